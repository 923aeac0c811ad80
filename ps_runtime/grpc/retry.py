"""Retries: the errors that a retry may cure, and the wait before it.

Waits have full jitter (Brooker, "Exponential Backoff And Jitter", 2015): uniform between nothing
and a bound that doubles, so that a thousand workers do not come back at the same moment.
"""

from __future__ import annotations

import random

from ps_core.errors import (
    Draining,
    NotOwner,
    Overloaded,
    PushpullError,
    Recovering,
    StaleAssignment,
    WaitExpired,
)

FIRST_BOUND_S = 0.05
LAST_BOUND_S = 2.0

_RNG = random.Random()  # noqa: S311 - jitter, no secret; a script's own sequence stays as it is


def is_retryable(error: PushpullError) -> bool:
    """True if the same request may succeed later."""
    return isinstance(error, (Recovering, Draining, Overloaded))


def is_curable(error: PushpullError) -> bool:
    """True if the same request may succeed later, perhaps at another server."""
    return is_retryable(error) or isinstance(error, WaitExpired | StaleAssignment | NotOwner)


class Backoff:
    """The waits between attempts at one thing; `reset` after a success."""

    def __init__(self, last_bound_s: float = LAST_BOUND_S) -> None:
        self._last_bound_s = last_bound_s
        self._bound_s = FIRST_BOUND_S

    def next_s(self, error: PushpullError | None = None) -> float:
        """Seconds to wait before the next attempt, at least `error.retry_after_ms`."""
        jitter_s = _RNG.uniform(0.0, self._bound_s)
        self._bound_s = min(2 * self._bound_s, self._last_bound_s)
        asked_s = error.retry_after_ms / 1000 if error is not None else 0.0
        return asked_s + jitter_s

    def reset(self) -> None:
        """Start again with short waits."""
        self._bound_s = FIRST_BOUND_S
