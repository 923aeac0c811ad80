"""Calls of the command line to the scheduler and the servers, as an operator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from ps_core.errors import (
    Fenced,
    InvalidConfig,
    PushpullError,
    Recovering,
    Unauthenticated,
    WaitExpired,
)
from ps_runtime.cluster.registration import PROTOCOL_VERSION, answer_of, operator_session
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.grpc.addresses import check_scheduler_address
from ps_runtime.grpc.channels import aio_channel
from pushpull.v1 import (
    parameters_pb2,
    parameters_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)

AnswerT = TypeVar("AnswerT")

QUERY_DEADLINE_S = 5.0
"""Deadline of each call: a person waits for its answer."""


class SchedulerQuery:
    """An operator's calls to one scheduler; an async context manager.

    Blocking: each call takes up to `QUERY_DEADLINE_S`; the first one registers an operator before
    it, which takes as long again.

    Raises:
        PushpullError: the scheduler did not answer, or refused.
    """

    def __init__(self, address: str) -> None:
        self._channel = aio_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._known: types_pb2.SessionIdentity | None = None

    async def session(self) -> types_pb2.SessionIdentity:
        if self._known is None:
            self._known = await operator_session(self._stub, QUERY_DEADLINE_S)
        return self._known

    async def status(self) -> scheduler_pb2.GetClusterStatusResponse:
        if self._known is not None:
            with contextlib.suppress(Fenced):  # the cluster was restored, or replaced
                return await self._status()
            self._known = None
        return await self._status()

    async def _status(self) -> scheduler_pb2.GetClusterStatusResponse:
        request = scheduler_pb2.GetClusterStatusRequest(session=await self.session())
        return await _answer(self._stub.GetClusterStatus, request)

    async def process_ended(self, launch_id: bytes, reason: str) -> int:
        """Report the end of the process that this one started as `launch_id`; the number of its
        nodes that had not left, and are now gone.
        """
        request = scheduler_pb2.DeregisterNodeRequest(
            session=await self.session(), reason=reason, launch_id=launch_id
        )
        answer: scheduler_pb2.DeregisterNodeResponse
        answer = await _answer(self._stub.DeregisterNode, request)
        return answer.ended_count

    async def begin_anew(self) -> None:
        """Empty the cluster, as when it was new; its servers register again by themselves."""
        session, self._known = await self.session(), None  # it belongs to the cluster before
        request = scheduler_pb2.RestoreCheckpointRequest(session=session, empty=True)
        await _answer(self._stub.RestoreCheckpoint, request)

    async def end_run(self, run: str) -> int:
        """End a run; the number of workers that were members of it."""
        request = scheduler_pb2.EndRunRequest(session=await self.session(), run=run)
        changed = _changed(self._stub.EndRun, request, f"run '{run}' may be ended")
        answer: scheduler_pb2.EndRunResponse = await changed
        return answer.ended_count

    async def remove_run(self, run: str) -> scheduler_pb2.RemoveRunResponse:
        """Remove a run that is over, with its tables."""
        request = scheduler_pb2.RemoveRunRequest(session=await self.session(), run=run)
        return await _changed(self._stub.RemoveRun, request, f"run '{run}' may be removed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close()


@contextlib.asynccontextmanager
async def operator_link(
    scheduler: str, deadline_s: float, run: str = ""
) -> AsyncIterator[SchedulerLink]:
    """An operator's link, for what takes longer than a `SchedulerQuery`: its calls go on while the
    scheduler is away, or another one takes its place. `run` is that of the tables it names.

    Blocking: up to `deadline_s`.

    Raises:
        PushpullError: as `SchedulerLink.connect`.
    """
    request = scheduler_pb2.RegisterNodeRequest(
        role=types_pb2.NODE_ROLE_OPERATOR, protocol_version=PROTOCOL_VERSION, run=run
    )
    link = await SchedulerLink.connect(_addresses(scheduler), request, deadline_s)
    try:
        yield link
    finally:
        await link.close()


async def _answer(call: Callable[..., Awaitable[AnswerT]], request: object) -> AnswerT:
    return await answer_of(call(request, timeout=QUERY_DEADLINE_S))


async def _changed(call: Callable[..., Awaitable[AnswerT]], request: object, what: str) -> AnswerT:
    """The answer of a call that changes a run. A scheduler that dies may have done it before."""
    try:
        return await _answer(call, request)
    except (Recovering, WaitExpired) as error:
        message = f"{error.message}; {what}: pushpull runs list says so"
        raise type(error)(message, retry_after_ms=error.retry_after_ms) from error


ServerAnswer = parameters_pb2.GetRangeStatsResponse | PushpullError
"""A server's statistics of its ranges, or the reason why it sent none."""


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """A scheduler's status, and the session with which the servers can be asked."""

    response: scheduler_pb2.GetClusterStatusResponse
    session: types_pb2.SessionIdentity


async def first_status(scheduler: str) -> ClusterAnswer:
    """The status from the first scheduler that answers; as `first_answer`."""

    async def ask(query: SchedulerQuery) -> ClusterAnswer:
        return ClusterAnswer(await query.status(), await query.session())

    return await first_answer(scheduler, ask)


async def first_answer(
    scheduler: str, ask: Callable[[SchedulerQuery], Awaitable[AnswerT]]
) -> AnswerT:
    """The answer of the first scheduler that gives one; commas separate the addresses.

    Blocking: up to twice `QUERY_DEADLINE_S` for each address.

    Raises:
        InvalidConfig: there is no address, an address or the join secret is malformed, or the
            scheduler refuses the request.
        Unauthenticated: this process does not have the cluster's join secret.
        Recovering: no scheduler answers; the message has a reason for each.
    """
    addresses = _addresses(scheduler)
    if not addresses:
        raise InvalidConfig(
            "no scheduler given: use --scheduler HOST:PORT or set PUSHPULL_SCHEDULER"
        )
    for address in addresses:
        check_scheduler_address(address)
    failures = []
    for address in addresses:
        try:
            async with SchedulerQuery(address) as query:
                return await ask(query)
        except (Unauthenticated, InvalidConfig):
            raise
        except PushpullError as error:
            failures.append(f"{address}: {error.message}")
    raise Recovering("no scheduler answers; " + "; ".join(failures))


def _addresses(scheduler: str) -> list[str]:
    return [address.strip() for address in scheduler.split(",") if address.strip()]


async def server_answers(answer: ClusterAnswer) -> dict[int, ServerAnswer]:
    """The answer of each server that has not left, by node id; all are asked at once."""
    servers = [
        status.node
        for status in answer.response.nodes
        if status.node.role == types_pb2.NODE_ROLE_SERVER
        and status.node.state != types_pb2.NODE_STATE_LEFT
    ]
    answers = await asyncio.gather(
        *(_range_stats(server.address, answer.session) for server in servers)
    )
    return {server.node_id: answer for server, answer in zip(servers, answers, strict=True)}


async def _range_stats(address: str, session: types_pb2.SessionIdentity) -> ServerAnswer:
    async with aio_channel(address) as channel:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        request = parameters_pb2.GetRangeStatsRequest(session=session)
        try:
            return await _answer(stub.GetRangeStats, request)
        except PushpullError as error:
            return error
