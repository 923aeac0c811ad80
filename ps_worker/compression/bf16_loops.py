"""Loops between FP32 and BF16 that numba compiles. Only `torch_casts` imports this.

They take one core. Torch would share a block out to its threads, and wait for each of them: where a
server, or backward, has the other cores, that takes longer.
"""

from __future__ import annotations

from typing import Any

from numba import uint16, uint32

from ps_core.compiled_loops import compiled

_HALF, _ONE, _ROUND = uint32(16), uint32(1), uint32(0x7FFF)
_NOT_SIGN, _INFINITE, _NAN = uint32(0x7FFFFFFF), uint32(0x7F800000), uint16(0x7FC0)


@compiled("void(Array(uint32, 1, 'C', readonly=True), uint16[::1])")
def narrow(source: Any, out: Any) -> None:
    """Round the bits of FP32 to the nearest of BF16, to an even one of two."""
    for at in range(len(out)):
        bits = source[at]
        rounded = (bits + _ROUND + ((bits >> _HALF) & _ONE)) >> _HALF
        out[at] = _NAN if (bits & _NOT_SIGN) > _INFINITE else uint16(rounded)


@compiled("void(Array(uint16, 1, 'C', readonly=True), uint32[::1])")
def widen(source: Any, out: Any) -> None:
    """Write the bits of BF16 as those of FP32."""
    for at in range(len(out)):
        out[at] = uint32(source[at]) << _HALF
