"""A node's server over real sockets: its calls, its errors, its health, its end."""

# ruff: noqa: N802 - the methods of a servicer are named by the contract

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ps_core import errors as tree
from ps_core.limits import MAX_MESSAGE_BYTES
from ps_runtime.grpc import channels
from ps_runtime.grpc.errors import RETRY_METADATA_KEY, STATUS, from_rpc_error, translated
from ps_runtime.grpc.node_server import READINESS, NodeServer, Service
from ps_runtime.observe.metrics import new_registry
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc

SERVICE = "pushpull.v1.ParameterService"
PREFIX = f"/{SERVICE}/"
REFLECTION_REQUEST: Any = reflection_pb2.ServerReflectionRequest
Work = Callable[[NodeServer, Any], Awaitable[None]]
"""What a test does with a node and a channel to it; untyped, for raw bytes go over it."""


class FailingServicer(parameters_pb2_grpc.ParameterServiceServicer):
    """Fails as it is told to, and parks calls until it is told to answer."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.parked_count = 0
        self.all_parked = asyncio.Event()
        self.expected_count = 1
        self.release = asyncio.Event()

    @translated
    async def OpenSession(self, _request: Any, _context: Any) -> parameters_pb2.OpenSessionResponse:
        if self.failure is not None:
            raise self.failure
        return parameters_pb2.OpenSessionResponse(node_id=7)

    @translated
    async def Pull(
        self, _request: parameters_pb2.PullRequest, _context: Any
    ) -> AsyncIterator[parameters_pb2.PullResponse]:
        yield parameters_pb2.PullResponse()
        if self.failure is not None:
            raise self.failure

    @translated
    async def Push(
        self, request_iterator: AsyncIterator[parameters_pb2.PushRequest], _context: Any
    ) -> AsyncIterator[parameters_pb2.PushResponse]:
        async for _ in request_iterator:
            yield parameters_pb2.PushResponse()

    @translated
    async def GetRangeStats(
        self, _request: Any, _context: Any
    ) -> parameters_pb2.GetRangeStatsResponse:
        self.parked_count += 1
        if self.parked_count == self.expected_count:
            self.all_parked.set()
        await self.release.wait()
        return parameters_pb2.GetRangeStatsResponse(gate_bytes=self.parked_count)


def run(main: Awaitable[None]) -> None:
    channels.run(_with_deadline(main))


async def _with_deadline(main: Awaitable[None]) -> None:
    await asyncio.wait_for(main, 30.0)


def serving(servicer: FailingServicer) -> list[Service]:
    def add(server: grpc.aio.Server) -> None:
        parameters_pb2_grpc.add_ParameterServiceServicer_to_server(servicer, server)

    return [(SERVICE, add)]


async def with_node(servicer: FailingServicer, work: Work) -> None:
    node = await NodeServer.start(services=serving(servicer), registry=new_registry())
    try:
        async with channels.aio_channel(node.address) as channel:
            await work(node, channel)
    finally:
        await node.stop(0.0)


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await exhausted(call)
    return caught.value


async def exhausted(call: Any) -> None:
    if not hasattr(call, "__aiter__"):
        await call
        return
    async for _ in call:
        pass


@pytest.mark.parametrize("kind", tree.CATALOGUE.values())
def test_an_error_reaches_the_client_as_itself(
    kind: type[tree.PushpullError], caplog: pytest.LogCaptureFixture
) -> None:
    """And the node's log if it is a bug: INTERNAL."""

    async def work(node: NodeServer, channel: Any) -> None:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        request = parameters_pb2.OpenSessionRequest()
        failure = await failure_of(stub.OpenSession(request, timeout=10))
        error = from_rpc_error(failure)
        assert failure.code() is STATUS[kind.code]
        assert failure.details() == "came: ü\nexpected: u"
        assert dict(failure.trailing_metadata())[RETRY_METADATA_KEY] == "250"
        assert type(error) is kind
        assert (error.message, error.clock) == ("came: ü\nexpected: u", 3)

    servicer = kind("came: ü\nexpected: u", retry_after_ms=250, clock=3)
    with caplog.at_level(logging.ERROR, logger="pushpull"):
        run(with_servicer(servicer, work))
    assert len(caplog.records) == (kind is tree.Internal)


async def with_servicer(failure: Exception | None, work: Work) -> None:
    await with_node(FailingServicer(failure), work)


def test_a_bug_is_internal_and_logged_but_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        for call in (
            stub.OpenSession(parameters_pb2.OpenSessionRequest(), timeout=10),
            stub.Pull(parameters_pb2.PullRequest(), timeout=10),
        ):
            failure = await failure_of(call)
            assert failure.code() is grpc.StatusCode.INTERNAL
            assert "ZeroDivisionError" in (failure.details() or "")
            assert "secret" not in (failure.details() or "")
            assert type(from_rpc_error(failure)) is tree.Internal

    with caplog.at_level(logging.ERROR, logger="pushpull"):
        run(with_servicer(ZeroDivisionError("secret"), work))
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_a_stream_that_fails_late_keeps_what_it_sent() -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        call = stub.Pull(parameters_pb2.PullRequest(), timeout=10)
        assert isinstance(await call.read(), parameters_pb2.PullResponse)
        assert type(from_rpc_error(await failure_of(call.read()))) is tree.StaleAssignment

    run(with_servicer(tree.StaleAssignment("epoch is 3; expected 4"), work))


def test_bytes_that_do_not_parse_are_refused_and_never_unknown() -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        garbage = b"\xff\xff\xff"

        async def garbage_stream() -> AsyncIterator[bytes]:
            yield garbage

        for call in (
            channel.unary_unary(PREFIX + "OpenSession")(garbage, timeout=10),
            channel.unary_stream(PREFIX + "Pull")(garbage, timeout=10),
            channel.stream_stream(PREFIX + "Push")(garbage_stream(), timeout=10),
            channel.unary_unary("/grpc.health.v1.Health/Check")(garbage, timeout=10),
            channel.unary_stream("/grpc.health.v1.Health/Watch")(garbage, timeout=10),
        ):
            failure = await failure_of(call)
            assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert type(from_rpc_error(failure)) is tree.InvalidTensor
            assert "does not parse" in (failure.details() or "")
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        answer = await stub.OpenSession(parameters_pb2.OpenSessionRequest(), timeout=10)
        assert answer.node_id == 7

    run(with_servicer(None, work))


def test_a_message_over_the_limit_is_refused_on_either_side() -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        request = b"x" * (MAX_MESSAGE_BYTES + 1)
        ours = await failure_of(channel.unary_unary(PREFIX + "OpenSession")(request, timeout=10))
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(
            node.address, options=options
        ) as channel_without_limit:
            foreign: Any = channel_without_limit
            theirs = await failure_of(
                foreign.unary_unary(PREFIX + "OpenSession")(request, timeout=10)
            )
        for failure in (ours, theirs):
            error = from_rpc_error(failure)
            assert type(error) is tree.InvalidTensor
            assert str(MAX_MESSAGE_BYTES) in error.message

    run(with_servicer(None, work))


def test_a_call_that_nobody_serves_says_that_the_address_is_wrong() -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        failure = await failure_of(
            channel.unary_unary("/pushpull.v1.SchedulerService/Heartbeat")(b"", timeout=10)
        )
        assert type(from_rpc_error(failure)) is tree.InvalidConfig

    run(with_servicer(None, work))


def test_a_node_that_serves_may_be_unready() -> None:
    """A server that is brought up to date answers, and should not be relied on alone."""

    async def work(node: NodeServer, channel: Any) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def told() -> list[int]:
            await asyncio.gather(*node._updates)
            return [
                (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status
                for name in ("", READINESS)
            ]

        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        node.set_unready("3 ranges are being brought up to date here")
        assert await told() == [not_serving, not_serving]
        assert node.why_unready == "not serving"
        node.set_serving(True)
        assert await told() == [serving, not_serving]
        assert node.why_unready == "3 ranges are being brought up to date here"
        node.set_unready("1 ranges are being brought up to date here")
        assert node.why_unready.startswith("1 ranges")
        node.set_unready("")
        assert await told() == [serving, serving]
        node.set_serving(False)
        assert await told() == [not_serving, not_serving]

    run(with_servicer(None, work))


def test_health_follows_set_serving() -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        states = health_pb2.HealthCheckResponse
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert (await watch.read()).status == states.NOT_SERVING
        node.set_serving(True)
        assert (await watch.read()).status == states.SERVING
        for name in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=name)
            assert (await stub.Check(request, timeout=10)).status == states.SERVING
        node.set_serving(False)
        assert (await watch.read()).status == states.NOT_SERVING
        watch.cancel()
        request = health_pb2.HealthCheckRequest(service="no.such.Service")
        failure = await failure_of(stub.Check(request, timeout=10))
        assert failure.code() is grpc.StatusCode.NOT_FOUND

    run(with_servicer(None, work))


def test_reflection_lists_the_services_and_describes_them() -> None:
    async def work(node: NodeServer, channel: Any) -> None:
        untyped: Any = channel  # the stubs of the package know synchronous channels only
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(untyped)
        asks = [
            REFLECTION_REQUEST(list_services=""),
            REFLECTION_REQUEST(file_containing_symbol=SERVICE),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asks), timeout=10)]
        names = {service.name for service in answers[0].list_services_response.service}
        assert names == {
            SERVICE,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert answers[1].file_descriptor_response.file_descriptor_proto

    run(with_servicer(None, work))


def test_parked_calls_hold_no_thread() -> None:
    async def main() -> None:
        servicer = FailingServicer()
        servicer.expected_count = 200

        async def work(node: NodeServer, channel: Any) -> None:
            stub = parameters_pb2_grpc.ParameterServiceStub(channel)
            request = parameters_pb2.GetRangeStatsRequest()
            before_count = threading.active_count()
            calls = [stub.GetRangeStats(request, timeout=20) for _ in range(200)]
            gathered = asyncio.gather(*calls)
            await servicer.all_parked.wait()
            assert threading.active_count() == before_count
            servicer.release.set()
            assert all(answer.gate_bytes == 200 for answer in await gathered)

        await with_node(servicer, work)

    run(main())


def test_stop_lets_calls_finish_within_the_grace() -> None:
    async def main() -> None:
        servicer = FailingServicer()
        node = await NodeServer.start(services=serving(servicer), registry=new_registry())
        async with channels.aio_channel(node.address) as channel:
            stub = parameters_pb2_grpc.ParameterServiceStub(channel)
            call = stub.GetRangeStats(parameters_pb2.GetRangeStatsRequest(), timeout=20)
            await servicer.all_parked.wait()
            watch = cast(Any, health_pb2_grpc.HealthStub(channel)).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=20
            )
            node.set_serving(True)
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            stopping = asyncio.create_task(node.stop(20.0))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not node.is_serving
            watch.cancel()
            servicer.release.set()
            assert (await call).gate_bytes == 1
            await stopping
            await node.stop(20.0)  # a second time does nothing

    run(main())


def test_stop_cuts_calls_that_outlast_the_grace_and_a_retry_is_asked_for() -> None:
    async def main() -> None:
        servicer = FailingServicer()
        node = await NodeServer.start(services=serving(servicer), registry=new_registry())
        async with channels.aio_channel(node.address) as channel:
            stub = parameters_pb2_grpc.ParameterServiceStub(channel)
            request = parameters_pb2.GetRangeStatsRequest()
            call = stub.GetRangeStats(request, timeout=20)
            await servicer.all_parked.wait()
            await node.stop(0.0)
            assert type(from_rpc_error(await failure_of(call))) is tree.Recovering
            later = stub.GetRangeStats(request, timeout=20)
            assert type(from_rpc_error(await failure_of(later))) is tree.Recovering

    run(main())


@pytest.mark.parametrize("setting", ["listen", "http_listen"])
def test_an_address_in_use_is_named(setting: str) -> None:
    async def main() -> None:
        first = await NodeServer.start(registry=new_registry())
        taken = {"listen": first.address, "http_listen": first.http_address}[setting]
        settings: dict[str, Any] = {setting: taken, "registry": new_registry()}
        try:
            with pytest.raises(tree.InvalidConfig, match=f"^{setting} is '{taken}', which cannot"):
                await NodeServer.start(**settings)
        finally:
            await first.stop(0.0)

    run(main())


def test_run_uses_the_tuned_loop_and_allocator() -> None:
    seen: list[str] = []

    async def main() -> None:
        seen.append(type(asyncio.get_running_loop()).__module__)

    run(main())
    assert seen == ["uvloop"]
    assert channels.tune_allocator()
