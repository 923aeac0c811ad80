"""Encodes what a worker pushes to one table.

    encode(block), ... -> sealed -> ended, with what servers did not take
                       -> dropped (the step is skipped, or an edit)

Rules:
    - A payload does not change before its step has ended: it may be sent again. Then its memory
      serves the next; in the warm-up of a SPARSE codec none is kept, since each step has its size.
    - Elements of absent tensors count as zero, and leave their residuals alone.
    - INT8 rounds at random, with draws that are a function of (rank, clock, block, element): a run
      can be repeated; so does a SPARSE codec that draws its places. INT8 feeds back what it rounds
      off, SIGN all but a sign, SPARSE and LOW_RANK what they leave out.
    - LOW_RANK goes on from the factors of the block's last push that counted. A block travels as
      INT8 that saves bytes so, and one that is not finite, for this once.
    - A block whose residual outgrows its gradients falls back to INT8, for good.
    - 16 bits keep eight or eleven bits of each element, small or large, and feed nothing back.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from struct import Struct
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.codecs import int8, low_rank, payloads, sign, sparse
from ps_core.codecs.choices import PushCodec
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.codecs.low_rank import BlockMatrix
from ps_core.errors import InvalidTensor
from ps_core.tables.elements import NATIVE_CODEC, Codec, unpack_presence
from ps_core.tables.table import Table
from ps_worker.compression.residual_guard import ResidualGuard, length_of
from ps_worker.compression.residuals import Residuals
from ps_worker.spec.values import BlockValues

BEYOND_HALF = "beyond what push_codec fp16 can hold (65504), unlike bf16 and int8"
"""Words for an element that FP16 makes infinite."""

_PLACE = Struct("<QQQ")


class CodedPayload(NamedTuple):
    """A block's elements, and the codec that they are in."""

    codec: Codec
    payload: Bytes


@dataclass(slots=True, eq=False)
class _Step:
    """A step's payloads until it has ended, those that were replaced included."""

    scale: float = 0.0
    clip_scale: float = 1.0
    taken: float = 1.0  # of the payloads, as far as the worker knows the setting
    newest: dict[int, CodedPayload] = field(default_factory=dict)
    presence: dict[int, bytes] = field(default_factory=dict)  # of the newest
    replaced: list[CodedPayload] = field(default_factory=list)
    final: set[int] = field(default_factory=set)  # applied on arrival


class StepEnd(NamedTuple):
    """The end of a sealed step.

    Attributes:
        takes_effect: False: it has failed, and no server applies more of it than came on arrival.
        discarded: its blocks in ranges that were updated without it.
        rejected: its blocks that were too stale.
        is_reduced: its update waits for the factor that clips it, so its clock is under BSP.
    """

    takes_effect: bool = True
    discarded: Collection[int] = ()
    rejected: Collection[int] = ()
    is_reduced: bool = False


_TAKEN = StepEnd()
"""All of it is applied."""


class PushEncoder:
    """Encodes one worker's pushes to one table. Not thread-safe.

    Args:
        push: its codec is another than the table's own.
        rank: the worker's; draws of different ranks differ.
        on_fall_back: is called when a block falls back to INT8, because its residual has outgrown
            its gradients, with the number of blocks that have.
        is_bsp: True for a clock under BSP, where servers clip a sum, and not a step.
        mean_of: the number of workers whose steps an update is the mean of; 0 if it is of no mean.
    """

    def __init__(
        self,
        table: Table,
        push: PushCodec,
        rank: int,
        on_fall_back: Callable[[int], None] = lambda _: None,
        is_bsp: Callable[[int], bool] = lambda _: True,
        mean_of: Callable[[], int] = lambda: 0,
    ) -> None:
        self._codec = push.codec
        self._push = push
        self._on_fall_back = on_fall_back
        self._is_bsp = is_bsp
        self._mean_of = mean_of
        is_low_rank = push.codec is Codec.LOW_RANK
        self._matrices = [
            block_matrix(table, block, push.matrix_rank) if is_low_rank else None
            for block in range(table.block_count)
        ]
        self._guard = ResidualGuard(table.block_count, push.residual_limit)
        self._table = table
        self._rank = rank
        self._native = NATIVE_CODEC[table.spec.dtype]
        start_counts = [m.rank * m.columns if m else 0 for m in self._matrices]
        self._residuals = None if push.codec.is_raw else Residuals(table, start_counts)
        self._steps: dict[int, _Step] = {}
        self._owed_of = 0  # `mean_of` of the newest step: others may have left since
        self._free: dict[int, list[Bytes]] = {}

    @property
    def may_refuse(self) -> bool:
        """True if there are finite elements that it cannot hold."""
        return self._codec is Codec.FP16 and not self._table.spec.allow_non_finite

    def encode(self, clock: int, pushed: BlockValues, *, is_final: bool = False) -> CodedPayload:
        """A block of the open step, encoded.

        Args:
            is_final: servers apply it on arrival.

        Shapes:
            pushed.payload: the block's elements, in the table's dtype.

        Raises:
            InvalidTensor: an element is beyond what FP16 can hold.
        """
        block, payload, presence = pushed
        step = self._steps.setdefault(clock, _Step())
        if block in step.newest:
            step.replaced.append(step.newest.pop(block))
        if is_final:
            step.final.add(block)
        length = self._table.block_length(block)
        if self._residuals is None:
            out = self._taken(self._codec.payload_bytes(length))
            self._narrow(block, payload, out)
            coded = step.newest[block] = CodedPayload(self._codec, out)
            return coded
        before, left = self._residuals.pair(block, is_final=is_final)
        gradient, there = self._elements(payload, length), before
        mask = self._absent(block, presence)
        if mask is not None:
            gradient, there = (np.where(mask, np.float32(0), each) for each in (gradient, before))
        coded = self._compressed(clock, block, gradient, there, left)
        step.newest[block], step.presence[block] = coded, presence
        if mask is not None:
            left[mask] = before[mask]
        return coded

    def _compressed(
        self, clock: int, block: int, gradient: Floats, before: Floats, left: Floats
    ) -> CodedPayload:
        """A gradient plus what earlier ones have left; what this one leaves is written."""
        guard = self._guard
        if not guard.is_dense(block):
            coded = self._compress(clock, block, gradient, before, left)
            if not guard.looks(clock, block, gradient, left):
                return coded
            self._on_fall_back(guard.dense_count)
        else:
            guard.looks(clock, block, gradient, left)
        with np.errstate(over="ignore", invalid="ignore"):
            whole = gradient + before
        key = self._key(clock, block)
        share = guard.longest_step(block) / max(length_of(whole), 1e-30)
        if 0 < share < 1:  # 0: an element is not finite, and the servers refuse it
            sent = whole * np.float32(share)
            coded = self._in_int8(sent, np.zeros_like(sent), left, key)
            left += whole - sent
            return coded
        return self._in_int8(gradient, before, left, key)

    def _free_up(self, out: Bytes) -> None:
        self._free.setdefault(out.nbytes, []).append(out)

    def _taken(self, byte_count: int) -> Bytes:
        free = self._free.get(byte_count)
        return free.pop() if free else np.empty(byte_count, np.uint8)

    def keep_only(self, clock: int, blocks: Collection[int]) -> None:
        """All other blocks of the open step are withdrawn."""
        self._withdraw(self._steps.setdefault(clock, _Step()), blocks)
        if self._residuals is not None:
            self._residuals.keep_only(blocks)

    def sealed(
        self, clock: int, scale: float, *, takes_part: bool, clip_scale: float | None = None
    ) -> None:
        """The open step is sealed, with this contribution scale, and a factor that clips it."""
        step = self._steps.setdefault(clock, _Step())
        step.scale = scale
        if clip_scale is not None:
            step.clip_scale = clip_scale
            step.taken = 1.0 if self._is_bsp(clock) else clip_scale
        if not takes_part:
            self._withdraw(step, ())
        if self._residuals is not None:
            self._owed_of = self._mean_of() if takes_part else self._owed_of
            self._residuals.seal(clock, scale, takes_part=takes_part, taken=step.taken)

    @staticmethod
    def _withdraw(step: _Step, but: Collection[int]) -> None:
        kept = {*but, *step.final}
        step.replaced += [step.newest.pop(block) for block in [*step.newest] if block not in kept]

    def ended(self, clock: int, end: StepEnd = _TAKEN) -> None:
        """Every entry of a sealed step has ended."""
        step = self._steps.pop(clock, None)
        if step is None:
            return
        if self._residuals is not None:
            for block in step.newest:
                self._learn(self._residuals, clock, block, step, end)
            self._residuals.ended(clock)
        for codec, payload in (*step.newest.values(), *step.replaced):
            if codec is not Codec.SPARSE or clock > self._push.warm_up_count:
                self._free_up(payload)

    def _learn(
        self, residuals: Residuals, clock: int, block: int, step: _Step, end: StepEnd
    ) -> None:
        """Take note of what came of a block."""
        is_final = block in step.final
        if block in end.rejected or not (end.takes_effect or self._came_on_arrival(step, block)):
            residuals.revise(clock, block, 0.0)
            return
        if step.clip_scale != 1.0 and not is_final:
            is_bsp = end.is_reduced or bool(end.discarded) or self._is_bsp(clock)
            taken = 1.0 if is_bsp else step.clip_scale
            if taken != step.taken:  # the setting was not the one that the seal was sent with
                residuals.revise(clock, block, taken / step.taken)
        if block in end.discarded:
            residuals.give_back(block, self._decoded(step, block), step.scale)

    def _came_on_arrival(self, step: _Step, block: int) -> bool:
        """True for a block that servers applied before its step failed; they refuse a NaN."""
        if block not in step.final:
            return False
        if self._table.spec.allow_non_finite:
            return True
        return bool(np.isfinite(self._decoded(step, block)).all())

    def _decoded(self, step: _Step, block: int) -> Floats:
        """A block, as servers have it."""
        codec, payload = step.newest[block]
        elements = np.empty(self._table.block_length(block), np.float32)
        decode_into(payload.data, codec, elements.view(np.uint8), Codec.FP32)
        mask = self._absent(block, step.presence[block])
        if mask is not None:
            elements[mask] = 0  # the servers have ignored them
        return elements

    def left_of(self, block: int) -> Floats:
        """The residual of a block, as it counts; a view."""
        assert self._residuals is not None  # noqa: S101 - `has_residuals`
        return self._residuals.of(block)

    # --- in checkpoints

    @property
    def has_residuals(self) -> bool:
        """True if there is a state to save."""
        return self._residuals is not None

    def state_dict(self) -> dict[str, Any]:
        """The residuals and starts, between two steps, and what the guard has seen."""
        if self._residuals is None:
            return {}
        flat = self._residuals.flat().data.cast("B")
        residuals = _casts().elements(flat, Codec.FP32)
        guard = _casts().elements(self._guard.state().data.cast("B"), Codec.FP64)
        found = {"residuals": residuals, "scale": self._residuals.unit, "guard": guard}
        found["mean_of"] = self._owed_of
        starts = self._residuals.flat_starts()
        if starts.size:
            found["starts"] = _casts().elements(starts.data.cast("B"), Codec.FP32)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved residuals; InvalidCheckpoint if they are of another table."""
        if self._residuals is not None and state:
            starts = state["starts"].numpy() if "starts" in state else None
            self._residuals.load(self._owed(state), float(state["scale"]), starts)
            if "guard" in state:
                self._guard.load(state["guard"].numpy())

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Add what another worker saved, which does not come back; its starts and what its guard
        has seen are left.
        """
        if self._residuals is not None and state:
            self._residuals.add(self._owed(state), float(state["scale"]))

    def _owed(self, state: Mapping[str, Any]) -> Floats:
        """Saved residuals. What was a part of the mean of so many workers is the same amount of the
        mean of those that there are now.
        """
        saved: Floats = state["residuals"].numpy()
        before, now = int(state.get("mean_of", 0)), self._mean_of()
        self._owed_of = self._owed_of or now
        return saved if before == now or not (before and now) else saved * np.float32(now / before)

    # --- elements

    def _elements(self, payload: memoryview, length: int) -> Floats:
        """A gradient as float32: a view, or a copy."""
        if self._native is Codec.FP32:
            return np.frombuffer(payload, np.float32, length)
        found = np.empty(length, np.float32)
        _casts().convert(payload, self._native, found.data.cast("B"), Codec.FP32)
        return found

    def _compress(
        self, clock: int, block: int, gradient: Floats, before: Floats, left: Floats
    ) -> CodedPayload:
        """As `_compressed`, of a block that has not fallen back."""
        key = self._key(clock, block)
        if self._codec is Codec.LOW_RANK:
            coded = self._in_factors(block, gradient, before, left, key)
            return coded or self._in_int8(gradient, before, left, key)
        if self._codec is Codec.INT8:
            return self._in_int8(gradient, before, left, key)
        out = self._taken(self._push.payload_bytes(len(gradient), clock))
        if self._codec is Codec.SIGN:
            sign.encode_gradient(gradient, before, left, out)
        elif self._push.is_random:
            sparse.encode_random(gradient, before, left, out, key)
        else:
            sparse.encode_largest(gradient, before, left, out)
        return CodedPayload(self._codec, out)

    def _in_int8(self, gradient: Floats, before: Floats, left: Floats, key: int) -> CodedPayload:
        out = self._taken(Codec.INT8.payload_bytes(len(gradient)))
        int8.encode_gradient(gradient, before, left, out, key)
        return CodedPayload(Codec.INT8, out)

    def _in_factors(
        self, block: int, gradient: Floats, before: Floats, left: Floats, key: int
    ) -> CodedPayload | None:
        """None: the block has no matrix, or its factors are not finite."""
        matrix = self._matrices[block]
        if matrix is None or self._residuals is None:
            return None
        start, following = (each.reshape(matrix.rank, -1) for each in self._residuals.starts(block))
        out = self._taken(matrix.payload_bytes)
        drawn = low_rank.started(start, key)
        following[:] = low_rank.encode_gradient(gradient, before, left, out, matrix, drawn)
        if low_rank.is_finite(out, len(gradient)):
            return CodedPayload(Codec.LOW_RANK, out)
        following[:] = start
        self._free_up(out)
        return None

    def _key(self, clock: int, block: int) -> int:
        """The key of a block's draws."""
        return zlib.crc32(_PLACE.pack(self._rank, clock, block))

    def _narrow(self, block: int, payload: memoryview, out: Bytes) -> None:
        casts = _casts()
        casts.convert(payload, self._native, out, self._codec)
        if self.may_refuse:
            at = casts.first_overflow(payload, self._native, out)
            if at is not None:
                raise InvalidTensor(
                    f"element {at} in block {block} of table '{self._table.spec.name}' is "
                    f"{BEYOND_HALF}"
                )

    def _absent(self, block: int, presence: bytes) -> npt.NDArray[np.bool_] | None:
        """A mask of the elements of absent tensors; None: there are none."""
        if not presence:
            return None
        segments = self._table.segments(block)
        mask = np.zeros(self._table.block_length(block), np.bool_)
        present = unpack_presence(presence, len(segments))
        for segment, is_here in zip(segments, present, strict=True):
            if not is_here:
                mask[segment.begin : segment.end] = True
        return mask


def block_matrix(table: Table, block: int, rank: int) -> BlockMatrix | None:
    """The matrix of a block: as wide as the rows of the tensor that has most of it, or else square.
    None: INT8 takes no more bytes.
    """
    length = table.block_length(block)
    most = max(table.segments(block), key=lambda segment: segment.end - segment.begin)
    tensor = table.spec.tensors[most.tensor]
    columns = math.prod(tensor.shape[1:])
    first = (block * table.spec.block_elements - tensor.offset) % columns
    for matrix in (
        BlockMatrix(length, columns, rank, first),
        BlockMatrix.square(length, rank),
    ):
        if matrix.payload_bytes < Codec.INT8.payload_bytes(length):
            return matrix
    return None


def decode_into(payload: memoryview, codec: Codec, out: Bytes, native: Codec) -> None:
    """Write a payload's elements as those of a table. Shapes: `out` has them in codec `native`."""
    if codec.is_raw:
        _casts().convert(payload, codec, out, native)
        return
    raw = np.frombuffer(payload, np.uint8)
    raw = raw if raw.ctypes.data % 4 == 0 else raw.copy()
    if native is Codec.FP32:
        payloads.decode(codec, raw, out.view(np.float32))
        return
    found = np.empty(out.nbytes // native.element_bytes, np.float32)
    payloads.decode(codec, raw, found)
    _casts().convert(found.data.cast("B"), Codec.FP32, out, native)


def load_kernels(codec: Codec, native: Codec = Codec.FP32) -> None:
    """Load the compiled loops, if there are any, of a codec and for a table's own; blocks for a
    second, or for some where they must be compiled.
    """
    if Codec.BF16 in (codec, native):
        _casts().bf16_loops()
    payloads.load_kernels(codec)


def _casts() -> ModuleType:
    from ps_worker.compression import torch_casts

    return torch_casts
