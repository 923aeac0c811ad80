"""Saves a worker's own state between two steps, at the clock of a checkpoint's cut (SEMANTICS S10).

    view has a proposed checkpoint -> this worker answers with the clocks of its next save point
    view has its cut               -> there, its state is copied and written; the next step begins

Rules:
    - A save point is a place in the training loop where the last step is complete, schedules and
      data position included. `Client.save_point` is one; in a script without such calls, the
      beginning of the next step is: of its model, or of rows that it steps by themselves.
    - From its answer until the cut is decided a worker stays at the save point that it has named,
      because the state of the cut would be lost.
    - The background thread gives the answer, so that a script that waits in a step delays no other
      worker. Within a step the answer is a guess: as many steps to the next save point as to the
      last. A guess that is too high makes the cut later; one that is too low, the state (logged).
    Of models that are stepped in turn, one that the script has ceased to step is where it is; a
    cut at its next step is out of reach, which each worker reports as if it waited.
    - A script that waits for a checkpoint of its next step reports that: it takes the step only if
      another worker has taken it, or waits for this one in its reduction. If all wait, it is
      proposed anew at their present clocks.
    - A script in a collective call is at a save point there, if another worker waits for a
      checkpoint before it makes that call, because neither would go on.
    - Until its first save point a worker starts up: it may attach more.
    - A state that cannot be written is reported as lost, which fails the checkpoint, and training
      goes on. The report says so if it has parameters that no server has.
    - A state whose copy Ctrl-C ends is copied at the next save point, and lost if a step lies
      between that the cut does not have.
    - A worker that leaves writes its state as of its last step, unless it leaves a restored cluster
      while it starts up: that state may lack what the checkpoint has, and is lost. With all states
      and tables of that checkpoint it lacks nothing. A worker without a state says that there is
      none to write, because no checkpoint is made there before all have begun, or something moved.
    - Workers that take their steps together (`keep_in_step`) save their states at one step, under
      any consistency: where each range is cut at its own moment, at the highest clock named.

Invariants:
    SV-1  A state that is written as of a clock was copied when its worker was at that clock.

`scheduler.machine.checkpoints` chooses the clocks, `state_codec` encodes the states.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol, runtime_checkable

from ps_core import limits
from ps_core.change import Checkpoint
from ps_core.cluster_view import ClusterView
from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, PushpullError, WaitExpired
from ps_core.keys import TableId
from ps_core.manifest import PartReport, ReportedTable
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_runtime.system.executors import submitted
from ps_runtime.system.future_waits import result_of
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.steps.steps import TableHandle

_LEAVING = 0
"""The number of no checkpoint: of the state of a worker that leaves."""

_CUT_SHORT = "Ctrl-C ended the copy of this worker's state, and its script took a step after that"
_LEFT_EARLY = "its worker left before its first step and its first save point"
_MAX_NAME_BYTES = 200
_LOOK_S = 0.5
_IDLE_COUNT = 16
"""A table that took no step between so many save points of other models takes none to the next."""


class HasState(Protocol):
    """An object whose state, of values that `state_codec` accepts, can be saved and loaded."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class TakesOver(Protocol):
    """A state that can go on from those of further workers as well."""

    def take_over(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class GoesOnWith(Protocol):
    """A state that takes up its own once more when another of its worker has been loaded."""

    def goes_on_with(self, state: object, /) -> Any: ...


@runtime_checkable
class KeepsParameters(Protocol):
    """A state that has parameters which no server has, where `keeps_parameters`."""

    @property
    def keeps_parameters(self) -> bool: ...

    @property
    def begins_anew(self) -> str:
        """Words on training without the state in a checkpoint."""
        ...

    def is_part_of(self, tables: Collection[str]) -> bool:
        """True if its model has one of the tables of these names."""
        ...


@dataclass(frozen=True, slots=True)
class Before:
    """The names of a worker's states and of all tables in the checkpoint that its cluster began
    from.
    """

    states: frozenset[str]
    tables: frozenset[str]


class Question(Enum):
    """A worker's question to the scheduler about a checkpoint, repeated while it waits."""

    MUST_STEP = "its script waits: must it take a step first, which another has taken?"
    IS_AWAITED = "does the script of another worker wait for it?"


class Scheduler(Protocol):
    """The save points' calls to the scheduler; any thread."""

    def join_checkpoint(
        self,
        number: int,
        clocks: Mapping[TableId, int],
        *,
        has_state: bool,
        has_begun: bool,
        question: Question | None = None,
        answered: Callable[[bool], None] | None = None,
    ) -> None:
        """Report this worker's clocks, and ask; calls `answered` if an answer comes."""
        ...

    def report_part(self, number: int, part: PartReport) -> None: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Asked:
    """A script's call for a checkpoint, after these steps, when it had that of number `had`;
    `number` is the first that was cut since and has all of them, or 0.
    """

    had: int
    clocks: Mapping[TableId, int]
    steps: Mapping[TableId, int]  # with the inner ones, which only the worker's own state has
    number: int = 0


Write = Callable[[Checkpoint, int, Mapping[str, Mapping[str, Any]]], Callable[[], PartReport]]
"""Copies the states of a checkpoint at a clock; the result writes the copy to its file."""

Trained = Callable[[], Iterable[tuple[TableHandle, bool]]]
"""The tables of a model, each with True if it is awake."""


class SavePoints:
    """The save points of one worker; it waits for a cut at most `patience_s`."""

    def __init__(
        self,
        scheduler: Scheduler,
        handles: Callable[[], Iterable[TableHandle]],
        write: Write,
        patience_s: float = limits.CHECKPOINT_CUT_S,
    ) -> None:
        self._scheduler = scheduler
        self._handles = handles
        self._write = write
        self._patience_s = patience_s
        # Entered by itself: Ctrl-C within `Condition.__enter__` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._writing: set[Future[None]] = set()
        self._leaving: Future[None] | None = None  # the state that is written when it leaves
        self._attached: dict[str, HasState] = {}
        self._loaded: set[str] = set()  # those that have what the cluster began from
        self._models: list[Trained] = []
        self._alone: set[TableId] = set()  # of rows, each of which counts as a model
        self._stepped_first: Callable[[], object | None] = lambda: None  # of these rows
        # Steps count with the inner ones, so a save point may lie between two clocks.
        self._passed: dict[TableId, int] = {}  # steps before the last save point
        self._took: dict[TableId, int] = {}  # steps from the save point before it
        self._idle: Counter[TableId] = Counter()  # save points since its last step
        self._view: ClusterView | None = None
        self._answered = 0  # the newest checkpoint that this worker has answered
        self._saved = 0  # the newest that was written, or lost
        self._saved_steps: dict[TableId, int] = {}  # those taken then
        self._copying: dict[int, int] = {}  # the one whose state a thread copies now
        self._cut_short = 0  # the newest whose copy Ctrl-C ended
        self._had = 0  # the newest that the script has asked for
        self._asked: weakref.WeakSet[_Asked] = weakref.WeakSet()  # calls that are not answered
        self._newest: _Asked | None = None  # the newest call
        self._cut: ClusterView | None = None  # the newest view with a checkpoint that is cut
        self._yes = dict.fromkeys(Question, 0)  # the newest checkpoint with a positive answer
        self._asked_s = dict.fromkeys(Question, 0.0)  # the time of the last question
        self._stays_since_s = 0.0
        self._is_resting = False
        self._has_begun = False  # the script has come to a save point, or asked for a checkpoint
        self._is_explicit = False
        self._is_in_step = False
        self._is_closed = False
        self._last_clocks: dict[TableId, int] | None = None

    # --- attached states

    def attach(self, name: str, state: HasState) -> None:
        if not name or len(name.encode()) > _MAX_NAME_BYTES:
            raise InvalidConfig(f"the name '{name[:40]}' is not of 1 to {_MAX_NAME_BYTES} bytes")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(state, method, None)):
                raise InvalidConfig(
                    f"'{name}' is a {type(state).__name__} without {method}(); expected something "
                    "with state_dict() and load_state_dict()"
                )
        with self._lock:
            if self._attached.get(name, state) is not state:
                raise InvalidConfig(
                    f"another state is attached as '{name}'; give each its own name"
                )
            self._attached[name] = state

    def load(self, name: str, found: Any) -> None:
        """Load what a checkpoint has of an attached state, and tell the others."""
        with self._lock:
            attached = dict(self._attached)
        state = attached[name]
        state.load_state_dict(found)
        for other in attached.values():
            if other is not state and isinstance(other, GoesOnWith):
                other.goes_on_with(state)

    def loaded(self, name: str) -> None:
        """An attached state has what the checkpoint had of it that the cluster began from."""
        with self._lock:
            self._loaded.add(name)

    @property
    def has_state(self) -> bool:
        return bool(self._attached)

    def keep_in_step(self) -> None:
        """The worker's state must be of the same step as all other workers', under any consistency:
        they take their steps together.
        """
        with self._lock:
            self._is_in_step = True

    @property
    def is_in_step(self) -> bool:
        return self._is_in_step

    def add_model(self, trained: Trained) -> None:
        """Add tables that take their steps together, once between two save points."""
        with self._lock:
            self._models.append(trained)
            self._passed |= {handle.table.table_id: handle.step_count for handle, _ in trained()}

    def add_rows(self, handle: TableHandle) -> None:
        """Add rows that the script steps by themselves, as tables of `add_model`. Idempotent."""
        if handle.table.table_id not in self._alone:
            self._alone.add(handle.table.table_id)
            self.add_model(lambda: [(handle, True)])

    def models(self) -> list[list[tuple[TableHandle, bool]]]:
        """The tables of each model, and whether each takes steps."""
        with self._lock:
            return [[*trained()] for trained in self._models]

    # --- events of the cluster

    def take_view(self, view: ClusterView) -> None:
        with self._lock:
            self._view = view
            checkpoint = view.checkpoint
            if checkpoint is not None and checkpoint.is_cut:
                self._cut = view
                for asked in self._asked:
                    asked.number = asked.number or self._covering(asked)
            elif checkpoint is not None and checkpoint.number > self._answered:
                self._answered = checkpoint.number
                self._join()
            self._changed.notify_all()

    def _join(self) -> None:
        self._scheduler.join_checkpoint(
            self._answered,
            self._next_clocks(),
            has_state=self.has_state,
            has_begun=self._has_begun,
        )

    def _next_clocks(self) -> dict[TableId, int]:
        """The clocks of the worker's present or next save point."""
        if self._last_clocks is not None:  # its final seal is for a step that it does not take
            return self._last_clocks
        handles = {handle.table.table_id: handle for handle in self._handles()}
        clocks = {table_id: handle.clock for table_id, handle in handles.items()}
        if self._is_resting or not self._attached:
            return clocks
        awake = {h.table.table_id: is_awake for t in self._models for h, is_awake in t()}
        for table_id, handle in handles.items():
            steps = self._passed.get(table_id, handle.step_count)
            steps += self._took.get(table_id, int(table_id in awake))
            if awake.get(table_id, True):
                clocks[table_id] = max(clocks[table_id], handle.inner_steps.clock_after(steps))
        return clocks

    def end(self, _reason: object = None) -> None:
        """The session has ended: stop all waits for views."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Leave; wait for parts that are being written, at most `timeout_s`. The state of a worker
        that leaves is lost if it is not written by then.
        """
        self.end()
        with self._lock:
            writing = list(self._writing)
        end_s = now_s() + timeout_s
        for each in writing:
            try:
                result_of(each, max(end_s - now_s(), 0.0))
            except TimeoutError:
                logs.warning("checkpoint_part_not_waited_for", waited_s=timeout_s)
                if self._leaving is not None and not self._leaving.done():
                    late = WaitExpired(f"it was not written within {timeout_s:g} s")
                    self._lost(Checkpoint(_LEAVING, ""), late)
                break
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- events of the script

    def reach(self, *, is_explicit: bool = True) -> None:
        """The script is at a save point: the last step is complete. Once it has called `save_point`
        (`is_explicit`) only such calls count.

        Blocking: while a checkpoint is proposed and not cut, at most `limits.CHECKPOINT_CUT_S`,
            unless all tables are asynchronous and workers are not in step; and while the state is
            copied.
        """
        with self._lock:
            self._has_begun = True
            self._is_explicit = self._is_explicit or is_explicit
            if self._is_explicit is not is_explicit or not self._attached:
                return
            self._arrive()
            if self._is_out_of_reach():
                self._ask_to_begin_anew()
        self._rest(lambda: self._is_decided() or self._is_asynchronous())

    def reach_alone(self, stepped: object) -> None:
        """As `reach`, before a step of rows in no model. It is a save point where the script trains
        no model, and of several such rows those that it stepped first: between the steps of one
        pass the last step is not complete.
        """
        with self._lock:
            first = self._stepped_first()
            has_model = len(self._models) > len(self._alone)
            if has_model or (first is not None and first is not stepped):
                return
            self._stepped_first = weakref.ref(stepped)
        self.reach(is_explicit=False)

    def _is_asynchronous(self) -> bool:
        """True if no table of this worker can be cut at a clock: then its state at the next save
        point belongs to the cut as well as that at this one.
        """
        if self._is_in_step:
            return False
        tables = {} if self._view is None else self._view.tables_by_id
        for handle in self._handles():
            table = tables.get(handle.table.table_id)
            if table is None or table.consistency.mode is not Mode.ASP:
                return False
            if table.change is not None and handle.clock < table.change.after_clock:
                return False
        return True

    def rest(self, is_over: Callable[[], bool]) -> None:
        """As `reach`; also waits for a checkpoint about to be proposed, to its cut or `is_over`."""
        with self._lock:
            self._arrive()
            answered = self._answered

        def ends() -> bool:
            has_begun = self._checkpoint is not None or self._answered != answered
            return is_over() or (self._is_decided() and has_begun)

        self._rest(ends)
        with self._lock:
            # Not the newest: others may have asked for another before this thread went on.
            self._had = max(self._had, 0 if self._newest is None else self._newest.number)

    def asks(self) -> Callable[[], tuple[int, int]]:
        """The script asks for a checkpoint now. The result gives, until the script has it, the
        number of one that will do, and of the newest view. Such a checkpoint has all steps that
        this worker has taken until now, however many it has taken when the result is called, and
        its script had not asked for it before; 0: none. Called again, it gives another one: that
        has failed.
        """
        with self._lock:
            self._has_begun = True
            clocks = {handle.table.table_id: handle.clock for handle in self._handles()}
            asked = _Asked(self._had, clocks, self._step_counts())
            asked.number = self._covering(asked)
            self._asked.add(asked)
            self._newest = asked

        def covered_by() -> tuple[int, int]:
            with self._lock:
                if 0 < asked.number <= asked.had:
                    asked.number = self._covering(asked)
                asked.had = max(asked.had, asked.number)
                self._had = max(self._had, asked.number)
                return asked.number, 0 if self._view is None else self._view.view_number

        return covered_by

    def _covering(self, asked: _Asked) -> int:
        """The newest checkpoint that is cut, if it will do; else 0. Tables of which each range has
        a clock of its own go by when this worker's state is saved, beside others with a cut.
        """
        view, checkpoint = self._cut, None if self._cut is None else self._cut.checkpoint
        if view is None or checkpoint is None or checkpoint.number <= asked.had:
            return 0
        handles = (h for h in self._handles() if h.table.table_id in asked.clocks)
        cuts = {}
        for handle in handles:
            table = view.tables_by_id.get(handle.table.table_id)
            if table is None or table.cut is None or table.cut.checkpoint != checkpoint.number:
                return 0
            cuts[table.table_id] = self._clock_of_cut(view, handle, checkpoint.number)
        clocks = [cut for cut in cuts.values() if cut is not None]
        if not clocks or (len(clocks) < len(cuts) and not self._attached):
            return 0
        if any(cut is not None and asked.clocks[each] > cut for each, cut in cuts.items()):
            return 0
        saved = self._saved_steps if checkpoint.number == self._saved else asked.steps
        if any(steps > saved.get(table_id, 0) for table_id, steps in asked.steps.items()):
            return 0
        return checkpoint.number

    def _step_counts(self) -> dict[TableId, int]:
        return {handle.table.table_id: handle.step_count for handle in self._handles()}

    def stay(self, is_over: Callable[[], bool], within_s: float) -> None:
        """The script takes no step until `is_over`, whatever it has answered before; checkpoints
        that are proposed meanwhile are answered with this save point. WaitExpired: one was cut at a
        step that another worker has taken, and this one has to take first.

        Blocking: until `is_over` (call `wake` then), at most `within_s`; and as `reach`.
        """
        self._stays_since_s = now_s()
        self._stop_here()
        self._rest(lambda: is_over() or self._is_left_behind(), within_s)
        with self._lock:
            ahead = self._step_ahead() if self._is_left_behind() and not is_over() else None
        if ahead is not None:
            handle, cut = ahead
            raise WaitExpired(
                f"checkpoint {self._answered} is of step {cut} of table '{handle.name}', and this "
                f"worker is at {handle.clock}: others were further. Take that step, then wait"
            )

    def _is_left_behind(self) -> bool:
        """True if another worker has taken a step that this one has not. Asks the scheduler now and
        then, while there may be such a step, and reports that this worker stays.
        """
        is_ahead = self._step_ahead() is not None
        if is_ahead and self._yes[Question.MUST_STEP] == self._answered:
            return True
        is_long = self._is_in_progress and now_s() >= self._stays_since_s + _LOOK_S
        if is_ahead or is_long:
            self._ask_to_begin_anew()
        return False

    def _is_out_of_reach(self) -> bool:
        """True if the cut is at a step that the script will not take: of a model that it has ceased
        to step.
        """
        view = self._view
        if view is None or not self._is_in_progress or self._saved == self._answered:
            return False
        cuts = {h: self._clock_of_cut(view, h, self._answered) for h in self._handles()}
        ahead = [handle for handle, cut in cuts.items() if handle.clock < (cut or 0)]
        return bool(ahead) and all(self._idle[h.table.table_id] > _IDLE_COUNT for h in ahead)

    def _ask_to_begin_anew(self) -> None:
        """Report that this worker is where it is; if all do, the checkpoint begins again."""
        clocks = {handle.table.table_id: handle.clock for handle in self._handles()}
        self._ask(Question.MUST_STEP, clocks)

    def _ask(self, question: Question, clocks: Mapping[TableId, int]) -> None:
        if now_s() < self._asked_s[question] + _LOOK_S:
            return
        self._asked_s[question] = now_s()
        self._scheduler.join_checkpoint(
            self._answered,
            clocks,
            has_state=self.has_state,
            has_begun=self._has_begun,
            question=question,
            answered=partial(self._take_answer, question, self._answered),
        )

    def _take_answer(self, question: Question, number: int, is_so: bool) -> None:
        with self._lock:
            if is_so:
                self._yes[question] = max(self._yes[question], number)
                self._changed.notify_all()

    @property
    def _checkpoint(self) -> Checkpoint | None:
        return None if self._view is None else self._view.checkpoint

    @property
    def _is_in_progress(self) -> bool:
        """True while a checkpoint that this worker has answered is not complete."""
        return self._checkpoint is not None and self._checkpoint.number == self._answered

    def accompany(self, is_over: Callable[[], bool], within_s: float) -> None:
        """The script is in a collective call, which is a save point only if another worker waits
        for a checkpoint before it makes that call.

        Blocking: until `is_over` (call `wake` then), at most `within_s`; and as `reach`.
        """
        until_s = now_s() + within_s
        with self._lock:
            self._asked_s[Question.IS_AWAITED] = now_s()
            while not self._is_awaited():
                left_s = until_s - now_s()
                if is_over() or self._is_closed or left_s <= 0:
                    return
                self._changed.wait(min(left_s, _LOOK_S))
        with contextlib.suppress(WaitExpired):  # it cannot take a step in the middle of the call
            self.stay(is_over, max(until_s - now_s(), 0.0))

    def _is_awaited(self) -> bool:
        """True if another worker waits for the checkpoint in progress. Asks the scheduler now and
        then, while this worker's part is missing.
        """
        if not self._is_in_progress or self._saved == self._answered:
            return False
        if self._yes[Question.IS_AWAITED] == self._answered:
            return True
        self._ask(Question.IS_AWAITED, self._next_clocks())
        return False

    def had(self, number: int, url: str) -> None:
        """The script has this checkpoint, which it asked for. The one that the cluster began from
        may have a number of another root.
        """
        with self._lock:
            if self._view is None or url != self._view.restored_from:
                self._had = max(self._had, number)

    def _step_ahead(self) -> tuple[TableHandle, int] | None:
        """A table whose cut is ahead of this worker, and the clock of the cut."""
        if self._view is None or not self._is_in_progress:
            return None
        for handle in self._handles():
            cut = self._clock_of_cut(self._view, handle, self._answered)
            needs_all = not handle.table.spec.consistency.backup_workers
            if cut is not None and handle.clock < cut and (needs_all or self._attached):
                return handle, cut
        return None

    def leave(self) -> None:
        """The script takes no further step, whatever it has answered before; blocks as `reach`."""
        if self.has_state and not self._is_closed:
            self._stop_here()
            self._rest(self._is_decided)
        with self._lock:
            self._last_clocks = {h.table.table_id: h.clock for h in self._handles()}

    def leave_behind(self, url: str, before: Before | None = None) -> None:
        """Copy the present state for later checkpoints, into the directory of workers that have
        left; `close` waits until it is written. `before`: None if nothing was loaded. A worker
        without a state reports that there is none to write, where the scheduler waits for it.
        """
        with self._lock:
            clocks = self._last_clocks
            if clocks is None or self._is_closed:
                return
            is_starting, has_state = self._is_starting(before), bool(self._attached)
            is_restored = self._view is not None and bool(self._view.restored_from)
        if not has_state:
            if is_restored and not is_starting:
                self._scheduler.report_part(_LEAVING, PartReport())
            return
        if is_starting:
            self._scheduler.report_part(_LEAVING, PartReport(problem=_LEFT_EARLY))
            return
        self._save(Checkpoint(_LEAVING, url), clocks)

    def _is_starting(self, before: Before | None) -> bool:
        """True before the first step and the first save point in a cluster that was restored, while
        the worker lacks a state or a table of that checkpoint.
        """
        if self._has_begun or self._view is None or not self._view.restored_from:
            return False
        handles = list(self._handles())
        if (
            before is not None
            and before.states <= self._loaded
            and before.tables <= {handle.name for handle in handles}
        ):
            return False
        return all(each.clock <= (each.table.restored_clock or 0) for each in handles)

    def wake(self, _reason: object = None) -> None:
        with self._lock:
            self._changed.notify_all()

    def _stop_here(self) -> None:
        """Make this a save point, and take back an answer with a later one."""
        with self._lock:
            self._arrive()
            if not self._is_decided():
                self._join()

    def _arrive(self) -> None:
        took = {h.table.table_id: self._steps_since(h) for h in self._handles()}
        if any(took.values()):  # else no step lies between this save point and the last
            for table_id, steps in took.items():
                self._idle[table_id] = 0 if steps else self._idle[table_id] + 1
                if steps or self._is_explicit or self._idle[table_id] > _IDLE_COUNT:
                    self._took[table_id] = steps
        self._is_resting = True

    def _steps_since(self, handle: TableHandle) -> int:
        passed = self._passed.get(handle.table.table_id)
        if passed is None:  # this is its first; it may have begun at any clock
            return int(handle.clock > (handle.table.restored_clock or 0))
        return handle.step_count - passed

    def _go_on(self) -> None:
        self._passed |= self._step_counts()
        self._is_resting = False

    def _is_decided(self) -> bool:
        """True if no checkpoint that this worker has answered waits for its cut."""
        checkpoint = self._checkpoint
        return checkpoint is None or checkpoint.is_cut or checkpoint.number != self._answered

    def _rest(self, is_over: Callable[[], bool], within_s: float | None = None) -> None:
        """Wait, and save states that are due. Ends only after a wait in which none was, because a
        checkpoint that is proposed while a state is copied is answered with this save point.
        """
        until_s = now_s() + (self._patience_s if within_s is None else within_s)
        try:
            while (due := self._leave(is_over, until_s)) is not None:
                self._save(*due)
        finally:
            with self._lock:
                number = self._copying.pop(threading.get_ident(), 0)
                if number and number == self._saved:  # by Ctrl-C
                    self._saved, self._cut_short = 0, number
                self._go_on()

    def _leave(
        self, is_over: Callable[[], bool], until_s: float
    ) -> tuple[Checkpoint, dict[TableId, int]] | None:
        """Wait for a state that is due; None: the wait is over, and the script in its next step."""
        with self._lock:
            while (due := self._due()) is None:
                left_s = until_s - now_s()
                if is_over() or self._is_closed or left_s <= 0:
                    self._go_on()
                    return None
                self._changed.wait(min(left_s, _LOOK_S))
            return due

    def _due(self) -> tuple[Checkpoint, dict[TableId, int]] | None:
        """The checkpoint whose cut this worker has reached, and its clocks."""
        view, checkpoint = self._view, self._checkpoint
        if view is None or checkpoint is None or not checkpoint.is_cut or not self._attached:
            return None
        if checkpoint.number != self._answered or checkpoint.number == self._saved:
            return None
        cuts = {h: self._clock_of_cut(view, h, checkpoint.number) for h in self._handles()}
        if any(handle.clock < (cut or 0) for handle, cut in cuts.items()):
            return None
        taken = self._step_counts()
        self._copying[threading.get_ident()] = checkpoint.number
        self._saved, self._saved_steps = checkpoint.number, taken
        for handle, cut in cuts.items():
            if cut is not None and handle.clock > cut:
                if checkpoint.number == self._cut_short:
                    self._give_up(checkpoint, WaitExpired(_CUT_SHORT))
                    return None
                logs.warning(
                    "checkpoint_state_late",
                    number=checkpoint.number, table=handle.name, cut=cut, state=handle.clock,
                )  # fmt: skip
        return checkpoint, {handle.table.table_id: handle.clock for handle in cuts}

    def _clock_of_cut(self, view: ClusterView, handle: TableHandle, checkpoint: int) -> int | None:
        """The clock at which the state is saved; None: at any."""
        table = view.tables_by_id.get(handle.table.table_id)
        if self._is_in_step and table is not None and table.cut is not None:
            return table.cut.after_clock if table.cut.checkpoint == checkpoint else None
        return cut_clock(view, handle, checkpoint)

    def _save(self, checkpoint: Checkpoint, clocks: dict[TableId, int]) -> None:
        tables = {table_id: ReportedTable(0, clock) for table_id, clock in clocks.items()}
        try:
            with self._lock:
                attached = dict(self._attached)
            states = {name: state.state_dict() for name, state in attached.items()}
            write = self._write(checkpoint, max(clocks.values(), default=0), states)
        except Exception as error:  # noqa: BLE001 - training goes on, whatever a state raises
            self._give_up(checkpoint, error)
            return
        with uninterrupted(), self._lock:
            self._copying.pop(threading.get_ident(), None)
            writing = self._submitted(partial(self._written, checkpoint, write, tables))
            if checkpoint.number == _LEAVING:
                self._leaving = writing
        if writing is None:
            self._written(checkpoint, write, tables)

    def _submitted(self, work: Callable[[], None]) -> Future[None] | None:
        """As `ps_runtime.system.executors.submitted`."""
        writing = submitted(self._threads, work)
        if writing is not None:
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
        return writing

    def _written(
        self,
        checkpoint: Checkpoint,
        write: Callable[[], PartReport],
        tables: Mapping[TableId, ReportedTable],
    ) -> None:
        try:
            part = write()
        except Exception as error:  # noqa: BLE001 - as in `_save`
            self._lost(checkpoint, error)
            return
        report = replace(part, tables=tables, has_parameters=self._keep_parameters)
        self._scheduler.report_part(checkpoint.number, report)

    def _give_up(self, checkpoint: Checkpoint, error: Exception) -> None:
        """This thread copies no state any more."""
        with uninterrupted():
            self._copying.pop(threading.get_ident(), None)
            self._lost(checkpoint, error)

    def _lost(self, checkpoint: Checkpoint, error: Exception) -> None:
        said = error.message if isinstance(error, PushpullError) else repr(error)
        logs.warning("checkpoint_state_lost", number=checkpoint.number, reason=said)
        lost = PartReport(problem=said, has_parameters=self._keep_parameters)
        self._scheduler.report_part(checkpoint.number, lost)

    @property
    def _keep_parameters(self) -> bool:
        """True if the states have parameters that no server has."""
        with self._lock:
            attached = list(self._attached.values())
        return any(isinstance(s, KeepsParameters) and s.keeps_parameters for s in attached)


def cut_clock(view: ClusterView, handle: TableHandle, checkpoint: int) -> int | None:
    """The clock of a table's cut; None if it is not cut, or each range has a clock of its own."""
    table = view.tables_by_id.get(handle.table.table_id)
    if table is None or table.cut is None or table.cut.checkpoint != checkpoint:
        return None
    return table.cut_step
