"""What a run tells of checkpoints: which are there already, and which failed, each once."""

from __future__ import annotations

from ps_cli.console.output import Output
from ps_core.errors import PushpullError
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.launch.cluster_shape import CheckpointPlan
from pushpull.v1 import scheduler_pb2


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
