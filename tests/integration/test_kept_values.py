"""A scheduler that was started again finds servers with values of the cluster before it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import ps_worker as ps
from ps_cli.__main__ import app
from ps_cli.checkpoint.app import checkpoint_app
from ps_core.errors import ForeignCluster
from tests.integration.lane_cluster import until
from tests.joining import SECRET

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

SIZE = 4 * 64
STEPS = 3
IDS = np.arange(5, 700, 7)


class Process:
    """A role, and the lines that it logs."""

    def __init__(self, role: str, ready_file: Path, *arguments: str) -> None:
        self._ready_file = ready_file
        self.process = subprocess.Popen(
            [sys.executable, "-m", role, f"--ready-file={ready_file}", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PUSHPULL_JOIN_SECRET": SECRET,
            },
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self, pattern: str) -> str:
        """The next line with it."""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line has '{pattern}': {''.join(seen)}")

    def rest(self) -> str:
        """All further lines, until it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    @property
    def address(self) -> str:
        """Where it serves."""
        return str(json.loads(self._ready_file.read_text())["address"])

    def end(self) -> None:
        """At once."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def running(role: str, ready_file: Path, *arguments: str) -> Iterator[Process]:
    process = Process(role, ready_file, *arguments)
    try:
        yield process
    finally:
        process.end()


def until_shown(address: str) -> list[Any]:
    """What `pushpull status` says of values of clusters before, when it says anything."""
    found: list[Any] = []

    def is_shown() -> bool:
        ran = CliRunner().invoke(
            app, ["status", "--json", "--scheduler", address], env={"PUSHPULL_JOIN_SECRET": SECRET}
        )
        assert ran.exit_code == 0, ran.output
        found[:] = json.loads(ran.stdout)["kept_values"]
        return bool(found)

    until(is_shown, "the server is shown")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("cluster_id", ["one", "another"])
def test_a_server_with_values_keeps_them_until_somebody_has_read_them(
    tmp_path: Path, cluster_id: str
) -> None:
    shape = ("--workers=1", "--servers=1", "--heartbeat-interval-s=0.2", "--lease-s=1")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(
            running("scheduler", tmp_path / "first", *shape, "--cluster-id=one")
        )
        first.line("event=cluster_formed")
        address = first.address
        server = stack.enter_context(
            running("ps_server", tmp_path / "server", f"--scheduler={address}")
        )
        server.line("event=serving")
        client = ps.connect(address, request_deadline_s=30.0, lane="grpc")
        sgd = ps.SGD(lr=1.0)
        table = client.create_table(
            "x", SIZE, optimizer=sgd, consistency="asp", reduction="sum", block_elements=64
        )
        users = client.create_embedding("users", 3, optimizer=sgd, consistency="asp")
        for _ in range(STEPS):
            client.wait(client.push(table, np.ones(SIZE, np.float32)))
            client.wait(client.push_rows(users, IDS, np.ones((len(IDS), 3), np.float32)))
        first.end()
        again = ("--cluster-id=" + cluster_id, f"--listen={address}")
        stack.enter_context(running("scheduler", tmp_path / "again", *shape, *again))

        kept = re.search(r"file=(\S+)", server.line("event=values_kept"))
        assert kept is not None
        assert Path(kept[1]).stat().st_mode & 0o077 == 0
        shown = until_shown(address)
        assert [entry["file"] for entry in shown] == [kept[1]]
        assert (shown[0]["address"], shown[0]["cluster_id"]) == (server.address, "one")
        out = tmp_path / "saved.safetensors"
        ran = CliRunner().invoke(checkpoint_app, ["rescue", kept[1], str(out)])
        assert ran.exit_code == 0, ran.output
        saved = load_file(out)
        assert np.array_equal(saved["x"], np.full(SIZE, -STEPS, np.float32))
        assert sorted(saved["users/ids"].tolist()) == IDS.tolist()
        assert np.array_equal(saved["users/rows"], np.full((len(IDS), 3), -STEPS, np.float32))
        with pytest.raises(ForeignCluster, match="another"):
            client.checkpoint().wait()
        client.close(leave=False)
        server.process.send_signal(signal.SIGTERM)
        said = server.rest()
        assert "event=stopped" in said
        assert "event=registering_again" not in said, said
        assert server.process.wait() == 0
        assert not Path(kept[1]).exists()


def begun(
    stack: contextlib.ExitStack, folder: Path, shape: Sequence[str]
) -> tuple[Process, Process]:
    """A scheduler and a server that serves."""
    first = stack.enter_context(running("scheduler", folder / "first", *shape))
    first.line("event=cluster_formed")
    joins = f"--scheduler={first.address}"
    server = stack.enter_context(running("ps_server", folder / "server", joins))
    server.line("event=serving")
    return first, server


@pytest.mark.thorough
def test_kept_values_can_be_read_once_the_disk_takes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    shape = ("--workers=1", "--servers=1", "--heartbeat-interval-s=0.2", "--lease-s=1")
    with contextlib.ExitStack() as stack:
        first, server = begun(stack, tmp_path, shape)
        address = first.address
        client = ps.connect(address, request_deadline_s=30.0, lane="grpc")
        table = client.create_table("x", SIZE, optimizer=ps.SGD(lr=1.0), consistency="asp")
        client.wait(client.push(table, np.ones(SIZE, np.float32)))
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (8, limits[1]))
        first.end()
        stack.enter_context(running("scheduler", tmp_path / "again", *shape, f"--listen={address}"))

        said = server.line("event=values_kept")
        assert "file=none" in said
        assert 'remedy="make room for temporary files' in said
        assert until_shown(address)[0]["file"] is None
        assert not list(temporary.iterdir())
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
        kept = re.search(r"file=(/\S+)", server.line("event=values_kept"))
        assert kept is not None
        until(lambda: until_shown(address)[0]["file"] == kept[1], "the file is shown")
        out = tmp_path / "saved.safetensors"
        ran = CliRunner().invoke(checkpoint_app, ["rescue", kept[1], str(out)])
        assert ran.exit_code == 0, ran.output
        assert np.array_equal(load_file(out)["x"], np.full(SIZE, -1, np.float32))
        client.close(leave=False)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0
        assert not list(temporary.iterdir())


@pytest.mark.thorough
def test_a_server_that_stops_joins_no_cluster_that_it_finds_meanwhile(tmp_path: Path) -> None:
    """It has no values to keep, and would have a range of the other cluster for a moment."""
    shape = ("--workers=1", "--servers=1", "--heartbeat-interval-s=0.2", "--lease-s=10")
    with contextlib.ExitStack() as stack:
        first, server = begun(stack, tmp_path, shape)
        address = first.address
        first.end()
        server.process.send_signal(signal.SIGTERM)
        server.line("event=told_to_stop")
        again = running("scheduler", tmp_path / "again", *shape, f"--listen={address}")
        stack.enter_context(again)
        said = server.rest()
        assert "event=fenced" in said
        assert "event=registering_again" not in said, said
        assert server.process.wait() == 0


@pytest.mark.thorough
def test_a_server_that_registers_again_and_finds_no_scheduler_stops_at_once(tmp_path: Path) -> None:
    """It is no member of a cluster, so nobody would copy from it."""
    shape = ("--workers=1", "--servers=1", "--heartbeat-interval-s=0.2", "--lease-s=1")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running("scheduler", tmp_path / "first", *shape))
        first.line("event=cluster_formed")
        address = first.address
        patient = ("--drain-grace-s=60", f"--scheduler={address}")
        server = stack.enter_context(running("ps_server", tmp_path / "server", *patient))
        server.line("event=serving")
        first.end()
        again = running("scheduler", tmp_path / "again", *shape, f"--listen={address}")
        with again as other:
            server.line("event=registering_again")
            other.end()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
