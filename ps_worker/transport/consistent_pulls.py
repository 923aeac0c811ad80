"""Consistent reads of readers: one state of a whole table, while it is trained.

Rules:
    - Under BSP a read names one clock for every range, the newest that any reports. Where a range
      is past it already, the read asks further ahead, by a margin that grows. Nobody is held up.
    - Under SSP it cuts first: every range holds what is beyond the clock that it has reached. Then
      it names the highest of these clocks. A cut that was begun is always ended, and ends by itself
      soon if this process cannot.
    - Under ASP there is no clock that all have reached: each range is read as it is between two
      updates.

Everything belongs to the background loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.consistency import Consistency, Mode
from ps_core.errors import AlreadyPast, InvalidConfig, PushpullError, WaitExpired
from ps_core.keys import TableId
from ps_core.tables import Table
from ps_runtime.grpc.retry import Backoff, is_curable
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.steps.steps import Pulled
from ps_worker.transport.pulls import ATTEMPT_S, Puller, ReadOrder


class Moment(NamedTuple):
    """What a consistent read is of: a clock, and the cut that holds it, or 0."""

    clock: int
    cut: int = 0


class ConsistentPuller:
    """The consistent reads of one reader.

    Args:
        puller: what reads at a clock.
        view: the newest view.
    """

    def __init__(self, puller: Puller, view: Callable[[], ClusterView]) -> None:
        self._puller = puller
        self._view = view

    async def read(self, order: ReadOrder) -> Pulled:
        """Read as the table's consistency wants it, which may change meanwhile.

        Raises:
            WaitExpired: not in time.
            PushpullError: a server refused for good.
        """
        while True:
            setting = self._setting(order)
            try:
                match setting.mode:
                    case Mode.BSP:
                        return await self._read_ahead(order)
                    case Mode.SSP:
                        return await self._read_by_cut(order)
                    case Mode.ASP:
                        return await self._puller.read(replace(order, consistent=False))
            except InvalidConfig:
                if self._setting(order) == setting:
                    raise

    def _setting(self, order: ReadOrder) -> Consistency:
        return self._view().table(order.table.table_id).consistency

    # --- BSP

    async def _read_ahead(self, order: ReadOrder) -> Pulled:
        margin = 0
        clock = await self._newest_clock(order)
        while True:
            deadline_s = min(order.deadline_s, now_s() + ATTEMPT_S)
            try:
                return await self._puller.read_at(order, clock, deadline_s)
            except AlreadyPast as past:
                margin = max(1, 2 * margin)
                clock = past.clock + margin
                if now_s() >= order.deadline_s:
                    raise WaitExpired(
                        f"no clock of table '{order.table.spec.name}' could be read before the "
                        f"servers had passed it: {past.message}"
                    ) from past
            except WaitExpired:
                if now_s() >= order.deadline_s:
                    raise
                margin = 0
                clock = await self._newest_clock(order)

    async def _newest_clock(self, order: ReadOrder) -> int:
        """The newest clock that any range of the table reports."""
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

    async def _read_by_cut(self, order: ReadOrder) -> Pulled:
        backoff = Backoff()
        while True:
            lasts_s = min(limits.DEFAULT_CUT_S, max(order.deadline_s - now_s(), 0.001))
            cut = new_cut()
            try:
                clocks = await self.begin_cut(cut, [order.table], lasts_s)
                held = replace(order, cut=cut)
                (clock,) = clocks.values()
                return await self._puller.read_at(held, clock, now_s() + lasts_s)
            except PushpullError as error:  # it took a server or a worker too long
                if not (is_curable(error) or isinstance(error, AlreadyPast)):
                    raise
                await self._puller.pause(order, backoff, WaitExpired(error.message))
            finally:
                await self.end_cut(cut, [order.table])

    async def begin_cut(
        self, cut: int, tables: Sequence[Table], lasts_s: float
    ) -> dict[TableId, int]:
        """Hold tables beyond what they have reached, `lasts_s` at most.

        Returns:
            For each table the lowest clock that may be read.

        Raises:
            PushpullError: a server refused, or was not reached. The others hold, until `end_cut`.
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
        """Let go whatever that cut still holds. Never raises: it ends by itself soon."""
        for table in tables:
            try:
                links = self._puller.links_of(table)
                await asyncio.gather(*(link.end_cut(table.table_id, cut) for link in links))
            except PushpullError as error:
                logs.debug("cut_not_ended", table=table.spec.name, error=error.message)


def new_cut() -> int:
    """A number for a cut that no other of this session has."""
    return int.from_bytes(os.urandom(7), "big") + 1
