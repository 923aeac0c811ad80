"""PROTOCOL.md against real processes: its worked example, byte for byte, and its claims.

One cluster of one server and one worker serves all tests. Each but the worked example itself has a
table of its own, and the example's messages with that table's place in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from docs.worked_messages import (
    ASSIGNMENT_EPOCH,
    FIRST_ORDINAL,
    TABLE_ID,
    VIEW_NUMBER,
    worked_messages,
)
from ps_core.keys import range_of_slot, slot_of_ordinal
from ps_core.limits import RANGE_COUNT
from ps_worker.client.local_cluster import local_cluster
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pushpull.v1 import types_pb2 as types
from tests.joining import proven

DEADLINE_S = 30.0
WORKED: dict[str, Any] = {worked.name: worked.message for worked in worked_messages()}


def _copy(name: str) -> Any:
    return WORKED[name].__class__.FromString(WORKED[name].SerializeToString())


class Raw:
    """The plainest of clients: stubs, one session, one server."""

    def __init__(self, scheduler: grpc.Channel) -> None:
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        request = proven(self._scheduler, _copy("register-request"))
        self.registered = self._scheduler.RegisterNode(request, timeout=DEADLINE_S)
        self.session = self.registered.session
        watch = self._scheduler.WatchCluster(
            scheduler_pb2.WatchClusterRequest(session=self.session), timeout=DEADLINE_S
        )
        view = next(watch).view
        watch.cancel()
        (address,) = [node.address for node in view.nodes if node.address]
        self.server_channel = grpc.insecure_channel(address)
        self.server = parameters_pb2_grpc.ParameterServiceStub(self.server_channel)

    def own(self, name: str) -> Any:
        """The page's message with this client's session in it."""
        message = _copy(name)
        target = message.header if name == "push-header" else message
        target.session.CopyFrom(self.session)
        return message

    def create(self, name: str) -> scheduler_pb2.CreateTableResponse:
        """The page's table under another name, known to the server."""
        request = self.own("create-table")
        request.spec.name = name
        created: scheduler_pb2.CreateTableResponse
        created = self._scheduler.CreateTable(request, timeout=DEADLINE_S)
        opening = self.own("open-session")
        opening.view_number = created.view_number
        self.server.OpenSession(opening, timeout=DEADLINE_S)
        return created

    def push(self, *messages: Any) -> list[parameters_pb2.EntryReply]:
        """Write, half-close, read to the end."""
        entries = iter([self.own("push-header"), *messages])
        answers = self.server.Push(entries, timeout=DEADLINE_S)
        return [reply for answer in answers for reply in answer.replies]

    def push_and_break(self, message: Any) -> list[parameters_pb2.EntryReply]:
        """Send one message and break the stream at its first answer."""
        answers = self.server.Push(iter([self.own("push-header"), message]), timeout=DEADLINE_S)
        replies = list(next(answers).replies)
        answers.cancel()
        return replies


@dataclass(frozen=True)
class Place:
    """A table of one test's own, and the page's messages for it."""

    table_id: int
    range_id: int

    def block(self, **changes: Any) -> Any:
        """The page's block, for this table."""
        message = _copy("push-block")
        message.block.table_id, message.block.range_id = self.table_id, self.range_id
        for field, value in changes.items():
            setattr(message.block, field, value)
        return message

    def seal(self, sequence: int = 2, **changes: Any) -> Any:
        """The page's seal, for this table."""
        message = _copy("push-seal")
        message.seal.table_id = self.table_id
        (part,) = message.seal.ranges
        part.range_id, part.sequence = self.range_id, sequence
        for field, value in changes.items():
            setattr(message.seal, field, value)
        return message

    def read(self, message: Any) -> Any:
        """The page's read, for this table."""
        message.table_id = self.table_id
        message.ranges[0].range_id = self.range_id
        return message


@pytest.fixture(scope="module")
def raw() -> Iterator[Raw]:
    with (
        local_cluster(servers=1, workers=1) as cluster,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        client = Raw(channel)
        client.create("first")
        created = client.create(WORKED["create-table"].spec.name)
        assert (created.table.table_id, created.table.first_ordinal) == (TABLE_ID, FIRST_ORDINAL)
        assert created.view_number == VIEW_NUMBER
        with client.server_channel:
            yield client


@pytest.fixture
def place(raw: Raw, request: pytest.FixtureRequest) -> Place:
    table = raw.create(request.node.name).table
    range_id = range_of_slot(slot_of_ordinal(table.first_ordinal), RANGE_COUNT)
    assert WORKED["push-block"].block.assignment_epoch == ASSIGNMENT_EPOCH
    return Place(table.table_id, range_id)


def _named(replies: Sequence[parameters_pb2.EntryReply]) -> list[tuple[str, int]]:
    kinds = parameters_pb2.ReplyKind
    return [(kinds.Name(r.kind).removeprefix("REPLY_KIND_"), r.sequence) for r in replies]


def _outcomes(replies: Sequence[parameters_pb2.EntryReply]) -> dict[int, str]:
    names = parameters_pb2.Outcome
    return {
        reply.sequence: names.Name(reply.outcome).removeprefix("OUTCOME_")
        for reply in replies
        if reply.kind == parameters_pb2.REPLY_KIND_COMMITTED
    }


def test_worked_example(raw: Raw) -> None:
    on_page = WORKED["register-response"]
    assert raw.session.node_id == on_page.session.node_id
    assert len(raw.session.session_token) == len(on_page.session.session_token)
    for name in ("worker_count", "heartbeat_interval_ms", "lease_ms", "token_key"):
        assert getattr(raw.registered, name) == getattr(on_page, name), name

    replies = raw.push(WORKED["push-block"], WORKED["push-seal"])
    # The block's RECEIVED is left out where its COMMITTED was there before it left.
    received = [reply for reply in replies if reply.kind == parameters_pb2.REPLY_KIND_RECEIVED]
    assert received in ([], [WORKED["push-received"].replies[0]])
    assert replies[-2:] == list(WORKED["push-committed"].replies)
    (answer,) = raw.server.Pull(raw.own("pull-request"), timeout=DEADLINE_S)
    assert answer == WORKED["pull-response"]

    replies = raw.push(WORKED["push-one-message"])
    assert _outcomes(replies) == {3: "APPLIED", 4: "APPLIED"}
    request = raw.own("pull-request")
    request.clock = 2
    (answer,) = raw.server.Pull(request, timeout=DEADLINE_S)
    # The bias was absent from step 2: it stands as step 1 left it.
    assert (answer.block.version, answer.block.clock) == (2, 2)
    assert answer.block.payload.hex() == "000080bf" + "00000040" + "000080be"


def test_a_failed_call_carries_its_error_in_metadata(raw: Raw) -> None:
    request = raw.own("pull-request")
    request.session.session_token = b"forged"
    with pytest.raises(grpc.RpcError) as failure:
        list(raw.server.Pull(request, timeout=DEADLINE_S))
    call: Any = failure.value
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    carried = dict(call.trailing_metadata())["pushpull-error-bin"]
    assert types.Error.FromString(carried).code == types.ERROR_CODE_UNAUTHENTICATED


def test_a_block_sent_again_on_another_stream_is_answered_there(raw: Raw, place: Place) -> None:
    assert _named(raw.push_and_break(place.block())) == [("RECEIVED", 1)]
    assert _outcomes(raw.push(place.block(), place.seal())) == {1: "APPLIED", 2: "APPLIED"}
    # Once more, after the end: the original outcomes, and nothing is done twice.
    replies = raw.push(place.block(), place.seal())
    assert _named(replies) == [("COMMITTED", 1), ("COMMITTED", 2)]
    (answer,) = raw.server.Pull(place.read(raw.own("pull-request")), timeout=DEADLINE_S)
    assert answer == WORKED["pull-response"]


def test_a_seal_sent_again_on_another_stream_is_answered_there(raw: Raw, place: Place) -> None:
    assert _named(raw.push_and_break(place.seal())) == [("RECEIVED", 2)]
    assert _outcomes(raw.push(place.seal(), place.block())) == {1: "APPLIED", 2: "APPLIED"}


def test_an_invalid_block_can_be_replaced_before_the_seal(raw: Raw, place: Place) -> None:
    wrong = place.block(payload=b"\0")
    right = place.block(sequence=2, replaces=1)
    outcomes = _outcomes(raw.push(wrong, right, place.seal(3)))
    assert outcomes == {1: "INVALID", 2: "APPLIED", 3: "APPLIED"}


def test_a_replaced_block_is_not_applied(raw: Raw, place: Place) -> None:
    first = place.block(payload=bytes(12))
    outcomes = _outcomes(raw.push(first, place.block(sequence=2, replaces=1), place.seal(3)))
    assert outcomes == {1: "REPLACED", 2: "APPLIED", 3: "APPLIED"}
    (answer,) = raw.server.Pull(place.read(raw.own("pull-request")), timeout=DEADLINE_S)
    assert answer == WORKED["pull-response"]


def test_an_invalid_block_makes_its_seal_invalid_and_a_skip_ends_the_step(
    raw: Raw, place: Place
) -> None:
    skipped = place.seal(3, skip=True)
    outcomes = _outcomes(raw.push(place.block(payload=b"\0"), place.seal(2), skipped))
    assert outcomes == {1: "INVALID", 2: "INVALID", 3: "APPLIED"}


def test_an_invalid_seal_has_not_sealed(raw: Raw, place: Place) -> None:
    wrong = place.seal(2)
    wrong.seal.hyperparameters.add(name="beta1", value=0.5)
    outcomes = _outcomes(raw.push(place.block(), wrong, place.seal(3)))
    assert outcomes == {1: "APPLIED", 2: "INVALID", 3: "APPLIED"}


def test_a_number_given_up_holds_no_seal_back(raw: Raw, place: Place) -> None:
    given_up = parameters_pb2.PushRequest(
        withdrawal=parameters_pb2.Withdrawal(
            table_id=place.table_id,
            range_id=place.range_id,
            assignment_epoch=ASSIGNMENT_EPOCH,
            sequence=1,
        )
    )
    outcomes = _outcomes(raw.push(place.seal(), given_up))
    assert outcomes == {1: "WITHDRAWN", 2: "APPLIED"}


def test_a_withdrawal_is_answered_as_what_it_gave_up_ended(raw: Raw, place: Place) -> None:
    def given_up(sequence: int) -> Any:
        number = parameters_pb2.Withdrawal(
            table_id=place.table_id,
            range_id=place.range_id,
            assignment_epoch=ASSIGNMENT_EPOCH,
            sequence=sequence,
        )
        return parameters_pb2.PushRequest(withdrawal=number)

    assert _named(raw.push_and_break(place.seal(2))) == [("RECEIVED", 2)]
    (refused,) = raw.push(given_up(2))
    assert refused.kind == parameters_pb2.REPLY_KIND_ERROR
    assert refused.error.code == types.ERROR_CODE_INVALID_KEYS
    replies = raw.push(place.block(), given_up(1), given_up(3), given_up(3))
    assert _outcomes(replies) == {1: "APPLIED", 3: "WITHDRAWN"}
    assert _named(replies).count(("COMMITTED", 3)) == 2


def test_a_sequence_that_has_not_come_is_named_by_who_waits(raw: Raw, place: Place) -> None:
    assert _named(raw.push_and_break(place.seal(3))) == [("RECEIVED", 3)]
    words = "waits for sequence 1 of worker 0"
    request = place.read(raw.own("pull-request"))
    request.deadline_ms = 1
    (answer,) = raw.server.Pull(request, timeout=DEADLINE_S)
    assert answer.error.error.code == types.ERROR_CODE_WAIT_EXPIRED
    assert words in answer.error.error.message
    asked = parameters_pb2.GetRangeStatsRequest(table_id=place.table_id, session=raw.session)
    (part,) = raw.server.GetRangeStats(asked, timeout=DEADLINE_S).ranges
    assert words in part.waits[0]
    assert _outcomes(raw.push(place.block(), place.block(sequence=2, replaces=1))) == {
        1: "REPLACED",
        2: "APPLIED",
    }
    (part,) = raw.server.GetRangeStats(asked, timeout=DEADLINE_S).ranges
    assert not part.waits


def test_a_deadline_beyond_the_limit_is_refused(raw: Raw, place: Place) -> None:
    request = place.read(raw.own("pull-request"))
    request.deadline_ms = 3_600_001
    (answer,) = raw.server.Pull(request, timeout=DEADLINE_S)
    assert answer.error.error.code == types.ERROR_CODE_INVALID_CONFIG
    opening = raw.own("open-session")
    opening.deadline_ms = 3_600_001
    with pytest.raises(grpc.RpcError) as failure:
        raw.server.OpenSession(opening, timeout=DEADLINE_S)
    call: Any = failure.value
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_does_not_parse_is_an_invalid_tensor(raw: Raw, place: Place) -> None:
    del place
    for method in ("OpenSession", "Pull", "GetRangeStats"):
        many = method == "Pull"
        path = f"/pushpull.v1.ParameterService/{method}"
        channel: Any = raw.server_channel
        make = channel.unary_stream if many else channel.unary_unary
        with pytest.raises(grpc.RpcError) as failure:
            list(make(path)(b"\xff", timeout=DEADLINE_S))
        call: Any = failure.value
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        carried = dict(call.trailing_metadata())["pushpull-error-bin"]
        assert types.Error.FromString(carried).code == types.ERROR_CODE_INVALID_TENSOR


def test_the_answer_to_a_session_says_which_server_it_is(raw: Raw) -> None:
    opened = raw.server.OpenSession(raw.own("open-session"), timeout=DEADLINE_S)
    assert opened.cluster_id == raw.session.cluster_id
    header = raw.own("push-header")
    header.header.receiver_node_id = opened.node_id + 1
    with pytest.raises(grpc.RpcError) as failure:
        list(raw.server.Push(iter([header]), timeout=DEADLINE_S))
    call: Any = failure.value
    carried = dict(call.trailing_metadata())["pushpull-error-bin"]
    assert types.Error.FromString(carried).code == types.ERROR_CODE_NOT_OWNER


def test_a_last_seal_ends_what_was_sent_beyond_it(raw: Raw, place: Place) -> None:
    later = place.block(sequence=3, clock=2)
    outcomes = _outcomes(raw.push(later, place.block(), place.seal(last=True)))
    assert outcomes == {1: "APPLIED", 2: "APPLIED", 3: "WITHDRAWN"}


def test_another_epoch_consumes_no_number(raw: Raw, place: Place) -> None:
    (reply,) = raw.push(place.block(assignment_epoch=ASSIGNMENT_EPOCH + 1))
    assert reply.kind == parameters_pb2.REPLY_KIND_ERROR
    assert reply.error.code == types.ERROR_CODE_STALE_ASSIGNMENT
    assert _outcomes(raw.push(place.block(), place.seal())) == {1: "APPLIED", 2: "APPLIED"}


def test_push_pull_carries_a_step_and_its_read(raw: Raw, place: Place) -> None:
    messages = [
        parameters_pb2.PushPullRequest(header=raw.own("push-header").header),
        parameters_pb2.PushPullRequest(block=place.block().block),
        parameters_pb2.PushPullRequest(seal=place.seal().seal),
        parameters_pb2.PushPullRequest(pull=place.read(_copy("pull-request"))),
    ]
    messages[-1].pull.ClearField("session")
    parts = list(raw.server.PushPull(iter(messages), timeout=DEADLINE_S))
    assert [part.pull for part in parts if part.HasField("pull")] == [WORKED["pull-response"]]
    assert sum(part.HasField("end") for part in parts) == 1
