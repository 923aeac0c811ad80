"""Work that an executor refuses: the caller does it, and no thread does it again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ps_runtime.system.executors import DaemonThreads, in_daemon_thread, in_thread, submitted

NO_STACK_BYTES = 2**46
"""A stack that no system gives: every further thread is refused, as at a limit of processes."""


class Pool:
    """An executor whose only thread is busy until it is freed."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)
        self._free = threading.Event()
        self.busy: Future[bool] = self.threads.submit(self._free.wait)

    def free(self) -> None:
        """The thread takes what is queued, and ends."""
        self._free.set()
        self.threads.shutdown()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.free()


@contextlib.contextmanager
def no_further_threads() -> Iterator[None]:
    before = threading.stack_size(NO_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_work_that_no_further_thread_takes_is_the_callers_alone(pool: Pool) -> None:
    done: list[int] = []

    def work() -> None:
        done.append(threading.get_ident())

    with no_further_threads():
        assert submitted(pool.threads, work) is None
    work()
    pool.free()
    assert done == [threading.get_ident()]


def test_work_that_the_loop_finds_no_thread_for_is_done_once(pool: Pool) -> None:
    done: list[int] = []

    async def live() -> None:
        asyncio.get_running_loop().set_default_executor(pool.threads)
        with no_further_threads():
            await in_thread(lambda: done.append(threading.get_ident()))
        pool.free()

    asyncio.run(live())
    assert done == [threading.get_ident()]


def test_work_that_a_thread_took_before_the_refusal_is_that_threads() -> None:
    class Refusing(ThreadPoolExecutor):
        """One whose thread is quicker than its refusal."""

        def submit(self, work, /, *arguments, **named):  # type: ignore[no-untyped-def]
            super().submit(work, *arguments, **named).exception()
            raise RuntimeError("can't start new thread")

    threads = Refusing(1)
    done: list[int] = []
    working = submitted(threads, lambda: done.append(threading.get_ident()))
    assert working is not None
    working.result()
    assert done != [threading.get_ident()]
    assert len(done) == 1
    threads.shutdown()


def test_an_executor_that_has_ended_takes_nothing() -> None:
    threads = ThreadPoolExecutor(1)
    threads.shutdown()
    assert submitted(threads, lambda: None) is None


def test_an_error_is_the_works() -> None:
    def fails() -> None:
        raise ValueError("it failed")

    with ThreadPoolExecutor(1) as threads:
        working = submitted(threads, fails)
        assert working is not None
        with pytest.raises(ValueError, match="it failed"):
            working.result()


def test_daemon_threads_do_all_that_came_before_their_end_and_nothing_after() -> None:
    begun: list[str] = []
    threads = DaemonThreads(2, "worker", lambda: begun.append(threading.current_thread().name))
    free = threading.Event()
    works = [threads.submit(free.wait) for _ in range(2)]
    queued = threads.submit(pow, 2, 10)
    dropped = threads.submit(pow, 2, 11)
    assert dropped.cancel()
    failed = threads.submit(int, "none")
    threads.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(pow, 2, 12)
    assert not threads.ended.done()
    free.set()
    threads.shutdown()
    assert threads.ended.done()
    assert sorted(begun) == ["worker_0", "worker_1"]
    assert [*(work.result() for work in works), queued.result()] == [True, True, 1024]
    assert isinstance(failed.exception(), ValueError)


def test_work_that_waits_for_ever_keeps_no_loop_from_ending() -> None:
    free, ended = threading.Event(), threading.Event()

    async def give_up() -> None:
        working = asyncio.create_task(in_daemon_thread(free.wait, "worker"))
        assert await in_daemon_thread(lambda: 1024, "worker") == 1024
        working.cancel()

    def live() -> None:
        asyncio.run(give_up())
        ended.set()

    threading.Thread(target=live, daemon=True).start()
    has_ended = ended.wait(10.0)
    free.set()
    assert has_ended
