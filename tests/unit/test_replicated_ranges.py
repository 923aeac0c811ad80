"""One server's part in replication: what a backup does with what comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables import Table
from ps_server.changes import Change, Elements, Put, SentTotal
from ps_server.events import Contributor, Record
from ps_server.lanes import SharedLanes
from ps_server.part_copy import Delta, WorkerFacts, fresh_copy
from ps_server.range_log import Batch
from ps_server.replicated_ranges import ReplicatedRanges, ReplicationSetting
from ps_server.replication import PLACED_EPOCH, Ack, Beat, Snapshot
from ps_server.server_machine import ServerMachine
from ps_server.shards import Shards
from ps_server.store_copy import RangeCopy
from tests.property.shard_twin import table

LEASE_S = 3.0
ONE, TWO = NodeId(1), NodeId(2)
RANGE = RangeId(0)
WORKER = Incarnation(11)
MODEL: Table = table([128])
BLOCKS = (0, 1)
SUM = SentTotal((Elements(0, b"", np.ones(64, np.float32).tobytes()),))


@dataclass
class Backup:
    """A server that backs up the only range of a cluster, and lends its values."""

    ranges: ReplicatedRanges
    shards: Shards

    @property
    def value(self) -> float:
        payload, _ = self.shards.stores[TableId(1), RANGE].read(0, None, None)
        return float(np.frombuffer(payload, np.float32)[0])


def run(scenario: Callable[[Backup], Awaitable[None]]) -> None:
    async def with_backup() -> None:
        lanes = SharedLanes()
        lanes.open()
        shards = Shards(lanes, {})
        session = Session("cluster", b"t" * 16, TWO, Incarnation(2), Role.SERVER)
        setting = ReplicationSetting(LEASE_S)
        ranges = ReplicatedRanges(session, ServerMachine(TWO, 1), shards, setting, lambda: 0.0)
        try:
            await scenario(Backup(ranges, shards))
        finally:
            await ranges.close()
            lanes.close()

    asyncio.run(with_backup())


def view(number: int, epoch: int, *, joins: bool = False) -> ClusterView:
    """Server 2 backs up the range, or joins it."""
    (slots,) = key_ranges(1)
    primary = Node(ONE, Incarnation(1), Role.SERVER, 0, "127.0.0.1:1", NodeState.ALIVE)
    two = (TWO,)
    assignment = RangeAssignment(
        RANGE, slots, AssignmentEpoch(epoch), ONE, () if joins else two, two if joins else ()
    )
    return ClusterView(number, "cluster", 1, 1, (primary,), (assignment,), (MODEL,))


def batch(number: int, *changes: Change) -> Batch:
    facts = fresh_copy(MODEL, BLOCKS).facts
    delta = Delta(facts, (WorkerFacts(WORKER, 0, 0, 0, None, 0, 0),), (), ())
    return Batch(RANGE, PLACED_EPOCH, PLACED_EPOCH, number, TableId(1), delta, changes)


def put(total: object = SUM, *, numbers: tuple[tuple[str, float], ...] = ()) -> Put:
    workers = (Contributor(0, WORKER, (1,), skip=False),)
    return Put(Record(TableId(1), RANGE, 1, 1, False, workers, numbers, (0,)), total)


def beat(epoch: int) -> Beat:
    return Beat(0.0, ((RANGE, AssignmentEpoch(epoch)),))


def test_what_it_could_not_make_it_does_not_acknowledge() -> None:
    """Not when it comes, nor when it comes again; nor does it grant the lease, which would keep its
    primary waiting for ever.
    """

    async def scenario(backup: Backup) -> None:
        backup.ranges.observe(view(1, PLACED_EPOCH))
        assert backup.ranges.take(batch(1, put())) == Ack(RANGE, 1)
        broken = batch(2, put(total="not a sum"))  # a bug, and not one of the catalogue's errors
        assert backup.ranges.take(broken) is None
        backup.ranges.observe(view(2, PLACED_EPOCH))
        assert backup.ranges.take(broken) is None
        assert backup.ranges.grant(beat(PLACED_EPOCH)).range_ids == ()

    run(scenario)


def test_one_that_broke_joins_anew() -> None:
    """What broke in the midst of a change left the blocks marked as changing."""

    async def scenario(backup: Backup) -> None:
        backup.ranges.observe(view(1, PLACED_EPOCH))
        assert backup.ranges.take(batch(1, put(numbers=(("unheard_of", 1.0),)))) is None
        backup.ranges.observe(view(2, 3, joins=True))
        store = backup.shards.stores[TableId(1), RANGE].snapshot()
        copy = Snapshot(
            RANGE, AssignmentEpoch(3), PLACED_EPOCH, 1, {TableId(1): fresh_copy(MODEL, BLOCKS)}
        )
        assert backup.ranges.join(RangeCopy(copy, {TableId(1): store})) == Ack(RANGE, 1)
        again = batch(2, put())._replace(assignment_epoch=AssignmentEpoch(3))
        assert backup.ranges.take(again) == Ack(RANGE, 2)
        assert backup.value == -1.0

    run(scenario)
