"""The rule of adaptive staleness bounds: moves by the workers' waits and the loss.

The rule judges a table period by period. A period lasts at least `adaptation_interval_s`, and until
every worker of the table has taken 8 + s steps, because a bound that was raised by r takes effect
only when the fast workers have used up r steps. The first line that fits gives the next bound:

    in the period                                    s becomes
    the loss rose                                    s // 2 (*), and is not raised for 6 periods
    half of the workers waited 10 % of the time      s + max(1, s // 2) (*)
    half of them did, and s was lowered to here      s + 1 (*): the bound before
    ... less than 2 %, for 2 periods in a row        s - 1 (*)
    anything else                                    s

    (*) within the table's limits LEAST..MOST

    waited     a worker's reads were parked at a server until other workers' steps had come, as the
               servers report it: the most of any server, over the length of the period. "Half of
               the workers waited x" means that at least half of them waited x or more
    rose       the mean of the losses that workers reported in this period is above that of the
               last one, by more than 5 % and by more than three standard errors of the difference;
               or one of them was not finite

Rules against oscillation:
    - Between 2 % and 10 % nothing happens.
    - A bound at which workers waited is tried again only after 4, 8, ... 64 quiet periods instead
      of 2: twice as many each time that it was too low again. After two quiet periods at that
      bound, it counts like any other.
    - Each rise of the loss doubles the periods without a raise, 6, 12, 24, 48, 64; after 128
      periods without a rise there are 6 again.

A raise by half reaches any bound in a few periods and is at most half too far; the way back is by
one, because a bound that no worker reaches costs nothing. A wait of 10 % is one that a person would
look into; 2 % is below what reads cost in any case. With three standard errors, a constant loss
counts as a rise once in 700 periods.

After a restart the running period begins again, because counters of nodes are compared with reports
to the same scheduler.

Invariants:
    AD-1  The bound never leaves the table's limits.

A move is a change (`scheduler.machine.changes`) and may fail; the next period decides again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ps_core.cluster_view import ClusterView, NodeState, Role
from ps_core.consistency import Consistency
from ps_core.errors import check
from ps_core.keys import NodeId, TableId
from ps_core.losses import NO_LOSSES, LossTotals
from ps_core.tables.table import Table

LONG_WAIT = 0.10
SHORT_WAIT = 0.02
LEAST_CLOCK_COUNT = 8
FIRST_PATIENCE_COUNT = 2
MAX_PATIENCE_COUNT = 64
FIRST_HOLD_COUNT = 6
MAX_HOLD_COUNT = 64
FORGOTTEN_COUNT = 2 * MAX_HOLD_COUNT
LOSS_RISE = 0.05
LOSS_ERRORS = 3.0
LEAST_LOSS_COUNT = 8  # fewest losses of a period whose mean counts


@dataclass(frozen=True, slots=True)
class Verdict:
    """The next bound, and the reason of a move."""

    staleness: int
    reason: str = ""


@dataclass(slots=True)
class Course:
    """The rule's state of one table."""

    quiet_count: int = 0
    patience_count: int = FIRST_PATIENCE_COUNT
    too_low: int | None = None
    """Bound at which workers waited last, unless two periods there were quiet since."""
    was_lowered: bool = False
    """The last move was down, after quiet periods."""
    held_count: int = 0
    """Periods left without a raise."""
    hold_count: int = FIRST_HOLD_COUNT
    calm_count: int = 0
    losses: LossTotals = NO_LOSSES

    def step(
        self, setting: Consistency, wait_share: float, losses: LossTotals = NO_LOSSES
    ) -> Verdict:
        """End a period under `setting`, in which half of the workers or more waited this share."""
        s = setting.staleness
        reason = self._risen(losses)
        if reason:
            verdict = self._braked(setting, reason)
        else:
            verdict = self._by_waits(setting, wait_share)
            self.held_count = max(0, self.held_count - 1)
            self.calm_count += 1
        check(
            setting.least <= verdict.staleness <= setting.most,
            "AD-1",
            f"a bound of {verdict.staleness} for {setting}",
        )
        if verdict.staleness != s:
            self.quiet_count = 0
        return verdict

    def _risen(self, losses: LossTotals) -> str:
        """Words on a rise of the loss; empty if it has not risen."""
        before = self.losses
        if losses.count >= LEAST_LOSS_COUNT:
            self.losses = losses
        if losses.non_finite_count:
            return "a loss was not finite"
        if min(before.count, losses.count) < LEAST_LOSS_COUNT:
            return ""
        error = (before.error_square + losses.error_square) ** 0.5
        threshold = max(LOSS_RISE * abs(before.mean), LOSS_ERRORS * error)
        if losses.mean - before.mean <= threshold:
            return ""
        return f"the loss rose from {before.mean:.4g} to {losses.mean:.4g}"

    def _braked(self, setting: Consistency, reason: str) -> Verdict:
        if self.calm_count >= FORGOTTEN_COUNT:
            self.hold_count = FIRST_HOLD_COUNT
        self.held_count = self.hold_count
        self.hold_count = min(2 * self.hold_count, MAX_HOLD_COUNT)
        self.calm_count = self.quiet_count = 0
        self.was_lowered = False
        return Verdict(max(setting.least, setting.staleness // 2), reason)

    def _by_waits(self, setting: Consistency, wait_share: float) -> Verdict:
        s = setting.staleness
        if wait_share >= SHORT_WAIT:
            self.quiet_count = 0
            if wait_share < LONG_WAIT or self.held_count or s == setting.most:
                return Verdict(s)
            return self._raised(setting, wait_share)
        self.quiet_count += 1
        if s == setting.least:
            return Verdict(s)
        is_well = self.quiet_count >= FIRST_PATIENCE_COUNT
        if self.too_low is not None and s <= self.too_low and is_well:
            # Workers waited at this bound once, and do not any more.
            self.too_low, self.patience_count = None, FIRST_PATIENCE_COUNT
        is_doubtful = self.too_low is not None and s - 1 <= self.too_low
        if self.quiet_count < (self.patience_count if is_doubtful else FIRST_PATIENCE_COUNT):
            return Verdict(s)
        self.was_lowered = True
        return Verdict(s - 1, f"reads waited {wait_share:.1%} of the time")

    def _raised(self, setting: Consistency, wait_share: float) -> Verdict:
        s = setting.staleness
        step = 1 if self.was_lowered else max(1, s // 2)
        if self.was_lowered:
            self.patience_count = min(2 * self.patience_count, MAX_PATIENCE_COUNT)
        self.too_low, self.was_lowered = s, False
        reason = f"half of the workers or more waited {wait_share:.0%} of the time"
        return Verdict(min(setting.most, s + step), reason)


@dataclass(frozen=True, slots=True)
class Report:
    """A node's report, which came at `at_s`; counters count from the node's start. A worker has
    `clocks` and `losses`, a server the seconds for which each worker's reads of a table waited.
    """

    at_s: float
    clocks: Mapping[TableId, int] = field(default_factory=dict)
    waits_s: Mapping[tuple[TableId, NodeId], float] = field(default_factory=dict)
    losses: LossTotals = NO_LOSSES


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a table's bound, to the one of `consistency`."""

    table_name: str
    consistency: Consistency
    reason: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class CourseRecord:
    """The rule's state of a table at the end of a period; `setting` has the limits as requested."""

    setting: Consistency
    course: Course


@dataclass(slots=True)
class _WatchedTable:
    """A table and its running period: its start, and the reports at that time."""

    table: Table
    course: Course = field(default_factory=Course)
    record: CourseRecord | None = None
    begun_s: float | None = None
    first_reports: dict[NodeId, Report] = field(default_factory=dict)


class Adaptation:
    """The tables of a cluster with an adaptive bound; `records` come from the journal."""

    def __init__(
        self, interval_s: float, records: Mapping[TableId, CourseRecord] | None = None
    ) -> None:
        self._interval_s = interval_s
        self._records = records or {}
        self._watched: dict[TableId, _WatchedTable] = {}
        self._reports: dict[NodeId, Report] = {}
        self._members: dict[NodeId, Role] = {}
        self._is_whole = False

    @property
    def tables(self) -> Iterable[Table]:
        return [watched.table for watched in self._watched.values()]

    @property
    def courses(self) -> dict[TableId, CourseRecord]:
        """The rule's state for the journal, without tables in their first period."""
        watched = {table_id: each.record for table_id, each in self._watched.items()}
        return {
            **self._records,
            **{name: each for name, each in watched.items() if each is not None},
        }

    @property
    def is_idle(self) -> bool:
        return not self._watched

    def observe(self, view: ClusterView) -> None:
        """Compare the tables and nodes with a new view."""
        found = {t.table_id: t for t in view.tables if t.consistency.moves}
        for table_id in self._watched.keys() - found.keys():
            del self._watched[table_id]
        for table_id, table in found.items():
            watched = self._watched.get(table_id)
            setting = table.consistency.as_requested
            if watched is None or watched.table.consistency.as_requested != setting:
                self._watched[table_id] = self._begun(table)
            elif (watched.table.change, watched.table.proposed) != (table.change, table.proposed):
                watched.table, watched.begun_s = table, None
        self._records = {}
        if not found:
            self._reports.clear()
            return
        nodes = [node for node in view.nodes if node.role is not Role.READER]
        self._members = {n.node_id: n.role for n in nodes if n.state is NodeState.ALIVE}
        # A worker that waits for a silent node says nothing about the bound.
        self._is_whole = not any(node.state is NodeState.SILENT for node in nodes)
        for node_id in self._reports.keys() - self._members.keys():
            del self._reports[node_id]

    def _begun(self, table: Table) -> _WatchedTable:
        """Take the journal's state of the table, if its limits are the same."""
        record = self._records.get(table.table_id)
        if record is None or record.setting != table.consistency.as_requested:
            return _WatchedTable(table)
        return _WatchedTable(table, replace(record.course), record)

    def heard(self, node_id: NodeId, report: Report) -> None:
        if node_id in self._members and self._watched:
            self._reports[node_id] = report

    def look(self, now_s: float) -> list[Move]:
        moves = []
        for watched in self._watched.values():
            if watched.table.proposed is not None or not self._is_whole:
                watched.begun_s = None
            elif watched.begun_s is None:
                self._begin(watched, now_s)
            elif now_s - watched.begun_s >= self._interval_s:
                moves += self._end(watched, now_s)
        return moves

    def _begin(self, watched: _WatchedTable, now_s: float) -> None:
        watched.begun_s, watched.first_reports = now_s, dict(self._reports)

    def _end(self, watched: _WatchedTable, now_s: float) -> list[Move]:
        """Judge a period that is long enough, unless nodes came or went in it."""
        table = watched.table
        setting = table.consistency
        workers = [
            node_id
            for node_id in self._both(watched, Role.WORKER)
            if table.table_id in watched.first_reports[node_id].clocks
        ]
        servers = self._both(watched, Role.SERVER)
        server_count = sum(role is Role.SERVER for role in self._members.values())
        if not workers or not servers or len(servers) < server_count:
            self._begin(watched, now_s)
            return []
        if not self._has_all(watched, workers, servers):
            return []
        shares = sorted(self._wait_share(watched, worker, servers) for worker in workers)
        losses = LossTotals.together(
            self._reports[worker].losses.since(watched.first_reports[worker].losses)
            for worker in workers
        )
        verdict = watched.course.step(setting, shares[len(shares) // 2], losses)
        watched.record = CourseRecord(setting.as_requested, replace(watched.course))
        self._begin(watched, now_s)
        if verdict.staleness == setting.staleness:
            return []
        moved = replace(setting, staleness=verdict.staleness)
        return [Move(table.spec.name, moved, verdict.reason, table.run)]

    def _both(self, watched: _WatchedTable, role: Role) -> list[NodeId]:
        """Nodes with reports from the start of the period until now."""
        return [
            node_id
            for node_id in watched.first_reports
            if self._members.get(node_id) is role and node_id in self._reports
        ]

    def _has_all(
        self, watched: _WatchedTable, workers: Iterable[NodeId], servers: Iterable[NodeId]
    ) -> bool:
        """True if every server was heard over the period, and every worker took enough steps."""
        table, first, last = watched.table, watched.first_reports, self._reports
        needed = LEAST_CLOCK_COUNT + table.consistency.staleness
        took_steps = all(
            last[worker].clocks.get(table.table_id, 0) - first[worker].clocks[table.table_id]
            >= needed
            for worker in workers
        )
        return took_steps and all(
            last[server].at_s - first[server].at_s >= self._interval_s / 2 for server in servers
        )

    def _wait_share(
        self, watched: _WatchedTable, worker: NodeId, servers: Iterable[NodeId]
    ) -> float:
        place = (watched.table.table_id, worker)
        shares = []
        for server in servers:
            before, now = watched.first_reports[server], self._reports[server]
            waited_s = now.waits_s.get(place, 0.0) - before.waits_s.get(place, 0.0)
            shares.append(waited_s / (now.at_s - before.at_s))
        return min(1.0, max(0.0, *shares))
