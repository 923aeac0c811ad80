"""Decides when a server that was told to stop may end.

asks --the scheduler: you have left------------------> LEAVES
--RECOVERING, with whom it waits for-> STAYS ---> asks again
--fenced, or no scheduler within a lease--------> LEAVES_UNHEARD
--no scheduler, which could still save values---> STAYS ---> asks again
--the grace is over-----------------------------> may not ask any more
"""

from __future__ import annotations

from enum import Enum

from ps_core.cluster_view import ClusterView
from ps_core.errors import PushpullError, Recovering
from ps_core.keys import NodeId


class DepartureStep(Enum):
    """Steps of a server that has got an answer."""

    LEAVES = "leaves"
    STAYS = "stays"
    LEAVES_UNHEARD = "leaves unheard"


class Departure:
    """Departure of one server.

    Args:
        end_s: end of the grace.
        lease_s: a server leaves that has not heard the scheduler for longer, since without one
            nobody else comes to hold its ranges; but for one with values that may be saved when
            the scheduler is back.

    Attributes:
        awaited: the servers and ranges that the scheduler last named to wait for.
    """

    def __init__(self, end_s: float, lease_s: float) -> None:
        self.awaited = ""
        self._end_s = end_s
        self._lease_s = lease_s

    def left_s(self, now_s: float) -> float:
        """Seconds of the grace that are left; at 0 the server may not ask any more."""
        return max(0.0, self._end_s - now_s)

    def answered(
        self,
        error: PushpullError | None,
        silent_s: float,
        *,
        is_fenced: bool = False,
        may_be_saved: bool = False,
    ) -> DepartureStep:
        """Take the scheduler's answer, or the failure to get one; None: the membership has ended.

        Args:
            error: as above.
            silent_s: since the scheduler was heard.
            is_fenced: the server is no member any more.
            may_be_saved: it has values that are lost if it leaves now, and that a scheduler could
                have others copy, or a checkpoint.
        """
        if error is None:
            return DepartureStep.LEAVES
        # Only the scheduler says when to ask again; gRPC's own failure is a `Recovering`, too.
        if isinstance(error, Recovering) and error.retry_after_ms:
            self.awaited = error.message
            return DepartureStep.STAYS
        is_unheard = is_fenced or (silent_s > self._lease_s and not may_be_saved)
        return DepartureStep.LEAVES_UNHEARD if is_unheard else DepartureStep.STAYS


def held_alone(view: ClusterView | None, own: NodeId) -> int:
    """The ranges with values that no other server has, as a view says: how many."""
    if view is None or view.finished:
        return 0
    held = {range_id for t in view.tables for range_id in t.blocks_by_range(len(view.ranges))}
    return sum(
        own in r.in_sync
        and r.range_id in held
        and view.living_servers.isdisjoint(set(r.in_sync) - {own})
        for r in view.ranges
    )
