"""Entries, reads and bytes at random over the real wire: servers live, and answer by the catalogue.

What is sent parses, mostly, and is right in places, so that some of it is taken. So no values are
asked of the table that it goes to but that both its servers go on: a worker trains there and must
see its every step applied. A second table, which is left alone, must come out bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from ps_runtime.grpc.errors import ERROR_METADATA_KEY, STATUS
from pushpull.v1 import parameters_pb2
from pushpull.v1 import types_pb2 as types
from tests.integration.raw_wire import BLOCK, DEADLINE_S, RawTable, RawWorker, Wire, payload

ROUNDS = 15
PARAMETERS = "/pushpull.v1.ParameterService/"
BY_GRPC = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""What the client's own deadline, or its end of the stream, looks like."""

NUMBERS = (0, 1, 1, 2, 3, 4, 5, 9, 64, 65, 300, 65_536, 65_537, 2**31, 2**32 - 1)
DOUBLES = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e30, 1e300, float("nan"), float("inf"), -float("inf"))
NAMES = ("lr", "lr", "lr", "eps", "momentum", "beta1", "", "\0", "ü" * 40)
BYTES = (b"", b"\0", b"\1", b"\xff" * 7, payload(1.0), payload(float("nan")), bytes(BLOCK * 2))


class Fuzzer:
    """Messages for one table, from one seed."""

    def __init__(self, dice: random.Random, table: RawTable, worker: RawWorker) -> None:
        self.dice = dice
        self.table = table
        self.worker = worker
        self._places: dict[int, tuple[int, int]] = {}
        self._blocks = list(table.places)

    def look(self, wire: Wire, node_id: int) -> None:
        """Where the worker is in each range: what is near there is what may do harm."""
        is_lost = self.dice.random() < 0.05
        self._blocks = list(self.table.places) if is_lost else self.table.blocks_at(node_id)
        request = parameters_pb2.GetRangeStatsRequest(
            table_id=self.table.table_id, session=self.worker.session
        )
        for part in wire.servers[node_id].GetRangeStats(request, timeout=DEADLINE_S).ranges:
            for worker in part.workers:
                if worker.rank == self.worker.session.rank:
                    self._places[part.range_id] = (worker.low_water_sequence, worker.clock)

    def mutated(self, message: Any) -> Any:
        """`message` with about one field in sixteen made up."""
        for field in message.DESCRIPTOR.fields:
            if field.message_type is not None or field.name == "last" or self.dice.random() > 0.06:
                continue
            if field.is_repeated:
                count = self.dice.choice((0, 1, 2, 100))
                getattr(message, field.name).extend(self._value(field) for _ in range(count))
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _value(self, field: Any) -> object:
        kind = field.cpp_type
        if kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
            large = (2**64 - 1,) if kind == field.CPPTYPE_UINT64 else ()
            return self.dice.choice((*NUMBERS, *large))
        if kind == field.CPPTYPE_ENUM:
            return self.dice.choice((0, 1, 2, 3, 4, 5, 77))
        if kind == field.CPPTYPE_BOOL:
            return self.dice.random() < 0.5
        if kind == field.CPPTYPE_DOUBLE:
            return self.dice.choice(DOUBLES)
        return self.dice.choice(NAMES if field.type == field.TYPE_STRING else BYTES)

    def _terms(self, target: Any) -> None:
        for _ in range(self.dice.choice((0, 0, 0, 1, 1, 2))):
            target.add(name=self.dice.choice(NAMES), value=self.dice.choice(DOUBLES))

    def block(self) -> Any:
        """A push of some block."""
        made = self.worker.block(self.table, self.dice.choice(self._blocks))
        self._number(made)
        made.clock = self._clock(made.range_id)
        made.kind = 2 if made.clock == 0 else 1
        made.replaces = max(0, self.dice.choice((0, 0, 0, made.sequence - 1, made.sequence - 2)))
        if self.dice.random() < 0.1:
            self._terms(made.eager.hyperparameters)
        if self.dice.random() < 0.3:
            made.seal.CopyFrom(self.seal())
        return self.mutated(made)

    def seal(self) -> Any:
        """A seal of some ranges."""
        count = self.dice.choice((0, 1, 1, 2, 4))
        made = self.worker.seal(self.table, self.dice.choices(self._blocks, k=count))
        made.clock = self._clock(made.ranges[0].range_id if made.ranges else 0)
        made.skip = self.dice.random() < 0.25
        for part in made.ranges:
            self._number(part)
            self.mutated(part)
        self._terms(made.hyperparameters)
        return self.mutated(made)

    def withdrawal(self) -> Any:
        """A number given up."""
        range_id, epoch, _ = self.table.places[self.dice.choice(self._blocks)]
        made = parameters_pb2.Withdrawal(
            table_id=self.table.table_id, range_id=range_id, assignment_epoch=epoch
        )
        self._number(made)
        return self.mutated(made)

    def _number(self, entry: Any) -> None:
        low_water, _ = self._places.get(entry.range_id, (0, 0))
        entry.sequence = low_water + self.dice.randint(1, 6)

    def _clock(self, range_id: int) -> int:
        _, clock = self._places.get(range_id, (0, 0))
        return self.dice.choice((0, *[clock + 1] * 6, clock + 2))

    def read(self) -> Any:
        """A read of some ranges."""
        made = parameters_pb2.PullRequest(session=self.worker.session, table_id=self.table.table_id)
        for block in self.dice.choices(self._blocks, k=2):
            range_id, epoch, _ = self.table.places[block]
            self.mutated(made.ranges.add(range_id=range_id, assignment_epoch=epoch))
        self.mutated(made)
        made.deadline_ms = self.dice.choice((1, 5, 20))
        return made

    def stream(self, message: type[Any]) -> list[bytes]:
        """A header, then entries, reads or bytes."""
        makers: dict[str, Any] = {"block": self.block, "seal": self.seal}
        last = "withdrawal" if message is parameters_pb2.PushRequest else "pull"
        makers[last] = self.withdrawal if last == "withdrawal" else self.read
        made = [message(header=self.worker.header.header).SerializeToString()]
        for _ in range(self.dice.randint(1, 12)):
            kind = self.dice.choice(list(makers))
            made.append(message(**{kind: makers[kind]()}).SerializeToString())
            if self.dice.random() < 0.1:
                made.append(self.dice.choice(made[1:]))
        if self.dice.random() < 0.2:
            made.insert(self.dice.randint(0, len(made)), self.noise(made[-1]))
        return made

    def noise(self, like: bytes) -> bytes:
        """Bytes at random, or a message with one bit turned over or its end cut off."""
        kind = self.dice.randrange(3)
        if kind == 0:
            return self.dice.randbytes(self.dice.randint(0, 40))
        if kind == 1:
            return like[: self.dice.randint(0, len(like))]
        flipped = bytearray(like)
        flipped[self.dice.randrange(len(flipped))] ^= 1 << self.dice.randrange(8)
        return bytes(flipped)


def _check_replies(replies: Iterable[parameters_pb2.EntryReply]) -> None:
    for reply in replies:
        assert reply.error.code != types.ERROR_CODE_INTERNAL, reply
        assert reply.kind != parameters_pb2.REPLY_KIND_UNSPECIFIED
        if reply.outcome == parameters_pb2.OUTCOME_INVALID:
            assert reply.error.message, reply


def _check_end(failure: grpc.RpcError) -> None:
    """The call ended by its own deadline, or with an error of the catalogue and its status."""
    call: Any = failure
    carried = dict(call.trailing_metadata() or ()).get(ERROR_METADATA_KEY)
    if carried is None:
        assert call.code() in BY_GRPC, (call.code(), call.details())
        return
    error = types.Error.FromString(carried)
    name = types.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_")
    # The client's deadline may pass while the error is on its way.
    assert call.code() in (STATUS[name], *BY_GRPC)
    assert name != "INTERNAL", call.details()


def _send(wire: Wire, fuzzer: Fuzzer, node_id: int) -> None:
    channel = wire.server_channels[node_id]
    fuzzer.look(wire, node_id)
    method = fuzzer.dice.choice(("Push", "PushPull", "Pull"))
    try:
        if method == "Pull":
            request = fuzzer.read().SerializeToString()
            if fuzzer.dice.random() < 0.2:
                request = fuzzer.noise(request)
            reading: Any = channel.unary_stream(
                PARAMETERS + method,
                response_deserializer=parameters_pb2.PullResponse.FromString,
            )
            for part in reading(request, timeout=2.0):
                assert part.error.error.code != types.ERROR_CODE_INTERNAL, part
            return
        is_push = method == "Push"
        request_type, response_type = (
            (parameters_pb2.PushRequest, parameters_pb2.PushResponse)
            if is_push
            else (parameters_pb2.PushPullRequest, parameters_pb2.PushPullResponse)
        )
        sending: Any = channel.stream_stream(
            PARAMETERS + method, response_deserializer=response_type.FromString
        )
        # Much of it is never sealed: only the deadline ends such a stream.
        for answer in sending(iter(fuzzer.stream(request_type)), timeout=0.03):
            _check_replies(answer.replies if is_push else answer.replies.replies)
    except grpc.RpcError as failure:
        _check_end(failure)


@pytest.mark.thorough
@pytest.mark.drawn
def test_whatever_comes_is_answered_by_the_catalogue_and_harms_nobody(
    wire: Wire, drawn_seed: int
) -> None:
    dice = random.Random(drawn_seed)
    print(f"make fuzz SEED={drawn_seed}")
    bad, good = wire.workers
    asp = types.Consistency(asp=types.Asynchronous())
    exact = types.OptimizerSpec(kind=types.OPTIMIZER_KIND_ADAM, kernels=types.KERNEL_KIND_EXACT)
    tables = [
        wire.create("fuzzed asp", consistency=asp, optimizer=exact),
        wire.create("fuzzed bsp"),
        wire.create("fuzzed start", initializer={"from_rank_zero": {}}, gate_bytes=1),
    ]
    quiet = wire.create("quiet")
    fuzzers = [Fuzzer(dice, table, bad) for table in tables]
    for _ in range(ROUNDS):
        for _ in range(5):
            fuzzer = dice.choice(fuzzers)
            _send(wire, fuzzer, dice.choice(fuzzer.table.servers))
        wire.train(tables[0], [good])
        wire.train(quiet)
    total = sum(1.5 * clock for clock in range(1, ROUNDS + 1))
    assert wire.values(quiet) == {
        block: (ROUNDS, ROUNDS, payload(-0.5 * total)) for block in quiet.places
    }
