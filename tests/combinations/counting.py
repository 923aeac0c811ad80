"""Runs a counted training with processes that come and die, and checks what is in its parameters.

a worker's column -> the digits of each value -> the steps that are in it, and how often
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ps_worker as ps
from ps_runtime.launch.cluster_shape import NO_UPDATE_LOG, CheckpointPlan, UpdateLogPlan
from tests.combinations.counted import (
    BACKUP,
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
    SECOND,
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
        place: its rank if it is of those that the cluster was started for, and replaces nobody.
        steps: the last that it ended.
        after: by step that it tells the values of: its clock, and its model.
        end: its model when it has ended.
        residuals: what its codec has left.
        death: the moment at which it was killed; None: it was not.
        frozen: the steps in which a layer was.
    """

    number: int
    place: int | None
    steps: int = 0
    after: dict[int, tuple[int, Values]] = field(default_factory=dict)
    end: Values | None = None
    residuals: Values = field(default_factory=dict)
    death: Death | None = None
    frozen: set[int] = field(default_factory=set)

    def ended(self, step: int, clock: int, values: Values | None, trains_large: bool) -> None:
        self.steps = step
        if values is not None:
            self.after[step] = clock, values
        if not trains_large:
            self.frozen.add(step)


class _Run:
    """The processes of one cluster. Each has a thread here that hears it.

    Args:
        begun: the numbers of workers that were there before.
        saves_after: as of `Order`; who saves knows no faults.
    """

    def __init__(
        self, training: Counted, cluster: ReplicatedCluster, begun: int, saves_after: int
    ) -> None:
        self.training, self._cluster = training, cluster
        self._begun, self._saves_after = begun, saves_after
        self.told: list[_Told] = []
        self.faults = Faults(cluster, () if saves_after else training.faults)
        self.problems: list[str] = []
        self.refusals: list[str] = []
        self._late = 0 if saves_after else training.late
        self._deaths = () if saves_after else training.deaths
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, rank: int | None, *, is_first: bool = False) -> threading.Event:
        """Start a worker; the event: it is connected, or never will be."""
        connected, context = threading.Event(), warm_context()
        ours, theirs = context.Pipe()
        with self._lock:
            told = _Told(self._begun + len(self.told), rank if is_first else None)
            self.told.append(told)
            order = Order(
                self._cluster.address,
                self.training,
                told.number,
                rank,
                is_first,
                self._saves_after,
                self._stops(told.place),
            )
            process = context.Process(target=work, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            hears = threading.Thread(
                target=self._hear, args=(told, process, ours, connected), daemon=True
            )
            hears.start()
            self._threads.append(hears)
        return connected

    def _stops(self, place: int | None) -> frozenset[tuple[int, str]]:
        training = self.training
        if self._saves_after:
            return frozenset()
        happenings: list[Fault | Death] = [*training.faults, *training.deaths]
        found = {(each.step, each.moment) for each in happenings if each.rank == place}
        if place == 0 and training.late:
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
            pipe.close()

    def _hear_all(self, told: _Told, process: Any, pipe: Any, connected: threading.Event) -> None:
        while True:
            assert pipe.poll(WAIT_S), f"it says nothing after step {told.steps}"
            word, *more = pipe.recv()
            if word == "connected":
                connected.set()
            elif word == "step":
                told.ended(*more)
            elif word == "end":
                told.end, told.residuals = more
            elif word == "moment":
                if self._dies(told, process, *more):
                    _hear_the_rest(told, pipe)
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
        rank = told.place
        if rank == 0 and self._late == step and moment == "before":
            self._late = 0
            self.start(None).wait(WAIT_S)
        assert rank is not None
        self.faults.at(rank, step, moment)
        for death in self._deaths:
            if (death.rank, death.step, death.moment) == (rank, step, moment):
                process.kill()
                process.join()
                told.death = death
                self.start(rank)
                return True
        return False


def _hear_the_rest(told: _Told, pipe: Any) -> None:
    """The steps that it had ended before it was killed."""
    with suppress(EOFError, OSError):
        while pipe.poll():
            word, *more = pipe.recv()
            if word == "step":
                told.ended(*more)


def check(training: Counted, folder: Path) -> str:
    """Run it; returns words for what is wrong, empty if nothing is.

    Raises:
        Refused: the features do not go together.
    """
    saved: list[_Told] = []
    if training.saves_after:
        run, _ = _trained(training, folder, 0, training.saves_after)
        saved = run.told
        if run.problems:
            return "\n".join(run.problems)
    run, values = _trained(training, folder, len(saved), 0)
    if run.problems:
        return "\n".join(run.problems)
    if training.optimizer == "aggregate":
        finals = {f"at worker {t.number}": t.end for t in run.told if t.end is not None}
    else:
        finals = {"in the end": values}
    problems = [*_wrong_on_the_way(training, run, saved), *_wrong_in_the_end(run, saved, finals)]
    return "; ".join(problems[:6])


def _trained(training: Counted, folder: Path, begun: int, saves_after: int) -> tuple[_Run, Values]:
    """A run of one cluster, and the model in the end. Args as of `_Run`."""
    logs = UpdateLogPlan(str(folder / f"logs-{begun}"), is_synced=True)
    root = str(folder / "checkpoints")
    workers = training.later if begun else training.workers
    with replicated_cluster(
        training.servers,
        workers,
        {"PUSHPULL_WORKER_TIMEOUT_S": "8"},
        replica_count=training.replicas,
        lease_s=LEASE_S,
        update_log=logs if training.has_logs else NO_UPDATE_LOG,
        checkpoints=CheckpointPlan(url=root, resume=root if begun else ""),
        has_journal=True,
        max_workers=workers + 4,
    ) as cluster:
        run = _Run(training, cluster, begun, saves_after)
        for rank in range(workers):
            run.start(rank, is_first=True)
        reads = _Reads(cluster, training) if training.is_read and not saves_after else None
        run.wait()
        if reads is not None:
            reads.end()
            run.problems += reads.problems[:4]
        if run.refusals and not run.problems:
            raise Refused(run.refusals[0])
        run.faults.end()
        is_read = not (run.problems or saves_after or training.optimizer == "aggregate")
        return run, _read(cluster, training) if is_read else {}


def _read(cluster: ReplicatedCluster, training: Counted) -> Values:
    """The model as a reader finds it when all have ended."""
    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader:
        found = _read_models(reader, training)
        if training.has_rows:
            rows = make_rows(reader, training)(ROW_IDS)
            found |= {f"row {i}": rows[i : i + 1].detach().numpy() for i in ROW_IDS.tolist()}
    return found


def _read_models(reader: ps.Client, training: Counted) -> Values:
    model = CountedNet()
    ps.pull_model(reader, model)
    found = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    if training.trains_two:
        ps.pull_model(reader, model, "second")
        found[SECOND] = model.large.detach().numpy().copy()
    return found


class _Reads:
    """A reader's reads while the others train: each of one state, with whole steps."""

    def __init__(self, cluster: ReplicatedCluster, training: Counted) -> None:
        self._training = training
        self._ends = threading.Event()
        self.problems: list[str] = []
        self._reader = ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        model, count = CountedNet(), 0
        try:
            while not self._ends.is_set():
                clock = ps.pull_model(self._reader, model)
                count += 1
                self._check(model, f"read {count}, of clock {clock}")
        except ps.PushpullError as error:
            if not self._ends.is_set():
                self.problems.append(f"read {count + 1}: {type(error).__name__}: {error}")

    def _check(self, model: CountedNet, where: str) -> None:
        for name in ("large", "small", "sparse"):
            value = model.get_parameter(name).detach().numpy()
            for one in np.unique(value):
                found = digits(float(one))
                if max(found) > 1 or min(found) < 0:
                    self.problems.append(f"{where}: {name} has {float(one)}, {found}")
        if self._is_whole and len(np.unique(model.small.detach().numpy())) > 2:
            self.problems.append(f"{where}: {model.small}: steps of another number at each worker")
        if self._is_whole:
            rows = [model.get_parameter(name).detach().numpy() for name in ("large", "small")]
            if len(np.unique(np.concatenate(rows), axis=0)) > 1:
                self.problems.append(f"{where}: a state with half of a step: {rows}")

    @property
    def _is_whole(self) -> bool:
        """Each read has the same steps of all workers in all tensors."""
        training = self._training
        return (
            training.options["consistency"] == "bsp"
            and training.options["push_codec"] == "none"
            and training.optimizer not in INNER_STEPS
            and not (training.changes or training.late or training.deaths or training.frozen)
            and not training.unfrozen
            and not (training.skips or training.saves_after)
        )

    def end(self) -> None:
        self._ends.set()
        self._reader.close()
        self._thread.join()


# --- which steps are in a value


def _changes(training: Counted, name: str, told: _Told, step: int) -> bool:
    """True if a worker's step changes a tensor or row."""
    if training.counts_samples or any(
        (rank, step) in training.skips for rank in _skipping_with(training, told.place)
    ):
        return False
    if name.startswith("row "):
        return int(name.removeprefix("row ")) in rows_of(step)
    if name == "large":
        return step not in told.frozen
    if name == SECOND:
        return True
    return not (name == "sparse" and is_absent(training, told.number, step))


def _skipping_with(training: Counted, place: int | None) -> list[int]:
    """The workers whose infinities skip a worker's step."""
    if place is None:
        return []
    groups = training.groups
    if not groups:
        return [place]
    return [rank for rank, group in enumerate(groups) if group == groups[place]]


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
    training: Counted, values: Values, told: _Told, bounds: tuple[int, int], where: str
) -> list[str]:
    """What is wrong with a worker's column that has its steps up to the first of the bounds, and
    may have some up to the second.
    """
    problems, (sure, may) = [], bounds
    for name, value in values.items():
        if name in ("seen", "start"):
            continue
        counting = [step for step in range(1, may + 1) if _changes(training, name, told, step)]
        needed = {step for step in counting if step <= sure}
        for one in np.unique(value.reshape(-1, COLUMNS)[:, told.number]):
            found = digits(float(one))
            steps = {step for step, digit in enumerate(found, 1) if digit}
            if max(found) > 1 or min(found) < 0 or not needed <= steps <= set(counting):
                problems.append(
                    f"{where}: {name} has of worker {told.number} {float(one)}, {found}; expected "
                    f"{sorted(needed)}, perhaps all of {counting}"
                )
    return problems


def _wrong_in_the_end(run: _Run, saved: list[_Told], finals: dict[str, Values]) -> list[str]:
    training, problems = run.training, []
    for where, values in finals.items():
        for told in run.told:
            for name, left in told.residuals.items():
                adds = training.optimizer == "add" and name != SECOND
                if name in values:  # `Add` pushes updates, the others what is taken off
                    values[name] = values[name] + (left if adds else -left)
        if not np.array_equal(values["start"], np.arange(100.0) + 1000.0 * len(training.edits)):
            problems.append(f"{where}: what edits alone change is {values['start']}")
        for told in saved:  # what they had left was another's, and is lost if that one died
            is_kept = not (_keeps(training) and any(other.death for other in run.told))
            bounds = _bounds(training, told) if is_kept else (0, told.steps)
            problems += _wrong(training, values, told, bounds, where)
        for told in run.told:
            problems += _wrong(training, values, told, _bounds(training, told), where)
        if training.has_shards:
            problems += _wrong_shards(run, values["seen"])
        if training.has_sampler:
            problems += _wrong_epochs(training, values["seen"])
    return problems


def _keeps(training: Counted) -> bool:
    """True if a worker keeps what the servers have not taken, for a later step."""
    return training.options["push_codec"] != "none" or training.optimizer in INNER_STEPS


def _bounds(training: Counted, told: _Told) -> tuple[int, int]:
    """A worker's steps that are in the values, and the last that may be."""
    is_left_out = BACKUP in training.options["consistency"]
    if told.death is None:
        return told.steps if _keeps(training) or not is_left_out else 0, told.steps
    sure, may = told.steps, told.steps
    if is_left_out:
        sure = 0
    if training.options["push_codec"] != "none":
        sure = 0  # what the codec had left is lost with it
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


def _wrong_epochs(training: Counted, seen: Any) -> list[str]:
    """What is wrong with the samples of all epochs: some make the workers' numbers equal."""
    counts = -seen
    most = PASSES * (max(training.workers, training.later) - 1)
    if counts.min() < PASSES or counts.sum() > PASSES * SAMPLES + most:
        return [f"samples were seen {counts.tolist()} times; expected {PASSES} each"]
    return []


def _wrong_on_the_way(training: Counted, run: _Run, saved: list[_Told]) -> list[str]:
    """A worker has its own steps; under BSP all have the same after each."""
    problems: list[str] = []
    setting, codec = training.options["consistency"], training.options["push_codec"]
    is_plain = codec == "none" and setting != BACKUP
    for told in [*saved, *run.told] if is_plain else []:
        for step, (_, values) in told.after.items():
            where = f"worker {told.number} after its step {step}"
            problems += _wrong(training, values, told, (step, step), where)
    is_bsp = setting == "bsp" and not training.changes
    own = ("add", *INNER_STEPS) if not is_plain else INNER_STEPS
    if is_bsp and training.optimizer not in own:
        for of in (saved, run.told):
            problems += _differences(of)
    return problems


def _differences(of: list[_Told]) -> list[str]:
    """Where workers have other values at the same clock."""
    problems, by_clock = [], dict[int, tuple[int, Values]]()
    for told in of:
        for clock, values in told.after.values():
            number, other = by_clock.setdefault(clock, (told.number, values))
            names = [n for n in values if not np.array_equal(values[n], other[n])]
            if names:
                words = f"workers {number} and {told.number} differ at clock {clock}: {names}"
                problems.append(words)
    return problems
