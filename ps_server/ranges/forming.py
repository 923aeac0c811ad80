"""BSP: an update forms when every member's step is in, or all but a few (SEMANTICS S1, S7).

An update of BSP is all gradients or all one edit (SEMANTICS S16). What each is, the seal says; so
every range of every table of a model, which have the same seals, comes to the same: who disagrees
ends the clock for all with nothing.

Invariants:
    RM-2  Update c is applied after update c - 1 and holds each member's step once, in rank order
          (with backup workers: each contributor's, in the record's order).

What it deliberately does not do: let seals take effect, or decide when to look (`update_gate`
does).
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.errors import AlreadyPast, EditRefused
from ps_core.ledger import Ending, Outcome
from ps_core.tables import Hyperparameters, OptimizerKind
from ps_server.ranges.events import Apply, Drop, Effect, Reduce
from ps_server.ranges.range_state import RangeState, StepPart, WorkerPart
from ps_server.ranges.records import Records
from ps_server.ranges.update_scales import UpdateScales


class Forming:
    """The update in the making of one table in one range.

    Attributes:
        wake_s: when it may form by time alone; None: time alone does not.
    """

    def __init__(self, state: RangeState, records: Records, scales: UpdateScales) -> None:
        self._state = state
        self._records = records
        self._scales = scales
        self.wake_s: float | None = None
        self._folded: list[int] = []  # backup workers: who is in it
        self._next_rank = 0  # ranks below it that belong to it are folded
        self._first: WorkerPart | None = None  # whose step says first whether it is an edit
        self._values: tuple[tuple[int, object], ...] = ()  # of the edit, as the first gave them
        self._of = "", b""  # what they are of
        self._dispute: EditRefused | None = None
        self._is_folded = False

    def form(self, now_s: float, out: list[Effect]) -> bool:
        """Fold what has its turn; form update `clock + 1` once every member is in (RM-2)."""
        state = self._state
        clock = state.clock + 1
        if state.unscaled is not None:
            return False
        if self._is_nobodys(clock):
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
        members = [rank for rank in state.ranks if state.is_member(rank, clock)]
        return self._form_record(clock, members, out)

    def _take(self, worker: WorkerPart, step: StepPart, out: list[Effect]) -> None:
        """The step has its turn in the update."""
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
            out.append(self._records.fold(worker, step))
            state.add_to_sum(step)
            self._is_folded = True

    def _disagreement(
        self, first: WorkerPart, worker: WorkerPart, clock: int
    ) -> EditRefused | None:
        steps = first.steps[clock], worker.steps[clock]
        edits = steps[0].edit, steps[1].edit
        arrays = steps[0].array, steps[1].array
        if edits[0] == edits[1] and arrays[0] == arrays[1]:
            return None
        before = f"before clock {clock} of table '{self._state.name}'"
        if all(edits):
            what = "loaded optimizer state" if any(arrays) else "changed parameters"
            return EditRefused(
                f"workers {first.rank} and {worker.rank} {what} to different values {before}"
            )
        does, other = (first, worker) if edits[0] else (worker, first)
        what = "loaded optimizer state" if does.steps[clock].array else "changed parameters"
        return EditRefused(f"worker {does.rank} {what} {before}, and worker {other.rank} did not")

    def _is_nobodys(self, clock: int) -> bool:
        """Whether all have left before, and somebody joined after it."""
        state = self._state
        return clock <= state.newest_join_clock and not any(
            state.is_member(rank, clock) for rank in state.ranks
        )

    def pass_clock(self, clock: int) -> None:
        """All up to `clock` is decided, for everyone."""
        state = self._state
        state.clock = state.formed_clock = clock
        state.end_sum()
        self._next_rank = 0
        self._first, self._values, self._dispute, self._is_folded = None, (), None, False
        for worker in state.workers.values():
            worker.done_clock = max(worker.done_clock, clock)

    def _form_without_slowest(self, clock: int, now_s: float, out: list[Effect]) -> bool:
        """BSP with backup workers: form the update once enough members are in, and those that come
        within the grace time.

        A step is folded as soon as it is in, whatever its rank: nobody knows which others will
        come, and what waits unfolded takes the room that they need. The record has the order.
        """
        state, setting = self._state, self._state.schedule.at(clock)
        members = [rank for rank in state.ranks if state.is_member(rank, clock)]
        for rank in members:
            worker = state.worker_at(rank, clock)
            if worker is None or worker.sealed_clock < clock or rank in self._folded:
                continue
            self._folded.append(rank)
            step = worker.steps[clock]
            if not step.skip and step.pushes:
                out.append(self._records.fold(worker, step))
                state.add_to_sum(step)
        ready_count = len(self._folded)
        if not ready_count or ready_count < len(members) - setting.backup_workers:
            return False
        if ready_count < len(members) and setting.grace_ms:
            if self.wake_s is None:
                self.wake_s = now_s + setting.grace_ms / 1000
            if now_s < self.wake_s:
                return False
        self.wake_s = None
        contributors, self._folded = self._folded, []
        return self._form_record(clock, contributors, out)

    def _form_record(self, clock: int, ranks: Sequence[int], out: list[Effect]) -> bool:
        """Those that take part are in; False if there is none."""
        state = self._state
        if self._dispute is not None or (self._first is not None and self._first.steps[clock].edit):
            self._form_edit(clock, ranks, out)
            return True
        contributors = []
        blocks: set[int] = set()
        numbers: Hyperparameters | None = None
        is_clipped = False
        for worker in [worker for rank in ranks if (worker := state.worker_at(rank, clock))]:
            step = worker.steps[clock]
            contributors.append(self._records.contributor(worker, step))
            if not step.skip:
                blocks.update(step.blocks)
                numbers = step.numbers if numbers is None else numbers
                is_clipped = is_clipped or step.sealed_by.terms.clip_scale is not None
        if not contributors:
            return False
        numbers = state.table.numbers.merged(()) if numbers is None else numbers
        record = self._records.record(clock, contributors, numbers, tuple(sorted(blocks)))
        if is_clipped:
            state.unscaled = record
            out.append(Reduce(record))
            return self.drop_orphan(out)
        # A sum of nothing is a value too: workers that read clock c of an AGGREGATE table get it.
        if record.blocks or state.table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            out.append(Apply(record))
        self._records.commit(record, out)
        self.pass_clock(clock)
        return True

    def _form_edit(self, clock: int, ranks: Sequence[int], out: list[Effect]) -> None:
        """All workers mean the same edit: its values replace those that are there. Or they do not:
        nothing does.
        """
        workers = [worker for rank in ranks if (worker := self._state.worker_at(rank, clock))]
        for worker in workers if self._dispute is not None else ():
            step = worker.steps[clock]
            step.edit, step.skip, step.problem = b"", True, self._dispute
        contributors = [self._records.contributor(w, w.steps[clock]) for w in workers]
        if self._dispute is None:
            self._records.assign(clock, contributors, self._values, out, of=self._of)
        else:
            record = self._records.record(clock, contributors, (), ())
            if self._is_folded:
                out.append(Drop(record))
            self._records.commit(record, out)
        self.pass_clock(clock)

    def drop_orphan(self, out: list[Effect]) -> bool:
        """Whether the update that waits for its scale was dropped, since nobody can say it."""
        orphan = self._scales.orphan()
        if orphan is None:
            return False
        out.append(Drop(orphan))
        self.pass_clock(orphan.clock)
        return True

    def discard(self, worker: WorkerPart, step: StepPart, out: list[Effect]) -> None:
        """The update has formed without this step; its worker goes on from the newest clock."""
        state = self._state
        newest = max(state.clock, worker.done_clock, step.clock)
        past = AlreadyPast(
            f"update {step.clock} of table '{state.name}' has formed without worker "
            f"{worker.rank}; range {state.range_id} is at clock {newest}",
            clock=newest,
        )
        ending = Ending(Outcome.DISCARDED, past, squares=self._scales.squares_of_late(step))
        for push in step.pushes.values():
            state.unstage(step, worker, push)
        for sequence in sorted(step.pushes):
            state.end(worker, step.pushes[sequence].sender, sequence, ending, out)
        seal = step.sealed_by
        state.end(worker, seal.sender, seal.sequence, ending, out)
        del worker.steps[step.clock]
