"""The clients of this process that have not been closed: what they do together, and at its end.

A client stays here until it is closed: one that its script lost has to leave all the same.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Protocol

from ps_core.cluster_view import Role
from ps_core.errors import PushpullError
from ps_runtime.observe import logs
from ps_worker.transport.loop import stop_background
from ps_worker.transport.metrics import MEASURES, NODE_MEASURES

if TYPE_CHECKING:
    from ps_worker.transport.engine import Engine


class OpenClient(Protocol):
    """A client as this module sees it (`ps_worker.client.client.Client`)."""

    engine: Engine

    def close(self) -> None:
        """Leave, and end the connection."""

    def abandon(self, reason: str) -> None:
        """End the connection in the middle of the work."""


OPEN: set[OpenClient] = set()

MEASURES.window_bytes.set_function(lambda: sum(c.engine.pushes.in_flight_bytes for c in list(OPEN)))
NODE_MEASURES.watch(
    lambda: max((c.engine.view.view_number for c in list(OPEN)), default=0),
    lambda: max((c.engine.contact_age_s for c in list(OPEN)), default=0.0),
)


def has_worker() -> bool:
    """True if a worker of this process, or of the one that it was forked from, is open: it may have
    the identity that this process was given, which is one worker's.
    """
    roles = [client.engine.session.role for client in list(OPEN) if client.engine.is_alive]
    return Role.WORKER in roles


def close_all(failed_by: str = "") -> None:
    """Close every client of this process.

    Args:
        failed_by: what ended the script in the middle of its work, in words; empty: nothing did.

    Blocking, Raises: as `Client.leave`; all are closed before the first failure is raised.
    """
    failures: list[PushpullError] = []
    for client in list(OPEN):
        try:
            client.abandon(failed_by) if failed_by else client.close()
        except PushpullError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _at_exit() -> None:
    """A script that ended without closing: it leaves, unless an exception ended it."""
    last = getattr(sys, "last_value", None)
    has_failed = last is not None and not hasattr(sys, "ps1")
    for client in list(OPEN):
        try:
            client.abandon(type(last).__name__) if has_failed else client.close()
        except PushpullError as failure:
            logs.error("leave_failed", error=failure)
    stop_background()


atexit.register(_at_exit)
