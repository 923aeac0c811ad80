"""Roles of a run that die while others go on, and are started again, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command_line import (
    END_DEADLINE_S,
    START_DEADLINE_S,
    Tool,
    assert_all_gone,
    run_here,
)
from tests.integration.lane_cluster import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

GOES_ON = r"server \d \(\S+\) was killed by SIGKILL; its ranges go on at their backups\n"
NEVER = {"PUSHPULL_WORKER_TIMEOUT_S": "0"}
"""A worker that is silent is not declared gone for that, however long."""

WAITING = """
import signal
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("t", 1024, optimizer=ps.SGD(lr=1.0), block_elements=64)
    client.push_pull(table, [1.0] * 1024)  # every server serves
    print(f"rank {client.rank} is here", flush=True)
    signal.pause()
"""

DYING_ONCE = """
import os, pathlib
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("t", 64, optimizer=ps.SGD(lr=1.0))
    lives = pathlib.Path(f"life of {client.rank}")
    if client.rank == 1 and not lives.exists():
        lives.touch()
        os._exit(3)
    client.pull(table)
    while table.clock < 5:
        client.push_pull(table, [1.0] * 64)
    print(f"rank {client.rank} trained to clock {table.clock}", flush=True)
"""


def write(directory: Path, program: str) -> str:
    (directory / "script.py").write_text(program)
    return "script.py"


def status(address: str, cwd: Path) -> dict[str, Any]:
    """What `pushpull status --json` prints."""
    asked = run_here("status", "--json", "--scheduler", address, cwd=cwd)
    assert asked.returncode == 0, asked.stderr
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


@pytest.mark.thorough
def test_with_replicas_a_dead_server_is_told_in_a_line_and_the_last_one_ends_the_run(
    tmp_path: Path,
) -> None:
    arguments = ("train", write(tmp_path, WAITING), "-w", "1", "-s", "2", "--replicas", "2")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("rank 0 is here")
        roles = tool.role_pids()
        first, last = roles["server"]
        os.kill(first, signal.SIGKILL)
        tool.wait_for(GOES_ON)
        assert tool.process.poll() is None
        os.kill(last, signal.SIGKILL)
        assert tool.end(END_DEADLINE_S) == 1, tool.text
    assert len(re.findall(GOES_ON, tool.text)) == 1
    assert re.search(r"pushpull: server \d ended with signal 9 \(SIGKILL\) and the run", tool.text)
    assert "cannot go on: no server is left that serves, and the values are lost" in tool.text
    assert_all_gone([pid for pids in roles.values() for pid in pids])


@pytest.mark.thorough
def test_a_dead_server_is_started_again_as_a_new_node(tmp_path: Path) -> None:
    arguments = (
        *("train", write(tmp_path, WAITING), "-w", "1", "-s", "2", "--replicas", "2"),
        *("--max-restarts", "1", "--lease-s", "0.6", "--verbose"),
    )
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        address = tool.wait_for(r"scheduler at (\S+:\d+);").group(1)
        tool.wait_for("rank 0 is here")
        os.kill(tool.role_pids()["scheduler"][0], signal.SIGKILL)
        tool.wait_for(
            r"scheduler was killed by SIGKILL; it goes on from its journal, and is started again "
            r"\(restart 1 of 20\)"
        )
        tool.wait_for(r"\[scheduler\] .* event=cluster_resumed")
        os.kill(tool.role_pids()["server"][0], signal.SIGKILL)
        tool.wait_for(r"and it is started again \(restart 1 of 1\)")
        tool.wait_for(r"\[scheduler\] .* event=node_silent")
        tool.wait_for(r"\[scheduler\] .* event=node_registered .*role=server", count=3)
        tool.wait_for(r"\[scheduler\] .* event=backup_let_in")
        until(lambda: not status(address, tmp_path)["degraded_range_count"], "all have replicas")
        document = status(address, tmp_path)
        servers = [node for node in document["nodes"] if node["role"] == "server"]
        assert len(servers) == 3
        assert sum(node["state"] == "alive" for node in servers) == 2
        assert document["ranges_by_in_sync"] == {"2": 16}
        os.kill(tool.role_pids()["server"][-1], signal.SIGKILL)  # it may not serve yet
        tool.wait_for(rf"{GOES_ON}|server \d was killed by SIGKILL before it served again", count=1)
        tool.process.send_signal(signal.SIGTERM)
        assert tool.end(END_DEADLINE_S) == 143, tool.text


@pytest.mark.thorough
def test_a_server_that_was_paused_for_long_ends_and_is_started_again(tmp_path: Path) -> None:
    arguments = (
        *("train", write(tmp_path, WAITING), "-w", "1", "-s", "2", "--replicas", "2"),
        *("--max-restarts", "1", "--lease-s", "0.5", "--verbose"),
    )
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("rank 0 is here")
        paused = tool.role_pids()["server"][0]
        os.kill(paused, signal.SIGSTOP)
        tool.wait_for(r"\[scheduler\] .* event=backup_left_out|event=ranges_failed_over")
        tool.wait_for(r"\[scheduler\] .* event=node_left reason=\"given up after")
        os.kill(paused, signal.SIGCONT)
        tool.wait_for(r"\[server \d\] .* has left the cluster: it was given up after")
        tool.wait_for(
            r"server \d \(\S+\) ended with exit code 1 \(.*\); its ranges go on at their backups, "
        )
        tool.wait_for(r"\[scheduler\] .* event=backup_let_in")
        tool.process.send_signal(signal.SIGTERM)
        assert tool.end(END_DEADLINE_S) == 143, tool.text


@pytest.mark.thorough
def test_without_replicas_a_dead_servers_values_are_lost(tmp_path: Path) -> None:
    arguments = ("train", write(tmp_path, WAITING), "-w", "1", "-s", "2", "--max-restarts", "9")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("rank 0 is here")
        os.kill(tool.role_pids()["server"][0], signal.SIGKILL)
        assert tool.end(END_DEADLINE_S) == 1, tool.text
    assert "the run cannot go on: its values are lost" in tool.text


@pytest.mark.thorough
def test_a_dead_worker_is_started_again_and_takes_its_rank_over(tmp_path: Path) -> None:
    arguments = (
        *("train", write(tmp_path, DYING_ONCE), "-w", "2", "-s", "1"),
        *("--max-restarts", "1", "--lease-s", "0.6"),
    )
    with Tool(*arguments, cwd=tmp_path, variables=NEVER, is_warm=True) as tool:
        tool.wait_for(
            r"worker 1 ended with exit code 3; it is started again \(restart 1 of 1\), and takes "
            "its rank over"
        )
        assert tool.end(START_DEADLINE_S) == 0, tool.text
    assert re.search(r"\[worker 0\] rank 0 trained to clock 5", tool.text)
    assert re.search(r"\[worker 1\] rank 1 trained to clock \d", tool.text)
    assert "2 workers finished in" in tool.text
    assert "waiting_for_place" not in tool.text, "the scheduler has been told that it has ended"


@pytest.mark.thorough
def test_up_goes_on_without_a_server(tmp_path: Path) -> None:
    with Tool("up", "-s", "2", "--replicas", "2", "--quiet", cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("cluster is up")
        os.kill(tool.role_pids()["server"][0], signal.SIGKILL)
        tool.wait_for("go on at their backups")
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(END_DEADLINE_S) == 130, tool.text


@pytest.mark.thorough
def test_up_waits_for_a_server_that_is_started_again_before_it_served(tmp_path: Path) -> None:
    """A cold one, which imports torch first."""
    with Tool("up", "--max-restarts", "1", "--quiet", cwd=tmp_path) as tool:
        until(lambda: bool(tool.role_pids()["server"]), "a server begins to start")
        os.kill(tool.role_pids()["server"][0], signal.SIGKILL)
        tool.wait_for(r"server 0 was killed by SIGKILL; it is started again \(restart 1 of 1\)")
        tool.wait_for("cluster is up")
        tool.process.send_signal(signal.SIGINT)
        assert tool.end(END_DEADLINE_S) == 130, tool.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--servers", "2", "--replicas", "3"), "replicas is 3; expected 1 to the number of serv"),
        (("--min-in-sync", "2"), "min_in_sync is 2; expected 1 to the number of replicas, 1"),
    ],
)
def test_replicas_that_cannot_be_are_refused_in_a_line(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    found = run_here("up", *arguments, cwd=tmp_path)
    assert found.returncode == 2
    assert expected in found.stderr
    assert "Traceback" not in found.stderr
