"""Memory of messages: used again when nobody reads it, never before, and let go when not needed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_runtime.http2.protocol.memory import LEAST_BYTES, MessageMemory

MIB = 1024 * 1024


def place(view: memoryview) -> int:
    """Where it lies."""
    return np.frombuffer(view, np.uint8).ctypes.data


@given(length=st.integers(1, 5_000_000))
def test_it_is_as_long_as_was_asked_for(length: int) -> None:
    view = MessageMemory().take(length)
    assert (view.nbytes, view.format, view.readonly) == (length, "B", False)


def test_a_piece_is_used_again_when_nobody_has_a_view_of_it() -> None:
    memory = MessageMemory()
    first = memory.take(MIB)
    at = place(first)
    del first
    assert place(memory.take(MIB - 17)) == at
    assert memory.byte_count == MIB


@pytest.mark.parametrize(
    "reads",
    [
        lambda view: view[5:],
        lambda view: view.toreadonly()[7:9],
        lambda view: np.frombuffer(view, np.float32, offset=4)[::2],
        lambda view: torch.frombuffer(view, dtype=torch.float32)[3:],
        lambda view: [{"held": view}],
    ],
    ids=["slice", "read-only", "array", "tensor", "container"],
)
def test_a_piece_that_somebody_reads_is_nobody_elses(reads: object) -> None:
    """MEM-1."""
    memory = MessageMemory()
    view = memory.take(MIB)
    at = place(view)
    reader = reads(view)  # type: ignore[operator]
    del view
    others = [memory.take(MIB) for _ in range(3)]
    assert at not in map(place, others)
    del reader
    free = memory.take(MIB)
    assert place(free) == at


def test_a_piece_that_is_read_in_another_thread_is_nobody_elses() -> None:
    memory = MessageMemory()
    began, ends = threading.Event(), threading.Event()

    def read(view: memoryview) -> None:
        del places[:]
        places.append(place(view))
        began.set()
        ends.wait()

    places: list[int] = []
    thread = threading.Thread(target=read, args=(memory.take(MIB),))
    thread.start()
    began.wait()
    assert place(memory.take(MIB)) != places[0]
    ends.set()
    thread.join()


@settings(max_examples=50)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=60),
    size=st.sampled_from([LEAST_BYTES, 100_000, MIB]),
)
def test_no_view_ever_changes_under_its_reader(steps: list[tuple[int, int]], size: int) -> None:
    """What each message was filled with stays in it; a step that ends lets all of its go."""
    memory = MessageMemory()
    held: list[tuple[int, memoryview]] = []
    number = 0
    for kind, count in steps:
        if kind == 0:
            memory.trim()
        elif kind == 1:
            del held[:count]
        else:
            for _ in range(count):
                number += 1
                view = memory.take(size)
                view[:] = number.to_bytes(4) * (size // 4)
                held.append((number, view))
        for expected, view in held[:: max(len(held) // 4, 1)]:
            assert view[-4:] == expected.to_bytes(4)
            assert view[:4] == expected.to_bytes(4)


def test_steps_of_one_size_take_no_more_than_the_largest_had() -> None:
    memory = MessageMemory()
    for _ in range(20):
        step = [memory.take(MIB) for _ in range(32)]
        del step
    assert memory.byte_count == 32 * MIB


def test_what_was_not_needed_is_let_go() -> None:
    memory = MessageMemory()
    step = [memory.take(MIB) for _ in range(10)]
    del step
    memory.trim()
    assert memory.byte_count == 10 * MIB, "it was needed just now"
    kept = memory.take(MIB)
    memory.trim()
    assert memory.byte_count == MIB
    memory.trim()
    assert memory.byte_count == MIB, "somebody reads it"
    del kept
    memory.trim()
    assert memory.byte_count == MIB, "it was needed until just now"
    memory.trim()
    assert memory.byte_count == 0


def test_small_ones_are_the_allocators() -> None:
    memory = MessageMemory()
    small = memory.take(LEAST_BYTES - 1)
    assert (small.nbytes, memory.byte_count) == (LEAST_BYTES - 1, 0)
