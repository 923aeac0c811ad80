"""What a decision does to values, as a primary tells its backups (SEMANTICS S8).

    Put        a sum becomes values
    Kept       a sum was reduced, and waits for its scale; `Put` without a total follows
    Dropped    nothing comes of a sum
    Assigned   initial values

Both ends run the same arithmetic on the same numbers: what is told is the sum before it is averaged
(after it, where it was kept), in the table's own arithmetic, and the record has the rest.

What it deliberately does not do: look into payloads.
"""

from __future__ import annotations

from typing import NamedTuple

from ps_server.events import Record


class Elements(NamedTuple):
    """The elements of one block: of a sum, of values, or of optimizer state.

    Shapes:
        presence: one bit for each of the block's tensors; empty means all.
        payload: little-endian, in the dtype of the table's arithmetic. It may be a view of memory
            that changes when the sum is applied: it is to be written to a message before.
    """

    block: int
    presence: bytes
    payload: bytes | memoryview


class Put(NamedTuple):
    """The sum of the record's clock becomes values; no total: it is the one that was `Kept`."""

    record: Record
    total: tuple[Elements, ...] | None


class Kept(NamedTuple):
    """The sum of the record's clock, reduced, which waits for its scale."""

    record: Record
    total: tuple[Elements, ...]


class Dropped(NamedTuple):
    """Nothing comes of the sum of the record's clock, which was `Kept`."""

    record: Record


class Assigned(NamedTuple):
    """Initial values."""

    record: Record
    parts: tuple[Elements, ...]


Change = Put | Kept | Dropped | Assigned
