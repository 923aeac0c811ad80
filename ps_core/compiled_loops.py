"""The common part of modules whose loops numba compiles. Only such modules import this one, when
their loops are needed: numba takes a second to load.

The compiled code is kept beside a module's file, or in the user's cache directory, if either can be
written; compiling takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, uint64

from ps_core.rows import GOLDEN, MIX_FACTORS, MIX_SHIFTS

_SHIFT_1, _SHIFT_2, _SHIFT_3 = (uint64(int(shift)) for shift in MIX_SHIFTS)
_FACTOR_1, _FACTOR_2 = (uint64(int(factor)) for factor in MIX_FACTORS)
_GOLDEN = uint64(GOLDEN)

_njit: Any = njit


def compiled(*signatures: str, **flags: Any) -> Callable[[Any], Any]:
    """Compile a function for these signatures when it is defined, or, without any, for those it is
    called with; `cache` where a file can be.
    """

    def compile_now(function: Any) -> Any:
        given = list(signatures) or None
        try:
            return _njit(given, nogil=True, cache=True, **flags)(function)
        except RuntimeError:  # no directory can be written
            return _njit(given, nogil=True, **flags)(function)

    return compile_now


@compiled("uint64(uint64)")
def mixed(value: Any) -> Any:
    """As `ps_core.rows.splitmix64`."""
    value += _GOLDEN
    value = (value ^ (value >> _SHIFT_1)) * _FACTOR_1
    value = (value ^ (value >> _SHIFT_2)) * _FACTOR_2
    return value ^ (value >> _SHIFT_3)
