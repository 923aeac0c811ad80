"""A pull's share in one range: what it asks of the gate, and its answer, piece by piece.

Rules:
    - An answer has all of its blocks as of its decision. It is made piece by piece, since a range
      may have thousands; a block about to change before its turn is copied first (`HeldAnswers`).

Invariants:
    RA-1  A piece is made of the range as of the decision to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import NamedTuple
from weakref import ref

import numpy as np

from ps_core import limits, sequence_locks
from ps_core.cluster_view import Role, Session
from ps_core.envelope import ALIGNMENT_BYTES
from ps_core.errors import InvalidKeys, InvalidTensor, InvariantViolation, PushpullError
from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import Waiting, Work, at_once
from ps_core.tables.elements import NATIVE_CODEC, Codec
from ps_runtime.cluster import wire
from ps_server.lane.answer_ring import AnswerRing
from ps_server.lane.value_segments import SharedValues
from ps_server.ranges.events import AnswerPull, Place, PullEvent
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.read_gate import WaitCause
from ps_server.stores import Shards
from ps_server.values.row_store import RowStore, Store
from ps_server.wire.parameter_wire import (
    block_answer,
    block_answer_head,
    range_error,
    unchanged_answer,
)
from pushpull.v1 import parameters_pb2

_HELD_ANSWER_COUNT = 32
"""Held answers of a shard beyond which those that have been made are looked for."""

_Key = tuple[TableId, RangeId]

Serialized = bytes | memoryview
"""A serialized PullResponse."""

AnswerPart = Serialized | parameters_pb2.SharedValue
"""A part of an answer, or a value that the reader takes from shared memory."""

_Copy = tuple[int, bytes | memoryview, bytes]
"""A block, its payload, and its presence bits."""


class PullTerms(NamedTuple):
    """The terms of a pull, the same for each of its ranges.

    Attributes:
        deadline_s: by the server's clock.
        codec: None: the table's own.
        shared: the reader takes what is shared to it.
        cut: the session's number of the cut that it ends, or 0.
        array: of optimizer state; empty for the values.
    """

    session: Session
    clock: int
    deadline_s: float
    consistent: bool = False
    codec: Codec | None = None
    shared: bool = False
    cut: int = 0
    array: str = ""


class RangeRead:
    """A pull's share in one range. `ParameterNode.begin_read` begins it.

    Args:
        part: what is asked for, checked; None: all of the range.

    Attributes:
        number: the node's for it, once it has begun.
        parked_s: since when it waits.
        cause: what it waited for then; None: it did not.
    """

    def __init__(
        self,
        terms: PullTerms,
        place: Place,
        part: parameters_pb2.RangePull | None = None,
    ) -> None:
        part = part or parameters_pb2.RangePull()
        blocks: Sequence[int] = part.blocks
        ids, skips, held_versions = part.ids, part.skipped_row_counts, part.held_versions
        self.terms = terms
        self.place = place
        self.number = 0
        self.parked_s = 0.0
        self.cause: WaitCause | None = None
        self.is_answered = False
        self._blocks = blocks
        self._ids = dict(zip(blocks, ids, strict=False)) if ids else {}
        self._skips = dict(zip(blocks, skips, strict=False)) if skips else {}
        self._held_versions: Sequence[int] = held_versions or ()  # plus one; 0: none
        self._held_edit_count = part.held_edit_count
        self._held: dict[int, int] = {}  # by block, once `answer` knows which there are
        self._arrival: asyncio.Future[None] | None = None
        self._refusal: bytes | None = None
        self._at = 0  # index of the next block
        self._left: set[int] | None = None  # later blocks not yet copied, once one was
        self._kept: dict[int, AnswerPart | _Copy | int] = {}

    @property
    def event(self) -> PullEvent:
        session, cut = self.terms.session, self.terms.cut
        return PullEvent(
            self.place,
            self.number,
            session.incarnation if session.role is Role.WORKER else None,
            self.terms.clock,
            self.terms.consistent,
            self.terms.deadline_s,
            (session.incarnation, cut) if cut else None,
            session.rank,
            session.run,
        )

    # --- the gate's decision

    def refuse(self, error: PushpullError) -> None:
        self._refusal = range_error(self.place.range_id, error)
        self._blocks = ()
        self._arrived()

    def answer(self, effect: AnswerPull, state: RangeState, shards: Shards) -> None:
        """Answer from now on."""
        key = effect.table_id, effect.range_id
        terms = self.terms
        self._effect = effect
        self._name = state.name
        self._shards = shards
        self._store = shards.stores[key]
        spec = state.table.spec
        own_codec = spec.arithmetic_codec
        self._codec = own_codec if terms.array else terms.codec or NATIVE_CODEC[spec.dtype]
        self._shared: SharedValues | None = None
        self._ring: AnswerRing | None = None
        if isinstance(self._store, RowStore) and self._codec is not own_codec:
            what = f"a pull of rows of table '{self._name}' in codec {self._codec.value}"
            self.refuse(InvalidTensor(f"{what}; expected {own_codec.value}"))
            return
        if terms.shared and self._ids:
            if self._codec is own_codec:
                self._ring = shards.lanes.answers(terms.session.incarnation)
        elif terms.shared and not terms.array and not self._skips:
            self._shared = shards.segments.shared_with(terms.session, key, self._codec)
        self._blocks = self._blocks or state.blocks
        if self._held_versions:
            self._held = dict(zip(self._blocks, self._held_versions, strict=False))
        self._row_elements = spec.element_count
        self._block_bytes = self._codec.payload_bytes(spec.block_elements)
        if self._ids:
            count = max(map(len, self._ids.values())) // limits.ROW_ID_BYTES
            self._block_bytes = self._codec.payload_bytes(count * spec.element_count)
        elif self._skips:
            row_bytes = spec.element_count * spec.accumulator_element_bytes
            most = limits.most_pulled_rows(row_bytes)
            self._block_bytes = most * (limits.ROW_ID_BYTES + row_bytes)
        self._arrived()

    def _arrived(self) -> None:
        self.is_answered = True
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def arrival(self) -> None:
        if not self.is_answered:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    # --- the answer, piece by piece

    @property
    def is_refused(self) -> bool:
        """True if the next piece is an error."""
        return self._refusal is not None

    @property
    def is_done(self) -> bool:
        return self._refusal is None and self._at >= len(self._blocks)

    def wanted(self, store: Store | None) -> list[Waiting]:
        """Have rows that are on disk fetched; returns what to wait for."""
        return store.want_all(self._ids) if isinstance(store, RowStore) else []

    def coming(self) -> list[Waiting]:
        """As `wanted`; once all have come, `next` does not wait for the disk."""
        return [] if self._refusal is not None else self.wanted(self._store)

    def listing(self) -> Work[None]:
        """Have the next block of a listing ready, for which the disk may be waited for."""
        block = None if self.is_done or self._refusal is not None else self._blocks[self._at]
        if block in self._skips and block not in self._kept and isinstance(self._store, RowStore):
            with contextlib.suppress(PushpullError):  # `next` says what is wrong
                payload = yield from self._store.listing(block, self._skips[block])
                self._kept[block] = block, payload, b""

    @property
    def next_bytes(self) -> int:
        """Payload bytes of the next piece, or a few more; those in shared memory do not count."""
        if self._refusal is not None or self._shared is not None or self._ring is not None:
            return 0
        count = min(len(self._blocks) - self._at, limits.SLICE_BLOCK_COUNT)
        return min(count * self._block_bytes, limits.SLICE_BYTES + self._block_bytes)

    def next(self) -> list[AnswerPart]:
        """The next blocks (RA-1); the error of one that cannot be read covers all later ones."""
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            return [refusal]
        piece: list[AnswerPart] = []
        unchanged: list[int] = []
        byte_count = 0
        try:
            for block in self._blocks[self._at : self._at + limits.SLICE_BLOCK_COUNT]:
                found = self._kept.pop(block, None)
                if found is None:
                    found = self._take(block)
                self._at += 1
                if self._left is not None:
                    self._left.discard(block)
                if isinstance(found, int):
                    unchanged.append(found)
                    continue
                if isinstance(found, tuple):
                    byte_count += len(found[1])
                    found = self._part(*found)
                elif isinstance(found, memoryview):
                    count = len(self._ids[block]) // limits.ROW_ID_BYTES
                    byte_count += self._codec.payload_bytes(count * self._row_elements)
                elif not isinstance(found, bytes):
                    byte_count += found.byte_count
                piece.append(found)
                if byte_count >= limits.SLICE_BYTES:
                    break
        except InvariantViolation:
            raise
        except PushpullError as error:
            self._at = len(self._blocks)
            piece = [range_error(self.place.range_id, error)]
            unchanged = []
        if unchanged:
            piece.append(unchanged_answer(self._effect.range_clock, unchanged))
            lengths = map(self._store.table.block_length, unchanged)
            self._shards.unchanged_bytes += sum(map(self._codec.payload_bytes, lengths))
        self._shards.sent_bytes += byte_count
        return piece

    def keep(self, blocks: Collection[int]) -> bool:
        """Copy the missing ones of these blocks, which are about to change; True if others stay."""
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
                found = range_error(self.place.range_id, error)
            if isinstance(found, tuple):
                found = (block, bytes(found[1]), found[2])
            self._kept[block] = found
        return bool(self._left)

    def _take(self, block: int) -> AnswerPart | _Copy | int:
        """A block as it is, its payload valid until anything happens; its number alone if the
        caller has its values.
        """
        effect = self._effect
        if block not in effect.versions:
            raise InvalidKeys(
                f"block {block} of table '{self._name}' is not in range {effect.range_id}"
            )
        if self.terms.array:
            return (block, self._store.read_array(block, self.terms.array), b"")
        if self._ids or self._skips:
            if not isinstance(self._store, RowStore):
                raise InvalidKeys(f"a pull of table '{self._name}' names ids; it is not of rows")
            if self._skips:
                return (block, at_once(self._store.listing(block, self._skips[block])), b"")
            if self._ring is not None:
                return self._ring_value(self._ring, self._store, block)
            return self._rows(self._store, block)
        if effect.keeps_for is not None:
            self._store.keep(effect.keeps_for, block)
        held = self._held.get(block, 0)
        if held and effect.is_unchanged(block, held - 1, self._held_edit_count):
            return block
        if self._shared is not None:
            return self._shared.shared_value(effect, block)
        return (block, *self._store.read(block, self._codec, effect.clock))

    def _ring_value(
        self, ring: AnswerRing, store: RowStore, block: int
    ) -> parameters_pb2.SharedValue:
        """The rows of a partition, in the session's ring."""
        ids = self._ids[block]
        with ring.piece(store.rows_byte_count(block, ids)) as (piece, memory):
            store.read_rows_into(memory, block, ids)
        version, peer_version = self._versions(block)
        return parameters_pb2.SharedValue(
            block=block,
            version=version,
            peer_version=peer_version,
            clock=self._effect.range_clock,
            codec=wire.codec_to_proto(self._codec),
            segment_id=ring.segment_id,
            offset_bytes=piece.offset_bytes,
            byte_count=piece.byte_count,
            stamp_offset_bytes=sequence_locks.offset_bytes(piece.lock_number),
            stamp=ring.lock(piece),
        )

    def _rows(self, store: RowStore, block: int) -> memoryview:
        """The rows of a partition in a serialized PullResponse, which are copied once."""
        ids = self._ids[block]
        byte_count = store.rows_byte_count(block, ids)
        head = block_answer_head(self._value(block, b""), byte_count)
        begin = -len(head) % ALIGNMENT_BYTES  # so that the rows are aligned
        memory = np.empty(begin + len(head) + byte_count, np.uint8)
        message = memory[begin:]
        message[: len(head)] = np.frombuffer(head, np.uint8)
        store.read_rows_into(message[len(head) :], block, ids)
        return message.data

    def _versions(self, block: int) -> tuple[int, int]:
        """A block's updates, and those of them that are not the puller's own."""
        effect = self._effect
        version = effect.versions[block]
        return version, version - effect.own_updates.get(block, 0)

    def _part(self, block: int, payload: bytes | memoryview, presence: bytes) -> bytes:
        return block_answer(self._value(block, presence), payload)

    def _value(self, block: int, presence: bytes) -> parameters_pb2.BlockValue:
        version, peer_version = self._versions(block)
        return parameters_pb2.BlockValue(
            block=block,
            version=version,
            peer_version=peer_version,
            clock=self._effect.range_clock,
            codec=wire.codec_to_proto(self._codec),
            presence=presence,
            edit_count=self._effect.edit_count,
        )


class HeldAnswers:
    """Answers that are not made yet: each copies a block before it changes (RA-1).

    Attributes:
        reads: by shard.
    """

    def __init__(self) -> None:
        self.reads: dict[_Key, list[ref[RangeRead]]] = {}

    def hold(self, key: _Key, read: RangeRead) -> None:
        held = self.reads.setdefault(key, [])
        if len(held) >= _HELD_ANSWER_COUNT:
            held[:] = [each for each in held if each() is not None]
        held.append(ref(read))

    def keep(self, key: _Key, blocks: Collection[int]) -> None:
        """Have these blocks copied, which are about to change, or to go."""
        held = self.reads.pop(key)
        left = [each for each in held if (read := each()) is not None and read.keep(blocks)]
        if left:
            self.reads[key] = left
