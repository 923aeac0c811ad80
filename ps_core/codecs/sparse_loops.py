"""The passes of `sparse_passes` as loops that numba compiles, with the same places. Only `sparse`
imports this.

The comparisons of a chunk are vector instructions, and eight of them are looked at as one word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, uint32

from ps_core.codecs.sparse_passes import NOT_SIGN, RUN, STRIDE
from ps_core.compiled_loops import compiled

_CHUNK, _WORD = 1024, 8
_BITS = int32(NOT_SIGN)

_READ = "Array(float32, 1, 'C', readonly=True)"


@compiled(f"int32[::1]({_READ}, {_READ})")
def sample(gradient: Any, before: Any) -> Any:
    stride_count = len(gradient) // STRIDE
    sums = np.empty(stride_count * RUN, np.float32)
    for number in range(stride_count):
        begin, to = number * STRIDE, number * RUN
        own, old, new = gradient[begin:], before[begin:], sums[to : to + RUN]
        for at in range(RUN):
            new[at] = own[at] + old[at]
    return sums.view(np.int32) & _BITS


@compiled(f"uint32[::1]({_READ}, {_READ}, float32[::1], int32)")
def add(gradient: Any, before: Any, left: Any, threshold: Any) -> Any:
    bits = left.view(np.int32)
    reaches = np.zeros(_CHUNK, np.uint8)
    words = reaches.view(np.uint64)
    found = np.empty(len(left) // 16 + _WORD, np.uint32)
    count = 0
    for begin in range(0, len(left), _CHUNK):
        end = begin + _CHUNK
        own, old, new = gradient[begin:end], before[begin:end], left[begin:end]
        new_bits, reached = bits[begin:end], reaches[: len(left) - begin]
        for at in range(len(new)):
            new[at] = own[at] + old[at]
        for at in range(len(reached)):
            reached[at] = int32(new_bits[at] & _BITS) >= threshold
        for at in range(len(reached), _CHUNK):
            reaches[at] = 0
        if len(found) < count + _CHUNK:
            more = np.empty(3 * len(found) + _CHUNK, np.uint32)
            for at in range(count):
                more[at] = found[at]
            found = more
        for word in range(len(words)):
            if words[word] != 0:
                for at in range(_WORD * word, _WORD * word + _WORD):
                    found[count] = uint32(begin + at)
                    count += reaches[at]
    return found[:count]


def take_largest(left: Any, places: Any, values: Any, sent: Any) -> None:
    magnitudes = _magnitudes(left, places)
    at = len(places) - len(sent)  # numpy finds it: numba would compile a search of its own for 10 s
    _take(left, places, magnitudes, np.partition(magnitudes, at)[at], values, sent)


@compiled("int32[::1](float32[::1], uint32[::1])")
def _magnitudes(left: Any, places: Any) -> Any:
    bits = left.view(np.int32)
    magnitudes = np.empty(len(places), np.int32)
    for at in range(len(places)):
        magnitudes[at] = bits[places[at]] & _BITS
    return magnitudes


@compiled("void(float32[::1], uint32[::1], int32[::1], int32, float32[::1], uint32[::1])")
def _take(left: Any, places: Any, magnitudes: Any, least: Any, values: Any, sent: Any) -> None:
    equal_count = len(sent)
    for at in range(len(places)):
        equal_count -= magnitudes[at] > least
    count = 0
    for at in range(len(places)):
        if magnitudes[at] >= least:
            if magnitudes[at] == least:
                equal_count -= 1
                if equal_count < 0:
                    continue
            place = places[at]
            sent[count], values[count] = place, left[place]
            left[place] = 0
            count += 1
