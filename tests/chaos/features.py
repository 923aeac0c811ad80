"""Tables of every kind, each trained by a thread of a worker, beside twins that know their values.

A step that is lost, done twice or torn is seen, wherever it was.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import ps_worker as ps
from tests.integration.counted_steps import Counted, Load

TWIN_LENGTH = 3000
_BLOCK_COUNT = 12
_ROW_LENGTH, _ID_COUNT, _BATCH_IDS = 8, 1000, 200
_CHECKED_EVERY = 16
_IN_FLIGHT = 3
_NEAR = 1e-4
_MOST_STEPS = 100_000
_SETTINGS = ("bsp", "ssp:1", "ssp:4", "asp")
_CHANGED_EVERY_S = 1.0
_READ_EVERY_S = 0.1


class Feature(Protocol):
    """A table that is trained until `stop_after` says which step is the last.

    Attributes:
        paces: others wait for its steps, so that all workers must end with the same one.
    """

    paces: bool

    @property
    def pushed(self) -> int:
        """Its steps so far."""

    def run(self) -> object:
        """Train it; AssertionError if its values are not what they must be."""

    def stop_after(self, last: int) -> None:
        """Push no more than so many steps in all."""


class CountedTable:
    """A dense table; each step adds to its worker's elements."""

    def __init__(
        self, client: ps.Client, world: int, consistency: str, name: str = "", **options: Any
    ) -> None:
        self._counted = Counted(world, _BLOCK_COUNT)
        self._client = client
        name = name or f"counted {consistency}"
        self.table = self._counted.create(client, name, consistency, **options)
        self.paces = consistency != "asp"
        is_alone = client.rank == 0 and not self.paces
        self.load = Load(self._counted, client, self.table, in_flight=1 if is_alone else 4)

    @property
    def pushed(self) -> int:
        """Its steps."""
        return self.load.pushed

    def run(self) -> object:
        return self.load.run()

    def stop_after(self, last: int) -> None:
        self.load.stop_after(last)

    def found(self) -> list[list[int]]:
        """The numbers of steps of each worker that its blocks have; one if all have the same."""
        steps = self._counted.steps(self._client.pull(self.table))
        return sorted(map(list, {tuple(row) for row in steps.tolist()}))


class ChangedTable(CountedTable):
    """A dense table whose consistency worker 0 changes again and again."""

    def __init__(self, client: ps.Client, world: int) -> None:
        super().__init__(client, world, "bsp", "counted changed")
        self._draws = random.Random(0)
        self._over = threading.Event()

    def run(self) -> object:
        if self._client.rank:
            return super().run()
        with ThreadPoolExecutor(1) as thread:
            changing = thread.submit(self._change)
            try:
                super().run()
            finally:
                self._over.set()
            return changing.result()

    def _change(self) -> None:
        while not self._over.wait(_CHANGED_EVERY_S):
            self._client.set_consistency(self.table, self._draws.choice(_SETTINGS))

    def stop_after(self, last: int) -> None:
        self._over.set()
        super().stop_after(last)


class Twin:
    """The values of a table under BSP, by torch."""

    def __init__(self, world: int, make: Callable[[list[torch.nn.Parameter]], Any]) -> None:
        self._world = world
        self._values = torch.nn.Parameter(torch.zeros(TWIN_LENGTH))
        self._optimizer: torch.optim.Optimizer = make([self._values])
        self.step_count = 0

    def gradient(self, rank: int) -> npt.NDArray[np.float32]:
        """The next step of a worker."""
        draws = np.random.default_rng((rank, self.step_count))
        return draws.integers(-8, 9, TWIN_LENGTH).astype(np.float32)

    def step(self) -> None:
        """All workers take their next step."""
        mean = np.mean([self.gradient(rank) for rank in range(self._world)], axis=0)
        self._values.grad = torch.from_numpy(mean.astype(np.float32))
        self._optimizer.step()
        self.step_count += 1

    def is_like(self, values: Any) -> bool:
        """Whether these are its values."""
        apart = np.abs(np.asarray(values) - self._values.detach().numpy()).max()
        return bool(apart < _NEAR)


TWINS: dict[str, tuple[Any, Callable[[list[torch.nn.Parameter]], Any]]] = {
    "adam": (ps.Adam(lr=0.01), lambda of: torch.optim.Adam(of, lr=0.01)),
    "momentum": (
        ps.SGD(lr=0.01, momentum=0.9),
        lambda of: torch.optim.SGD(of, lr=0.01, momentum=0.9),
    ),
}
"""Optimizers that have state: ours, and torch's."""


class TwinTable:
    """A dense table under BSP with an optimizer that has state, and its twin."""

    paces = True

    def __init__(self, client: ps.Client, world: int, name: str) -> None:
        self._client = client
        optimizer, twin = TWINS[name]
        self.table = client.create_table(
            name, TWIN_LENGTH, optimizer=optimizer, consistency="bsp", block_elements=512
        )
        self._twin = Twin(world, twin)
        self._last: int | None = None

    @property
    def pushed(self) -> int:
        """Its steps."""
        return self._twin.step_count

    def run(self) -> object:
        while self._last is None or self.pushed < self._last:
            gradient = self._twin.gradient(self._client.rank)
            found = self._client.push_pull(self.table, gradient)
            self._twin.step()
            assert self._twin.is_like(found), f"step {self.pushed} is not as the twin's"
        return None

    def stop_after(self, last: int) -> None:
        self._last = last


class RowTwin:
    """The rows of one worker."""

    def __init__(self, world: int, rank: int) -> None:
        self.ids = np.arange(_ID_COUNT) * world + rank
        self._counts = np.zeros(_ID_COUNT, np.int64)
        self._draws = np.random.default_rng(rank)
        self.step_count = 0

    def step(self) -> npt.NDArray[np.int64]:
        """The ids of its next step."""
        places = self._draws.integers(0, _ID_COUNT, _BATCH_IDS)
        np.add.at(self._counts, places, 1)
        self.step_count += 1
        found: npt.NDArray[np.int64] = self.ids[places]
        return found

    def wrong(self, rows: npt.NDArray[Any]) -> str:
        """What is wrong of its rows; empty if nothing is."""
        wrong = np.flatnonzero((-rows != self._counts[:, None]).any(axis=1))
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return (
            f"{len(wrong)} rows are wrong after {self.step_count} steps; that of id "
            f"{self.ids[first]} is {rows[first].tolist()}, and has {self._counts[first]} steps"
        )


class RowTable:
    """Rows of an embedding table; each step takes one from rows of its worker's own."""

    def __init__(self, client: ps.Client, world: int, consistency: str) -> None:
        self.paces = consistency != "asp"
        self._client = client
        self.table = client.create_embedding(
            f"rows {consistency}",
            _ROW_LENGTH,
            optimizer=ps.SGD(lr=1.0),
            consistency=consistency,
            reduction="sum",
        )
        self._twin = RowTwin(world, client.rank)
        self._last: int | None = None

    @property
    def pushed(self) -> int:
        """Its steps."""
        return self._twin.step_count

    def run(self) -> object:
        waiting: deque[ps.PushTicket] = deque()
        ones = np.ones((_BATCH_IDS, _ROW_LENGTH), np.float32)
        while self._last is None or self.pushed < self._last:
            waiting.append(self._client.push_rows(self.table, self._twin.step(), ones))
            if len(waiting) == _IN_FLIGHT:
                self._client.wait(waiting.popleft())
            if self.pushed % _CHECKED_EVERY == 0:
                self._check(waiting)
        self._check(waiting)
        return None

    def stop_after(self, last: int) -> None:
        self._last = last

    def _check(self, waiting: deque[ps.PushTicket]) -> None:
        while waiting:
            self._client.wait(waiting.popleft())
        wrong = self._twin.wrong(self._client.pull_rows(self.table, self._twin.ids))
        assert not wrong, wrong


def every_feature(client: ps.Client, world: int) -> dict[str, Feature]:
    """A table of each kind, by name."""
    made: dict[str, Feature] = {
        f"counted {setting}": CountedTable(client, world, setting)
        for setting in ("asp", "ssp:3", "bsp")
    }
    made["counted changed"] = ChangedTable(client, world)
    made["counted bf16"] = CountedTable(client, world, "ssp:2", push_codec="bf16")
    made |= {name: TwinTable(client, world, name) for name in TWINS}
    for setting in ("asp", "ssp:2", "bsp"):
        made[f"rows {setting}"] = RowTable(client, world, setting)
    return made


class Reader:
    """A reader that pulls a table again and again, on a thread, until `finish`."""

    def __init__(self, address: str, world: int) -> None:
        self._address, self._counted = address, Counted(world, _BLOCK_COUNT)
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._reading = self._thread.submit(self._read)

    def _read(self) -> int:
        read_count, seen = 0, np.zeros((_BLOCK_COUNT, self._counted.world), np.int64)
        with ps.connect(self._address, role="reader", request_deadline_s=120.0) as client:
            table = client.table("counted bsp")
            while not self._over.wait(_READ_EVERY_S):
                found = self._counted.steps(client.pull(table))
                assert np.all(found >= seen), "a read takes back what another one showed"
                read_count, seen = read_count + 1, found
        return read_count

    def check(self) -> None:
        """It still reads; else what it found is raised."""
        if self._reading.done():
            self._reading.result()

    def finish(self) -> int:
        """The number of its reads."""
        self._over.set()
        with self._thread:
            return self._reading.result()


def check_restored(client: ps.Client, world: int) -> dict[str, int]:
    """Check that tables under BSP have all of some steps of `world` workers; returns how many, by
    name.
    """
    found = {}
    for name, (_, make) in TWINS.items():
        twin, values = Twin(world, make), client.pull(TwinTable(client, world, name).table)
        while not twin.is_like(values):
            assert twin.step_count < _MOST_STEPS, f"table '{name}' has the values of no step"
            twin.step()
        found[name] = twin.step_count
    table = RowTable(client, world, "bsp").table
    twins = [RowTwin(world, rank) for rank in range(world)]
    rows = [client.pull_rows(table, twin.ids) for twin in twins]
    while any(map(RowTwin.wrong, twins, rows)):
        assert twins[0].step_count < _MOST_STEPS, f"rows are of no step: {twins[0].wrong(rows[0])}"
        for each in twins:
            each.step()
    found["rows bsp"] = twins[0].step_count
    values = client.pull(CountedTable(client, world, "bsp").table)
    steps = Counted(world, _BLOCK_COUNT).steps(values)
    assert len(set(steps.ravel().tolist())) == 1, f"table 'counted bsp' is torn: {steps.tolist()}"
    return found | {"counted bsp": int(steps[0, 0])}


class Features:
    """Tables that are trained beside each other, a thread each.

    Attributes:
        failures: of tables whose values were wrong, or that could not go on.
        failed: set at the first.
    """

    def __init__(self, client: ps.Client, world: int) -> None:
        self._client, self._world = client, world
        self.of = every_feature(client, world)
        self._ends = client.create_table(
            "ends", (world, len(self.of)), optimizer=ps.SGD(lr=1.0), reduction="sum"
        )
        self.failures: list[str] = []
        self.failed = threading.Event()
        self._threads = {
            name: threading.Thread(target=self._run, args=(name, each), daemon=True)
            for name, each in self.of.items()
        }

    def _run(self, name: str, feature: Feature) -> None:
        try:
            feature.run()
        except (AssertionError, ps.PushpullError) as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            self.failed.set()

    def start(self) -> None:
        """Begin to train all."""
        for thread in self._threads.values():
            thread.start()

    def finish(self, within_s: float, more: int = 20) -> None:
        """All workers end each table with the same step, which none has begun."""
        own = np.zeros((self._world, len(self.of)), np.float32)
        own[self._client.rank] = [feature.pushed for feature in self.of.values()]
        pushed = -np.asarray(self._client.push_pull(self._ends, own))
        for feature, most in zip(self.of.values(), pushed.max(axis=0).tolist(), strict=True):
            feature.stop_after(int(most) + more if feature.paces else feature.pushed)
        for name, thread in self._threads.items():
            thread.join(within_s)
            if thread.is_alive():
                self.failures.append(f"{name}: does not come to its end within {within_s:g} s")
        if not self.failures:
            self._client.push_pull(self._ends, np.zeros_like(own))  # all have taken their last step
