"""What a client does about checkpoints: asks for one, and says what of its own belongs to it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from ps_core.change import Checkpoint
from ps_core.errors import Fenced, InvalidConfig, WaitExpired
from ps_core.imported import Imported
from ps_core.part_report import PartReport
from ps_runtime.checkpoint.calls import MadeCheckpoint
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.checkpoint.save_points import HasState, SavePoints
from ps_worker.client.connection import GRACE_S
from ps_worker.client.tables import Catalogue
from ps_worker.transport.config import WorkerConfig

if TYPE_CHECKING:
    from ps_worker.checkpoint.saved_states import RestoredStates

_WRITTEN_WITHIN_S = 60.0
"""What a worker that leaves gives its own state, to be written."""


class CheckpointTicket:
    """A checkpoint on its way."""

    def __init__(
        self, future: Future[MadeCheckpoint], deadline_s: float, save_points: SavePoints | None
    ) -> None:
        self.future = future
        self._deadline_s = deadline_s
        self._save_points = save_points
        self._thread = threading.get_ident()

    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self.future.done()

    def wait(self, timeout_s: float | None = None) -> MadeCheckpoint:
        """Its number, directory and size. For a worker, in the thread that asked for it, this is a
        save point: it takes no step meanwhile.

        Args:
            timeout_s: how long to wait; None means what `checkpoint` was given.

        Blocking: until it is complete.

        Raises:
            InvalidConfig: the cluster has nowhere to put checkpoints.
            InvalidCheckpoint: it could not be written; the message says what, and why.
            WaitExpired: it was not complete in time; the message says who is missing. Within a
                second or two where another worker has taken a step that it is of and this one has
                not: take it, and wait again.
        """
        waits_s = self._deadline_s if timeout_s is None else timeout_s
        end_s = now_s() + waits_s + GRACE_S
        if self._save_points is not None and threading.get_ident() == self._thread:
            self._save_points.stay(self.future.done, waits_s + GRACE_S)
        try:
            made = self.future.result(max(end_s - now_s(), 0.0))
        except TimeoutError:
            raise WaitExpired(
                f"the checkpoint is not complete after {waits_s:g} s, and goes on being made; wait "
                "again, or give wait(timeout_s=...) more"
            ) from None
        if self._save_points is not None:
            self._save_points.had(made.number)
        return made


class CheckpointVerbs(Catalogue):
    """The part of `ps_worker.client.client.Client` that is about checkpoints."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._restored: RestoredStates | None = None
        self.save_points = SavePoints(
            self.engine.checkpoints, lambda: list(self._handles.values()), self._copied
        )
        if not self.is_reader:
            self.engine.watch(self.save_points.take_view, self.save_points.end)

    def _copied(
        self, checkpoint: Checkpoint, clock: int, states: Mapping[str, Mapping[str, Any]]
    ) -> Callable[[], PartReport]:
        # Here, so that those who have no state start without torch.
        from ps_worker.checkpoint.saved_states import copied

        return copied(self.session, checkpoint, clock, states)

    @property
    def restored_from(self) -> str:
        """The directory of the checkpoint that the cluster was started from; empty if of none."""
        return self.engine.view.restored_from

    def restored_state(self, name: str, *, per_rank: bool = False) -> Any | None:
        """What the checkpoint that the cluster was started from has by this name of `attach_state`.

        Blocking, Raises: as there.
        """
        restored = self._restored_states()
        if restored is None or (per_rank and not restored.is_own):
            return None
        return restored.find(name)

    def restored_states(self, name: str) -> dict[int, Any]:
        """What every worker of the checkpoint that the cluster was started from had attached by
        this name, by rank; without tensors. Empty where there is none.

        Blocking, Raises: as `attach_state`.
        """
        if not self.restored_from or self.is_newcomer or self.imported is not None:
            return {}
        from ps_worker.checkpoint.saved_states import states_of_all

        return states_of_all(self.restored_from, name)

    @property
    def imported(self) -> Imported | None:
        """What the checkpoint that the cluster was started from has, if it was imported.

        Blocking, Raises: as `attach_state`.
        """
        restored = self._restored_states()
        return None if restored is None else restored.imported

    @property
    def tables_before(self) -> tuple[str, ...]:
        """The names of tables that were there before this worker: those of the checkpoint that the
        cluster was started from, or, for who joins while others train, the cluster's.

        Blocking, Raises: as `attach_state`.
        """
        if self.is_newcomer:
            return tuple(table.spec.name for table in self.engine.view.tables)
        restored = self._restored_states()
        return () if restored is None else restored.table_names

    def _restored_states(self) -> RestoredStates | None:
        if not self.restored_from or self.is_newcomer:
            return None
        if self._restored is None:
            from ps_worker.checkpoint.saved_states import RestoredStates

            self._restored = RestoredStates(self.restored_from, self.rank)
        return self._restored

    def leave(self, timeout_s: float | None = None) -> None:
        """End this worker's part: the others go on without it. Then close.

        Steps left open are dropped: their blocks take no part in an update. A checkpoint that is
        being settled has this worker's state before that, and those that are made later have it as
        of now. Idempotent.

        Args:
            timeout_s: how long the steps on their way, and the end itself, may take to be
                committed; None means the client's request_deadline_s.

        Blocking, Raises: as `Connection.leave`.
        """
        if not self._is_closed and self._pid == os.getpid() and not self.is_reader:
            self.save_points.leave()
            if self.engine.left_url:
                self.save_points.leave_behind(self.engine.left_url)
        super().leave(timeout_s)

    def _end(self, reason: str) -> None:
        if self._is_closed:
            return
        self.save_points.close(_WRITTEN_WITHIN_S if reason else 0.0)
        super()._end(reason)

    def checkpoint(self, reason: str = "", *, timeout_s: float | None = None) -> CheckpointTicket:
        """Make a checkpoint of all tables, their optimizers' state, and what workers attached.

        Workers and operators may ask. For a worker the call is a save point: call it where
        `save_point` would be. If all workers call it after the same step, the checkpoint is of that
        step; if one does, it is of that step or, where others are further, of one of the next. So
        one may wait for it while the others wait for that one in a collective call (`barrier`).
        Training goes on while it is written. Who asks while one is about to be made has that one;
        so has a worker that asks for the first time since, and has taken no step beyond it.

        Args:
            reason: for its manifest.
            timeout_s: how long it may take; None means the client's request_deadline_s.

        Returns:
            A ticket, to be waited for.

        Blocking: workers: until it is settled where the tables are cut, usually some milliseconds.
        """
        self.check_usable()
        deadline_s = self.deadline_s(timeout_s)
        covered_by = _by_none if self.is_reader else self.save_points.asks()
        future = self._loop.start(self.engine.create_checkpoint(reason, deadline_s, covered_by))
        if self.is_reader:
            return CheckpointTicket(future, deadline_s, None)
        future.add_done_callback(self.save_points.wake)
        self.save_points.rest(future.done)
        return CheckpointTicket(future, deadline_s, self.save_points)

    def restore(self, url: str = "", *, timeout_s: float | None = None) -> Self:
        """Take the whole cluster back to a checkpoint, and connect to it again.

        Everything since is gone, on the servers and on its way there: the cluster begins a new
        timeline, and whatever belongs to the old one is refused. Every worker has to call it, with
        the same URL; the first call restores, the others find that it is done. A worker that does
        not learns from its next call that its session has ended. Make the tables or the
        `DistributedOptimizer` again, with the client that is returned: they begin at the
        checkpoint's clock, and `attach_state` loads what was attached.

        Args:
            url: a checkpoint's directory, or what has several, whose newest good one is taken;
                empty: the cluster's own place for them.
            timeout_s: how long it may take; None means the client's request_deadline_s.

        Returns:
            Another client, with this one's rank; this one is closed.

        Blocking: until the cluster has begun anew and its servers are there again.

        Raises:
            InvalidCheckpoint: there is no good one; nothing has changed.
            WaitExpired: the scheduler or the servers did not come in time.
        """
        deadline_s = self.deadline_s(timeout_s)
        restoring = self._loop.start(self.engine.restore_checkpoint(url, deadline_s))
        with contextlib.suppress(Fenced):  # somebody else has restored it
            self._result(restoring, deadline_s + GRACE_S)
        self.close(leave=False)
        rank = None if self.is_reader else self.rank
        return type(self)(replace(self._config, rank=rank))

    def attach_state(self, name: str, state: HasState, *, per_rank: bool = False) -> None:
        """Make something part of this worker's checkpoints: a learning rate schedule, a GradScaler,
        `RandomState()`, the position in the data, anything with `state_dict` and
        `load_state_dict`. A `DistributedOptimizer` attaches itself.

        In a cluster that was started from a checkpoint the state that it has by this name is loaded
        at once. Its values may be None, bools, numbers, strings, bytes, lists, tuples, sets, dicts,
        torch tensors and numpy arrays: nothing is pickled.

        Args:
            name: unique in this worker; the same after a restart.
            state: what is asked for its state at save points, and given it back here.
            per_rank: it differs from worker to worker, as a position in the data does. Then a
                worker whose rank the checkpoint does not have keeps `state` as it is; else it takes
                over the lowest rank's.

        Blocking: while the checkpoint's part is read, the first time.

        Raises:
            InvalidConfig: the name is taken, or `state` lacks a method.
            NotPermitted: a reader has no state.
            InvalidCheckpoint: the checkpoint's part cannot be read.
        """
        self.check_may_push("attach state")
        self.save_points.attach(name, state)
        found = self.restored_state(name, per_rank=per_rank)
        if found is not None:
            state.load_state_dict(found)
        elif self.restored_from and not self.is_newcomer and not per_rank and not self.imported:
            logs.warning("state_not_in_checkpoint", name=name, url=self.restored_from)

    def save_point(self) -> None:
        """Say that everything of the last step has been done, schedules and data position included:
        here this worker's own state may be written down. Call it at the end of each pass through
        the training loop.

        A script that never calls it has its save points where the next step begins: at
        `zero_grad`, or at `step` where that comes first.

        Blocking: a moment, while a checkpoint is being settled.

        Raises:
            InvalidConfig: nothing was ever attached: there is no `DistributedOptimizer`, and no
                `attach_state`.
        """
        self.check_may_push("have save points")
        if not self.save_points.has_state:
            raise InvalidConfig("this worker has attached no state; see attach_state")
        self.save_points.reach()


def _by_none() -> tuple[int, int]:
    """A reader has no steps: the next checkpoint will do, whatever was cut."""
    return 0, 0
