"""What fails while a run goes on is told at once, counted, and in the exit code; real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
from pathlib import Path

import pytest

from ps_runtime.checkpoint.store import CheckpointStore, resolve
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape
from ps_runtime.launch.launcher import Launcher, start_scheduler, start_servers
from tests.integration.command_line import (
    END_DEADLINE_S,
    START_DEADLINE_S,
    ForkedTool,
    Tool,
    assert_all_gone,
    environment,
    run_warm,
)
from tests.integration.warm_roles import FORKER, Order

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

NEVER = {"PUSHPULL_WORKER_TIMEOUT_S": "0"}
"""A worker that is silent is not declared gone for that, however long."""

UNTIL_TOLD = """
import pathlib
import ps_worker as ps

with ps.connect() as client:
    sgd = ps.SGD(lr=1.0)
    table = client.create_table("t", 1024, optimizer=sgd, block_elements=64)  # on every server
    print("is training", flush=True)
    while not pathlib.Path("enough").exists():
        client.push_pull(table, [1.0] * 1024)
"""

ENDS_EARLY = """
import os
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("t", 64, optimizer=ps.SGD(lr=1.0))
    client.report(planned_steps=8)
    while table.clock < 8:
        client.push_pull(table, [1.0] * 64)
        if client.rank == 1 and table.clock == 4:
            os._exit(0)
    print(f"rank {client.rank} took {table.clock} steps", flush=True)
"""

NO_TABLE = """
import ps_worker as ps

ps.connect().close()
"""


def write(directory: Path, program: str) -> str:
    (directory / "script.py").write_text(program)
    return "script.py"


@pytest.mark.thorough
def test_a_checkpoint_that_fails_is_told_at_once_is_in_the_status_and_in_the_exit_code(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    arguments = (
        *("train", write(tmp_path, UNTIL_TOLD), "-w", "1", "-s", "1", "--interval", "60"),
        *("--checkpoint-url", "runs", "--checkpoint-every", "0.5s"),
    )
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        address = tool.wait_for(r"scheduler at (\S+:\d+);").group(1)
        tool.wait_for("is training")
        shutil.rmtree(runs)
        runs.touch()
        told = tool.wait_for(r"pushpull: checkpoint (\d+) failed: server \d+: (.*)\n")
        assert "Not a directory" in told.group(2)
        asked = run_warm("status", "--json", "--scheduler", address, cwd=tmp_path)
        shown = run_warm("status", "--scheduler", address, cwd=tmp_path)
        (tmp_path / "enough").touch()
        assert tool.end(START_DEADLINE_S) == 3, tool.text
    checkpoints = json.loads(asked.stdout)["checkpoints"]
    assert checkpoints["failed_count"] >= 1
    assert checkpoints["failed_number"] >= int(told.group(1))
    assert "Not a directory" in checkpoints["failure"]
    assert f"checkpoints {checkpoints['failed_count']} failed; checkpoint" in shown.stdout
    assert "pushpull: there is no last checkpoint" in tool.text
    assert "1 workers finished in" in tool.text
    assert "pushpull: the run has ended well, but the last checkpoint failed" in tool.text


@pytest.mark.thorough
def test_a_server_that_is_lost_while_the_last_checkpoint_is_made_does_not_cost_it(
    tmp_path: Path,
) -> None:
    """A stopped server takes no part in it; when its lease has ended, the other makes another."""
    arguments = (
        *("train", write(tmp_path, UNTIL_TOLD), "-w", "1", "-s", "2", "--replicas", "2"),
        *("--checkpoint-url", "runs", "--checkpoint-every", "1000"),
        *("--lease-s", "8"),  # it ends after the checkpoint has begun, on a busy machine too
    )
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("is training")
        os.kill(tool.role_pids()["server"][0], signal.SIGSTOP)
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(START_DEADLINE_S) == 130, tool.text
    assert "a server was lost while it was made; it is tried again" in " ".join(
        tool.text.split()
    ), tool.text
    assert re.search(r"^checkpoint /.*/runs/\d+-\w+ \(.* bytes\)$", tool.text, re.MULTILINE), (
        tool.text
    )
    assert "there is no last checkpoint" not in tool.text


@pytest.mark.thorough
def test_a_terminal_that_is_closed_costs_no_last_checkpoint(tmp_path: Path) -> None:
    # nohup has everybody ignore the signal of a closed terminal.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    number = signal.SIGTERM if is_ignored else signal.SIGHUP
    script = write(tmp_path, UNTIL_TOLD)
    arguments = ("train", script, "-w", "1", "-s", "1", "--checkpoint-url", "runs")
    given = {**environment(), "TERM": "xterm-256color"}
    master, terminal = pty.openpty()
    order = Order("ps_cli", arguments, given, tmp_path, has_warm_roles=True)
    tool = ForkedTool(FORKER.start(order, terminal, terminal))
    try:
        os.close(terminal)
        with os.fdopen(master, errors="replace") as window:
            assert any("is training" in line for line in window)
        tool.send_signal(number)
        assert tool.wait(START_DEADLINE_S) == 128 + number
    finally:
        tool.kill()
        tool.wait()
    with resolve(str(tmp_path / "runs")).reader as reader:
        assert reader.manifest.reason == "stopped"


@pytest.mark.thorough
def test_further_signals_end_a_last_checkpoint_at_once(tmp_path: Path) -> None:
    """Though a stopped server takes no part in it, and the scheduler is killed meanwhile."""
    script = write(tmp_path, UNTIL_TOLD)
    arguments = ("train", script, "-w", "1", "-s", "1", "--checkpoint-url", "runs")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("is training")
        roles = tool.role_pids()
        os.kill(roles["server"][0], signal.SIGSTOP)
        tool.process.send_signal(signal.SIGINT)
        tool.wait_for("making a last checkpoint; once more to stop at once")
        tool.process.send_signal(signal.SIGINT)
        assert_all_gone(roles["worker"])  # roles are being stopped
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(END_DEADLINE_S) == 130, tool.text
        assert_all_gone(roles["server"] + roles["scheduler"])
    assert "Traceback" not in tool.text


@pytest.mark.thorough
@pytest.mark.parametrize("command", [("train", "script.py"), ("up",)])
def test_a_place_for_checkpoints_that_takes_none_is_refused_at_once(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    write(tmp_path, UNTIL_TOLD)
    (tmp_path / "file").touch()
    found = run_warm(*command, "--checkpoint-url", "file/runs", cwd=tmp_path, has_warm_roles=True)
    assert found.returncode == 1
    said = found.stderr.splitlines()[-1]
    assert said.startswith("pushpull: scheduler ended with exit code 2")
    assert "file/runs cannot be written to: Not a directory" in said
    assert said.endswith("give another --checkpoint-url, or none")
    assert "Traceback" not in found.stderr


def test_a_server_that_cannot_write_checkpoints_does_not_join(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with Launcher() as launcher:
        shape = ClusterShape(1, 1, checkpoints=CheckpointPlan(str(runs)))
        scheduler = start_scheduler(launcher, shape)
        runs.rmdir()  # what the scheduler has there, the server has not
        runs.touch()
        (server,) = start_servers(launcher, shape, scheduler.address)
        ended = server.wait(START_DEADLINE_S)
    assert ended is not None
    assert (ended.returncode, ended.was_ready) == (2, False)
    assert f"no checkpoint can be written: {runs} cannot be written to" in ended.reason
    assert ended.reason.endswith("give another --checkpoint-url, or none")


@pytest.mark.thorough
def test_a_last_checkpoint_has_as_long_as_is_said_and_no_longer(tmp_path: Path) -> None:
    """A stopped server takes no part in it."""
    script = write(tmp_path, UNTIL_TOLD)
    arguments = ("train", script, "-w", "1", "-s", "1", "--checkpoint-url", "runs")
    with Tool(*arguments, "--checkpoint-last-s", "1", cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("is training")
        os.kill(tool.role_pids()["server"][0], signal.SIGSTOP)
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(30) == 130, tool.text
    tool.wait_for(
        r"pushpull: there is no last checkpoint: checkpoint 1 waits .*; "
        r"to give it more than 1 s: --checkpoint-last-s"
    )


def test_a_run_without_tables_has_no_last_checkpoint_to_wait_for(tmp_path: Path) -> None:
    arguments, place = ("train", write(tmp_path, NO_TABLE), "-w", "1"), "PUSHPULL_CHECKPOINT_URL"
    with Tool(*arguments, cwd=tmp_path, variables={place: "runs"}, is_warm=True) as tool:
        assert tool.end(30) == 0, tool.text
    assert "there is no last checkpoint, since there is no table" in tool.text


FAILS_LATER = """
import shutil
import sys
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("t", 64, optimizer=ps.SGD(lr=1.0))
    client.push_pull(table, [1.0] * 64)
    if "save" in sys.argv:
        client.checkpoint().wait()
    if "beside" in sys.argv:
        shutil.move("beside", f"runs/{sys.argv[-1]}")
    if "fail" in sys.argv:
        raise ValueError("on purpose")
"""


@pytest.mark.thorough
def test_a_run_that_failed_names_no_checkpoint_of_another_run(tmp_path: Path) -> None:
    """Its own, or the one that it began from, or none."""

    def train(*options: str, ends: int) -> str:
        arguments = ("train", "script.py", "-w", "1", "-s", "1", *options)
        found = run_warm(*arguments, cwd=tmp_path, has_warm_roles=True)
        assert found.returncode == ends, found.stdout + found.stderr
        return found.stdout + found.stderr

    write(tmp_path, FAILS_LATER)
    train("--checkpoint-url", "runs", "--", "save", ends=0)
    first = CheckpointStore(str(tmp_path / "runs")).newest_good()
    assert first is not None
    assert "to go on from" not in train("--checkpoint-url", "runs", "--", "fail", ends=1)
    told = train("--checkpoint-url", "other", "--resume", "runs", "--", "fail", ends=1)
    assert f"it has made no checkpoint; to begin where it began: --resume {first.url}\n" in told
    told = train("--checkpoint-url", "runs", "--", "save", "fail", ends=1)
    newest = CheckpointStore(str(tmp_path / "runs")).newest_good()
    assert newest is not None
    assert newest.name != first.name
    assert f"to go on from its newest checkpoint: --resume {newest.url}\n" in told
    # As one that a run beside this one completes meanwhile.
    (tmp_path / "runs" / newest.name).rename(tmp_path / "beside")
    told = train("--checkpoint-url", "runs", "--", "fail", "beside", newest.name, ends=1)
    assert CheckpointStore(str(tmp_path / "runs")).names()[-1] == newest.name
    assert "to go on from" not in told


@pytest.mark.thorough
def test_the_others_go_on_at_once_when_a_workers_process_has_ended(tmp_path: Path) -> None:
    arguments = ("train", write(tmp_path, ENDS_EARLY), "-w", "2", "-s", "1")
    with Tool(*arguments, cwd=tmp_path, variables=NEVER, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 0, tool.text
    assert "[worker 0] rank 0 took 8 steps" in tool.text
    assert "1 of 2 workers finished in" in tool.text
    assert (
        "pushpull: worker 1 ended before its steps were done: its process ended without leaving "
        "the cluster, last heard at step"
    ) in tool.text


@pytest.mark.thorough
def test_a_script_that_never_connects_is_told_that_it_ran_alone(tmp_path: Path) -> None:
    arguments = ("train", write(tmp_path, "print('trained')\n"), "-w", "2", "-s", "1")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 0, tool.text
    assert "2 workers finished in" in tool.text
    assert "pushpull: worker 0, worker 1 never joined the cluster as a worker: " in tool.text


@pytest.mark.thorough
def test_a_server_that_cannot_start_is_started_again_so_often_with_its_reason(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "server-0").touch()
    arguments = (
        *("train", write(tmp_path, UNTIL_TOLD), "-w", "1", "-s", "1"),
        *("--update-log", "log", "--max-restarts", "2"),
    )
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 1, tool.text
    why = "log/server-0: no update log can be kept there: .*Not a directory"
    tool.wait_for(
        rf"server 0 ended with exit code 1 \(.*{why}.*is started again \(restart 1 of 2\)"
    )
    tool.wait_for(rf"server 0 .*{why}.*is started again in 1 s \(restart 2 of 2\)")
    tool.wait_for(
        r"pushpull: server 0 ended with exit code 1 after 2 restarts \(see --max-restarts\) before "
        rf"it served; it said: .*{why}"
    )
