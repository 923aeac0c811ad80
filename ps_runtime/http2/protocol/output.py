"""Output of one end of an HTTP/2 connection: frames in order, within the peer's windows.

Invariants:
    H2O-1  No more bytes leave than the peer's windows take, on each stream and on all together.
    H2O-2  Header blocks are compressed in the order in which they leave.
"""

from __future__ import annotations

from collections.abc import Sequence

import hpack

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.frames import ConnectionBroken, ErrorCode, Flag, FrameType, Setting
from ps_runtime.http2.protocol.streams import Fields, MessagePiece, Stream

_HEADER_FRAME_BYTES = 16 * 1024
_MAX_WAITING_BYTES = 1024 * 1024
"""Bytes of waiting frames without their messages. 100 streams that end together need less."""


class Http2Output:
    """The output of one connection."""

    def __init__(self) -> None:
        self.pieces: list[MessagePiece] = []
        self.data_frame_count = 0
        self.stream_window = wire.DEFAULT_WINDOW_BYTES
        self._waiting_bytes = 0
        self._encoder = hpack.Encoder()
        self._window = wire.DEFAULT_WINDOW_BYTES
        self._max_frame = wire.DEFAULT_MAX_FRAME_BYTES

    def take(self) -> list[MessagePiece]:
        """Remove and return the pieces to write now, in order."""
        pieces, self.pieces = self.pieces, []
        self._waiting_bytes = 0
        return pieces

    def put(self, frame: bytes) -> None:
        """Queue a frame, or the head of one."""
        self._waiting_bytes += len(frame)
        self.pieces.append(frame)

    def check_that_it_leaves(self) -> None:
        """Raise ConnectionBroken for a peer that does not read the many answers that it causes."""
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            raise ConnectionBroken("unread answers", ErrorCode.ENHANCE_YOUR_CALM)

    def fields(self, stream: Stream, fields: Fields, *, ends: bool = False) -> None:
        """Queue headers or trailers now."""
        block = self._encoder.encode(list(fields))
        self.put(wire.header_frames(stream.stream_id, block, _HEADER_FRAME_BYTES, ends=ends))

    def message(self, stream: Stream, pieces: Sequence[MessagePiece]) -> bool:
        """Queue a message, whose bytes must not change until they are written. True if all of it
        may leave now; if not, the stream's receiver gets `on_writable`.
        """
        if stream.tail is not None:
            return True
        length = sum(map(len, pieces))
        whole = length + wire.PREFIX_BYTES
        if whole <= self._sendable_bytes(stream) and not stream.queued_bytes:
            self._spend(stream, whole)
            head = wire.head(whole, FrameType.DATA, 0, stream.stream_id)
            self.put(head + wire.prefix(length))
            self.pieces += filter(len, pieces)  # Python 3.12's loop never removes an empty piece
            return True
        stream.put((wire.prefix(length), *pieces))
        self.pump(stream)
        stream.had_to_wait = stream.queued_bytes > 0
        return not stream.had_to_wait

    def pump(self, stream: Stream) -> None:
        """Send a stream's pieces as far as the peer takes them, and then its end."""
        while stream.queued_bytes:
            count = min(self._sendable_bytes(stream), stream.queued_bytes)
            if count <= 0:
                return
            self._spend(stream, count)
            self.put(wire.head(count, FrameType.DATA, 0, stream.stream_id))
            self.pieces += stream.next_pieces(count)
        if stream.tail is not None and not stream.has_ended:
            stream.has_ended = True
            if stream.tail:
                self.fields(stream, stream.tail, ends=True)
            else:
                self.put(wire.frame(FrameType.DATA, Flag.END_STREAM, stream.stream_id))
        if stream.had_to_wait:
            stream.had_to_wait = False
            stream.receiver.on_writable()

    def _sendable_bytes(self, stream: Stream) -> int:
        return min(stream.send_window, self._window, self._max_frame)

    def _spend(self, stream: Stream, count: int) -> None:
        stream.send_window -= count
        self._window -= count
        self.data_frame_count += 1

    # --- from the peer

    def widen(self, increment: int) -> None:
        """Widen the window of all streams together; ConnectionBroken above its bound."""
        self._window = _wider(self._window, increment)

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """Widen a stream's window; ConnectionBroken above its bound."""
        stream.send_window = _wider(stream.send_window, increment)

    def set(self, name: int, value: int, streams: Sequence[Stream]) -> None:
        """Apply a setting of the peer's; ConnectionBroken if a window exceeds its bound."""
        if name == Setting.HEADER_TABLE_SIZE:
            # The size never grows again: hpack stores every change until the next headers leave.
            if value < self._encoder.header_table_size:
                self._encoder.header_table_size = value
        elif name == Setting.MAX_FRAME_SIZE:
            self._max_frame = value
        elif name == Setting.INITIAL_WINDOW_SIZE:
            for stream in streams:
                self.widen_stream(stream, value - self.stream_window)
            self.stream_window = value


def _wider(window: int, increment: int) -> int:
    if window + increment > wire.MAX_WINDOW_BYTES:
        raise ConnectionBroken("a window above 2^31 - 1", ErrorCode.FLOW_CONTROL_ERROR)
    return window + increment
