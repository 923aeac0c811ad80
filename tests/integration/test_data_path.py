"""How many files a block passes through on its way there and back, and a read.

Whoever changes the data path has to know each of them. They are counted by running: a function of
the file is called, in the worker's process or in the server's. What runs beside, as heartbeats do,
runs in some rounds only; what is of the path runs in all.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator
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
from ps_worker.transport.loop import background
from tests.integration.counted_server import SOCKET, RunFiles

pytestmark = pytest.mark.thorough

DEADLINE_S = 60.0
ROUNDS, MORE_ROUNDS = 12, 120
"""On a machine with much else to do a round may last so long that a timer is due in each."""

BLOCK = limits.DEFAULT_BLOCK_ELEMENTS
ROLES = ("ps_server/", "ps_worker/")
MOST = {"shm": (35, 25), "grpc": (32, 22)}
"""By lane: files of the two roles that a push, and a pull, may run through."""


class Both:
    """The files that run in the worker's process, this one, and in the server's."""

    def __init__(self, worker: RunFiles, server: socket.socket) -> None:
        self._worker = worker
        self._lines = server.makefile("rw")

    def of(self, action: Callable[[], object], most: int) -> list[str]:
        """The files that run in each of some rounds; more rounds where they are above `most`."""
        found = self._round(action)
        for number in range(2, MORE_ROUNDS + 1):
            found &= self._round(action)
            if number >= ROUNDS and len(of_roles(found)) <= most:
                break
        return sorted(found)

    def _round(self, action: Callable[[], object]) -> set[str]:
        self._ask("begin")
        self._worker.begin()
        action()
        worker = self._worker.files
        return worker | set(self._ask("end"))

    def _ask(self, order: str) -> list[str]:
        self._lines.write(f"{order}\n")
        self._lines.flush()
        files: list[str] = json.loads(self._lines.readline())
        return files


def of_roles(files: Iterable[str]) -> list[str]:
    """Those that are not of what all roles share."""
    return [path for path in files if path.startswith(ROLES)]


@pytest.fixture(scope="module")
def worker() -> Iterator[RunFiles]:
    """The files that run here, also on the thread of a process's clients, which may be there."""
    run = RunFiles()
    run.watch()
    background().post(run.watch_thread)
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
        most_pushed, most_pulled = MOST[lane]
        pushed = both.of(lambda: client.wait(client.push(table, gradient)), most_pushed)
        pulled = both.of(lambda: client.pull(table, out=out), most_pulled)
    too_many = []
    for verb, files, most in (("push", pushed, most_pushed), ("pull", pulled, most_pulled)):
        count = len(of_roles(files))
        said = (
            f"lane {lane}: a {verb} runs through {count} files of the two roles, at most {most} "
            f"expected, and {len(files) - count} of what all roles share:"
        )
        print(said, *files, sep="\n  ")
        if count > most:
            too_many.append("\n  ".join((said, *files)))
    assert not too_many, "\n".join(too_many)
