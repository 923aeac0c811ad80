"""Figures of a comparison's runs, and rows of their medians, as pure functions.

Definitions:
    time          from the start of the first step of any worker to the end of the last step of any
                  worker, without starting processes and evaluating; workers that record start
                  together
    steps/s       the steps of all workers that were applied, over that time: not those that were
                  discarded or skipped
    bytes         of payloads, of all workers, at the end of each one's client
    quality       reported by the worker whose last step ended last: its model has all updates
    wait share    the share of the workers' time that they spent in `step`, waiting for the commit
                  of their own step or for the pull
    staleness     of a step: the most of any block, in updates by others since the pull; inner steps
                  have none
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ps_cli.compare.modes import ComparedMode
from ps_cli.compare.records import LossEntry, TableEntry, WorkerRecord

MAX_CURVE_POINTS = 60
"""The most points of a curve; each is the mean of the losses around it."""

PHASE_TIMES = ("compute_s", "send_s", "commit_s", "read_s")
"""The phases of a step; their sum is the time from the end of the step before to its own end."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """The seconds that a worker spent in each phase of its steps."""

    rank: int
    step_count: int
    compute_s: float
    send_s: float
    commit_s: float
    read_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.send_s + self.commit_s + self.read_s


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run, as the module defines them.

    Attributes:
        step_count: steps of all workers.
        applied_count: of these, those that were neither discarded nor skipped.
        quality: by the measure's name; None if it is not finite.
        staleness: counts of steps by it.
        rejected_count: blocks that were too stale (ASP with a bound).
        discarded_count: steps that came too late (BSP with backup workers).
        skipped_count: steps that were not applied (gradients that are not finite).
        pushed_bytes, pulled_bytes: payloads of all workers.
        workers: by rank.
        loss_by_step, loss_by_time: (step, or seconds, and the mean loss of the workers).
    """

    time_s: float = 0.0
    step_count: int = 0
    applied_count: int = 0
    quality: dict[str, float | None] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    rejected_count: int = 0
    discarded_count: int = 0
    skipped_count: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    workers: tuple[WorkerTime, ...] = ()
    loss_by_step: tuple[Point, ...] = ()
    loss_by_time: tuple[Point, ...] = ()

    @property
    def steps_per_s(self) -> float:
        return self.applied_count / self.time_s if self.time_s > 0 else 0.0

    @property
    def mean_staleness(self) -> float:
        summed = sum(tau * count for tau, count in self.staleness.items())
        return summed / max(1, sum(self.staleness.values()))

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def wait_share(self) -> float:
        """0 to 1."""
        waited_s = sum(worker.commit_s + worker.read_s for worker in self.workers)
        total_s = sum(worker.total_s for worker in self.workers)
        return waited_s / total_s if total_s > 0 else 0.0


def figures_of(records: Sequence[WorkerRecord]) -> RunFigures:
    steps = [step for record in records for step in record.steps]
    own = [step for step in steps if not step.is_early]
    losses = [entry for record in records for entry in record.losses]
    staleness = Counter(step.staleness for step in steps if step.staleness is not None)
    began = [one.steps[0].ended_s - one.steps[0].duration_s for one in records if one.steps]
    began_s = min(began, default=min((entry.at_s for entry in losses), default=0.0))
    ended_s = max((step.ended_s for step in steps), default=began_s)
    return RunFigures(
        time_s=ended_s - began_s,
        step_count=len(own),
        applied_count=sum(step.applied and not step.discarded for step in own),
        quality=_quality(records),
        staleness=dict(sorted(staleness.items())),
        rejected_count=sum(step.rejected for step in steps),
        discarded_count=sum(step.discarded for step in steps),
        skipped_count=sum(not step.applied for step in own),
        pushed_bytes=sum(record.pushed_bytes for record in records),
        pulled_bytes=sum(record.pulled_bytes for record in records),
        workers=tuple(_worker_time(record) for record in records),
        loss_by_step=_curve(losses, lambda entry: entry.step),
        loss_by_time=_curve(losses, lambda entry: entry.at_s - began_s),
    )


def _quality(records: Iterable[WorkerRecord]) -> dict[str, float | None]:
    judged = [record for record in records if record.quality]
    if not judged:
        return {}
    last = max(judged, key=lambda one: (one.steps[-1].ended_s if one.steps else 0.0, -one.rank))
    return last.quality


def _worker_time(record: WorkerRecord) -> WorkerTime:
    times_s = (sum(getattr(step, phase) for step in record.steps) for phase in PHASE_TIMES)
    count = sum(not step.is_early for step in record.steps)
    return WorkerTime(record.rank, count, *times_s)


def _curve(losses: Sequence[LossEntry], place: Callable[[LossEntry], float]) -> tuple[Point, ...]:
    """Mean losses in up to MAX_CURVE_POINTS intervals of equal width, at their mean places."""
    known = [(place(entry), entry.loss) for entry in losses if entry.loss is not None]
    if not known:
        return ()
    first, last = min(known)[0], max(known)[0]
    width = (last - first) / MAX_CURVE_POINTS or 1.0
    intervals: dict[int, list[Point]] = {}
    for at, loss in known:
        index = min(int((at - first) / width), MAX_CURVE_POINTS - 1)
        intervals.setdefault(index, []).append((at, loss))
    return tuple(
        (statistics.fmean(at for at, _ in points), statistics.fmean(loss for _, loss in points))
        for _, points in sorted(intervals.items())
    )


def other_tables(records: Sequence[WorkerRecord], mode: ComparedMode) -> tuple[TableEntry, ...]:
    """The tables of gradients that have other settings than the run's mode. Outer steps of the
    script's own are none of them where the mode has no outer steps.
    """

    def asked(table: TableEntry) -> ComparedMode:
        return replace(mode, outer_steps=mode.outer_steps or table.mode.outer_steps)

    return tuple(table for table in gradient_tables(records) if table.mode != asked(table))


def gradient_tables(records: Sequence[WorkerRecord]) -> tuple[TableEntry, ...]:
    """The tables that gradients are pushed to, each once; buffers are values, not gradients."""
    tables = (table for record in records for table in record.tables)
    return tuple(dict.fromkeys(table for table in tables if table.optimizer != "assign"))


@dataclass(frozen=True, slots=True)
class ModeRow:
    """A mode's row of the table: medians over its finished runs, but the largest `max_staleness`.

    `relative_time` is over the first mode's; `quality` has each measure's median, and each run's.
    """

    mode: str
    finished_count: int
    run_count: int
    time_s: float | None = None
    relative_time: float | None = None
    steps_per_s: float | None = None
    pushed_bytes: float | None = None
    pulled_bytes: float | None = None
    quality: dict[str, tuple[float | None, tuple[float | None, ...]]] = field(default_factory=dict)
    mean_staleness: float | None = None
    max_staleness: int | None = None
    wait_share: float | None = None
    rejected_count: float | None = None
    discarded_count: float | None = None


def mode_row(
    mode: str, run_count: int, finished: Sequence[RunFigures], first_time_s: float | None
) -> ModeRow:
    """The row of one mode; `first_time_s` is the median time of the first mode."""
    if not finished:
        return ModeRow(mode, 0, run_count)

    def median(figure: str) -> float:
        found: float = statistics.median(getattr(figures, figure) for figures in finished)
        return found

    time_s = median("time_s")
    names = dict.fromkeys(name for figures in finished for name in figures.quality)
    return ModeRow(
        mode=mode,
        finished_count=len(finished),
        run_count=run_count,
        time_s=time_s,
        relative_time=time_s / first_time_s if first_time_s and time_s else None,
        steps_per_s=median("steps_per_s"),
        pushed_bytes=median("pushed_bytes"),
        pulled_bytes=median("pulled_bytes"),
        quality={name: _median_of(name, finished) for name in names},
        mean_staleness=median("mean_staleness"),
        max_staleness=max(figures.max_staleness for figures in finished),
        wait_share=median("wait_share"),
        rejected_count=median("rejected_count"),
        discarded_count=median("discarded_count"),
    )


def _median_of(
    name: str, finished: Sequence[RunFigures]
) -> tuple[float | None, tuple[float | None, ...]]:
    values = tuple(figures.quality.get(name) for figures in finished)
    known = [value for value in values if value is not None]
    return (statistics.median(known) if known else None), values
