"""A worker's messages to the scheduler about checkpoints: clocks, questions, reports of states."""

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
    """Sends these messages, from any thread; `all_answered` belongs to the loop.

    A `ps_worker.checkpoint.save_points.Scheduler`; `post` calls a function on the loop, in order.
    """

    def __init__(self, link: SchedulerLink, post: Callable[..., None]) -> None:
        self._link = link
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def join_checkpoint(
        self,
        number: int,
        clocks: Mapping[TableId, int],
        *,
        has_state: bool,
        has_begun: bool,
        question: Question | None = None,
        answered: Callable[[bool], None] | None = None,
    ) -> None:
        stays = question is Question.MUST_STEP

        async def join() -> None:
            heard = await join_checkpoint(
                self._link, number, clocks, has_state, has_begun=has_begun, stays=stays
            )
            if answered is not None:
                answered(heard.must_step if stays else heard.is_awaited)

        self._post(self._start, join())

    def report_part(self, number: int, part: PartReport) -> None:
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
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
