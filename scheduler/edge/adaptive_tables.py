"""The edge of tables with an adaptive bound: reports of nodes in, change requests out."""

from __future__ import annotations

from collections.abc import Mapping

from ps_core.cluster_view import ClusterView
from ps_core.keys import NodeId, TableId
from ps_core.losses import LossTotals
from ps_runtime.observe.metrics import SchedulerMetrics
from pushpull.v1 import scheduler_pb2
from scheduler.machine.adaptation import Adaptation, CourseRecord, Report
from scheduler.machine.changes import ChangeRequest

DEADLINE_S = 2.0
"""Time for the servers to prepare a move, in seconds. It is short because prepared servers hold
workers back meanwhile; a withdrawn move is decided again one interval later."""


class AdaptiveTables:
    """Requests moves of adaptive bounds; `records` are the courses of an earlier scheduler."""

    def __init__(
        self, interval_s: float, metrics: SchedulerMetrics, records: Mapping[TableId, CourseRecord]
    ) -> None:
        self._adaptation = Adaptation(interval_s, records)
        self._metrics = metrics
        metrics.staleness_bound.clear()  # a restore may have replaced the cluster that had some
        self._shown: set[str] = set()

    def observe(self, view: ClusterView) -> None:
        self._adaptation.observe(view)
        tables = {table.title: table for table in self._adaptation.tables}
        for name, table in tables.items():
            self._metrics.staleness_bound.labels(table=name).set(table.consistency.staleness)
        for name in self._shown - tables.keys():
            self._metrics.staleness_bound.remove(name)
        self._shown = set(tables)

    def heard(self, node_id: NodeId, said: scheduler_pb2.NodeProgress, now_s: float) -> None:
        if not self._adaptation.is_idle:
            self._adaptation.heard(node_id, _report(said, now_s))

    @property
    def courses(self) -> dict[TableId, CourseRecord]:
        return self._adaptation.courses

    def requests(self, now_s: float) -> list[ChangeRequest]:
        return [
            ChangeRequest(
                move.table_name, move.consistency, 0, now_s + DEADLINE_S, move.reason, move.run
            )
            for move in self._adaptation.look(now_s)
        ]


def _report(said: scheduler_pb2.NodeProgress, now_s: float) -> Report:
    losses = said.losses
    return Report(
        now_s,
        clocks={TableId(table.table_id): table.clock for table in said.tables},
        waits_s={
            (TableId(wait.table_id), NodeId(wait.node_id)): wait.waited_ms / 1000
            for wait in said.read_waits
        },
        losses=LossTotals(losses.count, losses.total, losses.square_total, losses.non_finite_count),
    )
