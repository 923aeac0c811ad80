"""Decides if a late joiner may load state before its first step: all workers must be new, and none
may have trained without the others, because all load the same (SEMANTICS S16).

    other workers present                      a load
    a new one that has trained alone           is refused
    an old one that lives                      is refused, unless no worker had taken a step yet
    an old one that may be dead                waits for a lease to decide
    only new ones                              waits until all have joined, or `ALL_HERE_WITHIN_S`

Each passes the clocks after which others have joined, and all load at one clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

from ps_core.cluster_view import ClusterView, NodeState
from ps_core.collective_calls import is_late_joiner, workers_here
from ps_core.keys import Incarnation, TableId

ALL_HERE_WITHIN_S = 30.0
"""Seconds that a worker waits with a load for the workers that the cluster was started for."""
_SILENT_LEASES = 1.2
"""A dead worker is silent in the view after so many leases, which includes the view's delay."""


class LateJoiner(NamedTuple):
    """A worker that joins a model."""

    incarnation: Incarnation
    joined_ids: frozenset[TableId]
    """The tables that are older than it."""
    is_at_start: bool
    """No worker had taken a step when it joined them."""
    lease_s: float

    @property
    def limits_s(self) -> tuple[float, float]:
        """The waits, counted from its join, after which time alone decides."""
        return min(self.lease_s * _SILENT_LEASES, ALL_HERE_WITHIN_S), ALL_HERE_WITHIN_S


def may_load(view: ClusterView, late_joiner: LateJoiner, waited_s: float) -> bool | None:
    """True if a worker may load, `waited_s` after it has joined; None: it waits."""
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
    """The tables of `table_ids` that are older than this worker."""
    return frozenset(
        table.table_id
        for table in view.tables
        if table.table_id in table_ids and own in {join.incarnation for join in table.joins}
    )


def has_trained_alone(view: ClusterView, own: Incarnation, joined_ids: Collection[TableId]) -> bool:
    """True if a new worker took more than one step before another joined: a step that a former
    worker had sealed may lie between two joins, too. Tables may be joined a step apart; the empty
    step of a worker on tables where it is behind does not count.
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
    """True if the workers that the cluster was started for are present, and all have joined."""
    here = {worker.incarnation for worker in workers_here(view).values()}
    return len(here) >= view.worker_count and all(
        here <= {join.incarnation for join in view.tables_by_id[table_id].joins}
        for table_id in joined_ids
    )


def clocks_behind(view: ClusterView, clocks: Mapping[TableId, int]) -> int:
    """Clocks from a worker's `clocks` to the one after which the last present worker joined."""
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
