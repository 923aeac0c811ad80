"""Addresses that are reserved now and take memory page by page, when they are first written.

An array that grows into reserved addresses is never copied. Its first pages are small, so that a
short array takes little; pages beyond are huge, which makes random access faster (on Linux).
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

_IS_LINUX = sys.platform.startswith("linux")
_NO_RESERVE = 0x4000 if _IS_LINUX else 0
"""MAP_NORESERVE, which Python names from 3.13 on: no memory is accounted for."""

_SMALL_BYTES = 16 * 1024 * 1024


def reserve(byte_count: int) -> npt.NDArray[np.uint8]:
    """Reserve so many bytes, zeros; OSError if there are no such addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, byte_count, flags=flags)
    for advice, begin, end in (
        ("MADV_NOHUGEPAGE", 0, min(_SMALL_BYTES, byte_count)),
        ("MADV_HUGEPAGE", _SMALL_BYTES, byte_count),
        ("MADV_DONTDUMP", 0, byte_count),
    ):
        _advise(memory, advice, begin, end)
    return np.frombuffer(memory, np.uint8)


def _advise(memory: mmap.mmap, name: str, begin: int, end: int) -> None:
    """Advise the system, if it knows this advice."""
    advice: Any = getattr(mmap, name, None)
    if advice is None or begin >= end:
        return
    try:
        memory.madvise(advice, begin, end - begin)
    except OSError:  # a system without huge pages
        return
