"""The clients of this process that have not been closed: what they do together, and at its end.

A client stays here until it is closed: one that its script lost has to leave all the same.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Protocol

from ps_core.errors import PushpullError
from ps_runtime import logs
from ps_worker.loop import stop_background
from ps_worker.measures import MEASURES, NODE_MEASURES

if TYPE_CHECKING:
    from ps_worker.engine import Engine


class OpenClient(Protocol):
    """What is asked of a client here (`ps_worker.connection.Connection`)."""

    engine: Engine

    def close(self, *, leave: bool) -> None:
        """Leave or not, and end the connection."""


OPEN: set[OpenClient] = set()

MEASURES.window_bytes.set_function(lambda: sum(c.engine.in_flight_bytes for c in list(OPEN)))
NODE_MEASURES.watch(
    lambda: max((c.engine.view_number for c in list(OPEN)), default=0),
    lambda: max((c.engine.contact_age_s for c in list(OPEN)), default=0.0),
)


def close_all(*, leave: bool) -> None:
    """Close every client of this process, leaving or not.

    Blocking, Raises: as `Connection.leave`; all are closed before the first failure is raised.
    """
    failures: list[PushpullError] = []
    for client in list(OPEN):
        try:
            client.close(leave=leave)
        except PushpullError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _at_exit() -> None:
    """A script that ended without closing: it leaves, unless an exception ended it."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for client in list(OPEN):
        try:
            client.close(leave=not failed)
        except PushpullError as failure:
            logs.error("leave_failed", error=failure)
    stop_background()


atexit.register(_at_exit)
