"""Decides whether a worker that joins a model may load what it brings: a load before its first step
has one meaning only where all workers are new, and none has trained without the others (SEMANTICS
S16).

    who is there beside it                     it loads
    a new one that has trained alone           not
    one from before that lives                 not; but so where nobody had taken a step yet
    one from before that may be dead           it waits: a lease shows that
    new ones alone                             when all have joined, or after `ALL_HERE_WITHIN_S`

Each passes the clocks after which others have joined, and all load at one clock.

What it deliberately does not do: wait for a view, or step anything (`ps_worker.training.joining`
and `trained_model` do).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from ps_core.cluster_view import ClusterView, NodeState
from ps_core.collective import is_late_joiner, workers_here
from ps_core.keys import Incarnation, TableId

ALL_HERE_WITHIN_S = 30.0
"""How long a worker that brings something waits for the others that the cluster was started for."""
_SILENT_LEASES = 1.2
"""Whoever is dead is silent in the view after a lease, and what that takes to come."""


class LateJoiner(NamedTuple):
    """A worker that joins a model.

    Attributes:
        incarnation: its own.
        joined_ids: the tables that were there before it.
        is_at_start: whether nobody had taken a step when it joined them.
        lease_s: of the cluster.
    """

    incarnation: Incarnation
    joined_ids: frozenset[TableId]
    is_at_start: bool
    lease_s: float

    @property
    def limits_s(self) -> tuple[float, float]:
        """When time alone decides something, from when it has joined."""
        return min(self.lease_s * _SILENT_LEASES, ALL_HERE_WITHIN_S), ALL_HERE_WITHIN_S


def may_load(view: ClusterView, late_joiner: LateJoiner, waited_s: float) -> bool | None:
    """Whether what a worker brings may be loaded, so long after it has joined; None: it waits."""
    silent_s, limit_s = late_joiner.limits_s
    if has_trained_alone(view, late_joiner.incarnation, late_joiner.joined_ids):
        return False
    before = [worker for worker in workers_here(view).values() if not is_late_joiner(view, worker)]
    if any(worker.state is NodeState.ALIVE for worker in before):
        return None if waited_s < silent_s else late_joiner.is_at_start
    if not before and all_have_joined(view, late_joiner.joined_ids):
        return True
    if waited_s < limit_s:
        return None
    return late_joiner.is_at_start or not before


def joined_tables(
    view: ClusterView, own: Incarnation, table_ids: Collection[TableId]
) -> frozenset[TableId]:
    """Those of the tables that were there before this worker; others have it from the start."""
    return frozenset(
        table.table_id
        for table in view.tables
        if table.table_id in table_ids and own in {join.incarnation for join in table.joins}
    )


def has_trained_alone(view: ClusterView, own: Incarnation, joined_ids: Collection[TableId]) -> bool:
    """Whether a new worker is there that took more than a step before another came: one that has
    read a table, and waits, is joined by the next a clock later. Tables may be joined a step apart;
    then a worker ends a clock with nothing on those where it is behind, which is no step.
    """
    here = {worker.incarnation for worker in workers_here(view).values()} | {own}
    clocks: dict[Incarnation, list[int]] = {}
    for table in [view.tables_by_id[table_id] for table_id in joined_ids]:
        for join in [join for join in table.joins if join.incarnation in here]:
            taken = join.after_clock - (table.restored_clock or 0)
            clocks.setdefault(join.incarnation, []).append(taken)
    steps = sorted(max(taken) for taken in clocks.values() if len(taken) == len(joined_ids))
    return any(later > earlier + 1 for earlier, later in pairwise(steps))


def all_have_joined(view: ClusterView, joined_ids: Collection[TableId]) -> bool:
    """Whether as many workers are there as the cluster was started for, and all have joined."""
    here = {worker.incarnation for worker in workers_here(view).values()}
    return len(here) >= view.worker_count and all(
        here <= {join.incarnation for join in view.tables_by_id[table_id].joins}
        for table_id in joined_ids
    )


def clocks_behind(view: ClusterView, clocks: Mapping[TableId, int]) -> int:
    """How many clocks lie between where a worker is and where the last of those that are there has
    joined.

    Args:
        view: the newest.
        clocks: of the tables that the worker has joined, where it is.
    """
    here = {worker.incarnation for worker in workers_here(view).values()}
    return max(
        (
            join.after_clock - clock
            for table_id, clock in clocks.items()
            for join in view.tables_by_id[table_id].joins
            if join.incarnation in here and join.after_clock > clock
        ),
        default=0,
    )
