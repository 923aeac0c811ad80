"""Protobuf messages around one large payload, joined and split without copying the payload twice.

The generated code copies a `bytes` field into the message, and again when the message is written. A
block's payload is a megabyte, so the data path writes the few small fields with the generated code
and puts the payload beside them with one join; reading, it takes a view of the payload and parses
the rest. What is on the wire is ordinary protobuf either way.

Rules:
    - The outer message has one set field of a message type (a oneof); the payload is a bytes field
      of that inner message, and the last to be written.
    - Reading accepts any order of fields, as protobuf demands; the last of several payloads counts.

Invariants:
    ENV-1  split(join(rest, payload)) gives rest and payload again.

What it deliberately does not do: know any message of the contract; groups, which proto3 lacks.
"""

from __future__ import annotations

from ps_core.errors import InvalidTensor

ALIGNMENT_BYTES = 16
"""CPython's `bytes` begin their content at such an address, and no element is wider."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_SHORT = tuple(bytes((number,)) for number in range(0x80))
"""The varints of one byte: most of those that are written."""


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
        outer_field: the number of the field that holds the inner message.
        rest: the inner message without its payload, serialized.
        payload_field: the number of the payload in the inner message.
        payload: the bytes; any C-contiguous buffer, copied once, into the result.
        padding_field: a bytes field of the inner message that nobody reads; with it the payload
            begins at a multiple of ALIGNMENT_BYTES, so that a receiver can compute on it where it
            lies. 0 leaves it where it falls.
    """
    view = memoryview(payload).cast("B")
    head = varint(payload_field << 3 | _BYTES) + varint(view.nbytes)
    padding = _head(padding_field, 0) if padding_field else b""
    outer = _head(outer_field, len(rest) + len(padding) + len(head) + view.nbytes)
    # The padding changes the length before it, and so, seldom, how many bytes that one takes: then
    # the payload lies unaligned, which costs its receiver a copy and nothing else.
    missing = -(len(outer) + len(rest) + len(padding) + len(head)) % ALIGNMENT_BYTES
    if padding_field and missing:
        padding = _head(padding_field, missing) + bytes(missing)
        outer = _head(outer_field, len(rest) + len(padding) + len(head) + view.nbytes)
    return b"".join((outer, rest, padding, head, view))


def _head(field: int, size: int) -> bytes:
    return varint(field << 3 | _BYTES) + varint(size)


def wrap(outer_field: int, inner: bytes) -> bytes:
    """The outer message whose field `outer_field` holds the serialized `inner`."""
    return _head(outer_field, len(inner)) + inner


def split(message: bytes, outer_field: int, payload_field: int) -> tuple[bytes, memoryview] | None:
    """The inner message without its payload, and a view of the payload; None for another field.

    Raises:
        InvalidTensor: the message is cut off or is no protobuf.
    """
    view = memoryview(message)
    key, at = _read_varint(view, 0)
    if key != (outer_field << 3 | _BYTES):
        return None
    length, at = _read_varint(view, at)
    if at + length != len(view):
        raise InvalidTensor(f"a message of {len(view)} bytes announces {at + length}")
    rest: list[memoryview] = []
    payload = view[:0]
    while at < len(view):
        begin = at
        key, at = _read_varint(view, at)
        value, at = _skip(view, at, key & 7)
        if key >> 3 == payload_field:
            payload = view[value:at]
        else:
            rest.append(view[begin:at])
    return b"".join(rest), payload


def _skip(view: memoryview, at: int, wire_type: int) -> tuple[int, int]:
    """Where the value of a field begins and where it ends."""
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
