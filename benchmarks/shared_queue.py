r"""A training script whose workers take batches from one queue, until so many have been applied.

    pushpull compare benchmarks/shared_queue.py -m bsp,bsp:backup=1,ssp:4,asp -w 4 \
        --straggler permanent:30ms,90ms,rank=0

With a fixed number of steps a worker a slow worker makes every setting slow; with one queue the
fast ones take what the slow one does not. The queue is a table that only counts: taking a batch
adds 1 to it, and a batch whose step was discarded is put back.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn

import ps_worker as ps
from examples.digits_cnn import accuracy, build_model, load


class Queue:
    """Batches 1 to `count`, each taken once, by whoever comes."""

    def __init__(self, client: ps.Client, count: int) -> None:
        self._client = client
        self._count = count
        self._table = client.create_table(
            "taken", 1, optimizer=ps.Add(), consistency="asp", reduction="sum", dtype="float64"
        )

    def take(self) -> int:
        """The number of a batch; 0 if there is none left."""
        taken = int(self._add(1.0))
        return taken if taken <= self._count else 0

    def put_back(self) -> None:
        """A batch that was taken was not applied."""
        self._add(-1.0)

    def _add(self, number: float) -> float:
        return float(self._client.push_pull(self._table, np.array([number]))[0])


def train(client: ps.Client, arguments: argparse.Namespace) -> float:
    """Train until the queue is empty; returns the accuracy on the test images."""
    training, testing = load(arguments.seed)
    torch.manual_seed(arguments.seed)
    model = build_model()
    optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=arguments.lr))
    queue = Queue(client, arguments.batches)
    while number := queue.take():
        draw = torch.Generator().manual_seed(1_000_000 * arguments.seed + number)
        chosen = torch.randint(len(training), (arguments.batch_size,), generator=draw)
        batch = training.take(chosen)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.pixels), batch.labels)
        loss.backward()
        optimizer.step()
        if any(result.discarded for result in optimizer.results):
            queue.put_back()
        client.report(loss=loss.item())
    return accuracy(model, testing)


def main() -> None:
    """Train as one worker of a cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=400, help="batches that are applied in all")
    parser.add_argument("--batch-size", type=int, default=32, help="images a batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the split, model and batches")
    arguments = parser.parse_args()
    with ps.connect() as client:
        client.report(quality={"test accuracy": train(client, arguments)})


if __name__ == "__main__":
    main()
