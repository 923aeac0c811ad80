"""Every Prometheus metric of pushpull: one class a role, one help text a metric.

Labels are bounded: roles, outcomes, error codes. A worker's name is never one, and a table's only
for tables whose bound of staleness moves; `pushpull status` shows GetRangeStats' per-table figures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ps_runtime.system.turns import TurnMeter

_LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0,
)  # fmt: skip
_STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures (memory, CPU, file descriptors, Python)."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class LoopCounter(Collector):
    """A Counter without locks, for each block or call: only the loop's thread counts or scrapes."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._count = 0
        self._count_elsewhere: Callable[[], int] | None = None
        self._name = name
        self._documentation = documentation
        registry.register(self)

    def inc(self, amount: int = 1) -> None:
        self._count += amount

    def set_function(self, count: Callable[[], int]) -> None:
        """Show what `count` returns at each scrape; `inc` then has no effect."""
        self._count_elsewhere = count

    @property
    def count(self) -> int:
        return self._count if self._count_elsewhere is None else self._count_elsewhere()

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._documentation, self.count)


class LoopHistogram(Collector):
    """A Histogram without locks, for events of every block: only the event loop's thread observes
    and scrapes. An observation costs a fifth of Histogram's 0.7 us.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float] = _LATENCY_BUCKETS_S,
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        names = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)


class NodeMetrics:
    """Metrics of every node that is registered with a scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self.view_number = gauge(
            "pushpull_node_view_number", "The cluster view that the node acts on."
        )
        self.scheduler_contact_age_seconds = gauge(
            "pushpull_node_scheduler_contact_age_seconds",
            "Seconds since the scheduler last answered the node.",
        )

    def watch(self, view_number: Callable[[], int], contact_age_s: Callable[[], float]) -> None:
        """Show what both functions return at each scrape."""
        self.view_number.set_function(view_number)
        self.scheduler_contact_age_seconds.set_function(contact_age_s)


class TurnMetrics:
    """Metrics of the turns of a node's event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loop_counter = partial(LoopCounter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.longest_turn_seconds = gauge(
            "pushpull_node_longest_turn_seconds",
            "Longest turn of the event loop in the last minute or two, measured by the delay of a "
            "timer. A lease is missed after long turns.",
        )
        self.long_turns = loop_counter(
            "pushpull_node_long_turns_total",
            "Turns of the event loop that were longer than MAX_TURN_S.",
        )

    def watch(self, meter: TurnMeter) -> None:
        """Show the figures of `meter` at each scrape."""
        self.longest_turn_seconds.set_function(lambda: meter.longest_s)
        self.long_turns.set_function(lambda: meter.long_count)


class SchedulerMetrics:
    """Metrics of a scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        counter = partial(Counter, registry=registry)
        self.view_number = gauge("pushpull_scheduler_view_number", "The newest cluster view.")
        self.nodes = gauge(
            "pushpull_scheduler_nodes",
            "Nodes that have registered, by role and state (alive, silent, left, gone).",
            ("role", "state"),
        )
        self.tables = gauge("pushpull_scheduler_tables", "Tables.")
        self.heartbeats = counter(
            "pushpull_scheduler_heartbeats_total", "Heartbeats answered, by role.", ("role",)
        )
        self.ranges = gauge(
            "pushpull_scheduler_ranges",
            "Ranges with values, by how many of their replicas are missing: 0 is none; if all are "
            "missing, no server serves the range.",
            ("missing_replicas",),
        )
        self.lost_ranges = gauge(
            "pushpull_scheduler_lost_ranges",
            "Ranges whose values are on no server that is present or may come back.",
        )
        self.failovers = counter(
            "pushpull_scheduler_failovers_total",
            "Failovers, counted once for each range: a backup became the primary.",
        )
        self.hand_overs = counter(
            "pushpull_scheduler_hand_overs_total",
            "Hand-overs, counted once for each range: a primary gave it to a backup, so that "
            "primaries are spread evenly.",
        )
        self.staleness_bound = gauge(
            "pushpull_scheduler_staleness_bound",
            "Current bound of staleness of a table whose bound moves (ssp:LEAST..MOST).",
            ("table",),
        )
        self.refusals = counter(
            "pushpull_scheduler_refusals_total", "Calls refused, by the error's code.", ("code",)
        )
        self.checkpoints = counter(
            "pushpull_scheduler_checkpoints_total",
            "Checkpoints that ended, by result: complete or failed.",
            ("result",),
        )
        self.journal_not_written = gauge(
            "pushpull_scheduler_journal_not_written",
            "1: the journal takes no write for now, so nothing new is decided.",
        )
        self.data_shards = counter(
            "pushpull_scheduler_data_shards_total",
            "Shards of data sets, by what became of them: issued, done, or returned by a worker "
            "that left or is gone, to be issued again.",
            ("event",),
        )
        self.checkpoint_bytes = gauge(
            "pushpull_scheduler_checkpoint_bytes", "Bytes of the newest complete checkpoint."
        )
        self.checkpoint_age_seconds = gauge(
            "pushpull_scheduler_checkpoint_age_seconds",
            "Seconds since the newest checkpoint was complete; before the first, since the start.",
        )


class ServerMetrics:
    """Metrics of a parameter server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loop_histogram = partial(LoopHistogram, registry=registry)
        self.push_duration_seconds = loop_histogram(
            "pushpull_server_push_duration_seconds",
            "From the arrival of an entry to its COMMITTED reply; under BSP with the wait for the "
            "other workers.",
        )
        self.pull_duration_seconds = loop_histogram(
            "pushpull_server_pull_duration_seconds",
            "From the arrival of a pull to its last block, waits included.",
        )
        self.apply_duration_seconds = loop_histogram(
            "pushpull_server_apply_duration_seconds",
            "Optimizer time of one update of one range of a table.",
        )
        self.staleness_updates = loop_histogram(
            "pushpull_server_staleness_updates",
            "Others' updates to a block between a worker's pull and its push (ASP).",
            buckets=_STALENESS_BUCKETS,
        )
        self._count(registry)
        self._level(registry)

    def _count(self, registry: CollectorRegistry) -> None:
        loop_counter = partial(LoopCounter, registry=registry)
        counter = partial(Counter, registry=registry)
        self.received_bytes = loop_counter(
            "pushpull_server_received_bytes_total", "Payload bytes received."
        )
        self.sent_bytes = loop_counter("pushpull_server_sent_bytes_total", "Payload bytes sent.")
        self.unchanged_bytes = loop_counter(
            "pushpull_server_unchanged_bytes_total",
            "Payload bytes of pulled blocks that were not sent, since the caller had their values.",
        )
        self.applied_updates = loop_counter(
            "pushpull_server_applied_updates_total",
            "Updates applied, counted once for each range of a table.",
        )
        self.short_updates = loop_counter(
            "pushpull_server_short_updates_total",
            "BSP updates applied without the step of a worker that was declared gone, counted once "
            "for each range of a table.",
        )
        self.failed_updates = counter(
            "pushpull_server_failed_updates_total",
            "Updates that could not be computed; each one's table has failed on this server.",
        )
        self.entries = counter(
            "pushpull_server_entries_total",
            "Pushes and seals that have ended, by outcome.",
            ("outcome",),
        )
        self.resent_entries = loop_counter(
            "pushpull_server_resent_entries_total",
            "Entries that had been received before and were answered from the ledger.",
        )
        self.evicted_rows = loop_counter(
            "pushpull_server_evicted_rows_total", "Rows of embedding tables that were evicted."
        )
        self.fetched_rows = loop_counter(
            "pushpull_server_fetched_rows_total", "Rows that were read from the disk."
        )
        self.written_rows = loop_counter(
            "pushpull_server_written_rows_total", "Rows that were written to the disk."
        )
        self.quota_refusals = counter(
            "pushpull_server_quota_refusals_total",
            "Entries refused or given back because staging memory is over quota.",
        )
        self.errors = counter(
            "pushpull_server_errors_total", "Errors answered, by code.", ("code",)
        )

    def _level(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self.gate_bytes = gauge(
            "pushpull_server_gate_bytes",
            "Bytes of staging memory in use: sums and steps not yet applied.",
        )
        self.state_bytes = gauge(
            "pushpull_server_state_bytes", "Bytes of parameters and optimizer state."
        )
        self.rows = gauge("pushpull_server_rows", "Rows of embedding tables.")
        self.candidate_rows = gauge(
            "pushpull_server_candidate_rows",
            "Ids of embedding tables that have had too few gradients to be rows.",
        )
        self.disk_rows = gauge(
            "pushpull_server_disk_rows", "Rows of embedding tables that are not in memory."
        )
        self.parked_pulls = gauge(
            "pushpull_server_parked_pulls",
            "Range reads of pulls that wait, by cause (initial_values, own_step, ...).",
            ("cause",),
        )
        self.pull_wait_seconds = Histogram(
            "pushpull_server_pull_wait_seconds",
            "Wait of a range read of a pull that could not be answered at once, by cause.",
            ("cause",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.primary_ranges = gauge(
            "pushpull_server_primary_ranges", "Ranges that the server is primary of."
        )
        self.backup_ranges = gauge(
            "pushpull_server_backup_ranges", "Ranges that the server backs up for another."
        )
        self.values_kept = gauge(
            "pushpull_server_values_kept", "1: it keeps a lost cluster's values."
        )
        self.held_decisions = gauge(
            "pushpull_server_held_decisions",
            "Decisions that some in-sync backup has not acknowledged: no client has seen them.",
        )
        self.peer_queue_bytes = gauge(
            "pushpull_server_peer_queue_bytes", "Bytes that wait to be written to other servers."
        )
        self.update_log_bytes = gauge(
            "pushpull_server_update_log_bytes",
            "Bytes of the update log; withheld segments and what waits to be written count, too.",
        )
        self.update_log_queue_bytes = gauge(
            "pushpull_server_update_log_queue_bytes",
            "Bytes that wait to be written to the update log.",
        )
        self.sessions = gauge("pushpull_server_sessions", "Sessions that have been opened.")
        self.shm_sessions = gauge(
            "pushpull_server_shm_sessions",
            "Sessions on this host that share memory with the server.",
        )
        self.stream_connections = gauge(
            "pushpull_server_stream_connections", "Connections to the stream port."
        )


class WorkerMetrics:
    """Metrics of a worker or reader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loop_histogram = partial(LoopHistogram, registry=registry)
        loop_counter = partial(LoopCounter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        counter = partial(Counter, registry=registry)
        self.pushed_bytes = loop_counter(
            "pushpull_worker_pushed_bytes_total", "Payload bytes sent, resends included."
        )
        self.pulled_bytes = loop_counter(
            "pushpull_worker_pulled_bytes_total", "Payload bytes received."
        )
        self.unchanged_bytes = loop_counter(
            "pushpull_worker_unchanged_bytes_total",
            "Payload bytes of pulled blocks that did not come, since the client had their values.",
        )
        self.steps = loop_counter("pushpull_worker_steps_total", "Steps sealed, of all tables.")
        self.step_duration_seconds = loop_histogram(
            "pushpull_worker_step_duration_seconds",
            "From the first push of a step to the end of its first pull.",
        )
        self.pull_duration_seconds = loop_histogram(
            "pushpull_worker_pull_duration_seconds",
            "From a pull's call to its last block, waits included.",
        )
        self.cache_hits = counter(
            "pushpull_worker_cache_hits_total",
            "Distinct rows of batches that caches of Embeddings had (cache_rows).",
        )
        self.cache_misses = counter(
            "pushpull_worker_cache_misses_total",
            "Distinct rows of batches that caches of Embeddings did not have, or only too old.",
        )
        self.resent_entries = counter(
            "pushpull_worker_resent_entries_total",
            "Entries sent again, by the reason's error code.",
            ("code",),
        )
        self.rejected_blocks = loop_counter(
            "pushpull_worker_rejected_blocks_total", "Blocks that servers rejected as too stale."
        )
        self.recomputed_blocks = counter(
            "pushpull_worker_recomputed_blocks_total",
            "Blocks that were too stale and that step(closure) computed anew, counted each time.",
        )
        self.abandoned_blocks = counter(
            "pushpull_worker_abandoned_blocks_total",
            "Blocks that were still too stale when step(closure) gave them up.",
        )
        self.fallen_back_blocks = counter(
            "pushpull_worker_fallen_back_blocks_total",
            "Blocks pushed in int8, since what push_codec left out had outgrown the gradients.",
        )
        self.discarded_steps = loop_counter(
            "pushpull_worker_discarded_steps_total",
            "Steps that some update does not include (backup workers).",
        )
        self.lanes = gauge(
            "pushpull_worker_lanes",
            "Servers that the clients of this process reach, by lane (shm, grpc).",
            ("lane",),
        )
        self.window_bytes = gauge(
            "pushpull_worker_window_bytes",
            "Payload bytes sent to all servers and not yet RECEIVED.",
        )
