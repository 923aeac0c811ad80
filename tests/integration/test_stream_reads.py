"""Reads on a PushPull stream: many at once, and none in the way of an entry."""

from __future__ import annotations

from typing import Any

from ps_core import limits
from pushpull.v1 import parameters_pb2
from pushpull.v1 import types_pb2 as types
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
        check_error(error, "OVERLOADED", "256 reads wait on this stream")
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
