"""How many files a block passes through on its way there and back, and a read.

Whoever changes the data path has to know each of them. They are counted by running: a function of
the file is called, in the worker's process or in the server's. What runs beside, as heartbeats do,
runs in some rounds only; what is of the path runs in all.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps_worker as ps
from ps_core import limits
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleCommand, start_scheduler
from tests.integration.counted_server import SOCKET, RunFiles

DEADLINE_S = 60.0
ROUNDS = 12
BLOCK = limits.DEFAULT_BLOCK_ELEMENTS
ROLES = ("ps_server/", "ps_worker/")
MOST = {"shm": (37, 28), "grpc": (32, 26)}
"""By lane: files of the two roles that a push, and a pull, may run through."""


class Both:
    """The files that run in the worker's process, this one, and in the server's."""

    def __init__(self, worker: RunFiles, server: socket.socket) -> None:
        self._worker = worker
        self._lines = server.makefile("rw")

    def of(self, action: Callable[[], object]) -> list[str]:
        """The files that run in each of some rounds."""
        found: set[str] | None = None
        for _ in range(ROUNDS):
            self._ask("begin")
            self._worker.begin()
            action()
            worker = self._worker.files
            both = worker | set(self._ask("end"))
            found = both if found is None else found & both
        assert found
        return sorted(found)

    def _ask(self, order: str) -> list[str]:
        self._lines.write(f"{order}\n")
        self._lines.flush()
        files: list[str] = json.loads(self._lines.readline())
        return files


@pytest.fixture(scope="module")
def worker() -> Iterator[RunFiles]:
    """The files that run here: the thread of a process's clients lives as long as the process."""
    run = RunFiles()
    run.watch()
    yield run
    run.leave()


@contextmanager
def counted(worker: RunFiles, folder: Path, lane: str) -> Iterator[tuple[Both, ps.Client]]:
    """A worker and a server, both looked at."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "counted"))
    listener.listen()
    listener.settimeout(DEADLINE_S)
    shape = ClusterShape(server_count=1, worker_count=1)
    with Launcher() as launcher, listener:
        scheduler = start_scheduler(launcher, shape)
        environment = {SOCKET: str(folder / "counted")}
        bare = RoleCommand("server", 0, "tests.integration.counted_server", (), environment)
        arguments = (
            f"--scheduler={scheduler.address}",
            f"--ready-file={launcher.ready_file(bare)}",
        )
        process = launcher.start(replace(bare, arguments=arguments))
        server, _ = listener.accept()
        server.settimeout(DEADLINE_S)
        launcher.wait_ready(process)
        options: Any = {"rank": 0, "lane": lane, "request_deadline_s": DEADLINE_S}
        with server, ps.connect(scheduler.address, **options) as client:
            yield Both(worker, server), client


@pytest.mark.parametrize("lane", MOST)
def test_a_block_passes_few_files(worker: RunFiles, tmp_path: Path, lane: str) -> None:
    """A push of one block that ends its step, until its outcome is handled; and a read of it."""
    with counted(worker, tmp_path, lane) as (both, client):
        table = client.create_table("one block", BLOCK, optimizer=ps.SGD(lr=1.0))
        gradient = np.ones(BLOCK, np.float32)
        out = np.empty_like(gradient)
        client.push_pull(table, gradient, out=out)
        found = {
            "push": both.of(lambda: client.wait(client.push(table, gradient))),
            "pull": both.of(lambda: client.pull(table, out=out)),
        }
    too_many = []
    for (verb, files), most in zip(found.items(), MOST[lane], strict=True):
        of_roles = [path for path in files if path.startswith(ROLES)]
        said = (
            f"lane {lane}: a {verb} runs through {len(of_roles)} files of the two roles, at most "
            f"{most} expected, and {len(files) - len(of_roles)} of what all roles share:"
        )
        print(said, *files, sep="\n  ")
        if len(of_roles) > most:
            too_many.append("\n  ".join((said, *files)))
    assert not too_many, "\n".join(too_many)
