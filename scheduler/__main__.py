"""`pushpull scheduler`: runs one cluster's scheduler until it is told to stop or all is done."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from functools import partial

from ps_core.cluster_view import ClusterView
from ps_core.errors import InvalidCheckpoint, InvalidConfig, PushpullError, WaitExpired
from ps_core.keys import Incarnation
from ps_runtime import channels, clock, config, join_secret, logs
from ps_runtime.checkpoint_roots import CheckpointRoots
from ps_runtime.metrics import SchedulerMetrics, new_registry
from ps_runtime.node_server import NodeServer
from ps_runtime.ready_file import write_ready_file
from ps_runtime.shutdown import die_with_parent_if_asked, wait_for_stop_signal
from pushpull.v1 import scheduler_pb2
from scheduler.checkpointing import CheckpointPolicy
from scheduler.cluster import Cluster
from scheduler.cluster_state import MIN_TOKEN_KEY_BYTES, TIMELINE_BYTES, ClusterSettings
from scheduler.config import SchedulerConfig, parser
from scheduler.placement import range_count_for
from scheduler.restoring import AUTO, checkpoints_under, restored_at_start
from scheduler.servicer import SERVICE_NAME, SchedulerServicer, add_to_server

SERVERS_LEAVE_WITHIN_S = 5.0
"""How long a cluster that is done waits for its servers to say goodbye."""

_INCARNATION_BITS = 40
"""Of 53 that the contract allows: room for as many nodes as any cluster will see."""


def cluster_settings(settings: SchedulerConfig) -> ClusterSettings:
    """A new cluster: its identities and its key are drawn here, and nowhere else.

    Raises:
        InvalidConfig: a setting is out of its bounds.
        InvalidCheckpoint: the checkpoint that it is to start from is no good one, or the place for
            checkpoints cannot be read.
    """
    checkpoint_url, newest = checkpoints_under(settings.checkpoint_url)
    return ClusterSettings(
        checkpoint_url=checkpoint_url,
        checkpoint_count=newest,
        checkpoint_full_every=settings.checkpoint_full_every,
        restored=restored_at_start(settings.resume, checkpoint_url),
        cluster_id=settings.cluster_id or secrets.token_hex(8),
        timeline=secrets.token_bytes(TIMELINE_BYTES),
        token_key=secrets.token_bytes(2 * MIN_TOKEN_KEY_BYTES),
        first_incarnation=Incarnation(1 + secrets.randbits(_INCARNATION_BITS)),
        worker_count=settings.workers,
        server_count=settings.servers,
        range_count=settings.ranges or range_count_for(settings.servers),
        max_workers=settings.max_workers,
        stop_when_done=settings.stop_when_done and not _makes_last(settings),
        heartbeat_interval_s=settings.heartbeat_interval_s,
        lease_s=settings.lease_s,
        worker_timeout_s=settings.worker_timeout_s,
        adaptation_interval_s=settings.adaptation_interval_s,
        replica_count=settings.replicas,
        min_in_sync=settings.min_in_sync,
    )


def _makes_last(settings: SchedulerConfig) -> bool:
    """Whether a last checkpoint is made."""
    return bool(settings.checkpoint_url) and settings.checkpoint_last_s > 0


async def serve(settings: SchedulerConfig, cluster: ClusterSettings, secret: bytes) -> None:
    """Serve the cluster until a stop signal comes or it is finished; whoever joins it proves to
    know the secret.

    Raises:
        InvalidConfig: an address cannot be bound, or the ready file not written.
    """
    # Before anything else: a signal that comes early must end the process as cleanly as a late one.
    stop = asyncio.create_task(wait_for_stop_signal())
    registry = new_registry()
    servicer = SchedulerServicer(
        Cluster(cluster, clock.now_s()),
        SchedulerMetrics(registry),
        secret,
        CheckpointPolicy(
            settings.checkpoint_every_s, settings.checkpoint_every_clocks, settings.checkpoint_keep
        ),
        CheckpointRoots(
            (
                cluster.checkpoint_url,
                "" if settings.resume == AUTO else settings.resume,
                *settings.checkpoint_roots,
            )
        ),
    )

    try:
        node = await NodeServer.start(
            settings.listen,
            advertise=settings.advertise,
            http_listen=settings.http_listen,
            services=[(SERVICE_NAME, partial(add_to_server, servicer))],
            registry=registry,
        )
    except BaseException:
        stop.cancel()
        raise
    servicer.on_view.append(partial(_say_if_degraded, node))
    ticking = asyncio.create_task(servicer.watch_for_silence())
    try:
        node.set_serving(True)
        if settings.ready_file is not None:
            where = settings.ready_file, node.address, node.http_address
            await asyncio.to_thread(write_ready_file, *where)
        logs.info(
            "cluster_formed",
            cluster_id=cluster.cluster_id,
            workers=cluster.worker_count,
            max_workers=cluster.rank_count,
            servers=cluster.server_count,
            replicas=cluster.replica_count,
            min_in_sync=cluster.min_in_sync,
        )
        await _until_the_end(settings, servicer, stop, ticking)
    finally:
        stop.cancel()
        servicer.checkpointing.give_up("the scheduler ends")
        servicer.close()
        await servicer.checkpointing.close()
        await node.stop(settings.drain_grace_s)
        ticking.cancel()


def _say_if_degraded(node: NodeServer, view: ClusterView) -> None:
    node.degraded = view.lost_words


async def _until_the_end(
    settings: SchedulerConfig,
    servicer: SchedulerServicer,
    stop: asyncio.Task[signal.Signals],
    ticking: asyncio.Task[None],
) -> None:
    """Wait for a stop signal or the end of the work; a failure of `ticking` is raised."""
    finished = asyncio.create_task(_all_done(settings, servicer))
    try:
        await asyncio.wait((stop, finished, ticking), return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            ticking.result()
        if stop.done():
            finished.cancel()
            logs.info("stopping", reason=stop.result().name)
            await _make_last(settings, servicer, "stopped")
        else:
            finished.result()
    finally:
        finished.cancel()


async def _all_done(settings: SchedulerConfig, servicer: SchedulerServicer) -> None:
    if settings.stop_when_done and _makes_last(settings):
        while not servicer.has_finished:
            await servicer.until_workers_are_done()
            await _make_last(settings, servicer, "the end of training")
            servicer.finish()
    await servicer.until_finished()
    if await servicer.until_servers_have_left(SERVERS_LEAVE_WITHIN_S):
        logs.info("stopping", reason="all workers and servers have left")
    else:
        logs.warning("stopping", reason=f"servers are left after {SERVERS_LEAVE_WITHIN_S} s")


async def _make_last(settings: SchedulerConfig, servicer: SchedulerServicer, reason: str) -> None:
    """Make a checkpoint of what there is, while there are servers; it is logged if there is none.

    Blocking: at most `checkpoint_last_s`.
    """
    if not _makes_last(settings) or not servicer.has_tables:
        return
    within_s = settings.checkpoint_last_s
    request = scheduler_pb2.CreateCheckpointRequest(reason=reason)
    making = asyncio.create_task(servicer.checkpointing.create(request, clock.now_s() + within_s))
    left = asyncio.create_task(servicer.until_servers_have_left(2 * within_s))
    try:
        await asyncio.wait((making, left), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise WaitExpired("no server is left that has values")
        making.result()
    except PushpullError as error:
        logs.warning("no_last_checkpoint", reason=error.message)
    finally:
        for task in (making, left):
            task.cancel()
        await asyncio.gather(making, left, return_exceptions=True)


def main() -> None:
    """Run the scheduler; a wrong setting ends it with status 2 and a line that names it."""
    settings = config.from_command_line(SchedulerConfig, parser())
    try:
        die_with_parent_if_asked(os.environ)
        logs.configure("scheduler", settings.log_level, settings.log_format)
        secret = join_secret.found_or_made()
        channels.run(serve(settings, cluster_settings(settings), secret))
    except (InvalidConfig, InvalidCheckpoint) as error:
        logs.error("cannot_serve", error=error.message)
        sys.exit(2)


if __name__ == "__main__":
    main()
