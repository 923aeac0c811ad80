"""What GetRangeStats answers, from the machine's state."""

from __future__ import annotations

from ps_server.service.node import ParameterNode
from pushpull.v1 import parameters_pb2


async def range_stats(node: ParameterNode, table_id: int) -> parameters_pb2.GetRangeStatsResponse:
    """Every range part of the table (0: of all tables), by table and range; each as it is when its
    turn comes.
    """
    now_s = node.now()
    response = parameters_pb2.GetRangeStatsResponse(gate_bytes=node.machine.gate_bytes)
    for place in sorted(place for place in node.machine.parts if table_id in (0, place[0])):
        await node.turns.breathe()
        part = node.machine.parts.get(place)
        if part is None:
            continue
        stats = response.ranges.add(
            range_id=place[1],
            table_id=place[0],
            assignment_epoch=node.machine.assignment_epoch(place[1]),
            clock=part.state.clock,
            block_count=len(part.state.blocks),
            state_bytes=node.shards.stores[place].state_bytes,
            update_count=part.state.update_count,
            waits=(*part.reads.waits(now_s), *part.state.gaps()),
            initialized=part.state.initialized,
            failure=part.state.failure.message if part.state.failure is not None else "",
        )
        for worker in part.state.worker_places():
            stats.workers.add(
                rank=worker.rank,
                incarnation=worker.incarnation,
                clock=worker.clock,
                low_water_sequence=worker.low_water,
                last_heard_ms=max(0, int((now_s - worker.last_heard_s) * 1000)),
                left=worker.left,
            )
    return response
