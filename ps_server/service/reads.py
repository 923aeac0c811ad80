"""Reads of one range on their way, and how they are answered: with bytes, or with places in memory
that is lent.

Rules:
    - An answer says how all of its blocks were at the moment of its decision. It is made piece by
      piece, since a range may have thousands; what is about to change before its turn has come is
      copied first (`Shards`).

Invariants:
    RA-1  A piece is made of what the range was when the read was decided on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import InvalidKeys, InvariantViolation, PushpullError
from ps_core.tables import NATIVE_CODEC, Codec
from ps_runtime.cluster import wire
from ps_server.lane.shards import Shards
from ps_server.ranges.events import AnswerPull, Place
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.read_gate import WaitCause
from ps_server.values.block_values import arithmetic_codec
from ps_server.wire.frames import block_answer, range_error
from pushpull.v1 import parameters_pb2

AnswerPart = bytes | parameters_pb2.SharedValue
"""A serialized PullResponse, or a value that the reader takes from where it lies."""


@dataclass(slots=True, eq=False)
class Read:
    """A read of one range on its way; `on_answer` gets its answer, once.

    `codec` is None for the table's own; `shared`: the reader takes what is lent to it; `cut` is the
    session's number of the cut that it ends, or 0; `array` is of optimizer state, empty for the
    values.
    """

    place: Place
    blocks: Sequence[int]
    codec: Codec | None
    session: Session
    shared: bool
    on_answer: Callable[[RangeAnswer], None]
    cut: int = 0
    array: str = ""
    parked_s: float = 0.0
    cause: WaitCause | None = None
    """What it waits for, since `parked_s`, if it does."""


_Copy = tuple[int, bytes | memoryview, bytes]
"""A block, its payload, and its presence bits."""


class RangeAnswer(Protocol):
    """What a read of one range is answered with, made piece by piece. `answered` and `refused` make
    one.
    """

    @property
    def is_done(self) -> bool:
        """Whether `next` has nothing more."""

    @property
    def next_bytes(self) -> int:
        """The payload bytes of the next piece, or a few more; what is lent has none."""

    def next(self) -> list[AnswerPart]:
        """The next piece; made of what the range was when the read was decided on (RA-1)."""


def refused(range_id: int, error: PushpullError) -> RangeAnswer:
    """The answer of a range that cannot be read."""
    return _Refusal(range_id, error)


def answered(effect: AnswerPull, read: Read, state: RangeState, shards: Shards) -> RangeAnswer:
    """What a read is answered with."""
    answer = _Values(effect, read, state, shards)
    shards.hold((effect.table_id, effect.range_id), answer)
    return answer


class _Refusal:
    """See `RangeAnswer`."""

    def __init__(self, range_id: int, error: PushpullError) -> None:
        self._left: list[AnswerPart] = [range_error(range_id, error)]
        self.next_bytes = 0

    @property
    def is_done(self) -> bool:
        return not self._left

    def next(self) -> list[AnswerPart]:
        left, self._left = self._left, []
        return left


class _Values:
    """See `RangeAnswer`. The blocks come from the store, until it changes."""

    def __init__(self, effect: AnswerPull, read: Read, state: RangeState, shards: Shards) -> None:
        place = effect.table_id, effect.range_id
        self._effect = effect
        self._name = state.name
        self._shards = shards
        self._store = shards.stores[place]
        self._array = read.array
        self._codec = read.codec or NATIVE_CODEC[state.table.spec.dtype]
        if read.array:
            self._codec = arithmetic_codec(state.table)
        is_lent = read.shared and not read.array
        self._lent = shards.homes.lent_to(read.session, place, self._codec) if is_lent else None
        self._blocks = read.blocks or state.blocks
        self._at = 0  # the next that is to be taken
        self._left: set[int] | None = None  # those behind that have not been copied, once any was
        self._kept: dict[int, AnswerPart | _Copy] = {}
        self._block_bytes = state.table.spec.block_elements * self._codec.element_bytes

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._blocks)

    @property
    def next_bytes(self) -> int:
        if self._lent is not None:
            return 0
        count = min(len(self._blocks) - self._at, limits.SLICE_BLOCK_COUNT)
        return min(count * self._block_bytes, limits.SLICE_BYTES + self._block_bytes)

    def next(self) -> list[AnswerPart]:
        """The next blocks; the error of one that cannot be read stands for all behind it."""
        piece: list[AnswerPart] = []
        byte_count = 0
        most = min(limits.SLICE_BLOCK_COUNT, len(self._blocks) - self._at)
        try:
            while len(piece) < most:
                found = self._next()
                if isinstance(found, tuple):
                    byte_count += len(found[1])
                    found = self._part(*found)
                elif not isinstance(found, bytes):
                    byte_count += found.byte_count
                piece.append(found)
                if byte_count >= limits.SLICE_BYTES:
                    break
        except InvariantViolation:
            raise
        except PushpullError as error:
            self._at = len(self._blocks)
            piece = [range_error(self._effect.range_id, error)]
        self._shards.sent_bytes += byte_count
        return piece

    def keep(self, blocks: Collection[int]) -> None:
        """These blocks are about to change: what is missing of them is copied now."""
        if self._left is None:
            self._left = set(self._blocks[self._at :])
        for block in blocks:
            if block not in self._left:
                continue
            self._left.discard(block)
            try:
                found = self._take(block)
            except InvariantViolation:
                raise
            except PushpullError as error:
                found = range_error(self._effect.range_id, error)
            if isinstance(found, tuple):
                found = (found[0], bytes(found[1]), found[2])
            self._kept[block] = found

    def _next(self) -> AnswerPart | _Copy:
        """The next block as it was."""
        block = self._blocks[self._at]
        found = self._kept.pop(block, None) or self._take(block)
        self._at += 1
        if self._left is not None:
            self._left.discard(block)
        return found

    def _take(self, block: int) -> AnswerPart | _Copy:
        """A block as it is; its payload is good until anything happens."""
        effect = self._effect
        if block not in effect.versions:
            raise InvalidKeys(
                f"block {block} of table '{self._name}' is not in range {effect.range_id}"
            )
        if self._array:
            return (block, self._store.read_array(block, self._array), b"")
        if effect.keeps_for is not None:
            self._store.keep(effect.keeps_for, block)
        if self._lent is not None:
            return self._lent.shared_value(effect, block)
        return (block, *self._store.read(block, self._codec, effect.clock))

    def _part(self, block: int, payload: bytes | memoryview, presence: bytes) -> bytes:
        effect = self._effect
        version = effect.versions[block]
        value = parameters_pb2.BlockValue(
            block=block,
            version=version,
            peer_version=version - effect.own_updates.get(block, 0),
            clock=effect.range_clock,
            codec=wire.codec_to_proto(self._codec),
            presence=presence,
        )
        return block_answer(value, payload)
