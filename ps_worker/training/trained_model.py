"""All tables of a model in training: they take their steps together.

Rules:
    - A step seals every table that is awake, and either all of them take part or none does (a
      gradient that is not finite, an overflow of mixed precision).
    - What can be refused is refused before the first seal.
    - A step happens once. It is sealed on all tables without being interrupted; where the wait for
      it ends early (WaitExpired, Ctrl-C), it stays to be ended, and nothing is sealed before that.
    - A *round* is a step in which only blocks that were too stale are pushed, computed anew. It
      takes one clock on every table of the model, those that sleep included: between any two
      tables the distance of a worker's clocks is that of every other worker's. Else a change into
      BSP could leave two workers waiting for each other, each on another table. For the same reason
      clocks whose updates formed without this worker are left out on all tables, or on none.

What it deliberately does not do: know torch's optimizer interface, or make tables
(`ps_worker.training.distributed_optimizer` does).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import (
    EditRefused,
    InvalidConfig,
    InvalidTensor,
    PushpullError,
    WaitExpired,
)
from ps_core.tables import VALUES_ARRAY, Hyperparameters
from ps_runtime.system.clock import now_s
from ps_worker.spec.optimizers import Add, ServerOptimizer, check_switches, numbers_of
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import Pulled, PushTicket, StepResult
from ps_worker.training.clipping import UpdateScaling, clip_of, clip_reduced, multiply_gradients
from ps_worker.training.common_model import CommonModel
from ps_worker.training.interrupts import uninterrupted
from ps_worker.training.joining import clocks_to_pass, joins_nobody
from ps_worker.training.local_optimizer import StateBefore
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.planned_edits import (
    ASLEEP,
    PASSED,
    REMEDIES,
    Edited,
    PlannedEdits,
    digest_of,
    load_refused,
    names_of,
    problem_of,
)
from ps_worker.training.served_state import (
    LoadedState,
    State,
    arrays_of,
    is_same,
    loaded_state,
    pulled_arrays,
)
from ps_worker.training.step_times import StepTimes
from ps_worker.training.tables.staging import is_finite
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.transport.metrics import MEASURES

if TYPE_CHECKING:
    from ps_worker.client.client import Client

Groups: TypeAlias = Sequence[Mapping[str, Any]]
"""torch's parameter groups."""


@dataclass(slots=True, eq=False)
class _SealedStep:
    """A step that was sealed on all tables, and whose end is not known.

    Attributes:
        tickets: of the tables that are awake.
        scaling: what clips the update; None where nothing does.
        is_skipped: it takes no part in the update.
        problem: why, if a gradient was not finite.
        pulled: what has come of it so far.
        edited: the parameters that it gives the servers, where it is an edit.
        is_edit: whether it is one.
        is_laid: it is an edit that more are to follow before it is in place.
        refused: why nothing of it was taken, if that is known.
        is_taken_over: it has become the parameters' values.
        has_gradients: gradients of the next step have come since.
    """

    tickets: Mapping[TrainedTable, PushTicket]
    scaling: UpdateScaling | None
    is_skipped: bool
    problem: str
    pulled: dict[TrainedTable, Pulled] = field(default_factory=dict)
    edited: Edited = field(default_factory=dict)
    is_edit: bool = False
    is_laid: bool = False
    refused: EditRefused | None = None
    is_taken_over: bool = False
    has_gradients: bool = False


class TrainedModel:
    """The tables of one `DistributedOptimizer`, and how a step goes over them.

    Args:
        client: a worker's client.
        optimizer: what the servers do with the gradients.
        options: the optimizer's options.

    Attributes:
        options: as they are now.
        tables: of parameters; the owner adds them.
        buffers: of buffers; likewise.
        inner: the local optimizer of `Aggregate` and `Add`; the owner gives it.
        results: how the last step ended on each table that is awake; empty if it was skipped.
        gradient_norm: what the last step was clipped by; None where nothing is clipped.
    """

    def __init__(
        self, client: Client, optimizer: ServerOptimizer, options: TrainingOptions
    ) -> None:
        self.options = options
        self.tables: list[TrainedTable] = []
        self.buffers: list[BufferTable] = []
        self.inner: torch.optim.Optimizer | None = None
        self.results: dict[TrainedTable, StepResult] = {}
        self.gradient_norm: float | None = None
        self._client = client
        self._optimizer = optimizer
        self._sealed: _SealedStep | None = None
        self._common = CommonModel(client, options.name, self.tables, self.buffers)
        self._round_count = 0  # how far the clocks are ahead of the script's steps
        self._loaded: LoadedState | None = None
        self._given = (-1, b"")  # names the state that `gave_state` was told of, and when
        self._edits = PlannedEdits()
        self._joined_at = -1  # its clock when it joined others
        self._joined_s = 0.0  # when that was
        self._is_at_start = True  # whether nobody had taken a step by then
        self._brought: Edited | None = None  # what it had changed at its first backward pass
        self._times: StepTimes  # from `begin` on

    @property
    def adds(self) -> bool:
        """Whether what is pushed is how far a local optimizer moved the parameters."""
        return isinstance(self._optimizer, Add)

    @property
    def _aggregates(self) -> bool:
        """Whether the servers have sums, and the parameters are the local optimizer's."""
        return self.inner is not None and not self.adds

    def begin(self) -> None:
        """The tables are there; the first step's computation begins.

        Blocking: as `StepTimes`.
        """
        self._times = StepTimes(self._client)

    def joined(self) -> None:
        """This worker joins others that train: the model is theirs, and what is changed before the
        first backward pass would be refused to all of them (SEMANTICS S16).
        """
        clocks = [(t.handle.clock, t.handle.table.restored_clock or 0) for t in self.tables]
        self._is_at_start = all(clock <= first for clock, first in clocks)
        self._joined_at, self._joined_s = self._clock, now_s()

    # --- between two steps

    def numbers(self, table: TrainedTable, groups: Groups) -> Hyperparameters:
        """The hyperparameters of a step on a table.

        Raises:
            InvalidConfig: a switch that is the table's for good was changed.
        """
        if self.inner is not None:
            return ()
        group = groups[table.group]
        check_switches(table.handle.spec.optimizer, group, table.name)
        return numbers_of(table.handle.spec.optimizer, group)

    def set_consistency(
        self, wanted: Consistency, after_clock: int, timeout_s: float | None
    ) -> int:
        """As `DistributedOptimizer.set_consistency`."""
        options = replace(self.options, consistency=wanted)
        clocks = [
            self._client.set_consistency(
                handle, setting, after_clock=after_clock, timeout_s=timeout_s
            )
            for handle, setting in [
                *((table.handle, wanted) for table in self.tables),
                *((table.handle, wanted.without_policy()) for table in self.buffers),
            ]
        ]
        self.options = options
        return max(clocks, default=0)

    def synchronize(self, timeout_s: float | None) -> None:
        """As `DistributedOptimizer.synchronize`. A call that was interrupted goes on where it was:
        the others are there, too.
        """
        self.end_step()
        if not self._common.is_interrupted:
            self._settle()
            if self.options.applies_on_arrival and any(
                t.handle.steps.has_open_step for t in self.tables
            ):
                raise InvalidConfig(
                    "synchronize between backward and step in eager mode, whose blocks are applied "
                    "as they come; call step() first"
                )
        self._common.meet(timeout_s, is_pulled=not self._aggregates)

    def _settle(self) -> None:
        for table in self.tables:
            table.settle()
        for buffers in self.buffers:
            buffers.settle()

    def pass_rounds(self, tables: Sequence[TrainedTable]) -> None:
        """New tables take the clocks that the others had for rounds.

        Blocking: until they are committed.
        """
        for table in tables:
            for _ in range(self._round_count):
                table.pass_clock()
            table.settle()

    # --- a step

    @property
    def is_repeated(self) -> bool:
        """Whether `step` would only wait for the step before, which has not ended: no gradient has
        come since.
        """
        sealed = self._sealed
        return sealed is not None and not sealed.has_gradients and not sealed.is_edit

    def gradient_came(self) -> None:
        """A backward pass runs: the next `step` is one of its own.

        Raises:
            InvalidConfig: the step before would write its reduced gradients over it; or other
                workers, which are in a `synchronize`, would see it.
        """
        if self._joined_at >= 0 and self._brought is None:
            self._brought = self._edited()
        if self._common.is_interrupted and self.options.applies_on_arrival:
            raise InvalidConfig(
                "a backward pass in eager mode, whose blocks are applied as they come, before a "
                "synchronize() that was interrupted has ended; call synchronize() until it returns"
            )
        if self._sealed is None:
            return
        if self.inner is not None and not self.adds:
            raise InvalidConfig(
                "a backward pass before the last step has ended, which will write the reduced "
                "gradients; call step() or zero_grad() until it returns"
            )
        self._sealed.has_gradients = True

    def end_step(self) -> None:
        """Ends the step whose end an earlier call has not seen, if there is one.

        Blocking, Raises: as `step`; a gradient that was not finite is not told again.
        """
        if self._sealed is not None:
            self._sealed.problem = ""
            self.results = self._end(self._sealed)

    def step(
        self, groups: Groups, scale: StepScale, closure: Callable[[], object] | None = None
    ) -> None:
        """A step of all tables, and rounds until nothing is too stale or they are up. Where the
        step before has not ended: its end, and another step only if gradients have come since.

        Args:
            groups: torch's parameter groups.
            scale: what the gradients that are there count for.
            closure: computes them anew; None: there are no rounds.

        Blocking, Raises: as `DistributedOptimizer.step`.
        """
        self.results = {}
        sealed = self._sealed if self.is_repeated else None
        before = None if closure is None or sealed is not None else self._state_before()
        self.results = self._step(groups, scale) if sealed is None else self._end(sealed)
        if closure is None:
            return
        for _ in range(self.options.recompute):
            rejected = self._rejected()
            if not rejected or not self._may_recompute(before):
                break
            with self._restricted(rejected):
                with torch.enable_grad():
                    closure()
                ended = self._step(groups, scale, before)
            MEASURES.recomputed_blocks.inc(sum(map(len, rejected.values())))
            for table, result in ended.items():
                self.results[table] = _after_round(self.results[table], result)
        MEASURES.abandoned_blocks.inc(sum(map(len, self._rejected().values())))

    def _rejected(self) -> dict[TrainedTable, tuple[int, ...]]:
        return {table: end.rejected for table, end in self.results.items() if end.rejected}

    def _settings(self) -> Iterator[Consistency]:
        """The newest settings of all tables: others than the owner may have changed them."""
        for handle in (*(t.handle for t in self.tables), *(b.handle for b in self.buffers)):
            yield self._client.consistency_of(handle)

    def _may_recompute(self, before: StateBefore | None) -> bool:
        """Under BSP a step of some blocks would stand for a whole one, in everybody's update."""
        if self.adds and before is None:
            return False
        return all(setting.mode is not Mode.BSP for setting in self._settings())

    def _state_before(self) -> StateBefore | None:
        """ADD: what the local optimizer may have to go back to."""
        if self.inner is None or not self.adds or not self.options.recompute:
            return None
        rejects = any(setting.policy is StalePolicy.REJECT for setting in self._settings())
        return StateBefore(self.inner) if rejects else None

    @contextlib.contextmanager
    def _restricted(self, rejected: Mapping[TrainedTable, Sequence[int]]) -> Iterator[None]:
        for table in self.tables:
            table.restrict(rejected.get(table, ()))
        try:
            yield
        finally:
            for table in self.tables:
                table.restrict(None)

    @torch.no_grad()
    def _step(
        self, groups: Groups, scale: StepScale, before: StateBefore | None = None
    ) -> dict[TrainedTable, StepResult]:
        """One step; how it ended on each table that is awake, nothing if it was skipped."""
        self.end_step()
        self._times.computed(1 + max((table.handle.clock for table in self.tables), default=0))
        self._common.go_on()
        self._settle()
        for table in self.tables:
            table.check_dtype()
        self._take_edits()
        with uninterrupted():
            self._sealed = sealed = self._seal(groups, scale, before)
        return self._end(sealed)

    # --- what the script has changed

    def load(self, state: State, groups: Groups) -> None:
        """Optimizer state that the next `step` gives to the servers, in the place of what was
        loaded before; nothing if they have it already.

        Args:
            state: as `arrays_of` takes it.
            groups: the parameter groups as they will be.

        Blocking, Raises: as `DistributedOptimizer.load_state_dict`.
        """
        may_be_infinite = self.options.allow_non_finite
        arrays = arrays_of(state, self.tables, groups, may_be_infinite=may_be_infinite)
        loaded = None
        if self._edits or not is_same(arrays, pulled_arrays(self._client, list(arrays))):
            loaded = loaded_state(arrays)
            if self._is_new and not self._joins_nobody():
                raise EditRefused(f"optimizer state was loaded into {self._brings_nothing()}")
            why = self.why_no_edit()
            if why and self._given == (self._clock, loaded.digest):
                loaded = None
            elif why:
                raise EditRefused(load_refused(self.options.name, why))
        self._loaded = loaded
        self._edits.forget()

    def gave_state(self, entries: Mapping[torch.Tensor, Mapping[str, Any]], groups: Groups) -> None:
        """The script has been given this. Where no step is all workers', others may have changed it
        since; to load it again before the next step, as Accelerate does with every optimizer, is no
        change all the same.

        Args:
            entries: the state of each parameter that has any.
            groups: the parameter groups.

        Blocking: reads all of it, in such a setting.
        """
        if self.why_no_edit():
            parameters = enumerate(_parameters(groups))
            state = {place: entries[p] for place, p in parameters if p in entries}
            arrays = arrays_of(state, self.tables, groups, may_be_infinite=True)
            self._given = self._clock, loaded_state(arrays).digest

    @property
    def _clock(self) -> int:
        return max((table.handle.clock for table in self.tables), default=0)

    @property
    def loaded(self) -> LoadedState | None:
        """What was loaded, and not all given to the servers."""
        return self._loaded

    def _take_edits(self) -> None:
        """Gives the servers the parameters that were changed since the last step, and optimizer
        state that was loaded, in steps before that of the gradients (SEMANTICS S16).

        Blocking: until they have ended; reads every parameter.

        Raises:
            EditRefused: the setting has no such step, or the workers do not mean the same.
            InvalidTensor: the values are none that the table may have.
        """
        if self.inner is not None:  # sums: they are its own; Add: an edit is part of what is pushed
            if self.adds and self._is_new:
                self._check_brings_nothing(self._edited())
            return
        if not self._edits or not self._is_as_planned():
            self._plan_edits()
        while self._edits:
            with uninterrupted():
                self._sealed = self._seal_edit()
            self._end(self._sealed)

    def _edited(self) -> Edited:
        found = {table: table.edited() for table in self.tables}
        return {table: indexes for table, indexes in found.items() if indexes}

    def _is_as_planned(self) -> bool:
        """Whether a plan of which some was taken is still what the script means: it may have
        changed more since a wait expired.
        """
        return not self._edits.problem and digest_of(self._edited()) == self._edits.edit_digest

    @property
    def _is_new(self) -> bool:
        """Whether it joins others that train, and has taken no step with them."""
        return self._joined_at >= self._clock

    def _check_brings_nothing(self, edited: Edited) -> None:
        """What a newcomer's script changed before its loop is nobody else's edit."""
        brought = edited if self._brought is None else self._brought
        left = {
            table: indexes
            for table, found in brought.items()
            if (indexes := sorted({*found} & {*edited.get(table, ())}))
        }
        if left and not self._joins_nobody():
            raise EditRefused(
                f"parameter {names_of(left)} was changed in {self._brings_nothing()}. The change "
                "stays until it is undone"
            )

    def _joins_nobody(self) -> bool:
        at_start = self._is_at_start
        return joins_nobody(self._client, self.tables, self._joined_s, is_at_start=at_start)

    def _brings_nothing(self) -> str:
        return (
            f"'{self.options.name}' before this worker's first step, and it joins others that "
            f"train: the model is theirs, as of step {self._clock}. Nothing was sent. Load only "
            "where optimizer.clock is 0, or start all workers anew, together"
        )

    def _plan_edits(self) -> None:
        self._edits.forget()
        edited = self._edited()
        if self._is_new:
            self._check_brings_nothing(edited)
        if not edited and self._loaded is None:
            return
        why = self.why_no_edit()
        if edited and why:
            raise EditRefused(
                f"parameter {names_of(edited)} of '{self.options.name}' was changed since the last "
                f"step, {why}. Nothing was sent of this step, and the change stays until it is "
                "undone or taken. Change it under BSP: set_consistency('bsp') at every worker, the "
                "change, step(), and set_consistency() back; or before the optimizer is made. To "
                "clamp in every step, give the optimizer clamp=(least, greatest)"
            )
        if why:
            raise EditRefused(load_refused(self.options.name, why))
        problem = problem_of(edited, may_be_infinite=self.options.allow_non_finite)
        passed_count = clocks_to_pass(self._client, self.tables) if self._is_new else 0
        self._edits.plan(edited, self._loaded, problem, passed_count)

    def why_no_edit(self) -> str:
        """Why the next step cannot be an edit, as far as this worker knows; empty if it can."""
        if self.options.applies_on_arrival:
            return "with mode='eager', whose blocks were applied as they left"
        reasons = (self._client.tables.why_no_edit(table.handle) for table in self.tables)
        return next((reason for reason in reasons if reason), "")

    def _seal_edit(self) -> _SealedStep:
        """Seals the next edit on every table; nothing is waited for. One with a problem is
        nobody's: it ends the clock for all, who need not wait for this worker so.
        """
        edits, array = self._edits, self._edits.next
        name = f"refused by worker {self._client.rank}".encode() if edits.problem else edits.digest
        if array == PASSED:
            name = PASSED.encode()
        for buffers in self.buffers if array != ASLEEP else ():
            buffers.push()
        for buffers in self.buffers if array != ASLEEP else ():
            buffers.seal()
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
        is_laid = not edits.is_in_place_with_next
        return _SealedStep(
            tickets, None, False, edits.problem, edited=edits.edited, is_edit=True, is_laid=is_laid
        )

    def _ended_edit(self, sealed: _SealedStep) -> None:
        """What was planned goes on, or begins anew with the next step."""
        if sealed.refused is not None or sealed.problem:
            self._edits.forget()
            return
        self._edits.taken()
        if not self._edits:
            self._loaded = None

    def _end_refused(self, sealed: _SealedStep) -> None:
        if sealed.is_edit and sealed.problem:
            raise InvalidTensor(
                f"{sealed.problem}. The step was not taken, and the value stays until it is changed"
            )
        if sealed.refused is None:
            return
        own = "no parameter was changed here"
        if self._loaded is not None:
            own = "optimizer state was loaded here, which waits for a step that takes all of it"
        elif sealed.edited:
            own = f"{names_of(sealed.edited)} was changed here, and stays so until undone or taken"
        raise EditRefused(
            f"{sealed.refused.message}; {own}. The step was not taken by anybody. {REMEDIES}"
        )

    def _seal(self, groups: Groups, scale: StepScale, before: StateBefore | None) -> _SealedStep:
        """Sends what is left of the step, and seals it on every table; nothing is waited for."""
        awake = {t: self.numbers(t, groups) for t in self.tables if not t.is_asleep}
        scale = self._scaled(scale, groups)
        if self.options.is_eager:
            for table, numbers in awake.items():
                table.check_final(numbers)
        if self.adds and not scale.skip:
            self._move(before)
        # All that can be refused here is refused before the first seal: all tables end the step.
        problem = scale.problem if scale.skip else _push_rest(awake)
        for buffers in self.buffers:
            buffers.push()
        for buffers in self.buffers:
            buffers.seal()
        skip = scale.skip or bool(problem)
        tickets = {
            table: table.seal(numbers, scale, skip=skip or not table.takes_part)
            for table, numbers in awake.items()
        }
        scaling = None if skip else self._scale_updates(scale, tickets)
        self._pass_asleep()
        self._times.sealed([ticket for table, ticket in tickets.items() if table.takes_part])
        return _SealedStep(tickets, scaling, skip, problem)

    @torch.no_grad()
    def _end(self, sealed: _SealedStep) -> dict[TrainedTable, StepResult]:
        """Waits for the end of a step, and takes over what came of it; as `_step`."""
        try:
            for table in sealed.tickets:
                pulled = _finished(table, sealed)
                if pulled is not None:
                    sealed.pulled[table] = pulled
            with uninterrupted():
                self._take_over(sealed)
            for buffers in self.buffers:
                buffers.finish()
        except BaseException as error:
            if isinstance(error, PushpullError) and not isinstance(error, WaitExpired):
                self._sealed = None  # it has ended, if not well
            self._left(sealed)
            raise
        with uninterrupted():
            self._sealed = None
            self._leave_out(sealed.tickets)
            if sealed.is_edit:
                self._ended_edit(sealed)
            else:
                self._times.ended()
        self._end_refused(sealed)
        if sealed.scaling is not None and sealed.scaling.norm is not None:
            self.gradient_norm = sealed.scaling.norm
        if sealed.problem:
            raise InvalidTensor(
                f"{sealed.problem}; expected finite values. The step was skipped on every server "
                "(allow_non_finite=True would apply it)"
            )
        ended = {} if sealed.is_skipped or sealed.is_edit else sealed.tickets
        return {table: ticket.future.result() for table, ticket in ended.items()}

    def _left(self, sealed: _SealedStep) -> None:
        """The script goes on before the step has ended: what it changes meanwhile comes after."""
        with uninterrupted():
            for table in sealed.tickets if not self._aggregates else ():
                table.left()
            for buffers in self.buffers:
                buffers.left()

    def _pass_asleep(self) -> None:
        """A round takes a clock of every table."""
        if not any(table.is_restricted for table in self.tables):
            return
        self._round_count += 1
        for table in self.tables:
            if table.is_asleep:
                table.pass_clock()

    def _leave_out(self, awake: Collection[TrainedTable]) -> None:
        """Backup workers: where all tables have formed without this worker, it goes on at the
        newest clock of all. What sleeps, or is not read here, passes as many.
        """
        parts: list[TrainedTable | BufferTable] = [*self.tables, *self.buffers]
        if not self._client.tables.are_all_in([part.handle for part in parts]):
            return
        pulled = {*awake, *(buffers for buffers in self.buffers if buffers.is_pulled)}
        count = self._client.catch_up(*(part.handle for part in parts if part in pulled))
        for part in parts:
            for _ in range(count if part not in pulled else 0):
                part.pass_clock()

    def _move(self, before: StateBefore | None) -> None:
        """ADD: the local optimizer takes a step on this worker's own gradients."""
        if before is not None:
            before.step_again(set().union(*(table.restricted_to() for table in self.tables)))
        elif self.inner is not None:
            self.inner.step()

    def _take_over(self, sealed: _SealedStep) -> None:
        """What was pulled becomes parameters, or gradients for the local optimizer; once."""
        is_taken = sealed.refused is None and not sealed.problem and not sealed.is_laid
        for table in sealed.tickets:
            if not self._aggregates:
                table.write_parameters(() if is_taken else sealed.edited.get(table, ()))
            elif table in sealed.pulled:
                table.write_gradients(sealed.pulled[table])
        if self.inner is not None and self._aggregates and not sealed.is_taken_over:
            if self.options.clip_norm is not None:
                trained = _parameters(self.inner.param_groups)
                self.gradient_norm = clip_reduced(trained, self.options.clip_norm)
            self.inner.step()
        sealed.is_taken_over = True

    # --- what gradients count for

    def _scaled(self, scale: StepScale, groups: Groups) -> StepScale:
        """What goes with the seal, once loss scale and clipping have been seen to.

        Raises:
            InvalidConfig: they cannot be had.
        """
        if self.options.applies_on_arrival and scale != StepScale():
            raise InvalidConfig(
                "loss scaling needs steps that count as a whole; expected mode='sealed', got "
                "'eager' under ASP"
            )
        max_norm = self.options.clip_norm
        clips = max_norm is not None and (self.inner is None or self.adds)
        if scale.skip:
            return replace(scale, clip_scale=1.0 if clips and not self.adds else None)
        if self.adds:
            multiply_gradients(_parameters(groups), scale.contribution_scale)
            scale = StepScale()
        if max_norm is None or not clips:
            return scale
        return self._clipped(scale, groups, max_norm)

    def _clipped(self, scale: StepScale, groups: Groups, max_norm: float) -> StepScale:
        """This worker's own gradients, clipped: by their scale where that can be, else in place.

        A server's optimizer under BSP clips the reduced gradient instead; which it is at this clock
        the servers know.
        """
        clip = clip_of(_parameters(groups), max_norm, scale.contribution_scale)
        self.gradient_norm = clip.norm
        if not math.isfinite(clip.norm) and not self.options.allow_non_finite:
            problem = self._why_not_finite(clip.norm)
            return StepScale(1.0, True, problem, None if self.adds else 1.0)
        if self.adds:
            multiply_gradients(_parameters(groups), clip.factor)
            return scale
        if scale.contribution_scale * clip.factor > 0.0:
            return replace(scale, clip_scale=clip.factor)
        # A seal carries no NaN, and no 0.
        if any(setting.mode is not Mode.BSP for setting in self._settings()):
            multiply_gradients(_parameters(groups), clip.factor)
        return replace(scale, clip_scale=1.0)

    def _scale_updates(
        self, scale: StepScale, tickets: Mapping[TrainedTable, PushTicket]
    ) -> UpdateScaling | None:
        """BSP: the updates wait for their norm; they are scaled as soon as it is known."""
        max_norm = self.options.clip_norm
        if scale.clip_scale is None or max_norm is None or not tickets:
            return None
        scaling = UpdateScaling(
            [(table.handle, ticket) for table, ticket in tickets.items()],
            max_norm,
        )
        for table, ticket in zip(tickets, scaling.tickets, strict=True):
            table.wait_for(ticket)
        return scaling

    def _why_not_finite(self, norm: float) -> str:
        for table in self.tables:
            for entry in table.layout.placed:
                gradient = entry.tensor.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if not is_finite(gradient.detach()):
                    return _not_finite(entry.name, table)
        clock = 1 + max(table.handle.clock for table in self.tables)
        return f"the norm of the gradients is {norm} at step {clock} of '{self.options.name}'"


def _finished(table: TrainedTable, sealed: _SealedStep) -> Pulled | None:
    """As `TrainedTable.finish`; where nothing of the step is taken, its clock is over all the same,
    and what was asked for comes.
    """
    while True:
        try:
            return table.finish()
        except EditRefused as error:  # each ticket raises once
            sealed.refused = sealed.refused or error


def _parameters(groups: Groups) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from group["params"]


def _push_rest(awake: Mapping[TrainedTable, Hyperparameters]) -> str:
    """Sends what is left of the step; the first gradient that is not finite ends that.

    Returns:
        Which that is; empty if all are finite.
    """
    for table, numbers in awake.items():
        name = table.push_rest(numbers)
        if name is not None:
            return _not_finite(name, table)
    return ""


def _not_finite(name: str, table: TrainedTable) -> str:
    return (
        f"the gradient of '{name}' has an infinity or a NaN at step {table.handle.clock + 1} of "
        f"table '{table.name}'"
    )


def _after_round(before: StepResult, ended: StepResult) -> StepResult:
    """How a step ended, with one round more. What had no part in the round has its clock."""
    return replace(
        before,
        clock=ended.clock,
        staleness=max(before.staleness, ended.staleness),
        rejected=ended.rejected,
        round_count=before.round_count + 1,
    )
