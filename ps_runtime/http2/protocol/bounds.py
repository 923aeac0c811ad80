"""Limits of one end of an HTTP/2 connection on the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ps_runtime.http2.protocol import frames as wire


@dataclass(frozen=True)
class Bounds:
    """Limits on the peer.

    Attributes:
        max_message_bytes: the largest message.
        window_bytes: bytes of one stream that were sent and not consumed. A message is consumed
            when all of it has come, and the window is given back by halves: with space for less
            than two messages, a peer could wait inside of one forever.
        stream_count: streams that the peer may have open at once.

    Raises:
        ValueError: the window is smaller than that, or than HTTP/2's default, or above its bound.
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
        """The window of all streams together: each may be inside of a message, and one goes on."""
        return self.stream_count * self._whole_bytes + self.window_bytes

    @cached_property
    def max_frame_bytes(self) -> int:
        """The largest DATA frame: it fits a message of the largest size with its prefix."""
        least, most = wire.DEFAULT_MAX_FRAME_BYTES, wire.MAX_MAX_FRAME_BYTES
        return min(max(self._whole_bytes, least), most)

    @property
    def _whole_bytes(self) -> int:
        return self.max_message_bytes + wire.PREFIX_BYTES
