"""What servers say to each other: the same at both ends, and nothing breaks whoever reads it."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core import limits
from ps_core.envelope import ALIGNMENT_BYTES
from ps_core.errors import InvalidConfig, InvalidKeys, InvariantViolation, PushpullError
from ps_core.keys import Incarnation, RangeId
from ps_core.ledger import Ending, Ledger, Outcome
from ps_core.tables.table import Table
from ps_server.ranges.range_copy import RangeDelta, ShardCopy, WorkerCopy, WorkerFacts, fresh_copy
from ps_server.replication.messages import Beat, LogRecord, RangeCopy, Snapshot
from ps_server.values.mutations import Elements, KeptSum, Put, SentAccumulator
from ps_server.values.store_copy import BlockCopy, StoreCopy
from ps_server.values.update_arithmetic import Accumulator
from ps_server.wire.replication_reader import Came, ReplicationReader
from ps_server.wire.replication_wire import (
    SMALL_BYTES,
    answers_from,
    answers_message,
    beat_message,
    log_record_messages,
)
from ps_server.wire.snapshot_wire import snapshot_messages
from pushpull.v1 import replication_pb2, types_pb2
from pushpull.v1.replication_pb2 import ReplicateRequest
from tests.examples import examples
from tests.property.replicated_values import (
    ANSWERS,
    BEATS,
    log_records,
    plain,
    range_copies,
)
from tests.property.shard_twin import table
from tests.property.store_pair import EPOCH, RANGE, TABLE, record_of

SESSION = types_pb2.SessionIdentity(cluster_id="c", node_id=3)
HEADER = ReplicateRequest(
    header=replication_pb2.ReplicateHeader(session=SESSION, receiver_node_id=4)
).SerializeToString()
MODEL: Table = table([64] * 8)


def reader(small_bytes: int = SMALL_BYTES) -> ReplicationReader:
    found = ReplicationReader(small_bytes)
    header = found.read(HEADER)
    assert isinstance(header, replication_pb2.ReplicateHeader)
    assert (header.session, header.receiver_node_id) == (SESSION, 4)
    return found


def read_all(messages: Iterable[bytes], small_bytes: int = SMALL_BYTES) -> Came:
    """What the messages are together, and nothing before they are all there."""
    *first, last = messages
    at = reader(small_bytes)
    assert [at.read(message) for message in first] == [None] * len(first)
    found = at.read(last)
    assert found is not None
    return found


@pytest.mark.thorough
@settings(max_examples=examples(300), deadline=None)
@given(log_records(), st.sampled_from([0, SMALL_BYTES]))
def test_a_log_record_is_the_same_at_the_other_end(log_record: LogRecord, small_bytes: int) -> None:
    found = read_all(log_record_messages(log_record), small_bytes)
    assert plain(found) == plain(log_record)


@pytest.mark.thorough
@settings(max_examples=examples(200), deadline=None)
@given(range_copies(), st.sampled_from([0, SMALL_BYTES]))
def test_a_snapshot_is_the_same_at_the_other_end(copy: RangeCopy, small_bytes: int) -> None:
    found = read_all(snapshot_messages(copy), small_bytes)
    assert isinstance(found, RangeCopy)
    assert plain(found) == plain(copy)


@given(BEATS, st.lists(ANSWERS, max_size=4))
def test_leases_and_answers_are_the_same_at_the_other_end(beat: Beat, answers: list[Any]) -> None:
    assert reader().read(beat_message(beat)) == beat
    found = answers_from(answers_message(answers))
    assert sorted(map(repr, found)) == sorted(map(repr, answers))


def log_record_of(*changes: object) -> LogRecord:
    facts = fresh_copy(MODEL, range(8)).facts
    return LogRecord(RANGE, EPOCH, EPOCH, 5, TABLE, RangeDelta(facts, (), (), ()), changes)


def test_every_double_arrives_as_it_is() -> None:
    strange = struct.unpack("<d", bytes.fromhex("0100000000f0ff7f"))[0]
    numbers = (math.nan, strange, -0.0, 5e-324, math.inf)
    ending = Ending(Outcome.APPLIED, squares=numbers)
    log_record = log_record_of()
    delta = log_record.delta._replace(endings=((Incarnation(1), 1, ending),))
    found = read_all(log_record_messages(log_record._replace(delta=delta)))
    assert isinstance(found, LogRecord)
    came = found.delta.endings[0][2].squares
    assert struct.pack("<5d", *came) == struct.pack("<5d", *numbers)


def test_a_payload_is_read_where_it_lies() -> None:
    """Aligned, so that sums are made there."""
    payload = np.arange(1 << 17, dtype=np.float32)
    blocks = tuple(
        Elements(block, b"\1" * block, payload.data.cast("B")[: 300_000 + 4 * block])
        for block in range(3)
    )
    log_record = log_record_of(Put(record_of(1, range(3), 1), SentAccumulator(blocks)))
    (message,) = log_record_messages(log_record)
    whole = np.frombuffer(message, np.uint8)
    found = read_all([message])
    assert isinstance(found, LogRecord)
    (put,) = found.changes
    assert isinstance(put, Put)
    for came, sent in zip(put.accumulator.blocks, blocks, strict=True):
        assert came.payload == sent.payload
        address = np.frombuffer(came.payload, np.uint8).ctypes.data
        assert 0 < address - whole.ctypes.data < whole.nbytes
        assert address % ALIGNMENT_BYTES == whole.ctypes.data % ALIGNMENT_BYTES


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1 << 20] * 3, [1, 1, 1]),
        ([1 << 18] * 5, [4, 1]),
        ([1 << 22, 64], [1, 1]),
        ([64, 1 << 22], [1, 1]),
        ([1 << 20], [1]),
    ],
)
def test_a_record_that_is_too_long_comes_in_several_messages(
    lengths: list[int], counts: list[int]
) -> None:
    blocks = tuple(Elements(n, b"", bytes([n]) * length) for n, length in enumerate(lengths))
    log_record = log_record_of(Put(record_of(1, range(8), 1), SentAccumulator(blocks)))
    messages = log_record_messages(log_record)
    parsed = [ReplicateRequest.FromString(message).batch for message in messages]
    assert [len(each.blocks) for each in parsed] == counts
    assert all(len(message) <= limits.MAX_MESSAGE_BYTES for message in messages)
    assert plain(read_all(messages)) == plain(log_record)


def test_a_head_that_fills_a_message_goes_alone() -> None:
    """The largest block, and a decision with very many entries."""
    record = record_of(1, range(8), 1)
    crowd = tuple(
        replace_sequences(record.contributors[0], range(rank, rank + 20_000)) for rank in range(20)
    )
    blocks = (Elements(0, b"", bytes(1 << 22)),)
    log_record = log_record_of(Put(record._replace(contributors=crowd), SentAccumulator(blocks)))
    messages = log_record_messages(log_record)
    assert [len(m) <= limits.MAX_MESSAGE_BYTES for m in messages] == [True, True]
    assert plain(read_all(messages)) == plain(log_record)


def replace_sequences(contributor: Any, sequences: Iterable[int]) -> Any:
    return contributor._replace(sequences=tuple(sequences))


def test_a_long_ledger_comes_in_several_messages() -> None:
    ledger = Ledger()
    error = InvalidKeys("x" * 1000)
    for sequence in range(1, 20_001):
        is_wrong = sequence % 4 == 0
        ledger.end(sequence, Ending(Outcome.INVALID, error if is_wrong else None))
    worker = WorkerFacts(Incarnation(7), 0, 1, 1, None, 0, 0)
    part = ShardCopy(fresh_copy(MODEL, range(8)).facts, {}, {
        worker.incarnation: WorkerCopy(worker, ledger, {3: 4}),
    })  # fmt: skip
    copy = RangeCopy(Snapshot(RANGE, EPOCH, EPOCH, 1, {TABLE: part}), {TABLE: StoreCopy((), ())})
    messages = list(snapshot_messages(copy))
    assert len(messages) > 5
    assert max(map(len, messages)) <= limits.MAX_MESSAGE_BYTES
    assert plain(read_all(messages)) == plain(copy)


def test_the_largest_block_is_copied_tensor_by_tensor() -> None:
    payload = bytes(limits.MAX_BLOCK_ELEMENTS * 8)
    slots = (("exp_avg", payload), ("exp_avg_sq", payload))
    block = BlockCopy(0, 1, (5,), payload, slots)
    part = fresh_copy(MODEL, range(1))
    copy = RangeCopy(
        Snapshot(RANGE, EPOCH, EPOCH, 1, {TABLE: part}), {TABLE: StoreCopy((block,), ())}
    )
    messages = list(snapshot_messages(copy))
    assert max(map(len, messages)) <= limits.MAX_MESSAGE_BYTES
    assert plain(read_all(messages)) == plain(copy)


@pytest.mark.thorough
@settings(max_examples=examples(50), deadline=None)
@given(range_copies(), st.lists(log_records(), min_size=1, max_size=3), BEATS)
def test_a_snapshot_lets_others_go_in_between(
    copy: RangeCopy, others: list[LogRecord], beat: Beat
) -> None:
    at, found = reader(), []
    for number, message in enumerate(snapshot_messages(copy)):
        for came in map(at.read, log_record_messages(others[number % len(others)])):
            assert plain(came) == plain(others[number % len(others)])
        assert at.read(beat_message(beat)) == beat
        found.append(at.read(message))
    assert plain(found[-1]) == plain(copy)


def test_a_snapshot_that_is_given_up_ends_with_the_next() -> None:
    part = fresh_copy(MODEL, range(1))
    snapshot = Snapshot(RANGE, EPOCH, EPOCH, 1, {TABLE: part})
    first = RangeCopy(snapshot, {TABLE: StoreCopy((), ())})
    second = RangeCopy(snapshot._replace(range_id=RangeId(9), copies={}), {})
    at = reader()
    for message in list(snapshot_messages(first))[:-1]:
        assert at.read(message) is None
    found = [at.read(message) for message in snapshot_messages(second)]
    assert plain(found[-1]) == plain(second)


# --- what is not right


def test_what_is_not_what_goes_over_the_wire_is_a_bug() -> None:
    record = record_of(1, range(1), 1)
    for change in (Put(record, Accumulator()), KeptSum(record, None), "nothing"):
        with pytest.raises(InvariantViolation, match="RW-2"):
            log_record_messages(log_record_of(change))
    with pytest.raises(InvariantViolation, match="RW-1"):
        log_record_messages(log_record_of(Put(record._replace(range_id=RangeId(9)), None)))


def request(**fields: Any) -> bytes:
    return ReplicateRequest(**fields).SerializeToString()


def broken_head(**fields: Any) -> bytes:
    (message,) = log_record_messages(log_record_of())
    found = ReplicateRequest.FromString(message)
    found.batch.head.MergeFrom(replication_pb2.BatchHead(**fields))
    return found.SerializeToString()


ENDED = replication_pb2.EndedEntries
WORKERS = replication_pb2.WorkersFacts
CHANGE = replication_pb2.ValueChange
PUT = replication_pb2.VALUE_CHANGE_KIND_PUT
DETAIL = replication_pb2.EndingDetail
FACTS = replication_pb2.PartFacts
ERROR = types_pb2.Error(code=types_pb2.ERROR_CODE_RECOVERING)
SNAPSHOT = request(snapshot=replication_pb2.RangeSnapshot(range_id=3))
NO_SETTING = request(snapshot_table=replication_pb2.SnapshotTable(table_id=1))

BAD = [
    pytest.param(request(), "holds nothing", id="nothing"),
    pytest.param(b"\xff\xff", "is no ReplicateRequest", id="no-protobuf"),
    pytest.param(b"\xff" * (SMALL_BYTES + 1), "is no ReplicateRequest", id="large-no-protobuf"),
    pytest.param(HEADER, "only there", id="second-header"),
    pytest.param(request(batch=replication_pb2.ReplicatedBatch()), "no head", id="no-head"),
    pytest.param(
        request(batch=replication_pb2.ReplicatedBatch(head=replication_pb2.BatchHead())),
        "no setting",
        id="no-setting",
    ),
    pytest.param(broken_head(range_id=65_536), "range_id is 65536", id="range"),
    pytest.param(broken_head(counted=[0]), "a counted decision is number 0", id="counted"),
    pytest.param(broken_head(facts=FACTS(unscaled=1)), "without a scale", id="unscaled"),
    pytest.param(broken_head(facts=FACTS(failure=ERROR)), "failed with RECOVERING", id="failure"),
    pytest.param(broken_head(changes=[CHANGE(kind=PUT)]), "a change's decision", id="record"),
    pytest.param(
        broken_head(changes=[CHANGE()], records=[{}]), "of kind 0 with 0 blocks", id="change"
    ),
    pytest.param(
        broken_head(changes=[CHANGE(kind=PUT, block_count=2)], records=[{}]),
        "has 0 blocks; expected 2",
        id="blocks",
    ),
    pytest.param(broken_head(endings=ENDED(sequences=[1])), "lists of 0, 1, 0", id="endings"),
    pytest.param(
        broken_head(endings=ENDED(incarnations=[1], sequences=[1], outcomes=[0])),  # type: ignore[list-item]
        "outcome is 0",
        id="outcome",
    ),
    pytest.param(
        broken_head(endings=ENDED(stalenesses=[1])), "lists of 0, 1;", id="stalenesses"
    ),
    pytest.param(
        broken_head(endings=ENDED(details=[DETAIL(index=0)])), "with details", id="details"
    ),
    pytest.param(broken_head(workers=WORKERS(incarnations=[1])), "facts of workers", id="workers"),
    pytest.param(broken_head(workers=WORKERS(left=[0])), "lists of 1, 0", id="left"),
    pytest.param(
        broken_head(workers=WORKERS(left=[0], left_clocks=[1])), "a worker that left", id="who-left"
    ),
    pytest.param(
        request(beat=replication_pb2.Beat(range_ids=[1])), "ranges of a beat", id="beat"
    ),
    pytest.param(request(snapshot_end={}), "without a snapshot", id="end"),
    pytest.param(request(elements={}), "without a snapshot", id="elements"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "text"), BAD)
def test_a_message_that_is_not_right_is_refused(message: bytes, text: str) -> None:
    with pytest.raises(InvalidConfig, match=text):
        reader().read(message)


def test_a_stream_begins_with_its_header() -> None:
    with pytest.raises(InvalidConfig, match="the header in its first"):
        ReplicationReader().read(beat_message(Beat(0.0, ())))


def table_message(**fields: Any) -> bytes:
    setting = replication_pb2.SettingFrom(consistency=types_pb2.Consistency(bsp={}))
    facts = FACTS(settings=[setting])
    return request(snapshot_table={"table_id": 1, "facts": facts, **fields})


ONE_WORKER = WORKERS(
    incarnations=[7], ranks=[0], sealed_clocks=[0], done_clocks=[0], confirmed_sequences=[0]
)
LEDGER = {"table_id": 1, "incarnation": 7}
BAD_SNAPSHOTS = [
    pytest.param([NO_SETTING], "no setting", id="facts"),
    pytest.param([table_message(blocks=[1])], "versions of blocks", id="versions"),
    pytest.param([table_message()] * 2, "table 1 twice", id="twice"),
    pytest.param([request(snapshot_block={"table_id": 2})], "of table 2 before", id="no-table"),
    pytest.param([request(snapshot_change={"table_id": 2})], "of table 2", id="change-of-none"),
    pytest.param([request(elements={"block": 4})], "block 4 come after nothing", id="elements"),
    pytest.param(
        [table_message(), request(snapshot_block={"table_id": 1}), request(snapshot_end={})],
        "goes on with snapshot_end; expected 1 elements",
        id="no-elements",
    ),
    pytest.param(
        [table_message(), request(snapshot_change={"table_id": 1})], "kind 0", id="change"
    ),
    pytest.param([request(snapshot_end={"range_id": 4})], "range 3 ends as 4", id="end"),
    pytest.param(
        [table_message(), request(snapshot_ledger=LEDGER)], "a ledger of worker 7", id="nobody"
    ),
    pytest.param(
        [table_message(workers=ONE_WORKER), request(snapshot_end={"range_id": 3})],
        "no ledger of worker 7",
        id="no-ledger",
    ),
    pytest.param(
        [
            table_message(workers=ONE_WORKER),
            request(snapshot_ledger={**LEDGER, "low_water": 2**60}),
            request(snapshot_end={"range_id": 3}),
        ],
        "a ledger has ended up to",
        id="ledger",
    ),
    pytest.param(
        [table_message(workers=ONE_WORKER), request(snapshot_ledger={**LEDGER, "own_blocks": [1]})],
        "updates of a worker",
        id="own-updates",
    ),
]


@pytest.mark.parametrize(("messages", "text"), BAD_SNAPSHOTS)
def test_a_snapshot_that_is_not_right_is_refused(messages: list[bytes], text: str) -> None:
    at = reader()
    at.read(SNAPSHOT)
    *before, last = messages
    for message in before:
        at.read(message)
    with pytest.raises(InvalidConfig, match=text):
        at.read(last)


@pytest.mark.thorough
@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_no_byte_breaks_a_reader(data: st.DataObject) -> None:
    """Whatever comes is read, or refused with an error of the catalogue."""
    drawn: list[st.SearchStrategy[list[bytes]]] = [
        log_records().map(log_record_messages),
        range_copies().map(lambda copy: list(snapshot_messages(copy))),
    ]
    messages = data.draw(st.one_of(*drawn))
    at = reader(data.draw(st.sampled_from([0, SMALL_BYTES])))
    spoiled = data.draw(st.integers(0, len(messages) - 1))
    for number, message in enumerate(messages):
        if number == spoiled:
            message = data.draw(broken(message))
        with contextlib.suppress(PushpullError):
            at.read(message)


@st.composite
def broken(draw: st.DrawFn, message: bytes) -> bytes:
    at = draw(st.integers(0, len(message) - 1))
    if draw(st.booleans()):
        return message[:at]
    return message[:at] + draw(st.binary(min_size=1, max_size=2)) + message[at + 1 :]


@given(st.binary(max_size=50))
def test_answers_that_are_none_are_refused(raw: bytes) -> None:
    with contextlib.suppress(PushpullError):
        answers_from(raw)


def test_an_ending_is_what_a_ledger_keeps() -> None:
    """The plain ones are shared; one with more to tell is its own."""
    endings = (
        (Incarnation(1), 1, Ending(Outcome.APPLIED)),
        (Incarnation(1), 2, Ending(Outcome.APPLIED, staleness=3)),
        (Incarnation(1), 3, Ending(Outcome.REJECTED, staleness=4, squares=(1.0,))),
    )
    log_record = log_record_of()
    found = read_all(
        log_record_messages(log_record._replace(delta=log_record.delta._replace(endings=endings)))
    )
    assert isinstance(found, LogRecord)
    assert found.delta.endings == endings
    assert replace(endings[0][2]) == Ending(Outcome.APPLIED)
