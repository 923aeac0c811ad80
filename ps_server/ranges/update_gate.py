"""The update gate: seals take effect, and updates form (SEMANTICS S1, S4, S6).

    mode              an update is                        it forms when
    BSP               clock c of every member, summed     the seal of clock c of every member is
                      in rank order as turns come         in effect
    BSP, b backups    clock c of those that are in,       those of all members but b are, and the
                      summed as they come                 grace time has passed or all are in
    BSP, clipped      that sum, times its scale           a worker says the scale (`update_scales`)
    SSP, ASP          one worker's step, without what     its seal takes effect
                      is too stale, scaled by how
                      stale it is if the table says so
    SSP, ASP, eager   one push of it                      it arrives

Where a table's schedule changes the mode between two clocks, everything before the change is
decided before anything after it. A seal takes effect when every entry of a lower sequence has an
outcome or is held, and the seal of the clock before it is in effect; none does beyond the clock
that a change holds.

Invariants:
    RM-6  No worker's clock goes past an update that has not formed, unless its own step is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ps_core.errors import EditRefused, InvalidConfig, InvalidTensor, PushpullError
from ps_core.ledger import Ending, Outcome
from ps_server.ranges.aggregation import APPLIED, Aggregation, Records
from ps_server.ranges.events import (
    Accumulate,
    Apply,
    Contributor,
    Drop,
    Effect,
    Forget,
    Record,
    ScaleEvent,
    SealEvent,
)
from ps_server.ranges.range_state import HeldPush, PendingStep, RangeState, RangeWorker
from ps_server.ranges.read_gate import ReadGate
from ps_server.ranges.update_scales import UpdateScales

_WITHDRAWN = Ending(Outcome.WITHDRAWN)

_NAMED_COUNT = 8
"""Most invalid pushes that an error names; there may be thousands."""


class UpdateGate:
    """The update gate of one table in one range."""

    def __init__(self, state: RangeState, read_gate: ReadGate) -> None:
        self._state = state
        self._records = Records(state)
        self._read_gate = read_gate
        self._scales = UpdateScales(state)
        self.aggregation = Aggregation(state, self._records, self._scales)

    def advance(self, worker: RangeWorker, now_s: float, out: list[Effect]) -> None:
        """Let the worker's seals take effect in turn, and form the updates that follow."""
        if self._take_effects(worker, out):  # else nothing follows
            self._progress(worker, now_s, out)

    def _take_effects(self, worker: RangeWorker, out: list[Effect]) -> bool:
        """Let the worker's seals take effect; True if one did."""
        sealed_clock = worker.sealed_clock
        while (step := self._next_step(worker)) is not None and step.seal is not None:
            if not self._is_complete(worker, step.seal.sequence):
                break
            if not self._take_effect(worker, step, step.seal, out):
                break
        return worker.sealed_clock != sealed_clock

    def _next_step(self, worker: RangeWorker) -> PendingStep | None:
        """The step whose seal may take effect next: that of the next clock, or one further ahead,
        if all updates between have formed without the worker (RM-6).
        """
        step = worker.steps.get(worker.sealed_clock + 1)
        if step is None and worker.steps:
            ahead = min(worker.steps)
            if worker.sealed_clock < ahead <= self._state.clock + 1:
                step = worker.steps[ahead]
        is_held = step is not None and self._state.schedule.holds(step.clock)
        return None if is_held else step

    @staticmethod
    def _is_complete(worker: RangeWorker, sequence: int) -> bool:
        held, ledger = worker.held, worker.ledger
        for number in range(ledger.low_water + 1, sequence):
            if number not in held and not ledger.has_ended(number):
                return False
        return True

    def _take_effect(
        self, worker: RangeWorker, step: PendingStep, seal: SealEvent, out: list[Effect]
    ) -> bool:
        if seal.skip_if_invalid:
            self.recall_carrier(worker, step, seal)
        # Initial values cannot be skipped: rank 0 sends invalid pushes again.
        skips_invalid = seal.skip_if_invalid and step.clock > 0
        # Gradients that left before their worker saw that the step is an edit are withdrawn.
        invalid = step.invalid_values if seal.terms.edit else step.invalid
        step.skip = seal.terms.skip or (skips_invalid and bool(invalid))
        problem = None if step.skip else self._step_problem(step, seal, invalid)
        if problem is not None:
            step.seal = None
            ending = Ending(Outcome.INVALID, problem)
            self._state.end(worker, seal.sender, seal.sequence, ending, out)
            return False
        worker.sealed_clock = step.clock
        step.edit = b"" if step.skip else seal.terms.edit
        step.array = seal.terms.array
        if step.edit:
            self._end_gradients(worker, step, out)
        if step.edit and not self._state.takes_edits(step.clock):
            self._refuse_edit(worker, step)
        if step.skip:
            self._state.unstage_step(step, worker)
        if seal.terms.last:
            worker.final_seal_clock = step.clock if step.skip else None
            self._leave(worker, step.clock, out)
            if step.skip and self._state.schedule.is_bsp(step.clock):
                self._depart(worker, step, out)
        if self._is_late(worker, step) and step.clock in worker.steps:
            self.aggregation.discard(worker, step, out)
        return True

    def _step_problem(
        self, step: PendingStep, seal: SealEvent, invalid: Collection[int]
    ) -> PushpullError | None:
        """The fault of a step's pushes, once all have come."""
        if not invalid and (not step.clock or not step.has_values or seal.terms.edit):
            return None
        what = f"clock {step.clock} of table '{self._state.name}'"
        if invalid:
            named = sorted(invalid)[:_NAMED_COUNT]
            return InvalidTensor(
                f"{what} has {len(invalid)} invalid pushes ({', '.join(map(str, named))}"
                f"{', ...' * (len(invalid) > len(named))}): replace them, or seal it with skip"
            )
        if any(push.is_assign for push in step.pushes.values()):
            return InvalidConfig(f"{what} has ASSIGN pushes, and its seal no edit: withdraw them")
        return None

    def _end_gradients(self, worker: RangeWorker, step: PendingStep, out: list[Effect]) -> None:
        """End the gradients of an edit's step; a withdrawal may be on its way."""
        for push in [push for push in step.pushes.values() if not push.is_assign]:
            self._state.drop_push(step, worker, push.sequence)
            self._state.end(worker, push.sender, push.sequence, _WITHDRAWN, out)

    def _refuse_edit(self, worker: RangeWorker, step: PendingStep) -> None:
        """Refuse an edit; its clock ends nevertheless, as on the other tables of the model."""
        setting = self._state.schedule.at(step.clock)
        step.edit, step.skip = b"", True
        step.problem = EditRefused(
            f"worker {worker.rank} {step.edit_words} of table '{self._state.name}' before clock "
            f"{step.clock}, which is under {setting}: no step of it is all workers'"
        )

    @staticmethod
    def recall_carrier(worker: RangeWorker, step: PendingStep, seal: SealEvent) -> None:
        """Recall the outcome of the push that the seal came with. The push may have ended at an
        earlier primary: its outcome moved with the ledger, its step did not. Called when the seal
        comes, too: the worker may confirm the outcome before the seal takes effect.
        """
        if worker.ledger.outcome(seal.sequence - 1) in (Outcome.INVALID, Outcome.WITHDRAWN):
            step.invalid[seal.sequence - 1] = True

    def _is_late(self, worker: RangeWorker, step: PendingStep) -> bool:
        """True if the update has formed without the step, scaled or not."""
        if 0 < step.clock <= worker.done_clock:
            return True
        summed = self._state.unscaled
        is_summed = summed is not None and step.clock == summed.clock
        return is_summed and bool(self._state.squares.get(step.clock))  # else it is being reduced

    def _depart(self, worker: RangeWorker, step: PendingStep, out: list[Effect]) -> None:
        """Let a worker leave by a skipped last step, without waiting for the update: otherwise two
        workers that leave one after the other would wait for ever.
        """
        worker.left_clock = step.clock - 1
        contributors = [self._records.contributor(worker, step)]
        self._records.commit(self._records.record(step.clock, contributors, (), ()), out)

    def _leave(self, worker: RangeWorker, clock: int, out: list[Effect]) -> None:
        """Leave after `clock`: later entries of the worker are withdrawn."""
        worker.left_clock = clock
        for later in [c for c in worker.steps if c > clock]:
            step = worker.steps.pop(later)
            if (seal := step.seal) is not None:
                self._state.end(worker, seal.sender, seal.sequence, _WITHDRAWN, out)
            self._state.end_step(step, worker, _WITHDRAWN, out)
            for sequence, sender in sorted(step.missing.items()):
                self._state.end(worker, sender, sequence, _WITHDRAWN, out)

    def ended(self, worker: RangeWorker, now_s: float, out: list[Effect]) -> None:
        """End a worker's membership: its steps in effect count, and nobody waits for more."""
        self.leave_unsealed(worker, out)
        if not self._state.initialized:
            return
        if self.aggregation.drop_orphan(out):
            self._go_on(self._state.clock, now_s, out)
        self._decide((), now_s, out)
        self._forget(worker, out)
        self._read_gate.release(out)

    def resume(self, now_s: float, out: list[Effect]) -> None:
        """Let steps go on that a decided change held, under the new setting."""
        self._read_gate.settled(out)
        for worker in list(self._state.workers.values()):
            self._record_waiting(worker, out)
            self.advance(worker, now_s, out)
        if self._state.initialized:
            self._decide(list(self._state.workers.values()), now_s, out)
            self._end_settings(out)
        self._read_gate.settled(out)
        self._read_gate.release(out)

    def _forget(self, worker: RangeWorker, out: list[Effect]) -> None:
        """Forget values kept for a worker that left: no gradient of it needs them."""
        state = self._state
        if worker.left_clock is not None and state.schedule.compensates:
            out.append(Forget(state.table.table_id, state.range_id, worker.incarnation))

    def leave_unsealed(self, worker: RangeWorker, out: list[Effect]) -> None:
        """Let the worker leave after its newest seal in effect, unless it left before that."""
        if worker.left_clock is None or worker.left_clock > worker.sealed_clock:
            self._leave(worker, worker.sealed_clock, out)

    def _progress(self, worker: RangeWorker, now_s: float, out: list[Effect]) -> None:
        """Form the updates that follow from a seal of `worker`."""
        state = self._state
        before = state.record_count, state.clock
        moved: Sequence[RangeWorker] = (worker,)
        if not state.initialized:
            self._initialize(out)
            moved = list(state.workers.values())
            for other in moved:
                self._record_waiting(other, out)
        if not state.initialized:
            return
        self._decide(moved, now_s, out)
        self._forget(worker, out)
        if before != (state.record_count, state.clock):
            self._read_gate.release(out)

    def _decide(self, moved: Sequence[RangeWorker], now_s: float, out: list[Effect]) -> None:
        """Record the steps and updates that can be; `moved`: with perhaps more steps in effect."""
        state = self._state
        while state.failure is None:
            clock = state.clock
            for worker in moved:
                self._record_sealed(worker, out)
            if state.schedule.is_bsp(clock + 1):
                if not self.aggregation.form(now_s, out):
                    return
            else:
                state.clock = state.schedule.up_to_bsp(clock, state.slowest_clock())
            if state.clock == clock:
                return
            self._read_gate.release(out)  # some ask for the state at exactly this clock
            moved = self._those_who_may_go_on(clock, out)

    def _those_who_may_go_on(self, clock: int, out: list[Effect]) -> Sequence[RangeWorker]:
        """The workers with perhaps more to record, now that more than `clock` is decided: with
        backup workers a seal ahead may have its turn, where the setting changes any step.
        """
        state = self._state
        if not state.schedule.varies and not state.schedule.at(clock + 1).backup_workers:
            return ()
        everyone = list(state.workers.values())
        self._end_settings(out)
        for worker in everyone:
            self._record_waiting(worker, out)
            self._take_effects(worker, out)
        return everyone

    def _end_settings(self, out: list[Effect]) -> None:
        """Forget settings that no step can have any more, and the values kept for them."""
        state = self._state
        kept = state.schedule.compensates
        state.schedule.forget_before(state.clock)
        if kept and not state.schedule.compensates:
            table_id = state.table.table_id
            out += [Forget(table_id, state.range_id, worker) for worker in state.workers]

    def _initialize(self, out: list[Effect]) -> None:
        worker = self._state.by_rank.get(0)
        step = worker.steps.get(0) if worker is not None else None
        if worker is None or step is None or worker.sealed_clock < 0:
            return
        self._state.initialized = True
        parts = self._records.take_parts(worker, step)
        self._records.assign(0, [self._records.contributor(worker, step)], parts, out)

    def _record_sealed(self, worker: RangeWorker, out: list[Effect]) -> None:
        """Record each step of the worker whose seal is in effect, outside of BSP."""
        while worker.done_clock < worker.sealed_clock and self._is_by_itself(worker.done_clock + 1):
            step = worker.steps[worker.done_clock + 1]
            worker.done_clock = step.clock
            self._record_step(worker, step, out)

    def _is_by_itself(self, clock: int) -> bool:
        """True if a step of `clock` is an update of its own, and BSP updates below have formed."""
        schedule = self._state.schedule
        if schedule.is_bsp(clock):
            return False
        return not schedule.varies or self._state.formed_clock >= schedule.bsp_before(clock)

    def _record_step(self, worker: RangeWorker, step: PendingStep, out: list[Effect]) -> None:
        if step.edit:
            parts = self._records.take_parts(worker, step)
            contributors = [self._records.contributor(worker, step)]
            self._records.assign(step.clock, contributors, parts, out, of=step.of)
            return
        accumulations: list[Accumulate] = []
        if not step.skip:
            self._records.reject_stale(worker, step, out)
            if step.pushes:
                accumulations = self._records.scaled_accumulations(worker, step)
        blocks = tuple(sorted(block for each in accumulations for block, _ in each.parts))
        contributor = self._records.contributor(worker, step)
        record = self._records.record(step.clock, [contributor], step.hyperparameters, blocks)
        if accumulations:
            out += accumulations
            out.append(Apply(record))
        self._records.commit(record, out)

    def takes_eager(self, worker: RangeWorker, step: PendingStep, push: HeldPush) -> bool:
        """True if the push is applied on arrival; else it waits: for its seal under BSP, or until
        nothing holds its clock.
        """
        schedule = self._state.schedule
        return (
            push.is_eager
            and self._state.initialized
            and self._is_by_itself(step.clock)
            and not schedule.holds(step.clock)
            and worker.done_clock >= schedule.begins_after(step.clock)
        )

    def _record_waiting(self, worker: RangeWorker, out: list[Effect]) -> None:
        """Apply the eager pushes that no longer have to wait."""
        for step in list(worker.steps.values()):
            for push in list(step.pushes.values()) if step.eager is not None else ():
                if push.payload is not None and self.takes_eager(worker, step, push):
                    self.record_eager(worker, step, push, out)

    def record_eager(
        self, worker: RangeWorker, step: PendingStep, push: HeldPush, out: list[Effect]
    ) -> None:
        """Record one eager push, outside of BSP; the seal that follows only ends the step."""
        tau = self._records.staleness(worker, push)
        setting = self._state.schedule.at(step.clock)
        if setting.rejects(tau):
            self._state.drop_push(step, worker, push.sequence)
            self._records.reject(worker, push, tau, out)
            return
        part = (push.block, push.payload)
        self._state.unstage(step, worker, push)
        contributor = Contributor(worker.rank, worker.incarnation, (push.sequence,), False)
        record = self._records.record(step.clock, [contributor], step.eager or (), (push.block,))
        accumulation = Accumulate(
            self._state.table.table_id,
            self._state.range_id,
            step.clock,
            worker.rank,
            (part,),
            setting.scale(tau),
            self._state.compensation(worker.incarnation, step.clock),
        )
        out += (accumulation, Apply(record))
        self._records.commit(record, out)
        del step.pushes[push.sequence]

    def tick(self, now_s: float, out: list[Effect]) -> None:
        """Form an update whose grace time is over."""
        wake_s = self.aggregation.wake_s
        if wake_s is None or now_s < wake_s:
            return
        before = self._state.record_count
        self._decide((), now_s, out)
        if before != self._state.record_count:
            self._read_gate.release(out)

    # --- updates that wait for their scale

    def reduced(self, record: Record, squares: tuple[float, ...], out: list[Effect]) -> None:
        """Take the squares of a reduced sum: tell those in it, and those who came meanwhile."""
        if self._state.failure is not None:
            return
        self._scales.reduced(record.clock, squares)
        self._records.end_entries(record, squares, out)
        for worker in self._state.workers.values():
            step = worker.steps.get(record.clock)
            if step is not None and record.clock <= worker.sealed_clock:
                self.aggregation.discard(worker, step, out)

    def scale(
        self, event: ScaleEvent, worker: RangeWorker, now_s: float, out: list[Effect]
    ) -> None:
        """Take the scale of an update from a worker; the first to say it lets the update go."""
        ending = self._scales.ending(event, worker)
        summed = self._scales.take(event, worker) if ending is None else None
        self._state.end(worker, event.sender, event.sequence, ending or APPLIED, out)
        if summed is None:
            return
        said_by = Contributor(worker.rank, worker.incarnation, (event.sequence,), False)
        record = self._records.scaled(summed, said_by, event.scale)
        out.append(Apply(record) if record.blocks else Drop(record))
        self._records.count(record)
        self.aggregation.pass_clock(record.clock)
        self._go_on(record.clock, now_s, out)

    def _go_on(self, clock: int, now_s: float, out: list[Effect]) -> None:
        """Go on after update `clock` has its scale, or is dropped."""
        self._read_gate.release(out)
        self._decide(self._those_who_may_go_on(clock - 1, out), now_s, out)
        self._read_gate.release(out)
