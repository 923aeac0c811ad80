"""The work of `sign`, as passes of numpy, for where numba is not installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_core.codecs.int8_passes import Floats
from ps_core.tables.elements import SCALED_GROUP_COUNT

LESS = 1 - 2.0**-18
"""A scale in units of its group's mean: rounding makes none infinite."""

_GROUP_BYTES = SCALED_GROUP_COUNT // 8
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = _BITS.astype(np.float32) * 2 - 1  # of the eight elements that each byte has
_SIGNS.flags.writeable = False


def encode(
    gradient: Floats, before: Floats, left: Floats, scales: Floats, bits: npt.NDArray[np.uint8]
) -> None:
    """As `sign.encode_gradient`, of groups of one length and the parts of their payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
        bits[:] = np.packbits(left.view(np.int32) >= 0, bitorder="little")
        groups = left.reshape(len(scales), -1)
        taken = np.abs(groups)
        taken *= np.float32(LESS / groups.shape[1])  # before the sum, which cannot overflow so
        np.sum(taken, axis=1, out=scales)
        is_broken = ~np.isfinite(scales)
        scales[is_broken] = np.nan
        np.copysign(scales[:, None], groups, out=taken)
        groups -= taken
    if is_broken.any():
        groups[is_broken] = before.reshape(groups.shape)[is_broken]


def decode(scales: Floats, bits: npt.NDArray[np.uint8], out: Floats) -> None:
    """As `sign.decode`, of the parts of a payload."""
    signs = _SIGNS.take(bits, axis=0)
    signs *= np.repeat(scales, _GROUP_BYTES)[: len(bits), None]
    out[:] = signs.reshape(-1)[: len(out)]
