"""A client's checkpoints: creating and restoring them, and this worker's own state in each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ps_core.change import Checkpoint
from ps_core.errors import Fenced, InvalidConfig, StaleAssignment, WaitExpired
from ps_core.keys import TableId
from ps_core.manifest import Imported, PartReport
from ps_runtime.checkpoint.calls import MadeCheckpoint, create_checkpoint, restore_checkpoint
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_runtime.system.future_waits import is_done, result_of, tell_when_done
from ps_worker.checkpoint.save_points import Before, HasState, SavePoints, TakesOver
from ps_worker.client.connection import GRACE_S, ClientConnection
from ps_worker.client.tables import ClientTables

if TYPE_CHECKING:
    from ps_worker.checkpoint.saved_states import RestoredStates
    from ps_worker.steps.steps import TableHandle

_WRITTEN_WITHIN_S = 60.0
"""A worker that leaves waits at most so long for its own state to be written."""


class CheckpointTicket:
    """A checkpoint that is being made."""

    def __init__(
        self, future: Future[MadeCheckpoint], deadline_s: float, save_points: SavePoints | None
    ) -> None:
        self.future = future
        self._deadline_s = deadline_s
        self._save_points = save_points
        self._thread = threading.get_ident()
        self._is_waited_for = False
        tell_when_done(future, self._tell)

    def _tell(self, future: Future[MadeCheckpoint]) -> None:
        """Log why it failed, unless a thread that waits is told, or it is the session that ended,
        which is said elsewhere.
        """
        failure = None if future.cancelled() or self._is_waited_for else future.exception()
        if failure is not None and not isinstance(failure, Fenced):
            logs.warning("checkpoint_failed", error=failure)

    def done(self) -> bool:
        """True once it is complete, or has failed."""
        return is_done(self.future)

    def wait(self, timeout_s: float | None = None) -> MadeCheckpoint:
        """Wait for the checkpoint. In the thread of a worker that called `checkpoint` this is a
        save point: the worker takes no step meanwhile.

        Args:
            timeout_s: None means that of `checkpoint`.

        Returns:
            Its number, directory and size.

        Blocking: until it is complete.

        Raises:
            InvalidConfig: the cluster has no directory for checkpoints.
            InvalidCheckpoint: it could not be written; the message says what, and why.
            WaitExpired: it was not complete in time; the message says who is missing. Comes within
                a second or two if it is of a step that another worker has taken, or waits in for
                this one's gradients, and this one has not: take the step, and wait again.
        """
        waits_s = self._deadline_s if timeout_s is None else timeout_s
        self._is_waited_for = True
        try:
            return self._waited(waits_s)
        finally:
            self._is_waited_for = self.done()

    def _waited(self, waits_s: float) -> MadeCheckpoint:
        end_s = now_s() + waits_s + GRACE_S
        if self._save_points is not None and threading.get_ident() == self._thread:
            self._save_points.stay(self.done, waits_s + GRACE_S)
        try:
            made = result_of(self.future, max(end_s - now_s(), 0.0))
        except TimeoutError:
            raise WaitExpired(
                f"the checkpoint is not complete after {waits_s:g} s, and goes on being made; wait "
                "again, or give wait(timeout_s=...) more"
            ) from None
        if self._save_points is not None:
            self._save_points.had(made.number, made.url)
        return made


class ClientCheckpoints:
    """The checkpoint calls of a client, and the checkpoint that the cluster was started from."""

    def __init__(self, connection: ClientConnection, tables: ClientTables) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._tables = tables
        self._restored: RestoredStates | None = None
        self._is_restored: bool | None = None  # None: not known yet
        self.save_points = SavePoints(
            self._engine.checkpoints, lambda: tables.handles, self._copied
        )
        if not connection.is_reader:
            self._engine.watch(self.save_points.take_view, self.save_points.end)

    def _copied(
        self, checkpoint: Checkpoint, clock: int, states: Mapping[str, Mapping[str, Any]]
    ) -> Callable[[], PartReport]:
        # Imported here, because a worker without state runs without torch.
        from ps_worker.checkpoint.saved_states import copied

        return copied(self._engine.session, checkpoint, clock, states)

    @property
    def restored_from(self) -> str:
        return self._engine.view.restored_from

    def restored_state(self, name: str, *, per_rank: bool = False) -> Any | None:
        """The attached state of this name (`attach_state`) in the checkpoint that the cluster was
        started from; None if it has none.

        Blocking, Raises: as `attach_state`.
        """
        restored = self._restored_states()
        if restored is None or (per_rank and not restored.is_own):
            return None
        return restored.find(name)

    def restored_states(self, name: str) -> dict[int, Any]:
        """The attached state of this name of each worker in the checkpoint that the cluster was
        started from, by rank; without tensors. Reads the checkpoint, and warns if it has none.
        """
        if not self._begins_restored() or self.imported is not None:
            return {}
        from ps_worker.checkpoint.saved_states import states_of_all

        found = states_of_all(self.restored_from, name)
        if not found:
            self._tell_missing(name)
        return found

    @property
    def imported(self) -> Imported | None:
        """The checkpoint that the cluster was started from, if it was imported; reads it."""
        restored = self._restored_states()
        return None if restored is None else restored.imported

    @property
    def tables_before(self) -> tuple[str, ...]:
        """The names of tables that existed before this worker: those of the checkpoint that the
        cluster was started from, which this reads, or, for a late joiner, the cluster's.
        """
        there = self._engine.view.tables if self._engine.is_late_joiner else ()
        restored = self._restored_states()
        before = () if restored is None else restored.table_names
        return (*(table.spec.name for table in there), *before)

    def _begins_restored(self) -> bool:
        """True if this worker goes on from the states of a checkpoint: it is one of the first, or
        follows one before anybody has taken a step (SEMANTICS S10).

        Blocking: if it follows one, until it has joined all tables.
        """
        engine = self._engine
        if self._is_restored is None:
            is_first = not engine.is_late_joiner
            # States of ranks beyond the first were taken over by rank 0.
            follows = engine.is_replacement and engine.session.rank < engine.view.worker_count
            self._is_restored = bool(self.restored_from) and (
                is_first or (follows and self._tables.place.is_at_start())
            )
        return self._is_restored

    def _restored_states(self) -> RestoredStates | None:
        if not self._begins_restored():
            return None
        if self._restored is None:
            from ps_worker.checkpoint.saved_states import RestoredStates

            self._restored = RestoredStates(self.restored_from, self._engine.session.rank)
        return self._restored

    def leave(self) -> None:
        self.save_points.leave()
        if self._engine.scheduler.left_url:
            found = self._restored  # read by whoever has loaded a state
            before = None
            if found is not None:
                before = Before(found.names, frozenset(found.table_names))
            self.save_points.leave_behind(self._engine.scheduler.left_url, before)

    def close(self, *, has_left: bool) -> None:
        """End; a worker that has left waits until its own state is written."""
        self.save_points.close(_WRITTEN_WITHIN_S if has_left else 0.0)

    def checkpoint(self, reason: str = "", *, timeout_s: float | None = None) -> CheckpointTicket:
        """Make a checkpoint of all tables, their optimizers' state, and workers' attached state.

        Workers and operators may call it. For a worker the call is a save point: make it where
        `save_point` would be. If all workers call it after the same step, the checkpoint is of that
        step; if one does, it is of that step or, if others are ahead, of one of the next. So one
        worker may wait for it while the others wait for that one in a collective call (`barrier`).
        Training goes on while it is written. A call made while a checkpoint is about to be made
        returns that one; so does a worker's first call after it, if the worker has taken no step
        beyond it.

        If it fails, `wait` raises the reason. If no thread is in `wait` by then, a warning is
        logged, `event=checkpoint_failed`, and training goes on without it: so too where the cluster
        has no place for checkpoints.

        While a cluster that was started from a checkpoint starts up, that one is returned: no table
        is beyond it, and some tables and states may not be there yet.

        `reason` is for its manifest.

        Blocking: workers: until the clock of the cut is decided, usually some milliseconds.
        """
        connection, save_points = self._connection, self.save_points
        connection.check_usable()
        deadline_s = connection.deadline_s(timeout_s)
        # For a reader, which has no steps, the next checkpoint will do.
        covered_by = (lambda: (0, 0)) if connection.is_reader else save_points.asks()
        future = connection.loop.start(self._made(reason, deadline_s, covered_by))
        if connection.is_reader:
            return CheckpointTicket(future, deadline_s, None)
        tell_when_done(future, save_points.wake)
        save_points.rest(partial(is_done, future))
        return CheckpointTicket(future, deadline_s, save_points)

    async def _made(
        self, reason: str, deadline_s: float, covered_by: Callable[[], tuple[int, int]]
    ) -> MadeCheckpoint:
        """Make a checkpoint; each view with a cut calls `covered_by` (`SavePoints.asks`) again."""
        scheduler, end_s = self._engine.scheduler, now_s() + deadline_s
        while True:
            number, view_number = covered_by()
            left_s = max(end_s - now_s(), 0.0)
            try:
                return await create_checkpoint(scheduler, reason, left_s, number, view_number)
            except StaleAssignment:
                await scheduler.view_at_least(view_number + 1, max(end_s - now_s(), 0.0))

    def restore(self, url: str, timeout_s: float | None) -> None:
        self._connection.check_open()
        deadline_s = self._connection.deadline_s(timeout_s)
        try:
            restoring = restore_checkpoint(self._engine.scheduler, url, deadline_s)
            self._connection.asked(restoring, deadline_s)
        except Fenced as error:
            if not error.retry_after_ms:  # else another client has restored it
                raise

    def attach(self, name: str, state: HasState, *, per_rank: bool = False) -> None:
        """Make an object's state part of this worker's checkpoints: a learning rate schedule, a
        GradScaler, `RandomState()`, the position in the data, anything with `state_dict` and
        `load_state_dict`. A `DistributedOptimizer` attaches itself.

        In a cluster that was started from a checkpoint, the state of this name is loaded at once,
        unless others had trained there before this worker joined.
        If it is a schedule of a `DistributedOptimizer` or a `HybridOptimizer`, or has one in its
        attributes, that optimizer has the checkpoint's hyperparameters again, which the schedule's
        constructor has changed: set others after this call.
        Its values may be None, bools, numbers, strings, bytes, lists, tuples, sets, dicts, torch
        tensors and numpy arrays: nothing is pickled.

        Args:
            name: unique in this worker; the same after a restart.
            state: the object; save points call `state_dict`, and this call `load_state_dict`.
            per_rank: it differs from worker to worker, as a position in the data does. Then a
                worker whose rank the checkpoint does not have keeps `state` as it is; else it loads
                the lowest rank's. If the checkpoint has ranks that the cluster does not have,
                worker 0 calls `state.take_over` with what each of them saved; it is dropped with a
                warning if there is no such method.

        Blocking: while the checkpoint's part is read, the first time; a worker that takes another's
            place, until it has joined all tables.

        Raises:
            InvalidConfig: the name is taken, or `state` lacks a method.
            NotPermitted: a reader has no state.
            InvalidCheckpoint: the checkpoint's part cannot be read, or it lacks the parameters of a
                model that only workers had; the message names one that has them.
            WaitExpired: it has not joined.
        """
        self._connection.check_may_push("attach state")
        restored, rank = self._restored_states(), self._engine.session.rank
        if per_rank:
            self.attach_for([rank], name, state)
            if restored is not None and restored.misses(rank, name):
                self._tell_missing(name)
            return
        self.save_points.attach(name, state)
        found = self.restored_state(name)
        if found is not None:
            self.save_points.load(name, found)
            self.save_points.loaded(name)
        elif restored is not None and not self.imported:
            restored.check_parameters(name, state)
            self._tell_missing(name)

    def _tell_missing(self, name: str) -> None:
        logs.warning("state_not_in_checkpoint", name=name, url=self.restored_from)

    def attach_for(self, ranks: Collection[int], name: str, state: HasState) -> None:
        """As `attach`, per rank, of a state that goes on from what the workers of these ranks had
        saved: this worker's is loaded, and the others' are taken over. Who goes on from that of
        rank 0 takes over those of ranks that the cluster does not have as well.
        """
        self.save_points.attach(name, state)
        found, own = self.saved_for(ranks, name), self._engine.session.rank
        if own in found:
            self.save_points.load(name, found.pop(own))
        saved = {rank: each for rank, each in found.items() if each}
        restored = self._restored_states()
        if isinstance(state, TakesOver):
            for each in saved.values():
                state.take_over(each)
        elif saved and restored is not None:
            logs.warning(
                "state_of_absent_workers_dropped",
                name=name,
                ranks=",".join(map(str, saved)),
                remedy=f"resume with {restored.rank_count} workers, or give it a take_over method",
            )
        self.save_points.loaded(name)

    def saved_for(self, ranks: Collection[int], name: str) -> dict[int, Any]:
        """The states, by rank, that `attach_for` goes on from."""
        restored, own = self._restored_states(), self._engine.session.rank
        if restored is None:
            return {}
        mine = restored.find(name) if restored.is_own and own in ranks else None
        found = {} if mine is None else {own: mine}
        absent = range(self._engine.world_size, restored.rank_count) if 0 in ranks else ()
        others = {*ranks, *absent} - {own}
        if others:
            from ps_worker.checkpoint.saved_states import states_of

            found |= states_of(self.restored_from, name, others)
        return found

    def save_point(self) -> None:
        """Mark a point where the last step is complete, schedules and data position included, and
        this worker's own state may be saved. Call it at the end of each pass through the training
        loop.

        A script that never calls it has its save points at the beginning of the next step: at
        `zero_grad` or `step`, whichever comes first.

        Blocking: a moment, while the clock of a checkpoint is decided.

        Raises:
            InvalidConfig: there is no attached state: no `DistributedOptimizer`, no `attach_state`.
        """
        self._connection.check_may_push("have save points")
        if not self.save_points.has_state:
            raise InvalidConfig("this worker has attached no state; see attach_state")
        self.save_points.reach()
        clocks, is_only = self._loop()
        self._engine.steps.loop.save_point(clocks, is_only=is_only)

    def begin_step(self, model: str) -> None:
        """The script begins a step of this model, for workers that join (SEMANTICS S6)."""
        clocks, is_only = self._loop()
        self._engine.steps.loop.begin_step(model, clocks, is_only=is_only)

    def begin_rows_step(self, handle: TableHandle) -> None:
        """As `begin_step`, of rows that the script steps by themselves."""
        self.save_points.add_rows(handle)
        self.begin_step(f"rows/{handle.name}")

    def _loop(self) -> tuple[dict[TableId, int], bool]:
        """The clocks of the tables that the script steps, and whether it has one model."""
        models = self.save_points.models()
        clocks = {h.table.table_id: h.clock for m in models for h, is_awake in m if is_awake}
        return clocks, len(models) <= 1
