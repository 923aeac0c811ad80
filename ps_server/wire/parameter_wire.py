"""ParameterService's messages: read, made events in one validation pass, and answered.

A block's payload is a megabyte, and the generated code would copy it into the message and out of it
again. So the hot messages are read and written around their payload: no copy in, one copy out.
`ps_core.envelope` takes the payload apart from the rest. The wire has ordinary protobuf either way,
and a message of unusual form goes through the generated parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError, Message

from ps_core import limits
from ps_core.envelope import MAX_BESIDE_BYTES, before, is_frugal, join, split, wrap
from ps_core.errors import InvalidConfig, InvalidTensor, PushpullError, Recovering
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables.elements import Codec
from ps_runtime.cluster import wire
from ps_runtime.grpc import errors
from ps_server.ranges.events import (
    EntryEvent,
    Place,
    PushEvent,
    ReplyTo,
    ScaleEvent,
    SealEvent,
    SealTerms,
    Sender,
    WithdrawEvent,
)
from ps_server.values.contributions import Contribution
from ps_server.values.row_gradients import RowGradients
from pushpull.v1 import parameters_pb2

SMALL_BYTES = 64 * 1024
"""Most bytes of a message that is parsed whole: to go around its payload costs more than a copy."""

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

_PUSH_KINDS = frozenset(parameters_pb2.PushKind.values())
_REPLY_KIND = {kind: getattr(parameters_pb2, f"REPLY_KIND_{kind.name}") for kind in ReplyKind}
_OUTCOME = {outcome: getattr(parameters_pb2, f"OUTCOME_{outcome.name}") for outcome in Outcome}


class BlockFrame(NamedTuple):
    """A BlockPush without its payload, and the payload as it lies in the message that came."""

    block: parameters_pb2.BlockPush
    payload: memoryview


Entry = BlockFrame | parameters_pb2.PushRequest | parameters_pb2.PushPullRequest
"""One message of a push stream."""


# --- received messages


def kind_of(entry: Entry) -> str | None:
    """The kind of a message's entry, by the name of its field; None for no entry."""
    return "block" if isinstance(entry, BlockFrame) else entry.WhichOneof("entry")


def pulls_of(message: Entry, kind: str | None) -> Iterator[parameters_pb2.PullRequest]:
    """The pulls in a message of a PushPull stream; `kind` as `kind_of` says."""
    if isinstance(message, parameters_pb2.PushPullRequest):
        if kind == "pull":
            yield message.pull
        if message.HasField("then_pull"):
            yield message.then_pull


def more_follow(entry: Entry, kind: str | None) -> bool:
    """True if its sender writes another message at once; `kind` as `kind_of` says."""
    if isinstance(entry, BlockFrame):
        return entry.block.more_follow
    if kind == "batch":
        return bool(entry.batch.blocks) and entry.batch.blocks[-1].more_follow
    return kind == "block" and entry.block.more_follow


def entry_reader(
    message: type[parameters_pb2.PushRequest | parameters_pb2.PushPullRequest],
    small_bytes: int = SMALL_BYTES,
) -> Any:
    """A deserializer of a push stream's messages; those of up to `small_bytes` are parsed whole.
    It raises DecodeError for bytes that are no such message.
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
    """Raise DecodeError for a message that has much beside its payloads."""
    block = _BLOCK_IN_REQUEST, _PUSHED_PAYLOAD
    try:
        is_good = is_frugal(raw, _BATCH, limits.MAX_BATCH_COUNT, block)
    except InvalidTensor as error:
        raise DecodeError(error.message) from None
    if not is_good:
        raise _wasteful(raw)


def _wasteful(raw: bytes) -> DecodeError:
    return DecodeError(
        f"of its {len(raw)} bytes more than {limits.MAX_ENTRY_BYTES} are no payload, or it has too "
        "many entries"
    )


# --- events


class Decoder(Protocol):
    """Makes contributions of payloads, or raises what is wrong with them."""

    def decode(
        self, place: Place, block: int, codec: Codec, payload: memoryview, presence: bytes
    ) -> Contribution | RowGradients: ...

    def decode_shared(
        self, place: Place, sender: Sender, message: parameters_pb2.BlockPush, codec: Codec
    ) -> Contribution | RowGradients:
        """The same in the sender's shared memory. Recovering: that is not there any more."""

    def check_space(self, place: Place, found: Contribution | RowGradients) -> None:
        """Raise TableFull if there is no memory for the rows that this would make."""


def seal_terms(message: parameters_pb2.Seal) -> SealTerms:
    if len(message.edit) > limits.MAX_EDIT_BYTES:
        raise InvalidConfig(
            f"a seal's edit has {len(message.edit)} bytes; expected at most {limits.MAX_EDIT_BYTES}"
        )
    has_scale = message.HasField("contribution_scale")
    return SealTerms(
        message.clock,
        wire.hyperparameters_from_proto(message.hyperparameters),
        message.contribution_scale if has_scale else 1.0,
        message.skip,
        message.last,
        message.clip_scale if message.HasField("clip_scale") else None,
        message.edit,
        message.array,
    )


def _kept(error: PushpullError) -> PushpullError:
    """An error for a ledger, without the traceback: its frames hold the payload, or its memory."""
    error.__traceback__ = error.__context__ = None
    return error


def push_events(
    frame: BlockFrame, sender: Sender, decoder: Decoder
) -> Iterator[PushEvent | SealEvent]:
    """The push, and the seal that it carries."""
    message = frame.block
    place = Place(
        TableId(message.table_id),
        RangeId(message.range_id),
        AssignmentEpoch(message.assignment_epoch),
    )
    payload: Contribution | RowGradients | None = None
    problem: PushpullError | None = None
    eager = None
    try:
        if message.kind not in _PUSH_KINDS:
            expected = ", ".join(map(str, sorted(_PUSH_KINDS)))
            raise InvalidConfig(f"kind is {message.kind}; expected one of {expected}")
        codec = wire.codec_from_proto(message.codec)
        if message.HasField("eager"):
            eager = wire.hyperparameters_from_proto(message.eager.hyperparameters)
        if message.HasField("shared_payload"):
            if frame.payload.nbytes:
                raise InvalidTensor(
                    f"a push has a payload of {frame.payload.nbytes} bytes and a shared payload; "
                    "expected one of them"
                )
            payload = decoder.decode_shared(place, sender, message, codec)
        else:
            payload = decoder.decode(place, message.block, codec, frame.payload, message.presence)
        if not message.was_received:
            decoder.check_space(place, payload)
    except PushpullError as error:
        problem = _kept(error)
    has_version = message.HasField("pulled_peer_version")
    yield PushEvent(
        place,
        sender,
        message.sequence,
        message.clock,
        message.block,
        payload.byte_count if payload is not None else 0,
        payload,
        problem,
        message.kind == parameters_pb2.PUSH_KIND_ASSIGN,
        message.replaces,
        message.confirmed_sequence,
        message.pulled_peer_version if has_version else None,
        eager,
    )
    if message.HasField("seal"):
        lost = problem if isinstance(problem, Recovering) else None
        yield from seal_events(message.seal, sender, message, lost)


def seal_events(
    message: parameters_pb2.Seal,
    sender: Sender,
    carrier: parameters_pb2.BlockPush | None = None,
    lost: PushpullError | None = None,
) -> Iterator[SealEvent]:
    """One event for each range of the seal; `carrier` is the push that it came in, if any, and
    `lost` why that one's payload is lost: both come again.
    """
    problem: PushpullError | None = None
    try:
        terms = seal_terms(message)
        if carrier is not None:
            _check_carried(message, carrier)
    except PushpullError as error:
        terms, problem = SealTerms(message.clock), _kept(error)
    for place, part in _places(message):
        yield SealEvent(
            place,
            sender,
            part.sequence,
            terms,
            part.confirmed_sequence,
            carrier is not None,
            lost or problem,
        )


def scale_events(message: parameters_pb2.UpdateScale, sender: Sender) -> Iterator[ScaleEvent]:
    """One event for each range."""
    for place, part in _places(message):
        yield ScaleEvent(
            place, sender, part.sequence, message.clock, message.scale, part.confirmed_sequence
        )


def _places(
    message: parameters_pb2.Seal | parameters_pb2.UpdateScale,
) -> Iterator[tuple[Place, parameters_pb2.RangeSeal]]:
    """The ranges, one at least: without any there is no entry to answer."""
    if not 1 <= len(message.ranges) <= limits.MAX_RANGE_COUNT:
        what = "a seal" if isinstance(message, parameters_pb2.Seal) else "an update's scale"
        raise InvalidConfig(
            f"{what} of table {message.table_id} names {len(message.ranges)} ranges; expected 1 to "
            f"{limits.MAX_RANGE_COUNT}"
        )
    for part in message.ranges:
        place = Place(
            TableId(message.table_id),
            RangeId(part.range_id),
            AssignmentEpoch(part.assignment_epoch),
        )
        yield place, part


def _check_carried(message: parameters_pb2.Seal, carrier: parameters_pb2.BlockPush) -> None:
    expected = (carrier.table_id, carrier.clock, [carrier.range_id])
    came = (message.table_id, message.clock, [part.range_id for part in message.ranges[:2]])
    if came != expected:
        raise InvalidConfig(
            f"a seal inside a block is of table {came[0]}, clock {came[1]}, ranges {came[2]}; "
            f"expected its block's: table {expected[0]}, clock {expected[1]}, ranges {expected[2]}"
        )


def entry_events(message: Entry, sender: Sender, decoder: Decoder) -> Iterator[EntryEvent]:
    """The events of one message of a push stream."""
    if isinstance(message, BlockFrame):
        yield from push_events(message, sender, decoder)
        return
    match message.WhichOneof("entry"):
        case "block":
            frame = BlockFrame(message.block, memoryview(message.block.payload))
            yield from push_events(frame, sender, decoder)
        case "batch":
            blocks = message.batch.blocks
            if not 1 <= len(blocks) <= limits.MAX_BATCH_COUNT:
                raise InvalidConfig(
                    f"a batch has {len(blocks)} blocks; expected 1 to {limits.MAX_BATCH_COUNT}"
                )
            for block in blocks:
                frame = BlockFrame(block, memoryview(block.payload))
                yield from push_events(frame, sender, decoder)
        case "seal":
            yield from seal_events(message.seal, sender)
        case "update_scale":
            yield from scale_events(message.update_scale, sender)
        case "withdrawal":
            given_up = message.withdrawal
            place = Place(
                TableId(given_up.table_id),
                RangeId(given_up.range_id),
                AssignmentEpoch(given_up.assignment_epoch),
            )
            yield WithdrawEvent(place, sender, given_up.sequence)
        case kind:
            raise InvalidConfig(
                f"a message of a push stream holds {kind or 'no entry'}; expected a block, a batch "
                "of blocks, a seal, an update's scale or a withdrawal after the header"
            )


def deadline_s_of(given_ms: int, default_s: float) -> float:
    """The time that a request may wait; 0 means the default. InvalidConfig if it is too long."""
    most_ms = int(limits.MAX_DEADLINE_S * 1000)
    if given_ms > most_ms:
        raise InvalidConfig(f"deadline_ms is {given_ms}; expected at most {most_ms}")
    return given_ms / 1000 or default_s


# --- answers


def push_response(replies: Iterable[ReplyTo]) -> parameters_pb2.PushResponse:
    """The replies as one message. Each is filled in where it lies in the message; one made by its
    constructor and copied costs 2 us instead of 0.6 us.
    """
    response = parameters_pb2.PushResponse()
    for _, kind, table_id, range_id, sequence, ending, error in replies:
        message = response.replies.add()
        message.kind = _REPLY_KIND[kind]
        message.table_id = table_id
        message.range_id = range_id
        message.sequence = sequence
        if ending is not None:
            message.outcome = _OUTCOME[ending.outcome]
            message.staleness = ending.staleness
            if ending.squares:
                message.squares.extend(ending.squares)
            error = ending.error
        if error is not None:
            message.error.CopyFrom(errors.error_to_proto(error))
    return response


def block_answer(value: parameters_pb2.BlockValue, payload: bytes | memoryview) -> bytes:
    """A serialized PullResponse of `value` with `payload`, which is copied once."""
    return join(_BLOCK_IN_RESPONSE, value.SerializeToString(), _PULLED_PAYLOAD, payload)


def block_answer_head(value: parameters_pb2.BlockValue, byte_count: int) -> bytes:
    """`block_answer` without its payload of so many bytes, which comes last."""
    return before(_BLOCK_IN_RESPONSE, value.SerializeToString(), _PULLED_PAYLOAD, byte_count)


def shared_answer(values: list[parameters_pb2.SharedValue]) -> bytes:
    """A serialized PullResponse of values that the caller reads in shared memory."""
    response = parameters_pb2.PullResponse()
    response.shared.values.extend(values)
    return response.SerializeToString()


def unchanged_answer(clock: int, blocks: Iterable[int]) -> bytes:
    """A serialized PullResponse of blocks of one range whose values the caller has."""
    unchanged = parameters_pb2.UnchangedBlocks(clock=clock, blocks=blocks)
    return parameters_pb2.PullResponse(unchanged=unchanged).SerializeToString()


def pull_part(answer: bytes | memoryview, read_number: int = 0, *, is_last: bool = False) -> bytes:
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
    """The error of a range, as part of an answer."""
    message = parameters_pb2.RangeError(range_id=range_id, error=errors.error_to_proto(error))
    return parameters_pb2.PullResponse(error=message).SerializeToString()


def serialized(message: bytes | memoryview | Message) -> bytes:
    """A serializer for messages that are serialized already."""
    if isinstance(message, Message):
        return message.SerializeToString()
    return bytes(message)
