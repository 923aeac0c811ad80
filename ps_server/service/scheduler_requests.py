"""Messages of a server to the scheduler: prepared changes, and requests for backups of its ranges.
Later views bring the answers.

Rules:
    - A prepared change is sent until the scheduler has it, or the change is no longer open.
    - Requests for backups are made one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ps_core.cluster_view import BackupRequest
from ps_core.errors import PushpullError, WaitExpired
from ps_runtime.observe import logs
from ps_server.ranges.server_machine import PreparedChange

Send = Callable[[PreparedChange], Awaitable[None]]
"""Sends one prepared change. WaitExpired: no answer came in time; it may be sent again."""

Ask = Callable[[Sequence[BackupRequest]], Awaitable[object]]


class PrepareReports:
    """Sends one server's prepared changes. Belongs to one event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending: dict[PreparedChange, asyncio.Task[None]] = {}

    def send(self, prepared: Iterable[PreparedChange]) -> None:
        """Send those of these that are new, and stop sending any other."""
        wanted = set(prepared)
        for old in self._sending.keys() - wanted:
            self._sending.pop(old).cancel()
        for new in wanted - self._sending.keys():
            self._sending[new] = asyncio.get_running_loop().create_task(self._deliver(new))

    async def _deliver(self, change: PreparedChange) -> None:
        while True:
            try:
                await self._send(change)
            except WaitExpired:  # the scheduler was reached and did not answer in time
                continue
            except PushpullError as error:
                logs.warning("prepare_unheard", table_id=change.table_id, error=error.message)
            return

    def close(self) -> None:
        """Send no more."""
        self.send(())


class BackupRequests:
    """Sends one server's requests for backups. Belongs to one event loop."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._is_unheard = False

    def request(self, requests: Sequence[BackupRequest]) -> None:
        """Ask, unless a call is open: the caller repeats its requests."""
        if requests and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._deliver(requests))

    async def _deliver(self, requests: Sequence[BackupRequest]) -> None:
        try:
            await self._ask(requests)
        except PushpullError as error:
            if not self._is_unheard:  # once, not at each of many tries while the scheduler is away
                logs.warning("backup_request_unheard", ranges=len(requests), error=error.message)
            self._is_unheard = True
            return
        if self._is_unheard:
            logs.info("backup_request_heard", ranges=len(requests))
        self._is_unheard = False

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
