"""Messages between a primary and its backups, to `pushpull.v1` and back.

A record is written around its payloads as `ps_server.wire.parameter_wire` writes blocks: each is
copied once, into the message, and read in place from a received one. The wire is ordinary protobuf.

Rules:
    - A record has a message to itself, or several that follow each other if it is too long for one.
    - A wrong message is refused with InvalidConfig.

Invariants:
    RW-1  A log record and its decisions are of one range and table.
    RW-2  Values are sent as `SentAccumulator` and `Elements`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.envelope import join, pieces_of_several, split, split_several, wrap
from ps_core.errors import InvalidConfig, InvalidTensor, InvariantViolation
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_core.sliced_work import Work, at_once, pieces_of
from ps_server.ranges.events import Record
from ps_server.ranges.range_copy import RangeDelta
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord
from ps_server.values.mutations import (
    Assigned,
    Dropped,
    Elements,
    KeptSum,
    Mutation,
    Put,
    SentAccumulator,
)
from ps_server.wire.decision_wire import (
    RecordTable,
    at,
    check_lengths,
    endings_from_proto,
    endings_to_proto,
    facts_from_proto,
    facts_to_proto,
    record_from_proto,
    workers_from_proto,
    workers_to_proto,
)
from pushpull.v1 import replication_pb2

MessageT = TypeVar("MessageT", bound=Message)
Pieces = Sequence[bytes | memoryview]
"""A serialized message, one piece behind the other."""

SERVICE = "pushpull.v1.ReplicationService"

SMALL_BYTES = 64 * 1024
"""Most bytes of a message that is parsed whole: to go around its payload costs more than a copy."""

_BATCH = replication_pb2.ReplicateRequest.BATCH_FIELD_NUMBER
_ELEMENTS = replication_pb2.ReplicateRequest.ELEMENTS_FIELD_NUMBER
_FRAME_BYTES = 64
"""Most bytes of keys, lengths and padding, around a block and around a message."""

_HEAD = replication_pb2.ReplicatedBatch.HEAD_FIELD_NUMBER
_BLOCKS = replication_pb2.ReplicatedBatch.BLOCKS_FIELD_NUMBER
_PAYLOAD = replication_pb2.BlockElements.PAYLOAD_FIELD_NUMBER
_PADDING = replication_pb2.BlockElements.PADDING_FIELD_NUMBER

_PUT = replication_pb2.VALUE_CHANGE_KIND_PUT
_PUT_KEPT = replication_pb2.VALUE_CHANGE_KIND_PUT_KEPT
_PUT_REDUCED = replication_pb2.VALUE_CHANGE_KIND_PUT_REDUCED
_KEPT = replication_pb2.VALUE_CHANGE_KIND_KEPT
_DROPPED = replication_pb2.VALUE_CHANGE_KIND_DROPPED
_ASSIGNED = replication_pb2.VALUE_CHANGE_KIND_ASSIGNED


# --- mutations


def change_to_proto(
    change: Mutation, index: int
) -> tuple[replication_pb2.ValueChange, tuple[Elements, ...]]:
    """A mutation whose decision has that index; its blocks go beside it."""
    blocks: tuple[Elements, ...] = ()
    means: tuple[Elements, ...] = ()
    match change:
        case Put(accumulator=None):
            kind = _PUT_KEPT
        case Put(accumulator=SentAccumulator() as accumulator):
            kind, blocks = _PUT_REDUCED if accumulator.is_reduced else _PUT, accumulator.blocks
            means = accumulator.means
        case KeptSum(accumulator=SentAccumulator() as accumulator):
            kind, blocks = _KEPT, accumulator.blocks
        case Dropped():
            kind = _DROPPED
        case Assigned(parts=parts):
            kind, blocks = _ASSIGNED, parts
        case _:
            raise InvariantViolation("RW-2", f"{type(change).__name__} is not to be sent as it is")
    message = replication_pb2.ValueChange(
        kind=kind, record=index, block_count=len(blocks), mean_count=len(means)
    )
    return message, blocks + means


def change_from_proto(
    message: replication_pb2.ValueChange, record: Record, blocks: Iterator[Elements]
) -> Mutation:
    """A mutation; its blocks are the next of `blocks`."""
    kind, count, mean_count = message.kind, message.block_count, message.mean_count
    own = tuple(itertools.islice(blocks, count))
    means = tuple(itertools.islice(blocks, mean_count))
    if (len(own), len(means)) != (count, mean_count):
        found, expected = len(own) + len(means), count + mean_count
        raise InvalidConfig(f"a change of values has {found} blocks; expected {expected}")
    if kind in (_PUT, _PUT_REDUCED):
        return Put(record, SentAccumulator(own, kind == _PUT_REDUCED, means))
    if means:
        raise InvalidConfig(
            f"a change of values is of kind {kind} with {mean_count} running means; "
            f"expected them with {_PUT} and {_PUT_REDUCED} only"
        )
    if kind == _KEPT:
        return KeptSum(record, SentAccumulator(own, is_reduced=True))
    if kind == _ASSIGNED:
        return Assigned(record, own)
    if count or kind not in (_PUT_KEPT, _DROPPED):
        raise InvalidConfig(
            f"a change of values is of kind {kind} with {count} blocks; expected kind {_PUT} to "
            f"{_ASSIGNED}, and none with {_PUT_KEPT} and {_DROPPED}"
        )
    return Put(record, None) if kind == _PUT_KEPT else Dropped(record)


# --- log records


def log_record_messages(log_record: LogRecord) -> list[bytes]:
    """A log record as serialized requests, to be sent in this order with nothing between them. Its
    changes are as backups are told them (`ps_server.stores.for_backup`); payloads are copied.
    """
    return [b"".join(pieces) for pieces in at_once(cutting_log_record(log_record))]


def cutting_log_record(log_record: LogRecord) -> Work[list[Pieces]]:
    """As `log_record_messages`, each in pieces: those that are payloads are views of them."""
    head, blocks = _head(log_record)
    parts = []
    for some in pieces_of(blocks):
        parts += [(_beside(block), block.payload) for block in some]
        yield
    rest = wrap(_HEAD, head.SerializeToString())
    messages: list[Pieces] = []
    begin = size = 0
    for end, (beside, payload) in enumerate(parts):
        length = len(beside) + len(payload) + _FRAME_BYTES
        size += length
        if end > begin and size > limits.REPLICATION_MESSAGE_BYTES:
            messages.append(_around(_MORE_FOLLOW, parts[begin:end]))
            begin, size = end, length
            yield
    if begin < len(parts) and size + len(rest) + _FRAME_BYTES > limits.MAX_MESSAGE_BYTES:
        messages.append(_around(_MORE_FOLLOW, parts[begin:]))
        begin = len(parts)
    messages.append(_around(rest, parts[begin:]))
    return messages


_MORE_FOLLOW = replication_pb2.ReplicatedBatch(more_follow=True).SerializeToString()


def _around(rest: bytes, parts: Sequence[tuple[bytes, bytes | memoryview]]) -> Pieces:
    return pieces_of_several(_BATCH, rest, _BLOCKS, parts, _PAYLOAD, _PADDING)


def elements_message(block: Elements) -> bytes:
    """Elements of a snapshot as a serialized request."""
    return join(_ELEMENTS, _beside(block), _PAYLOAD, block.payload, _PADDING)


def _beside(block: Elements) -> bytes:
    message = replication_pb2.BlockElements(block=block.block, presence=block.presence)
    return message.SerializeToString()


def _head(log_record: LogRecord) -> tuple[replication_pb2.BatchHead, list[Elements]]:
    delta, records = log_record.delta, RecordTable()
    blocks: list[Elements] = []
    changes = []
    for change in log_record.changes:
        if not isinstance(change, Mutation):
            raise InvariantViolation("RW-2", f"{type(change).__name__} is no change of values")
        record = change.record
        _check_place(log_record, record)
        message, own = change_to_proto(change, records.index(record))
        changes.append(message)
        blocks += own
    for record in delta.counted:
        _check_place(log_record, record)
    head = replication_pb2.BatchHead(
        range_id=log_record.range_id,
        term=log_record.term,
        assignment_epoch=log_record.assignment_epoch,
        number=log_record.number,
        table_id=log_record.table_id,
        facts=facts_to_proto(delta.facts, records),
        counted=[records.index(record) for record in delta.counted],
        changes=changes,
    )
    if delta.workers:
        head.workers.CopyFrom(workers_to_proto(delta.workers))
    if delta.endings:
        head.endings.CopyFrom(endings_to_proto(delta.endings, named=True))
    head.records.extend(records.messages)
    return head, blocks


def _check_place(log_record: LogRecord, record: Record) -> None:
    if (record.table_id, record.range_id) != (log_record.table_id, log_record.range_id):
        raise InvariantViolation(
            "RW-1",
            f"a log record of table {log_record.table_id}, range {log_record.range_id} has a "
            f"decision of table {record.table_id}, range {record.range_id}",
        )


def log_record_from_proto(head: replication_pb2.BatchHead, blocks: Sequence[Elements]) -> LogRecord:
    range_id, table_id = range_id_from_proto(head.range_id), TableId(head.table_id)
    records = [record_from_proto(each, table_id, range_id) for each in head.records]
    counted = tuple([at(records, index, "a counted decision") for index in head.counted])
    delta = RangeDelta(
        facts_from_proto(head.facts, records),
        workers_from_proto(head.workers) if head.HasField("workers") else (),
        tuple(endings_from_proto(head.endings)) if head.HasField("endings") else (),
        counted,
    )
    rest = iter(blocks)
    changes = []
    for change in head.changes:
        record = at(records, change.record, "a change's decision")
        changes.append(change_from_proto(change, record, rest))
    if next(rest, None) is not None:
        raise InvalidConfig(
            f"a log record has {len(blocks)} blocks; expected as many as its changes"
        )
    return LogRecord(
        range_id,
        AssignmentEpoch(head.term),
        AssignmentEpoch(head.assignment_epoch),
        head.number,
        table_id,
        delta,
        tuple(changes),
    )


def range_id_from_proto(number: int) -> RangeId:
    if number >= limits.SLOT_COUNT:
        raise InvalidConfig(f"range_id is {number}; expected below {limits.SLOT_COUNT}")
    return RangeId(number)


# --- leases and answers


def beat_message(beat: Beat) -> bytes:
    """A beat as a serialized request."""
    message = replication_pb2.Beat(
        sent_s=beat.sent_s,
        range_ids=[range_id for range_id, _ in beat.epochs],
        assignment_epochs=[assignment_epoch for _, assignment_epoch in beat.epochs],
    )
    return replication_pb2.ReplicateRequest(beat=message).SerializeToString()


def beat_from_proto(message: replication_pb2.Beat) -> Beat:
    check_lengths("the ranges of a beat", message.range_ids, message.assignment_epochs)
    ranges = map(range_id_from_proto, message.range_ids)
    epochs = map(AssignmentEpoch, message.assignment_epochs)
    return Beat(message.sent_s, tuple(zip(ranges, epochs, strict=True)))


def answers_message(answers: Iterable[Ack | Grant]) -> bytes:
    """Answers of a backup as a serialized response."""
    response = replication_pb2.ReplicateResponse()
    for answer in answers:
        if isinstance(answer, Ack):
            response.acks.add(
                range_id=answer.range_id,
                number=answer.number,
                assignment_epoch=answer.assignment_epoch,
            )
        else:
            response.grants.add(sent_s=answer.sent_s, range_ids=answer.range_ids)
    return response.SerializeToString()


def greeting_message(session: Session, stream_port: int) -> bytes:
    """The first response of a stream: the listener, and its stream port (0: none)."""
    return replication_pb2.ReplicateResponse(
        stream_port=stream_port, node_id=session.node_id, incarnation=session.incarnation
    ).SerializeToString()


def greeting_from(raw: bytes | memoryview) -> tuple[int, int, int]:
    """The node id and the incarnation that a first response names, and the stream port."""
    response = parsed(replication_pb2.ReplicateResponse, raw)
    return response.node_id, response.incarnation, response.stream_port


def answers_from(raw: bytes | memoryview) -> list[Ack | Grant]:
    response = parsed(replication_pb2.ReplicateResponse, raw)
    acks = [
        Ack(range_id_from_proto(a.range_id), a.number, AssignmentEpoch(a.assignment_epoch))
        for a in response.acks
    ]
    grants = [
        Grant(each.sent_s, tuple(map(range_id_from_proto, each.range_ids)))
        for each in response.grants
    ]
    return [*acks, *grants]


# --- received requests


class Request(NamedTuple):
    """A request: the field that is set, what is in it, and its payloads where they lie."""

    kind: str
    message: Any
    blocks: tuple[Elements, ...]


def request_from(raw: bytes | memoryview, small_bytes: int = SMALL_BYTES) -> Request:
    """A request; one of up to `small_bytes` is parsed whole. Else its blocks are views of `raw`."""
    if len(raw) > small_bytes:
        try:
            found = _split_request(raw)
        except (InvalidTensor, DecodeError):  # unusual or broken: the generated parser knows which
            found = None
        if found is not None:
            return found
    request = parsed(replication_pb2.ReplicateRequest, raw)
    kind = request.WhichOneof("message")
    if kind is None:
        raise InvalidConfig("a message between servers holds nothing that is known")
    message = getattr(request, kind)
    inside = message.blocks if kind == "batch" else [message] if kind == "elements" else ()
    blocks = tuple([Elements(each.block, each.presence, each.payload) for each in inside])
    return Request(kind, message, blocks)


def _split_request(raw: bytes | memoryview) -> Request | None:
    several = split_several(raw, _BATCH, _BLOCKS, _PAYLOAD)
    if several is not None:
        log_record = replication_pb2.ReplicatedBatch.FromString(several[0])
        blocks = tuple([_lying(*part) for part in several[1]])
        return Request("batch", log_record, blocks)
    one = split(raw, _ELEMENTS, _PAYLOAD)
    if one is None:
        return None
    return Request("elements", None, (_lying(*one),))


def _lying(beside: bytes, payload: memoryview) -> Elements:
    message = replication_pb2.BlockElements.FromString(beside)
    return Elements(message.block, message.presence, payload)


def parsed(kind: type[MessageT], raw: bytes | memoryview) -> MessageT:
    """The message that was serialized; InvalidConfig if it is none of that kind."""
    try:
        return kind.FromString(bytes(raw))
    except DecodeError as error:
        problem = f"a message of {len(raw)} bytes is no {kind.__name__}: {error}"
        raise InvalidConfig(problem) from None
