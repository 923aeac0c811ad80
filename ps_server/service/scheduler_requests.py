"""Messages of a server to the scheduler: prepared changes, requests for backups, and its departure.

Rules:
    - A prepared change is sent until the scheduler has it, or the change is no longer open.
    - Requests for backups are made one call at a time. Later views bring the answers.
    - A server that is told to stop leaves when others have all that it holds (`departure_machine`
      decides). SIGINT is a person's: nothing is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ps_core.cluster_view import BackupRequest, lost_among
from ps_core.errors import PushpullError, WaitExpired
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.grpc.errors import has_expired_unheard
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_server.ranges.server_machine import PreparedChange
from ps_server.replication.departure_machine import Departure, DepartureStep, held_alone

REASON = "the server stops"
_ASK_AGAIN_S = 0.2


class PrepareReports:
    """Sends one server's prepared changes. Belongs to one event loop.

    Args:
        send: sends one. WaitExpired: no answer came in time; it may be sent again.
    """

    def __init__(self, send: Callable[[PreparedChange], Awaitable[None]]) -> None:
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
            except WaitExpired:
                continue
            except PushpullError as error:
                logs.warning("prepare_unheard", table_id=change.table_id, error=error.message)
            return

    def close(self) -> None:
        self.send(())


class BackupRequests:
    """Sends one server's requests for backups. Belongs to one event loop."""

    def __init__(self, ask: Callable[[Sequence[BackupRequest]], Awaitable[object]]) -> None:
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
        if self._asking is not None:
            self._asking.cancel()


async def until_kept(link: SchedulerLink, end_s: float, *, has_log: bool) -> None:
    """Leave the cluster as soon as that loses nothing, or when `end_s` has come by `clock.now_s`.
    The server goes on serving, since others copy from it. If the scheduler has not answered for a
    lease, it leaves, unless values would be lost that may be saved when the scheduler is back.
    `has_log`: all that the server holds is in its update log.
    """
    departure, answer, silent_s = Departure(end_s, link.lease_s), "", 0.0
    while (left_s := departure.left_s(clock.now_s())) > 0:
        said, alone = departure.awaited, held_alone(link.view, link.session.node_id)
        unsaved = _unsaved(link)  # now: a view after the departure has what that loses
        error: PushpullError | None = None
        try:
            await link.deregister_if_kept(REASON, left_s)
        except PushpullError as failure:
            error = failure
            answer = answer if has_expired_unheard(failure) else failure.message
        silent_s = clock.now_s() - link.last_scheduler_contact_s
        is_fenced = link.fenced_by is not None
        may_be_saved = bool(alone) and not (unsaved or has_log)
        step = departure.answered(error, silent_s, is_fenced=is_fenced, may_be_saved=may_be_saved)
        match step:
            case DepartureStep.LEAVES:
                if unsaved:
                    _tell_lost(alone, unsaved, has_log=has_log)
                return
            case DepartureStep.LEAVES_UNHEARD:
                logs.warning("leaves_unheard", error="" if error is None else error.message)
                if not is_fenced:
                    _tell_lost(alone, _silence(silent_s), has_log=has_log)
                return
        if departure.awaited != said:
            left = round(left_s, 1)
            logs.info("stays_for_now", reason=departure.awaited, grace_left_s=left)
        await asyncio.sleep(min(_ASK_AGAIN_S, left_s))
    alone = held_alone(link.view, link.session.node_id)
    if alone or departure.awaited:
        why = answer if answer and silent_s <= link.lease_s else _silence(silent_s)
        logs.warning("leaves_with_the_only_copy", ranges=alone, reason=why)


def _silence(silent_s: float) -> str:
    return f"the scheduler has not answered for {silent_s:.1f} s"


def _tell_lost(range_count: int, reason: str, *, has_log: bool) -> None:
    """Log that a server leaves with values of so many ranges that no other server has."""
    if range_count:
        where = ": its update log alone has them" * has_log
        logs.warning("leaves_with_the_only_copy", ranges=range_count, reason=f"{reason}{where}")


def _unsaved(link: SchedulerLink) -> str:
    """The reason why no checkpoint will have the values of a server that leaves; empty if one will,
    or other servers have them.
    """
    if link.replica_count > 1:
        return ""
    if not link.checkpoint_url:
        return "one replica, and no place for checkpoints"
    view = link.view
    if view is not None and lost_among(view.ranges, view.of_run("").tables):
        return "one replica, and other values are lost, without which no checkpoint is made"
    return ""
