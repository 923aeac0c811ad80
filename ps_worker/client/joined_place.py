"""The place at which a late joiner joins all tables of its run (SEMANTICS S6).

It ends steps with nothing, also on tables that its script has not opened yet: the others wait for
it on all of them. `ps_worker.spec.loop_places` says up to which clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping

from ps_core.cluster_view import ClusterView
from ps_core.errors import WaitExpired
from ps_core.keys import TableId
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.client.connection import ClientConnection
from ps_worker.spec.loop_places import LoopReport, PlaceSearch
from ps_worker.transport.loop_reports import reports_of_others

_ASKS_S = 0.25
_JOINED_WITHIN_S = 5.0
"""Seconds that it waits until it has joined the tables that its script has not opened."""

_QUIET_LEASES = 2
"""Without a step of the others for so many leases, it begins where it is; for one, if it knows how
far their loop goes at a time."""


class JoinedPlace:
    """The search of one worker, made once.

    Attributes:
        clocks: at which it begins, by table; empty until they are found, and where nobody told.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._ended: dict[TableId, int] = {}  # the newest clocks that it has ended with nothing
        self._has_searched = False
        self.clocks: Mapping[TableId, int] = {}

    def find(self, begun: Collection[TableId]) -> None:
        """Find the place, and end steps up to it, but for tables that the script has begun.

        Blocking: while the others go on to a place of a loop that steps several models; a moment
            otherwise.
        """
        if not self._has_searched:
            limit_s = self._connection.config.request_deadline_s
            self._connection.asked(self._find(frozenset(begun), now_s() + limit_s), limit_s)
            self._has_searched = True

    def joined(self, view: ClusterView) -> dict[TableId, int]:
        """The clocks after which this worker has joined the tables that are older than it."""
        me = self._engine.session.incarnation
        return {
            table.table_id: join.after_clock
            for table in view.tables
            for join in table.joins
            if join.incarnation == me and self._engine.joins(table.table_id)
        }

    async def _find(self, begun: frozenset[TableId], end_s: float) -> None:
        engine = self._engine
        count = sum(engine.joins(table.table_id) for table in engine.view.tables)
        with contextlib.suppress(WaitExpired):
            await engine.scheduler.view_where(
                lambda view: len(self.joined(view)) >= count, "all joins", _JOINED_WITHIN_S
            )
        tables = engine.view.tables_by_id
        joined = {t: c for t, c in self.joined(engine.view).items() if t not in begun}
        search = PlaceSearch(
            {t: max(clock, self._ended.get(t, 0)) for t, clock in joined.items()},
            {t: tables[t].restored_clock or 0 for t in joined},
        )
        is_found = await self._search(search, joined, end_s)
        place = search.place
        if place is None:
            return
        self.clocks = search.clocks
        engine.steps.loop.begin_at(search.clocks, place)
        if not is_found and not place.steps:
            logs.warning(
                "joined_between_steps",
                risk="if workers step several models in turn, this one and the others may wait for "
                "each other: none of them has come to the beginning of its loop",
                remedy="end this worker and start it again, or train these tables under ssp or asp",
            )

    async def _search(
        self, search: PlaceSearch, joined: Mapping[TableId, int], end_s: float
    ) -> bool:
        """True if it has found a place."""
        if search.hear(()):
            return True
        heard: list[LoopReport] = []
        lease_s = self._engine.scheduler.lease_s
        quiet_s = now_s() + lease_s
        while True:
            reports = await self._asked(min(quiet_s, end_s))
            is_found = search.hear(reports)
            await self._end_up_to(search.clocks, joined, end_s)
            if reports != heard and search.place is not None:
                leases = 1 if search.place.steps else _QUIET_LEASES
                heard, quiet_s = reports, now_s() + leases * lease_s
            if is_found or now_s() >= min(quiet_s, end_s):
                return is_found
            await asyncio.sleep(_ASKS_S)

    async def _asked(self, end_s: float) -> list[LoopReport]:
        """The others' reports; none if the scheduler is away."""
        try:
            return await reports_of_others(self._engine.scheduler, end_s)
        except WaitExpired:
            return []

    async def _end_up_to(
        self, clocks: Mapping[TableId, int], joined: Mapping[TableId, int], end_s: float
    ) -> None:
        tables = self._engine.view.tables_by_id
        for table_id, clock in clocks.items():
            newest = self._ended.get(table_id, joined[table_id])
            if clock > newest:
                if table_id not in self._ended:
                    await self._engine.links.meet(tables[table_id], end_s)
                for each in range(newest + 1, clock + 1):
                    self._engine.steps.pass_clock(tables[table_id], each)
                self._ended[table_id] = clock
