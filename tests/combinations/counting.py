"""Runs a counted training with processes that come and die, and checks what is in its parameters.

a worker's column -> the digits of each value -> the steps that are in it, and how often
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ps_worker as ps
from ps_runtime.launch.cluster_shape import NO_UPDATE_LOG, UpdateLogPlan
from tests.combinations.counted import (
    COLUMNS,
    INNER_STEPS,
    PASSES,
    SAMPLES,
    SHARD,
    STEPS,
    Counted,
    Death,
)
from tests.combinations.counted_worker import (
    DEADLINE_S,
    ROW_IDS,
    CountedNet,
    Order,
    Values,
    is_absent,
    make_rows,
    rows_of,
    work,
)
from tests.combinations.faults import Fault, Faults
from tests.combinations.training import LEASE_S, Refused
from tests.integration.replicated_cluster import ReplicatedCluster, replicated_cluster
from tests.integration.warm_processes import warm_context

WAIT_S = 150.0
"""For a worker's next word: longer than it waits itself."""


@dataclass
class _Told:
    """What a worker process said.

    Attributes:
        rank: None until it is connected.
        steps: the last that it ended.
        after: by step: its clock, and its model.
        death: the moment at which it was killed; None: it was not.
    """

    number: int
    rank: int | None = None
    steps: int = 0
    after: dict[int, tuple[int, Values]] = field(default_factory=dict)
    end: Values | None = None
    death: Death | None = None


class _Run:
    """A training's processes. Each has a thread here that hears it."""

    def __init__(self, training: Counted, cluster: ReplicatedCluster, stack: ExitStack) -> None:
        self.training, self._cluster, self._stack = training, cluster, stack
        self.told: list[_Told] = []
        self.faults = Faults(cluster, training.faults)
        self.problems: list[str] = []
        self.refusals: list[str] = []
        self._late = training.late
        self._deaths = list(training.deaths)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, rank: int | None) -> threading.Event:
        """Start a worker; the event: it is connected, or never will be."""
        connected, context = threading.Event(), warm_context()
        ours, theirs = context.Pipe()
        with self._lock:
            told = _Told(len(self.told))
            self.told.append(told)
            stops = self._stops(told.number)
            order = Order(self._cluster.address, self.training, told.number, rank, stops)
            process = context.Process(target=work, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            self._stack.callback(process.kill)
            hears = threading.Thread(
                target=self._hear, args=(told, process, ours, connected), daemon=True
            )
            hears.start()
            self._threads.append(hears)
        return connected

    def _stops(self, number: int) -> frozenset[tuple[int, str]]:
        training = self.training
        if number >= training.workers:
            return frozenset()
        happenings: list[Fault | Death] = [*training.faults, *training.deaths]
        found = {(each.step, each.moment) for each in happenings if each.rank == number}
        if number == 0 and training.late:
            found.add((training.late, "before"))
        return frozenset(found)

    def wait(self) -> None:
        """Until every worker has ended, those that come meanwhile, too."""
        while True:
            with self._lock:
                living = [thread for thread in self._threads if thread.is_alive()]
            if not living:
                return
            living[0].join()

    def _hear(self, told: _Told, process: Any, pipe: Any, connected: threading.Event) -> None:
        try:
            self._hear_all(told, process, pipe, connected)
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.problems.append(f"worker {told.number}: {type(error).__name__}: {error}")
            process.kill()
        finally:
            connected.set()
            process.join()

    def _hear_all(self, told: _Told, process: Any, pipe: Any, connected: threading.Event) -> None:
        while True:
            assert pipe.poll(WAIT_S), f"it says nothing after step {told.steps}"
            word, *more = pipe.recv()
            if word == "connected":
                told.rank = more[0]
                connected.set()
            elif word == "step":
                told.steps = more[0]
                told.after[more[0]] = more[1], more[2]
            elif word == "end":
                told.end = more[2]
            elif word == "moment":
                if self._dies(told, process, *more):
                    return
                if more[1] != "during":
                    pipe.send("go on")
            elif word == "refused":
                self.refusals.append(more[0])
                return
            elif word == "failed":
                self.problems.append(f"worker {told.number}: {more[0]}")
                return
            else:
                return

    def _dies(self, told: _Told, process: Any, step: int, moment: str) -> bool:
        """Do what is due at this moment of a worker; True: it was killed."""
        rank = told.number
        if rank == 0 and self._late == step and moment == "before":
            self._late = 0
            self.start(None).wait(WAIT_S)
        self.faults.at(rank, step, moment)
        for death in self._deaths:
            if (death.rank, death.step, death.moment) == (rank, step, moment):
                process.kill()
                told.death = death
                self.start(rank)
                return True
        return False


def check(training: Counted, folder: Path) -> str:
    """Run it; returns words for what is wrong, empty if nothing is.

    Raises:
        Refused: the features do not go together.
    """
    logs = UpdateLogPlan(str(folder / "logs"), is_synced=True) if training.has_logs else None
    with (
        replicated_cluster(
            training.servers,
            training.workers,
            {"PUSHPULL_WORKER_TIMEOUT_S": "8"},
            replica_count=training.replicas,
            lease_s=LEASE_S,
            update_log=logs or NO_UPDATE_LOG,
            has_journal=True,
            max_workers=training.workers + 4,
        ) as cluster,
        ExitStack() as stack,
    ):
        run = _Run(training, cluster, stack)
        for rank in range(training.workers):
            run.start(rank)
        run.wait()
        if run.refusals and not run.problems:
            raise Refused(run.refusals[0])
        run.faults.end()
        if run.problems or run.refusals:
            return "\n".join([*run.problems, *run.refusals])
        if training.optimizer == "aggregate":
            finals = {f"at worker {t.number}": t.end for t in run.told if t.end is not None}
        else:
            finals = {"in the end": _read(cluster, training)}
    return "; ".join([*_wrong_on_the_way(run), *_wrong_in_the_end(run, finals)][:6])


def _read(cluster: ReplicatedCluster, training: Counted) -> Values:
    """The model as a reader finds it when all have ended."""
    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader:
        model = CountedNet()
        ps.pull_model(reader, model)
        found = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        if training.has_rows:
            rows = make_rows(reader, training)(ROW_IDS)
            found |= {f"row {i}": rows[i : i + 1].detach().numpy() for i in ROW_IDS.tolist()}
    return found


# --- which steps are in a value


def _expected(training: Counted, name: str, number: int, steps: Iterable[int]) -> list[int]:
    """Those of a worker's steps that change a tensor or row."""
    return [step for step in steps if _changes(training, name, number, step)]


def _changes(training: Counted, name: str, number: int, step: int) -> bool:
    if training.has_shards or any(
        (rank, step) in training.skips for rank in _skipping_with(training, number)
    ):
        return False
    if name.startswith("row "):
        return int(name.removeprefix("row ")) in rows_of(step)
    if name == "large":
        return step not in training.frozen
    return not (name == "sparse" and is_absent(training, number, step))


def _skipping_with(training: Counted, number: int) -> list[int]:
    """The workers whose infinities skip a worker's step."""
    if number >= training.workers:
        return []
    groups = training.groups
    if not groups:
        return [number]
    return [rank for rank, group in enumerate(groups) if group == groups[number]]


def digits(value: float) -> list[int]:
    """How often each step is in a value; the last has what is beyond them all."""
    left = round(-value)
    if left != -value or left < 0:
        return [-1] * (STEPS + 1)
    found = []
    for _ in range(STEPS):
        left, digit = divmod(left, 4)
        found.append(digit)
    return [*found, left]


def _wrong(
    training: Counted, values: Values, number: int, sure: int, may: int, where: str
) -> list[str]:
    """What is wrong with a column that has steps up to `sure`, and may have some up to `may`."""
    problems = []
    for name, value in values.items():
        if name in ("seen", "start"):
            continue
        needed = set(_expected(training, name, number, range(1, sure + 1)))
        allowed = set(_expected(training, name, number, range(1, may + 1)))
        for one in np.unique(value.reshape(-1, COLUMNS)[:, number]):
            found = digits(float(one))
            steps = {step for step, digit in enumerate(found, 1) if digit}
            if max(found) > 1 or min(found) < 0 or not needed <= steps <= allowed:
                problems.append(
                    f"{where}: {name} has of worker {number} {float(one)}, {found}; expected "
                    f"{sorted(needed)}, perhaps up to {may}"
                )
    return problems


def _wrong_in_the_end(run: _Run, finals: dict[str, Values]) -> list[str]:
    training, problems = run.training, []
    for where, values in finals.items():
        if not np.array_equal(values["start"], np.arange(100.0)):
            problems.append(f"{where}: what nobody changed is {values['start']}")
        for told in run.told:
            sure, may = _bounds(training, told)
            problems += _wrong(training, values, told.number, sure, may, where)
        if training.has_shards:
            problems += _wrong_shards(run, values["seen"])
    return problems


def _bounds(training: Counted, told: _Told) -> tuple[int, int]:
    """A worker's steps that are in the values, and the last that may be."""
    if told.death is None:
        return told.steps, told.steps
    sure, may = told.steps, told.steps
    if training.options["overlap_pull"]:
        sure -= 1  # `step` returns before its step is committed
    if told.death.moment == "during" or (
        told.death.moment == "in" and training.options["mode"] == "eager"
    ):
        may += 1
    inner = INNER_STEPS.get(training.optimizer, 1)
    if inner > 1:  # what no outer step has taken is lost with it
        exchanges = {"outer": 1, "fragments": 2, "overlap": 3}[training.optimizer]
        sure = max(0, sure - inner * exchanges - 2)
    return max(sure, 0), may


def _wrong_shards(run: _Run, seen: Any) -> list[str]:
    counts = -seen
    most = PASSES + (1 if run.training.deaths else 0)
    again = int((counts > PASSES).sum())
    dead = sum(told.death is not None for told in run.told)
    if counts.min() < PASSES or counts.max() > most + dead or again > 2 * SHARD * dead:
        return [f"samples were trained on {counts.tolist()} times; expected {PASSES} each"]
    assert len(counts) == SAMPLES
    return []


def _wrong_on_the_way(run: _Run) -> list[str]:
    """A worker has its own steps; under BSP all have the same after each."""
    training, problems = run.training, []
    for told in run.told:
        for step, (_, values) in told.after.items():
            where = f"worker {told.number} after its step {step}"
            problems += _wrong(training, values, told.number, step, step, where)
    is_bsp = training.options["consistency"] == "bsp" and not training.changes
    if is_bsp and training.optimizer not in INNER_STEPS:
        by_clock: dict[int, tuple[int, Values]] = {}
        for told in run.told:
            for clock, values in told.after.values():
                number, other = by_clock.setdefault(clock, (told.number, values))
                names = [n for n in values if not np.array_equal(values[n], other[n])]
                if names:
                    problems.append(
                        f"workers {number} and {told.number} differ at clock {clock}: {names}"
                    )
    return problems
