"""The calls of one client to one server: by its stream port, where that serves, else by its gRPC
port.

Everything belongs to the background loop.
"""

from __future__ import annotations

from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ps_core.cluster_view import Node
from ps_runtime.http2.channel import StreamChannel
from ps_runtime.http2.stream_port import GrpcioCall, ServerCall, StreamPort
from pushpull.v1 import parameters_pb2

_SERVICE = "/pushpull.v1.ParameterService/"
_GREETING_S = 5.0
"""How long a stream port may take to answer, when the gRPC port has answered."""


class ServerCalls:
    """The calls of one client to one server.

    Args:
        node: the server.
        channel: to its gRPC port.
    """

    def __init__(self, node: Node, channel: grpc.aio.Channel) -> None:
        self._stream_port = StreamPort(node)
        self._streams: StreamChannel | None = None
        self._port = 0
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
        streams = await self._stream_port.connect(port, deadline_s)
        if streams is None:
            return
        try:
            raw = await streams.unary(
                f"{_SERVICE}OpenSession", request.SerializeToString(), min(deadline_s, _GREETING_S)
            )
            there = parameters_pb2.OpenSessionResponse.FromString(cast(bytes, raw))
        except grpc.RpcError as error:
            details = cast(grpc.Call, error).details()
            self._stream_port.refuse(f"OpenSession failed there: {details}")
        except DecodeError:
            self._stream_port.refuse("whoever answers there is no server")
        else:
            named = (there.cluster_id, there.node_id, there.incarnation)
            if named == (response.cluster_id, response.node_id, response.incarnation):
                self._streams = streams
                self._stream_port.confirm()
            else:
                self._stream_port.refuse(f"server {there.node_id} answers there")
        finally:  # also where this client is closed meanwhile
            if self._streams is not streams:
                streams.close()

    def push_pull(self) -> ServerCall:
        """A PushPull stream."""
        if self._streams is not None and self._streams.is_open:
            return self._streams.call(f"{_SERVICE}PushPull")
        return GrpcioCall(self._push_pull())

    async def pull(self, request: parameters_pb2.PullRequest, timeout_s: float) -> ServerCall:
        """A Pull."""
        raw = request.SerializeToString()
        if self._streams is not None and self._streams.is_open:
            call = self._streams.call(f"{_SERVICE}Pull", timeout_s)
            await call.write((raw,))
            call.done_writing()
            return call
        return GrpcioCall(self._pull(raw, timeout=timeout_s))

    def close(self) -> None:
        """Leave the stream port; calls that are open there fail."""
        if self._streams is not None:
            self._streams.close()
            self._streams = None
