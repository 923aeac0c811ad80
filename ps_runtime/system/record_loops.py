"""The loops of `record_disk`, compiled by numba. Only that module imports this one.

Each record, or stretch of records, is one call of the system's `pread` or `pwrite`.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ps_core.compiled_loops import compiled

_SIZE, _OFFSET = types.intp, types.int64
_pread = types.ExternalFunction("pread", _SIZE(types.int32, types.voidptr, types.uintp, _OFFSET))
_pwrite = types.ExternalFunction("pwrite", _SIZE(types.int32, types.voidptr, types.uintp, _OFFSET))


def _as_pointer(_: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generated(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generated


_pointer: Any = intrinsic(_as_pointer)


@compiled("int64(int32, intp, int64, int64[::1], int64[::1])")
def read_records(file: Any, address: Any, size: Any, positions: Any, places: Any) -> int:
    for at in range(len(positions)):
        place = _pointer(address + places[at] * size)
        if _pread(file, place, size, positions[at] * size) != size:
            return at
    return -1


@compiled("int64(int32, intp, int64, int64[::1])")
def write_records(file: Any, address: Any, size: Any, positions: Any) -> int:
    at = 0
    while at < len(positions):
        end = at + 1
        while end < len(positions) and positions[end] == positions[end - 1] + 1:
            end += 1
        place, byte_count = _pointer(address + at * size), (end - at) * size
        if _pwrite(file, place, byte_count, positions[at] * size) != byte_count:
            return at
        at = end
    return -1
