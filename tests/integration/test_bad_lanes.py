"""Clients that lie about shared memory: each gets its error, nothing changes, others train on."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_core import limits
from ps_runtime.system.shared_memory import SharedSegment
from pushpull.v1 import parameters_pb2
from pushpull.v1 import types_pb2 as types
from tests.integration.lane_cluster import until
from tests.integration.no_segments import pipe_end, plain_file
from tests.integration.open_files import open_files
from tests.integration.raw_lane import RawLane, Request, connected, dropped, offer_of, segment
from tests.integration.raw_wire import (
    BLOCK,
    DEADLINE_S,
    RawTable,
    RawWorker,
    Scene,
    Wire,
    check_error,
    payload,
)

pytestmark = pytest.mark.slow

SIZE = 4 * BLOCK
PAGE = 4096

_segment_ids = itertools.count(1)
"""A number is used once in a session, and there is one session for all tests of this file."""


@pytest.fixture
def node_id(wire: Wire) -> int:
    return min(wire.servers)


@pytest.fixture
def lane(wire: Wire, bad: RawWorker, node_id: int) -> Iterator[RawLane]:
    """A connection of the first worker that has not said who it is."""
    with RawLane(offer_of(wire, bad, node_id)) as made:
        yield made


def _held(pid: int) -> list[str]:
    """The files that a server has open and the foreign memory that it has mapped."""
    files = open_files(pid)
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    kinds = ("pipe:", "raw-lane", "pushpull-answers", "/tmp")  # noqa: S108
    found = [name for name in (*files, *maps.splitlines()) if any(kind in name for kind in kinds)]
    return [name for name in found if ".so" not in name]


@pytest.fixture(autouse=True)
def no_leak(scene: Scene) -> Iterator[None]:
    """Whatever a test does, the servers hold no file and no memory of it afterwards."""
    pids = [pid for name, pid in scene.process_ids.items() if name.startswith("server")]
    before = [len(_held(pid)) for pid in pids]
    yield
    until(
        lambda: all(len(_held(p)) <= b for p, b in zip(pids, before, strict=True)),
        "the servers close what a test brought",
    )


def _refused(lane: RawLane, code: str, *words: str) -> None:
    """The server said why, and closed the connection."""
    response = lane.receive()
    assert response.HasField("error"), response
    check_error(response.error, code, *words)
    assert lane.receive() is None


# --- who is calling


def _hello(nonce: bytes) -> bytes:
    return Request(hello=parameters_pb2.LaneHello(nonce=nonce)).SerializeToString()


STRANGERS: dict[str, tuple[bytes, str, str]] = {
    "wrong nonce": (_hello(bytes(16)), "UNAUTHENTICATED", "no session's"),
    "no nonce": (_hello(b""), "UNAUTHENTICATED", "no session's"),
    "endless nonce": (_hello(bytes(20_000)), "INVALID_CONFIG", "is no LaneRequest"),
    "no hello": (segment(1, PAGE).SerializeToString(), "UNAUTHENTICATED", "no session's"),
    "garbage": (b"\xff\xff\xff", "INVALID_CONFIG", "is no LaneRequest"),
    "unknown field": (b"\x50\x01", "UNAUTHENTICATED", "no session's"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger_is_shown_out(lane: RawLane, case: str) -> None:
    message, code, words = STRANGERS[case]
    lane.send(message, 0, 1, 2)  # descriptors that nobody asked for
    _refused(lane, code, words)


def test_strangers_cannot_fill_the_server(wire: Wire, bad: RawWorker, node_id: int) -> None:
    offer = offer_of(wire, bad, node_id)
    crowd = [connected(offer) for _ in range(limits.MAX_LANE_STRANGER_COUNT)]
    try:
        with connected(offer) as one_too_many:
            assert one_too_many.recv(1) == b""
    finally:
        for stranger in crowd:
            stranger.close()

    def is_let_in() -> bool:
        with RawLane(offer) as lane, contextlib.suppress(BrokenPipeError):
            lane.send(_hello(offer.nonce))
            return lane.receive() is not None
        return False

    until(is_let_in, "those who left make room")


def test_a_session_has_one_connection(lane: RawLane, wire: Wire, bad: RawWorker) -> None:
    lane.hello()
    with RawLane(lane.offer) as newer:
        newer.hello()
        assert lane.receive() is None
        newer.share(next(_segment_ids), bytes(PAGE))


# --- what is no segment


def _unsealed() -> int:
    fd = os.memfd_create("raw-lane", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, PAGE)
    return fd


def _good() -> int:
    made = SharedSegment("raw-lane", PAGE)
    fd = os.dup(made.fd)
    made.close()
    return fd


Make = Callable[[], int] | None
BAD_SEGMENTS: dict[str, tuple[Make, int, str, tuple[str, ...]]] = {
    "without a descriptor": (None, PAGE, "INVALID_CONFIG", ("without its file descriptor",)),
    "pipe": (pipe_end, PAGE, "INVALID_CONFIG", ("expected a memfd",)),
    "file": (lambda: plain_file(PAGE), PAGE, "INVALID_CONFIG", ("expected a memfd",)),
    "memfd without seals": (_unsealed, PAGE, "INVALID_CONFIG", ("seals 0x0", "sealed against")),
    "smaller than said": (_good, PAGE + 1, "INVALID_CONFIG", (f"{PAGE} bytes", f"said {PAGE + 1}")),
    "larger than said": (_good, 1, "INVALID_CONFIG", (f"{PAGE} bytes", "said 1")),
    "of no size": (_good, 0, "INVALID_CONFIG", ("said 0",)),
    "larger than may be": (
        _good,
        limits.MAX_LANE_SEGMENT_BYTES + 1,
        "INVALID_CONFIG",
        (f"expected at most {limits.MAX_LANE_SEGMENT_BYTES}",),
    ),
    "of any size": (_good, 2**64 - 1, "INVALID_CONFIG", (f"{2**64 - 1} bytes",)),
}


@pytest.mark.parametrize("case", BAD_SEGMENTS)
def test_what_is_no_segment_ends_the_connection(lane: RawLane, case: str) -> None:
    make, byte_count, code, words = BAD_SEGMENTS[case]
    lane.hello()
    descriptors = [] if make is None else [make()]
    lane.send(segment(next(_segment_ids), byte_count), *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    _refused(lane, code, *words)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (_hello(bytes(16)), "holds no segment; expected one"),
        (b"", ""),
        (b"\xff\xff\xff", "is no LaneRequest"),
        (b"\x50\x01", "holds no segment; expected one"),
    ],
    ids=["hello again", "nothing", "garbage", "unknown field"],
)
def test_after_the_hello_come_segments_alone(lane: RawLane, message: bytes, words: str) -> None:
    lane.hello().send(message)
    if message:
        _refused(lane, "INVALID_CONFIG", words)
    else:
        assert lane.receive() is None, "a message of no bytes is the connection's end"


def _used_again(lane: RawLane, number: int) -> None:
    fd = _good()
    lane.send(segment(number, PAGE), fd)
    os.close(fd)
    _refused(lane, "INVALID_CONFIG", f"number {number}; expected one above {number}")


def test_a_segments_number_is_used_once(lane: RawLane) -> None:
    number = next(_segment_ids)
    lane.hello().share(number, bytes(PAGE))
    _used_again(lane, number)
    with RawLane(lane.offer) as newer:
        _used_again(newer.hello(), number)


def test_a_session_shares_a_few_segments(lane: RawLane) -> None:
    lane.hello()
    for _ in range(limits.MAX_LANE_SEGMENT_COUNT):
        lane.share(next(_segment_ids), bytes(PAGE))
    fd = _good()
    lane.send(segment(next(_segment_ids), PAGE), fd)
    os.close(fd)
    _refused(lane, "OVERLOADED", f"shares {limits.MAX_LANE_SEGMENT_COUNT} segments already")


# --- descriptors of payloads


def _at_home(wire: Wire, bad: RawWorker, table: RawTable) -> RawLane:
    """A connection to the server of the table's block 0."""
    return RawLane(offer_of(wire, bad, table.places[0][2])).hello()


def _described(entry: Any, **fields: int) -> Any:
    entry.ClearField("payload")
    entry.shared_payload.CopyFrom(parameters_pb2.SharedPayload(**fields))
    return entry


def _whole(number: int) -> dict[str, int]:
    return {"segment_id": number, "offset_bytes": 0, "byte_count": SIZE}


Describe = Callable[[int], dict[str, int]]
BAD_PAYLOADS: dict[str, tuple[Describe, tuple[str, ...]]] = {
    "unknown segment": (
        lambda number: _whole(number + 1_000_000),
        ("which is not shared; this session shares",),
    ),
    "segment 2**32 - 1": (lambda _: _whole(2**32 - 1), (f"segment {2**32 - 1}, which is not",)),
    "behind the end": (
        lambda number: {**_whole(number), "offset_bytes": PAGE},
        (f"bytes [{PAGE}, {PAGE + SIZE})", f"at most {PAGE}"),
    ),
    "over the end": (
        lambda number: {**_whole(number), "offset_bytes": PAGE - SIZE + 16},
        (f"end of at most {PAGE}",),
    ),
    "over the end of all numbers": (
        lambda number: {**_whole(number), "offset_bytes": 2**64 - 16, "byte_count": SIZE},
        (f"bytes [{2**64 - 16}, {2**64 - 16 + SIZE})",),
    ),
    "of all sizes": (
        lambda number: {**_whole(number), "byte_count": 2**64 - 1},
        (f"bytes [0, {2**64 - 1})",),
    ),
    "not aligned": (
        lambda number: {**_whole(number), "offset_bytes": 8},
        ("a beginning at a multiple of 16",),
    ),
    "too short": (
        lambda number: {**_whole(number), "byte_count": SIZE - 4},
        (f"{SIZE - 4} bytes; expected {SIZE}",),
    ),
    "inside an element": (
        lambda number: {**_whole(number), "byte_count": SIZE - 1},
        (f"{SIZE - 1} bytes; expected {SIZE}",),
    ),
    "too long": (
        lambda number: {**_whole(number), "byte_count": PAGE},
        (f"{PAGE} bytes; expected {SIZE}",),
    ),
    "empty": (lambda number: {**_whole(number), "byte_count": 0}, (f"0 bytes; expected {SIZE}",)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BAD_PAYLOADS)
def test_a_payload_that_is_not_where_it_is_said_to_be(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    describe, words = BAD_PAYLOADS[case]
    number = next(_segment_ids)
    entry = bad.block(table)
    bad.take_sequence(table)
    with _at_home(wire, bad, table) as lane:
        lane.share(number, payload(7.0, PAGE // 4))
        message = parameters_pb2.PushRequest(block=_described(entry, **describe(number)))
        (reply,) = wire.send(bad, table.places[0][2], message)
    assert reply.outcome == parameters_pb2.OUTCOME_INVALID
    check_error(reply.error, "INVALID_TENSOR", *words)
    bad.replaces[table.table_id, table.places[0][0]] = entry.sequence


def test_a_payload_is_in_one_place(wire: Wire, bad: RawWorker, table: RawTable) -> None:
    number = next(_segment_ids)
    entry = bad.block(table)
    bad.take_sequence(table)
    with _at_home(wire, bad, table) as lane:
        lane.share(number, payload(7.0, PAGE // 4))
        entry.shared_payload.CopyFrom(parameters_pb2.SharedPayload(**_whole(number)))
        for message in (
            parameters_pb2.PushRequest(block=entry),
            parameters_pb2.PushRequest(batch=parameters_pb2.BlockBatch(blocks=[entry])),
        ):
            (reply,) = wire.send(bad, table.places[0][2], message)
            assert reply.outcome == parameters_pb2.OUTCOME_INVALID
            check_error(reply.error, "INVALID_TENSOR", f"payload of {SIZE} bytes and a shared")
    bad.replaces[table.table_id, table.places[0][0]] = entry.sequence


def test_shared_values_are_checked_as_others_are(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    number = next(_segment_ids)
    entry = bad.block(table)
    bad.take_sequence(table)
    with _at_home(wire, bad, table) as lane:
        lane.share(number, payload(1.0, BLOCK - 1) + struct.pack("<f", float("nan")))
        message = parameters_pb2.PushRequest(block=_described(entry, **_whole(number)))
        (reply,) = wire.send(bad, table.places[0][2], message)
    check_error(reply.error, "INVALID_TENSOR", "non-finite gradient in tensor")
    bad.replaces[table.table_id, table.places[0][0]] = entry.sequence


def test_a_segment_that_is_not_shared_cannot_be_dropped(lane: RawLane) -> None:
    lane.hello().send(dropped(1_000_000))
    _refused(lane, "INVALID_CONFIG", "segment 1000000 is dropped, which is not shared")


def _is_lost(wire: Wire, bad: RawWorker, table: RawTable, number: int, words: str) -> None:
    """The push ends in nothing: its number is still free for the bytes, which come in step 2."""
    entry = _described(bad.block(table), **_whole(number))
    (reply,) = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(block=entry))
    assert reply.kind == parameters_pb2.REPLY_KIND_ERROR
    check_error(reply.error, "RECOVERING", words, "send the payload itself")


def test_without_a_connection_the_bytes_are_asked_for(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    _is_lost(wire, bad, table, 1, "without a connection on the server's Unix socket")


def test_what_an_ended_connection_shared_is_asked_for_as_bytes(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    """A stream that broke may still be read when its client has come back with new memory."""
    number = next(_segment_ids)
    with _at_home(wire, bad, table) as lane:
        lane.share(number, payload(7.0, PAGE // 4))
        with _at_home(wire, bad, table) as newer:
            _is_lost(wire, bad, table, number, f"segment {number}, which is shared no more")
            newer.share(next(_segment_ids), bytes(PAGE))
            _is_lost(wire, bad, table, number, f"segment {number}, which is shared no more")


def test_what_its_owner_dropped_is_asked_for_as_bytes(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    number = next(_segment_ids)
    with _at_home(wire, bad, table) as lane:
        lane.share(number, payload(7.0, PAGE // 4))
        lane.send(dropped(number))
        lane.share(next(_segment_ids), bytes(PAGE))  # its answer comes after the other was dropped
        _is_lost(wire, bad, table, number, f"segment {number}, which is shared no more")


@pytest.mark.parametrize("count", [0, limits.MAX_BATCH_COUNT + 1])
def test_a_batch_has_its_limits(wire: Wire, bad: RawWorker, table: RawTable, count: int) -> None:
    batch = parameters_pb2.BlockBatch(blocks=[bad.block(table)] * count)
    with pytest.raises(Exception, match=f"a batch has {count} blocks; expected 1 to 64"):
        wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(batch=batch))


# --- memory that changes, and memory that is lent


def test_a_step_from_shared_memory_is_a_step(wire: Wire) -> None:
    """Blocks of one batch, one as bytes and the others where they lie; then read there again."""
    made = wire.create("shared step", blocks=3, consistency=types.Consistency(asp={}))
    bad = wire.workers[0]
    for node_id in made.servers:
        with RawLane(offer_of(wire, bad, node_id)).hello() as lane:
            number = next(_segment_ids)
            blocks = made.blocks_at(node_id)
            lane.share(number, b"".join(payload(float(block + 1)) for block in blocks))
            entries = []
            for place, block in enumerate(blocks):
                entry = bad.block(made, block, float(block + 1))
                bad.take_sequence(made, block)
                where = {"segment_id": number, "offset_bytes": place * SIZE, "byte_count": SIZE}
                entries.append(_described(entry, **where) if place else entry)
            seal = bad.seal(made, blocks)
            batch = parameters_pb2.BlockBatch(blocks=entries)
            request = parameters_pb2.PushRequest
            replies = wire.send(bad, node_id, request(batch=batch), request(seal=seal))
            outcomes = {r.outcome for r in replies if r.kind == parameters_pb2.REPLY_KIND_COMMITTED}
            assert outcomes == {parameters_pb2.OUTCOME_APPLIED}
            read = wire.pull_request(made, blocks, shared=True, session=bad.session)
            parts = wire.pull(node_id, read)
            lent = [value for part in parts for value in part.shared.values]
            assert [value.block for value in lent] == blocks
            assert lane.receive().HasField("segment")
            for value in lent:
                memory = lane.lent[value.segment_id]
                begin, end = value.offset_bytes, value.offset_bytes + value.byte_count
                assert memory[begin:end].tobytes() == payload(-0.5 * (value.block + 1))
                at = value.stamp_offset_bytes
                assert struct.unpack("<Q", memory[at : at + 8].tobytes()) == (value.stamp,)
                assert value.version == 1


def test_values_are_lent_to_those_on_the_socket_alone(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    read = wire.pull_request(table, [0], shared=True, session=bad.session, clock=1)
    (part,) = wire.pull(table.places[0][2], read)
    assert part.block.payload == payload(-0.75)


@pytest.mark.thorough
def test_rows_are_lent_until_the_memory_for_answers_comes_round(wire: Wire, bad: RawWorker) -> None:
    """A reader that is too late finds another stamp, and never another's rows under its own."""
    length = 1024
    made = wire.create(
        "lent rows",
        blocks=1,
        element_count=length,
        block_elements=length,
        rows=types.RowsSpec(partition_count=1, seed=7),
        initializer=types.Initializer(uniform=types.UniformInitializer(scale=1.0)),
        consistency=types.Consistency(asp={}),
    )
    node_id = made.places[0][2]
    most = limits.MAX_PULLED_ROW_BYTES // (4 * length)
    request = wire.pull_request(made, [0], session=bad.session)
    request.ranges[0].blocks.append(0)

    def rows(first: int, *, shared: bool) -> parameters_pb2.PullResponse:
        request.shared = shared
        request.ranges[0].ids[:] = [np.arange(first, first + most, dtype="<u8").tobytes()]
        (part,) = wire.pull(node_id, request)
        return part

    with RawLane(offer_of(wire, bad, node_id)).hello() as lane:
        until(lambda: rows(0, shared=True).HasField("shared"), "its memory is reserved")
        segment_id = lane.receive().segment.segment_id
        memory = lane.lent[segment_id]
        told = []
        for number in range(2 * limits.LANE_ANSWER_BYTES // limits.MAX_PULLED_ROW_BYTES):
            (value,) = rows(number * most, shared=True).shared.values
            assert (value.block, value.segment_id) == (0, segment_id)
            assert value.byte_count == limits.MAX_PULLED_ROW_BYTES
            told.append(value)
        standing = []
        for number, value in enumerate(told):
            at, begin = value.stamp_offset_bytes, value.offset_bytes
            if struct.unpack("<Q", memory[at : at + 8].tobytes()) == (value.stamp,):
                standing.append(number)
                found = memory[begin : begin + value.byte_count].tobytes()
                assert found == rows(number * most, shared=False).block.payload
        assert standing == list(range(8, 16))


@pytest.mark.thorough
def test_memory_that_changes_meanwhile_brings_no_nan_into_a_table(wire: Wire) -> None:
    """The server keeps a copy, and it is the copy that it has checked."""
    elements = 65_536
    asp = types.Consistency(asp={})
    # Four blocks, so that neither server has much more than the other; block 0 alone is pushed.
    spec = {"element_count": 4 * elements, "block_elements": elements, "consistency": asp}
    made = wire.create("changing memory", **spec)
    bad, node_id = wire.workers[0], made.places[0][2]
    stop = threading.Event()
    with RawLane(offer_of(wire, bad, node_id)).hello() as lane:
        number = next(_segment_ids)
        values = lane.share(number, payload(1.0, elements)).array.view(np.float32)

        ones, poisoned = np.ones(elements, np.float32), np.ones(elements, np.float32)
        poisoned[-1] = np.nan

        def change() -> None:
            while not stop.is_set():
                np.copyto(values, poisoned)
                np.copyto(values, ones)

        changer = threading.Thread(target=change)
        changer.start()
        try:
            outcomes = list(_pushed(wire, bad, made, number, 200))
        finally:
            stop.set()
            changer.join()
    assert set(outcomes) == {parameters_pb2.OUTCOME_APPLIED, parameters_pb2.OUTCOME_INVALID}
    read = wire.pull_request(made, [0])
    (part,) = wire.pull(node_id, read)
    found = np.frombuffer(part.block.payload, np.float32)
    assert np.all(found == -0.5 * outcomes.count(parameters_pb2.OUTCOME_APPLIED))


def _pushed(wire: Wire, bad: RawWorker, made: RawTable, number: int, count: int) -> Iterator[int]:
    """Steps of one message, one after the other, all from the same memory; what became of each."""
    node_id = made.places[0][2]
    for clock in range(1, count + 1):
        bad.clocks[made.table_id] = clock - 1
        entry = _described(
            bad.block(made), segment_id=number, offset_bytes=0, byte_count=4 * 65_536
        )
        bad.take_sequence(made)
        entry.seal.CopyFrom(bad.seal(made))
        bad.take_sequence(made)
        replies = wire.send(bad, node_id, parameters_pb2.PushRequest(block=entry))
        for reply in replies:
            if reply.sequence == entry.sequence and reply.outcome:
                yield reply.outcome


# --- last, since it waits for what began with the first test


@pytest.mark.thorough
def test_a_stranger_that_says_nothing_is_shown_out(scene: Scene) -> None:
    scene.stranger.settimeout(limits.STREAM_HEADER_DEADLINE_S + DEADLINE_S)
    assert scene.stranger.recv(1) == b""
