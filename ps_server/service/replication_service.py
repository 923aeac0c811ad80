"""ReplicationService: messages of primaries to a server that backs up their ranges.

The messages of a stream are taken in order, on the loop; acknowledgements and grants gather and
leave together. A beat waits for the messages before it, so primaries send beats on streams of their
own.

Rules:
    - A stream that names another server is refused: the address may have been that one's, and one
      server's copies would otherwise count for two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from ps_core.errors import Draining, InvalidConfig, NotOwner, Recovering
from ps_runtime.grpc.errors import translated
from ps_server.peers.node_replication import ReplicatedRanges
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, RangeCopy
from ps_server.service.node import ParameterNode
from ps_server.service.work_queue import Works
from ps_server.wire.replication_reader import Came, ReplicationReader
from ps_server.wire.replication_wire import answers_message, greeting_message
from pushpull.v1 import replication_pb2, replication_pb2_grpc

SERVICE = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"].full_name


class _Answers:
    def __init__(self) -> None:
        self._waiting: list[Ack | Grant] = []
        self._news = asyncio.Event()
        self._has_ended = False
        self._failure: BaseException | None = None

    def put(self, answer: Ack | Grant | None) -> None:
        if answer is not None:
            self._waiting.append(answer)
            self._news.set()

    def end(self, failure: BaseException | None = None) -> None:
        self._has_ended, self._failure = True, failure
        self._news.set()

    async def messages(self) -> AsyncIterator[bytes]:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._waiting:
                answers, self._waiting = self._waiting, []
                yield answers_message(answers)
            if self._failure is not None:
                raise self._failure
            if self._has_ended and not self._waiting:
                return


class ReplicationServicer(replication_pb2_grpc.ReplicationServiceServicer):
    """The service, over one `ParameterNode`."""

    def __init__(self) -> None:
        self._node: ParameterNode | None = None
        self._open: set[_Answers] = set()  # of each stream
        self.stream_port = 0

    def attach(self, node: ParameterNode) -> None:
        """The server has registered: serve `node`."""
        self._node = node

    def detach(self) -> None:
        """The node's timeline has ended."""
        self._node = None

    def drain(self) -> None:
        """End all streams: the server is going away, and others may not hear of that in a view."""
        for answers in self._open:
            answers.end(Draining("the server is going away"))

    @translated
    async def Replicate(  # noqa: N802 - the contract's name
        self,
        request_iterator: AsyncIterator[bytes],
        context: object,  # noqa: ARG002
    ) -> AsyncIterator[bytes]:
        reader = ReplicationReader()
        header = reader.read(await anext(aiter(request_iterator), b""))
        node, replicas = self._admitted(header)
        yield greeting_message(node.session, self.stream_port)
        answers = _Answers()
        self._open.add(answers)
        taking = asyncio.create_task(_take(node.works, replicas, reader, request_iterator, answers))
        try:
            async for message in answers.messages():
                yield message
        finally:
            self._open.discard(answers)
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking

    def _admitted(self, header: Came | None) -> tuple[ParameterNode, ReplicatedRanges]:
        """This server and its replicas, for a caller that may speak here."""
        if self._node is None:
            raise Recovering("the server has not registered yet", retry_after_ms=100)
        if header is None or isinstance(header, LogRecord | Beat | RangeCopy):
            raise InvalidConfig("a stream between servers begins without its header")
        own = self._node.session
        if header.receiver_node_id != own.node_id:
            raise NotOwner(
                f"this is server {own.node_id}; server {header.receiver_node_id} is meant"
            )
        self._node.sessions.admit(header.session, "Replicate")
        if self._node.replicas is None:
            raise InvalidConfig("this cluster does not replicate its ranges")
        return self._node, self._node.replicas


async def _take(
    works: Works,
    replicas: ReplicatedRanges,
    reader: ReplicationReader,
    messages: AsyncIterator[bytes],
    answers: _Answers,
) -> None:
    try:
        async for raw in messages:
            match reader.read(raw):
                case LogRecord() as record:
                    answers.put(await works.done(replicas.taking(record)))
                case Beat() as beat:
                    answers.put(replicas.grant(beat))
                case RangeCopy() as copy:
                    await replicas.view_of(copy.snapshot)
                    answers.put(await works.done(replicas.joining(copy)))
    except asyncio.CancelledError:
        raise
    except Exception as failure:  # noqa: BLE001 - the stream's owner raises it again
        answers.end(failure)
    else:
        answers.end()


def handlers_of(servicer: ReplicationServicer) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's method by its short name, with messages as they are on the wire."""
    replicate: Any = servicer.Replicate
    handler = grpc.stream_stream_rpc_method_handler(replicate, _unchanged, _unchanged)
    return {"Replicate": handler}


def add_to_server(servicer: ReplicationServicer, server: grpc.aio.Server) -> None:
    handlers = handlers_of(servicer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _unchanged(message: bytes) -> bytes:
    return message
