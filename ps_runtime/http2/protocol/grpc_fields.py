"""The header fields of gRPC calls (gRPC's PROTOCOL-HTTP2)."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from ps_runtime.http2.protocol.streams import Fields

Metadata = tuple[tuple[str, str | bytes], ...]

CONTENT_TYPE = (b"content-type", b"application/grpc")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_MAX_TIMEOUT_MS = 99_999_999
_STATUS = re.compile(rb"[0-9]{1,9}")


def request_fields(path: str, authority: str, timeout_s: float | None) -> Fields:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        CONTENT_TYPE,
    ]
    if timeout_s is not None:
        timeout_ms = min(max(math.ceil(timeout_s * 1000), 1), _MAX_TIMEOUT_MS)
        fields.append((b"grpc-timeout", b"%dm" % timeout_ms))
    return fields


def timeout_s(value: bytes) -> float | None:
    """The seconds of a grpc-timeout; None if it is malformed."""
    found = _TIMEOUT.fullmatch(value)
    return None if found is None else int(found[1]) * _UNIT_S[found[2]]


def trailers(status: int, text: str, metadata: Metadata = ()) -> Fields:
    """The trailers that end a call."""
    fields = [(b"grpc-status", b"%d" % status)]
    if text:
        fields.append((b"grpc-message", _quoted(text)))
    for key, value in metadata:
        raw = value.encode() if isinstance(value, str) else value
        if key.endswith("-bin"):
            raw = base64.b64encode(raw).rstrip(b"=")
        fields.append((key.encode(), raw))
    return fields


def read_trailers(fields: Fields) -> tuple[int, str, Metadata] | None:
    """Status, text and metadata of trailers; None without a status."""
    found = dict(fields)
    status = found.get(b"grpc-status", b"")
    if not _STATUS.fullmatch(status):
        return None
    text = unquote_to_bytes(found.get(b"grpc-message", b"")).decode(errors="replace")
    return int(status), text, tuple(_metadata(fields))


def _metadata(fields: Fields) -> Iterable[tuple[str, str | bytes]]:
    for key, value in fields:
        name = key.decode(errors="replace")
        if name.startswith((":", "grpc-", "content-type")):
            continue
        if not name.endswith("-bin"):
            yield name, value.decode(errors="replace")
            continue
        try:
            yield name, base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
        except binascii.Error:
            continue  # not from a gRPC of ours


def _quoted(text: str) -> bytes:
    """Percent-encode all but printable ASCII, and the percent sign."""
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in text.encode()
    )
