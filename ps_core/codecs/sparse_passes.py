"""The work of `sparse`, as passes of numpy, for where numba is not installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_core.codecs.int8_passes import Floats

NOT_SIGN = np.int32(0x7FFFFFFF)
"""The bits of a float32 that order absolute values; those of NaN are above infinity's."""


def add(
    gradient: Floats, before: Floats, left: Floats, threshold: np.int32
) -> npt.NDArray[np.uint32]:
    """Write the sums to `left`; returns the places of those whose absolute value has bits of
    `threshold` or above, ascending. Shapes: (n,).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
    return np.flatnonzero(left.view(np.int32) & NOT_SIGN >= threshold).astype(np.uint32)
