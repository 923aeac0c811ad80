"""A server's stream port, and the two ways to call the methods that move parameters.

A call goes to the stream port if it can be reached, else by grpcio to the gRPC port. The bytes of
both are the same. Everything belongs to the loop that it was made on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, cast

import grpc
import grpc.aio

from ps_core.cluster_view import Node
from ps_runtime.grpc.addresses import split_address
from ps_runtime.http2.channel import StreamChannel
from ps_runtime.http2.protocol.streams import MessagePiece
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s

_CONNECT_S = 2.0

_AGAIN_S = 60.0
"""Time for which a port that did not answer is not tried again: a firewall drops packets to it, and
each session would wait for it."""


class ServerCall(Protocol):
    """An open call. Failures are `grpc.RpcError`. `write` sends a message in pieces, which must not
    change until it is answered; iteration has the serialized answers; `cancel` gives the call up,
    unless it has ended.
    """

    async def write(self, pieces: Sequence[MessagePiece]) -> None: ...
    def __aiter__(self) -> AsyncIterator[MessagePiece]: ...
    def cancel(self) -> object: ...


class GrpcioCall:
    """A call of grpcio's, which takes a message in one piece."""

    def __init__(
        self, call: grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.UnaryStreamCall[bytes, bytes]
    ) -> None:
        self._call = call

    async def write(self, pieces: Sequence[MessagePiece]) -> None:
        message = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        stream = cast("grpc.aio.StreamStreamCall[bytes, bytes]", self._call)
        await stream.write(bytes(message))

    def __aiter__(self) -> AsyncIterator[MessagePiece]:
        return aiter(self._call)

    def cancel(self) -> object:
        return self._call.cancel()


class StreamPort:
    """The stream port of one server, and the reason why it is not used, if any."""

    def __init__(
        self, node: Node, now: Callable[[], float] = now_s, connect_s: float = _CONNECT_S
    ) -> None:
        self._node = node
        self._now = now
        self._connect_s = connect_s
        self._port = 0
        self._refused = ""
        self._again_s = 0.0

    async def connect(self, port: int, deadline_s: float) -> StreamChannel | None:
        """Connect to the port that the server names; None, and a log line, if that fails."""
        if port == self._port and self._now() < self._again_s:
            return None
        self._port = port
        host, _ = split_address(self._node.address, "address")
        try:
            return await StreamChannel.connect(host, port, min(deadline_s, self._connect_s))
        # At the end of the interpreter asyncio resolves no names.
        except (OSError, UnicodeError, RuntimeError) as error:
            if isinstance(error, TimeoutError) and deadline_s >= self._connect_s:
                self._again_s = self._now() + _AGAIN_S
                self.refuse(f"it does not answer, and is not tried again for {_AGAIN_S:.0f} s")
            else:
                self.refuse(f"it cannot be reached: {error!r}")
            return None

    def confirm(self) -> None:
        """Note that the port serves, so that a later problem is logged."""
        self._refused = ""

    def refuse(self, reason: str) -> None:
        """Log the reason why the port is not used, once."""
        if reason != self._refused:
            self._refused = reason
            logs.warning(
                "stream_port_not_used",
                server=self._node.node_id,
                address=self._node.address,
                stream_port=self._port,
                reason=reason,
            )
