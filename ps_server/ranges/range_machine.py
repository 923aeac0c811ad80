"""The range machine: a table in a range, from an entry's arrival to its outcome (SEMANTICS S2-S6).

    arrive -> [INVALID | REFUSED | held] -> sealed -> in effect -> accumulated -> recorded -> ended

An entry that passed session and epoch checks ends in exactly one outcome; a refusal over quota ends
nothing. One that comes again gets the answer that it got, or would have got, before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ps_core import limits
from ps_core.change import ChangeOutcome, ChangeResult, Join, TableChange
from ps_core.cluster_view import Node, NodeState
from ps_core.consistency import Mode
from ps_core.errors import (
    Fenced,
    InvalidConfig,
    InvalidKeys,
    Overloaded,
    PushpullError,
    Recovering,
    UpdateFailed,
)
from ps_core.keys import Incarnation
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_core.tables.optimizers import DISAGREE, Hyperparameters, OptimizerKind, array_words
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    Effect,
    EntryEvent,
    PullEvent,
    PushEvent,
    Record,
    ScaleEvent,
    SealEvent,
    SealTerms,
    Sender,
    StepId,
    WithdrawEvent,
)
from ps_server.ranges.range_state import (
    HeldPush,
    PendingStep,
    RangeState,
    RangeWorker,
)
from ps_server.ranges.read_gate import ReadGate
from ps_server.ranges.schedule import CutId
from ps_server.ranges.update_gate import UpdateGate

_MAX_SHOWN = 64

_WITHOUT_PARAMETERS = frozenset({OptimizerKind.AGGREGATE, OptimizerKind.ASSIGN, OptimizerKind.ADD})


class RangeMachine:
    """One table in one range. Methods take an event and the time, and return effects in order."""

    def __init__(self, state: RangeState) -> None:
        self.resent_count = 0  # entries that were answered from the ledger
        self.state = state
        self.read_gate = ReadGate(state)
        self._gate = UpdateGate(state, self.read_gate)
        self._rules = EntryRules(state)

    def entry(self, event: EntryEvent, now_s: float) -> list[Effect]:
        out: list[Effect] = []
        try:
            worker = self._worker(event.sender, now_s)
            worker.ledger.confirm(event.confirmed)
            if worker.ledger.has_ended(event.sequence):
                self.resent_count += 1
                ending = worker.ledger.ending(event.sequence)
                self.state.reply(
                    out, event.sender, ReplyKind.COMMITTED, event.sequence, ending=ending
                )
                return out
            worker.ledger.check_in_reach(event.sequence)
            match event:
                case PushEvent():
                    self._take_push(event, worker, out)
                case SealEvent():
                    self._take_seal(event, worker, out)
                case ScaleEvent():
                    self._gate.scale(event, worker, now_s, out)
                case _:
                    self._take_withdrawal(event, worker, out)
        except PushpullError as error:
            self.state.reply(out, event.sender, ReplyKind.ERROR, event.sequence, error=error)
            return out
        self._gate.advance(worker, now_s, out)
        self._go_on(now_s, out)
        return out

    def reduced(self, record: Record, squares: tuple[float, ...]) -> list[Effect]:
        """Take the squares of a reduced sum.

        Args:
            record: as in `Reduce`.
            squares: of each block of the range, ascending, the sum of its squares.
        """
        out: list[Effect] = []
        self._gate.reduced(record, squares, out)
        return out

    def ended(self, node: Node, now_s: float) -> list[Effect]:
        """End a worker's membership, whether it was ever heard here or not (S6): its sealed steps
        count, the rest ends as WITHDRAWN, its pulls are refused, and nobody waits for it. Repeating
        the event does nothing, as does ending a worker that left by a seal, unless a sum of its
        step waits for a scale: it says none any more.
        """
        out: list[Effect] = []
        state = self.state
        holder = state.by_rank.get(node.rank)
        worker = state.workers.get(node.incarnation)
        if worker is None and holder is None and node.rank < state.worker_count:
            worker = holder = self._new_worker(node.rank, node.incarnation, now_s)
        if worker is None:  # it never came here, or was replaced and forgotten
            self.read_gate.ended(node, out)
            return out
        if worker is holder:
            left_by_seal = worker.has_left and node.state is NodeState.LEFT
            has_said_all = left_by_seal and worker.incarnation not in state.summed_incarnations
            if node.rank in state.ended or has_said_all:
                return out
            state.ended[node.rank] = node
        self.read_gate.ended(node, out)
        self._gate.ended(worker, now_s, out)
        self._go_on(now_s, out)
        return out

    def overturn(self, record: Record, error: UpdateFailed) -> None:
        """End the record's entries as INVALID after all: its update could not be computed."""
        state = self.state
        for contributor in record.contributors:
            worker = state.workers.get(contributor.incarnation)
            if worker is None:  # forgotten
                continue
            for sequence in contributor.sequences:
                worker.ledger.overturn(sequence, Ending(Outcome.INVALID, error))
        if record.blocks and not record.is_assign:
            state.update_count -= 1
            for block in record.blocks:
                state.versions[block] -= 1
        state.clock = min(state.clock, max(record.clock - 1, 0))

    def fail(self, error: UpdateFailed) -> list[Effect]:
        """Fail the table: held and later entries end as INVALID, and pulls are refused."""
        out: list[Effect] = []
        state = self.state
        state.failure = error
        state.unscaled = None
        state.unstage_all()
        ending = Ending(Outcome.INVALID, error)
        for worker in state.workers.values():
            for step in worker.steps.values():
                senders = step.missing | {s: push.sender for s, push in step.pushes.items()}
                if step.seal is not None:
                    senders[step.seal.sequence] = step.seal.sender
                for sequence, sender in sorted(senders.items()):
                    state.end(worker, sender, sequence, ending, out)
            worker.steps.clear()
        self.read_gate.fail(error, out)
        return out

    def observe(self, table: Table, now_s: float, *, decides: bool = False) -> list[Effect]:
        """Take the table of the newest view, with the change of its consistency. `decides`: this
        range takes what is decided.
        """
        out: list[Effect] = []
        state, change = self.state, table.proposed
        is_freed = state.schedule.observe(table, state.reached, now_s)
        for join in table.joins:
            self._join(join, now_s)
        if decides and change is not None and change.is_decided:
            is_freed = self._take(change, now_s) or is_freed
        if is_freed:
            self._gate.resume(now_s, out)
        self._go_on(now_s, out)
        return out

    def _take(self, change: TableChange, now_s: float) -> bool:
        is_taken = self.state.schedule.take(change)
        if is_taken and change.join is not None:
            self._join(replace(change.join, after_clock=change.after_clock), now_s)
        return is_taken

    def settled(self, change: TableChange, settled: ChangeResult, now_s: float) -> list[Effect]:
        """Take the outcome of a change that is held for here, from the range that decides."""
        if settled.outcome is ChangeOutcome.TAKEN:
            is_freed = self._take(replace(change, after_clock=settled.after_clock), now_s)
        else:
            is_freed = self.state.schedule.give_up(change.number)
        return self.resume(now_s) if is_freed else []

    def resume(self, now_s: float) -> list[Effect]:
        """Let held steps go on."""
        out: list[Effect] = []
        self._gate.resume(now_s, out)
        self._go_on(now_s, out)
        return out

    def _join(self, join: Join, now_s: float) -> None:
        """Give a worker its rank beyond `join.after_clock`, as in every range."""
        state = self.state
        holder = state.by_rank.get(join.rank)
        if holder is not None and holder.incarnation >= join.incarnation:
            return  # it has joined, or was itself replaced
        state.ended.pop(join.rank, None)
        worker = self._new_worker(join.rank, join.incarnation, now_s)
        if holder is not None:
            worker.is_first = False
            state.replaced[holder.incarnation] = holder
        state.ranks = tuple(sorted({*state.ranks, join.rank}))
        if not state.awaits_rank_zero or join.rank != 0:  # else it may give the initial values
            worker.sealed_clock = worker.done_clock = worker.joined_clock = join.after_clock
            state.newest_join_clock = max(state.newest_join_clock, join.after_clock)
            worker.predecessor = holder

    def loaded(self, versions: Mapping[int, int], now_s: float) -> list[Effect]:
        """The restored table has its values, with these versions of blocks."""
        out: list[Effect] = []
        state = self.state
        state.versions |= versions
        state.initialized = True
        self._gate.resume(now_s, out)
        return out

    def begin_cut(self, cut_id: CutId, deadline_s: float) -> int:
        """Hold the table for a reader that wants one state of all ranges: nothing beyond the
        returned clock takes effect before the reader has its answer, or `deadline_s` has come.

        Raises:
            UpdateFailed: the table has failed.
        """
        if self.state.failure is not None:  # a new one: a raised error collects frames
            raise UpdateFailed(self.state.failure.message)
        return self.state.schedule.begin_cut(cut_id, self.state.stepped_clock, deadline_s)

    def end_cut(self, cut_id: CutId, now_s: float) -> list[Effect]:
        out: list[Effect] = []
        self.state.schedule.end_cut(cut_id)
        self._go_on(now_s, out)
        return out

    def pull(self, event: PullEvent, now_s: float) -> list[Effect]:
        """Answer a pull at once, refuse it, or park it until its deadline."""
        out = self.read_gate.pull(event, now_s)
        self._go_on(now_s, out)
        return out

    def cancel(self, waiter: int) -> None:
        """Cancel a parked pull. Steps that its cut held go on at the next `tick`."""
        self.read_gate.cancel(waiter)

    def _go_on(self, now_s: float, out: list[Effect]) -> None:
        """Let steps go on that cuts no longer hold, and forget replaced workers."""
        if self.state.replaced:
            self.state.forget_past()
        while self.state.schedule.is_freed:
            self.state.schedule.is_freed = False
            self._gate.resume(now_s, out)

    @property
    def wake_s(self) -> float | None:
        """The time at which `tick` may do something; None: time alone changes nothing."""
        schedule = self.state.schedule
        if schedule.is_freed:
            return 0.0
        gate_s = self._gate.aggregation.wake_s if self.state.failure is None else None
        cut_s = schedule.cut_deadline_s
        if gate_s is None or cut_s is None:
            return cut_s if gate_s is None else gate_s
        return min(gate_s, cut_s)

    def tick(self, now_s: float) -> list[Effect]:
        self.state.schedule.end_late_cuts(now_s)
        out: list[Effect] = list(self.read_gate.tick(now_s))
        self._gate.tick(now_s, out)
        self._go_on(now_s, out)
        return out

    def _worker(self, sender: Sender, now_s: float) -> RangeWorker:
        worker = self.state.workers.get(sender.incarnation)
        if worker is None:
            holder = self.state.by_rank.get(sender.rank)
            if self.state.is_to_join(sender.rank, sender.incarnation):
                raise Recovering(
                    f"worker {sender.rank} (incarnation {sender.incarnation}) has not joined table "
                    f"'{self.state.name}' yet: pull it first, which waits for that",
                    retry_after_ms=int(limits.JOIN_RETRY_S * 1000),
                )
            if holder is not None:
                raise Fenced(
                    f"rank {sender.rank} is incarnation {holder.incarnation} here; got "
                    f"{sender.incarnation}"
                )
            worker = self._new_worker(sender.rank, sender.incarnation, now_s)
        worker.last_heard_s = now_s
        return worker

    def _new_worker(self, rank: int, incarnation: Incarnation, now_s: float) -> RangeWorker:
        start = -1 if rank == 0 and self.state.awaits_rank_zero else self.state.first_clock
        done_clock = max(start, self.state.formed_clock)
        worker = RangeWorker(rank, incarnation, start, done_clock, now_s)
        worker.joined_clock = self.state.first_clock
        self.state.workers[incarnation] = worker
        self.state.by_rank[rank] = worker
        return worker

    def _answer_again(
        self, event: PushEvent | SealEvent, worker: RangeWorker, out: list[Effect]
    ) -> None:
        """Answer a held entry that came again; its stream before may have broken."""
        step = worker.steps[worker.held[event.sequence]]
        push = step.pushes.get(event.sequence)
        if push is not None:
            push.sender = event.sender
        elif step.seal is not None and step.seal.sequence == event.sequence:
            step.seal = step.seal._replace(sender=event.sender)
        self.state.reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)

    def _take_push(self, event: PushEvent, worker: RangeWorker, out: list[Effect]) -> None:
        step = worker.steps.get(event.clock)
        if event.sequence in worker.held:
            self._answer_again(event, worker, out)
            return
        if event.replaces:
            self._replace(event, worker, out)
        problem = event.problem or self._rules.push_problem(event, worker, step)
        if problem is not None:
            self._take_invalid(event, worker, problem, out)
            return
        step_id = StepId(event.clock, event.sender.rank)
        if not self.state.staging.admit(step_id, event.byte_count, out):
            full = _over_quota(f"the gate of table '{self.state.name}' is full")
            self.state.reply(out, event.sender, ReplyKind.REFUSED, event.sequence, error=full)
            return
        if step is None:
            step = worker.steps[event.clock] = PendingStep(event.clock)
        worker.arrived(event.sequence)
        self._hold(event, worker, step, out)

    def _take_invalid(
        self, event: PushEvent, worker: RangeWorker, problem: PushpullError, out: list[Effect]
    ) -> None:
        """Consume the sequence of an invalid push; its step, if still open, remembers it."""
        step = worker.steps.get(event.clock)
        if worker.sealed_clock < event.clock <= worker.sealed_clock + limits.MAX_CLOCK_LEAD_COUNT:
            step = step or worker.steps.setdefault(event.clock, PendingStep(event.clock))
            if len(step.invalid) >= limits.MAX_LEDGER_GAP_COUNT:
                raise InvalidKeys(
                    f"clock {event.clock} of table '{self.state.name}' has {len(step.invalid)} "
                    "invalid pushes; expected a seal with skip"
                )
            if step.seal is None or event.sequence < step.seal.sequence:
                step.invalid[event.sequence] = event.is_assign
        self.state.end(worker, event.sender, event.sequence, Ending(Outcome.INVALID, problem), out)

    def _hold(
        self, event: PushEvent, worker: RangeWorker, step: PendingStep, out: list[Effect]
    ) -> None:
        push = HeldPush(
            event.sender,
            event.sequence,
            event.block,
            event.byte_count,
            event.payload,
            event.pulled_peer_version,
            event.eager is not None,
            event.is_assign,
        )
        step.pushes[event.sequence] = push
        step.has_values = step.has_values or event.is_assign
        step.blocks[event.block] = event.sequence
        worker.held[event.sequence] = event.clock
        if event.eager is not None:
            step.eager = self.state.table.step_hyperparameters.merged(event.eager)
        if self._gate.takes_eager(worker, step, push):
            self._gate.record_eager(worker, step, push, out)
            return
        self.state.reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)

    def _replace(self, event: PushEvent, worker: RangeWorker, out: list[Effect]) -> None:
        self._rules.check_replacement(event, worker)
        step = worker.steps.get(event.clock)
        if worker.ledger.has_ended(event.replaces):
            if step is not None:
                step.invalid.pop(event.replaces, None)
            return
        if step is not None:
            self.state.drop_push(step, worker, event.replaces)
        self.state.end(worker, event.sender, event.replaces, Ending(Outcome.REPLACED), out)

    def _take_seal(self, event: SealEvent, worker: RangeWorker, out: list[Effect]) -> None:
        clock = event.terms.clock
        if event.sequence in worker.held:
            # The seal came again since an answer was lost, perhaps that of a given back push.
            step = worker.steps[worker.held[event.sequence]]
            full = _over_quota("given back")
            for sequence in step.missing:
                self.state.reply(out, event.sender, ReplyKind.GIVEN_BACK, sequence, error=full)
            self._answer_again(event, worker, out)
            return
        step = worker.steps.get(clock) or PendingStep(clock)
        problem = self._rules.seal_problem(event, worker, step)
        if problem is None:
            hyperparameters = event.terms.hyperparameters
            step.hyperparameters = self.state.table.step_hyperparameters.merged(hyperparameters)
            problem = self._rules.disagreement(event.terms, step.hyperparameters, worker)
            if problem is not None:
                self.read_gate.dispute(clock, problem, out)
        if problem is not None:
            ending = Ending(Outcome.INVALID, problem)
            self.state.end(worker, event.sender, event.sequence, ending, out)
            return
        worker.steps[clock] = step
        worker.arrived(event.sequence)
        step.seal = event
        if event.skip_if_invalid:
            self._gate.recall_carrier(worker, step, event)
        worker.held[event.sequence] = clock
        self.state.reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)

    def _take_withdrawal(
        self, event: WithdrawEvent, worker: RangeWorker, out: list[Effect]
    ) -> None:
        clock = worker.held.get(event.sequence)
        if clock is not None:
            step = worker.steps[clock]
            is_seal = step.seal is not None and step.seal.sequence == event.sequence
            if is_seal or clock <= worker.sealed_clock:
                raise InvalidKeys(
                    f"sequence {event.sequence} is {'a seal' if is_seal else 'in effect'}: it "
                    "cannot be withdrawn"
                )
            self.state.drop_push(step, worker, event.sequence)
        self.state.end(worker, event.sender, event.sequence, Ending(Outcome.WITHDRAWN), out)

    def give_back(self, given: StepId, out: list[Effect]) -> None:
        """Give back a step's staged payloads, which must be sent again, to a lower step; the quota
        has already taken their bytes off this one.
        """
        worker = self.state.worker_at(given.rank, given.clock)
        step = worker.steps.get(given.clock) if worker is not None else None
        if worker is None or step is None:
            return
        staged = [push for push in step.pushes.values() if push.payload is not None]
        if not staged:
            return
        error = _over_quota(f"the gate of table '{self.state.name}' gives way to a lower step")
        for push in staged:
            del step.pushes[push.sequence]
            step.blocks.pop(push.block, None)
            worker.held.pop(push.sequence)
            step.missing[push.sequence] = push.sender
            self.state.reply(out, push.sender, ReplyKind.GIVEN_BACK, push.sequence, error=error)
        worker.sealed_clock = min(worker.sealed_clock, given.clock - 1)
        if self.state.has_ended(worker):  # it will not send again
            self._gate.leave_unsealed(worker, out)
        elif worker.left_clock is not None and worker.holds_last_seal:
            worker.left_clock = None  # its final seal is no longer in effect


def _over_quota(words: str) -> Overloaded:
    return Overloaded(words, retry_after_ms=int(limits.OVER_QUOTA_RETRY_S * 1000))


class EntryRules:
    """Checks of an entry apart from its payload; each returns the error that it ends with."""

    def __init__(self, state: RangeState) -> None:
        self._state = state
        self._hyperparameters = state.table.step_hyperparameters
        self._most_scale = limits.MAX_SCALE[state.table.spec.accumulator_element_bytes]

    def push_problem(
        self, event: PushEvent, worker: RangeWorker, step: PendingStep | None
    ) -> PushpullError | None:
        if self._state.failure is not None:
            return self._state.failure
        name = self._state.name
        if event.block not in self._state.versions:
            return InvalidKeys(
                f"block {event.block} of table '{name}' is not in range {self._state.range_id}"
            )
        is_initial = event.is_assign and event.clock == 0
        if is_initial and (event.sender.rank != 0 or not self._state.awaits_rank_zero):
            return InvalidConfig(
                f"ASSIGN to table '{name}' at clock {event.clock} by rank {event.sender.rank}; "
                "expected clock 0 by rank 0, once, in a table that starts from rank 0"
            )
        problem = self._clock_problem(event.clock, worker)
        if not is_initial and problem is not None:
            return problem
        if event.is_assign and not is_initial:
            problem = self._kind_problem()
            if problem is not None:
                return problem
            if event.eager is not None:
                return InvalidConfig("an ASSIGN is eager; expected one that waits for its seal")
        if step is not None and step.seal is not None and event.sequence > step.seal.sequence:
            return InvalidConfig(
                f"push {event.sequence} comes after the seal of clock {event.clock}"
            )
        if step is not None and event.block in step.blocks:
            return InvalidKeys(
                f"block {event.block} of table '{name}' was pushed at clock {event.clock} already, "
                f"as sequence {step.blocks[event.block]}; name it in `replaces`"
            )
        if event.eager is not None:
            try:
                self._hyperparameters.merged(event.eager)
            except InvalidConfig as error:
                return error
        return None

    def _kind_problem(self) -> PushpullError | None:
        spec = self._state.table.spec
        optimizer = spec.optimizer.kind
        if spec.rows is not None:
            return InvalidConfig(f"table '{spec.name}' is one of rows; expected no edit of it")
        if optimizer not in _WITHOUT_PARAMETERS:
            return None
        return InvalidConfig(
            f"table '{self._state.name}' has no parameters that an optimizer steps: its optimizer "
            f"is {optimizer.value}; expected no edit"
        )

    def _clock_problem(self, clock: int, worker: RangeWorker) -> PushpullError | None:
        first = max(worker.sealed_clock, 0) + 1
        # A worker that was left behind may go to the range's clock.
        last = max(worker.sealed_clock, self._state.clock) + limits.MAX_CLOCK_LEAD_COUNT
        left = worker.left_clock
        if left is not None and not worker.sealed_clock < clock <= left:  # else it was given back
            return InvalidConfig(
                f"worker {worker.rank} left table '{self._state.name}' at clock {left}; got clock "
                f"{clock}"
            )
        if not first <= clock <= last:
            remedy = "a worker that joins others pulls the table before its first push: the pull "
            remedy = f"; {remedy}says at which clock it begins" * (clock < first)
            return InvalidConfig(
                f"clock {clock} of table '{self._state.name}' by worker {worker.rank}; "
                f"expected {first} (at most {last}){remedy}"
            )
        return None

    def check_replacement(self, event: PushEvent, worker: RangeWorker) -> None:
        """Check that a push replaces a lower push of the same step, which is not yet sealed.

        Raises:
            InvalidKeys: saying what was named instead.
        """
        named = f"sequence {event.sequence} cannot replace {event.replaces}"
        if not 1 <= event.replaces < event.sequence:
            raise InvalidKeys(f"{named}; expected a lower one, from 1")
        step = worker.steps.get(event.clock)
        clock = worker.held.get(event.replaces)
        if clock is not None:
            if step is None or event.replaces not in step.pushes:
                raise InvalidKeys(
                    f"{named}, which is an entry of clock {clock}; expected a push of clock "
                    f"{event.clock}"
                )
            if clock <= worker.sealed_clock:
                raise InvalidKeys(f"{named}: clock {clock} is sealed")
        if step is not None and step.seal is not None and step.seal.sequence < event.sequence:
            raise InvalidKeys(f"{named}: clock {event.clock} was sealed as {step.seal.sequence}")

    def seal_problem(
        self, event: SealEvent, worker: RangeWorker, step: PendingStep
    ) -> PushpullError | None:
        """The fault of a seal in itself; `disagreement` compares it with other workers' seals."""
        name, terms = self._state.name, event.terms
        problem = self._state.failure or event.problem
        if problem is not None:
            return problem
        if step.seal is not None:
            return InvalidConfig(
                f"worker {worker.rank} sealed clock {terms.clock} of table '{name}' already"
            )
        problem = self._clock_problem(terms.clock, worker)
        if terms.clock != 0 and problem is not None:
            return problem
        is_given = not self._state.awaits_rank_zero
        if terms.clock == 0 and (worker.rank != 0 or terms.skip or is_given):
            return InvalidConfig(
                f"clock 0 of table '{name}' is sealed by rank 0, without skip, in a table that "
                "starts from rank 0"
            )
        problem = (
            self._scale_problem(terms)
            or self._clip_problem(terms, step)
            or self._edit_problem(terms)
        )
        if problem is not None:
            return problem
        try:
            mine = self._hyperparameters.merged(terms.hyperparameters)
        except InvalidConfig as error:
            return error
        if step.eager is not None and not terms.skip and step.eager != mine:
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{name}' has other hyperparameters "
                f"({mine}) than its eager pushes ({step.eager})"
            )
        return None

    def _scale_problem(self, terms: SealTerms) -> PushpullError | None:
        """The fault of scales with which the accumulator would overflow, after the decision."""
        most, scale, clip = self._most_scale, terms.contribution_scale, terms.clip_scale
        if not 0.0 < scale <= most:
            return InvalidConfig(
                f"contribution_scale is {scale}; expected above 0, and at most {most:g} in this "
                "table"
            )
        if clip is None or (0.0 < clip < float("inf") and 0.0 < clip * scale <= most):
            return None
        return InvalidConfig(
            f"clip_scale is {clip}; expected finite and above 0, and times contribution_scale "
            f"({scale}) above 0 and at most {most:g}"
        )

    def _clip_problem(self, terms: SealTerms, step: PendingStep) -> PushpullError | None:
        if terms.clip_scale is None:
            return None
        optimizer = self._state.table.spec.optimizer.kind
        seal = f"the seal of clock {terms.clock} of table '{self._state.name}' has a clip_scale"
        if optimizer in _WITHOUT_PARAMETERS:
            return InvalidConfig(
                f"{seal}; {optimizer.value} has no gradient that the servers could clip"
            )
        if step.eager is not None or terms.clock == 0:
            return InvalidConfig(
                f"{seal}; expected none for initial values and for eager steps, which are applied "
                "as they come"
            )
        return None

    def _edit_problem(self, terms: SealTerms) -> PushpullError | None:
        if not (terms.edit or terms.array):
            return None
        optimizer = self._state.table.spec.optimizer
        seal = f"the seal of clock {terms.clock} of table '{self._state.name}'"
        if terms.array and not (terms.edit and optimizer.has_array(terms.array)):
            return InvalidConfig(
                f"{seal} is of array {terms.array[:_MAX_SHOWN]!r}; expected an edit of "
                f"{array_words(optimizer)}"
            )
        if terms.clock == 0 or terms.skip or terms.last or terms.clip_scale is not None:
            return InvalidConfig(
                f"{seal} has an edit; expected a clock above 0, and neither skip, last nor a "
                "clip_scale with it"
            )
        return self._kind_problem()

    def disagreement(
        self, terms: SealTerms, mine: Hyperparameters, worker: RangeWorker
    ) -> PushpullError | None:
        """Under BSP all seals of a clock carry the same hyperparameters; skipped ones have no say.

        With backup workers a worker that was left behind leaves out clocks, so that its schedules
        are elsewhere: there the update takes the hyperparameters of the first step that it holds.
        Those of AGGREGATE have any names; a worker that gives none has no say.
        """
        setting = self._state.schedule.at(terms.clock)
        if setting.mode is not Mode.BSP or setting.backup_workers or terms.skip or terms.edit:
            return None
        for other in self._state.workers.values():
            step = other.steps.get(terms.clock)
            if other is worker or step is None or step.seal is None:
                continue
            if step.seal.terms.skip or step.seal.terms.edit:  # `Aggregation` compares edits
                continue
            theirs = step.hyperparameters
            if (step.seal.terms.clip_scale is None) != (terms.clip_scale is None):
                ranks = worker.rank, other.rank
                clips, does_not = ranks if terms.clip_scale is not None else ranks[::-1]
                return InvalidConfig(
                    f"workers {clips} and {does_not} {DISAGREE} {terms.clock} of table "
                    f"'{self._state.name}': worker {clips} clips the gradient, worker {does_not} "
                    "not"
                )
            if theirs != mine and theirs and mine:
                low, high = sorted(((worker.rank, mine), (other.rank, theirs)))
                return InvalidConfig(
                    f"workers {low[0]} and {high[0]} {DISAGREE} {terms.clock} of table "
                    f"'{self._state.name}': {_differing(low, high)}"
                )
        return None


def _differing(low: tuple[int, Hyperparameters], high: tuple[int, Hyperparameters]) -> str:
    """The hyperparameters that two workers, each with its rank, do not have alike, in words."""
    (first, ours), (second, theirs) = (low[0], dict(low[1])), (high[0], dict(high[1]))
    found = []
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            found.append(f"{name} at worker {first if name in ours else second} alone")
        elif (a := ours[name]) != (b := theirs[name]):
            are_told_apart = f"{a:g}" != f"{b:g}"
            found.append(f"{name}: {a:g} and {b:g}" if are_told_apart else f"{name}: {a} and {b}")
    return ", ".join(found)
