"""The open clients of this process: their common metrics, and their end with the process.

A client stays here until it is closed, because one that its script lost still has to leave. Python
tells nobody at its end that `sys.exit` ended a script, and with which status: such a script counts
as one that has ended normally, unless `pushpull worker` runs it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Protocol

from ps_core.cluster_view import Role
from ps_runtime.observe import logs
from ps_worker.transport.loop import stop_background
from ps_worker.transport.metrics import MEASURES, NODE_MEASURES

if TYPE_CHECKING:
    from ps_worker.client.connection import ClientConnection
    from ps_worker.transport.engine import Engine


class OpenClient(Protocol):
    """A `ps_worker.client.client.Client`, which imports this module."""

    connection: ClientConnection
    engine: Engine

    def close(self, *, leave: bool = True) -> None: ...

    def abandon(self, reason: str) -> None: ...


class Awaiting(Protocol):
    """A `ps_worker.training.tables.awaited_parameters.AwaitedParameters`."""

    def wait(self) -> None: ...

    def give_up(self) -> None: ...


class OwnCluster(Protocol):
    """A `ps_worker.client.local_cluster.LocalCluster`, which imports this module."""

    def stop(self) -> None: ...


OPEN: set[OpenClient] = set()

_child_pid = 0
"""The child of `multiprocessing` that closes its clients at its end."""

_STRANDED: weakref.WeakSet[OpenClient] = weakref.WeakSet()
"""Clients whose cluster this process has stopped."""

OWN_CLUSTERS: set[OwnCluster] = set()
"""Clusters that this process has started and not stopped: they live until its end."""

MEASURES.window_bytes.set_function(lambda: sum(c.engine.pushes.in_flight_bytes for c in list(OPEN)))
NODE_MEASURES.watch(
    lambda: max((c.engine.view.view_number for c in list(OPEN)), default=0),
    lambda: max((c.engine.contact_age_s for c in list(OPEN)), default=0.0),
)


def opened(client: OpenClient) -> None:
    """Keep a client until it is closed. A child of `multiprocessing` ends it before `atexit`, which
    knows nothing of the error that has ended the child, or never comes (fork, forkserver).
    """
    global _child_pid
    OPEN.add(client)
    if parent_process() is not None and _child_pid != os.getpid():
        _child_pid = os.getpid()
        Finalize(None, _end_child, exitpriority=0)


def has_worker() -> bool:
    """True if a worker of this process, or of the parent that forked it, is open: it may have this
    process's identity, which only one worker can have.
    """
    roles = [client.engine.session.role for client in list(OPEN) if client.engine.is_alive]
    return Role.WORKER in roles


def is_normal_end(error: BaseException | None) -> bool:
    """True if a `with` block ended without an exception, or by `sys.exit` with status 0."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def strand(scheduler: str) -> None:
    """This process stops the cluster of that scheduler: at its exit, nothing of the cluster is left
    that its clients could leave, and nobody is there to wait for them.
    """
    for each in list(OPEN):
        if scheduler in each.connection.config.scheduler:
            _STRANDED.add(each)
            each.engine.scheduler.is_stopped_here = True


def close_all(failed_by: str = "") -> None:
    """Close every client of this process; if the script failed, abandon it, by that reason.

    Blocking, Raises: as `Client.leave`; the first failure is raised when all are closed.
    """
    failures: list[Exception] = []
    for client in list(OPEN):
        try:
            client.abandon(failed_by) if failed_by else client.close()
        except Exception as failure:  # noqa: BLE001 - raised when the others have left
            failures.append(failure)
    if failures:
        raise failures[0]


def _end_all(error: BaseException | None) -> None:
    """Stop the clusters of a script that did not, and close its clients; after an error, abandon
    them. Those of a cluster that was stopped only end: nobody is there who would hear a farewell.
    """
    for cluster in list(OWN_CLUSTERS):
        cluster.stop()
    for client in list(OPEN):
        try:
            if client in _STRANDED or is_normal_end(error):
                client.close(leave=client not in _STRANDED)
            else:
                client.abandon(type(error).__name__)
        except Exception as failure:  # noqa: BLE001 - the others still have to leave
            logs.error("leave_failed", error=failure)


def _end_child() -> None:
    """End the clients of a child of `multiprocessing`, which has not waited for its threads yet:
    after a normal end they may train.
    """
    error = sys.exc_info()[1]
    try:
        if is_normal_end(error):
            # As multiprocessing itself, which does it later; to join each would hang on a pool's.
            threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as stop:
        error = stop
        raise
    finally:
        _end_all(error)


def _at_exit() -> None:
    _end_all(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
    stop_background()


atexit.register(_at_exit)
