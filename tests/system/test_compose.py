"""Clusters of docker-compose.yml that train, through the command that COMPOSE names."""

from __future__ import annotations

import os
import re
import shlex
import signal

import pytest

from tests.system.containers import (
    RUN_TIMEOUT_S,
    Compose,
    engine,
    process_of,
    read_until,
)
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

RUNS_PAGE = (ROOT / "docs/guides/RUNS.md").read_text(encoding="utf-8")
SCRIPT = "examples/digits_cnn.py --epochs 40"
"""Long enough for all that is done to it meanwhile."""


def test_a_cluster_of_any_size_trains_to_its_end_whichever_container_is_killed(
    compose: Compose,
) -> None:
    """Once each, in the middle; the engine starts them again, and the run ends as any other. One of
    another name trains beside it, as docs/guides/RUNS.md has it.
    """
    begun = compose(
        "up", "--no-build", "--detach",
        SERVERS="2", WORKERS="3", SCRIPT=SCRIPT, PUSHPULL_UPDATE_LOG="/update-log",
    )  # fmt: skip
    assert begun.returncode == 0, begun.stdout[-8000:]
    servers, workers = compose.containers("server"), compose.containers("worker")
    (scheduler,) = compose.containers("scheduler")
    assert (len(servers), len(workers)) == (2, 3)
    formed = read_until(scheduler, r"event=cluster_formed .* workers=(\d+) .* servers=(\d+)")
    assert formed.groups() == ("3", "2")
    read_until(scheduler, "event=table_created")  # training is on its way
    for killed, where, returned in (
        (servers[0], servers[0], "event=update_log_read"),
        (scheduler, scheduler, "event=cluster_resumed"),
        (workers[0], scheduler, r"event=node_registered .*role=worker node_id=([6-9]|\d\d+)"),
    ):
        os.kill(process_of(killed), signal.SIGKILL)
        read_until(where, returned)
    (line,) = re.findall(r"docker compose (run .*worker)$", RUNS_PAGE, re.MULTILINE)
    nightly = compose(*shlex.split(line), SCRIPT="examples/digits_cnn.py --epochs 1")
    assert nightly.returncode == 0, nightly.stdout[-8000:]
    assert "epoch 1 of 1" in nightly.stdout
    read_until(scheduler, "event=run_begun run=nightly workers=1")
    everybody = [scheduler, *servers, *workers]
    statuses = engine("wait", *everybody).split()
    said = "\n".join(engine("logs", each) for each in workers)
    assert statuses == ["0"] * len(everybody), said[-8000:]
    reached = re.search(r"test accuracy (\d+\.\d+)%", said)
    assert reached, said[-8000:]
    assert float(reached[1]) >= 97.0
    restarts = engine("inspect", "--format", "{{.RestartCount}}", *everybody).split()
    assert [restarts[n] != "0" for n in (0, 1, 3)] == [True] * 3


def test_the_next_run_goes_on_from_the_last_checkpoint_and_stops_by_itself(
    compose: Compose,
) -> None:
    """The volume is the project's: the run before has left its last checkpoint there, of another
    number of servers.
    """
    listed = compose.cli("checkpoint", "list", "/checkpoints")
    assert re.search(r"the end of training +good", listed), listed
    compose("down")
    run = compose(
        "up", "--no-build", "--abort-on-container-failure",
        SERVERS="3", WORKERS="3", SCRIPT=SCRIPT, PUSHPULL_RESUME="/checkpoints",
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:]
    assert "event=checkpoint_chosen" in run.stdout
    assert "epoch 1 of" not in run.stdout
    reached = re.search(r"test accuracy (\d+\.\d+)%", run.stdout)
    assert reached, run.stdout[-8000:]
    assert float(reached[1]) >= 97.0
