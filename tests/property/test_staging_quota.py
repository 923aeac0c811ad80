"""Gate memory: it stays within its bound, and the lowest step always finds room."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from ps_server.ranges.events import StepId
from ps_server.ranges.staging_memory import StagingQuota
from tests.examples import examples

STEP_BYTES = 40
STEPS = st.builds(StepId, st.integers(1, 3), st.integers(0, 3))


class Rooms(RuleBasedStateMachine):
    """Against a twin that lists every payload."""

    are_rows: ClassVar[bool] = False
    steps = Bundle("steps")

    def __init__(self) -> None:
        super().__init__()
        self.staging = StagingQuota(0, 0)
        self.capacity = 2 * STEP_BYTES
        self.staging.resize(0, STEP_BYTES)
        self.staged: list[tuple[StepId, int]] = []
        self.summed = 0
        self.waiting: set[StepId] = set()

    @property
    def _counted(self) -> int:
        """The bytes of sums that steps have to leave room for."""
        return min(self.summed, STEP_BYTES) if self.are_rows else self.summed

    def _bytes(self, step: StepId) -> int:
        return sum(size for other, size in self.staged if other == step)

    @rule(extra=st.integers(0, 9))
    def grow(self, extra: int) -> None:
        self.staging.resize(2 * STEP_BYTES + extra, STEP_BYTES)
        self.capacity = max(self.capacity, 2 * STEP_BYTES + extra)

    @rule(step=STEPS, size=st.sampled_from([1, 7, 20, 40]))
    def admit(self, step: StepId, size: int) -> None:
        if self._bytes(step) + size > STEP_BYTES:
            return  # no step is larger than a step
        lowest = min([step, *(other for other, _ in self.staged)])
        given_back = self.staging.admit(step, size)
        if lowest == step:
            assert given_back is not None, "the lowest step found no room (ROOM-2)"
        if given_back is None:
            lower = sum(n for other, n in self.staged if other <= step)
            assert lower + size + self._counted > self.capacity, "refused, but room could be made"
            self.waiting.add(step)
            return
        assert all(other > step for other in given_back)
        if self._bytes(step) + size == STEP_BYTES:
            self.waiting.discard(step)
        self.staged = [item for item in self.staged if item[0] not in given_back]
        self.waiting.update(given_back)
        self.staged.append((step, size))

    @rule(draw=st.data())
    def release(self, draw: st.DataObject) -> None:
        if self.staged:
            index = draw.draw(st.integers(0, len(self.staged) - 1))
            step, size = self.staged.pop(index)
            self.staging.release(step, size)

    @rule(draw=st.data())
    def accumulate(self, draw: st.DataObject) -> None:
        """A payload becomes more of a sum, or is added to what is there."""
        if self.staged:
            step, size = self.staged.pop(draw.draw(st.integers(0, len(self.staged) - 1)))
            self.staging.release(step, size)
            most = size if self.are_rows else min(size, STEP_BYTES - self.summed)
            new = draw.draw(st.integers(0, most))
            self.staging.add_sum(new, are_rows=self.are_rows)
            self.summed += new

    @rule()
    def apply(self) -> None:
        self.staging.end_sum(self.summed)
        self.summed = 0

    @rule()
    def credit(self) -> None:
        turns = self.staging.credit()
        assert set(turns) <= self.waiting
        assert list(turns) == sorted(turns)
        if self.waiting and not self.staged:
            assert min(self.waiting) in turns, "room is free and the lowest got no credit"
        self.waiting -= set(turns)

    @invariant()
    def within_bounds(self) -> None:
        staged = sum(size for _, size in self.staged)
        assert self.staging.held_bytes == staged + self.summed
        assert staged + self._counted <= self.capacity


class RowRooms(Rooms):
    """Sums have the rows of each worker."""

    are_rows = True


for each in (Rooms, RowRooms):
    each.TestCase.settings = settings(
        max_examples=examples(300), stateful_step_count=30, deadline=None
    )
TestRooms, TestRowRooms = Rooms.TestCase, RowRooms.TestCase
