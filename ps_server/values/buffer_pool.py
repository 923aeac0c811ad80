"""Working memory of the data path, used again instead of allocated again.

A fresh 1 MiB tensor costs 256 page faults, about as much as the arithmetic on it, so sums,
converted payloads and scratch come from here and go back.

Rules:
    - A buffer's content is unspecified when it is taken.
    - A user that gives a buffer back holds no view of it any more.
    - The pool keeps as many buffers as were needed at once; `trim` frees those that were not needed
      since its last call.
    - The pool takes no lock: `list.append` and `list.pop` are atomic, so one pool serves all stores
      of a server from several threads; `trim` may then free a few too many.

Invariants:
    POOL-1  No buffer is in the pool twice (a breach would hand one memory to two users).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _Free:
    """Buffers of one kind; `least_count` is the fewest that were free since the last trim."""

    buffers: list[Tensor] = field(default_factory=list)
    least_count: int = 0


class BufferPool:
    """Flat tensors by dtype and number of elements."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], _Free] = {}

    def take(self, element_count: int, dtype: torch.dtype) -> Tensor:
        """A flat contiguous tensor of unspecified content, the caller's until it is given back."""
        free = self._of(element_count, dtype)
        try:
            buffer = free.buffers.pop()
        except IndexError:
            free.least_count = 0
            return torch.empty(element_count, dtype=dtype)
        free.least_count = min(free.least_count, len(free.buffers))
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._of(buffer.numel(), buffer.dtype).buffers.append(buffer)

    def _of(self, element_count: int, dtype: torch.dtype) -> _Free:
        free = self._free.get((dtype, element_count))
        return self._free.setdefault((dtype, element_count), _Free()) if free is None else free

    def trim(self) -> None:
        """Free the buffers that were not needed since the last call. By the pool's own thread."""
        for key, free in list(self._free.items()):
            if free.least_count == len(free.buffers):  # all of it, or there is nothing
                del self._free[key]
                continue
            del free.buffers[: free.least_count]  # those that were used longest ago
            free.least_count = len(free.buffers)

    @property
    def held_bytes(self) -> int:
        """Bytes of free buffers."""
        kinds = tuple(self._free.items())  # other threads may add some meanwhile
        return sum(dtype.itemsize * count * len(free.buffers) for (dtype, count), free in kinds)
