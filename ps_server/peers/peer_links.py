"""Streams to the servers that back up this one's ranges, or are about to.

The first message opens a stream, which is kept, and opened again when it breaks. Messages on their
way are lost with it, and so are messages that are sent while there is none: the sender of records
sends them again until they are acknowledged.

Beats have a stream of their own, which opens and ends with the other: a grant must not wait for the
values before its beat, which a backup may take seconds to take in. A server that answers none for
five leases is not reached, though its connection may stand for long after a network was cut: it is
connected to anew, and so is one that does not greet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import grpc
import grpc.aio

from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.errors import Internal, PushpullError, Recovering, WaitExpired
from ps_core.keys import NodeId
from ps_runtime.cluster.node_identity import AddressTaken, as_of_unknown, check_answers
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.grpc.errors import from_rpc_error
from ps_runtime.grpc.retry import Backoff, is_retryable
from ps_runtime.http2.protocol.streams import MessagePiece
from ps_runtime.http2.stream_port import GrpcioCall, ServerCall, StreamPort
from ps_runtime.observe import logs
from ps_server.replication.peer_queues import PeerQueue, PeerQueues
from ps_server.wire.replication_wire import greeting_from
from pushpull.v1 import replication_pb2, types_pb2

REPLICATE = "/pushpull.v1.ReplicationService/Replicate"

_LAST_BACKOFF_S = 0.5
"""A peer that is back is found again within this time."""

_SILENT_LEASES = 5
_LEAST_SILENT_S = 3.0
"""Wait for the answer to a beat, or for a greeting, however short a lease is."""

_GREETING_S = 2.0
"""A stream port may take so long to answer when the gRPC port has answered."""


class PeerListener(Protocol):
    """Receives the events of peers' streams."""

    def peer_opened(self, peer: NodeId) -> None:
        """Messages that were sent before may be lost."""

    def peer_said(self, peer: NodeId, response: MessagePiece) -> None: ...


class PeerLink:
    """The stream to one server."""

    def __init__(
        self,
        node: Node,
        identity: types_pb2.SessionIdentity,
        listener: PeerListener,
        queue: PeerQueue[bytes],
        lease_s: float,
    ) -> None:
        self.node = node
        self._lease_s = lease_s
        self._silent_s = max(_SILENT_LEASES * lease_s, _LEAST_SILENT_S)
        self._queue = queue
        self._identity = identity
        self._listener = listener
        self._channel = aio_channel(node.address)
        self._stream_port = StreamPort(node)
        self._is_asked = False  # a beat is unanswered
        self._unanswered_s = 0.0
        self._looked_s = 0.0
        self._is_silent = False
        self._news = asyncio.Event()
        self._beat: bytes | None = None
        self._beat_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._call: ServerCall | None = None
        self._is_troubled = False

    def begin(self) -> None:
        """Open the stream and keep it. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, messages: Iterable[bytes]) -> None:
        """Queue messages; they are lost if there is no stream, or it breaks."""
        self.begin()
        for message in messages:
            self._queue.put(message, len(message))
        self._news.set()

    def send_beat(self, message: bytes) -> None:
        """As `send`, in place of a beat that was not written yet."""
        self.begin()
        if self._queue.is_open:
            self._beat = message
            self._beat_news.set()

    def look(self, now_s: float) -> None:
        """Connect anew if the server is silent; to be called at least ten times a lease."""
        passed_s = min(now_s - self._looked_s, self._lease_s)  # more: this process was paused
        self._looked_s = now_s
        self._unanswered_s = self._unanswered_s + passed_s if self._is_asked else 0.0
        if self._unanswered_s > self._silent_s:
            self._is_asked, self._is_silent = False, True
            self.reset()

    def reset(self) -> None:
        """Drop the stream with the messages that it has taken, and those that wait."""
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _keep(self) -> None:
        backoff = Backoff(last_bound_s=_LAST_BACKOFF_S)
        while True:
            error: PushpullError = Recovering("the stream ended")
            try:
                await self._run(backoff)
            except grpc.RpcError as failure:
                error = as_of_unknown(from_rpc_error(failure))
            except Recovering as failure:
                error = failure
            except asyncio.CancelledError:
                if _is_closing():
                    raise
            except Exception as bug:  # noqa: BLE001 - else the range would wait for ever, unsaid
                logs.exception("peer_link_failed", bug, server=self.node.node_id)
                error = Internal(f"the link to server {self.node.node_id} failed: {bug!r}")
            if self._is_silent:
                error = Recovering(f"it has not answered for {self._silent_s:g} s")
                await self._connect_anew()
            self._troubled(error)
            await asyncio.sleep(backoff.next_s(error))

    async def _connect_anew(self) -> None:
        """Give the connection up: it may have been cut, and would be noticed late."""
        before, self._channel = self._channel, aio_channel(self.node.address)
        self._is_silent = False
        await before.close()

    async def _run(self, backoff: Backoff) -> None:
        open_call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            REPLICATE
        )
        async with contextlib.AsyncExitStack() as stack:
            call = GrpcioCall(open_call())
            stack.callback(call.cancel)
            try:
                async with asyncio.timeout(self._silent_s):
                    port = await self._greeted(call)
            except TimeoutError:
                self._is_silent = True
                return
            by_stream_port = await self._by_stream_port(port, stack) if port else None
            if by_stream_port is not None:
                call.cancel()
                await self._carry(*by_stream_port, backoff)
                return
            beats = GrpcioCall(open_call())
            stack.callback(beats.cancel)
            await self._greeted(beats)
            await self._carry(call, beats, backoff)

    async def _greeted(self, call: ServerCall) -> int:
        """Greet the peer, and wait for its greeting. Returns its stream port, 0 for none."""
        header = replication_pb2.ReplicateHeader(
            session=self._identity, receiver_node_id=self.node.node_id
        )
        await call.write((replication_pb2.ReplicateRequest(header=header).SerializeToString(),))
        first = await anext(aiter(call), None)
        if first is None:
            raise Recovering("the peer ended the stream")
        try:
            node_id, incarnation, port = greeting_from(first)
        except PushpullError as error:
            raise as_of_unknown(error) from error
        # A server of another cluster accepts no session of this one.
        check_answers(self.node, "", ("", node_id, incarnation))
        return port

    async def _by_stream_port(
        self, port: int, stack: contextlib.AsyncExitStack
    ) -> tuple[ServerCall, ServerCall] | None:
        """Both streams by the peer's stream port, if that serves. `stack` closes them."""
        streams = await self._stream_port.connect(port, _GREETING_S)
        if streams is None:
            return None
        stack.callback(streams.close)
        try:
            calls = streams.call(REPLICATE), streams.call(REPLICATE)
            async with asyncio.timeout(_GREETING_S):
                for call in calls:
                    await self._greeted(call)
        except (grpc.RpcError, TimeoutError) as error:
            said = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer"
            self._stream_port.refuse(f"Replicate failed there: {said}")
        except PushpullError as error:
            self._stream_port.refuse(error.message)
        else:
            self._stream_port.confirm()
            return calls
        return None

    async def _carry(self, call: ServerCall, beats: ServerCall, backoff: Backoff) -> None:
        """Write messages and read answers, until one of the streams ends, and both with it. Raises
        the error of the one that ended first.
        """
        self._call = call
        self._queue.is_open = True
        self._reached()
        backoff.reset()
        hearing = asyncio.create_task(self._hear(beats, call))
        writing = [
            asyncio.create_task(each)
            for each in (self._write(call), self._write_beats(beats, call))
        ]
        try:
            self._listener.peer_opened(self.node.node_id)
            async for response in call:
                self._listener.peer_said(self.node.node_id, response)
        except (grpc.RpcError, asyncio.CancelledError):
            if hearing.done() and not _is_closing():
                hearing.result()  # raises why: this stream was cancelled with the other
            raise
        finally:
            self._call = None
            self._queue.end()
            self._beat, self._is_asked = None, False
            call.cancel()
            beats.cancel()
            for each in (hearing, *writing):
                each.cancel()
            _, *ends = await asyncio.gather(hearing, *writing, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):  # else the reader alone says that the stream ended
                    logs.exception("peer_link_failed", end, server=self.node.node_id)

    async def _write(self, call: ServerCall) -> None:
        """Write queued messages."""
        with _writing(call):
            while True:
                while (message := self._queue.take()) is not None:
                    await call.write((message,))
                self._news.clear()
                await self._news.wait()

    async def _write_beats(self, beats: ServerCall, call: ServerCall) -> None:
        """Write the newest beat."""
        with _writing(call):
            while True:
                await self._beat_news.wait()
                self._beat_news.clear()
                message, self._beat = self._beat, None
                if message is not None:
                    self._is_asked = True
                    await beats.write((message,))

    async def _hear(self, beats: ServerCall, call: ServerCall) -> None:
        """Read grants, until their stream ends, and the other with it. Raises why."""
        try:
            async for response in beats:
                self._is_asked, self._unanswered_s = False, 0.0
                self._listener.peer_said(self.node.node_id, response)
            raise Recovering("the peer ended the stream of beats")
        finally:
            call.cancel()

    def _troubled(self, error: PushpullError) -> None:
        if not self._is_troubled:
            self._is_troubled = True
            is_taken = isinstance(error, AddressTaken)
            expected = not is_taken and (is_retryable(error) or isinstance(error, WaitExpired))
            say, node = logs.info if expected else logs.warning, self.node
            say("peer_unreachable", server=node.node_id, address=node.address, error=error.message)

    def _reached(self) -> None:
        if self._is_troubled:
            self._is_troubled = False
            logs.info("peer_reached", server=self.node.node_id, address=self.node.address)


@contextlib.contextmanager
def _writing(call: ServerCall) -> Iterator[None]:
    """Around a writer: if its stream breaks, the reader says why; if it fails, the link ends."""
    try:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            yield
    except Exception:
        call.cancel()  # else nobody would notice that nothing is written any more
        raise


def _is_closing() -> bool:
    """True if the link is closed, as against a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class PeerLinks:
    """The streams to all other servers of the newest view."""

    def __init__(
        self,
        identity: types_pb2.SessionIdentity,
        listener: PeerListener,
        queues: PeerQueues[bytes],
        lease_s: float,
    ) -> None:
        self._lease_s = lease_s
        self._identity = identity
        self._listener = listener
        self._queues = queues
        self._links: dict[NodeId, PeerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def observe(self, view: ClusterView) -> None:
        """Make links to new servers, and close those to servers that have left."""
        present = {
            node.node_id: node
            for node in view.nodes
            if node.role is Role.SERVER
            and node.state is not NodeState.LEFT
            and node.node_id != self._identity.node_id
        }
        for node_id in [node_id for node_id in self._links if node_id not in present]:
            closing = asyncio.create_task(self._links.pop(node_id).close())
            self._queues.remove(node_id)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for node_id, node in present.items():
            if node_id not in self._links:
                queue = self._queues.add(node_id)
                self._links[node_id] = PeerLink(
                    node, self._identity, self._listener, queue, self._lease_s
                )

    def find(self, peer: NodeId) -> PeerLink | None:
        return self._links.get(peer)

    def look(self, now_s: float) -> None:
        """Connect anew to silent servers; to be called at least ten times a lease."""
        for link in self._links.values():
            link.look(now_s)

    def reset(self, peer: NodeId) -> None:
        self._links[peer].reset()

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)
