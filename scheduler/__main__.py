"""`pushpull scheduler`: runs one cluster's scheduler until it is told to stop or all is done."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial

from ps_core.errors import (
    InvalidCheckpoint,
    InvalidConfig,
    InvalidJournal,
    PushpullError,
    Recovering,
    WaitExpired,
)
from ps_runtime.cluster import join_secret
from ps_runtime.grpc import channels
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.launch.ready_file import write_ready_file
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from ps_runtime.settings import config
from ps_runtime.system import clock
from ps_runtime.system.process_end import (
    REFUSED_EXIT_CODE,
    die_with_parent_if_asked,
    dies_with_parent,
    unwind_at_sigint,
    wait_for_stop_signal,
)
from pushpull.v1 import scheduler_pb2
from scheduler.config import SchedulerConfig, parser
from scheduler.edge.restoring import AUTO
from scheduler.edge.servicer import SERVICE_NAME, SchedulerServicer, add_to_server
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.state import ClusterSettings
from scheduler.start import SchedulerStart, started

NO_LAST_CHECKPOINT_EXIT_CODE = 3
"""The exit code after a run that ended well, and whose last checkpoint failed; as of `train`."""

LAST_ATTEMPTS = 3  # a last checkpoint during which a server is lost can be made by the others
SERVERS_LEAVE_WITHIN_S = 5.0  # wait of a finished cluster for its servers to leave

_LAST_S = "--checkpoint-last-s (PUSHPULL_CHECKPOINT_LAST_S)"
_REMEDY = "start the scheduler again with its journal: it makes the last checkpoint then"

UNDER_WAY_WITHIN_S = 30.0
"""Wait at the end for a checkpoint that somebody requested, where no last one is made."""


async def serve(settings: SchedulerConfig, start: SchedulerStart, secret: bytes) -> bool:
    """Serve the cluster until a stop signal comes or the work is done; False if it is done, and its
    last checkpoint failed.
    """
    cluster, has_last = start.begun.reply.settings, True
    # Before anything else: a signal that comes early must end the process as cleanly as a late one.
    stop = asyncio.create_task(wait_for_stop_signal())
    registry = new_registry()
    servicer = SchedulerServicer(
        start.begun,
        SchedulerMetrics(registry),
        secret,
        CheckpointPolicy(
            settings.checkpoint_every_s, settings.checkpoint_every_clocks, settings.checkpoint_keep
        ),
        (
            cluster.checkpoint_url,
            "" if settings.resume == AUTO else settings.resume,
            *settings.checkpoint_roots,
        ),
        start.journal,
    )

    try:
        await servicer.flushed()
        node = await NodeServer.start(
            settings.listen,
            advertise=settings.advertise,
            http_listen=settings.http_listen,
            services=[(SERVICE_NAME, partial(add_to_server, servicer))],
            registry=registry,
        )
    except BaseException:
        stop.cancel()
        await servicer.close_journal(has_ended=False)
        raise

    def show_health() -> None:
        node.degraded = servicer.degraded_words

    servicer.on_health_change = show_health
    ticking = asyncio.create_task(_watch(servicer))
    try:
        node.set_serving(True)
        if settings.ready_file is not None:
            where = settings.ready_file, node.address, node.http_address
            await asyncio.to_thread(write_ready_file, *where)
        _tell_formed(cluster)
        has_last = await _until_the_end(settings, servicer, stop, ticking)
    finally:
        stop.cancel()
        servicer.checkpointing.give_up("the scheduler ends")
        servicer.close()
        may_go_on = start.journal is not None and not servicer.has_finished
        is_final = _is_final(stop)
        await servicer.checkpointing.close(goes_on=may_go_on and not is_final)
        with contextlib.suppress(PushpullError):  # of the journal, logged before
            await servicer.flushed()
        await node.stop(settings.drain_grace_s)
        ticking.cancel()
        await servicer.close_journal(has_ended=servicer.has_finished and has_last)
    return has_last


def _tell_formed(cluster: ClusterSettings) -> None:
    logs.info(
        "cluster_formed",
        cluster_id=cluster.cluster_id,
        workers=cluster.worker_count,
        max_workers=cluster.rank_count,
        servers=cluster.server_count,
        replicas=cluster.replica_count,
        min_in_sync=cluster.min_in_sync,
    )


def _is_final(stop: asyncio.Future[signal.Signals]) -> bool:
    """True if a launcher has ended the cluster: it removes the journal, and says so by SIGINT."""
    came = stop.done() and not stop.cancelled() and stop.exception() is None
    return came and stop.result() is signal.SIGINT and dies_with_parent(os.environ)


async def _watch(servicer: SchedulerServicer) -> None:
    """Tick the cluster for as long as the journal can be written."""
    looking = asyncio.create_task(servicer.watch_for_silence())
    failing = asyncio.create_task(servicer.until_journal_failed())
    try:
        done, _ = await asyncio.wait((looking, failing), return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        looking.cancel()
        failing.cancel()


async def _until_the_end(
    settings: SchedulerConfig,
    servicer: SchedulerServicer,
    stop: asyncio.Task[signal.Signals],
    ticking: asyncio.Task[None],
) -> bool:
    """Wait for a stop signal or the end of the work; raise a failure of `ticking`. False as in
    `serve`.
    """
    finished = asyncio.create_task(_all_done(settings, servicer))
    try:
        await asyncio.wait((stop, finished, ticking), return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            ticking.result()
        if stop.done():
            finished.cancel()
            logs.info("stopping", reason=stop.result().name)
            await _make_last(settings, servicer, "stopped")
            return True
        return finished.result()
    finally:
        finished.cancel()


async def _all_done(settings: SchedulerConfig, servicer: SchedulerServicer) -> bool:
    """Wait until the work is done and servers have left; False if its last checkpoint failed.

    A cluster that the next scheduler can save is not finished then. One that nobody can save is,
    and stays in the journal: the next scheduler ends with it. So a supervisor that starts again
    whoever fails either saves the run in the end, or comes to rest.
    """
    has_last, has_ended = True, servicer.has_finished
    if has_ended:
        logs.warning("cluster_was_finished", remedy="start once more to begin a new cluster")
    if settings.stop_when_done and settings.checkpoint_url:
        while not has_ended:
            await servicer.until_workers_are_done()
            has_last = await _make_last(settings, servicer, "the end of training")
            if not has_last and settings.journal is not None and servicer.may_be_saved_later:
                logs.error("values_stay_at_servers", remedy=_REMEDY)
                return False
            has_ended = servicer.finish()
    await servicer.until_finished()
    if await servicer.until_servers_have_left(SERVERS_LEAVE_WITHIN_S):
        logs.info("stopping", reason="all workers and servers have left")
    else:
        logs.warning("stopping", reason=f"servers have not left in {SERVERS_LEAVE_WITHIN_S} s")
    return has_last


async def _make_last(settings: SchedulerConfig, servicer: SchedulerServicer, reason: str) -> bool:
    """Make a last checkpoint while servers are there; False if it failed, which is logged. Where
    `checkpoint_last_s` is 0, wait for a running checkpoint that somebody requested.
    """
    if not settings.checkpoint_url or not servicer.has_tables:
        return True
    within_s = settings.checkpoint_last_s or UNDER_WAY_WITHIN_S
    making = asyncio.create_task(_last(settings, servicer, reason, clock.now_s() + within_s))
    left = asyncio.create_task(servicer.until_servers_have_left(2 * within_s))
    try:
        await asyncio.wait((making, left), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise WaitExpired("every server with values has left")
        making.result()
        return True
    except PushpullError as error:
        is_late = making.done() and isinstance(error, WaitExpired) and settings.checkpoint_last_s
        remedy = f"; to give it more than {within_s:g} s: {_LAST_S}" if is_late else ""
        logs.warning("no_last_checkpoint", reason=error.message + remedy)
        return not settings.checkpoint_last_s
    finally:
        for task in (making, left):
            task.cancel()
        await asyncio.gather(making, left, return_exceptions=True)


async def _last(
    settings: SchedulerConfig, servicer: SchedulerServicer, reason: str, deadline_s: float
) -> None:
    checkpointing = servicer.checkpointing
    if not settings.checkpoint_last_s:
        await checkpointing.until_none_is_under_way(deadline_s)
        return
    request = scheduler_pb2.CreateCheckpointRequest(reason=reason)
    for attempts_left in reversed(range(LAST_ATTEMPTS)):
        try:
            await checkpointing.create(request, deadline_s)
            return
        except InvalidCheckpoint as error:
            if not attempts_left:
                raise
            logs.warning("last_checkpoint_again", reason=error.message)


def main() -> None:
    """Run the scheduler. A wrong setting ends the process with status 2 and names it; a journal
    that cannot be written or opened now, with status 1: another start may find it well.
    """
    settings = config.from_command_line(SchedulerConfig, parser())
    unwind_at_sigint()
    try:
        die_with_parent_if_asked(os.environ)
        logs.configure("scheduler", settings.log_level, settings.log_format)
        secret = join_secret.found_or_made()
        has_last = channels.run(serve(settings, started(settings), secret))
    except (InvalidConfig, InvalidCheckpoint, InvalidJournal, Recovering) as error:
        logs.error("cannot_serve", error=error.message)
        sys.exit(1 if isinstance(error, Recovering) else REFUSED_EXIT_CODE)
    if not has_last:
        sys.exit(NO_LAST_CHECKPOINT_EXIT_CODE)


if __name__ == "__main__":
    main()
