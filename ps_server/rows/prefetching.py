"""A hint to the processor, for loops that numba compiles: this element is about to be used."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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
