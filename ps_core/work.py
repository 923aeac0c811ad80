"""Work that can be left for a while: long work is done in steps, so that others have their turns.

A `Work` is a generator; it yields where it may be left, and returns what comes of it. Who has no
others to think of does it `at_once`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Work = Generator[None, None, ResultT]

PIECE_COUNT = 4
"""Blocks that are worked on in one step."""


def at_once(work: Work[ResultT]) -> ResultT:
    """Do all of it; what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


def pieces_of(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    """A few at a time."""
    for begin in range(0, len(items), PIECE_COUNT):
        yield items[begin : begin + PIECE_COUNT]
