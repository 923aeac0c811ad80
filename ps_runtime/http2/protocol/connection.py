"""One end of an HTTP/2 connection that carries gRPC (RFC 9113, gRPC's PROTOCOL-HTTP2): bytes come
in, calls of receivers and bytes to send come out. No input or output happens here.

The owner receives into `buffer()`, says how much by `received()`, and writes `output.take()`
whenever it called anything. Inside a large message, `buffer()` is the message's own memory.

Rules:
    - A peer that breaks the protocol, or a bound, ends its connection, and nobody else's.
    - What is received counts until it is consumed, on the stream and on the connection, so that
      a peer can fill no memory. What comes on a stream that has gone counts as consumed.
    - Frames that bring nothing are counted, whatever their type; what is said and heard pays for
      them, and so does time. A peer that sends more of them than that ends its connection.

Invariants:
    H2C-1  A peer never has more on its way to us than the windows that it was told.

What it deliberately does not do: server push, priorities, compressed messages, upgrades from
HTTP/1.1, encryption.
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
from ps_runtime.http2.protocol.output import Output
from ps_runtime.http2.protocol.streams import (
    Assembly,
    Fields,
    Piece,
    Receiver,
    ServerReceiver,
    Stream,
)

_SMALL_BYTES = 64 * 1024
"""Of the buffer for all but the inside of large messages."""

_LOOK_BYTES = 4096
"""What is received there behind a large message: the rest of the next one is not copied."""

_DIRECT_BYTES = 32 * 1024
"""So much of a message and its frame must be missing to be received where it will lie."""

_MAX_CONTROL_FRAME_BYTES = 32 * 1024
_MAX_RESET_COUNT = 1000
"""Streams that a peer may open and reset beyond those that came to their end."""

_MAX_VAIN_COUNT = 2000
"""Frames that bring nothing, beyond those that are paid for, until `renew`."""

_PAID_COUNT = 10
"""So many of them a message that comes pays for, and a frame of DATA that leaves: its reader widens
two windows, and may ask for the time that a ping takes."""

_LEAST_DATA_BYTES = 1024
"""DATA that is shorter, and completes no message, brings nothing."""

_MAX_LATE_COUNT = 1000
"""Streams that were ended here first, so that the peer's own end of them may still come."""

_STREAM_FRAMES = (FrameType.HEADERS, FrameType.CONTINUATION, FrameType.RST_STREAM)
"""What they bring is counted by what they do."""


class Connection:
    """One end. `accept` makes a server of it: it makes what hears a stream that the peer opens.
    Connections may share the `memory` that they receive large messages into.
    """

    def __init__(
        self,
        bounds: Bounds,
        accept: Callable[[], ServerReceiver] | None = None,
        memory: MessageMemory | None = None,
    ) -> None:
        self.output = Output()
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
        self._body_left = 0  # of the DATA frame that is coming in, for that stream
        self._skip_left = 0  # behind it: padding, and what is for nobody
        self._body_ends = False
        self._blocks = HeaderBlocks()
        self._next_id = 1
        self._last_peer_id = 0
        self._reset_count = 0
        self._vain_count = 0
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
        own = {
            Setting.ENABLE_PUSH: 0,
            Setting.MAX_CONCURRENT_STREAMS: bounds.stream_count,
            Setting.INITIAL_WINDOW_SIZE: bounds.window_bytes,
            Setting.MAX_FRAME_SIZE: bounds.max_frame_bytes,
            Setting.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
        if self._accept is not None:
            del own[Setting.ENABLE_PUSH]  # a client's to say
        self.output.put(wire.settings(own))
        more = bounds.connection_window_bytes - wire.DEFAULT_WINDOW_BYTES
        self.output.put(wire.window_update(0, more))

    # --- what the owner does

    @property
    def has_room(self) -> bool:
        """Whether the peer takes a stream more."""
        return not self.is_going_away and len(self.streams) < self._peer_stream_count

    def open(self, fields: Fields, receiver: Receiver) -> Stream:
        """A client's new stream; `has_room` for it."""
        stream = self._new_stream(self._next_id, receiver)
        self._next_id += 2
        if self._next_id > wire.MAX_WINDOW_BYTES:  # the last number has been given away
            self.is_going_away = True
        self.output.fields(stream, fields)
        return stream

    def end(self, stream: Stream, trailers: Fields = ()) -> None:
        """Send nothing more, behind what waits; with trailers or without."""
        if stream.tail is None:
            stream.tail = trailers
            self._pump(stream)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Drop a stream, and tell the peer so."""
        if self._is_open(stream):
            self.output.put(wire.reset(stream.stream_id, code))
            self._end_here(stream.stream_id)
            self._drop(stream)

    def go_away(self, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """Take no more streams; those that are open go on."""
        self.is_going_away = True
        self.output.put(wire.go_away(self._last_peer_id, code, text))

    def consumed(self, stream: Stream, message: Piece) -> None:
        """A message has been taken: the peer may send as much again."""
        count = min(len(message) + wire.PREFIX_BYTES, stream.unconsumed)
        stream.unconsumed -= count
        self._credit_stream(stream, count)
        self._give_back(count)

    def renew(self) -> None:
        """Time has passed: frames that brought nothing are forgiven."""
        self._vain_count = 0

    def broken(self, text: str) -> None:
        """The connection is gone: every stream hears of it."""
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
        """A stream that has not gone ends before its end."""
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
            # Answered in full: what the client still sends is for nobody (gRPC's rule).
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

    # --- what comes

    def buffer(self) -> memoryview:
        """Where to receive; not empty."""
        if self._target is not None:
            return self._target
        return self._small[self._filled : max(self._filled + 1, self._look_bytes)]

    def received(self, count: int) -> None:
        """`count` bytes have come into `buffer()`.

        Raises:
            ConnectionBroken: the peer broke the protocol: write what there is, and close.
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
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        self._preface_left -= step
        return step

    def _take_frame(self, head: FrameHead, view: memoryview, at: int, end: int) -> int:
        """Where the next one begins, or what is left of this; `at` if more of it must come."""
        begins = at + wire.FRAME_HEAD_BYTES
        self._check_place(head)
        if head.kind == FrameType.DATA:
            if head.flags & Flag.PADDED and begins == end:
                return at
            return self._begin_body(head, view, begins)
        take = self._controls.get(head.kind)
        if take is None:
            self._in_vain()
            self._skip_left = head.length
            return begins
        if head.length > _MAX_CONTROL_FRAME_BYTES:
            raise ConnectionBroken(
                ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {head.kind} has {head.length} bytes"
            )
        if end - begins < head.length:
            return at
        if head.kind not in _STREAM_FRAMES:
            self._in_vain()
        take(head, bytes(view[begins : begins + head.length]))
        return begins + head.length

    def _in_vain(self) -> None:
        """A frame brings nothing."""
        self._vain_count += 1
        if self._vain_count <= _MAX_VAIN_COUNT:
            return
        sent = self.output.data_frame_count
        self._vain_count -= _PAID_COUNT * (sent - self._paid_frame_count)
        self._paid_frame_count = sent
        if self._vain_count > _MAX_VAIN_COUNT:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "frames that bring nothing")
        self._vain_count = max(self._vain_count, 0)

    def _check_place(self, head: FrameHead) -> None:
        if not self._has_settings and head.kind != FrameType.SETTINGS:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a frame before SETTINGS")
        self._blocks.check_place(head)

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
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "DATA is all padding")
        if stream is not None and stream.peer_has_ended:
            raise ConnectionBroken(ErrorCode.STREAM_CLOSED, "DATA behind the end of its stream")
        self._body_ends = bool(head.flags & Flag.END_STREAM)
        if stream is None or (head.length - overhead < _LEAST_DATA_BYTES and not self._body_ends):
            self._in_vain()  # a message that it completes pays for it
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
        self._credit_stream(stream, overhead)
        self._give_back(overhead)
        if not self._body_left:
            self._after_body()
        return at

    def _spend_window(self, head: FrameHead, stream: Stream | None) -> None:
        if head.length > self._bounds.max_frame_bytes:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"DATA of {head.length} bytes")
        self._window -= head.length
        if stream is not None:
            stream.receive_window -= head.length
        if self._window < 0 or (stream is not None and stream.receive_window < 0):
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than was allowed")

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

    def _hand_over(self, stream: Stream, messages: list[Piece]) -> None:
        self._vain_count = max(self._vain_count - _PAID_COUNT * len(messages), 0)
        for message in messages:
            if stream.is_deaf:
                return
            stream.receiver.on_message(message)

    def _hear_no_more(self) -> None:
        """The rest of the frame that is coming in is for nobody."""
        self._skip_left += self._body_left
        self._body_left, self._body_of, self._target = 0, None, None

    def _after_body(self) -> None:
        stream, self._body_of = self._body_of, None
        if stream is not None and self._body_ends and not self._is_cut_off(stream):
            self._peer_ended(stream)

    def _is_cut_off(self, stream: Stream) -> bool:
        """Whether the peer ends a stream inside of a message; that is an end before its end."""
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
                ErrorCode.PROTOCOL_ERROR,
                f"a frame of type {head.kind} on stream {head.stream_id}, which is not open",
            )

    # --- headers

    def _take_headers(self, head: FrameHead, payload: bytes) -> None:
        if not head.stream_id & 1:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"stream {head.stream_id}")
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
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "headers in the middle of a stream")
        elif ends and self._is_cut_off(stream):
            return
        elif not stream.is_deaf:
            stream.receiver.on_fields(fields)
        if stream is not None and ends and self._is_open(stream):
            self._peer_ended(stream)

    def _end_here(self, stream_id: int) -> None:
        """A stream of the peer's ends before the peer has ended it."""
        self._late_ids[stream_id] = None
        if len(self._late_ids) > _MAX_LATE_COUNT:
            del self._late_ids[next(iter(self._late_ids))]

    def _check_late(self, head: FrameHead) -> None:
        """Headers of a stream that is not open: they may have been on their way when it was ended
        here. Else the peer's numbers go back (RFC 9113, 5.1.1).
        """
        self._check_not_idle(head)
        self._in_vain()
        if self._accept is not None and head.stream_id not in self._late_ids:
            raise ConnectionBroken(
                ErrorCode.PROTOCOL_ERROR,
                f"stream {head.stream_id} is opened after {self._last_peer_id}",
            )

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
            self._in_vain()
            return
        self._reset_count += 1
        if self._accept is not None and self._reset_count > _MAX_RESET_COUNT:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "streams that are reset at once")
        self._break(stream, int.from_bytes(payload), "the stream was reset")

    def _take_settings(self, head: FrameHead, payload: bytes) -> None:
        if head.stream_id or (head.flags & Flag.ACK and payload):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "SETTINGS out of place")
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
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if not head.flags & Flag.ACK:
            self.output.put(wire.ping(payload, is_ack=True))

    def _take_go_away(self, head: FrameHead, payload: bytes) -> None:
        if head.stream_id or len(payload) < 8:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "GOAWAY is cut off")
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
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a window that is widened by nothing")
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
    raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, which was switched off")
