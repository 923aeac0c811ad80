"""The two calls that the command line makes: the scheduler's status and the servers'."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc

from ps_core.errors import InvalidConfig, PushpullError, Recovering
from ps_runtime.channels import aio_channel
from ps_runtime.errors import from_rpc_error
from pushpull.v1 import (
    parameters_pb2,
    parameters_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)

QUERY_DEADLINE_S = 5.0
"""A status that takes longer is of no use to the person who waits."""


class SchedulerQuery:
    """Asks one scheduler how its cluster does; an async context manager."""

    def __init__(self, address: str) -> None:
        self._channel = aio_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    async def status(self) -> scheduler_pb2.GetClusterStatusResponse:
        """The cluster's status.

        Blocking: up to `QUERY_DEADLINE_S`.

        Raises:
            PushpullError: the scheduler did not answer, or refused.
        """
        request = scheduler_pb2.GetClusterStatusRequest()
        try:
            response: scheduler_pb2.GetClusterStatusResponse = await self._stub.GetClusterStatus(
                request, timeout=QUERY_DEADLINE_S
            )
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from failure
        return response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()


ServerAnswer = parameters_pb2.GetRangeStatsResponse | PushpullError
"""What a server said of its ranges, or why it said nothing."""


async def first_status(addresses: Sequence[str]) -> scheduler_pb2.GetClusterStatusResponse:
    """The status from the first scheduler of the list that answers.

    Blocking: up to `QUERY_DEADLINE_S` an address.

    Raises:
        InvalidConfig: the list is empty.
        Recovering: none answers; the message says why for each.
    """
    if not addresses:
        raise InvalidConfig(
            "no scheduler given: use --scheduler HOST:PORT or set PUSHPULL_SCHEDULER"
        )
    failures = []
    for address in addresses:
        try:
            async with SchedulerQuery(address) as query:
                return await query.status()
        except PushpullError as error:
            failures.append(f"{address}: {error.message}")
    raise Recovering("no scheduler answers; " + "; ".join(failures))


async def server_answers(
    response: scheduler_pb2.GetClusterStatusResponse,
) -> dict[int, ServerAnswer]:
    """What each living server says of its ranges, by node id; asked all at once."""
    servers = [
        status.node
        for status in response.nodes
        if status.node.role == types_pb2.NODE_ROLE_SERVER
        and status.node.state != types_pb2.NODE_STATE_LEFT
    ]
    answers = await asyncio.gather(*(_range_stats(server.address) for server in servers))
    return {server.node_id: answer for server, answer in zip(servers, answers, strict=True)}


async def _range_stats(address: str) -> ServerAnswer:
    async with aio_channel(address) as channel:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        request = parameters_pb2.GetRangeStatsRequest()
        try:
            response: parameters_pb2.GetRangeStatsResponse = await stub.GetRangeStats(
                request, timeout=QUERY_DEADLINE_S
            )
        except grpc.RpcError as failure:
            return from_rpc_error(failure)
        return response
