"""Bad entries over the real wire: each gets its error, and nothing else happens.

In each test rank 0 misbehaves; then the table must be as it was, bit for bit, and both workers take
another step in it, which must come out as arithmetic says (the fixture `table`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from ps_core import limits
from pushpull.v1 import parameters_pb2
from pushpull.v1 import types_pb2 as types
from tests.integration.raw_wire import (
    BLOCK,
    DEADLINE_S,
    RawTable,
    RawWorker,
    Wire,
    check_error,
    payload,
    to_range,
)

NAN, INFINITY = float("nan"), float("inf")
FAR = limits.MAX_LEDGER_GAP_COUNT + 100
UNKNOWN_TABLE = 1_000_000


Change = Callable[[Any, RawTable], object]


def _set(**fields: Any) -> Change:
    def change(entry: Any, table: RawTable) -> None:
        for name, value in fields.items():
            setattr(entry, name, value)

    return change


REFUSED_PLACES: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "unknown table": (
        _set(table_id=UNKNOWN_TABLE),
        "TABLE_NOT_FOUND",
        ("there is no table 1000000",),
    ),
    "another server's range": (
        lambda entry, table: to_range(entry, *table.elsewhere),
        "NOT_OWNER",
        ("does not serve range",),
    ),
    "range that does not exist": (
        lambda entry, _: to_range(entry, 4_000_000, 1),
        "INVALID_KEYS",
        ("there is no range 4000000",),
    ),
    "old epoch": (_set(assignment_epoch=1), "STALE_ASSIGNMENT", ("epoch 2; got 1",)),
    "epoch to come": (_set(assignment_epoch=2**60), "STALE_ASSIGNMENT", (f"got {2**60}",)),
    "sequence 0": (_set(sequence=0), "INVALID_KEYS", ("sequence is 0; expected 1 to",)),
    "sequence far ahead": (_set(sequence=FAR), "INVALID_KEYS", (f"sequence is {FAR}",)),
    "largest sequence": (_set(sequence=2**64 - 1), "INVALID_KEYS", (f"is {2**64 - 1}; expected",)),
}
"""What consumes no number, for pushes and withdrawals."""


def _without_number(reply: parameters_pb2.EntryReply, code: str, words: tuple[str, ...]) -> None:
    assert reply.kind == parameters_pb2.REPLY_KIND_ERROR
    check_error(reply.error, code, *words)


@pytest.mark.parametrize("case", REFUSED_PLACES)
def test_a_push_to_a_wrong_place_is_refused(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    change, code, words = REFUSED_PLACES[case]
    entry = bad.block(table)
    change(entry, table)
    (reply,) = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(block=entry))
    _without_number(reply, code, words)


@pytest.mark.parametrize("case", REFUSED_PLACES)
def test_a_withdrawal_of_what_is_not_there_is_refused(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    change, code, words = REFUSED_PLACES[case]
    entry = parameters_pb2.Withdrawal(
        table_id=table.table_id,
        range_id=table.places[0][0],
        assignment_epoch=table.places[0][1],
        sequence=bad.next_sequence(table),
    )
    change(entry, table)
    (reply,) = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(withdrawal=entry))
    _without_number(reply, code, words)


@pytest.mark.parametrize("case", REFUSED_PLACES)
def test_a_seal_of_a_wrong_place_is_refused(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    change, code, words = REFUSED_PLACES[case]
    entry = bad.seal(table)
    change(entry if case == "unknown table" else entry.ranges[0], table)
    (reply,) = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(seal=entry))
    _without_number(reply, code, words)


def test_a_number_that_nobody_used_may_be_withdrawn(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    range_id, epoch, node_id = table.places[0]
    given_up = parameters_pb2.Withdrawal(
        table_id=table.table_id,
        range_id=range_id,
        assignment_epoch=epoch,
        sequence=bad.take_sequence(table),
    )
    (reply,) = wire.send(bad, node_id, parameters_pb2.PushRequest(withdrawal=given_up))
    assert reply.outcome == parameters_pb2.OUTCOME_WITHDRAWN


def test_what_was_applied_cannot_be_withdrawn_or_sent_as_another_thing(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    range_id, epoch, node_id = table.places[0]
    given_up = parameters_pb2.Withdrawal(
        table_id=table.table_id, range_id=range_id, assignment_epoch=epoch, sequence=1
    )
    other = bad.block(table, value=99.0)
    other.sequence = 1
    replies = wire.send(
        bad,
        node_id,
        parameters_pb2.PushRequest(withdrawal=given_up),
        parameters_pb2.PushRequest(block=other),
    )
    assert [reply.outcome for reply in replies] == [parameters_pb2.OUTCOME_APPLIED] * 2


def _cut(entry: Any, count: int) -> None:
    entry.payload = entry.payload[:count]


def _poison(value: float) -> Change:
    def change(entry: Any, table: RawTable) -> None:
        entry.payload = payload(1.0, BLOCK - 1) + struct.pack("<f", value)

    return change


def _eager(name: str, value: float) -> Change:
    return lambda entry, _: entry.eager.hyperparameters.add(name=name, value=value)


INVALID_PUSHES: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "no codec": (_set(codec=0), "INVALID_TENSOR", ("codec is unset",)),
    "unknown codec": (_set(codec=77), "INVALID_TENSOR", ("codec is 77, which is unknown",)),
    "codec of a wider dtype": (
        lambda entry, table: _set(codec=types.CODEC_FP64, payload=bytes(512))(entry, table),
        "INVALID_TENSOR",
        ("codec fp64", "float32"),
    ),
    "length of another codec": (
        _set(codec=types.CODEC_FP16),
        "INVALID_TENSOR",
        ("256 bytes; expected 128",),
    ),
    "empty payload": (_set(payload=b""), "INVALID_TENSOR", ("0 bytes; expected 256",)),
    "payload too short": (
        lambda entry, _: _cut(entry, 252),
        "INVALID_TENSOR",
        ("252 bytes; expected 256",),
    ),
    "payload that ends inside an element": (
        lambda entry, _: _cut(entry, 255),
        "INVALID_TENSOR",
        ("255 bytes; expected 256",),
    ),
    "payload too long": (
        _set(payload=bytes(1_000_000)),
        "INVALID_TENSOR",
        ("1000000 bytes; expected 256",),
    ),
    "presence too long": (
        _set(presence=b"\1\1"),
        "INVALID_KEYS",
        ("presence has 2 bytes; expected 1",),
    ),
    "block of another range": (_set(block=1), "INVALID_KEYS", ("block 1",)),
    "block beyond the table": (_set(block=4), "INVALID_KEYS", ("block 4", "table's 4 blocks")),
    "largest block": (_set(block=2**64 - 1), "INVALID_KEYS", (f"block {2**64 - 1}",)),
    "NaN": (_poison(NAN), "INVALID_TENSOR", ("non-finite gradient in tensor", "finite values")),
    "infinity": (_poison(-INFINITY), "INVALID_TENSOR", ("non-finite gradient in tensor",)),
    "clock sealed before": (_set(clock=1), "INVALID_CONFIG", ("clock 1", "expected 2")),
    "clock 0": (_set(clock=0), "INVALID_CONFIG", ("clock 0", "expected 2")),
    "clock far ahead": (_set(clock=66), "INVALID_CONFIG", ("clock 66", "at most 65")),
    "largest clock": (_set(clock=2**64 - 1), "INVALID_CONFIG", (f"clock {2**64 - 1}",)),
    "ASSIGN": (
        _set(kind=parameters_pb2.PUSH_KIND_ASSIGN, clock=0),
        "INVALID_CONFIG",
        ("ASSIGN", "clock 0 by rank 0", "expected clock 0"),
    ),
    "unknown kind": (_set(kind=9), "INVALID_CONFIG", ("kind is 9; expected one of 0, 1, 2",)),
    "eager with a number that SGD lacks": (
        _eager("beta1", 0.5),
        "INVALID_CONFIG",
        ("sgd has no hyperparameter 'beta1'",),
    ),
    "eager with NaN": (_eager("lr", NAN), "INVALID_CONFIG", ("'lr' is nan",)),
}


@pytest.mark.parametrize("case", INVALID_PUSHES)
def test_an_invalid_push_consumes_its_number_and_nothing_else(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    change, code, words = INVALID_PUSHES[case]
    entry = bad.block(table)
    sequence = bad.take_sequence(table)
    change(entry, table)
    (reply,) = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(block=entry))
    assert reply.kind == parameters_pb2.REPLY_KIND_COMMITTED
    assert reply.outcome == parameters_pb2.OUTCOME_INVALID
    check_error(reply.error, code, *words)
    # Sent again it is answered as before, and in its place a right one may come.
    again = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(block=entry))
    assert [(r.outcome, r.error) for r in again] == [(reply.outcome, reply.error)]
    bad.replaces[table.table_id, table.places[0][0]] = sequence


def _many(count: int) -> Change:
    def change(entry: Any, table: RawTable) -> None:
        for number in range(count):
            entry.hyperparameters.add(name=f"h{number}", value=1.0)

    return change


def _number(name: str, value: float) -> Change:
    return lambda entry, _: entry.hyperparameters.add(name=name, value=value)


def _twice(entry: Any, table: RawTable) -> None:
    _number("lr", 0.1)(entry, table)
    _number("lr", 0.2)(entry, table)


INVALID_SEALS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "33 hyperparameters": (_many(33), ("has 33 entries; expected at most 32",)),
    "10,000 hyperparameters": (_many(10_000), ("has 10000 entries; expected at most 32",)),
    "unknown name": (_number("beta1", 0.5), ("sgd has no hyperparameter 'beta1'",)),
    "endless name": (_number("x" * 200_000, 0.5), ("200000 bytes; expected at most 64",)),
    "name twice": (_twice, ("'lr' comes twice",)),
    "NaN": (_number("lr", NAN), ("'lr' is nan; expected a finite number",)),
    "beyond float32": (_number("lr", 1e300), ("'lr' is 1e+300; expected a magnitude",)),
    "out of torch's bounds": (
        _number("momentum", -1.0),
        ("'momentum' is -1.0; expected at least",),
    ),
    "scale 0": (_set(contribution_scale=0.0), ("contribution_scale is 0.0; expected above 0",)),
    "scale NaN": (_set(contribution_scale=NAN), ("contribution_scale is nan",)),
    "scale infinite": (_set(contribution_scale=INFINITY), ("contribution_scale is inf",)),
    "clock sealed before": (_set(clock=1), ("clock 1", "expected 2")),
    "clock 0": (_set(clock=0), ("clock 0", "starts from rank 0")),
    "clock far ahead": (_set(clock=66), ("clock 66", "at most 65")),
}


@pytest.mark.parametrize("case", INVALID_SEALS)
def test_an_invalid_seal_has_not_sealed(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    change, words = INVALID_SEALS[case]
    entry = bad.seal(table)
    bad.take_sequence(table)
    change(entry, table)
    (reply,) = wire.send(bad, table.places[0][2], parameters_pb2.PushRequest(seal=entry))
    assert reply.outcome == parameters_pb2.OUTCOME_INVALID
    check_error(reply.error, "INVALID_CONFIG", *words)


def test_workers_that_disagree_are_both_named(wire: Wire) -> None:
    made = wire.create("disagreement", blocks=1)
    (node_id,) = made.servers
    bad, good = wire.workers
    sealed = parameters_pb2.PushRequest(seal=good.seal(made))
    answers = wire.servers[node_id].Push(iter([good.header, sealed]), timeout=DEADLINE_S)
    assert next(answers).replies[0].kind == parameters_pb2.REPLY_KIND_RECEIVED
    entry = bad.seal(made)
    bad.take_sequence(made)
    entry.hyperparameters.add(name="lr", value=0.25)
    (reply,) = wire.send(bad, node_id, parameters_pb2.PushRequest(seal=entry))
    check_error(reply.error, "INVALID_CONFIG", "workers 0 and 1", "lr: 0.25 and 0.5")
    wire.send(bad, node_id, parameters_pb2.PushRequest(seal=bad.seal(made)))
    (reply,) = [reply for answer in answers for reply in answer.replies]
    assert reply.outcome == parameters_pb2.OUTCOME_APPLIED
    assert wire.values(made) == {0: (0, 1, payload(0.0))}


def test_only_a_push_of_the_same_step_can_be_replaced(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    held = bad.block(table)
    bad.take_sequence(table)
    held.clock = 3
    thief = bad.block(table)
    thief.replaces = held.sequence
    itself = bad.block(table)
    itself.replaces = itself.sequence
    request = parameters_pb2.PushRequest
    given_up = parameters_pb2.Withdrawal(
        table_id=table.table_id,
        range_id=held.range_id,
        assignment_epoch=held.assignment_epoch,
        sequence=held.sequence,
    )
    replies = wire.send(
        bad,
        table.places[0][2],
        request(block=held),
        request(block=thief),
        request(block=itself),
        request(withdrawal=given_up),
    )
    errors = [reply.error for reply in replies if reply.HasField("error")]
    check_error(errors[0], "INVALID_KEYS", "cannot replace", "clock 3; expected a push of clock 2")
    check_error(errors[1], "INVALID_KEYS", "cannot replace", "expected a lower one")
    assert len(errors) == 2


def test_a_seal_in_a_block_is_of_that_block(wire: Wire, bad: RawWorker, table: RawTable) -> None:
    entry = bad.block(table)
    bad.take_sequence(table)
    entry.seal.CopyFrom(bad.seal(table))
    entry.seal.clock = 3
    bad.take_sequence(table)
    replies = wire.send(
        bad,
        table.places[0][2],
        parameters_pb2.PushRequest(block=entry),
        parameters_pb2.PushRequest(
            withdrawal=parameters_pb2.Withdrawal(
                table_id=table.table_id,
                range_id=entry.range_id,
                assignment_epoch=entry.assignment_epoch,
                sequence=entry.sequence,
            )
        ),
    )
    (error,) = [reply.error for reply in replies if reply.HasField("error")]
    check_error(error, "INVALID_CONFIG", "a seal inside a block", "clock 3", "clock 2")


# --- non-finite gradients


def test_a_step_with_a_nan_is_refused_as_a_whole(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    entry = bad.block(table, value=NAN)
    bad.take_sequence(table)
    seal = bad.seal(table)
    bad.take_sequence(table)
    replies = wire.send(
        bad,
        table.places[0][2],
        parameters_pb2.PushRequest(block=entry),
        parameters_pb2.PushRequest(seal=seal),
    )
    replies = [r for r in replies if r.kind == parameters_pb2.REPLY_KIND_COMMITTED]
    assert [reply.outcome for reply in replies] == [parameters_pb2.OUTCOME_INVALID] * 2
    check_error(replies[1].error, "INVALID_TENSOR", f"invalid pushes ({entry.sequence})", "skip")
    bad.replaces[table.table_id, entry.range_id] = entry.sequence


def test_a_table_may_allow_what_is_not_finite(wire: Wire) -> None:
    asp = types.Consistency(asp=types.Asynchronous())
    made = wire.create("non-finite", blocks=1, allow_non_finite=True, consistency=asp)
    good = wire.workers[1]
    (node_id,) = made.servers
    replies = wire.send(good, node_id, *good.messages(made, node_id, INFINITY)[1:])
    outcomes = [r.outcome for r in replies if r.kind == parameters_pb2.REPLY_KIND_COMMITTED]
    assert outcomes == [parameters_pb2.OUTCOME_APPLIED] * 2
    assert wire.values(made)[0][2] == payload(-INFINITY)
