"""A client's pulls from one server: how long each may take, and how many are open at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from grpc import stream_stream_rpc_method_handler as both_streams
from grpc import unary_stream_rpc_method_handler as answer_stream
from grpc import unary_unary_rpc_method_handler as unary

from ps_core import limits
from ps_core.errors import Recovering, WaitExpired
from ps_runtime.cluster.node_identity import AddressTaken
from ps_runtime.http2.server import StreamServer
from ps_worker.transport.links import PULL_CALL_COUNT, Answer, ServerLink
from pushpull.v1 import parameters_pb2
from tests.integration.test_dead_addresses import ONE, Answering, Heard, grpc_node, node, refuse

SILENCE_S = 0.8
BLOCKS = 4


async def passed(wait_s: float) -> None:
    """Time that a server takes."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=wait_s)


def block(number: int) -> bytes:
    value = parameters_pb2.BlockValue(block=number, payload=b"1234")
    return parameters_pb2.PullResponse(block=value).SerializeToString()


class Slow(Answering):
    """Sends a block from time to time, and after the last perhaps nothing more, for ever."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__(ONE)
        self.ends = ends
        self.was_left = asyncio.Event()

    async def pull(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for number in range(BLOCKS):
            await passed(SILENCE_S / 3)
            yield block(number)
        try:
            if not self.ends:
                await asyncio.Event().wait()
        finally:
            self.was_left.set()


@contextlib.asynccontextmanager
async def stream_port(answering: Answering) -> AsyncIterator[None]:
    """Serve it on a stream port, too."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "OpenSession": unary(cast(Any, answering.open_session), bytes, bytes),
        "PushPull": both_streams(cast(Any, answering.push_pull), bytes, bytes),
        "Pull": answer_stream(cast(Any, answering.pull), bytes, bytes),
    }
    server = await StreamServer.start("127.0.0.1:0", {"pushpull.v1.ParameterService": handlers})
    answering.stream_port = server.port
    try:
        yield
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def linked(answering: Answering, **more: Any) -> AsyncIterator[ServerLink]:
    """A reader's link to it."""
    async with grpc_node(answering) as address:
        link = ServerLink(node(address), replace(Heard().setting, **more))
        yield link
        await link.close()


def test_an_answer_may_take_as_long_as_the_caller_waits_if_its_parts_come() -> None:
    async def scenario() -> None:
        taken: list[Answer] = []
        async with linked(Slow(ends=True), silence_s=SILENCE_S) as link:
            request = parameters_pb2.PullRequest(deadline_ms=1)
            await link.pull(request, 20.0, taken.append, is_small=False)
        assert len(taken) == BLOCKS

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_server_that_falls_silent_in_its_answer_is_given_up() -> None:
    """It may be paused: its caller then says which server it waits for, and asks again."""

    async def scenario() -> None:
        slow, taken = Slow(ends=False), list[Answer]()
        async with linked(slow, silence_s=SILENCE_S) as link:
            request = parameters_pb2.PullRequest(deadline_ms=1)
            with pytest.raises(WaitExpired, match=r"nothing of an answer came for 0\.8 s"):
                await link.pull(request, 20.0, taken.append, is_small=False)
            await slow.was_left.wait()
        assert len(taken) == BLOCKS

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Parking(Answering):
    """Answers pulls by their own calls when it is told to."""

    def __init__(self) -> None:
        super().__init__(ONE)
        self.begun: list[int] = []
        self.open_count = self.most_count = 0
        self.is_full, self.goes_on = asyncio.Event(), asyncio.Event()

    async def pull(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        number = parameters_pb2.PullRequest.FromString(request).table_id
        self.begun.append(number)
        self.open_count += 1
        self.most_count = max(self.most_count, self.open_count)
        if self.open_count == PULL_CALL_COUNT:
            self.is_full.set()
        await self.goes_on.wait()
        self.open_count -= 1
        yield block(number)


def test_more_pulls_than_a_server_takes_wait_for_their_turn_and_the_push_stream_does_not() -> None:
    async def scenario() -> None:
        parking, heard = Parking(), Heard()
        count = 2 * PULL_CALL_COUNT
        async with stream_port(parking), linked(parking) as link:
            await link.ensure_session(1, 20.0, lambda _: True)
            pulls = [
                link.pull(
                    parameters_pb2.PullRequest(table_id=number, deadline_ms=10_000),
                    20.0,
                    lambda _: None,
                    is_small=False,
                )
                for number in range(count)
            ]
            pulling: asyncio.Future[Any] = asyncio.gather(*pulls)
            filling: asyncio.Future[Any] = asyncio.ensure_future(parking.is_full.wait())
            await asyncio.wait({pulling, filling}, return_when=asyncio.FIRST_COMPLETED)
            link.start_stream(1, heard)
            assert await heard.opened.get() == ONE
            assert link.trouble.words == ""
            parking.goes_on.set()
            await pulling
        assert parking.begun == list(range(count))
        assert parking.most_count == PULL_CALL_COUNT

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_pull_that_never_gets_its_turn_says_so() -> None:
    async def scenario() -> None:
        parking = Parking()
        async with linked(parking) as link:
            request = parameters_pb2.PullRequest(deadline_ms=10_000)
            earlier = [
                asyncio.create_task(link.pull(request, 20.0, lambda _: None, is_small=False))
                for _ in range(PULL_CALL_COUNT)
            ]
            await parking.is_full.wait()
            with pytest.raises(WaitExpired, match="earlier pulls of this process were not ans"):
                await link.pull(request, 0.05, lambda _: None, is_small=False)
            parking.goes_on.set()
            await asyncio.gather(*earlier)

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Bounded(Answering):
    """Answers numbered pulls once the most that it takes are open, or the last is."""

    def __init__(self, count: int) -> None:
        super().__init__(ONE)
        self.count, self.most_count = count, 0
        self.asked_for: list[int] = []

    async def push_pull(
        self, requests: AsyncIterator[bytes], _context: Any
    ) -> AsyncIterator[bytes]:
        unanswered: deque[int] = deque()
        async for raw in requests:
            request = parameters_pb2.PushPullRequest.FromString(raw)
            for field, pull in (("pull", request.pull), ("then_pull", request.then_pull)):
                if request.HasField(field):
                    unanswered.append(pull.read_number)
                    self.asked_for.append(pull.table_id)
            self.most_count = max(self.most_count, len(unanswered))
            while len(unanswered) >= limits.MAX_STREAM_READ_COUNT or (
                unanswered and len(self.asked_for) == self.count
            ):
                answer = parameters_pb2.PushPullResponse(
                    read_number=unanswered.popleft(), end=parameters_pb2.PullEnd()
                )
                yield answer.SerializeToString()


def test_more_small_pulls_than_a_push_stream_takes_wait_for_their_turn() -> None:
    """Beyond so many the server refuses: each of those would come half a second later."""

    async def scenario() -> None:
        count = limits.MAX_STREAM_READ_COUNT + 100
        bounded, heard = Bounded(count), Heard()
        async with linked(bounded) as link:
            link.start_stream(1, heard)
            await heard.opened.get()
            requests = [parameters_pb2.PullRequest(table_id=number) for number in range(count)]
            pulls = [link.pull(each, 20.0, lambda _: None, is_small=True) for each in requests]
            await asyncio.gather(*pulls)
        assert bounded.asked_for == list(range(count))
        assert bounded.most_count <= limits.MAX_STREAM_READ_COUNT

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_pull_given_up_while_its_request_waits_for_the_socket_leaves_no_stream_open() -> None:
    """Else the connection takes no more calls after a hundred, for as long as pulls may last."""

    async def scenario() -> None:
        parking = Parking()
        async with stream_port(parking), linked(parking, silence_s=0.05) as link:
            await link.ensure_session(1, 20.0, lambda _: True)
            channel = link._calls._streams
            assert channel is not None
            channel._transport.pause_writing()  # as asyncio does when pushes fill the socket
            request = parameters_pb2.PullRequest(deadline_ms=1)
            with pytest.raises(WaitExpired, match="nothing of an answer came"):
                await link.pull(request, 20.0, lambda _: None, is_small=False)
            assert not channel._transport.connection.streams
            channel._transport.resume_writing()
            parking.goes_on.set()
            await link.pull(request, 20.0, lambda _: None, is_small=False)

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Recovered(Answering):
    """Refuses its first pull; replies to what comes on a push stream."""

    has_refused = False

    async def pull(self, _request: bytes, context: Any) -> AsyncIterator[bytes]:
        if not self.has_refused:
            self.has_refused = True
            await refuse(context, Recovering("it is busy"))
        yield block(0)

    async def push_pull(
        self, requests: AsyncIterator[bytes], _context: Any
    ) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        async for _ in requests:
            replies = parameters_pb2.PushResponse()
            yield parameters_pb2.PushPullResponse(replies=replies).SerializeToString()


class Told(Heard):
    """Notes that replies came."""

    def __init__(self) -> None:
        super().__init__()
        self.replied = asyncio.Event()

    def replies(self, server: object, response: parameters_pb2.PushResponse) -> None:
        del server, response
        self.replied.set()


@pytest.mark.parametrize("answer", ["a pull", "a reply to an entry"])
def test_an_answer_ends_the_trouble_of_a_pull_that_failed(answer: str) -> None:
    """Else the server is blamed for later waits, which other workers cause."""

    async def scenario() -> None:
        told = Told()
        async with linked(Recovered(ONE)) as link:
            if answer != "a pull":
                link.start_stream(1, told)
                await told.opened.get()
            pull = parameters_pb2.PullRequest(deadline_ms=10_000)
            with pytest.raises(Recovering):
                await link.pull(pull, 20.0, lambda _: None, is_small=False)
            assert "cannot be reached" in link.trouble.words
            if answer == "a pull":
                await link.pull(pull, 20.0, lambda _: None, is_small=False)
            else:
                link.send(parameters_pb2.Seal())
                await told.replied.wait()
            assert link.trouble.words == ""

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_an_answer_does_not_prove_that_an_address_is_the_server_s_again() -> None:
    async def scenario() -> None:
        recovered = Recovered(ONE)
        recovered.has_refused = True
        async with linked(recovered) as link:
            link.trouble.note(AddressTaken("server 3 answers there"))
            pull = parameters_pb2.PullRequest(deadline_ms=10_000)
            await link.pull(pull, 20.0, lambda _: None, is_small=False)
            assert "server 3 answers there" in link.trouble.words
            await link.ensure_session(1, 20.0, lambda _: True)
            assert link.trouble.words == ""

    asyncio.run(asyncio.wait_for(scenario(), 20))
