"""The image and docker-compose.yml, for real, through the command that COMPOSE names."""

from __future__ import annotations

import os
import re
import shlex
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.system.containers import (
    BUILD_TIMEOUT_S,
    COMPOSE_FILE,
    IMAGE,
    RUN_TIMEOUT_S,
    SCHEDULER_IMAGE,
    Compose,
    engine,
    process_of,
    read_until,
)
from tests.tidy.source import ROOT

MAX_OWN_MB, MAX_SCHEDULER_OWN_MB = 860, 110
"""Above the base, which has 130 MB on Docker Hub: the images have less than 1 GB and 250 MB. Most
of it is torch's CPU build; CUDA's would be several times that."""

RUNS_PAGE = (ROOT / "docs/guides/RUNS.md").read_text(encoding="utf-8")
SCRIPT = "examples/digits_cnn.py --epochs 60"
"""Long enough for all that is done to it meanwhile."""


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """A project whose image is built; its containers are gone afterwards."""
    project = Compose()
    project.build()
    yield project
    project("down", "--volumes")


def test_workers_have_gpus_with_the_second_file() -> None:
    files = ("-f", "docker-compose.yml", "-f", "deploy/docker-compose.gpu.yml")
    shown = Compose()(*files, "config", IMAGE="")
    assert shown.returncode == 0, shown.stdout
    services = yaml.safe_load(shown.stdout[shown.stdout.index("services:") :])["services"]
    server, worker = services["server"], services["worker"]
    assert server["image"] == worker["image"] == "pushpull-gpu:latest"
    given = server["build"]["args"]  # podman-compose has a list, in which the last one counts
    arguments = given if isinstance(given, dict) else dict(each.split("=", 1) for each in given)
    assert arguments["TORCH_INDEX"].endswith("/cu130")
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert device["count"] in ("all", -1)
    assert "PUSHPULL_SCHEDULER" in worker["environment"], "the first file's"
    assert "deploy" not in server


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_the_image_has_no_root_no_compiler_and_no_more_than_it_needs(compose: Compose) -> None:
    for image, most_mb in ((IMAGE, MAX_OWN_MB), (SCHEDULER_IMAGE, MAX_SCHEDULER_OWN_MB)):
        printed = engine(
            "run", "--rm", image, "sh", "-ec",
            "id -u; "
            "for tool in cc gcc g++ clang make pip; do command -v $tool || true; done; "
            "python -m pip --version 2>&1 | tail -n 1; "
            "du -s --block-size=MB /opt/pushpull",
        )  # fmt: skip
        assert "10001" in printed.split("\n")
        assert not re.search(r"/(cc|gcc|g\+\+|clang|make)\b", printed)
        assert "No module named pip" in printed
        (size_mb,) = re.findall(r"^(\d+)MB", printed, re.MULTILINE)
        assert int(size_mb) <= most_mb


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_a_script_of_ones_own_is_three_lines_of_dockerfile(
    compose: Compose, tmp_path: Path
) -> None:
    """The page's, with the image under the name that it has here."""
    page = (ROOT / "docs/guides/CONTAINERS.md").read_text(encoding="utf-8")
    dockerfile, _ = re.findall(r"```dockerfile\n(.*?)```", page, re.DOTALL)
    assert dockerfile.count("\n") == 3
    first = f"FROM {IMAGE}\n"
    (tmp_path / "Dockerfile").write_text(re.sub(r"FROM .*\n", first, dockerfile))
    (tmp_path / "train.py").write_text("import torch, pushpull\nprint('mine', torch.ones(1))\n")
    image = f"pushpull-own-{uuid.uuid4().hex[:8]}"
    engine("build", "--quiet", "--tag", image, str(tmp_path))
    try:
        assert "mine" in engine("run", "--rm", image, "python", "train.py")
        command = engine("image", "inspect", "--format", "{{.Config.Cmd}}", image)
        assert command == "[pushpull worker train.py]"
    finally:
        engine("image", "rm", image)


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_a_cluster_of_any_size_trains_to_its_end_whichever_container_is_killed(
    compose: Compose,
) -> None:
    """Once each, in the middle; the engine starts them again, and the run ends as any other. One of
    another name trains beside it, as docs/guides/RUNS.md has it.
    """
    begun = compose(
        "up", "--no-build", "--detach",
        SERVERS="3", WORKERS="4", SCRIPT=SCRIPT, PUSHPULL_UPDATE_LOG="/update-log",
    )  # fmt: skip
    assert begun.returncode == 0, begun.stdout[-8000:]
    servers, workers = compose.containers("server"), compose.containers("worker")
    (scheduler,) = compose.containers("scheduler")
    assert (len(servers), len(workers)) == (3, 4)
    formed = read_until(scheduler, r"event=cluster_formed .* workers=(\d+) .* servers=(\d+)")
    assert formed.groups() == ("4", "3")
    read_until(scheduler, "event=table_created")  # training is on its way
    for killed, where, returned in (
        (servers[0], servers[0], "event=update_log_read"),
        (scheduler, scheduler, "event=cluster_resumed"),
        (workers[0], scheduler, r"event=node_registered .*role=worker node_id=(9|\d\d+)"),
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
    assert [restarts[n] != "0" for n in (0, 1, 4)] == [True] * 3


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
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
        SERVERS="2", WORKERS="4", SCRIPT=SCRIPT, PUSHPULL_RESUME="/checkpoints",
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:]
    assert "event=checkpoint_chosen" in run.stdout
    assert "epoch 1 of" not in run.stdout
    reached = re.search(r"test accuracy (\d+\.\d+)%", run.stdout)
    assert reached, run.stdout[-8000:]
    assert float(reached[1]) >= 97.0


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("service", ["scheduler", "server", "worker"])
def test_every_role_has_a_probe_and_is_started_again(service: str) -> None:
    declared = COMPOSE_FILE["services"][service]
    assert declared["healthcheck"]["test"][0] == "CMD"
    assert declared["restart"].startswith("on-failure")


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_a_server_alone_says_that_it_looks_for_the_scheduler(compose: Compose) -> None:
    compose("down")
    run = compose("run", "--rm", "--no-deps", "-T", "-e", "PUSHPULL_CONNECT_DEADLINE_S=2", "server")
    assert run.returncode != 0
    assert "scheduler:7070" in run.stdout
    assert "Traceback" not in run.stdout
