"""Staging of gradients: copied while backward runs, compared when the step ends.

Each table has one flat buffer in host memory. A hook copies a parameter's gradient into it as soon
as autograd has finished it; a block whose tensors have all been copied may leave. When the step
ends, every gradient is compared with its copy, so that clipping, unscaling, accumulation and any
other change that a training loop makes to `.grad` counts.

Rules:
    - A block that changes after it left is sent again before the step's seal.
    - On the CPU bits decide what has changed. On a device sums of bits by column do, because
      reading the gradient back would cost a transfer; `_version` says what is certainly the same.
    - A table whose gradients mostly changed after they left (clipping does that in every step) is
      not streamed in the next step; staging goes on, so streaming starts again when that ends.
      Staging that was wasted twice pauses for a step, then for 2, 4, ... `_MAX_PAUSE_COUNT` steps:
      gradients are copied once, when the step ends.
    - Backward may change a gradient on a device while it is copied; that is a change after it left,
      like any other.

Invariants:
    STG-1  `take` gives every block with a present gradient that has not left in its present form.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ps_core.errors import InvalidTensor
from ps_core.tables.elements import pack_presence
from ps_core.tables.table import Table
from ps_worker.spec.flat_layout import TORCH_DTYPE, FlatLayout
from ps_worker.spec.values import BlockValues, Raw
from ps_worker.training.tables.device_copies import (
    Arrival,
    can_pin,
    pin_in_place,
    to_host,
    zero_pages,
)
from ps_worker.transport.lane import empty_shared

CopyToHost: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Arrival | None]
"""Copies (source, target) as `to_host` does."""

_BITS: dict[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by width; as integers, NaN equals itself and 0 differs from -0."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_COLUMN_COUNT = 1021
"""A prime, so that no layer has rows of this length, and equal changes of every row do not cancel.
A single sum missed `neg_` in 108 of 500 random tensors of ten elements; sums by column missed none,
of ten or of 100,000.
"""


_MAX_PAUSE_COUNT = 32
"""The most steps for which staging pauses that was wasted again and again."""


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """The identity of a gradient on a device without reading it back: its place in memory, and sums
    of its bits by column (a short gradient is its own sums).
    """

    place: tuple[int, int, tuple[int, ...]]
    sums: torch.Tensor

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Fingerprint:
        return cls(place_of(gradient), column_sums(gradient))

    def is_untouched(self, gradient: torch.Tensor) -> bool:
        """True if a gradient is the same tensor, of the same version; never blocks."""
        return place_of(gradient) == self.place

    def differs(self, other: Fingerprint) -> torch.Tensor:
        """A one-element bool tensor on the device: True if two gradients differ. One that was only
        written to, with the same bits, does not: `clip_grad_norm_` does that if it clips nothing.
        """
        (_, _, strides), (_, _, others) = self.place, other.place
        if strides != others:  # the sums are in the order of memory
            return torch.ones((), dtype=torch.bool, device=self.sums.device)
        return sums_differ(self.sums, other.sums)


def place_of(gradient: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    version = -1 if gradient.is_inference() else gradient._version
    return gradient.data_ptr(), version, gradient.stride()


def _flat_bits(gradient: torch.Tensor) -> torch.Tensor:
    """The elements' bits in the order of the memory: a view, unless the memory has gaps."""
    if not gradient.is_contiguous():
        strides = gradient.stride()
        outer_first = sorted(range(gradient.dim()), key=lambda axis: -strides[axis])
        gradient = gradient.permute(outer_first)
    return gradient.reshape(-1).view(_BITS[gradient.element_size()])


def column_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of a tensor's bits, in the order of its memory: of each column of its whole rows, then
    the bits of the last row, if it is not whole. Queued on the device.
    """
    bits = _flat_bits(tensor)
    whole = bits.numel() // _COLUMN_COUNT * _COLUMN_COUNT
    if not whole:
        return bits.clone()
    sums = bits.new_empty(_COLUMN_COUNT + bits.numel() - whole, dtype=torch.int64)
    rows = bits[:whole].view(-1, _COLUMN_COUNT)
    torch.sum(rows, 0, dtype=torch.int64, out=sums[:_COLUMN_COUNT])
    sums[_COLUMN_COUNT:].copy_(bits[whole:])
    return sums


def sums_differ(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """A one-element bool tensor on the device: True if two results of `column_sums` differ."""
    if before.shape != now.shape:
        return torch.ones((), dtype=torch.bool, device=now.device)
    return (before != now).any()


def flagged(flags: list[tuple[int, torch.Tensor]]) -> list[int]:
    """The indexes whose one-element flag is True: in one transfer, not one for each parameter."""
    if not flags:
        return []
    device = flags[0][1].device
    found = torch.stack([flag.to(device) for _, flag in flags]).tolist()
    return [index for (index, _), is_true in zip(flags, found, strict=True) if is_true]


def is_same_memory(first: int, second: int, byte_count: int) -> bool:
    """True if `byte_count` bytes at two addresses are the same. Other threads run meanwhile. Reads
    16 to 24 GB/s a core, where `torch.equal` of integers reads 6 to 14.
    """
    return not _memcmp(first, second, byte_count)


def same_bits(staged: torch.Tensor, gradient: torch.Tensor) -> bool:
    """True if two CPU tensors of one shape and dtype have the same bits."""
    if staged.is_contiguous() and gradient.is_contiguous():
        return is_same_memory(staged.data_ptr(), gradient.data_ptr(), staged.nbytes)
    bits = _BITS[staged.element_size()]
    return torch.equal(staged.view(bits), gradient.view(bits))


@dataclass(slots=True, eq=False)
class _ParameterState:
    """A parameter's state in the current step."""

    blocks: tuple[int, ...]
    hook_count: int = 0
    is_staged: bool = False
    is_present: bool = False
    fingerprint: Fingerprint | None = None  # of a gradient on a device
    is_finite: bool | None = None  # that gradient is, by the device; None: it was not asked


@dataclass(slots=True, eq=False)
class _BlockState:
    """A block's state in the current step."""

    tensors: tuple[int, ...]
    waiting_count: int  # tensors that are not staged yet
    has_left: bool = False
    is_changed: bool = False  # since it left, or it is staged and has not left
    is_wasted: bool = False  # it changed after it left, or after it would have if it were streamed


class FlatBuffer:
    """Host memory in the shape of a table: shared with servers on this host, if `is_shared` and the
    system can; pinned, if `is_pinned`, where its tensors are on a device for which it can be.
    """

    def __init__(
        self, layout: FlatLayout, *, is_shared: bool = False, is_pinned: bool = True
    ) -> None:
        devices = [entry.tensor.device for entry in layout.placed]
        self._device = next(filter(can_pin, devices), None)
        dtype = TORCH_DTYPE[layout.dtype]
        byte_count = layout.element_count * dtype.itemsize
        memory = None
        if is_shared:
            with contextlib.suppress(OSError):  # no memory can be shared
                memory = empty_shared(byte_count, "uint8")
        if memory is None and self._device is not None:
            memory = zero_pages(byte_count)  # torch's own pinned memory is of a power of two
        self._memory = memory
        self._is_pinned = False
        if memory is None or (is_pinned and not self.pin()):
            pins = is_pinned and self._device is not None
            self.values = torch.zeros(layout.element_count, dtype=dtype, pin_memory=pins)
        else:
            self.values = torch.from_numpy(memory).view(dtype)
        self.views = layout.views(self.values)
        self.raw: Raw = self.values.view(torch.uint8).numpy()

    def pin(self) -> bool:
        """Pin the memory, if it has to be and is not; False: the driver refuses. Idempotent."""
        if self._device is not None and self._memory is not None and not self._is_pinned:
            self._is_pinned = pin_in_place(self._memory, self._device)
            return self._is_pinned
        return True


def blocks_in(table: Table, values: torch.Tensor) -> Iterator[BlockValues]:
    """The blocks of a table's flat values, as views."""
    size = table.spec.block_elements * values.element_size()
    raw = values.view(torch.uint8).numpy().data
    for block in range(table.block_count):
        yield BlockValues(block, raw[block * size : (block + 1) * size])


class GradientStaging:
    """The gradients of one table, from hook to step.

    Args:
        accumulate: the backward passes of one step; a gradient is staged after the last.
        is_shared: stage in memory that servers on this host can read.
        asks_finite: have devices look at their gradients for `non_finite`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        table: Table,
        accumulate: int = 1,
        *,
        is_shared: bool = False,
        asks_finite: bool = True,
        copy: CopyToHost = to_host,
    ) -> None:
        self._asks_finite = asks_finite
        self.layout = layout
        self.table = table
        self.streams = True
        self._accumulate = accumulate
        self._copy_to_host = copy
        self._buffer = FlatBuffer(layout, is_shared=is_shared)
        segments = [table.segments(block) for block in range(table.block_count)]
        self._blocks = [_BlockState(tuple(s.tensor for s in here), len(here)) for here in segments]
        blocks_of: list[list[int]] = [[] for _ in layout.placed]
        for number, block in enumerate(self._blocks):
            for tensor in block.tensors:
                blocks_of[tensor].append(number)
        self._parameters = [_ParameterState(tuple(blocks)) for blocks in blocks_of]
        self._copying: deque[tuple[Arrival, int]] = deque()
        self._only: frozenset[int] | None = None
        self._wasted_count = 0  # steps in a row of which the staging was wasted, pauses apart
        self._pause_count = 0  # steps that staging still pauses for
        # Hooks run on autograd's threads: one for each device.
        self._lock = threading.Lock()

    def restrict(self, blocks: Collection[int] | None) -> None:
        """Let only these blocks leave from now on; None: all."""
        with self._lock:
            self._only = None if blocks is None else frozenset(blocks)

    # --- while backward runs

    def hooked(self, index: int) -> list[BlockValues]:
        """Copy the gradient of parameter `index`, or queue the copy (device); returns the blocks
        that leave now.
        """
        gradient = self.layout.placed[index].tensor.grad
        with self._lock:
            parameter = self._parameters[index]
            parameter.hook_count += 1
            if gradient is None or parameter.hook_count != self._accumulate:
                return []  # a later pass of a longer accumulation: `take` will see the difference
            if self._pause_count or not self._is_wanted(index):
                return []
            ready = [*self._arrived(), *self._copy(index, gradient)]
            return [self._leave(n) for n in ready if self._may_leave(n)] if self.streams else []

    @property
    def newest_copy(self) -> Arrival | None:
        """The end of the newest copy that is under way; None: there is none."""
        with self._lock:
            return self._copying[-1][0] if self._copying else None

    def landed(self) -> list[BlockValues]:
        """The blocks that leave because copies have ended. Gradients that were touched since are
        left to `take`. Never blocks.
        """
        with self._lock:
            complete = self._arrived()
            if not self.streams:
                return []
            ready = (n for n in complete if self._may_leave(n) and self._is_untouched(n))
            return [self._leave(number) for number in ready]

    def stay(self, numbers: Iterable[int]) -> None:
        """These blocks were to leave, and could not: `take` gives them again (STG-1)."""
        with self._lock:
            for number in numbers:
                self._blocks[number].has_left = False
                self._blocks[number].is_changed = True

    def discard(self) -> None:
        """The gradients were zeroed: the next backward pass starts over."""
        with self._lock:
            self._finish_copies()
            for block in self._blocks:
                block.is_wasted |= block.waiting_count == 0
            self._restart()

    # --- when the step ends

    def arriving(self) -> Iterator[list[BlockValues]]:
        """The blocks of a streamed table that leave as the last gradients come from their device.

        A device is far behind the hooks: when the last has run, it has most of a backward pass
        before it. Gradients that were touched since are left to `take`, as are tables that are not
        streamed. Waits for the device, gradient by gradient.
        """
        while True:
            with self._lock:
                if not (self.streams and self._copying):
                    return
                arrival, index = self._copying.popleft()
                arrival.synchronize()
                complete = self._mark_staged(index)
                ready = [n for n in complete if self._may_leave(n) and self._is_untouched(n)]
                blocks = [self._leave(number) for number in ready]
            yield blocks

    def changed_after_leaving(self) -> str | None:
        """The name of a parameter whose gradient has changed since its block left."""
        with self._lock:
            self._finish_copies()
            for index in sorted(self._changed_parameters()):
                if any(self._blocks[block].has_left for block in self._parameters[index].blocks):
                    return self.layout.placed[index].name
        return None

    def take(self) -> list[BlockValues]:
        """The blocks that have to leave before the step's seal (STG-1). Reads every gradient once
        (CPU), or waits for the device.
        """
        with self._lock:
            self._finish_copies()
            for index in self._changed_parameters(asks_finite=self._asks_finite):
                self._restage(index)
            self._finish_copies()
            self._judge()
            leaving = [n for n in range(len(self._blocks)) if self._must_leave(n)]
            return [self._leave(number) for number in leaving]

    def non_finite(self) -> str | None:
        """The name of a parameter whose gradient is not finite, after `take`. Reads those of the
        host once; devices have looked at theirs.
        """
        states = self._parameters
        present = [index for index, each in enumerate(states) if each.is_present]
        is_whole = len(present) == len(states) and all(each.is_finite is None for each in states)
        if is_whole and is_finite(self._buffer.values):
            return None
        for index in present:
            known = states[index].is_finite
            if not (is_finite(self._buffer.views[index]) if known is None else known):
                return self.layout.placed[index].name
        return None

    def finish(self) -> None:
        """The step was sealed and committed: start the next."""
        with self._lock:
            self._finish_copies()  # of a step that was skipped before `take`
            self._restart()
            for parameter in self._parameters:
                parameter.is_present = False
            for block in self._blocks:
                block.has_left = block.is_changed = block.is_wasted = False

    # --- inside, under the lock

    def _judge(self) -> None:
        """Was this step's staging of use? What the next one does follows."""
        if self._pause_count:
            self._pause_count -= 1
            return
        wasted_count = sum(block.is_wasted for block in self._blocks)
        self.streams = 2 * wasted_count <= len(self._blocks)
        self._wasted_count = 0 if self.streams else self._wasted_count + 1
        if self._wasted_count > 1:
            self._pause_count = min(2 ** (self._wasted_count - 2), _MAX_PAUSE_COUNT)

    def _restart(self) -> None:
        for parameter in self._parameters:
            parameter.hook_count = 0
            parameter.is_staged = False
        for block in self._blocks:
            block.waiting_count = len(block.tensors)

    def _copy(self, index: int, gradient: torch.Tensor) -> list[int]:
        """Stage a gradient; returns the blocks that this completes (`_arrived` has later ones)."""
        parameter, entry = self._parameters[index], self.layout.placed[index]
        if gradient.layout is not torch.strided or gradient.shape != entry.tensor.shape:
            raise InvalidTensor(
                f"the gradient of '{entry.name}' is {gradient.layout} of shape "
                f"{tuple(gradient.shape)}; expected a dense one of {tuple(entry.tensor.shape)}"
            )
        for block in parameter.blocks:
            self._blocks[block].is_changed = True
        parameter.is_present = True
        gradient = gradient.detach()
        arrival = self._copy_to_host(gradient, self._buffer.views[index])
        on_host = arrival is None and gradient.device.type == "cpu"
        parameter.fingerprint = None if on_host else Fingerprint.of(gradient)
        if arrival is None:
            return self._mark_staged(index)
        self._copying.append((arrival, index))
        return []

    def _mark_staged(self, index: int) -> list[int]:
        parameter = self._parameters[index]
        if parameter.is_staged:
            return []
        parameter.is_staged = True
        complete = []
        for number in parameter.blocks:
            self._blocks[number].waiting_count -= 1
            if self._blocks[number].waiting_count == 0:
                complete.append(number)
        return complete

    def _arrived(self) -> list[int]:
        """The blocks that finished copies complete. Never blocks."""
        complete = []
        while self._copying and self._copying[0][0].query():
            complete += self._mark_staged(self._copying.popleft()[1])
        return complete

    def _finish_copies(self) -> None:
        while self._copying:
            event, index = self._copying.popleft()
            event.synchronize()
            self._mark_staged(index)

    def _is_untouched(self, block: int) -> bool:
        """True if a block's gradients are the staged ones, as far as the host can tell."""
        for tensor in self._blocks[block].tensors:
            fingerprint = self._parameters[tensor].fingerprint
            gradient = self.layout.placed[tensor].tensor.grad
            if gradient is None or not (fingerprint is None or fingerprint.is_untouched(gradient)):
                return False
        return True

    def _changed_parameters(self, *, asks_finite: bool = False) -> set[int]:
        """The parameters whose present gradient differs from the staged one. With `asks_finite`
        devices say in the same transfer which gradients are finite.
        """
        changed = set()
        on_device: list[tuple[int, torch.Tensor]] = []
        bad: list[tuple[int, torch.Tensor]] = []
        count = len(self._parameters)
        for index, parameter in enumerate(self._parameters):
            gradient = self.layout.placed[index].tensor.grad
            parameter.is_finite = None
            if asks_finite and gradient is not None and self._is_on_device(index, gradient):
                bad.append((count + index, torch.isfinite(gradient.detach()).all().logical_not()))
            if not self._is_wanted(index):
                continue
            if gradient is None or not parameter.is_staged:
                if parameter.is_present or gradient is not None:
                    changed.add(index)
            elif parameter.fingerprint is not None:
                now = Fingerprint.of(gradient.detach())
                on_device.append((index, parameter.fingerprint.differs(now)))
            elif not same_bits(self._buffer.views[index], gradient.detach()):
                changed.add(index)
        found = set(flagged([*on_device, *bad]))
        for number, _ in bad:
            self._parameters[number - count].is_finite = number not in found
        return changed | {index for index in found if index < count}

    def _is_on_device(self, index: int, gradient: torch.Tensor) -> bool:
        """True if a parameter's gradient is dense and on a device."""
        if gradient.layout is not torch.strided:
            return False
        return self._parameters[index].fingerprint is not None or gradient.device.type != "cpu"

    def _restage(self, index: int) -> None:
        if self._parameters[index].is_staged:
            for block in self._parameters[index].blocks:
                self._blocks[block].is_wasted |= self._blocks[block].waiting_count == 0
        gradient = self.layout.placed[index].tensor.grad
        if gradient is not None:
            self._copy(index, gradient)
            return
        self._parameters[index].is_present = False
        for block in self._parameters[index].blocks:
            self._blocks[block].is_changed = True

    def _may_leave(self, number: int) -> bool:
        return self._only is None or number in self._only

    def _is_wanted(self, index: int) -> bool:
        """True if any block that may leave has elements of the parameter."""
        return self._only is None or not self._only.isdisjoint(self._parameters[index].blocks)

    def _must_leave(self, number: int) -> bool:
        if not self._may_leave(number):
            return False
        block = self._blocks[number]
        is_present = any(self._parameters[tensor].is_present for tensor in block.tensors)
        return block.is_changed if block.has_left else is_present

    def _leave(self, number: int) -> BlockValues:
        block = self._blocks[number]
        block.has_left = True
        block.is_changed = False
        width = self._buffer.values.element_size()
        start = number * self.table.spec.block_elements * width
        payload = self._buffer.raw.data[start : start + self.table.block_length(number) * width]
        present = tuple(self._parameters[tensor].is_present for tensor in block.tensors)
        return BlockValues(number, payload, pack_presence(present))


def is_finite(values: torch.Tensor) -> bool:
    """True if there is neither an infinity nor a NaN."""
    if not values.numel():
        return True
    # The extremes propagate NaN. One vectorised pass: 17 GB/s a core, 12 times as fast as a norm.
    least, greatest = torch.aminmax(values)
    return bool(torch.isfinite(least) and torch.isfinite(greatest))
