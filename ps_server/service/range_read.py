"""A pull's share in one range: parked at the read gate, then answered piece by piece.

    begun --> parked --the gate lets it--> answered with blocks, or with places in shared memory
       +--------+----> refused

Rules:
    - An answer has all of its blocks as of its decision. It is made piece by piece, since a range
      may have thousands; a block that is about to change before its turn is copied first
      (`Shards`).
    - Waits are counted by worker, for tables whose staleness bound moves. Time in which several
      pulls of a worker are parked counts once.
    - A pull first waits for its worker's own step. So it waits for others only from when the worker
      was last heard in the range, if that is after the pull came.

Invariants:
    RA-1  A piece is made of the range as of the decision to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ps_core import limits
from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.errors import InvalidKeys, InvariantViolation, PushpullError
from ps_core.keys import NodeId, TableId
from ps_core.tables import NATIVE_CODEC, Codec
from ps_runtime.cluster import wire
from ps_server.lane.segments import SharedValues
from ps_server.lane.shards import Shards
from ps_server.ranges.events import AnswerPull, Place, PullEvent
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.read_gate import WaitCause
from ps_server.ranges.server_machine import ServerMachine
from ps_server.wire.parameter_wire import block_answer, range_error
from pushpull.v1 import parameters_pb2

AnswerPart = bytes | parameters_pb2.SharedValue
"""A serialized PullResponse, or a value that the reader takes from shared memory."""

_Copy = tuple[int, bytes | memoryview, bytes]
"""A block, its payload, and its presence bits."""

_FOR_STEPS = (WaitCause.OWN_STEP, WaitCause.WORKERS)


class PullTerms(NamedTuple):
    """The terms of a pull, the same for each of its ranges.

    Attributes:
        session: whose it is.
        clock: as in the protocol.
        deadline_s: until when it waits, by the server's clock.
        consistent: as in the protocol.
        codec: of the payloads; None: the table's own.
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
        terms: the pull's.
        place: the range.
        blocks: the blocks that are asked for; empty: all of the range.

    Attributes:
        number: the node's for it, once it has begun.
        parked_s: since when it waits.
        cause: what it waited for then; None: it did not.
        is_answered: whether it waits no more.
    """

    def __init__(self, terms: PullTerms, place: Place, blocks: Sequence[int] = ()) -> None:
        self.terms = terms
        self.place = place
        self.number = 0
        self.parked_s = 0.0
        self.cause: WaitCause | None = None
        self.is_answered = False
        self._blocks = blocks
        self._arrival: asyncio.Future[None] | None = None
        self._refusal: bytes | None = None
        self._at = 0  # index of the next block
        self._left: set[int] | None = None  # later blocks not yet copied, once one was
        self._kept: dict[int, AnswerPart | _Copy] = {}

    @property
    def event(self) -> PullEvent:
        """The event for the machine."""
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
        """Answer from now on. The blocks come from the store, until it changes."""
        key = effect.table_id, effect.range_id
        terms = self.terms
        self._effect = effect
        self._name = state.name
        self._shards = shards
        self._store = shards.stores[key]
        self._codec = terms.codec or NATIVE_CODEC[state.table.spec.dtype]
        if terms.array:
            self._codec = state.table.spec.arithmetic_codec
        self._shared: SharedValues | None = None
        if terms.shared and not terms.array:
            self._shared = shards.segments.shared_with(terms.session, key, self._codec)
        self._blocks = self._blocks or state.blocks
        self._block_bytes = state.table.spec.block_elements * self._codec.element_bytes
        shards.hold(key, self)
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
    def is_done(self) -> bool:
        return self._refusal is None and self._at >= len(self._blocks)

    @property
    def next_bytes(self) -> int:
        """Payload bytes of the next piece, or a few more; shared values have none."""
        if self._refusal is not None or self._shared is not None:
            return 0
        count = min(len(self._blocks) - self._at, limits.SLICE_BLOCK_COUNT)
        return min(count * self._block_bytes, limits.SLICE_BYTES + self._block_bytes)

    def next(self) -> list[AnswerPart]:
        """The next blocks, as of the decision (RA-1); the error of a block that cannot be read
        covers all later ones.
        """
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            return [refusal]
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
            piece = [range_error(self.place.range_id, error)]
        self._shards.sent_bytes += byte_count
        return piece

    def keep(self, blocks: Collection[int]) -> None:
        """Copy the missing ones of these blocks, which are about to change."""
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
                found = (found[0], bytes(found[1]), found[2])
            self._kept[block] = found

    def _next(self) -> AnswerPart | _Copy:
        block = self._blocks[self._at]
        found = self._kept.pop(block, None) or self._take(block)
        self._at += 1
        if self._left is not None:
            self._left.discard(block)
        return found

    def _take(self, block: int) -> AnswerPart | _Copy:
        """A block as it is; its payload is valid until anything happens."""
        effect = self._effect
        if block not in effect.versions:
            raise InvalidKeys(
                f"block {block} of table '{self._name}' is not in range {effect.range_id}"
            )
        if self.terms.array:
            return (block, self._store.read_array(block, self.terms.array), b"")
        if effect.keeps_for is not None:
            self._store.keep(effect.keeps_for, block)
        if self._shared is not None:
            return self._shared.shared_value(effect, block)
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


class ReadWaits:
    """The time for which each worker's pulls were parked for other workers, in tables whose bound
    moves.

    Args:
        machine: the server's.
    """

    def __init__(self, machine: ServerMachine) -> None:
        self._machine = machine
        self._tables: frozenset[TableId] = frozenset()
        self._waited_s: dict[tuple[TableId, NodeId], float] = {}
        self._until_s: dict[tuple[TableId, NodeId], float] = {}

    def observe(self, view: ClusterView) -> None:
        """Count for the tables of the newest view; forget others, and workers that it does not
        have.
        """
        self._tables = frozenset(t.table_id for t in view.tables if t.consistency.moves)
        if self._waited_s:
            members = {node.node_id for node in view.nodes if node.state.is_member}
            for place in list(self._waited_s):
                if place[0] not in self._tables or place[1] not in members:
                    del self._waited_s[place], self._until_s[place]

    def ended(self, read: RangeRead, cause: WaitCause, now_s: float) -> float:
        """Count a pull that is no longer parked, which first was for `cause`; in seconds."""
        place, session = read.place, read.terms.session
        part = self._machine.shards.get((place.table_id, place.range_id))
        if part is not None and place.table_id in self._tables and cause in _FOR_STEPS:
            reader = part.state.workers.get(session.incarnation)
            heard_s = read.parked_s if reader is None else reader.last_heard_s
            since_s = max(read.parked_s, heard_s)
            self._add((place.table_id, NodeId(session.node_id)), since_s, now_s)
        return now_s - read.parked_s

    def _add(self, place: tuple[TableId, NodeId], since_s: float, now_s: float) -> None:
        from_s = max(since_s, self._until_s.get(place, since_s))
        self._waited_s[place] = self._waited_s.get(place, 0.0) + max(0.0, now_s - from_s)
        self._until_s[place] = now_s

    def totals_ms(self) -> Iterator[tuple[TableId, NodeId, int]]:
        """(table, worker, milliseconds in all)."""
        for number, ((table_id, reader), waited_s) in enumerate(self._waited_s.items()):
            if number == limits.MAX_READ_WAIT_COUNT:
                return
            yield table_id, reader, round(waited_s * 1000)
