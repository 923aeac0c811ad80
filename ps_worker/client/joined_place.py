"""The place at which a late joiner joins all tables of its run (SEMANTICS S6).

It ends steps with nothing, also on tables that its script has not opened yet: the others wait for
it on all of them. `ps_worker.spec.loop_places` says up to which clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection, Sequence
from typing import Final

from ps_core.cluster_view import ClusterView
from ps_core.consistency import Mode
from ps_core.errors import Fenced, PushpullError, WaitExpired
from ps_core.keys import TableId
from ps_core.tables.table import Table
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.client.connection import ClientConnection
from ps_worker.spec.loop_places import Found, LoopReports, PlaceSearch
from ps_worker.steps.steps import TableHandle
from ps_worker.transport.loop_reports import reports_of_others

_UNHEARD_LEASES: Final = 1
"""It waits so many leases for anyone to tell of a loop ..."""

_FOLLOWED_LEASES: Final = 4
"""... and so many in all for one to come to a place; then it begins where it is."""


class JoinedPlace:
    """The search of one worker, made once.

    Attributes:
        clocks: the newest that it has ended with nothing, by table.
        tables: those on which it begins at a place of the others.
        stepped: those that another worker has told it steps.
        is_told: a living worker has told where the loop is, or there is no need to know.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._has_searched = False
        self._running: PlaceSearch | None = None
        self._lock = threading.Lock()  # for `clocks` and the end of a search
        self.clocks: dict[TableId, int] = {}
        self.tables: Collection[TableId] = frozenset()
        self.stepped: frozenset[TableId] = frozenset()
        self.is_told = True

    def find(self, handles: Sequence[TableHandle]) -> None:
        """Find the place, and end steps up to it, but for those of the script's handles that it has
        begun to step. However that ends, the handles stand where it has ended steps with nothing.

        Blocking: while the others go on to a place of a loop that steps several models, some leases
            at most; a moment otherwise.
        """
        if self._has_searched:
            return
        limit_s, search = self._connection.config.request_deadline_s, PlaceSearch(self.clocks)
        waiting = {each.table.table_id: each for each in handles if self._waits(each)}
        begun = frozenset(each.table.table_id for each in handles) - waiting.keys()
        self._running = search
        try:
            self._connection.asked(self._find(search, begun, now_s() + limit_s), limit_s)
            self._has_searched = True
        finally:
            with self._lock:  # one that was interrupted ends no more steps
                self._running = None
            for table_id in waiting.keys() & self.clocks.keys():
                steps, clock = waiting[table_id].steps, self.clocks[table_id]
                steps.reached(clock)
                steps.skip_clocks(clock - steps.clock, is_owed=False)

    def _waits(self, handle: TableHandle) -> bool:
        """True if the script has not begun to step it."""
        return handle.steps.is_to_join or handle.clock == self.clocks.get(handle.table.table_id)

    def joined(self, view: ClusterView) -> dict[TableId, int]:
        """The clocks after which this worker has joined the tables that are older than it."""
        me = self._engine.session.incarnation
        return {
            table.table_id: join.after_clock
            for table in view.tables
            for join in table.joins
            if join.incarnation == me and self._engine.joins(table.table_id)
        }

    def is_at_start(self) -> bool:
        """True if nobody had taken a step in this cluster when this worker joined its tables.

        Blocking: until it has joined all of them; WaitExpired names them.
        """
        limit_s, joins = self._connection.config.request_deadline_s, self._engine.joins

        def has_joined(view: ClusterView) -> bool:
            found = {t.table_id for t in view.tables if joins(t.table_id)}
            return found <= self.joined(view).keys()

        joining = self._engine.scheduler.view_where(has_joined, "this worker to join", limit_s)
        view = self._connection.asked(joining, limit_s)
        firsts = {t.table_id: t.restored_clock or 0 for t in view.tables}
        return all(clock <= firsts[each] for each, clock in self.joined(view).items())

    async def _find(self, search: PlaceSearch, begun: frozenset[TableId], end_s: float) -> None:
        engine, began_s = self._engine, now_s()
        lease_s, interval_s = engine.scheduler.lease_s, engine.scheduler.heartbeat_interval_s
        with contextlib.suppress(WaitExpired):
            await engine.scheduler.view_where(
                lambda view: self._firsts(begun).keys() <= self.joined(view).keys(),
                "all joins",
                interval_s,
            )
        leases, has_followed = _UNHEARD_LEASES, False
        while True:
            firsts = self._firsts(begun)
            joined = {t: c for t, c in self.joined(engine.view).items() if t in firsts}
            if all(t in joined and joined[t] <= first for t, first in firsts.items()):
                return  # nobody has taken a step
            reports = await self._asked(min(began_s + leases * lease_s, end_s))
            self.stepped = frozenset().union(*(report.sealed for report in reports.told))
            own = {t: c for t, c in self._clocks().items() if t not in firsts}
            found = search.hear(joined, reports, firsts.keys() - joined.keys(), own)
            if found is Found.FOLLOWS:
                leases, has_followed = _FOLLOWED_LEASES, True
            until_s = min(began_s + leases * lease_s, end_s)
            await self._end_up_to(search, until_s)
            # Whom it follows may be silent for a moment, and a scheduler that was started again.
            may_go_on = has_followed and found is Found.DEAD
            left_s = until_s - now_s()
            may_hear = found is Found.NOTHING and not self._is_free(begun)
            if left_s <= 0 or not (may_go_on or may_hear or found is Found.FOLLOWS):
                self._end(found, search, has_followed=has_followed)
                return
            await asyncio.sleep(min(interval_s, left_s))

    def _firsts(self, begun: frozenset[TableId]) -> dict[TableId, int]:
        """The clocks at which the tables began that it joins, or will."""
        return {t.table_id: t.restored_clock or 0 for t in self._to_join(begun)}

    def _to_join(self, begun: frozenset[TableId]) -> list[Table]:
        joins, tables = self._engine.joins, self._engine.view.tables
        return [t for t in tables if joins(t.table_id) and t.table_id not in begun]

    def _is_free(self, begun: frozenset[TableId]) -> bool:
        """True where workers wait for each other on none of the tables, as long as that stays."""
        return all(map(_is_free, self._to_join(begun)))

    def _clocks(self) -> dict[TableId, int]:
        """Its own, of tables on which workers wait for each other."""
        reached, tables = self._engine.steps.reached, self._engine.view.tables
        known = {t.table_id: t.restored_clock or 0 for t in tables if not _is_free(t)}
        return {table_id: reached.get(table_id, clock) for table_id, clock in known.items()}

    def _end(self, found: Found, search: PlaceSearch, *, has_followed: bool) -> None:
        self.is_told = found in (Found.ALONE, Found.PLACE)
        if found is Found.PLACE:
            self.tables = search.placed
        elif found is Found.ALONE:
            self._engine.steps.loop.begin_alone()
        elif has_followed or found is Found.NO_FURTHER:
            warn_between_steps("the others step several models in turn")

    async def _asked(self, end_s: float) -> LoopReports:
        """The others' reports; none if the scheduler is away, or does not say."""
        joins = [join for table in self._engine.view.tables for join in table.joins]
        late_joiners = {join.incarnation for join in joins}
        try:
            return await reports_of_others(self._engine.scheduler, late_joiners, end_s)
        except Fenced:
            raise
        except PushpullError:
            return LoopReports()

    async def _end_up_to(self, search: PlaceSearch, end_s: float) -> None:
        """End steps with nothing, on tables whose servers answer until then."""
        joined = self.joined(self._engine.view)
        for table_id, clock in search.clocks.items():
            table = self._engine.view.tables_by_id.get(table_id)
            newest = self.clocks.get(table_id, joined.get(table_id, clock))
            if table is None or clock <= newest:
                continue
            if table_id not in self.clocks:
                try:
                    await self._engine.meet(table, end_s)
                except WaitExpired:
                    continue
            self._pass_clocks(search, table, range(newest + 1, clock + 1))

    def _pass_clocks(self, search: PlaceSearch, table: Table, clocks: range) -> None:
        with self._lock:
            if self._running is search:
                for clock in clocks:
                    self._engine.steps.pass_clock(table, clock)
                self.clocks[table.table_id] = clocks[-1]


def _is_free(table: Table) -> bool:
    return table.consistency.mode is Mode.ASP


def warn_between_steps(steps: str) -> None:
    """Warn of a loop that steps several models, in which nothing tells where the others are."""
    logs.warning(
        "joined_between_steps",
        steps=steps,
        risk="if workers step models in turn, this one and the others may wait for each other",
        remedy="end this worker and start it again, or train these tables under ssp or asp",
    )
