"""The hot messages, read and written around their payload: no copy in, one copy out.

A block's payload is a megabyte, and the generated code would copy it into the message and out of it
again. `ps_core.envelope` takes the payload apart from the rest; what is on the wire is ordinary
protobuf either way, and a message that is put together unusually goes through the generated parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from ps_core import limits
from ps_core.envelope import MAX_BESIDE_BYTES, is_frugal, join, split, wrap
from ps_core.errors import InvalidTensor, PushpullError
from ps_runtime.grpc import errors
from ps_runtime.grpc.requests import RequestReader
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc

SMALL_BYTES = 64 * 1024
"""A message up to it is parsed whole: a copy of its payload costs less than to go around it."""

SERVICE = "pushpull.v1.ParameterService"

_BLOCK_IN_REQUEST = parameters_pb2.PushRequest.BLOCK_FIELD_NUMBER
_PUSHED_PAYLOAD = parameters_pb2.BlockPush.PAYLOAD_FIELD_NUMBER
_BATCH = (
    parameters_pb2.PushRequest.BATCH_FIELD_NUMBER,
    parameters_pb2.BlockBatch.BLOCKS_FIELD_NUMBER,
    _PUSHED_PAYLOAD,
)
_BLOCK_IN_RESPONSE = parameters_pb2.PullResponse.BLOCK_FIELD_NUMBER
_PULLED_PAYLOAD = parameters_pb2.BlockValue.PAYLOAD_FIELD_NUMBER
_PULL_IN_PART = parameters_pb2.PushPullResponse.PULL_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """A BlockPush without its payload, and the payload as it lies in the message that came."""

    block: parameters_pb2.BlockPush
    payload: memoryview


Entry = BlockFrame | parameters_pb2.PushRequest | parameters_pb2.PushPullRequest
"""One message of a push stream."""


def kind_of(entry: Entry) -> str | None:
    """Which entry a message holds, by the name of its field; None for no entry."""
    if isinstance(entry, BlockFrame):
        return "block"
    kind: str | None = entry.WhichOneof("entry")
    return kind


def pulls_of(message: Entry) -> Iterator[parameters_pb2.PullRequest]:
    """The pulls in a message of a PushPull stream."""
    if isinstance(message, parameters_pb2.PushPullRequest):
        if message.WhichOneof("entry") == "pull":
            yield message.pull
        if message.HasField("then_pull"):
            yield message.then_pull


def more_follow(entry: Entry, kind: str | None) -> bool:
    """Whether its sender writes another message at once; `kind` as `kind_of` says."""
    if isinstance(entry, BlockFrame):
        return entry.block.more_follow
    if kind == "batch":
        return bool(entry.batch.blocks) and entry.batch.blocks[-1].more_follow
    return kind == "block" and entry.block.more_follow


def block_of(entry: Entry) -> BlockFrame:
    """The block of an entry whose kind is "block"."""
    if isinstance(entry, BlockFrame):
        return entry
    return BlockFrame(entry.block, memoryview(entry.block.payload))


def entry_reader(
    message: type[parameters_pb2.PushRequest | parameters_pb2.PushPullRequest],
    small_bytes: int = SMALL_BYTES,
) -> Any:
    """A deserializer of a push stream's messages; those of up to `small_bytes` are parsed whole.

    Raises (the deserializer):
        DecodeError: the bytes are no such message.
    """

    def read(raw: bytes) -> Entry:
        if len(raw) <= small_bytes:
            return message.FromString(raw)
        try:
            found = split(raw, _BLOCK_IN_REQUEST, _PUSHED_PAYLOAD)
        except InvalidTensor:
            found = None  # unusual or broken: the generated parser knows which
        if found is None:
            _check_frugal(raw)
            return message.FromString(raw)
        if len(found[0]) > MAX_BESIDE_BYTES:
            raise _wasteful(raw)
        return BlockFrame(parameters_pb2.BlockPush.FromString(found[0]), found[1])

    return read


def _check_frugal(raw: bytes) -> None:
    """Refuse to parse what is much beside payloads.

    Raises:
        DecodeError: it is.
    """
    try:
        is_good = is_frugal(
            raw, _BATCH, limits.MAX_BATCH_COUNT, (_BLOCK_IN_REQUEST, _PUSHED_PAYLOAD)
        )
    except InvalidTensor as error:
        raise DecodeError(error.message) from None
    if not is_good:
        raise _wasteful(raw)


def _wasteful(raw: bytes) -> DecodeError:
    return DecodeError(
        f"of its {len(raw)} bytes more than {limits.MAX_ENTRY_BYTES} are no payload, or it has too "
        "many entries"
    )


def block_answer(value: parameters_pb2.BlockValue, payload: bytes | memoryview) -> bytes:
    """A serialized PullResponse of `value` with `payload`, which is copied once."""
    return join(_BLOCK_IN_RESPONSE, value.SerializeToString(), _PULLED_PAYLOAD, payload)


def shared_answer(values: list[parameters_pb2.SharedValue]) -> bytes:
    """A serialized PullResponse of values that the caller reads where they lie."""
    shared = parameters_pb2.SharedValues(values=values)
    return parameters_pb2.PullResponse(shared=shared).SerializeToString()


def pull_part(answer: bytes, read_number: int = 0, *, is_last: bool = False) -> bytes:
    """A serialized PushPullResponse of a serialized PullResponse."""
    beside = parameters_pb2.PushPullResponse(read_number=read_number, is_last=is_last)
    return wrap(_PULL_IN_PART, answer) + beside.SerializeToString()


def pull_end(read_number: int) -> bytes:
    """A serialized PushPullResponse that says that a pull has been answered in full."""
    end = parameters_pb2.PullEnd()
    return parameters_pb2.PushPullResponse(end=end, read_number=read_number).SerializeToString()


def with_replies(part: bytes, replies: parameters_pb2.PushResponse) -> bytes:
    """A serialized PushPullResponse with answers to entries beside its part."""
    beside = parameters_pb2.PushPullResponse(with_replies=replies)
    return part + beside.SerializeToString()


def range_error(range_id: int, error: PushpullError) -> bytes:
    """The part of an answer that says why a range could not be read."""
    message = parameters_pb2.RangeError(range_id=range_id, error=errors.error_to_proto(error))
    return parameters_pb2.PullResponse(error=message).SerializeToString()


def serialized(message: bytes | Message) -> bytes:
    """A serializer that lets through what is serialized already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def handlers_of(
    servicer: parameters_pb2_grpc.ParameterServiceServicer,
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's methods by their short names, with the readers and writers above."""
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    return {
        "OpenSession": unary(
            servicer.OpenSession, RequestReader(parameters_pb2.OpenSessionRequest), serialized
        ),
        "Push": stream(servicer.Push, entry_reader(parameters_pb2.PushRequest), serialized),
        "Pull": grpc.unary_stream_rpc_method_handler(
            servicer.Pull, RequestReader(parameters_pb2.PullRequest), serialized
        ),
        "PushPull": stream(
            servicer.PushPull, entry_reader(parameters_pb2.PushPullRequest), serialized
        ),
        "BeginCut": unary(
            servicer.BeginCut, RequestReader(parameters_pb2.BeginCutRequest), serialized
        ),
        "EndCut": unary(servicer.EndCut, RequestReader(parameters_pb2.EndCutRequest), serialized),
        "SettleChange": unary(
            servicer.SettleChange, RequestReader(parameters_pb2.SettleChangeRequest), serialized
        ),
        "GetRangeStats": unary(
            servicer.GetRangeStats, RequestReader(parameters_pb2.GetRangeStatsRequest), serialized
        ),
        "EnterCollective": unary(
            servicer.EnterCollective,
            RequestReader(parameters_pb2.EnterCollectiveRequest, limits.MAX_MESSAGE_BYTES),
            serialized,
        ),
    }


def add_to_server(
    servicer: parameters_pb2_grpc.ParameterServiceServicer, server: grpc.aio.Server
) -> None:
    """As the generated function of that name, with the readers and writers above."""
    handlers = handlers_of(servicer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
