"""What a worker's push driver makes of views, of steps, and of the servers' replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, cast

import pytest

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.errors import (
    Fenced,
    InvalidConfig,
    InvalidTensor,
    NotPermitted,
    PushpullError,
    Recovering,
    TableFull,
    Unauthenticated,
)
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, key_ranges
from ps_core.tables.elements import Codec, DType
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import PushBody, StepFuture, StepResult
from ps_worker.transport.links import ServerLinks
from ps_worker.transport.metrics import MEASURES, REGISTRY
from ps_worker.transport.push_driver import PushDriver
from ps_worker.window.push_window import POLLED_COUNT, PushWindow, StepTerms
from pushpull.v1 import parameters_pb2, types_pb2
from tests.property.shard_twin import table

MODEL = table([64])
ONE = NodeId(1)


class Links:
    """Links to servers that take all and say nothing."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def find(self, server: NodeId) -> Links:
        assert server == ONE
        return self

    def send(self, message: parameters_pb2.BlockPush, payload: memoryview) -> None:
        assert len(payload) == 256
        self.sent.append(message.assignment_epoch)


def session_ended(error: PushpullError) -> None:
    """It does not end."""
    raise error


def view(number: int, epoch: int) -> ClusterView:
    (slots,) = key_ranges(1)
    assignment = RangeAssignment(RangeId(0), slots, AssignmentEpoch(epoch), ONE, (), ())
    return ClusterView(number, "cluster", 1, 1, (), (assignment,), (MODEL,))


async def turn() -> None:
    """What was to be done soon has been done."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


def test_a_server_that_may_have_lost_a_range_in_between_is_sent_what_it_had_received() -> None:
    """Views may be left out, and RECEIVED is no promise: nobody else would send it again, and the
    step would never end.
    """

    async def scenario() -> None:
        links = Links()
        window = PushWindow(1 << 20)
        driver = PushDriver(window, view(1, 2), cast(ServerLinks, links), Counters(), session_ended)
        driver.take_view(view(1, 2))
        driver.stream_opened(ONE)
        driver.open_step(MODEL, 1, Future())
        driver.submit(MODEL, 1, [PushBody(0, memoryview(bytes(256)), b"", None, None)])
        await turn()
        received = parameters_pb2.PushResponse()
        received.replies.add(
            kind=parameters_pb2.REPLY_KIND_RECEIVED, table_id=1, range_id=0, sequence=1
        )
        driver.replies(ONE, received)
        driver.take_view(view(2, 4))  # its backups are others
        await turn()
        assert links.sent == [2]
        driver.take_view(view(5, 7))  # another had it for a while, or not
        await turn()
        assert links.sent == [2, 7]
        assert not driver.refused
        driver.fail(PushpullError("the end"))

    asyncio.run(scenario())


# --- steps

BLOCKS = table([192])
RECEIVED, COMMITTED = parameters_pb2.REPLY_KIND_RECEIVED, parameters_pb2.REPLY_KIND_COMMITTED
APPLIED, SKIPPED = parameters_pb2.OUTCOME_APPLIED, parameters_pb2.OUTCOME_SKIPPED


class Driven:
    """A driver with a stream to one server, which is told what the server says."""

    def __init__(self, resend_after_s: float = 10.0) -> None:
        self.sent: list[Any] = []
        self.written_count: int | None = None  # None: all
        self.has_sent = asyncio.Event()
        self.ended: list[PushpullError] = []
        self.counters = Counters()
        (slots,) = key_ranges(1)
        ranges = (RangeAssignment(RangeId(0), slots, AssignmentEpoch(3), ONE, (), ()),)
        self.view = ClusterView(1, "cluster", 1, 1, (), ranges, (BLOCKS,))
        window = PushWindow(1 << 20, resend_after_s)
        self.driver = PushDriver(
            window, self.view, cast(ServerLinks, self), self.counters, self.ended.append
        )
        self.driver.take_view(self.view)
        self.driver.stream_opened(ONE)

    def find(self, _: NodeId) -> Driven:
        return self

    def send(self, message: Any, payload: memoryview | None = None) -> None:
        del payload
        self.sent.append(message)
        self.has_sent.set()

    def unwritten_counts(self) -> dict[NodeId, int]:
        written_count = self.written_count
        return {} if written_count is None else {ONE: len(self.sent) - written_count}

    async def sent_count(self, count: int) -> None:
        """Wait until so many messages were sent."""
        async with asyncio.timeout(10):
            while len(self.sent) < count:
                self.has_sent.clear()
                await self.has_sent.wait()

    def open(self, clock: int = 1) -> StepFuture:
        future = StepFuture()
        self.driver.open_step(BLOCKS, clock, future)
        return future

    def push(self, *blocks: int, clock: int = 1, **more: Any) -> None:
        bodies = [PushBody(b, memoryview(bytes(256)), b"", None, None, **more) for b in blocks]
        self.driver.submit(BLOCKS, clock, bodies)

    async def say(self, kind: int, *sequences: int, **more: Any) -> None:
        said = parameters_pb2.PushResponse()
        for sequence in sequences:
            said.replies.add(
                kind=cast(Any, kind), table_id=1, range_id=0, sequence=sequence, **more
            )
        self.driver.replies(ONE, said)
        await turn()

    async def step(self, clock: int = 1, terms: StepTerms | None = None, **more: Any) -> StepFuture:
        """A step of three blocks, with sequences from `first` on, all received; its seal is next.
        All but the seal have taken effect.
        """
        first = 4 * (clock - 1) + 1
        future = self.open(clock)
        self.push(0, 1, 2, clock=clock, **more)
        self.driver.seal(BLOCKS, clock, terms or StepTerms())
        await turn()
        await self.say(RECEIVED, *range(first, first + 3))
        await self.say(COMMITTED, *range(first, first + 3), outcome=APPLIED)
        assert not future.done()
        return future


def driven(scene: Callable[[Driven], Awaitable[None]], resend_after_s: float = 10.0) -> None:
    async def main() -> None:
        on = Driven(resend_after_s)
        try:
            await scene(on)
        finally:
            on.driver.fail(PushpullError("the end"))

    asyncio.run(main())


def resent_count() -> float:
    labels = {"code": Recovering.code}
    return REGISTRY.get_sample_value("pushpull_worker_resent_entries_total", labels) or 0.0


def test_entries_that_a_broken_stream_has_lost_are_counted_each() -> None:
    async def scene(on: Driven) -> None:
        on.open()
        on.push(0, 1, 2)
        await on.sent_count(3)
        before = resent_count()
        on.driver.stream_closed(ONE)
        assert resent_count() == before + 3
        on.driver.stream_closed(ONE)  # another, which came to nothing
        assert resent_count() == before + 3

    driven(scene)


def error_of(code: int, words: str) -> types_pb2.Error:
    return types_pb2.Error(code=cast(Any, code), message=words)


def test_a_seal_carries_what_the_step_was_sealed_with_and_nothing_else() -> None:
    async def scene(on: Driven) -> None:
        await on.step()
        plain = on.sent[-1]
        assert isinstance(plain, parameters_pb2.Seal)
        assert not plain.HasField("contribution_scale")
        assert not plain.HasField("clip_scale")
        assert (plain.skip, plain.last, plain.edit, plain.array) == (False, False, b"", "")
        assert [(r.range_id, r.assignment_epoch, r.sequence) for r in plain.ranges] == [(0, 3, 4)]
        await on.say(COMMITTED, 4, outcome=APPLIED)
        await on.step(2, StepTerms((("lr", 0.5),), 0.25, True, True, 0.0))
        full = on.sent[-1]
        assert [(each.name, each.value) for each in full.hyperparameters] == [("lr", 0.5)]
        assert (full.contribution_scale, full.clip_scale) == (0.25, 0.0)
        assert full.HasField("clip_scale")
        assert (full.skip, full.last) == (True, True)

    driven(scene)


def test_an_edit_assigns_in_the_tables_arithmetic_where_it_is_of_state() -> None:
    async def scene(on: Driven) -> None:
        on.open()
        on.push(0)
        on.push(1, is_assign=True)
        on.push(2, is_assign=True, codec=Codec.FP64)
        on.driver.seal(BLOCKS, 1, StepTerms(edit=b"name", array="step"))
        await turn()
        kinds = [message.kind for message in on.sent[:3]]
        assert kinds == [
            parameters_pb2.PUSH_KIND_GRADIENT,
            parameters_pb2.PUSH_KIND_ASSIGN,
            parameters_pb2.PUSH_KIND_ASSIGN,
        ]
        await on.say(RECEIVED, 1, 2, 3)
        assert (on.sent[-1].edit, on.sent[-1].array) == (b"name", "step")

    driven(scene)


def test_state_goes_in_the_arithmetic_and_values_in_the_tables_own_type() -> None:
    half = table([64], dtype=DType.FLOAT16)

    async def scene(on: Driven) -> None:
        on.driver.open_step(half, 1, Future())
        for codec in (None, Codec.FP32):
            body = PushBody(0, memoryview(bytes(128)), b"", None, None, True, codec)
            on.driver.submit(half, 1, [body])
            await turn()
        assert [message.codec for message in on.sent] == [
            types_pb2.CODEC_FP16,
            types_pb2.CODEC_FP32,
        ]
        assert [message.replaces for message in on.sent] == [0, 1]

    driven(scene)


def test_a_step_ends_with_the_squares_of_each_block() -> None:
    async def scene(on: Driven) -> None:
        future = await on.step(terms=StepTerms(clip_scale=1.0))
        steps = MEASURES.steps.count
        await on.say(COMMITTED, 4, outcome=APPLIED, squares=[1.0, 2.0, 4.0])
        result = future.result(timeout=0)
        assert result.squares == {0: 1.0, 1: 2.0, 2: 4.0}
        assert result.applied
        scaled = on.open()
        on.driver.seal(BLOCKS, 1, StepTerms(update_scale=0.5))
        await turn()
        assert isinstance(on.sent[-1], parameters_pb2.UpdateScale)
        assert (on.sent[-1].scale, on.sent[-1].ranges[0].sequence) == (0.5, 5)
        await on.say(COMMITTED, 5, outcome=APPLIED)
        assert scaled.result(timeout=0).squares == {}
        assert MEASURES.steps.count == steps, "a scale is no step"

    driven(scene)


def test_a_step_whose_push_was_refused_has_the_squares_if_its_seals_have_ended() -> None:
    """Other workers' updates wait for their scale, and perhaps each worker was refused a push."""

    async def scene(on: Driven) -> None:
        future = on.open()
        on.push(0, 1, 2)
        on.driver.seal(BLOCKS, 1, StepTerms(clip_scale=1.0))
        await turn()
        await on.say(RECEIVED, 1, 2)
        full = error_of(types_pb2.ERROR_CODE_TABLE_FULL, "full")
        await on.say(parameters_pb2.REPLY_KIND_ERROR, 3, error=full)
        seal = on.sent[-1]
        assert isinstance(seal, parameters_pb2.Seal)
        assert seal.skip
        await on.say(COMMITTED, 1, 2, outcome=SKIPPED)
        await on.say(COMMITTED, 3, outcome=parameters_pb2.OUTCOME_WITHDRAWN)
        await on.say(COMMITTED, 4, outcome=APPLIED, squares=[1.0, 2.0, 4.0])
        assert isinstance(future.exception(timeout=0), TableFull)
        assert future.squares == {0: 1.0, 1: 2.0, 2: 4.0}
        await on.step(2, StepTerms(clip_scale=1.0))
        error = error_of(types_pb2.ERROR_CODE_INVALID_CONFIG, "another lr")
        refused = on.open(3)
        on.driver.seal(BLOCKS, 3, StepTerms(clip_scale=1.0))
        await turn()
        await on.say(parameters_pb2.REPLY_KIND_ERROR, 9, error=error)
        assert isinstance(refused.exception(timeout=0), InvalidConfig)
        assert refused.squares is None

    driven(scene)


def test_a_long_push_takes_turns_and_what_follows_stays_behind() -> None:
    count = 2 * POLLED_COUNT + 2
    long = table([64 * count])

    async def scene(on: Driven) -> None:
        on.driver.open_step(long, 1, Future())
        bodies = [PushBody(b, memoryview(bytes(256)), b"", None, None) for b in range(count)]
        on.driver.submit(long, 1, bodies)
        on.driver.withdraw(long, 1, range(1, count))  # the first was sent by then
        on.driver.submit(long, 1, [bodies[1]])
        on.driver.seal(long, 1, StepTerms())
        loop, seen = asyncio.get_running_loop(), [0]

        def look() -> None:  # once a turn
            seen.append(len(on.sent))
            if len(on.sent) < count + 2:
                loop.call_soon(look)

        look()
        await on.sent_count(count + 2)
        assert max(after - before for before, after in pairwise(seen)) == POLLED_COUNT
        assert [message.sequence for message in on.sent[:count]] == [*range(1, count + 1)]
        withdrawn, again = on.sent[count:]
        assert isinstance(withdrawn, parameters_pb2.Withdrawal)
        assert (withdrawn.sequence, again.block, again.replaces) == (1, 1, 2)
        await on.say(RECEIVED, *range(1, count + 2))
        assert [r.sequence for r in on.sent[-1].ranges] == [count + 2]
        on.driver.submit(long, 2, bodies)
        on.driver.fail(PushpullError("the end"))
        await turn()
        assert len(on.sent) == count + 3

    driven(scene)


@pytest.mark.parametrize(("outcome", "applied"), [(APPLIED, True), (SKIPPED, False)])
def test_a_step_has_the_staleness_of_its_entries(outcome: int, applied: bool) -> None:
    async def scene(on: Driven) -> None:
        future = on.open()
        on.push(0, 1)
        on.driver.seal(BLOCKS, 1, StepTerms(skip=not applied))
        await turn()
        await on.say(RECEIVED, 1, 2)
        await on.say(COMMITTED, 1, outcome=outcome, staleness=7)
        await on.say(COMMITTED, 2, 3, outcome=outcome)
        result = future.result(timeout=0)
        assert (result.applied, result.staleness) == (applied, 7)
        assert on.counters.staleness == 7

    driven(scene)


def test_finished_steps_count_up_and_a_final_seal_is_none() -> None:
    async def scene(on: Driven) -> None:
        for clock in (1, 2):
            await on.step(clock)
            await on.say(COMMITTED, 4 * clock, outcome=APPLIED)
        assert on.counters.finished_step_count == 2
        await on.step(3, StepTerms(skip=True, last=True))
        await on.say(COMMITTED, 12, outcome=APPLIED)
        assert on.counters.finished_step_count == 2

    driven(scene)


def test_a_step_that_another_tables_has_passed_does_not_put_the_count_back() -> None:
    async def scene(on: Driven) -> None:
        on.counters.finished_step_count = 9
        await on.step()
        await on.say(COMMITTED, 4, outcome=APPLIED)
        assert on.counters.finished_step_count == 9

    driven(scene)


@pytest.mark.parametrize(
    ("code", "kind", "ends_session"),
    [
        (types_pb2.ERROR_CODE_INVALID_TENSOR, InvalidTensor, False),
        (types_pb2.ERROR_CODE_FENCED, Fenced, True),
        (types_pb2.ERROR_CODE_UNAUTHENTICATED, Unauthenticated, True),
        (types_pb2.ERROR_CODE_NOT_PERMITTED, NotPermitted, True),
    ],
)
def test_a_step_fails_with_its_first_problem_and_names_the_others(
    code: int, kind: type[PushpullError], ends_session: bool
) -> None:
    async def scene(on: Driven) -> None:
        future = on.open()
        on.push(0, 1, 2)
        on.driver.seal(BLOCKS, 1, StepTerms())
        await turn()
        await on.say(RECEIVED, 1, 2, 3)
        for sequence in (1, 2, 3):
            error = error_of(code, f"bad {sequence}")
            await on.say(COMMITTED, sequence, outcome=parameters_pb2.OUTCOME_INVALID, error=error)
        await on.say(COMMITTED, 4, outcome=APPLIED)
        failure = future.exception(timeout=0)
        assert isinstance(failure, kind)
        assert failure.message == "bad 1"
        assert failure.__notes__ == ["also: bad 2", "also: bad 3"]
        assert [type(each) for each in on.ended] == [kind] * 3 * ends_session

    driven(scene)


def test_a_seal_that_is_refused_for_good_stops_the_table_with_the_first_reason() -> None:
    async def scene(on: Driven) -> None:
        for clock, words in ((1, "the first"), (2, "another")):
            future = await on.step(clock)
            code = types_pb2.ERROR_CODE_INVALID_CONFIG
            error = error_of(code, words)
            await on.say(parameters_pb2.REPLY_KIND_ERROR, 4 * clock, error=error)
            failure = future.exception(timeout=0)
            assert isinstance(failure, InvalidConfig)
            assert failure.message == words
            assert {t: each.message for t, each in on.driver.refused.items()} == {1: "the first"}

    driven(scene)


def test_a_step_whose_seal_was_withdrawn_fails_and_ends_the_session() -> None:
    async def scene(on: Driven) -> None:
        future = await on.step()
        await on.say(COMMITTED, 4, outcome=parameters_pb2.OUTCOME_WITHDRAWN)
        assert isinstance(future.exception(timeout=0), Fenced)
        assert [type(each) for each in on.ended] == [Fenced]

    driven(scene)


def test_what_was_refused_for_a_while_is_sent_again_when_that_is_over() -> None:
    async def scene(on: Driven) -> None:
        on.open()
        on.push(0)
        await turn()
        error = types_pb2.Error(
            code=types_pb2.ERROR_CODE_OVERLOADED, message="over quota", retry_after_ms=1
        )
        await on.say(parameters_pb2.REPLY_KIND_REFUSED, 1, error=error)
        await on.sent_count(2)
        assert [message.sequence for message in on.sent] == [1, 1]

    driven(scene)


def test_what_the_stream_has_not_taken_is_not_sent_again() -> None:
    async def scene(on: Driven) -> None:
        on.written_count = 1
        on.open()
        on.push(0, 1)
        await on.sent_count(3)
        assert [message.sequence for message in on.sent] == [1, 2, 1]
        on.written_count = 3
        await on.sent_count(5)
        assert sorted(message.sequence for message in on.sent[3:]) == [1, 2]

    driven(scene, resend_after_s=0.1)


def test_a_driver_that_has_failed_fails_all_steps_with_that() -> None:
    async def scene(on: Driven) -> None:
        open_step, done = on.open(1), on.open(2)
        done.set_result(StepResult(2, True, 0))
        error = PushpullError("fenced")
        on.driver.fail(error)
        assert open_step.exception(timeout=0) is error
        assert on.open(3).exception(timeout=0) is error
        on.push(0)
        on.driver.seal(BLOCKS, 1, StepTerms())
        await turn()
        assert on.sent == []

    driven(scene)
