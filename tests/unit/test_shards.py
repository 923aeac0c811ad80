"""The stores of one server: which are there, and what a backup does to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidKeys
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import Accumulate, Contributor, Place, Record
from ps_server.ranges.range_copy import fresh_copy
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replication.messages import RangeCopy, Snapshot
from ps_server.stores import Shards, for_backup
from ps_server.values.mutations import (
    Assigned,
    Dropped,
    Elements,
    KeptSum,
    Mutation,
    Put,
    SentAccumulator,
)
from tests.property.shard_twin import table

TABLE = TableId(1)
LEFT, RIGHT = RangeId(0), RangeId(1)
MODEL = table([384])
PARTS = [ShardAdded(MODEL, LEFT, (0, 1)), ShardAdded(MODEL, RIGHT, (2, 3))]
WORKER = Session("cluster", b"t" * 16, NodeId(2), Incarnation(11), Role.WORKER)
ONE = np.ones(64, np.float32).tobytes()
SUM = SentAccumulator((Elements(0, b"", ONE),))
ELSEWHERE = SentAccumulator((Elements(1, b"", ONE),))
TWO = np.full(64, 2, np.float32).tobytes()


@pytest.fixture
def shards() -> Shards:
    found = Shards(SharedLanes(), {})
    found.add(PARTS)
    return found


def record(clock: int = 1, scale: float = 1.0, *, is_assign: bool = False) -> Record:
    workers = (Contributor(0, Incarnation(11), (1,), skip=False),)
    return Record(TABLE, LEFT, 1, clock, is_assign, workers, (), (0,), update_scale=scale)


def value(shards: Shards) -> float:
    payload, _ = shards.stores[TABLE, LEFT].read(0, None, None)
    return float(np.frombuffer(payload, np.float32)[0])


def test_a_store_that_is_there_is_not_made_again(shards: Shards) -> None:
    """SH-3."""
    shards.make(Put(record(), SUM))
    stores = dict(shards.stores)
    shards.add([*PARTS, ShardAdded(MODEL, RangeId(2), (4, 5))])
    assert {key: shards.stores[key] for key in stores} == stores
    assert (TABLE, RangeId(2)) in shards.stores
    assert value(shards) == -1.0


def test_a_range_that_is_removed_begins_anew(shards: Shards) -> None:
    """SH-3."""
    shards.make(Put(record(), SUM))
    shards.remove(LEFT)
    shards.remove(LEFT)
    assert shards.stores.keys() == {(TABLE, RIGHT)}
    shards.add(PARTS)
    assert value(shards) == 0.0
    assert shards.state_bytes == 4 * 256


def test_a_backup_makes_what_a_primary_decides(shards: Shards) -> None:
    shards.make(Assigned(record(is_assign=True), (Elements(0, b"", TWO),)))
    assert value(shards) == 2.0
    shards.make(Put(record(), SUM))
    assert value(shards) == 1.0
    shards.make(KeptSum(record(2), SUM))
    shards.make(Put(record(2, 0.5), None))
    assert value(shards) == 0.5
    shards.make(KeptSum(record(3), SUM))
    shards.make(Dropped(record(3)))
    assert shards.make(Put(record(3), None)) is None
    assert value(shards) == 0.5


def test_a_primary_applies_what_it_took(shards: Shards) -> None:
    place = Place(TABLE, LEFT, 1)  # type: ignore[arg-type]
    for _ in range(2):
        part = shards.decode(place, 0, Codec.FP32, memoryview(ONE), b"")
        shards.accumulate(Accumulate(TABLE, LEFT, 1, 0, ((0, part),), 1.0))
    total = shards.take(record())
    assert bytes(total.sent().blocks[0].payload) == TWO
    assert at_once(shards.applying(record(), total)) is None
    assert value(shards) == -2.0


def test_initial_values_are_told_as_they_are(shards: Shards) -> None:
    place = Place(TABLE, LEFT, 1)  # type: ignore[arg-type]
    part = shards.decode(place, 0, Codec.FP32, memoryview(TWO), b"")
    change = for_backup(Assigned(record(is_assign=True), ((0, part),)))
    assert change == Assigned(record(is_assign=True), (Elements(0, b"", TWO),))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            Put(record(), ELSEWHERE),
            r"blocks \[1\]; expected some of \[0\]",
        ),
        (
            Put(record()._replace(range_id=RangeId(9)), SentAccumulator(())),
            "range 9 holds no block",
        ),
        (KeptSum(record()._replace(table_id=TableId(9)), SentAccumulator(())), "table 9"),
    ],
)
def test_a_change_of_what_is_not_here_is_refused(
    shards: Shards, change: Put | KeptSum, text: str
) -> None:
    with pytest.raises(InvalidKeys, match=text):
        shards.make(change)
    assert value(shards) == 0.0


def test_a_sum_that_was_kept_and_comes_whole_is_kept_no_more(shards: Shards) -> None:
    """A primary that took over does not know which of its backups have it."""
    shards.make(KeptSum(record(), SUM))
    shards.make(Put(record(scale=0.5), SUM._replace(is_reduced=True)))
    assert value(shards) == -0.5
    assert shards.stores[TABLE, LEFT].snapshot().sums == ()


@pytest.fixture
def lending() -> Iterator[Shards]:
    """Shards of a server that sessions on its host may share memory with."""
    with asyncio.Runner() as runner:

        async def opened() -> SharedLanes:
            lanes = SharedLanes()
            lanes.open()
            return lanes

        async def close() -> None:
            lanes.close()

        lanes = runner.run(opened())
        found = Shards(lanes, {})
        found.add(PARTS)
        yield found
        runner.run(close())


def test_the_memory_that_is_lent_goes_with_the_last_of_its_ranges(lending: Shards) -> None:
    (segment,) = lending.segments._segments[TABLE]
    assert segment.values is not None
    memory = segment.values.segment
    lending.make(Put(record(), SUM))
    lending.remove(LEFT)
    assert memory.fd >= 0
    lending.remove(RIGHT)
    assert memory.fd < 0
    assert not lending.segments.shares(WORKER, TABLE, None)
    lending.add(PARTS)
    assert value(lending) == 0.0


def test_a_block_that_changes_has_another_stamp_and_the_others_have_theirs(lending: Shards) -> None:
    """SH-2: initial values, an update, and what is decided and dropped."""
    (segment,) = lending.segments._segments[TABLE]
    shared = segment.values
    assert shared is not None

    def stamps() -> list[int]:
        return [shared.place(block)[1] for block in range(4)]

    initial = Assigned(record(is_assign=True), (Elements(0, b"", TWO),))
    for change, becomes in ((initial, 2.0), (Put(record(), SUM), 1.0)):
        before = stamps()
        lending.make(change)
        assert value(lending) == becomes
        assert stamps() == [before[0] + 2, *before[1:]]
    before = stamps()
    lending.make(KeptSum(record(2), SUM))
    lending.make(Dropped(record(2)))
    assert (value(lending), stamps()) == (1.0, before)


def snapshot(*held: Mutation) -> Snapshot:
    epoch = AssignmentEpoch(2)
    copies = {TABLE: fresh_copy(MODEL, (0, 1))}
    return Snapshot(LEFT, epoch, epoch, 7, copies, held)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_range_that_is_copied_goes_on_elsewhere(
    shards: Shards, lending: Shards, is_shared: bool
) -> None:
    """With what was decided and is held yet; what happens here later is not in the copy."""
    other = lending if is_shared else Shards(SharedLanes(), {})
    other.add(PARTS)
    shards.make(Put(record(), SUM))
    other.make(Put(record(), SUM))
    shards.make(KeptSum(record(2), SUM))
    held = Put(record(2, 0.5), shards.take(record(2)))
    copy = at_once(shards.copying(snapshot(held)))
    at_once(shards.applying(held.record, held.accumulator))
    shards.make(Put(record(3), SUM))
    assert value(shards) == -2.5
    other.restore(copy)
    assert value(other) == -1.5
    other.make(Put(record(3), SUM))
    assert value(other) == value(shards)


def test_a_copy_with_a_table_that_is_not_here_changes_nothing(shards: Shards) -> None:
    other = Shards(SharedLanes(), {})
    other.add(PARTS)
    other.make(Put(record(), SUM))
    copy = at_once(other.copying(snapshot()))
    more = RangeCopy(copy.snapshot, {**copy.stores, TableId(9): copy.stores[TABLE]})
    with pytest.raises(InvalidKeys, match="table 9"):
        shards.restore(more)
    assert value(shards) == 0.0
