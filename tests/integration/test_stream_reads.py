"""PushPull streams: many reads at once, none in the way of an entry, and no answer kept back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

from ps_core import limits
from pushpull.v1 import parameters_pb2
from pushpull.v1 import types_pb2 as types
from tests.integration.lane_cluster import until
from tests.integration.raw_wire import DEADLINE_S, RawTable, RawWorker, Wire, check_error, payload

Request = parameters_pb2.PushPullRequest


def _step(worker: RawWorker, table: RawTable, value: float) -> list[Any]:
    """The header and the coming step of a table of one block, for a PushPull stream."""
    (node_id,) = table.servers
    made = worker.messages(table, node_id, value)
    return [Request.FromString(message.SerializeToString()) for message in made]


def _answers(wire: Wire, table: RawTable, messages: list[Any]) -> list[Any]:
    (node_id,) = table.servers
    return list(wire.servers[node_id].PushPull(iter(messages), timeout=DEADLINE_S))


def test_reads_that_wait_hold_up_no_entry(wire: Wire, bad: RawWorker) -> None:
    """More reads wait for a step than a stream may have, and the step comes behind them."""
    table = wire.create("many reads", blocks=1)
    other = wire.workers[1]
    sealed = wire.servers[table.servers[0]].Push(
        iter(other.messages(table, table.servers[0], 2.0)), timeout=DEADLINE_S
    )
    header, *entries = _step(bad, table, 1.0)
    too_many = limits.MAX_STREAM_READ_COUNT + 5
    reads = [
        Request(pull=wire.pull_request(table, [0], clock=1, read_number=number))
        for number in range(1, too_many + 1)
    ]
    for read in reads:
        read.pull.session.Clear()
    parts = _answers(wire, table, [header, *reads, *entries])
    ended = {part.read_number: part.pull for part in parts if part.is_last}
    assert sorted(ended) == list(range(1, too_many + 1))
    refused = [number for number, pull in ended.items() if pull.HasField("error")]
    assert refused == list(range(limits.MAX_STREAM_READ_COUNT + 1, too_many + 1))
    for number in refused:
        error = ended.pop(number).error.error
        check_error(error, "OVERLOADED", "256 pulls wait on this stream")
        assert error.retry_after_ms > 0
    assert {pull.block.payload for pull in ended.values()} == {payload(-0.75)}
    assert [reply.outcome for answer in sealed for reply in answer.replies][-1] == (
        parameters_pb2.OUTCOME_APPLIED
    )


def test_reads_without_a_number_are_answered_in_turn(wire: Wire, bad: RawWorker) -> None:
    table = wire.create("reads in turn", blocks=1, consistency=types.Consistency(asp={}))
    header, *entries = _step(bad, table, 1.0)
    read = Request(pull=wire.pull_request(table, [0]))
    numbered = Request(pull=wire.pull_request(table, [0], read_number=7))
    with_read = Request()
    with_read.CopyFrom(entries[-1])
    with_read.then_pull.CopyFrom(read.pull)
    messages = [header, read, numbered, *entries[:-1], with_read, read]
    parts = _answers(wire, table, messages)
    kinds = [part.WhichOneof("part") for part in parts if not part.read_number]
    assert [kind for kind in kinds if kind != "replies"] == ["pull", "end"] * 3
    (alone,) = [part for part in parts if part.read_number]
    assert alone.is_last
    assert alone.pull.HasField("block")
    read_values = [part.pull.block.payload for part in parts if part.HasField("pull")]
    assert read_values[-1] == payload(-0.5)


def test_long_answers_come_whole(wire: Wire, bad: RawWorker) -> None:
    """They are there at once, but do not leave at once."""
    count = 2 * limits.STREAM_READ_BYTES // 4
    table = wire.create("long answers", element_count=count, block_elements=count)
    header, *_ = _step(bad, table, 1.0)
    read_count = 20
    reads = [
        Request(pull=wire.pull_request(table, [0], read_number=number))
        for number in range(1, read_count + 1)
    ]
    parts = _answers(wire, table, [header, *reads])
    assert all(part.is_last for part in parts)
    assert sorted(part.read_number for part in parts) == list(range(1, read_count + 1))
    assert {len(part.pull.block.payload) for part in parts} == {4 * count}


def test_answers_do_not_wait_for_what_never_follows(wire: Wire, bad: RawWorker) -> None:
    """A sender says that more follows, and waits for its answers instead."""
    table = wire.create("more to follow", blocks=1)
    header, *entries = _step(bad, table, 1.0)
    for entry in entries[:-1]:
        entry.block.more_follow = True
    gave_first: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def messages() -> Iterator[Any]:
        yield header
        yield from entries[:-1]
        gave_first.get(timeout=DEADLINE_S)
        yield entries[-1]
        gave_first.get(timeout=DEADLINE_S)

    (node_id,) = table.servers
    answers = wire.servers[node_id].PushPull(messages(), timeout=DEADLINE_S)
    (received,) = next(answers).replies.replies
    assert received.kind == parameters_pb2.REPLY_KIND_RECEIVED
    gave_first.put(True)
    (sealed,) = next(answers).replies.replies
    assert sealed.sequence == entries[-1].seal.ranges[0].sequence
    other = wire.workers[1]
    wire.send(other, node_id, *other.messages(table, node_id, 2.0)[1:])
    outcomes = {reply.outcome for reply in next(answers).replies.replies}
    assert outcomes == {parameters_pb2.OUTCOME_APPLIED}
    gave_first.put(True)
    assert list(answers) == []


def test_an_answer_says_the_clock_of_its_values(wire: Wire, bad: RawWorker) -> None:
    """Two steps come in one message; a read that waited for the first is answered in between."""
    table = wire.create("two steps at once", blocks=1)
    (node_id,) = table.servers
    other = wire.workers[1]
    calls = []
    for clock in (1, 2):
        made = other.messages(table, node_id, 2.0 * clock)
        calls.append(wire.servers[node_id].Push(iter(made), timeout=DEADLINE_S))
        assert next(calls[-1]).replies[0].kind == parameters_pb2.REPLY_KIND_RECEIVED
        other.clocks[table.table_id] = clock
    reading = wire.servers[node_id].Pull(
        wire.pull_request(table, [0], session=other.session, clock=1), timeout=DEADLINE_S
    )
    blocks = []
    for clock in (1, 2):
        entry = bad.block(table, value=float(clock))
        bad.take_sequence(table)
        entry.seal.CopyFrom(bad.seal(table))
        bad.take_sequence(table)
        bad.clocks[table.table_id] = clock
        blocks.append(entry)
    until(lambda: _is_parked(wire, table), "the read waits")
    batch = parameters_pb2.BlockBatch(blocks=blocks)
    replies = wire.send(bad, node_id, parameters_pb2.PushRequest(batch=batch))
    assert {r.outcome for r in replies} <= {0, parameters_pb2.OUTCOME_APPLIED}
    (part,) = list(reading)
    found = part.block.clock, part.block.version, part.block.payload
    assert found == (1, 1, payload(-0.75))


def _is_parked(wire: Wire, table: RawTable) -> bool:
    request = parameters_pb2.GetRangeStatsRequest(
        table_id=table.table_id, session=wire.reader.session
    )
    stats = wire.servers[table.servers[0]].GetRangeStats(request, timeout=DEADLINE_S)
    return any(part.waits for part in stats.ranges)
