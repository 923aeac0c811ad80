"""Streams to the servers that back up this one's ranges, or are about to.

A stream is opened while something is to be sent and kept; one that breaks is opened again. What was
on its way is lost with it, and so is what is sent while there is none: the sender of batches sends
them again until they are acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Container, Iterable
from typing import Protocol

import grpc
import grpc.aio

from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.errors import Internal, PushpullError, Recovering, WaitExpired
from ps_core.keys import NodeId
from ps_runtime import logs
from ps_runtime.channels import aio_channel
from ps_runtime.errors import from_rpc_error
from ps_runtime.retry import Backoff, is_retryable
from pushpull.v1 import replication_pb2, types_pb2

_Call = grpc.aio.StreamStreamCall[bytes, bytes]

REPLICATE = "/pushpull.v1.ReplicationService/Replicate"

_LAST_BACKOFF_S = 0.5
"""A peer that is back is found again within this time."""


class PeerListener(Protocol):
    """Who is told what comes from peers."""

    def peer_opened(self, peer: NodeId) -> None:
        """A stream to the peer is there; nothing of what was sent before may have come."""

    def peer_said(self, peer: NodeId, response: bytes) -> None:
        """The peer answered."""


class PeerLink:
    """The stream to one server."""

    def __init__(
        self, node: Node, identity: types_pb2.SessionIdentity, listener: PeerListener
    ) -> None:
        self.node = node
        self.queued_bytes = 0
        self._identity = identity
        self._listener = listener
        self._channel = aio_channel(node.address)
        self._open_call = self._channel.stream_stream(
            REPLICATE,
            request_serializer=_unchanged,
            response_deserializer=_unchanged,
        )
        self._queue: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._call: _Call | None = None
        self._is_troubled = False

    @property
    def is_open(self) -> bool:
        """Whether what is sent now has a stream to go by."""
        return self._call is not None

    def send(self, messages: Iterable[bytes]) -> None:
        """Queue messages; they are lost if there is no stream, or it breaks."""
        self._begin()
        if self._call is None:
            return
        for message in messages:
            self._queue.append(message)
            self.queued_bytes += len(message)
        self._news.set()

    def send_first(self, message: bytes) -> None:
        """As `send`, before what waits already."""
        self._begin()
        if self._call is not None:
            self._queue.appendleft(message)
            self.queued_bytes += len(message)
            self._news.set()

    def reset(self) -> None:
        """What waits is of no use any more, and neither is what the stream has taken."""
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """End the stream and the channel."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        backoff = Backoff(last_bound_s=_LAST_BACKOFF_S)
        while True:
            error: PushpullError = Recovering("the stream ended")
            try:
                await self._run(backoff)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
            except Exception as bug:  # noqa: BLE001 - else the range would wait for ever, unsaid
                logs.exception("peer_link_failed", bug, server=self.node.node_id)
                error = Internal(f"the link to server {self.node.node_id} failed: {bug!r}")
            self._troubled(error)
            await asyncio.sleep(backoff.next_s(error))

    async def _run(self, backoff: Backoff) -> None:
        call = self._open_call()
        writer: asyncio.Task[None] | None = None
        try:
            header = replication_pb2.ReplicateHeader(
                session=self._identity, receiver_node_id=self.node.node_id
            )
            first = replication_pb2.ReplicateRequest(header=header)
            await call.write(first.SerializeToString())
            if await call.read() is grpc.aio.EOF:  # else the peer says that it listens
                return
            self._call = call
            self._reached()
            backoff.reset()
            writer = asyncio.create_task(self._write(call))
            self._listener.peer_opened(self.node.node_id)
            while isinstance(response := await call.read(), bytes):
                self._listener.peer_said(self.node.node_id, response)
        finally:
            self._call = None
            self._queue.clear()
            self.queued_bytes = 0
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    async def _write(self, call: _Call) -> None:
        """Write what comes. If the stream breaks, the reader says why."""
        try:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                while True:
                    while self._queue:
                        message = self._queue.popleft()
                        self.queued_bytes -= len(message)
                        await call.write(message)
                    self._news.clear()
                    await self._news.wait()
        except Exception:
            call.cancel()  # else nobody would notice that nothing is written any more
            raise

    def _troubled(self, error: PushpullError) -> None:
        if not self._is_troubled:
            self._is_troubled = True
            expected = is_retryable(error) or isinstance(error, WaitExpired)
            (logs.info if expected else logs.warning)(
                "peer_unreachable",
                server=self.node.node_id,
                address=self.node.address,
                error=error.message,
            )

    def _reached(self) -> None:
        if self._is_troubled:
            self._is_troubled = False
            logs.info("peer_reached", server=self.node.node_id, address=self.node.address)


class PeerLinks:
    """The streams to all other servers of the present view.

    Args:
        identity: this server's session.
        listener: who is told what comes.
    """

    def __init__(self, identity: types_pb2.SessionIdentity, listener: PeerListener) -> None:
        self._identity = identity
        self._listener = listener
        self._links: dict[NodeId, PeerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def observe(self, view: ClusterView) -> None:
        """Go on without servers that have left."""
        present = {
            node.node_id: node
            for node in view.nodes
            if node.role is Role.SERVER
            and node.state is not NodeState.LEFT
            and node.node_id != self._identity.node_id
        }
        for node_id in [node_id for node_id in self._links if node_id not in present]:
            closing = asyncio.create_task(self._links.pop(node_id).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for node_id, node in present.items():
            if node_id not in self._links:
                self._links[node_id] = PeerLink(node, self._identity, self._listener)

    def find(self, peer: NodeId) -> PeerLink | None:
        """The link to a server; None if it has left."""
        return self._links.get(peer)

    def is_idle(self, peer: NodeId) -> bool:
        """Whether there is a stream to the server, and nothing waits for it."""
        link = self._links.get(peer)
        return link is not None and link.is_open and not link.queued_bytes

    @property
    def busy(self) -> set[NodeId]:
        """The servers to which something is on its way that their streams have not taken."""
        return {node_id for node_id, link in self._links.items() if link.queued_bytes}

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, to all of them."""
        return sum(link.queued_bytes for link in self._links.values())

    def reset_others(self, wanted: Container[NodeId]) -> None:
        """Forget what is on its way to servers that nothing is for any more."""
        for node_id, link in self._links.items():
            if node_id not in wanted and link.queued_bytes:
                link.reset()

    async def close(self) -> None:
        """Close all links."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)


def _unchanged(message: bytes) -> bytes:
    return message
