"""What the streams between servers tell of their backlog, and of whose view is newer."""

from __future__ import annotations

import pytest

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, key_ranges
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.messages import Snapshot
from ps_server.replication.peer_queues import Backlog
from ps_server.replication.range_roles import Replication


def test_a_stream_that_takes_all_the_time_what_comes_all_the_time_is_not_slow() -> None:
    backlog = Backlog()
    for _ in range(5):
        backlog.put(100)
        backlog.look()
        assert backlog.queued_bytes
        assert not backlog.is_slow
        backlog.taken(100)


def test_what_has_waited_since_the_last_look_says_that_it_is_slow() -> None:
    backlog = Backlog()
    seen = []
    backlog.put(100)
    backlog.look()
    backlog.put(100)
    for taken in (99, 1, 100):  # of the first, its last, and the second
        backlog.taken(taken)
        backlog.look()
        seen.append(backlog.is_slow)
    assert seen == [True, True, False]
    assert not backlog.queued_bytes


@pytest.mark.parametrize(
    ("of_view", "of_snapshot", "knows"),
    [(None, 1, False), (1, 2, False), (2, 2, True), (3, 2, True)],
)
def test_whose_view_is_newer(of_view: int | None, of_snapshot: int, *, knows: bool) -> None:
    node_id = NodeId(1)
    replication = Replication(node_id, ServerMachine(node_id, 1), 1.0, 1, has_update_log=False)
    if of_view is not None:
        ((slots),) = key_ranges(1)
        epoch = AssignmentEpoch(of_view)
        ranges = (RangeAssignment(RangeId(0), slots, epoch, NodeId(2), catching_up=(node_id,)),)
        replication.observe(ClusterView(1, "c", 1, 2, (), ranges, ()), 1.0)
    snapshot = Snapshot(RangeId(0), AssignmentEpoch(of_snapshot), AssignmentEpoch(1), 0, {})
    assert replication.knows(snapshot) == knows
