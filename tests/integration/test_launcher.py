"""The launcher and the embedded cluster, with real processes."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ps_core.errors import InvalidConfig, Recovering, WaitExpired
from ps_runtime.launch import launcher as launching
from ps_runtime.launch.launcher import (
    Launcher,
    RoleCommand,
    RoleExit,
    RoleProcess,
    describe_exit,
)
from ps_runtime.launch.role_environment import role_environment, thread_count
from ps_worker.client.local_cluster import local_cluster
from tests.joining import SECRET

pytestmark = pytest.mark.slow

START_DEADLINE_S = 60.0
Role = Callable[[str, str], RoleCommand]


@pytest.fixture(scope="module", autouse=True)
def new_interpreters() -> Iterator[None]:
    """As a user's roles begin."""
    before, launching.start_role = launching.start_role, launching.new_interpreter
    yield
    launching.start_role = before


@pytest.fixture
def role(tmp_path: Path) -> Role:
    """Makes a module of a program's text and the command that runs it as a role."""

    def make(kind: str, program: str) -> RoleCommand:
        name = f"role_{kind}"
        (tmp_path / f"{name}.py").write_text(program)
        roots = os.pathsep.join((str(tmp_path), *(p for p in sys.path if p)))
        return RoleCommand(kind, 0, name, environment={"PYTHONPATH": roots})

    return make


@pytest.fixture
def exits() -> queue.SimpleQueue[RoleExit]:
    return queue.SimpleQueue()


@pytest.fixture
def launcher(exits: queue.SimpleQueue[RoleExit]) -> Iterator[Launcher]:
    with Launcher(on_exit=exits.put) as made:
        yield made


def is_gone(pid: int) -> bool:
    """Whether no process has this number; a zombie of somebody's counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in ("Z", "X")


def wait_until_gone(pid: int) -> None:
    """Return when the process has ended; pytest's timeout bounds it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor, "rb") as watched:
        ready, _, _ = select.select([watched], [], [], START_DEADLINE_S)
        assert ready, f"process {pid} still runs"


def test_a_role_that_ends_says_how_and_what_it_said_last(
    launcher: Launcher, role: Role, exits: queue.SimpleQueue[RoleExit]
) -> None:
    program = "import sys\nprint('one')\nprint('two', file=sys.stderr)\nsys.exit(3)\n"
    launcher.start(role("server", program))
    ended = exits.get(timeout=START_DEADLINE_S)
    assert (ended.returncode, ended.was_stopped) == (3, False)
    assert describe_exit(ended, "early") == (
        "server 0 ended with exit code 3 early; its last lines:\n  [server 0] one\n  [server 0] two"
    )


def test_a_killed_role_is_described_by_its_signal(
    launcher: Launcher, role: Role, exits: queue.SimpleQueue[RoleExit]
) -> None:
    process = launcher.start(role("worker", "import signal\nsignal.pause()\n"))
    os.kill(process.pid, signal.SIGKILL)
    ended = exits.get(timeout=START_DEADLINE_S)
    assert (ended.how, ended.fate) == ("signal 9 (SIGKILL)", "was killed by SIGKILL")


@pytest.mark.thorough
def test_a_role_that_is_started_again_has_to_become_ready_again(
    launcher: Launcher, role: Role, exits: queue.SimpleQueue[RoleExit]
) -> None:
    program = (
        "import json, pathlib, sys\nready, marker = map(pathlib.Path, sys.argv[1:])\n"
        "if marker.exists(): sys.exit(4)\nmarker.touch()\n"
        "ready.write_text(json.dumps({'address': 'a:1', 'http_address': 'a:2'}))\nsys.exit(3)\n"
    )
    bare = role("server", program)
    ready_file = launcher.ready_file(bare)
    arguments = (str(ready_file), str(ready_file.with_suffix(".marker")))
    command = replace(bare, arguments=arguments)
    first = launcher.start(command)
    ended = exits.get(timeout=START_DEADLINE_S)
    assert (ended.returncode, ended.was_ready, ended.fate) == (3, True, "ended with exit code 3")
    assert not first.is_serving
    launcher.start(ended.command)
    again = exits.get(timeout=START_DEADLINE_S)
    assert (again.returncode, again.was_ready) == (4, False)
    assert [process.name for process in launcher.processes] == ["server 0", "server 0"]


def test_waiting_for_a_role_that_dies_first_says_why(launcher: Launcher, role: Role) -> None:
    process = launcher.start(role("server", "raise SystemExit('no port left')\n"))
    with pytest.raises(
        Recovering, match=r"server 0 ended with exit code 1 before it served(.|\n)*no port"
    ):
        launcher.wait_ready(process)


def test_waiting_for_a_role_that_never_serves_ends(launcher: Launcher, role: Role) -> None:
    process = launcher.start(role("server", "import signal\nsignal.pause()\n"))
    with pytest.raises(WaitExpired, match=r"server 0 did not serve within 0\.2 s"):
        launcher.wait_ready(process, deadline_s=0.2)


def test_a_role_that_has_ended_is_not_late(
    launcher: Launcher, role: Role, exits: queue.SimpleQueue[RoleExit]
) -> None:
    """It may be started again; one that runs says how long it has had."""
    process = launcher.start(role("server", "import signal\nsignal.pause()\n"))
    process.check_in_time()
    process.wait(0.02)
    with pytest.raises(WaitExpired, match=r"server 0 did not serve within 0\.01 s"):
        process.check_in_time(0.01)
    os.kill(process.pid, signal.SIGKILL)
    exits.get(timeout=START_DEADLINE_S)
    process.check_in_time(0.01)


def test_stop_ends_workers_before_servers_before_the_scheduler(
    launcher: Launcher, role: Role, exits: queue.SimpleQueue[RoleExit]
) -> None:
    for kind in ("scheduler", "server", "worker"):
        launcher.start(role(kind, "import signal\nsignal.pause()\n"))
    launcher.stop()
    ended = [exits.get(timeout=START_DEADLINE_S) for _ in range(3)]
    assert [e.command.kind for e in ended] == ["worker", "server", "scheduler"]
    assert all(e.was_stopped for e in ended)


def test_a_role_that_ignores_its_signal_is_killed(role: Role) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    program = (
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf')\n"
        "while True: signal.pause()\n"
    )
    with Launcher(on_line=lambda _, line: lines.put(line)) as launcher:
        process = launcher.start(role("server", program))
        assert lines.get(timeout=START_DEADLINE_S) == "deaf"
        launcher.stop(grace_s=0.2)
        assert process.exit is not None
        assert process.exit.how == "signal 9 (SIGKILL)"


def test_a_role_whose_lines_nobody_takes_writes_on(role: Role) -> None:
    """More of them than a pipe holds."""
    program = "for number in range(20_000): print(number, flush=True)\n"
    told = queue.SimpleQueue[str]()

    def refuse(_: RoleProcess, line: str) -> None:
        told.put(line)
        raise OSError("no space")

    with Launcher(on_line=refuse) as launcher:
        ended = launcher.start(role("worker", program)).wait(START_DEADLINE_S)
        assert ended is not None
        assert (ended.returncode, ended.recent_lines[-1]) == (0, "19999")
        assert told.qsize() == 20_000


def test_what_a_role_left_behind_ends_with_it(role: Role) -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid)\n"
    )
    with Launcher(on_line=lambda _, line: lines.put(line)) as launcher:
        process = launcher.start(role("worker", program))
        child = int(lines.get(timeout=START_DEADLINE_S))
        assert process.wait(START_DEADLINE_S) is not None
        wait_until_gone(child)


def test_a_stopped_launcher_starts_nothing(launcher: Launcher, role: Role) -> None:
    launcher.stop()
    launcher.stop()
    with pytest.raises(InvalidConfig, match="has been stopped"):
        launcher.start(role("server", ""))


def test_a_role_does_not_inherit_who_its_starter_is() -> None:
    own = {"PUSHPULL_RANK": "3", "PUSHPULL_JOURNAL": "/journal", "PUSHPULL_STREAM_LISTEN": "b:2"}
    own["PUSHPULL_RUN"] = "nightly"  # checkpoints are of the run without a name
    environment = role_environment(
        {**own, "PUSHPULL_LOG_LEVEL": "debug", "PYTHONPATH": "here"},
        {"PUSHPULL_SCHEDULER": "a:1"},
    )
    assert own.keys().isdisjoint(environment)
    for_all = {"PUSHPULL_STREAM_LISTEN": "off"}
    assert role_environment(for_all, {}).items() >= for_all.items()
    assert environment["PUSHPULL_LOG_LEVEL"] == "debug"
    assert environment["PUSHPULL_SCHEDULER"] == "a:1"
    assert str(Path("here").absolute()) in environment["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize("name", ["CHECKPOINT_URL", "RESUME", "UPDATE_LOG"])
def test_a_role_has_a_place_only_from_its_starter(name: str) -> None:
    """An inherited one would be the scheduler's alone, and one directory for the log of all."""
    named = f"PUSHPULL_{name}"
    assert named not in role_environment({named: "place"}, {})
    assert role_environment({named: "place"}, {named: "given"})[named] == "given"


@pytest.mark.parametrize(("cores", "processes", "expected"), [(8, 2, 4), (2, 3, 1), (4, 0, 4)])
def test_threads_are_shared_out(cores: int, processes: int, expected: int) -> None:
    assert thread_count(cores, processes) == expected


@pytest.mark.parametrize(("servers", "workers"), [(0, 1), (1, 0)])
def test_a_cluster_of_nobody_is_refused(servers: int, workers: int) -> None:
    with pytest.raises(InvalidConfig, match="expected at least 1"):
        local_cluster(servers=servers, workers=workers)


@pytest.mark.thorough
def test_a_local_cluster_serves_and_ends_with_its_block() -> None:
    with local_cluster(servers=2, workers=1) as cluster:
        pids = cluster.process_ids
        assert sorted(pids) == ["scheduler", "server 0", "server 1"]
        url = f"http://{cluster.http_address}/healthz"
        with urllib.request.urlopen(url, timeout=START_DEADLINE_S) as answer:
            assert answer.status == 200
    assert all(is_gone(pid) for pid in pids.values())


@pytest.mark.thorough
def test_a_local_cluster_does_not_outlive_a_killed_parent() -> None:
    program = (
        "import json, signal\nfrom ps_worker.client.local_cluster import local_cluster\n"
        "cluster = local_cluster()\nprint(json.dumps(cluster.process_ids), flush=True)\n"
        "signal.pause()\n"
    )
    environment = role_environment(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)})
    environment = {k: v for k, v in environment.items() if not k.startswith("PUSHPULL_")}
    environment["PUSHPULL_JOIN_SECRET"] = SECRET
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids: dict[str, int] = json.loads(parent.stdout.readline())
        parent.kill()
    assert len(pids) == 2
    for pid in pids.values():
        wait_until_gone(pid)
