"""`ps.ray_cluster` on a real local Ray of four nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.command_line import environment
from tests.tidy.source import ROOT

RUN_WITHIN_S = 400.0


@pytest.fixture(scope="module")
def found() -> Any:
    """What the run found; a process of its own, since Ray and its node belong to a process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.on_ray"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=RUN_WITHIN_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"before init"')]
    return json.loads(lines[-1])


pytestmark = [pytest.mark.timeout(RUN_WITHIN_S + 20), pytest.mark.thorough]


def test_the_program_of_the_page_trains(found: Any) -> None:
    printed = re.search(r"^\[(-1\.0\d*), (-1\.0\d*)\]$", found["program"], re.MULTILINE)
    assert printed, found["program"]
    assert printed[1] == printed[2]
    assert " info " not in found["program"], "roles say what is wrong, not what they do"


def test_a_task_of_the_page_that_ray_runs_again_trains_with_the_others(found: Any) -> None:
    printed = re.search(r"^\[(-1\.0\d*), (-1\.0\d*)\]$", found["run again"], re.MULTILINE)
    assert printed, found["run again"]


def test_servers_are_spread_over_nodes(found: Any) -> None:
    roles = found["placed"]
    assert [role["name"] for role in roles] == ["scheduler", "server 0", "server 1"]
    assert roles[1]["node_id"] != roles[2]["node_id"]


def test_a_server_whose_node_or_process_died_is_there_again_while_tasks_and_actors_train(
    found: Any,
) -> None:
    before, after = found["placed"], found["placed again"]
    assert found["lost"] == before[1]["node_id"]
    assert after[0] == before[0], "the scheduler stays"
    assert after[1]["node_id"] not in (found["lost"], after[2]["node_id"])
    assert after[1]["address"] != before[1]["address"]
    assert after[2] == before[2]
    again = found["started again"]
    assert again[0] == before[0]
    assert again[1]["process_id"] != after[1]["process_id"]
    assert again[2] == before[2]
    ranks = sorted(rank for rank, _, _ in found["trained"])
    assert ranks == [0, 1]
    for _, clock, value in found["trained"]:
        assert value == -clock, "each step counts once"


def test_wrong_uses_are_refused_with_the_remedy(found: Any) -> None:
    assert found["before init"] == "Ray is not initialized; call ray.init() first"
    assert found["copy"] == "this is a copy of the cluster; ask where ray_cluster was called"
