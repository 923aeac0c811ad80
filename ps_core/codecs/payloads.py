"""Codecs whose payloads are more than an array of elements: INT8, SIGN, SPARSE and LOW_RANK."""

from __future__ import annotations

import numpy as np

from ps_core.codecs import int8, low_rank, sign, sparse
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.tables.elements import Codec

_LARGEST_NUMBER = np.float32(128)
"""A number of INT8 without its sign is no larger."""

KERNELS = {
    Codec.INT8: int8.KERNELS,
    Codec.SIGN: sign.KERNELS,
    Codec.SPARSE: sparse.KERNELS,
    Codec.LOW_RANK: low_rank.KERNELS,
}
"""Kernels of the codecs that have compiled loops."""


def decode(codec: Codec, payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of each codec's `decode`.

    Raises:
        InvalidTensor: a place of a SPARSE payload is wrong, or the matrix of a LOW_RANK one.
    """
    if codec is Codec.SPARSE:
        sparse.decode(payload, out)
    elif codec is Codec.LOW_RANK:
        low_rank.decode(payload, out)
    elif codec is Codec.SIGN:
        sign.decode(payload, out)
    else:
        int8.decode(payload, out)


def is_finite(codec: Codec, payload: Bytes, element_count: int) -> bool:
    """True if all elements are: scales say so, the few that are sent, or factors. False: perhaps.

    Raises:
        InvalidTensor: the matrix of a LOW_RANK payload is wrong.
    """
    if codec is Codec.SPARSE:
        return bool(np.isfinite(sparse.parts(payload)[0]).all())
    if codec is Codec.LOW_RANK:
        return low_rank.is_finite(payload, element_count)
    if codec is Codec.SIGN:
        return bool(np.isfinite(sign.scales_of(payload, element_count)).all())
    with np.errstate(over="ignore"):
        return bool(np.isfinite(int8.parts(payload)[0] * _LARGEST_NUMBER).all())


def load_kernels(codec: Codec) -> None:
    """Load the compiled loops of a codec, if it has any; as `Kernels.load`."""
    if codec in KERNELS:
        KERNELS[codec].load()
