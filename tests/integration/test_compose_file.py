"""docker-compose.yml: the size of the cluster that the scheduler's command asks for, its times, and
its volumes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.edge.sqlite_store import FILE_NAME, SqliteStore
from tests.tidy.source import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SCHEDULER, SERVER = COMPOSE["services"]["scheduler"], COMPOSE["services"]["server"]

ADDRESSES = """\
case $2 in server) count={servers};; worker) count={workers};; esac
seq --format "10.0.0.%g STREAM" $count
"""


def started_with(folder: Path, servers: int, workers: int) -> str:
    """Arguments of the scheduler that the command starts, where so many containers have addresses;
    its journal is in `folder`.
    """
    programs = {
        "getent": ADDRESSES.format(servers=servers, workers=workers),
        "pushpull": 'echo "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    shell, options, script = SCHEDULER["command"]
    script = script.replace("$$", "$").replace("/journal", str(journal_in(folder)))
    run = subprocess.run(
        [shell, options, script],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def journal_in(folder: Path) -> Path:
    (folder / "journal").mkdir(exist_ok=True)
    return folder / "journal"


def sized(servers: int, workers: int) -> str:
    return f"scheduler --stop-when-done --servers {servers} --workers {workers}"


@pytest.fixture
def with_cluster(tmp_path: Path) -> Path:
    """A folder where a scheduler of 2 servers and 4 workers has ended well, and its cluster not."""
    assert started_with(tmp_path, 2, 4) == sized(2, 4)
    store = SqliteStore(journal_in(tmp_path))
    store.claim()
    store.write({"cluster": b"kept"})
    store.close()
    return tmp_path


def test_a_scheduler_that_was_stopped_is_for_as_many_as_before(with_cluster: Path) -> None:
    assert started_with(with_cluster, 2, 3) == sized(2, 4)


def test_containers_are_counted_anew_after_a_run_that_came_to_its_end(with_cluster: Path) -> None:
    store = SqliteStore(journal_in(with_cluster))
    store.claim()
    store.write({}, list(store.read()))
    store.close()
    assert started_with(with_cluster, 3, 1) == sized(3, 1)


def test_a_journal_that_cannot_be_read_may_have_a_cluster(with_cluster: Path) -> None:
    """The scheduler says what is wrong with it, and a copy in its place is of the same size."""
    (journal_in(with_cluster) / FILE_NAME).write_bytes(b"damaged" * 1000)
    assert started_with(with_cluster, 2, 3) == sized(2, 4)


def with_defaults(text: str) -> str:
    return re.sub(r"\$\{\w+:-(\d+)\}", r"\1", text)


def test_a_last_checkpoint_has_minutes_and_the_scheduler_is_killed_later() -> None:
    """Whatever time it is given: the variable is in both."""
    given = SCHEDULER["environment"]["PUSHPULL_CHECKPOINT_LAST_S"]
    minutes, grace_s = SCHEDULER["stop_grace_period"].split("m", 1)
    assert grace_s == f"{given}s"
    assert int(minutes) >= 1
    assert float(with_defaults(given)) >= 300


@pytest.mark.parametrize(("service", "folder"), [(SCHEDULER, "/journal"), (SERVER, "/update-log")])
def test_volumes_that_one_container_alone_can_use_are_its_own(
    service: dict[str, Any], folder: str
) -> None:
    """A named one is kept, and the next containers of the service have other folders there."""
    assert folder in service["volumes"]
    assert not [name for name in COMPOSE["volumes"] if name in folder]


def test_the_client_of_an_object_store_fits_the_image_s_fsspec() -> None:
    """s3fs of a version takes fsspec of that version alone, and pip would put another in."""
    page = (ROOT / "docs/guides/CONTAINERS.md").read_text("utf-8")
    (version,) = re.findall(r"s3fs==(\S+)$", page, re.MULTILINE)
    assert f"\ns3fs=={version}\n" in (ROOT / "constraints.txt").read_text("utf-8")
    assert f"\nfsspec=={version} " in (ROOT / "deploy/image/light.txt").read_text("utf-8")
