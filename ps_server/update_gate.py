"""Seals take effect, updates form (SEMANTICS S1, S4, S6).

BSP: update c forms when the seal of clock c of every member is in effect; steps are folded in rank
order as soon as their turn comes. ASP: a step is folded and recorded when its seal takes effect, an
eager push when it arrives.

Rules:
    - A seal takes effect when every entry of a lower sequence has an outcome or is held, and the
      seal of the clock before it is in effect.
    - A decision is a Record; outcomes are given when it commits. With one replica that is at once.

Invariants:
    RM-2  Under BSP update c is applied after update c - 1 and holds each member's step once, in
          rank order.
    RM-3  Nothing is folded before the range has its initial values.

What it deliberately does not do: take entries in (`range_machine` does), or replicate (a later
record path hooks in at `_commit`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.errors import InvalidTensor, check
from ps_core.ledger import Ending, Outcome
from ps_core.tables import Hyperparameters, OptimizerKind
from ps_server.events import Apply, Assign, Contributor, Effect, Fold, Record, SealEvent
from ps_server.range_state import HeldPush, RangeState, StepPart, WorkerPart
from ps_server.read_gate import ReadGate

_NAMED_COUNT = 8
"""Invalid pushes that an error names; there may be thousands."""

_APPLIED = Ending(Outcome.APPLIED)
_SKIPPED = Ending(Outcome.SKIPPED)


class UpdateGate:
    """The gate of one table in one range."""

    def __init__(self, state: RangeState, reads: ReadGate) -> None:
        self._state = state
        self._reads = reads
        self._next_rank = 0  # ranks below it that belong to the update in the making are folded

    def advance(self, worker: WorkerPart, out: list[Effect]) -> None:
        """Let every seal of `worker` take effect whose turn has come, and what follows from it."""
        sealed_clock = worker.sealed_clock
        while True:
            step = worker.steps.get(worker.sealed_clock + 1)
            if step is None or step.seal is None:
                break
            if not self._is_complete(worker, step.seal.sequence):
                break
            if not self._take_effect(worker, step, step.seal, out):
                break
        if worker.sealed_clock != sealed_clock:  # else nothing can follow
            self._progress(worker, out)

    @staticmethod
    def _is_complete(worker: WorkerPart, sequence: int) -> bool:
        held, ledger = worker.held, worker.ledger
        for number in range(ledger.low_water + 1, sequence):
            if number not in held and not ledger.has_ended(number):
                return False
        return True

    def _take_effect(
        self, worker: WorkerPart, step: StepPart, seal: SealEvent, out: list[Effect]
    ) -> bool:
        # Initial values cannot be skipped: rank 0 sends what was invalid again.
        skips_invalid = seal.skip_if_invalid and step.clock > 0
        step.skip = seal.terms.skip or (skips_invalid and bool(step.invalid))
        if step.invalid and not step.skip:
            step.seal = None
            del worker.held[seal.sequence]
            named = sorted(step.invalid)[:_NAMED_COUNT]
            problem = InvalidTensor(
                f"clock {step.clock} of table '{self._state.name}' has {len(step.invalid)} invalid "
                f"pushes ({', '.join(map(str, named))}{', ...' * (len(step.invalid) > len(named))})"
                ": replace them, or seal it with skip"
            )
            self._state.end(
                worker, seal.sender, seal.sequence, Ending(Outcome.INVALID, problem), out
            )
            return False
        worker.sealed_clock = step.clock
        if step.skip:
            for push in step.pushes.values():
                self._state.unstage(step, worker, push)
        if seal.terms.last:
            self._leave(worker, step.clock, out)
            if step.skip and not self._state.is_asp:
                self._depart(worker, step, out)
        return True

    def _depart(self, worker: WorkerPart, step: StepPart, out: list[Effect]) -> None:
        """A last step that is skipped adds nothing to its update: the worker goes without waiting
        for the others to form it, else two that leave one after the other would wait for ever.
        """
        worker.left_clock = step.clock - 1
        self._commit(self._record(step.clock, [self._contributor(worker, step)], (), ()), out)

    def _leave(self, worker: WorkerPart, clock: int, out: list[Effect]) -> None:
        """The worker is not waited for beyond `clock`; what it sent beyond it is withdrawn."""
        worker.left_clock = clock
        for later in [c for c in worker.steps if c > clock]:
            step = worker.steps.pop(later)
            if step.seal is not None:
                seal = step.seal
                self._state.end(worker, seal.sender, seal.sequence, Ending(Outcome.WITHDRAWN), out)
            for sequence in sorted([*step.pushes, *step.missing]):
                push = step.pushes.get(sequence)
                sender = push.sender if push is not None else step.missing[sequence]
                if push is not None:
                    self._state.unstage(step, worker, push)
                    del worker.held[sequence]
                self._state.end(worker, sender, sequence, Ending(Outcome.WITHDRAWN), out)

    def _progress(self, worker: WorkerPart, out: list[Effect]) -> None:
        """What follows from a seal of `worker` that took effect."""
        state = self._state
        before = state.record_count
        moved: Sequence[WorkerPart] = (worker,)
        if not state.initialized:
            self._initialize(out)
            moved = list(state.by_rank.values())
        if not state.initialized:
            return
        if state.is_asp:
            for other in moved:
                self._record_sealed(other, out)
        else:
            while self._form(out):
                pass
        if before != state.record_count:
            self._reads.release(out)

    def _initialize(self, out: list[Effect]) -> None:
        worker = self._state.by_rank.get(0)
        step = worker.steps.get(0) if worker is not None else None
        if worker is None or step is None or worker.sealed_clock < 0:
            return
        self._state.initialized = True
        parts = self._take_parts(worker, step)
        record = self._record(0, [self._contributor(worker, step)], (), tuple(b for b, _ in parts))
        out.append(Assign(record, parts))
        self._commit(record, out)

    def _record_sealed(self, worker: WorkerPart, out: list[Effect]) -> None:
        """ASP: record every step of the worker whose seal is in effect."""
        while worker.done_clock < worker.sealed_clock:
            step = worker.steps[worker.done_clock + 1]
            worker.done_clock = step.clock
            self._record_step(worker, step, out)

    def _record_step(self, worker: WorkerPart, step: StepPart, out: list[Effect]) -> None:
        fold = self._fold(worker, step) if step.pushes and not step.skip else None
        blocks = tuple([block for block, _ in fold.parts]) if fold is not None else ()
        contributor = self._contributor(worker, step)
        record = self._record(step.clock, [contributor], step.numbers, blocks)
        if fold is not None:
            out.append(fold)
            out.append(Apply(record))
        self._commit(record, out)

    def record_eager(
        self,
        worker: WorkerPart,
        step: StepPart,
        push: HeldPush,
        hyperparameters: Hyperparameters,
        out: list[Effect],
    ) -> None:
        """ASP: one block is a record of its own; the seal that follows only ends the step."""
        merged = self._state.table.numbers.merged(hyperparameters)
        part = (push.block, push.payload)
        self._state.unstage(step, worker, push)
        contributor = Contributor(worker.rank, worker.incarnation, (push.sequence,), False)
        record = self._record(step.clock, [contributor], merged, (push.block,))
        out.append(
            Fold(
                self._state.table.table_id,
                self._state.range_id,
                step.clock,
                worker.rank,
                (part,),
                1.0,
            )
        )
        out.append(Apply(record))
        self._commit(record, out)
        del step.pushes[push.sequence]

    def _form(self, out: list[Effect]) -> bool:
        """BSP: fold what has its turn; form update `clock + 1` once every member is in (RM-2)."""
        state = self._state
        clock = state.clock + 1
        for rank in range(self._next_rank, state.worker_count):
            if not state.is_member(rank, clock):
                continue
            worker = state.by_rank.get(rank)
            if worker is None or worker.sealed_clock < clock:
                return False
            step = worker.steps[clock]
            if not step.skip and step.pushes:
                out.append(self._fold(worker, step))
            self._next_rank = rank + 1
        return self._form_record(clock, out)

    def _form_record(self, clock: int, out: list[Effect]) -> bool:
        """Every member is in; False if there is none."""
        state = self._state
        contributors = []
        blocks: set[int] = set()
        numbers: Hyperparameters | None = None
        for rank in range(state.worker_count):
            if not state.is_member(rank, clock):
                continue
            worker = state.by_rank[rank]
            step = worker.steps[clock]
            contributors.append(self._contributor(worker, step))
            if not step.skip:
                blocks.update(step.blocks)
                numbers = step.numbers if numbers is None else numbers
        if not contributors:
            return False
        numbers = state.table.numbers.merged(()) if numbers is None else numbers
        record = self._record(clock, contributors, numbers, tuple(sorted(blocks)))
        state.clock = clock
        self._next_rank = 0
        # A sum of nothing is a value too: workers that read clock c of an AGGREGATE table get it.
        if record.blocks or state.table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            out.append(Apply(record))
        self._commit(record, out)
        return True

    def _take_parts(self, worker: WorkerPart, step: StepPart) -> tuple[tuple[int, object], ...]:
        """The staged payloads of a step by block; they are staged no more."""
        pushes = sorted(step.pushes.values(), key=lambda push: push.block)
        parts = tuple([(push.block, push.payload) for push in pushes])
        for push in pushes:
            self._state.unstage(step, worker, push)
        return parts

    def _fold(self, worker: WorkerPart, step: StepPart) -> Fold:
        state = self._state
        check(state.initialized, "RM-3", "fold before the initial values")
        parts = self._take_parts(worker, step)
        scale = step.sealed_by.terms.contribution_scale
        return Fold(state.table.table_id, state.range_id, step.clock, worker.rank, parts, scale)

    def _contributor(self, worker: WorkerPart, step: StepPart) -> Contributor:
        sequences = (*sorted(step.pushes), step.sealed_by.sequence)
        return Contributor(worker.rank, worker.incarnation, sequences, step.skip)

    def _record(
        self,
        clock: int,
        contributors: list[Contributor],
        hyperparameters: Hyperparameters,
        blocks: tuple[int, ...],
    ) -> Record:
        self._state.record_count += 1
        return Record(
            self._state.table.table_id,
            self._state.range_id,
            self._state.record_count,
            clock,
            clock == 0,
            tuple(contributors),
            hyperparameters,
            blocks,
        )

    def _commit(self, record: Record, out: list[Effect]) -> None:
        """Every in-sync replica has the record (there is one): its outcomes hold."""
        if record.blocks and not record.is_assign:
            self._state.update_count += 1
            for block in record.blocks:
                self._state.versions[block] += 1
        for contributor in record.contributors:
            self._end_contribution(record, contributor, out)

    def _end_contribution(
        self, record: Record, contributor: Contributor, out: list[Effect]
    ) -> None:
        worker = self._state.workers[contributor.incarnation]
        step = worker.steps[record.clock]
        if not contributor.skip and not record.is_assign:
            for block in record.blocks:
                worker.own_updates[block] = worker.own_updates.get(block, 0) + 1
        for sequence in contributor.sequences:
            push = step.pushes.get(sequence)
            if push is None:
                self._state.end(worker, step.sealed_by.sender, sequence, _APPLIED, out)
                del worker.steps[record.clock]
                continue
            ending = _SKIPPED
            if not contributor.skip:
                staleness = self._staleness(worker, push)
                ending = Ending(Outcome.APPLIED, staleness=staleness) if staleness else _APPLIED
            self._state.end(worker, push.sender, sequence, ending, out)

    def _staleness(self, worker: WorkerPart, push: HeldPush) -> int:
        if push.pulled_peer_version is None:
            return 0
        return max(
            0, self._state.peer_version(worker.incarnation, push.block) - push.pulled_peer_version
        )
