"""Spells out the bytes of a serialized protobuf message, field by field, for PROTOCOL.md."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_HEX_WIDTH = 40
_SHOWN_BYTES = 12


def dump(payload: bytes, descriptor: Any) -> str:
    """One line a field: its bytes, its path, its value; messages inside are indented."""
    return "\n".join(_lines(payload, descriptor, depth=0))


def _varint(payload: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = payload[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _lines(payload: bytes, descriptor: Any, depth: int) -> Iterator[str]:
    position = 0
    while position < len(payload):
        start = position
        tag, position = _varint(payload, position)
        field, wire_type = descriptor.fields_by_number[tag >> 3], tag & 7
        if wire_type == _LENGTH:
            length, position = _varint(payload, position)
            head, body = payload[start:position], payload[position : position + length]
            position += length
            yield from _length_delimited(head, body, field, depth)
        elif wire_type == _VARINT:
            value, position = _varint(payload, position)
            yield _line(payload[start:position], f"{_name(field)} = {_enum(field, value)}", depth)
        elif wire_type == _FIXED64:
            position += 8
            (number,) = struct.unpack("<d", payload[position - 8 : position])
            yield _line(payload[start:position], f"{_name(field)} = {number}", depth)
        else:
            raise ValueError(f"wire type {wire_type} is not used by the contract")


def _length_delimited(head: bytes, body: bytes, field: Any, depth: int) -> Iterator[str]:
    if field.message_type is not None:
        yield _line(head, f"{_name(field)}: {field.message_type.name}, {len(body)} bytes", depth)
        yield from _lines(body, field.message_type, depth + 1)
        return
    if field.type == field.TYPE_STRING:
        text = f'"{body.decode()}"'
    elif field.type == field.TYPE_BYTES:
        text = f"{len(body)} bytes"
    else:
        text = str(_packed(body))
    yield _line(head + body, f"{_name(field)} = {text}", depth)


def _packed(body: bytes) -> list[int]:
    values, position = [], 0
    while position < len(body):
        value, position = _varint(body, position)
        values.append(value)
    return values


def _name(field: Any) -> str:
    return f"{field.number} {field.name}"


def _enum(field: Any, value: int) -> str:
    if field.enum_type is None:
        return str(value)
    return f"{field.enum_type.values_by_number[value].name} ({value})"


def _line(raw: bytes, text: str, depth: int) -> str:
    rows = [raw[i : i + _SHOWN_BYTES].hex(" ") for i in range(0, len(raw), _SHOWN_BYTES)]
    indent = "  " * depth
    first = f"{rows[0]:<{_HEX_WIDTH}}{indent}{text}"
    return "\n".join([first, *rows[1:]])
