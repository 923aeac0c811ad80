"""SIGN payloads: a bit for each element, and a scale for each 256.

    payload = scales (float32, one for each group of 256) | bits (one an element, lowest bit first)
    element = the scale of its group, with a minus where its bit is 0

Rules:
    - A group's scale is the mean of its absolute values, or a little less, so that least is left.
    - What a payload does not say is given back to the caller, to be added to the next gradient.
    - A group with an element that is not finite decodes to NaN.

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

_LESS = 1 - 2.0**-18
"""A scale in units of its group's mean: rounding makes none infinite."""


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
    whole = count - count % SCALED_GROUP_COUNT
    parts = [slice(0, whole)] * (whole > 0) + [slice(whole, count)] * (whole < count)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
        payload[scales.nbytes :] = np.packbits(left.view(np.int32) >= 0, bitorder="little")
        for part in parts:
            _take_signs(
                left[part].reshape(-1, min(SCALED_GROUP_COUNT, part.stop - part.start)),
                scales[part.start // SCALED_GROUP_COUNT :][: _group_count(part.stop - part.start)],
            )
    is_finite = np.isfinite(scales)
    if not is_finite.all():
        broken = np.repeat(~is_finite, SCALED_GROUP_COUNT)[:count]
        left[broken] = before[broken]


def _take_signs(groups: npt.NDArray[np.float32], scales: Floats) -> None:
    """Write the scales of groups of one length, and take what the payload says from the groups.
    Shapes: (groups, elements); (groups,).
    """
    taken = np.abs(groups)
    taken *= np.float32(_LESS / groups.shape[1])  # before the sum, which cannot overflow so
    np.sum(taken, axis=1, out=scales)
    scales[~np.isfinite(scales)] = np.nan
    np.copysign(scales[:, None], groups, out=taken)
    groups -= taken


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
