"""Pulls of a caller that has values already, as a server answers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.ranges.events import Place, PushEvent, SealEvent, SealTerms, Sender
from ps_server.service.node import ParameterNode
from ps_server.service.pull import Pull
from ps_server.service.range_read import PullTerms, RangeRead
from pushpull.v1 import parameters_pb2, types_pb2

KEY = b"k" * 16
PLACE = Place(TableId(1), RangeId(0), AssignmentEpoch(1))
SGD = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))
LENGTH = 64
LAST_LENGTH = 10


def session(node_id: int, role: Role) -> Session:
    found = Session("c", b"t" * 16, NodeId(node_id), Incarnation(10 + node_id), role)
    return replace(found, token=found.signed(KEY))


WORKER = session(2, Role.WORKER)


class Server:
    """One with a table in one range, of which the last block is short, and a worker."""

    def __init__(
        self,
        block_count: int = 4,
        optimizer: OptimizerSpec = SGD,
        begins: InitializerKind = InitializerKind.ZEROS,
    ) -> None:
        count = (block_count - 1) * LENGTH + LAST_LENGTH
        spec = TableSpec(
            "model", DType.FLOAT32, count, optimizer, LENGTH, initializer=Initializer(begins)
        )
        self.table = Table(TableId(1), 0, spec.validated())
        own = session(1, Role.SERVER)
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(own, KEY, 1, metrics, lambda: 0.0)
        (slots,) = key_ranges(1)
        assigned = (RangeAssignment(RangeId(0), slots, AssignmentEpoch(1), own.node_id),)
        self.node.observe(ClusterView(1, "c", 1, 1, (), assigned, (self.table,)))
        self.clock = self._sequence = 0

    def step(self, *blocks: int, edit: bytes = b"") -> None:
        """A step with a gradient of ones, or an edit, of these blocks."""
        self.clock += 1
        self._end(blocks, SealTerms(self.clock, edit=edit), is_assign=bool(edit))

    def begin(self) -> None:
        """Initial values, of rank 0."""
        self._end(range(self.table.block_count), SealTerms(0), is_assign=True)

    def _end(self, blocks: Sequence[int], terms: SealTerms, *, is_assign: bool) -> None:
        stream = self.node.open_stream(WORKER)
        sender = Sender(WORKER.incarnation, WORKER.rank, stream.origin)
        for block in blocks:
            payload = memoryview(np.ones(self.table.block_length(block), np.float32).tobytes())
            part = self.node.shards.decode(PLACE, block, Codec.FP32, payload, b"")
            push = PushEvent(
                PLACE, sender, self._next(), terms.clock, block, part.byte_count, part,
                is_assign=is_assign,
            )  # fmt: skip
            self.node.entries(stream, [push])
        self.node.entries(stream, [SealEvent(PLACE, sender, self._next(), terms)])

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def pulled(
        self,
        held: Sequence[int | None] = (),
        edit_count: int = 0,
        *,
        blocks: Sequence[int] = (),
        **more: object,
    ) -> tuple[dict[int, bytes], list[int], parameters_pb2.RangeError]:
        """The payloads that come, the blocks that are unchanged, and the error."""
        request = parameters_pb2.PullRequest(table_id=1, clock=self.clock, **more)  # type: ignore[arg-type]
        request.ranges.add(
            range_id=0,
            assignment_epoch=1,
            blocks=blocks,
            held_versions=[0 if version is None else version + 1 for version in held],
            held_edit_count=edit_count,
        )
        answer = Pull(self.node, request, WORKER).at_once()
        assert answer is not None
        return taken(answer, self.clock)


def taken(
    answer: Sequence[object], clock: int
) -> tuple[dict[int, bytes], list[int], parameters_pb2.RangeError]:
    came: dict[int, bytes] = {}
    unchanged: list[int] = []
    error = parameters_pb2.RangeError()
    for part in answer:
        assert isinstance(part, bytes)
        response = parameters_pb2.PullResponse.FromString(part)
        if response.HasField("block"):
            came[response.block.block] = response.block.payload
            assert response.block.clock == clock
        elif response.HasField("unchanged"):
            unchanged += response.unchanged.blocks
            assert response.unchanged.clock == clock
        else:
            error = response.error
    return came, unchanged, error


def test_a_block_comes_if_its_version_is_another() -> None:
    server = Server()
    server.step(0, 1)
    server.step(1, 3)
    shards = server.node.shards
    whole, unchanged, _ = server.pulled()
    assert (sorted(whole), unchanged) == ([0, 1, 2, 3], [])
    sent_bytes = shards.sent_bytes
    assert (sent_bytes, shards.unchanged_bytes) == (4 * (3 * LENGTH + LAST_LENGTH), 0)
    came, unchanged, _ = server.pulled([1, 1, None, 1])
    assert came == {1: whole[1], 2: whole[2]}, "of block 2 it has none"
    assert unchanged == [0, 3]
    assert shards.sent_bytes - sent_bytes == 4 * 2 * LENGTH
    assert shards.unchanged_bytes == 4 * (LENGTH + LAST_LENGTH)
    assert server.pulled([0], blocks=[2])[:2] == ({}, [2]), "0 is a version, too"
    assert server.pulled([2, 1], blocks=[3, 1])[0] == {3: whole[3], 1: whole[1]}


def test_after_an_edit_everything_comes_though_versions_stay() -> None:
    server = Server()
    server.step(0, 1, 2, 3)
    server.step(2, edit=b"one edit")
    came, unchanged, _ = server.pulled([1, 1, 1, 1])
    assert (sorted(came), unchanged) == ([0, 1, 2, 3], [])
    assert server.pulled([1, 1, 1, 1], 1)[:2] == ({}, [0, 1, 2, 3])
    server.step(2, edit=b"another")
    assert sorted(server.pulled([1, 1, 1, 1], 1)[0]) == [0, 1, 2, 3]


def test_initial_values_are_no_edit() -> None:
    """So an answer has no byte more as long as there is none."""
    server = Server(begins=InitializerKind.FROM_RANK_ZERO)
    server.begin()
    assert server.pulled([0, 0, 0, 0])[:2] == ({}, [0, 1, 2, 3])


def test_another_codec_says_as_much() -> None:
    """The caller holds what it had in this codec."""
    server = Server()
    server.step(0)
    came, unchanged, _ = server.pulled([1, 1, 0, 0], codec=types_pb2.CODEC_BF16)
    assert (sorted(came), unchanged) == ([1], [0, 2, 3])


def test_sums_and_optimizer_state_always_come() -> None:
    server = Server(optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
    server.step(0)
    server.step()
    came, unchanged, _ = server.pulled([1, 0, 0, 0])
    assert (sorted(came), unchanged) == ([0, 1, 2, 3], [])
    server = Server(optimizer=OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0), ("momentum", 0.5))))
    server.step(0)
    came, unchanged, _ = server.pulled([1, 0, 0, 0], array="momentum_buffer")
    assert (sorted(came), unchanged) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize(("held", "blocks"), [((0, 0, 0), ()), ((0, 0), (1,)), ((0,), (1, 2))])
def test_as_many_versions_as_blocks_or_none(held: Sequence[int], blocks: Sequence[int]) -> None:
    came, unchanged, error = Server().pulled(held, blocks=blocks)
    assert (came, unchanged) == ({}, [])
    assert error.error.code == types_pb2.ERROR_CODE_INVALID_KEYS
    expected = f"{len(held)} versions of values that its caller holds; expected one for each of "
    assert expected + f"its {len(blocks) or 4} blocks" in error.error.message


def test_a_long_answer_compares_with_the_range_as_it_was_decided_on() -> None:
    """A step changes all of it before the second piece is made (RA-1)."""
    count = 3 * limits.SLICE_BLOCK_COUNT
    server = Server(count)
    server.step(count - 1)
    part = parameters_pb2.RangePull(range_id=0, assignment_epoch=1, held_versions=[1] * count)
    read = RangeRead(PullTerms(WORKER, 1, 9.0), PLACE, part)
    server.node.begin_read(read)
    assert read.is_answered
    parts = list(read.next())
    server.step(*range(count))
    while not read.is_done:
        parts += read.next()
    came, unchanged, _ = taken(parts, 1)
    assert (list(came), unchanged) == ([count - 1], list(range(count - 1)))
    assert len(parts) == 4, "a message for each piece, and the value"
    assert came[count - 1] == np.full(LAST_LENGTH, -1, np.float32).tobytes()
