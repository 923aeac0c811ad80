"""Every method of every service, called without a session and with one of every role, beside the
table of docs/reference/REFERENCE.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor

from ps_core import errors, rights
from ps_core.cluster_view import Role, Session
from ps_core.keys import Incarnation, NodeId
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.cluster import wire
from ps_runtime.grpc import channels
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.observe.metrics import ServerMetrics, new_registry
from ps_runtime.system import clock
from ps_server.service.node import ParameterNode
from ps_server.service.replication_service import SERVICE as REPLICATION
from ps_server.service.replication_service import ReplicationServicer
from ps_server.service.replication_service import add_to_server as add_replication
from ps_server.service.servicer import ParameterServicer
from ps_server.service.servicer import add_to_server as add_parameters
from pushpull.v1 import parameters_pb2, replication_pb2, scheduler_pb2, types_pb2
from tests.integration.scheduler_calls import DEADLINE_S, Running, refused, with_scheduler
from tests.tidy.source import ROOT
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint

PARAMETERS = "pushpull.v1.ParameterService"
KEY = b"k" * 32
OWN = Session("c-1", bytes(16), NodeId(90), Incarnation(90), Role.SERVER)
REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
ROWS = re.compile(r"^\| `(\w+)\.(\w+)` \| (.*) \|$", re.MULTILINE)
METHODS: list[MethodDescriptor] = [
    method
    for service in (
        scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
        parameters_pb2.DESCRIPTOR.services_by_name["ParameterService"],
        replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"],
    )
    for method in service.methods
]


def table() -> dict[str, frozenset[str]]:
    """What the page says: of each method, the roles that may call it."""
    page = (Path(ROOT) / "docs/reference/REFERENCE.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| method \| (.*) \|$", page, re.MULTILINE)
    roles = [name.removesuffix("s") for name in head.split(" | ")]
    found = {}
    for service, method, cells in ROWS.findall(page):
        marks = [cell.strip() for cell in cells.split("|")]
        assert len(marks) == len(roles), (service, method)
        if marks[0] != "no session needed":
            found[method] = frozenset(
                role for role, mark in zip(roles, marks, strict=True) if mark == "yes"
            )
    return found


def request(method: MethodDescriptor, session: types_pb2.SessionIdentity | None) -> Any:
    """What the method takes, with nothing in it but a session."""
    kind: Any = {
        "Push": parameters_pb2.PushRequest,
        "PushPull": parameters_pb2.PushPullRequest,
        "Replicate": replication_pb2.ReplicateRequest,
    }.get(method.name)
    if kind is None:
        pages = {"scheduler": scheduler_pb2, "parameters": parameters_pb2}
        file = method.input_type.file.name.rsplit("/", 1)[-1].removesuffix(".proto")
        made = getattr(pages[file], method.input_type.name)()
        if session is not None:
            made.session.CopyFrom(session)
        return made
    made = kind()
    made.header.SetInParent()
    if session is not None:
        made.header.session.CopyFrom(session)
    if method.name == "Replicate":
        made.header.receiver_node_id = OWN.node_id
    return made


async def status(
    channel: grpc.aio.Channel, method: MethodDescriptor, session: types_pb2.SessionIdentity | None
) -> grpc.StatusCode:
    """How a call ends, or that it is answered."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    message = request(method, session).SerializeToString()
    sends = method.name in ("Push", "PushPull", "Replicate")
    answers = sends or method.name in ("Pull", "WatchCluster")
    try:
        if not answers:
            await channel.unary_unary(path)(message, timeout=DEADLINE_S)
        elif sends:
            call: Any = channel.stream_stream(path)(iter([message]), timeout=DEADLINE_S)
            await call.read()
            call.cancel()
        else:
            reading: Any = channel.unary_stream(path)(message, timeout=DEADLINE_S)
            await reading.read()
            reading.cancel()
    except grpc.aio.AioRpcError as ended:
        return ended.code()
    return grpc.StatusCode.OK


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[grpc.aio.Channel]:
    """A server of the same cluster as the scheduler's, and its second replica."""
    registry = new_registry()
    node = ParameterNode(
        replace(OWN, token=OWN.signed(KEY)), KEY, 1, ServerMetrics(registry), clock.now_s
    )
    parameters, replication = ParameterServicer(), ReplicationServicer()

    async def view_at_least(number: int, deadline_s: float) -> None:
        del number, deadline_s

    parameters.attach(node, view_at_least)
    replication.attach(node)
    serving = await NodeServer.start(
        services=[
            (PARAMETERS, lambda s: add_parameters(parameters, s)),
            (REPLICATION, lambda s: add_replication(replication, s)),
        ],
        registry=registry,
    )
    try:
        async with channels.aio_channel(serving.address) as channel:
            yield channel
    finally:
        node.close()
        await serving.stop(0.0)


def test_the_page_is_the_table_of_the_code() -> None:
    words = {name: frozenset(role.value for role in may) for name, may in rights.MAY_CALL.items()}
    assert table() == words


def test_every_method_takes_the_sessions_of_its_roles_and_no_other() -> None:
    async def test(scheduler: Running) -> None:
        page = table()
        async with server() as at_server:
            for method in METHODS:
                if method.name in rights.NEEDS_NO_SESSION:
                    continue
                is_scheduler = method.containing_service.name == "SchedulerService"
                channel = scheduler.channel if is_scheduler else at_server
                for role in Role:
                    session = await scheduler.join(role)
                    may = role.value in page[method.name]
                    came = await status(channel, method, session)
                    assert (came not in REFUSALS) == may, (method.name, role, came)
                    if not may:
                        assert came is grpc.StatusCode.PERMISSION_DENIED, (method.name, role, came)
                    forged = types_pb2.SessionIdentity()
                    forged.CopyFrom(session)
                    forged.session_token = b"x" * 32
                    came = await status(channel, method, forged)
                    assert came is grpc.StatusCode.UNAUTHENTICATED, (method.name, role, came)
                    await scheduler.leave(session)
                came = await status(channel, method, None)
                assert came is grpc.StatusCode.UNAUTHENTICATED, method.name

    with_scheduler(test, worker_count=1, max_workers=1000, stop_when_done=False)


def test_without_the_proof_nobody_becomes_anything() -> None:
    async def test(scheduler: Running) -> None:
        for role in Role:
            message = scheduler_pb2.RegisterNodeRequest(
                registration_id=bytes(16), role=wire.role_to_proto(role), protocol_version=1
            )
            for proof in (b"", b"x" * 32):
                message.join_proof = proof
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await scheduler.stub.RegisterNode(message, timeout=DEADLINE_S)
                assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "PUSHPULL_JOIN_SECRET" in str(failure.value.details())
        assert not (await scheduler.status()).nodes

    with_scheduler(test)


def test_a_registration_that_was_overheard_is_good_for_nothing_in_another_cluster() -> None:
    kept: list[scheduler_pb2.RegisterNodeRequest] = []

    async def hear(scheduler: Running) -> None:
        kept.append(await scheduler.registration(Role.READER))
        first = await scheduler.stub.RegisterNode(kept[0], timeout=DEADLINE_S)
        again = await scheduler.stub.RegisterNode(kept[0], timeout=DEADLINE_S)
        assert again.session == first.session
        assert len((await scheduler.status()).nodes) == 1

    async def replay(scheduler: Running) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await scheduler.stub.RegisterNode(kept[0], timeout=DEADLINE_S)
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED

    with_scheduler(hear)
    with_scheduler(replay)  # of the same name, key and secret


def test_an_operator_is_no_node_and_makes_no_view() -> None:
    async def test(scheduler: Running) -> None:
        before = (await scheduler.status()).view
        session = await scheduler.join(Role.OPERATOR)
        await scheduler.beat(session)
        await scheduler.leave(session)
        await scheduler.beat(session)  # it was no member, and so it has not left
        after = (await scheduler.status()).view
        assert after == before
        assert not after.nodes

    with_scheduler(test)


def test_a_restore_opens_nothing_outside_the_schedulers_places(tmp_path: Path) -> None:
    root, outside = CheckpointStore(str(tmp_path / "runs")), CheckpointStore(str(tmp_path / "else"))
    for store in (root, outside):
        write_checkpoint(store.directory(7, CLUSTER_ID), 7)

    async def test(scheduler: Running) -> None:
        operator = await scheduler.join(Role.OPERATOR)
        before = (await scheduler.status()).view
        for url in (outside.url, f"{root.url}/../else", "http://192.0.2.1/x", "file:///etc"):
            message = scheduler_pb2.RestoreCheckpointRequest(session=operator, url=url)
            call = scheduler.stub.RestoreCheckpoint(message, timeout=DEADLINE_S)
            denied = grpc.StatusCode.PERMISSION_DENIED
            await refused(call, errors.NotPermitted, denied, ("--checkpoint-roots", root.url))
        assert (await scheduler.status()).view == before
        message = scheduler_pb2.RestoreCheckpointRequest(session=operator, url=root.url)
        restored = await scheduler.stub.RestoreCheckpoint(message, timeout=DEADLINE_S)
        assert restored.clock == 41

    with_scheduler(test, checkpoint_url=root.url)


def test_of_restores_at_once_one_restores_and_the_others_find_it_done(tmp_path: Path) -> None:
    root = CheckpointStore(str(tmp_path))
    write_checkpoint(root.directory(7, CLUSTER_ID), 7)

    async def test(scheduler: Running) -> None:
        message = scheduler_pb2.RestoreCheckpointRequest(
            session=await scheduler.join(Role.WORKER), url=root.url
        )
        calls = [scheduler.stub.RestoreCheckpoint(message, timeout=DEADLINE_S) for _ in range(8)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        codes = [end.code() for end in ended if isinstance(end, grpc.aio.AioRpcError)]
        assert codes == 7 * [grpc.StatusCode.FAILED_PRECONDITION]

    with_scheduler(test, checkpoint_url=root.url)


def test_who_waits_for_a_checkpoint_hears_at_once_that_the_cluster_was_restored(
    tmp_path: Path,
) -> None:
    root = CheckpointStore(str(tmp_path))
    write_checkpoint(root.directory(7, CLUSTER_ID), 7)

    async def test(scheduler: Running) -> None:
        for _ in range(2):
            await scheduler.join(Role.SERVER)
        worker = await scheduler.join(Role.WORKER)
        await scheduler.create(worker)
        asked = scheduler_pb2.CreateCheckpointRequest(session=worker)
        waiting = scheduler.stub.CreateCheckpoint(asked, timeout=10 * DEADLINE_S)
        await scheduler.view_where(worker, lambda view: view.checkpoint is not None)
        message = scheduler_pb2.RestoreCheckpointRequest(session=worker, url=root.url)
        await scheduler.stub.RestoreCheckpoint(message, timeout=DEADLINE_S)
        gone = grpc.StatusCode.FAILED_PRECONDITION
        await refused(waiting, errors.Fenced, gone, ("a restore has replaced the cluster",))
        assert not (await scheduler.status()).view.HasField("checkpoint")

    with_scheduler(test, checkpoint_url=root.url)


def test_a_cluster_begins_anew_with_nothing_when_an_operator_asks() -> None:
    async def test(scheduler: Running) -> None:
        worker, operator = await scheduler.join(Role.WORKER), await scheduler.join(Role.OPERATOR)
        server = await scheduler.join(Role.SERVER)
        denied = grpc.StatusCode.PERMISSION_DENIED
        for caller in (worker, server):
            message = scheduler_pb2.RestoreCheckpointRequest(session=caller, empty=True)
            call = scheduler.stub.RestoreCheckpoint(message, timeout=DEADLINE_S)
            await refused(call, errors.NotPermitted, denied, ("operator",))
        message = scheduler_pb2.RestoreCheckpointRequest(session=operator, empty=True)
        answer = await scheduler.stub.RestoreCheckpoint(message, timeout=DEADLINE_S)
        assert (answer.url, answer.clock) == ("", 0)
        assert not (await scheduler.status()).view.nodes
        gone = grpc.StatusCode.FAILED_PRECONDITION
        await refused(scheduler.beat(server), errors.Fenced, gone, ("register again",))
        assert (await scheduler.join(Role.SERVER)).node_id > server.node_id

    with_scheduler(test)
