"""A worker's messages to the scheduler about checkpoints, from any thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ps_core.errors import PushpullError
from ps_core.keys import TableId
from ps_core.manifest import PartReport
from ps_runtime.checkpoint.calls import join_checkpoint, report_part
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.observe import logs
from ps_worker.checkpoint.save_points import Question


class CheckpointLink:
    """A `ps_worker.checkpoint.save_points.Scheduler`.

    Args:
        link: to the scheduler.
        post: calls a function on the loop of `link`, from any thread, in order.
    """

    def __init__(self, link: SchedulerLink, post: Callable[..., None]) -> None:
        self._link = link
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def join_checkpoint(
        self, number: int, clocks: Mapping[TableId, int], *, has_state: bool
    ) -> None:
        """Report this worker's clocks."""

        async def join() -> None:
            await join_checkpoint(self._link, number, clocks, has_state)

        self._post(self._start, join())

    def ask_about_checkpoint(
        self,
        question: Question,
        number: int,
        clocks: Mapping[TableId, int],
        *,
        has_state: bool,
        answered: Callable[[bool], None],
    ) -> None:
        """Report this worker's clocks, and ask; the loop calls `answered`."""
        stays = question is Question.MUST_STEP

        async def ask() -> None:
            heard = await join_checkpoint(self._link, number, clocks, has_state, stays=stays)
            answered(heard.must_step if stays else heard.is_awaited)

        self._post(self._start, ask())

    def report_part(self, number: int, part: PartReport) -> None:
        """Report a written part."""
        self._post(self._start, report_part(self._link, number, part))

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _carry_out(call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except PushpullError as error:
            logs.warning("checkpoint_word_unheard", error=error.message)

    async def all_answered(self, deadline_s: float) -> None:
        """Wait until the scheduler has answered all calls, at most `deadline_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
