"""From steps in effect to records, and from records to outcomes (SEMANTICS S1, S2).

Rules:
    - A decision is a Record; outcomes are given when it commits. With one replica that is at once.

Invariants:
    RM-3  Nothing is folded before the range has its initial values.

What it deliberately does not do: decide when (`update_gate` does), or replicate (a later record
path hooks in at `commit`).
"""

from __future__ import annotations

from ps_core.consistency import StalePolicy
from ps_core.errors import check
from ps_core.ledger import Ending, Outcome
from ps_core.tables import Hyperparameters
from ps_server.ranges.events import Assign, Contributor, Effect, Fold, Record
from ps_server.ranges.range_state import HeldPush, RangeState, StepPart, WorkerPart

APPLIED = Ending(Outcome.APPLIED)
_SKIPPED = Ending(Outcome.SKIPPED)


class Records:
    """The records of one table in one range."""

    def __init__(self, state: RangeState) -> None:
        self._state = state

    def take_parts(self, worker: WorkerPart, step: StepPart) -> tuple[tuple[int, object], ...]:
        """The staged payloads of a step by block; they are staged no more."""
        pushes = sorted(step.pushes.values(), key=lambda push: push.block)
        parts = tuple([(push.block, push.payload) for push in pushes])
        self._state.unstage_step(step, worker)
        return parts

    def fold(self, worker: WorkerPart, step: StepPart) -> Fold:
        """The step, to be added to the sum of its clock."""
        state = self._state
        check(state.initialized, "RM-3", "fold before the initial values")
        parts = self.take_parts(worker, step)
        terms = step.sealed_by.terms
        table_id, clock, scale = state.table.table_id, step.clock, terms.contribution_scale
        if terms.clip_scale is not None and not state.schedule.is_bsp(clock):
            scale *= terms.clip_scale
        compensation = state.compensation(worker.incarnation, clock)
        return Fold(table_id, state.range_id, clock, worker.rank, parts, scale, compensation)

    def contributor(self, worker: WorkerPart, step: StepPart) -> Contributor:
        """The worker's part in an update."""
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
        """The next decision."""
        self._state.record_count += 1
        return Record(
            self._state.table.table_id,
            self._state.range_id,
            self._state.record_count,
            clock,
            is_assign,
            tuple(contributors),
            hyperparameters,
            blocks,
            self._state.gone_count(clock) if clock and self._state.schedule.is_bsp(clock) else 0,
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
        """An edit is decided, or the initial values: these replace values. Or they are `of` an
        array of optimizer state, under that name of an edit.
        """
        blocks = tuple(block for block, _ in parts)
        record = self.record(clock, contributors, (), blocks, is_assign=True, of=of)
        if parts or not clock:
            out.append(Assign(record, parts))
        self.commit(record, out)

    def scaled(self, summed: Record, said_by: Contributor, scale: float) -> Record:
        """The decision that makes an update of a sum."""
        self._state.record_count += 1
        return summed._replace(
            number=self._state.record_count,
            contributors=(said_by,),
            update_scale=scale,
            summed_by=summed.contributors,
        )

    def commit(self, record: Record, out: list[Effect]) -> None:
        """Every in-sync replica has the record (there is one): its outcomes hold."""
        self.count(record)
        for contributor in record.contributors:
            self._end_contribution(record, contributor, (), out)

    def commit_sum(self, record: Record, squares: tuple[float, ...], out: list[Effect]) -> None:
        """The sum is there, and says how large it is; it becomes an update with its scale."""
        for contributor in record.contributors:
            self._end_contribution(record, contributor, squares, out)

    def count(self, record: Record) -> None:
        """It is an update now, of those who took part."""
        state = self._state
        if record.is_assign:  # no update of a block, whose version stays
            state.changed_clock = max(state.changed_clock, record.clock)
            return
        if not record.blocks:
            return
        state.update_count += 1
        state.changed_clock = max(state.changed_clock, record.clock)
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
        alike: list[HeldPush] = []  # those before this one, with this ending
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
        if seal not in step.pushes:  # the seal itself, which is the last
            ending = Ending(Outcome.APPLIED, squares=squares) if squares else APPLIED
            if step.problem is not None:
                ending = Ending(Outcome.INVALID, step.problem)
            self._state.end(worker, step.sealed_by.sender, seal, ending, out)
            del worker.steps[record.clock]

    def staleness(self, worker: WorkerPart, push: HeldPush) -> int:
        """Updates of the block by others since the worker pulled it; 0 if it does not say."""
        if push.pulled_peer_version is None:
            return 0
        return max(
            0, self._state.peer_version(worker.incarnation, push.block) - push.pulled_peer_version
        )

    def reject_stale(self, worker: WorkerPart, step: StepPart, out: list[Effect]) -> None:
        """What is too stale takes no part in the step."""
        setting = self._state.schedule.at(step.clock)
        if setting.policy is not StalePolicy.REJECT:
            return
        for push in list(step.pushes.values()):
            tau = self.staleness(worker, push)
            if setting.rejects(tau):
                self._state.drop_push(step, worker, push.sequence)
                self.reject(worker, push, tau, out)

    def reject(self, worker: WorkerPart, push: HeldPush, tau: int, out: list[Effect]) -> None:
        """The push ends as too stale."""
        ending = Ending(Outcome.REJECTED, staleness=tau)
        self._state.end(worker, push.sender, push.sequence, ending, out)

    def scaled_folds(self, worker: WorkerPart, step: StepPart) -> list[Fold]:
        """The step's parts, together where what their staleness makes of them is the same."""
        setting = self._state.schedule.at(step.clock)
        if setting.policy not in (StalePolicy.DAMP, StalePolicy.DIVIDE):
            return [self.fold(worker, step)]
        factors = {
            push.block: setting.scale(self.staleness(worker, push)) for push in step.pushes.values()
        }
        whole = self.fold(worker, step)
        return [
            whole._replace(
                parts=tuple(part for part in whole.parts if factors[part[0]] == factor),
                scale=whole.scale * factor,
            )
            for factor in sorted(set(factors.values()), reverse=True)
        ]
