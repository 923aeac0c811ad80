"""Codecs whose payloads are more than an array of elements: INT8, SIGN and SPARSE."""

from __future__ import annotations

import numpy as np

from ps_core.codecs import int8, sign, sparse
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.tables.elements import Codec

_LARGEST_NUMBER = np.float32(128)
"""A number of INT8 without its sign is no larger."""


def decode(codec: Codec, payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of each codec's `decode`.

    Raises:
        InvalidTensor: a place of a SPARSE payload is wrong.
    """
    if codec is Codec.SPARSE:
        sparse.decode(payload, out)
    elif codec is Codec.SIGN:
        sign.decode(payload, out)
    else:
        int8.decode(payload, out)


def is_finite(codec: Codec, payload: Bytes, element_count: int) -> bool:
    """True if all elements are: scales say so, or the few that are sent. False: perhaps."""
    if codec is Codec.SPARSE:
        return bool(np.isfinite(sparse.parts(payload)[0]).all())
    if codec is Codec.SIGN:
        return bool(np.isfinite(sign.scales_of(payload, element_count)).all())
    with np.errstate(over="ignore"):
        return bool(np.isfinite(int8.parts(payload)[0] * _LARGEST_NUMBER).all())


def load_kernels(codec: Codec) -> None:
    """Load the compiled loops of a codec, if it has any; as `Kernels.load`."""
    if codec is Codec.INT8:
        int8.KERNELS.load()
    elif codec is Codec.SPARSE:
        sparse.KERNELS.load()
