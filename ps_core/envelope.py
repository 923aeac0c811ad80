"""Protobuf messages around large payloads, joined and split without a second copy of the payload.

Generated code copies a `bytes` field into the message, and again when the message is written. A
block's payload is a megabyte. So the data path writes the small fields with generated code and puts
the payload beside them with one join. A reader takes a view of the payload and parses the rest. The
bytes on the wire are ordinary protobuf either way.

Rules:
    - The outer message has one set field of a message type (a oneof). The payload is a bytes field
      of that inner message, written last; or each of several messages in it has a payload.
    - Reading accepts any order of fields, as protobuf demands; the last of several payloads counts.
    - Groups, which proto3 lacks, are refused.

Invariants:
    ENV-1  split(join(rest, payload)) gives rest and payload again; so do the two for several.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from ps_core.errors import InvalidTensor
from ps_core.limits import MAX_ENTRY_BYTES, MESSAGE_OVERHEAD_BYTES

ALIGNMENT_BYTES = 16
"""Alignment of the content of CPython's `bytes`; no element is wider."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

MAX_BESIDE_BYTES = MESSAGE_OVERHEAD_BYTES
"""Bytes of fields beside a payload; a message with more is not searched further."""

_FAST_BYTES = 512
"""Bytes at the start of a message in which small numbers are read without a call."""

_MOST_FIELDS = 16
"""Fields of a message on a stream, which has one entry and few others."""

_SHORT = tuple(bytes((number,)) for number in range(0x80))
"""Varints of one byte, the most frequent ones."""


def varint(number: int) -> bytes:
    """`number` (0 or more) as a base-128 varint."""
    if number < 0x80:
        return _SHORT[number]
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def join(
    outer_field: int,
    rest: bytes,
    payload_field: int,
    payload: bytes | memoryview,
    padding_field: int = 0,
) -> bytes:
    """The outer message whose field `outer_field` holds `rest` and, behind it, the payload.

    Args:
        outer_field: number of the field of the inner message.
        rest: the inner message without its payload, serialized.
        payload_field: number of the payload in the inner message.
        payload: any C-contiguous buffer, copied once, into the result.
        padding_field: number of a bytes field of the inner message that nobody reads; with it the
            payload begins at a multiple of ALIGNMENT_BYTES, so that a receiver can compute on it in
            place. 0: no padding.
    """
    return b"".join(pieces(outer_field, rest, payload_field, payload, padding_field))


def pieces(
    outer_field: int,
    rest: bytes,
    payload_field: int,
    payload: bytes | memoryview,
    padding_field: int,
) -> tuple[bytes, memoryview]:
    """The pieces of `join`: everything before the payload, and a view of the payload."""
    view = memoryview(payload).cast("B")
    return before(outer_field, rest, payload_field, view.nbytes, padding_field), view


def before(
    outer_field: int, rest: bytes, payload_field: int, byte_count: int, padding_field: int = 0
) -> bytes:
    """The bytes of `join` before the payload, which has `byte_count`."""
    head = varint(payload_field << 3 | _BYTES) + varint(byte_count)
    padding = _head(padding_field, 0) if padding_field else b""
    outer = _head(outer_field, len(rest) + len(padding) + len(head) + byte_count)
    # The padding changes the length before it and, seldom, the size of that length's varint: then
    # the payload is not aligned, which costs its receiver only a copy.
    missing = -(len(outer) + len(rest) + len(padding) + len(head)) % ALIGNMENT_BYTES
    if padding_field and missing:
        padding = _head(padding_field, missing) + bytes(missing)
        outer = _head(outer_field, len(rest) + len(padding) + len(head) + byte_count)
    return b"".join((outer, rest, padding, head))


def pieces_of_several(
    outer_field: int,
    rest: bytes,
    inner_field: int,
    parts: Sequence[tuple[bytes, bytes | memoryview]],
    payload_field: int,
    padding_field: int,
) -> list[bytes | memoryview]:
    """The outer message whose field `outer_field` holds `rest` and, behind it, one message for each
    of `parts`, in pieces to be joined or written one behind the other.

    Args:
        outer_field: number of the field that holds everything.
        rest: its other fields, serialized.
        inner_field: number of the repeated field of the parts.
        parts: fields beside the payload, serialized, and the payload; the result has a view of it.
        payload_field: number of the payload in a part.
        padding_field: as in `join`; at most 15.
    """
    views = [memoryview(payload).cast("B") for _, payload in parts]
    about = len(rest) + sum(view.nbytes + 2 * ALIGNMENT_BYTES for view in views)
    begin = at = len(_head(outer_field, about))
    pieces: list[bytes | memoryview] = [b"", rest]
    at += len(rest)
    for (beside, _), view in zip(parts, views, strict=True):
        tail = _head(payload_field, view.nbytes)
        length = len(beside) + 2 + len(tail) + view.nbytes
        # As in `join`: where the padding makes a length's varint longer, the payload is unaligned.
        inner = _head(inner_field, length)
        missing = -(at + len(inner) + length - view.nbytes) % ALIGNMENT_BYTES
        inner = _head(inner_field, length + missing)
        pieces += inner, beside, _head(padding_field, missing), bytes(missing), tail, view
        at += len(inner) + length + missing
    pieces[0] = _head(outer_field, at - begin)
    return pieces


def _head(field: int, size: int) -> bytes:
    return varint(field << 3 | _BYTES) + varint(size)


def wrap(outer_field: int, inner: bytes | memoryview) -> bytes:
    """The outer message whose field `outer_field` holds the serialized `inner`."""
    return b"".join((_head(outer_field, len(inner)), inner))


def split(
    message: bytes | memoryview, outer_field: int, payload_field: int
) -> tuple[bytes, memoryview] | None:
    """The inner message without its payload, and a view of the payload; None for another field.
    InvalidTensor if the message is truncated, or is no protobuf.
    """
    inner = _inside(message, outer_field)
    return None if inner is None else _split_inner(inner, payload_field)


def split_several(
    message: bytes | memoryview, outer_field: int, inner_field: int, payload_field: int
) -> tuple[bytes, list[tuple[bytes, memoryview]]] | None:
    """The inverse of `pieces_of_several`: the rest, and of each part the fields beside its payload
    and a view of the payload. None, or InvalidTensor, as from `split`.
    """
    view = _inside(message, outer_field)
    if view is None:
        return None
    rest: list[memoryview] = []
    parts: list[tuple[bytes, memoryview]] = []
    at = 0
    while at < len(view):
        begin = at
        key, at = _read_varint(view, at)
        value, at = _skip(view, at, key & 7)
        if key == (inner_field << 3 | _BYTES):
            parts.append(_split_inner(view[value:at], payload_field))
        else:
            rest.append(view[begin:at])
    return b"".join(rest), parts


def _inside(message: bytes | memoryview, outer_field: int) -> memoryview | None:
    """The content of a message's only field, if that is `outer_field`."""
    view = memoryview(message)
    key, at = _read_varint(view, 0)
    if key != (outer_field << 3 | _BYTES):
        return None
    length, at = _read_varint(view, at)
    if at + length != len(view):
        raise InvalidTensor(f"a message of {len(view)} bytes announces {at + length}")
    return view[at:]


def _split_inner(view: memoryview, payload_field: int) -> tuple[bytes, memoryview]:
    payload_key = payload_field << 3 | _BYTES
    rest: list[memoryview] = []
    payload = view[:0]
    at = done = 0
    # Fields beside a payload are short and before it: read as bytes, they take a third of the time.
    head = bytes(view[:_FAST_BYTES])
    last = len(head) - 1
    while at < len(view):
        begin = at
        key, number = (head[at], head[at + 1]) if at < last else (0x80, 0)
        if key | number < 0x80 and key & 7 == _VARINT:
            at += 2
        else:
            if begin - payload.nbytes > MAX_BESIDE_BYTES:
                break  # the caller sees it by the length of the rest
            key, at = _read_varint(view, at)
            value, at = _skip(view, at, key & 7)
            if key == payload_key:
                payload = view[value:at]
                rest.append(view[done:begin])
                done = at
    rest.append(view[done:])
    return b"".join(rest), payload


def is_frugal(
    message: bytes | memoryview,
    several: tuple[int, int, int],
    most_count: int,
    alone: tuple[int, int],
) -> bool:
    """True if a message may be parsed: it has few fields, and few bytes outside payloads. Reads a
    bounded part of any message; InvalidTensor as from `split`.

    Args:
        several: numbers of the field with several messages that have payloads, of the repeated
            field in it, and of their payloads.
        most_count: bound of those messages.
        alone: numbers of the field with one such message, and of its payload.
    """
    if len(message) <= MAX_ENTRY_BYTES:
        return True
    view = memoryview(message)
    batch_field, inner_field, payload_field = several
    beside = at = 0
    for _ in range(_MOST_FIELDS):
        if at >= len(view):
            return beside <= MAX_ENTRY_BYTES
        begin = at
        key, at = _read_varint(view, at)
        value, at = _skip(view, at, key & 7)
        if key == (batch_field << 3 | _BYTES):
            spare = MAX_ENTRY_BYTES - beside - (len(view) - at)
            beside += _beside_several(view[value:at], inner_field, payload_field, most_count, spare)
        elif key == (alone[0] << 3 | _BYTES):
            beside += len(_split_inner(view[value:at], alone[1])[0])
        else:
            beside += at - begin
        if beside > MAX_ENTRY_BYTES:
            break
    return False


def _beside_several(
    view: memoryview, inner_field: int, payload_field: int, most: int, spare: int
) -> int:
    """Bytes beside the payloads of several messages, or any number up to `spare` if there are no
    more; over the limit for too many messages.
    """
    plain = _plain_part(inner_field, payload_field)
    beside = at = 0
    for _ in range(most + _MOST_FIELDS):
        left = len(view) - at
        if not left or beside + left <= spare:  # any rest fits
            return beside + left
        if beside > MAX_ENTRY_BYTES:
            break
        begin = at
        if (found := plain.match(view, at)) is not None:
            at = found.end(1) + _short_number(found[1])
            size = _short_number(found[2])
            if found.end() + size <= at <= len(view):
                beside += at - begin - size
                continue
            at = begin  # malformed: the slow way raises the error
        key, at = _read_varint(view, at)
        value, at = _skip(view, at, key & 7)
        beside += at - begin
        if key == (inner_field << 3 | _BYTES):
            beside -= _split_inner(view[value:at], payload_field)[1].nbytes
    return MAX_ENTRY_BYTES + 1


@functools.cache
def _plain_part(inner_field: int, payload_field: int) -> re.Pattern[bytes]:
    """Pattern of the usual start of a message with a payload: its key and length, fields of small
    numbers, and the payload's key and length. Field by field, that takes ten times longer.
    """
    number = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
    length = rb"([\x80-\xff]{0,3}[\x00-\x7f])"
    keys = re.escape(bytes(field << 3 | _VARINT for field in range(1, 16)))
    inner, payload = (re.escape(varint(f << 3 | _BYTES)) for f in (inner_field, payload_field))
    return re.compile(
        inner + length + rb"(?:[" + keys + rb"]" + number + rb"){0,15}" + payload + length
    )


def _short_number(encoded: bytes) -> int:
    """A varint of up to four bytes."""
    number = int.from_bytes(encoded, "little")
    low = number & 0x7F | number >> 1 & 0x3F80
    return low | number >> 2 & 0x1FC000 | number >> 3 & 0xFE00000


def has_few(
    message: bytes | memoryview, outer_field: int, counted: int, most_count: int, free: int
) -> bool:
    """True if a message with a repeated message field may be parsed: the field has few entries, and
    few bytes are beside it. InvalidTensor as from `split`.

    Args:
        outer_field: number of the field that holds the inner message.
        counted: number of the repeated field in that.
        most_count: bound of its entries.
        free: number of a field in the inner message whose size does not matter.
    """
    view = memoryview(message)
    beside = count = at = 0
    while at < len(view) and beside <= MAX_ENTRY_BYTES and count <= most_count:
        begin = at
        key, at = _read_varint(view, at)
        value, at = _skip(view, at, key & 7)
        beside += at - begin
        if key != (outer_field << 3 | _BYTES):
            continue
        inner = view[value:at]
        beside -= len(inner)
        within = 0
        while within < len(inner) and beside <= MAX_ENTRY_BYTES and count <= most_count:
            begin = within
            key, within = _read_varint(inner, within)
            _, within = _skip(inner, within, key & 7)
            if key == (counted << 3 | _BYTES):
                count += 1
            elif key != (free << 3 | _BYTES):
                beside += within - begin
    return beside <= MAX_ENTRY_BYTES and count <= most_count


def _skip(view: memoryview, at: int, wire_type: int) -> tuple[int, int]:
    """Start and end of a field's value."""
    begin = at
    if wire_type == _VARINT:
        _, at = _read_varint(view, at)
    elif wire_type == _BYTES:
        length, begin = _read_varint(view, at)
        at = begin + length
    elif wire_type == _FIXED64:
        at += 8
    elif wire_type == _FIXED32:
        at += 4
    else:
        raise InvalidTensor(f"a message has wire type {wire_type} at byte {at}")
    if at > len(view):
        raise InvalidTensor(f"a message of {len(view)} bytes ends inside a field at byte {begin}")
    return begin, at


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise InvalidTensor(f"a message of {len(view)} bytes ends inside a number at byte {at}")
        byte = view[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
