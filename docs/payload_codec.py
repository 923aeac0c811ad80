"""The codecs of payloads as PROTOCOL.md has them, in numpy, for tests to hold the servers against.

bfloat16, which numpy lacks, is a uint16: a float32's upper half, rounded to nearest even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.tables.elements import SCALED_GROUP_COUNT, Codec

_NUMPY_DTYPE: dict[Codec, np.dtype[Any]] = {
    Codec.FP32: np.dtype("<f4"),
    Codec.FP16: np.dtype("<f2"),
    Codec.BF16: np.dtype("<u2"),
    Codec.FP64: np.dtype("<f8"),
}

RAW_CODECS = tuple(_NUMPY_DTYPE)
"""The codecs whose payloads are arrays of elements."""


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


def decode_int8(payload: bytes, element_count: int) -> npt.NDArray[np.float32]:
    """Values of an INT8 payload: numbers times the scale of their group."""
    scale_count = -(-element_count // SCALED_GROUP_COUNT)
    scales = np.frombuffer(payload, "<f4", scale_count)
    numbers = np.frombuffer(payload, np.int8, element_count, 4 * scale_count)
    groups = np.arange(element_count) // SCALED_GROUP_COUNT
    found: npt.NDArray[np.float32] = np.multiply(numbers, scales[groups], dtype=np.float32)
    return found


def decode_sign(payload: bytes, element_count: int) -> npt.NDArray[np.float32]:
    """Values of a SIGN payload: the scale of their group, with a minus where their bit is 0."""
    scale_count = -(-element_count // SCALED_GROUP_COUNT)
    scales = np.frombuffer(payload, "<f4", scale_count)
    packed = np.frombuffer(payload, np.uint8, offset=4 * scale_count)
    bits = np.unpackbits(packed, count=element_count, bitorder="little")
    own = scales[np.arange(element_count) // SCALED_GROUP_COUNT]
    return np.where(bits == 1, own, -own)


def encode_sparse(elements: npt.ArrayLike, places: npt.ArrayLike) -> bytes:
    """A SPARSE payload."""
    return np.array(elements, "<f4").tobytes() + np.array(places, "<u4").tobytes()


def decode_sparse(payload: bytes, element_count: int) -> npt.NDArray[np.float32]:
    """Values of a SPARSE payload: zero but for those that are sent."""
    count = len(payload) // 8
    found = np.zeros(element_count, np.float32)
    found[np.frombuffer(payload, "<u4", offset=4 * count)] = np.frombuffer(payload, "<f4", count)
    return found


def encode_low_rank(left: npt.ArrayLike, right: npt.ArrayLike, first: int = 0) -> bytes:
    """A LOW_RANK payload of these factors; `first` is the column of the block's first element."""
    rows, columns = np.array(left, "<f4"), np.array(right, "<f4")
    header = np.array([columns.shape[1], columns.shape[0], first], "<u4")
    return header.tobytes() + rows.tobytes() + columns.tobytes()


def decode_low_rank(payload: bytes, element_count: int) -> npt.NDArray[np.float32]:
    """Values of a LOW_RANK payload: of each the sum of its products, one after the other."""
    columns, rank, first = np.frombuffer(payload, "<u4", 3).tolist()
    numbers = np.frombuffer(payload, "<f4", offset=12)
    right = numbers[-rank * columns :].reshape(rank, columns)
    left = numbers[: -rank * columns].reshape(-1, rank)
    row, column = np.divmod(first + np.arange(element_count), columns)
    found: npt.NDArray[np.float32] = left[row, 0] * right[0, column]
    for k in range(1, rank):
        found += left[row, k] * right[k, column]
    return found
