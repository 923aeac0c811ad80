"""Works: one event after the other, however long each takes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ps_core import limits
from ps_core.sliced_work import PIECE_COUNT, Work, at_once, pieces_of
from ps_runtime.system.turns import Turns
from ps_server.service.work_queue import FEW_STEPS, Works


class Bench:
    """Works that take all of a slice with each step."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures: list[Exception] = []
        self.now_s = 0.0
        self.works = Works(Turns(self.now), self.failures.append, self.now)

    def now(self) -> float:
        return self.now_s

    def work(self, name: str, steps: int, failure: Exception | None = None) -> Work[str]:
        for step in range(steps):
            self.lines.append(f"{name}{step}")
            self.now_s += 2 * limits.SLICE_S
            yield
        if failure is not None:
            raise failure
        self.lines.append(f"{name} ends")
        return name

    def begin(self, name: str, steps: int, failure: Exception | None = None) -> None:
        def unheard() -> Work[None]:
            yield from self.work(name, steps, failure)

        self.works.begin(unheard())


def test_without_a_loop_all_is_done_at_once() -> None:
    bench = Bench()
    bench.begin("a", 100)
    assert bench.lines[-1] == "a ends"
    assert not bench.works.jobs


def test_a_long_work_goes_on_in_other_turns_and_who_comes_waits() -> None:
    async def whole() -> None:
        bench = Bench()
        bench.begin("a", FEW_STEPS - 1)
        assert bench.lines[-1] == "a ends"
        bench.begin("b", FEW_STEPS + 2)
        assert bench.lines[-1] == f"b{FEW_STEPS - 1}"
        assert bench.works.jobs
        done = asyncio.create_task(bench.works.done(bench.work("c", 1)))
        bench.works.between(lambda: bench.lines.append("between"))
        await bench.works.in_turn(lambda: None)
        assert await done == "c"
        behind = bench.lines[bench.lines.index(f"b{FEW_STEPS}") :]
        assert behind == [
            f"b{FEW_STEPS}", f"b{FEW_STEPS + 1}", "b ends", "between", "c0", "c ends",
        ]  # fmt: skip

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_others_have_their_turns_between_two_steps() -> None:
    async def whole() -> None:
        bench = Bench()
        loop = asyncio.get_running_loop()
        seen: list[int] = []

        def look() -> None:
            seen.append(len(bench.lines))
            if bench.works.jobs:
                loop.call_soon(look)

        bench.begin("a", FEW_STEPS + 5)
        look()
        await bench.works.in_turn(lambda: None)
        assert {*range(FEW_STEPS, FEW_STEPS + 5)} <= {*seen}

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_what_cannot_wait_lets_all_be_done_first() -> None:
    async def whole() -> None:
        bench = Bench()
        bench.begin("a", FEW_STEPS + 5)
        done = asyncio.create_task(bench.works.done(bench.work("b", 3)))
        await asyncio.wait([done], timeout=0)
        bench.works.finish()
        assert bench.lines[-1] == "b ends"
        assert await done == "b"

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_a_failure_is_raised_where_somebody_waits_and_said_where_nobody_does() -> None:
    async def whole() -> None:
        bench = Bench()
        failures = [ValueError("0"), ValueError("1"), ValueError("2")]
        with pytest.raises(ValueError, match="0"):
            bench.begin("a", 1, failures[0])
        bench.begin("b", FEW_STEPS + 1, failures[1])
        with pytest.raises(ValueError, match="2"):
            await bench.works.done(bench.work("c", 1, failures[2]))
        assert bench.failures == [failures[1]]
        assert not bench.works.jobs
        bench.begin("d", 1)
        assert bench.lines[-1] == "d ends"

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_who_does_not_wait_any_more_changes_nothing() -> None:
    async def whole() -> None:
        bench = Bench()
        bench.begin("a", FEW_STEPS + 1)
        gone = [asyncio.create_task(bench.works.done(bench.work("b", 1)))]
        gone.append(asyncio.create_task(bench.works.in_turn(lambda: "never")))
        await asyncio.wait(gone, timeout=0)
        for task in gone:
            task.cancel()
        await bench.works.in_turn(lambda: None)
        assert bench.lines[-1] == "b ends"
        assert not bench.failures

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_who_waits_has_its_turn_however_much_comes_behind() -> None:
    """Each work begins another before it ends: the queue is never empty."""

    async def whole() -> None:
        bench = Bench()

        def endless() -> Work[None]:
            for _ in range(FEW_STEPS + 1):
                bench.now_s += 2 * limits.SLICE_S
                yield
            if not called:
                bench.works.begin(endless())

        called: list[bool] = []
        bench.works.begin(endless())
        await bench.works.in_turn(lambda: called.append(bool(bench.works.jobs)))
        assert called == [False]

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_what_is_begun_between_two_works_is_done_before_those_that_wait() -> None:
    async def whole() -> None:
        bench = Bench()
        bench.begin("a", FEW_STEPS + 1)
        bench.works.between(lambda: bench.begin("b", FEW_STEPS + 1))
        done = asyncio.create_task(bench.works.done(bench.work("c", 1)))
        await done
        ends = [line for line in bench.lines if line.endswith("ends")]
        assert ends == ["a ends", "b ends", "c ends"]

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_what_cannot_wait_between_two_works_leaves_those_that_wait() -> None:
    async def whole() -> None:
        bench = Bench()

        def called() -> None:
            bench.begin("b", FEW_STEPS + 1)
            bench.works.finish()
            bench.lines.append("called")

        bench.begin("a", FEW_STEPS + 1)
        bench.works.between(called)
        assert await bench.works.done(bench.work("c", 1)) == "c"
        assert bench.lines[-4:] == ["b ends", "called", "c0", "c ends"]

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_who_has_its_turn_is_told_what_was_raised() -> None:
    async def whole() -> None:
        bench = Bench()
        bench.begin("a", FEW_STEPS + 1)
        with pytest.raises(ZeroDivisionError):
            await bench.works.in_turn(lambda: 1 // 0)
        assert bench.failures == []

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_pieces_are_all_of_it_a_few_at_a_time() -> None:
    items = tuple(range(2 * PIECE_COUNT + 1))
    pieces = [list(piece) for piece in pieces_of(items)]
    assert [len(piece) for piece in pieces] == [PIECE_COUNT, PIECE_COUNT, 1]
    assert [item for piece in pieces for item in piece] == list(items)
    assert list(pieces_of(())) == []
    assert at_once(Bench().work("a", 3)) == "a"


def test_what_a_step_waits_for_is_there_before_the_next() -> None:
    came = Future[str]()

    def reading() -> Work[str]:
        yield came
        return came.result(timeout=0)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(at_once, reading())
        came.set_result("read")
        assert result.result(30.0) == "read"

    failed = Future[str]()
    failed.set_exception(OSError("no disk"))

    def careless() -> Work[str]:
        yield failed
        return "done"

    with pytest.raises(OSError, match="no disk"):
        at_once(careless())
