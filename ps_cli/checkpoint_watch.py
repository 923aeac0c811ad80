"""Which checkpoints of a run failed: each is told once, when the scheduler first says so."""

from __future__ import annotations

from ps_cli.output import Output
from pushpull.v1 import scheduler_pb2


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
