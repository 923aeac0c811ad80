"""Consistent pulls of readers: one state of a whole table, while it is trained.

Rules:
    - Under BSP a pull names one clock for every range, the newest that any reports. If a range is
      past it already, the pull asks further ahead, by a margin that grows. No worker waits.
    - Under SSP it begins a cut first: every range suspends updates beyond the clock that it has
      reached. Then the pull names the highest of these clocks. A cut is always ended; servers end
      it soon if this process cannot.
    - Under ASP there is no clock that all ranges have: each is pulled as it is between two updates.

Only the background loop calls this.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ps_core import limits
from ps_core.consistency import Consistency, Mode
from ps_core.errors import AlreadyPast, InvalidConfig, PushpullError, WaitExpired
from ps_core.keys import TableId
from ps_core.tables import Table
from ps_runtime.grpc.retry import Backoff, is_curable
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.steps.steps import Pulled
from ps_worker.transport.pulls import ATTEMPT_S, Puller, PullOrder


class Moment(NamedTuple):
    """The moment of a consistent pull: a clock, and the cut that holds it, or 0."""

    clock: int
    cut: int = 0


class ConsistentPuller:
    """The consistent pulls of one reader."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller

    async def pull(self, order: PullOrder) -> Pulled:
        """Pull by the rule of the table's consistency, which may change meanwhile."""
        while True:
            setting = self._setting(order)
            try:
                match setting.mode:
                    case Mode.BSP:
                        return await self._pull_ahead(order)
                    case Mode.SSP:
                        return await self._pull_by_cut(order)
                    case Mode.ASP:
                        return await self._puller.pull(replace(order, consistent=False))
            except InvalidConfig:
                if self._setting(order) == setting:
                    raise

    def _setting(self, order: PullOrder) -> Consistency:
        return self._puller.links.view.table(order.table.table_id).consistency

    # --- BSP

    async def _pull_ahead(self, order: PullOrder) -> Pulled:
        margin = 0
        clock = await self._newest_clock(order)
        while True:
            deadline_s = min(order.deadline_s, now_s() + ATTEMPT_S)
            try:
                return await self._puller.pull_at(order, clock, deadline_s)
            except AlreadyPast as past:
                margin = max(1, 2 * margin)
                clock = past.clock + margin
                if now_s() >= order.deadline_s:
                    raise WaitExpired(
                        f"no clock of table '{order.table.spec.name}' could be pulled before the "
                        f"servers had passed it: {past.message}"
                    ) from past
            except WaitExpired:
                if now_s() >= order.deadline_s:
                    raise
                margin = 0
                clock = await self._newest_clock(order)

    async def _newest_clock(self, order: PullOrder) -> int:
        backoff = Backoff()
        while True:
            try:
                links = self._puller.links_of(order.table)
                found = await asyncio.gather(
                    *(link.range_stats(order.table.table_id) for link in links)
                )
                return max(
                    (stats.clock for response in found for stats in response.ranges), default=0
                )
            except PushpullError as error:
                if not is_curable(error):
                    raise
                await self._puller.pause(order, backoff, error)

    # --- SSP

    async def _pull_by_cut(self, order: PullOrder) -> Pulled:
        backoff = Backoff()
        while True:
            lasts_s = min(limits.DEFAULT_CUT_S, max(order.deadline_s - now_s(), 0.001))
            cut = new_cut()
            try:
                clocks = await self.begin_cut(cut, [order.table], lasts_s)
                (clock,) = clocks.values()
                end_s = now_s() + lasts_s
                return await self._puller.pull_at(replace(order, cut=cut), clock, end_s)
            except PushpullError as error:  # a server or a worker took too long
                if not (is_curable(error) or isinstance(error, AlreadyPast)):
                    raise
                await self._puller.pause(order, backoff, WaitExpired(error.message))
            finally:
                await self.end_cut(cut, [order.table])

    async def begin_cut(
        self, cut: int, tables: Sequence[Table], lasts_s: float
    ) -> dict[TableId, int]:
        """Suspend updates of tables beyond their clocks, `lasts_s` at most; gives the lowest clock
        to pull of each. If a server is not reached, the others keep the cut until `end_cut`.
        """
        asked = [
            (table.table_id, link) for table in tables for link in self._puller.links_of(table)
        ]
        found = await asyncio.gather(
            *(link.begin_cut(table_id, cut, lasts_s) for table_id, link in asked)
        )
        clocks: dict[TableId, int] = {}
        for (table_id, _), clock in zip(asked, found, strict=True):
            clocks[table_id] = max(clock, clocks.get(table_id, 0))
        return clocks

    async def end_cut(self, cut: int, tables: Sequence[Table]) -> None:
        """End a cut on all servers. Never raises, because servers end it by themselves soon."""
        for table in tables:
            try:
                links = self._puller.links_of(table)
                await asyncio.gather(*(link.end_cut(table.table_id, cut) for link in links))
            except PushpullError as error:
                logs.debug("cut_not_ended", table=table.spec.name, error=error.message)


def new_cut() -> int:
    """A random number for a cut, unique in the session."""
    return int.from_bytes(os.urandom(7), "big") + 1
