"""What a comparison says of its runs: figures from records, and rows of medians. Pure functions.

Definitions:
    time          from the begin of the first step's computation of any worker to the end of the
                  last step of any worker: neither starting processes nor evaluating counts, and
                  workers that record begin together
    steps/s       the steps of all workers over that time
    quality       as the worker reports whose last step ended last: its model has all updates
    wait share    of the workers' time between their first and last step, what they spent in
                  `step` waiting for the commit of their own step or for the read
    staleness     of a step: the most of any block, in updates by others since the pull
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ps_cli.compare.records import LossEntry, TableRecord, WorkerRecord
from ps_core import consistency

MAX_CURVE_POINTS = 60
"""A curve has so many points at most; each is the mean of the losses around it."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """Where a worker's time went."""

    rank: int
    step_count: int
    compute_s: float
    send_s: float
    commit_s: float
    read_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.send_s + self.commit_s + self.read_s


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run in figures.

    Attributes:
        time_s: see the module.
        step_count: of all workers.
        quality: by the measure's name; None where it is not finite.
        staleness: how many steps had which staleness.
        rejected_count: blocks that were too stale (ASP with a bound).
        discarded_count: steps that came too late (BSP with backup workers).
        skipped_count: steps that were not applied (gradients that are not finite).
        workers: by rank.
        loss_by_step: (step, mean loss of the workers).
        loss_by_time: (seconds, mean loss of the workers).
    """

    time_s: float = 0.0
    step_count: int = 0
    quality: dict[str, float | None] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    rejected_count: int = 0
    discarded_count: int = 0
    skipped_count: int = 0
    workers: tuple[WorkerTime, ...] = ()
    loss_by_step: tuple[Point, ...] = ()
    loss_by_time: tuple[Point, ...] = ()

    @property
    def steps_per_s(self) -> float:
        """See the module."""
        return self.step_count / self.time_s if self.time_s > 0 else 0.0

    @property
    def mean_staleness(self) -> float:
        """Over all steps."""
        total = sum(tau * count for tau, count in self.staleness.items())
        return total / max(1, sum(self.staleness.values()))

    @property
    def max_staleness(self) -> int:
        """Over all steps."""
        return max(self.staleness, default=0)

    @property
    def wait_share(self) -> float:
        """See the module; 0 to 1."""
        waited_s = sum(worker.commit_s + worker.read_s for worker in self.workers)
        total_s = sum(worker.total_s for worker in self.workers)
        return waited_s / total_s if total_s > 0 else 0.0


def figures_of(records: Sequence[WorkerRecord]) -> RunFigures:
    """The figures of one run."""
    steps = [step for record in records for step in record.steps]
    losses = [entry for record in records for entry in record.losses]
    began = [
        record.steps[0].ended_s - record.steps[0].duration_s for record in records if record.steps
    ]
    began_s = min(began, default=min((entry.at_s for entry in losses), default=0.0))
    ended_s = max((step.ended_s for step in steps), default=began_s)
    return RunFigures(
        time_s=ended_s - began_s,
        step_count=len(steps),
        quality=_quality(records),
        staleness=dict(sorted(Counter(step.staleness for step in steps).items())),
        rejected_count=sum(step.rejected for step in steps),
        discarded_count=sum(step.discarded for step in steps),
        skipped_count=sum(not step.applied for step in steps),
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
    return WorkerTime(
        rank=record.rank,
        step_count=len(record.steps),
        compute_s=sum(step.compute_s for step in record.steps),
        send_s=sum(step.send_s for step in record.steps),
        commit_s=sum(step.commit_s for step in record.steps),
        read_s=sum(step.read_s for step in record.steps),
    )


def _curve(losses: Sequence[LossEntry], place: Callable[[LossEntry], float]) -> tuple[Point, ...]:
    """The mean loss in up to MAX_CURVE_POINTS intervals of equal width, at their mean places."""
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


def other_consistency(records: Sequence[WorkerRecord], mode: str) -> tuple[TableRecord, ...]:
    """The tables of gradients whose consistency is not the one that the run was to have.

    Buffers are not among them: they are values, of which nothing is too stale to be taken.
    """
    wanted = str(consistency.parsed(mode))
    return tuple(table for table in gradient_tables(records) if table.consistency != wanted)


def gradient_tables(records: Sequence[WorkerRecord]) -> tuple[TableRecord, ...]:
    """The tables that gradients are pushed to, each once."""
    tables = (table for record in records for table in record.tables)
    return tuple(dict.fromkeys(table for table in tables if table.optimizer != "assign"))


@dataclass(frozen=True, slots=True)
class ModeRow:
    """A mode's line of the table: medians over its finished runs.

    Attributes:
        mode: as `pushpull` writes it.
        finished_count: runs that finished.
        run_count: runs that were begun.
        time_s: median.
        relative_time: `time_s` over that of the first mode; None without it.
        steps_per_s: median.
        quality: by the measure's name: the median, and each run's.
        mean_staleness: median.
        max_staleness: the largest of all.
        wait_share: median, 0 to 1.
        rejected_count: median.
        discarded_count: median.
    """

    mode: str
    finished_count: int
    run_count: int
    time_s: float | None = None
    relative_time: float | None = None
    steps_per_s: float | None = None
    quality: dict[str, tuple[float | None, tuple[float | None, ...]]] = field(default_factory=dict)
    mean_staleness: float | None = None
    max_staleness: int | None = None
    wait_share: float | None = None
    rejected_count: float | None = None
    discarded_count: float | None = None


def mode_row(
    mode: str, run_count: int, finished: Sequence[RunFigures], first_time_s: float | None
) -> ModeRow:
    """The line of one mode.

    Args:
        mode: which.
        run_count: runs of it that were begun.
        finished: the figures of those that finished.
        first_time_s: the median time of the first mode; None if that is not known.
    """
    if not finished:
        return ModeRow(mode, 0, run_count)
    time_s = median_time_s(finished)
    names = dict.fromkeys(name for figures in finished for name in figures.quality)
    return ModeRow(
        mode=mode,
        finished_count=len(finished),
        run_count=run_count,
        time_s=time_s,
        relative_time=time_s / first_time_s if first_time_s and time_s else None,
        steps_per_s=statistics.median(figures.steps_per_s for figures in finished),
        quality={name: _median_of(name, finished) for name in names},
        mean_staleness=statistics.median(figures.mean_staleness for figures in finished),
        max_staleness=max(figures.max_staleness for figures in finished),
        wait_share=statistics.median(figures.wait_share for figures in finished),
        rejected_count=statistics.median(figures.rejected_count for figures in finished),
        discarded_count=statistics.median(figures.discarded_count for figures in finished),
    )


def median_time_s(finished: Sequence[RunFigures]) -> float | None:
    """Of the runs of one mode; None if none finished."""
    return statistics.median(figures.time_s for figures in finished) if finished else None


def _median_of(
    name: str, finished: Sequence[RunFigures]
) -> tuple[float | None, tuple[float | None, ...]]:
    values = tuple(figures.quality.get(name) for figures in finished)
    known = [value for value in values if value is not None]
    return (statistics.median(known) if known else None), values
