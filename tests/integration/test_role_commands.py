"""`pushpull scheduler`, `server` and `worker` as they are typed, and roles that nobody shadows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_runtime.launch import launcher as launching
from ps_runtime.launch.launcher import Launcher, RoleCommand
from ps_runtime.launch.role_entry import command_of
from tests.integration.command_line import ROOT, environment

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0

TRAINS = """
import sys
import numpy as np
import pushpull as ps
import scheduler  # the user's own, which lies beside the script

with ps.connect() as client:
    table = client.create_table("w", 10, optimizer=ps.SGD(lr=1.0))
    client.push_pull(table, np.ones(10, np.float32))
    print("trained", client.rank, scheduler.WHOSE, *sys.argv[1:])
"""

INTRUDER = """
WHOSE = "mine"
if __name__ == "__main__":
    raise SystemExit("the user's own file ran in the place of a role")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's working folder, with files named as our packages are."""
    for name in ("scheduler", "ps_server"):
        (tmp_path / f"{name}.py").write_text(INTRUDER)
    (tmp_path / "train.py").write_text(TRAINS)
    return tmp_path


@pytest.fixture
def variables(folder: Path) -> dict[str, str]:
    """The environment of somebody whose PYTHONPATH begins with the working folder."""
    given = environment()
    return {**given, "PYTHONPATH": os.pathsep.join((".", str(folder), given["PYTHONPATH"]))}


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """As a user's roles begin."""
    before, launching.start_role = launching.start_role, launching.new_interpreter
    yield
    launching.start_role = before


class Started:
    """Commands that are running; each is ended, and waited for."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._folder, self._variables = folder, variables
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pushpull", *arguments],
            cwd=self._folder, env=self._variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._running.append(process)
        return process

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def started(folder: Path, variables: dict[str, str]) -> Iterator[Started]:
    commands = Started(folder, variables)
    yield commands
    commands.end()


def address_of(process: subprocess.Popen[str]) -> str:
    """Where a scheduler listens, as its log says."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        found = re.search(r"event=listening address=(\S+)", line)
        if found:
            return found[1]
    raise AssertionError("".join(seen))


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_the_three_commands_make_a_cluster_in_a_folder_with_files_of_their_names(
    started: Started,
) -> None:
    scheduler = started.start(
        *("scheduler", "--workers", "1", "--servers", "1", "--stop-when-done")
    )
    address = address_of(scheduler)
    server = started.start("server", "--scheduler", address)
    worker = started.start("worker", "--scheduler", address, "--rank=0", "train.py", "--rank", "7")
    said, _ = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0, said
    assert said.endswith("trained 0 mine --rank 7\n")
    for role in (server, scheduler):  # the cluster ends as it was told to, and they with it
        text, _ = role.communicate(timeout=DEADLINE_S)
        assert role.returncode == 0, text


@pytest.mark.usefixtures("new_interpreters")
def test_the_launcher_starts_ours_where_a_user_has_a_scheduler_on_the_path(folder: Path) -> None:
    paths = os.pathsep.join((str(folder), environment()["PYTHONPATH"]))
    command = RoleCommand("scheduler", None, "scheduler", environment={"PYTHONPATH": paths})
    with Launcher() as launcher:
        ready = launcher.ready_file(command)
        arguments = ("--workers=1", "--servers=1", f"--ready-file={ready}")
        role = RoleCommand("scheduler", None, "scheduler", arguments, command.environment)
        assert launcher.wait_ready(launcher.start(role), DEADLINE_S).address


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["scheduler", "ps_server", "ps_worker"])
def test_python_m_is_still_the_role(module: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: pushpull ")


@pytest.mark.thorough
def test_a_wrong_setting_is_one_line_and_names_the_remedy(started: Started) -> None:
    process = started.start("scheduler", "--servers", "1")
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "pushpull scheduler: error: 'workers' is not set; give --workers" in said
    assert len(said.splitlines()) == 2
    assert str(ROOT) not in said


@pytest.mark.parametrize(("module", "imported"), [("scheduler", "grpc"), ("ps_server", "torch")])
def test_a_role_that_is_interrupted_while_it_imports_says_nothing(
    module: str, imported: str
) -> None:
    """As by Ctrl-C of `pushpull up` or `pushpull server` in their first seconds."""
    python, *rest = command_of(module, ())
    with subprocess.Popen(
        [python, "-X", "importtime", *rest],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as role:
        assert role.stderr is not None
        next(line for line in role.stderr if f" {imported}." in line)
        role.send_signal(signal.SIGINT)
        said = [line for line in role.stderr if not line.startswith("import time:")]
    assert (role.returncode, said) == (-signal.SIGINT, [])


@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_role_whose_image_lacks_torch_says_so_in_a_line(folder: Path, role: str) -> None:
    """As in the scheduler's image."""
    for name in ("numpy", "torch"):
        (folder / f"{name}.py").write_text(
            f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        )
    path = os.pathsep.join((str(folder), environment()["PYTHONPATH"]))
    script = ["train.py"] if role == "worker" else []
    done = subprocess.run(
        [sys.executable, "-m", "pushpull", role, "--scheduler", "127.0.0.1:1", *script],
        cwd=folder, env=environment() | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (said,) = done.stderr.splitlines()
    assert "this role needs" in said
    assert "take the image of servers and workers" in said
