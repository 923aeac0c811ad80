"""Registration of a node: the scheduler's addresses, and one call's answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from ps_core import limits
from ps_core.errors import PushpullError, Recovering, Unauthenticated, WaitExpired
from ps_runtime.cluster import join_secret
from ps_runtime.grpc.channels import scheduler_channel
from ps_runtime.grpc.errors import from_rpc_error
from ps_runtime.grpc.retry import Backoff, is_retryable
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_runtime.system.executors import in_thread
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

AnswerT = TypeVar("AnswerT")

REGISTRATION_ID_BYTES = 16
PROTOCOL_VERSION = 1

ATTEMPT_DEADLINE_S = 5.0
"""The longest attempt at a short call before the next address is tried."""

LEAST_ATTEMPT_S = 0.2
"""The shortest attempt: a round trip needs about as much."""

_NOT_CONNECTED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class Addresses:
    """The scheduler's addresses, each with its channel; one of them is present: tried next.

    A channel that does not connect is replaced, so that a host's name is looked up anew: the
    scheduler may be back at another IP address, and gRPC itself looks a second time after half a
    minute, or after two where the name had no address.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._made_s: dict[str, float] = {}  # when each channel was made
        self._closing: set[asyncio.Task[None]] = set()
        self._present = 0

    def __str__(self) -> str:
        return ", ".join(self._addresses)

    @property
    def present(self) -> str:
        return self._addresses[self._present]

    def stub(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        """A stub of the present address."""
        channel = self._channels.get(self.present)
        if channel is None:
            channel = self._channels[self.present] = scheduler_channel(self.present)
            self._made_s[self.present] = clock.now_s()
        return scheduler_pb2_grpc.SchedulerServiceStub(channel)

    def leave(self, address: str) -> None:
        """A call to `address` has failed: make the next one present, unless another task has done
        so, and give up a channel that is not connected, on which no call waits any more.
        """
        if self.present == address:
            self._present = (self._present + 1) % len(self._addresses)
        channel = self._channels.get(address)
        if channel is None or channel.get_state() is not _NOT_CONNECTED:
            return
        if clock.now_s() - self._made_s[address] >= limits.SCHEDULER_RECONNECT_S:
            del self._channels[address]
            closing = asyncio.get_running_loop().create_task(channel.close(ATTEMPT_DEADLINE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)


async def registered(
    book: Addresses, request: scheduler_pb2.RegisterNodeRequest, deadline_s: float
) -> scheduler_pb2.RegisterNodeResponse:
    """Register at any address that answers, for up to `deadline_s`.

    If another node has the place (a rank, an address), the call waits while that node may be dead.

    Raises:
        WaitExpired: no scheduler answered, or the place was not free in time; names the addresses
            and the last failure.
        PushpullError: a scheduler refused.
    """
    begun_s = clock.now_s()
    end_s = begun_s + deadline_s
    backoff = Backoff()
    told = ""
    while True:
        address = book.present
        request.waiting_ms = round((clock.now_s() - begun_s) * 1000)
        attempt_s = min(max(end_s - clock.now_s(), LEAST_ATTEMPT_S), ATTEMPT_DEADLINE_S)
        try:
            answer = await register_once(book.stub(), request, attempt_s)
        except PushpullError as error:
            if not (is_retryable(error) or isinstance(error, WaitExpired)):
                raise
            has_answered = isinstance(error, Recovering) and error.retry_after_ms > 0
            if not has_answered:
                book.leave(address)
            event = "waiting_for_place" if has_answered else "waiting_for_scheduler"
            if event != told:
                told = event
                logs.warning(event, addresses=str(book), error=error.message)
            wait_s = backoff.next_s(error)
            if clock.now_s() + wait_s >= end_s:
                what = "not registered" if has_answered else "no scheduler answered"
                raise WaitExpired(
                    f"{what} at {book} within {deadline_s:.1f} s; last failure: {error.message}"
                ) from error
            await asyncio.sleep(wait_s)
        else:
            session = answer.session
            logs.info(
                "registered",
                scheduler=address,
                cluster_id=session.cluster_id,
                node_id=session.node_id,
                incarnation=session.incarnation,
            )
            return answer


async def register_once(
    stub: scheduler_pb2_grpc.SchedulerServiceStub,
    request: scheduler_pb2.RegisterNodeRequest,
    timeout_s: float,
) -> scheduler_pb2.RegisterNodeResponse:
    """Make one attempt to register, with a proof that this process knows the join secret. Raises
    InvalidConfig if that cannot be read, or is none; the refusal of the scheduler; or no answer.
    """
    secret = await in_thread(join_secret.found)
    while True:
        challenge = await _challenge(stub, timeout_s)
        join_secret.set_proof(request, secret, challenge)
        try:
            response: scheduler_pb2.RegisterNodeResponse = await answer_of(
                stub.RegisterNode(request, timeout=timeout_s)
            )
        except Unauthenticated:
            if await _challenge(stub, timeout_s) == challenge:
                raise  # otherwise the cluster was restored in between
        else:
            return response


async def operator_session(
    stub: scheduler_pb2_grpc.SchedulerServiceStub, timeout_s: float
) -> types_pb2.SessionIdentity:
    """As `register_once`, as an operator, who needs neither heartbeats nor a farewell."""
    request = scheduler_pb2.RegisterNodeRequest(
        registration_id=os.urandom(REGISTRATION_ID_BYTES),
        role=types_pb2.NODE_ROLE_OPERATOR,
        protocol_version=PROTOCOL_VERSION,
    )
    return (await register_once(stub, request, timeout_s)).session


async def _challenge(stub: scheduler_pb2_grpc.SchedulerServiceStub, timeout_s: float) -> bytes:
    request = scheduler_pb2.GetJoinChallengeRequest()
    answer: scheduler_pb2.GetJoinChallengeResponse = await answer_of(
        stub.GetJoinChallenge(request, timeout=timeout_s)
    )
    return answer.challenge


async def answer_of(call: Awaitable[AnswerT]) -> AnswerT:
    """The call's answer; a failure becomes an error of the catalogue."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
