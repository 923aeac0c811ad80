"""Pages that are asked for ahead are there, and have what they had: on Linux, as all tests."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from ps_runtime.system.prefault import Prefaulting

SIZE, PAGE_BYTES = 64 << 20, 4096


def resident_share(memory: npt.NDArray[np.uint8]) -> float:
    """The share of its pages that take memory."""
    begin = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    count = (memory.ctypes.data + memory.nbytes - begin) // PAGE_BYTES
    found = (ctypes.c_ubyte * count)()
    address, length = ctypes.c_void_p(begin), ctypes.c_size_t(count * PAGE_BYTES)
    assert ctypes.CDLL(None).mincore(address, length, found) == 0
    return sum(each & 1 for each in found) / count


def test_pages_are_there_before_they_are_written() -> None:
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)  # an array may have pages of another
    memory[: 2 << 20] = 7
    memory[-5] = 9
    assert resident_share(memory) < 0.2
    prefaulting = Prefaulting()
    pieces = [memory[begin : begin + (2 << 20)] for begin in range(0, SIZE, 2 << 20)]
    for asked in [prefaulting.begin(piece) for piece in pieces]:
        assert asked is not None
        asked.result(60.0)
    assert resident_share(memory) > 0.99
    assert (memory[: 2 << 20] == 7).all()
    assert memory[-5] == 9
    assert not memory[2 << 20 : -5].any()
