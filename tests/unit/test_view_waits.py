"""Who waits for a view: one by one each gets its answer, and thousands of them a few in a turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from ps_core.cluster_view import ClusterView
from ps_core.errors import Fenced
from ps_runtime.cluster.view_waits import AT_ONCE, ViewWaits
from tests.unit.measured_loop import a_turn, most_turn_s, turns_of

pytestmark = pytest.mark.slow

MANY = 2000
ANSWER_S = 100e-6
"""What an answer takes of its turn, at least: with `MANY` in one turn that was 0.2 s."""


def view(number: int) -> ClusterView:
    return ClusterView(number, "c", 1, 1, (), (), ())


def at_least(number: int) -> Callable[[ClusterView], bool]:
    return lambda view: view.view_number >= number


async def answered(wait: Awaitable[ClusterView]) -> object:
    """What comes of it, which takes time to say."""
    result: object
    try:
        result = (await wait).view_number
    except (TimeoutError, Fenced) as error:
        result = type(error)
    until_s = time.thread_time() + ANSWER_S
    while time.thread_time() < until_s:
        pass
    return result


def run(scene: Callable[[ViewWaits], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scene(ViewWaits()), 30.0)

    asyncio.run(whole())


def test_a_view_that_came_before_the_waiter_goes_on_is_the_one_it_has() -> None:
    """It is told of no view from before it listens: with an older one it would stay behind."""

    async def scene(waits: ViewWaits) -> None:
        task = asyncio.create_task(waits.wait(at_least(1), 30.0))
        await a_turn()
        waits.came(view(1))
        # In the turn in which it is answered; it goes on in the next.
        asyncio.get_running_loop().call_soon(waits.came, view(2))
        assert (await task).view_number == 2

    run(scene)


def test_each_has_the_first_view_that_it_waits_for() -> None:
    async def scene(waits: ViewWaits) -> None:
        waits.came(view(1))
        assert (await waits.wait(at_least(1), 0.0)).view_number == 1
        tasks = [asyncio.create_task(waits.wait(at_least(n), 30.0)) for n in (3, 2, 3)]
        await a_turn()
        waits.came(view(2))
        assert (await tasks[1]).view_number == 2
        assert not tasks[0].done()
        waits.came(view(4))
        assert [found.view_number for found in await asyncio.gather(*tasks)] == [4, 2, 4]

    run(scene)


def test_whose_time_is_up_is_told_while_others_wait() -> None:
    async def scene(waits: ViewWaits) -> None:
        late = asyncio.create_task(waits.wait(at_least(1), 30.0))
        await a_turn()
        for deadline_s in (0.02, 0.01):
            with pytest.raises(TimeoutError):
                await waits.wait(at_least(1), deadline_s)
        assert not late.done()
        late.cancel()
        waits.came(view(1))
        assert late.cancelled() or not late.done()

    run(scene)


def test_an_end_ends_all_waits_and_those_to_come() -> None:
    async def scene(waits: ViewWaits) -> None:
        task = asyncio.create_task(waits.wait(at_least(1), 30.0))
        await a_turn()
        waits.end(Fenced("first"))
        waits.end(Fenced("second"))
        for wait in (task, waits.wait(at_least(1), 30.0)):
            with pytest.raises(Fenced, match="first"):
                await wait

    run(scene)


def test_a_view_that_comes_while_others_are_answered_is_looked_at() -> None:
    async def scene(waits: ViewWaits) -> None:
        early = [asyncio.create_task(waits.wait(at_least(1), 30.0)) for _ in range(3 * AT_ONCE)]
        late = asyncio.create_task(waits.wait(at_least(2), 30.0))
        await a_turn()
        waits.came(view(1))
        await early[0]
        assert not early[-1].done(), "all were answered in one turn"
        waits.came(view(2))
        assert (await late).view_number == 2
        await asyncio.gather(*early)

    run(scene)


@pytest.mark.thorough
@pytest.mark.parametrize("ends_by", ["time", "view", "end"])
def test_many_go_on_in_short_turns(ends_by: str) -> None:
    """Measured: 5 ms."""
    expected = {"time": TimeoutError, "view": 1, "end": Fenced}[ends_by]

    async def scene() -> None:
        waits, tasks = ViewWaits(), list[asyncio.Task[object]]()
        end_s = asyncio.get_running_loop().time() + 0.5
        for number in range(MANY):
            left_s = end_s - asyncio.get_running_loop().time()
            wait = waits.wait(at_least(1), left_s if ends_by == "time" else 30.0)
            tasks.append(asyncio.create_task(answered(wait)))
            if not number % AT_ONCE:
                await a_turn()
        await a_turn()
        if ends_by == "view":
            waits.came(view(1))
        elif ends_by == "end":
            waits.end(Fenced("it is over"))
        for task in tasks:  # gathered they would all be looked at in one turn
            assert await task == expected

    assert min(turns_of(scene())[0] for _ in range(2)) < most_turn_s()
