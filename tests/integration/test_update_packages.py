"""Servers whose installed packages differ, or are broken; and the page's example, as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ps_worker as ps
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import (
    Launcher,
    ReadyRole,
    RoleCommand,
    RoleProcess,
    start_scheduler,
)
from tests.integration.command_line import run_warm
from tests.tidy.source import ROOT
from tests.unit.package_folder import install

pytestmark = pytest.mark.thorough

PAGE = (ROOT / "docs/guides/CUSTOM_UPDATES.md").read_text(encoding="utf-8")
END_DEADLINE_S = 60.0

UPDATE = """
class Plain:
    hyperparameters = {"lr": 1.0}
    slots = {}

    def update(self, values, state, gradient, numbers, step):
        if (gradient == 2.0).any():
            raise ArithmeticError("two is too many")
        return values.sub_(gradient, alpha=numbers["lr"]), state
"""


def package(folder: Path, version: str = "1.0", source: str = UPDATE) -> Path:
    """A folder with an update 'plain'."""
    return install(folder, "zoo", version, {"zoo_plain": source}, {"plain": "zoo_plain:Plain"})


class Cluster:
    """A scheduler, and servers that are started one by one, each with its own packages."""

    def __init__(self, launcher: Launcher, server_count: int, workers: int = 1) -> None:
        self.launcher = launcher
        shape = ClusterShape(server_count=server_count, worker_count=workers)
        self.scheduler: ReadyRole = start_scheduler(launcher, shape)
        self.started = 0

    def start(self, *folders: Path) -> RoleProcess:
        paths = [*map(str, folders), str(ROOT), str(ROOT / "protos")]
        added = {"PYTHONPATH": os.pathsep.join(paths)}
        bare = RoleCommand("server", self.started, "ps_server", environment=added)
        self.started += 1
        arguments = (
            "--listen=127.0.0.1:0",
            "--http-listen=127.0.0.1:0",
            f"--scheduler={self.scheduler.address}",
            f"--ready-file={self.launcher.ready_file(bare)}",
        )
        return self.launcher.start(RoleCommand(*_identity(bare), arguments, added))

    def serve(self, *folders: Path) -> RoleProcess:
        """Start a server that serves."""
        process = self.start(*folders)
        self.launcher.wait_ready(process)
        return process

    def refused(self, *folders: Path) -> str:
        """Start a server that must not join; what it says."""
        ended = self.start(*folders).wait(END_DEADLINE_S)
        assert ended is not None
        assert ended.returncode == 2, ended  # to start it again would change nothing
        return ended.recent_lines[-1]


def _identity(command: RoleCommand) -> tuple[str, int | None, str]:
    return command.kind, command.index, command.module


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def test_two_servers_with_different_versions_do_not_join_one_cluster(
    launcher: Launcher, tmp_path: Path
) -> None:
    cluster = Cluster(launcher, server_count=2)
    old, new = package(tmp_path / "old"), package(tmp_path / "new", "1.1")
    patched = package(tmp_path / "patched", source=UPDATE.replace("alpha=", "alpha=2 * "))
    faster = package(tmp_path / "faster", source=UPDATE.replace('"lr": 1.0', '"lr": 2.0'))
    cluster.serve(old)
    said = cluster.refused(new)
    for words in (
        "INVALID_CONFIG",
        "custom update 'plain'",
        "zoo 1.1;",
        "server node 1",
        "zoo 1.0;",
    ):
        assert words in said
    marks = re.findall(r"selftest=(\w+)", cluster.refused(patched))
    assert len(set(marks)) == 2
    assert "with lr=2; " in cluster.refused(faster)
    cluster.serve(old)
    with ps.connect(cluster.scheduler.address) as client:
        client.create_table("w", 64, optimizer=ps.Custom("plain"))


def test_a_server_that_comes_later_needs_what_tables_use(
    launcher: Launcher, tmp_path: Path
) -> None:
    """And a worker leaves in order, and the cluster goes on, when a table has failed."""
    cluster = Cluster(launcher, server_count=1, workers=2)
    zoo = package(tmp_path / "zoo")
    broken = package(tmp_path / "broken", source="import nonsense_that_is_nowhere\n")
    server = cluster.serve(zoo)
    with ps.connect(cluster.scheduler.address, rank=0, request_deadline_s=30.0) as client:
        table = client.create_table("w", 640, optimizer=ps.Custom("plain"), consistency="asp")
        said = cluster.refused()
        assert "table 'w' uses the custom update 'plain', which the server lacks; it has none" in (
            said.replace('\\"', '"')
        )
        assert "cannot run it: zoo_plain:Plain of zoo 1.0 cannot be loaded" in cluster.refused(
            broken
        )
        cluster.serve(zoo)
        client.wait(client.push(table, np.ones(640, np.float32)))
        assert client.pull(table).tolist() == [-1.0] * 640
        with pytest.raises(ps.UpdateFailed, match=r"two is too many \(zoo_plain.py:8\)"):
            client.wait(client.push(table, np.full(640, 2.0, np.float32)))
    with ps.connect(cluster.scheduler.address, rank=1, request_deadline_s=30.0) as client:
        other = client.create_table("v", 64, optimizer=ps.Custom("plain"), consistency="asp")
        client.wait(client.push(other, np.ones(64, np.float32)))
    assert server.exit is None
    assert any("event=table_failed" in line for line in server.recent_lines)


def test_a_broken_package_does_not_keep_a_server_from_starting(
    launcher: Launcher, tmp_path: Path
) -> None:
    cluster = Cluster(launcher, server_count=1)
    server = cluster.serve(package(tmp_path / "zoo", source="import nonsense_that_is_nowhere\n"))
    (line,) = [line for line in server.recent_lines if "update_not_offered" in line]
    assert "ModuleNotFoundError" in line
    with ps.connect(cluster.scheduler.address, request_deadline_s=30.0) as client:
        with pytest.raises(ps.InvalidConfig, match="ModuleNotFoundError"):
            client.create_table("w", 64, optimizer=ps.Custom("plain"))
        table = client.create_table("w", 64, optimizer=ps.SGD(lr=1.0))
        client.wait(client.push(table, np.ones(64, np.float32)))


def blocks(language: str) -> list[str]:
    """The page's programs in one language."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.mark.timeout(150)
def test_the_page_has_a_complete_example(tmp_path: Path) -> None:
    (project,) = blocks("toml")
    update, check, script = blocks("python")
    said = tomllib.loads(project)
    assert said["tool"]["setuptools"]["py-modules"] == ["lion_updates"]
    head = said["project"]
    folder = install(
        tmp_path / "installed",
        head["name"],
        head["version"],
        {"lion_updates": update},
        head["entry-points"]["pushpull.updates"],
    )
    (tmp_path / "test_lion_updates.py").write_text(check, encoding="utf-8")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "protos")])}
    checked = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lion_updates.py"],
        cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert "1 passed" in checked.stdout, checked.stdout + checked.stderr
    arguments = ("train", "train.py", "--workers", "2", "--servers", "2")
    trained = run_warm(*arguments, cwd=tmp_path, has_warm_roles=True, variables=paths)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    reached = re.search(r"loss (\d+\.\d+)\n", trained.stdout)
    assert reached, trained.stdout
    assert float(reached[1]) < 1.0
