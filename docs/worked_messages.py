"""The messages of the worked example in PROTOCOL.md: one worker, one server, one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message

from docs import payload_codec as codecs
from ps_core.cluster_view import Role, Session
from ps_core.keys import Incarnation, NodeId, range_of_slot, slot_of_ordinal
from ps_core.limits import RANGE_COUNT
from ps_core.rights import Joiner
from ps_core.tables.elements import Codec
from pushpull.v1 import parameters_pb2 as parameters
from pushpull.v1 import scheduler_pb2 as scheduler
from pushpull.v1 import types_pb2 as types

EXAMPLE_TOKEN_KEY = bytes(range(32))
EXAMPLE_SECRET = b"correct horse battery staple"
EXAMPLE_CHALLENGE = bytes(range(0xC0, 0xD0))
TABLE_ID = 2
FIRST_ORDINAL = 1
RANGE_ID = range_of_slot(slot_of_ordinal(FIRST_ORDINAL), RANGE_COUNT)
ASSIGNMENT_EPOCH = 2
LEARNING_RATE = 0.5
VIEW_NUMBER = 5


@dataclass(frozen=True, slots=True)
class WorkedMessage:
    """A message of the example: `name` marks its place on the page, `caption` introduces it."""

    name: str
    caption: str
    message: Message


def example_session() -> Session:
    """The identity of the example's worker, without its token."""
    return Session("demo", bytes(range(16)), NodeId(2), Incarnation(2), Role.WORKER)


def _identity() -> types.SessionIdentity:
    session = example_session()
    return types.SessionIdentity(
        cluster_id=session.cluster_id,
        timeline=session.timeline,
        node_id=session.node_id,
        incarnation=session.incarnation,
        role=types.NODE_ROLE_WORKER,
        rank=session.rank,
        session_token=session.signed(EXAMPLE_TOKEN_KEY),
    )


def _fp32(*values: float) -> bytes:
    return codecs.encode(np.array(values, dtype=np.float32), Codec.FP32)


def _spec() -> types.TableSpec:
    return types.TableSpec(
        name="line",
        dtype=types.DTYPE_FLOAT32,
        element_count=3,
        block_elements=64,
        tensors=[
            types.TensorSpec(name="weight", shape=[1, 2], offset=0),
            types.TensorSpec(name="bias", shape=[1], offset=2),
        ],
        optimizer=types.OptimizerSpec(
            kind=types.OPTIMIZER_KIND_SGD,
            hyperparameters=[types.Hyperparameter(name="lr", value=LEARNING_RATE)],
        ),
        consistency=types.Consistency(bsp=types.BulkSynchronous()),
        initializer=types.Initializer(zeros=types.ZerosInitializer()),
    )


def _block(sequence: int, confirmed: int, clock: int) -> parameters.BlockPush:
    return parameters.BlockPush(
        range_id=RANGE_ID,
        assignment_epoch=ASSIGNMENT_EPOCH,
        table_id=TABLE_ID,
        block=0,
        clock=clock,
        sequence=sequence,
        confirmed_sequence=confirmed,
        codec=types.CODEC_FP32,
        kind=parameters.PUSH_KIND_GRADIENT,
        payload=_fp32(1.0, -2.0, 0.5),
    )


def _seal(sequence: int, confirmed: int, clock: int) -> parameters.Seal:
    return parameters.Seal(
        table_id=TABLE_ID,
        clock=clock,
        ranges=[
            parameters.RangeSeal(
                range_id=RANGE_ID,
                assignment_epoch=ASSIGNMENT_EPOCH,
                sequence=sequence,
                confirmed_sequence=confirmed,
            )
        ],
    )


def _reply(kind: parameters.ReplyKind, sequence: int) -> parameters.EntryReply:
    committed = kind == parameters.REPLY_KIND_COMMITTED
    return parameters.EntryReply(
        kind=kind,
        table_id=TABLE_ID,
        range_id=RANGE_ID,
        sequence=sequence,
        outcome=parameters.OUTCOME_APPLIED if committed else parameters.OUTCOME_UNSPECIFIED,
    )


def _one_message_step() -> parameters.PushRequest:
    block = _block(3, 2, 2)
    block.presence = b"\x01"
    block.seal.CopyFrom(_seal(4, 2, 2))
    return parameters.PushRequest(block=block)


def example_joiner() -> Joiner:
    """The example's worker, when it asks to join."""
    return Joiner(bytes(range(0xA0, 0xB0)), Role.WORKER, rank=0)


def _register() -> tuple[WorkedMessage, ...]:
    challenge = scheduler.GetJoinChallengeResponse(challenge=EXAMPLE_CHALLENGE)
    request = scheduler.RegisterNodeRequest(
        registration_id=example_joiner().registration_id,
        role=types.NODE_ROLE_WORKER,
        requested_rank=0,
        protocol_version=1,
        join_proof=example_joiner().proof(EXAMPLE_SECRET, EXAMPLE_CHALLENGE),
    )
    response = scheduler.RegisterNodeResponse(
        session=_identity(), worker_count=1, heartbeat_interval_ms=1000, lease_ms=3000
    )
    return (
        WorkedMessage("challenge", "The scheduler's answer to `GetJoinChallenge`:", challenge),
        WorkedMessage("register-request", "To the scheduler's `RegisterNode`:", request),
        WorkedMessage("register-response", "Its answer:", response),
    )


def _table() -> tuple[WorkedMessage, ...]:
    request = scheduler.CreateTableRequest(session=_identity(), spec=_spec())
    session = parameters.OpenSessionRequest(session=_identity(), view_number=VIEW_NUMBER)
    return (
        WorkedMessage("create-table", "To the scheduler's `CreateTable`:", request),
        WorkedMessage("open-session", "To the server's `OpenSession`:", session),
    )


def _push() -> tuple[WorkedMessage, ...]:
    header = parameters.PushRequest(header=parameters.StreamHeader(session=_identity()))
    received = parameters.PushResponse(replies=[_reply(parameters.REPLY_KIND_RECEIVED, 1)])
    kind = parameters.REPLY_KIND_COMMITTED
    committed = parameters.PushResponse(replies=[_reply(kind, 1), _reply(kind, 2)])
    return (
        WorkedMessage("push-header", "The first message of the stream:", header),
        WorkedMessage("push-block", "The block:", parameters.PushRequest(block=_block(1, 0, 1))),
        WorkedMessage("push-received", "The server answers:", received),
        WorkedMessage("push-seal", "The seal:", parameters.PushRequest(seal=_seal(2, 0, 1))),
        WorkedMessage("push-committed", "The server answers:", committed),
        WorkedMessage("push-one-message", "Step 2, whole:", _one_message_step()),
    )


def _pull() -> tuple[WorkedMessage, ...]:
    request = parameters.PullRequest(
        session=_identity(),
        table_id=TABLE_ID,
        ranges=[parameters.RangePull(range_id=RANGE_ID, assignment_epoch=ASSIGNMENT_EPOCH)],
        clock=1,
        deadline_ms=30_000,
    )
    value = parameters.BlockValue(
        block=0,
        version=1,
        clock=1,
        codec=types.CODEC_FP32,
        payload=_fp32(-0.5, 1.0, -0.25),
    )
    again = parameters.PullRequest()
    again.CopyFrom(request)
    again.ranges[0].held_versions.append(value.version + 1)
    unchanged = parameters.UnchangedBlocks(clock=1, blocks=[0])
    error = types.Error(
        code=types.ERROR_CODE_NOT_OWNER, message=f"range {RANGE_ID} is served by node 3"
    )
    return (
        WorkedMessage("pull-request", "To the server's `Pull`:", request),
        WorkedMessage("pull-response", "The answer:", parameters.PullResponse(block=value)),
        WorkedMessage("pull-again-request", "Once more, to the same:", again),
        WorkedMessage(
            "pull-unchanged", "The answer:", parameters.PullResponse(unchanged=unchanged)
        ),
        WorkedMessage("error", "In trailing metadata `pushpull-error-bin`:", error),
    )


def worked_messages() -> tuple[WorkedMessage, ...]:
    """All messages of the example, in the order of the page."""
    return _register() + _table() + _push() + _pull()
