"""The passes of `sign_passes` as loops that numba compiles, with the same bits, of groups of 256.
Only `sign` imports this.

A group is summed as numpy sums 256 elements: two halves, each in eight lanes. Its signs are looked
at in words of eight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, uint8, uint64

from ps_core.codecs.sign_passes import LESS
from ps_core.compiled_loops import compiled
from ps_core.tables.elements import SCALED_GROUP_COUNT

_HALF, _LANES = SCALED_GROUP_COUNT // 2, 8
_FACTOR, _NAN = float32(LESS / SCALED_GROUP_COUNT), float32(np.nan)
_TO_BITS, _LAST_BYTE = uint64(0x0102040810204080), uint64(56)
"""A word of eight bytes that are 0 or 1, times the first, has them as bits in its last byte."""

_READ = "Array(float32, 1, 'C', readonly=True)"
_READ_BITS = "Array(uint8, 1, 'C', readonly=True)"


@compiled("float32(float32[::1], float32[::1])")
def _sum(values: Any, lanes: Any) -> Any:
    """The sum of half a group."""
    for lane in range(_LANES):
        lanes[lane] = values[lane]
    for begin in range(_LANES, _HALF, _LANES):
        for lane in range(_LANES):
            lanes[lane] += values[begin + lane]
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + (
        (lanes[4] + lanes[5]) + (lanes[6] + lanes[7])
    )


@compiled(f"void({_READ}, {_READ}, float32[::1], float32[::1], uint8[::1])")
def encode(gradient: Any, before: Any, left: Any, scales: Any, bits: Any) -> None:
    all_signs = left.view(np.int32)
    taken, lanes = np.empty(SCALED_GROUP_COUNT, np.float32), np.empty(_LANES, np.float32)
    is_plus = np.empty(SCALED_GROUP_COUNT, np.uint8)
    words = is_plus.view(np.uint64)
    for group in range(len(scales)):
        begin = group * SCALED_GROUP_COUNT
        end = begin + SCALED_GROUP_COUNT
        own, old, new = gradient[begin:end], before[begin:end], left[begin:end]
        signs, packed = all_signs[begin:end], bits[begin // 8 : end // 8]
        for at in range(SCALED_GROUP_COUNT):
            new[at] = own[at] + old[at]
        for at in range(SCALED_GROUP_COUNT):
            taken[at] = abs(new[at]) * _FACTOR
            is_plus[at] = signs[at] >= int32(0)
        for word in range(len(words)):
            packed[word] = uint8((words[word] * _TO_BITS) >> _LAST_BYTE)
        scale = _sum(taken[:_HALF], lanes) + _sum(taken[_HALF:], lanes)
        if np.isfinite(scale):
            for at in range(SCALED_GROUP_COUNT):
                new[at] -= scale if signs[at] >= int32(0) else -scale
        else:
            scale = _NAN
            for at in range(SCALED_GROUP_COUNT):
                new[at] = old[at]
        scales[group] = scale


@compiled(f"void({_READ}, {_READ_BITS}, float32[::1])")
def decode(scales: Any, bits: Any, out: Any) -> None:
    for group in range(len(scales)):
        begin = group * SCALED_GROUP_COUNT
        end = begin + SCALED_GROUP_COUNT
        scale, own, packed = scales[group], out[begin:end], bits[begin // 8 : end // 8]
        for byte in range(len(packed)):
            found = int32(packed[byte])
            for bit in range(8):
                own[8 * byte + bit] = scale if (found >> bit) & 1 else -scale
