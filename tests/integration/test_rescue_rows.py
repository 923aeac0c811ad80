"""`pushpull checkpoint rescue` of tables of rows, at servers that still serve: row by row what a
client pulls.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import safetensors.torch

import ps_worker as ps
from ps_runtime.cluster import wire
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc
from tests.file_limits import NO_BYTECODE, limiting
from tests.integration.command_line import environment, run_here
from tests.integration.raw_wire import check_error
from tests.integration.rescued_rows import kept_file, rescued, rows_in

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

DEADLINE_S = 30.0
LONG = 4096
"""Elements of a row: 128 rows fit an answer."""

IDS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ps.LocalCluster]:
    root = tmp_path_factory.mktemp("checkpoints")
    with ps.local_cluster(2, 1, checkpoint_url=str(root)) as found:
        yield found


@pytest.fixture(scope="module")
def client(cluster: ps.LocalCluster) -> Iterator[ps.Client]:
    with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as found:
        yield found


def push(client: ps.Client, table: ps.TableHandle, ids: Any, seed: int = 0) -> None:
    """A step with gradients of these ids."""
    dtype = np.dtype(table.table.spec.dtype.value)
    shape = len(ids), table.table.spec.element_count
    rows = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    client.wait(client.push_rows(table, np.asarray(ids), rows))


@pytest.mark.thorough
def test_rows_are_saved_as_a_client_pulls_them(
    cluster: ps.LocalCluster, client: ps.Client, tmp_path: Path
) -> None:
    """Beside parameters; rows that no update made, and candidates, are not in it."""
    adam = ps.Adam(lr=0.1)
    dense = client.create_table("model", [("weight", (30, 5))], optimizer=adam)
    client.wait(client.push(dense, np.ones((30, 5), np.float32)))
    long = client.create_embedding("long", LONG, optimizer=ps.FTRL(lr=0.1), partitions=2)
    wide = client.create_embedding(
        "wide", 3, optimizer=adam, dtype="float64", partitions=5, admit_after=2,
        init=ps.Uniform(1.0),
    )  # fmt: skip
    client.create_embedding("nobody's", 3, optimizer=adam)
    for ids in (range(0, IDS, 2), range(1, IDS, 2)):
        push(client, long, ids)
    push(client, wide, range(0, IDS, 2))
    push(client, wide, range(0, IDS, 4))
    out = tmp_path / "saved.safetensors"
    said = rescued(kept_file(tmp_path / "kept.json", cluster.address), out)
    count = IDS + IDS // 4
    assert said == (f"{out}: 7 tensors of 4 tables, with {count} rows, without optimizer state\n")
    every = np.arange(IDS)
    for table, expected in ((long, every), (wide, every[::4])):
        found, pulled = rows_in(out, table.name), client.pull_rows(table, every)
        assert sorted(found) == expected.tolist()
        assert found == {row_id: pulled[row_id].tobytes() for row_id in found}
    assert rows_in(out, "nobody's") == {}
    check_as_exported(client, out, tmp_path)
    check_train_on(client, out, tmp_path)


def check_as_exported(client: ps.Client, out: Path, folder: Path) -> None:
    """The file is what `checkpoint export` writes of a checkpoint, but for the order of rows."""
    url = client.checkpoint().wait().url
    ended = run_here("checkpoint", "export", url, "exported", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (one, other) = (safetensors.torch.load_file(each) for each in (out, folder / "exported"))
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {
        n: (t.shape, t.dtype) for n, t in other.items()
    }
    assert one["weight"].equal(other["weight"])
    for name in ("long", "wide"):
        assert rows_in(out, name) == rows_in(folder / "exported", name)


def check_train_on(client: ps.Client, out: Path, folder: Path) -> None:
    """Another cluster starts from the file."""
    ended = run_here("checkpoint", "import", str(out), str(folder / "again"), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    every = np.arange(IDS)
    with (
        ps.local_cluster(1, 1, resume=str(folder / "again")) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as second,
    ):
        again = second.create_embedding("long", LONG, optimizer=ps.FTRL(lr=0.1), partitions=2)
        before = client.pull_rows(client.table("long"), every)
        assert np.array_equal(second.pull_rows(again, every), before)


class Between(parameters_pb2_grpc.ParameterServiceServicer):
    """Stands between a reader and a server; `before` is called before each pull."""

    def __init__(self, address: str, before: Callable[[], None]) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        self._stub = parameters_pb2_grpc.ParameterServiceStub(self._channel)
        self._before = before
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        parameters_pb2_grpc.add_ParameterServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Pull(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - gRPC's name
        del context
        self._before()
        yield from self._stub.Pull(request, timeout=DEADLINE_S)

    def close(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()


@contextlib.contextmanager
def disturbed(path: Path, address: str, before: Callable[[], None]) -> Iterator[Path]:
    """A file of kept values, by which each pull comes after a call of `before`."""
    with contextlib.ExitStack() as stack:

        def moved(server: str) -> str:
            between = Between(server, before)
            stack.callback(between.close)
            return between.address

        yield kept_file(path, address, moved)


@pytest.fixture(scope="module")
def changing() -> Iterator[tuple[str, ps.Client, ps.TableHandle]]:
    """A cluster whose one table has one partition of three answers, with room for no more rows."""
    with ps.local_cluster(1, 1) as cluster, ps.connect(cluster.address) as worker:
        table = worker.create_embedding(
            "moving", LONG, optimizer=ps.SGD(lr=1.0), partitions=1, consistency="asp",
            max_rows=IDS, evict_after=3,
        )  # fmt: skip
        for ids in (range(150), range(150, 300)):
            push(worker, table, ids)
        yield cluster.address, worker, table


@pytest.mark.thorough
def test_a_partition_that_changes_meanwhile_is_read_anew(
    changing: tuple[str, ps.Client, ps.TableHandle], tmp_path: Path
) -> None:
    """Rows come, change and go between its answers: all are of one moment."""
    address, worker, table = changing
    calls: list[int] = []

    def before() -> None:
        calls.append(len(calls))
        if calls[-1] < 6:  # the last of them evicts two thirds of the rows
            push(worker, table, range(200, 310), seed=calls[-1])

    out = tmp_path / "saved"
    with disturbed(tmp_path / "kept.json", address, before) as kept:
        rescued(kept, out)
    assert len(calls) > 6, "it was read when nothing changed any more"
    pulled = worker.pull_rows(table, np.arange(310))
    found = rows_in(out, "moving")
    assert sorted(found) == list(range(200, 310))
    assert found == {row_id: pulled[row_id].tobytes() for row_id in found}


@pytest.mark.thorough
def test_one_that_never_rests_is_refused_with_the_remedy(
    changing: tuple[str, ps.Client, ps.TableHandle], tmp_path: Path
) -> None:
    address, worker, table = changing

    calls: list[int] = []

    def before() -> None:
        calls.append(len(calls))
        push(worker, table, range(200, 310))

    with disturbed(tmp_path / "kept.json", address, before) as kept:
        ended = run_here("checkpoint", "rescue", str(kept), "saved", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "of table 'moving' at 127.0.0.1:" in ended.stderr
    assert "pushed to each of the 20 times that it was read: end its workers" in ended.stderr
    assert len(calls) == 2 * 20, "it is given up at the second answer"
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]


# --- what goes wrong


@pytest.mark.thorough
def test_a_disk_that_is_full_is_said(
    cluster: ps.LocalCluster, client: ps.Client, tmp_path: Path
) -> None:
    table = client.create_embedding("filling", LONG, optimizer=ps.SGD(lr=1.0))
    push(client, table, range(50))
    kept = kept_file(tmp_path / "kept.json", cluster.address)
    ended = subprocess.run(
        [sys.executable, "-m", "ps_cli", "checkpoint", "rescue", kept, "saved"],
        cwd=tmp_path, env=environment() | NO_BYTECODE, capture_output=True, text=True, check=False,
        preexec_fn=limiting(500_000),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (
        2, "pushpull: saved cannot be written: File too large\n",
    )  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]


def test_a_server_that_is_gone_is_named(
    cluster: ps.LocalCluster, client: ps.Client, tmp_path: Path
) -> None:
    push(client, client.create_embedding("lost", 4, optimizer=ps.SGD(lr=1.0)), range(9))
    kept = kept_file(tmp_path / "kept.json", cluster.address, lambda _: "127.0.0.1:1")
    ended = run_here("checkpoint", "rescue", str(kept), "saved", cwd=tmp_path)
    assert ended.returncode == 1
    assert " at 127.0.0.1:1 cannot be read: " in ended.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]


@pytest.mark.thorough
def test_a_listing_that_is_wrong_is_refused(cluster: ps.LocalCluster) -> None:
    with ps.connect(cluster.address, role="reader") as reader:
        engine = reader.engine
        tables = {table.spec.name: table for table in engine.view.tables}
        session = wire.session_to_proto(reader.session)
        for name, pull, words in (
            ("wide", {"blocks": [0, 1], "skipped_row_counts": [0]}, "the rows of 1 blocks"),
            ("wide", {"skipped_row_counts": [0]}, "for each of its 0 blocks"),
            ("wide", {"blocks": [0], "ids": [b""], "skipped_row_counts": [0]}, "one of both"),
            ("model", {"blocks": [0], "skipped_row_counts": [0]}, "it is not of rows"),
            ("wide", {"blocks": [77], "skipped_row_counts": [0]}, "block 77"),
        ):
            table = tables[name]
            range_id, *_ = table.blocks_by_range(len(engine.view.ranges))
            assignment = engine.view.ranges[range_id]
            (address,) = [n.address for n in engine.view.nodes if n.node_id == assignment.primary]
            part = parameters_pb2.RangePull(
                range_id=range_id, assignment_epoch=assignment.assignment_epoch, **pull
            )
            request = parameters_pb2.PullRequest(
                session=session, table_id=table.table_id, ranges=[part]
            )
            with grpc.insecure_channel(address) as channel:
                stub = parameters_pb2_grpc.ParameterServiceStub(channel)
                (answer,) = stub.Pull(request, timeout=DEADLINE_S)
            check_error(answer.error.error, "INVALID_KEYS", words)
