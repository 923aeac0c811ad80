"""The open clients of this process: their common metrics, and their end with the process.

A client stays here until it is closed, because one that its script lost still has to leave.
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
    """A `ps_worker.client.client.Client`, which imports this module."""

    engine: Engine

    def close(self) -> None: ...

    def abandon(self, reason: str) -> None: ...


OPEN: set[OpenClient] = set()

MEASURES.window_bytes.set_function(lambda: sum(c.engine.pushes.in_flight_bytes for c in list(OPEN)))
NODE_MEASURES.watch(
    lambda: max((c.engine.view.view_number for c in list(OPEN)), default=0),
    lambda: max((c.engine.contact_age_s for c in list(OPEN)), default=0.0),
)


def has_worker() -> bool:
    """True if a worker of this process, or of the parent that forked it, is open: it may have this
    process's identity, which only one worker can have.
    """
    roles = [client.engine.session.role for client in list(OPEN) if client.engine.is_alive]
    return Role.WORKER in roles


def close_all(failed_by: str = "") -> None:
    """Close every client of this process; if the script failed, abandon it, by that reason.

    Blocking, Raises: as `Client.leave`; the first failure is raised when all are closed.
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
    """Close the clients of a script that did not; after an exception, abandon them."""
    last = getattr(sys, "last_value", None)
    has_failed = last is not None and not hasattr(sys, "ps1")
    for client in list(OPEN):
        try:
            client.abandon(type(last).__name__) if has_failed else client.close()
        except PushpullError as failure:
            logs.error("leave_failed", error=failure)
    stop_background()


atexit.register(_at_exit)
