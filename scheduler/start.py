"""What a scheduler serves when it starts: a new cluster, or the one that its journal has.

Rules:
    - A journal that has a cluster is gone on with, whatever `resume` says: that is for the first
      start. What nodes were told of the cluster (`_TOLD`) has to be what the settings say; what
      only the scheduler goes by, such as `stop_when_done`, may be another from this start on.
    - A journal that is not gone on with stays as it is.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from ps_core.errors import InvalidJournal, PushpullError
from ps_core.keys import Incarnation
from ps_runtime.observe import logs
from ps_runtime.system import clock
from scheduler.config import SchedulerConfig
from scheduler.edge.publication import Journal
from scheduler.edge.restoring import checkpoints_under, restored_at_start
from scheduler.edge.sqlite_store import SqliteStore
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.placement import range_count_for
from scheduler.machine.state import MIN_TOKEN_KEY_BYTES, TIMELINE_BYTES, ClusterSettings, Kept
from scheduler.store import records

_INCARNATION_BITS = 40
"""Of 53 that the contract allows: room for as many nodes as any cluster will see."""

_TOLD = {
    "worker_count": "workers",
    "server_count": "servers",
    "max_workers": "max_workers",
    "range_count": "ranges",
    "heartbeat_interval_s": "heartbeat_interval_s",
    "lease_s": "lease_s",
    "replica_count": "replicas",
    "min_in_sync": "min_in_sync",
    "checkpoint_url": "checkpoint_url",
}
"""Fields that nodes go by, and the settings that they come from."""


@dataclass(frozen=True, slots=True)
class Start:
    """What is served, and where it is kept; None: nowhere."""

    begun: Decision[Cluster]
    journal: Journal | None = None


def started(settings: SchedulerConfig) -> Start:
    """Open the journal, if there is to be one, and go on with what it has, or begin.

    Blocking: reads the journal and checkpoints.

    Raises:
        InvalidConfig: a setting is out of its bounds.
        InvalidCheckpoint: the checkpoint that it is to start from is no good one, or the place for
            checkpoints cannot be read.
        InvalidJournal: the journal is damaged, or of another cluster.
        Recovering: another scheduler has the journal, or its disk takes nothing.
    """
    if settings.journal is None:
        return Start(Decision(Cluster(cluster_settings(settings), clock.now_s())))
    store = SqliteStore(Path(settings.journal))
    try:
        kept = records.read(store.read())
        if kept is None:
            begun = Decision(Cluster(cluster_settings(settings), clock.now_s()))
        else:
            begun = Cluster.resumed(_as_set(kept, settings), clock.now_s())
        term = store.claim()
    except PushpullError as error:
        store.close()
        if isinstance(error, InvalidJournal) and store.name not in error.message:
            raise InvalidJournal(f"{store.name}: {error.message}") from error
        raise
    if kept is not None:
        view = begun.reply.view
        logs.info(
            "cluster_resumed",
            journal=store.name,
            start=term,
            view=view.view_number,
            nodes=sum(node.state.is_member for node in view.nodes),
            tables=len(view.tables),
        )
    return Start(begun, Journal(store))


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
        stop_when_done=settings.stop_when_done and not settings.checkpoint_url,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        lease_s=settings.lease_s,
        worker_timeout_s=settings.worker_timeout_s,
        adaptation_interval_s=settings.adaptation_interval_s,
        replica_count=settings.replicas,
        min_in_sync=settings.min_in_sync,
    )


def _as_set(kept: Kept, settings: SchedulerConfig) -> Kept:
    """What a journal has, as the settings have it today.

    Raises:
        InvalidJournal: it is of another cluster, or of one with other settings.
        InvalidConfig: a setting is out of its bounds.
        InvalidCheckpoint: the place for checkpoints cannot be read.
    """
    was = kept.settings
    if settings.cluster_id not in (None, was.cluster_id):
        raise InvalidJournal(
            f"it has cluster '{was.cluster_id}', and the settings say '{settings.cluster_id}': "
            "give another directory, or no cluster_id"
        )
    given = replace(
        was,
        worker_count=settings.workers,
        server_count=settings.servers,
        range_count=settings.ranges or was.range_count,
        max_workers=settings.max_workers,
        stop_when_done=settings.stop_when_done and not settings.checkpoint_url,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        lease_s=settings.lease_s,
        worker_timeout_s=settings.worker_timeout_s,
        adaptation_interval_s=settings.adaptation_interval_s,
        replica_count=settings.replicas,
        min_in_sync=settings.min_in_sync,
        checkpoint_full_every=settings.checkpoint_full_every,
        checkpoint_url=checkpoints_under(settings.checkpoint_url)[0],
    )
    for field, setting in _TOLD.items():
        before, now = getattr(was, field), getattr(given, field)
        if before != now:
            raise InvalidJournal(
                f"it has cluster '{was.cluster_id}' with {setting} {before!r}, and the settings "
                f"say {now!r}: start the scheduler as before, or give another directory, with "
                "which the cluster begins anew"
            )
    return replace(kept, settings=given)
