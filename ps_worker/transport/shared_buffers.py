"""Arrays in memory that servers on this host can read.

A worker does not copy a gradient that it pushes from such an array with ``copy=False``: the server
reads it there. In all else they are ordinary arrays.

Thread-safe. The memory is freed with the last view of it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_runtime.system.shared_memory import Bytes, allocate

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, order=True)
class SharedBuffer:
    """The address of such an array, and the file that it can be mapped from; `number` is unique in
    the process, where both may be used again.
    """

    begin: int
    byte_count: int
    fd: int
    number: int


_numbers = itertools.count(1)
_lock = threading.Lock()
_buffers: list[SharedBuffer] = []
"""By address."""

_gone: deque[SharedBuffer] = deque()
"""Collected buffers that are still among `_buffers`. The collector may call `_forget` at any
moment, even in a thread that holds the lock, so `_forget` takes none.
"""

_collected = [0]


def empty_shared(shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
    """A new array of zeros that servers on this host can read.

    Shapes:
        result: C-contiguous, writable, aligned to a page.

    Raises:
        OSError: this system cannot share memory, or has none left: an ordinary array serves too.
    """
    element = np.dtype(dtype)
    byte_count = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    if not 0 < byte_count <= limits.MAX_LANE_SEGMENT_BYTES:
        raise OSError(
            f"{byte_count} bytes are asked for; a server maps 1 to {limits.MAX_LANE_SEGMENT_BYTES}"
        )
    fd, memory = allocate("pushpull-buffer", byte_count)
    raw: Bytes = np.frombuffer(memory, np.uint8)
    buffer = SharedBuffer(raw.ctypes.data, byte_count, fd, next(_numbers))
    with _lock:
        _sweep()
        insort(_buffers, buffer)
    weakref.finalize(memory, _forget, buffer)
    return raw.view(element).reshape(shape)


def find(payload: memoryview) -> tuple[SharedBuffer, int] | None:
    """The buffer of a payload, and its offset there; None for ordinary memory."""
    if not _buffers:
        return None
    begin = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    with _lock:
        _sweep()
        at = bisect_right(_buffers, begin, key=lambda buffer: buffer.begin) - 1
        buffer = _buffers[at] if at >= 0 else None
    if buffer is None or begin + payload.nbytes > buffer.begin + buffer.byte_count:
        return None
    return buffer, begin - buffer.begin


def collected_count() -> int:
    """The number of buffers collected so far; when it changes, check `is_live` again."""
    return _collected[0]


def is_live(buffer: SharedBuffer) -> bool:
    with _lock:
        _sweep()
        return buffer in _buffers


def _forget(buffer: SharedBuffer) -> None:
    _gone.append(buffer)
    _collected[0] += 1
    os.close(buffer.fd)


def _sweep() -> None:
    while _gone:
        _buffers.remove(_gone.popleft())
