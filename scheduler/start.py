"""The cluster that a scheduler serves when it starts: a new one, or the one in its journal.

Rules:
    - A journal with a cluster wins over `resume`, which is for the first start. Settings that nodes
      were told (`_TOLD`) must be those of the journal; the others may change with each start.
    - A journal that is refused stays as it is.
    - A new cluster needs a place where checkpoints can be written, and one that goes on does not.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ps_core.errors import InvalidJournal, PushpullError
from ps_core.keys import Incarnation, range_count_for
from ps_runtime.observe import logs
from ps_runtime.system import clock
from scheduler.config import SchedulerConfig
from scheduler.edge.publication import JournalWriter
from scheduler.edge.restoring import (
    checkpoints_again_under,
    checkpoints_under,
    restored_at_start,
)
from scheduler.edge.sqlite_store import SqliteStore
from scheduler.journal import records
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import (
    MIN_TOKEN_KEY_BYTES,
    TIMELINE_BYTES,
    ClusterSettings,
    JournaledCluster,
)

_INCARNATION_BITS = 40
"""Bits of the first incarnation; the rest of the contract's 53 is for counting up."""

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
"""Cluster settings that nodes were told, and the flag of each."""

_UNTOLD = ("worker_timeout_s", "adaptation_interval_s", "checkpoint_full_every")
"""Cluster settings that may change with each start, and have the names of their flags."""


@dataclass(frozen=True, slots=True)
class SchedulerStart:
    """The cluster to serve, with the transitions of its start, and its journal, if it has one."""

    begun: Decision[Cluster]
    journal: JournalWriter | None = None


def started(settings: SchedulerConfig) -> SchedulerStart:
    """Resume the cluster in the journal; begin a new one if there is none. Blocking: reads the
    journal and checkpoints, which it may refuse.
    """
    if settings.journal is None:
        return SchedulerStart(Decision(Cluster(cluster_settings(settings), clock.now_s())))
    store = SqliteStore(Path(settings.journal))
    try:
        journaled = records.read(store.read())
        if journaled is None:
            begun = Decision(Cluster(cluster_settings(settings), clock.now_s()))
        else:
            begun = Cluster.resumed(_with_settings(journaled, settings), clock.now_s())
        term = store.claim()
    except PushpullError as error:
        store.close()
        if isinstance(error, InvalidJournal) and store.name not in error.message:
            raise InvalidJournal(f"{store.name}: {error.message}") from error
        raise
    if journaled is not None:
        view = begun.reply.view
        logs.info(
            "cluster_resumed",
            journal=store.name,
            start=term,
            view=view.view_number,
            nodes=sum(node.state.is_member for node in view.nodes),
            tables=len(view.tables),
        )
    return SchedulerStart(begun, JournalWriter(store))


def cluster_settings(settings: SchedulerConfig) -> ClusterSettings:
    """Settings of a new cluster. Its identities and its key are drawn here, and nowhere else."""
    checkpoint_url, newest = checkpoints_under(settings.checkpoint_url)
    return ClusterSettings(
        checkpoint_count=newest,
        restored=restored_at_start(settings.resume, checkpoint_url),
        cluster_id=settings.cluster_id or secrets.token_hex(8),
        timeline=secrets.token_bytes(TIMELINE_BYTES),
        token_key=secrets.token_bytes(2 * MIN_TOKEN_KEY_BYTES),
        first_incarnation=Incarnation(1 + secrets.randbits(_INCARNATION_BITS)),
        range_count=settings.ranges or range_count_for(settings.servers),
        **_given(settings, checkpoint_url),
    )


def _given(settings: SchedulerConfig, checkpoint_url: str) -> dict[str, Any]:
    """Cluster settings that every start gives, by field, but for `range_count`."""
    given = _TOLD | dict(zip(_UNTOLD, _UNTOLD, strict=True))
    del given["range_count"]
    return {field: getattr(settings, flag) for field, flag in given.items()} | {
        "stop_when_done": settings.stop_when_done and not settings.checkpoint_url,
        "checkpoint_url": checkpoint_url,
    }


def _with_settings(journaled: JournaledCluster, settings: SchedulerConfig) -> JournaledCluster:
    """The journaled cluster with the settings of this start, if these may differ."""
    was = journaled.settings
    if settings.cluster_id not in (None, was.cluster_id):
        raise InvalidJournal(
            f"it has cluster '{was.cluster_id}', and the settings say '{settings.cluster_id}': "
            "give another directory, or no cluster_id"
        )
    given = replace(
        was,
        range_count=settings.ranges or was.range_count,
        **_given(settings, checkpoints_again_under(settings.checkpoint_url)),
    )
    for field, setting in _TOLD.items():
        before, now = getattr(was, field), getattr(given, field)
        if before != now:
            raise InvalidJournal(
                f"it has cluster '{was.cluster_id}' with {setting} {before!r}, and the settings "
                f"say {now!r}: start the scheduler as before, or give another directory, with "
                "which the cluster begins anew"
            )
    return replace(journaled, settings=given)
