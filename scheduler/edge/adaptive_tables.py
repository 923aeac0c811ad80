"""Tables whose bound moves, at the scheduler's edge: what nodes say in, wishes for changes out.

Nodes are listened to only while there is such a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from ps_core.cluster_view import ClusterView
from ps_core.keys import NodeId, TableId
from ps_core.losses import LossTotals
from ps_runtime.observe.metrics import SchedulerMetrics
from pushpull.v1 import scheduler_pb2
from scheduler.machine.adaptation import Adaptation, KeptCourse, Report
from scheduler.machine.changes import ChangeRequest

DEADLINE_S = 2.0
"""How long servers have to promise a move: while one does not, the others hold back their workers,
and no bound is worth more than that. What was withdrawn is decided again a period later."""


class AdaptiveTables:
    """Says where bounds should move.

    Args:
        interval_s: how often a bound may move.
        metrics: where the bounds are shown.
        kept: what a scheduler before this one remembered of them.
    """

    def __init__(
        self, interval_s: float, metrics: SchedulerMetrics, kept: Mapping[TableId, KeptCourse]
    ) -> None:
        self._adaptation = Adaptation(interval_s, kept)
        self._metrics = metrics
        self._shown: set[str] = set()

    def observe(self, view: ClusterView) -> None:
        """The cluster has changed."""
        self._adaptation.observe(view)
        tables = {table.title: table for table in self._adaptation.tables}
        for name, table in tables.items():
            self._metrics.staleness_bound.labels(table=name).set(table.consistency.staleness)
        for name in self._shown - tables.keys():
            self._metrics.staleness_bound.remove(name)
        self._shown = set(tables)

    def heard(self, node_id: NodeId, said: scheduler_pb2.NodeProgress, now_s: float) -> None:
        """A node said how it does."""
        if not self._adaptation.is_idle:
            self._adaptation.heard(node_id, _report(said, now_s))

    @property
    def courses(self) -> dict[TableId, KeptCourse]:
        """What to remember of them."""
        return self._adaptation.courses

    def requests(self, now_s: float) -> list[ChangeRequest]:
        """The moves to be made now."""
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
