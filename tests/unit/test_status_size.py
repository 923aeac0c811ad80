"""The scheduler's status is an answer that any client accepts."""

from __future__ import annotations

import pytest

from ps_core import limits
from pushpull.v1 import scheduler_pb2 as pb
from scheduler.edge.servicer import fitted


def _status(node_count: int, table_count: int, loop_count: int) -> pb.GetClusterStatusResponse:
    said = pb.NodeProgress(
        tables=[pb.TableProgress(table_id=each, clock=1 << 20) for each in range(table_count)],
        loop=pb.LoopProgress(
            tables=[
                pb.LoopTable(table_id=each, clock=1 << 20, place=1 << 20)
                for each in range(loop_count)
            ],
        ),
    )
    return pb.GetClusterStatusResponse(
        nodes=[pb.NodeStatus(progress=said) for _ in range(node_count)]
    )


@pytest.mark.parametrize(
    ("size", "has_loops", "has_clocks"),
    [
        ((10, 20, 20), True, True),
        ((1_000, 256, 256), False, True),
        ((400, 2_000, 256), False, False),
    ],
)
def test_where_loops_are_is_left_out_before_the_clocks(
    size: tuple[int, int, int], has_loops: bool, has_clocks: bool
) -> None:
    response = fitted(_status(*size))
    assert response.ByteSize() <= limits.FOREIGN_MAX_MESSAGE_BYTES
    progress = response.nodes[0].progress
    assert (progress.HasField("loop"), bool(progress.tables)) == (has_loops, has_clocks)
