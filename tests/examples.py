"""How many examples a property test draws."""

from __future__ import annotations

from hypothesis import settings

QUICK_SHARE = 3


def examples(count: int) -> int:
    """All under `make fuzz`; a third in `make test`, which draws the same ones every time."""
    return count // QUICK_SHARE if settings().derandomize else count
