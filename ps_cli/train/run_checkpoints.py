"""Checkpoints of a run: which are there already, which failed, and the one at its end, whether its
work is done or a signal ends it.
"""

from __future__ import annotations

import asyncio
import contextlib

from ps_cli.console.exit_rules import Ending
from ps_cli.console.output import Output
from ps_cli.console.scheduler_query import SchedulerQuery
from ps_core.errors import PushpullError
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.launch.cluster_shape import CheckpointPlan
from pushpull.v1 import scheduler_pb2

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


def warn_of_earlier_runs(plan: CheckpointPlan, output: Output) -> None:
    """Say so where a run begins at step 0 beside the checkpoints of another: --resume may have been
    forgotten.

    Blocking: reads the manifests that are there.
    """
    if not plan.url or plan.resume:
        return
    try:
        found = list(CheckpointStore(plan.url).runs().values())
    except PushpullError:
        return  # the scheduler says what is wrong with the place
    if found:
        output.warn(
            f"{plan.url} has checkpoints of an earlier run, the newest of them {found[-1]}; this "
            f"run begins at step 0 and leaves them there. To go on from them: --resume {plan.url}"
        )


def tell_beginning(plan: CheckpointPlan, restored_from: str, output: Output) -> None:
    """Say which checkpoint a run goes on from, where it was to go on from one."""
    if restored_from:
        output.say(f"goes on from checkpoint {restored_from}")
    elif plan.resume:
        output.say(f"there is no checkpoint under {plan.url} yet: the run begins at step 0")


class CheckpointWatch:
    """What a run has heard of its checkpoints.

    Args:
        output: where a failure is told.

    Attributes:
        failed_count: how many failed, all in all.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._told_count = 0
        self.failed_count = 0

    def observe(self, history: scheduler_pb2.CheckpointHistory) -> None:
        """Tell what has failed since the last look. A restored cluster begins to count anew."""
        new_count = history.failed_count - self._told_count
        self._told_count = history.failed_count
        if new_count < 0:
            new_count = history.failed_count
        if not new_count:
            return
        self.failed_count += new_count
        others = f" (and {new_count - 1} before it)" if new_count > 1 else ""
        self._output.warn(
            f"checkpoint {history.failed_number} failed{others}: {history.failed_reason}"
        )
