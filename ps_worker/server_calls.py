"""The two ways to call the methods that move parameters: a server's stream port, where it has one
that can be reached, else its gRPC port by grpcio. What goes over the wire is the same.

Everything belongs to the background loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, cast

import grpc
import grpc.aio

from ps_core.cluster_view import Node
from ps_runtime import logs
from ps_runtime.addresses import split_address
from ps_runtime.http2.channel import StreamChannel
from ps_runtime.http2.streams import Piece
from pushpull.v1 import parameters_pb2

_SERVICE = "/pushpull.v1.ParameterService/"
_CONNECT_S = 2.0


class ServerCall(Protocol):
    """A call that is open. Failures are `grpc.RpcError`."""

    async def write(self, pieces: Sequence[Piece]) -> None:
        """Send a message in pieces, which must not change until it is answered."""

    def __aiter__(self) -> AsyncIterator[Piece]:
        """The serialized answers."""

    def cancel(self) -> object:
        """Give the call up, if it has not ended."""


class ServerCalls:
    """The calls of one client to one server.

    Args:
        node: the server.
        channel: to its gRPC port.
    """

    def __init__(self, node: Node, channel: grpc.aio.Channel) -> None:
        self._node = node
        self._streams: StreamChannel | None = None
        self._port = 0
        self._refused = ""
        # The outbox writes messages around their payloads, and payloads are not copied out of them.
        self._push_pull: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"{_SERVICE}PushPull", request_serializer=None, response_deserializer=None
        )
        self._pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            f"{_SERVICE}Pull", request_serializer=None, response_deserializer=None
        )

    async def use_port(
        self,
        request: parameters_pb2.OpenSessionRequest,
        response: parameters_pb2.OpenSessionResponse,
        deadline_s: float,
    ) -> None:
        """Use the stream port that the answer to an OpenSession names, if it can be reached.

        Args:
            request: which was answered.
            response: what it was answered.
            deadline_s: what may be spent on it.
        """
        port = response.stream_port
        if self._streams is not None and self._streams.is_open and port == self._port:
            return
        self.close()
        if not port:
            return
        self._port = port
        host, _ = split_address(self._node.address, "address")
        deadline_s = min(deadline_s, _CONNECT_S)
        try:
            streams = await StreamChannel.connect(host, port, deadline_s)
        except OSError as error:
            self._refuse(f"it cannot be reached: {error!r}")
            return
        try:
            raw = await streams.unary(
                f"{_SERVICE}OpenSession", request.SerializeToString(), deadline_s
            )
            there = parameters_pb2.OpenSessionResponse.FromString(cast(bytes, raw))
        except grpc.RpcError as error:
            self._refuse(f"OpenSession failed there: {cast(grpc.Call, error).details()}")
        else:
            expected = (response.node_id, response.incarnation)
            if (there.node_id, there.incarnation) == expected:
                self._streams = streams
                self._refused = ""
            else:
                self._refuse(f"server {there.node_id} answers there")
        finally:  # also where this client is closed meanwhile
            if self._streams is not streams:
                streams.close()

    def push_pull(self) -> ServerCall:
        """A PushPull stream."""
        if self._streams is not None and self._streams.is_open:
            return self._streams.call(f"{_SERVICE}PushPull")
        return _GrpcioCall(self._push_pull())

    async def pull(self, request: parameters_pb2.PullRequest, timeout_s: float) -> ServerCall:
        """A Pull."""
        raw = request.SerializeToString()
        if self._streams is not None and self._streams.is_open:
            call = self._streams.call(f"{_SERVICE}Pull", timeout_s)
            await call.write((raw,))
            call.done_writing()
            return call
        return _GrpcioCall(self._pull(raw, timeout=timeout_s))

    def close(self) -> None:
        """Leave the stream port; calls that are open there fail."""
        if self._streams is not None:
            self._streams.close()
            self._streams = None

    def _refuse(self, reason: str) -> None:
        """Say why the stream port is not used, once."""
        if reason != self._refused:
            self._refused = reason
            logs.warning(
                "stream_port_not_used",
                server=self._node.node_id,
                address=self._node.address,
                stream_port=self._port,
                reason=reason,
            )


class _GrpcioCall:
    """A call of grpcio's, which takes messages in one piece."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.UnaryStreamCall[bytes, bytes],
    ) -> None:
        self._call = call

    async def write(self, pieces: Sequence[Piece]) -> None:
        message = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        stream = cast("grpc.aio.StreamStreamCall[bytes, bytes]", self._call)
        await stream.write(bytes(message))

    def __aiter__(self) -> AsyncIterator[Piece]:
        return aiter(self._call)

    def cancel(self) -> object:
        return self._call.cancel()
