"""The images, and what docker-compose.yml says of its roles."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
import yaml

from tests.system.containers import (
    COMPOSE_FILE,
    IMAGE,
    RUN_TIMEOUT_S,
    SCHEDULER_IMAGE,
    Compose,
    engine,
)
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

MAX_OWN_MB, MAX_SCHEDULER_OWN_MB = 860, 110
"""Above the base, which has 130 MB on Docker Hub: the images have less than 1 GB and 250 MB. Most
of it is torch's CPU build; CUDA's would be several times that."""


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


@pytest.mark.parametrize("service", ["scheduler", "server", "worker"])
def test_every_role_has_a_probe_and_is_started_again(service: str) -> None:
    declared = COMPOSE_FILE["services"][service]
    assert declared["healthcheck"]["test"][0] == "CMD"
    assert declared["restart"].startswith("on-failure")


def test_a_server_alone_says_that_it_looks_for_the_scheduler(compose: Compose) -> None:
    compose("down")
    run = compose("run", "--rm", "--no-deps", "-T", "-e", "PUSHPULL_CONNECT_DEADLINE_S=2", "server")
    assert run.returncode != 0
    assert "scheduler:7070" in run.stdout
    assert "Traceback" not in run.stdout
