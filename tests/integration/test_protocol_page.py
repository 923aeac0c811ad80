"""docs/PROTOCOL.md against real processes: its worked example, byte for byte, and its claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from docs.worked_messages import FIRST_ORDINAL, TABLE_ID, VIEW_NUMBER, worked_messages
from ps_worker.local_cluster import local_cluster
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pushpull.v1 import types_pb2 as types

DEADLINE_S = 30.0
WORKED = {worked.name: worked.message for worked in worked_messages()}


class Raw:
    """The plainest of clients: stubs, one session, one server."""

    def __init__(self, scheduler: grpc.Channel) -> None:
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        request = WORKED["register-request"]
        self.registered = self.scheduler.RegisterNode(request, timeout=DEADLINE_S)
        self.session = self.registered.session
        watch = self.scheduler.WatchCluster(
            scheduler_pb2.WatchClusterRequest(session=self.session), timeout=DEADLINE_S
        )
        view = next(watch).view
        watch.cancel()
        (self.address,) = [node.address for node in view.nodes if node.address]

    def own(self, name: str) -> Any:
        """The page's message with this client's session in it."""
        message = WORKED[name].__class__.FromString(WORKED[name].SerializeToString())
        target = message.header if name == "push-header" else message
        target.session.CopyFrom(self.session)
        return message

    def table(self, spec: types.TableSpec) -> scheduler_pb2.CreateTableResponse:
        """The table, created."""
        request = scheduler_pb2.CreateTableRequest(session=self.session, spec=spec)
        return self.scheduler.CreateTable(request, timeout=DEADLINE_S)


@pytest.fixture
def raw() -> Iterator[Raw]:
    with (
        local_cluster(servers=1, workers=1) as cluster,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        client = Raw(channel)
        spec = client.own("create-table").spec
        spec.name = "first"
        client.table(spec)
        yield client


@pytest.fixture
def server(raw: Raw) -> Iterator[parameters_pb2_grpc.ParameterServiceStub]:
    created = raw.table(raw.own("create-table").spec)
    assert (created.table.table_id, created.table.first_ordinal) == (TABLE_ID, FIRST_ORDINAL)
    assert created.view_number == VIEW_NUMBER
    with grpc.insecure_channel(raw.address) as channel:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        stub.OpenSession(raw.own("open-session"), timeout=DEADLINE_S)
        yield stub


def _push(
    server: parameters_pb2_grpc.ParameterServiceStub, *messages: Message
) -> list[parameters_pb2.EntryReply]:
    """Write, half-close, read to the end."""
    answers = server.Push(iter(messages), timeout=DEADLINE_S)
    return [reply for answer in answers for reply in answer.replies]


def _named(replies: list[parameters_pb2.EntryReply]) -> list[tuple[str, int]]:
    kinds = parameters_pb2.ReplyKind
    return [(kinds.Name(r.kind).removeprefix("REPLY_KIND_"), r.sequence) for r in replies]


def test_worked_example(raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub) -> None:
    on_page = WORKED["register-response"]
    assert isinstance(on_page, scheduler_pb2.RegisterNodeResponse)
    assert raw.session.node_id == on_page.session.node_id
    assert len(raw.session.session_token) == len(on_page.session.session_token)
    settings = ("worker_count", "heartbeat_interval_ms", "lease_ms", "token_key")
    for name in settings:
        assert getattr(raw.registered, name) == getattr(on_page, name), name

    replies = _push(server, raw.own("push-header"), WORKED["push-block"], WORKED["push-seal"])
    received, committed = WORKED["push-received"], WORKED["push-committed"]
    assert isinstance(received, parameters_pb2.PushResponse)
    assert isinstance(committed, parameters_pb2.PushResponse)
    assert replies[0] == received.replies[0]
    assert replies[-2:] == list(committed.replies)

    (answer,) = server.Pull(raw.own("pull-request"), timeout=DEADLINE_S)
    assert answer == WORKED["pull-response"]


def test_a_step_in_one_message(raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub) -> None:
    _push(server, raw.own("push-header"), WORKED["push-block"], WORKED["push-seal"])
    replies = _push(server, raw.own("push-header"), WORKED["push-one-message"])
    assert _named(replies)[-2:] == [("COMMITTED", 3), ("COMMITTED", 4)]
    request = raw.own("pull-request")
    request.clock = 2
    (answer,) = server.Pull(request, timeout=DEADLINE_S)
    # The bias was absent from step 2: it stands as step 1 left it.
    assert (answer.block.version, answer.block.clock) == (2, 2)
    assert answer.block.payload.hex() == "000080bf" + "00000040" + "000080be"


def test_a_refused_read_carries_its_error_in_metadata(
    raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub
) -> None:
    request = raw.own("pull-request")
    request.session.session_token = b"forged"
    with pytest.raises(grpc.RpcError) as failure:
        list(server.Pull(request, timeout=DEADLINE_S))
    call: Any = failure.value
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    carried = dict(call.trailing_metadata())["pushpull-error-bin"]
    assert types.Error.FromString(carried).code == types.ERROR_CODE_UNAUTHENTICATED


def test_an_entry_sent_again_on_another_stream_is_answered_there(
    raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub
) -> None:
    first = server.Push(iter([raw.own("push-header"), WORKED["push-block"]]), timeout=DEADLINE_S)
    assert _named(list(next(first).replies)) == [("RECEIVED", 1)]
    first.cancel()
    again = _push(server, raw.own("push-header"), WORKED["push-block"], WORKED["push-seal"])
    assert {("COMMITTED", 1), ("COMMITTED", 2)} <= set(_named(again))
    # Once more, after the end: the original outcome.
    replies = _push(server, raw.own("push-header"), WORKED["push-block"], WORKED["push-seal"])
    assert _named(replies) == [("COMMITTED", 1), ("COMMITTED", 2)]
    (answer,) = server.Pull(raw.own("pull-request"), timeout=DEADLINE_S)
    assert answer == WORKED["pull-response"]


def test_a_seal_sent_again_on_another_stream_is_answered_there(
    raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub
) -> None:
    first = server.Push(iter([raw.own("push-header"), WORKED["push-seal"]]), timeout=DEADLINE_S)
    assert _named(list(next(first).replies)) == [("RECEIVED", 2)]
    first.cancel()
    again = _push(server, raw.own("push-header"), WORKED["push-seal"], WORKED["push-block"])
    assert {("COMMITTED", 1), ("COMMITTED", 2)} <= set(_named(again))


def test_an_invalid_block_can_be_replaced_before_the_seal(
    raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub
) -> None:
    wrong, right, seal = (
        parameters_pb2.PushRequest.FromString(WORKED[name].SerializeToString())
        for name in ("push-block", "push-block", "push-seal")
    )
    wrong.block.payload += b"\0"
    right.block.sequence, right.block.replaces = 2, 1
    seal.seal.ranges[0].sequence = 3
    replies = _push(server, raw.own("push-header"), wrong, right, seal)
    outcomes = {r.sequence: r.outcome for r in replies if r.outcome}
    assert outcomes == {
        1: parameters_pb2.OUTCOME_INVALID,
        2: parameters_pb2.OUTCOME_APPLIED,
        3: parameters_pb2.OUTCOME_APPLIED,
    }


def test_an_invalid_seal_has_not_sealed(
    raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub
) -> None:
    wrong, again = (
        parameters_pb2.PushRequest.FromString(WORKED["push-seal"].SerializeToString())
        for _ in range(2)
    )
    wrong.seal.hyperparameters.add(name="beta1", value=0.5)
    again.seal.ranges[0].sequence = 3
    replies = _push(server, raw.own("push-header"), WORKED["push-block"], wrong, again)
    outcomes = {r.sequence: r.outcome for r in replies if r.outcome}
    assert outcomes == {
        1: parameters_pb2.OUTCOME_APPLIED,
        2: parameters_pb2.OUTCOME_INVALID,
        3: parameters_pb2.OUTCOME_APPLIED,
    }


def test_push_pull_carries_a_step_and_its_read(
    raw: Raw, server: parameters_pb2_grpc.ParameterServiceStub
) -> None:
    block, seal, pull = WORKED["push-block"], WORKED["push-seal"], WORKED["pull-request"]
    assert isinstance(block, parameters_pb2.PushRequest)
    assert isinstance(seal, parameters_pb2.PushRequest)
    assert isinstance(pull, parameters_pb2.PullRequest)
    read = parameters_pb2.PullRequest.FromString(pull.SerializeToString())
    read.ClearField("session")
    messages = [
        parameters_pb2.PushPullRequest(header=raw.own("push-header").header),
        parameters_pb2.PushPullRequest(block=block.block),
        parameters_pb2.PushPullRequest(seal=seal.seal),
        parameters_pb2.PushPullRequest(pull=read),
    ]
    parts = list(server.PushPull(iter(messages), timeout=DEADLINE_S))
    assert [part.pull for part in parts if part.HasField("pull")] == [WORKED["pull-response"]]
    assert parts[-1].HasField("end") or parts[-1].HasField("replies")
    assert sum(part.HasField("end") for part in parts) == 1
