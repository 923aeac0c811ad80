"""Numbers with units, as options have them."""

from __future__ import annotations

import math

from ps_core.errors import InvalidConfig

_BITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def bytes_per_s_of(text: str) -> float:
    """A bandwidth such as 25Gbit; InvalidConfig if it is none."""
    found = _number(text, _BITS)
    if not found:
        raise InvalidConfig(
            f"bandwidth is '{text}'; expected a number above 0 with Gbit, Mbit or kbit (a second), "
            "such as 25Gbit"
        )
    return found / 8


def seconds_of(option: str, text: str) -> float:
    """A duration such as 100us; InvalidConfig if it is none."""
    found = _number(text, _SECONDS)
    if found is None:
        raise InvalidConfig(
            f"{option} is '{text}'; expected a number of 0 or more with us, ms or s, such as 100us"
        )
    return found


def count_of(option: str, text: str) -> int:
    """A whole number, perhaps written as 7e9; InvalidConfig if it is none, or below 1."""
    found = _number(text, {"": 1.0})
    if not found or found != int(found):
        raise InvalidConfig(
            f"{option} is '{text}'; expected a whole number above 0, such as 7e9 or 350e6"
        )
    return int(found)


def _number(text: str, units: dict[str, float]) -> float | None:
    """The number in the base unit; None if it has another unit, or is negative or not finite."""
    word = text.strip().lower()
    unit = next((unit for unit in units if word.endswith(unit)), None)
    if unit is None:
        return None
    try:
        found = float(word.removesuffix(unit)) * units[unit]
    except ValueError:
        return None
    return found if math.isfinite(found) and found >= 0 else None
