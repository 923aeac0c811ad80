"""All tables of a model in training: they take their steps together.

Rules:
    - A step seals every table that is awake; all of them take part in the update, or none does (a
      gradient that is not finite, an overflow of mixed precision).
    - All checks come before the first seal.
    - A step is sealed on all tables without interruption. If the wait for it ends early
      (WaitExpired, Ctrl-C), the next call ends it before it seals another.
    - A *round* is a step that pushes only blocks that were too stale, computed anew. It takes one
      clock on every table of the model, those that sleep included, so the clocks of any two tables
      are equally far apart at every worker. Otherwise a change to BSP could leave two workers
      waiting for each other, each on another table. For the same reason a worker skips clocks whose
      updates were made without it on all tables, or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import EditRefused, InvalidConfig, InvalidTensor, PushpullError, WaitExpired
from ps_core.tables.optimizers import VALUES_ARRAY, Hyperparameters
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.spec.optimizers import (
    Add,
    Outer,
    ServerOptimizer,
    check_switches,
    hyperparameters_of,
)
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import StepResult, TableHandle, after_round
from ps_worker.training.among_workers.later_groups import ModelClocks
from ps_worker.training.among_workers.worker_group import WorkerGroup
from ps_worker.training.among_workers.workers_model import WorkersModel
from ps_worker.training.clipping import scaled_step, scaled_updates
from ps_worker.training.common_model import CommonModel, EarlyOuterStep
from ps_worker.training.joining import ModelJoin, clocks_to_pass
from ps_worker.training.local_optimizer import (
    OuterNeeds,
    OuterSteps,
    SettingsByClock,
    StateBefore,
    check_waits_for_all,
    refused_inner_step,
    skipped_step,
)
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.planned_edits import (
    ASLEEP,
    PASSED,
    REMEDIES,
    Edited,
    PlannedEdits,
    digest_of,
    edit_refused,
    load_refused,
    own_words,
    problem_of,
)
from ps_worker.training.sealed_step import SealedStep
from ps_worker.training.served_state import LoadedState, State, arrays_of, is_same, pulled_arrays
from ps_worker.training.step_times import StepTimes
from ps_worker.training.tables.awaited_parameters import AwaitedParameters
from ps_worker.training.tables.gradient_marks import GradientMarks
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.training.tables.unrounded_values import pull_unrounded
from ps_worker.training.trained_rows import TrainedRows, bind_rows, check_rows_fit, have_met
from ps_worker.transport.metrics import MEASURES

if TYPE_CHECKING:
    from ps_worker.client.client import Client

Groups: TypeAlias = Sequence[Mapping[str, Any]]
"""torch's parameter groups."""


class TrainedModel:
    """The tables of one `DistributedOptimizer`, which take their steps together.

    Attributes:
        tables, buffers, rows: the owner adds them.
        group: the workers that push and pull as one; the owner sets it.
        inner: the local optimizer of `Aggregate`, `Add` and `Outer`; the owner sets it.
        own: this worker's copy of the model, with `Aggregate`; the owner sets it, once it is whole.
        outer_steps: those of `Outer`.
        results: the results of the last step, by table that is awake; empty if it was skipped.
        row_results: likewise, of embedding tables.
        gradient_norm: the norm that the last step was clipped by; None without clipping.
        loaded: optimizer state that the servers do not have in full yet.
        adds: the worker pushes its local optimizer's updates (`Add`).
        outer: the optimizer, if it is `Outer`.
        are_replayed: a CUDA graph, whose replays call no hooks, makes gradients.
        is_reducing: True while workers reduce gradients by themselves; the owner sets it.
        awaited: the values that the last step did not wait for (`overlap_pull`); the owner sets it.
    """

    def __init__(
        self, client: Client, optimizer: ServerOptimizer, options: TrainingOptions
    ) -> None:
        self.options = options
        self.tables: list[TrainedTable] = []
        self.buffers: list[BufferTable] = []
        self.rows: list[TrainedRows] = []
        self.group = WorkerGroup(client, [client.rank])
        self.inner: torch.optim.Optimizer | None = None
        self.own: WorkersModel | None = None
        self.results: dict[TrainedTable, StepResult] = {}
        self.row_results: list[StepResult] = []
        self.gradient_norm: float | None = None
        self.loaded: LoadedState | None = None
        self.adds = isinstance(optimizer, Add)
        self.outer = optimizer if isinstance(optimizer, Outer) else None
        self.outer_steps = OuterSteps(self.outer, self.tables, self.buffers)
        self.inner_steps = self.outer_steps.inner
        self.are_replayed = False
        self.is_reducing: Callable[[], bool] = lambda: self.group.has_begun
        self.awaited = AwaitedParameters(None)
        self._client = client
        self._optimizer = optimizer
        self._sealed: SealedStep | None = None
        self._untold = ""  # a step that was refused, in words, which no call has raised
        self._edits = PlannedEdits()
        self._common = CommonModel(client, options.name, self.tables, self.buffers, self._edits)
        self._round_count = 0  # the clocks beyond the script's steps
        self._is_hooked = False  # a hook of the present step's gradients was called
        self._given = (-1, b"")  # clock and digest of the state that `gave_state` noted
        self._groups: Groups = ()  # of the last `_step`
        self._join = ModelJoin(client, options.name, self.tables)
        self._times: StepTimes  # from `begin` on
        self._settings = SettingsByClock(client.tables.newest)

    @property
    def aggregates(self) -> bool:
        """True if the servers have sums, and the parameters are the local optimizer's."""
        return self.inner is not None and not self.moves

    @property
    def moves(self) -> bool:
        """True if the worker pushes how far its local optimizer moved the parameters."""
        return self.adds or self.outer is not None

    @property
    def clock(self) -> int:
        handles = [*(table.handle for table in self.tables), *(rows.handle for rows in self.rows)]
        return max((handle.clock for handle in handles), default=0)

    @property
    def _parts(self) -> list[TrainedTable | BufferTable]:
        return [*self.tables, *self.buffers]

    @property
    def clocks(self) -> ModelClocks:
        """The clocks of this worker's tables, for a group that comes later."""
        tables = [table.handle for table in self.tables]
        awake = [(table.handle, not table.is_asleep) for table in self.tables]
        settings = self._settings.ahead(1, awake)  # which others may have changed
        may_differ = any(s.mode is Mode.ASP or s.backup_workers for s in settings)
        may_pass = may_differ and (self.inner is None or self.adds)
        passing = [handle for handle, is_awake in self.awake_handles() if is_awake and may_pass]
        return ModelClocks(self.options.name, tables, may_differ, self._round_count, passing)

    def awake_handles(self) -> list[tuple[TableHandle, bool]]:
        """The handles of all tables, and whether each takes steps."""
        return [
            *((table.handle, not table.is_asleep) for table in self.tables),
            *((buffers.handle, True) for buffers in self.buffers),
            *((rows.handle, True) for rows in self.rows),
        ]

    @property
    def rows_name(self) -> str:
        """The name of one of its embedding tables; empty without one."""
        return self.rows[0].name if self.rows else ""

    def check_rows_fit(self, consistency: Consistency) -> None:
        """Refuse settings that Embeddings in the module do not have."""
        if self.rows:
            options = replace(self.options, consistency=consistency)
            check_rows_fit(self.rows_name, self._optimizer, options)

    def begin(self) -> None:
        """Begin the first step's computation; blocks as `StepTimes`."""
        self._times = StepTimes(self._client)

    def joined(self) -> None:
        """This worker joins others that train."""
        self._join.begin(self.clock, self.awake_handles())

    # --- between two steps

    def hyperparameters(self, table: TrainedTable, groups: Groups) -> Hyperparameters:
        """The hyperparameters of a step on a table; InvalidConfig if a fixed switch was changed."""
        group = groups[table.group]
        if self.outer is not None:
            return self.outer.outer_hyperparameters(group)
        if self.inner is not None:
            return () if self.own is None else self.own.hyperparameters(group, table)
        check_switches(table.handle.spec.optimizer, group, table.name)
        return hyperparameters_of(table.handle.spec.optimizer, group)

    def set_consistency(
        self, wanted: Consistency, after_clock: int, timeout_s: float | None
    ) -> int:
        self.check_rows_fit(wanted)
        options = replace(self.options, consistency=wanted)
        check_waits_for_all(self.outer, options)
        change = partial(self._client.set_consistency, after_clock=after_clock, timeout_s=timeout_s)
        clocks = [change(table.handle, wanted) for table in self.tables]
        clocks += [change(buffers.handle, wanted.without_policy()) for buffers in self.buffers]
        self.options = options
        for table in self.tables:
            table.options = options
        return max(clocks, default=0)

    def synchronize(self, groups: Groups, timeout_s: float | None) -> None:
        """As `DistributedOptimizer.synchronize`; resumes a call that was interrupted."""
        self.end_overlapped()
        self.end_step()
        if not self._common.is_interrupted:
            self._wait_pending()
            if self.options.applies_on_arrival and any(
                t.handle.steps.has_open_step for t in self.tables
            ):
                raise InvalidConfig(
                    "synchronize between backward and step in eager mode, whose blocks are applied "
                    "on arrival; call step() first"
                )
        self._groups = groups
        self._common.meet(timeout_s, is_pulled=not self.aggregates, outer=self._early_outer_step())
        have_met(self.rows)
        self.tell()

    def _early_outer_step(self) -> EarlyOuterStep | None:
        if self.outer is None:
            return None
        self._outer_needs()  # a view tells of one change only: of each in its time
        seal, end = self._seal_early, self.end_overlapped
        return EarlyOuterStep(self.inner_steps, self._outer_needs, self._pass_to, seal, end)

    def _outer_needs(self) -> OuterNeeds:
        ranks = self._client.engine.view.awaited_ranks
        return self._settings.needs_after(self.clock, self.awake_handles(), len(ranks))

    def _pass_to(self, clock: int) -> None:
        parts: list[TrainedTable | BufferTable] = [t for t in self.tables if not t.is_asleep]
        for part in (*parts, *self.buffers) * max(clock - self.clock, 0):
            part.pass_clock()

    def _seal_early(self) -> None:
        """OUTER: seal an outer step of all blocks; one without moves takes part under BSP only."""
        settings = self._settings.ahead(1, self.awake_handles())
        takes_part = self.inner_steps.have_moved or all(s.mode is Mode.BSP for s in settings)
        self.outer_steps.merge()
        self.outer_steps.choose(self.clock, is_whole=True)
        self._sealed = self._seal(self._groups, StepScale(skip=not takes_part), None)
        self._sealed.has_gradients, self._sealed.is_early = self._is_hooked, True

    def _wait_pending(self) -> None:
        for part in self._parts:
            part.wait_pending()
        for rows in self.rows:
            rows.finish()

    # --- a step

    @property
    def is_repeated(self) -> bool:
        """True if `step` would only end a step that was begun: no gradient has come since."""
        if self.group.has_begun:
            return True
        sealed = self._sealed
        if sealed is None or sealed.is_edit:
            return False
        if not sealed.has_gradients and sealed.marks is not None:
            sealed.has_gradients = self._marks().differ_from(sealed.marks)
        return not sealed.has_gradients

    def _marks(self) -> GradientMarks:
        return GradientMarks(e.tensor.grad for table in self.tables for e in table.layout.placed)

    def _unhooked_marks(self) -> GradientMarks | None:
        """None: hooks tell of all gradients."""
        return self._marks() if self.are_replayed or not self._is_hooked else None

    def gradient_came(self) -> None:
        """A backward pass runs, so the next `step` takes a step of its own. Refuses one whose
        gradients the last step would overwrite, or that other workers, which are in a
        `synchronize`, would pull.
        """
        self._is_hooked = True
        self._client.engine.steps.has_gradient = True
        self._join.gradient_came(self.edited)
        if self._common.is_interrupted and self.options.applies_on_arrival:
            raise InvalidConfig(
                "a backward pass in eager mode, whose blocks are applied on arrival, before a "
                "synchronize() that was interrupted has ended; call synchronize() until it returns"
            )
        if self.is_reducing() or (self.aggregates and self._sealed is not None):
            raise InvalidConfig(
                "a backward pass before the last step has ended, which will write the reduced "
                "gradients; call step() or zero_grad() until it returns"
            )
        if self._sealed is not None:
            self._sealed.has_gradients = True

    def end_step(self, *, is_zeroing: bool = False) -> None:
        """End a step whose end no call has seen; blocks and raises as `step`, but for a gradient
        that was not finite: `tell` does. Then wait for awaited values, unless the caller zeroes
        gradients.
        """
        if self.group.has_begun:
            if not is_zeroing:
                self.group.check_gradients(self._marks)
            self.results = self._step(self._groups, StepScale())
        self._end_sealed()
        if not is_zeroing:
            self.awaited.wait()

    def _end_sealed(self) -> None:
        """End a sealed step, but no outer one that is on its way while inner steps are taken."""
        if not self._is_overlapped:
            self.end_overlapped()

    def end_overlapped(self) -> None:
        """As `end_step`, also of an outer step that is on its way; its values wait for a merge."""
        if self._sealed is not None:
            self.results = self._end(self._sealed)
        self.outer_steps.take_failed()

    def tell(self) -> None:
        """InvalidTensor if a step was refused, and no call has said so."""
        if untold := self._untold:
            self._untold = ""
            raise InvalidTensor(untold)

    @property
    def _is_overlapped(self) -> bool:
        """True if inner steps are taken while the last outer step is on its way."""
        sealed = self._sealed
        is_taken_over = sealed is not None and not (sealed.is_skipped or sealed.is_edit)
        return is_taken_over and self.outer_steps.is_overlapped

    def push_rows_ahead(self) -> None:
        """Push the gradients of rows, while it is not known yet whether the next `step` skips. Only
        where nothing changes them until then: no clipping in place, and no edit, which is a step.
        """
        if self.tables or self.options.clip_norm is not None:
            return
        for rows in self.rows:
            rows.push_ahead()

    def step(
        self,
        groups: Groups,
        scale: StepScale,
        closure: Callable[[], object] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Take a step of all tables, and rounds while blocks are too stale, for which `closure`
        computes the gradients anew. End the last step first; if no gradients have come since, do
        only that. `meanwhile` is called together with the seals, without interruption, before the
        wait for the step. Blocks and raises as `DistributedOptimizer.step`.
        """
        self.group.check_gradients(self._marks)
        self.results = {}
        sealed = self._sealed if self.is_repeated and not self.group.has_begun else None
        before = None if closure is None or sealed is not None else self._state_before()
        if sealed is None:
            if not self.group.has_begun:
                self._client.checkpoints.begin_step(self.options.name)
            self.results = self._step(groups, scale, meanwhile=meanwhile)
        else:
            self.results = self._end(sealed)
            self.tell()
        if closure is None:
            return
        for _ in range(self.options.recompute):
            rejected = self._rejected()
            if not rejected or not self._may_recompute(before):
                break
            for table in self.tables:
                table.restrict(rejected.get(table, ()))
            try:
                with torch.enable_grad():
                    closure()
                ended = self._step(groups, scale, before)
            finally:
                for table in self.tables:
                    table.restrict(None)
            MEASURES.recomputed_blocks.inc(sum(map(len, rejected.values())))
            for table, result in ended.items():
                self.results[table] = after_round(self.results[table], result)
        MEASURES.abandoned_blocks.inc(sum(map(len, self._rejected().values())))

    def _rejected(self) -> dict[TrainedTable, tuple[int, ...]]:
        return {table: end.rejected for table, end in self.results.items() if end.rejected}

    def settings(self) -> Iterator[Consistency]:
        """The newest settings of all tables, which other clients may have changed."""
        return (self._client.consistency_of(part.handle) for part in self._parts)

    def _may_recompute(self, before: StateBefore | None) -> bool:
        """False under BSP, where a step of some blocks would count as a whole one."""
        is_possible = before is not None or not self.moves
        return is_possible and all(setting.mode is not Mode.BSP for setting in self.settings())

    def _state_before(self) -> StateBefore | None:
        """ADD: the state that the local optimizer may have to return to."""
        if self.inner is None or not self.adds or not self.options.recompute:
            return None
        rejects = any(setting.policy is StalePolicy.REJECT for setting in self.settings())
        return StateBefore(self.inner) if rejects else None

    @torch.no_grad()
    def _step(
        self,
        groups: Groups,
        scale: StepScale,
        before: StateBefore | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> dict[TrainedTable, StepResult]:
        """Take one step, or go on with one that the group has begun; returns its results by table
        that is awake, none if it was skipped.
        """
        self._end_sealed()
        self.awaited.wait()
        self._groups = groups
        self.row_results = []
        self._times.computed(1 + self.inner_steps.at(self.clock))
        try:
            self._common.go_on(outer=self._early_outer_step())
        finally:
            if self._sealed is not None:  # the gradients at hand are not its own
                self._sealed.has_gradients = True
        if self._sealed is None:
            self._wait_pending()
        for table in self.tables:
            table.check_parameters()
        with self.group.marking(self._unhooked_marks, groups):
            scale = self.group.reduced(self.tables, scale)
            self._take_edits()
            with uninterrupted(self._interrupted):
                if self.outer is not None:
                    self._take_inner_step(groups, scale)
                    scale = StepScale()
                if self.outer is None or self.inner_steps.are_all_taken:
                    self.outer_steps.choose(self.clock)
                    self._sealed = self._seal(groups, scale, before)
                elif self._sealed is not None:
                    self._sealed.has_gradients = False  # the inner step has taken them
                self._is_hooked = False
                self.group.sealed()
                if meanwhile is not None:
                    meanwhile()
        if self._sealed is None or self._is_overlapped:
            if not self.outer_steps.is_overlapped:
                self.outer_steps.merge()
            self._times.inner_ended(self.clock)
            ended = {}
        else:
            ended = self._end(self._sealed)
        self.tell()
        return ended

    def _take_inner_step(self, groups: Groups, scale: StepScale) -> None:
        """OUTER: a step of the local optimizer. It counts if it is not taken, so that workers stay
        in step: if mixed precision skips it, or the norm that it is clipped by is not finite.
        """
        for table in self.tables:
            self.hyperparameters(table, groups)
        scale = scaled_step(self, scale, groups)
        if self.inner is not None and not scale.skip:
            self.inner.step()
        self.inner_steps.take(self.clock)
        self._client.engine.steps.inner_count += 1
        self._client.engine.counters.inner_step_count = self.inner_steps.script_count
        self._untold = self._untold or refused_inner_step(scale.problem)

    # --- edits

    def load(self, state: State, groups: Groups) -> None:
        """Have the next `step` give optimizer state to the servers, unless they have it already.
        Replaces state that was loaded before. Args as `arrays_of`; blocks and raises as
        `DistributedOptimizer.load_state_dict`.
        """
        may_be_infinite = self.options.allow_non_finite
        arrays = arrays_of(state, self.tables, groups, may_be_infinite=may_be_infinite)
        loaded = None
        if self._edits or not is_same(arrays, pulled_arrays(self._client, list(arrays))):
            loaded = LoadedState(arrays)
            if self._join.is_new(self.clock) and not self._join.joins_nobody():
                raise EditRefused(f"optimizer state was loaded into {self._join.words}")
            if (why := self.why_no_edit()) and self._given == (self.clock, loaded.digest):
                loaded = None
            elif why:
                raise EditRefused(load_refused(self.options.name, why))
        self.loaded = loaded
        self._edits.forget()

    def gave_state(self, entries: Mapping[torch.Tensor, Mapping[str, Any]], groups: Groups) -> None:
        """Note the state that the script has been given. To load it again before the next step, as
        Accelerate does, is no change, though steps of others may have changed it since.
        """
        if self.why_no_edit():
            parameters = enumerate(each for group in groups for each in group["params"])
            state = {place: entries[p] for place, p in parameters if p in entries}
            arrays = arrays_of(state, self.tables, groups, may_be_infinite=True)
            self._given = self.clock, LoadedState(arrays).digest

    def _take_edits(self) -> None:
        """Give the servers the parameters that were changed since the last step, and loaded
        optimizer state, in steps before that of the gradients (S16). Reads every parameter.
        """
        if self.own is not None:
            self.own.take_changes()
        # Aggregate: they are the workers' own; else an edit is part of what is pushed.
        if self.inner is not None and (self.outer is None or self.inner_steps.have_moved):
            if self.adds and self._join.is_new(self.clock):
                self._join.check(self.edited())
            return
        # The script may have changed more since a wait for a planned edit expired.
        is_as_planned = self._edits and not self._edits.problem
        if not (is_as_planned and digest_of(self.edited()) == self._edits.edit_digest):
            self._plan_edits()
        while self._edits:
            with uninterrupted(self._interrupted):
                self._sealed = self._seal_edit()
            self._end(self._sealed)

    def edited(self) -> Edited:
        return self._edits.found(self.tables, self.clock)

    def _plan_edits(self) -> None:
        self._edits.forget()
        edited = self.edited()
        is_new = self._join.is_new(self.clock)
        if is_new:
            self._join.check(edited)
        if not edited and self.loaded is None:
            return
        if why := self.why_no_edit():
            refused = edit_refused(edited, self.options.name, why) if edited else ""
            raise EditRefused(refused or load_refused(self.options.name, why))
        problem = problem_of(edited, may_be_infinite=self.options.allow_non_finite)
        passed_count = clocks_to_pass(self._client, self.tables) if is_new else 0
        pull_unrounded(table.unrounded for table in edited)
        self._edits.plan(edited, self.loaded, problem, passed_count)

    def why_no_edit(self) -> str:
        """The reason why the next step cannot be an edit, as far as this worker knows, or empty."""
        if self.options.applies_on_arrival:
            return "with mode='eager', whose blocks were applied as they left"
        reasons = (self._client.tables.why_no_edit(table.handle) for table in self.tables)
        return next((reason for reason in reasons if reason), "")

    def _seal_edit(self) -> SealedStep:
        """Seal the next edit on every table."""
        edits, array = self._edits, self._edits.next
        name = edits.name_at(self._client.rank)
        if array != ASLEEP:
            self._seal_buffers()
            for rows in self.rows:
                rows.pass_clock()
        tickets = {}
        for table in self.tables:
            indexes = () if edits.problem else edits.edited.get(table, ())
            if table.is_asleep != (array == ASLEEP) or (table.is_asleep and not indexes):
                continue
            if array in (ASLEEP, PASSED):
                tickets[table] = table.edit(indexes if array == ASLEEP else (), name)
            elif array in ("", VALUES_ARRAY):
                tickets[table] = table.edit(indexes, name, array)
            else:
                tickets[table] = table.load(array, edits.values(table), name)
        step = SealedStep(tickets, None, False, edits.problem, edited=edits.edited, is_edit=True)
        step.is_staged = not edits.is_in_place_with_next
        return step

    def _ended_edit(self, sealed: SealedStep) -> None:
        """Go on to the next planned edit; after a refusal, plan anew with the next step."""
        sealed.refused = self._edits.ended(sealed.refused)
        if sealed.refused is not None or sealed.problem:
            self.group.sealed()  # no worker has sealed a step of its gradients
        elif not self._edits:
            self.loaded = None

    def _end_refused(self, sealed: SealedStep) -> None:
        if sealed.is_edit and sealed.problem:
            raise InvalidTensor(
                f"{sealed.problem}. The step was not taken, and the value stays until it is changed"
            )
        if sealed.refused is not None:
            own = own_words(sealed.edited, is_loaded=self.loaded is not None)
            raise EditRefused(f"{sealed.refused.message}; {own}. {REMEDIES}")

    def _seal(self, groups: Groups, scale: StepScale, before: StateBefore | None) -> SealedStep:
        """Push the rest of the step, and seal it on every table."""
        awake = {t: self.hyperparameters(t, groups) for t in self.tables if not t.is_asleep}
        is_round = any(table.is_restricted for table in self.tables)
        for rows in self.rows:
            rows.begin_step(has_gradients=not is_round)
        if self.outer is None:
            scale = scaled_step(self, scale, groups)
        if self.options.is_eager:
            for table, hyperparameters in awake.items():
                table.check_final(hyperparameters)
        if self.adds and not scale.skip:  # a step on this worker's own gradients
            if before is not None:
                before.step_again(set().union(*(table.restricted_to() for table in self.tables)))
            elif self.inner is not None:
                self.inner.step()
        problem = scale.problem if scale.skip else scale.told(self._push_rest(awake))
        skip = scale.skip or bool(problem)
        with self._client.connection.loop.together():
            self._seal_buffers()
            if not (skip or is_round or self.options.applies_on_arrival):  # else it is too late
                bind_rows(self._client, self.rows, awake)
            tickets = {}
            # A graph's replay would not wait, and who was left out learns that by its pull.
            is_awaited = self.awaited.is_on and not (skip or self.are_replayed)
            is_awaited &= not any(setting.backup_workers for setting in self.settings())
            for table, given in awake.items():
                skips = skip or not table.takes_part
                tickets[table] = table.seal(given, scale, skip=skips, is_awaited=is_awaited)
            row_steps = [] if is_round else [(r, r.seal(scale, skip=skip)) for r in self.rows]
        self.outer_steps.sealed()
        max_norm = None if skip or scale.clip_scale is None else self.options.clip_norm
        scaling = scaled_updates([*tickets.items(), *row_steps], max_norm)
        if is_round:
            self._round_count += 1
            for table in (table for table in self.tables if table.is_asleep):
                table.pass_clock()
            for rows in self.rows:
                rows.pass_clock()
        taking_part = [ticket for table, ticket in tickets.items() if table.takes_part]
        self._times.sealed([*taking_part, *(ticket for _, ticket in row_steps)])
        sealed = SealedStep(tickets, scaling, skip, problem)
        sealed.marks = None if self.aggregates else self._unhooked_marks()
        return sealed

    def _push_rest(self, awake: Mapping[TrainedTable, Hyperparameters]) -> str:
        """Push the rest of the step, up to the first gradient that is not finite; returns words for
        it, or nothing. Rows are pushed with their seal.
        """
        may_be_infinite = self.options.allow_non_finite or self.options.applies_on_arrival
        if not may_be_infinite and (words := self.non_finite_rows()):
            return words
        for table, hyperparameters in awake.items():
            if (bad := table.push_rest(hyperparameters)) is not None:
                return bad
        for rows in self.rows:
            rows.prepare()
        return ""

    def _seal_buffers(self) -> None:
        for buffers in self.buffers:
            buffers.push()  # which checks them
        for buffers in self.buffers:
            buffers.seal()

    @torch.no_grad()
    def _end(self, sealed: SealedStep) -> dict[TrainedTable, StepResult]:
        """Wait for the end of a step, and take over its result; returns as `_step`."""
        try:
            with self.group.sharing([*sealed.tickets], sealed):
                for table in sealed.tickets:
                    if (pulled := sealed.finish(table)) is not None:
                        sealed.pulled[table] = pulled
            with uninterrupted():
                self._take_over(sealed)
            for buffers in self.buffers:
                buffers.finish(is_shown=sealed.is_early or not self._is_overlapped)
            self._finish_rows(sealed)
        except BaseException as error:
            with uninterrupted():  # the script goes on: its changes come after the step
                if isinstance(error, PushpullError) and not isinstance(error, WaitExpired):
                    self._sealed = None  # it has ended, with an error
                    if sealed.is_taken_over:  # the error is of buffers, or of rows
                        self.awaited.begin(sealed.tickets)
                self._leave(sealed)
                if self._sealed is None and not (sealed.is_taken_over or sealed.is_edit):
                    self.outer_steps.failed(sealed.tickets, is_skipped=sealed.is_skipped)
            raise
        with uninterrupted():
            self._sealed = None
            self.awaited.begin(sealed.tickets)
            self._leave_out(sealed.tickets)
            if sealed.is_edit:
                self._ended_edit(sealed)
            else:
                self._times.ended(is_early=sealed.is_early)
                self._untold = skipped_step(sealed.problem, self.options) or self._untold
        self._end_refused(sealed)
        if not sealed.is_edit:
            self.group.renewed()
        if sealed.scaling is not None and sealed.scaling.norm is not None:
            self.gradient_norm = sealed.scaling.norm
        ended = {} if sealed.is_skipped or sealed.is_edit else sealed.tickets
        return {table: ticket.future.result() for table, ticket in ended.items()}

    def _interrupted(self) -> None:
        """Ctrl-C came while a step was sealed."""
        if self._sealed is not None and not self._is_overlapped:
            self._leave(self._sealed)

    def _leave(self, sealed: SealedStep) -> None:
        """The script goes on before a step has ended, or after its error: its changes come after
        that.
        """
        if self.own is not None and not sealed.is_taken_over:
            self.own.left(sealed.tickets.values(), is_over=self._sealed is None)
        for table in () if self.aggregates else sealed.tickets:
            table.left()
        for buffers in self.buffers:
            buffers.left()

    def _finish_rows(self, sealed: SealedStep) -> None:
        """Wait for the steps of all embedding tables; then raise the first error of one."""
        results = []
        for rows in self.rows:
            try:
                results.append(rows.finish(is_skipped=sealed.is_skipped))
            except WaitExpired:
                raise
            except PushpullError as error:
                sealed.failure = sealed.failure or error
        if sealed.failure is not None:
            raise sealed.failure
        if not sealed.is_skipped and not sealed.is_edit:
            self.row_results += [result for result in results if result is not None]

    def _leave_out(self, awake: Collection[TrainedTable]) -> None:
        """Backup workers: skip clocks whose updates were made without this worker on all tables.
        Tables that sleep, or are not pulled here, pass as many.
        """
        parts = self._parts
        if not self._client.tables.are_all_in([part.handle for part in parts]):
            return
        pulled = {*awake, *(buffers for buffers in self.buffers if buffers.is_pulled)}
        count = self._client.catch_up(*(part.handle for part in parts if part in pulled))
        for part in parts:
            for _ in range(count if part not in pulled else 0):
                part.pass_clock()

    def _take_over(self, sealed: SealedStep) -> None:
        """Write the pulled values into the parameters, or into the gradients for one step of the
        local optimizer.
        """
        is_taken = sealed.refused is None and not sealed.problem and not sealed.is_staged
        for table in sealed.tickets:
            if self.aggregates:
                if table in sealed.pulled:
                    table.write_gradients(sealed.pulled[table])
            elif self.outer is None or sealed.is_skipped or sealed.is_edit:
                table.write_parameters(() if is_taken else sealed.edited.get(table, ()))
            else:
                result = None if sealed.refused else sealed.tickets[table].future.result()
                self.outer_steps.take(table, result, is_again=sealed.is_taken_over)
        if not self.outer_steps.is_overlapped:
            self.outer_steps.merge()
        if self.own is not None and not sealed.is_taken_over:
            self.gradient_norm = self.own.step(self.options.clip_norm)
        sealed.is_taken_over = True

    def non_finite_rows(self) -> str:
        """Words for a gradient of rows with an infinity or a NaN; empty without one."""
        return next((words for rows in self.rows if (words := rows.non_finite())), "")
