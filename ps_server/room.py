"""Gate memory of one table on one server: who may stage a step, and who must give way (SEMANTICS
S3).

Rules:
    - A step is (clock, rank). Room goes to the lowest step among those with something sent here.
    - Where a lower step finds no room, the highest steps are given back, whole, to be sent again.
    - So two servers never favour two different workers for good, and no order of arrival deadlocks.

Invariants:
    ROOM-1  Staged bytes never exceed the capacity.
    ROOM-3  A step never releases more than it stages.
    ROOM-2  The capacity holds any one step whole, so the lowest step always finds room.

What it deliberately does not do: hold payloads, or know ranges and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ps_core.errors import InvariantViolation


class Step(NamedTuple):
    """One worker's step: ordered by clock, then rank."""

    clock: int
    rank: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether there is room, and which steps were given back to make it."""

    admitted: bool
    given_back: tuple[Step, ...] = ()


_ADMITTED = Admission(True)


class GateRoom:
    """Room for staged steps."""

    def __init__(self, capacity_bytes: int, step_bytes: int) -> None:
        """Args:
        capacity_bytes: room for staged payloads; taken as `step_bytes` if it is less.
        step_bytes: the most that one step stages on this server.
        """
        self._capacity_bytes = max(capacity_bytes, step_bytes)
        self._step_bytes = step_bytes
        self._staged: dict[Step, int] = {}
        self._staged_bytes = 0
        self._waiting: dict[Step, int] = {}

    def resize(self, capacity_bytes: int, step_bytes: int) -> None:
        """The table grew on this server; the room never shrinks."""
        self._step_bytes = max(self._step_bytes, step_bytes)
        self._capacity_bytes = max(self._capacity_bytes, capacity_bytes, self._step_bytes)

    @property
    def staged_bytes(self) -> int:
        """Bytes staged at present."""
        return self._staged_bytes

    def admit(self, step: Step, byte_count: int) -> Admission:
        """Ask for room for one more payload of `step`."""
        free = self._capacity_bytes - self._staged_bytes
        if free < byte_count:
            return self._make_room(step, byte_count, free)
        self._stage(step, byte_count)
        return _ADMITTED

    def _make_room(self, step: Step, byte_count: int, free: int) -> Admission:
        given_back: list[Step] = []
        for other in sorted((s for s in self._staged if s > step), reverse=True):
            if free >= byte_count:
                break
            free += self._staged[other]
            given_back.append(other)
        if free < byte_count:
            asked = self._waiting.get(step, 0) + byte_count
            # A retry without credit asks for the same bytes again: never count more than a step.
            self._waiting[step] = min(asked, self._step_bytes - self._staged.get(step, 0))
            return Admission(False)
        for other in given_back:
            size = self._staged.pop(other)
            self._staged_bytes -= size
            self._waiting[other] = self._waiting.get(other, 0) + size
        self._stage(step, byte_count)
        return Admission(True, tuple(given_back))

    def _stage(self, step: Step, byte_count: int) -> None:
        self._staged[step] = self._staged.get(step, 0) + byte_count
        self._staged_bytes += byte_count
        self._waiting.pop(step, None)
        if self._staged_bytes > self._capacity_bytes:
            raise InvariantViolation("ROOM-1", "staged more than fits")

    def release(self, step: Step, byte_count: int) -> None:
        """A payload of `step` is no longer staged."""
        left = self._staged.get(step, 0) - byte_count
        if left < 0:
            raise InvariantViolation(
                "ROOM-3", f"step {step} releases {byte_count} bytes that it does not stage"
            )
        self._staged_bytes -= byte_count
        if left:
            self._staged[step] = left
        else:
            self._staged.pop(step, None)

    def forget(self, rank: int) -> None:
        """A worker left: it waits for nothing any more."""
        for step in [step for step in self._waiting if step.rank == rank]:
            del self._waiting[step]

    def credit(self) -> tuple[Step, ...]:
        """The waiting steps whose turn has come, in order; each is named once."""
        if not self._waiting:
            return ()  # as nearly always
        turns: list[Step] = []
        promised = 0
        for step in sorted(self._waiting):
            lower = sum(size for other, size in self._staged.items() if other <= step)
            if lower + promised + self._waiting[step] > self._capacity_bytes:
                break
            promised += self._waiting.pop(step)
            turns.append(step)
        return tuple(turns)
