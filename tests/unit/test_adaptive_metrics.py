"""The scheduler's metrics of bounds that move."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from ps_core.cluster_view import Role
from ps_core.consistency import parsed
from ps_runtime.observe.metrics import SchedulerMetrics
from scheduler.edge.adaptive_tables import AdaptiveTables
from tests.unit.cluster_harness import SPEC, Harness


def test_a_restored_cluster_shows_no_bound_of_the_cluster_before() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    name, labels = "pushpull_scheduler_staleness_bound", {"table": SPEC.name}
    harness = Harness(server_count=1, worker_count=1)
    harness.join(Role.SERVER)
    adaptive = replace(SPEC, consistency=parsed("ssp:1..4"))
    harness.create(harness.join(Role.WORKER), adaptive)
    AdaptiveTables(1.0, metrics, {}).observe(harness.cluster.view)
    assert registry.get_sample_value(name, labels) is not None
    AdaptiveTables(1.0, metrics, {}).observe(Harness().cluster.view)
    assert registry.get_sample_value(name, labels) is None
