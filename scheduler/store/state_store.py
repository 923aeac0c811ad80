"""The scheduler's store of records: one protocol, whose contract is tested in `tests/contract`.

Rules:
    - A key is a short text, a value any bytes. A `write` is atomic, and durable when it returns;
      records that it does not name stay.
    - One scheduler at a time owns a store. `claim` raises the term to a number that no claim had
      before; a store that another scheduler has claimed since refuses every `write`.
    - Before it is claimed, a store is only read: a foreign or damaged one stays as it is.
    - Calls may block, and come from one thread at a time, any thread.
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
        """All records by key; empty in a new store.

        Blocking: reads the disk.

        Raises:
            InvalidJournal: it is damaged.
            Recovering: the disk cannot be read now.
        """

    def claim(self) -> int:
        """Raise the term; every other scheduler that has the store open can write no more.

        Returns:
            The term: the number of claims so far.

        Blocking: until it is durable.

        Raises:
            InvalidJournal: it is damaged.
            Recovering: the disk takes no write now, for instance because it is full.
        """

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        """Put records and remove others, atomically.

        Blocking: until they are durable.

        Raises:
            InvalidJournal: it is damaged, or another scheduler has claimed it; nothing was written.
            Recovering: the disk takes no write now; nothing was written, and a retry may be.
        """

    def close(self) -> None:
        """Unlock it. Idempotent."""
