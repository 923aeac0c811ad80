"""One end of an HTTP/2 connection with gRPC messages (RFC 9113, gRPC's PROTOCOL-HTTP2).

Received bytes go in; calls of receivers and bytes to send come out. It does no input or output: the
owner receives into `buffer()`, reports the count to `received()`, and writes `output.take()` after
each call. Inside a large message, `buffer()` is the message's own memory.

Rules:
    - A peer that breaks the protocol, or a bound, ends only its own connection.
    - Received bytes count until they are consumed, on the stream and on the connection, so that a
      peer cannot fill the memory. Bytes of a stream that is gone count as consumed.
    - Useless frames are counted, whatever their type; messages pay for them, and so does time. A
      peer that sends more of them ends its connection.

Invariants:
    H2C-1  A peer never has more bytes on their way to us than its windows allow.

There is no server push, priority, compression, upgrade from HTTP/1.1 or encryption.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.frames import (
    ConnectionBroken,
    ErrorCode,
    Flag,
    FrameHead,
    FrameType,
    Setting,
)
from ps_runtime.http2.protocol.header_blocks import MAX_LIST_BYTES, HeaderBlocks
from ps_runtime.http2.protocol.memory import MessageMemory
from ps_runtime.http2.protocol.output import Http2Output
from ps_runtime.http2.protocol.streams import (
    Assembly,
    Fields,
    MessagePiece,
    Receiver,
    ServerReceiver,
    Stream,
)

_SMALL_BYTES = 64 * 1024
"""The buffer for all but the inside of large messages."""

_LOOK_BYTES = 4096
"""Bytes received into that buffer after a large message: the next one is received in place."""

_DIRECT_BYTES = 32 * 1024
"""Bytes that a message and its frame must lack at least to be received in place."""

_MAX_CONTROL_FRAME_BYTES = 32 * 1024
_MAX_RESET_COUNT = 1000
"""Streams that a peer may open and reset beyond those that ended regularly."""

_MAX_USELESS_COUNT = 2000
"""Useless frames beyond the paid ones, until `renew`."""

_PAID_COUNT = 10
"""Useless frames that a received message pays for, and a sent DATA frame: its reader widens two
windows, and may measure a ping."""

_LEAST_DATA_BYTES = 1024
"""DATA that is shorter, and completes no message, is useless."""

_MAX_LATE_COUNT = 1000
"""Streams that ended here first, so that the peer's own end of them may still come."""

_STREAM_FRAMES = (FrameType.HEADERS, FrameType.CONTINUATION, FrameType.RST_STREAM)
"""Frames that are counted by their effect."""


class Http2Connection:
    """One end of a connection; a server's has `accept`, which makes receivers of streams.
    Connections may share the `memory` for large messages.
    """

    def __init__(
        self,
        bounds: Bounds,
        accept: Callable[[], ServerReceiver] | None = None,
        memory: MessageMemory | None = None,
    ) -> None:
        self.output = Http2Output()
        self._memory = memory or MessageMemory()
        self.streams: dict[int, Stream] = {}
        self.is_going_away = False
        self._bounds = bounds
        self._accept = accept
        self._small = memoryview(bytearray(_SMALL_BYTES))
        self._filled = 0
        self._look_bytes = _SMALL_BYTES
        self._target: memoryview | None = None
        self._preface_left = 0 if accept is None else len(wire.PREFACE)
        self._has_settings = False
        self._body_of: Stream | None = None
        self._body_left = 0  # bytes of that stream's DATA frame still to come
        self._skip_left = 0  # bytes after them to ignore: padding, and those without a receiver
        self._body_ends = False
        self._blocks = HeaderBlocks()
        self._next_id = 1
        self._last_peer_id = 0
        self._reset_count = 0
        self._useless_count = 0
        self._paid_frame_count = 0
        self._late_ids: dict[int, None] = {}
        self._peer_stream_count = wire.MAX_WINDOW_BYTES
        self._window = bounds.connection_window_bytes
        self._credit = 0
        self._controls: dict[int, Callable[[FrameHead, bytes], None]] = {
            FrameType.HEADERS: self._take_headers,
            FrameType.PRIORITY: lambda head, _: wire.check_length(head, 5),
            FrameType.RST_STREAM: self._take_reset,
            FrameType.SETTINGS: self._take_settings,
            FrameType.PUSH_PROMISE: _refuse_push,
            FrameType.PING: self._take_ping,
            FrameType.GOAWAY: self._take_go_away,
            FrameType.WINDOW_UPDATE: self._take_window_update,
            FrameType.CONTINUATION: self._take_headers,
        }
        self._greet()

    def _greet(self) -> None:
        bounds = self._bounds
        if self._accept is None:
            self.output.put(wire.PREFACE)
        own = {Setting.ENABLE_PUSH: 0} if self._accept is None else {}
        own |= {
            Setting.MAX_CONCURRENT_STREAMS: bounds.stream_count,
            Setting.INITIAL_WINDOW_SIZE: bounds.window_bytes,
            Setting.MAX_FRAME_SIZE: bounds.max_frame_bytes,
            Setting.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
        self.output.put(wire.settings(own))
        more = bounds.connection_window_bytes - wire.DEFAULT_WINDOW_BYTES
        self.output.put(wire.window_update(0, more))

    # --- for the owner

    @property
    def can_open(self) -> bool:
        """True if the peer takes one more stream."""
        return not self.is_going_away and len(self.streams) < self._peer_stream_count

    def open(self, fields: Fields, receiver: Receiver) -> Stream:
        """Open a client's stream; `can_open` must be true."""
        stream = self._new_stream(self._next_id, receiver)
        self._next_id += 2
        if self._next_id > wire.MAX_WINDOW_BYTES:  # no number is left
            self.is_going_away = True
        self.output.fields(stream, fields)
        return stream

    def end(self, stream: Stream, trailers: Fields = ()) -> None:
        """End our side of a stream after its pieces, with trailers or without."""
        if stream.tail is None:
            stream.tail = trailers
            self._pump(stream)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Drop a stream, and tell the peer."""
        if self._is_open(stream):
            self.output.put(wire.reset(stream.stream_id, code))
            self._end_here(stream.stream_id)
            self._drop(stream)

    def go_away(self, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """Accept no more streams; open ones go on."""
        self.is_going_away = True
        self.output.put(wire.go_away(self._last_peer_id, code, text))

    def consumed(self, stream: Stream, message: MessagePiece) -> None:
        """Give a taken message's bytes back to the peer's windows."""
        count = min(len(message) + wire.PREFIX_BYTES, stream.unconsumed)
        stream.unconsumed -= count
        self._credit_stream(stream, count)
        self._give_back(count)

    def renew(self) -> None:
        """Forget useless frames, because time has passed."""
        self._useless_count = 0

    def broken(self, text: str) -> None:
        """Break every stream, because the connection is gone."""
        self.is_going_away = True
        for stream in list(self.streams.values()):
            self._break(stream, None, text)

    # --- streams

    def _new_stream(self, stream_id: int, receiver: Receiver) -> Stream:
        incoming = Assembly(self._bounds.max_message_bytes, self._memory)
        windows = self.output.stream_window, self._bounds.window_bytes
        stream = Stream(stream_id, receiver, incoming, *windows)
        self.streams[stream_id] = stream
        return stream

    def _is_open(self, stream: Stream) -> bool:
        return self.streams.get(stream.stream_id) is stream

    def _break(self, stream: Stream, code: int | None, text: str) -> None:
        if self._is_open(stream):
            self._drop(stream)
            stream.receiver.on_broken(code, text)

    def _drop(self, stream: Stream) -> None:
        del self.streams[stream.stream_id]
        stream.close()
        if self._body_of is stream:
            self._hear_no_more()
        self._give_back(stream.unconsumed)
        stream.unconsumed = 0

    def _pump(self, stream: Stream) -> None:
        self.output.pump(stream)
        self._close_if_both(stream)

    def _close_if_both(self, stream: Stream) -> None:
        if not (stream.has_ended and self._is_open(stream)):
            return
        if stream.peer_has_ended:
            self._reset_count = max(self._reset_count - 1, 0)
            self._drop(stream)
        elif self._accept is not None:
            # The answer is complete: gRPC ignores what the client still sends.
            self.reset(stream, ErrorCode.NO_ERROR)

    def _credit_stream(self, stream: Stream, count: int) -> None:
        stream.credit += count
        if stream.credit * 2 >= self._bounds.window_bytes and not stream.peer_has_ended:
            self.output.put(wire.window_update(stream.stream_id, stream.credit))
            stream.receive_window += stream.credit
            stream.credit = 0

    def _give_back(self, count: int) -> None:
        self._credit += count
        if self._credit * 2 >= self._bounds.window_bytes:
            self.output.put(wire.window_update(0, self._credit))
            self._window += self._credit
            self._credit = 0

    # --- from the peer

    def buffer(self) -> memoryview:
        """Memory to receive into; not empty."""
        if self._target is not None:
            return self._target
        return self._small[self._filled : max(self._filled + 1, self._look_bytes)]

    def received(self, count: int) -> None:
        """Take `count` bytes that came into `buffer()`. After ConnectionBroken, which means that
        the peer broke the protocol, write the output, and close.
        """
        try:
            self.output.check_that_it_leaves()
            if self._target is not None and self._body_of is not None:
                self._received_inside(self._body_of, self._target, count)
            else:
                self._filled += count
                self._parse()
        except ConnectionBroken as failure:
            self.go_away(failure.code, failure.text)
            raise

    def _received_inside(self, stream: Stream, target: memoryview, count: int) -> None:
        self._target = target[count:] if count < len(target) else None
        self._body_left -= count
        self._look_bytes = _LOOK_BYTES
        self._hand_over(stream, stream.incoming.advance(count))
        if not self._body_left:
            self._after_body()

    def _parse(self) -> None:
        view, end = self._small, self._filled
        at = self._take_preface(view, end) if self._preface_left else 0
        while at < end:
            begin = at
            if self._body_left and self._body_of is not None:
                at = self._take_body(self._body_of, view, at, end)
            elif self._skip_left:
                at = min(end, at + self._skip_left)
                self._skip_left -= at - begin
            elif end - at >= wire.FRAME_HEAD_BYTES:
                at = self._take_frame(wire.read_head(view, at), view, at, end)
            if at == begin:
                break
        left = end - at
        if left and at:
            view[:left] = bytes(view[at:end])
        self._filled = left
        self._look_bytes = _SMALL_BYTES

    def _take_preface(self, view: memoryview, end: int) -> int:
        done = len(wire.PREFACE) - self._preface_left
        step = min(self._preface_left, end)
        if view[:step] != wire.PREFACE[done : done + step]:
            raise ConnectionBroken("no HTTP/2 preface")
        self._preface_left -= step
        return step

    def _take_frame(self, head: FrameHead, view: memoryview, at: int, end: int) -> int:
        """Take a frame; returns the offset after its known bytes, or `at` if more must come."""
        begins = at + wire.FRAME_HEAD_BYTES
        if not self._has_settings and head.kind != FrameType.SETTINGS:
            raise ConnectionBroken("a frame before SETTINGS")
        self._blocks.check_place(head)
        if head.kind == FrameType.DATA:
            if head.flags & Flag.PADDED and begins == end:
                return at
            return self._begin_body(head, view, begins)
        take = self._controls.get(head.kind)
        if take is None:
            self._count_useless()
            self._skip_left = head.length
            return begins
        if head.length > _MAX_CONTROL_FRAME_BYTES:
            raise ConnectionBroken(
                f"a frame of type {head.kind} has {head.length} bytes", ErrorCode.FRAME_SIZE_ERROR
            )
        if end - begins < head.length:
            return at
        if head.kind not in _STREAM_FRAMES:
            self._count_useless()
        take(head, bytes(view[begins : begins + head.length]))
        return begins + head.length

    def _count_useless(self) -> None:
        self._useless_count += 1
        if self._useless_count <= _MAX_USELESS_COUNT:
            return
        sent = self.output.data_frame_count
        self._useless_count -= _PAID_COUNT * (sent - self._paid_frame_count)
        self._paid_frame_count = sent
        if self._useless_count > _MAX_USELESS_COUNT:
            raise ConnectionBroken("frames that bring nothing", ErrorCode.ENHANCE_YOUR_CALM)
        self._useless_count = max(self._useless_count, 0)

    # --- DATA

    def _begin_body(self, head: FrameHead, view: memoryview, at: int) -> int:
        self._check_not_idle(head)
        stream = self.streams.get(head.stream_id)
        self._spend_window(head, stream)
        overhead = 0
        if head.flags & Flag.PADDED:
            overhead = 1 + view[at]
            at += 1
            if overhead > head.length:
                raise ConnectionBroken("DATA is all padding")
        if stream is not None and stream.peer_has_ended:
            raise ConnectionBroken("DATA behind the end of its stream", ErrorCode.STREAM_CLOSED)
        self._body_ends = bool(head.flags & Flag.END_STREAM)
        if stream is None or (head.length - overhead < _LEAST_DATA_BYTES and not self._body_ends):
            self._count_useless()  # a message that it completes pays for it
        if stream is None or stream.is_deaf:
            self._skip_left = head.length - min(overhead, 1)
            self._give_back(head.length)
            if stream is not None and self._body_ends:
                self._peer_ended(stream)
            return at
        self._body_of = stream
        self._body_left = head.length - overhead
        self._skip_left = max(overhead - 1, 0)
        stream.unconsumed += self._body_left
        if overhead:
            self._credit_stream(stream, overhead)
            self._give_back(overhead)
        if not self._body_left:
            self._after_body()
        return at

    def _spend_window(self, head: FrameHead, stream: Stream | None) -> None:
        if head.length > self._bounds.max_frame_bytes:
            raise ConnectionBroken(f"DATA of {head.length} bytes", ErrorCode.FRAME_SIZE_ERROR)
        self._window -= head.length
        if stream is not None:
            stream.receive_window -= head.length
        if self._window < 0 or (stream is not None and stream.receive_window < 0):
            raise ConnectionBroken("more DATA than was allowed", ErrorCode.FLOW_CONTROL_ERROR)

    def _take_body(self, stream: Stream, view: memoryview, at: int, end: int) -> int:
        stop = min(end, at + self._body_left)
        self._body_left -= stop - at
        found, problem = stream.incoming.take(view[at:stop])
        self._hand_over(stream, found)
        if problem and self._is_open(stream):
            stream.is_deaf = True
            self._hear_no_more()
            stream.receiver.on_unreadable(problem)
        elif not self._body_left:
            self._after_body()
        elif self._body_of is stream:
            rest = stream.incoming.rest(self._body_left)
            if rest is not None and len(rest) >= _DIRECT_BYTES:
                self._target = rest
        return stop

    def _hand_over(self, stream: Stream, messages: list[MessagePiece]) -> None:
        self._useless_count = max(self._useless_count - _PAID_COUNT * len(messages), 0)
        for message in messages:
            if stream.is_deaf:
                return
            stream.receiver.on_message(message)

    def _hear_no_more(self) -> None:
        """Skip the rest of the incoming frame."""
        self._skip_left += self._body_left
        self._body_left, self._body_of, self._target = 0, None, None

    def _after_body(self) -> None:
        stream, self._body_of = self._body_of, None
        if stream is not None and self._body_ends and not self._is_cut_off(stream):
            self._peer_ended(stream)

    def _is_cut_off(self, stream: Stream) -> bool:
        """Break a stream that the peer ends inside of a message; False for any other."""
        if stream.is_deaf or not stream.incoming.has_begun:
            return False
        self.output.put(wire.reset(stream.stream_id, ErrorCode.PROTOCOL_ERROR))
        self._break(stream, ErrorCode.PROTOCOL_ERROR, "the stream ended inside of a message")
        return True

    def _peer_ended(self, stream: Stream) -> None:
        stream.peer_has_ended = True
        if not stream.is_deaf:
            stream.receiver.on_end()
        self._close_if_both(stream)

    def _check_not_idle(self, head: FrameHead) -> None:
        newest = self._next_id - 2 if self._accept is None else self._last_peer_id
        if not head.stream_id & 1 or head.stream_id > newest:
            raise ConnectionBroken(
                f"a frame of type {head.kind} on stream {head.stream_id}, which is not open"
            )

    # --- headers

    def _take_headers(self, head: FrameHead, payload: bytes) -> None:
        if not head.stream_id & 1:
            raise ConnectionBroken(f"stream {head.stream_id}")
        found = self._blocks.take(head, payload)
        if found is None:
            return
        head, fields = found
        ends = bool(head.flags & Flag.END_STREAM)
        stream = self.streams.get(head.stream_id)
        if stream is None:
            if self._accept is None or head.stream_id <= self._last_peer_id:
                self._check_late(head)
                return
            self._last_peer_id = head.stream_id
            stream = self._accepted(head, fields, self._accept)
        elif stream.peer_has_ended or (self._accept is not None and not ends):
            raise ConnectionBroken("headers in the middle of a stream")
        elif ends and self._is_cut_off(stream):
            return
        elif not stream.is_deaf:
            stream.receiver.on_fields(fields)
        if stream is not None and ends and self._is_open(stream):
            self._peer_ended(stream)

    def _end_here(self, stream_id: int) -> None:
        """Note a stream of the peer's that ends here first."""
        self._late_ids[stream_id] = None
        if len(self._late_ids) > _MAX_LATE_COUNT:
            del self._late_ids[next(iter(self._late_ids))]

    def _check_late(self, head: FrameHead) -> None:
        """Check headers of a stream that is not open: they may have been on their way when it ended
        here. Otherwise the peer's numbers go back (RFC 9113, 5.1.1).
        """
        self._check_not_idle(head)
        self._count_useless()
        if self._accept is not None and head.stream_id not in self._late_ids:
            raise ConnectionBroken(f"stream {head.stream_id} is opened after {self._last_peer_id}")

    def _accepted(
        self, head: FrameHead, fields: Fields, accept: Callable[[], ServerReceiver]
    ) -> Stream | None:
        if self.is_going_away or len(self.streams) >= self._bounds.stream_count:
            self.output.put(wire.reset(head.stream_id, ErrorCode.REFUSED_STREAM))
            self._end_here(head.stream_id)
            return None
        receiver = accept()
        stream = self._new_stream(head.stream_id, receiver)
        receiver.on_open(stream, fields)
        return stream

    # --- the rest

    def _take_reset(self, head: FrameHead, payload: bytes) -> None:
        wire.check_length(head, 4)
        self._check_not_idle(head)
        stream = self.streams.get(head.stream_id)
        if stream is None:
            self._count_useless()
            return
        self._reset_count += 1
        if self._accept is not None and self._reset_count > _MAX_RESET_COUNT:
            raise ConnectionBroken("streams that are reset at once", ErrorCode.ENHANCE_YOUR_CALM)
        self._break(stream, int.from_bytes(payload), "the stream was reset")

    def _take_settings(self, head: FrameHead, payload: bytes) -> None:
        if head.stream_id or (head.flags & Flag.ACK and payload):
            raise ConnectionBroken("SETTINGS out of place")
        if head.flags & Flag.ACK:
            return
        self._has_settings = True
        for name, value in wire.read_settings(payload):
            if name == Setting.MAX_CONCURRENT_STREAMS:
                self._peer_stream_count = value
            self.output.set(name, value, tuple(self.streams.values()))
        self.output.put(wire.frame(FrameType.SETTINGS, Flag.ACK, 0))
        self._pump_all()

    def _take_ping(self, head: FrameHead, payload: bytes) -> None:
        wire.check_length(head, 8)
        if head.stream_id:
            raise ConnectionBroken("PING on a stream")
        if not head.flags & Flag.ACK:
            self.output.put(wire.ping(payload, is_ack=True))

    def _take_go_away(self, head: FrameHead, payload: bytes) -> None:
        if head.stream_id or len(payload) < 8:
            raise ConnectionBroken("GOAWAY is cut off")
        self.is_going_away = True
        last = int.from_bytes(payload[:4]) & wire.MAX_WINDOW_BYTES
        code = int.from_bytes(payload[4:8])
        if self._accept is not None:
            return
        text = f"the server goes away: {payload[8:].decode(errors='replace')}"
        for stream in [stream for number, stream in self.streams.items() if number > last]:
            self._break(stream, code or ErrorCode.REFUSED_STREAM, text)

    def _take_window_update(self, head: FrameHead, payload: bytes) -> None:
        wire.check_length(head, 4)
        increment = int.from_bytes(payload) & wire.MAX_WINDOW_BYTES
        if not increment:
            raise ConnectionBroken("a window that is widened by nothing")
        if not head.stream_id:
            self.output.widen(increment)
            self._pump_all()
            return
        self._check_not_idle(head)
        stream = self.streams.get(head.stream_id)
        if stream is not None:
            self.output.widen_stream(stream, increment)
            self._pump(stream)

    def _pump_all(self) -> None:
        for stream in list(self.streams.values()):
            if self._is_open(stream) and stream.queued_bytes:
                self._pump(stream)


def _refuse_push(_head: FrameHead, _payload: bytes) -> None:
    raise ConnectionBroken("PUSH_PROMISE, which was switched off")
