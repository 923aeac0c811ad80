"""The process of one parameter server: what `pushpull server` runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.errors import (
    Fenced,
    ForeignCluster,
    Internal,
    InvalidCheckpoint,
    InvalidConfig,
    PushpullError,
    Unauthenticated,
)
from ps_runtime.checkpoint.calls import report_part
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.cluster import kept_values
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.grpc import channels
from ps_runtime.grpc.addresses import join_address, split_address
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.http2.server import StreamServer
from ps_runtime.launch import shutdown
from ps_runtime.launch.ready_file import write_ready_file
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import NodeMetrics, ServerMetrics, new_registry
from ps_runtime.settings import config
from ps_runtime.system import capacity, clock
from ps_runtime.system.background import switch_often
from ps_runtime.system.collector import Collector
from ps_runtime.system.trimming import trim_often
from ps_server.checkpoint.checkpoint_parts import CheckpointParts
from ps_server.checkpoint.restored_values import RestoredValues
from ps_server.config import ServerConfig, parser
from ps_server.installed_updates import installed_updates
from ps_server.lane.lane_socket import SharedLanes
from ps_server.lane.shards import Shards
from ps_server.peers.node_replication import ReplicationSetting
from ps_server.ranges.read_gate import WaitCause
from ps_server.service import replication_service
from ps_server.service import servicer as parameter_service
from ps_server.service.change_doubts import ChangeDoubts
from ps_server.service.departure import REASON, until_kept
from ps_server.service.node import ParameterNode
from ps_server.service.replication_service import ReplicationServicer
from ps_server.service.scheduler_requests import BackupRequests, PrepareReports
from ps_server.service.servicer import FEATURES, ParameterServicer, ViewAtLeast
from ps_server.update_log.recovery import RecoveredLog, open_log
from ps_server.update_log.writer import LogSetting
from ps_server.values.kernel_fingerprint import kernel_fingerprint
from pushpull.v1 import scheduler_pb2, types_pb2

_TICK_S = 0.1
_LEAST_TICK_S = 0.001
_LEAST_GRACE_S = 0.5

_FAILED = 1
_REFUSED = 2
"""Exit codes. After the second one a restart with the same settings would change nothing."""


def main() -> None:
    """Run until told to stop, or until the cluster has finished."""
    settings = config.from_command_line(ServerConfig, parser())
    shutdown.die_with_parent_if_asked(os.environ)
    logs.configure("server", settings.log_level, settings.log_format)
    channels.tune_allocator()
    switch_often()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        channels.run(_serve(settings))
    except PushpullError as error:
        logs.error("failed", error=error.code, message=error.message)
        sys.exit(_REFUSED if isinstance(error, InvalidConfig | Unauthenticated) else _FAILED)


async def _serve(settings: ServerConfig) -> None:
    registry = new_registry()
    servicer, backups = ParameterServicer(), ReplicationServicer()
    server = await NodeServer.start(
        settings.listen,
        advertise=settings.advertise,
        http_listen=settings.http_listen,
        services=[
            (
                parameter_service.SERVICE,
                lambda grpc_server: parameter_service.add_to_server(servicer, grpc_server),
            ),
            (
                replication_service.SERVICE,
                lambda grpc_server: replication_service.add_to_server(backups, grpc_server),
            ),
        ],
        registry=registry,
    )
    streams = await _stream_port(settings, servicer, backups)
    stop = asyncio.create_task(shutdown.wait_for_stop_signal())

    def attach(node: ParameterNode, view_at_least: ViewAtLeast) -> None:
        servicer.attach(node, view_at_least)
        backups.attach(node)

    metrics, node_metrics = ServerMetrics(registry), NodeMetrics(registry)
    if streams is not None:
        metrics.stream_connections.set_function(lambda: streams.connection_count)

    async def run() -> None:
        """Run again each time that the cluster begins anew."""
        while True:
            try:
                await _run(settings, server, attach, (metrics, node_metrics), stop)
            except Fenced as error:
                if not error.retry_after_ms and not isinstance(error, ForeignCluster):
                    raise
                logs.info("registering_again", reason=error.message)
                servicer.drain()
                gc.unfreeze()
            else:
                return
            gc.collect()

    running = asyncio.create_task(run())
    end_s = 0.0
    try:
        await asyncio.wait((stop, running), return_when=asyncio.FIRST_COMPLETED)
        is_orderly = running.done() or stop.result() == signal.SIGTERM
        grace_s = settings.drain_grace_s if is_orderly else _LEAST_GRACE_S
        end_s = clock.now_s() + grace_s
        if not running.done() and server.is_serving:  # it leaves, since it has seen the signal
            await asyncio.wait((running,), timeout=grace_s + _LEAST_GRACE_S)
        if running.done():
            running.result()
    finally:
        for task in (stop, running):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        servicer.drain()
        grace_s = max(end_s - clock.now_s(), _LEAST_GRACE_S)
        ends = [server.stop(grace_s)]
        if streams is not None:
            ends.append(streams.stop(grace_s))
        await asyncio.gather(*ends)


def _expecting(collector: Collector, node: ParameterNode) -> Callable[[ClusterView], None]:
    """Listener of views that tells the collector when this server holds other ranges."""
    held_count = len(node.shards.stores)

    def look(_: ClusterView) -> None:
        nonlocal held_count
        if len(node.shards.stores) != held_count:
            held_count = len(node.shards.stores)
            collector.expect()

    return look


async def _stream_port(
    settings: ServerConfig, servicer: ParameterServicer, backups: ReplicationServicer
) -> StreamServer | None:
    """Serve streams on a port of their own, and have clients and other servers hear of it."""
    if settings.stream_listen == "off":
        return None
    listen = settings.stream_listen
    if listen == "auto":
        listen = join_address(split_address(settings.listen, "listen")[0], 0)
    services = {
        parameter_service.SERVICE: parameter_service.handlers_of(servicer),
        replication_service.SERVICE: replication_service.handlers_of(backups),
    }
    streams = await StreamServer.start(listen, services)
    servicer.stream_port = backups.stream_port = streams.port
    logs.info("stream_port", port=streams.port)
    return streams


async def _run(
    settings: ServerConfig,
    server: NodeServer,
    attach: Callable[[ParameterNode, ViewAtLeast], None],
    measures: tuple[ServerMetrics, NodeMetrics],
    stop: asyncio.Task[signal.Signals],
) -> None:
    """Register, serve, and end when the cluster has finished or replaced this server, or when it
    is told to stop.
    """
    metrics, node_metrics = measures
    async with contextlib.AsyncExitStack() as stack:
        link, node = await _registered(settings, server.address, metrics, stack)
        _watch(link, node, metrics, node_metrics)
        stack.callback(trim_often(node.shards.pool))
        finished, failed, left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        waits: list[bool] = []  # not empty while `look` waits for its turn between works
        node.health.on_failure = partial(_note_failure, failed)
        votes = PrepareReports(
            lambda each: link.prepare_change(each.table_id, each.number, each.clock, each.outcome)
        )
        stack.callback(votes.close)
        doubts = ChangeDoubts(node, link.session)
        stack.push_async_callback(doubts.close)
        link.on_view.append(doubts.observe)
        link.before_view = node.prepare
        link.on_view.append(node.observe)
        restored = _keep_checkpoints(link, node, settings, stack)
        link.on_view.append(lambda _: node.works.between(lambda: votes.send(node.prepared_changes)))
        asked = _backup_requests(link, node, stack)
        link.on_view.append(lambda view: finished.set() if view.finished else None)
        link.on_view.append(partial(_say_if_ready, server, link, stop))
        attach(node, link.view_at_least)
        await _first_view(link, settings, stack)
        await _begin_to_serve(settings, server, link, node, stack)

        def tick() -> None:
            node.tick()
            if not node.works.is_busy:
                look()
            elif not waits:
                waits.append(True)
                node.works.between(look)

        def look() -> None:
            waits.clear()
            silent_s = clock.now_s() - link.last_scheduler_contact_s
            doubts.look(is_alone=silent_s > link.lease_s)
            restored.look()
            votes.send(node.prepared_changes)
            asked.request(node.replicas.backup_requests if node.replicas is not None else ())

        leaving = asyncio.create_task(_leave_when_told(stop, server, link, settings, left))
        stack.callback(leaving.cancel)
        try:
            ends = (finished, link.fenced, failed, left)
            await _until(ends, tick, lambda: node.ticks_within_s)
            if left.is_set():
                return
            if isinstance(link.fenced_by, ForeignCluster) and node.shards.stores:
                await _keep_values(settings, server.address, link, node, stack, (failed, left))
        finally:
            if node.health.failure is not None:
                raise Internal(
                    f"server {link.session.node_id} ends: what it decided could not be done "
                    f"({type(node.health.failure).__name__}: {node.health.failure})"
                ) from node.health.failure
        if link.fenced_by is not None:
            raise link.fenced_by
        logs.info("finished", reason="all workers have left")


def _backup_requests(
    link: SchedulerLink, node: ParameterNode, stack: contextlib.AsyncExitStack
) -> BackupRequests:
    """Carry the requests for backups to the scheduler."""
    asked = BackupRequests(lambda requests: link.set_backups(requests, link.lease_s))
    stack.callback(asked.close)
    if node.replicas is not None:
        node.replicas.ask = asked.request
    return asked


async def _begin_to_serve(
    settings: ServerConfig,
    server: NodeServer,
    link: SchedulerLink,
    node: ParameterNode,
    stack: contextlib.AsyncExitStack,
) -> None:
    collector = Collector()
    collector.start()
    stack.callback(collector.stop)
    link.on_view.append(_expecting(collector, node))
    server.set_serving(True)
    if settings.ready_file is not None:
        where = settings.ready_file, server.address, server.http_address
        await asyncio.to_thread(write_ready_file, *where)


async def _registered(
    settings: ServerConfig,
    address: str,
    metrics: ServerMetrics,
    stack: contextlib.AsyncExitStack,
) -> tuple[SchedulerLink, ParameterNode]:
    """Recover the update log, register, and make the node; `stack` ends all of it."""
    installed = await asyncio.to_thread(installed_updates)
    request = scheduler_pb2.RegisterNodeRequest(
        role=types_pb2.NODE_ROLE_SERVER,
        address=address,
        protocol_version=1,
        features=FEATURES,
        kernel_fingerprint=kernel_fingerprint(),
        cluster_id=settings.cluster_id,
        custom_updates=installed.to_proto(),
        memory=await asyncio.to_thread(_memory, settings.memory_mb * 2**20),
    )
    shards = Shards(SharedLanes(), installed.updates)
    stack.callback(shards.segments.close)
    stack.callback(shards.lanes.close)
    if settings.lane != "grpc":
        _open_lanes(shards.lanes, must=settings.lane == "shm")
    recovered = None
    if settings.update_log is not None:
        recovered = await open_log(
            settings.update_log, shards, request.kernel_fingerprint, settings.connect_deadline_s
        )
        stack.push_async_callback(asyncio.to_thread, recovered.directory.close)
        request.update_log.CopyFrom(recovered.claim())
    link = await SchedulerLink.connect(settings.scheduler, request, settings.connect_deadline_s)
    stack.push_async_callback(_leave, link)
    node = ParameterNode(
        link.session, link.token_key, link.worker_count, metrics, clock.now_s, shards
    )
    stack.callback(node.close)
    _replicate(link, node, recovered, settings, stack)
    return link, node


def _say_if_ready(
    server: NodeServer,
    link: SchedulerLink,
    stop: asyncio.Task[signal.Signals],
    view: ClusterView,
) -> None:
    """Set the server ready when it is catching up with no range."""
    count = sum(link.session.node_id in r.catching_up for r in view.ranges)
    if not stop.done():
        server.set_unready(f"{count} ranges are being brought up to date here" if count else "")


async def _leave_when_told(
    stop: asyncio.Task[signal.Signals],
    server: NodeServer,
    link: SchedulerLink,
    settings: ServerConfig,
    left: asyncio.Event,
) -> None:
    """Leave on SIGTERM when nothing is lost by that, on SIGINT at once."""
    number = await asyncio.shield(stop)
    logs.info("told_to_stop", signal=number.name)
    server.set_unready("told to stop")
    if number == signal.SIGTERM:
        await until_kept(link, clock.now_s() + settings.drain_grace_s)
    else:
        await link.deregister(REASON, deadline_s=1.0, loss_is_wanted=True)
    left.set()


def _memory(given_bytes: int) -> scheduler_pb2.ServerMemory:
    """Memory that tables may take here: as given, or a share of the system's."""
    if given_bytes:
        return scheduler_pb2.ServerMemory(byte_count=given_bytes)
    byte_count = int(capacity.memory_bytes() * limits.TABLE_MEMORY_SHARE)
    return scheduler_pb2.ServerMemory(byte_count=byte_count, pool=capacity.memory_pool())


async def _leave(link: SchedulerLink) -> None:
    await link.deregister(REASON, deadline_s=1.0)
    await link.close()


def _replicate(
    link: SchedulerLink,
    node: ParameterNode,
    recovered: RecoveredLog | None,
    settings: ServerConfig,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Replicate decisions to backups and the update log, where there are any."""
    if link.replica_count == 1 and recovered is None:
        return
    update_log = None
    if recovered is not None:
        recovered = recovered.of(link.session, node.shards)
        setting = LogSetting(settings.update_log_mb * 1_000_000, settings.update_log_sync)
        update_log = recovered.begin(link.session, link.range_count, setting)
    replicas = node.replicate(ReplicationSetting(link.lease_s, link.min_in_sync), update_log)
    stack.push_async_callback(replicas.close)
    if recovered is not None:
        replicas.recover(recovered.replicas)


def _keep_checkpoints(
    link: SchedulerLink,
    node: ParameterNode,
    settings: ServerConfig,
    stack: contextlib.AsyncExitStack,
) -> RestoredValues:
    """Load restored values, and write the parts of checkpoints."""
    restored = RestoredValues(node)
    stack.push_async_callback(restored.close)
    link.on_view.append(lambda view: node.works.between(partial(restored.observe, view)))
    rate_bytes_s = int(settings.checkpoint_rate_mb_s * 1e6)
    checkpoints = CheckpointParts(
        node,
        partial(report_part, link),
        rate_bytes_s,
        settings.checkpoint_buffer_mb * 2**20,
    )
    stack.push_async_callback(checkpoints.close)
    link.on_view.append(lambda view: node.works.between(partial(checkpoints.observe, view)))
    return restored


async def _first_view(
    link: SchedulerLink, settings: ServerConfig, stack: contextlib.AsyncExitStack
) -> None:
    """Wait for the first view, and check that this server can write checkpoints.

    If the cluster trains already, a server that cannot write only logs it: others may be waiting
    for this server.

    Raises:
        InvalidConfig: the server cannot write there.
    """
    view = await link.view_at_least(1, settings.connect_deadline_s)
    url = link.checkpoint_url
    if not url:
        return
    trying = asyncio.create_task(asyncio.to_thread(lambda: CheckpointStore(url).check_writable()))
    if not view.tables:
        try:
            await trying
        except InvalidCheckpoint as error:
            raise InvalidConfig(error.message) from error
        return

    def told(tried: asyncio.Task[None]) -> None:
        failure = None if tried.cancelled() else tried.exception()
        if failure is not None:
            logs.error("checkpoints_not_writable", url=url, reason=str(failure))

    trying.add_done_callback(told)
    stack.callback(trying.cancel)


def _open_lanes(lanes: SharedLanes, *, must: bool) -> None:
    try:
        lanes.open()
    except OSError as error:
        if must:
            raise InvalidConfig(f"lane is 'shm', which this system refuses: {error}") from error
        logs.warning("lane_not_offered", lane="shm", error=str(error))


def _watch(
    link: SchedulerLink, node: ParameterNode, metrics: ServerMetrics, node_metrics: NodeMetrics
) -> None:
    """Let heartbeats and scrapes ask the node."""
    link.progress = lambda: scheduler_pb2.NodeProgress(
        pushed_bytes=node.shards.received_bytes,
        pulled_bytes=node.shards.sent_bytes,
        step_count=node.applied_count,
        read_waits=[
            scheduler_pb2.ReadWait(table_id=table_id, node_id=reader, waited_ms=waited_ms)
            for table_id, reader, waited_ms in node.read_waits.totals_ms()
        ],
    )
    node_metrics.watch(
        lambda: node.machine.view_number, lambda: clock.now_s() - link.last_scheduler_contact_s
    )
    metrics.received_bytes.set_function(lambda: node.shards.received_bytes)
    metrics.sent_bytes.set_function(lambda: node.shards.sent_bytes)
    metrics.resent_entries.set_function(lambda: node.machine.resent_count)
    metrics.gate_bytes.set_function(lambda: node.machine.gate_bytes)
    metrics.state_bytes.set_function(lambda: node.shards.state_bytes)
    for cause in WaitCause:
        metrics.parked_pulls.labels(cause=cause.value).set_function(
            partial(node.parked_count, cause)
        )
    metrics.sessions.set_function(lambda: node.sessions.count)
    metrics.shm_sessions.set_function(lambda: node.lanes.session_count)
    metrics.primary_ranges.set_function(lambda: node.machine.range_count)
    if node.replicas is not None:
        replicas = node.replicas
        log = replicas.update_log
        if log is not None:
            metrics.update_log_bytes.set_function(lambda: log.segments.byte_count)
            metrics.update_log_queue_bytes.set_function(lambda: log.queued_bytes)
        metrics.backup_ranges.set_function(lambda: replicas.backed_up_count)
        metrics.held_decisions.set_function(lambda: replicas.held_count)
        metrics.peer_queue_bytes.set_function(lambda: replicas.queued_bytes)


async def _keep_values(
    settings: ServerConfig,
    address: str,
    link: SchedulerLink,
    node: ParameterNode,
    stack: contextlib.AsyncExitStack,
    ends: tuple[asyncio.Event, asyncio.Event],
) -> None:
    """Keep values that are of no use to the scheduler's cluster, which is another one: go on as
    without a scheduler, until an operator who has read the values stops this server.
    """
    node.metrics.values_kept.set(1)
    view, reason = link.view, "" if link.fenced_by is None else link.fenced_by.message
    kept = "none"
    if view is not None:
        with contextlib.suppress(OSError):
            path = await asyncio.to_thread(kept_values.write, link.session, link.token_key, view)
            stack.callback(path.unlink, missing_ok=True)
            kept = str(path)
    logs.error(
        "values_kept",
        reason=reason,
        file=kept,
        remedy="pushpull checkpoint rescue FILE OUT.safetensors; then stop this server",
    )
    told = scheduler_pb2.KeptValues(
        address=address, cluster_id=link.session.cluster_id, file="" if kept == "none" else kept
    )
    telling = asyncio.create_task(
        kept_values.keep_reporting(settings.scheduler, told, interval_s=link.lease_s)
    )
    try:
        await _until(ends, node.tick, lambda: node.ticks_within_s)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


def _note_failure(failed: asyncio.Event, failure: Exception) -> None:
    logs.exception("server_failed", failure)
    failed.set()


async def _until(
    events: Iterable[asyncio.Event], tick: Callable[[], None], within_s: Callable[[], float]
) -> None:
    """Tick every `_TICK_S`, and when something is due before, until one of the events is set."""
    ends = [asyncio.create_task(event.wait()) for event in events]
    try:
        while not any(task.done() for task in ends):
            timeout_s = min(_TICK_S, max(within_s(), _LEAST_TICK_S))
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            tick()
    finally:
        for task in ends:
            task.cancel()
