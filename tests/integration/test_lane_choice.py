"""Which lane a client takes: by setting, by what the server offers, by what the system allows."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import ps_worker as ps
from ps_runtime.observe import logs
from ps_worker.transport.metrics import REGISTRY
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until
from tests.joining import operator

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0
SIZE = 64 * 50


@pytest.fixture(scope="module")
def bytes_only() -> Iterator[LaneCluster]:
    """Servers that were told not to share memory."""
    with lane_cluster(servers=2, workers=8, environment={"PUSHPULL_LANE": "grpc"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    """Servers that share memory where they can."""
    with lane_cluster(servers=1, workers=8) as cluster:
        yield cluster


def worker(cluster: LaneCluster, **options: Any) -> ps.Client:
    return ps.connect(cluster.address, request_deadline_s=DEADLINE_S, **options)


def trained(client: ps.Client, name: str) -> ps.TableHandle:
    """A table after one step."""
    handle = client.create_table(
        name, SIZE, optimizer=ps.SGD(lr=1.0), consistency=ps.ASP(), block_elements=64
    )
    found = np.asarray(client.push_pull(handle, np.ones(SIZE, np.float32)))
    assert np.all(found == -1.0)
    return handle


def lanes_in_use() -> dict[str, float]:
    """The metric of this process, by lane."""
    return {
        sample.labels["lane"]: sample.value
        for metric in REGISTRY.collect()
        if metric.name == "pushpull_worker_lanes"
        for sample in metric.samples
        if sample.value
    }


def said_in_status(cluster: LaneCluster, node_id: int) -> str:
    """What the scheduler knows of a node's lane."""
    with grpc.insecure_channel(cluster.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.GetClusterStatusRequest(session=operator(stub))
        answer = stub.GetClusterStatus(request, timeout=DEADLINE_S)
    (lane,) = [entry.progress.lane for entry in answer.nodes if entry.node.node_id == node_id]
    return str(lane)


@pytest.mark.thorough
def test_a_server_that_shares_nothing_gets_bytes(
    bytes_only: LaneCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER_NAME)
    with worker(bytes_only) as client:
        trained(client, "bytes")
        chosen = [
            record.getMessage()
            for record in caplog.records
            if "lane_chosen" in record.msg % record.args
        ]
        assert len(chosen) == 2, "one line a server"
        for line in chosen:
            assert "lane=grpc" in line
            assert 'reason="the server does not offer shared memory"' in line
        assert lanes_in_use() == {"grpc": 2}
        node_id = client.session.node_id
        until(lambda: said_in_status(bytes_only, node_id) == "grpc", "status says lane=grpc")
    assert lanes_in_use() == {}


def test_a_client_that_insists_says_which_server_shares_nothing(bytes_only: LaneCluster) -> None:
    words = r"lane is 'shm', and server \d+ at 127\.0\.0\.1:\d+ cannot share memory.*does not offer"
    with pytest.raises(ps.InvalidConfig, match=words), worker(bytes_only, lane="shm") as client:
        trained(client, "insisting")
    with worker(bytes_only) as client:
        trained(client, "for the reader")
        with (
            pytest.raises(ps.InvalidConfig, match=words),
            worker(bytes_only, lane="shm", role="reader") as reader,
        ):
            reader.pull(reader.table("for the reader"))


@pytest.mark.thorough
def test_a_client_that_wants_bytes_gets_bytes(
    cluster: LaneCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER_NAME)
    with worker(cluster, lane="grpc") as client:
        trained(client, "by setting")
        assert 'lane=grpc reason="by setting"' in caplog.text
        assert cluster.shm_sessions == [0]


@pytest.mark.thorough
def test_clients_on_the_servers_host_share_memory(
    cluster: LaneCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER_NAME)
    with worker(cluster) as client, worker(cluster, role="reader") as reader:
        handle = trained(client, "shared")
        assert np.all(np.asarray(reader.pull(reader.table(handle.name))) == -1.0)
        assert 'lane=shm reason="same host"' in caplog.text
        assert lanes_in_use() == {"shm": 2}
        for node_id in (client.session.node_id, reader.session.node_id):
            until(lambda n=node_id: said_in_status(cluster, n) == "shm", "status says lane=shm")  # type: ignore[misc]
    until(lambda: cluster.shm_sessions == [0], "both have left")


def test_a_wrong_setting_is_refused(cluster: LaneCluster) -> None:
    with pytest.raises(ps.InvalidConfig, match="lane is 'tcp'; expected one of auto, shm, grpc"):
        worker(cluster, lane="tcp")


LIMITED = """
import resource, sys
import numpy as np
import ps_worker as ps
from ps_runtime.observe import logs
logs.configure("worker", "warning")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    ps.empty_shared(1 << 20)
except OSError as error:
    print("refused:", error.errno)
with ps.connect(sys.argv[1], request_deadline_s=20.0) as client:
    table = client.create_table("limited", 1 << 20, optimizer=ps.SGD(lr=1.0), consistency=ps.ASP())
    found = client.push_pull(table, np.ones(1 << 20, np.float32))
    print("values:", np.unique(found))
"""


@pytest.mark.thorough
def test_a_process_that_may_make_no_large_file_sends_bytes(cluster: LaneCluster) -> None:
    """Its ring cannot be reserved: one line says so, and training goes on."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", LIMITED, cluster.address],  # it keeps no cut bytecode
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["refused: 27", "values: [-1.]"]
    (line,) = [line for line in done.stderr.splitlines() if "lane_chosen" in line]
    assert "lane=grpc" in line
    assert "File too large" in line
    assert "Traceback" not in done.stderr
    assert cluster.shm_sessions == [0]
