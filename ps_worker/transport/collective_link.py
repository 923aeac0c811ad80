"""A worker's collective calls on the background loop: asks the host until the round has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from ps_core.cluster_view import ClusterView, Session
from ps_core.collective_calls import WAITS_FOR, Host, Round, Share, host_of
from ps_core.errors import Fenced, PushpullError, StaleAssignment, WaitExpired
from ps_runtime.cluster.wire import round_from_proto, round_to_proto, share_to_proto
from ps_runtime.grpc.retry import Backoff, is_curable
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.collectives.rounds import Rounds
from ps_worker.transport.links import ServerLinks
from pushpull.v1 import parameters_pb2

_ANNOUNCED_WITHIN_S = 10.0
_ASKED_FOR_S = 2.0
"""The host answers after this at the latest, naming missing workers, and is asked again."""

_GRACE_S = 1.0


class CollectiveLink:
    """The collective calls of one worker; `waits` gets the reasons why it waits, for a person."""

    def __init__(
        self,
        session: Session,
        links: ServerLinks,
        waits: dict[object, str],
        *,
        is_late_joiner: bool,
    ) -> None:
        self._session = session
        self._links = links
        self._waits = waits
        self._rounds = Rounds(is_late_joiner=is_late_joiner)
        self._host: Host | None = None
        self._moved = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None
        self._answered: tuple[Share, Round] | None = None

    def take_view(self, view: ClusterView) -> None:
        host = host_of(view)
        if host == self._host:
            return
        self._host = host
        self._moved.set()
        self._moved = asyncio.Event()
        if host is None or not self._rounds.must_announce(host):
            return
        self.stop()
        self._announcing = asyncio.get_running_loop().create_task(self._announce())

    def stop(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()

    async def enter(self, share: Share, deadline_s: float) -> Round:
        """The round that ends with this share, which takes part once, also if given twice."""
        try:
            return await self._asked_until_ended(share, deadline_s)
        finally:
            self._waits.pop(self, None)

    async def _announce(self) -> None:
        """Announce this worker to the host, for which the other workers wait."""
        backoff = Backoff()
        while True:
            try:
                await self._ask(None, _ANNOUNCED_WITHIN_S)
                return
            except PushpullError as error:
                if not is_curable(error):
                    logs.warning("collective_host_untold", error=error.message)
                    return
                await asyncio.sleep(backoff.next_s(error))

    async def _asked_until_ended(self, share: Share, deadline_s: float) -> Round:
        end_s = now_s() + deadline_s
        backoff = Backoff()
        reason = "there is no server"
        while True:
            if self._answered is not None and self._answered[0] is share:
                return self._answered[1]  # perhaps to a call that was interrupted
            left_s = end_s - now_s()
            if left_s <= 0:
                raise WaitExpired(f"{share.call} is not over after {deadline_s:g} s: {reason}")
            moved = self._moved
            try:
                await self._unless(moved, self._ask(share, min(left_s, _ASKED_FOR_S)))
                continue
            except PushpullError as error:
                if not is_curable(error):
                    raise
                reason = self._reason(error)
                self._waits[self] = f"{share.call}: {reason}"
                if isinstance(error, WaitExpired):
                    continue  # the host has waited already
                wait_s = min(backoff.next_s(error), max(end_s - now_s(), 0.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await moved.wait()

    def _reason(self, error: PushpullError) -> str:
        if self._host is None or error.message.startswith(WAITS_FOR):
            return error.message
        return f"the round's host is server {self._host.server}, and {error.message}"

    async def _unless(self, moved: asyncio.Event, asking: Coroutine[Any, Any, None]) -> None:
        """Ask, unless the host moves before the answer."""
        asked = asyncio.ensure_future(asking)
        waited = asyncio.ensure_future(moved.wait())
        try:
            await asyncio.wait((asked, waited), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                asked.result()
        finally:
            asked.cancel()
            waited.cancel()
            await asyncio.gather(asked, waited, return_exceptions=True)

    async def _ask(self, share: Share | None, deadline_s: float) -> None:
        host = self._host
        link = None if host is None else self._links.find(host.server)
        if host is None or link is None:
            raise StaleAssignment("no server can be the round's host")
        entering = self._rounds.entering(host, share)
        request = parameters_pb2.EnterCollectiveRequest(
            view_number=self._links.view.view_number,
            assignment_epoch=host.assignment_epoch,
            ended_round=entering.ended_round,
            last_round=None if entering.last is None else round_to_proto(entering.last),
            share=None if share is None else share_to_proto(share),
            deadline_ms=max(int(deadline_s * 1000), 1),
        )
        try:
            response = await link.enter_collective(request, deadline_s + _GRACE_S)
        except StaleAssignment:
            self._rounds.must_tell_again()
            raise
        if host != self._host:
            return  # an old host's answer does not count
        if share is None:
            self._rounds.told(host)
            return
        ended = round_from_proto(response.round)
        if not ended.has(self._session.incarnation):
            raise Fenced(f"round {ended.number} was answered, and this worker is not in it")
        self._rounds.ended(host, ended)
        self._answered = share, ended
