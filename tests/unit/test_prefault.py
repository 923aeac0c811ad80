"""Pages that are asked for ahead are there, and have what they had: on Linux, as all tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ps_runtime.system.prefault import Prefaulting

SIZE = 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_are_there_before_they_are_written() -> None:
    memory = np.empty(SIZE, np.uint8)
    memory[: 2 << 20] = 7
    memory[-5] = 9
    before = resident_bytes()
    prefaulting = Prefaulting()
    pieces = [memory[begin : begin + (2 << 20)] for begin in range(0, SIZE, 2 << 20)]
    for asked in [prefaulting.begin(piece) for piece in pieces]:
        assert asked is not None
        asked.result(60.0)
    assert resident_bytes() - before > SIZE * 0.9
    assert (memory[: 2 << 20] == 7).all()
    assert memory[-5] == 9
    assert not memory[2 << 20 : -5].any()
