"""Watches the roles of a local cluster during a run, and stops them all when the run ends.

Rules:
    - The run ends at the first of: a signal; a role's end that ends the run by the rules of
      `ps_cli.train.exit_rules`; an error of the run's own work.
    - Every role is stopped before `run` returns, unless the run ends well and leaves its roles for
      the next. A second signal kills the roles at once.
    - A run that did not fail may do a last thing while its roles still serve; a signal ends that.
      A scheduler or server that dies meanwhile is started again by the same rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from ps_cli.console.output import Output
from ps_cli.train.exit_rules import FAILURE_EXIT_CODE, ExitRules, RestartRole, RunEnd, Verdict
from ps_core.errors import PushpullError
from ps_runtime.launch.launcher import Launcher, RoleExit, RoleProcess

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Work = Coroutine[Any, Any, None]


async def _nothing(_: RoleExit) -> None:
    pass


class Supervisor:
    """Owns the launcher of one run. Lines of roles of the kinds `shown_kinds` are shown; those of
    others appear only in the message about a role's end.
    """

    def __init__(self, output: Output, shown_kinds: frozenset[str]) -> None:
        self._output = output
        self._shown_kinds = shown_kinds
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[RoleExit | signal.Signals | Exception] = asyncio.Queue()
        self._following: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self.launcher = Launcher(on_line=self._on_line, on_exit=self._on_exit)

    async def run(
        self,
        work: Work,
        rules: ExitRules,
        last: Callable[[RunEnd], Work] | None = None,
        ended: Callable[[RoleExit], Work] = _nothing,
        *,
        leaves_roles: bool = False,
    ) -> RunEnd:
        """Do `work` until the run ends, then stop every role.

        Args:
            work: starts the roles and shows their progress; it is cancelled at the end.
            rules: decide what follows from the end of a role.
            last: called before the roles are stopped, unless the run failed.
            ended: called when a role has ended, before it is started again.
            leaves_roles: a run that ends well leaves its roles to another run, or to `stop`.
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
                watching.cancel()
                await self._unless_stopped(self._last(last, ending), rules, ended)
            goes_on = leaves_roles and not ending.exit_code
            return ending
        finally:
            tasks = (working, watching, *self._following)
            for task in tasks:
                task.cancel()
            if not goes_on:
                await asyncio.to_thread(self._stop)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Stop every role, and stop catching signals. Idempotent."""
        await asyncio.to_thread(self._stop)
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    @property
    def is_whole(self) -> bool:
        """True if another run may have the roles: none was stopped, and all but workers live."""
        others = (p for p in self.launcher.processes if p.command.kind != "worker")
        return not self._is_stopping and all(role.exit is None for role in others)

    async def _last(self, last: Callable[[RunEnd], Work], ending: RunEnd) -> None:
        if not ending.exit_code:  # otherwise roles may wait to be started again
            await asyncio.gather(*self._following)
        await last(ending)

    async def _unless_stopped(
        self, work: Work, rules: ExitRules, ended: Callable[[RoleExit], Work]
    ) -> None:
        async def signalled() -> None:
            while not isinstance(event := await self._events.get(), signal.Signals):
                if isinstance(event, Exception):
                    self._output.complain(str(event))
                elif event.command.kind != "worker" and event.returncode:
                    self._judged(event, rules, ended)

        doing = asyncio.create_task(work)
        stopped = asyncio.create_task(signalled())
        try:
            await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, stopped):
                task.cancel()
            await asyncio.gather(doing, stopped, return_exceptions=True)

    def _stop(self) -> None:
        self._is_stopping = True
        self.launcher.stop()

    async def _first_ending(self, rules: ExitRules, ended: Callable[[RoleExit], Work]) -> RunEnd:
        while True:
            event = await self._events.get()
            if isinstance(event, signal.Signals):
                return RunEnd(128 + event, f"stopped by {event.name}")
            if isinstance(event, Exception):
                raise event
            verdict = self._judged(event, rules, ended)
            if isinstance(verdict, RunEnd):
                return verdict

    def _judged(
        self, role_exit: RoleExit, rules: ExitRules, ended: Callable[[RoleExit], Work]
    ) -> Verdict:
        """Follow the rules; what they say is printed, unless the run ends."""
        servers = (p for p in self.launcher.processes if p.command.kind == "server")
        verdict = rules.judge(role_exit, sum(server.is_serving for server in servers))
        again = verdict if isinstance(verdict, RestartRole) else None
        following = asyncio.create_task(self._follow(role_exit, ended, again))
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        if verdict.message and not isinstance(verdict, RunEnd):
            self._output.say(verdict.message)
        return verdict

    async def _follow(
        self, role_exit: RoleExit, ended: Callable[[RoleExit], Work], again: RestartRole | None
    ) -> None:
        try:
            await ended(role_exit)
            if again is not None:
                await asyncio.sleep(again.after_s)
                await asyncio.to_thread(self.launcher.start_again, role_exit.command)
        except Exception as error:  # noqa: BLE001 - raised where the run is watched
            if not self._is_stopping:
                self._events.put_nowait(error)

    def _catch_signals(self) -> None:
        for number in _SIGNALS:
            # nohup ignores SIGHUP on purpose.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_stopping:
            self.launcher.kill()
        else:
            self._events.put_nowait(number)

    def _on_exit(self, role_exit: RoleExit) -> None:
        if role_exit.was_stopped:
            return
        # The loop may be closed if a role ends while the tool does.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, role_exit)

    def _on_line(self, process: RoleProcess, line: str) -> None:
        if process.command.kind in self._shown_kinds:
            self._output.role_line(process.name, line, process.command.index or 0)


def _failure(working: asyncio.Task[None]) -> RunEnd:
    error = working.exception()
    if error is None:
        return RunEnd(0)
    if isinstance(error, PushpullError):
        return RunEnd(FAILURE_EXIT_CODE, error.message)
    raise error
