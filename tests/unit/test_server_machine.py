"""The server machine: which parts it has, and which events reach them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.errors import StaleAssignment
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import ReplyKind
from ps_core.sliced_work import at_once
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    PullEvent,
    PushEvent,
    RefusePull,
    SealEvent,
    SealTerms,
    Sender,
    WithdrawEvent,
)
from ps_server.ranges.server_machine import ServerMachine
from tests.unit.machine_harness import PLACE, kinds, make_table, problem

ME, OTHER = NodeId(1), NodeId(2)
RANGE_COUNT = 4
FIRST = make_table(blocks=2)
TABLES = [
    FIRST,
    replace(FIRST, table_id=TableId(2), first_ordinal=2),
    replace(make_table(blocks=1), table_id=TableId(3), first_ordinal=4),
]


def view_of(number: int, owners: tuple[NodeId | None, ...], tables: list[Table]) -> ClusterView:
    """Whoever has a range now has it under an epoch of its own."""
    slots = key_ranges(len(owners))
    ranges = tuple(
        RangeAssignment(RangeId(index), slots[index], AssignmentEpoch(number), owner)
        for index, owner in enumerate(owners)
    )
    return ClusterView(number, "c", 2, 1, (), ranges, tuple(tables))


OWNERS = st.tuples(*[st.sampled_from([ME, ME, OTHER, None])] * RANGE_COUNT)


@given(st.lists(st.tuples(OWNERS, st.sets(st.sampled_from([1, 2, 3])), st.booleans()), max_size=6))
def test_there_is_a_part_for_each_range_of_ours_that_holds_blocks_and_no_other(
    course: list[tuple[tuple[NodeId | None, ...], set[int], bool]],
) -> None:
    """SM-1, SM-7: ranges go, are kept or given up meanwhile, and come again; tables are removed."""
    machine, gone, suspended = ServerMachine(ME, 2), set[int](), set[RangeId]()
    ours = set[RangeId]()
    for number, (owners, removed, are_kept) in enumerate(course, 1):
        gone |= removed if number > 2 else set()
        tables = [table for table in TABLES if table.table_id not in gone]
        seen = view_of(number, owners, tables)
        before, ours = ours, {RangeId(n) for n, owner in enumerate(owners) if owner == ME}
        at_once(machine.removing(machine.removed_by(seen)))
        lost = before - ours
        at_once(machine.suspending(lost) if are_kept else machine.giving_up(lost))
        suspended |= lost if are_kept else set()
        for range_id in ours & suspended:
            machine.resume(range_id)
        suspended -= ours
        added = machine.observe(seen)
        expected = {
            (table.table_id, range_id): blocks
            for table in tables
            for range_id, blocks in table.blocks_by_range(RANGE_COUNT).items()
            if range_id in ours
        }
        assert machine.shards.keys() == expected.keys()
        assert machine.suspended.keys() & machine.shards.keys() == set()
        assert {table_id for table_id, _ in machine.suspended} <= {t.table_id for t in tables}
        for part in added:
            assert part.blocks == expected[part.table.table_id, part.range_id]


def test_what_is_of_another_epoch_reaches_no_part() -> None:
    """SM-2."""
    machine = ServerMachine(ME, 2)
    machine.observe(view_of(3, (ME,), [FIRST]))
    (part,) = machine.shards.values()
    sender = Sender(Incarnation(1000), 0, 0)
    for epoch in (AssignmentEpoch(2), AssignmentEpoch(4)):
        place = PLACE._replace(assignment_epoch=epoch)
        for event in (
            PushEvent(place, sender, 1, 1, 0, 256, "payload"),
            SealEvent(place, sender, 1, SealTerms(1)),
            WithdrawEvent(place, sender, 1),
        ):
            found = machine.entry(event, 100.0)
            assert kinds(found) == [ReplyKind.ERROR]
            assert isinstance(problem(found), StaleAssignment)
        (refused,) = machine.pull(PullEvent(place, 7, Incarnation(1000), 0, False, 110.0), 100.0)
        assert isinstance(refused, RefusePull)
        assert isinstance(refused.error, StaleAssignment)
    assert part.state.by_rank == {}
    push = PushEvent(PLACE._replace(assignment_epoch=AssignmentEpoch(3)), sender, 1, 1, 0, 256, "p")
    assert kinds(machine.entry(push, 100.0)) == [ReplyKind.RECEIVED]
