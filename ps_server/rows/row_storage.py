"""Rows' values in memory: as the table's dtype, or in fewer bits, rounded at random.

    full      the elements
    float16   of binary16: magnitudes up to 65504
    bfloat16  the upper half of float32
    int8      whole numbers from -127 to 127, times 2**k: k is the least with which the row's
              largest magnitude is at most 127 * 2**k, and lies behind them; -128 is no number

Rules:
    - An update rounds a value down with some probability and up otherwise, so that its mean is the
      value (`ps_core.rows.rounding_draws`); all else rounds it to the nearest.
    - Everything outside sees elements of the table's dtype: copies, checkpoints, pulls.

Invariants:
    ST-1  Values that were unpacked are the same after they were packed and unpacked again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.tables.table_spec import RowStorage
from ps_server.rows.row_arrays import Column, Rows

Draws = npt.NDArray[np.uint16]
"""A random number for each element. Shapes: (rows, elements)."""

_Bits = npt.NDArray[np.uint32]
_Halves = npt.NDArray[np.uint16]

_LARGEST = {
    RowStorage.FLOAT16: 65504.0,
    RowStorage.BFLOAT16: 3.3895313892515355e38,
    RowStorage.INT8: 127 * 2.0**121,
}
"""Beyond it a value is stored as it: rounded up, it would be infinite."""

_NO_NUMBER = {RowStorage.FLOAT16: 0x7E00, RowStorage.BFLOAT16: 0x7FC0, RowStorage.INT8: -128}

_FLOAT16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""The values of all bit patterns; to look them up takes half of the time of numpy's cast."""

_SMALL_BITS = np.uint32((127 - 14) << 23)
"""The bits of 2**-14. Below it binary16 is subnormal."""

_INT8_LEAST = -126


class FullRows:
    """Rows as the elements of the table."""

    is_packed = False

    def __init__(self, column: Column) -> None:
        self.column = column

    def packed(self, values: Rows, draws: Draws | None = None) -> Rows:
        """The rows as they are stored. Shapes: (rows, elements) to (rows, width of the column)."""
        del draws
        return values

    def unpacked(self, packed: Rows) -> Rows:
        """The inverse of `packed`, but for what that has rounded."""
        return packed


class PackedRows(FullRows):
    """Rows of float32 in fewer bits."""

    is_packed = True

    def __init__(self, length: int, storage: RowStorage) -> None:
        match storage:
            case RowStorage.INT8:
                column = Column(length + 1, np.dtype(np.int8), most_bytes=4 * length)
            case _:
                column = Column(length, np.dtype(np.uint16), most_bytes=4 * length)
        super().__init__(column)
        self._storage = storage
        self._largest = np.float32(_LARGEST[storage])

    def packed(self, values: Rows, draws: Draws | None = None) -> Rows:
        bounded = np.clip(values, -self._largest, self._largest)
        no_number = np.isnan(bounded)
        has_none = not no_number.any()
        if not has_none:
            bounded[no_number] = 0.0
        match self._storage:
            case RowStorage.FLOAT16:
                found: Rows = _float16(bounded, draws)
            case RowStorage.BFLOAT16:
                found = _bfloat16(bounded, draws)
            case _:
                found = _int8(bounded, draws)
        if not has_none:
            found[:, : values.shape[1]][no_number] = _NO_NUMBER[self._storage]
        return found

    def unpacked(self, packed: Rows) -> Rows:
        match self._storage:
            case RowStorage.FLOAT16:
                found: Rows = _FLOAT16_VALUES.take(packed)
                return found
            case RowStorage.BFLOAT16:
                bits: _Bits = packed.astype(np.uint32)
                bits <<= np.uint32(16)
                return bits.view(np.float32)
        numbers = packed[:, :-1]
        found = numbers.astype(np.float32)
        found *= _powers(packed[:, -1:])
        no_number = numbers == _NO_NUMBER[RowStorage.INT8]
        if no_number.any():
            found[no_number] = np.nan
        return found


def row_storage(storage: RowStorage, length: int, dtype: np.dtype[Any]) -> FullRows:
    """The storage of a table whose rows have `length` elements."""
    if storage is RowStorage.FULL:
        return FullRows(Column(length, dtype))
    return PackedRows(length, storage)


def _float16(values: Rows, draws: Draws | None) -> _Halves:
    bits: _Bits = values.view(np.uint32)
    lower = np.uint32(1 << 12) if draws is None else draws.astype(np.uint32) >> np.uint32(3)
    found: _Bits = bits & np.uint32(0x7FFFFFFF)
    is_small = found < _SMALL_BITS
    found += lower
    found >>= np.uint32(13)
    found -= np.uint32(112 << 10)
    if is_small.any():  # equal steps, 2**24 of them in 1
        shares = 0.5 if draws is None else (draws[is_small] >> np.uint16(3)) * np.float32(2.0**-13)
        found[is_small] = np.abs(values[is_small]) * np.float32(2.0**24) + shares
    found |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    return found.astype(np.uint16)


def _bfloat16(values: Rows, draws: Draws | None) -> _Halves:
    bits: _Bits = values.view(np.uint32)
    return ((bits + (np.uint32(1 << 15) if draws is None else draws)) >> np.uint32(16)).astype(
        np.uint16
    )


def _int8(values: Rows, draws: Draws | None) -> npt.NDArray[np.int8]:
    most = np.abs(values).max(axis=1, keepdims=True)
    exponents = np.frexp(most)[1] - 7
    np.clip(exponents, _INT8_LEAST, None, out=exponents)
    exponents += most > np.float32(127) * _powers(exponents)
    shares = np.float32(0.5) if draws is None else draws * np.float32(2.0**-16)
    numbers = values * _powers(-exponents)
    numbers += shares
    np.floor(numbers, out=numbers)
    found = np.empty((len(values), values.shape[1] + 1), np.int8)
    found[:, :-1] = numbers
    found[:, -1:] = exponents
    return found


def _powers(exponents: npt.NDArray[Any]) -> Rows:
    """2 to these powers, from -126 to 127."""
    bits = (exponents.astype(np.int32) + np.int32(127)) << np.int32(23)
    return bits.view(np.float32)
