"""Incoming header blocks: joined from their frames, and decompressed (RFC 7541).

Rules:
    - No other frame comes between the frames of a block.
    - Every block is decompressed, even of a stream that is gone: the compression has a memory.
"""

from __future__ import annotations

import hpack

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.frames import ConnectionBroken, ErrorCode, Flag, FrameHead, FrameType
from ps_runtime.http2.protocol.streams import Fields

MAX_LIST_BYTES = 16 * 1024
"""Bytes of a block's fields, as RFC 9113 counts them (6.5.2)."""

_MAX_BLOCK_BYTES = 32 * 1024


class HeaderBlocks:
    """The header blocks of one peer."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_LIST_BYTES)
        self._block = bytearray()
        self._head: FrameHead | None = None

    def check_place(self, head: FrameHead) -> None:
        """Refuse another frame inside of a block, and a rest without a beginning."""
        open_id = None if self._head is None else self._head.stream_id
        if open_id != (head.stream_id if head.kind == FrameType.CONTINUATION else None):
            raise ConnectionBroken("a header block is cut in two")

    def take(self, head: FrameHead, payload: bytes) -> tuple[FrameHead, Fields] | None:
        """Take a HEADERS or CONTINUATION frame; the last one of a block gives the head of the
        block's first frame and its fields. ConnectionBroken if they are too long, or not readable.
        """
        if head.kind == FrameType.HEADERS:
            self._head = head
            self._block[:] = wire.without_padding(payload, head.flags)
        else:
            self._block += payload
            if not payload:
                raise ConnectionBroken("CONTINUATION of nothing", ErrorCode.ENHANCE_YOUR_CALM)
        if len(self._block) > _MAX_BLOCK_BYTES:
            raise ConnectionBroken("a header block without end", ErrorCode.ENHANCE_YOUR_CALM)
        first = self._head
        if first is None or not head.flags & Flag.END_HEADERS:
            return None
        self._head = None
        return first, self._fields()

    def _fields(self) -> Fields:
        try:
            found = self._decoder.decode(bytes(self._block), raw=True)
        except hpack.OversizedHeaderListError:
            raise ConnectionBroken("too many headers", ErrorCode.ENHANCE_YOUR_CALM) from None
        except hpack.HPACKError as error:
            raise ConnectionBroken(f"headers: {error}", ErrorCode.COMPRESSION_ERROR) from None
        return [(bytes(name), bytes(value)) for name, value in found]
