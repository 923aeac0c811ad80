"""The command line with real processes: training, every way to be interrupted, status."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.command_line import (
    END_DEADLINE_S,
    ROOT,
    START_DEADLINE_S,
    Tool,
    assert_all_gone,
    run,
    run_here,
)

pytestmark = pytest.mark.timeout(180)

ENDLESS = """
import time
import numpy as np
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("weights", 4096, optimizer=ps.SGD(lr=0.1))
    gradient = np.ones(4096, dtype=np.float32)
    client.push_pull(table, gradient)
    print("is training", flush=True)
    while True:
        time.sleep(0.003)  # it computes
        client.push_pull(table, gradient)
        client.report(loss=0.5, planned_steps=1_000_000)
"""

FAILING = """
import ps_worker as ps

def explode(rank):
    raise RuntimeError(f"worker {rank} has had enough")

with ps.connect() as client:
    explode(client.rank)
"""


STARTS_A_READER = """
import subprocess
import sys
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("t", 4, optimizer=ps.SGD(lr=1.0))
    client.push_pull(table, [1.0] * 4)
    reader = (sys.executable, "-m", "ps_cli", "worker", "--role", "reader", "reads.py")
    print("the reader ended with", subprocess.run(reader).returncode, flush=True)
"""

READS = """
import ps_worker as ps

with ps.connect() as reader:
    print("the reader has", reader.pull(reader.table("t")).tolist(), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(program: str) -> str:
        (tmp_path / "script.py").write_text(program)
        return "script.py"

    return write


@pytest.mark.thorough
def test_digits_train_from_another_folder_and_nothing_is_left(tmp_path: Path) -> None:
    # A user's own scheduler.py must not be taken for ours.
    (tmp_path / "scheduler.py").write_text("raise SystemExit('the wrong scheduler')\n")
    digits = str(ROOT / "examples" / "digits_cnn.py")
    arguments = ("train", digits, "--workers", "2", "--servers", "2", "--", "--epochs", "1")
    with Tool(*arguments, cwd=tmp_path) as tool:
        tool.wait_for(r"\[worker 0\] epoch 1 of 1: loss \d")
        pids = [pid for found in tool.role_pids().values() for pid in found]
        assert tool.end(START_DEADLINE_S) == 0, tool.text
    assert len(pids) == 5
    assert re.search(r"\[worker 0\] test accuracy \d\d\.\d\d%", tool.text)
    assert "2 workers finished in" in tool.text
    assert "OMP_NUM_THREADS=" in tool.text
    assert "\x1b" not in tool.text
    assert_all_gone(pids)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "worker"])  # a scheduler goes on from its journal
def test_a_killed_role_ends_the_run_with_its_name(
    kind: str, tmp_path: Path, script: Callable[[str], str]
) -> None:
    arguments = ("train", script(ENDLESS), "--workers", "2", "--servers", "2")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for(r"\[worker \d\] is training", count=2)
        roles = tool.role_pids()
        os.kill(roles[kind][-1], signal.SIGKILL)
        killed_s = time.monotonic()
        assert tool.end(END_DEADLINE_S) == 1, tool.text
        assert time.monotonic() - killed_s < END_DEADLINE_S
    assert re.search(rf"pushpull: {kind}( \d)? ended with signal 9 \(SIGKILL\)", tool.text)
    assert_all_gone([pid for pids in roles.values() for pid in pids])


@pytest.mark.thorough
def test_each_worker_has_gpus_of_its_own(tmp_path: Path, script: Callable[[str], str]) -> None:
    program = "import os\nprint('has', os.environ['CUDA_VISIBLE_DEVICES'])\n"
    arguments = ("train", script(program), "--workers", "2", "--devices", "5,3,1,0")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 0, tool.text
    assert "4 GPUs: 2 for each of 2 workers" in tool.text
    assert "[worker 0] has 5,3" in tool.text
    assert "[worker 1] has 1,0" in tool.text


@pytest.mark.thorough
def test_a_script_starts_a_role_itself(tmp_path: Path, script: Callable[[str], str]) -> None:
    """It is the script's child, and need not end with the tool that has started the script."""
    (tmp_path / "reads.py").write_text(READS)
    with Tool("train", script(STARTS_A_READER), "-w", "1", cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 0, tool.text
    assert "[worker 0] the reader has [-1.0, -1.0, -1.0, -1.0]" in tool.text
    assert "[worker 0] the reader ended with 0" in tool.text


@pytest.mark.slow
def test_a_workers_exception_is_shown_and_ends_the_run(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    arguments = ("train", script(FAILING), "--workers", "2")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 1, tool.text
    assert re.search(r"\[worker (\d)\] RuntimeError: worker \1 has had enough", tool.text)
    assert re.search(r'\[worker \d\]   File ".*script\.py", line \d+, in explode', tool.text)
    assert re.search(r"pushpull: worker \d ended with exit code 1", tool.text)


@pytest.mark.slow
def test_on_a_terminal_there_is_a_live_table_and_ctrl_c_ends_all(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    arguments = ("train", script(ENDLESS), "-w", "2")
    with Tool(*arguments, cwd=tmp_path, on_terminal=True, is_warm=True) as tool:
        tool.wait_for("is training", count=2)
        tool.wait_for("steps/s")
        tool.wait_for(r"0\.5000")
        roles = tool.role_pids()
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(END_DEADLINE_S) == 130, tool.text
    assert "stopped by SIGINT" in tool.text
    assert "\x1b[" in tool.text
    assert "Traceback" not in tool.text
    assert_all_gone([pid for pids in roles.values() for pid in pids])


@pytest.mark.thorough
@pytest.mark.slow
def test_status_of_a_running_cluster_for_programs_and_people(
    tmp_path: Path, script: Callable[[str], str]
) -> None:
    arguments = ("train", script(ENDLESS), "-w", "1", "-s", "2", "--interval", "0.5")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        address = tool.wait_for(r"scheduler at (\S+:\d+);").group(1)
        tool.wait_for("is training")
        tool.wait_for(r"\[train \d+s\] worker 0: step [1-9]\d* of 1000000, clock [1-9]")
        asked = run("status", "--json", "--scheduler", address, cwd=tmp_path)
        at = ("--scheduler", address)
        shown = run_here("status", *at, cwd=tmp_path)
        changed = run("tables", "set", "wei*", "ssp:4", *at, cwd=tmp_path)
        listed = run_here("tables", "list", *at, cwd=tmp_path)
        unknown = run_here("tables", "set", "nobody", "asp", *at, cwd=tmp_path)
        tool.process.send_signal(signal.SIGTERM)
        assert tool.end(END_DEADLINE_S) == 143, tool.text
    assert changed.returncode == 0, changed.stderr
    clock = int(re.fullmatch(r"weights: ssp:4 from clock (\d+) on\n", changed.stdout).group(1))  # type: ignore[union-attr]
    assert clock > 1, "it was in the middle of its training"
    assert f"float32, sgd, ssp:4 from clock {clock} on" in listed.stdout
    assert unknown.returncode == 1
    assert "no table is 'nobody'; the cluster has 'weights'" in unknown.stderr
    assert asked.returncode == 0, asked.stderr
    document = json.loads(asked.stdout)
    assert {node["role"] for node in document["nodes"]} == {"server", "worker"}
    (worker,) = [node for node in document["nodes"] if node["role"] == "worker"]
    assert worker["rank"] == 0
    assert worker["clocks"]["weights"] >= 1
    assert sum(server["block_count"] for server in document["servers"]) == 1
    (table,) = document["tables"]
    assert (table["name"], table["element_count"], table["consistency"]) == ("weights", 4096, "bsp")
    assert table["clock"] >= 1
    assert shown.returncode == 0
    assert "sgd lr 0.1" in shown.stdout
    assert "\x1b" not in shown.stdout


@pytest.mark.slow
def test_up_prints_an_address_and_ends_on_request(tmp_path: Path) -> None:
    with Tool("up", "--servers", "1", "--quiet", cwd=tmp_path, is_warm=True) as tool:
        address = tool.wait_for(r"cluster is up: scheduler at (\S+:\d+), 1 server").group(1)
        tool.wait_for(f"export PUSHPULL_SCHEDULER={re.escape(address)}")
        pids = [pid for found in tool.role_pids().values() for pid in found]
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(END_DEADLINE_S) == 130, tool.text
    assert len(pids) == 2
    assert_all_gone(pids)


def test_up_starts_no_cluster_that_nobody_can_join(tmp_path: Path) -> None:
    """A secret of its own would be in its roles' environment alone."""
    (tmp_path / "file").touch()
    variables = {"PUSHPULL_JOIN_SECRET": "", "HOME": str(tmp_path / "file" / "home")}
    with Tool("up", "--quiet", cwd=tmp_path, variables=variables, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 2, tool.text
    assert "one cannot be kept in" in tool.text
    assert "set PUSHPULL_JOIN_SECRET to what openssl rand -hex 32 prints" in tool.text
    assert "cluster is up" not in tool.text


def test_up_says_why_a_cluster_cannot_start(tmp_path: Path) -> None:
    found = run("up", "--listen", "not an address", cwd=tmp_path)
    assert found.returncode == 1
    assert "scheduler ended with exit code" in found.stderr
    assert "not an address" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("train", "absent.py"), 2, "absent.py"),
        (("train", "script.py", "--workers", "0"), 2, "--workers"),
        (("train", "script.py", "--devices", "0,0"), 2, "expected auto, none, or different GPUs"),
        (("up", "--checkpoint-last-s", "inf"), 2, "--checkpoint-last-s"),
        (("up", "--checkpoint-last-s", "3601"), 2, "--checkpoint-last-s"),
        (("status",), 2, "PUSHPULL_SCHEDULER"),
        (("status", "--scheduler", "127.0.0.1:1"), 1, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: tuple[str, ...], code: int, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("")
    found = run_here(*arguments, cwd=tmp_path)
    assert found.returncode == code
    assert expected in found.stderr
    assert "Traceback" not in found.stderr


def test_help_and_version(tmp_path: Path) -> None:
    shown = run_here("--help", cwd=tmp_path)
    assert all(name in shown.stdout for name in ("train", "up", "status", "version"))
    assert "Python 3." in run_here("version", cwd=tmp_path).stdout
