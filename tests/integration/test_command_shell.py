"""The command `pushpull` as a shell has it: its version, its help, its completion."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ps_worker as ps
from ps_runtime.checkpoint.store import resolve
from ps_runtime.settings.config import fields_of, flag_name, variable_name
from ps_server.config import ServerConfig
from ps_worker.client.local_cluster import local_cluster
from ps_worker.transport.config import ProcessConfig, WorkerConfig
from scheduler.config import SchedulerConfig
from tests.integration.command_line import environment, run_here

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0

SETTINGS: dict[str, tuple[Any, ...]] = {
    "scheduler": (SchedulerConfig,),
    "server": (ServerConfig,),
    "worker": (WorkerConfig, ProcessConfig),
}

HELPS = """
import contextlib, sys
from pushpull.__main__ import main

_, first, *others = sys.argv
for role in (first, *others):
    if role != first:
        print(end="\\f")
    sys.argv = ["pushpull", role, "--help"]
    with contextlib.suppress(SystemExit):
        main()
"""


def run(*command: str, folder: Path, **added: str) -> str:
    """What a command that ends well prints."""
    done = subprocess.run(
        command, cwd=folder, env=environment() | added, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_version_names_what_a_report_of_a_problem_needs(tmp_path: Path) -> None:
    said = run(sys.executable, "-m", "pushpull", "--version", folder=tmp_path)
    for part in ("pushpull ", "torch ", "grpcio ", "Python "):
        assert part in said
    assert said == run_here("version", cwd=tmp_path).stdout


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each role's --help prints, where whoever imports torch ends."""
    folder = tmp_path_factory.mktemp("helps")
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    (folder / "helps.py").write_text(HELPS)
    said = run(sys.executable, "helps.py", *SETTINGS, folder=folder)
    return dict(zip(SETTINGS, said.split("\f"), strict=True))


@pytest.mark.parametrize("role", SETTINGS)
def test_help_has_every_option_with_its_variable_and_imports_no_torch(
    role: str, helps: dict[str, str]
) -> None:
    said = " ".join(helps[role].split())
    assert said.startswith(f"usage: pushpull {role} [OPTIONS]")
    for settings in SETTINGS[role]:
        for field in fields_of(settings):
            assert re.search(rf" {flag_name(field.name)}[ ,]", said)
            assert f"[{variable_name(field.name)}" in said
    hidden = {field.name for settings in SETTINGS[role] for field in dataclasses.fields(settings)}
    hidden -= {field.name for settings in SETTINGS[role] for field in fields_of(settings)}
    assert hidden <= {"launch_id"}


def test_the_stubs_of_the_contract_bring_nothing_else(tmp_path: Path) -> None:
    asked = (
        "import pushpull.v1.types_pb2, sys; "
        "print([m for m in sys.modules if m.startswith(('ps_', 'torch', 'numpy', 'grpc'))])"
    )
    assert run(sys.executable, "-c", asked, folder=tmp_path) == "[]\n"


def listed(root: Path, stdout: int) -> subprocess.CompletedProcess[str]:
    """A command with one line of output, and its exit code as a shell sees it."""
    given = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "ps_cli", "checkpoint", "list", str(root)],
        env=given, stdout=stdout, stderr=subprocess.PIPE, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def test_a_reader_that_goes_away_leaves_the_exit_code(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = listed(tmp_path, write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_result_that_was_not_written_is_no_success(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = listed(tmp_path, full)
    os.close(full)
    assert done.returncode == 1
    assert done.stderr == "pushpull: lines of the output are lost: No space left on device\n"


@pytest.mark.thorough
def test_who_looks_after_a_cluster_needs_no_numpy(tmp_path: Path) -> None:
    """As in the scheduler's image; what needs it says so in one line."""
    for name in ("numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        )
    path = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    pushpull = (sys.executable, "-m", "ps_cli")
    with (
        local_cluster(checkpoint_url=str(tmp_path / "runs")) as cluster,
        ps.connect(cluster.address) as client,
    ):
        table = client.create_table("t", 64, optimizer=ps.SGD(lr=1.0), consistency="asp")
        client.push_pull(table, [1.0] * 64)
        at = {"PUSHPULL_SCHEDULER": cluster.address, "PYTHONPATH": path}
        made = run(*pushpull, "checkpoint", "create", "--reason", "mine", folder=tmp_path, **at)
        changed = run(*pushpull, "tables", "set", "t", "ssp:4", folder=tmp_path, **at)
    assert re.fullmatch(r"/.*/runs/\d+-\w+ \([\d,]+ bytes\)\n", made)
    assert re.fullmatch(r"t: ssp:4 from clock \d+ on\n", changed)
    with resolve(str(tmp_path / "runs")).reader as reader:
        assert reader.manifest.reason == "mine"
    done = subprocess.run(
        [*pushpull, "plan"], cwd=tmp_path, env=environment() | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert "needs numpy, which is not installed here" in said


@pytest.mark.thorough
def test_bash_completes_commands_and_options_once_it_is_installed(tmp_path: Path) -> None:
    command = tmp_path / "pushpull"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pushpull "$@"\n')
    command.chmod(0o755)
    lines = ["pushpull --install-completion >/dev/null", "source ~/.bashrc"]
    for words in (
        ("pushpull", "sch"),
        ("pushpull", "train", "--max-r"),
        ("pushpull", "server", "--scheduler", "a:1", "--stream-l"),
    ):
        lines += [
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}",
            '_pushpull_completion pushpull; echo "${COMPREPLY[@]}"',
        ]
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    script = "\n".join(lines)
    said = run("bash", "--norc", "-c", script, folder=tmp_path, HOME=str(tmp_path), PATH=path)
    assert said.splitlines() == ["scheduler", "--max-restarts", "--stream-listen"]
