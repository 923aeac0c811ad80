"""`python -m scheduler` as a process: how it starts and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ps_core.cluster_view import Role
from ps_runtime.grpc import channels
from tests.integration.scheduler_calls import (
    Caller,
)
from tests.joining import SECRET

pytestmark = pytest.mark.slow


class Process:
    """`python -m scheduler` on free ports."""

    def __init__(self, process: asyncio.subprocess.Process, ready_file: Path) -> None:
        self.process = process
        self.ready_file = ready_file

    async def address(self) -> str:
        """Its address, once the log says that it serves."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if b"event=cluster_formed" in line:
                break
        return str(json.loads(self.ready_file.read_text())["address"])

    async def end(self) -> tuple[int, str]:
        """Its status and the rest of its log, once it has ended."""
        _, rest = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, rest.decode()


@contextlib.asynccontextmanager
async def process(tmp_path: Path, *arguments: str, **variables: str) -> AsyncIterator[Process]:
    ready_file = tmp_path / "ready.json"
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler", f"--ready-file={ready_file}", *arguments),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Process(started, ready_file)
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_process_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    async def test() -> None:
        async with process(tmp_path, "--workers=1", "--servers=1") as scheduler:
            await scheduler.address()
            scheduler.process.send_signal(number)
            status, log = await scheduler.end()
        assert status == 0
        assert f"event=stopping reason={number.name}" in log
        assert SECRET not in log + scheduler.ready_file.read_text()

    asyncio.run(test())


@pytest.mark.thorough
def test_a_scheduler_that_can_keep_no_join_secret_does_not_start(tmp_path: Path) -> None:
    async def test() -> None:
        nowhere = {"PUSHPULL_JOIN_SECRET": "", "HOME": str(tmp_path / "nowhere")}
        async with process(tmp_path, "--workers=1", "--servers=1", **nowhere) as scheduler:
            status, log = await scheduler.end()
        assert status == 2
        assert "event=cannot_serve" in log
        assert "set PUSHPULL_JOIN_SECRET to what openssl rand -hex 32 prints" in log
        assert not scheduler.ready_file.exists()

    asyncio.run(test())


@pytest.mark.thorough
def test_stop_when_done_ends_after_the_last_worker_and_the_servers(tmp_path: Path) -> None:
    async def test() -> None:
        arguments = ("--workers=1", "--servers=1", "--stop-when-done")
        async with process(tmp_path, *arguments) as scheduler:
            channel = channels.aio_channel(await scheduler.address())
            async with channel:
                cluster = Caller(channel)
                server = await cluster.join(Role.SERVER)
                await cluster.leave(await cluster.join(Role.WORKER))
                await cluster.view_where(server, lambda view: view.finished)
                await cluster.leave(server)
                status, log = await scheduler.end()
        assert status == 0
        events = [word for word in log.split() if word.startswith("event=")]
        assert events[:5] == [
            "event=node_registered",
            "event=node_registered",
            "event=node_left",
            "event=cluster_finished",
            "event=node_left",
        ]
        assert 'reason="all workers and servers have left"' in log

    asyncio.run(test())


@pytest.mark.thorough
def test_stop_when_done_ends_when_the_last_worker_is_gone(tmp_path: Path) -> None:
    async def test() -> None:
        arguments = (
            *("--workers=2", "--servers=1", "--stop-when-done"),
            *("--heartbeat-interval-s=0.1", "--lease-s=0.3", "--worker-timeout-s=0.6"),
        )
        async with process(tmp_path, *arguments) as scheduler:
            channel = channels.aio_channel(await scheduler.address())
            async with channel:
                cluster = Caller(channel)
                server = await cluster.join(Role.SERVER)
                await cluster.leave(await cluster.join(Role.WORKER))
                await cluster.join(Role.WORKER)  # and is never heard of again
                view = await cluster.view_where(server, lambda _: True)
                while not view.finished:
                    await cluster.beat(server)
                    view = await cluster.view_where(server, lambda _: True)
                await cluster.leave(server)
                status, log = await scheduler.end()
        assert [node.state.value for node in view.nodes][1:] == ["left", "gone"]
        assert status == 0
        assert re.search(
            r'event=worker_gone reason="worker 1 was declared gone after 0\.\d s of silence"', log
        )

    asyncio.run(test())


def test_a_scheduler_whose_journal_cannot_be_written_now_is_not_refused(tmp_path: Path) -> None:
    """Who starts it again may find space: `train` and Kubernetes do so, but after status 2."""

    async def test() -> None:
        journal = "--journal=/proc/journal"  # no directory can be made there, whoever asks
        async with process(tmp_path, "--workers=1", "--servers=1", journal) as scheduler:
            status, log = await scheduler.end()
        assert status == 1
        assert "cannot be written" in log

    asyncio.run(test())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--workers=0", "--servers=1"), "workers is 0; expected 1 to 5000"),
        (
            ("--workers=1", "--servers=2", "--replicas=3"),
            "replicas is 3; expected 1 to the number of servers, 2",
        ),
        (
            ("--workers=1", "--servers=2", "--replicas=2", "--min-in-sync=3"),
            "min_in_sync is 3; expected 1 to the number of replicas, 2",
        ),
        (
            ("--workers=1", "--servers=1", "--ranges=4097"),
            "ranges is 4097; expected 1 to 4096, or 0 for as many as suit the servers",
        ),
    ],
)
def test_a_wrong_setting_ends_the_process_with_its_name(
    tmp_path: Path, wrong: tuple[str, ...], message: str
) -> None:
    async def test() -> None:
        async with process(tmp_path, *wrong) as scheduler:
            status, log = await scheduler.end()
        assert status == 2
        assert log.endswith(f'event=cannot_serve error="{message}"\n')

    asyncio.run(test())
