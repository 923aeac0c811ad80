"""The scheduler's store of records: one protocol, whose contract is tested in `tests/contract`.

Rules:
    - A key is a short text, a value any bytes. A `write` is atomic, and durable when it returns;
      records that it does not name stay.
    - One scheduler at a time owns a store. `claim` raises the term to a number that no claim had
      before; a store that another scheduler has claimed since refuses every `write`.
    - Before it is claimed, a store is only read: a foreign or damaged one stays as it is.
    - Calls block, and come from one thread at a time, any thread.
    - Every call raises InvalidJournal for a damaged store, and Recovering for a disk that cannot be
      read, or takes no write now, for instance because it is full: a retry may succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class StateStore(Protocol):
    """The records of one cluster. Opening a store locks it for this process."""

    @property
    def name(self) -> str:
        """Path or address, for messages."""

    def read(self) -> dict[str, bytes]:
        """All records by key; empty in a new store."""

    def claim(self) -> int:
        """Raise the term to the number of claims so far, and return it; every other scheduler that
        has the store open can write no more.
        """

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        """Put records and remove others; after an error nothing was written."""

    def close(self) -> None:
        """Unlock it. Idempotent."""
