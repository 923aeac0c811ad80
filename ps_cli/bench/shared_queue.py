r"""A training script whose workers take batches from one queue, until a number of them was applied.

    pushpull compare ps_cli/bench/shared_queue.py -m bsp,bsp:backup=1,ssp:4,asp -w 4 \
        --straggler permanent:30ms,90ms,rank=0

With a fixed number of steps for each worker, one slow worker slows every setting down; with one
queue, the fast workers take the batches that the slow one leaves. The queue is a table that counts:
taking a batch adds 1 to it, and a batch whose step was discarded, in any table of the model, is put
back. So exactly that many batches are applied, unless a worker dies with one.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

import numpy as np
import torch
from torch import nn

import ps_worker as ps
from examples.digits_cnn import accuracy, build_model, load


class Queue:
    """`count` batches for all workers.

    A worker that adds 1 pulls the sum with what others have added meanwhile: it may be too high,
    but never too low. So a worker that pulls more than `count` takes its own back, and ends only if
    the sum without it is at least `count`: the last one to take its own back has the final sum.
    """

    def __init__(self, client: ps.Client, count: int) -> None:
        self._client = client
        self._count = count
        self._table = client.create_table(
            "taken", 1, optimizer=ps.Add(), consistency="asp", reduction="sum", dtype="float64"
        )

    def take(self) -> bool:
        """True if there was a batch left; the caller applies it, or puts it back."""
        while self._add(1.0) > self._count:
            if self.put_back() >= self._count:
                return False
        return True

    def put_back(self) -> float:
        """Return a batch that was not applied; the number that are taken now."""
        return self._add(-1.0)

    def _add(self, number: float) -> float:
        return float(self._client.push_pull(self._table, np.array([number]))[0])


def train(client: ps.Client, arguments: Namespace) -> float:
    """Train until the queue is empty; the accuracy on the test images."""
    training, testing = load(arguments.seed)
    torch.manual_seed(arguments.seed)
    model = build_model()
    optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=arguments.lr))
    trained = client.tables.trained  # the queue is another table, and steps at its own pace
    queue = Queue(client, arguments.batches)
    draw = torch.Generator().manual_seed(1_000 * arguments.seed + client.rank)
    while queue.take():
        chosen = torch.randint(len(training), (arguments.batch_size,), generator=draw)
        batch = training.take(chosen)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.pixels), batch.labels)
        loss.backward()
        optimizer.step()
        if any(result.discarded for result in optimizer.results):
            queue.put_back()
        client.catch_up(*trained)
        client.report(loss=loss.item())
    return accuracy(model, testing)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400, help="batches of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, model and batches")
    arguments = parser.parse_args()
    with ps.connect() as client:
        client.report(quality={"test accuracy": train(client, arguments)})


if __name__ == "__main__":
    main()
