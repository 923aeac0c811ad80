"""HTTP/2 on the wire (RFC 9113): frames, settings, bounds of windows, and gRPC's message prefix."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD_BYTES = 9
PREFIX_BYTES = 5
"""gRPC's prefix of each message: a flag, and the length."""

DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_MAX_FRAME_BYTES = 16_384
MAX_MAX_FRAME_BYTES = (1 << 24) - 1
MAX_WINDOW_BYTES = (1 << 31) - 1

_HEAD = struct.Struct(">HBBBI")
_PREFIX = struct.Struct(">BI")
_SETTING = struct.Struct(">HI")


class FrameType(IntEnum):
    """Types of RFC 9113, section 6; others are ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """Bits of a frame's flags."""

    END_STREAM = 0x1
    ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """Identifiers of settings; others are ignored."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Codes of RST_STREAM and GOAWAY that we send, or tell apart."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionBroken(Exception):
    """The peer broke the protocol, or a bound: the connection ends with `code`."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class FrameHead(NamedTuple):
    """The head of a frame."""

    length: int
    kind: int
    flags: int
    stream_id: int


def read_head(view: memoryview, at: int) -> FrameHead:
    """The head at `at`, where FRAME_HEAD_BYTES must be."""
    high, low, kind, flags, stream_id = _HEAD.unpack_from(view, at)
    return FrameHead(high << 8 | low, kind, flags, stream_id & MAX_WINDOW_BYTES)


def check_length(head: FrameHead, expected: int) -> None:
    """Raise ConnectionBroken for a frame of a fixed length that has another."""
    if head.length != expected:
        raise ConnectionBroken(
            f"a frame of type {head.kind} has {head.length} bytes; expected {expected}",
            ErrorCode.FRAME_SIZE_ERROR,
        )


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return head(len(payload), kind, flags, stream_id) + payload


def prefix(length: int) -> bytes:
    """The prefix of an uncompressed message."""
    return _PREFIX.pack(0, length)


def read_prefix(raw: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int]:
    """The flag and the length of a message."""
    flag, length = _PREFIX.unpack_from(raw, at)
    return flag, length


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(name, value) for name, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The settings in order; ConnectionBroken if the length or a value is out of bounds."""
    if len(payload) % _SETTING.size:
        raise ConnectionBroken(
            f"SETTINGS has {len(payload)} bytes; expected sixes", ErrorCode.FRAME_SIZE_ERROR
        )
    found = list(_SETTING.iter_unpack(payload))
    for name, value in found:
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionBroken(f"ENABLE_PUSH is {value}")
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW_BYTES:
            raise ConnectionBroken(f"a window of {value} bytes", ErrorCode.FLOW_CONTROL_ERROR)
        in_bounds = DEFAULT_MAX_FRAME_BYTES <= value <= MAX_MAX_FRAME_BYTES
        if name == Setting.MAX_FRAME_SIZE and not in_bounds:
            raise ConnectionBroken(f"MAX_FRAME_SIZE is {value}")
    return found


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def reset(stream_id: int, code: int) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, int(code).to_bytes(4))


def go_away(last_stream_id: int, code: int, text: str) -> bytes:
    payload = last_stream_id.to_bytes(4) + int(code).to_bytes(4) + text.encode()
    return frame(FrameType.GOAWAY, 0, 0, payload)


def ping(payload: bytes, *, is_ack: bool) -> bytes:
    """A PING frame; `payload` has 8 bytes."""
    return frame(FrameType.PING, Flag.ACK if is_ack else 0, 0, payload)


def header_frames(stream_id: int, block: bytes, max_frame_bytes: int, *, ends: bool) -> bytes:
    """HEADERS, and CONTINUATION frames for a block that is longer than one frame."""
    frames, kind, flags = b"", FrameType.HEADERS, Flag.END_STREAM if ends else 0
    while len(block) > max_frame_bytes:
        frames += frame(kind, flags, stream_id, block[:max_frame_bytes])
        kind, flags, block = FrameType.CONTINUATION, 0, block[max_frame_bytes:]
    return frames + frame(kind, flags | Flag.END_HEADERS, stream_id, block)


def without_padding(payload: bytes, flags: int) -> bytes:
    """HEADERS' payload without padding and priority; ConnectionBroken if shorter than announced."""
    at, padding = 0, 0
    if flags & Flag.PADDED:
        padding, at = payload[0] if payload else 1, 1
    if flags & Flag.PRIORITY:
        at += 5
    if at + padding > len(payload):
        raise ConnectionBroken("HEADERS are all padding")
    return payload[at : len(payload) - padding]
