"""Memory for arrays that grow without being copied.

Rules:
    - An array begins small, then moves once, into addresses for as many elements as will ever come,
      of which only pages that are written take memory.
    - The first touch of a page takes the system up to 18 ms, if its host took the memory back. So
      the pages behind the end are asked for ahead, of a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Prefault = Callable[[npt.NDArray[np.uint8]], object]
"""Asks the system for the pages of some memory, which is not changed; returns at once."""

MadeT = TypeVar("MadeT")

FIRST_BYTES = 1 << 20

_GROWTH = 8

RESERVED_BYTES = 32 << 30
"""Addresses that are reserved for an array. A process has four thousand times as many."""

PAGE_BYTES = 2 << 20
"""A page of large arrays."""

_AHEAD_BYTES = PAGE_BYTES
"""The most that is asked for ahead of an array; not more than it has."""


def no_prefault(memory: npt.NDArray[np.uint8]) -> None:
    """Leave pages to their first touch."""
    del memory


class Ahead:
    """The pages of one array that were asked for."""

    def __init__(self, array: npt.NDArray[Any], prefault: Prefault) -> None:
        self._memory = array.reshape(-1).view(np.uint8)
        self._prefault = prefault
        self._end = 0

    def use(self, byte_count: int) -> None:
        """Ask for what comes behind the first bytes, which are used."""
        wanted = min(byte_count + min(byte_count, _AHEAD_BYTES), len(self._memory))
        self._end = max(self._end, byte_count)
        while self._end < wanted:
            begin, self._end = self._end, self._end + PAGE_BYTES
            self._prefault(self._memory[begin : self._end])

    def release(self, byte_count: int, release: Prefault) -> None:
        """Give back what lies behind the first bytes."""
        if byte_count < self._end:
            release(self._memory[byte_count : self._end])
            self._end = byte_count


def reserved(make: Callable[[int], MadeT], size: int, least: int) -> tuple[int, MadeT]:
    """Arrays of `size` places, or of as many as there are addresses for; MemoryError if these are
    fewer than `least`.
    """
    while True:
        try:
            return size, make(size)
        except MemoryError:  # this system counts addresses, or one array has too many
            size //= 2
            if size < least:
                raise


def longer(array: npt.NDArray[Any], count: int, least: int) -> npt.NDArray[Any]:
    """The array with space for more: some times as long, and once it has a megabyte, in a place for
    as many as will ever come. Pages that nothing is written to take no memory.
    """
    if array.nbytes >= FIRST_BYTES:
        size = RESERVED_BYTES // array.itemsize
        _, found = reserved(lambda count: np.empty(count, array.dtype), size, least)
    else:
        found = np.empty(max(least, _GROWTH * len(array)), array.dtype)
    found[:count] = array[:count]
    return found
