"""What one end of an HTTP/2 connection takes of the other."""

from __future__ import annotations

from dataclasses import dataclass

from ps_runtime.http2.protocol import frames as wire


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one end takes of the other.

    Attributes:
        max_message_bytes: of one message.
        window_bytes: of one stream, sent and not consumed. A message is consumed when all of it has
            come, and room is given back by halves of this: with less than two messages in it, a
            peer could wait for room inside of one, forever.
        stream_count: streams that the peer may have open at once.

    Raises:
        ValueError: a window is smaller than that, or than what a peer may send before it knows, or
            larger than there is.
    """

    max_message_bytes: int
    window_bytes: int = 16 * 1024 * 1024
    stream_count: int = 100

    def __post_init__(self) -> None:
        least = max(2 * self._whole_bytes, wire.DEFAULT_WINDOW_BYTES)
        if not least <= self.window_bytes <= self.connection_window_bytes <= wire.MAX_WINDOW_BYTES:
            raise ValueError(
                f"{self}; expected a window of {least} bytes or more, and all below 2 GiB"
            )

    @property
    def connection_window_bytes(self) -> int:
        """Of all streams together: each may be inside of a message, and one may go on."""
        return self.stream_count * self._whole_bytes + self.window_bytes

    @property
    def max_frame_bytes(self) -> int:
        """Of DATA: a message of the largest size, with its prefix, fits one frame."""
        least, most = wire.DEFAULT_MAX_FRAME_BYTES, wire.MAX_MAX_FRAME_BYTES
        return min(max(self._whole_bytes, least), most)

    @property
    def _whole_bytes(self) -> int:
        return self.max_message_bytes + wire.PREFIX_BYTES
