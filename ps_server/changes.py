"""What a decision does to values once it is committed: done by the primary, sent to backups.

A total is what was summed for an update, detached from the sums in the making: opaque here.
"""

from __future__ import annotations

from typing import NamedTuple

from ps_server.events import Record


class Put(NamedTuple):
    """A sum becomes values. `total` is None where it was `Kept` before: who has that, has it."""

    record: Record
    total: object | None


class Kept(NamedTuple):
    """A sum was reduced, and waits for its scale."""

    record: Record
    total: object


class Dropped(NamedTuple):
    """Nothing comes of a sum that was kept."""

    record: Record


class Assigned(NamedTuple):
    """Initial values, as (block, payload)."""

    record: Record
    parts: tuple[tuple[int, object], ...]


Change = Put | Kept | Dropped | Assigned
