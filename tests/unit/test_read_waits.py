"""How long workers' reads were parked for others: what a server counts, and says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.consistency import parsed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, key_ranges
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.ranges.events import SealEvent, SealTerms, Sender
from ps_server.service.node import ParameterNode
from ps_server.service.range_read import PullTerms, RangeRead
from tests.unit.machine_harness import PLACE, make_table

SERVER = Session("cluster", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)


def _worker(rank: int) -> Session:
    return Session(
        "cluster", b"t" * 16, NodeId(2 + rank), Incarnation(1000 + rank), Role.WORKER, rank
    )


def _view(text: str, number: int = 1, state: NodeState = NodeState.ALIVE) -> ClusterView:
    nodes = tuple(
        Node(NodeId(2 + rank), Incarnation(1000 + rank), Role.WORKER, rank, "", state)
        for rank in range(2)
    )
    (slots,) = key_ranges(1)
    ranges = (RangeAssignment(RangeId(0), slots, AssignmentEpoch(1), NodeId(1)),)
    return ClusterView(number, "cluster", 2, 1, nodes, ranges, (make_table(parsed(text)),))


class Server:
    """A server of one range, two workers that step, and a hand on its clock."""

    def __init__(self, text: str, workers: int = 2) -> None:
        self.now_s = 100.0
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(SERVER, b"k" * 16, workers, metrics, lambda: self.now_s)
        self.node.observe(_view(text))
        self.node.works.finish()
        self.streams = [self.node.open_stream(_worker(rank)) for rank in range(2)]
        self.sequences = [0, 0]
        self.reads: list[RangeRead] = []

    def seal(self, rank: int, clock: int) -> None:
        stream, self.sequences[rank] = self.streams[rank], self.sequences[rank] + 1
        sender = Sender(Incarnation(1000 + rank), rank, stream.origin)
        self.node.entries(
            stream, [SealEvent(PLACE, sender, self.sequences[rank], SealTerms(clock, ()))]
        )

    def read(self, rank: int, clock: int) -> int:
        read = RangeRead(PullTerms(_worker(rank), clock, self.now_s + 10), PLACE)
        self.node.begin_read(read)
        self.reads.append(read)
        return read.number

    @property
    def answered(self) -> int:
        return sum(read.is_answered for read in self.reads)

    def wait(self, rank: int, seconds: float) -> None:
        """A read of a worker that is two steps ahead, given up after so long."""
        self.seal(rank, 1)
        self.seal(rank, 2)
        number = self.read(rank, 4)
        self.now_s += seconds
        self.node.end_read(number)

    def waited_ms(self) -> dict[int, int]:
        """By rank."""
        return {reader - 2: ms for _, reader, ms in self.node.read_waits.totals_ms()}


def _on_a_loop(body: Callable[[], None]) -> None:
    async def run() -> None:
        body()

    asyncio.run(run())


def test_a_read_counts_from_its_own_step_until_the_others() -> None:
    def body() -> None:
        server = Server("ssp:1..4")
        server.read(0, 2)  # before its own seals have come
        server.now_s += 1.0
        server.seal(0, 1)
        server.seal(0, 2)
        server.now_s += 0.25
        assert server.answered == 0
        server.seal(1, 1)
        assert server.answered == 1
        assert server.waited_ms() == {0: 250}

    _on_a_loop(body)


def test_a_read_that_waits_for_its_own_step_only_counts_nothing() -> None:
    def body() -> None:
        server = Server("ssp:1..4")
        server.seal(1, 1)
        server.read(0, 1)
        server.now_s += 1.0
        server.seal(0, 1)
        assert server.answered == 1
        assert sum(server.waited_ms().values()) == 0

    _on_a_loop(body)


def test_reads_that_were_given_up_and_reads_at_once_count_once() -> None:
    def body() -> None:
        server = Server("ssp:1..4")
        server.seal(0, 1)
        server.seal(0, 2)
        given_up = server.read(0, 2)
        server.now_s += 0.5
        server.read(0, 2)
        server.now_s += 0.5
        server.node.end_read(given_up)
        server.now_s += 0.5
        server.seal(1, 1)
        assert server.waited_ms() == {0: 1000}, "from its last word on, and each moment once"

    _on_a_loop(body)


@pytest.mark.parametrize("text", ["ssp:1", "bsp"])
def test_a_table_whose_bound_is_fixed_is_not_counted(text: str) -> None:
    def body() -> None:
        server = Server(text)
        for clock in (1, 2):
            server.seal(0, clock)
        server.read(0, 2)
        server.now_s += 0.5
        for clock in (1, 2):
            server.seal(1, clock)
        assert server.answered == 1
        assert server.waited_ms() == {}

    _on_a_loop(body)


@pytest.mark.parametrize(
    "after", [_view("ssp:1", 2), _view("ssp:1..4", 2, NodeState.LEFT)], ids=["fixed", "left"]
)
def test_tables_and_workers_that_went_are_forgotten(after: ClusterView) -> None:
    def body() -> None:
        server = Server("ssp:1..4")
        server.wait(0, 1.0)
        assert server.waited_ms() == {0: 1000}
        server.node.observe(after)
        assert server.waited_ms() == {}

    _on_a_loop(body)


def test_what_a_heartbeat_says_is_bounded() -> None:
    def body() -> None:
        server = Server("ssp:1..4", workers=limits.MAX_READ_WAIT_COUNT + 5)
        for rank in range(limits.MAX_READ_WAIT_COUNT + 5):
            server.node.end_read(server.read(rank, 1))
        assert len(server.waited_ms()) == limits.MAX_READ_WAIT_COUNT

    _on_a_loop(body)
