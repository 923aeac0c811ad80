"""What a pull makes of its servers' answers: blocks that come twice, late, torn or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from ps_core import limits, sequence_locks
from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.consistency import parsed
from ps_core.errors import (
    AlreadyPast,
    Internal,
    InvalidConfig,
    NotOwner,
    PushpullError,
    Recovering,
    ValuesLost,
    WaitExpired,
)
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, key_ranges
from ps_core.sequence_locks import Shared
from ps_core.tables.elements import NATIVE_CODEC, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.grpc.errors import error_to_proto
from ps_runtime.system.clock import now_s
from ps_worker.spec.values import Region
from ps_worker.steps.counters import Counters
from ps_worker.steps.held_values import HeldValue, HeldValues
from ps_worker.steps.steps import Pulled, TableSteps
from ps_worker.transport.lane import Copiers
from ps_worker.transport.links import Answer, ServerLinks
from ps_worker.transport.pulls import ConsistentPuller, Puller, PullOrder
from pushpull.v1 import parameters_pb2
from tests.integration.lane_cluster import until
from tests.property.shard_twin import table

ONE, OTHER = NodeId(1), NodeId(2)
MODEL = table([6 * 64])
RANGE_COUNT = 2
BY_RANGE = MODEL.blocks_by_range(RANGE_COUNT)

Answers = Callable[[parameters_pb2.PullRequest], Iterable[Answer | PushpullError]]


def view_of(
    number: int = 1,
    epoch: int = 3,
    primaries: tuple[NodeId, NodeId] = (ONE, OTHER),
    *,
    of: Table = MODEL,
    is_lost: bool = False,
) -> ClusterView:
    ranges = tuple(
        RangeAssignment(RangeId(n), slots, AssignmentEpoch(epoch), primary, is_lost=is_lost)
        for n, (slots, primary) in enumerate(zip(key_ranges(RANGE_COUNT), primaries, strict=True))
    )
    return ClusterView(number, "cluster", 1, 2, (), ranges, (of,))


class Trouble:
    words = ""

    def note(self, _: PushpullError) -> None:
        """Nothing is in trouble."""


class Lane:
    """Shared memory whose values are copied, or torn."""

    def __init__(self) -> None:
        self.torn_blocks: set[int] = set()
        self.copied: list[int] = []

    def shared(self, value: parameters_pb2.SharedValue, target: Any, skip_bytes: int) -> Shared:
        assert skip_bytes == 0
        self.copied.append(value.block)
        values = np.full(target.nbytes // 4, value.block, "<f4").view(np.uint8)
        lock = 2 if value.block in self.torn_blocks else 4
        return Shared(values, target, np.array([lock], np.uint64), 0, 4)


@dataclass(eq=False)
class Link:
    """A server that answers as it is told; `requests` are what it was asked."""

    answers: Answers
    lane: Lane | None = None
    requests: list[parameters_pb2.PullRequest] = field(default_factory=list)
    small: list[bool] = field(default_factory=list)
    trouble: Trouble = field(default_factory=Trouble)

    @property
    def node(self) -> Any:
        return type("Node", (), {"address": "host:1", "node_id": ONE})

    async def pull(
        self,
        request: parameters_pb2.PullRequest,
        timeout_s: float,
        take: Callable[[Answer], None],
        *,
        is_small: bool,
    ) -> None:
        assert timeout_s > 0
        self.requests.append(request)
        self.small.append(is_small)
        for answer in self.answers(request):
            if isinstance(answer, PushpullError):
                raise answer
            take(answer)


class Links:
    """The newest view, and links."""

    def __init__(self, *links: Link, view: ClusterView | None = None) -> None:
        self.view = view_of() if view is None else view
        self.by_server = dict(zip((ONE, OTHER), links, strict=False))

    def find(self, server: NodeId | None) -> Link | None:
        return None if server is None else self.by_server.get(server)


def block_of(block: int, clock: int = 5, of: Table = MODEL, **more: Any) -> Answer:
    """A block whose elements are all its number."""
    value = parameters_pb2.BlockValue(
        block=block,
        clock=clock,
        version=10 + block,
        peer_version=20 + block,
        codec=wire.codec_to_proto(NATIVE_CODEC[of.spec.dtype]),
        **more,
    )
    element = "<f2" if of.spec.dtype is DType.FLOAT16 else "<f4"
    return value, memoryview(np.full(64, block, element).tobytes())


def shared_of(*blocks: int, clock: int = 5) -> Answer:
    codec = wire.codec_to_proto(MODEL.spec.arithmetic_codec)
    values = [
        parameters_pb2.SharedValue(
            block=block, clock=clock, version=10 + block, byte_count=256, codec=codec
        )
        for block in blocks
    ]
    return parameters_pb2.PullResponse(shared=parameters_pb2.SharedValues(values=values))


def asked(request: parameters_pb2.PullRequest) -> list[int]:
    """The blocks of a request: those that it names, or all of its ranges."""
    return [
        block
        for each in request.ranges
        for block in (each.blocks or BY_RANGE[RangeId(each.range_id)])
    ]


def whole(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
    return [block_of(block) for block in asked(request)]


def order_of(of: Table = MODEL, *, lasts_s: float = 10.0, **more: Any) -> PullOrder:
    count = of.spec.element_count
    memory = np.full(count * NATIVE_CODEC[of.spec.dtype].element_bytes, 255, np.uint8)
    steps = TableSteps(of, cast(Any, None))
    return PullOrder(
        of, Region(0, count, (count,)), memory, 5, more.pop("consistent", False), False,
        now_s() + lasts_s, steps, **more,
    )  # fmt: skip


def pulled(links: Links, order: PullOrder, copiers: Copiers | None = None) -> Pulled:
    return asyncio.run(puller_of(links, copiers).pull(order))


def puller_of(links: Links, copiers: Copiers | None = None) -> Puller:
    return Puller(cast(ServerLinks, links), Counters(), copiers)


@pytest.fixture(params=[0, 2], ids=["copied by the loop", "copied by threads"])
def copiers(request: pytest.FixtureRequest) -> Iterator[Copiers]:
    made = Copiers(request.param, least_bytes=0)
    yield made
    made.close()


def check_values(order: PullOrder) -> None:
    """All is there, each block in its place."""
    expected = np.repeat(np.arange(6), 64)
    assert order.raw.view("<f4").tolist() == expected.tolist()


def test_every_server_is_asked_for_its_ranges_and_the_lowest_clock_counts() -> None:
    one, other = Link(whole), Link(lambda request: [block_of(b, 4) for b in asked(request)])
    order = order_of()
    found = pulled(Links(one, other), order)
    check_values(order)
    assert [[each.range_id for each in link.requests[0].ranges] for link in (one, other)] == [
        [0],
        [1],
    ]
    assert found.clock == 4
    assert found.versions == {block: 10 + block for block in range(6)}
    assert order.steps.peer_versions == {block: 20 + block for block in range(6)}


def test_what_did_not_come_is_asked_for_again_alone() -> None:
    first = list(BY_RANGE[RangeId(0)])

    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        blocks = asked(request)
        return [block_of(b) for b in blocks[:1]] if len(blocks) > 1 else [block_of(blocks[0])]

    links = Links(Link(answers), Link(whole))
    order = order_of()
    pulled(links, order)
    check_values(order)
    requests = [asked(request) for request in links.by_server[ONE].requests]
    assert requests == [first[number:] for number in range(len(first))]
    assert len(links.by_server[OTHER].requests) == 1


def test_a_block_that_comes_twice_counts_once() -> None:
    first = BY_RANGE[RangeId(0)][0]

    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        own = whole(request)
        return [own[0], block_of(first, clock=1), *own[1:]]

    counters = Counters()
    links = Links(Link(answers), Link(whole))
    found = asyncio.run(Puller(cast(ServerLinks, links), counters).pull(order_of()))
    assert found.clock == 5, "the second is dropped"
    assert counters.pulled_bytes == MODEL.spec.element_count * 4


def test_presence_is_kept_where_some_tensor_was_absent() -> None:
    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        return [block_of(b, presence=b"\x02" if b == asked(request)[0] else b"") for b in
                asked(request)]  # fmt: skip

    found = pulled(Links(Link(answers), Link(whole)), order_of())
    assert found.presence == {BY_RANGE[RangeId(0)][0]: b"\x02"}


@pytest.mark.parametrize("of_codec", [False, True])
def test_a_block_of_another_length_or_codec_is_a_bug_of_the_server(of_codec: bool) -> None:
    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        value, payload = cast(Any, block_of(asked(request)[0]))
        if of_codec:
            value.codec += 1
        return [(value, payload if of_codec else payload[:-4])]

    with pytest.raises(Internal, match="expected 64 elements of fp32"):
        pulled(Links(Link(answers), Link(whole)), order_of())


def test_a_block_of_a_range_that_has_moved_is_pulled_again() -> None:
    """It may be older than what its next primary has."""
    links = Links(Link(whole), Link(whole))

    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        if len(links.by_server[ONE].requests) == 1:
            links.view = view_of(2, 4)
        return whole(request)

    links.by_server[ONE].answers = answers
    order = order_of()
    pulled(links, order)
    check_values(order)
    epochs = [request.ranges[0].assignment_epoch for request in links.by_server[ONE].requests]
    assert epochs == [3, 4]


def test_ranges_that_were_spread_over_servers_do_not_wait_for_what_they_did_before() -> None:
    links, counters, words = Links(view=view_of(primaries=(ONE, ONE))), Counters(), list[str]()

    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        words.append(counters.waiting_for)
        links.view = view_of(2, 4)
        return whole(request) if words[1:] else [NotOwner("server 1 is not primary now")]

    links.by_server = {ONE: Link(answers), OTHER: Link(answers)}
    asyncio.run(Puller(cast(ServerLinks, links), counters).pull(order_of()))
    assert words == ["", "", ""]


def test_values_that_are_lost_are_not_waited_for() -> None:
    links = Links(Link(whole), Link(whole), view=view_of(is_lost=True))
    with pytest.raises(ValuesLost):
        pulled(links, order_of())


def test_an_incurable_error_ends_the_pull_though_others_may_be_cured() -> None:
    links = Links(Link(lambda _: [Recovering("later")]), Link(lambda _: [InvalidConfig("no")]))
    with pytest.raises(InvalidConfig, match="no"):
        pulled(links, order_of())
    assert [len(link.requests) for link in links.by_server.values()] == [1, 1]


def test_a_wait_that_is_too_long_names_the_server() -> None:
    links = Links(Link(whole), Link(lambda _: [Recovering("it is starting")]))
    with pytest.raises(WaitExpired, match=r"took too long: server 2 at host:1: it is starting"):
        pulled(links, order_of(lasts_s=0.05))
    links.by_server[OTHER].answers = lambda _: [WaitExpired("worker 1 is missing")]
    with pytest.raises(WaitExpired, match=r"^server 2 at host:1: worker 1 is missing"):
        pulled(links, order_of(lasts_s=0.05))


def test_a_server_that_ends_its_answers_early_is_not_asked_in_a_loop() -> None:
    def answers(_: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        return [InvalidConfig("it is asked at once")] if len(one.requests) > 20 else []

    one = Link(answers)
    with pytest.raises(WaitExpired, match="took too long: a server ended its answer early"):
        pulled(Links(one, Link(whole)), order_of(lasts_s=0.05))


def test_a_request_waits_no_longer_than_its_caller() -> None:
    one = Link(whole)
    pulled(Links(one, Link(whole)), order_of(lasts_s=2.0))
    pulled(Links(one, Link(whole)), order_of(lasts_s=100.0))
    short, long = (request.deadline_ms for request in one.requests)
    assert 1_000 < short <= 2_000
    assert long == 10_000


# --- from shared memory


def shares(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
    return [shared_of(*asked(request))] if request.shared else whole(request)


def test_values_are_copied_from_shared_memory(copiers: Copiers) -> None:
    lanes = Lane(), Lane()
    links = Links(*(Link(shares, lane) for lane in lanes))
    order = order_of()
    found = pulled(links, order, copiers)
    check_values(order)
    assert found.versions == {block: 10 + block for block in range(6)}
    assert sorted(lanes[0].copied + lanes[1].copied) == list(range(6))
    assert [link.small for link in links.by_server.values()] == [[True], [True]]


def test_an_answer_in_several_messages_is_copied_whole(copiers: Copiers) -> None:
    def one_by_one(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        return [shared_of(block) for block in asked(request)]

    links = Links(Link(one_by_one, Lane()), Link(one_by_one, Lane()))
    order = order_of()
    found = pulled(links, order, copiers)
    check_values(order)
    assert found.versions == {block: 10 + block for block in range(6)}
    assert [len(link.requests) for link in links.by_server.values()] == [1, 1]


def test_of_a_range_with_a_torn_value_none_counts(copiers: Copiers) -> None:
    """The others may be of another moment."""
    lane = Lane()
    first = BY_RANGE[RangeId(0)]
    lane.torn_blocks = {first[1]}
    links = Links(Link(shares, lane), Link(shares, Lane()))
    order = order_of()
    pulled(links, order, copiers)
    check_values(order)
    requests = links.by_server[ONE].requests
    assert [asked(request) for request in requests] == [list(first)] * 4
    assert [request.shared for request in requests] == [True, True, True, False]
    assert lane.copied == [*first] * 3
    assert len(links.by_server[OTHER].requests) == 1


class Busy(Copiers):
    """Its one thread copies when somebody waits for it, and no sooner."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.ended = False

    def begin(self, shared: Sequence[Shared]) -> Future[list[bool]]:
        found: Future[list[bool]] = Future()
        found.set_running_or_notify_cancel()
        threading.Thread(target=self._copy, args=(found, shared)).start()
        self.begun.set()
        return found

    def _copy(self, found: Future[list[bool]], shared: Sequence[Shared]) -> None:
        until(lambda: bool(found._waiters), "somebody waits")
        counts = sequence_locks.copied(shared)
        self.ended = True
        found.set_result(counts)


def test_a_pull_that_is_given_up_ends_after_the_copies_that_write_to_its_memory() -> None:
    busy = Busy()
    links = Links(Link(shares, Lane()), Link(lambda _: [], Lane()))
    puller, order = puller_of(links, busy), order_of()

    async def given_up() -> None:
        pulling = asyncio.create_task(puller.pull(order))
        await asyncio.to_thread(busy.begun.wait)
        pulling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pulling
        assert busy.ended

    asyncio.run(given_up())


@pytest.mark.parametrize("kind", ["consistent", "state", "aggregate", "half"])
def test_what_cannot_be_shared_as_it_is_comes_as_bytes(kind: str) -> None:
    of = MODEL
    if kind == "aggregate":
        of = table([6 * 64], optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
    if kind == "half":
        of = table([6 * 64], dtype=DType.FLOAT16)

    def answers(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        assert not request.shared
        return [block_of(block, of=of) for block in asked(request)]

    links = Links(Link(answers, Lane()), Link(answers, Lane()))
    more: dict[str, Any] = {"consistent": {"consistent": True}, "state": {"array": "step"}}
    order = order_of(of, **more.get(kind, {}))
    pulled(links, order)
    found = order.raw.view("<f2" if kind == "half" else "<f4")
    assert found.tolist() == np.repeat(np.arange(6), 64).tolist()
    if kind == "state":
        assert order.steps.peer_versions == {}, "the worker has not seen the values"


# --- into memory that holds values


def unchanged_of(*blocks: int, clock: int = 6) -> Answer:
    found = parameters_pb2.UnchangedBlocks(clock=clock, blocks=blocks)
    return parameters_pb2.PullResponse(unchanged=found)


def held_of(request: parameters_pb2.PullRequest) -> dict[int, int]:
    """The versions that a request says its caller has."""
    found: dict[int, int] = {}
    for each in request.ranges:
        blocks = each.blocks or BY_RANGE[RangeId(each.range_id)]
        if each.held_versions:
            found |= {b: v - 1 for b, v in zip(blocks, each.held_versions, strict=True) if v}
    return found


def without_held(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
    """All that is asked for, but for what the caller has: in shared memory, if it may be."""
    held = held_of(request)
    new = [block for block in asked(request) if block not in held]
    found = [shared_of(*new)] if request.shared else [block_of(block) for block in new]
    return [*found, unchanged_of(*held)] if held else [*found]


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_held_does_not_come_again(is_shared: bool, copiers: Copiers) -> None:
    lanes = (Lane(), Lane()) if is_shared else (None, None)
    one, other = (Link(without_held, lane) for lane in lanes)
    links, held = Links(one, other), HeldValues()
    order = order_of(held=held)
    first = pulled(links, order, copiers)
    assert held_of(one.requests[0]) == {}
    counters = Counters()
    order = replace(order, clock=6, steps=TableSteps(MODEL, cast(Any, None)))
    puller = Puller(cast(ServerLinks, links), counters, copiers)
    found = asyncio.run(puller.pull(order))
    check_values(order)
    assert held_of(one.requests[1]) == {b: 10 + b for b in BY_RANGE[RangeId(0)]}
    assert (counters.pulled_bytes, counters.unchanged_bytes) == (0, order.raw.nbytes)
    assert found == replace(first, clock=6), "as if all had come"
    peers = {block: 0 if is_shared else 20 + block for block in range(6)}
    assert order.steps.peer_versions == peers


def test_a_request_without_anything_held_has_nothing_more() -> None:
    plain, holding = Link(whole), Link(whole)
    pulled(Links(plain, Link(whole)), order_of())
    pulled(Links(holding, Link(whole)), order_of(held=HeldValues()))
    before, after = plain.requests[0], holding.requests[0]
    after.deadline_ms = before.deadline_ms
    assert after == before


def test_what_was_written_in_part_is_not_held(copiers: Copiers) -> None:
    """The torn value's range comes again as bytes; what it had of before is not claimed."""
    first = BY_RANGE[RangeId(0)]
    lane = Lane()
    one = Link(without_held, lane)
    links, held = Links(one, Link(without_held, Lane())), HeldValues()
    pulled(links, order_of(held=held), copiers)
    lane.torn_blocks = {first[1]}

    def newer(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
        return shares(request) if len(one.requests) == 2 else without_held(request)

    one.answers = newer
    order = order_of(held=held)
    pulled(links, order, copiers)
    claims = [held_of(request) for request in one.requests]
    assert claims == [{}, {b: 10 + b for b in first}, {}, {}, {}]
    assert [request.shared for request in one.requests] == [True, True, True, True, False]


def test_values_beside_unchanged_ones_count_once_the_range_is_whole(copiers: Copiers) -> None:
    """In shared memory and as bytes, whatever comes first."""
    first = BY_RANGE[RangeId(0)]
    held = HeldValues()
    one = Link(without_held, Lane())
    links = Links(one, Link(without_held, Lane()))
    pulled(links, order_of(held=held), copiers)
    for answers in (
        [unchanged_of(*first[1:]), shared_of(first[0])],
        [shared_of(first[0]), unchanged_of(*first[1:])],
        [unchanged_of(*first[1:]), block_of(first[0])],
    ):
        one.answers = lambda _, answers=answers: answers  # type: ignore[misc]
        one.requests.clear()
        pulled(links, order_of(held=held), copiers)
        assert len(one.requests) == 1


def test_values_of_another_epoch_are_not_held() -> None:
    """Its next primary counts edits anew, so the same numbers may be another value's."""
    one, held = Link(without_held), HeldValues()
    links = Links(one, Link(without_held))
    pulled(links, order_of(held=held))
    links.view = view_of(2, 4)
    pulled(links, order_of(held=held))
    links.view = view_of(3, 5, (OTHER, ONE))
    pulled(links, order_of(held=held))
    assert [held_of(request) for request in one.requests] == [{}, {}, {}]


def test_an_unchanged_block_that_is_not_held_is_a_bug_of_the_server() -> None:
    first = BY_RANGE[RangeId(0)]
    for held in (None, HeldValues()):
        links = Links(Link(lambda _: [unchanged_of(*first)]), Link(whole))
        with pytest.raises(Internal, match="came as unchanged; expected its values"):
            pulled(links, order_of(held=held))


def test_a_request_holds_no_more_than_it_may_name() -> None:
    """Blocks of 64 elements: of a table of many, the first ranges' are held."""
    count = limits.MAX_NAMED_BLOCK_COUNT + 64
    of = table([count * 64])
    held = HeldValues()
    for block in range(count):
        held.take(block, HeldValue(AssignmentEpoch(3), 0, 2**40, 0))
    by_range = of.blocks_by_range(RANGE_COUNT)
    link = Link(
        lambda request: [unchanged_of(*by_range[RangeId(r.range_id)]) for r in request.ranges]
    )
    links = Links(link, view=view_of(primaries=(ONE, ONE), of=of))
    pulled(links, order_of(of, held=held))
    (request,) = link.requests
    held_counts = [len(each.held_versions) for each in request.ranges]
    assert 0 < sum(held_counts) <= limits.MAX_NAMED_BLOCK_COUNT
    assert request.ByteSize() <= limits.MAX_ENTRY_BYTES


# --- while the view changes


def test_a_request_to_a_server_that_lost_its_range_is_given_up() -> None:
    async def scene() -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        class Deaf(Link):
            async def pull(self, *arguments: Any, **more: Any) -> None:
                if self.requests:
                    await super().pull(*arguments, **more)
                    return
                self.requests.append(arguments[0])
                begun.set()
                await never.wait()

        deaf = Deaf(whole)
        links = Links(deaf, Link(whole))
        puller = puller_of(links)
        order = order_of()
        pulling = asyncio.create_task(puller.pull(order))
        await begun.wait()
        puller.take_view(links.view)
        assert puller.unanswered_by == [ONE]
        links.view = view_of(2, 4, (OTHER, OTHER))
        puller.take_view(links.view)
        await pulling
        check_values(order)
        assert len(deaf.requests) == 1
        assert puller.unanswered_by == []

    asyncio.run(scene())


# --- a reader's consistent pull


class Readable(Link):
    """A server that tells its clock and holds cuts."""

    clock = 7
    cut_clock = 9

    async def range_stats(self, _: int) -> parameters_pb2.GetRangeStatsResponse:
        stats = parameters_pb2.RangeStats(clock=self.clock)
        return parameters_pb2.GetRangeStatsResponse(ranges=[stats])

    async def begin_cut(self, _: int, cut: int, lasts_s: float) -> int:
        assert lasts_s > 0
        self.cuts = [*getattr(self, "cuts", []), cut]
        return self.cut_clock

    async def end_cut(self, _: int, cut: int) -> None:
        self.cuts.remove(cut)


def reading(
    text: str, *links: Link, after_clock: int | None = None, **more: Any
) -> tuple[PullOrder, Pulled]:
    """A consistent read of a table whose newest setting holds after that clock, or always."""
    of = replace(MODEL, spec=replace(MODEL.spec, consistency=parsed(text)))
    if after_clock is not None:
        of = replace(of, change=TableChange(1, after_clock, parsed(text)))
    found = Links(*links, view=view_of(of=of))
    order = order_of(of, consistent=True, **more)
    puller = ConsistentPuller(puller_of(found))
    return order, asyncio.run(puller.pull(order))


def test_under_bsp_all_ranges_are_pulled_at_the_newest_clock_of_any() -> None:
    one, other = Readable(whole), Readable(whole)
    other.clock = 8
    order, _ = reading("bsp", one, other)
    check_values(order)
    assert [link.requests[0].clock for link in (one, other)] == [8, 8]
    assert all(link.requests[0].consistent for link in (one, other))


def test_a_range_that_is_past_the_clock_is_asked_further_ahead_each_time() -> None:
    def past(request: parameters_pb2.PullRequest) -> Sequence[Answer | PushpullError]:
        if len(one.requests) <= 3:
            return [AlreadyPast("past", clock=request.clock + 10)]
        return whole(request)

    one = Readable(past)
    order, _ = reading("bsp", one, Readable(whole))
    check_values(order)
    assert [request.clock for request in one.requests] == [7, 18, 30, 44]


def test_under_ssp_the_highest_clock_of_a_cut_is_pulled_and_the_cut_ended() -> None:
    one, other = Readable(whole), Readable(whole)
    one.cut_clock = 12
    order, _ = reading("ssp:2", one, other)
    check_values(order)
    assert [link.requests[0].clock for link in (one, other)] == [12, 12]
    assert one.requests[0].cut == other.requests[0].cut > 0
    assert one.cuts == other.cuts == []


def test_under_asp_each_range_is_pulled_as_it_is() -> None:
    one, other = Readable(whole), Readable(whole)
    order, _ = reading("asp", one, other)
    check_values(order)
    assert not any(link.requests[0].consistent for link in (one, other))
    assert [link.requests[0].clock for link in (one, other)] == [5, 5]


# --- under a setting that holds from a later clock on


def check_read_by_cut(order: PullOrder, *links: Readable) -> None:
    check_values(order)
    for link in links:
        assert link.requests[-1].consistent
        assert (link.requests[-1].clock, link.requests[-1].cut > 0) == (9, True)
        assert link.cuts == []


@dataclass(eq=False)
class Far(Readable):
    """A server whose answer to a read takes so long to travel."""

    travels_s: float = 60.0

    async def pull(
        self,
        request: parameters_pb2.PullRequest,
        timeout_s: float,
        take: Callable[[Answer], None],
        *,
        is_small: bool,
    ) -> None:
        assert request.deadline_ms <= 10_000, "servers wait for the clock no longer than before"
        assert len(self.requests) < 3, "it is asked again and again"
        await super().pull(request, timeout_s, take if timeout_s > self.travels_s else _nothing,
                           is_small=is_small)  # fmt: skip
        if timeout_s <= self.travels_s:
            raise WaitExpired("DEADLINE_EXCEEDED")


def _nothing(_: Answer) -> None:
    """It came too late."""


@pytest.mark.parametrize("text", ["bsp", "ssp:2"])
def test_values_may_travel_for_as_long_as_the_reader_waits(text: str) -> None:
    far = Far(whole)
    order, _ = reading(text, far, Far(whole), lasts_s=100.0)
    check_values(order)
    assert len(far.requests) == 1


def test_an_answer_that_says_that_a_clock_is_past_is_read_no_further() -> None:
    """The values behind it may take minutes to come."""
    read: list[int] = []

    def past(request: parameters_pb2.PullRequest) -> Iterator[Answer | PushpullError]:
        if len(one.requests) == 1:
            error = error_to_proto(AlreadyPast("past", clock=9))
            refused = parameters_pb2.RangeError(range_id=0, error=error)
            yield parameters_pb2.PullResponse(error=refused)
            read.append(1)
        yield from whole(request)

    one = Readable(past)
    order, _ = reading("bsp", one, Readable(whole))
    check_values(order)
    assert [request.clock for request in one.requests] == [7, 10]
    assert not read


def test_before_a_table_becomes_asp_it_is_read_by_a_cut() -> None:
    one, other = Readable(whole), Readable(whole)
    order, _ = reading("asp", one, other, after_clock=1000)
    check_read_by_cut(order, one, other)


@pytest.mark.parametrize("after_clock", [4, 5, 8])
def test_beyond_the_clock_of_a_change_to_asp_nobody_waits(after_clock: int) -> None:
    """The slowest worker is at clock 5, the fastest at 9."""
    one, other = Readable(whole), Readable(whole)
    order, _ = reading("asp", one, other, after_clock=after_clock)
    check_values(order)
    assert not any(each.consistent for link in (one, other) for each in link.requests)


def needs_a_cut(request: parameters_pb2.PullRequest) -> list[Answer | PushpullError]:
    if request.consistent and not request.cut:
        return [InvalidConfig("not BSP: a consistent pull there needs a cut")]
    return whole(request)


@pytest.mark.parametrize("after_clock", [None, 7, 1000])
def test_at_clocks_that_are_not_bsp_a_table_is_read_by_a_cut(after_clock: int | None) -> None:
    """BSP begins later, or the view does not have the end of BSP yet."""
    one, other = Readable(needs_a_cut), Readable(needs_a_cut)
    order, _ = reading("bsp", one, other, after_clock=after_clock)
    check_read_by_cut(order, one, other)


@pytest.mark.parametrize("lost", [WaitExpired("cut again"), NotOwner("moved")])
def test_a_cut_that_a_range_does_not_hold_is_not_asked_for_again(lost: PushpullError) -> None:
    """Another range waits, and holds its workers, until the cut is ended."""

    class Waiting(Readable):
        async def pull(self, *arguments: Any, **more: Any) -> None:
            if self.requests:
                await super().pull(*arguments, **more)
            else:
                self.requests.append(arguments[0])
                await asyncio.wait_for(asyncio.Event().wait(), arguments[1])

    def lets_go_once(request: parameters_pb2.PullRequest) -> Sequence[Answer | PushpullError]:
        return [lost] if len(one.requests) == 1 else whole(request)

    one, other = Readable(lets_go_once), Waiting(whole)
    order, _ = reading("ssp:2", one, other, lasts_s=2.0)
    check_read_by_cut(order, one, other)
    for link in (one, other):
        first, second = link.requests
        assert first.cut != second.cut
