"""How many examples a property test draws."""

from __future__ import annotations

from hypothesis import settings

QUICK_SHARE = 6


def examples(count: int) -> int:
    """All under `make fuzz`; a sixth in `make test`, which draws the same ones every time."""
    return count // QUICK_SHARE if settings().derandomize else count
