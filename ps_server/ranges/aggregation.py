"""Aggregation: steps in effect become records, and records end entries (SEMANTICS S1, S2, S7).

    step in effect --its turn--> accumulated --all are in--> recorded --> committed: outcomes

An update of BSP is all gradients or all one edit (SEMANTICS S16), as the seals say. All ranges of
all tables of a model have the same seals, so they decide alike; if workers disagree, the clock ends
for all of them with nothing.

Invariants:
    RM-2  Update c is applied after update c - 1 and holds each member's step once, in rank order
          (with backup workers: each contributor's, in the record's order).
    RM-3  Nothing is accumulated before the range has its initial values.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from ps_core.consistency import StalePolicy
from ps_core.errors import AlreadyPast, EditRefused, check
from ps_core.ledger import Ending, Outcome
from ps_core.tables.optimizers import Hyperparameters, OptimizerKind
from ps_server.ranges.events import (
    Accumulate,
    Apply,
    AssignValues,
    Contributor,
    Drop,
    Effect,
    Record,
    Reduce,
)
from ps_server.ranges.range_state import HeldPush, PendingStep, RangeState, RangeWorker
from ps_server.ranges.update_scales import UpdateScales

APPLIED = Ending(Outcome.APPLIED)
_SKIPPED = Ending(Outcome.SKIPPED)


class Records:
    """Makes the records of one table in one range, and ends the entries that they name."""

    def __init__(self, state: RangeState) -> None:
        self._state = state

    def take_parts(self, worker: RangeWorker, step: PendingStep) -> tuple[tuple[int, object], ...]:
        """Take a step's staged payloads, by block, out of staging memory."""
        pushes = sorted(step.pushes.values(), key=attrgetter("block"))
        parts = tuple([(push.block, push.payload) for push in pushes])
        self._state.unstage_step(step, worker)
        return parts

    def accumulate(self, worker: RangeWorker, step: PendingStep) -> Accumulate:
        """The effect that adds the step to the accumulator of its clock."""
        state = self._state
        check(state.initialized, "RM-3", "accumulate before the initial values")
        parts = self.take_parts(worker, step)
        terms = step.sealed_by.terms
        table_id, clock, scale = state.table.table_id, step.clock, terms.contribution_scale
        if terms.clip_scale is not None and not state.schedule.is_bsp(clock):
            scale *= terms.clip_scale
        compensation = state.compensation(worker.incarnation, clock)
        return Accumulate(table_id, state.range_id, clock, worker.rank, parts, scale, compensation)

    def contributor(self, worker: RangeWorker, step: PendingStep) -> Contributor:
        sequences = (*sorted(step.pushes), step.sealed_by.sequence)
        return Contributor(worker.rank, worker.incarnation, sequences, step.skip)

    def record(
        self,
        clock: int,
        contributors: list[Contributor],
        hyperparameters: Hyperparameters,
        blocks: tuple[int, ...],
        *,
        is_assign: bool = False,
        of: tuple[str, bytes] = ("", b""),
    ) -> Record:
        state = self._state
        state.record_count += 1
        may_be_short = clock and state.ended and state.schedule.is_bsp(clock)
        return Record(
            state.table.table_id,
            state.range_id,
            state.record_count,
            clock,
            is_assign,
            tuple(contributors),
            hyperparameters,
            blocks,
            state.gone_count(clock) if may_be_short else 0,
            array=of[0],
            edit=of[1],
        )

    def assign(
        self,
        clock: int,
        contributors: list[Contributor],
        parts: tuple[tuple[int, object], ...],
        out: list[Effect],
        *,
        of: tuple[str, bytes] = ("", b""),
    ) -> None:
        """Record values that replace the table's, or those `of` an array of optimizer state."""
        blocks = tuple(block for block, _ in parts)
        record = self.record(clock, contributors, (), blocks, is_assign=True, of=of)
        if parts or not clock:
            out.append(AssignValues(record, parts))
        self.commit(record, out)

    def scaled(self, summed: Record, said_by: Contributor, scale: float) -> Record:
        """The record that turns a reduced sum into an update."""
        self._state.record_count += 1
        return summed._replace(
            number=self._state.record_count,
            contributors=(said_by,),
            update_scale=scale,
            summed_by=summed.contributors,
        )

    def commit(self, record: Record, out: list[Effect]) -> None:
        """Count the record, and end its entries. `ps_server.replication` holds the outcomes back
        until every in-sync replica has the record.
        """
        self.count(record)
        self.end_entries(record, (), out)

    def end_entries(self, record: Record, squares: tuple[float, ...], out: list[Effect]) -> None:
        """End the record's entries, with the `squares` of a reduced sum."""
        for contributor in record.contributors:
            self._end_contribution(record, contributor, squares, out)

    def count(self, record: Record) -> None:
        """Count the update in block versions and in its contributors' own updates."""
        state = self._state
        if record.is_assign or record.blocks:
            state.changed_clock = max(state.changed_clock, record.clock)
        if record.is_assign and record.clock:  # initial values are no edit
            state.edit_count += 1
        if record.is_assign or not record.blocks:  # the version of an assigned block stays
            return
        state.update_count += 1
        for block in record.blocks:
            state.versions[block] += 1
        for contributor in record.summed_by or record.contributors:
            if not contributor.skip:
                own_updates = state.workers[contributor.incarnation].own_updates
                for block in record.blocks:
                    own_updates[block] = own_updates.get(block, 0) + 1

    def _end_contribution(
        self,
        record: Record,
        contributor: Contributor,
        squares: tuple[float, ...],
        out: list[Effect],
    ) -> None:
        worker = self._state.workers[contributor.incarnation]
        step = worker.steps[record.clock]
        alike: list[HeldPush] = []  # earlier pushes with this ending
        ending_alike = APPLIED
        for sequence in contributor.sequences:
            push = step.pushes.get(sequence)
            if push is None:
                continue
            ending = _SKIPPED
            if step.problem is not None:
                ending = Ending(Outcome.INVALID, step.problem)
            elif not contributor.skip:
                staleness = self.staleness(worker, push)
                ending = Ending(Outcome.APPLIED, staleness=staleness) if staleness else APPLIED
            if ending is not ending_alike:
                self._state.end_pushes(worker, alike, ending_alike, out)
                alike, ending_alike = [], ending
            alike.append(push)
        self._state.end_pushes(worker, alike, ending_alike, out)
        seal = contributor.sequences[-1]
        if seal not in step.pushes:  # the seal itself
            ending = Ending(Outcome.APPLIED, squares=squares) if squares else APPLIED
            if step.problem is not None:
                ending = Ending(Outcome.INVALID, step.problem)
            self._state.end(worker, step.sealed_by.sender, seal, ending, out)
            del worker.steps[record.clock]

    def staleness(self, worker: RangeWorker, push: HeldPush) -> int:
        """Updates of the block by others since the worker pulled it; 0 if it does not say."""
        if push.pulled_peer_version is None:
            return 0
        now = self._state.versions[push.block] - worker.own_updates.get(push.block, 0)
        return max(0, now - push.pulled_peer_version)

    def reject_stale(self, worker: RangeWorker, step: PendingStep, out: list[Effect]) -> None:
        """Drop and reject the step's pushes that are too stale."""
        setting = self._state.schedule.at(step.clock)
        if setting.policy is not StalePolicy.REJECT:
            return
        for push in list(step.pushes.values()):
            tau = self.staleness(worker, push)
            if setting.rejects(tau):
                self._state.drop_push(step, worker, push.sequence)
                self.reject(worker, push, tau, out)

    def reject(self, worker: RangeWorker, push: HeldPush, tau: int, out: list[Effect]) -> None:
        ending = Ending(Outcome.REJECTED, staleness=tau)
        self._state.end(worker, push.sender, push.sequence, ending, out)

    def scaled_accumulations(self, worker: RangeWorker, step: PendingStep) -> list[Accumulate]:
        """The effects that accumulate the step: one a factor by which staleness scales blocks."""
        setting = self._state.schedule.at(step.clock)
        if setting.policy not in (StalePolicy.DAMP, StalePolicy.DIVIDE):
            return [self.accumulate(worker, step)]
        pushes = step.pushes.values()
        factors = {push.block: setting.scale(self.staleness(worker, push)) for push in pushes}
        whole = self.accumulate(worker, step)
        return [
            whole._replace(
                parts=tuple(part for part in whole.parts if factors[part[0]] == factor),
                scale=whole.scale * factor,
            )
            for factor in sorted(set(factors.values()), reverse=True)
        ]


class Aggregation:
    """Aggregates the next update of one table in one range under BSP.

    Attributes:
        wake_s: when it may form by time alone; None: time alone does not.
    """

    def __init__(self, state: RangeState, records: Records, scales: UpdateScales) -> None:
        self._state = state
        self._records = records
        self._scales = scales
        self.wake_s: float | None = None
        self._accumulated: list[int] = []  # with backup workers: ranks in the sum
        self._next_rank = 0  # members of lower rank are accumulated
        self._first: RangeWorker | None = None  # the first whose step counts
        self._values: tuple[tuple[int, object], ...] = ()  # the edit's, of the first worker
        self._of = "", b""  # the edit's
        self._dispute: EditRefused | None = None
        self._is_accumulated = False

    def form(self, now_s: float, out: list[Effect]) -> bool:
        """Accumulate the steps whose turn has come; form the update if all are in (RM-2)."""
        state = self._state
        clock = state.clock + 1
        if state.unscaled is not None:
            return False
        if clock <= state.newest_join_clock and not self._members(clock):  # others join later
            self.pass_clock(clock)
            return True
        if state.schedule.at(clock).backup_workers:
            return self._form_without_slowest(clock, now_s, out)
        for rank in state.ranks:
            if rank < self._next_rank or not state.is_member(rank, clock):
                continue
            worker = state.worker_at(rank, clock)
            if worker is None or worker.sealed_clock < clock:
                return False
            self._take(worker, worker.steps[clock], out)
            self._next_rank = rank + 1
        return self._form_record(clock, self._members(clock), out)

    def _members(self, clock: int) -> list[int]:
        return [rank for rank in self._state.ranks if self._state.is_member(rank, clock)]

    def _take(self, worker: RangeWorker, step: PendingStep, out: list[Effect]) -> None:
        """Take a step whose turn has come into the update."""
        state = self._state
        if step.skip:
            return
        if self._first is None:
            self._first = worker
        elif self._dispute is None:
            self._dispute = self._disagreement(self._first, worker, step.clock)
        if self._dispute is not None or (step.edit and worker is not self._first):
            state.unstage_step(step, worker)
        elif step.edit:
            self._values, self._of = self._records.take_parts(worker, step), step.of
            state.add_to_sum(step)
        elif step.pushes:
            out.append(self._records.accumulate(worker, step))
            state.add_to_sum(step)
            self._is_accumulated = True

    def _disagreement(
        self, first: RangeWorker, worker: RangeWorker, clock: int
    ) -> EditRefused | None:
        steps = first.steps[clock], worker.steps[clock]
        edits = steps[0].edit, steps[1].edit
        arrays = steps[0].array, steps[1].array
        if edits[0] == edits[1] and arrays[0] == arrays[1]:
            return None
        before = f"before clock {clock} of table '{self._state.name}'"
        if all(edits):
            words = steps[0].edit_words if arrays[0] else steps[1].edit_words
            return EditRefused(
                f"workers {first.rank} and {worker.rank} {words} to different values {before}"
            )
        does, other = (first, worker) if edits[0] else (worker, first)
        words = does.steps[clock].edit_words
        return EditRefused(f"worker {does.rank} {words} {before}, and worker {other.rank} did not")

    def pass_clock(self, clock: int) -> None:
        """Finish `clock` for every worker."""
        state = self._state
        state.clock = state.formed_clock = clock
        state.end_sum()
        self._next_rank = 0
        self._first, self._values, self._dispute, self._is_accumulated = None, (), None, False
        for worker in state.workers.values():
            worker.done_clock = max(worker.done_clock, clock)

    def _form_without_slowest(self, clock: int, now_s: float, out: list[Effect]) -> bool:
        """Form an update of BSP with backup workers: enough are in, and the grace time is over. A
        step is accumulated as it comes, whatever its rank: nobody knows which others will come, and
        a step that waits takes the staging memory that they need. The record has the order.
        """
        state, setting = self._state, self._state.schedule.at(clock)
        members = self._members(clock)
        for rank in members:
            worker = state.worker_at(rank, clock)
            if worker is None or worker.sealed_clock < clock or rank in self._accumulated:
                continue
            self._accumulated.append(rank)
            step = worker.steps[clock]
            if not step.skip and step.pushes:
                out.append(self._records.accumulate(worker, step))
                state.add_to_sum(step)
        ready_count = len(self._accumulated)
        if not ready_count or ready_count < len(members) - setting.backup_workers:
            return False
        if ready_count < len(members) and setting.grace_ms:
            if self.wake_s is None:
                self.wake_s = now_s + setting.grace_ms / 1000
            if now_s < self.wake_s:
                return False
        self.wake_s = None
        contributors, self._accumulated = self._accumulated, []
        return self._form_record(clock, contributors, out)

    def _form_record(self, clock: int, ranks: Sequence[int], out: list[Effect]) -> bool:
        """Form the record of these ranks' steps; False if none takes part."""
        state = self._state
        workers = [worker for rank in ranks if (worker := state.worker_at(rank, clock))]
        if self._dispute is not None or (self._first is not None and self._first.steps[clock].edit):
            self._form_edit(clock, workers, out)
            return True
        if not workers:
            return False
        steps = [worker.steps[clock] for worker in workers]
        contributors = list(map(self._records.contributor, workers, steps))
        taken = [step for step in steps if not step.skip]
        blocks = tuple(sorted({block for step in taken for block in step.blocks}))
        hyperparameters = (
            taken[0].hyperparameters if taken else state.table.step_hyperparameters.merged(())
        )
        record = self._records.record(clock, contributors, hyperparameters, blocks)
        if any(step.sealed_by.terms.clip_scale is not None for step in taken):
            state.unscaled = record
            out.append(Reduce(record))
            return self.drop_orphan(out)
        # A sum of nothing is a value too: workers that pull clock c of an AGGREGATE table get it.
        if record.blocks or state.table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            out.append(Apply(record))
        self._records.commit(record, out)
        self.pass_clock(clock)
        return True

    def _form_edit(self, clock: int, workers: list[RangeWorker], out: list[Effect]) -> None:
        """Record an edit: if all workers made the same, its values replace the table's."""
        for worker in workers if self._dispute is not None else ():
            step = worker.steps[clock]
            step.edit, step.skip, step.problem = b"", True, self._dispute
        contributors = [self._records.contributor(w, w.steps[clock]) for w in workers]
        if self._dispute is None:
            self._records.assign(clock, contributors, self._values, out, of=self._of)
        else:
            record = self._records.record(clock, contributors, (), ())
            if self._is_accumulated:
                out.append(Drop(record))
            self._records.commit(record, out)
        self.pass_clock(clock)

    def drop_orphan(self, out: list[Effect]) -> bool:
        """Drop the update that waits for its scale if nobody can say it; True if it was dropped."""
        orphan = self._scales.orphan()
        if orphan is None:
            return False
        out.append(Drop(orphan))
        self.pass_clock(orphan.clock)
        return True

    def discard(self, worker: RangeWorker, step: PendingStep, out: list[Effect]) -> None:
        """End a step that came after its update; its worker goes on from the newest clock."""
        state = self._state
        newest = max(state.clock, worker.done_clock, step.clock)
        past = AlreadyPast(
            f"update {step.clock} of table '{state.name}' has formed without worker "
            f"{worker.rank}; range {state.range_id} is at clock {newest}",
            clock=newest,
        )
        ending = Ending(Outcome.DISCARDED, past, squares=self._scales.squares_of_late(step))
        state.end_step(step, worker, ending, out)
        seal = step.sealed_by
        state.end(worker, seal.sender, seal.sequence, ending, out)
        del worker.steps[step.clock]
