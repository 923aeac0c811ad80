"""The header of a server's part, made in pieces: a part may have a quarter of a million blocks.

The json module holds the interpreter during a call, and so does the end of a large dict: with
65,000 blocks, each of a few such calls in a thread stopped the server's loop for a tenth of a
second. So nothing here is one call for all blocks.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from ps_runtime.checkpoint.part_file import LENGTH_BYTES, METADATA_KEY, VERSION, StoredBlock

_AT_ONCE = 64
"""Entries that one call encodes."""
_SORTED_AT_ONCE = 4096
_PIECE_BYTES = 1024 * 1024


def to_json(value: object) -> str:
    """The JSON in ASCII, so that characters are bytes."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def header(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a part with few entries, as safetensors has it."""
    return {"__metadata__": {METADATA_KEY: to_json(metadata)}, **tensors}


def metadata(checkpoint: int, cluster_id: str, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a server's part."""
    return {
        "version": VERSION, "checkpoint": checkpoint, "cluster_id": cluster_id, "blocks": blocks,
    }  # fmt: skip


def header_pieces(
    checkpoint: int,
    cluster_id: str,
    blocks: Mapping[tuple[str, int], StoredBlock],
    tensors: Mapping[str, Any],
) -> Iterator[str]:
    """The JSON of a server's header, piece by piece; the same as that of `header`."""
    begin, end = to_json(header({}, {})).split("{}")
    yield begin
    for piece in _metadata_pieces(checkpoint, cluster_id, blocks):
        yield to_json(piece)[1:-1]
    yield end.removesuffix("}")
    for piece in _members(tensors.items()):
        yield f",{piece}"
    yield "}"


def _metadata_pieces(
    checkpoint: int, cluster_id: str, blocks: Mapping[tuple[str, int], StoredBlock]
) -> Iterator[str]:
    yield to_json(metadata(checkpoint, cluster_id, {})).removesuffix("}}")
    between_tables = ""
    for table, numbers in _in_order(blocks):
        yield f"{between_tables}{to_json(table)}:{{"
        between_tables, between = ",", ""
        entries = ((str(number), _entry(blocks[table, number])) for number in numbers)
        for piece in _members(entries):
            yield between + piece
            between = ","
        yield "}"
    yield "}}"


def _members(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The members of a JSON object, without its braces, some at a time."""
    left = iter(items)
    while some := dict(itertools.islice(left, _AT_ONCE)):
        yield to_json(some)[1:-1]


def _entry(stored: StoredBlock) -> dict[str, Any]:
    entry = {"version": stored.version, "steps": stored.steps, "crc32": dict(stored.crc32s)}
    return {**entry, "in": stored.place} if stored.place else entry


def _in_order(blocks: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Iterator[int]]]:
    """The tables by name, each with the numbers of its blocks, ascending."""
    by_table: dict[str, list[int]] = {}
    for table, block in blocks:
        by_table.setdefault(table, []).append(block)
    for table, found in sorted(by_table.items()):
        begins = range(0, len(found), _SORTED_AT_ONCE)
        runs = (sorted(found[begin : begin + _SORTED_AT_ONCE]) for begin in begins)
        yield table, heapq.merge(*runs)


def padded_pieces(pieces: Iterable[str], header_bytes: int) -> Iterator[bytes]:
    """The beginning of a part: its header's length, the header, spaces up to `header_bytes`."""
    gathered = bytearray(header_bytes.to_bytes(LENGTH_BYTES, "little"))
    left = header_bytes
    for piece in pieces:
        gathered += piece.encode()
        left -= len(piece)
        if len(gathered) >= _PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    while left > 0:
        count = min(left, _PIECE_BYTES)
        gathered += count * b" "
        left -= count
        yield bytes(gathered)
        gathered.clear()
    if gathered:
        yield bytes(gathered)


def clear_by_entry(mapping: MutableMapping[Any, Any]) -> None:
    """Empty a mapping entry by entry, because the end of a large one holds the interpreter."""
    while mapping:
        mapping.popitem()
