"""What one end of an HTTP/2 connection sends: frames in order, within what the peer takes.

Invariants:
    H2O-1  No more leaves than the peer's windows take, on each stream and on all together.
    H2O-2  Header blocks are compressed in the order in which they leave.
"""

from __future__ import annotations

from collections.abc import Sequence

import hpack

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.frames import ConnectionBroken, ErrorCode, Flag, FrameType, Setting
from ps_runtime.http2.protocol.streams import Fields, Piece, Stream

_HEADER_FRAME_BYTES = 16 * 1024
_MAX_WAITING_BYTES = 1024 * 1024
"""Of frames that wait to leave, their messages aside. 100 streams that end together need less."""


class Output:
    """The way out of one connection."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.data_frame_count = 0
        self.stream_window = wire.DEFAULT_WINDOW_BYTES
        self._waiting_bytes = 0
        self._encoder = hpack.Encoder()
        self._window = wire.DEFAULT_WINDOW_BYTES
        self._max_frame = wire.DEFAULT_MAX_FRAME_BYTES

    def take(self) -> list[Piece]:
        """What to write now, in order; it is forgotten here."""
        pieces, self.pieces = self.pieces, []
        self._waiting_bytes = 0
        return pieces

    def put(self, frame: bytes) -> None:
        """A frame, or the head of one."""
        self._waiting_bytes += len(frame)
        self.pieces.append(frame)

    def check_that_it_leaves(self) -> None:
        """Hear no more of a peer that has much to be answered, and does not read the answers.

        Raises:
            ConnectionBroken: it is such a one.
        """
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "answers that nobody reads")

    def fields(self, stream: Stream, fields: Fields, *, ends: bool = False) -> None:
        """Headers or trailers, now."""
        block = self._encoder.encode(list(fields))
        frames = wire.header_frames(stream.stream_id, block, _HEADER_FRAME_BYTES, ends=ends)
        self.put(frames)

    def message(self, stream: Stream, pieces: Sequence[Piece]) -> bool:
        """A message, of bytes that must not change until they are written.

        Returns:
            Whether all of it may leave now; if not, the stream's receiver hears when it may.
        """
        if stream.tail is not None:
            return True
        length = sum(map(len, pieces))
        whole = length + wire.PREFIX_BYTES
        if whole <= self._room(stream) and not stream.queued_bytes:
            self._spend(stream, whole)
            head = wire.head(whole, FrameType.DATA, 0, stream.stream_id)
            self.put(head + wire.prefix(length))
            self.pieces += filter(len, pieces)  # the loop of Python 3.12 never gets rid of nothing
            return True
        stream.put((wire.prefix(length), *pieces))
        self.pump(stream)
        stream.had_to_wait = stream.queued_bytes > 0
        return not stream.had_to_wait

    def pump(self, stream: Stream) -> None:
        """Let leave what waits on a stream, as far as the peer takes it, and then its end."""
        while stream.queued_bytes:
            count = min(self._room(stream), stream.queued_bytes)
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
            stream.receiver.on_room()

    def _room(self, stream: Stream) -> int:
        return min(stream.send_window, self._window, self._max_frame)

    def _spend(self, stream: Stream, count: int) -> None:
        stream.send_window -= count
        self._window -= count
        self.data_frame_count += 1

    # --- what the peer says

    def widen(self, increment: int) -> None:
        """The peer takes so much more on all streams together.

        Raises:
            ConnectionBroken: that is more than there is.
        """
        self._window = _wider(self._window, increment)

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """The same for one stream."""
        stream.send_window = _wider(stream.send_window, increment)

    def set(self, name: int, value: int, streams: Sequence[Stream]) -> None:
        """A setting of the peer's.

        Raises:
            ConnectionBroken: a window becomes more than there is.
        """
        if name == Setting.HEADER_TABLE_SIZE:
            # It never grows again: hpack remembers every change until the next headers leave.
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
        raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
    return window + increment
