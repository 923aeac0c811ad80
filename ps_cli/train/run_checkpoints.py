"""Checkpoints of a run: those of earlier runs, those that failed, and the last one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass

from ps_cli.console.output import Output
from ps_cli.console.scheduler_query import SchedulerQuery, operator_link
from ps_cli.train.exit_rules import RunEnd
from ps_core.errors import InvalidCheckpoint, PushpullError, WaitExpired
from ps_runtime.checkpoint.calls import create_checkpoint
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.launch.cluster_shape import CheckpointPlan
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2

ATTEMPTS = 3
"""Attempts at the last checkpoint: if a server is lost in one, the others can make another."""


async def make_last(scheduler: str, last_s: float, ending: RunEnd, output: Output) -> bool:
    """Make a checkpoint of what the servers hold now, in `last_s` at most, and print its place or
    its failure; False if it failed. Without tables there is none to make.
    """
    with contextlib.suppress(PushpullError):
        async with SchedulerQuery(scheduler) as query:
            tables = (await query.status()).view.tables
            if all(table.run for table in tables):
                of_run = " of the run without a name" if tables else ""
                output.say(f"there is no last checkpoint, since there is no table{of_run}")
                return True
    if ending.exit_code:
        output.say(f"{ending.message}: making a last checkpoint; once more to stop at once")
    reason = "stopped" if ending.exit_code else "the end of training"
    try:
        made = await _attempted(scheduler, reason, last_s, output)
    except PushpullError as error:
        is_late = isinstance(error, WaitExpired)
        remedy = f"; to give it more than {last_s:g} s: --checkpoint-last-s" if is_late else ""
        output.complain(f"there is no last checkpoint: {error.message}{remedy}")
        return False
    output.say(f"checkpoint {made}")
    return True


async def _attempted(scheduler: str, reason: str, last_s: float, output: Output) -> str:
    """As `create`, `ATTEMPTS` times at most if the checkpoint fails, all within `last_s`."""
    end_s = clock.now_s() + last_s
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            return await create(scheduler, reason, end_s - clock.now_s())
        except InvalidCheckpoint as error:
            if not attempts_left or clock.now_s() >= end_s:
                raise
            output.warn(f"{error.message}; it is tried again")
    raise AssertionError("the last attempt returns or raises")


async def create(
    scheduler: str, reason: str, timeout_s: float, answers_within_s: float = math.inf
) -> str:
    """Make a checkpoint within `timeout_s`; its directory and the bytes of its files, in words. The
    scheduler has to answer in `answers_within_s` at most. Ends at once when it is cancelled.

    Raises:
        PushpullError: the checkpoint failed.
    """
    end_s = clock.now_s() + timeout_s
    async with operator_link(scheduler, min(timeout_s, answers_within_s)) as link:
        left_s = max(end_s - clock.now_s(), 0.0)
        made = await create_checkpoint(link, reason, left_s, covered_by=0, view_number=0)
        began_from = (await link.view_at_least(0, left_s)).restored_from
    is_source = made.url == began_from
    why = ": the servers have taken no step since the cluster began from it" if is_source else ""
    return f"{made.url} ({made.byte_count:,} bytes){why}"


def earlier_checkpoints(plan: CheckpointPlan, output: Output) -> frozenset[str]:
    """The names of the checkpoints that are there before a run. Warns if it begins at step 0 all
    the same, because --resume may have been forgotten.
    """
    if not plan.url:
        return frozenset()
    try:
        store = CheckpointStore(plan.url)
        names, found = frozenset(store.names()), list(store.runs().values())
    except PushpullError:
        return frozenset()  # the scheduler reports it
    if found and not plan.resume:
        output.warn(
            f"{plan.url} has checkpoints of an earlier run, the newest of them {found[-1]}; this "
            f"run begins at step 0 and leaves them there. To go on from them: --resume {plan.url}"
        )
    return names


@dataclass(frozen=True, slots=True)
class RunBeginning:
    """A run's cluster, the checkpoint that it began from, and its timeline; each empty if it is not
    known. A restore in place changes the latter two.
    """

    cluster_id: str = ""
    restored_from: str = ""
    timeline: bytes = b""


def tell_how_to_go_on(
    plan: CheckpointPlan, earlier: Collection[str], beginning: RunBeginning, output: Output
) -> None:
    """Print the checkpoint from which a run that has failed can go on, if there is one: the newest
    good one of its cluster and timeline, which is none of the `earlier`, or the one that it began
    from. What a restore in place has left behind is none.
    """
    words = ""
    if beginning.restored_from:
        begins = f"to begin where it began: --resume {beginning.restored_from}"
        words = f"it has made no checkpoint; {begins}"
    with contextlib.suppress(PushpullError):
        if plan.url and beginning.cluster_id:
            of_run = beginning.cluster_id, beginning.timeline
            own = CheckpointStore(plan.url).newest_good(earlier, *of_run)
            if own is not None:
                words = f"to go on from its newest checkpoint: --resume {own.url}"
    if words:
        output.complain(words)


def tell_beginning(plan: CheckpointPlan, restored_from: str, output: Output) -> None:
    """Print the checkpoint that a run with --resume goes on from, or that there is none."""
    if restored_from:
        output.say(f"goes on from checkpoint {restored_from}")
    elif plan.resume:
        output.say(f"there is no checkpoint under {plan.url} yet: the run begins at step 0")


class CheckpointWatch:
    """Counts the checkpoints of a run that failed, and warns of each."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._told_count = 0
        self.failed_count = 0

    def observe(self, history: scheduler_pb2.CheckpointHistory) -> None:
        """Warn of the failures since the last call. A restored cluster counts from 0 again."""
        known, self._told_count = self._told_count, history.failed_count
        new_count = history.failed_count - (known if known <= history.failed_count else 0)
        if not new_count:
            return
        self.failed_count += new_count
        others = f" (and {new_count - 1} before it)" if new_count > 1 else ""
        self._output.warn(
            f"checkpoint {history.failed_number} failed{others}: {history.failed_reason}"
        )
