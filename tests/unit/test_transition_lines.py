"""What the scheduler's log says of replicas and of data: one line for each thing that happened."""

from __future__ import annotations

import logging

import pytest

from ps_core.cluster_view import Node, NodeState, Role
from ps_core.keys import Incarnation, NodeId, RangeId
from scheduler.edge.transition_lines import log_transition
from scheduler.machine.data_shards import DataShardsReturned
from scheduler.machine.state import BackupsSet, JoinersNamed, NodeLeft, RangesFailedOver, Transition

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)
LOST = "event=ranges_failed_over"
RETURNED = "event=data_shards_returned data_set=train"
RANGES = tuple(map(RangeId, range(5)))
WORKER = Node(THREE, Incarnation(8), Role.WORKER, 1, "", NodeState.GONE)


def server(state: NodeState, silence_ms: int = 0) -> Node:
    return Node(TWO, Incarnation(7), Role.SERVER, 0, "", state, silence_ms)


@pytest.mark.parametrize(
    ("transition", "lines"),
    [
        (
            RangesFailedOver(server(NodeState.SILENT), RANGES, ((ONE, 2), (THREE, 3))),
            [f"WARNING {LOST} state=silent role=server node_id=2 ranges=5 taken_by=1:2,3:3"],
        ),
        (
            RangesFailedOver(server(NodeState.LEFT), RANGES, ((ONE, 5),)),
            [f"INFO {LOST} state=left role=server node_id=2 ranges=5 taken_by=1:5"],
        ),
        (
            BackupsSet(ONE, RANGES, ((TWO, 5),), ()),
            ["WARNING event=backup_left_out node_id=2 primary=1 ranges=5"],
        ),
        (
            BackupsSet(ONE, RANGES, (), ((TWO, 1), (THREE, 4))),
            [
                "INFO event=backup_let_in node_id=2 primary=1 ranges=1",
                "INFO event=backup_let_in node_id=3 primary=1 ranges=4",
            ],
        ),
        (BackupsSet(ONE, RANGES, (), ()), ["INFO event=backups_confirmed primary=1 ranges=5"]),
        (
            JoinersNamed(((THREE, 5),), ((TWO, 4),)),
            [
                "INFO event=backup_joins node_id=3 ranges=5",
                "WARNING event=backup_joins_no_more node_id=2 ranges=4",
            ],
        ),
        (
            NodeLeft(server(NodeState.LEFT, 60_500), "given up"),
            ['WARNING event=node_left reason="given up" role=server node_id=2'],
        ),
        (
            DataShardsReturned(WORKER, "train", 3, 2),
            [f"WARNING {RETURNED} pass_number=3 shards=2 role=worker node_id=3 rank=1"],
        ),
    ],
)
def test_a_line_says_who_and_how_many(
    transition: Transition, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="pushpull"):
        log_transition(transition)
    assert [f"{record.levelname} {record.getMessage()}" for record in caplog.records] == lines
