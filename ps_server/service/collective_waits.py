"""Workers that wait at this server for a round of collective calls (`ranges.collective_rounds`)."""

from __future__ import annotations

import asyncio

from ps_core.cluster_view import ClusterView, Session
from ps_core.collective_calls import WAITS_FOR, Round, Share
from ps_core.errors import Draining, WaitExpired
from ps_core.keys import AssignmentEpoch, NodeId
from ps_runtime.cluster.wire import round_from_proto, round_to_proto, share_from_proto
from ps_server.ranges.collective_rounds import CollectiveRounds
from pushpull.v1 import parameters_pb2


class CollectiveWaits:
    """EnterCollective, over one `CollectiveRounds` a run."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._machines: dict[str, CollectiveRounds] = {}
        self._changed = asyncio.Event()
        self._leaving: Draining | None = None

    def observe(self, view: ClusterView) -> None:
        runs = {"", *(run.name for run in view.runs)}
        for run in runs:
            self._of_run(run).observe(view.of_run(run))
        for removed in self._machines.keys() - runs:
            del self._machines[removed]
        self._wake()

    def _of_run(self, run: str) -> CollectiveRounds:
        return self._machines.setdefault(run, CollectiveRounds(self._own))

    def drain(self, leaving: Draining) -> None:
        """Refuse waiting workers, which ask the next host: this server is going away."""
        self._leaving = leaving
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(
        self, session: Session, request: parameters_pb2.EnterCollectiveRequest, timeout_s: float
    ) -> parameters_pb2.EnterCollectiveResponse:
        """Take a worker's share, and wait for the round that it is in, up to `timeout_s`.

        Raises:
            Fenced: the worker's membership has ended.
            StaleAssignment: collective calls meet elsewhere.
            WaitExpired: somebody is missing, named by the message.
        """
        if self._leaving is not None:
            raise self._leaving
        share = None
        if request.HasField("share"):
            came = share_from_proto(request.share)
            share = Share(session.rank, session.incarnation, came.call, came.clock, came.payload)
        last = round_from_proto(request.last_round) if request.HasField("last_round") else None
        assignment_epoch = AssignmentEpoch(request.assignment_epoch)
        machine = self._of_run(session.run)
        machine.check_host(assignment_epoch)
        machine.enter(session.incarnation, request.ended_round, last, share)
        self._wake()
        if share is None:
            return parameters_pb2.EnterCollectiveResponse()
        try:
            async with asyncio.timeout(timeout_s):
                ended = await self._answer(session, request.ended_round, assignment_epoch)
        except TimeoutError:
            raise WaitExpired(f"{WAITS_FOR} {machine.missing()}") from None
        return parameters_pb2.EnterCollectiveResponse(round=round_to_proto(ended))

    async def _answer(
        self, session: Session, ended_round: int, assignment_epoch: AssignmentEpoch
    ) -> Round:
        machine, who = self._of_run(session.run), session.incarnation
        while (ended := machine.answer(who, ended_round)) is None:
            await self._changed.wait()
            if self._leaving is not None:
                raise self._leaving
            machine.check_host(assignment_epoch)
            machine.check_here(who)
        return ended
