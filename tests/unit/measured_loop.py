"""An event loop that measures its turns by the processor time that they take."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ps_core import limits
from ps_runtime.system.background import switch_often
from ps_runtime.system.collector import Collector


class _Meter(selectors.DefaultSelector):
    """A turn is from when the loop has looked at its sockets until it looks again."""

    def __init__(self) -> None:
        super().__init__()
        self.turns_s: list[float] = []
        self._began_s: float | None = None

    def select(self, *wait: Any, **named: Any) -> list[Any]:
        """As the loop calls it, between two turns."""
        if self._began_s is not None:
            self.turns_s.append(time.thread_time() - self._began_s)
        found = super().select(*wait, **named)
        self._began_s = time.thread_time()
        return found


def turns_of(main: Coroutine[Any, Any, None]) -> list[float]:
    """Run `main` on a loop of its own: the seconds of processor time of each turn, longest first.

    Time in which another process had the processor does not count, so that a machine that is busy
    changes nothing. What the process had before is none of the collector's business.
    """
    meter = _Meter()
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: how much it finds says when the next one comes
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(meter)) as runner:
            runner.run(main)
    finally:
        gc.unfreeze()
    return sorted(meter.turns_s, reverse=True)


_PIECE_S = 0.005
"""Processor time of the piece of Python of `most_turn_s` where our figures were measured."""


def most_turn_s() -> float:
    """MAX_TURN_S in processor time of this machine, as it is now: a processor that is slower, or
    whose other thread is busy, takes longer for a turn, and for a piece of Python that is known.
    """

    def piece_s() -> float:
        begun_s = time.thread_time()
        made = {number: (number, [number]) for number in range(20_000)}
        sum(len(pair) for pair in made.values())
        return time.thread_time() - begun_s

    return limits.MAX_TURN_S * max(1.0, min(piece_s() for _ in range(3)) / _PIECE_S)


def shortest(
    scene: Callable[[], Coroutine[Any, Any, None]],
    run: Callable[[Coroutine[Any, Any, None]], list[float]],
) -> float:
    """The longest turn, in seconds, of the best of three attempts."""
    return min(run(scene())[0] for _ in range(3))


async def a_turn() -> None:
    """Whoever is to have the next turn of the loop has had it."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()
    loop.call_soon(turn.set_result, None)
    await turn


@contextlib.contextmanager
def collecting_as_a_server() -> Iterator[None]:
    """With its collector: what the tests before have left is not looked at."""
    collector = Collector()
    collector.start()
    try:
        yield
    finally:
        collector.stop()
        gc.unfreeze()


def turns_of_server(main: Coroutine[Any, Any, None]) -> list[float]:
    """`turns_of`, with the collector that a server has."""
    with collecting_as_a_server():
        return turns_of(main)


def longest_wait_of(work: Callable[[], None]) -> float:
    """The longest, in seconds of the process, that a thread which wants nothing but its turns waits
    for the interpreter, while another one does `work` in a process that is like a server's. What
    the other does without the interpreter counts only where the first had no processor.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:  # noqa: BLE001 - raised where it is waited for
            failures.append(failure)

    before_s, longest_s = sys.getswitchinterval(), 0.0
    switch_often()
    try:
        with collecting_as_a_server():
            thread = threading.Thread(target=run)
            thread.start()
            last_s = time.process_time()
            while thread.is_alive():
                now_s = time.process_time()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
    finally:
        sys.setswitchinterval(before_s)
    for failure in failures:
        raise failure
    return longest_s
