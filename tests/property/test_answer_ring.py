"""The ring of answers against a reader that remembers every piece it was told of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core import sequence_locks
from ps_core.errors import InvariantViolation
from ps_server.lane.answer_ring import AnswerRing, SharedPlace

RING_BYTES, PIECE_COUNT = 512, 5
SIZES = st.lists(st.integers(0, RING_BYTES // 2), max_size=60)


def written(ring: AnswerRing, byte_count: int, content: int) -> SharedPlace:
    with ring.piece(byte_count) as (piece, memory):
        assert len(memory) == byte_count
        memory[:] = content
    return piece


@given(SIZES)
def test_a_piece_is_whole_as_long_as_its_lock_stands(sizes: list[int]) -> None:
    """AR-1; and the newest are there, as long as all of them fit."""
    ring = AnswerRing(1, RING_BYTES, PIECE_COUNT)
    words = ring.segment.array.view(np.uint64)
    told: list[tuple[SharedPlace, int, int]] = []  # a piece, its lock, its content
    for number, byte_count in enumerate(sizes):
        piece = written(ring, byte_count, number % 251)
        told.append((piece, ring.lock(piece), number % 251))
        stand = []
        for old, lock, content in told:
            if int(words[sequence_locks.offset_bytes(old.lock_number) // 8]) != lock:
                continue
            found = ring.segment.array[old.offset_bytes : old.offset_bytes + old.byte_count]
            assert (found == content).all()
            assert (
                sequence_locks.offset_bytes(old.lock_number) + 8
                <= PIECE_COUNT * 8
                <= old.offset_bytes
            )
            stand.append(old)
        assert stand[-1] is piece
        assert len(stand) <= PIECE_COUNT
        if len(told) > 1 and told[-2][0].byte_count + byte_count <= RING_BYTES // 2:
            assert told[-2][0] in stand
    ring.close()


def test_a_piece_that_could_not_be_written_has_no_lock_and_its_place_is_used_again() -> None:
    ring = AnswerRing(1, RING_BYTES, PIECE_COUNT)
    first = written(ring, 64, 1)
    with pytest.raises(ZeroDivisionError), ring.piece(64) as (piece, memory):
        memory[:] = 1 // 0
    with pytest.raises(InvariantViolation):
        ring.lock(piece)
    second = written(ring, 64, 2)
    assert second.offset_bytes == piece.offset_bytes != first.offset_bytes
    ring.close()


def test_a_piece_is_at_most_half_of_the_ring() -> None:
    """AR-2."""
    ring = AnswerRing(1, RING_BYTES, PIECE_COUNT)
    with pytest.raises(InvariantViolation, match="AR-2"), ring.piece(RING_BYTES // 2 + 1):
        pass
    ring.close()
