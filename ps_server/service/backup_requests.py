"""What a server wishes of its ranges' backups, on its way to the scheduler: one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ps_core.cluster_view import BackupRequest
from ps_core.errors import PushpullError
from ps_runtime.observe import logs

Ask = Callable[[Sequence[BackupRequest]], Awaitable[object]]


class BackupRequests:
    """The wishes of one server. Belongs to one event loop.

    Args:
        ask: how they get to the scheduler. What comes of them is in views to come.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._is_unheard = False

    def stand(self, backup_requests: Sequence[BackupRequest]) -> None:
        """These stand now: ask, unless an answer is awaited; then they are to be said again."""
        if backup_requests and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._deliver(backup_requests))

    async def _deliver(self, backup_requests: Sequence[BackupRequest]) -> None:
        try:
            await self._ask(backup_requests)
        except PushpullError as error:
            if not self._is_unheard:  # once, not at each of many tries while the scheduler is away
                logs.warning(
                    "backup_request_unheard", ranges=len(backup_requests), error=error.message
                )
            self._is_unheard = True
            return
        if self._is_unheard:
            logs.info("backup_request_heard", ranges=len(backup_requests))
        self._is_unheard = False

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
