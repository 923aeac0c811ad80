"""Promises on their way to the scheduler: each is sent until it is heard, or of no use any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from ps_core.errors import PushpullError, WaitExpired
from ps_runtime.observe import logs
from ps_server.ranges.server_machine import Promise

Send = Callable[[Promise], Awaitable[None]]
"""Sends one promise. WaitExpired: no answer came in good time; it may be sent again."""


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
