"""Schedulers and servers that begin with all imported, as `warm_processes` has workers begin.

A process of the fork server waits for orders; for each it forks one that runs what `python -m`
would: with the arguments, environment, working directory and output that the launcher gives, and
as a child of the process that asked. That is so because the one in between ends at once, while the
asker is the one who adopts orphans. So the launcher does with it all that it does with a new
interpreter, by the same calls.

What begins as a new interpreter all the same: any other module, and a role whose environment
differs from this process' by more than our own variables, since torch and others read theirs while
they are imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from ps_runtime.role_environment import role_environment
from ps_runtime.role_starts import RoleChild, RoleStart, new_interpreter
from tests.integration.warm_processes import warm_context

MODULES = ("ps_server", "scheduler")

_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = ("PUSHPULL_", "PYTEST_", "TORCHINDUCTOR_")
"""Ours are read when a role runs. The others' are set while tests run, and read by no role."""


@dataclass(frozen=True)
class ForkedRole:
    """A child of this process that it did not fork."""

    pid: int

    def wait(self) -> int:
        """Reap it; negative for a signal. Blocking: until it ends."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class WarmRoles:
    """A way of `ps_runtime.role_starts`; the process that forks begins when it is needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._orders: Connection | None = None
        self._environment: Mapping[str, str] = {}
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def begin(self, start: RoleStart) -> RoleChild:
        """A fork that has imported all, or a new interpreter."""
        with self._lock:
            orders = self._open()
            if start.module not in MODULES or _foreign(start.environment) != self._environment:
                return new_interpreter(start)
            self._adopt_orphans(True)
            try:
                orders.send((start.module, start.arguments, {**start.environment}, Path.cwd()))
                reduction.send_handle(orders, start.output, None)
                return ForkedRole(orders.recv())
            finally:
                self._adopt_orphans(False)

    def close(self) -> None:
        """End the process that forks."""
        if self._orders is not None:
            self._orders.close()

    def _open(self) -> Connection:
        if self._orders is None:
            self._orders, theirs = warm_context().Pipe()
            process = warm_context().Process(target=fork_on_demand, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._environment = _foreign(role_environment(os.environ, {}))
        return self._orders

    def _adopt_orphans(self, wish: bool) -> None:
        if self._prctl(_PR_SET_CHILD_SUBREAPER, int(wish), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def _foreign(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be read by an import."""
    return {k: v for k, v in environment.items() if not k.startswith(_IGNORED)}


def fork_on_demand(orders: Connection) -> None:
    """The life of the process that forks: one role for each order, until nobody asks."""
    while True:
        try:
            module, arguments, environment, folder = orders.recv()
            output = reduction.recv_handle(orders)
        except EOFError:
            return
        adopted, release = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.read(adopted, 1)
                _become(output, environment, folder)
                _run(module, arguments)
                return
            os.setpgid(pid, 0)
            os.write(tell, pid.to_bytes(4, "little"))
            os._exit(0)
        os.waitpid(between, 0)  # from here on the other one is the asker's
        orders.send(int.from_bytes(os.read(told, 4), "little"))
        os.write(release, b"x")
        for descriptor in (output, adopted, release, told, tell):
            os.close(descriptor)


def _become(output: int, environment: Mapping[str, str], folder: Path) -> None:
    """What a new interpreter is given: its descriptors, its environment, its folder."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for given, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(given, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    for number in (signal.SIGINT, signal.SIGTERM):
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def _run(module: str, arguments: tuple[str, ...]) -> None:
    from tests.integration.warm_imports import MAINS

    sys.argv = [module, *arguments]
    MAINS[module]()
