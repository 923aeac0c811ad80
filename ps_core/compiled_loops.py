"""The common part of modules whose loops numba compiles: how they are compiled, how ids are mixed,
and a hint to the processor that an element is about to be used. Only such modules import this one,
when their loops are needed: numba takes a second to load.

The compiled code is kept beside a module's file, or in the user's cache directory, if either can be
written; compiling takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

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


_KEPT, _DATA = 3, 1


def _prefetching(is_written: bool) -> Any:
    @intrinsic
    def prefetch(_context: Any, array: Any, *place: Any) -> Any:
        """Have the cache line of an element loaded, and go on. `place`: its indices, as int64."""

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = signature.args[0]
            own = context.make_array(kind)(context, builder, arguments[0])
            indices = cgutils.unpack_tuple(builder, arguments[1])  # type: ignore[no-untyped-call]
            element = cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
                context, builder, kind, own, indices
            )
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], form)
            hints = (number(each) for each in (int(is_written), _KEPT, _DATA))
            builder.call(function, [builder.bitcast(element, byte), *hints])
            return context.get_dummy_value()

        places = types.StarArgTuple(place)  # type: ignore[no-untyped-call]
        return types.void(array, places), code

    return prefetch


to_read, to_write = _prefetching(False), _prefetching(True)
