"""Where a scheduler's records are kept: the one seam, whose contract `tests/contract` has.

Rules:
    - A key is a short text, a value any bytes. What one `write` has is durable when it returns, all
      of it or nothing; what it does not name stays.
    - A store is in the hands of one scheduler at a time. `claim` raises its term, which no other
      claim has had; a store that was claimed by another since refuses every `write`.
    - A store is read and claimed by the scheduler that will write it, and only looked at before it
      is claimed: one that is foreign or damaged stays as it is.
    - Calls may block and come from any one thread at a time.

What it deliberately does not do: know what a record says (`scheduler.store.records`), or choose
when it is written (`scheduler.edge.publication`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class StateStore(Protocol):
    """The records of one cluster. Made by opening it, which takes it into this process's hands."""

    @property
    def name(self) -> str:
        """Where it is, for messages."""

    def read(self) -> dict[str, bytes]:
        """All records by key; none: nothing was written yet.

        Blocking: reads the medium.

        Raises:
            InvalidJournal: it is damaged.
            Recovering: the medium cannot be read now.
        """

    def claim(self) -> int:
        """Raise the term; every other scheduler that has the store open can write no more.

        Returns:
            The term: the number of starts that came to this.

        Blocking: until it is durable.

        Raises:
            InvalidJournal: it is damaged.
            Recovering: the medium takes nothing now, because it is full, for instance.
        """

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        """Put records, and remove others, at once.

        Blocking: until they are durable.

        Raises:
            InvalidJournal: it is damaged, or another scheduler has claimed it: nothing was written.
            Recovering: the medium takes nothing now: nothing was written; the same again may be.
        """

    def close(self) -> None:
        """Give it out of hand. Idempotent."""
