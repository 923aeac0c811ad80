"""Which captured ranges may change before they are written: those whose copies fit (S10).

    planned --fits--> open: its blocks may change, and are copied before they do
            --else--> held: nothing of it changes; its blocks are copied in their turn
    held    --what is left of it fits--> open

Rules:
    - What open ranges may still need counts as taken: a range that is open never lacks room.
    - What was decided before a range is held may still be applied: it is copied without room.
    - A range that is larger than all the room is open when enough of it has been written.

What it deliberately does not do: hold ranges, or have memory (`checkpoint_parts` does).
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_server.values.copy_on_write import Key


class CopyRoom:
    """The room for the copies of one checkpoint.

    Args:
        bound_bytes: what copies that wait to be written may take.
    """

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._open: dict[Key, int] = {}  # bytes that are captured and not copied
        self._held: dict[Key, int] = {}
        self._waiting_bytes = 0

    @property
    def held(self) -> Sequence[Key]:
        """The ranges that must not change, in the order in which they were planned."""
        return list(self._held)

    @property
    def turns(self) -> Sequence[Key]:
        """The ranges whose blocks may be copied though nothing changes them, the best first: those
        that training waits for, one by one where others may need the room.
        """
        is_free = 2 * self._taken_bytes <= self._bound_bytes or not self._waiting_bytes
        return [*self._held, *self._open] if is_free else list(self._open)

    @property
    def waiting_bytes(self) -> int:
        """What is copied and not written."""
        return self._waiting_bytes

    def plan(self, key: Key, byte_count: int) -> bool:
        """A range of at most so many bytes is about to be captured; whether it may change then."""
        is_open = not self._held and self._fits(byte_count)
        (self._open if is_open else self._held)[key] = byte_count
        return is_open

    def captured(self, key: Key, byte_count: int) -> None:
        """So much of it has to be copied."""
        of = self._held if key in self._held else self._open
        of[key] = byte_count

    def copied(self, key: Key, byte_count: int, *, is_last: bool) -> None:
        """A block of it was copied."""
        self._waiting_bytes += byte_count
        of = self._held if key in self._held else self._open
        if key in of:
            of[key] = 0 if is_last else max(0, of[key] - byte_count)

    def written(self, byte_count: int) -> None:
        """A copy is not needed any more."""
        self._waiting_bytes -= byte_count

    def opened(self) -> list[Key]:
        """The ranges that were held and are open from now on."""
        found = []
        for key, byte_count in list(self._held.items()):
            if not self._fits(byte_count):
                break
            self._open[key] = self._held.pop(key)
            found.append(key)
        return found

    @property
    def _taken_bytes(self) -> int:
        return self._waiting_bytes + sum(self._open.values())

    def _fits(self, byte_count: int) -> bool:
        return not byte_count or self._taken_bytes + byte_count <= self._bound_bytes
