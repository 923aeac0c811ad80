"""Codecs whose payloads are scales of groups, and numbers of few bits: INT8 and SIGN."""

from __future__ import annotations

import numpy as np

from ps_core.codecs import int8, sign
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.tables.elements import Codec

_LARGEST_NUMBER = np.float32(128)
"""A number of INT8 without its sign is no larger."""


def encode_gradient(
    codec: Codec, gradient: Floats, before: Floats, left: Floats, payload: Bytes, key: int
) -> None:
    """Encode a gradient plus what earlier ones have left, and write what this one leaves.
    Arguments as of `int8.encode_gradient`; SIGN draws nothing.
    """
    if codec is Codec.SIGN:
        sign.encode_gradient(gradient, before, left, payload)
    else:
        int8.encode_gradient(gradient, before, left, payload, key)


def decode(codec: Codec, payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of `int8.encode_gradient`."""
    if codec is Codec.SIGN:
        sign.decode(payload, out)
    else:
        int8.decode(payload, out)


def is_finite(codec: Codec, payload: Bytes, element_count: int) -> bool:
    """True if all elements are: the scales say so. False: perhaps."""
    if codec is Codec.SIGN:
        return bool(np.isfinite(sign.scales_of(payload, element_count)).all())
    with np.errstate(over="ignore"):
        return bool(np.isfinite(int8.parts(payload)[0] * _LARGEST_NUMBER).all())
