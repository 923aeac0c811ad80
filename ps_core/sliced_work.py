"""Long work that is cut into steps, so that a loop does it in slices of time (SEMANTICS S15).

A `Work` is a generator: it yields between two steps, and returns the result. It yields what the
next step waits for, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Waiting(Protocol):
    """Work of another thread, as `concurrent.futures.Future`."""

    def done(self) -> bool: ...

    def result(self) -> Any:
        """Wait for the end, and return what it gave."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None: ...


Work = Generator[Any, None, ResultT]
"""Yields `Waiting | None`."""

PIECE_COUNT = 4
"""Blocks of one step."""


def at_once(work: Work[ResultT]) -> ResultT:
    """Do all steps without a break, and return the result."""
    while True:
        try:
            waiting: Waiting | None = next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        if waiting is not None:
            waiting.result()


def pieces_of(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    """Slices of `PIECE_COUNT` items."""
    for begin in range(0, len(items), PIECE_COUNT):
        yield items[begin : begin + PIECE_COUNT]
