"""Staging of gradients: copied while backward runs, compared when the step ends.

Each table has one flat buffer in host memory. A hook copies a parameter's gradient into it as soon
as autograd has finished it; a block whose tensors have all been copied may leave. When the step
ends, every gradient is compared with its copy, so that clipping, unscaling, accumulation and any
other change that a training loop makes to `.grad` counts.

Rules:
    - Gradients of a device are gathered, and copied some megabytes at a time, and with the last
      one: autograd waits for every call that a hook makes, and a large model has hundreds.
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
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables.elements import pack_presence
from ps_core.tables.table import Table
from ps_worker.spec.flat_layout import TORCH_DTYPE, FlatLayout
from ps_worker.spec.values import BlockValues, Raw
from ps_worker.training.tables.device_copies import (
    Arrival,
    Moves,
    can_pin,
    current_streams,
    follow,
    pin_in_place,
    to_host,
    zero_pages,
)
from ps_worker.training.tables.inspection import (
    Answers,
    ColumnSums,
    Numbered,
    Place,
    is_finite,
    non_finite,
    place_of,
    same_bits,
    true_numbers,
)
from ps_worker.transport.lane import empty_shared

if TYPE_CHECKING:
    from ps_worker.steps.steps import TableHandle

CopyToHost: TypeAlias = Callable[[Moves], Arrival | None]
"""Copies as `to_host` does."""

_GATHERED_BYTES = 8 * 2**20
"""Gradients of a device are copied together up to so many bytes, and up to a quarter of a table."""

_MAX_PAUSE_COUNT = 32
"""The most steps for which staging pauses that was wasted again and again."""


@dataclass(slots=True, eq=False)
class _ParameterState:
    """A parameter's state in the current step."""

    blocks: tuple[int, ...]
    hook_count: int = 0
    is_staged: bool = False
    is_present: bool = False
    place: Place | None = None  # of a gradient on a device
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

    Attributes:
        values: all elements, 1-D.
        views: of each tensor.
        raw: the bytes.
        sources: the address, size in bytes and dtype of each view.
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
        self.sources = [(view.data_ptr(), view.nbytes, view.dtype) for view in self.views]

    def swap(self, other: FlatBuffer) -> None:
        """Exchange the memory with another of the same layout."""
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

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


def check_as_given(handle: TableHandle, layout: FlatLayout, now: FlatBuffer) -> None:
    """Refuse other values than an earlier call, which was interrupted, has given the table: those
    are what every worker begins with.
    """
    given = handle.steps.initial_values
    if given is None or not handle.steps.has_assigned:
        return
    before = layout.views(torch.from_numpy(given).view(now.values.dtype))
    for entry, earlier, present in zip(layout.placed, before, now.views, strict=True):
        if not same_bits(earlier, present):
            raise InvalidConfig(
                f"'{entry.name}' has other values than an earlier call, which was interrupted, has "
                f"given to table '{handle.name}': training would begin with those, and the present "
                "ones would be lost. Nothing was changed. Call it with the earlier values (the "
                "same seed, or the same state dict), and load others once it has returned; or give "
                "another name= at every worker"
            )


def check_dense(name: str, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raises InvalidTensor if the gradient of a parameter is sparse, or of another shape."""
    if gradient.layout is not torch.strided or gradient.shape != tensor.shape:
        raise InvalidTensor(
            f"the gradient of '{name}' is {gradient.layout} of shape "
            f"{tuple(gradient.shape)}; expected a dense one of {tuple(tensor.shape)}. The "
            "step was not taken: give the parameter such a gradient (nn.Embedding without "
            "sparse=True), or none, and call step() again"
        )


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
        counts = [entry.tensor.numel() for entry in layout.placed]
        self._sums, self._sums_now = ColumnSums(counts), ColumnSums(counts)
        self._gathered: list[int] = []
        self._gathered_bytes = 0
        self._hooked_count = 0  # the parameters whose gradient is complete
        self._gathers_bytes = min(_GATHERED_BYTES, self._buffer.values.nbytes // 4)
        self._streams: list[Any] = []  # in which gathered gradients were made
        # Copies under way, with what they read: its memory must not be given away before.
        self._copying: deque[tuple[Arrival, Numbered]] = deque()
        self._untold: Arrival | None = None
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
            self._hooked_count += 1
            if self._pause_count or not self._is_wanted(index):
                return []
            ready = self._gather(index, gradient)
            return [self._leave(n) for n in ready if self._may_leave(n)] if self.streams else []

    def begun_copy(self) -> Arrival | None:
        """The end of the newest copies that are under way; None if an earlier call has told it."""
        with self._lock:
            untold, self._untold = self._untold, None
            return untold

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
            self._wait_for_copies()
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
                if not self.streams:
                    return
                complete = self._copy_gathered()
                if not (complete or self._copying):
                    return
                if self._copying:
                    complete += self._next_arrived()
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
            self._restage(self._changed_parameters(asks_finite=self._asks_finite))
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
            self._wait_for_copies()  # of a step that was skipped before `take`
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
        self._gathered.clear()
        self._streams.clear()
        self._gathered_bytes = self._hooked_count = 0
        self._untold = None
        for parameter in self._parameters:
            parameter.hook_count = 0
            parameter.is_staged = False
        for block in self._blocks:
            block.waiting_count = len(block.tensors)

    def _gather(self, index: int, gradient: torch.Tensor) -> list[int]:
        """Copy a gradient, or gather it for a copy of several (device). Returns the blocks that are
        complete now.
        """
        if gradient.is_cpu:
            return [*self._arrived(), *self._copy([index])]
        self._gathered.append(index)
        self._gathered_bytes += gradient.nbytes
        self._streams = current_streams(gradient.device, self._streams)
        is_last = self._hooked_count == len(self._parameters)
        if self._gathered_bytes < self._gathers_bytes and not is_last:
            return []
        return [*self._arrived(), *self._copy_gathered()]

    def _copy_gathered(self) -> list[int]:
        """Queue the copies of the gathered gradients; returns the blocks that this completes."""
        gathered, self._gathered = self._gathered, []
        streams, self._streams = self._streams, []
        self._gathered_bytes = 0
        if not gathered:
            return []
        follow(streams)
        return self._copy(gathered)

    def _copy(self, indexes: Iterable[int]) -> list[int]:
        """Stage gradients; returns the blocks that this completes (`_arrived` has later ones)."""
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index in indexes:
            gradient = self.layout.placed[index].tensor.grad
            if gradient is None:
                continue  # it has gone since it was gathered
            entry = self.layout.placed[index]
            check_dense(entry.name, entry.tensor, gradient)
            self._parameters[index].is_present = True
            for block in self._parameters[index].blocks:
                self._blocks[block].is_changed = True
            by_device.setdefault(gradient.device, []).append((index, gradient.detach()))
        complete = []
        for device, numbered in by_device.items():
            arrival = self._copy_to_host([(self._buffer.views[i], each) for i, each in numbered])
            on_host = arrival is None and device.type == "cpu"
            for index, each in numbered:
                self._parameters[index].place = None if on_host else place_of(each)
            if not on_host:
                self._sums.take(numbered)
            if arrival is None:
                complete += self._mark_staged(numbered)
            else:
                self._copying.append((arrival, numbered))
                self._untold = arrival
        return complete

    def _mark_staged(self, numbered: Numbered) -> list[int]:
        complete = []
        for index, _ in numbered:
            parameter = self._parameters[index]
            if parameter.is_staged:
                continue
            parameter.is_staged = True
            for number in parameter.blocks:
                self._blocks[number].waiting_count -= 1
                if self._blocks[number].waiting_count == 0:
                    complete.append(number)
        return complete

    def _arrived(self) -> list[int]:
        """The blocks that finished copies complete. Never blocks."""
        complete = []
        while self._copying and self._copying[0][0].query():
            complete += self._next_arrived()  # which tells torch's sanitizer, too
        return complete

    def _next_arrived(self) -> list[int]:
        """Wait for the oldest copies; returns the blocks that they complete."""
        arrival, numbered = self._copying.popleft()
        arrival.synchronize()
        return self._mark_staged(numbered)

    def _finish_copies(self) -> None:
        self._copy_gathered()
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        while self._copying:
            self._next_arrived()

    def _is_untouched(self, block: int) -> bool:
        """True if a block's gradients are the staged ones, as far as the host can tell."""
        for tensor in self._blocks[block].tensors:
            place = self._parameters[tensor].place
            gradient = self.layout.placed[tensor].tensor.grad
            if gradient is None or not (place is None or place_of(gradient) == place):
                return False
        return True

    def _changed_parameters(self, *, asks_finite: bool = False) -> set[int]:
        """The parameters whose present gradient differs from the staged one. With `asks_finite`
        devices say in the same transfer which gradients are finite.
        """
        changed = set()
        staged: list[tuple[int, torch.Tensor]] = []
        looked_at: list[tuple[int, torch.Tensor]] = []
        for index, parameter in enumerate(self._parameters):
            gradient = self.layout.placed[index].tensor.grad
            parameter.is_finite = None
            if asks_finite and gradient is not None and self._is_on_device(index, gradient):
                looked_at.append((index, gradient.detach()))
            if not self._is_wanted(index):
                continue
            if gradient is None or not parameter.is_staged:
                if parameter.is_present or gradient is not None:
                    changed.add(index)
            elif parameter.place is not None:
                if gradient.stride() != parameter.place[2]:
                    changed.add(index)  # sums are in the order of memory
                else:
                    staged.append((index, gradient.detach()))
            elif not same_bits(self._buffer.views[index], gradient.detach()):
                changed.add(index)
        count = len(self._parameters)
        bad = [
            Answers([None if n is None else count + n for n in numbers], are_true)
            for numbers, are_true in non_finite(looked_at)
        ]
        found = true_numbers([*self._sums_now.differing(self._sums, staged), *bad])
        for index, _ in looked_at:
            self._parameters[index].is_finite = count + index not in found
        return changed | {index for index in found if index < count}

    def _is_on_device(self, index: int, gradient: torch.Tensor) -> bool:
        """True if a parameter's gradient is dense and on a device."""
        if gradient.layout is not torch.strided:
            return False
        return self._parameters[index].place is not None or gradient.device.type != "cpu"

    def _restage(self, indexes: Collection[int]) -> None:
        for index in indexes:
            parameter = self._parameters[index]
            if parameter.is_staged:
                for block in parameter.blocks:
                    self._blocks[block].is_wasted |= self._blocks[block].waiting_count == 0
            if self.layout.placed[index].tensor.grad is None:
                parameter.is_present = False
                for block in parameter.blocks:
                    self._blocks[block].is_changed = True
        self._copy(sorted(indexes))

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
