"""From messages to events: the one validation pass over what came over the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ps_core import limits
from ps_core.errors import InvalidConfig, InvalidTensor, PushpullError, Recovering
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_core.tables import Codec
from ps_runtime.cluster import wire
from ps_server.ranges.events import (
    EntryEvent,
    Place,
    PushEvent,
    ScaleEvent,
    SealEvent,
    SealTerms,
    Sender,
    WithdrawEvent,
)
from ps_server.values.contributions import Contribution
from ps_server.wire.frames import BlockFrame, Entry, block_of, kind_of
from pushpull.v1 import parameters_pb2

_KINDS = frozenset(parameters_pb2.PushKind.values())


class Decoder(Protocol):
    """What makes a contribution of a payload."""

    def decode(
        self, place: Place, block: int, codec: Codec, payload: memoryview, presence: bytes
    ) -> Contribution:
        """Raises: what is wrong with the payload."""

    def decode_shared(
        self, place: Place, sender: Sender, message: parameters_pb2.BlockPush, codec: Codec
    ) -> Contribution:
        """The same for a payload in the sender's shared memory.

        Raises: what is wrong with it; Recovering: the sender's memory is not there any more.
        """


def seal_terms(message: parameters_pb2.Seal) -> SealTerms:
    """The terms of a seal.

    Raises:
        InvalidConfig: too many or unusable hyperparameters, or too long an edit.
    """
    if len(message.hyperparameters) > limits.MAX_HYPERPARAMETER_COUNT:
        raise InvalidConfig(
            f"a seal has {len(message.hyperparameters)} hyperparameters; expected at most "
            f"{limits.MAX_HYPERPARAMETER_COUNT}"
        )
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


def _check_kind(number: int) -> None:
    if number not in _KINDS:
        raise InvalidConfig(
            f"kind is {number}; expected one of {', '.join(map(str, sorted(_KINDS)))}"
        )


def _kept(error: PushpullError) -> PushpullError:
    """An error that a ledger keeps, without the frames that it came through: they hold the payload,
    or the memory that it lies in.
    """
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
    payload: Contribution | None = None
    problem: PushpullError | None = None
    eager = None
    try:
        _check_kind(message.kind)
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

    Raises:
        InvalidConfig: it names no range, so that there is no entry to answer, or more than exist.
    """
    _check_ranges(message)
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
    """One event for each range.

    Raises:
        InvalidConfig: it names no range, or more than exist.
    """
    _check_ranges(message)
    for place, part in _places(message):
        yield ScaleEvent(
            place, sender, part.sequence, message.clock, message.scale, part.confirmed_sequence
        )


def _check_ranges(message: parameters_pb2.Seal | parameters_pb2.UpdateScale) -> None:
    if not 1 <= len(message.ranges) <= limits.MAX_RANGE_COUNT:
        what = "a seal" if isinstance(message, parameters_pb2.Seal) else "an update's scale"
        raise InvalidConfig(
            f"{what} of table {message.table_id} names {len(message.ranges)} ranges; expected 1 to "
            f"{limits.MAX_RANGE_COUNT}"
        )


def _places(
    message: parameters_pb2.Seal | parameters_pb2.UpdateScale,
) -> Iterator[tuple[Place, parameters_pb2.RangeSeal]]:
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


def entry_events(
    message: Entry,
    sender: Sender,
    decoder: Decoder,
) -> Iterator[EntryEvent]:
    """The events of one message of a push stream.

    Raises:
        InvalidConfig: the message holds no entry, or a header where none may be, or a seal of no
            range.
    """
    kind = kind_of(message)
    if kind == "block":
        yield from push_events(block_of(message), sender, decoder)
    elif kind == "batch" and not isinstance(message, BlockFrame):
        _check_batch(message.batch)
        for block in message.batch.blocks:
            yield from push_events(BlockFrame(block, memoryview(block.payload)), sender, decoder)
    elif kind == "seal" and not isinstance(message, BlockFrame):
        yield from seal_events(message.seal, sender)
    elif kind == "update_scale" and not isinstance(message, BlockFrame):
        yield from scale_events(message.update_scale, sender)
    elif kind == "withdrawal" and not isinstance(message, BlockFrame):
        given_up = message.withdrawal
        place = Place(
            TableId(given_up.table_id),
            RangeId(given_up.range_id),
            AssignmentEpoch(given_up.assignment_epoch),
        )
        yield WithdrawEvent(place, sender, given_up.sequence)
    else:
        raise InvalidConfig(
            f"a message of a push stream holds {kind or 'no entry'}; expected a block, a batch of "
            "blocks, a seal, an update's scale or a withdrawal after the header"
        )


def _check_batch(batch: parameters_pb2.BlockBatch) -> None:
    if not 1 <= len(batch.blocks) <= limits.MAX_BATCH_COUNT:
        raise InvalidConfig(
            f"a batch has {len(batch.blocks)} blocks; expected 1 to {limits.MAX_BATCH_COUNT}"
        )


def deadline_s(given_ms: int, default_s: float) -> float:
    """How long a request may wait.

    Args:
        given_ms: what it says; 0 means the default.
        default_s: the default.

    Raises:
        InvalidConfig: it is longer than any may be.
    """
    most_ms = int(limits.MAX_DEADLINE_S * 1000)
    if given_ms > most_ms:
        raise InvalidConfig(f"deadline_ms is {given_ms}; expected at most {most_ms}")
    return given_ms / 1000 or default_s
