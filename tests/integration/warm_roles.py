"""Schedulers and servers that begin with all imported, as `warm_processes` has workers begin.

A process of the fork server waits for orders; for each it forks one that runs what `python -m`
would: with the arguments, environment, working directory and output that it is given, and as a
child of the process that asked. That is so because the one in between ends at once, while the asker
is the one who adopts orphans. So the launcher does with it all that it does with a new
interpreter, by the same calls.

What begins as a new interpreter all the same: any other module, and a role whose environment
differs from this process' by more than our own variables and further folders on PYTHONPATH, since
torch and others read theirs while they are imported.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe, reduction, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from ps_runtime.launch import launcher as launching
from ps_runtime.launch.launcher import RoleChild, RoleCommand, new_interpreter
from ps_runtime.launch.role_environment import role_environment
from ps_runtime.system.collector import spared
from tests import loop_files
from tests.integration.warm_processes import warm_context

ROLES = ("ps_server", "ps_worker", "scheduler")

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_THREADS = "OMP_NUM_THREADS"
_IGNORED = (
    *("PUSHPULL_", "PYTHONPATH", _THREADS),
    *("PYTEST_", "TORCHINDUCTOR_", "TERM", "COLUMNS", "LINES"),
)
"""Ours are read when a role runs, folders looked into then, and the number of threads is set as it
would be read. The others, which pytest, the compiler and terminals set, are read by no role."""


@dataclass(frozen=True)
class Forked:
    """A child of this process that it did not fork."""

    pid: int

    def wait(self) -> int:
        """Reap it; negative for a signal. Blocking: until it ends."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@dataclass(frozen=True)
class Order:
    """What is to run: `python -m module arguments`; whether what it starts is to be forked, too."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    added_paths: tuple[str, ...] = ()
    has_warm_roles: bool = False


class Forker:
    """Has processes forked; the one that does so begins when it is needed.

    Args:
        also: modules that it imports besides; each of its processes has them.
    """

    def __init__(self, also: tuple[str, ...] = ()) -> None:
        self._also = also
        self._lock = Lock()
        self._pipe: Connection | None = None

    def start(self, order: Order, output: int, errors: int) -> Forked:
        """A process that writes to these two, which stay the caller's."""
        with self._lock:
            pipe = self._open()
            self._adopt_orphans(True)
            try:
                pipe.send(order)
                for descriptor in (output, errors):
                    reduction.send_handle(pipe, descriptor, None)
                return Forked(pipe.recv())
            finally:
                self._adopt_orphans(False)

    def close(self) -> None:
        """End the process that forks."""
        if self._pipe is not None:
            self._pipe.close()

    def fork_here(self) -> None:
        """Let a fork of this process fork, which has no thread yet."""
        self._lock = Lock()
        self._pipe, theirs = Pipe()
        if os.fork() == 0:
            self._pipe.close()
            self._pipe = None
            fork_on_demand(theirs)
            os._exit(0)
        theirs.close()

    def _open(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = warm_context().Pipe()
            process = warm_context().Process(
                target=fork_on_demand, args=(theirs, self._also), daemon=True
            )
            process.start()
            theirs.close()
        return self._pipe

    def _adopt_orphans(self, wanted: bool) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def _prctl(what: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {what}")


FORKER = Forker()
_environment = role_environment(os.environ, {})


def begin_warm(command: RoleCommand, output: int) -> RoleChild:
    """A way of `ps_runtime.launch.launcher.start_role`: a fork that has imported all, or a new
    interpreter.
    """
    added = _added_paths(command.environment)
    if command.module not in ROLES or added is None or not _is_alike(command.environment):
        return new_interpreter(command, output)
    order = Order(command.module, command.arguments, {**command.environment}, Path.cwd(), added)
    return FORKER.start(order, output, output)


def _is_alike(environment: Mapping[str, str]) -> bool:
    """Whether what is read by an import is what the fork server had."""
    mine, given = (
        {k: v for k, v in variables.items() if not k.startswith(_IGNORED)}
        for variables in (_environment, environment)
    )
    return mine == given


def _added_paths(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The folders on PYTHONPATH beyond the fork server's; None if they change how Python starts."""
    mine, given = (
        [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        for variables in (_environment, environment)
    )
    added = tuple(path for path in given if path not in mine)
    if set(mine) - set(given) or any(Path(path, "sitecustomize.py").exists() for path in added):
        return None
    return added


def fork_on_demand(orders: Connection, also: tuple[str, ...] = ()) -> None:
    """The life of the process that forks: one process for each order, until nobody asks."""
    with spared():
        for module in also:
            importlib.import_module(module)
    while True:
        try:
            order: Order = orders.recv()
            outputs = [reduction.recv_handle(orders) for _ in range(2)]
        except EOFError:
            return
        with ExitStack() as stack:
            pipes = [*os.pipe(), *os.pipe()]
            for descriptor in (*outputs, *pipes):
                stack.callback(os.close, descriptor)
            adopted, release, told, tell = pipes
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid == 0:
                    os.close(release)
                    if not os.read(adopted, 1):
                        os._exit(1)
                    stack.pop_all()
                    _become(order, outputs)
                    _run(order)
                    sys.exit(0)
                os.setpgid(pid, 0)
                os.write(tell, pid.to_bytes(4, "little"))
                os._exit(0)
            os.waitpid(between, 0)  # from here on the other one is the asker's
            orders.send(int.from_bytes(os.read(told, 4), "little"))
            os.write(release, b"x")


_AS_A_NEW_PROCESS_HAS_IT = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
"""Ignored, if whoever started the tests ignores it: a shell's background job does."""


def _become(order: Order, outputs: list[int]) -> None:
    """What a new interpreter is given: its descriptors, its environment, its folder."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, given in enumerate((nothing, *outputs)):
        os.dup2(given, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    vars(vars(resource_tracker)["_resource_tracker"]).update(_fd=None, _pid=None)  # it has none yet
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    sys.path[:0] = order.added_paths
    if _THREADS in order.environment:
        sys.modules["torch"].set_num_threads(int(order.environment[_THREADS]))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    for number in (signal.SIGINT, signal.SIGTERM):
        assert signal.getsignal(number) in _AS_A_NEW_PROCESS_HAS_IT


def _run(order: Order) -> None:
    from tests.integration.warm_imports import MAINS

    sys.argv = [order.module, *order.arguments]
    _prctl(_PR_SET_NAME, order.module.encode())
    if order.has_warm_roles:
        FORKER.fork_here()
        launching.start_role = begin_warm
    if order.module in ("scheduler", "ps_server"):  # nobody waits for the loop of another
        loop_files.forbid()
    MAINS[order.module]()
