"""Listings of a server's rows: its answers, while steps change the partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.rows import partition_of
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.ranges.events import Place, PushEvent, SealEvent, SealTerms, Sender
from ps_server.service.node import ParameterNode
from ps_server.service.range_read import PullTerms, RangeRead
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from pushpull.v1 import parameters_pb2

KEY = b"k" * 16
ROWS = RowsSpec(2, max_row_count=800)
PLACE = Place(TableId(1), RangeId(0), AssignmentEpoch(1))


def session(node_id: int, role: Role) -> Session:
    found = Session("c", b"t" * 16, NodeId(node_id), Incarnation(10 + node_id), role)
    return replace(found, token=found.signed(KEY))


WORKER = session(2, Role.WORKER)


class Server:
    """One with a range of two partitions, and a worker."""

    def __init__(self, length: int) -> None:
        sgd = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))
        spec = TableSpec("users", DType.FLOAT32, length, sgd, rows=ROWS)
        table = Table(TableId(1), 0, spec.validated())
        own = session(1, Role.SERVER)
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(own, KEY, 1, metrics, lambda: 0.0)
        (slots,) = key_ranges(1)
        assigned = (RangeAssignment(RangeId(0), slots, AssignmentEpoch(1), own.node_id),)
        self.node.observe(ClusterView(1, "c", 1, 1, (), assigned, (table,)))
        self._length = length
        self._clock = self._sequence = 0

    def push(self, ids: range, value: float = 1.0) -> None:
        """A step with gradients of these ids."""
        stream = self.node.open_stream(WORKER)
        sender = Sender(WORKER.incarnation, WORKER.rank, stream.origin)
        self._clock += 1
        for block in range(2):
            own = np.array([i for i in ids if partition_of(i, ROWS) == block], np.uint64)
            rows = np.full((len(own), self._length), value, np.float32)
            payload = memoryview(payload_of(own, rows))
            part = self.node.shards.decode(PLACE, block, Codec.FP32, payload, b"")
            self._sequence += 1
            push = PushEvent(
                PLACE, sender, self._sequence, self._clock, block, part.byte_count, part
            )
            self.node.entries(stream, [push])
        self._sequence += 1
        self.node.entries(
            stream, [SealEvent(PLACE, sender, self._sequence, SealTerms(self._clock))]
        )

    def begun(self, *skips: int) -> RangeRead:
        """The listing of both partitions, decided on and not made."""
        terms = PullTerms(WORKER, self._clock, 9.0)
        part = parameters_pb2.RangePull(blocks=(0, 1), skipped_row_counts=skips)
        read = RangeRead(terms, PLACE, part)
        self.node.begin_read(read)
        assert read.is_answered
        return read

    def made(self, read: RangeRead) -> Iterator[tuple[int, int, dict[int, bytes]]]:
        """Partition, version, and rows by id."""
        while not read.is_done:
            for part in read.next():
                assert isinstance(part, bytes)
                value = parameters_pb2.PullResponse.FromString(part).block
                count = len(value.payload) // (8 + 4 * self._length)
                ids = np.frombuffer(value.payload, "<u8", count).tolist()
                rows = np.frombuffer(value.payload, "<f4", offset=8 * count)
                rows = rows.reshape(count, self._length)
                found = {i: row.tobytes() for i, row in zip(ids, rows, strict=True)}
                assert len(found) == count
                yield value.block, value.version, found

    @property
    def store(self) -> RowStore:
        store = self.node.shards.stores[PLACE.table_id, PLACE.range_id]
        assert isinstance(store, RowStore)
        return store


@pytest.fixture
def server() -> Server:
    return Server(2048)  # 256 rows fit an answer of a partition


def test_answers_of_one_version_are_all_that_a_partition_has(server: Server) -> None:
    for begin in range(0, 1200, 200):
        server.push(range(begin, begin + 200))
    found: dict[int, dict[int, bytes]] = {0: {}, 1: {}}
    skips, sizes = [0, 0], list[int]()
    while not sizes or any(sizes[-2:]):
        for block, version, rows in server.made(server.begun(*skips)):
            assert version == 6
            assert not found[block].keys() & rows.keys()
            found[block] |= rows
            sizes.append(len(rows))
            skips[block] += len(rows)
    assert skips == [len(found[0]), len(found[1])]
    assert sum(skips) == server.store.row_count < 1200, "some were evicted"
    value = np.full(2048, -1.0, np.float32).tobytes()
    assert {*found[0].values(), *found[1].values()} == {value}
    assert all(partition_of(i, ROWS) == block for block, each in found.items() for i in each)


def test_an_answer_is_as_the_partitions_were_when_it_was_decided_on(server: Server) -> None:
    """A step changes rows, makes others and evicts some before it is made (RA-1)."""
    server.push(range(150))
    reads = [server.begun(0, 0) for _ in range(2)]
    for begin in (100, 250, 400):
        server.push(range(begin, begin + 150))
    assert server.store.version(0) == 4
    value = np.full(2048, -1.0, np.float32).tobytes()
    for read in reads:
        rows: dict[int, bytes] = {}
        for _, version, some in server.made(read):
            assert version == 1
            rows |= some
        assert rows == dict.fromkeys(range(150), value)


def test_an_answer_has_no_more_than_fits_a_message(server: Server) -> None:
    for begin in range(0, 600, 200):
        server.push(range(begin, begin + 200))
    read = server.begun(0, 0)
    assert read.next_bytes <= 2 * limits.FOREIGN_MAX_MESSAGE_BYTES
    most = limits.MAX_PULLED_ROW_BYTES // (4 * 2048)
    assert [len(rows) for _, _, rows in server.made(read)] == [most, most]


def test_beyond_the_end_there_is_nothing(server: Server) -> None:
    server.push(range(10))
    assert [rows for _, _, rows in server.made(server.begun(10, 2**64 - 1))] == [{}, {}]


def test_a_pull_of_whole_partitions_is_refused_whatever_it_holds(server: Server) -> None:
    part = parameters_pb2.RangePull(held_versions=[1, 1])
    read = RangeRead(PullTerms(WORKER, 0, 9.0), PLACE, part)
    server.node.begin_read(read)
    (found,) = read.next()
    assert isinstance(found, bytes)
    assert "is one of rows" in parameters_pb2.PullResponse.FromString(found).error.error.message
