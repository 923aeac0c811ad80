"""Where a worker's own state is written down: between two steps, at the clock of a checkpoint's cut
(SEMANTICS S10).

    view says proposed -> this worker answers at which clocks it is next between two steps
    view says cut      -> there, its state is copied and written; the step after it may begin

Rules:
    - A save point is a place in the training loop where everything of the last step has been done:
      schedules have moved on, the data position too. `Client.save_point` is one; for a script that
      has none of its own, the beginning of the next step is.
    - From its answer until the cut is settled a worker does not leave the save point that it has
      named: the state that belongs to the cut would be gone.
    - The answer is given on the background thread, whatever the script does meanwhile; a script
      that waits for other workers in a step holds nobody up. So it is a guess, where the script is
      in a step: that it takes as many steps to its next save point as it took to its last. A guess
      that is too high makes the cut a later one; one that is too low, its state (a log line says).
    - A script that waits for a checkpoint that is of its next step says so: it takes that step only
      if another worker has taken it. Where all wait, the scheduler begins it again, at the steps
      that they are at.
    - A script that is in a collective call while another worker waits for a checkpoint, and has not
      made that call, is at a save point there: neither would go on.
    - What cannot be written is reported as lost, and training goes on.
    - Who leaves in order writes its state as of its last step: it has no later one.

Invariants:
    SV-1  A state that is written as of a clock was copied when its worker was at that clock.

What it deliberately does not do: choose clocks (`scheduler.machine.checkpoints` does), or know what
states are (`ps_worker.checkpoint.state_codec` does).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any, Protocol

from ps_core import limits
from ps_core.change import Checkpoint
from ps_core.cluster_view import ClusterView
from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, PushpullError, WaitExpired
from ps_core.keys import TableId
from ps_core.manifest import PartReport, ReportedTable
from ps_core.tables import Table
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.steps.steps import TableHandle

_LEAVING = 0
"""In the place of a checkpoint's number."""

_MAX_NAME_BYTES = 200
_LOOK_S = 0.5


class HasState(Protocol):
    """Anything whose state can be written down and taken over."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: values of the kinds that `ps_worker.checkpoint.state_codec` lists."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes over what `state_dict` gave."""
        ...


class Question(Enum):
    """What a worker asks the scheduler about a checkpoint, now and then."""

    MUST_STEP = "its script waits: must it take a step first, which another has taken?"
    IS_AWAITED = "does the script of another worker wait for it?"


class Scheduler(Protocol):
    """What save points say to the scheduler; any thread."""

    def join_checkpoint(
        self, number: int, clocks: Mapping[TableId, int], *, has_state: bool
    ) -> None:
        """Say where this worker is."""
        ...

    def ask_about_checkpoint(
        self,
        question: Question,
        number: int,
        clocks: Mapping[TableId, int],
        *,
        has_state: bool,
        answered: Callable[[bool], None],
    ) -> None:
        """Say that this worker is at these clocks, and ask; `answered` is called with the answer.
        It may never be called.
        """
        ...

    def report_part(self, number: int, part: PartReport) -> None:
        """Say what was written."""
        ...


Write = Callable[[Checkpoint, int, Mapping[str, Mapping[str, Any]]], Callable[[], PartReport]]
"""Copies the states of a checkpoint at a clock; what it returns writes the copy to its file."""

Trained = Callable[[], Iterable[tuple[TableHandle, bool]]]
"""The tables that a model steps, and whether each is awake."""


class SavePoints:
    """The save points of one worker.

    Args:
        scheduler: who is told.
        handles: the worker's tables.
        write: how its state is written.
        patience_s: how long a cut is waited for, in seconds.
    """

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
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._writing: set[Future[None]] = set()
        self._attached: dict[str, HasState] = {}
        self._models: list[Trained] = []
        self._passed: dict[TableId, int] = {}  # where the last save point was
        self._took: dict[TableId, int] = {}  # steps from the one before it to there
        self._view: ClusterView | None = None
        self._asked = 0  # the newest checkpoint that was answered
        self._asked_first = 0  # the first that was, since the script began to rest
        self._saved = 0  # the newest that was written, or lost
        self._had = 0  # the newest that the script has asked for
        self._cut: ClusterView | None = None  # the newest with a checkpoint that is cut
        self._yes = dict.fromkeys(Question, 0)  # the newest checkpoint of which that was so
        self._asked_s = dict.fromkeys(Question, 0.0)  # when that was asked
        self._stays_since_s = 0.0
        self._is_resting = False
        self._is_explicit = False
        self._is_closed = False
        self._last_clocks: dict[TableId, int] | None = None

    # --- what is saved

    def attach(self, name: str, state: HasState) -> None:
        """From now on this is part of the worker's state.

        Raises:
            InvalidConfig: the name is taken, or `state` has no state_dict.
        """
        if not name or len(name.encode()) > _MAX_NAME_BYTES:
            raise InvalidConfig(f"the name '{name[:40]}' is not of 1 to {_MAX_NAME_BYTES} bytes")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(state, method, None)):
                raise InvalidConfig(
                    f"'{name}' is a {type(state).__name__} without {method}(); expected something "
                    "with state_dict() and load_state_dict()"
                )
        with self._changed:
            if self._attached.get(name, state) is not state:
                raise InvalidConfig(
                    f"another state is attached as '{name}'; give each its own name"
                )
            self._attached[name] = state

    @property
    def has_state(self) -> bool:
        """Whether anything was attached."""
        return bool(self._attached)

    def add_model(self, trained: Trained) -> None:
        """These tables take their steps together, once between two save points."""
        with self._changed:
            self._models.append(trained)
            self._passed |= {handle.table.table_id: handle.clock for handle, _ in trained()}

    # --- what the cluster says

    def take_view(self, view: ClusterView) -> None:
        """A newer view; on the background thread."""
        with self._changed:
            self._view = view
            checkpoint = view.checkpoint
            is_new = checkpoint is not None and checkpoint.number > self._asked
            if checkpoint is not None and is_new and not checkpoint.is_cut:
                self._asked = checkpoint.number
                self._asked_first = self._asked_first or checkpoint.number
                self._join()
            if checkpoint is not None and checkpoint.is_cut:
                self._cut = view
            self._changed.notify_all()

    def _join(self) -> None:
        self._scheduler.join_checkpoint(
            self._asked, self._next_clocks(), has_state=bool(self._attached)
        )

    def _next_clocks(self) -> dict[TableId, int]:
        """The clocks at the save point that the worker is at, or that it comes to next."""
        if self._last_clocks is not None:  # its goodbye is for a step that it does not take
            return self._last_clocks
        clocks = {handle.table.table_id: handle.clock for handle in self._handles()}
        if self._is_resting or not self._attached:
            return clocks
        awake = {h.table.table_id: is_awake for t in self._models for h, is_awake in t()}
        for table_id, clock in clocks.items():
            steps = self._took.get(table_id, int(table_id in awake))
            if awake.get(table_id, True):
                clocks[table_id] = max(clock, self._passed.get(table_id, clock) + steps)
        return clocks

    def end(self, reason: object = None) -> None:
        """The session has ended: no view comes any more, and nobody waits for one."""
        del reason
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """The worker leaves: what is being written is waited for, at most so long."""
        self.end()
        with self._changed:
            writing = list(self._writing)
        end_s = now_s() + timeout_s
        for each in writing:
            try:
                each.result(max(end_s - now_s(), 0.0))
            except TimeoutError:
                logs.warning("checkpoint_part_not_waited_for", waited_s=timeout_s)
                break
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- what the script says

    def reach(self, *, is_explicit: bool = True) -> None:
        """The script is at a save point: all of the last step has been done.

        Args:
            is_explicit: it says so itself; from then on only what it says counts.

        Blocking: while a checkpoint is proposed and not cut, at most `limits.CHECKPOINT_CUT_S`,
            unless all its tables are asynchronous; and while its own state is copied.
        """
        with self._changed:
            self._is_explicit = self._is_explicit or is_explicit
            if self._is_explicit is not is_explicit or not self._attached:
                return
            self._arrive()
        self._rest(lambda: self._is_settled() or self._is_asynchronous())

    def _is_asynchronous(self) -> bool:
        """Whether no table of this worker's can be cut at a clock: a state that is written at its
        next save point belongs to the cut as much as one of this one.
        """
        tables = {} if self._view is None else self._view.tables_by_id
        return all(_is_asynchronous(tables.get(h.table.table_id), h) for h in self._handles())

    def rest(self, is_over: Callable[[], bool]) -> None:
        """As `reach`; besides, wait for a checkpoint that is about to be proposed, until it is
        settled or `is_over`.
        """
        with self._changed:
            self._arrive()
            asked, self._asked_first = self._asked, 0

        def ends() -> bool:
            begun = self._view is not None and self._view.checkpoint is not None
            return is_over() or (self._is_settled() and (begun or self._asked != asked))

        self._rest(ends)
        with self._changed:
            # Others may have asked for another before this thread went on.
            self._had = max(self._had, self._asked_first)

    def asks(self) -> Callable[[], tuple[int, int]]:
        """The script asks for a checkpoint now.

        Returns:
            What says, at any time until it has one, the number of a checkpoint that has all steps
            of this worker, which trains every table, and that its script had not asked for before;
            0: none has. And the number of the newest view, which says so.
        """
        with self._changed:
            had = self._had

        def covered_by() -> tuple[int, int]:
            with self._changed:
                number = self._covered_by(had)
                self._had = max(self._had, number)
                return number, 0 if self._view is None else self._view.view_number

        return covered_by

    def _covered_by(self, had: int) -> int:
        view, checkpoint = self._cut, None if self._cut is None else self._cut.checkpoint
        if view is None or checkpoint is None or checkpoint.number <= had:
            return 0
        handles = {handle.table.table_id: handle for handle in self._handles()}
        for table in view.tables:
            handle = handles.get(table.table_id)
            cut = None if handle is None else cut_clock(view, handle, checkpoint.number)
            if handle is None or cut is None or handle.clock > cut:
                return 0
        return checkpoint.number

    def stay(self, is_over: Callable[[], bool], within_s: float) -> None:
        """The script takes no step until `is_over`: it goes no further than it is, whatever it has
        said, and whatever is proposed meanwhile is answered with this save point.

        Blocking: until `is_over` (tell of it by `wake`), at most so long; and as `reach`.

        Raises:
            WaitExpired: a checkpoint has been cut at a step that another worker has taken, and this
                one has to take first.
        """
        self._stays_since_s = now_s()
        self._stop_here()
        self._rest(lambda: is_over() or self._is_left_behind(), within_s)
        with self._changed:
            ahead = self._step_ahead() if self._is_left_behind() and not is_over() else None
        if ahead is not None:
            handle, cut = ahead
            raise WaitExpired(
                f"checkpoint {self._asked} is of step {cut} of table '{handle.name}', and this "
                f"worker is at {handle.clock}: others were further. Take that step, then wait"
            )

    def _is_left_behind(self) -> bool:
        """Whether another worker has taken a step that this one stays before; the scheduler is
        asked now and then, while there is such a step, and told that this one stays.
        """
        is_ahead = self._step_ahead() is not None
        if is_ahead and self._yes[Question.MUST_STEP] == self._asked:
            return True
        is_long = self._is_under_way and now_s() >= self._stays_since_s + _LOOK_S
        if is_ahead or is_long:
            clocks = {handle.table.table_id: handle.clock for handle in self._handles()}
            self._ask(Question.MUST_STEP, clocks)
        return False

    def _ask(self, question: Question, clocks: Mapping[TableId, int]) -> None:
        if now_s() < self._asked_s[question] + _LOOK_S:
            return
        self._asked_s[question] = now_s()
        self._scheduler.ask_about_checkpoint(
            question,
            self._asked,
            clocks,
            has_state=bool(self._attached),
            answered=partial(self._answered, question, self._asked),
        )

    def _answered(self, question: Question, number: int, is_so: bool) -> None:
        with self._changed:
            if is_so:
                self._yes[question] = max(self._yes[question], number)
                self._changed.notify_all()

    @property
    def _is_under_way(self) -> bool:
        """Whether a checkpoint that this worker has answered is not complete."""
        checkpoint = None if self._view is None else self._view.checkpoint
        return checkpoint is not None and checkpoint.number == self._asked

    def accompany(self, is_over: Callable[[], bool], within_s: float) -> None:
        """The script is in a call that all workers make. It is no save point, unless another worker
        waits for a checkpoint before it makes that call.

        Blocking: until `is_over` (tell of it by `wake`), at most so long; and as `reach`.
        """
        until_s = now_s() + within_s
        with self._changed:
            self._asked_s[Question.IS_AWAITED] = now_s()
            while not self._is_awaited():
                left_s = until_s - now_s()
                if is_over() or self._is_closed or left_s <= 0:
                    return
                self._changed.wait(min(left_s, _LOOK_S))
        with contextlib.suppress(WaitExpired):  # it cannot take a step in the middle of the call
            self.stay(is_over, max(until_s - now_s(), 0.0))

    def _is_awaited(self) -> bool:
        """Whether another worker waits for the checkpoint that is made; the scheduler is asked now
        and then, while this one's part is missing.
        """
        if not self._is_under_way or self._saved == self._asked:
            return False
        if self._yes[Question.IS_AWAITED] == self._asked:
            return True
        self._ask(Question.IS_AWAITED, self._next_clocks())
        return False

    def had(self, number: int) -> None:
        """The script has this one, which it asked for."""
        with self._changed:
            self._had = max(self._had, number)

    def _step_ahead(self) -> tuple[TableHandle, int] | None:
        """A table whose cut waits for a step of this worker, and the clock of the cut."""
        checkpoint = None if self._view is None else self._view.checkpoint
        if self._view is None or checkpoint is None or checkpoint.number != self._asked:
            return None
        for handle in self._handles():
            cut = cut_clock(self._view, handle, checkpoint.number)
            needs_all = not handle.table.spec.consistency.backup_workers
            if cut is not None and handle.clock < cut and (needs_all or self._attached):
                return handle, cut
        return None

    def leave(self) -> None:
        """The script takes no further step: it goes no further than it is, whatever it has said.

        Blocking: as `reach`.
        """
        if self.has_state and not self._is_closed:
            self._stop_here()
            self._rest(self._is_settled)
        with self._changed:
            self._last_clocks = {h.table.table_id: h.clock for h in self._handles()}

    def leave_behind(self, url: str) -> None:
        """Write the state as of now for the checkpoints that are made when this worker has left.

        Args:
            url: the directory that has such states.

        Blocking: while it is copied; `close` waits until it is written.
        """
        with self._changed:
            clocks = self._last_clocks
            if clocks is None or not self._attached or self._is_closed:
                return
        self._save(Checkpoint(_LEAVING, url), clocks)

    def wake(self, reason: object = None) -> None:
        """Something has happened that a wait is for."""
        del reason
        with self._changed:
            self._changed.notify_all()

    def _stop_here(self) -> None:
        """This is a save point; what was said of a later one is taken back."""
        with self._changed:
            self._arrive()
            if not self._is_settled():
                self._join()

    def _arrive(self) -> None:
        took = {h.table.table_id: self._steps_since(h) for h in self._handles()}
        if any(took.values()):  # else no step lies between this save point and the last
            for table_id, steps in took.items():
                if steps or self._is_explicit:
                    self._took[table_id] = steps
        self._is_resting = True

    def _steps_since(self, handle: TableHandle) -> int:
        """How many steps lie between the last save point and this one."""
        passed = self._passed.get(handle.table.table_id)
        if passed is None:  # this is its first; it may have begun at any clock
            return int(handle.clock > (handle.table.restored_clock or 0))
        return handle.clock - passed

    def _go_on(self) -> None:
        self._passed |= {handle.table.table_id: handle.clock for handle in self._handles()}
        self._is_resting = False

    def _is_settled(self) -> bool:
        """Whether no checkpoint that was answered waits for its cut."""
        checkpoint = None if self._view is None else self._view.checkpoint
        return checkpoint is None or checkpoint.is_cut or checkpoint.number != self._asked

    def _rest(self, is_over: Callable[[], bool], within_s: float | None = None) -> None:
        """Wait, and save what is due. It leaves in the stretch in which nothing was: a checkpoint
        that is proposed while a state is copied is answered with this save point, too.
        """
        until_s = now_s() + (self._patience_s if within_s is None else within_s)
        try:
            while (due := self._leave(is_over, until_s)) is not None:
                self._save(*due)
        finally:
            with self._changed:
                self._go_on()

    def _leave(
        self, is_over: Callable[[], bool], until_s: float
    ) -> tuple[Checkpoint, dict[TableId, int]] | None:
        """What is due, as soon as something is; when the wait is over and nothing is, the script is
        in its next step.
        """
        with self._changed:
            while (due := self._due()) is None:
                left_s = until_s - now_s()
                if is_over() or self._is_closed or left_s <= 0:
                    self._go_on()
                    return None
                self._changed.wait(min(left_s, _LOOK_S))
            return due

    def _due(self) -> tuple[Checkpoint, dict[TableId, int]] | None:
        """The checkpoint whose cut this worker is at, if it is; and its clocks."""
        view = self._view
        checkpoint = None if view is None else view.checkpoint
        if view is None or checkpoint is None or not checkpoint.is_cut or not self._attached:
            return None
        if checkpoint.number != self._asked or checkpoint.number == self._saved:
            return None
        cuts = {h: cut_clock(view, h, checkpoint.number) for h in self._handles()}
        if any(handle.clock < (cut or 0) for handle, cut in cuts.items()):
            return None
        for handle, cut in cuts.items():
            if cut is not None and handle.clock > cut:
                logs.warning(
                    "checkpoint_state_late",
                    number=checkpoint.number, table=handle.name, cut=cut, state=handle.clock,
                )  # fmt: skip
        self._saved = checkpoint.number
        return checkpoint, {handle.table.table_id: handle.clock for handle in cuts}

    def _save(self, checkpoint: Checkpoint, clocks: dict[TableId, int]) -> None:
        tables = {table_id: ReportedTable(0, clock) for table_id, clock in clocks.items()}
        try:
            with self._changed:
                attached = dict(self._attached)
            states = {name: state.state_dict() for name, state in attached.items()}
            write = self._write(checkpoint, max(clocks.values(), default=0), states)
        except Exception as error:  # noqa: BLE001 - whatever a state does, training goes on
            self._lost(checkpoint, error)
            return
        with self._changed:
            writing = self._threads.submit(self._written, checkpoint, write, tables)
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)

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
        report = PartReport(part.file, part.byte_count, part.header_sha256, tables)
        self._scheduler.report_part(checkpoint.number, report)

    def _lost(self, checkpoint: Checkpoint, error: Exception) -> None:
        said = error.message if isinstance(error, PushpullError) else repr(error)
        logs.warning("checkpoint_state_lost", number=checkpoint.number, reason=said)
        self._scheduler.report_part(checkpoint.number, PartReport(problem=said))


def _is_asynchronous(table: Table | None, handle: TableHandle) -> bool:
    change = None if table is None else table.change
    is_newest = change is None or handle.clock >= change.after_clock
    return table is not None and is_newest and table.consistency.mode is Mode.ASP


def cut_clock(view: ClusterView, handle: TableHandle, checkpoint: int) -> int | None:
    """The clock that a worker's state belongs to: that of the table's cut; None where it is not
    cut, or by each range at a moment of its own.
    """
    table = view.tables_by_id.get(handle.table.table_id)
    if table is None or table.cut is None or table.cut.checkpoint != checkpoint:
        return None
    return table.cut_step
