"""What of a server's ranges goes to its update log, and what the log's word releases (S13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    Node,
    NodeState,
    RangeAssignment,
    Role,
)
from ps_core.errors import InvariantViolation
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, key_ranges
from ps_core.sliced_work import Work, at_once
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.backup import Replica
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.replication.output_commit import OutputCommit
from ps_server.replication.range_roles import PLACED_EPOCH, Replication
from ps_server.replication.replication_log import RangeLog
from ps_server.update_log.logged_ranges import LoggedRanges
from tests.unit.test_range_log import TABLE, delta

ME, OTHER = NodeId(1), NodeId(2)
ZERO, ONE = RangeId(0), RangeId(1)
LEASE_S = 3.0


class Paper:
    """A log that can be read."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int]] = []
        self.is_busy = False
        self.lagging: Sequence[RangeId] = ()

    def begin(self, log: RangeLog) -> None:
        self.lines.append(("begin", log.range_id, log.released))

    def take_over(self, log: RangeLog) -> None:
        self.lines.append(("taken over", log.range_id, log.released))

    def write_snapshot(self, snapshot: Snapshot) -> Work[None]:
        yield from ()
        self.lines.append(("snapshot", snapshot.range_id, snapshot.number))

    def write_record(self, record: LogRecord) -> None:
        self.lines.append(("record", record.range_id, record.number))

    def end(self, range_id: RangeId) -> None:
        self.lines.append(("end", range_id, 0))


class Server:
    """The machines of a server that keeps a log of two ranges."""

    def __init__(self) -> None:
        machine = ServerMachine(ME, 1)
        self.replication = Replication(ME, machine, LEASE_S, has_update_log=True)
        self.paper = Paper()
        output = OutputCommit(machine, self.replication, NotImplemented, _unsent)
        self.logged = LoggedRanges(self.paper, self.replication, output)
        self.view_number = 0
        self.nodes = {ME: NodeState.ALIVE, OTHER: NodeState.ALIVE}

    def see(
        self,
        *ranges: tuple[NodeId | None, AssignmentEpoch, tuple[NodeId, ...]],
        begins_anew: bool = False,
        looks: bool = True,
        **fields: object,
    ) -> None:
        """A newer view: primary, epoch and backups of each range, and `fields` of all."""
        self.view_number += 1
        slots = key_ranges(len(ranges))
        nodes = tuple(
            Node(each, Incarnation(each), Role.SERVER, 0, f"s:{each}", state)
            for each, state in self.nodes.items()
        )
        view = ClusterView(
            self.view_number, "c", 1, 2, nodes,
            tuple(
                RangeAssignment(
                    RangeId(index), slots[index], epoch, primary, backups, (),
                    in_sync if epoch == PLACED_EPOCH or begins_anew else (),
                    **fields,  # type: ignore[arg-type]
                )
                for index, (primary, epoch, backups) in enumerate(ranges)
                for in_sync in [() if primary is None else (primary, *backups)]
            ),
            (),
        )  # fmt: skip
        lost, _ = self.replication.observe(view, 0.0)
        self.logged.observe(lost)
        self.replication.serve(0.0)
        if looks:
            at_once(self.logged.looking())

    def log(self, range_id: RangeId = ZERO) -> RangeLog:
        return self.replication.primaries[range_id].log

    def decide(self, range_id: RangeId = ZERO) -> LogRecord:
        """Something, in a range."""
        log = self.log(range_id)
        record = log.decide(TABLE, delta(), (), ["done"])
        if log.is_written:
            self.logged.write(record)
        return record

    def says(self, record: LogRecord) -> list[object]:
        """The log has the record; what is released."""
        more = self.logged.written({(record.range_id, record.term): record.number})
        return self.replication.release(0.0, more)


def _unsent(peer: NodeId, record: LogRecord) -> None:
    del peer, record


def epoch(number: int) -> AssignmentEpoch:
    return AssignmentEpoch(number)


def test_a_range_that_is_placed_begins_with_nothing() -> None:
    """LOG-1, LOG-4: also where something is decided before the log is looked at."""
    server = Server()
    server.see((ME, PLACED_EPOCH, ()), (OTHER, PLACED_EPOCH, ()), looks=False)
    record = server.decide()
    assert server.replication.release(0.0, [ZERO]) == []
    assert server.says(record) == ["done"]
    assert server.paper.lines == [("begin", 0, 0), ("record", 0, 1)]


def test_a_range_that_is_taken_over_waits_for_its_base() -> None:
    """LOG-4."""
    server = Server()
    server.see((OTHER, PLACED_EPOCH, (ME,)), (OTHER, PLACED_EPOCH, ()))
    server.paper.is_busy = True
    server.see((ME, epoch(3), ()), (OTHER, PLACED_EPOCH, ()))
    record = server.decide()
    assert server.says(record) == []
    assert server.paper.lines == []
    server.paper.is_busy = False
    at_once(server.logged.looking())
    assert server.paper.lines == [("snapshot", 0, 1)]
    assert server.says(record) == []
    server.see((ME, epoch(4), ()), (OTHER, PLACED_EPOCH, ()), term=epoch(3))
    assert server.replication.release(0.0, [ZERO]) == ["done"]


@pytest.mark.parametrize("others", [(OTHER,), ()])
def test_a_range_is_taken_over_when_the_log_has_it(others: tuple[NodeId, ...]) -> None:
    """Until then the former primary's log brings it back, if all servers die (S13)."""
    server = Server()
    server.see((OTHER, PLACED_EPOCH, (ME,)))
    server.see((ME, epoch(3), others))
    assert server.replication.backup_requests(0.0) == []
    assert server.logged.written({(ZERO, epoch(3)): 0}) == [ZERO]
    expected = BackupRequest(ZERO, epoch(3), frozenset())
    assert server.replication.backup_requests(0.1) == [expected]


def test_values_of_a_checkpoint_wait_until_the_log_has_a_range_that_was_taken_over() -> None:
    """It may have other tables: if its server dies meanwhile, the former primary's log has them."""
    server = Server()
    server.see((OTHER, PLACED_EPOCH, (ME,)))
    server.see((ME, epoch(3), (OTHER,)))
    assert server.paper.lines == [("snapshot", 0, 0)]
    assert not server.replication.may_load(ZERO)
    server.logged.written({(ZERO, epoch(3)): 0})
    assert not server.replication.may_load(ZERO)
    server.see((ME, epoch(4), ()), term=epoch(3))
    assert server.replication.may_load(ZERO)


def test_the_word_of_another_tenure_says_nothing() -> None:
    server = Server()
    server.see((OTHER, PLACED_EPOCH, (ME,)))
    server.see((ME, epoch(3), ()))
    record = server.decide()
    server.see((ME, epoch(4), ()), term=epoch(3))
    assert server.says(record._replace(term=PLACED_EPOCH)) == []
    assert server.says(record) == ["done"]


def test_what_the_log_gave_back_goes_on_in_it() -> None:
    server = Server()
    replica = Replica(ZERO, PLACED_EPOCH, LEASE_S, PLACED_EPOCH, {}, 11)
    server.replication.recover([replica])
    server.logged.recover([ZERO])
    server.see((ME, epoch(3), ()), (OTHER, PLACED_EPOCH, ()))
    record = server.decide()
    assert server.says(record) == ["done"]
    assert server.paper.lines == [("taken over", 0, 11), ("record", 0, 12)]


def test_what_another_has_is_ended_and_not_joined_from_the_log() -> None:
    """LOG-2."""
    server = Server()
    replica = Replica(ZERO, PLACED_EPOCH, LEASE_S, PLACED_EPOCH, {}, 11)
    server.replication.recover([replica])
    server.logged.recover([ZERO])
    server.see((OTHER, epoch(3), (ME,)))
    assert not server.replication.replicas
    assert server.paper.lines == [("end", 0, 0)]


def withholding() -> Server:
    """One whose log has a range that it did not ask for."""
    server = Server()
    server.logged.recover([], [ZERO])
    return server


@pytest.mark.parametrize("state", [NodeState.LEFT, NodeState.SILENT])
def test_what_only_the_log_may_have_is_not_ended(state: NodeState) -> None:
    """LOG-2: the primary wrote this log before, or is silent, and nobody has taken the range over;
    or it took the range over and has not been seen to serve; or it lacks it.
    """
    server = withholding()
    server.nodes[OTHER] = state
    server.see((OTHER, epoch(4), ()), term=epoch(3))
    server.nodes = {ME: NodeState.ALIVE}
    server.see((OTHER, epoch(4), ()), term=epoch(3))
    server.nodes[OTHER] = NodeState.ALIVE
    server.see((OTHER, epoch(4), ()), term=epoch(4))
    server.see((OTHER, epoch(5), ()), term=epoch(4), is_lost=True)
    assert server.paper.lines == []


def test_what_a_living_primary_has_taken_over_is_ended_once() -> None:
    """LOG-2: it has asked for a configuration since."""
    server = withholding()
    server.see((OTHER, epoch(4), ()), term=epoch(3))
    server.see((OTHER, epoch(5), ()), term=epoch(3))
    assert server.paper.lines == [("end", 0, 0)]


@pytest.mark.parametrize("is_unplaced", [False, True])
def test_what_is_withheld_of_removed_tables_is_ended(*, is_unplaced: bool) -> None:
    """LOG-2: the range has no primary, or a living one since it was placed, who wrote another log.
    Nothing of the range is asked for in this log any more, whoever comes with it.
    """
    server = withholding()
    placed: dict[str, Any] = {"term": epoch(6), "placed_epoch": epoch(6)}
    server.nodes[OTHER] = NodeState.SILENT
    server.see((OTHER, epoch(6), ()), **placed)
    server.nodes[OTHER] = NodeState.ALIVE
    server.see((OTHER, epoch(6), ()), is_lost=True, **placed)
    server.see((OTHER, epoch(7), ()), term=epoch(7), placed_epoch=epoch(6))
    assert server.paper.lines == []
    if is_unplaced:
        server.see((None, epoch(8), ()))
    else:
        server.see((OTHER, epoch(9), ()), term=epoch(9), placed_epoch=epoch(9))
    assert server.paper.lines == [("end", 0, 0)]


def test_what_is_served_here_again_is_ended_before_it_begins() -> None:
    """LOG-2, LOG-4: this server has joined the range meanwhile, and heard of nothing between."""
    server = withholding()
    server.replication.replicas[ZERO] = Replica(ZERO, epoch(4), LEASE_S, epoch(3), {}, 11)
    server.see((ME, epoch(5), ()), term=epoch(5))
    assert server.paper.lines == [("end", 0, 0), ("snapshot", 0, 11)]


def test_what_nobody_has_seen_begins_anew() -> None:
    """The scheduler gives it to a server that came with the log of its only primaries. A server
    that was promoted alone sees the same, so it waits for its log in both cases.
    """
    server = Server()
    server.replication.recover([])
    server.see((ME, epoch(3), ()), begins_anew=True)
    assert server.paper.lines == [("snapshot", 0, 0)]
    assert not server.log().is_confirmed


def test_without_a_log_of_before_only_what_is_placed_begins() -> None:
    server = Server()
    server.see((ME, epoch(3), ()))
    assert not server.replication.primaries
    assert server.replication.missing == (ZERO,)


def test_a_range_that_is_lost_is_ended() -> None:
    server = Server()
    server.see((ME, PLACED_EPOCH, ()))
    server.see((OTHER, epoch(3), ()))
    server.see((OTHER, epoch(4), ()))
    assert server.paper.lines == [("begin", 0, 0), ("end", 0, 0)]


def test_bases_of_lagging_ranges_wait_while_much_is_written() -> None:
    server = Server()
    server.see((ME, PLACED_EPOCH, ()), (ME, PLACED_EPOCH, ()))
    server.paper.lagging, server.paper.is_busy = (ONE,), True
    at_once(server.logged.looking())
    assert server.paper.lines == [("begin", 0, 0), ("begin", 1, 0)]
    server.paper.is_busy = False
    at_once(server.logged.looking())
    assert server.paper.lines[2:] == [("snapshot", 1, 0)]


def test_a_lagging_range_has_no_base_while_its_values_come_from_a_checkpoint() -> None:
    """A thread writes them meanwhile, and a base is due when they are there."""
    server = Server()
    server.see((ME, PLACED_EPOCH, ()), (ME, PLACED_EPOCH, ()))
    server.paper.lines.clear()
    server.replication.close_only({ZERO})
    server.paper.lagging = [ZERO, ONE]
    at_once(server.logged.looking())
    assert server.paper.lines == [("snapshot", ONE, 0)]
    server.paper.lagging = [ZERO]
    server.replication.close_only(set())
    at_once(server.logged.looking())
    assert server.paper.lines[1:] == [("snapshot", ZERO, 0)]


def test_values_from_elsewhere_need_a_base() -> None:
    server = Server()
    server.see((ME, PLACED_EPOCH, ()))
    primary = server.replication.primaries[ZERO]
    primary.close()
    primary.replaced(is_last=False)
    at_once(server.logged.looking())
    assert server.paper.lines == [("begin", 0, 0)]  # more comes
    primary.replaced(is_last=True)
    record = server.decide()
    assert server.says(record) == []
    at_once(server.logged.looking())
    assert server.paper.lines == [("begin", 0, 0), ("snapshot", 0, record.number)]
    assert server.says(record) == ["done"]


def test_a_log_that_has_what_was_not_decided_is_a_bug() -> None:
    server = Server()
    server.see((ME, PLACED_EPOCH, ()))
    with pytest.raises(InvariantViolation, match="LOG-1"):
        server.log().written(1)


@pytest.mark.parametrize(("primary", "lines"), [(ME, ["end", "begin"]), (OTHER, ["end"])])
def test_what_the_log_gave_back_of_a_range_that_was_placed_anew_is_ended(
    primary: NodeId, lines: list[str]
) -> None:
    """LOG-2: what it has is of removed tables."""
    server = Server()
    replica = Replica(ZERO, PLACED_EPOCH, LEASE_S, PLACED_EPOCH, {}, 11)
    server.replication.recover([replica])
    server.logged.recover([ZERO])
    server.see((primary, epoch(6), ()), begins_anew=True, placed_epoch=epoch(6))
    assert server.paper.lines == [(line, ZERO, 0) for line in lines]


def test_a_range_that_is_placed_anew_where_it_was_served_begins_anew() -> None:
    """LOG-2: the view in which nobody had it has passed this server by."""
    server = Server()
    server.see((ME, PLACED_EPOCH, ()))
    server.says(server.decide())
    server.see((ME, epoch(6), ()), begins_anew=True, placed_epoch=epoch(6))
    assert server.log().number == 0
    lines = [("begin", ZERO, 0), ("record", ZERO, 1), ("end", ZERO, 0), ("begin", ZERO, 0)]
    assert server.paper.lines == lines
