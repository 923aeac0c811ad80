"""Loops over ids that numba compiles, the extra `rows`. Import it where its absence is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, uint64

from ps_core.rows import GOLDEN, MIX_FACTORS, MIX_SHIFTS

_SHIFT_1, _SHIFT_2, _SHIFT_3 = (uint64(int(shift)) for shift in MIX_SHIFTS)
_FACTOR_1, _FACTOR_2 = (uint64(int(factor)) for factor in MIX_FACTORS)
_GOLDEN = uint64(GOLDEN)


def compiled(*signatures: str) -> Callable[[Any], Any]:
    """Compile a function for these signatures when it is defined; `cache` where a file can be."""

    def compiled(function: Any) -> Any:
        try:
            return njit(list(signatures), nogil=True, cache=True)(function)
        except RuntimeError:  # no directory can be written
            return njit(list(signatures), nogil=True)(function)

    return compiled


@compiled("uint64(uint64)")
def mixed(value: Any) -> Any:
    """As `ps_core.rows.splitmix64`."""
    value += _GOLDEN
    value = (value ^ (value >> _SHIFT_1)) * _FACTOR_1
    value = (value ^ (value >> _SHIFT_2)) * _FACTOR_2
    return value ^ (value >> _SHIFT_3)
