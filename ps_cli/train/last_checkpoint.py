"""The checkpoint that a run makes at its end, whether its work is done or a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib

from ps_cli.console.exit_rules import Ending
from ps_cli.console.output import Output
from ps_cli.console.scheduler_query import SchedulerQuery
from ps_core.errors import PushpullError

DEADLINE_S = 60.0
"""A step may have to end, and everything has to be written; a second signal ends it earlier."""


async def make_last(scheduler: str, ending: Ending, output: Output) -> bool:
    """Make a checkpoint of what the servers hold now, and say where it is, or why there is none.

    Returns:
        Whether nothing is lost: there is one, or nothing to be written.
    """
    with contextlib.suppress(PushpullError):
        async with SchedulerQuery(scheduler) as query:
            if not (await query.status()).view.tables:
                output.say("there is no last checkpoint, since there is no table")
                return True
    if ending.exit_code:
        output.say(f"{ending.message}: making a last checkpoint; once more to stop at once")
    reason = "stopped" if ending.exit_code else "the end of training"
    try:
        url, byte_count = await asyncio.to_thread(create, scheduler, reason, DEADLINE_S)
    except PushpullError as error:
        output.complain(f"there is no last checkpoint: {error.message}")
        return False
    output.say(f"checkpoint {url} ({byte_count:,} bytes)")
    return True


def create(scheduler: str, reason: str, timeout_s: float) -> tuple[str, int]:
    """Make a checkpoint; its directory, and the bytes of its files.

    Blocking: until it is complete, at most `timeout_s`.

    Raises:
        PushpullError: there is none, and why.
    """
    # Here, so that the other commands start without torch.
    import ps_worker

    with ps_worker.connect(
        scheduler, role="operator", request_deadline_s=timeout_s, connect_deadline_s=timeout_s
    ) as client:
        made = client.checkpoint(reason).wait()
    return made.url, made.byte_count
