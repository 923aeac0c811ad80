"""Progress of `pushpull train`: rows made from the scheduler's status messages, as pure functions.

A rate is the difference of a counter between two *reports* over the time between them, not between
the polls: a report is as old as `last_heard_ms` says, however often it is polled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pushpull.v1 import scheduler_pb2, types_pb2

WINDOW_S = 5.0
"""Rates are averages over about this time, which is longer than a heartbeat."""

MAX_LINE_WORKERS = 8
"""Without a terminal, up to this many workers have a line each; more share one."""

_SAME_REPORT_S = 0.05
"""Two polls saw the same report if its times differ by less."""

_RATE_UNITS = ("B/s", "KB/s", "MB/s", "GB/s", "TB/s")
_BAR_WIDTH = 16
_STATES = {
    int(types_pb2.NODE_STATE_ALIVE): "training",
    int(types_pb2.NODE_STATE_SILENT): "silent",
    int(types_pb2.NODE_STATE_LEFT): "left",
    int(types_pb2.NODE_STATE_GONE): "gone",
}


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A worker's report of itself; `reported_at_s` is on the caller's clock. `is_begun` if it has a
    table: before that a worker of a resumed run does not know its steps.
    """

    rank: int
    state: str
    reported_at_s: float
    clock: int
    step_count: int
    planned_step_count: int
    moved_bytes: int
    loss: float | None
    staleness: int
    waiting_for: str
    is_begun: bool


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker's newest sample and its rates; a rate is None until two reports have come."""

    sample: WorkerSample
    steps_per_s: float | None
    bytes_per_s: float | None

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining steps take at the present rate; None: unknown."""
        sample = self.sample
        if not sample.planned_step_count or not self.steps_per_s or sample.state != "training":
            return None
        return max(0, sample.planned_step_count - sample.step_count) / self.steps_per_s


def worker_samples(
    response: scheduler_pb2.GetClusterStatusResponse, now_s: float
) -> tuple[WorkerSample, ...]:
    """The newest worker of each rank in a status message, by rank."""
    workers = [n for n in response.nodes if n.node.role == types_pb2.NODE_ROLE_WORKER]
    newest = {n.node.rank: n for n in sorted(workers, key=lambda n: n.node.incarnation)}
    found = (_sample(status, now_s) for status in newest.values())
    return tuple(sorted(found, key=lambda sample: sample.rank))


def _sample(status: scheduler_pb2.NodeStatus, now_s: float) -> WorkerSample:
    said = status.progress
    return WorkerSample(
        rank=status.node.rank,
        state=_STATES.get(int(status.node.state), "unknown"),
        reported_at_s=now_s - status.last_heard_ms / 1000,
        clock=max((table.clock for table in said.tables), default=0),
        step_count=said.step_count,
        planned_step_count=said.planned_step_count,
        moved_bytes=said.pushed_bytes + said.pulled_bytes,
        loss=said.loss if said.HasField("loss") else None,
        staleness=said.staleness,
        waiting_for=said.waiting_for,
        is_begun=bool(said.tables),
    )


def counted(count: int, noun: str) -> str:
    """As in "1 server", "2 servers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def still_awaited(
    response: scheduler_pb2.GetClusterStatusResponse, server_count: int, worker_count: int
) -> str:
    """Says which of the roles that were started have never joined; empty: all have."""
    servers = sum(n.node.role == types_pb2.NODE_ROLE_SERVER for n in response.nodes)
    ranks = {n.node.rank for n in response.nodes if n.node.role == types_pb2.NODE_ROLE_WORKER}
    missing = (("server", server_count - servers), ("worker", worker_count - len(ranks)))
    parts = [counted(count, kind) for kind, count in missing if count > 0]
    return f"waits for {' and '.join(parts)} to join" if parts else ""


class RateWindow:
    """The reports of the last `WINDOW_S` seconds, by rank: `observe` samples, then read `rows`."""

    def __init__(self) -> None:
        self._reports: dict[int, deque[WorkerSample]] = {}

    def observe(self, samples: Sequence[WorkerSample]) -> None:
        for sample in samples:
            reports = self._reports.setdefault(sample.rank, deque())
            if reports and sample.reported_at_s - reports[-1].reported_at_s < _SAME_REPORT_S:
                reports.pop()
            if reports and sample.is_begun and not reports[-1].is_begun:
                reports.clear()
            reports.append(sample)
            while len(reports) > 2 and reports[1].reported_at_s < sample.reported_at_s - WINDOW_S:
                reports.popleft()

    def rows(self) -> tuple[WorkerRow, ...]:
        return tuple(_row(self._reports[rank]) for rank in sorted(self._reports))


def _row(reports: Sequence[WorkerSample]) -> WorkerRow:
    first, last = reports[0], reports[-1]
    between_s = last.reported_at_s - first.reported_at_s
    if between_s < _SAME_REPORT_S:
        return WorkerRow(last, None, None)
    return WorkerRow(
        last,
        max(0, last.step_count - first.step_count) / between_s,
        max(0, last.moved_bytes - first.moved_bytes) / between_s,
    )


def live_view(rows: Sequence[WorkerRow], elapsed_s: float, note: str) -> RenderableType:
    """The table that a terminal shows beneath the workers' output."""
    head = Text(f"train {duration(elapsed_s)}  {note}".rstrip(), style="bold")
    if not rows:
        return head
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worker", justify="right")
    table.add_column("progress", no_wrap=True)
    for name in ("clock", "steps/s", "left", "loss", "staleness", "sent/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", style="yellow", overflow="ellipsis", no_wrap=True)
    for row in rows:
        sample = row.sample
        table.add_row(
            str(sample.rank),
            _bar(sample),
            str(sample.clock),
            number(row.steps_per_s, 1),
            _left(row.left_s),
            number(sample.loss, 4),
            str(sample.staleness),
            _rate(row.bytes_per_s),
            sample.waiting_for or ("" if sample.state == "training" else sample.state),
        )
    return Group(head, table)


def _bar(sample: WorkerSample) -> RenderableType:
    if not sample.planned_step_count:
        return Text(f"{sample.step_count} steps")
    return ProgressBar(
        total=sample.planned_step_count,
        completed=min(sample.step_count, sample.planned_step_count),
        width=_BAR_WIDTH,
    )


def plain_lines(rows: Sequence[WorkerRow], elapsed_s: float, awaited: str = "") -> list[str]:
    """Lines without a terminal: one a worker, or one for many; `awaited` is as `still_awaited`."""
    head = f"[train {duration(elapsed_s)}]"
    lines = [f"{head} {awaited}"] if awaited else []
    if not rows:
        return lines or [f"{head} no worker has joined yet"]
    if len(rows) > MAX_LINE_WORKERS:
        return [*lines, f"{head} {_summary(rows)}"]
    return [*lines, *(f"{head} worker {row.sample.rank}: {_line(row)}" for row in rows)]


def early_ends(rows: Sequence[WorkerRow], cut_off: Collection[int]) -> list[str]:
    """A line for each worker that ended before its steps were done, when all have ended; the
    processes of the ranks `cut_off` ended without leaving the cluster.
    """
    found = []
    for sample in (row.sample for row in rows):
        how = "it left after step" if sample.step_count < sample.planned_step_count else ""
        if sample.rank in cut_off and sample.state == "gone":
            how = "its process ended without leaving the cluster, last heard at step"
        if how:
            steps = _steps(sample)
            found.append(f"worker {sample.rank} ended before its steps were done: {how} {steps}")
    return found


def outsiders(joined: Collection[int], worker_count: int) -> str:
    """A line about the workers whose scripts have not joined as workers; empty: all have."""
    absent = [f"worker {rank}" for rank in range(worker_count) if rank not in joined]
    if not absent:
        return ""
    return (
        f"{', '.join(absent)} never joined the cluster as a worker: the script ran alone there, "
        "and what it trained is not in the parameters of the others (pushpull.connect() joins)"
    )


def _steps(sample: WorkerSample) -> str:
    planned = f" of {sample.planned_step_count}" if sample.planned_step_count else ""
    return f"{sample.step_count}{planned}"


def _line(row: WorkerRow) -> str:
    sample = row.sample
    parts = [
        f"step {_steps(sample)}",
        f"clock {sample.clock}",
        f"{number(row.steps_per_s, 1)} steps/s",
        *[f"{_left(row.left_s)} left"] * (row.left_s is not None),
        f"loss {number(sample.loss, 4)}",
        f"staleness {sample.staleness}",
        _rate(row.bytes_per_s),
    ]
    parts += [sample.state] * (sample.state != "training")
    parts += [f"waits for {sample.waiting_for}"] * bool(sample.waiting_for)
    return ", ".join(parts)


def _summary(rows: Sequence[WorkerRow]) -> str:
    clocks = [row.sample.clock for row in rows]
    losses = [row.sample.loss for row in rows if row.sample.loss is not None]
    lefts = [row.left_s for row in rows if row.left_s is not None]
    slowest = min(rows, key=lambda row: (row.sample.clock, row.sample.rank))
    loss = sum(losses) / len(losses) if losses else None
    parts = [
        f"{len(rows)} workers",
        f"clocks {min(clocks)} to {max(clocks)}",
        f"{number(_sum([row.steps_per_s for row in rows]), 1)} steps/s",
        *([] if not lefts else [f"{_left(max(lefts))} left"]),
        f"mean loss {number(loss, 4)}",
        f"staleness up to {max(row.sample.staleness for row in rows)}",
        _rate(_sum([row.bytes_per_s for row in rows])),
        f"slowest is worker {slowest.sample.rank}",
    ]
    return ", ".join(parts)


def _sum(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _left(left_s: float | None) -> str:
    return "-" if left_s is None else duration(left_s)


def _rate(bytes_per_s: float | None) -> str:
    """As in "- B/s", "32.8 KB/s", "1.20 GB/s"."""
    if bytes_per_s is None:
        return "- B/s"
    value, unit = bytes_per_s, 0
    while value >= 1000 and unit < len(_RATE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {_RATE_UNITS[unit]}"


def duration(elapsed_s: float) -> str:
    """As in "7s", "2m05s", "1h02m"."""
    seconds = int(elapsed_s)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
