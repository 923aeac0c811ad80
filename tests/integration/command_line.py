"""A running `pushpull`, its output and its processes, for the tests beside this file."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Self

from typer.testing import CliRunner

from ps_cli.__main__ import app
from tests.integration.warm_roles import FORKER, Forked, Forker, Order
from tests.joining import SECRET

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 100.0
END_DEADLINE_S = 10.0
NOTHING: Mapping[str, str] = MappingProxyType({})


def environment() -> dict[str, str]:
    """The caller's, less what would change what the tool does; the packages by absolute paths."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PUSHPULL_")}
    kept["PUSHPULL_JOIN_SECRET"] = SECRET
    kept.pop("OMP_NUM_THREADS", None)
    kept["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    return kept


def children_of(pid: int) -> list[int]:
    """The processes that any thread of `pid` has started and not reaped."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listed in lists for child in listed.read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


class ForkedTool:
    """A fork, as `subprocess.Popen` is."""

    def __init__(self, child: Forked) -> None:
        self._child = child
        self._descriptor = os.pidfd_open(child.pid)
        self.pid = child.pid
        self.returncode: int | None = None

    def wait(self, deadline_s: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], deadline_s)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", deadline_s or 0.0)
            os.close(self._descriptor)
            self.returncode = self._child.wait()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Tool:
    """A running `pushpull`; what it prints is read as it comes. A warm one is a fork of a process
    that has imported torch, and so are its roles.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        on_terminal: bool = False,
        variables: Mapping[str, str] = NOTHING,
        is_warm: bool = False,
        forker: Forker = FORKER,
    ) -> None:
        self._lines: list[str] = []
        self._arrived = threading.Condition()
        self._has_ended = False
        read_end, write_end = pty.openpty() if on_terminal else os.pipe()
        term = "xterm-256color" if on_terminal else "dumb"
        given = {**environment(), "TERM": term, **variables}
        self.process: subprocess.Popen[bytes] | ForkedTool
        if is_warm:
            order = Order("ps_cli", arguments, given, cwd, has_warm_roles=True)
            self.process = ForkedTool(forker.start(order, write_end, write_end))
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ps_cli", *arguments],
                cwd=cwd, env=given,
                stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end,
            )  # fmt: skip
        os.close(write_end)
        self._reader = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream:
            try:
                for line in stream:
                    self._add(line)
            except OSError:  # a terminal whose last writer is gone reads as an input/output error
                pass
        with self._arrived:
            self._has_ended = True
            self._arrived.notify_all()

    def _add(self, line: str) -> None:
        with self._arrived:
            self._lines.append(line)
            self._arrived.notify_all()

    @property
    def text(self) -> str:
        with self._arrived:
            return "".join(self._lines)

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until `pattern` has come `count` times; returns the last of them."""

        def found() -> list[re.Match[str]]:
            return list(re.finditer(pattern, "".join(self._lines)))

        with self._arrived:
            self._arrived.wait_for(
                lambda: len(found()) >= count or self._has_ended, START_DEADLINE_S
            )
            matches = found()
        assert len(matches) >= count, f"{pattern!r} did not come; the output:\n{self.text}"
        return matches[count - 1]

    def role_pids(self) -> dict[str, list[int]]:
        """The processes of each kind of role."""
        found: dict[str, list[int]] = {"scheduler": [], "server": [], "worker": []}
        for pid in children_of(self.process.pid):
            command, name = command_of(pid), Path(f"/proc/{pid}/comm").read_text().strip()
            for kind, module in (
                ("scheduler", "scheduler"),
                ("server", "ps_server"),
                ("worker", "ps_worker"),
            ):
                if f".role_entry {module} " in command or name == module:
                    found[kind].append(pid)
        return found

    def end(self, deadline_s: float) -> int:
        """Wait for the tool's end and all its output."""
        code = self.process.wait(deadline_s)
        self._reader.join(deadline_s)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "ps_cli", *arguments],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=START_DEADLINE_S,
        check=False,
    )  # fmt: skip


def run_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `run`, in this process, which has imported all: it takes no time.

    For commands that start no role. What a new interpreter adds is seen by a test that uses `run`:
    each command has one.
    """
    cleared = {name: None for name in os.environ if name.startswith("PUSHPULL_")}
    variables = {**cleared, "PUSHPULL_JOIN_SECRET": SECRET}
    with contextlib.chdir(cwd):
        ended = CliRunner().invoke(app, arguments, prog_name="pushpull", env=variables)
    if not isinstance(ended.exception, SystemExit | None):
        raise ended.exception
    return subprocess.CompletedProcess(arguments, ended.exit_code, ended.stdout, ended.stderr)


def run_warm(
    *arguments: str,
    cwd: Path,
    has_warm_roles: bool = False,
    module: str = "ps_cli",
    variables: Mapping[str, str] = NOTHING,
) -> subprocess.CompletedProcess[str]:
    """As `run`, in a fork of a process that has imported torch.

    For commands that import it. What a command forgets to import is seen by a test that uses `run`:
    each command has one.
    """
    given = {**environment(), **variables}
    order = Order(module, arguments, given, cwd, has_warm_roles=has_warm_roles)
    with TemporaryFile() as output, TemporaryFile() as errors:
        tool = ForkedTool(FORKER.start(order, output.fileno(), errors.fileno()))
        try:
            status = tool.wait(START_DEADLINE_S)
        finally:
            tool.kill()
            tool.wait()
        said = []
        for stream in (output, errors):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(arguments, status, *said)


def assert_all_gone(pids: Iterator[int] | list[int]) -> None:
    """Every process has ended, or does within the deadline."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(descriptor, "rb") as watched:
            ready, _, _ = select.select([watched], [], [], END_DEADLINE_S)
            assert ready, f"{command_of(pid)} is left over"
