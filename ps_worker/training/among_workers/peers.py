"""Waits for the other workers in torch.distributed, and ends when one of them is gone.

Rules:
    - gloo itself waits half an hour for a worker that is silent; the cluster declares it gone after
      `worker_timeout_s`. A wait here looks at the cluster, and lets Ctrl-C through.
    - A wait that ended with an error may be made again for the same call.
    - What waits inside torch, as calls of DistributedDataParallel and FSDP2 do, fails when a worker
      is declared gone: the process group's sockets are shut, which gloo takes for its end.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.errors import PushpullError, WaitExpired, WorkerLost
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.training.among_workers.process_group import (
    REMEDY,
    group_sockets,
    leave_as_it_is,
    shut,
)

if TYPE_CHECKING:
    from ps_worker.client.client import Client

_LOOK_S = 1.0
"""Between two looks at the cluster during a wait."""

_GRACE_S = 5.0
"""The last values of a worker that has left may still be on their way."""

_NAMED_WITHIN_S = 1.0
"""The cluster hears of a worker's end within this, where somebody tells it."""

_POLL_S = 0.0005

_RUN_S = 1e8
"""Longer than any."""


class Peers:
    """The workers of these ranks that are there when it is made; None: all."""

    def __init__(self, client: Client, ranks: Collection[int] | None = None) -> None:
        self._connection = client.connection
        self._ranks = {*(range(client.world_size) if ranks is None else ranks)} - {client.rank}
        self._words = "a worker" if ranks is None else _group_words(sorted(self._ranks))
        self._ended_before = {node.node_id for node in self._ended(self._view)}
        self._deadline_s = client.connection.deadline_s(None)

    @property
    def _view(self) -> ClusterView:
        return self._connection.engine.view

    @staticmethod
    def _ended(view: ClusterView) -> list[Node]:
        nodes = (node for node in view.nodes if node.role is Role.WORKER)
        return [node for node in nodes if not node.state.is_member]

    def _lost(self, view: ClusterView) -> list[Node]:
        """The workers that have ended since."""
        ended = (node for node in self._ended(view) if node.node_id not in self._ended_before)
        return [node for node in ended if node.rank in self._ranks]

    def check(self) -> None:
        """Raises WorkerLost if a worker has ended since, as far as is known here."""
        if lost := self._lost(self._view):
            raise WorkerLost(f"{_words_of(lost)}. {REMEDY}")

    def wait(self, work: Any, *, is_cpu: bool, giver: int | None = None) -> None:
        """Wait for the end of a collective call.

        Args:
            giver: the rank of the worker whose values it is for; None: all give.

        Blocking: until every worker has made it; at most the client's request_deadline_s.

        Raises:
            WorkerLost: a worker has ended.
            WaitExpired: a worker has not come to it.
            PushpullError: this worker's session has ended.
        """
        began_s = now_s()
        try:
            self._wait(work, is_cpu=is_cpu, giver=giver)
        finally:
            self._connection.waited_s += now_s() - began_s

    def _wait(self, work: Any, *, is_cpu: bool, giver: int | None) -> None:
        end_s, lost_by_s = now_s() + self._deadline_s, 0.0
        while not self._has_ended(work, is_cpu=is_cpu):
            self._check_alive(work)
            if lost := self._lost(self._view):
                lost_by_s = lost_by_s or now_s() + _GRACE_S
                if now_s() >= lost_by_s or any(node.state is NodeState.GONE for node in lost):
                    leave_as_it_is(work)
                    raise WorkerLost(f"{_words_of(lost)}. {REMEDY}")
            if now_s() >= end_s:
                leave_as_it_is(work)
                raise WaitExpired(
                    f"{self._late_words(giver)} The next call waits on; request_deadline_s of "
                    "ps.connect is the time"
                )

    def _check_alive(self, work: Any) -> None:
        try:
            self._connection.engine.check_alive()
        except PushpullError:  # the others may have ended unheard, behind a cut network
            if sockets := group_sockets():
                shut(sockets)
            else:
                leave_as_it_is(work)
            raise

    def _late_words(self, giver: int | None) -> str:
        within = f"within {self._deadline_s:g} s"
        if giver is not None:
            return (
                f"worker {giver}, which pulls for this group, has not given the values {within}: "
                "its own error says what it waits for."
            )
        return (
            f"{self._words} has not come to this step {within}, though all are there: is one still "
            "busy between two steps?"
        )

    def end_waits_of_torch(self) -> None:
        """From now on, let calls that wait inside torch fail when a worker is declared gone; they
        fail by themselves when its process has ended. Does nothing if the script has made the
        process group, whose timeout counts then.
        """
        for former in [each for each in _trained_by_torch if each.has_ended]:
            _trained_by_torch.discard(former)  # a restore in place ended its session
        _trained_by_torch.add(self)
        if sockets := group_sockets():
            self._connection.loop.start(self._shut_when_lost(sockets))

    async def _shut_when_lost(self, sockets: Collection[str]) -> None:
        with contextlib.suppress(PushpullError):  # the client was closed, or its session has ended
            view = await self._connection.engine.scheduler.view_where(
                lambda view: bool(self._gone(view)), "the end of a worker", _RUN_S
            )
            logs.warning("process_group_ended", because=_words_of(self._gone(view)))
            shut(sockets)

    @property
    def has_ended(self) -> bool:
        """True if the session of its worker was ended by others."""
        return self._connection.engine.scheduler.fenced_by is not None

    def _gone(self, view: ClusterView) -> list[Node]:
        return [node for node in self._lost(view) if node.state is NodeState.GONE]

    def _has_ended(self, work: Any, *, is_cpu: bool) -> bool:
        """Wait for a moment; True if the call has ended."""
        try:
            if is_cpu:
                work.wait(timedelta(seconds=_LOOK_S))
                return True
            until_s = now_s() + _LOOK_S
            while not work.is_completed() and now_s() < until_s:
                time.sleep(_POLL_S)
        except RuntimeError:
            pass
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as failure:
            raise self._failed(failure) from None
        return True

    def _failed(self, failure: RuntimeError) -> PushpullError:
        """The error of a call that torch has ended, which does not say whose fault it was."""
        said = str(failure).partition("\n")[0].partition(" This is typically")[0]
        try:
            lost = _words_of(self._told_lost()) or "a worker has ended, or its connection has"
        except PushpullError as error:  # another has restored, and its new group ends this one
            return error
        return WorkerLost(f"{lost} ({said}). {REMEDY}")

    def _told_lost(self) -> list[Node]:
        """The workers that have ended since, as the cluster tells within a second.

        Raises:
            Fenced: this worker's session has ended, as after a restore in place.
        """
        link = self._connection.engine.scheduler
        telling = link.view_where(
            lambda view: bool(self._lost(view)), "the end of a worker", _NAMED_WITHIN_S
        )
        try:
            return self._lost(self._connection.asked(telling, _NAMED_WITHIN_S))
        except PushpullError:
            if link.fenced_by is not None:
                raise link.fenced_by from None
            return []


_trained_by_torch: weakref.WeakSet[Peers] = weakref.WeakSet()
"""Those of models whose gradients torch's own wrappers reduce."""


def loss_behind(failure: BaseException) -> PushpullError | None:
    """The loss of a worker, or the restore in place, that made a call inside torch fail; None if
    neither did.

    Blocking: for a second, in which the cluster may hear of it.
    """
    said = str(failure)
    if not isinstance(failure, RuntimeError) or ("gloo" not in said and "NCCL" not in said):
        return None
    return next((peers._failed(failure) for peers in _trained_by_torch), None)


def _group_words(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks))
    return f"{'worker' if len(ranks) == 1 else 'one of workers'} {shown} of this group"


def _words_of(lost: list[Node]) -> str:
    return "; ".join(node.ended_words for node in lost)
