"""One table's blocks in one range: values, optimizer state, sums in the making.

The range machine decides what takes part in which update and in which order; this store does the
arithmetic that it was told to do, and nothing else. Calls on one store must not overlap; stores are
independent of each other but for the pool, which is safe to share between threads.

Rules:
    - Values are kept and summed in float32, for float64 tables in float64; workers of float16 and
      bfloat16 tables see them rounded to nearest even.
    - `decode` refuses whatever is wrong and changes nothing. Every other call checks before it
      changes anything.
    - Absent is zero: a mean divides by all contributors, whether or not they had the tensor. A
      tensor that no contributor had is skipped: values, optimizer state and step count stay as they
      were. A block without a present tensor is not touched and keeps its version.
    - AGGREGATE: the value after clock c is the reduced sum of clock c; a tensor absent from it
      reads as zeros, with its presence bit off. The sums of the last two clocks are kept; clock 0
      is the initial value.
    - Delay compensation: what a worker was given last is kept, block by block, until it goes.
    - ASSIGN: the reduced contribution replaces the values of the present tensors. ADD: it is added
      to them.

Invariants:
    STO-1  A contribution is folded at most once: its memory becomes the accumulator's.
    STO-2  The result depends on the parts, their order and their scales only, not on the block size
           or the other blocks (with OPT-1: DESIGN's G4).
    STO-3  An update that something was folded for has contributors.
    STO-4  The segments of a block cover it.
    STO-5  A store has a custom update exactly if its table names one.

What it deliberately does not do: sequence, wait, decide who contributes, know protobuf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor, InvariantViolation, check
from ps_core.keys import Incarnation
from ps_core.tables import (
    NATIVE_CODEC,
    Codec,
    DType,
    Hyperparameters,
    InitializerKind,
    OptimizerKind,
    Reduction,
    Table,
    presence_bytes,
)
from ps_server import contributions, delay
from ps_server.buffer_pool import BufferPool
from ps_server.contributions import TORCH_DTYPE, Contribution
from ps_server.custom_updates import CheckedUpdate, CustomOptimizer
from ps_server.events import Compensation
from ps_server.optimizers import BlockState, Optimizer, padded_length

_WITHOUT_ARITHMETIC = (
    OptimizerKind.AGGREGATE,
    OptimizerKind.ASSIGN,
    OptimizerKind.ADD,
    OptimizerKind.CUSTOM,
)
"""Optimizers that are no kernels of `ps_server.optimizers`."""

_KEPT_SUM_COUNT = 2
"""AGGREGATE: a worker that has sealed clock c may still ask for the sum of c - 1."""


def arithmetic_dtype(table: Table) -> torch.dtype:
    """The dtype that a table's values have on its servers: float32, or float64 for float64."""
    return torch.float64 if table.spec.dtype is DType.FLOAT64 else torch.float32


class ShardStore:
    """The blocks `blocks` of `table`, with their initial values (zeros if they come from rank 0).

    Args:
        table: the table, its spec validated.
        blocks: the blocks of the range.
        pool: working memory; one pool may serve all stores of a server. None means its own.
        home: the memory that a block's values live in: zeros, of its padded length. None means the
            store's own.
        update: CUSTOM: what the table's optimizer names.

    Raises:
        InvalidKeys: the table has no such block.
    """

    def __init__(
        self,
        table: Table,
        blocks: Sequence[int],
        pool: BufferPool | None = None,
        home: Callable[[int], Tensor] | None = None,
        update: CheckedUpdate | None = None,
    ) -> None:
        spec = table.spec
        self._table = table
        self._name = spec.name
        self._pool = pool if pool is not None else BufferPool()
        self._dtype = arithmetic_dtype(table)
        self._home = home
        self._states = {block: self._initial_state(block) for block in sorted(blocks)}
        self._payloads = {block: _payload_of(state) for block, state in self._states.items()}
        self._versions = dict.fromkeys(self._states, 0)
        self._kept = delay.KeptValues(self._pool)
        self._forming: dict[int, dict[int, Contribution]] = {}
        self._reduced: set[int] = set()
        self._sums: dict[int, dict[int, Contribution]] = {}
        self._is_mean = spec.reduction is Reduction.MEAN
        self._is_aggregate = spec.optimizer.kind is OptimizerKind.AGGREGATE
        self._adds = spec.optimizer.kind is OptimizerKind.ADD
        self._custom = _custom_optimizer(table, update)
        has_kernel = spec.optimizer.kind not in _WITHOUT_ARITHMETIC
        self._optimizer = Optimizer(spec.optimizer, self._pool) if has_kernel else None

    @property
    def state_bytes(self) -> int:
        """Bytes of values, optimizer state, kept sums and what readers were given; sums in the
        making do not count.
        """
        sums = self._kept.byte_count
        sums += sum(part.byte_count for kept in self._sums.values() for part in kept.values())
        return sums + sum(state.state_bytes for state in self._states.values())

    def decode(
        self,
        block: int,
        codec: Codec,
        payload: bytes | memoryview,
        presence: bytes,
        *,
        is_shared: bool = False,
    ) -> Contribution:
        """The payload as a contribution, checked. Changes nothing.

        Args:
            block: the block.
            codec: how the payload is encoded.
            payload: the block's elements.
            presence: one bit for each of the block's tensors; empty means all.
            is_shared: another process may write to the payload at any time. It is copied before
                it is checked, and the copy is what is checked and kept.

        Shapes:
            payload: little-endian. In the table's own float32 or float64 it is not copied but kept
                alive by the result, unless it is shared or a writable memoryview.

        Raises:
            InvalidKeys: the block is not here, or the presence bitmap has the wrong length.
            InvalidTensor: the codec cannot be this table's, the length lies, or a present tensor
                holds a value that is not finite (unless the table allows it).
        """
        state = self._state(block)
        present = None
        if presence:
            count = state.segment_count
            present = contributions.presence_mask(self._name, block, count, presence)
        self._check_codec(codec)
        view = memoryview(payload)
        dtype = TORCH_DTYPE[codec]
        if view.nbytes != state.length * dtype.itemsize:
            raise InvalidTensor(
                f"block {block} of table '{self._name}': the payload has {view.nbytes} bytes; "
                f"expected {state.length * dtype.itemsize} ({state.length} elements of "
                f"{codec.value})"
            )
        source = contributions.view(payload, codec)
        is_owned = is_shared or dtype is not self._dtype or not view.readonly
        if is_owned:  # before the check: what is checked must not change any more
            target = contributions.take_padded(self._pool, state.length, self._dtype)
            contributions.head(target, state.length).copy_(source)
            source = target
        part = Contribution(block, state.length, source, present, state.bounds, is_owned)
        if not self._table.spec.allow_non_finite:
            self._check_finite(part)
        return part

    def keep(self, reader: Incarnation, block: int) -> None:
        """Remember the block's values as `reader` has them now: what its gradients start from."""
        self._kept.keep(reader, block, self._state(block).values)

    def forget(self, reader: Incarnation) -> None:
        """The reader has gone."""
        self._kept.forget(reader)

    def compensate(self, compensation: Compensation, part: Contribution) -> Contribution:
        """A gradient as it would be at the present values, to first order (DC-ASGD); itself if the
        reader was never given the block.
        """
        kept = self._kept.find(compensation.reader, part.block)
        if kept is None:
            return part
        state = self._states[part.block]
        part = contributions.owned(part, self._pool)
        scratch = self._pool.take(state.values.numel(), self._dtype)
        delay.compensate(part, state, kept, compensation, scratch)
        self._pool.give_back(scratch)
        return part

    def fold(
        self,
        clock: int,
        parts: Sequence[tuple[int, Contribution]],
        scale: float,
        compensation: Compensation | None = None,
    ) -> None:
        """Add one worker's step to the sums of `clock`; called in rank order.

        Args:
            clock: the update.
            parts: as below.
            scale: what the contributions are multiplied by.
            compensation: how they are corrected for the updates that they missed, if so.

        Shapes:
            parts: (block, contribution) pairs. The store takes the contributions over (STO-1); a
                lone float32 or float64 one with scale 1 is used where it lies.

        Raises:
            InvalidConfig: the scale is not finite and above 0.
        """
        if not 0.0 < scale < math.inf:
            raise InvalidConfig(f"contribution scale is {scale}; expected finite and above 0")
        self._check_parts(parts)
        forming = self._forming.setdefault(clock, {})
        for block, part in parts:
            if part.present is not None and not part.present.any():
                contributions.release(part, self._pool)
                continue
            part = contributions.scaled(part, scale, self._pool)
            if compensation is not None:
                part = self.compensate(compensation, part)
            total = forming.get(block)
            forming[block] = part if total is None else contributions.added(total, part, self._pool)

    def reduce(self, clock: int, contributor_count: int) -> tuple[float, ...]:
        """Form the reduced gradient of `clock` from what was folded; `apply` then only scales it.

        Args:
            clock: the update.
            contributor_count: as in `apply`.

        Returns:
            Of each block of the range, ascending, the sum of the squares of its reduced gradient,
            in float64; absent tensors count as zeros.
        """
        forming = self._forming.setdefault(clock, {})
        check(contributor_count >= 1 or not forming, "STO-3", "a sum without contributors")
        self._reduced.add(clock)
        if self._is_mean:
            for block, total in forming.items():
                forming[block] = contributions.averaged(total, contributor_count, self._pool)
        return tuple(
            contributions.square_sum(forming[block], self._pool) if block in forming else 0.0
            for block in self._states
        )

    def apply(
        self,
        clock: int,
        hyperparameters: Hyperparameters,
        contributor_count: int,
        update_scale: float = 1.0,
    ) -> tuple[int, ...]:
        """Form update `clock` from what was folded and apply it; the blocks touched, ascending.

        Args:
            clock: the update.
            hyperparameters: put over the table's own; empty means those.
            contributor_count: the workers that took part, with or without gradients.
            update_scale: what the reduced gradient is multiplied by.

        Raises:
            InvalidConfig: a hyperparameter that the optimizer does not have or cannot use.
            UpdateFailed: the custom update failed; values, state and versions are as they were.
        """
        numbers = dict(self._table.numbers.merged(hyperparameters))
        forming = self._forming.pop(clock, {})
        is_reduced = clock in self._reduced
        self._reduced.discard(clock)
        check(contributor_count >= 1 or not forming, "STO-3", "a sum without contributors")
        reduced: dict[int, Contribution] = {}
        blocks = tuple(sorted(forming))
        for block in blocks:
            total = forming[block]
            if self._is_mean and not is_reduced:
                total = contributions.averaged(total, contributor_count, self._pool)
            total = contributions.scaled(total, update_scale, self._pool)
            if self._is_aggregate or self._custom is not None:
                reduced[block] = total
            else:
                self._apply_block(self._states[block], total, numbers)
        if self._custom is not None:
            parts = [(self._states[block], total) for block, total in reduced.items()]
            try:
                self._custom.apply(clock, parts, numbers)
            finally:
                for total in reduced.values():
                    contributions.release(total, self._pool)
        for block in blocks:
            self._versions[block] += 1
        if self._is_aggregate:
            self._keep(clock, reduced)
        return blocks

    def drop(self, clock: int) -> None:
        """Forget the sums of `clock` that are in the making."""
        self._reduced.discard(clock)
        for part in self._forming.pop(clock, {}).values():
            contributions.release(part, self._pool)

    def abandon(self) -> None:
        """Nothing more comes of what is in the making, nor of what readers were given."""
        for clock in list(self._forming):
            self.drop(clock)
        self._kept.clear()

    def assign(self, parts: Sequence[tuple[int, Contribution]]) -> None:
        """Replace initial values; absent tensors keep theirs. Versions do not change.

        Shapes:
            parts: (block, contribution) pairs; the store takes them over.
        """
        self._check_parts(parts)
        for block, part in parts:
            contributions.copy_present(part, self._states[block].values)
            contributions.release(part, self._pool)

    def read(
        self, block: int, codec: Codec | None, clock: int | None
    ) -> tuple[bytes | memoryview, bytes]:
        """A block's elements as a payload, and its presence bits.

        Args:
            block: the block.
            codec: how to encode; None means the table's dtype. Values are rounded to nearest even.
            clock: AGGREGATE: whose sum; None means the newest, 0 the initial values. Other tables
                ignore it.

        Shapes:
            payload: in the table's own arithmetic a read-only view, which the next update
                changes: copy it before anything else happens.
            presence: empty if all tensors are present, and for all tables but AGGREGATE.

        Raises:
            InvalidKeys: the block is not here.
            InvalidTensor: the codec is wider than the table.
            InvalidConfig: the sum of `clock` is not kept.
        """
        state = self._state(block)
        codec = NATIVE_CODEC[self._table.spec.dtype] if codec is None else codec
        self._check_codec(codec)
        if not self._is_aggregate:
            if TORCH_DTYPE[codec] is self._dtype:
                return self._payloads[block], b""
            return self._encode(state.values, state.length, codec), b""
        return self._read_sum(state, block, codec, clock)

    def version(self, block: int) -> int:
        """Updates that have touched the block.

        Raises:
            InvalidKeys: the block is not here.
        """
        self._state(block)
        return self._versions[block]

    def _initial_state(self, block: int) -> BlockState:
        length = self._table.block_length(block)
        segments = self._table.segments(block)
        bounds = np.array([0, *(segment.end for segment in segments)], dtype=np.int64)
        check(int(bounds[-1]) == length, "STO-4", f"segments of block {block} do not cover it")
        values = (
            self._home(block)
            if self._home
            else torch.zeros(padded_length(length), dtype=self._dtype)
        )
        initializer = self._table.spec.initializer
        if initializer.kind is InitializerKind.CONSTANT:
            values[:length] = initializer.constant
        elif initializer.kind is InitializerKind.INLINE:
            codec = NATIVE_CODEC[self._table.spec.dtype]
            begin = block * self._table.spec.block_elements * codec.element_bytes
            inline = initializer.inline[begin : begin + length * codec.element_bytes]
            values[:length] = contributions.view(inline, codec)
        return BlockState(values, bounds)

    def _state(self, block: int) -> BlockState:
        state = self._states.get(block)
        if state is None:
            raise InvalidKeys(
                f"block {block} of table '{self._name}' is not in this range; "
                f"it holds {len(self._states)} of the table's {self._table.block_count} blocks"
            )
        return state

    def _check_codec(self, codec: Codec) -> None:
        if codec is Codec.FP64 and self._dtype is not torch.float64:
            raise InvalidTensor(
                f"codec fp64 with table '{self._name}' of {self._table.spec.dtype.value}; "
                "expected fp32, fp16 or bf16"
            )

    def _check_finite(self, part: Contribution) -> None:
        broken = contributions.first_non_finite(part)
        if broken is None:
            return
        contributions.release(part, self._pool)
        segment = self._table.segments(part.block)[broken]
        raise InvalidTensor(
            f"non-finite gradient in tensor '{self._table.spec.tensors[segment.tensor].name}' of "
            f"table '{self._name}' (block {part.block}); expected finite values"
        )

    def _check_parts(self, parts: Sequence[tuple[int, Contribution]]) -> None:
        for block, part in parts:
            self._state(block)
            if part.block != block:
                raise InvariantViolation("STO-1", f"block {part.block} given as block {block}")

    def _apply_block(
        self, state: BlockState, total: Contribution, numbers: dict[str, float]
    ) -> None:
        if self._adds:
            contributions.add_present(total, state.values)
        elif self._optimizer is None:
            contributions.copy_present(total, state.values)
        else:
            total = contributions.padded(total, self._pool)
            self._optimizer.apply(state, total.values, total.present, numbers)
        contributions.release(total, self._pool)

    def _keep(self, clock: int, reduced: dict[int, Contribution]) -> None:
        self._sums[clock] = reduced
        for old in [kept for kept in self._sums if kept <= clock - _KEPT_SUM_COUNT]:
            for part in self._sums.pop(old).values():
                contributions.release(part, self._pool)

    def _read_sum(
        self, state: BlockState, block: int, codec: Codec, clock: int | None
    ) -> tuple[bytes | memoryview, bytes]:
        newest = max(self._sums, default=0)
        wanted = newest if clock is None else clock
        if wanted == 0 and newest < _KEPT_SUM_COUNT:
            return self._encode(state.values, state.length, codec), b""
        if wanted not in self._sums:
            kept = ", ".join(map(str, sorted(self._sums))) or "0"
            raise InvalidConfig(
                f"table '{self._name}' does not keep the sum of clock {wanted}; it keeps {kept}"
            )
        total = self._sums[wanted].get(block)
        if total is None:
            nothing = bytes(presence_bytes(state.segment_count))
            return bytes(state.length * codec.element_bytes), nothing
        if total.present is None:
            return self._encode(total.values, state.length, codec), b""
        values = torch.zeros(state.length, dtype=self._dtype)
        contributions.copy_present(total, values)
        present = contributions.packed_presence(total.present)
        return self._encode(values, state.length, codec), present

    def _encode(self, values: Tensor, length: int, codec: Codec) -> bytes | memoryview:
        dtype = TORCH_DTYPE[codec]
        elements = values[:length]
        if dtype is self._dtype:
            return elements.numpy().data.cast("B")
        buffer = self._pool.take(values.numel(), dtype)
        narrow = buffer[:length].copy_(elements)
        payload = narrow.view(torch.int16 if codec is Codec.BF16 else dtype).numpy().tobytes()
        self._pool.give_back(buffer)
        return payload


def _custom_optimizer(table: Table, update: CheckedUpdate | None) -> CustomOptimizer | None:
    spec = table.spec
    expected = spec.optimizer.custom_update
    check(expected == ("" if update is None else update.name), "STO-5", f"'{expected}' is not here")
    if update is None:
        return None
    return CustomOptimizer(update, spec.name, allow_non_finite=spec.allow_non_finite)


def _payload_of(state: BlockState) -> memoryview:
    """The block's values as they are at any time."""
    return state.values.numpy()[: state.length].data.cast("B").toreadonly()
