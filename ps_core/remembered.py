"""What was found of long tuples, so that it is found once.

A layout of a hundred thousand tensors is looked through in a tenth of a second, by each who is
asked about it. It is known again by being the same object.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


class Remembered(Generic[ResultT]):
    """What was found of the newest few. Safe to share between threads.

    Args:
        most: how many.
    """

    __slots__ = ("_found", "_most")

    def __init__(self, most: int = 64) -> None:
        self._found: dict[int, tuple[tuple[Any, ...], ResultT]] = {}
        self._most = most

    def find(self, of: tuple[Any, ...]) -> ResultT | None:
        """What was found of this very tuple."""
        found = self._found.get(id(of))
        return None if found is None else found[1]

    def put(self, of: tuple[Any, ...], result: ResultT) -> ResultT:
        """Remember it; the tuple is kept, so that its number stays its own."""
        for old in list(self._found)[: max(0, len(self._found) + 1 - self._most)]:
            self._found.pop(old, None)
        self._found[id(of)] = of, result
        return result
