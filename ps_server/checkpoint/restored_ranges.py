"""Which ranges get their values from a checkpoint, and when what was read of them is served (G7).

    served, without values --look--> begun --> its backups leave --> nobody else has any of it
                                       |                                |
                                       +--read--> read ------------> handed over: `loaded`

Rules:
    - A range is read once for each time that it is served, whoever asks; what was read of one that
      was given up meanwhile is forgotten.
    - It is handed over when nobody else has anything of it: backups are given it when they join
      anew, after its last table.

What it deliberately does not do: read (`ps_server.checkpoint.restored_values` does), or choose what
from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from ps_core.keys import RangeId, TableId
from ps_server.ranges.range_machine import RangeMachine

Key = tuple[TableId, RangeId]


class Replicas(Protocol):
    """The backups of a server's ranges; see `Primary` for each of these."""

    def close_ranges(self, range_ids: Iterable[RangeId]) -> None:
        """Values of these are about to come from a checkpoint."""

    def is_without_replicas(self, range_id: RangeId) -> bool:
        """Whether nobody else has anything of the range; so it is if it is not served here."""

    def replaced(self, range_id: RangeId, *, is_last: bool) -> None:
        """The values of one of its tables are other ones."""


class RestoredRanges:
    """The ranges of one server.

    Args:
        parts: what it serves, as it changes.
        replicas: None: nobody backs up anything.
    """

    def __init__(self, parts: Mapping[Key, RangeMachine], replicas: Replicas | None) -> None:
        self._parts = parts
        self._replicas = replicas
        self._begun: set[Key] = set()
        self._reading: dict[Key, RangeMachine] = {}
        self._ready: dict[Key, dict[int, int]] = {}

    def look(self) -> list[Key]:
        """What is to be read that was not before; to be called now and then, since time alone lets
        a server serve what an old lease kept from it.
        """
        missing = {key for key, part in self._parts.items() if is_missing(part)}
        self._begun &= missing
        reading = self._reading.items()  # of what is suspended too: it may be served again
        self._reading = {k: each for k, each in reading if k in missing or k not in self._parts}
        self._ready = {key: each for key, each in self._ready.items() if key in missing}
        if self._replicas is not None:
            self._replicas.close_ranges({range_id for _, range_id in missing})
        keys = sorted(missing - self._begun)
        self._begun |= set(keys)
        return keys

    def begin(self, key: Key) -> RangeMachine | None:
        """The machine of a range that is to be read now; None if it needs no values any more, or is
        being read: whoever read it a second time would write into values that are served.
        """
        part = self._parts.get(key)
        if part is None or not is_missing(part) or self._reading.get(key) is part:
            return None
        if key in self._ready:
            return None
        self._reading[key] = part
        return part

    def was_read(self, key: Key, part: RangeMachine, versions: dict[int, int]) -> None:
        """All of a range was read, whose machine was `part` when it began."""
        if self._reading.get(key) is part:
            del self._reading[key]
        if self._parts.get(key) is part:
            self._ready[key] = versions

    def hand_over(self) -> Iterator[tuple[Key, dict[int, int]]]:
        """What is served from now on, and the versions of its blocks: each is to be `loaded` before
        the next is asked for. Between two works: what is under way may have decided something of a
        range that its log has not heard of yet.
        """
        replicas = self._replicas
        for key in list(self._ready):
            part = self._parts.get(key)
            if part is None or not is_missing(part):
                del self._ready[key]
                continue
            if replicas is not None and not replicas.is_without_replicas(key[1]):
                continue
            versions = self._ready.pop(key)
            self._begun.discard(key)
            if replicas is not None:
                others = [each for each in self._begun if each[1] == key[1]]
                replicas.replaced(key[1], is_last=not others)
            yield key, versions


def is_missing(part: RangeMachine) -> bool:
    """Whether its values are those of a checkpoint, and are not there."""
    state = part.state
    is_restored = state.table.restored_clock is not None
    return is_restored and not state.initialized and state.failure is None
