"""Watches the roles of a local cluster while something goes on, and ends them all when it ends.

Rules:
    - The run ends at the first of: a signal; the end of a role that nobody asked to end, where the
      rules (`ps_cli.console.exit_rules`) say so; the work itself failing.
    - Whatever ends it, every role is stopped before `run` returns, unless the run ends well and its
      roles are kept for the next. A second signal kills at once.
    - A run that ends well, or by a signal, may have a last thing to do while its roles still serve;
      a signal ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from ps_cli.console.exit_rules import FAILURE_EXIT_CODE, Ending, ExitRules, StartAgain
from ps_cli.console.output import Output
from ps_core.errors import PushpullError
from ps_runtime.launch.launcher import Launcher, RoleExit, RoleProcess


async def _nothing(_: RoleExit) -> None:
    """What is done about the end of a role by whoever does nothing about it."""


class Supervisor:
    """Owns the launcher of one run.

    Args:
        output: where the roles' lines and the reasons go.
        shown_kinds: the kinds of role whose lines are shown; of others they are kept for the
            message about their end.
    """

    def __init__(self, output: Output, shown_kinds: frozenset[str]) -> None:
        self._output = output
        self._shown_kinds = shown_kinds
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[RoleExit | signal.Signals | Exception] = asyncio.Queue()
        self._following: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._caught: set[signal.Signals] = set()
        self.launcher = Launcher(on_line=self._on_line, on_exit=self._on_exit)

    async def run(
        self,
        work: Coroutine[Any, Any, None],
        rules: ExitRules,
        last: Callable[[Ending], Coroutine[Any, Any, None]] | None = None,
        ended: Callable[[RoleExit], Coroutine[Any, Any, None]] = _nothing,
        *,
        is_kept: bool = False,
    ) -> Ending:
        """Do `work` until the run ends, then stop every role.

        Args:
            work: starts the roles and shows what they do; it is cancelled at the end.
            rules: what the end of a role means.
            last: what is done before the roles are stopped, unless the run failed.
            ended: what is done when a role has ended, before it is started again.
            is_kept: a run that ends well leaves its roles for another one, or for `stop`.

        Returns:
            How it ended; the caller tells the user.
        """
        self._catch_signals()
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._first_ending(rules, ended))
        goes_on = False
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            ending = watching.result() if watching.done() else _failure(working)
            if last is not None and ending.exit_code != FAILURE_EXIT_CODE:
                working.cancel()
                await self._unless_stopped(self._last(last, ending))
            goes_on = is_kept and not ending.exit_code
            return ending
        finally:
            tasks = (working, watching, *self._following)
            for task in tasks:
                task.cancel()
            if not goes_on:
                await asyncio.to_thread(self._stop)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Stop every role, and catch signals no more. Idempotent."""
        await asyncio.to_thread(self._stop)
        for number in self._caught:
            self._loop.remove_signal_handler(number)
        self._caught.clear()

    @property
    def is_whole(self) -> bool:
        """Whether another run may have its roles: none was stopped, and all but workers live."""
        others = (p for p in self.launcher.processes if p.command.kind != "worker")
        return not self._is_stopping and all(role.exit is None for role in others)

    async def _last(
        self, last: Callable[[Ending], Coroutine[Any, Any, None]], ending: Ending
    ) -> None:
        if not ending.exit_code:  # else roles may be about to be started again
            await asyncio.gather(*self._following)
        await last(ending)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        doing = asyncio.create_task(work)
        stopped = asyncio.create_task(self._signalled())
        try:
            await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, stopped):
                task.cancel()
            await asyncio.gather(doing, stopped, return_exceptions=True)

    async def _signalled(self) -> None:
        while not isinstance(await self._events.get(), signal.Signals):
            pass

    def _stop(self) -> None:
        self._is_stopping = True
        self.launcher.stop()

    async def _first_ending(
        self, rules: ExitRules, ended: Callable[[RoleExit], Coroutine[Any, Any, None]]
    ) -> Ending:
        while True:
            event = await self._events.get()
            if isinstance(event, signal.Signals):
                return Ending(128 + event, f"stopped by {event.name}")
            if isinstance(event, Exception):
                raise event
            servers = (p for p in self.launcher.processes if p.command.kind == "server")
            meaning = rules.judge(event, sum(server.is_serving for server in servers))
            again = meaning if isinstance(meaning, StartAgain) else None
            following = asyncio.create_task(self._follow(event, ended, again))
            self._following.add(following)
            following.add_done_callback(self._following.discard)
            if isinstance(meaning, Ending):
                return meaning
            if meaning.message:
                self._output.say(meaning.message)

    async def _follow(
        self,
        role_exit: RoleExit,
        ended: Callable[[RoleExit], Coroutine[Any, Any, None]],
        again: StartAgain | None,
    ) -> None:
        """What follows the end of a role, beside whatever else happens."""
        try:
            await ended(role_exit)
            if again is not None:
                await asyncio.sleep(again.after_s)
                await asyncio.to_thread(self.launcher.start_again, role_exit.command)
        except Exception as error:  # noqa: BLE001 - raised where the run is watched
            if not self._is_stopping:
                self._events.put_nowait(error)

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP on purpose.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._loop.add_signal_handler(number, self._on_signal, number)
            self._caught.add(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_stopping:
            self.launcher.kill()
            return
        self._events.put_nowait(number)

    def _on_exit(self, role_exit: RoleExit) -> None:
        if role_exit.was_stopped:
            return
        # The loop may be gone if a role ends while the tool does.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, role_exit)

    def _on_line(self, process: RoleProcess, line: str) -> None:
        if process.command.kind in self._shown_kinds:
            self._output.role_line(process.name, line, process.command.index or 0)


def _failure(working: asyncio.Task[None]) -> Ending:
    """What the work's own end means: its error, or that there was nothing left to do."""
    error = working.exception()
    if error is None:
        return Ending(0)
    if isinstance(error, PushpullError):
        return Ending(FAILURE_EXIT_CODE, error.message)
    raise error
