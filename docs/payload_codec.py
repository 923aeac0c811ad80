"""The codecs of payloads as PROTOCOL.md has them, in numpy, for tests to hold the servers against.

bfloat16, which numpy lacks, is a uint16: a float32's upper half, rounded to nearest even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.tables.elements import Codec

_NUMPY_DTYPE: dict[Codec, np.dtype[Any]] = {
    Codec.FP32: np.dtype("<f4"),
    Codec.FP16: np.dtype("<f2"),
    Codec.BF16: np.dtype("<u2"),
    Codec.FP64: np.dtype("<f8"),
}


def raw_view(payload: bytes | memoryview, codec: Codec) -> npt.NDArray[Any]:
    """The payload as a read-only numpy vector, without a copy; bfloat16 as uint16."""
    return np.frombuffer(payload, dtype=_NUMPY_DTYPE[codec])


def decode(payload: bytes | memoryview, codec: Codec) -> npt.NDArray[Any]:
    """Values of the payload: a view for fp32, fp16 and fp64, a float32 copy for bf16."""
    raw = raw_view(payload, codec)
    if codec is not Codec.BF16:
        return raw
    return (raw.astype(np.uint32) << 16).view(np.float32)


def encode(values: npt.NDArray[Any], codec: Codec) -> bytes:
    """`values` (any float dtype, any shape, read in C order) as a payload."""
    if codec is not Codec.BF16:
        return np.ascontiguousarray(values, dtype=_NUMPY_DTYPE[codec]).tobytes()
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return quiet.astype(np.uint16).tobytes()
