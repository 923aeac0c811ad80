"""A server's loop waits for no disk: pulls, updates and copies go on when their rows have come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.sliced_work import Work
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_runtime.system.waiting import driven
from ps_server.lane.lane_socket import SharedLanes
from ps_server.rows.row_tier import RowTier
from ps_server.service.node import ParameterNode
from ps_server.service.pull import Pull
from ps_server.stores import Shards
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from pushpull.v1 import parameters_pb2
from tests.deferred_disk import DeferredDisk, FewFrames

KEY, LENGTH, COUNT, LEAST = b"k" * 16, 4, 60, 20


class LateOperation:
    """One that is done in a later turn of the loop that waits for it."""

    def __init__(self, disk: LateDisk, operation: Callable[[], Any]) -> None:
        self._disk, self._operation = disk, operation
        self._result: Any = None
        self._is_done = False

    def done(self) -> bool:
        return self._is_done or self._disk.is_patient

    def result(self) -> Any:
        if not self._is_done:
            assert self._disk.is_patient, "the loop is held up"
            self._end()
        return self._result

    def _end(self) -> None:
        if not self._is_done:
            self._result, self._is_done = self._operation(), True

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        def end() -> None:
            self._end()
            self._disk.awaited_count += 1
            call(self)

        asyncio.get_running_loop().call_soon(end)


class LateDisk(DeferredDisk):
    """A disk that nobody may block for, unless `is_patient`."""

    def __init__(self) -> None:
        super().__init__("late")
        self.is_patient = True
        self.awaited_count = 0

    def submit(self, operation: Callable[[], OSError | None]) -> Any:
        return LateOperation(self, operation)


def session(node_id: int, role: Role) -> Session:
    found = Session("c", b"t" * 16, NodeId(node_id), Incarnation(10 + node_id), role)
    return replace(found, token=found.signed(KEY))


class Server:
    """One with a partition of whose rows most are on disk."""

    def __init__(self, least_frame_count: int = LEAST) -> None:
        self.disk = LateDisk()
        sgd = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))
        spec = TableSpec("users", DType.FLOAT32, LENGTH, sgd, rows=RowsSpec(1))
        table = Table(TableId(1), 0, spec.validated())
        own = session(1, Role.SERVER)
        memory = FewFrames(tier=RowTier(self.disk, least_frame_count=least_frame_count))
        shards = Shards(SharedLanes(), {}, memory)
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(own, KEY, 1, metrics, lambda: 0.0, shards)
        (slots,) = key_ranges(1)
        assigned = (RangeAssignment(RangeId(0), slots, AssignmentEpoch(1), own.node_id),)
        self.node.observe(ClusterView(1, "c", 1, 1, (), assigned, (table,)))
        store = shards.stores[TableId(1), RangeId(0)]
        assert isinstance(store, RowStore)
        self.store = store
        self._clock = 0
        for row_id in range(COUNT):
            asyncio.run(driven(self.step([row_id])))
        assert store.memory_use.disk_row_count > COUNT // 2
        self.disk.is_patient = False

    def step(self, ids: list[int]) -> Work[Any]:
        """An update that takes 1 from these rows."""
        self._clock += 1
        values = np.ones((len(ids), LENGTH), np.float32)
        payload = payload_of(np.array(ids, np.uint64), values)
        part = self.store.decode(0, Codec.FP32, payload, b"")
        self.store.accumulate(self._clock, [(0, part)], 1.0)
        assert self.disk.is_patient or not self.store.is_brief(self._clock, 1)
        return self.store.applying(self.store.take(self._clock), Terms(self._clock, (), 1))

    def pull(self, ids: list[int]) -> Pull:
        part = parameters_pb2.RangePull(
            range_id=0, assignment_epoch=1, blocks=[0], ids=[np.array(ids, "<u8").tobytes()]
        )
        request = parameters_pb2.PullRequest(table_id=1, ranges=[part])
        return Pull(self.node, request, session(2, Role.WORKER))


@pytest.fixture
def server() -> Server:
    return Server()


def rows_of(messages: list[bytes]) -> list[list[float]]:
    (payload,) = [parameters_pb2.PullResponse.FromString(m).block.payload for m in messages[:1]]
    return np.frombuffer(payload, "<f4").reshape(-1, LENGTH).tolist()


def test_a_pull_of_rows_on_disk_is_answered_when_they_have_come(server: Server) -> None:
    ids = list(range(COUNT))
    pull = server.pull(ids)
    assert pull.at_once() is None

    async def parts() -> list[bytes]:
        return [bytes(message) async for message in pull.parts()]

    assert rows_of(asyncio.run(parts())) == [[-1.0] * LENGTH] * COUNT
    assert server.disk.awaited_count > 0
    again = server.pull(ids).at_once()
    assert again is not None, "all rows are in memory now"
    assert rows_of(list(map(bytes, again))) == [[-1.0] * LENGTH] * COUNT


def test_an_update_of_rows_on_disk_goes_on_when_they_have_come(server: Server) -> None:
    """Those that were in memory are still there then, though others had to make space."""
    for begin in range(0, COUNT, LEAST // 2):
        in_all = begin + LEAST // 2
        asyncio.run(driven(server.step([COUNT - 1, *range(begin, in_all), COUNT - 2])))
    assert server.disk.awaited_count > 0
    server.disk.is_patient = True
    rows = server.store.rows(0, np.arange(COUNT - 2, dtype=np.uint64))
    assert (rows == -2.0).all()


def test_an_update_of_more_rows_than_there_are_frames_waits_as_well() -> None:
    server = Server(4)
    for first in (0, COUNT // 3, 0):
        asyncio.run(driven(server.step(list(range(first, COUNT)))))
    server.disk.is_patient = True
    rows = server.store.rows(0, np.arange(COUNT, dtype=np.uint64))
    assert (rows[:20] == -3.0).all()
    assert (rows[20:] == -4.0).all()


def test_a_checkpoint_of_rows_on_disk_waits_beside_the_loop(server: Server) -> None:
    snapshot = server.store.capture(0)
    saved = asyncio.run(driven(server.store.saving_rows(0, snapshot)))
    assert snapshot.is_done
    values = np.frombuffer(dict(saved.tensors)["values"], np.float32)
    assert len(values) == COUNT * LENGTH
    assert (values == -1.0).all()
    assert server.store.memory_use.disk_row_count > COUNT // 2, "it fetches none"
