"""The pacing of replication: a backup whose stream takes nothing is left out, a slow one is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.table import Table
from ps_server.ranges.range_copy import RangeDelta, fresh_copy
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.messages import Ack, Grant
from ps_server.replication.peer_pacing import BEATS_A_LEASE, PeerPacing
from ps_server.replication.peer_queues import PeerQueues
from ps_server.replication.range_roles import PLACED_EPOCH, Replication
from tests.unit.machine_harness import make_table

LEASE_S = 3.0
LAG_S = 5 * LEASE_S
TICK_S = LEASE_S / BEATS_A_LEASE
ONE, TWO = NodeId(1), NodeId(2)
LATE, BUSY = RangeId(0), RangeId(1)
TABLE: Table = make_table()
COUNT = 100
"""Messages that wait for the stream, and records of the busy range."""


class Primary:
    """A server whose stream to its backup is full; the range LATE has a record there."""

    def __init__(self) -> None:
        self.queues: PeerQueues[str] = PeerQueues()
        self.queue = self.queues.add(TWO)
        self.queue.is_open = True
        self.replication = Replication(ONE, ServerMachine(ONE, 1), LEASE_S)
        self.pacing = PeerPacing(self.replication, LEASE_S, self.queues)
        epoch = AssignmentEpoch(PLACED_EPOCH)
        ranges = tuple(
            RangeAssignment(RangeId(i), slots, epoch, ONE, (TWO,), (), (ONE, TWO))
            for i, slots in enumerate(key_ranges(2))
        )
        self.replication.observe(ClusterView(1, "c", 1, 3, (), ranges, ()), 0.0)
        self.replication.serve(0.0)
        self.acked_count = 0
        for range_id, count in ((LATE, 1), (BUSY, COUNT)):
            delta = RangeDelta(fresh_copy(TABLE, range(4)).facts, (), (), ())
            for _ in range(count):
                self.replication.primaries[range_id].log.decide(TableId(1), delta, (), [])
        for _ in range(COUNT):
            self.queue.put("a record", 1_000_000)

    def acknowledge(self) -> None:
        self.acked_count += 1
        self.hear_again()

    def hear_again(self) -> None:
        """An acknowledgement that says nothing new."""
        ack = Ack(BUSY, self.acked_count, AssignmentEpoch(PLACED_EPOCH))
        self.replication.acked(TWO, ack, 0.0)

    def left_out_s(self, until_s: float, happens: Callable[[], object], every_s: float) -> float:
        """When it first asks for LATE to be without its backup, which grants every beat."""
        next_s = now_s = 0.0
        while now_s < until_s:
            now_s += TICK_S
            if now_s >= next_s:
                next_s += every_s
                happens()
            self.pacing.late(now_s)
            due = self.pacing.beats(now_s)
            for request in () if due is None else due.backup_requests:
                if request.range_id == LATE and not request.backups:
                    return now_s
            self.replication.granted(TWO, Grant(now_s, (LATE, BUSY)), now_s)
        raise TimeoutError(f"not asked for in {until_s} s")


@pytest.mark.parametrize("happens", ["nothing", "an old acknowledgement"])
def test_a_backup_whose_stream_takes_nothing_is_left_out_though_it_grants_beats(
    happens: str,
) -> None:
    """Its work queue is stuck, as on a disk that hangs, and its beats are not."""
    primary = Primary()
    actions = {"nothing": lambda: None, "an old acknowledgement": primary.hear_again}
    asked_s = primary.left_out_s(3 * LAG_S, actions[happens], TICK_S)
    assert LAG_S <= asked_s <= LAG_S + 3 * TICK_S


@pytest.mark.parametrize("happens", ["takes a message", "acknowledges another range"])
def test_a_backup_that_makes_slow_progress_is_not_left_out(happens: str) -> None:
    """It takes in a copy of gigabytes, and the record waits behind that."""
    primary = Primary()
    actions: dict[str, Callable[[], object]] = {
        "takes a message": primary.queue.take,
        "acknowledges another range": primary.acknowledge,
    }
    with pytest.raises(TimeoutError):
        primary.left_out_s(4 * LAG_S, actions[happens], LAG_S - LEASE_S)


def test_a_backup_that_stops_after_progress_has_the_whole_time_again() -> None:
    primary = Primary()
    left = iter(range(10))

    def takes_for_a_while() -> None:
        if next(left, None) is not None:
            primary.queue.take()

    asked_s = primary.left_out_s(4 * LAG_S, takes_for_a_while, LEASE_S)
    assert 9 * LEASE_S + LAG_S <= asked_s <= 9 * LEASE_S + LAG_S + 3 * TICK_S
