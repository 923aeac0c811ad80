"""Encodes what a worker pushes to one table.

    encode(block), ... -> sealed -> ended, with what was discarded
                       -> dropped (the step is skipped, or an edit)

Rules:
    - A payload does not change before its step has ended: it may be sent again. Then its memory
      serves the next.
    - Elements of absent tensors count as zero, and leave their residuals alone.
    - INT8 rounds at random, with draws that are a function of (rank, clock, block, element): a run
      can be repeated; so does a SPARSE codec that draws its places. INT8 feeds back what it rounds
      off, SIGN all but a sign, SPARSE what it leaves out.
    - A block whose residual outgrows its gradients falls back to INT8, for good.
    - 16 bits keep eight or eleven bits of each element, small or large, and feed nothing back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from struct import Struct
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.codecs import int8, payloads, sign, sparse
from ps_core.codecs.choices import PushCodec
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.errors import InvalidTensor
from ps_core.tables.elements import NATIVE_CODEC, Codec, unpack_presence
from ps_core.tables.table import Table
from ps_worker.compression.residual_guard import ResidualGuard, length_of
from ps_worker.compression.residuals import Residuals
from ps_worker.spec.values import BlockValues

_PLACE = Struct("<QQQ")


class CodedPayload(NamedTuple):
    """A block's elements, and the codec that they are in."""

    codec: Codec
    payload: Bytes


@dataclass(slots=True, eq=False)
class _Step:
    """A step's payloads until it has ended, those that were replaced included."""

    scale: float = 0.0
    newest: dict[int, CodedPayload] = field(default_factory=dict)
    replaced: list[CodedPayload] = field(default_factory=list)


class PushEncoder:
    """Encodes one worker's pushes to one table. Not thread-safe.

    Args:
        push: its codec is another than the table's own.
        rank: the worker's; draws of different ranks differ.
        on_fall_back: is called when a block falls back to INT8, because its residual has outgrown
            its gradients, with the number of blocks that have.
    """

    def __init__(
        self,
        table: Table,
        push: PushCodec,
        rank: int,
        on_fall_back: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._codec = push.codec
        self._push = push
        self._on_fall_back = on_fall_back
        self._guard = ResidualGuard(table.block_count, push.residual_limit)
        self._table = table
        self._rank = rank
        self._native = NATIVE_CODEC[table.spec.dtype]
        self._residuals = None if push.codec.is_raw else Residuals(table)
        self._steps: dict[int, _Step] = {}
        self._free: dict[int, list[Bytes]] = {}

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
        step.newest[block] = coded
        if mask is not None:
            left[mask] = before[mask]
        return coded

    def _compressed(
        self, clock: int, block: int, gradient: Floats, before: Floats, left: Floats
    ) -> CodedPayload:
        """A gradient plus what earlier ones have left; what this one leaves is written."""
        key = zlib.crc32(_PLACE.pack(self._rank, clock, block))
        guard, length = self._guard, len(gradient)
        if not guard.is_dense(block):
            out = self._taken(self._push.payload_bytes(length, clock))
            self._compress(gradient, before, left, out, key)
            if not guard.looks(clock, block, gradient, left):
                return CodedPayload(self._codec, out)
            self._free_up(out)
            self._on_fall_back(guard.dense_count)
        else:
            guard.looks(clock, block, gradient, left)
        out = self._taken(Codec.INT8.payload_bytes(length))
        with np.errstate(over="ignore", invalid="ignore"):
            whole = gradient + before
        share = guard.longest_step(block) / max(length_of(whole), 1e-30)
        if 0 < share < 1:  # 0: an element is not finite, and the servers refuse it
            sent = whole * np.float32(share)
            int8.encode_gradient(sent, np.zeros_like(sent), left, out, key)
            left += whole - sent
        else:
            int8.encode_gradient(gradient, before, left, out, key)
        return CodedPayload(Codec.INT8, out)

    def _free_up(self, out: Bytes) -> None:
        self._free.setdefault(out.nbytes, []).append(out)

    def _taken(self, byte_count: int) -> Bytes:
        free = self._free.get(byte_count)
        return free.pop() if free else np.empty(byte_count, np.uint8)

    def keep_only(self, clock: int, blocks: Collection[int]) -> None:
        """All other blocks of the open step are withdrawn."""
        step = self._steps.setdefault(clock, _Step())
        step.replaced += [step.newest.pop(block) for block in [*step.newest] if block not in blocks]
        if self._residuals is not None:
            self._residuals.keep_only(blocks)

    def sealed(self, clock: int, scale: float, *, takes_part: bool) -> None:
        """The open step is sealed, with this contribution scale."""
        step = self._steps.setdefault(clock, _Step())
        step.scale = scale
        if not takes_part:
            step.replaced += step.newest.values()
            step.newest.clear()
        if self._residuals is not None:
            self._residuals.seal(scale, takes_part=takes_part)

    def ended(self, clock: int, discarded: Collection[int]) -> None:
        """Every entry of a sealed step has ended; the servers discarded some of its blocks."""
        step = self._steps.pop(clock, None)
        if step is None:
            return
        for block in discarded:
            coded = step.newest.get(block)
            if coded is not None and self._residuals is not None:
                elements = np.empty(self._table.block_length(block), np.float32)
                decode_into(coded.payload.data, coded.codec, elements.view(np.uint8), Codec.FP32)
                self._residuals.give_back(block, elements, step.scale)
        for _, payload in (*step.newest.values(), *step.replaced):
            self._free_up(payload)

    # --- in checkpoints

    @property
    def has_residuals(self) -> bool:
        """True if there is a state to save."""
        return self._residuals is not None

    def state_dict(self) -> dict[str, Any]:
        """The residuals, between two steps, and what their guard has seen."""
        if self._residuals is None:
            return {}
        flat = self._residuals.flat().data.cast("B")
        residuals = _casts().elements(flat, Codec.FP32)
        guard = _casts().elements(self._guard.state().data.cast("B"), Codec.FP64)
        return {"residuals": residuals, "scale": self._residuals.unit, "guard": guard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved residuals; InvalidCheckpoint if they are of another table."""
        if self._residuals is not None and state:
            self._residuals.load(state["residuals"].numpy(), float(state["scale"]))
            if "guard" in state:
                self._guard.load(state["guard"].numpy())

    # --- elements

    def _elements(self, payload: memoryview, length: int) -> Floats:
        """A gradient as float32: a view, or a copy."""
        if self._native is Codec.FP32:
            return np.frombuffer(payload, np.float32, length)
        found = np.empty(length, np.float32)
        _casts().convert(payload, self._native, found.data.cast("B"), Codec.FP32)
        return found

    def _compress(
        self, gradient: Floats, before: Floats, left: Floats, out: Bytes, key: int
    ) -> None:
        """Encode a gradient plus what earlier ones have left, and write what this one leaves."""
        if self._codec is Codec.INT8:
            int8.encode_gradient(gradient, before, left, out, key)
        elif self._codec is Codec.SIGN:
            sign.encode_gradient(gradient, before, left, out)
        elif self._push.is_random:
            sparse.encode_random(gradient, before, left, out, key)
        else:
            sparse.encode_largest(gradient, before, left, out)

    def _narrow(self, block: int, payload: memoryview, out: Bytes) -> None:
        casts = _casts()
        casts.convert(payload, self._native, out, self._codec)
        if self._codec is Codec.FP16 and not self._table.spec.allow_non_finite:
            at = casts.first_overflow(payload, self._native, out)
            if at is not None:
                raise InvalidTensor(
                    f"element {at} in block {block} of table '{self._table.spec.name}' is beyond "
                    "what push_codec fp16 can hold (65504); expected bf16 or int8"
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


def _casts() -> ModuleType:
    from ps_worker.compression import torch_casts

    return torch_casts
