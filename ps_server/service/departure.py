"""The departure of a server: it leaves when other servers have all that it holds.

    SIGTERM  --the scheduler: RECOVERING, and whom it waits for-->  ask again
             --the scheduler: you have left-->                      end
             --the grace is over, or no scheduler answers-->        end, and say what is lost

`departure_machine` decides. SIGINT is a person's: nothing is waited for.
"""

from __future__ import annotations

import asyncio

from ps_core.errors import PushpullError
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_server.replication.departure_machine import Departure, DepartureStep

REASON = "the server stops"
_ASK_AGAIN_S = 0.2


async def until_kept(link: SchedulerLink, end_s: float) -> bool:
    """Leave the cluster as soon as that loses nothing. The server goes on serving, since others
    copy from it.

    Args:
        link: the server's.
        end_s: when to give up, by `clock.now_s`.

    Returns:
        Whether the membership has ended so.

    Blocking: until then. One that the scheduler has not answered for a lease is not waited for:
        without it nobody becomes a holder of anything.
    """
    departure = Departure(end_s, link.lease_s)
    while (left_s := departure.left_s(clock.now_s())) > 0:
        said, alone = departure.awaited, _held_alone(link)
        error = await _asked(link, left_s)
        silent_s = clock.now_s() - link.last_scheduler_contact_s
        match departure.answered(error, silent_s, is_fenced=link.fenced_by is not None):
            case DepartureStep.LEAVES:
                if alone and link.replica_count == 1 and not link.checkpoint_url:
                    why = "one replica, and no place for checkpoints"
                    logs.warning("leaves_with_the_only_copy", ranges=alone, reason=why)
                return True
            case DepartureStep.LEAVES_UNHEARD:
                logs.warning("leaves_unheard", error="" if error is None else error.message)
                return False
        if departure.awaited != said:
            left = round(left_s, 1)
            logs.info("stays_for_now", reason=departure.awaited, grace_left_s=left)
        await asyncio.sleep(min(_ASK_AGAIN_S, left_s))
    alone = _held_alone(link)
    if alone or departure.awaited:
        why = departure.awaited or "no answer"
        logs.warning("leaves_with_the_only_copy", ranges=alone, reason=why)
    return False


async def _asked(link: SchedulerLink, timeout_s: float) -> PushpullError | None:
    """The reason for which the membership has not ended; None: it has."""
    try:
        await link.deregister_if_kept(REASON, timeout_s)
    except PushpullError as error:
        return error
    return None


def _held_alone(link: SchedulerLink) -> int:
    """Ranges that no other server has, as far as this one knows."""
    view, own = link.view, link.session.node_id
    if view is None or view.finished:
        return 0
    return sum(
        own in r.in_sync and view.living_servers.isdisjoint(set(r.in_sync) - {own})
        for r in view.ranges
    )
