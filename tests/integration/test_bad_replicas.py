"""Servers that do not belong, and wrong words between servers: refused, and nothing is lost."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

import ps_worker as ps
from ps_core.cluster_view import ClusterView, NodeState, RangeAssignment
from ps_core.keys import Incarnation
from ps_core.ledger import Ending, Outcome
from ps_core.limits import RANGE_COUNT
from ps_core.tables.table import Table
from ps_runtime.cluster.wire import session_to_proto
from ps_server.ranges.range_copy import RangeDelta, fresh_copy
from ps_server.replication.messages import LogRecord
from ps_server.replication.range_roles import PLACED_EPOCH
from ps_server.values.kernel_fingerprint import kernel_fingerprint
from ps_server.wire.replication_wire import log_record_messages
from pushpull.v1 import replication_pb2, scheduler_pb2, scheduler_pb2_grpc
from pushpull.v1 import types_pb2 as types
from tests.integration.command_line import environment
from tests.integration.counted_steps import Counted
from tests.integration.lane_cluster import Served
from tests.integration.raw_wire import refused
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
)
from tests.joining import proven

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

COUNTED = Counted(world=1)
REPLICATE = "/pushpull.v1.ReplicationService/Replicate"
NOBODY = "127.0.0.1:1"


@dataclass
class Scene:
    """A cluster of two servers, a worker, and a table that it trains."""

    cluster: ReplicatedCluster
    client: ps.Client
    table: ps.TableHandle

    def train(self) -> None:
        """A step, after which all of them are there."""
        self.client.wait(self.client.push(self.table, COUNTED.gradient(0)))
        COUNTED.check(self.client.pull(self.table), [self.table.clock])


@pytest.fixture(scope="module")
def made() -> Iterator[Scene]:
    with (
        replicated_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        yield Scene(cluster, client, COUNTED.create(client, "counted"))


@pytest.fixture
def scene(made: Scene) -> Iterator[Scene]:
    """Whatever a test does, training goes on, and so it does when either server dies."""
    made.train()
    yield made
    made.train()
    made.cluster.have(2)
    made.train()


# --- who does not belong


def _ended(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.thorough
def test_more_replicas_than_servers_are_refused_by_the_scheduler() -> None:
    ended = _ended("scheduler", "--workers=1", "--servers=2", "--replicas=3")
    assert ended.returncode == 2, ended
    said = ended.stdout + ended.stderr
    assert "replica" in said, said
    assert "3" in said, said
    assert "Traceback" not in said


@pytest.mark.thorough
def test_a_server_of_another_cluster_ends_with_a_line(scene: Scene) -> None:
    ended = _ended("ps_server", f"--scheduler={scene.cluster.address}", "--cluster-id=another")
    assert ended.returncode == 1, ended
    said = ended.stdout + ended.stderr
    assert "another" in said, said
    assert "Traceback" not in said


def _register(cluster: ReplicatedCluster, **fields: object) -> scheduler_pb2.RegisterNodeResponse:
    values: dict[str, object] = {
        "registration_id": secrets.token_bytes(16),
        "protocol_version": 1,
        "role": types.NODE_ROLE_SERVER,
        "address": NOBODY,
        "kernel_fingerprint": kernel_fingerprint(),
        **fields,
    }
    with grpc.insecure_channel(cluster.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.RegisterNodeRequest(**values)  # type: ignore[arg-type]
        answer: scheduler_pb2.RegisterNodeResponse = stub.RegisterNode(
            proven(stub, request), timeout=DEADLINE_S
        )
    return answer


def _until_silent(cluster: ReplicatedCluster, node_id: int) -> ClusterView:
    def is_silent(view: ClusterView) -> bool:
        return any(n.node_id == node_id and n.state is NodeState.SILENT for n in view.nodes)

    return cluster.views.until(is_silent, f"node {node_id} is silent")


@pytest.mark.thorough
def test_a_server_with_other_kernels_is_refused(scene: Scene) -> None:
    refused(
        lambda: _register(scene.cluster, kernel_fingerprint="torch=0"),
        "INVALID_CONFIG", "kernel_fingerprint", "torch=0", kernel_fingerprint(),
    )  # fmt: skip


@pytest.mark.parametrize("version", [0, 2])
def test_an_older_or_newer_protocol_is_refused(scene: Scene, version: int) -> None:
    refused(
        lambda: _register(scene.cluster, protocol_version=version),
        "INVALID_CONFIG", "protocol", str(version), "1",
    )  # fmt: skip


@pytest.mark.thorough
def test_a_table_is_made_though_a_server_that_gets_a_part_of_it_is_dead(scene: Scene) -> None:
    node_id = _register(scene.cluster).session.node_id  # and that is all that it ever says
    table = COUNTED.create(scene.client, "with the dead")
    parts = table.table.blocks_by_range(RANGE_COUNT)
    view = _until_silent(scene.cluster, node_id)
    assert any(view.ranges[range_id].assignment_epoch > PLACED_EPOCH for range_id in parts)
    scene.client.wait(scene.client.push(table, COUNTED.gradient(0)))
    COUNTED.check(scene.client.pull(table), [1])


# --- wrong words on a stream between servers


def _header(session: types.SessionIdentity, node_id: int) -> bytes:
    header = replication_pb2.ReplicateHeader(session=session, receiver_node_id=node_id)
    return replication_pb2.ReplicateRequest(header=header).SerializeToString()


def _say(server: Served, *messages: bytes) -> list[replication_pb2.ReplicateResponse]:
    """Everything that the server answers, after it has heard all of it."""
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(REPLICATE, lambda raw: raw, lambda raw: raw)
        answers = list(call(iter(messages), timeout=DEADLINE_S))
    return [replication_pb2.ReplicateResponse.FromString(raw) for raw in answers]


def _refused(scene: Scene, session: types.SessionIdentity, code: str, *words: str) -> None:
    """A server refuses the stream of that session."""
    server = scene.cluster.living[0]
    header = _header(session, scene.cluster.node_id(server))
    refused(lambda: _say(server, header), code, *words)


@pytest.fixture(scope="module")
def session(made: Scene) -> types.SessionIdentity:
    """Of a server that registered, and is nobody's backup: it is silent, and gets no ranges."""
    session = _register(made.cluster).session
    _until_silent(made.cluster, session.node_id)
    return session


def test_a_worker_does_not_replicate(scene: Scene) -> None:
    session = session_to_proto(scene.client.session)
    _refused(scene, session, "NOT_PERMITTED", "Replicate is for servers", "worker")


@pytest.mark.thorough
def test_a_wrong_incarnation_is_refused(scene: Scene, session: types.SessionIdentity) -> None:
    lying = types.SessionIdentity()
    lying.CopyFrom(session)
    lying.incarnation += 1
    _refused(scene, lying, "UNAUTHENTICATED", "token", "is wrong")


def test_a_session_of_another_cluster_is_refused(
    scene: Scene, session: types.SessionIdentity
) -> None:
    lying = types.SessionIdentity()
    lying.CopyFrom(session)
    lying.cluster_id = "another"
    _refused(scene, lying, "FENCED", "another", "register again")


def test_a_stream_that_means_another_server_is_refused(
    scene: Scene, session: types.SessionIdentity
) -> None:
    first, second = scene.cluster.living
    meant = scene.cluster.node_id(second)
    refused(lambda: _say(first, _header(session, meant)), "NOT_OWNER", f"server {meant} is meant")


@pytest.mark.parametrize(
    "messages",
    [
        (b"\xff\xff\xff",),
        (b"",),
        (replication_pb2.ReplicateRequest(beat=replication_pb2.Beat()).SerializeToString(),),
    ],
    ids=["bytes", "nothing", "a beat"],
)
def test_a_stream_without_a_header_is_refused(scene: Scene, messages: tuple[bytes, ...]) -> None:
    refused(lambda: _say(scene.cluster.living[0], *messages), "INVALID_CONFIG")


_UNEVEN = replication_pb2.Beat(sent_s=1.0, range_ids=[1, 2], assignment_epochs=[1])
_NOBODYS = replication_pb2.Beat(sent_s=1.0, range_ids=[1_000_000], assignment_epochs=[1])


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff",
        bytes(range(150, 214)),
        replication_pb2.ReplicateRequest(beat=_UNEVEN).SerializeToString(),
        replication_pb2.ReplicateRequest(beat=_NOBODYS).SerializeToString(),
        replication_pb2.ReplicateRequest(
            elements=replication_pb2.BlockElements(block=1)
        ).SerializeToString(),
    ],
    ids=["bytes", "noise", "an uneven beat", "a range of nobody's", "a block of nothing"],
)  # fmt: skip
def test_a_malformed_message_ends_its_stream_alone(
    scene: Scene, session: types.SessionIdentity, message: bytes
) -> None:
    server = scene.cluster.living[0]
    header = _header(session, scene.cluster.node_id(server))
    refused(lambda: _say(server, header, message), "INVALID_CONFIG")


def _wrong_record(table: Table, assignment: RangeAssignment, number: int) -> list[bytes]:
    """Of the range's own primary, by all that it says; but of a worker that never was."""
    blocks = table.blocks_by_range(RANGE_COUNT)[assignment.range_id]
    endings = ((Incarnation(1), 1, Ending(Outcome.APPLIED)),)
    delta = RangeDelta(fresh_copy(table, blocks).facts, (), endings, ())
    epoch = assignment.assignment_epoch
    return log_record_messages(
        LogRecord(assignment.range_id, epoch, epoch, number, table.table_id, delta, ())
    )


@pytest.mark.thorough
def test_a_backup_that_was_told_what_does_not_fit_begins_anew(
    scene: Scene, session: types.SessionIdentity
) -> None:
    """RR-1."""
    cluster = scene.cluster
    cluster.have(2)
    table = COUNTED.create(scene.client, "new").table  # in ranges that nobody had before
    scene.client.wait(scene.client.push(scene.client.table("new"), COUNTED.gradient(0)))
    ranges = [cluster.healed().ranges[range_id] for range_id in table.blocks_by_range(RANGE_COUNT)]
    assignment = next(r for r in ranges if r.assignment_epoch == PLACED_EPOCH)
    (backup,) = [s for s in cluster.living if cluster.node_id(s) == assignment.backups[0]]
    header = _header(session, cluster.node_id(backup))
    *_, answer = _say(backup, header, *_wrong_record(table, assignment, 10**6))
    _say(backup, header, *_wrong_record(table, assignment, answer.acks[0].number + 1))
    cluster.wait_line(backup.process, f"event=replica_broken range_id={assignment.range_id} ")
    cluster.views.until(
        lambda v: v.ranges[assignment.range_id].assignment_epoch > assignment.assignment_epoch,
        "the backup is left out",
    )
    cluster.healed()
    dying = next(s for s in cluster.living if s is not backup)
    cluster.kill(dying)
    cluster.taken_over_from(dying)
    COUNTED.check(scene.client.pull(scene.client.table("new")), [1])
