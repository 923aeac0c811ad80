"""The passes of `int8_passes` as loops that numba compiles, with the same bits. Only `int8` imports
this.

Each loop over a group is one that LLVM makes into vector instructions: over slices, so that no
index can be negative, and in numbers of 32 bits throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int8, int32, uint32

from ps_core.codecs.int8_passes import FACTOR_1, FACTOR_2, GOLDEN, LEAST, MOST, PART
from ps_core.compiled_loops import compiled
from ps_core.tables.elements import SCALED_GROUP_COUNT

_LEAST, _PART, _MOST_FLOAT = float32(LEAST), float32(PART), float32(MOST)
_MOST, _LOWEST, _OFFSET = int32(MOST), int32(-MOST), int32(MOST + 1)
_OFFSET_FLOAT = float32(MOST + 1)
_GOLDEN, _FACTOR_1, _FACTOR_2 = uint32(GOLDEN), uint32(FACTOR_1), uint32(FACTOR_2)
_HALF, _ONE_LESS, _DRAW = uint32(16), uint32(15), float32(1 / 65536)
_NOT_SIGN, _INFINITE = int32(0x7FFFFFFF), int32(0x7F800000)
_NEAREST = float32(0.5)

_READ = "Array(float32, 1, 'C', readonly=True)"
_NUMBERS = "Array(int8, 1, 'C', readonly=True)"


@compiled()
def _largest(bits: Any) -> Any:
    """The bits of the largest absolute value; NaN's are above infinity's, and those above all."""
    largest = int32(0)
    for at in range(len(bits)):
        own = int32(bits[at] & _NOT_SIGN)
        largest = own if own > largest else largest
    return largest


@compiled()
def _scale_of(bits: Any) -> Any:
    """The scale of a group, and the factor of its numbers."""
    largest = np.empty(1, np.int32)
    largest[0] = _largest(bits)
    value = largest.view(np.float32)[0]
    if largest[0] >= _INFINITE:
        return float32(np.nan), float32(0)
    if value <= _LEAST:
        return float32(0), float32(0)
    return value * _PART, _MOST_FLOAT / value


@compiled(f"void({_READ}, {_READ}, float32[::1], float32[::1], int8[::1], uint32)")
def encode(gradient: Any, before: Any, left: Any, scales: Any, numbers: Any, key: Any) -> None:
    bits = left.view(np.int32)
    for group in range(len(scales)):
        begin = group * SCALED_GROUP_COUNT
        end = begin + SCALED_GROUP_COUNT
        own, old, new = gradient[begin:end], before[begin:end], left[begin:end]
        out = numbers[begin:end]
        for at in range(len(out)):
            new[at] = own[at] + old[at]
        scale, factor = _scale_of(bits[begin:end])
        scales[group] = scale
        if np.isnan(scale):
            for at in range(len(out)):
                out[at] = int8(0)
                new[at] = old[at]
            continue
        first = uint32(uint32(begin) * _GOLDEN + key)
        for at in range(len(out)):
            x = uint32(uint32(uint32(at) * _GOLDEN) + first)
            x = uint32(uint32(x ^ (x >> _HALF)) * _FACTOR_1)
            x = uint32(uint32(x ^ (x >> _ONE_LESS)) * _FACTOR_2)
            draw = float32(int32(x >> _HALF)) * _DRAW
            number = int32(int32(new[at] * factor + draw + _OFFSET_FLOAT) - _OFFSET)
            number = number if number < _MOST else _MOST
            number = number if number > _LOWEST else _LOWEST
            out[at] = int8(number)
            new[at] = new[at] - float32(number) * scale


@compiled(f"void({_READ}, float32[::1], int8[::1])")
def round_to_nearest(values: Any, scales: Any, numbers: Any) -> None:
    bits = values.view(np.int32)
    for group in range(len(scales)):
        begin = group * SCALED_GROUP_COUNT
        end = begin + SCALED_GROUP_COUNT
        scale, factor = _scale_of(bits[begin:end])
        scales[group] = scale
        own, out = values[begin:end], numbers[begin:end]
        for at in range(len(out)):
            number = int32(int32(own[at] * factor + _NEAREST + _OFFSET_FLOAT) - _OFFSET)
            number = number if number < _MOST else _MOST
            number = number if number > _LOWEST else _LOWEST
            out[at] = int8(number) if factor > 0 else int8(0)


@compiled(f"void({_READ}, {_NUMBERS}, float32[::1])")
def decode(scales: Any, numbers: Any, out: Any) -> None:
    for group in range(len(scales)):
        begin = group * SCALED_GROUP_COUNT
        end = begin + SCALED_GROUP_COUNT
        scale, own, new = scales[group], numbers[begin:end], out[begin:end]
        for at in range(len(new)):
            new[at] = float32(own[at]) * scale
