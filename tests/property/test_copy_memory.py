"""Pieces of the copies' memory: apart, within it, and had whenever there is room (CM-1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from ps_server.checkpoint.copy_memory import CopyMemory, MemorySpan

UNIT = 64
UNIT_COUNT = 12

ACTIONS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, UNIT_COUNT * UNIT + 1)),
    st.tuples(st.just("give back"), st.integers(0, UNIT_COUNT)),
    st.tuples(st.just("touch"), st.integers(0, 2 * UNIT_COUNT * UNIT)),
)


def longest_gap(taken: list[MemorySpan]) -> int:
    """The longest stretch that nobody has."""
    places = [(0, 0), *sorted((piece.begin, piece.end) for piece in taken)]
    ends = [*(begin for begin, _ in places[1:]), UNIT_COUNT * UNIT]
    return max(end - before for (_, before), end in zip(places, ends, strict=True))


@given(st.lists(ACTIONS, max_size=40))
def test_pieces_are_apart_and_are_had_when_there_is_room(actions: list[tuple[str, int]]) -> None:
    memory = CopyMemory(UNIT_COUNT * UNIT + 7)
    taken: list[tuple[MemorySpan, int]] = []
    for number, (action, size) in enumerate(actions):
        if action == "take":
            gap = longest_gap([piece for piece, _ in taken])
            piece = memory.take(size)
            assert (piece is None) == (max(size, 1) > gap)
            if piece is not None:
                assert piece.view.nbytes == size
                piece.view[:] = bytes([number]) * size
                taken.append((piece, number))
        elif action == "touch":
            memory.touch(size)
        elif taken:
            memory.give_back(taken.pop(size % len(taken))[0])
        for piece, mark in taken:
            assert set(piece.view) <= {mark}
    for piece, _ in taken:
        memory.give_back(piece)
    assert memory.take(UNIT_COUNT * UNIT) is not None


def test_what_is_taken_while_pages_are_touched_stays_as_it_is() -> None:
    size = 64 * 1024
    memory = CopyMemory(64 * 1024 * 1024)
    with ThreadPoolExecutor(1) as threads:
        touching = threads.submit(memory.touch, memory.byte_count)
        pieces: list[MemorySpan] = []
        while (piece := memory.take(size)) is not None:
            piece.view[:] = bytes([len(pieces) % 251 + 1]) * size
            pieces.append(piece)
        touching.result()
    for number, piece in enumerate(pieces):
        assert bytes(piece.view) == bytes([number % 251 + 1]) * size
    places = [place for piece in pieces for place in range(piece.begin, piece.end, UNIT)]
    assert len(set(places)) == len(places)


def test_without_memory_there_is_none() -> None:
    memory = CopyMemory(0)
    memory.touch(1)
    assert memory.take(1) is None
