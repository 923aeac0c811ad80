"""The image and docker-compose.yml, for real, through the command that COMPOSE names."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.tidy.source import ROOT

BUILD_TIMEOUT_S = 1500
RUN_TIMEOUT_S = 300

MAX_SITE_PACKAGES_MIB = 1100
"""Most of it is torch's CPU build; CUDA's would be several times that."""


class Compose:
    """One compose project with a name of its own."""

    def __init__(self) -> None:
        self._command = [
            *shlex.split(os.environ.get("COMPOSE", "docker compose")),
            "--project-name",
            f"pushpull-{uuid.uuid4().hex[:8]}",
        ]

    def __call__(
        self, *arguments: str, timeout_s: float = RUN_TIMEOUT_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a compose command to its end; its output is one text."""
        return subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextlib.contextmanager
    def following(self, service: str) -> Iterator[Iterator[str]]:
        """What a service prints, line by line, until it ends; all of it is ended afterwards."""
        with subprocess.Popen(
            [*self._command, "logs", "--follow", service],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # a compose may be one of Python's
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as logs:
            assert logs.stdout is not None
            try:
                yield iter(logs.stdout)
            finally:
                logs.kill()

    def shell(self, script: str) -> str:
        """What a shell script prints in a container of the image."""
        run = self("run", "--rm", "--no-deps", "-T", "worker-0", "sh", "-ec", script)
        assert run.returncode == 0, run.stdout
        return run.stdout


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """A project whose image is built; its containers are gone afterwards."""
    project = Compose()
    built = project("build", timeout_s=BUILD_TIMEOUT_S)
    assert built.returncode == 0, built.stdout[-4000:]
    yield project
    project("down", "--volumes")


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_the_image_has_no_root_no_compiler_and_no_more_than_it_needs(compose: Compose) -> None:
    printed = compose.shell(
        "id -u; "
        "for tool in cc gcc g++ clang make pip; do command -v $tool || true; done; "
        "python -m pip --version 2>&1 | tail -n 1; "
        "du -sm /opt/pushpull | cut -f 1"
    )
    lines = printed.split("\n")
    assert "10001" in lines
    assert not re.search(r"/(cc|gcc|g\+\+|clang|make)\b", printed)
    assert "No module named pip" in printed
    sizes = [int(line) for line in lines if line.isdigit() and line != "10001"]
    assert sizes
    assert sizes[-1] <= MAX_SITE_PACKAGES_MIB


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_the_cluster_trains_to_its_end_and_stops_by_itself(compose: Compose) -> None:
    run = compose("up", "--no-build", "--abort-on-container-failure")
    assert run.returncode == 0, run.stdout[-8000:]
    reached = re.search(r"test accuracy (\d+\.\d+)%", run.stdout)
    assert reached, run.stdout[-8000:]
    assert float(reached[1]) >= 97.0


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_what_was_trained_is_kept_and_the_next_run_goes_on_from_it(compose: Compose) -> None:
    """The volume is the project's: the run before has left its last checkpoint there."""
    listed = compose.shell("pushpull checkpoint list /checkpoints")
    assert re.search(r"the end of training +good", listed), listed
    verified = compose.shell("pushpull checkpoint verify /checkpoints")
    assert "good" in verified
    run = compose(
        "up", "--no-build", "--abort-on-container-failure", PUSHPULL_RESUME="/checkpoints"
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert "event=checkpoint_chosen" in run.stdout
    assert "epoch 1 of" not in run.stdout
    reached = re.search(r"test accuracy (\d+\.\d+)%", run.stdout)
    assert reached, run.stdout[-8000:]
    assert float(reached[1]) >= 97.0


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_a_server_that_is_killed_goes_on_from_its_log(compose: Compose) -> None:
    """Nobody else has what it had."""

    def up(*arguments: str) -> subprocess.CompletedProcess[str]:
        return compose(
            "up", "--no-build", "--detach", *arguments,
            PUSHPULL_UPDATE_LOG="/update-log", PUSHPULL_REPLICAS="1",
        )  # fmt: skip

    compose("down")  # else its containers go on with their logs of before
    begun = up()
    assert begun.returncode == 0, begun.stdout[-8000:]
    with compose.following("worker-0") as lines:
        said = [_until(lines, "epoch 1 of")]
        killed = compose("kill", "--signal", "KILL", "server-1")
        assert killed.returncode == 0, killed.stdout
        again = up("--no-deps", "server-1")
        assert again.returncode == 0, again.stdout
        with compose.following("server-1") as server_lines:
            _until(server_lines, "event=update_log_read")
        said.append(_until(lines, "test accuracy"))
    reached = re.search(r"test accuracy (\d+\.\d+)%", said[-1])
    assert reached, said
    assert float(reached[1]) >= 97.0
    compose("down")


def _until(lines: Iterator[str], text: str) -> str:
    """Everything up to the line that has the text."""
    said = ""
    for line in lines:
        said += line
        if text in line:
            return said
    raise AssertionError(f"'{text}' did not come: {said[-8000:]}")


@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
def test_a_server_alone_says_that_it_looks_for_the_scheduler(compose: Compose) -> None:
    run = compose(
        "run", "--rm", "--no-deps", "-T", "-e", "PUSHPULL_CONNECT_DEADLINE_S=2", "server-0"
    )
    assert run.returncode != 0
    assert "scheduler:7070" in run.stdout
    assert "Traceback" not in run.stdout
