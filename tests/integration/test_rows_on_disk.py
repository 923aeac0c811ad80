"""Servers whose memory is full keep the rows of a table on disk, and everything else is as without.

The least memory (1 MiB) has the 4,096 rows that a partition always has there; the others are in
files. Gradients are whole numbers, and one worker pushes them: rows are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file

import ps_worker as ps
from ps_core.errors import Recovering
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape
from ps_runtime.launch.launcher import Launcher, start_scheduler, start_server
from tests.integration.command_line import run_here
from tests.integration.lane_cluster import Served
from tests.integration.replicated_cluster import replicated_cluster
from tests.integration.rescued_rows import kept_file, rescued, rows_in
from tests.integration.rows_alone import RowsAlone

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

DIM, DEADLINE_S = 64, 30.0
IDS, BATCH = 15_000, 3_000
EVERY = np.arange(IDS)

Step = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


def drawn_steps(count: int) -> list[Step]:
    """The first ones make all rows; then come any, some of them twice in a step."""
    draws = np.random.default_rng(11)
    order = draws.permutation(IDS)
    steps = []
    for number in range(count):
        ids = order[number * BATCH : (number + 1) * BATCH]
        if not len(ids):
            ids = draws.integers(IDS, size=BATCH)
        steps.append((ids, draws.integers(-3, 4, (len(ids), DIM)).astype(np.float32)))
    return steps


STEPS = drawn_steps(12)


def on_disk(directory: Path) -> dict[str, str]:
    """The environment of servers with the least memory, and a directory for rows."""
    return {"PUSHPULL_MEMORY_MB": "1", "PUSHPULL_ROWS_DIR": str(directory)}


def create(client: ps.Client, partitions: int = 2) -> ps.TableHandle:
    return client.create_embedding(
        "rows", DIM, optimizer=ps.Adam(lr=0.1), init=ps.Uniform(1.0), partitions=partitions
    )


def train(client: ps.Client, table: ps.TableHandle, steps: Sequence[Step]) -> None:
    """Pulls what it pushes, as a model does."""
    for ids, gradients in steps:
        client.pull_rows(table, ids)
        client.wait(client.push_rows(table, ids, gradients))


def bits(rows: Any) -> bytes:
    return np.ascontiguousarray(rows).tobytes()


def expected_rows(table: ps.TableHandle, step_count: int) -> bytes:
    """The rows after so many steps on one server that has all of them in memory."""
    alone = RowsAlone(table)
    for step in STEPS[:step_count]:
        alone.step([step])
    return bits(alone.pull(EVERY))


def nameless_files(server: Served, directory: Path) -> int:
    """The files of this directory that a server has open, and that no directory has a name of."""
    count = 0
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        path = str(link.readlink())
        count += path.startswith(f"{directory}/") and path.endswith(" (deleted)")
    return count


@pytest.mark.thorough
@pytest.mark.parametrize("lane", ["grpc", "shm"])
def test_rows_on_disk_are_trained_as_rows_in_memory(lane: str, tmp_path: Path) -> None:
    found, disk_row_counts = [], []
    for environment in ({}, on_disk(tmp_path / "rows")):
        with (
            replicated_cluster(1, 1, environment, replica_count=1) as cluster,
            ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S) as client,
        ):
            table = create(client)
            train(client, table, STEPS)
            (server,) = cluster.servers
            disk_row_counts.append(server.metric("pushpull_server_disk_rows"))
            found.append(bits(client.pull_rows(table, EVERY)))
            assert server.metric("pushpull_server_rows") == IDS
            if environment:
                assert server.metric("pushpull_server_written_rows_total") >= disk_row_counts[-1]
                assert server.metric("pushpull_server_fetched_rows_total") > 0
    assert found[0] == found[1]
    assert disk_row_counts[0] == 0
    assert disk_row_counts[1] > IDS // 5


@pytest.mark.thorough
@pytest.mark.parametrize("lane", ["grpc", pytest.param("shm", marks=pytest.mark.second_lane)])
def test_a_killed_server_loses_no_row_and_leaves_no_file(lane: str, tmp_path: Path) -> None:
    """It dies under a push; another joins, gets all rows, and serves when the other one dies."""
    directory = tmp_path / "rows"
    with (
        replicated_cluster(2, 1, on_disk(directory)) as cluster,
        ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S) as client,
    ):
        adds = ps.SGD(lr=1.0, maximize=True)
        table = client.create_embedding("counts", DIM, optimizer=adds, partitions=2)
        expected = np.zeros((IDS, DIM), np.float32)
        for number, (ids, gradients) in enumerate(STEPS):
            np.add.at(expected, ids, gradients)
            ticket = client.push_rows(table, ids, gradients)
            if number in (6, 9):
                primary = cluster.a_primary()
                assert nameless_files(primary, directory) > 0
                cluster.kill(primary)
                assert list(directory.iterdir()) == []
            client.wait(ticket)
            if number == 6:
                cluster.have(2)
        assert cluster.living[0].metric("pushpull_server_disk_rows") > 0
        assert np.array_equal(client.pull_rows(table, EVERY), expected)
    assert list(directory.iterdir()) == []


@pytest.mark.thorough
def test_a_checkpoint_of_rows_on_disk_is_restored_on_any_servers(tmp_path: Path) -> None:
    """It is written while training goes on."""
    plan = CheckpointPlan(str(tmp_path / "checkpoints"))
    with (
        replicated_cluster(2, 1, on_disk(tmp_path / "rows"), replica_count=1, checkpoints=plan) as
        cluster, ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):  # fmt: skip
        table = create(client)
        train(client, table, STEPS[:6])
        counts = [server.metric("pushpull_server_disk_rows") for server in cluster.servers]
        assert min(counts) > 0
        begun = client.checkpoint()
        train(client, table, STEPS[6:8])
        made = begun.wait()
        kept = kept_file(tmp_path / "kept.json", cluster.address)
        rescued(kept, tmp_path / "listed")
        undisturbed = client.pull_rows(table, EVERY)
        assert bits(undisturbed) == expected_rows(table, 8)
        assert rows_in(tmp_path / "listed", "rows") == by_id(undisturbed)
    check_restored(made.url, 3, {}, tmp_path)
    check_restored(made.url, 1, on_disk(tmp_path / "others"), tmp_path)


def by_id(rows: npt.NDArray[np.float32]) -> dict[int, bytes]:
    return {row_id: row.tobytes() for row_id, row in enumerate(rows)}


def check_restored(url: str, servers: int, environment: dict[str, str], folder: Path) -> None:
    """A cluster begins with the rows and their state, and an export has all of them."""
    plan = CheckpointPlan(resume=url)
    with (
        replicated_cluster(servers, 1, environment, replica_count=1, checkpoints=plan) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        table = create(client)
        restored = client.pull_rows(table, EVERY)
        clock = table.clock
        assert 6 <= clock <= 8
        assert bits(restored) == expected_rows(table, clock)
        train(client, table, STEPS[clock:])
        written = [each.metric("pushpull_server_written_rows_total") for each in cluster.servers]
        assert all(count > IDS // 2 if environment else count == 0 for count in written)
        assert bits(client.pull_rows(table, EVERY)) == expected_rows(table, len(STEPS))
    out = folder / f"exported for {servers}"
    ended = run_here("checkpoint", "export", url, str(out), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert len(load_file(out)["rows/ids"]) == IDS
    assert rows_in(out, "rows") == by_id(restored)


def test_a_directory_that_cannot_be_written_to_ends_the_server(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way", encoding="ascii")
    shape = ClusterShape(1, 1, environment=on_disk(file / "rows"))
    with ExitStack() as stack:
        launcher = stack.enter_context(Launcher())
        scheduler = start_scheduler(launcher, shape)
        server = start_server(launcher, shape, scheduler.address, 0)
        with pytest.raises(Recovering) as raised:
            launcher.wait_ready(server)
    (said,) = [line for line in str(raised.value).splitlines() if "rows_dir" in line]
    assert f"rows_dir is '{file}/rows', where no file can be made: Not a directory" in said
    assert "expected a directory that the server may write to" in said
