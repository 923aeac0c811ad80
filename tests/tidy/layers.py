"""Which layer each module is in, and what each layer may know.

L0 `ps_core` <- L1 the roles' machines <- L2 what touches the world <- L3 entry points. A new module
of a role is entered here by whoever adds it: a module without a layer is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.tidy.source import Finding, Source, imports_of

PURE_MODULES = {
    "ps_runtime.http2.bounds",
    "ps_runtime.http2.connection",
    "ps_runtime.http2.frames",
    "ps_runtime.http2.grpc_fields",
    "ps_runtime.http2.header_blocks",
    "ps_runtime.http2.memory",
    "ps_runtime.http2.output",
    "ps_runtime.http2.streams",
    "ps_server.block_values",
    "ps_server.buffer_pool",
    "ps_server.captures",
    "ps_server.copy_room",
    "ps_server.changes",
    "ps_server.collectives",
    "ps_server.contributions",
    "ps_server.custom_updates",
    "ps_server.delay",
    "ps_server.departure_machine",
    "ps_server.entry_rules",
    "ps_server.events",
    "ps_server.fail_stop",
    "ps_server.failed_update",
    "ps_server.kernel_fingerprint",
    "ps_server.log_segments",
    "ps_server.logged_ranges",
    "ps_server.optimizer_arrays",
    "ps_server.optimizers",
    "ps_server.part_copy",
    "ps_server.output_commit",
    "ps_server.peer_pacing",
    "ps_server.peer_queues",
    "ps_server.primary",
    "ps_server.range_log",
    "ps_server.range_machine",
    "ps_server.range_state",
    "ps_server.read_gate",
    "ps_server.read_waits",
    "ps_server.records",
    "ps_server.replica",
    "ps_server.replication",
    "ps_server.replication_messages",
    "ps_server.restored_ranges",
    "ps_server.room",
    "ps_server.schedule",
    "ps_server.server_machine",
    "ps_server.shard_store",
    "ps_server.store_copy",
    "ps_server.sums",
    "ps_server.table_room",
    "ps_server.update_arithmetic",
    "ps_server.update_check",
    "ps_server.forming",
    "ps_server.update_gate",
    "ps_server.update_log_frames",
    "ps_server.update_scales",
    "ps_server.versions",
    "ps_server.work_queue",
    "ps_worker.clipping",
    "ps_worker.collective_rounds",
    "ps_worker.collective_values",
    "ps_worker.counters",
    "ps_worker.cutting",
    "ps_worker.epoch_plan",
    "ps_worker.flat_layout",
    "ps_worker.local_optimizer",
    "ps_worker.optimizers",
    "ps_worker.pending",
    "ps_worker.push_entries",
    "ps_worker.push_window",
    "ps_worker.ring",
    "ps_worker.settings",
    "ps_worker.state_values",
    "ps_worker.step_scale",
    "ps_worker.straggler",
    "ps_worker.training_options",
    "ps_worker.values",
    "scheduler.adaptation",
    "scheduler.admission",
    "scheduler.changes",
    "scheduler.checkpoint_state",
    "scheduler.checkpoints",
    "scheduler.cluster",
    "scheduler.cluster_state",
    "scheduler.configurations",
    "scheduler.departures",
    "scheduler.kept_values",
    "scheduler.membership",
    "scheduler.ownership",
    "scheduler.placement",
    "scheduler.server_memory",
    "scheduler.spec_difference",
    "scheduler.store.record_values",
    "scheduler.store.records",
    "scheduler.store.state_store",
    "scheduler.store.untold",
    "scheduler.tables",
    "scheduler.update_offers",
    "scheduler.view_size",
}
"""L1: they decide; time, randomness and input are arguments, and what to do is returned."""

EDGE_MODULES = {
    "ps_server",
    "ps_server.change_doubts",
    "ps_server.departure",
    "ps_server.checkpoint_parts",
    "ps_server.copy_memory",
    "ps_server.config",
    "ps_server.decision_wire",
    "ps_server.frames",
    "ps_server.installed_updates",
    "ps_server.intake",
    "ps_server.kept_log",
    "ps_server.lanes",
    "ps_server.encoded_log",
    "ps_server.log_follower",
    "ps_server.lent_values",
    "ps_server.value_homes",
    "ps_server.node",
    "ps_server.shards",
    "ps_server.promises",
    "ps_server.replication_reader",
    "ps_server.replication_wire",
    "ps_server.backup_wishes",
    "ps_server.peer_links",
    "ps_server.replicated_ranges",
    "ps_server.replication_service",
    "ps_server.reads",
    "ps_server.readings",
    "ps_server.replay",
    "ps_server.restored_values",
    "ps_server.run_log",
    "ps_server.collective_calls",
    "ps_server.servicer",
    "ps_server.snapshot_wire",
    "ps_server.sessions",
    "ps_server.stats",
    "ps_server.stream_reads",
    "ps_server.streams",
    "ps_server.unread",
    "ps_server.update_log",
    "ps_server.update_log_directory",
    "ps_server.update_log_reader",
    "ps_server.works",
    "ps_server.written_blocks",
    "ps_worker",
    "ps_worker.buffers",
    "ps_worker.catalogue",
    "ps_worker.checkpoint_link",
    "ps_worker.checkpoint_verbs",
    "ps_worker.client",
    "ps_worker.collective_link",
    "ps_worker.collectives",
    "ps_worker.config",
    "ps_worker.common_model",
    "ps_worker.connection",
    "ps_worker.consistent_pulls",
    "ps_worker.device_copies",
    "ps_worker.data_parallel",
    "ps_worker.distributed_optimizer",
    "ps_worker.distributed_sampler",
    "ps_worker.edits",
    "ps_worker.engine",
    "ps_worker.entry_stream",
    "ps_worker.interrupts",
    "ps_worker.lane",
    "ps_worker.link_trouble",
    "ps_worker.links",
    "ps_worker.local_cluster",
    "ps_worker.imported_model",
    "ps_worker.loop",
    "ps_worker.measures",
    "ps_worker.model_pull",
    "ps_worker.on_ray",
    "ps_worker.open_clients",
    "ps_worker.optimizer_state",
    "ps_worker.outbox",
    "ps_worker.planned_edits",
    "ps_worker.pulls",
    "ps_worker.pushes",
    "ps_worker.random_state",
    "ps_worker.save_points",
    "ps_worker.server_calls",
    "ps_worker.served_state",
    "ps_worker.saved_states",
    "ps_worker.shared_buffers",
    "ps_worker.shown_options",
    "ps_worker.staging",
    "ps_worker.step_record",
    "ps_worker.steps",
    "ps_worker.succession",
    "ps_worker.table_handle",
    "ps_worker.tickets",
    "ps_worker.torch_groups",
    "ps_worker.trained_model",
    "ps_worker.update_scaling",
    "ps_worker.trained_table",
    "scheduler",
    "scheduler.adaptive_tables",
    "scheduler.checkpointing",
    "scheduler.config",
    "scheduler.publication",
    "scheduler.requests",
    "scheduler.restoring",
    "scheduler.servicer",
    "scheduler.start",
    "scheduler.store",
    "scheduler.store.sqlite_store",
    "scheduler.transition_lines",
}
"""L2 of the roles; all of `ps_runtime` is L2 too."""

ENTRY_MODULES = {"__main__", "process"}
"""L3 of the roles; `process` is what `__main__` runs, where that has to prepare the imports."""

ROLES = ("scheduler", "ps_server", "ps_worker")

REPLAY = "ps_server.replay"
"""What the command line may know of servers: it makes again what they made, and serves nobody."""

IMPURE = {
    "asyncio", "ctypes", "datetime", "grpc", "google", "http", "io", "logging", "multiprocessing",
    "os", "pathlib", "prometheus_client", "pushpull", "queue", "secrets", "select", "shutil",
    "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
    "uvloop", "concurrent", "fcntl", "mmap", "rich", "typer", "random",
}  # fmt: skip
"""What L0 and L1 never import."""

PURE_EXCEPTIONS = {"random.Random", "sys.byteorder", "urllib.parse.unquote_to_bytes"}
"""The type of a generator that is passed in, a constant, and a function of its argument alone."""


def layer_of(module: str) -> int | None:
    """The layer of a shipped module, or None where nobody has said."""
    package, _, rest = module.partition(".")
    if package == "ps_core":
        return 0
    if package in ("ps_cli", "pushpull") or rest in ENTRY_MODULES:
        return 3
    if module in PURE_MODULES or module.rpartition(".")[0] in PURE_MODULES:  # or a name of one
        return 1
    if package == "ps_runtime" or module in EDGE_MODULES:
        return 2
    return None


def check_layers(source: Source) -> Iterator[Finding]:
    """Imports point down only, roles never import each other, and L0 and L1 know no world."""
    if not source.is_shipped:
        return
    layer = layer_of(source.module)
    if layer is None:
        yield Finding(source.path, 1, f"{source.module} has no layer in tests/tidy/layers.py")
        return
    for imported in imports_of(source):
        for message in _breaches(source, layer, imported.module, imported.dotted):
            yield Finding(source.path, imported.line, message)


def _breaches(source: Source, layer: int, module: str, dotted: str) -> Iterator[str]:
    root = module.split(".", maxsplit=1)[0]
    if layer <= 1 and root in IMPURE and dotted not in PURE_EXCEPTIONS:
        yield f"L{layer} imports {dotted}, which touches the world"
    if layer == 0 and root == "torch":
        yield "L0 imports torch; it knows the standard library and numpy"
    if source.package == "scheduler" and root == "torch":
        yield "the scheduler imports torch"
    if root in ROLES and source.package in ROLES and root != source.package:
        yield f"role {source.package} imports role {root}"
    if source.package == "ps_runtime" and root in (*ROLES, "ps_cli"):
        yield f"the edge imports {root}, which stands above it"
    if source.package == "ps_cli" and root in ("scheduler", "ps_server") and module != REPLAY:
        yield f"the command line imports {dotted}; it starts that role as a process"
    if source.package == "ps_cli" and module.startswith("ps_worker."):
        yield f"the command line imports {dotted}; it may know ps_worker's public names only"
    target = layer_of(dotted) if layer_of(dotted) is not None else layer_of(module)
    is_ours = root in ("ps_core", "ps_runtime", "ps_cli", *ROLES)
    if is_ours and target is not None and target > layer:
        yield f"L{layer} imports {dotted} of L{target}; imports point down"
