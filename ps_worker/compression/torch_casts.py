"""Conversions between payloads of raw elements, by torch: ten times as fast as numpy's for 16 bits.

Imported where a table has a codec of 16 bits, or a dtype of them: other workers run without torch.
"""

from __future__ import annotations

import warnings

import torch

from ps_core.codecs.int8 import Bytes
from ps_core.tables.elements import Codec

_DTYPES = {
    Codec.FP32: torch.float32,
    Codec.FP16: torch.float16,
    Codec.BF16: torch.bfloat16,
    Codec.FP64: torch.float64,
}

_NOT_SIGN, _INFINITE = 0x7FFF, 0x7C00
"""All bits of a binary16 but the sign's, and those of infinity."""

with warnings.catch_warnings():
    # Torch has no read-only tensor, and warns about the first view of read-only memory. Sources
    # are only read.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def elements(payload: memoryview | Bytes, codec: Codec) -> torch.Tensor:
    """A payload as a flat tensor that shares its memory, where that is aligned."""
    dtype = _DTYPES[codec]
    found = torch.frombuffer(payload, dtype=dtype)
    return found if found.data_ptr() % dtype.itemsize == 0 else found.clone()


def convert(source: memoryview | Bytes, codec: Codec, out: memoryview | Bytes, to: Codec) -> None:
    """Write a payload as one of another codec, rounded to the nearest."""
    elements(out, to).copy_(elements(source, codec))


def first_overflow(source: memoryview | Bytes, codec: Codec, narrow: Bytes) -> int | None:
    """The first element that is finite, and was not as FP16."""
    if int(elements(narrow, Codec.FP16).view(torch.int16).bitwise_and(_NOT_SIGN).max()) < _INFINITE:
        return None
    lost = elements(narrow, Codec.FP16).isinf() & elements(source, codec).isfinite()
    return int(lost.nonzero()[0].item()) if bool(lost.any()) else None
