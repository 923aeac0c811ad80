"""The work of `int8`, described there, as passes of numpy, for where numba is not installed."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ps_core.tables.elements import SCALED_GROUP_COUNT

Floats = npt.NDArray[np.float32]
_Item = TypeVar("_Item", bound=np.generic)

MOST = 127
"""The largest number of a payload; the smallest is its negative."""

PART = np.nextafter(np.nextafter(np.float32(1 / MOST), np.float32(0)), np.float32(0))
"""A scale in units of its group's largest element."""

LEAST = np.float32(1e-30)
"""A group whose elements are no larger decodes to zeros."""

GOLDEN, FACTOR_1, FACTOR_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""The draws' hash has 32 bits: of the element's place times GOLDEN, plus a key."""


def encode(
    gradient: Floats,
    before: Floats,
    left: Floats,
    scales: Floats,
    numbers: npt.NDArray[np.int8],
    key: np.uint32,
) -> None:
    """As `int8.encode_gradient`, of the parts of a payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
        factors, is_finite = _scaled(left, scales)
        drawn = draws(len(left), key) * np.float32(1 / 65536)
        _to_numbers(left, factors, drawn + np.float32(0), numbers)
        left -= numbers.astype(np.float32) * _spread(scales, len(left))
    if not is_finite.all():
        broken = ~_spread(is_finite, len(left))
        left[broken] = before[broken]


def round_to_nearest(values: Floats, scales: Floats, numbers: npt.NDArray[np.int8]) -> None:
    """As `int8.encode_values`, of the parts of a payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        factors, _ = _scaled(values, scales)
        _to_numbers(values, factors, np.float32(0.5), numbers)


def decode(scales: Floats, numbers: npt.NDArray[np.int8], out: Floats) -> None:
    """As `int8.decode`, of the parts of a payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(numbers.astype(np.float32), _spread(scales, len(out)), out=out)


def _scaled(values: Floats, scales: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Write the scales; returns of each group the factor of its numbers, and if it is finite."""
    begins = np.arange(0, len(values), SCALED_GROUP_COUNT)
    largest = np.maximum.reduceat(np.abs(values), begins) if len(values) else scales
    is_finite = np.isfinite(largest)
    is_used = is_finite & (largest > LEAST)
    scales[:] = np.where(is_finite, np.where(is_used, largest * PART, 0), np.nan)
    factors = np.float32(MOST) / np.where(is_used, largest, 1)
    return np.where(is_used, factors, np.float32(0)), is_finite


def _to_numbers(
    values: Floats, factors: Floats, draws: Floats | np.float32, numbers: npt.NDArray[np.int8]
) -> None:
    places = values * _spread(factors, len(values)) + draws + np.float32(MOST + 1)
    finite = np.where(np.isfinite(places), places, np.float32(MOST + 1))
    numbers[:] = np.clip(finite.astype(np.int32) - (MOST + 1), -MOST, MOST)


def draws(count: int, key: np.uint32) -> npt.NDArray[np.float32]:
    """16 bits of a hash for each element."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(GOLDEN) + key
    x = (x ^ (x >> np.uint32(16))) * np.uint32(FACTOR_1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(FACTOR_2)
    return (x >> np.uint32(16)).astype(np.float32)


def _spread(of_groups: npt.NDArray[_Item], count: int) -> npt.NDArray[_Item]:
    return np.repeat(of_groups, SCALED_GROUP_COUNT)[:count]
