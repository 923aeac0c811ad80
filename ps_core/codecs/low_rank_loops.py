"""The passes of `low_rank_passes` as a loop that numba compiles, with the same bits: LLVM makes one
instruction of a product and a sum only where it is asked to. Only `low_rank` imports this.
"""

from __future__ import annotations

from typing import Any

from ps_core.compiled_loops import compiled

_READ = "Array(float32, 2, 'C', readonly=True)"


@compiled(f"void({_READ}, {_READ}, int64, float32[::1])")
def decode(left: Any, right: Any, first: Any, out: Any) -> None:
    rank, columns = right.shape
    for row in range(len(left)):
        begin = row * columns - first
        skipped = max(0, -begin)
        own = out[begin + skipped : begin + columns]
        factor, numbers = left[row, 0], right[0, skipped:]
        for at in range(len(own)):
            own[at] = factor * numbers[at]
        for k in range(1, rank):
            factor, numbers = left[row, k], right[k, skipped:]
            for at in range(len(own)):
                own[at] += factor * numbers[at]
