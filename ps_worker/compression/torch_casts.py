"""Conversions between payloads of raw elements, by torch: ten times as fast as numpy's for 16 bits.
Between FP32 and BF16 compiled loops go before it, where numba is installed.

Imported where a table has a codec of 16 bits, or a dtype of them: other workers run without torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from ps_core.codecs.int8 import Bytes
from ps_core.tables.elements import Codec

_DTYPES = {
    Codec.FP32: torch.float32,
    Codec.FP16: torch.float16,
    Codec.BF16: torch.bfloat16,
    Codec.FP64: torch.float64,
}

_BITS: dict[Codec, npt.DTypeLike] = {Codec.FP32: np.uint32, Codec.BF16: np.uint16}

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


@functools.cache
def bf16_loops() -> ModuleType | None:
    """The module `bf16_loops`, which takes a second to load; None without numba."""
    try:
        return importlib.import_module("ps_worker.compression.bf16_loops")
    except ImportError:
        return None


def convert(source: memoryview | Bytes, codec: Codec, out: memoryview | Bytes, to: Codec) -> None:
    """Write a payload as one of another codec, rounded to the nearest."""
    if {codec, to} == {Codec.FP32, Codec.BF16} and (loops := bf16_loops()) is not None:
        move = loops.narrow if to is Codec.BF16 else loops.widen
        given, made = np.frombuffer(source, _BITS[codec]), np.frombuffer(out, _BITS[to])
        if given.flags.aligned and made.flags.aligned:
            move(given, made)
            return
    elements(out, to).copy_(elements(source, codec))


def first_overflow(source: memoryview | Bytes, codec: Codec, narrow: Bytes) -> int | None:
    """The first element that is finite, and was not as FP16."""
    if int(elements(narrow, Codec.FP16).view(torch.int16).bitwise_and(_NOT_SIGN).max()) < _INFINITE:
        return None
    lost = elements(narrow, Codec.FP16).isinf() & elements(source, codec).isfinite()
    return int(lost.nonzero()[0].item()) if bool(lost.any()) else None
