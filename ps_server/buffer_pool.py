"""Working memory of the data path, used again instead of allocated again.

A fresh 1 MiB tensor costs 256 page faults, about as much as the arithmetic on it, so sums,
converted payloads and scratch come from here and go back.

Rules:
    - A buffer's content is unspecified when it is taken.
    - Whoever gives a buffer back holds no view of it any more.
    - At most `kept_bytes` wait here to be used again; the rest goes to the allocator.

Invariants:
    POOL-1  No buffer is in the pool twice (a breach would hand one memory to two users).

What it deliberately does not do: lock. `list.append` and `list.pop` are atomic, so one pool serves
the stores of a whole server from several threads; the bound may be missed by one buffer a thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ps_core import limits


class BufferPool:
    """Flat tensors by dtype and number of elements.

    Attributes:
        kept_bytes: how much may wait here.
    """

    __slots__ = ("_free", "kept_bytes")

    def __init__(self, kept_bytes: int = limits.DEFAULT_GATE_EXTRA_BYTES) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self.kept_bytes = kept_bytes

    def take(self, element_count: int, dtype: torch.dtype) -> Tensor:
        """A flat contiguous tensor of unspecified content, the caller's until it is given back."""
        free = self._free.get((dtype, element_count))
        if free:
            try:
                return free.pop()
            except IndexError:  # another thread took the last one in between
                pass
        return torch.empty(element_count, dtype=dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Ends the caller's use of a tensor that `take` gave."""
        if self.held_bytes + buffer.nbytes <= self.kept_bytes:
            self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    @property
    def held_bytes(self) -> int:
        """Bytes that wait here to be used again."""
        held_bytes = 0
        # Other threads may add sizes meanwhile.
        for (dtype, element_count), free in tuple(self._free.items()):
            held_bytes += dtype.itemsize * element_count * len(free)
        return held_bytes
