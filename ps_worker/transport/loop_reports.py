"""Workers' reports of their training loops, in heartbeats and in the scheduler's status."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ps_core.cluster_view import Session
from ps_core.keys import Incarnation, TableId
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_worker.spec.loop_places import LoopPlace, LoopReport, LoopReports, TrainingLoop
from pushpull.v1 import scheduler_pb2, types_pb2

_MEMBERS = (types_pb2.NODE_STATE_ALIVE, types_pb2.NODE_STATE_SILENT)
"""A worker that is silent may go on, until it is declared gone."""

_MAX_TABLE_COUNT = 256
"""A loop with more tables is told without them: who joins is answered with all reports."""


def loop_to_proto(
    loop: TrainingLoop, sealed: Mapping[TableId, int]
) -> scheduler_pb2.LoopProgress | None:
    """The report of a loop whose worker has sealed these clocks; None before its first step."""
    place = loop.place
    if place is None:
        return None
    if len(loop.clocks) > _MAX_TABLE_COUNT:
        return scheduler_pb2.LoopProgress(in_turn=place.in_turn)
    return scheduler_pb2.LoopProgress(
        tables=[
            scheduler_pb2.LoopTable(
                table_id=table_id,
                clock=max(clock, sealed.get(table_id, 0)),
                place=place.clocks.get(table_id, 0),
            )
            for table_id, clock in loop.clocks.items()
        ],
        has_place=bool(place.clocks),
        in_turn=place.in_turn,
    )


def loop_from_proto(loop: scheduler_pb2.LoopProgress, *, is_alive: bool) -> LoopReport:
    tables = {TableId(table.table_id): table for table in loop.tables}
    places = {table_id: table.place for table_id, table in tables.items()}
    place = LoopPlace(places if loop.has_place else {}, loop.in_turn)
    sealed = {table_id: table.clock for table_id, table in tables.items()}
    return LoopReport(is_alive, sealed, place)


async def reports_of_others(
    link: SchedulerLink, late_joiners: Collection[Incarnation], end_s: float
) -> LoopReports:
    """The newest reports of the other workers of the run. Blocking: up to `end_s`.

    Raises:
        WaitExpired: the scheduler did not answer in time.
    """
    request = scheduler_pb2.GetClusterStatusRequest(session=link.identity)
    what = "the scheduler to say where the other workers are"
    status = await link.call("GetClusterStatus", request, what, end_s)
    return reports_in(status, link.session, late_joiners)


def reports_in(
    status: scheduler_pb2.GetClusterStatusResponse,
    own: Session,
    late_joiners: Collection[Incarnation],
) -> LoopReports:
    """The reports of the other workers of a session's run in the scheduler's status."""
    told, all_have_told = [], True
    for each in status.nodes:
        node, is_alive = each.node, each.node.state in _MEMBERS
        is_worker = node.role == types_pb2.NODE_ROLE_WORKER and node.run == own.run
        if not is_worker or node.node_id == own.node_id:
            continue
        if each.progress.HasField("loop"):
            told.append(loop_from_proto(each.progress.loop, is_alive=is_alive))
        elif is_alive and node.incarnation not in late_joiners:
            all_have_told = False
    return LoopReports(told, all_have_told)
