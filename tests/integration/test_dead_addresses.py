"""A server's address that somebody else has now: as dead as one where nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import pytest

import ps_worker as ps
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role
from ps_core.errors import Fenced, NotPermitted, PushpullError, WaitExpired
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, key_ranges
from ps_runtime.cluster.node_identity import AddressTaken
from ps_runtime.grpc.errors import abort
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_server.peers.peer_links import PeerLink
from ps_server.replication.peer_queues import PeerQueue
from ps_worker.spec.values import Region
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import TableSteps
from ps_worker.transport.links import LinkSetting, ServerLink, ServerLinks
from ps_worker.transport.pulls import Puller, PullOrder
from pushpull.v1 import parameters_pb2, replication_pb2, scheduler_pb2, types_pb2
from tests.integration.scheduler_calls import Running, with_scheduler
from tests.property.shard_twin import table

CLUSTER = "demo"
MODEL = table([64])
LEASE_S = 2.0
ONE, THREE = NodeId(1), NodeId(3)
WORKER = types_pb2.SessionIdentity(cluster_id=CLUSTER, node_id=9, incarnation=9)


def node(address: str, node_id: NodeId = ONE) -> Node:
    return Node(node_id, Incarnation(node_id * 10), Role.SERVER, 0, address, NodeState.ALIVE)


async def refuse(context: Any, error: PushpullError) -> None:
    """End the call; as a function that may return, for generators."""
    await abort(context, error)


class Heard:
    """What happens on the links."""

    def __init__(self) -> None:
        self.opened: asyncio.Queue[NodeId] = asyncio.Queue()
        self.failed: list[PushpullError] = []
        self.has_failed = asyncio.Event()

    def stream_opened(self, server: NodeId) -> None:
        self.opened.put_nowait(server)

    def stream_closed(self, server: NodeId) -> None:
        pass

    def replies(self, server: NodeId, response: parameters_pb2.PushResponse) -> None:
        pass

    def refused(self, error: PushpullError) -> None:
        self.failed.append(error)
        self.has_failed.set()

    @property
    def setting(self) -> LinkSetting:
        return LinkSetting(WORKER, "grpc", self.refused)


class Answering:
    """Serves what a server does, as if it were some node; counts who comes."""

    def __init__(self, node_id: int, cluster_id: str = CLUSTER, stream_port: int = 0) -> None:
        self.node_id, self.cluster_id, self.stream_port = node_id, cluster_id, stream_port
        self.refusal: PushpullError | None = None
        self.asked = asyncio.Event()
        self.asked_count = 0
        self.stream_count = 0

    async def open_session(self, _request: bytes, context: Any) -> bytes:
        self.asked_count += 1
        if self.asked_count > 2:
            self.asked.set()
        if self.refusal is not None:
            await abort(context, self.refusal)
        return parameters_pb2.OpenSessionResponse(
            node_id=self.node_id,
            incarnation=self.node_id * 10,
            cluster_id=self.cluster_id,
            stream_port=self.stream_port,
        ).SerializeToString()

    async def push_pull(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.stream_count += 1
        async for _ in requests:
            if self.refusal is not None:
                await abort(context, self.refusal)
            yield b""

    async def pull(self, _request: bytes, context: Any) -> AsyncIterator[bytes]:
        await refuse(context, NotPermitted("of another cluster's tables"))
        yield b""

    async def replicate(
        self, requests: AsyncIterator[bytes], _context: Any
    ) -> AsyncIterator[bytes]:
        async for _ in requests:
            self.asked_count += 1
            self.asked.set()
            yield replication_pb2.ReplicateResponse(node_id=self.node_id).SerializeToString()


class Garbled(Answering):
    """Answers what is no message."""

    async def open_session(self, request: bytes, context: Any) -> bytes:
        await super().open_session(request, context)
        return b"\xff\xff\xff"


@contextlib.asynccontextmanager
async def grpc_node(answering: Answering | None, port: int = 0) -> AsyncIterator[str]:
    """The address of a gRPC server; None serves no method."""
    server = grpc.aio.server()
    if answering is not None:
        parameters: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "OpenSession": grpc.unary_unary_rpc_method_handler(answering.open_session),
            "PushPull": grpc.stream_stream_rpc_method_handler(answering.push_pull),
            "Pull": grpc.unary_stream_rpc_method_handler(answering.pull),
        }
        replication: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Replicate": grpc.stream_stream_rpc_method_handler(answering.replicate)
        }
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("pushpull.v1.ParameterService", parameters),
                grpc.method_handlers_generic_handler("pushpull.v1.ReplicationService", replication),
            )
        )
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def tcp_node(answer: bytes) -> AsyncIterator[str]:
    """The address of something that says `answer` to whoever comes, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(24)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.contextmanager
def said_in_log(words: str) -> Iterator[asyncio.Event]:
    """Set when a line with these words is logged."""
    said = asyncio.Event()

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words in record.getMessage():
                said.set()

    logger, hearing = logging.getLogger(logs.LOGGER_NAME), Hearing()
    level = logger.level
    logger.addHandler(hearing)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.setLevel(level)
        logger.removeHandler(hearing)


TLS_ALERT = bytes((21, 3, 3, 0, 2, 2, 10))
HTTP_1 = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"
STRANGERS: dict[str, tuple[Callable[[], contextlib.AbstractAsyncContextManager[str]], str]] = {
    "no method": (lambda: grpc_node(None), "UNIMPLEMENTED"),
    "garbage": (lambda: tcp_node(bytes(range(256)) * 8), "UNAVAILABLE"),
    "tls": (lambda: tcp_node(TLS_ALERT), "UNAVAILABLE"),
    "http 1": (lambda: tcp_node(HTTP_1), "UNAVAILABLE"),
    "no message": (lambda: grpc_node(Garbled(0)), "no server answers there"),
    "an empty answer": (lambda: grpc_node(Answering(0, "")), "no server answers there"),
    "another node": (lambda: grpc_node(Answering(3)), "server 3 (incarnation 30) answers there"),
    "another cluster": (lambda: grpc_node(Answering(1, "other")), "of cluster 'other' answers"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_waited_out_and_named(kind: str) -> None:
    make, words = STRANGERS[kind]

    async def scenario() -> None:
        heard = Heard()
        async with make() as address:
            link = ServerLink(node(address), heard.setting)
            link.start_stream(1, heard)
            await link.ensure_session(1, 20.0, lambda link: words not in link.trouble.words)
            with pytest.raises(WaitExpired) as late:
                await link.ensure_session(1, 0.001, lambda _: True)
            await link.close()
        assert words in late.value.message
        assert f"server 1 at {address} cannot be reached" in late.value.message
        assert heard.failed == []

    asyncio.run(scenario())


def test_a_stranger_that_refuses_ends_nobody_and_the_server_is_found_when_it_is_back() -> None:
    """Another cluster's server says Fenced, or this client is refused before it is known by whom:
    whether it was replaced, the scheduler says.
    """

    async def scenario() -> None:
        heard, stranger = Heard(), Answering(1, "other")
        stranger.refusal = Fenced("the caller belongs to another cluster: register again")
        async with grpc_node(stranger) as address:
            link = ServerLink(node(address), heard.setting)
            link.start_stream(1, heard)
            await stranger.asked.wait()
            assert "register again" in link.trouble.words
        async with grpc_node(Answering(ONE), int(address.rpartition(":")[2])):
            assert await heard.opened.get() == ONE
            await link.close()
        assert heard.failed == []

    asyncio.run(scenario())


def test_a_server_that_proves_itself_ends_this_client_with_its_refusal() -> None:
    async def scenario() -> None:
        class Refusing(Answering):
            async def push_pull(
                self, requests: AsyncIterator[bytes], context: Any
            ) -> AsyncIterator[bytes]:
                await anext(aiter(requests))
                await refuse(context, NotPermitted("no"))
                yield b""

        heard = Heard()
        async with grpc_node(Refusing(ONE)) as address:
            link = ServerLink(node(address), heard.setting)
            link.start_stream(1, heard)
            await heard.has_failed.wait()
            await link.close()
        assert isinstance(heard.failed[0], NotPermitted)

    asyncio.run(scenario())


def test_a_worker_that_opens_a_table_at_a_dead_server_learns_that_its_run_was_ended() -> None:
    """It waited for the server, which others may have replaced, until request_deadline_s."""

    async def scenario(scheduler: Running) -> None:
        async with grpc_node(Answering(0)) as dead:
            server = await scheduler.join(Role.SERVER, address=dead)
            operator = await scheduler.join(Role.OPERATOR)

            def train() -> None:
                address = scheduler.node.address
                with ps.connect(address, run="night", world_size=1, request_deadline_s=9) as client:
                    client.create_table("model", 64, optimizer=ps.SGD(lr=1.0))

            training = asyncio.create_task(asyncio.to_thread(train))
            await scheduler.view_where(server, lambda view: bool(view.tables))
            ending = scheduler_pb2.EndRunRequest(session=operator, run="night")
            await scheduler.stub.EndRun(ending)
            with pytest.raises(Fenced, match="run 'night' was ended"):
                await training

    with_scheduler(scenario, server_count=1)


def test_a_server_at_the_address_of_one_before_has_the_only_stream() -> None:
    """Two links to it would be two streams of one session, and end each other's shared memory."""

    async def scenario() -> None:
        heard, answering = Heard(), Answering(THREE)
        async with grpc_node(answering) as address:
            nodes = (node(address, ONE), node(address, THREE))
            view = ClusterView(1, CLUSTER, 1, 1, nodes, (), ())
            links = ServerLinks(heard.setting, view)
            links.listener = heard
            links.update(view)
            assert await heard.opened.get() == THREE
            await answering.asked.wait()
            assert links.troubles()[0].endswith("server 3 (incarnation 30) answers there")
            await links.close()
        assert heard.opened.empty()
        assert answering.stream_count == 1

    asyncio.run(scenario())


def test_a_strangers_refusal_of_a_read_is_no_answer_to_it() -> None:
    async def scenario() -> None:
        async with grpc_node(Answering(THREE)) as address:
            link = ServerLink(node(address), Heard().setting)
            with pytest.raises(AddressTaken):
                await link.pull(parameters_pb2.PullRequest(), 5.0, print, is_small=False)
            await link.close()
        async with grpc_node(Answering(ONE)) as address:
            link = ServerLink(node(address), Heard().setting)
            with pytest.raises(NotPermitted):
                await link.pull(parameters_pb2.PullRequest(), 5.0, print, is_small=False)
            await link.close()

    asyncio.run(scenario())


def test_a_read_that_waits_names_the_server_that_it_waits_for() -> None:
    async def scenario() -> None:
        heard, stranger = Heard(), Answering(THREE)
        async with grpc_node(stranger) as address:
            (slots,) = key_ranges(1)
            part = RangeAssignment(RangeId(0), slots, AssignmentEpoch(2), ONE, (), ())
            view = ClusterView(1, CLUSTER, 1, 1, (node(address),), (part,), (MODEL,))
            links = ServerLinks(heard.setting, view)
            links.update(view)
            counters = Counters()
            puller = Puller(links, counters)
            raw = np.zeros(256, np.uint8)
            order = PullOrder(
                MODEL,
                Region(0, 64, (64,)),
                raw,
                0,
                False,
                True,
                now_s() + 0.5,
                cast(TableSteps, None),
            )
            with pytest.raises(WaitExpired) as late:
                await puller.pull(order)
            with pytest.raises(WaitExpired):  # as one attempt of a reader's consistent pull
                await puller.pull_at(replace(order, deadline_s=now_s() + 0.5))
            await links.close()
        assert not counters.waits
        named = f"server 1 at {address} cannot be reached"
        assert late.value.message.startswith(f"a pull of table 'model' took too long: {named}")
        assert late.value.message.endswith("server 3 (incarnation 30) answers there")

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_at_the_stream_port_is_done_without(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, _ = STRANGERS[kind]

    async def scenario() -> None:
        heard = Heard()
        async with make() as strange:
            port = int(strange.rpartition(":")[2])
            async with grpc_node(Answering(ONE, stream_port=port)) as address:
                link = ServerLink(node(address), heard.setting)
                link.start_stream(1, heard)
                assert await heard.opened.get() == ONE
                await link.close()
        assert heard.failed == []

    asyncio.run(scenario())
    assert "stream_port_not_used" in caplog.text


class Offering(Answering):
    """Offers a Unix socket."""

    socket_name = ""

    async def open_session(self, request: bytes, context: Any) -> bytes:
        raw = await super().open_session(request, context)
        response = parameters_pb2.OpenSessionResponse.FromString(raw)
        response.same_host.socket_name = self.socket_name
        return response.SerializeToString()


@pytest.mark.parametrize("role", ["worker", "reader"])
def test_a_unix_socket_that_takes_no_more_for_a_moment_is_tried_again(role: str) -> None:
    """Lane 'shm': all clients come at once, and the server accepts one after the other."""

    async def scenario() -> None:
        heard, offering = Heard(), Offering(ONE)
        offering.socket_name = f"pushpull-test-{os.urandom(8).hex()}"
        kind = socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        with socket.socket(*kind) as listener, socket.socket(*kind) as other:
            listener.bind(f"\0{offering.socket_name}")
            listener.listen(0)
            other.connect(f"\0{offering.socket_name}")
            async with grpc_node(offering) as address:
                link = ServerLink(node(address), replace(heard.setting, lane="shm"))
                ends: set[asyncio.Task[Any]] = {
                    asyncio.create_task(each.wait()) for each in (heard.has_failed, offering.asked)
                }
                if role == "worker":
                    link.start_stream(1, heard)
                else:
                    meeting = link.ensure_session(1, 20.0, lambda _: True)
                    ends.add(asyncio.create_task(meeting))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                assert heard.failed == []
                assert offering.asked.is_set(), "it goes on without shared memory"
                assert "cannot share memory with this process" in link.trouble.words
                await link.close()
                for end in ends:
                    end.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_at_a_peers_address_hears_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, _ = STRANGERS[kind]

    class Peer:
        def peer_opened(self, peer: NodeId) -> None:
            raise AssertionError(peer)

        def peer_said(self, peer: NodeId, response: object) -> None:
            raise AssertionError(peer, response)

    async def scenario() -> None:
        async with make() as address:
            queue: PeerQueue[bytes] = PeerQueue()
            link = PeerLink(node(address), WORKER, Peer(), queue, LEASE_S)
            with said_in_log("peer_unreachable") as said:
                link.send(())
                async with asyncio.timeout(10):
                    await said.wait()
            assert not queue.is_open
            await link.close()

    asyncio.run(scenario())
    assert "peer_link_failed" not in caplog.text


class Taking(Answering):
    """Takes what another server sends."""

    async def replicate(
        self, requests: AsyncIterator[bytes], _context: Any
    ) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield replication_pb2.ReplicateResponse(
                node_id=self.node_id, incarnation=self.node_id * 10
            ).SerializeToString()


@pytest.mark.parametrize("what", ["a message", "a beat"])
def test_a_message_that_cannot_be_written_is_said_in_the_log(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours: the stream is opened again, and its reader alone would not say why."""

    class Peer:
        link: PeerLink

        def peer_opened(self, peer: NodeId) -> None:
            del peer
            broken = cast(bytes, "no bytes")
            if what == "a beat":
                self.link.send_beat(broken)
            else:
                self.link.send((broken,))

        def peer_said(self, peer: NodeId, response: object) -> None: ...

    async def scenario() -> None:
        peer = Peer()
        async with grpc_node(Taking(ONE)) as address:
            link = peer.link = PeerLink(node(address), WORKER, peer, PeerQueue(), LEASE_S)
            with said_in_log("peer_unreachable") as said:
                link.begin()
                async with asyncio.timeout(10):
                    await said.wait()
            await link.close()

    asyncio.run(scenario())
    assert "peer_link_failed" in caplog.text
    assert "TypeError" in caplog.text


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (NotPermitted("no beats of yours"), "no beats of yours"),
        (None, "the peer ended the stream of beats"),
    ],
)
def test_a_stream_of_beats_that_ends_says_why(
    refusal: PushpullError | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream beside it, which ends with it, knows only that it was cancelled."""

    class WithoutBeats(Answering):
        async def replicate(
            self, requests: AsyncIterator[bytes], context: Any
        ) -> AsyncIterator[bytes]:
            self.stream_count += 1
            is_of_beats = self.stream_count == 2
            await anext(aiter(requests))
            yield replication_pb2.ReplicateResponse(
                node_id=self.node_id, incarnation=self.node_id * 10
            ).SerializeToString()
            async for _ in requests:
                if is_of_beats and refusal is not None:
                    await refuse(context, refusal)
                if is_of_beats:
                    return

    class Peer:
        link: PeerLink

        def peer_opened(self, peer: NodeId) -> None:
            del peer
            self.link.send_beat(b"a beat")

        def peer_said(self, peer: NodeId, response: object) -> None: ...

    async def scenario() -> None:
        peer = Peer()
        async with grpc_node(WithoutBeats(ONE)) as address:
            link = peer.link = PeerLink(node(address), WORKER, peer, PeerQueue(), LEASE_S)
            with said_in_log("peer_unreachable") as has_said:
                link.begin()
                async with asyncio.timeout(10):
                    await has_said.wait()
            await link.close()

    asyncio.run(scenario())
    (line,) = (r.getMessage() for r in caplog.records if "peer_unreachable" in r.getMessage())
    assert said in line
    assert "peer_link_failed" not in caplog.text


class Deaf(Answering):
    """Greets whoever comes, and answers a beat for each time that `due` is released."""

    def __init__(self, node_id: int) -> None:
        super().__init__(node_id)
        self.due = asyncio.Semaphore(0)
        self.has_two_more = asyncio.Event()
        self.connections: list[str] = []  # of the streams

    async def replicate(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.connections.append(context.peer())
        self.stream_count += 1
        if self.stream_count == 4:
            self.has_two_more.set()
        greeting = replication_pb2.ReplicateResponse(
            node_id=self.node_id, incarnation=self.node_id * 10
        )
        await anext(aiter(requests))
        yield greeting.SerializeToString()
        async for _ in requests:
            self.asked_count += 1
            self.asked.set()
            await self.due.acquire()
            yield greeting.SerializeToString()


class Hearing:
    """The listener of a link."""

    def __init__(self) -> None:
        self.is_open, self.has_heard = asyncio.Event(), asyncio.Event()

    def peer_opened(self, peer: NodeId) -> None:
        assert peer == ONE
        self.is_open.set()

    def peer_said(self, peer: NodeId, response: object) -> None:
        del peer, response
        self.has_heard.set()


async def written(deaf: Deaf, link: PeerLink) -> None:
    """Send a beat, and wait until it has come."""
    before = deaf.asked_count
    link.send_beat(b"a beat")
    while deaf.asked_count == before:
        deaf.asked.clear()
        await deaf.asked.wait()


@contextlib.asynccontextmanager
async def looked_at() -> AsyncIterator[tuple[Deaf, Hearing, PeerLink]]:
    """A peer, and an open link to it that was looked at at 1,000 s."""
    deaf, hearing = Deaf(ONE), Hearing()
    async with grpc_node(deaf) as address:
        link = PeerLink(node(address), WORKER, hearing, PeerQueue(), LEASE_S)
        link.begin()
        await hearing.is_open.wait()
        link.look(1_000.0)
        yield deaf, hearing, link
        await link.close()


def test_a_peer_that_answers_no_beat_is_connected_to_anew() -> None:
    """Its connection may have been cut: TCP and keepalives notice that after half a minute."""

    async def scenario() -> None:
        async with looked_at() as (deaf, _, link):
            await written(deaf, link)
            with said_in_log("it has not answered for 10 s") as said:
                for tick in range(1, 40):
                    link.look(1_000.0 + tick * LEASE_S / 10)
                link.look(2_000.0)  # this process was paused: it may not have read the answer
                assert not said.is_set()
                for tick in range(1, 13):
                    link.look(2_000.0 + tick * LEASE_S / 10)
                await said.wait()
            await deaf.has_two_more.wait()
            assert not {*deaf.connections[:2]} & {*deaf.connections[2:]}

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_peer_that_answers_late_is_not() -> None:
    async def scenario() -> None:
        async with looked_at() as (deaf, hearing, link):
            for beat in range(4):
                hearing.has_heard.clear()
                await written(deaf, link)
                for tick in range(30):
                    link.look(1_000.0 + (beat * 30 + tick) * LEASE_S / 10)
                deaf.due.release()
                await hearing.has_heard.wait()
            assert deaf.stream_count == 2

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.thorough
def test_a_peer_that_does_not_greet_is_connected_to_anew() -> None:
    async def scenario() -> None:
        class Mute(Answering):
            async def replicate(
                self, requests: AsyncIterator[bytes], _context: Any
            ) -> AsyncIterator[bytes]:
                self.stream_count += 1
                if self.stream_count == 2:
                    self.asked.set()
                async for _ in requests:
                    pass
                yield b""

        mute = Mute(ONE)
        async with grpc_node(mute) as address:
            link = PeerLink(node(address), WORKER, Hearing(), PeerQueue(), lease_s=0.1)
            with said_in_log("it has not answered for 3 s") as said:
                link.begin()
                await said.wait()
            await mute.asked.wait()
            await link.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
