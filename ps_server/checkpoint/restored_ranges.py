"""Decides which table shards are read from a checkpoint, and when they are served (G7).

    served, without values --look--> begun --> its backups leave --> no other server has any of it
                                       |                                |
                                       +--read--> read ------------> handed over: `loaded`

Rules:
    - A shard is read once for each time that it is served.
    - A shard is handed over when no other server has anything of its range: backups get the range
      when they join anew, after its last table.
    - A range that was taken over is read when the update log, if there is one, has what the former
      primary had of it, and the scheduler knows.
    - A range of which nothing is to come any more, since its tables failed, is like any other. A
      thread that reads a shard goes on when its table fails: until it has ended, the range is not
      copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from ps_core.keys import RangeId, TableId
from ps_server.ranges.range_machine import RangeMachine

Key = tuple[TableId, RangeId]


class Replicas(Protocol):
    """The backups of a server's ranges; see `Primary` for each of these."""

    def may_load(self, range_id: RangeId) -> bool:
        """False while the update log must have first what the range has already (S13)."""

    def close_only(self, range_ids: Collection[RangeId]) -> None:
        """Values of these ranges, and of no others, are about to come from a checkpoint."""

    def is_without_replicas(self, range_id: RangeId) -> bool:
        """True if no other server has anything of the range, or it is not served here."""

    def replaced(self, range_id: RangeId, *, is_last: bool) -> None:
        """Values of one of its tables came from the checkpoint."""


class RestoredRanges:
    """The restored table shards of one server, among all that it serves, as they change."""

    def __init__(self, shards: Mapping[Key, RangeMachine], replicas: Replicas | None) -> None:
        self._shards = shards
        self._replicas = replicas
        self._begun: set[Key] = set()
        self._reading: dict[RangeMachine, Key] = {}
        self._ready: dict[Key, dict[int, int]] = {}

    def look(self) -> list[Key]:
        """Shards to read that were not before. To be called now and then: time alone lets a server
        serve a range when an old lease runs out.
        """
        missing = {key for key, shard in self._shards.items() if is_missing(shard)}
        self._begun &= missing
        self._ready = {key: each for key, each in self._ready.items() if key in missing}
        if self._replicas is not None:
            missing = {key for key in missing if self._replicas.may_load(key[1])}
            self._replicas.close_only({range_id for _, range_id in missing} | self._being_read)
        keys = sorted(missing - self._begun)
        self._begun |= set(keys)
        return keys

    @property
    def _being_read(self) -> set[RangeId]:
        """Ranges to whose values a thread may write, though their tables have failed."""
        return {
            key[1]
            for shard, key in self._reading.items()
            if self._shards.get(key, shard) is shard  # suspended, or here
        }

    def begin(self, key: Key) -> RangeMachine | None:
        """The machine of a shard that is to be read now. None if it needs no values any more, or is
        being read: a second read would write into values that are served. `was_read` or `end_read`
        must follow, when nothing writes to its values any more.
        """
        shard = self._shards.get(key)
        is_needed = shard is not None and is_missing(shard) and key not in self._ready
        if shard is None or not is_needed or shard in self._reading:
            return None
        self._reading[shard] = key
        return shard

    def was_read(self, key: Key, shard: RangeMachine, versions: dict[int, int]) -> None:
        """All of a shard was read, whose machine was `shard` at the begin."""
        self.end_read(shard)
        if self._shards.get(key) is shard:
            self._ready[key] = versions

    def end_read(self, shard: RangeMachine) -> None:
        """A shard is not read any more, whatever came of it. Idempotent."""
        self._reading.pop(shard, None)

    def hand_over(self) -> Iterator[tuple[Key, dict[int, int]]]:
        """Shards that are served from now on, and the versions of their blocks: each is to be
        `loaded` before the next is asked for. To be called between two works: within one, a
        decision may not be in its range's log yet.
        """
        replicas = self._replicas
        for key in list(self._ready):
            shard = self._shards.get(key)
            if shard is None or not is_missing(shard):
                del self._ready[key]
                continue
            if replicas is not None and not replicas.is_without_replicas(key[1]):
                continue
            versions = self._ready.pop(key)
            self._begun.discard(key)
            if replicas is not None:
                to_come = {range_id for _, range_id in self._begun} | self._being_read
                replicas.replaced(key[1], is_last=key[1] not in to_come)
            yield key, versions


def is_missing(shard: RangeMachine) -> bool:
    return shard.state.awaits_checkpoint
