"""One table's blocks in one range: values, optimizer state, accumulators.

The range machine decides the contributions of each update and their order; this store only does the
arithmetic. Calls on one store must not overlap. Stores share only the pool, which is thread-safe.

Rules:
    - Values are kept and summed in float32, for float64 tables in float64; workers of float16 and
      bfloat16 tables see them rounded to nearest even.
    - Every call checks before it changes anything.
    - A tensor that no contributor had is skipped: values, optimizer state and step count stay. A
      block without a present tensor is not touched and keeps its version.
    - AGGREGATE: the value after clock c is the reduced sum of clock c; a tensor absent from it
      reads as zeros, with its presence bit off. The sums of the last two clocks are kept; clock 0
      is the initial value.
    - Delay compensation: the running mean of the adaptive form covers the accumulated steps, in
      their order. It goes with the accumulator, and becomes the block's with the update: a sum that
      is dropped is in no mean that is copied, saved or sent.
    - ASSIGN: the reduced contribution replaces present tensors' values. ADD: it is added to them.

Invariants:
    STO-1  A contribution is accumulated at most once: its memory becomes the accumulator's.
    STO-2  The result depends on the parts, their order and their scales only, not on the block size
           or the other blocks (with OPT-1: DESIGN's G4).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ps_core.errors import (
    InvalidConfig,
    InvalidKeys,
    InvalidTensor,
    InvariantViolation,
    UpdateFailed,
)
from ps_core.keys import Incarnation
from ps_core.sliced_work import PIECE_COUNT, Work, at_once, pieces_of
from ps_core.tables.elements import NATIVE_CODEC, Codec, check_length
from ps_core.tables.optimizers import Hyperparameters
from ps_core.tables.table import Table
from ps_server.ranges.events import Compensation
from ps_server.values import contributions
from ps_server.values import delay_compensation as delay
from ps_server.values.block_values import (
    ReadyBlock,
    arithmetic_dtype,
    encoded,
    ready_block,
    received,
)
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.custom_updates import CheckedUpdate
from ps_server.values.mutations import SentAccumulator
from ps_server.values.optimizer_arrays import assign_array, check_array, read_array
from ps_server.values.optimizers import BlockState
from ps_server.values.store_copy import (
    SavedBlock,
    StoreCopy,
    SumCopy,
    buffer_for,
    check_block,
    copy_of_block,
    restore_block,
    saved_block,
)
from ps_server.values.update_arithmetic import Accumulator, KeptSums, Terms, UpdateArithmetic


class ChangeHooks(NamedTuple):
    """Called with blocks before they change and after."""

    begin: Callable[[Sequence[int]], None]
    end: Callable[[Sequence[int]], None]


def nobody(blocks: Sequence[int]) -> None:
    """A hook that does nothing."""
    del blocks


NOBODY_LOOKS = ChangeHooks(nobody, nobody)


class ShardStore:
    """The blocks `blocks` of `table`, with their initial values (zeros if they come from rank 0).

    Args:
        pool: working memory; one pool may serve all stores of a server. None means its own.
        home: the memory of a block's values: zeros, of its padded length. None: the store's own.
        update: CUSTOM: what the table's optimizer names.
        ready: the blocks as they begin, ascending, where they have been made before, in `home`.

    Attributes:
        lineage: is another object whenever blocks were replaced otherwise than by an update. While
            it is the same one, a block of the same version is the same.

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
        ready: Mapping[int, ReadyBlock] | None = None,
    ) -> None:
        spec = table.spec
        self.table = table
        self._name = spec.name
        self._pool = pool or BufferPool()
        self._dtype = arithmetic_dtype(table)
        self._codec = spec.arithmetic_codec
        if ready is None:
            ready = {block: ready_block(table, block, home) for block in sorted(blocks)}
        self._states = {block: state for block, (state, _) in ready.items()}
        self._payloads = {block: payload for block, (_, payload) in ready.items()}
        self._versions = dict.fromkeys(self._states, 0)
        self._block_bytes = self._counted_bytes()  # counted on: a store may have thousands
        self.lineage = object()
        self._kept = delay.ReaderValues(self._pool)
        self._accumulators: defaultdict[int, Accumulator] = defaultdict(Accumulator)
        self._means_ahead: dict[int, Contribution] = {}  # the newest, of sums not applied yet
        self._sums = KeptSums(self._name, self._pool)
        self._arithmetic = UpdateArithmetic(table, self._pool, update)
        self._is_by_block = not (self._arithmetic.is_aggregate or self._arithmetic.is_whole)

    @property
    def state_bytes(self) -> int:
        """Bytes of all that is kept, for readers too; sums in the making do not count."""
        return self._kept.byte_count + self._sums.byte_count + self._block_bytes

    @property
    def has_means(self) -> bool:
        """True if a block has had adaptive delay compensation. Looks at each."""
        return any(delay.MEAN_SQUARE in state.slots for state in self._states.values())

    @property
    def copy_bytes(self) -> int:
        """The most bytes that a checkpoint's copy of it has."""
        return self._block_bytes

    def _counted_bytes(self) -> int:
        return sum(state.state_bytes for state in self._states.values())

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
            presence: one bit for each of the block's tensors; empty means all.
            is_shared: another process may write to the payload at any time. It is copied before
                it is checked, and the copy is what is checked and kept.

        Shapes:
            payload: of the codec's length for the block. In the table's own float32 or float64 it
                is not copied but kept alive by the result, unless it is shared or writable.

        Raises:
            InvalidKeys: the block is not here, or the presence bitmap has the wrong length.
            InvalidTensor: the codec cannot be this table's, the length lies, or a present tensor
                holds a value that is not finite (unless the table allows it).
        """
        state = self._state(block)
        count = state.segment_count
        present = contributions.presence_mask(self._name, block, count, presence)
        self._check_codec(codec)
        view = memoryview(payload)
        what = f"block {block} of table '{self._name}': the payload"
        check_length(view.nbytes, codec, state.length, what)
        is_owned = is_shared or codec is not self._codec or not view.readonly
        is_finite = False  # it is not known
        if is_owned:  # before the check: what is checked must not change any more
            source = contributions.take_padded(self._pool, state.length, self._dtype)
            target = contributions.head(source, state.length)
            try:
                is_finite = contributions.decode(payload, codec, target) and not is_shared
            except InvalidTensor as error:
                self._pool.give_back(source)
                raise InvalidTensor(f"{what} has {error}") from error
        else:
            source = contributions.view(payload, codec)
        part = Contribution(block, state.length, source, present, state.bounds, is_owned)
        if not (is_finite or self.table.spec.allow_non_finite):
            self._check_finite(part)
        return part

    def keep(self, reader: Incarnation, block: int) -> None:
        """Remember the block's values as `reader` has them now: its gradients start from these."""
        self._kept.keep(reader, block, self._state(block).values)

    def forget(self, reader: Incarnation) -> None:
        self._kept.forget(reader)

    def _compensated(
        self, accumulator: Accumulator, compensation: Compensation, part: Contribution
    ) -> Contribution:
        """The gradient at the present values; unchanged if the reader was never given the block."""
        kept = self._kept.find(compensation.reader, part.block)
        if kept is None:
            return part
        state = self._states[part.block]
        part = contributions.owned(part, self._pool)
        mean = self._mean_after(accumulator, part) if compensation.adaptive else None
        scratch = self._pool.take(state.values.numel(), self._dtype)
        delay.compensate(part, state, kept, compensation.strength, mean, scratch)
        self._pool.give_back(scratch)
        return part

    def _mean_after(self, accumulator: Accumulator, part: Contribution) -> Contribution:
        """The block's running mean with the gradient in it, which goes with the accumulator."""
        ahead = self._means_ahead.get(part.block)
        slot = self._states[part.block].slots.get(delay.MEAN_SQUARE)
        mean = delay.mean_after(part, slot if ahead is None else ahead.values, self._pool)
        if part.block in accumulator.means:
            contributions.release(accumulator.means[part.block], self._pool)
        accumulator.means[part.block] = self._means_ahead[part.block] = mean
        return mean

    def accumulate(
        self,
        clock: int,
        parts: Sequence[tuple[int, Contribution]],
        scale: float,
        compensation: Compensation | None = None,
    ) -> None:
        """Add one worker's step to the sums of `clock`; called in rank order.

        Args:
            parts: (block, contribution) pairs. The store takes the contributions over (STO-1); a
                lone float32 or float64 one with scale 1 is used where it lies.
            compensation: how they are corrected for the updates that they missed, if so.

        Raises:
            InvalidConfig: the scale is not finite and above 0.
        """
        if not 0.0 < scale < math.inf:
            raise InvalidConfig(f"contribution scale is {scale}; expected finite and above 0")
        self._check_parts(parts)
        accumulator = self._accumulators[clock]
        for _, part in parts:
            if part.present is not None and not part.present.any():
                contributions.release(part, self._pool)
                continue
            part = contributions.scaled(part, scale, self._pool)
            if compensation is not None:
                part = self._compensated(accumulator, compensation, part)
            accumulator.add(part, self._pool)

    def reducing(self, clock: int, contributor_count: int) -> Work[tuple[float, ...]]:
        """Form the reduced gradient of `clock`; `apply` then only scales it. Returns the sum of the
        squares of its present elements, of each block of the range, ascending, in float64.
        """
        accumulator = self._accumulators[clock]
        yield from self._arithmetic.reducing(accumulator, contributor_count)
        squares = []
        for block in self._states:
            part = accumulator.parts.get(block)
            squares.append(0.0 if part is None else contributions.square_sum(part, self._pool))
            yield
        return tuple(squares)

    def apply(
        self,
        clock: int,
        hyperparameters: Hyperparameters,
        contributor_count: int,
        update_scale: float = 1.0,
    ) -> tuple[int, ...]:
        """`take` and `applying` at once; what was accumulated survives an InvalidConfig."""
        self._arithmetic.merged(hyperparameters)
        terms = Terms(clock, hyperparameters, contributor_count, update_scale)
        return at_once(self.applying(self.take(clock), terms))

    def applying(
        self, accumulator: Accumulator, terms: Terms, changes: ChangeHooks = NOBODY_LOOKS
    ) -> Work[tuple[int, ...]]:
        """Apply a sum that was taken, or came from another server, some blocks after others. It is
        used up. Returns the blocks touched, ascending.

        Raises:
            InvalidConfig: a hyperparameter that the optimizer does not have or cannot use.
            UpdateFailed: the custom update failed; values, state and versions are as they were.
        """
        arithmetic = self._arithmetic
        blocks = tuple(sorted(accumulator.parts))
        means, accumulator.means = accumulator.means, {}
        if arithmetic.is_aggregate:  # the sums before it change place, whatever its blocks are
            for some in pieces_of(tuple(self._states)):
                changes.begin(some)
                changes.end(some)
                yield
        if arithmetic.is_whole:
            self._change(blocks, changes, accumulator, terms, means)
        else:
            for some in pieces_of(blocks):
                self._change(some, changes, accumulator, terms, means)
                yield
        accumulator.is_reduced = True
        if arithmetic.is_aggregate:
            self._sums.keep(terms.clock, accumulator)
        return blocks

    def is_brief(self, clock: int, block_count: int) -> bool:
        """True if the update of `clock`, of so many blocks, is one step: `apply_brief` does it."""
        del clock
        return block_count <= PIECE_COUNT and self._is_by_block

    def apply_brief(self, accumulator: Accumulator, terms: Terms, changes: ChangeHooks) -> None:
        """As `applying`, where the update `is_brief`: most are, and steps cost more than these."""
        means, accumulator.means = accumulator.means, {}
        self._change(sorted(accumulator.parts), changes, accumulator, terms, means)
        accumulator.is_reduced = True

    def _change(
        self,
        blocks: Sequence[int],
        changes: ChangeHooks,
        accumulator: Accumulator,
        terms: Terms,
        means: dict[int, Contribution],
    ) -> None:
        all_states = self._states
        numbers = self._arithmetic.merged(terms.hyperparameters)
        slot_counts = [len(all_states[block].slots) for block in blocks]
        changes.begin(blocks)
        try:
            self._arithmetic.apply(all_states, blocks, accumulator, terms, numbers)
        except UpdateFailed:
            changes.end(blocks)
            raise
        if means:
            self._put_means(blocks, means)
        changes.end(blocks)  # what else is raised leaves blocks marked: nobody takes a part
        for block, slot_count in zip(blocks, slot_counts, strict=True):
            self._versions[block] += 1
            state = all_states[block]
            if len(state.slots) != slot_count:  # each is like the values
                self._block_bytes += (len(state.slots) - slot_count) * state.values.nbytes

    def _put_means(self, blocks: Sequence[int], means: dict[int, Contribution]) -> None:
        for block in blocks:
            mean = means.pop(block, None)
            if mean is None:
                continue
            state = self._states[block]
            if delay.MEAN_SQUARE not in state.slots:
                state.slots[delay.MEAN_SQUARE] = torch.zeros_like(state.values)
            contributions.copy_present(mean, state.slots[delay.MEAN_SQUARE])
            self._forget_ahead(mean)
            contributions.release(mean, self._pool)

    def _forget_ahead(self, mean: Contribution) -> None:
        if self._means_ahead.get(mean.block) is mean:
            del self._means_ahead[mean.block]

    def take(self, clock: int) -> Accumulator:
        """Take the accumulator of `clock`; later steps of the same clock go into another one."""
        return self._accumulators.pop(clock, None) or Accumulator()

    def kept_accumulator(self, clock: int) -> Accumulator:
        """The accumulator of `clock` as `reducing` left it; it stays, and must not be changed."""
        return self._accumulators[clock]

    def put_accumulator(self, clock: int, accumulator: Accumulator) -> None:
        """Put another server's sum of `clock` in place of the one here."""
        self.drop(clock)
        self._accumulators[clock] = accumulator

    def receiving(self, sent: SentAccumulator) -> Work[Accumulator]:
        """Check a sum that came from another server. Changes nothing.

        Shapes:
            sent: as `Accumulator.sent` gives it. Payloads are not copied but kept alive by the
                result; they must not change any more.

        Raises:
            InvalidKeys: a block is not here, or comes twice, or its presence bitmap has the wrong
                length; or a mean is of another block, or of a part of one.
            InvalidTensor: a payload has the wrong length.
        """
        parts: dict[int, Contribution] = {}
        means: dict[int, Contribution] = {}
        for found, elements in ((parts, sent.blocks), (means, sent.means)):
            for each in elements:
                found[each.block] = received(self.table, self._state(each.block), each)
                yield
        if len(parts) != len(sent.blocks) or len(means) != len(sent.means):
            raise InvalidKeys(f"a sum of table '{self._name}' has a block twice")
        if means.keys() - parts.keys() or any(mean.presence for mean in sent.means):
            raise InvalidKeys(
                f"a sum of table '{self._name}' has running means of blocks {sorted(means)}; "
                f"expected whole ones, of some of its blocks, {sorted(parts)}"
            )
        return Accumulator(parts, sent.is_reduced, means)

    def drop(self, clock: int) -> None:
        accumulator = self._accumulators.pop(clock, None)
        if accumulator is not None:
            for mean in accumulator.means.values():
                self._forget_ahead(mean)
            accumulator.release(self._pool)

    def snapshot(self) -> StoreCopy:
        """`copying`, at once."""
        return at_once(self.copying())

    def copying(self) -> Work[StoreCopy]:
        """Copy the store's lasting state, sums that wait for their scale too."""
        blocks = []
        for block, state in self._states.items():
            blocks.append(copy_of_block(block, self._versions[block], state))
            yield
        waiting = {clock: each for clock, each in self._accumulators.items() if each.is_reduced}
        sums = [
            SumCopy(clock, waits, each.sent().fixed())
            for waits, some in ((False, self._sums.all), (True, waiting))
            for clock, each in some.items()
        ]
        return StoreCopy(tuple(blocks), tuple(sums))

    def saved(self, block: int) -> SavedBlock:
        """A block for a checkpoint: views that the next update changes."""
        return saved_block(block, self._versions[block], self._state(block))

    def load(
        self, block: int, version: int, steps: Sequence[int]
    ) -> Callable[[str, int], memoryview]:
        """Load a block of a checkpoint: the result gives the memory of each tensor to write to, by
        its name and its bytes; `end_load` follows.
        """
        state = self._state(block)
        self.lineage = object()
        self._versions[block] = version
        state.set_segment_steps(steps)

        def buffer(name: str, byte_count: int) -> memoryview:
            del byte_count  # who writes compares it
            before = state.state_bytes
            found = buffer_for(name, state)
            self._block_bytes += state.state_bytes - before
            return found

        return buffer

    def end_load(self, block: int) -> None:
        """Note that all tensors of the block were written: they lie in place."""
        self._state(block)

    def checking(self, copy: StoreCopy) -> Work[None]:
        """Check that the copy is of these blocks. Changes nothing.

        Raises:
            InvalidKeys: it is of other blocks, or a sum is.
            InvalidTensor: something in it has the wrong length.
        """
        blocks = [each.block for each in copy.blocks]
        if sorted(blocks) != list(self._states):
            raise InvalidKeys(
                f"a copy of table '{self._name}' has {len(blocks)} blocks, the first {blocks[:3]}; "
                f"expected the {len(self._states)} of its range, {list(self._states)[:3]} first"
            )
        for each in copy.blocks:
            check_block(f"block {each.block} of '{self._name}'", each, self._states[each.block])
            yield
        for kept in copy.sums:
            yield from self.receiving(kept.accumulator)

    def restoring(self, copy: StoreCopy, changes: ChangeHooks = NOBODY_LOOKS) -> Work[None]:
        """After `checking`, restore the store from `copy`, in the memory that the values have;
        nothing else stays. Sums stay in the memory of `copy`.
        """
        yield from self.checking(copy)
        self.abandon()
        self.lineage = object()
        for block in copy.blocks:
            changes.begin((block.block,))
            restore_block(block, self._states[block.block])
            self._versions[block.block] = block.version
            changes.end((block.block,))
            yield
        kept: dict[int, Accumulator] = {}
        for each in copy.sums:
            sums = self._accumulators if each.waits else kept
            sums[each.clock] = yield from self.receiving(each.accumulator)
        self._block_bytes = self._counted_bytes()
        self._sums.restore(kept)

    def abandon(self, *, keeps_reduced: bool = False) -> None:
        """Drop all accumulators, or all that are not reduced, and the values kept for readers."""
        for clock, each in list(self._accumulators.items()):
            if not (keeps_reduced and each.is_reduced):
                self.drop(clock)
        if not keeps_reduced:
            self._means_ahead.clear()
        self._kept.clear()

    def assign(
        self, parts: Sequence[tuple[int, Contribution]], array: str = "", edit: bytes = b""
    ) -> None:
        """Replace values; or lay optimizer state beside what there is, or put it in place. Absent
        tensors keep theirs. Versions and all else do not change.

        Args:
            parts: (block, contribution) pairs; the store takes them over.
            array: of optimizer state (`assign_array`); empty means that values are replaced.
            edit: under which name.

        Raises:
            InvalidKeys: the table's optimizer has no such array.
        """
        self._check_parts(parts)
        if array:
            check_array(self.table, array)
        self.lineage = object()
        for block, part in parts:
            state = self._states[block]
            if array:
                before = state.state_bytes
                assign_array(state, self.table.spec.optimizer, (array, edit), part)
                self._block_bytes += state.state_bytes - before
            else:
                contributions.copy_present(part, state.values)
            contributions.release(part, self._pool)

    def read_array(self, block: int, array: str) -> bytes:
        """A block's elements of an array of optimizer state; InvalidKeys if either is not here."""
        state = self._state(block)
        check_array(self.table, array)
        return read_array(state, self.table.spec.optimizer, array)

    def read(
        self, block: int, codec: Codec | None, clock: int | None
    ) -> tuple[bytes | memoryview, bytes]:
        """A block's elements as a payload, and its presence bits.

        Args:
            codec: how to encode, rounded to the nearest; None means the table's dtype.
            clock: AGGREGATE: whose sum; None: the newest, 0: the initial values. Others ignore it.

        Shapes:
            payload: in the table's own arithmetic a read-only view, which the next update
                changes: copy it before anything else happens.
            presence: empty if all tensors are present, and for all tables but AGGREGATE.

        Raises:
            InvalidKeys: the block is not here.
            InvalidTensor: the codec is wider than the table, or is for pushes alone.
            InvalidConfig: the sum of `clock` is not kept.
        """
        state = self._state(block)
        codec = NATIVE_CODEC[self.table.spec.dtype] if codec is None else codec
        self._check_codec(codec)
        if codec.is_for_pushes_alone:
            raise InvalidTensor(
                f"a pull cannot have codec {codec.value}; expected fp32, fp16, bf16 or int8"
            )
        if not self._arithmetic.is_aggregate:
            if codec is self._codec:
                return self._payloads[block], b""
            return encoded(state.values, state.length, codec, self._pool), b""
        return self._sums.read(state, block, codec, clock)

    @property
    def blocks(self) -> Collection[int]:
        return self._states.keys()

    def version(self, block: int) -> int:
        """Updates that have touched the block."""
        self._state(block)
        return self._versions[block]

    def _state(self, block: int) -> BlockState:
        state = self._states.get(block)
        if state is None:
            raise InvalidKeys(
                f"block {block} of table '{self._name}' is not in this range; "
                f"it holds {len(self._states)} of the table's {self.table.block_count} blocks"
            )
        return state

    def _check_codec(self, codec: Codec) -> None:
        if codec is Codec.FP64 and self._dtype is not torch.float64:
            raise InvalidTensor(
                f"codec fp64 with table '{self._name}' of {self.table.spec.dtype.value}; "
                "expected fp32, or a codec of fewer bits"
            )

    def _check_finite(self, part: Contribution) -> None:
        broken = contributions.first_non_finite(part)
        if broken is None:
            return
        contributions.release(part, self._pool)
        segment = self.table.segments(part.block)[broken]
        raise InvalidTensor(
            f"non-finite gradient in tensor '{self.table.spec.tensors[segment.tensor].name}' of "
            f"table '{self._name}' (block {part.block}); expected finite values"
        )

    def _check_parts(self, parts: Sequence[tuple[int, Contribution]]) -> None:
        for block, part in parts:
            self._state(block)
            if part.block != block:
                raise InvariantViolation("STO-1", f"block {part.block} given as block {block}")
