"""The values of one server: the stores of its ranges, and where sessions on this host may read
them.

Invariants:
    SH-1  What is folded or assigned has its payload.
    SH-2  A block that is lent changes only while its stamp says so.

What it deliberately does not do: decide what happens to them, or count and time it (`node` does).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ps_core.cluster_view import Session
from ps_core.errors import InvalidKeys, InvariantViolation, UpdateFailed
from ps_core.keys import RangeId, TableId
from ps_core.tables import NATIVE_CODEC, Codec
from ps_server.buffer_pool import BufferPool
from ps_server.contributions import Contribution
from ps_server.custom_updates import CheckedUpdate
from ps_server.events import Assign, Fold, Forget, Place, Record, Sender
from ps_server.lanes import SharedLanes
from ps_server.lent_values import LentValues, lent_values
from ps_server.server_machine import PartAdded
from ps_server.shard_store import ShardStore
from pushpull.v1 import parameters_pb2

_Key = tuple[TableId, RangeId]


class Shards:
    """All stores of one server.

    Args:
        lanes: the sessions on this host.
        updates: the custom updates that the server offers, by name.

    Attributes:
        stores: by table and range.
        received_bytes: payload bytes that came, wherever they lay.
    """

    def __init__(self, lanes: SharedLanes, updates: Mapping[str, CheckedUpdate]) -> None:
        self.stores: dict[_Key, ShardStore] = {}
        self.received_bytes = 0
        self._lanes = lanes
        self._updates = updates
        self._pool = BufferPool()
        self._lent: dict[_Key, LentValues] = {}
        self._homes: dict[TableId, list[LentValues | None]] = {}
        self._native_codec: dict[TableId, Codec] = {}
        self._segment_ids = itertools.count(1)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        return sum(store.state_bytes for store in self.stores.values())

    def add(self, parts: Sequence[PartAdded]) -> None:
        """Make room for parts of one table: where they can be lent, if this server lends."""
        table = parts[0].table
        lent = None
        if self._lanes.is_open:
            blocks = [block for part in parts for block in part.blocks]
            lent = lent_values(table, next(self._segment_ids), blocks)
        self._homes.setdefault(table.table_id, []).append(lent)
        self._native_codec[table.table_id] = NATIVE_CODEC[table.spec.dtype]
        update = self._updates.get(table.spec.optimizer.custom_update)
        home = None if lent is None else lent.values
        for part in parts:
            key = (table.table_id, part.range_id)
            self.stores[key] = ShardStore(table, part.blocks, self._pool, home, update)
            if lent is not None:
                self._lent[key] = lent

    # --- payloads that come

    def decode(
        self, place: Place, block: int, codec: Codec, payload: memoryview, presence: bytes
    ) -> Contribution:
        """See `intake.Decoder`; a place that is not here is answered by the machine."""
        store = self._store(place)
        self.received_bytes += len(payload)
        return store.decode(block, codec, payload, presence)

    def decode_shared(
        self, place: Place, sender: Sender, message: parameters_pb2.BlockPush, codec: Codec
    ) -> Contribution:
        """See `intake.Decoder`."""
        store = self._store(place)
        payload = self._lanes.payload(sender.incarnation, message.shared_payload)
        self.received_bytes += len(payload)
        return store.decode(message.block, codec, payload, message.presence, is_shared=True)

    def _store(self, place: Place) -> ShardStore:
        store = self.stores.get((place.table_id, place.range_id))
        if store is None:
            raise InvalidKeys(f"range {place.range_id} holds no block of table {place.table_id}")
        return store

    # --- what the machines decided

    def fold(self, effect: Fold) -> None:
        """One worker's step goes into the sum of its clock."""
        store = self.stores[effect.table_id, effect.range_id]
        parts = _contributions(effect.parts)
        store.fold(effect.clock, parts, effect.scale, effect.compensation)

    def reduce(self, record: Record) -> tuple[float, ...]:
        """The sum of the record's clock is whole: reduce it, and say how large it is.

        Returns:
            As `ShardStore.reduce`.
        """
        store = self.stores[record.table_id, record.range_id]
        return store.reduce(record.clock, record.contributor_count)

    def apply(self, record: Record) -> UpdateFailed | None:
        """Why the update could not be computed, if so; then nothing has changed."""
        failure = None
        key = record.table_id, record.range_id
        lent = self._lent.get(key)
        if lent is not None:
            lent.begin_change(record.blocks)
        try:
            self.stores[key].apply(
                record.clock, record.hyperparameters, record.contributor_count, record.update_scale
            )
        except UpdateFailed as error:  # a new one: this one's frames hold the gradients
            failure = UpdateFailed(f"{error.message} (range {record.range_id})")
        if lent is not None:  # what else may be raised leaves blocks marked: nobody takes a part
            lent.end_change(record.blocks)
        return failure

    def assign(self, effect: Assign) -> None:
        """Initial values."""
        record = effect.record
        key = record.table_id, record.range_id
        lent = self._lent.get(key)
        if lent is not None:
            lent.begin_change(record.blocks)
        self.stores[key].assign(_contributions(effect.parts))
        if lent is not None:
            lent.end_change(record.blocks)

    def drop(self, record: Record) -> None:
        """Nothing comes of the sum of the record's clock."""
        self.stores[record.table_id, record.range_id].drop(record.clock)

    def forget(self, effect: Forget) -> None:
        """What was kept for a reader is of no use any more."""
        self.stores[effect.table_id, effect.range_id].forget(effect.reader)

    def abandon(self, table_id: TableId) -> None:
        """The table has failed."""
        for (owner, _), store in self.stores.items():
            if owner == table_id:
                store.abandon()

    # --- values that are lent

    def lends(self, session: Session, table_id: TableId, codec: Codec | None) -> bool:
        """Whether the session takes all of the table's values, as `codec`, from where they lie."""
        homes = self._homes.get(table_id)
        if homes is None:
            return False
        codec = codec or self._native_codec[table_id]
        return all(
            home is not None and codec is home.codec and self._is_lent(session, home)
            for home in homes
        )

    def lent_to(self, session: Session, key: _Key, codec: Codec) -> LentValues | None:
        """The range's values as `codec`, if the session takes them from where they lie."""
        lent = self._lent.get(key)
        if lent is None or codec is not lent.codec or not self._is_lent(session, lent):
            return None
        return lent

    def _is_lent(self, session: Session, lent: LentValues) -> bool:
        return self._lanes.lend(session.incarnation, lent.segment_id, lent.segment)


def _contributions(parts: Sequence[tuple[int, object]]) -> list[tuple[int, Contribution]]:
    found = []
    for block, payload in parts:
        if not isinstance(payload, Contribution):
            raise InvariantViolation("SH-1", f"block {block} was folded without its payload")
        found.append((block, payload))
    return found
