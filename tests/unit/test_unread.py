"""Answers that nobody reads: bounded for a server as a whole."""

from __future__ import annotations

import asyncio

import pytest

from ps_server.service.unread_answers import UnreadAnswers

MOST, PATIENCE_S = 100, 0.01


def test_what_would_be_too_much_waits_until_others_have_read() -> None:
    async def whole() -> None:
        unread = UnreadAnswers(lambda: 0.0, MOST, PATIENCE_S)
        slow, other = unread.reader(), unread.reader()
        await slow.put(60)
        await slow.put(40)
        waiting = asyncio.create_task(other.put(50))
        done, _ = await asyncio.wait([waiting], timeout=0)
        assert not done
        slow.count(-40)
        done, _ = await asyncio.wait([waiting], timeout=0)
        assert not done
        slow.count(-60)
        await waiting
        assert unread.byte_count == 50
        other.end()
        assert unread.byte_count == 0

    asyncio.run(whole())


def test_one_answer_that_is_larger_than_all_may_be_is_given_alone() -> None:
    async def whole() -> None:
        unread = UnreadAnswers(lambda: 0.0, MOST, PATIENCE_S)
        await unread.reader().put(MOST + 1)
        assert not unread.has_space(1)

    asyncio.run(whole())


def test_who_reads_nothing_is_cut_and_who_reads_goes_on() -> None:
    """The first has read nothing since 0, the second has since 3; at 4 a third wants room."""
    now_s = 0.0

    async def whole() -> None:
        nonlocal now_s
        unread = UnreadAnswers(lambda: now_s, MOST, PATIENCE_S)

        async def call(reads_at_s: float | None) -> None:
            nonlocal now_s
            reader = unread.reader()
            try:
                await reader.put(50)
                if reads_at_s is not None:
                    now_s = reads_at_s
                    reader.count(-10)
                    await reader.put(10)
                await asyncio.Event().wait()
            finally:
                reader.end()

        deaf, reads = asyncio.create_task(call(None)), asyncio.create_task(call(3.0))
        await asyncio.wait([deaf, reads], timeout=0)
        now_s = 3.0 + PATIENCE_S / 2
        third = asyncio.create_task(call(None))
        with pytest.raises(asyncio.CancelledError):
            await deaf
        fourth = asyncio.create_task(unread.reader().put(50))
        await asyncio.wait([fourth], timeout=5 * PATIENCE_S)
        assert not any(task.done() for task in (reads, third, fourth)), "nobody is cut too early"
        now_s += 1.5 * PATIENCE_S
        await asyncio.wait([reads])
        await fourth
        third.cancel()

    asyncio.run(whole())


def test_one_call_at_a_time_is_cut_however_many_wait() -> None:
    """What it held may be enough, with what the others read meanwhile."""
    now_s = 0.0

    async def whole() -> None:
        nonlocal now_s
        unread = UnreadAnswers(lambda: now_s, MOST, PATIENCE_S)

        async def call(byte_count: int) -> None:
            reader = unread.reader()
            try:
                await reader.put(byte_count)
                await asyncio.Event().wait()
            finally:
                reader.end()

        slow = [asyncio.create_task(call(10)) for _ in range(10)]
        await asyncio.wait(slow, timeout=0)
        waiting = [asyncio.create_task(call(15)) for _ in range(5)]
        for cut_count in (1, 2):
            now_s += 1.5 * PATIENCE_S
            await asyncio.wait(slow[cut_count - 1 : cut_count])
            await asyncio.wait(slow, timeout=10 * PATIENCE_S)
            assert [task.done() for task in slow].count(True) == cut_count
        assert unread.byte_count == 95, "the first of those that waited goes on"
        for task in (*slow, *waiting):
            task.cancel()

    asyncio.run(asyncio.wait_for(whole(), 10.0))
