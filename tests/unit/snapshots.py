"""Snapshots that catching-up backups are given, each made at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ps_core.keys import NodeId
from ps_core.sliced_work import at_once
from ps_server.replication.messages import Snapshot
from ps_server.replication.output_commit import OutputCommit
from ps_server.replication.range_roles import Replication


def snapshots_of(
    of: Replication | OutputCommit,
    now_s: float,
    has_space: Callable[[NodeId], bool] = lambda _: True,
) -> Iterator[tuple[NodeId, Snapshot]]:
    for node_id, work in of.copies(now_s, has_space):
        yield node_id, at_once(work)
