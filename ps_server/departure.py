"""A server that is told to stop leaves when others have all that it holds.

    SIGTERM  --the scheduler: RECOVERING, and whom it waits for-->  ask again
             --the scheduler: you have left-->                      end
             --the grace is over, or no scheduler answers-->        end, and say what is lost

SIGINT is a person's: nothing is waited for.
"""

from __future__ import annotations

import asyncio

from ps_core.errors import PushpullError, Recovering
from ps_runtime import clock, logs
from ps_runtime.scheduler_link import SchedulerLink

REASON = "the server stops"
_ASK_AGAIN_S = 0.2


async def until_kept(link: SchedulerLink, end_s: float) -> bool:
    """Leave the cluster as soon as nothing is lost by that. The server goes on serving meanwhile,
    since others copy from it.

    Args:
        link: the server's.
        end_s: when to give up, by `clock.now_s`.

    Returns:
        Whether the membership has ended so.

    Blocking: until then. One that the scheduler has not answered for a lease is not waited for:
        without it nobody becomes a holder of anything.
    """
    said = ""
    while True:
        left_s = end_s - clock.now_s()
        try:
            if left_s > 0:
                alone = _held_alone(link)
                await link.deregister_if_kept(REASON, left_s)
                if alone and link.replica_count == 1 and not link.checkpoint_url:
                    why = "one replica, and no place for checkpoints"
                    logs.warning("leaves_with_the_only_copy", ranges=alone, reason=why)
                return True
        except Recovering as error:
            if error.message != said:
                logs.info("stays_for_now", reason=error.message, grace_left_s=round(left_s, 1))
            said = error.message
        except PushpullError as error:
            silent_s = clock.now_s() - link.last_scheduler_contact_s
            if link.fenced_by is not None or silent_s > link.lease_s:
                logs.warning("leaves_unheard", error=error.message)
                return False
        if left_s <= 0:
            alone = _held_alone(link)
            if alone or said:
                logs.warning("leaves_with_the_only_copy", ranges=alone, reason=said or "no answer")
            return False
        await asyncio.sleep(min(_ASK_AGAIN_S, left_s))


def _held_alone(link: SchedulerLink) -> int:
    """How many ranges no other server has, as far as this one knows."""
    view, own = link.view, link.session.node_id
    if view is None or view.finished:
        return 0
    return sum(
        own in r.in_sync and view.living_servers.isdisjoint(set(r.in_sync) - {own})
        for r in view.ranges
    )
