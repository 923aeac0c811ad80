"""An update that cannot be computed: what its workers are told, and that nobody waits after it."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from torch import Tensor

from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.consistency import Consistency, parsed
from ps_core.errors import UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import Place, PushEvent, ReplyTo, SealEvent, SealTerms, Sender
from ps_server.service.node import ParameterNode
from ps_server.service.push_stream import PushStream
from ps_server.service.range_read import PullTerms, RangeRead
from ps_server.stores import Shards
from ps_server.values.custom_updates import checked
from ps_server.values.shard_store import ShardStore
from pushpull.v1 import parameters_pb2

RANGES = 4
BLOCK = 64
SERVER = Session("cluster", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
FAILING = TableId(1)
SOUND = TableId(2)

BSP, ASP = "bsp", "asp"

APART = (0, 1, 3)
"""Blocks of which each lives in another range; 2 lives with 0."""


class Fragile:
    """Subtracts the gradient; breaks on one."""

    hyperparameters: ClassVar = {"lr": 1.0}
    slots: ClassVar = {"m": 0.0}

    def update(
        self,
        values: Tensor,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,  # noqa: ARG002 - the contract's shape
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        values.sub_(gradient, alpha=numbers["lr"])
        if float(gradient[0]) == 13.0:
            raise ArithmeticError("thirteen")
        return values, {"m": state["m"] + 1.0}


def _spec(name: str, kind: OptimizerKind, consistency: Consistency, **more: Any) -> TableSpec:
    custom = "fragile" if kind is OptimizerKind.CUSTOM else ""
    numbers = (("lr", 1.0),)
    return TableSpec(
        name,
        DType.FLOAT32,
        BLOCK * RANGES,
        OptimizerSpec(kind, numbers, custom_update=custom),
        block_elements=BLOCK,
        consistency=consistency,
        **more,
    ).validated()


def answer_of(read: RangeRead) -> list[parameters_pb2.PullResponse]:
    """The answer to a read that waits no more."""
    assert read.is_answered
    found = []
    while not read.is_done:
        for part in read.next():
            assert isinstance(part, bytes)
            found.append(parameters_pb2.PullResponse.FromString(part))
    return found


@dataclass
class Stage:
    """One server with a table that may fail and one that does not."""

    consistency: str
    workers: int = 2
    from_rank_zero: bool = False
    gate_bytes: int = 0
    said: list[ReplyTo] = field(default_factory=list)

    def __post_init__(self) -> None:
        setting = parsed(self.consistency)
        start = InitializerKind.FROM_RANK_ZERO if self.from_rank_zero else InitializerKind.ZEROS
        more = {"initializer": Initializer(start), "gate_bytes": self.gate_bytes}
        failing = _spec("frail", OptimizerKind.CUSTOM, setting, **more)
        tables = (
            Table(FAILING, 0, failing),
            Table(SOUND, RANGES, _spec("sound", OptimizerKind.SGD, setting)),
        )
        self.metrics = ServerMetrics(CollectorRegistry())
        updates = {"fragile": checked("fragile", Fragile)}
        shards = Shards(SharedLanes(), updates)
        self.node = ParameterNode(
            SERVER, b"k" * 16, self.workers, self.metrics, lambda: 5.0, shards
        )
        self.node.lanes.open()  # its values have sequence locks
        ranges = tuple(
            RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), NodeId(1))
            for index, slots in enumerate(key_ranges(RANGES))
        )
        nodes = tuple(self._worker(rank, NodeState.ALIVE) for rank in range(self.workers))
        self.view = ClusterView(1, "cluster", self.workers, 1, nodes, ranges, tables)
        self.node.observe(self.view)
        self.node.works.finish()
        self.node.works.finish()  # a busy machine may have left some of it for later turns
        self.streams: list[PushStream] = []
        for rank in range(self.workers):
            identity = Session(
                "cluster", b"t" * 16, NodeId(2 + rank), self.sender(rank).incarnation,
                Role.WORKER, rank,
            )  # fmt: skip
            self.streams.append(self.node.open_stream(identity))

    @staticmethod
    def _worker(rank: int, state: NodeState) -> Node:
        return Node(NodeId(2 + rank), Incarnation(100 + rank), Role.WORKER, rank, "", state)

    def sender(self, rank: int) -> Sender:
        origin = self.streams[rank].origin if len(getattr(self, "streams", ())) > rank else 0
        return Sender(Incarnation(100 + rank), rank, origin)

    def place(self, table: TableId, block: int) -> Place:
        found = self.node.machine.table(table).range_of_block(block, RANGES)
        return Place(table, found, AssignmentEpoch(1))

    def push(
        self, rank: int, clock: int, sequence: int, value: float, *, block: int = 0,
        table: TableId = FAILING, **more: Any,
    ) -> PushEvent:  # fmt: skip
        place = self.place(table, block)
        payload = np.full(BLOCK, value, np.float32).tobytes()
        part = self.node.shards.decode(place, block, Codec.FP32, memoryview(payload), b"")
        return PushEvent(
            place, self.sender(rank), sequence, clock, block, part.byte_count, part, **more
        )

    def seal(
        self, rank: int, clock: int, sequence: int, *, block: int = 0, table: TableId = FAILING,
        **more: Any,
    ) -> SealEvent:  # fmt: skip
        place = self.place(table, block)
        return SealEvent(place, self.sender(rank), sequence, SealTerms(clock, **more))

    def take(self, rank: int, *events: PushEvent | SealEvent) -> list[ReplyTo]:
        """The server takes these in at once; what it then says to anybody."""
        self.node.entries(self.streams[rank], events)
        said = []
        for stream in self.streams:
            said += list(stream._replies.values())
            stream._replies.clear()
        self.said += said
        return said

    def outcome(
        self, rank: int, sequence: int, table: TableId = FAILING, block: int = 0
    ) -> Outcome:
        """How an entry ended, as its sender was told last."""
        key = (self.sender(rank).incarnation, table, self.place(table, block).range_id, sequence)
        endings = [
            reply.ending
            for reply in self.said
            if (reply.sender.incarnation, *reply[2:5]) == key and reply.ending is not None
        ]
        assert len(endings) == 1, endings
        if endings[0].outcome is Outcome.INVALID:
            assert isinstance(endings[0].error, UpdateFailed)
        return endings[0].outcome

    def read(self, rank: int, clock: int, *, block: int = 0, table: TableId = FAILING) -> RangeRead:
        """A read that was begun."""
        terms = PullTerms(self.streams[rank].session, clock, 90.0)
        read = RangeRead(terms, self.place(table, block))
        self.node.begin_read(read)
        return read

    def state(self, table: TableId, block: int) -> tuple[list[float], int, int, bool]:
        """First values, the state's first, the block's version, whether its lock is at rest."""
        place = (table, self.place(table, block).range_id)
        shard = self.node.shards.stores[place]
        assert isinstance(shard, ShardStore)
        held = shard._states[block]
        slots = [slot[0].item() for slot in held.slots.values()]
        lock = self.node.shards.segments._shared[place].place(block)[
            1
        ]  # raises while the block changes
        return (
            [held.values[0].item(), *slots],
            shard.version(block),
            int(np.max(held.steps)),
            (lock % 2 == 0),
        )


THIRTEEN = (
    r"table 'frail' has failed: its custom update 'fragile' cannot make update {clock} of block "
    r"{block}: it raised ArithmeticError: thirteen \(test_failed_update.py:\d+\) \(range \d\)"
)


class Stages:
    """Makes stages, and closes them."""

    def __init__(self) -> None:
        self.made: list[Stage] = []

    def __call__(self, consistency: str, **more: Any) -> Stage:
        self.made.append(Stage(consistency, **more))
        return self.made[-1]

    def trained(self) -> Stage:
        """BSP, with clock 1 applied in the ranges of block 0 and block 1."""
        stage = self(BSP)
        for rank in range(2):
            for block in (0, 1):
                push = stage.push(rank, 1, 1, 1.0, block=block)
                stage.take(rank, push, stage.seal(rank, 1, 2, block=block))
        return stage

    def close(self) -> None:
        for stage in self.made:
            stage.node.lanes.close()


@pytest.fixture
def stages() -> Stages:
    return Stages()


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A server's node belongs to a running loop."""

    @functools.wraps(test)
    def run(stages: Stages, **more: Any) -> None:
        async def whole() -> None:
            try:
                await test(stages=stages, **more)
            finally:
                stages.close()

        asyncio.run(whole())

    return run


def _break(stage: Stage, rank: int = 1) -> list[ReplyTo]:
    """Clock 2 of block 0 fails, by this rank's step."""
    stage.take(1 - rank, stage.push(1 - rank, 2, 3, 13.0), stage.seal(1 - rank, 2, 4))
    return stage.take(rank, stage.push(rank, 2, 3, 13.0), stage.seal(rank, 2, 4))


@on_a_loop
async def test_all_whose_step_it_was_are_told_and_values_are_as_they_were(stages: Stages) -> None:
    bsp = stages.trained()
    before = bsp.state(FAILING, 0)
    assert before == ([-1.0, 1.0], 1, 1, True)
    said = _break(bsp)
    for rank in range(2):
        assert bsp.outcome(rank, 3) is bsp.outcome(rank, 4) is Outcome.INVALID
    for reply in said:
        if reply.ending is not None:
            error = reply.ending.error
            assert isinstance(error, UpdateFailed)
            assert re.fullmatch(THIRTEEN.format(clock=2, block=0), error.message)
            assert error.__traceback__ is None  # its frames hold gradients
            assert error.__context__ is None
    assert bsp.state(FAILING, 0) == before
    assert bsp.metrics.failed_updates._value.get() == 1.0
    assert bsp.metrics.applied_updates.count == 2


@on_a_loop
async def test_what_comes_later_is_refused_with_the_cause(stages: Stages) -> None:
    """SM-4."""
    bsp = stages.trained()
    _break(bsp)
    bsp.take(0, bsp.push(0, 3, 5, 1.0), bsp.seal(0, 3, 6))
    assert bsp.outcome(0, 5) is bsp.outcome(0, 6) is Outcome.INVALID
    bsp.take(0, bsp.seal(0, 3, 7, skip=True, last=True))
    assert bsp.outcome(0, 7) is Outcome.INVALID
    for clock in (0, 1, 2, 3):
        (answer,) = answer_of(bsp.read(0, clock))
        assert answer.error.error.code == 17
        assert "thirteen" in answer.error.error.message


@on_a_loop
async def test_what_was_asked_again_gets_the_same_answer(stages: Stages) -> None:
    bsp = stages.trained()
    _break(bsp)
    bsp.said.clear()
    bsp.take(1, bsp.push(1, 2, 3, 13.0), bsp.seal(1, 2, 4))
    assert bsp.outcome(1, 3) is bsp.outcome(1, 4) is Outcome.INVALID


@on_a_loop
async def test_the_other_ranges_of_the_table_fail_with_it(stages: Stages) -> None:
    """A step that is in some ranges and not in others is nobody's (SM-4)."""
    bsp = stages.trained()
    waiting = bsp.read(0, 2, block=1)
    bsp.take(0, bsp.push(0, 2, 3, 1.0, block=1), bsp.seal(0, 2, 4, block=1))
    bsp.take(1, bsp.push(1, 2, 3, 1.0, block=1))  # not sealed
    assert not waiting.is_answered
    _break(bsp)
    for rank, sequence in ((0, 3), (0, 4), (1, 3)):
        assert bsp.outcome(rank, sequence, block=1) is Outcome.INVALID
    (answer,) = answer_of(waiting)
    assert "thirteen" in answer.error.error.message
    bsp.take(1, bsp.seal(1, 2, 4, block=1))
    assert bsp.outcome(1, 4, block=1) is Outcome.INVALID
    assert bsp.state(FAILING, 1) == ([-1.0, 1.0], 1, 1, True)
    assert bsp.node.machine.gate_bytes == 0


@on_a_loop
async def test_other_tables_go_on(stages: Stages) -> None:
    bsp = stages.trained()
    table: dict[str, Any] = {"table": SOUND}
    bsp.take(0, bsp.push(0, 1, 1, 1.0, **table), bsp.seal(0, 1, 2, **table))
    read = bsp.read(0, 1, table=SOUND)
    _break(bsp)
    assert not read.is_answered
    bsp.take(1, bsp.push(1, 1, 1, 3.0, **table), bsp.seal(1, 1, 2, **table))
    for rank in range(2):
        assert bsp.outcome(rank, 2, SOUND) is Outcome.APPLIED
    assert answer_of(read)[0].block.version == 1
    assert bsp.state(SOUND, 0)[0] == [-2.0]


@on_a_loop
async def test_all_that_was_decided_at_once_is_said_anew(stages: Stages) -> None:
    """One message has a good update of one range, a bad one of another, good ones behind it, and
    one of another table: the machine had ended them all before the second was tried.
    """
    stage = stages(ASP, workers=1)
    waiting = {b: stage.read(0, 1, block=b) for b in APART}
    pushes = [stage.push(0, 1, 1, 13.0 if b == 1 else 1.0, block=b) for b in APART]
    seals = [stage.seal(0, 1, 2, block=b) for b in APART]
    other = stage.push(0, 1, 1, 1.0, table=SOUND), stage.seal(0, 1, 2, table=SOUND)
    later = stage.push(0, 2, 3, 1.0, block=3), stage.seal(0, 2, 4, block=3)
    stage.take(0, *pushes, other[0], *seals, other[1], *later)
    assert stage.outcome(0, 1, block=0) is stage.outcome(0, 2, block=0) is Outcome.APPLIED
    for block, sequence in ((1, 1), (1, 2), (3, 1), (3, 2), (3, 3), (3, 4)):
        assert stage.outcome(0, sequence, block=block) is Outcome.INVALID
    assert stage.outcome(0, 2, SOUND) is Outcome.APPLIED
    assert stage.state(FAILING, 0)[0] == [-1.0, 1.0]
    assert stage.state(FAILING, 3) == ([0.0], 0, 0, True)
    assert stage.state(SOUND, 0)[0] == [-1.0]
    assert answer_of(waiting[0])[0].HasField("block")  # it was let go before
    assert all(answer_of(waiting[b])[0].HasField("error") for b in (1, 3))
    parts = stage.node.machine.shards
    counts = {block: parts[stage.place(FAILING, block)[:2]].state.update_count for block in APART}
    assert counts == {0: 1, 1: 0, 3: 0}


@on_a_loop
async def test_an_eager_push_fails_alone_and_its_seal_after_it(stages: Stages) -> None:
    stage = stages(ASP, workers=1)
    stage.take(0, stage.push(0, 1, 1, 13.0, eager=(("lr", 1.0),)))
    assert stage.outcome(0, 1) is Outcome.INVALID
    stage.take(0, stage.seal(0, 1, 2))
    assert stage.outcome(0, 2) is Outcome.INVALID


@on_a_loop
async def test_initial_values_that_were_still_to_come_are_refused_too(stages: Stages) -> None:
    """Rank 0 seals clock 0 everywhere in one message; another's step waits for it in one range."""
    stage = stages(ASP, from_rank_zero=True)
    stage.take(1, stage.push(1, 1, 1, 13.0), stage.seal(1, 1, 2))
    pushes = [stage.push(0, 0, 1, 2.0, block=b, is_assign=True) for b in range(2)]
    stage.take(0, *pushes, *(stage.seal(0, 0, 2, block=b) for b in range(2)))
    assert stage.outcome(0, 1) is stage.outcome(0, 2) is Outcome.APPLIED
    assert stage.outcome(1, 1) is stage.outcome(1, 2) is Outcome.INVALID
    assert stage.outcome(0, 1, block=1) is stage.outcome(0, 2, block=1) is Outcome.INVALID
    assert stage.state(FAILING, 0)[0] == [2.0]
    assert stage.state(FAILING, 1)[0] == [0.0]


@on_a_loop
async def test_who_waits_for_room_is_not_left_waiting(stages: Stages) -> None:
    stage = stages(BSP, gate_bytes=1, workers=3)  # room for a sum and a step
    for rank, value in enumerate((26.0, 13.0)):  # 13 in the mean of three
        pushes = (stage.push(rank, 1, 1 + (b == 2), value, block=b) for b in range(RANGES))
        stage.take(rank, *pushes)
    for _ in range(3):  # asks for three blocks: the room of two is not enough
        said = stage.take(2, stage.push(2, 1, 1, 13.0, block=1))
        assert [reply.kind for reply in said] == [ReplyKind.REFUSED]
    stage.take(2, stage.seal(2, 1, 1))
    stage.take(1, stage.seal(1, 1, 3))
    said = stage.take(0, stage.seal(0, 1, 3))
    assert stage.outcome(0, 1) is stage.outcome(0, 1, block=3) is Outcome.INVALID
    assert ReplyKind.CREDIT in [reply.kind for reply in said if reply.sender.rank == 2]
    stage.take(2, stage.push(2, 1, 1, 13.0, block=1))
    assert stage.outcome(2, 1, block=1) is Outcome.INVALID


@pytest.mark.parametrize("consistency", [BSP, "bsp:backup=1,grace=50ms", "ssp:2", ASP])
@on_a_loop
async def test_time_and_deaths_pass_over_a_failed_table(stages: Stages, consistency: str) -> None:
    stage = stages(consistency, workers=3)
    for rank in range(2):
        push = stage.push(rank, 1, 1, 1.0, block=1)
        stage.take(rank, push, stage.seal(rank, 1, 2, block=1))
    assert (stage.node.machine.wake_s is None) == ("grace" not in consistency)
    for rank in range(3):  # all have one step more in effect than the range will have formed
        stage.take(rank, stage.push(rank, 1, 1, 13.0), stage.seal(rank, 1, 2))
    for rank in range(2):
        stage.take(rank, stage.push(rank, 2, 3, 1.0, block=1), stage.seal(rank, 2, 4, block=1))
    assert stage.node.machine.wake_s is None
    stage.node.tick()
    gone = tuple(stage._worker(rank, NodeState.GONE) for rank in range(3))
    view = stage.view
    stage.node.observe(ClusterView(2, "cluster", 3, 1, gone, view.ranges, view.tables))
    stage.node.works.finish()
    stage.node.tick()
    assert stage.metrics.failed_updates._value.get() == 1.0


@pytest.mark.parametrize("consistency", ["ssp:1", ASP, "asp:compensate=1"])
@on_a_loop
async def test_without_bsp_the_others_hear_of_it_at_their_next_step(
    stages: Stages, consistency: str
) -> None:
    stage = stages(consistency)
    stage.take(0, stage.push(0, 1, 1, 1.0), stage.seal(0, 1, 2))
    assert stage.outcome(0, 2) is Outcome.APPLIED
    stage.take(1, stage.push(1, 1, 1, 13.0), stage.seal(1, 1, 2))
    assert stage.outcome(1, 2) is Outcome.INVALID
    assert stage.state(FAILING, 0)[0] == [-1.0, 1.0]
    stage.take(0, stage.push(0, 2, 3, 1.0), stage.seal(0, 2, 4))
    assert stage.outcome(0, 4) is Outcome.INVALID


def store_of(stage: Stage, block: int) -> ShardStore:
    """The store of a block of the table whose update fails."""
    store = stage.node.shards.stores[stage.place(FAILING, block)[:2]]
    assert isinstance(store, ShardStore)
    return store


@on_a_loop
async def test_nothing_is_kept_for_updates_that_never_come(stages: Stages) -> None:
    stage = stages("asp:compensate=1")
    shards = [store_of(stage, block) for block in APART]
    for rank in range(2):
        answer_of(stage.read(rank, 0))
    assert any(shard._kept for shard in shards)
    stage.take(1, stage.push(1, 1, 1, 13.0), stage.seal(1, 1, 2))
    assert not any(shard._kept or shard._accumulators for shard in shards)

    stage = stages(BSP)
    shards = [store_of(stage, block) for block in APART]
    stage.take(0, stage.push(0, 1, 1, 1.0, block=1), stage.seal(0, 1, 2, block=1))
    assert any(shard._accumulators for shard in shards)  # rank 0's turn has come there
    stage.take(0, stage.push(0, 1, 1, 13.0), stage.seal(0, 1, 2))
    stage.take(1, stage.push(1, 1, 1, 13.0), stage.seal(1, 1, 2))
    assert not any(shard._accumulators for shard in shards)


@on_a_loop
async def test_a_cut_of_a_failed_table_is_refused_and_an_open_one_holds_nothing(
    stages: Stages,
) -> None:
    stage = stages(ASP)
    stage.take(0, stage.push(0, 1, 1, 1.0), stage.seal(0, 1, 2))
    session = stage.streams[0].session
    assert stage.node.begin_cut(session, FAILING, 1, 30.0) == 1
    stage.take(1, stage.push(1, 1, 1, 13.0), stage.seal(1, 1, 2))
    assert stage.outcome(1, 2) is Outcome.INVALID
    with pytest.raises(UpdateFailed, match="thirteen"):
        stage.node.begin_cut(session, FAILING, 2, 30.0)
    stage.node.end_cut(session, FAILING, 1)
    stage.node.tick()
    assert stage.node.machine.wake_s is None
    stage.take(0, stage.push(0, 2, 3, 1.0), stage.seal(0, 2, 4))
    assert stage.outcome(0, 4) is Outcome.INVALID
