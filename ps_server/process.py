"""The process of one parameter server: what `pushpull server` runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ps_core.cluster_view import HAND_OVER_FEATURE, ClusterView
from ps_core.codecs import payloads
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
from ps_runtime.grpc.addresses import join_address, split_address, warn_of_loopback
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.http2.server import StreamServer
from ps_runtime.launch.ready_file import write_ready_file
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import NodeMetrics, ServerMetrics, new_registry
from ps_runtime.settings import config
from ps_runtime.system import capacity, clock, process_end
from ps_runtime.system.background import switch_often
from ps_runtime.system.collector import Collector
from ps_runtime.system.executors import in_daemon_thread
from ps_runtime.system.prefault import Prefaulting, release
from ps_runtime.system.record_disk import RecordDisk
from ps_runtime.system.trimming import trim_often
from ps_server.checkpoint.checkpoint_parts import CheckpointParts
from ps_server.checkpoint.restored_values import RestoredValues
from ps_server.config import ServerConfig, parser
from ps_server.installed_updates import installed_updates
from ps_server.lane.lane_socket import SharedLanes
from ps_server.peers.node_replication import ReplicationSetting
from ps_server.ranges.read_gate import WaitCause
from ps_server.rows.row_memory import RowMemory
from ps_server.rows.row_tier import RowTier
from ps_server.service import replication_service
from ps_server.service import servicer as parameter_service
from ps_server.service.change_doubts import ChangeDoubts
from ps_server.service.node import ParameterNode
from ps_server.service.replication_service import ReplicationServicer
from ps_server.service.scheduler_requests import (
    REASON,
    BackupRequests,
    PrepareReports,
    until_kept,
)
from ps_server.service.servicer import FEATURES, ParameterServicer, ViewAtLeast
from ps_server.stores import Shards
from ps_server.update_log.recovery import RecoveredLog, open_log
from ps_server.update_log.writer import LogSetting
from ps_server.values.kernel_fingerprint import kernel_fingerprint
from pushpull.v1 import scheduler_pb2, types_pb2

_TICK_S = 0.1
_LEAST_TICK_S = 0.001
_MEMORY_LOOK_S = 1.0
_LEAST_GRACE_S = 0.5

_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until told to stop, or until the cluster has finished. `arguments`: the command line."""
    settings = config.from_command_line(ServerConfig, parser(), arguments)
    process_end.unwind_at_sigint()
    try:
        process_end.die_with_parent_if_asked(os.environ)
        process_end.forget_parent(os.environ)  # installed updates are a user's code
        logs.configure("server", settings.log_level, settings.log_format)
        capacity.allow_open_files()
        channels.tune_allocator()
        switch_often()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        channels.run(_serve(settings))
    except PushpullError as error:
        logs.error("failed", error=error.code, message=error.message)
        is_refused = isinstance(error, InvalidConfig | Unauthenticated)
        sys.exit(process_end.REFUSED_EXIT_CODE if is_refused else _FAILED)


async def _serve(settings: ServerConfig) -> None:
    registry = new_registry()
    servicer, backups = ParameterServicer(), ReplicationServicer()
    server = await NodeServer.start(
        settings.listen,
        advertise=settings.advertise,
        http_listen=settings.http_listen,
        services=[
            (parameter_service.SERVICE, partial(parameter_service.add_to_server, servicer)),
            (replication_service.SERVICE, partial(replication_service.add_to_server, backups)),
        ],
        registry=registry,
    )
    warn_of_loopback(server.address, settings.listen, settings.scheduler)
    streams = await _stream_port(settings, servicer, backups)
    stop = asyncio.create_task(process_end.wait_for_stop_signal())

    def attach(node: ParameterNode, view_at_least: ViewAtLeast) -> None:
        servicer.attach(node, view_at_least)
        backups.attach(node)

    metrics, node_metrics = ServerMetrics(registry), NodeMetrics(registry)
    if streams is not None:
        metrics.stream_connections.set_function(lambda: streams.connection_count)

    async def run() -> None:
        """Run again each time that the cluster begins anew."""
        for number in itertools.count():
            try:
                async with contextlib.AsyncExitStack() as stack:
                    membership = _Membership(settings, server, stop, stack)
                    membership.is_first = number == 0
                    await membership.run(attach, metrics, node_metrics)
            except Fenced as error:
                if not error.retry_after_ms and not isinstance(error, ForeignCluster):
                    raise
                if stop.done():  # another cluster may place ranges here in the time until it leaves
                    return
                logs.info("registering_again", reason=error.message)
                servicer.detach()
                backups.detach()
                gc.unfreeze()
            else:
                return
            gc.collect()  # the update log may have as many values as there were

    running = asyncio.create_task(run())
    end_s = 0.0
    try:
        await asyncio.wait((stop, running), return_when=asyncio.FIRST_COMPLETED)
        is_orderly = running.done() or stop.result() == signal.SIGTERM
        grace_s = settings.drain_grace_s if is_orderly else _LEAST_GRACE_S
        end_s = clock.now_s() + grace_s
        is_member = server.is_serving and servicer.is_attached
        if is_member and not running.done():  # it leaves, since it has seen the signal
            await asyncio.wait((running,), timeout=grace_s + _LEAST_GRACE_S)
        if running.done():
            running.result()
    finally:
        for task in (stop, running):
            task.cancel()
        await asyncio.gather(stop, running, return_exceptions=True)  # its error is raised already
        servicer.drain()
        backups.drain()
        grace_s = max(end_s - clock.now_s(), _LEAST_GRACE_S)
        await asyncio.gather(*(one.stop(grace_s) for one in (server, streams) if one is not None))


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


class _Membership:
    """A membership of this server, from its registration until the cluster has finished, or begins
    anew; `stack` ends all of it.
    """

    is_first = True

    def __init__(
        self,
        settings: ServerConfig,
        server: NodeServer,
        stop: asyncio.Task[signal.Signals],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self._settings = settings
        self._server = server
        self._stop = stop
        self._stack = stack
        self._finished, self._failed, self._left = (asyncio.Event() for _ in range(3))

    async def run(
        self,
        attach: Callable[[ParameterNode, ViewAtLeast], None],
        metrics: ServerMetrics,
        node_metrics: NodeMetrics,
    ) -> None:
        """Serve until the cluster has finished or replaced this server, or a signal ends it."""
        stack = self._stack
        await self._register(metrics)
        link, node = self._link, self._node
        self._watch(metrics, node_metrics)
        stack.callback(trim_often(node.shards.pool.trim))
        waits: list[bool] = []  # not empty while `look` waits for its turn between works
        node.health.on_failure = self._note_failure
        votes = PrepareReports(
            lambda each: link.prepare_change(each.table_id, each.number, each.clock, each.outcome)
        )
        stack.callback(votes.close)
        doubts = ChangeDoubts(node)
        stack.push_async_callback(doubts.close)
        link.before_view = node.prepare
        link.on_view += [doubts.observe, node.observe]
        restored = self._keep_checkpoints()
        asked = BackupRequests(lambda requests: link.set_backups(requests, link.lease_s))
        stack.callback(asked.close)
        if node.replicas is not None:
            node.replicas.ask = asked.request
        link.on_view += [
            lambda _: node.works.between(lambda: votes.send(node.prepared_changes)),
            lambda view: self._finished.set() if view.finished else None,
            self._say_if_ready,
        ]
        attach(node, link.view_at_least)
        await self._see_first_view()
        await self._begin_to_serve()

        def tick() -> None:
            node.tick()
            if not node.works.jobs:
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

        leaving = asyncio.create_task(self._leave_when_told())
        stack.callback(leaving.cancel)
        try:
            await self._until((self._finished, link.fenced, self._failed, self._left), tick)
            if isinstance(link.fenced_by, ForeignCluster) and node.shards.stores:
                await self._keep_values()
            if self._left.is_set():
                return  # and joins no other cluster
        finally:
            if node.health.failure is not None:
                raise Internal(
                    f"server {link.session.node_id} ends: what it decided could not be done "
                    f"({type(node.health.failure).__name__}: {node.health.failure})"
                ) from node.health.failure
        if link.fenced_by is not None and not (link.is_leaving and type(link.fenced_by) is Fenced):
            raise link.fenced_by
        reason = "told to stop" if link.is_leaving else "all workers have left"
        logs.info("finished", reason=reason)

    async def _register(self, metrics: ServerMetrics) -> None:
        """Recover the update log, register, and make the node."""
        settings, stack = self._settings, self._stack
        installed = await asyncio.to_thread(installed_updates)
        request = scheduler_pb2.RegisterNodeRequest(
            role=types_pb2.NODE_ROLE_SERVER,
            address=self._server.address,
            protocol_version=1,
            features=(*FEATURES, HAND_OVER_FEATURE),
            kernel_fingerprint=kernel_fingerprint(),
            cluster_id=settings.cluster_id,
            custom_updates=installed.to_proto(),
            memory=await asyncio.to_thread(_memory, settings.memory_mb * 2**20),
        )
        machine_bytes = await asyncio.to_thread(capacity.memory_bytes)
        tier = None
        if settings.rows_dir is not None:
            disk = RecordDisk(settings.rows_dir)
            await asyncio.to_thread(disk.check)
            tier = RowTier(disk, release=release)
        rows = RowMemory(request.memory.byte_count, machine_bytes, Prefaulting().begin, tier)
        shards = Shards(SharedLanes(), installed.updates, rows)
        stack.callback(shards.segments.close)
        stack.callback(shards.lanes.close)
        if settings.lane != "grpc":
            _open_lanes(shards.lanes, must=settings.lane == "shm")
        recovered = None
        if settings.update_log is not None:
            recovered = await open_log(
                settings.update_log,
                shards,
                request.kernel_fingerprint,
                settings.connect_deadline_s,
                self._server.set_waiting,
            )
            stack.push_async_callback(asyncio.to_thread, recovered.directory.close)
            request.update_log.CopyFrom(recovered.claim())
        link = await SchedulerLink.connect(settings.scheduler, request, settings.connect_deadline_s)
        stack.push_async_callback(_leave, link)
        self._link = link
        self._node = ParameterNode(
            link.session, link.token_key, link.worker_count, metrics, clock.now_s, shards
        )
        stack.callback(self._node.close)
        if link.replica_count > 1 or recovered is not None:
            self._replicate(recovered)

    def _replicate(self, recovered: RecoveredLog | None) -> None:
        """Replicate decisions to backups and the update log."""
        settings, link, node = self._settings, self._link, self._node
        update_log = None
        if recovered is not None:
            recovered = recovered.of(link.session, node.shards)
            setting = LogSetting(settings.update_log_mb * 1_000_000, settings.update_log_sync)
            update_log = recovered.begin(link.session, link.range_count, setting)
        replicas = node.replicate(ReplicationSetting(link.lease_s, link.min_in_sync), update_log)
        self._stack.push_async_callback(replicas.close)
        if recovered is not None:
            replicas.recover(recovered.replicas, recovered.withheld)

    def _watch(self, metrics: ServerMetrics, node_metrics: NodeMetrics) -> None:
        """Let heartbeats and scrapes ask the node."""
        link, node, shards = self._link, self._node, self._node.shards
        link.progress = lambda: scheduler_pb2.NodeProgress(
            pushed_bytes=shards.received_bytes,
            pulled_bytes=shards.sent_bytes,
            step_count=node.applied_count,
            read_waits=[
                scheduler_pb2.ReadWait(table_id=table_id, node_id=reader, waited_ms=waited_ms)
                for table_id, reader, waited_ms in node.read_waits.totals_ms()
            ],
        )
        node_metrics.watch(
            lambda: node.machine.view_number, lambda: clock.now_s() - link.last_scheduler_contact_s
        )
        metrics.received_bytes.set_function(lambda: shards.received_bytes)
        metrics.sent_bytes.set_function(lambda: shards.sent_bytes)
        metrics.unchanged_bytes.set_function(lambda: shards.unchanged_bytes)
        metrics.resent_entries.set_function(lambda: node.machine.resent_count)
        metrics.gate_bytes.set_function(lambda: node.machine.gate_bytes)
        metrics.state_bytes.set_function(lambda: shards.state_bytes)
        metrics.rows.set_function(lambda: shards.row_count)
        metrics.candidate_rows.set_function(lambda: shards.candidate_count)
        metrics.evicted_rows.set_function(lambda: shards.row_memory.evicted_count)
        metrics.disk_rows.set_function(lambda: shards.memory_use.disk_row_count)
        tier = shards.row_memory.tier
        if tier is not None:
            metrics.fetched_rows.set_function(lambda: tier.fetched_count)
            metrics.written_rows.set_function(lambda: tier.written_count)
        for cause in WaitCause:
            parked = metrics.parked_pulls.labels(cause=cause.value)
            parked.set_function(partial(node.parked_count, cause))
        metrics.sessions.set_function(lambda: node.sessions.count)
        metrics.shm_sessions.set_function(lambda: node.lanes.session_count)
        metrics.primary_ranges.set_function(lambda: node.machine.range_count)
        if (replicas := node.replicas) is not None:
            if (log := replicas.update_log) is not None:
                metrics.update_log_bytes.set_function(lambda: log.segments.disk_bytes)
                metrics.update_log_queue_bytes.set_function(lambda: log.queued_bytes)
            metrics.backup_ranges.set_function(lambda: len(replicas.replication.replicas))
            metrics.held_decisions.set_function(lambda: replicas.held_count)
            metrics.peer_queue_bytes.set_function(lambda: replicas.queued_bytes)

    def _keep_checkpoints(self) -> RestoredValues:
        """Load restored values, and write the parts of checkpoints."""
        settings, link, node = self._settings, self._link, self._node
        restored = RestoredValues(node)
        self._stack.push_async_callback(restored.close)
        checkpoints = CheckpointParts(
            node,
            partial(report_part, link),
            int(settings.checkpoint_rate_mb_s * 1e6),
            settings.checkpoint_buffer_mb * 2**20,
        )
        self._stack.push_async_callback(checkpoints.close)
        link.on_view += [
            lambda view: node.works.between(partial(restored.observe, view)),
            lambda view: node.works.between(partial(checkpoints.observe, view)),
        ]
        return restored

    async def _see_first_view(self) -> None:
        """Wait for the first view, and check that this server can write checkpoints. If the cluster
        trains already, or begins anew, it only logs that it cannot: others may be waiting for this
        server.
        """
        view = await self._link.view_at_least(1, self._settings.connect_deadline_s)
        url = self._link.checkpoint_url
        if not url:
            return

        def told(tried: asyncio.Task[None]) -> None:
            failure = None if tried.cancelled() else tried.exception()
            if failure is not None:
                logs.error("checkpoints_not_writable", url=url, reason=str(failure))

        trying = asyncio.create_task(
            in_daemon_thread(lambda: CheckpointStore(url).check_writable(), "checkpoint place")
        )
        if view.tables or not self.is_first:
            trying.add_done_callback(told)
            self._stack.callback(trying.cancel)
            return
        try:
            await trying
        except InvalidCheckpoint as error:
            raise InvalidConfig(error.message) from error

    async def _begin_to_serve(self) -> None:
        settings, server = self._settings, self._server
        collector, stores = Collector(), self._node.shards.stores
        collector.start()
        self._stack.callback(collector.stop)
        looking = asyncio.create_task(_watch_memory(self._node.shards))
        self._stack.callback(looking.cancel)
        held_count = len(stores)

        def look(_: ClusterView) -> None:
            """Tell the collector when this server holds other ranges."""
            nonlocal held_count
            if len(stores) != held_count:
                held_count = len(stores)
                collector.expect()

        self._link.on_view.append(look)
        server.set_serving(True)
        if settings.ready_file is not None:
            where = settings.ready_file, server.address, server.http_address
            await asyncio.to_thread(write_ready_file, *where)

    def _say_if_ready(self, view: ClusterView) -> None:
        """Set the server ready when it is catching up with no range that waits for that."""
        node_id = self._link.session.node_id
        count = sum(node_id in r.catching_up and node_id != r.hand_over_to for r in view.ranges)
        if not self._stop.done():
            reason = f"{count} ranges are being brought up to date here" if count else ""
            self._server.set_unready(reason)

    async def _leave_when_told(self) -> None:
        """Leave on SIGTERM when nothing is lost by that, on SIGINT at once."""
        number = await asyncio.shield(self._stop)
        logs.info("told_to_stop", signal=number.name)
        self._link.is_leaving = True
        self._server.set_unready("told to stop")
        if number == signal.SIGTERM:
            end_s = clock.now_s() + self._settings.drain_grace_s
            await until_kept(self._link, end_s, has_log=self._settings.update_log is not None)
        else:
            await self._link.deregister(REASON, deadline_s=1.0, loss_is_wanted=True)
        self._left.set()

    async def _keep_values(self) -> None:
        """Keep values that are of no use to the scheduler's cluster, which is another one: go on as
        without a scheduler, until an operator who has read the values stops this server.
        """
        if self._left.is_set():
            return
        link, node = self._link, self._node
        node.metrics.values_kept.set(1)
        told = scheduler_pb2.KeptValues(
            address=self._server.address, cluster_id=link.session.cluster_id
        )
        is_tried = asyncio.Event()
        telling = [
            asyncio.create_task(self._tell_how_they_are_read(told, is_tried)),
            asyncio.create_task(self._report_kept(told, is_tried)),
        ]
        try:
            await self._until((self._failed, self._left), node.tick)
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)

    async def _report_kept(self, told: scheduler_pb2.KeptValues, is_tried: asyncio.Event) -> None:
        """Tell the scheduler of kept values, once their file is written, or cannot be yet."""
        await is_tried.wait()
        interval_s = self._link.lease_s
        await kept_values.keep_reporting(self._settings.scheduler, told, interval_s=interval_s)

    async def _tell_how_they_are_read(
        self, told: scheduler_pb2.KeptValues, is_tried: asyncio.Event
    ) -> None:
        """Write the file by which kept values are read, once the disk takes it, and log so."""
        link = self._link
        reason = "" if link.fenced_by is None else link.fenced_by.message
        is_logged = False
        while link.view is not None:
            try:
                path = await asyncio.to_thread(
                    kept_values.write, link.session, link.token_key, link.view
                )
            except OSError as error:
                if not is_logged:
                    logs.error(
                        "values_kept",
                        reason=reason,
                        file="none",
                        error=str(error),
                        remedy="make room for temporary files: another line names the file then",
                    )
                is_logged = True
                is_tried.set()
                await asyncio.sleep(link.lease_s)
                continue
            self._stack.callback(path.unlink, missing_ok=True)
            told.file = str(path)
            logs.error(
                "values_kept",
                reason=reason,
                file=told.file,
                remedy="pushpull checkpoint rescue FILE OUT.safetensors; then stop this server",
            )
            break
        is_tried.set()

    def _note_failure(self, failure: Exception) -> None:
        logs.exception("server_failed", failure)
        self._failed.set()

    async def _until(self, events: Iterable[asyncio.Event], tick: Callable[[], None]) -> None:
        """Tick every `_TICK_S`, and when something is due before, until an event is set."""
        ends = [asyncio.create_task(event.wait()) for event in events]
        try:
            while not any(task.done() for task in ends):
                timeout_s = min(_TICK_S, max(self._node.ticks_within_s, _LEAST_TICK_S))
                await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                tick()
                for kernels in payloads.KERNELS.values():
                    if kernels.must_load():
                        asyncio.get_running_loop().run_in_executor(None, kernels.load)
        finally:
            for task in ends:
                task.cancel()


def _memory(given_bytes: int) -> scheduler_pb2.ServerMemory:
    """Memory that tables may take here: as given, or a share of the system's."""
    if given_bytes:
        return scheduler_pb2.ServerMemory(byte_count=given_bytes)
    pool = capacity.memory_pool()
    return scheduler_pb2.ServerMemory(byte_count=capacity.table_bytes(), pool=pool)


async def _watch_memory(shards: Shards) -> None:
    """Tell now and then how much memory tables take, and the machine has left, for new rows."""
    while True:
        if shards.has_rows:
            shards.look_at_memory()
            left_bytes = await asyncio.to_thread(capacity.available_bytes)
            shards.row_memory.measured_left(left_bytes)
        await asyncio.sleep(_MEMORY_LOOK_S)


def _open_lanes(lanes: SharedLanes, *, must: bool) -> None:
    try:
        lanes.open()
    except OSError as error:
        if must:
            raise InvalidConfig(f"lane is 'shm', which this system refuses: {error}") from error
        logs.warning("lane_not_offered", lane="shm", error=str(error))


async def _leave(link: SchedulerLink) -> None:
    await link.deregister(REASON, deadline_s=1.0)
    await link.close()
