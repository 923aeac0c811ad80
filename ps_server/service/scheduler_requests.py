"""A server's promises, and its requests for backups of its ranges, on their way to the scheduler.
Its answers to both come with later views.

Rules:
    - A promise is sent until it is heard, or of no use any more.
    - Requests for backups are made one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ps_core.cluster_view import BackupRequest
from ps_core.errors import PushpullError, WaitExpired
from ps_runtime.observe import logs
from ps_server.ranges.server_machine import Promise

Send = Callable[[Promise], Awaitable[None]]
"""Sends one promise. WaitExpired: no answer came in good time; it may be sent again."""

Ask = Callable[[Sequence[BackupRequest]], Awaitable[object]]


class Promises:
    """The promises of one server. Belongs to one event loop.

    Args:
        send: how one is sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending: dict[Promise, asyncio.Task[None]] = {}

    def stand(self, promises: Iterable[Promise]) -> None:
        """These are not settled: send those that are new, and no others any more."""
        standing = set(promises)
        for old in self._sending.keys() - standing:
            self._sending.pop(old).cancel()
        for new in standing - self._sending.keys():
            self._sending[new] = asyncio.get_running_loop().create_task(self._deliver(new))

    async def _deliver(self, promise: Promise) -> None:
        while True:
            try:
                await self._send(promise)
            except WaitExpired:  # the scheduler was reached and did not answer in time
                continue
            except PushpullError as error:
                logs.warning("promise_unheard", table_id=promise.table_id, error=error.message)
            return

    def close(self) -> None:
        """Send no more."""
        self.stand(())


class BackupRequests:
    """The requests of one server. Belongs to one event loop.

    Args:
        ask: how they get to the scheduler.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._is_unheard = False

    def stand(self, requests: Sequence[BackupRequest]) -> None:
        """These stand now: ask, unless an answer is awaited; then they are to be said again."""
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
