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

from collections.abc import Iterator
from types import ModuleType

import numpy as np

from ps_core.codecs import sign_passes
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.codecs.kernels import Kernels
from ps_core.tables.elements import SCALED_GROUP_COUNT

KERNELS = Kernels(sign_passes, "ps_core.codecs.sign_loops")
"""Those of this process, of whole groups."""


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
    scales, bits = _parts(payload, count)
    for kernels, elements, groups, octets in _shares(count):
        own = gradient[elements], before[elements], left[elements]
        kernels.encode(*own, scales[groups], bits[octets])


def decode(payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of `encode_gradient`."""
    scales, bits = _parts(payload, len(out))
    for kernels, elements, groups, octets in _shares(len(out)):
        kernels.decode(scales[groups], bits[octets], out[elements])


def _parts(payload: Bytes, element_count: int) -> tuple[Floats, Bytes]:
    scales = scales_of(payload, element_count)
    return scales, payload[scales.nbytes :]


def _shares(count: int) -> Iterator[tuple[ModuleType, slice, slice, slice]]:
    """Kernels, elements, scales and bytes of bits: of the whole groups, and of a last one."""
    whole = count - count % SCALED_GROUP_COUNT
    for kernels, begin, end in ((KERNELS.used(), 0, whole), (sign_passes, whole, count)):
        if begin < end:
            groups = slice(begin // SCALED_GROUP_COUNT, _group_count(end))
            yield kernels, slice(begin, end), groups, slice(begin // 8, -(-end // 8))


def _group_count(element_count: int) -> int:
    return -(-element_count // SCALED_GROUP_COUNT)
