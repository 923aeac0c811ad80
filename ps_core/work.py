"""Long work in steps, between which other work has its turn.

A `Work` is a generator: it yields between two steps, and returns the result.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Work = Generator[None, None, ResultT]

PIECE_COUNT = 4
"""Blocks of one step."""


def at_once(work: Work[ResultT]) -> ResultT:
    """Do all steps without a break, and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


def pieces_of(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    """Slices of `PIECE_COUNT` items."""
    for begin in range(0, len(items), PIECE_COUNT):
        yield items[begin : begin + PIECE_COUNT]
