"""The work of `low_rank`, as passes of numpy, for where numba is not installed."""

from __future__ import annotations

import numpy as np

from ps_core.codecs.int8_passes import Floats

_CHUNK = 2**15
"""Elements of the matrix that are summed at once: they stay in a core's cache."""


def decode(left: Floats, right: Floats, first: int, out: Floats) -> None:
    """As `low_rank.decode`, of a payload's factors and the column of the block's first element.

    Shapes: (rows, rank), (rank, columns), (n,).
    """
    columns = right.shape[1]
    step = max(1, _CHUNK // columns)
    with np.errstate(over="ignore", invalid="ignore"):
        for row in range(0, len(left), step):
            rows = left[row : row + step]
            total = rows[:, :1] * right[0]
            for k in range(1, len(right)):
                total += rows[:, k : k + 1] * right[k]
            begin = row * columns - first
            skipped = max(0, -begin)
            part = out[begin + skipped : begin + total.size]
            part[:] = total.reshape(-1)[skipped : skipped + len(part)]
