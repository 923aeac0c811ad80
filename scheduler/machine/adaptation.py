"""Where the bound of SSP is for a table whose bound moves: by how long workers wait, and the loss.

A table is looked at period by period. A period lasts at least the scheduler's
`adaptation_interval_s`, and until every worker that trains on the table has taken 8 + s steps: a
bound that was raised by r is felt only when the fast have used up r steps. At its end the first of
these lines that fits says what the bound s becomes:

    in the period                                    s becomes
    the loss rose                                    s // 2 (*), and is not raised for 6 periods
    half of the workers waited 10 % of the time      s + max(1, s // 2) (*)
    half of them did, and s was lowered to here      s + 1 (*): back to where it was
    ... less than 2 %, for 2 periods in a row        s - 1 (*)
    anything else                                    s

    (*) within the table's two bounds

    waited     a worker's reads were parked at a server until other workers' steps had come: what
               the servers report, the most of any server, over the length of the period. "Half of
               the workers waited x" is: at least half of them waited x or more
    rose       the mean of the losses that workers reported in this period is above that of the
               period before, by more than 5 % and by more than three standard errors of the
               difference; or one of them was not finite

Rules, so that it settles:
    - Between 2 % and 10 % nothing happens.
    - A bound at which workers waited is not tried again after 2 quiet periods, but after 4, 8, ...
      64: twice as many each time that it turns out too low again. Two quiet periods there, and it
      is as good as any other.
    - Each rise of the loss doubles the periods without a raise, 6, 12, 24, 48, 64; after 128
      periods without a rise it is 6 again.

Why these numbers. A raise by half reaches any bound in a few periods and is at most half too far;
what is too far comes back by one, since a bound that nobody reaches costs nothing. 10 % is a loss
of time that a person would look into; 2 % is below what reads cost in any case. Three standard
errors: a loss that does not change passes for a rise once in 700 periods.

A scheduler that goes on from its journal has what the rule remembers of each table; the period
that was under way begins again, since nodes count from what they said to that scheduler.

Invariants:
    AD-1  The bound never leaves the table's two bounds.

What it deliberately does not do: change anything (`scheduler.machine.changes` does, and may not
succeed: the next period decides again), know a clock, or look at tables whose bound is fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ps_core.cluster_view import ClusterView, NodeState, Role
from ps_core.consistency import Consistency
from ps_core.errors import check
from ps_core.keys import NodeId, TableId
from ps_core.losses import NO_LOSSES, LossTotals
from ps_core.tables import Table

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
LEAST_LOSS_COUNT = 8
"""Of fewer losses a period has no mean that says anything."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a period showed.

    Attributes:
        wait_share: the share of its time that at least half of the workers waited.
        losses: those that the workers reported.
    """

    wait_share: float
    losses: LossTotals = NO_LOSSES


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where the bound should be, and why."""

    staleness: int
    reason: str = ""


@dataclass(slots=True)
class Course:
    """What the rule remembers of one table."""

    quiet_count: int = 0
    patience_count: int = FIRST_PATIENCE_COUNT
    too_low: int | None = None
    """The bound at which workers waited last, unless it turned out well since."""
    was_lowered: bool = False
    """The last move was down, for quiet."""
    held_count: int = 0
    """Periods to come in which nothing is raised."""
    hold_count: int = FIRST_HOLD_COUNT
    calm_count: int = 0
    losses: LossTotals = NO_LOSSES

    def step(self, setting: Consistency, seen: Seen) -> Verdict:
        """The end of a period under `setting`."""
        s = setting.staleness
        reason = self._risen(seen.losses)
        if reason:
            verdict = self._braked(setting, reason)
        else:
            verdict = self._by_waits(setting, seen.wait_share)
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
        """Why the loss counts as risen; empty if it does not."""
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
            # Here they waited once, and do not any more.
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
    """What a node said of itself; counters count from its start.

    Attributes:
        at_s: when it came.
        clocks: a worker's, by table.
        waits_s: a server's: how long each worker's reads of a table were parked for others.
        losses: a worker's.
    """

    at_s: float
    clocks: Mapping[TableId, int] = field(default_factory=dict)
    waits_s: Mapping[tuple[TableId, NodeId], float] = field(default_factory=dict)
    losses: LossTotals = NO_LOSSES


@dataclass(frozen=True, slots=True)
class Move:
    """The bound of a run's table should be where `consistency` has it."""

    table_name: str
    consistency: Consistency
    reason: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class KeptCourse:
    """What the rule remembered of a table at the end of a period: it outlives the scheduler.

    Attributes:
        setting: the table's two bounds, as someone asked for them.
        course: never changed.
    """

    setting: Consistency
    course: Course


@dataclass(slots=True)
class _Watched:
    """A table, and the period that it is in: since when, and what was known then."""

    table: Table
    course: Course = field(default_factory=Course)
    kept: KeptCourse | None = None
    begun_s: float | None = None
    base: dict[NodeId, Report] = field(default_factory=dict)


_NONE_KEPT: Mapping[TableId, KeptCourse] = MappingProxyType({})


class Adaptation:
    """The tables of a cluster whose bound moves.

    Args:
        interval_s: the length of a period, at least.
        kept: what a scheduler before this one remembered of the tables that it watched.
    """

    def __init__(self, interval_s: float, kept: Mapping[TableId, KeptCourse] = _NONE_KEPT) -> None:
        self._interval_s = interval_s
        self._kept = kept
        self._watched: dict[TableId, _Watched] = {}
        self._reports: dict[NodeId, Report] = {}
        self._members: dict[NodeId, Role] = {}
        self._is_whole = False

    @property
    def tables(self) -> Iterable[Table]:
        """Those that are watched."""
        return [watched.table for watched in self._watched.values()]

    @property
    def courses(self) -> dict[TableId, KeptCourse]:
        """What to remember of them; of one whose first period has not ended there is nothing.
        Before any view came it is what was remembered.
        """
        watched = {table_id: each.kept for table_id, each in self._watched.items()}
        return {**self._kept, **{name: kept for name, kept in watched.items() if kept is not None}}

    @property
    def is_idle(self) -> bool:
        """Whether no table's bound moves."""
        return not self._watched

    def observe(self, view: ClusterView) -> None:
        """The cluster has changed."""
        found = {t.table_id: t for t in view.tables if t.consistency.moves}
        for table_id in self._watched.keys() - found.keys():
            del self._watched[table_id]
        if not found:
            self._kept = _NONE_KEPT
            self._reports.clear()
            return
        for table_id, table in found.items():
            watched = self._watched.get(table_id)
            if watched is None or watched.table.consistency.begun != table.consistency.begun:
                self._watched[table_id] = self._begun(table)
            elif (watched.table.change, watched.table.proposed) != (table.change, table.proposed):
                watched.table, watched.begun_s = table, None
        self._kept = _NONE_KEPT
        alive = [n for n in view.nodes if n.state is NodeState.ALIVE and n.role is not Role.READER]
        self._members = {node.node_id: node.role for node in alive}
        # Who waits for a silent node says nothing about the bound.
        self._is_whole = not any(
            node.state is NodeState.SILENT and node.role is not Role.READER for node in view.nodes
        )
        for node_id in self._reports.keys() - self._members.keys():
            del self._reports[node_id]

    def _begun(self, table: Table) -> _Watched:
        """Go on where the scheduler before this one was, if these are the same bounds."""
        kept = self._kept.get(table.table_id)
        if kept is None or kept.setting != table.consistency.begun:
            return _Watched(table)
        return _Watched(table, replace(kept.course), kept)

    def heard(self, node_id: NodeId, report: Report) -> None:
        """A node said how it does."""
        if node_id in self._members and self._watched:
            self._reports[node_id] = report

    def look(self, now_s: float) -> list[Move]:
        """The bounds that should move now."""
        moves = []
        for watched in self._watched.values():
            if watched.table.proposed is not None or not self._is_whole:
                watched.begun_s = None
            elif watched.begun_s is None:
                self._begin(watched, now_s)
            elif now_s - watched.begun_s >= self._interval_s:
                moves += self._end(watched, now_s)
        return moves

    def _begin(self, watched: _Watched, now_s: float) -> None:
        watched.begun_s, watched.base = now_s, dict(self._reports)

    def _end(self, watched: _Watched, now_s: float) -> list[Move]:
        """The period is long enough: judge it, if it is of use."""
        table = watched.table
        setting = table.consistency
        workers = [
            node_id
            for node_id in self._both(watched, Role.WORKER)
            if table.table_id in watched.base[node_id].clocks
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
            self._reports[worker].losses.since(watched.base[worker].losses) for worker in workers
        )
        verdict = watched.course.step(setting, Seen(shares[len(shares) // 2], losses))
        watched.kept = KeptCourse(setting.begun, replace(watched.course))
        self._begin(watched, now_s)
        if verdict.staleness == setting.staleness:
            return []
        moved = replace(setting, staleness=verdict.staleness)
        return [Move(table.spec.name, moved, verdict.reason, table.run)]

    def _both(self, watched: _Watched, role: Role) -> list[NodeId]:
        """The nodes that are known from the beginning of the period until now."""
        return [
            node_id
            for node_id in watched.base
            if self._members.get(node_id) is role and node_id in self._reports
        ]

    def _has_all(
        self, watched: _Watched, workers: Iterable[NodeId], servers: Iterable[NodeId]
    ) -> bool:
        """Whether everybody has been heard over the period, and every worker has taken steps."""
        table = watched.table
        needed = LEAST_CLOCK_COUNT + table.consistency.staleness
        for worker in workers:
            before = watched.base[worker].clocks[table.table_id]
            if self._reports[worker].clocks.get(table.table_id, 0) - before < needed:
                return False
        return all(
            self._reports[server].at_s - watched.base[server].at_s >= self._interval_s / 2
            for server in servers
        )

    def _wait_share(self, watched: _Watched, worker: NodeId, servers: Iterable[NodeId]) -> float:
        place = (watched.table.table_id, worker)
        shares = []
        for server in servers:
            before, now = watched.base[server], self._reports[server]
            waited_s = now.waits_s.get(place, 0.0) - before.waits_s.get(place, 0.0)
            shares.append(waited_s / (now.at_s - before.at_s))
        return min(1.0, max(0.0, *shares))
