"""The ring of pushed payloads against a twin that marks every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ps_core.errors import InvariantViolation
from ps_worker.transport.lane import ALIGNMENT_BYTES, Ring
from tests.examples import examples

RING_BYTES = 8 * ALIGNMENT_BYTES
SIZES = st.one_of(
    st.integers(1, 3 * ALIGNMENT_BYTES),
    st.sampled_from([ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES, 3 * ALIGNMENT_BYTES]),
    st.integers(1, RING_BYTES + 1),
)


def slots_of(offset: int, byte_count: int) -> set[int]:
    """The aligned units that a piece of that size at that place uses."""
    first = offset // ALIGNMENT_BYTES
    return set(range(first, first + -(-byte_count // ALIGNMENT_BYTES)))


class Rings(RuleBasedStateMachine):
    """The twin knows the slots of every piece in use, and which piece is the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(RING_BYTES)
        self.pieces: dict[int, int] = {}  # offset -> size, oldest first

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=6))
    def take(self, sizes: list[int]) -> None:
        for byte_count in sizes:
            offset = self.ring.take(byte_count)
            if offset is None:
                assert byte_count > RING_BYTES or self.pieces, "an empty ring refused (RING-2)"
                continue
            assert offset % ALIGNMENT_BYTES == 0
            assert offset >= 0
            assert offset + byte_count <= RING_BYTES
            used = {slot for at, size in self.pieces.items() for slot in slots_of(at, size)}
            assert not used & slots_of(offset, byte_count), "two pieces overlap (RING-1)"
            self.pieces[offset] = byte_count

    @precondition(lambda self: self.pieces)
    @rule()
    def give_back_the_oldest(self) -> None:
        self._give_back(next(iter(self.pieces)))

    @precondition(lambda self: self.pieces)
    @rule(number=st.integers(0, 7))
    def give_back_any(self, number: int) -> None:
        self._give_back(list(self.pieces)[number % len(self.pieces)])

    def _give_back(self, offset: int) -> None:
        self.ring.give_back(offset)
        del self.pieces[offset]

    def teardown(self) -> None:
        for offset in list(self.pieces):
            self._give_back(offset)
        assert self.ring.take(RING_BYTES) == 0, "an empty ring gives all of it (RING-2)"


Rings.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=30, deadline=None
)
TestRings = Rings.TestCase


@given(st.lists(SIZES.filter(lambda size: size <= RING_BYTES // 4), min_size=1, max_size=60))
def test_pieces_that_come_back_in_order_never_stop_the_flow(sizes: list[int]) -> None:
    """With at most a quarter of the ring a piece, two pieces in flight always find room."""
    ring = Ring(RING_BYTES)
    in_flight: list[int] = []
    for size in sizes:
        if len(in_flight) == 2:
            ring.give_back(in_flight.pop(0))
        offset = ring.take(size)
        assert offset is not None
        in_flight.append(offset)


def test_what_comes_back_out_of_order_is_free_once_the_older_is() -> None:
    ring = Ring(4 * ALIGNMENT_BYTES)
    first, second, third = (ring.take(ALIGNMENT_BYTES) for _ in range(3))
    assert (first, second, third) == (0, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES)
    ring.give_back(ALIGNMENT_BYTES)
    assert ring.take(2 * ALIGNMENT_BYTES) is None
    ring.give_back(0)
    assert ring.take(2 * ALIGNMENT_BYTES) == 0  # around the end, over the first two
    assert ring.take(ALIGNMENT_BYTES) is None  # the gap at the end was given up with that


def test_a_ring_of_a_wrong_size_and_a_piece_that_is_not_out_are_bugs() -> None:
    with pytest.raises(InvariantViolation, match="RING-1"):
        Ring(ALIGNMENT_BYTES + 1)
    with pytest.raises(KeyError):
        Ring(ALIGNMENT_BYTES).give_back(0)
