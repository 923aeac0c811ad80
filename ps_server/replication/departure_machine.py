"""Decides when a server that was told to stop may end.

    asks --the scheduler: you have left------------------> LEAVES
         --RECOVERING, and whom it waits for--> STAYS ---> asks again
         --fenced, or no scheduler within a lease--------> LEAVES_UNHEARD
         --the grace is over-----------------------------> may not ask any more

What it deliberately does not do: ask, wait, or end anything (`departure` does).
"""

from __future__ import annotations

from enum import Enum

from ps_core.errors import PushpullError, Recovering


class Step(Enum):
    """What a server does that has got an answer."""

    LEAVES = "leaves"
    STAYS = "stays"
    LEAVES_UNHEARD = "leaves unheard"


class Departure:
    """One server's way out.

    Args:
        end_s: when the grace is over.
        lease_s: a server leaves that has not heard the scheduler for longer: without it nobody
            becomes a holder of anything.

    Attributes:
        awaited: whom the scheduler named last to wait for.
    """

    def __init__(self, end_s: float, lease_s: float) -> None:
        self.awaited = ""
        self._end_s = end_s
        self._lease_s = lease_s

    def left_s(self, now_s: float) -> float:
        """How much of the grace is left; 0: it may not ask any more."""
        return max(0.0, self._end_s - now_s)

    def answered(
        self, error: PushpullError | None, silent_s: float, *, is_fenced: bool = False
    ) -> Step:
        """The scheduler, or nobody, has answered.

        Args:
            error: the refusal; None: the membership has ended.
            silent_s: for how long the scheduler has not been heard.
            is_fenced: the server has been told that it is no member any more.
        """
        if error is None:
            return Step.LEAVES
        # The scheduler says when to ask again; where nobody listens, gRPC's own failure is a
        # `Recovering` too.
        if isinstance(error, Recovering) and error.retry_after_ms:
            self.awaited = error.message
            return Step.STAYS
        is_unheard = is_fenced or silent_s > self._lease_s
        return Step.LEAVES_UNHEARD if is_unheard else Step.STAYS
