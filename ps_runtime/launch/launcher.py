"""Starts the roles of a local cluster as child processes, watches them, and ends them.

Rules:
    - Each role is the leader of its own process group, so Ctrl-C in a terminal reaches only the
      launcher, and a role's own children end with it.
    - A child that has ended stays unreaped until its group has been killed: until then the kernel
      cannot give its number to another process, so no signal reaches a stranger.
    - One thread that lives as long as the launcher starts all children: the kernel's parent-death
      signal, which roles ask for under PUSHPULL_DIE_WITH_PARENT=1, fires at the end of the *thread*
      that forked. It is a daemon: Python ends others before the functions of `atexit`, in which
      clients still leave.
    - No poll has a fixed rate, and every wait is bounded and ends early if the child dies.

The caller decides the meaning of a role's end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol, Self

from ps_core.errors import InvalidConfig, Recovering, WaitExpired
from ps_runtime.cluster import join_secret
from ps_runtime.launch import role_entry
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.held_ports import HeldPorts
from ps_runtime.launch.role_environment import role_environment
from ps_runtime.observe import logs
from ps_runtime.system.executors import DaemonThreads

RECENT_LINE_COUNT = 40
"""Lines of each role's output for the message about its end."""

MAX_LINE_BYTES = 65_536
"""A longer line is cut, so that memory stays bounded."""

READY_DEADLINE_S = 120.0
"""A role imports torch first: seconds on a busy machine, minutes on a cold disk."""

STOP_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL, for each kind of role."""

CHECKPOINT_GRACE_S = 35.0
"""Longer than a scheduler waits for a checkpoint that is under way."""

_DRAIN_GRACE_S = 1.0
"""Time for calls in progress when a role stops: less than `STOP_GRACE_S`, or it is killed."""

_LAUNCH_ID = "PUSHPULL_LAUNCH_ID"

_READER_JOIN_S = 1.0
_FIRST_POLL_S = 0.005
_MAX_POLL_S = 0.1

LineSink = Callable[["RoleProcess", str], None]
"""Gets each line of output, from a thread of the launcher's, one line at a time a role."""

ExitSink = Callable[["RoleExit"], None]
"""Gets each role that ends, once, from a thread of the launcher's."""


class RoleChild(Protocol):
    """A child process: its number is also that of its process group."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Reap it; returns its exit code, negative for a signal. Blocking: until it ends."""
        ...


def new_interpreter(command: RoleCommand, output: int) -> RoleChild:
    """Start a process that imports all its modules."""
    return subprocess.Popen(
        role_entry.command_of(command.module, command.arguments),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=command.environment,
        process_group=0,
    )


start_role: Callable[[RoleCommand, int], RoleChild] = new_interpreter
"""Starts a role, with no input and just this environment, its output to a descriptor of which the
caller closes its own. A new interpreter imports torch, a second or two of CPU for each server, so
this project's tests fork a process that has imported it already. Either way, it is a child of this
process and the leader of its own process group."""


@dataclass(frozen=True, slots=True)
class RoleCommand:
    """The command of a role: `module` with `arguments`; `kind` and `index` make its name."""

    kind: str
    index: int | None
    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def launch_id(self) -> bytes:
        """The launch id by which its nodes' end can be reported to the scheduler; may be empty."""
        return bytes.fromhex(self.environment.get(_LAUNCH_ID, ""))

    @property
    def name(self) -> str:
        """The role for people: "scheduler", "server 0", "worker 3"."""
        return self.kind if self.index is None else f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class RoleExit:
    """The end of a role.

    Attributes:
        returncode: as subprocess has it, negative for a signal.
        was_stopped: the launcher had told it to end.
        address: the address that it served at; empty if it never served.
        ran_s: seconds from its start to its end.
    """

    command: RoleCommand
    returncode: int
    was_stopped: bool
    recent_lines: tuple[str, ...]
    address: str = ""
    ran_s: float = 0.0

    @property
    def was_ready(self) -> bool:
        return bool(self.address)

    @property
    def how(self) -> str:
        """The end for people: "exit code 1", "signal 9 (SIGKILL)"."""
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        name = _signal_name(-self.returncode)
        return f"signal {-self.returncode}" + (f" ({name})" if name else "")

    @property
    def reason(self) -> str:
        """The role's own reason; empty for none, and for a worker, whose script prints its own."""
        if self.returncode <= 0 or self.command.kind == "worker":
            return ""
        return reason_of(self.recent_lines)

    @property
    def fate(self) -> str:
        """The end as a verb: "ended with exit code 1", "was killed by SIGKILL"."""
        name = _signal_name(-self.returncode)
        return f"was killed by {name}" if name else f"ended with {self.how}"


def _signal_name(number: int) -> str:
    """The signal's name; empty if it is none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class ReadyRole:
    """The addresses in a role's ready file."""

    address: str
    http_address: str


class RoleProcess:
    """One role; `exit` is its end, or None while it runs. Made by `Launcher.start`."""

    def __init__(
        self, command: RoleCommand, child: RoleChild, output: IO[bytes], ready_file: Path
    ) -> None:
        self.command = command
        self._ready_file = ready_file
        self.pid = child.pid
        self._child = child
        self._output = output
        self._signal_lock = threading.Lock()
        self._is_reaped = False
        self._recent_lines: deque[str] = deque(maxlen=RECENT_LINE_COUNT)
        self._was_stopped = False
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self.exit: RoleExit | None = None

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def recent_lines(self) -> tuple[str, ...]:
        return tuple(self._recent_lines)

    @property
    def is_serving(self) -> bool:
        """True if it runs, and has written its addresses."""
        return self.exit is None and self._ready_file.exists()

    def check_in_time(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Raise WaitExpired if it runs, and has not served within `deadline_s` of its start."""
        is_late = time.monotonic() - self._began_s > deadline_s
        if is_late and self.exit is None and not self._ready_file.exists():
            raise self.not_served(deadline_s)

    def not_served(self, within_s: float) -> WaitExpired:
        """The error of a wait for it, with its last lines."""
        lines = "\n".join(self.recent_lines)
        return WaitExpired(f"{self.name} did not serve within {within_s:g} s\n{lines}")

    def wait(self, timeout_s: float) -> RoleExit | None:
        """Wait for its end, up to `timeout_s`; None if it still runs then."""
        self._ended.wait(max(0.0, timeout_s))
        return self.exit

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the role itself; nothing if it has ended."""
        with self._signal_lock:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def stop(self, number: signal.Signals) -> None:
        """End it on purpose: the exit has `was_stopped`. SIGKILL goes to its whole group."""
        self._was_stopped = True
        if number is not signal.SIGKILL:
            self.send(number)
            return
        with self._signal_lock:
            if not self._is_reaped:
                os.killpg(self.pid, number)

    def watch(self, on_line: LineSink, on_exit: ExitSink) -> None:
        """Start to read its output and to wait for its end."""
        reader = threading.Thread(
            target=self._read, args=(on_line,), name=f"output of {self.name}", daemon=True
        )
        watcher = threading.Thread(
            target=self._watch, args=(reader, on_exit), name=f"end of {self.name}", daemon=True
        )
        reader.start()
        watcher.start()

    def _read(self, on_line: LineSink) -> None:
        """Read to the end, whatever a sink raises: the role would die at its next line."""
        has_failed = False
        with self._output:
            for line in _lines(self._output):
                self._recent_lines.append(line)
                try:
                    on_line(self, line)
                except Exception as error:  # noqa: BLE001 - as above; told once a role
                    if not has_failed:
                        logs.exception("line_not_shown", error, role=self.name)
                    has_failed = True

    def _watch(self, reader: threading.Thread, on_exit: ExitSink) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._signal_lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            returncode = self._child.wait()
            self._is_reaped = True
        # The last lines say the reason. Bounded, because a process that left the group may hold
        # the pipe open.
        reader.join(_READER_JOIN_S)
        address = _read_ready(self._ready_file).address if self._ready_file.exists() else ""
        ran_s, lines = time.monotonic() - self._began_s, self.recent_lines
        self.exit = RoleExit(self.command, returncode, self._was_stopped, lines, address, ran_s)
        self._ended.set()
        on_exit(self.exit)


def _lines(stream: IO[bytes]) -> Iterable[str]:
    """The lines of `stream`, each as it was after its last carriage return."""
    while raw := stream.readline(MAX_LINE_BYTES):
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        yield text.rsplit("\r", 1)[-1]


def _ignore(*_: object) -> None:
    """The default sinks: `RoleProcess` has the last lines, and the end."""


@contextlib.contextmanager
def _kept_from_cleaners(directory: str) -> Iterator[None]:
    """Lock a directory: systemd-tmpfiles removes old files in /tmp, but none in a locked one."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def temporary_directory(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new directory; raises InvalidConfig, with a remedy, where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise InvalidConfig(
            f"no temporary directory can be made: {error}; let TMPDIR name a directory with free "
            "space that this user may write"
        ) from error


class Launcher:
    """Starts roles and ends them all. Thread-safe; use it as a context manager. InvalidConfig if
    there is no place for its files.
    """

    def __init__(self, on_line: LineSink = _ignore, on_exit: ExitSink = _ignore) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._forker = DaemonThreads(1, "pushpull launcher", lambda: None)
        self._ready_directory = temporary_directory("pushpull-")
        self._kept = contextlib.ExitStack()
        self._kept.enter_context(_kept_from_cleaners(self._ready_directory.name))
        self._lock = threading.Lock()
        self._processes: list[RoleProcess] = []
        self._is_stopping = False
        self.held_ports = HeldPorts()
        """Ports for roles that are started again; the launcher's `stop` lets them go."""

    @property
    def processes(self) -> tuple[RoleProcess, ...]:
        """All roles in the order of their start, ended ones included."""
        with self._lock:
            return tuple(self._processes)

    def ready_file(self, command: RoleCommand) -> Path:
        return Path(self._ready_directory.name) / f"{command.name.replace(' ', '-')}.json"

    @property
    def journal_directory(self) -> Path:
        """The path of a scheduler's journal; the launcher's `stop` removes it."""
        return Path(self._ready_directory.name) / "journal"

    def start_again(self, command: RoleCommand) -> RoleProcess:
        """Start a role that has ended; a scheduler gets its old address, which others know."""
        ready_file = self.ready_file(command)
        if command.kind == "scheduler" and ready_file.exists():
            where = _read_ready(ready_file)
            places = {"--listen": where.address, "--http-listen": where.http_address}
            arguments = tuple(
                f"{name}={places.get(name, value)}" if equals else name
                for name, equals, value in (each.partition("=") for each in command.arguments)
            )
            command = replace(command, arguments=arguments)
        return self.start(command)

    def start(self, command: RoleCommand) -> RoleProcess:
        """Start a role, anew if it has ended; InvalidConfig after `stop`."""
        with self._lock:
            self._check_open(command)
            forked = self._forker.submit(self._fork, command)
        return forked.result()

    def _check_open(self, command: RoleCommand) -> None:
        if self._is_stopping:
            raise InvalidConfig(f"{command.name} cannot start: the launcher has been stopped")

    def _fork(self, command: RoleCommand) -> RoleProcess:
        with self._lock:
            self._check_open(command)
            ready_file = self.ready_file(command)
            ready_file.unlink(missing_ok=True)  # of a former process
            read_end, write_end = os.pipe()
            output = os.fdopen(read_end, "rb")
            try:
                environment = role_environment(os.environ, command.environment)
                child = start_role(replace(command, environment=environment), write_end)
            finally:
                os.close(write_end)
            process = RoleProcess(command, child, output, ready_file)
            self._processes.append(process)
        process.watch(self._on_line, self._on_exit)
        return process

    def wait_ready(self, process: RoleProcess, deadline_s: float = READY_DEADLINE_S) -> ReadyRole:
        """Wait until a role serves. Blocking: up to `deadline_s`.

        Raises:
            Recovering: the role ended first; the message has its last lines.
            WaitExpired: it did not serve in time; the message has its last lines.
        """
        path = self.ready_file(process.command)
        give_up_s = time.monotonic() + deadline_s
        poll_s = _FIRST_POLL_S
        while True:
            if path.exists():
                return _read_ready(path)
            role_exit = process.wait(poll_s)
            if role_exit is not None:
                raise Recovering(describe_exit(role_exit, "before it served"))
            if time.monotonic() >= give_up_s:
                raise process.not_served(deadline_s)
            poll_s = min(poll_s * 2, _MAX_POLL_S)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End all roles: workers first, then servers, then the scheduler. Idempotent. Blocking: at
        most `grace_s` for each of the three kinds, and the kernel's time to kill.
        """
        for kind in ("worker", "server", "scheduler"):
            self.end(kind, grace_s)
        self._forker.shutdown()
        self.held_ports.close()
        self._kept.close()
        self._ready_directory.cleanup()

    def end(self, kind: str, grace_s: float) -> None:
        """End the roles of a kind: the scheduler first, if it has to wait for a checkpoint.
        Idempotent. Blocking: at most `grace_s`, and the kernel's time to kill.
        """
        _stop_all([p for p in self._closed() if p.command.kind == kind], grace_s)

    def _closed(self) -> tuple[RoleProcess, ...]:
        """All roles, of which no more start."""
        with self._lock:
            self._is_stopping = True
            return tuple(self._processes)

    def kill(self) -> None:
        """Send SIGKILL to all roles at once, for a user who does not want to wait for `stop`."""
        for process in self._closed():
            process.stop(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _stop_all(processes: Sequence[RoleProcess], grace_s: float) -> None:
    for process in processes:
        # SIGTERM lets a server wait until another has its values, and a scheduler with a journal
        # leave what the next one needs; here all of them end, and so does the journal.
        process.stop(signal.SIGTERM if process.command.kind == "worker" else signal.SIGINT)
    give_up_s = time.monotonic() + grace_s
    for process in processes:
        if process.wait(give_up_s - time.monotonic()) is None:
            process.stop(signal.SIGKILL)
    for process in processes:
        process.wait(STOP_GRACE_S + _READER_JOIN_S)


def _read_ready(path: Path) -> ReadyRole:
    return ReadyRole(**json.loads(path.read_text()))


def reason_of(lines: Sequence[str]) -> str:
    """The last error in a role's log, or about its command line; empty if there is none."""
    for text in reversed(lines):
        fields = logs.fields_of(text)
        if fields and logs.is_error(text):
            said = (fields.get(name) for name in ("message", "error", "reason"))
            return next((each for each in said if each), fields["event"])
        program, is_wrong, reason = text.partition(": error: ")
        if is_wrong and program.startswith("pushpull "):
            return reason
    return ""


def describe_exit(role_exit: RoleExit, when: str) -> str:
    """The message about a role that ended, with its own reason or else its last lines."""
    head = f"{role_exit.command.name} ended with {role_exit.how} {when}"
    if role_exit.reason:
        return f"{head}; it said: {role_exit.reason}"
    if not role_exit.recent_lines:
        return f"{head}; it printed nothing"
    lines = "\n".join(f"  [{role_exit.command.name}] {line}" for line in role_exit.recent_lines)
    return f"{head}; its last lines:\n{lines}"


def start_scheduler(
    launcher: Launcher, shape: ClusterShape, deadline_s: float = READY_DEADLINE_S
) -> ReadyRole:
    """Start the scheduler of a local cluster and wait until it serves. Blocking, Raises: as
    `Launcher.wait_ready`; InvalidConfig if the join secret cannot be read.
    """
    join_secret.ensure(os.environ)
    bare = RoleCommand("scheduler", None, "scheduler", environment=shape.environment)
    arguments = (
        f"--listen={launcher.held_ports.hold(shape.listen)}",
        f"--http-listen={launcher.held_ports.hold('127.0.0.1:0')}",
        *shape.scheduler_arguments,
        f"--ready-file={launcher.ready_file(bare)}",
        f"--drain-grace-s={_DRAIN_GRACE_S}",
        *((f"--journal={launcher.journal_directory}",) if shape.has_journal else ()),
    )
    return launcher.wait_ready(launcher.start(replace(bare, arguments=arguments)), deadline_s)


def start_servers(launcher: Launcher, shape: ClusterShape, scheduler: str) -> list[RoleProcess]:
    """Start the servers of a local cluster; `Launcher.wait_ready` waits for each."""
    return [start_server(launcher, shape, scheduler, index) for index in range(shape.server_count)]


def start_server(
    launcher: Launcher, shape: ClusterShape, scheduler: str, index: int
) -> RoleProcess:
    """Start one server of a local cluster; `index` is one that no other server has."""
    bare = RoleCommand("server", index, "ps_server", environment=shape.environment)
    arguments = (
        f"--listen={shape.server_listen}",
        "--http-listen=127.0.0.1:0",
        f"--scheduler={scheduler}",
        f"--ready-file={launcher.ready_file(bare)}",
        *shape.update_log.server_arguments(index),
    )
    return launcher.start(replace(bare, arguments=arguments))


def worker_command(
    rank: int, scheduler: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> RoleCommand:
    """The command of worker `rank`; `arguments` are its script and the script's own."""
    added = {
        **environment,
        "PUSHPULL_SCHEDULER": scheduler,
        "PUSHPULL_RANK": str(rank),
        _LAUNCH_ID: secrets.token_hex(16),
    }
    return RoleCommand("worker", rank, "ps_worker", tuple(arguments), added)
