"""Containers of the image, through the command that COMPOSE names and the engine below it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.tidy.source import ROOT

BUILD_TIMEOUT_S = 1500
RUN_TIMEOUT_S = 300

COMPOSE = shlex.split(os.environ.get("COMPOSE", "docker compose"))
ENGINE = "docker" if Path(COMPOSE[0]).name == "docker" else "podman"
IMAGE = os.environ.get("IMAGE", "pushpull:latest")
SCHEDULER_IMAGE = os.environ.get("SCHEDULER_IMAGE", "pushpull-scheduler:latest")
COMPOSE_FILE: dict[str, Any] = yaml.safe_load(
    (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
)


def engine(*arguments: str, timeout_s: float = RUN_TIMEOUT_S) -> str:
    """What a command of the engine prints; it has to succeed."""
    run = _run([ENGINE, *arguments], timeout_s)
    assert run.returncode == 0, f"{arguments}: {run.stdout[-8000:]}"
    return run.stdout.strip()


def process_of(container: str) -> int:
    """The container's first process, as this machine numbers it. Killed, it is as if the kernel had
    done it: no word of it goes by the engine, which does as the container's restart policy says.
    """
    pid = int(engine("inspect", "--format", "{{.State.Pid}}", container))
    assert pid > 0, f"{container} does not run: {engine('logs', container)[-8000:]}"
    return pid


def read_until(
    container: str, pattern: str, timeout_s: float = 60.0, count: int = 1
) -> re.Match[str]:
    """The line of a container that is the first that matches, or the `count`th, printed or yet to
    be, over all of its starts.
    """
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        left = count
        with _following(container, end_s - time.monotonic()) as lines:
            for line in lines:
                found = re.search(pattern, line)
                left -= found is not None
                if found and not left:
                    return found
        # It has ended; unless it is done, the engine starts it again, or has.
    raise AssertionError(f"'{pattern}' did not come: {engine('logs', container)[-8000:]}")


@contextlib.contextmanager
def _following(container: str, timeout_s: float) -> Iterator[Iterator[str]]:
    with subprocess.Popen(
        ["timeout", f"{timeout_s:.0f}", ENGINE, "logs", "--follow", container],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as logs:
        assert logs.stdout is not None
        try:
            yield iter(logs.stdout)
        finally:
            logs.terminate()


def _run(
    command: list[str],
    timeout_s: float,
    variables: dict[str, str] | None = None,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Compose:
    """One compose project with a name of its own.

    Args:
        folder: whose docker-compose.yml it is.
    """

    def __init__(self, folder: Path = ROOT) -> None:
        self._project = f"pushpull-{uuid.uuid4().hex[:8]}"
        self._folder = folder

    def __call__(
        self, *arguments: str, timeout_s: float = RUN_TIMEOUT_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a compose command to its end; its output is one text."""
        command = [*COMPOSE, "--project-name", self._project, *arguments]
        return _run(command, timeout_s, variables, self._folder)

    def build(self, **variables: str) -> None:
        """Build the images, each once: podman-compose builds one for every container."""
        built = self("build", timeout_s=BUILD_TIMEOUT_S, SERVERS="1", WORKERS="1", **variables)
        assert built.returncode == 0, built.stdout[-4000:]

    def containers(self, service: str) -> list[str]:
        """The containers of a service, the oldest first."""
        labels = {"project": self._project, "service": service}
        filters = [f"--filter=label=com.docker.compose.{k}={v}" for k, v in labels.items()]
        return engine("ps", "--all", "--quiet", *filters).split()[::-1]

    def cli(self, *arguments: str) -> str:
        """What a command of pushpull prints in a container beside the cluster."""
        run = self("--profile", "cli", "run", "--rm", "--no-deps", "-T", "cli", *arguments)
        assert run.returncode == 0, run.stdout
        return run.stdout
