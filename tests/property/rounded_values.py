"""Values rounded one by one, in float64 where all of it is exact: the twin of `row_storage`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ps_core.tables.table_spec import RowStorage

_HALF = 1 << 15


def rounded(
    storage: RowStorage, values: Sequence[float], draws: Sequence[int] | None
) -> list[float]:
    """The float32 values of one row as they are stored, with a draw of 16 bits for each; without
    draws, to the nearest.
    """
    if storage is RowStorage.FULL:
        return list(values)
    chosen = [_HALF] * len(values) if draws is None else draws
    if storage is not RowStorage.INT8:
        return [_float(storage, value, draw) for value, draw in zip(values, chosen, strict=True)]
    values = [math.copysign(min(abs(value), 127 * 2.0**121), value) for value in values]
    most = max(abs(value) for value in values)
    step = 2.0**-126
    while most > 127 * step:
        step *= 2
    return [
        _single(_single(value / step) + draw / 2**16) // 1 * step
        for value, draw in zip(values, chosen, strict=True)
    ]


def _float(storage: RowStorage, value: float, draw: int) -> float:
    is_half = storage is RowStorage.FLOAT16
    bits, least, largest = (10, -14, 65504.0) if is_half else (7, -126, (2 - 2**-7) * 2.0**127)
    magnitude = min(abs(value), largest)
    exponent = max(least, math.frexp(magnitude)[1] - 1) if magnitude else least
    step = 2.0 ** (exponent - bits)
    share = (draw >> 3) / 2**13 if is_half else draw / 2**16
    count = magnitude / step + share
    if is_half and magnitude < 2.0**-14:
        count = _single(count)
    return math.copysign(math.floor(count) * step, value)


def _single(value: float) -> float:
    """Rounded to float32, as the servers calculate."""
    found: float
    (found,) = struct.unpack("<f", struct.pack("<f", value))
    return found
