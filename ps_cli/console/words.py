"""Numbers as a person reads them: bytes, and lists of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

UNKNOWN = "?"
"""Stands for what is not known."""


def size(byte_count: int | None) -> str:
    """As in "1.5 MiB"; "?" if not known."""
    if byte_count is None:
        return UNKNOWN
    value, unit = float(byte_count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def spans(numbers: Iterable[int]) -> list[str]:
    """As spans: 1, 2, 3, 7 become "1-3" and "7"."""
    ordered = sorted(numbers)
    found = []
    for _, span in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in span]
        first, last = members[0], members[-1]
        found.append(str(first) if first == last else f"{first}-{last}")
    return found
