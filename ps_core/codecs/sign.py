"""SIGN payloads: a bit for each element, and a scale for each 256.

    payload = scales (float32, one for each group of 256) | bits (one an element, lowest bit first)
    element = the scale of its group, with a minus where its bit is 0

Rules:
    - A group's scale is the mean of its absolute values: so what is left is least.
    - What a payload does not say is given back to the caller, to be added to the next gradient.
    - A group with an element that is not finite, or whose mean is not, decodes to NaN.

Invariants:
    SG-1  decoded(payload) + what is left = the gradient + what was left before, as float32 rounds;
          of groups that are finite.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.tables.elements import SCALED_GROUP_COUNT

_GROUP_BYTES = SCALED_GROUP_COUNT // 8
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = _BITS.astype(np.float32) * 2 - 1  # of the eight elements that each byte has
_SIGNS.flags.writeable = False


def scales_of(payload: Bytes, element_count: int) -> Floats:
    """A payload's scales, as a view."""
    return payload[: 4 * _group_count(element_count)].view(np.float32)


def encode_gradient(gradient: Floats, before: Floats, left: Floats, payload: Bytes) -> None:
    """Encode a gradient plus what earlier ones have left (SG-1).

    Shapes:
        gradient, before, left: (n,); `before` was left by earlier ones, `left` is written.
        payload: (Codec.SIGN.payload_bytes(n),), aligned to 4 bytes; written.
    """
    count = len(gradient)
    scales = scales_of(payload, count)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
        begins = np.arange(0, count, SCALED_GROUP_COUNT)
        sums = np.add.reduceat(np.abs(left), begins, dtype=np.float64)
        sizes = np.minimum(count - begins, SCALED_GROUP_COUNT)
        scales[:] = sums / sizes
        is_finite = np.isfinite(scales)
        scales[~is_finite] = np.nan
        payload[scales.nbytes :] = np.packbits(left >= 0, bitorder="little")
        left -= _elements(payload, count)
    if not is_finite.all():
        broken = np.repeat(~is_finite, SCALED_GROUP_COUNT)[:count]
        left[broken] = before[broken]


def decode(payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of `encode_gradient`."""
    out[:] = _elements(payload, len(out))


def _elements(payload: Bytes, count: int) -> npt.NDArray[np.float32]:
    scales = scales_of(payload, count)
    bits = payload[scales.nbytes :]
    signs = _SIGNS.take(bits, axis=0)
    signs *= np.repeat(scales, _GROUP_BYTES)[: len(bits), None]
    return signs.reshape(-1)[:count]


def _group_count(element_count: int) -> int:
    return -(-element_count // SCALED_GROUP_COUNT)
