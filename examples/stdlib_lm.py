"""A byte-level LSTM language model, trained on the source of Python's own standard library.

    pushpull train examples/stdlib_lm.py --workers 2 --servers 2 -- --minutes 2 --evaluate
    python examples/stdlib_lm.py --single --steps 200       # plain torch, for comparison

With --evaluate, rank 0 starts an evaluator: a process that joins the cluster as a reader, pulls the
parameters as they were after one and the same update while training goes on, and prints the
perplexity of files that nobody trains on. It can as well be started by hand, beside any run:

    PUSHPULL_SCHEDULER=host:port python examples/stdlib_lm.py --evaluator-only

A perplexity of 256 is guessing; 2 means that the model is as unsure as between two bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import sysconfig
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

import pushpull as ps

BYTE_COUNT = 256
LEFT_OUT = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
HELD_OUT_EVERY = 20
EVALUATION_WINDOW_COUNT = 32
EVALUATOR_END_S = 60.0
MEET_EVERY = 10
"""Steps after which workers tell each other whether --minutes are over."""


class ByteModel(nn.Module):
    """Says of each byte how likely it follows those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_COUNT, width // 2)
        self.memory = nn.LSTM(width // 2, width, batch_first=True)
        self.guess = nn.Linear(width, BYTE_COUNT)

    def forward(self, text: Tensor) -> Tensor:
        remembered, _ = self.memory(self.embedding(text))
        logits: Tensor = self.guess(remembered)
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean nats a byte of windows of shape (n, length + 1)."""
        logits = self(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def source_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(root.rglob("*.py"))
    return [path for path in found if not LEFT_OUT.intersection(path.relative_to(root).parts)]


def read(files: list[Path], limit_bytes: int) -> Tensor:
    """The files' bytes, one after the other, as int64."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).long()


def training_text(rank: int, world_size: int, limit_bytes: int) -> Tensor:
    """This worker's share of the files: nobody else reads them."""
    files = [path for i, path in enumerate(source_files()) if i % HELD_OUT_EVERY]
    return read(files[rank::world_size], limit_bytes)


def held_out_windows(length: int) -> Tensor:
    """Windows of the files that nobody trains on, evenly spread over them."""
    text = read(source_files()[::HELD_OUT_EVERY], sys.maxsize)
    starts = torch.linspace(0, len(text) - length - 1, EVALUATION_WINDOW_COUNT).long().tolist()
    return torch.stack([text[start : start + length + 1] for start in starts])


def windows(text: Tensor, arguments: Namespace, rank: int) -> Iterator[Tensor]:
    """Random windows, without end."""
    generator = torch.Generator().manual_seed(arguments.seed + 1 + rank)
    bound = len(text) - arguments.length
    while True:
        starts = torch.randint(bound, (arguments.batch_size,), generator=generator).tolist()
        yield torch.stack([text[start : start + arguments.length + 1] for start in starts])


def perplexity(model: ByteModel, held_out: Tensor) -> float:
    with torch.no_grad():
        return math.exp(model.loss(held_out).item())


def server_optimizer(arguments: Namespace) -> ps.Adam | ps.Add | ps.Outer:
    """Adam at the servers, or at each worker."""
    adam = partial(torch.optim.Adam, lr=arguments.lr)
    if arguments.inner_steps:
        momentum = arguments.outer_momentum
        return ps.Outer(
            adam, arguments.inner_steps, arguments.outer_lr, momentum, nesterov=momentum > 0
        )
    return ps.Add(adam) if arguments.push_updates else ps.Adam(lr=arguments.lr)


def is_over(arguments: Namespace, client: ps.Client | None, step: int, end_s: float) -> bool:
    """True when --minutes are over. Where steps wait for all workers, all end with the same step:
    else one would wait in `synchronize` for those who wait for its next step.
    """
    is_my_end = time.monotonic() >= end_s
    if client is None or arguments.minutes is None or not waits_for_all(client):
        return is_my_end
    if step % (arguments.inner_steps or MEET_EVERY):
        return False
    return bool(client.all_reduce(int(is_my_end), "max"))


def waits_for_all(client: ps.Client) -> bool:
    """False under ASP, and with backup workers, where one that came late leaves out clocks."""
    setting = client.consistency
    return setting.mode.value != "asp" and not setting.backup_workers


def train(arguments: Namespace, client: ps.Client | None) -> None:
    rank, world_size = (client.rank, client.world_size) if client else (0, 1)
    text = training_text(rank, world_size, arguments.megabytes << 20)
    torch.manual_seed(arguments.seed)
    model = ByteModel(arguments.width)
    optimizer: torch.optim.Optimizer
    if client is None:
        optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    else:
        optimizer = ps.DistributedOptimizer(client, model, server_optimizer(arguments))
    planned = arguments.steps if arguments.minutes is None else None
    end_s = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    # Where the run goes on from a checkpoint the first windows have been seen.
    done = 0
    if isinstance(optimizer, ps.DistributedOptimizer):
        done = optimizer.clock * max(1, arguments.inner_steps)
    batches = islice(enumerate(windows(text, arguments, rank), start=1), done, planned)
    for step, batch in batches:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        if client is not None:
            client.report(loss=loss.item(), planned_steps=planned)
        if rank == 0 and step % arguments.log_every == 0:
            print(f"step {step}: training perplexity {math.exp(loss.item()):.2f}")
        if is_over(arguments, client, step, end_s):
            break
    # With backup workers one that came late may wait for a step that the others do not take.
    if client is not None and not client.consistency.backup_workers:
        assert isinstance(optimizer, ps.DistributedOptimizer)
        optimizer.synchronize()  # inner steps since the last exchange, if there are any
    reached = perplexity(model, held_out_windows(arguments.length))
    if client is not None:
        client.report(quality={"held-out perplexity": reached})
    if rank == 0:
        print(f"held-out perplexity {reached:.2f}")


def evaluate(arguments: Namespace) -> None:
    """Pull and judge the model again and again; with --until-eof until standard input ends."""
    held_out = held_out_windows(arguments.length)
    model = ByteModel(arguments.width)
    began_s = time.monotonic()
    with ps.connect(role="reader") as client:
        is_last = False
        while not is_last:
            is_last = pause(arguments)
            step = ps.pull_model(client, model)
            reached = perplexity(model, held_out)
            elapsed_s = time.monotonic() - began_s
            print(
                f"evaluator: held-out perplexity {reached:.2f} at step {step} after "
                f"{elapsed_s:.0f} s"
            )


def pause(arguments: Namespace) -> bool:
    """Wait for the next report's time; returns whether it is the last."""
    if not arguments.until_eof:
        time.sleep(arguments.evaluate_every)
        return False
    ended, _, _ = select.select([sys.stdin], [], [], arguments.evaluate_every)
    return bool(ended)


@contextlib.contextmanager
def evaluator() -> Iterator[None]:
    """An evaluator beside this process, for as long as the block runs; it reports once more then.

    It has this process's arguments, and its environment: PUSHPULL_SCHEDULER names the cluster.
    """
    command = [sys.executable, *sys.argv, "--evaluator-only", "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            yield
            child.communicate(timeout=EVALUATOR_END_S)
        finally:
            child.kill()
    if child.returncode != 0:
        sys.exit(f"the evaluator ended with exit code {child.returncode}")


def positive(text: str) -> int:
    """The count that an option gives."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def not_negative(text: str) -> int:
    """The count that an option gives, which may be none."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=not_negative, default=300, help="steps to take")
    parser.add_argument("--minutes", type=float, help="minutes to train, instead of --steps")
    parser.add_argument("--width", type=positive, default=256, help="of the LSTM's memory")
    parser.add_argument("--length", type=positive, default=96, help="bytes of a window")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows a step and worker")
    parser.add_argument("--lr", type=float, default=3e-3, help="Adam's learning rate")
    parser.add_argument(
        "--push-updates",
        action="store_true",
        help="each worker runs Adam, and pushes its updates (ps.Add): sign and topk need that",
    )
    parser.add_argument(
        "--inner-steps",
        type=not_negative,
        default=0,
        help="steps of Adam at each worker between two exchanges (ps.Outer, DiLoCo)",
    )
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of --inner-steps")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of --inner-steps")
    parser.add_argument("--clip", type=float, default=1.0, help="bound of the gradient's norm")
    parser.add_argument(
        "--megabytes", type=positive, default=16, help="text a worker reads at most"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model and the windows")
    parser.add_argument("--log-every", type=positive, default=50, help="steps between two lines")
    parser.add_argument("--evaluate", action="store_true", help="rank 0 starts an evaluator")
    parser.add_argument(
        "--evaluate-every", type=float, default=10.0, help="seconds between reports"
    )
    parser.add_argument(
        "--evaluator-only",
        action="store_true",
        help="be an evaluator of a run that goes on elsewhere",
    )
    parser.add_argument("--until-eof", action="store_true", help="end it with standard input")
    parser.add_argument("--single", action="store_true", help="plain torch, without a cluster")
    arguments = parser.parse_args()
    if arguments.length >= arguments.megabytes << 20:
        parser.error("--length is a window of --megabytes; expected fewer bytes than these have")
    if arguments.evaluator_only and not arguments.until_eof and "PUSHPULL_RANK" in os.environ:
        parser.error("a worker cannot be the evaluator; --evaluate has rank 0 start one")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.evaluator_only:
        evaluate(arguments)
    elif arguments.single:
        train(arguments, None)
    else:
        with ps.connect() as client:
            needs_evaluator = arguments.evaluate and client.rank == 0
            with evaluator() if needs_evaluator else contextlib.nullcontext():
                train(arguments, client)


if __name__ == "__main__":
    main()
