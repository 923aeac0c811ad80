"""Which ranges are read from a checkpoint, and when what was read of them is served (G7)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.errors import UpdateFailed
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId, key_ranges
from ps_core.sliced_work import at_once
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_server.checkpoint.restored_ranges import Key, RestoredRanges
from ps_server.checkpoint.restored_values import RestoredTables, RestoredValues
from ps_server.ranges.range_copy import RangeDelta, fresh_copy
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.messages import Ack, LogRecord
from ps_server.replication.output_commit import OutputCommit
from ps_server.replication.range_roles import PLACED_EPOCH, Replication
from ps_server.update_log.logged_ranges import LoggedRanges
from tests.unit.checkpoint_files import WEIGHTS, write_checkpoint
from tests.unit.machine_harness import make_table
from tests.unit.snapshots import snapshots_of
from tests.unit.test_logged_ranges import Paper
from tests.unit.test_long_turns import Stage

ME, OTHER = NodeId(1), NodeId(2)
RANGE = RangeId(0)
LEASE_S = 3.0


class Server:
    """One that serves the only range, whose tables are restored.

    Args:
        backups: of the range, when it is placed.
        primary: of the range, when it is placed.
    """

    def __init__(
        self,
        *backups: NodeId,
        min_in_sync: int = 1,
        has_update_log: bool = False,
        primary: NodeId = ME,
    ) -> None:
        first = replace(make_table(), restored_clock=4)
        second = replace(first, table_id=TableId(2), spec=replace(first.spec, name="second"))
        self.tables: tuple[Table, ...] = (first, second)
        self.machine = ServerMachine(ME, 1)
        self.replication = Replication(
            ME, self.machine, LEASE_S, min_in_sync, has_update_log=has_update_log
        )
        self.ranges = RestoredRanges(self.machine.shards, self)
        self.number = 0
        self.see(PLACED_EPOCH, primary, *backups)

    def see(self, epoch: int, primary: NodeId, *backups: NodeId, catching_up: NodeId = ME) -> None:
        """The scheduler says who has the range."""
        self.number += 1
        (slots,) = key_ranges(1)
        assignment = RangeAssignment(
            RANGE, slots, AssignmentEpoch(epoch), primary, backups,
            () if catching_up == ME else (catching_up,), (primary, *backups),
        )  # fmt: skip
        view = ClusterView(self.number, "c", 1, 2, (), (assignment,), self.tables)
        self.replication.observe(view, 0.0)
        self.machine.observe(self.replication.serve(0.0))

    def may_load(self, range_id: RangeId) -> bool:
        return self.replication.may_load(range_id)

    def close_only(self, range_ids: Collection[RangeId]) -> None:
        self.replication.close_only(range_ids)

    def is_without_replicas(self, range_id: RangeId) -> bool:
        return self.replication.primaries[range_id].is_without_replicas

    def replaced(self, range_id: RangeId, *, is_last: bool) -> None:
        self.replication.primaries[range_id].replaced(is_last=is_last)

    def read(self, key: Key) -> bool:
        """A thread reads; whether there was anything to be read."""
        part = self.ranges.begin(key)
        if part is not None:
            self.ranges.was_read(key, part, dict.fromkeys(part.state.blocks, 4))
        return part is not None

    def hand_over(self) -> list[TableId]:
        """What is served from now on."""
        served = []
        for key, versions in self.ranges.hand_over():
            self.machine.loaded(key, versions, 0.0)
            served.append(key[0])
        return served


ONE, TWO = (TableId(1), RANGE), (TableId(2), RANGE)


def test_a_range_is_read_once_and_served_when_its_backups_have_left() -> None:
    server = Server(OTHER)
    assert server.ranges.look() == [ONE, TWO]
    assert server.ranges.look() == []
    assert server.read(ONE)
    assert server.hand_over() == []
    server.see(3, ME)
    assert server.hand_over() == [TableId(1)]
    assert server.replication.primaries[RANGE]._is_closed  # the other table's come yet
    server.read(TWO)
    assert server.hand_over() == [TableId(2)]
    assert not server.replication.primaries[RANGE]._is_closed


def test_what_is_being_read_or_is_served_is_not_read_again() -> None:
    """Whoever read it would write into values that updates have changed since."""
    server = Server()
    server.ranges.look()
    reading = server.ranges.begin(ONE)
    assert reading is not None
    assert server.ranges.begin(ONE) is None
    server.ranges.was_read(ONE, reading, {})
    assert server.ranges.begin(ONE) is None
    server.hand_over()
    assert server.ranges.begin(ONE) is None


def test_a_range_that_left_and_came_back_is_read_again() -> None:
    server = Server()
    server.ranges.look()
    before = server.ranges.begin(ONE)
    assert before is not None
    at_once(server.machine.giving_up((RANGE,)))
    assert server.ranges.look() == []
    server.see(PLACED_EPOCH, ME)
    assert server.ranges.look() == [ONE, TWO]
    server.ranges.was_read(ONE, before, {})
    assert server.hand_over() == []
    assert server.read(ONE)
    assert server.hand_over() == [TableId(1)]


def test_what_waits_for_more_servers_does_not_keep_values_out() -> None:
    """They join only when the values are there: each would wait for the other."""
    server = Server(min_in_sync=2)
    server.ranges.look()
    log = server.replication.primaries[RANGE].log
    facts = fresh_copy(server.tables[0], range(4)).facts
    log.decide(TableId(1), RangeDelta(facts, (), (), ()), (), ["an answer"])
    assert log.release(0.0) == []
    server.read(ONE)
    server.read(TWO)
    assert server.hand_over() == [TableId(1), TableId(2)]
    assert log.release(0.0) == []
    server.see(3, ME, catching_up=OTHER)
    ((_, snapshot),) = snapshots_of(server.replication, 0.0)
    assert snapshot.number == log.number > 1
    server.replication.acked(OTHER, Ack(RANGE, log.number, AssignmentEpoch(3)), 0.0)
    assert [
        set(backup_request.backups) for backup_request in server.replication.backup_requests(0.0)
    ] == [{OTHER}]
    server.see(4, ME, OTHER)
    server.replication.primaries[RANGE].granted(OTHER, 0.0, 0.0)
    assert log.release(0.0) == ["an answer"]


def test_what_waits_for_the_update_log_does_not_keep_values_out() -> None:
    """A range that was taken over waits for a snapshot in it, which waits for the values."""
    server = Server(has_update_log=True)
    server.ranges.look()
    primary = server.replication.primaries[RANGE]
    primary.log.lose_logged_snapshot()
    facts = fresh_copy(server.tables[0], range(4)).facts
    primary.log.decide(TableId(1), RangeDelta(facts, (), (), ()), (), ["an answer"])
    needs_snapshot = primary.needs_snapshot
    assert not needs_snapshot
    server.read(ONE)
    server.read(TWO)
    assert server.hand_over() == [TableId(1), TableId(2)]
    assert primary.log.release(0.0) == []
    assert primary.needs_snapshot
    primary.log.begin_logged_snapshot()
    primary.log.written(primary.log.number)
    assert primary.log.release(0.0) == ["an answer"]


@pytest.mark.parametrize("served", [[ONE], []])
def test_a_range_is_open_again_once_the_values_that_are_missing_cannot_come(
    served: list[Key],
) -> None:
    """The checkpoint has lost the values of a table. The others of the range have backups, and are
    in the update log, all the same: nothing of theirs was released, nor had another copy.
    """
    server = Server(has_update_log=True)
    server.ranges.look()
    primary = server.replication.primaries[RANGE]
    for key in served:
        server.read(key)
    assert server.hand_over() == [table_id for table_id, _ in served]
    for table_id, _ in {ONE, TWO}.difference(served):
        server.machine.refuse_table(table_id, UpdateFailed("the checkpoint cannot be read"))
    primary.log.lose_logged_snapshot()  # of a range that was taken over; a hand-over does it too
    needs_snapshot = primary.needs_snapshot
    assert not needs_snapshot
    server.see(3, ME, catching_up=OTHER)
    assert list(snapshots_of(server.replication, 0.0)) == []
    assert server.ranges.look() == []
    assert primary.needs_snapshot
    assert len(list(snapshots_of(server.replication, 0.0))) == 1


def test_what_was_not_read_since_its_range_had_gone_is_read_when_that_is_back() -> None:
    server = Server(OTHER)
    key = server.ranges.look()[0]
    part = server.ranges.begin(key)
    assert part is not None
    server.see(3, OTHER, ME)
    server.ranges.end_read(part)
    assert server.ranges.look() == []
    server.see(4, ME, OTHER)
    assert key in server.ranges.look()
    assert server.ranges.begin(key) is part


@pytest.mark.parametrize("looks", [True, False])
def test_a_range_is_not_copied_while_values_that_failed_are_read(looks: bool) -> None:
    """The thread that reads them does not hear of it: a copy would be of what it writes."""
    server = Server(has_update_log=True)
    server.ranges.look()
    reading = server.ranges.begin(ONE)
    assert reading is not None
    server.read(TWO)
    server.machine.refuse_table(TableId(1), UpdateFailed("the checkpoint cannot be read"))
    if looks:
        assert server.ranges.look() == []
    assert server.hand_over() == [TableId(2)]
    primary = server.replication.primaries[RANGE]
    assert primary._is_closed
    assert server.ranges.look() == []
    assert primary._is_closed
    server.ranges.end_read(reading)
    assert server.ranges.look() == []
    assert not primary._is_closed


def test_nothing_is_read_to_a_table_that_has_failed_meanwhile(tmp_path: Path) -> None:
    directory = CheckpointDirectory(locate(tmp_path.joinpath("checkpoint").as_uri()))
    write_checkpoint(directory, 1)
    stage = Stage(1)
    restored = Table(TableId(2), 0, WEIGHTS, restored_clock=41)
    stage.node.observe(replace(stage.view(2), tables=(stage.table, restored)))
    values = RestoredValues(stage.node)
    (key,) = values._ranges.look()

    async def fail() -> None:
        stage.node.refuse_table(TableId(2), UpdateFailed("another block cannot be read"))

    async def scene() -> int | None:
        with CheckpointReader(directory) as reader:
            load = values._load_range(RestoredTables(reader), key)  # it begins first
            byte_count, _ = await asyncio.gather(load, fail())
            return byte_count

    assert asyncio.run(scene()) is None


def test_a_range_stays_closed_while_it_is_read_into_though_the_table_has_failed() -> None:
    """Another part of the table could not be read; a copy would have what is being written."""
    server = Server()
    server.ranges.look()
    reading = server.ranges.begin(ONE)
    assert reading is not None
    server.read(TWO)
    server.machine.refuse_table(TableId(1), UpdateFailed("the checkpoint cannot be read"))
    server.ranges.look()
    assert server.hand_over() == [TableId(2)]
    server.see(3, ME, catching_up=OTHER)
    server.ranges.look()
    assert list(snapshots_of(server.replication, 0.0)) == []
    server.ranges.was_read(ONE, reading, {})
    server.ranges.look()
    assert len(list(snapshots_of(server.replication, 0.0))) == 1


def test_values_come_when_the_log_has_what_was_there_and_are_in_a_base_of_their_own() -> None:
    """A backup is promoted while the checkpoint is read. Until the scheduler knows that its log has
    the range, the former primary's log counts.
    """
    server, paper = Server(ME, has_update_log=True, primary=OTHER), Paper()
    output = OutputCommit(server.machine, server.replication, NotImplemented, _unsent)
    logged = LoggedRanges(paper, server.replication, output)
    server.see(3, ME)
    assert server.machine.shards.keys() == {ONE, TWO}
    at_once(logged.looking())
    assert [line[:2] for line in paper.lines] == [("snapshot", RANGE)]
    assert server.ranges.look() == []
    server.see(4, ME)
    for key in server.ranges.look():
        server.read(key)
    at_once(logged.looking())
    assert server.hand_over() == [TableId(1), TableId(2)]
    assert len(paper.lines) == 1
    at_once(logged.looking())
    assert [line[:2] for line in paper.lines[1:]] == [("snapshot", RANGE)]


def _unsent(peer: NodeId, record: LogRecord) -> None:
    del peer, record


def test_a_range_that_is_served_again_is_not_read_a_second_time_beside_the_first() -> None:
    """Whoever writes what it reads would write into values that are served."""
    server = Server(OTHER)
    key = server.ranges.look()[0]
    part = server.ranges.begin(key)
    assert part is not None
    server.see(3, OTHER, ME)
    assert server.ranges.look() == []
    server.see(4, ME, OTHER)
    assert key in server.ranges.look()
    assert server.machine.shards[key] is part
    assert server.ranges.begin(key) is None
    server.ranges.was_read(key, part, {0: 4})
    assert server.ranges.begin(key) is None
