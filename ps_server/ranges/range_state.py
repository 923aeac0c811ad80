"""The state of a range machine: workers, their steps, clocks and versions of one (range, table).

Invariants:
    RM-5  A step in effect has a seal.
    RM-1  Each sequence of an incarnation is unseen, held, missing (given back) or ended; never two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ps_core.cluster_view import Node, NodeState
from ps_core.consistency import Mode, StalePolicy
from ps_core.errors import EditRefused, InvariantViolation, PushpullError, UpdateFailed
from ps_core.keys import Incarnation, RangeId
from ps_core.ledger import Ending, Ledger, ReplyKind
from ps_core.tables.elements import InitializerKind
from ps_core.tables.optimizers import Hyperparameters
from ps_core.tables.table import Table
from ps_server.ranges.events import Compensation, Effect, Record, ReplyTo, SealEvent, Sender, StepId
from ps_server.ranges.schedule import ReachedClocks, Schedule


class StagingMemory(Protocol):
    """The staging memory of a table, as its ranges use it."""

    def admit(self, step: StepId, byte_count: int, effects: list[Effect]) -> bool:
        """True if the payload may be staged; effects give other steps back, in every range."""

    def release(self, step: StepId, byte_count: int) -> None:
        """A payload is no longer staged."""

    def add_sum(self, byte_count: int) -> None:
        """Count bytes that are no longer staged as a sum, or as more of one."""

    def end_sum(self, byte_count: int) -> None:
        """A sum is there no more."""


@dataclass(slots=True, eq=False)
class HeldPush:
    """A held push. `payload` is None once it is accumulated or dropped."""

    sender: Sender
    sequence: int
    block: int
    byte_count: int
    payload: object | None
    pulled_peer_version: int | None
    is_eager: bool = False
    is_assign: bool = False


@dataclass(slots=True, eq=False)
class PendingStep:
    """One worker's step, before its outcome."""

    clock: int
    pushes: dict[int, HeldPush] = field(default_factory=dict)  # by sequence
    blocks: dict[int, int] = field(default_factory=dict)  # block -> sequence
    missing: dict[int, Sender] = field(default_factory=dict)  # given back, by sequence
    invalid: dict[int, bool] = field(default_factory=dict)  # by sequence: True for an ASSIGN
    has_values: bool = False  # an ASSIGN was held, perhaps one that was replaced since
    seal: SealEvent | None = None
    hyperparameters: Hyperparameters = ()  # the seal's, over the table's own
    skip: bool = False
    eager: Hyperparameters | None = None
    edit: bytes = b""  # that a seal in effect names; empty if the step is none, or is not taken
    array: str = ""  # of optimizer state, that the edit replaces; empty: it replaces values
    problem: EditRefused | None = None  # of the step's entries, if nothing of it is taken

    @property
    def invalid_values(self) -> list[int]:
        """The invalid pushes that are ASSIGN: an edit has no other pushes."""
        return [sequence for sequence, is_assign in self.invalid.items() if is_assign]

    @property
    def of(self) -> tuple[str, bytes]:
        """The `of` of the edit's record."""
        return (self.array, self.edit) if self.array else ("", b"")

    @property
    def edit_words(self) -> str:
        return "loaded optimizer state" if self.array else "changed parameters"

    @property
    def sealed_by(self) -> SealEvent:
        if self.seal is None:
            raise InvariantViolation("RM-5", f"clock {self.clock} is in effect without a seal")
        return self.seal


@dataclass(slots=True, eq=False)
class RangeWorker:
    """A worker in this range. `sealed_clock`: its newest seal in effect. `done_clock`: up to here
    its steps are recorded, or updates formed without them. `held`: the clock of each held sequence.
    `own_updates`: the updates of each block in which it took part. `left_clock`: its last clock.
    """

    rank: int
    incarnation: Incarnation
    sealed_clock: int
    done_clock: int
    last_heard_s: float
    ledger: Ledger = field(default_factory=Ledger)
    steps: dict[int, PendingStep] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    own_updates: dict[int, int] = field(default_factory=dict)
    left_clock: int | None = None
    final_seal_clock: int | None = None  # of the seal by which it left, if that ended no step
    joined_clock: int = 0  # it takes part in later updates; above 0 if it joined in the middle
    predecessor: RangeWorker | None = None  # at its rank; its steps count up to `joined_clock`
    is_first: bool = True

    @property
    def has_left(self) -> bool:
        """True if it has left this table and has no open steps."""
        left = self.left_clock
        return left is not None and left <= self.sealed_clock and not self.steps

    @property
    def stepped_clock(self) -> int:
        """The highest clock of its steps that took effect, or that updates formed without."""
        clock = max(self.sealed_clock, self.done_clock)
        return clock - (self.final_seal_clock == clock)

    @property
    def holds_last_seal(self) -> bool:
        """True if the seal by which it left has no outcome yet."""
        for step in self.steps.values():  # noqa: SIM110 - asked of each worker at each record
            if step.seal is not None and step.seal.terms.last:
                return True
        return False

    @property
    def gap(self) -> int | None:
        """The lowest missing sequence that a seal waits for; None if no seal waits."""
        waiting = [
            step.seal.sequence
            for step in self.steps.values()
            if step.seal is not None and step.clock > self.sealed_clock
        ]
        for number in range(self.ledger.low_water + 1, min(waiting, default=0)):
            if number not in self.held and not self.ledger.has_ended(number):
                return number
        return None

    @property
    def gap_words(self) -> str:
        """Words for the missing sequence that its next seal waits for; empty if none is missing."""
        gap = self.gap
        return "" if gap is None else f"waits for sequence {gap} of worker {self.rank}"

    def arrived(self, sequence: int) -> None:
        """An entry that was given back has come again, or has ended (RM-1)."""
        for step in self.steps.values():
            if step.missing:
                step.missing.pop(sequence, None)


class UpdateScale(NamedTuple):
    """The scale by which an update was applied, and the rank that said it."""

    clock: int
    scale: float
    rank: int


class RangeState:
    """The state of one table in one range, and the small changes that its machines share."""

    def __init__(
        self,
        table: Table,
        range_id: RangeId,
        blocks: tuple[int, ...],
        worker_count: int,
        staging: StagingMemory,
        versions: dict[int, int] | None = None,
    ) -> None:
        """`versions`: 0 for each block, if the caller has made that mapping."""
        self.table = table
        self.name = table.spec.name
        self.schedule = Schedule(table)
        self.range_id = range_id
        self.blocks = blocks
        is_restored = table.restored_clock is not None
        self.first_clock = table.restored_clock or 0  # the clock at which it and all workers begin
        self.initialized = (
            not is_restored and table.spec.initializer.kind is not InitializerKind.FROM_RANK_ZERO
        )
        self.clock = self.first_clock
        self.formed_clock = self.first_clock
        self.read_clock = self.first_clock  # the highest clock that a worker has pulled for
        self.newest_join_clock = 0
        self.changed_clock = self.first_clock  # the highest clock in the values
        self.update_count = 0
        self.record_count = 0
        self.edit_count = 0  # since this server became primary: no other epoch compares it
        self.versions = dict.fromkeys(blocks, 0) if versions is None else versions
        self.worker_count = worker_count
        self.ranks: Sequence[int] = range(worker_count)  # and ranks that joined beyond these
        self.staging = staging
        self.workers: dict[Incarnation, RangeWorker] = {}
        self.by_rank: dict[int, RangeWorker] = {}
        self.replaced: dict[Incarnation, RangeWorker] = {}  # no longer in `by_rank`
        self.past_reached_clock = self.past_stepped_clock = 0  # by workers that were forgotten
        self.ended: dict[int, Node] = {}  # by rank: left with something unsaid, or gone; unreplaced
        self.unscaled: Record | None = None  # BSP: the sum of clock + 1, which waits for its scale
        self.squares: dict[int, tuple[float, ...]] = {}  # of the newest such sums, by clock
        self.said: UpdateScale | None = None  # the newest scale
        self._summed: dict[int, int] = {}  # bytes of each block of the sum
        self.failure: UpdateFailed | None = None  # of any range of the table on this server

    @property
    def awaits_rank_zero(self) -> bool:
        return not self.initialized and self.table.restored_clock is None

    @property
    def awaits_checkpoint(self) -> bool:
        """True if its values are to come from a checkpoint."""
        is_restored = self.table.restored_clock is not None
        return is_restored and not self.initialized and self.failure is None

    @property
    def reached_clock(self) -> int:
        reached = max(self.clock, self._unscaled_clock, self.changed_clock, self.past_reached_clock)
        for worker in self.workers.values():
            reached = max(reached, worker.sealed_clock, worker.done_clock)
        return reached

    @property
    def stepped_clock(self) -> int:
        """The highest clock of a step that has taken effect. A final seal is none: its step was not
        taken, and the other workers may never take it.
        """
        formed = max(self.formed_clock, self._unscaled_clock)
        reached = max(formed, self.changed_clock, self.past_stepped_clock)
        for worker in self.workers.values():
            reached = max(reached, worker.stepped_clock)
        return reached

    @property
    def _unscaled_clock(self) -> int:
        """The clock of a sum that waits for its scale, or 0. Who takes the range over has it, and
        hears of its seals only when workers send them again.
        """
        return 0 if self.unscaled is None else self.unscaled.clock

    @property
    def reached(self) -> ReachedClocks:
        by_steps = self.stepped_clock
        by_anything = max(self.reached_clock, self.read_clock)
        return ReachedClocks(by_steps, max(by_steps, self.clock), by_anything)

    def compensation(self, incarnation: Incarnation, clock: int) -> Compensation | None:
        """Delay compensation of this worker's gradients of `clock`, if the setting has it."""
        setting = self.schedule.at(clock)
        if setting.policy is not StalePolicy.COMPENSATE:
            return None
        return Compensation(incarnation, setting.strength, setting.adaptive)

    def takes_edits(self, clock: int) -> bool:
        """True if a step of that clock is one of all workers, which can then edit values."""
        setting = self.schedule.at(clock)
        is_shared = setting.mode is Mode.BSP and not setting.backup_workers
        return is_shared or (len(self.ranks) == 1 and setting.mode is not Mode.BSP)

    def slowest_clock(self) -> int:
        """The clock up to which everything is decided for each worker that has not left; if all
        have left, the highest of theirs. One never heard of has done what formed without it.
        """
        workers = [self.by_rank.get(rank) for rank in self.ranks]
        clocks = [
            self.formed_clock if worker is None else worker.done_clock
            for worker in workers
            if worker is None or worker.left_clock is None
        ]
        if clocks:
            return min(clocks)
        return max((worker.done_clock for worker in workers if worker is not None), default=0)

    def is_member(self, rank: int, clock: int) -> bool:
        worker = self.by_rank.get(rank)
        if worker is not None and worker.joined_clock:
            worker = self.worker_at(rank, clock)
        return worker is None or (
            clock > worker.joined_clock
            and (worker.left_clock is None or clock <= worker.left_clock)
        )

    def is_to_join(self, rank: int, incarnation: Incarnation) -> bool:
        """True if an unknown worker comes by a change: in another's place, or beyond the first
        ranks, which everybody waits for from the start.
        """
        holder = self.by_rank.get(rank)
        return rank >= self.worker_count if holder is None else holder.incarnation < incarnation

    def worker_at(self, rank: int, clock: int) -> RangeWorker | None:
        """The worker that has or had the rank at a clock; None if none was ever heard of."""
        worker = self.by_rank.get(rank)
        while worker is not None and clock <= worker.joined_clock and worker.predecessor:
            worker = worker.predecessor
        return worker

    def forget_past(self) -> None:
        """Forget replaced workers once all that they sealed is decided: the worker with their rank
        fences them, and no later update waits for them.
        """
        in_sum = self.summed_incarnations
        for incarnation, worker in list(self.replaced.items()):
            left = worker.left_clock
            if incarnation in in_sum:  # it becomes an update with its scale
                continue
            if worker.steps or left is None or left > worker.done_clock:
                continue
            clock = max(worker.sealed_clock, worker.done_clock)
            self.past_reached_clock = max(self.past_reached_clock, clock)
            self.past_stepped_clock = max(self.past_stepped_clock, worker.stepped_clock)
            del self.replaced[incarnation], self.workers[incarnation]
            for other in (*self.replaced.values(), self.by_rank[worker.rank]):
                if other.predecessor is worker:
                    other.predecessor = worker.predecessor

    @property
    def summed_incarnations(self) -> set[Incarnation]:
        """The workers whose steps are in the sum that waits for its scale."""
        summed = () if self.unscaled is None else self.unscaled.contributors
        return {contributor.incarnation for contributor in summed}

    def has_ended(self, worker: RangeWorker) -> bool:
        """True if the worker's membership has ended, whether its rank was given anew or not."""
        return worker.rank in self.ended or worker is not self.by_rank.get(worker.rank)

    def gone_count(self, clock: int) -> int:
        gone = (r for r, node in self.ended.items() if node.state is NodeState.GONE)
        return sum(not self.is_member(rank, clock) for rank in gone)

    def worker(self, incarnation: Incarnation | None) -> RangeWorker | None:
        """The worker of an incarnation; None if it is unknown here, or no worker's."""
        return None if incarnation is None else self.workers.get(incarnation)

    def gaps(self) -> list[str]:
        """Seals that wait for a missing sequence, as sentences."""
        place = f"in table '{self.name}' (range {self.range_id})"
        return [
            f"the seal of worker {worker.rank} {place} {words}"
            for worker in self.by_rank.values()
            if (words := worker.gap_words)
        ]

    def drop_push(self, step: PendingStep, worker: RangeWorker, sequence: int) -> None:
        """Forget a held push that has not been accumulated."""
        push = step.pushes.pop(sequence, None)
        if push is None:
            return
        self.unstage(step, worker, push)
        if step.blocks.get(push.block) == sequence:
            del step.blocks[push.block]
        worker.held.pop(sequence, None)

    def unstage(self, step: PendingStep, worker: RangeWorker, push: HeldPush) -> None:
        """Release the payload and its staging memory."""
        if push.payload is not None:
            push.payload = None
            self.staging.release(StepId(step.clock, worker.rank), push.byte_count)

    def unstage_step(self, step: PendingStep, worker: RangeWorker) -> None:
        """Release all payloads of the step."""
        byte_count = 0
        for push in step.pushes.values():
            if push.payload is not None:
                push.payload = None
                byte_count += push.byte_count
        self.staging.release(StepId(step.clock, worker.rank), byte_count)

    def add_to_sum(self, step: PendingStep) -> None:
        """Count the step's released bytes in the sum of its clock (BSP): those of a block once,
        but the rows of each worker.
        """
        summed, are_rows, more = self._summed, self.table.spec.rows is not None, 0
        for push in step.pushes.values():
            if are_rows or push.block not in summed:
                summed[push.block] = summed.get(push.block, 0) + push.byte_count
                more += push.byte_count
        self.staging.add_sum(more)

    @property
    def summed_bytes(self) -> int:
        """Bytes of the sum that is being accumulated."""
        return sum(self._summed.values())

    def end_sum(self) -> None:
        """Release the bytes of the sum, which was applied or dropped."""
        if self._summed:
            self.staging.end_sum(self.summed_bytes)
            self._summed = {}

    def unstage_all(self) -> None:
        self.end_sum()
        for worker in self.workers.values():
            for step in worker.steps.values():
                self.unstage_step(step, worker)

    def end_step(
        self, step: PendingStep, worker: RangeWorker, ending: Ending, out: list[Effect]
    ) -> None:
        """Release the payloads of a step, and end its pushes in order."""
        self.unstage_step(step, worker)
        pushes = [step.pushes[sequence] for sequence in sorted(step.pushes)]
        self.end_pushes(worker, pushes, ending, out)

    def end(
        self, worker: RangeWorker, sender: Sender, sequence: int, ending: Ending, out: list[Effect]
    ) -> None:
        """End the sequence, in the ledger and for its sender."""
        worker.held.pop(sequence, None)
        worker.arrived(sequence)
        worker.ledger.end(sequence, ending)
        self.reply(out, sender, ReplyKind.COMMITTED, sequence, ending=ending)

    def end_pushes(
        self, worker: RangeWorker, pushes: Sequence[HeldPush], ending: Ending, out: list[Effect]
    ) -> None:
        """`end` for each, in this order; a step has thousands."""
        held, table_id, range_id = worker.held, self.table.table_id, self.range_id
        kind = ReplyKind.COMMITTED
        worker.ledger.end_all([push.sequence for push in pushes], ending)
        for push in pushes:
            sequence = push.sequence
            held.pop(sequence, None)
            out.append(ReplyTo(push.sender, kind, table_id, range_id, sequence, ending))
        for step in worker.steps.values():
            if step.missing:
                for push in pushes:
                    step.missing.pop(push.sequence, None)

    def reply(
        self,
        out: list[Effect],
        sender: Sender,
        kind: ReplyKind,
        sequence: int,
        *,
        ending: Ending | None = None,
        error: PushpullError | None = None,
    ) -> None:
        out.append(
            ReplyTo(sender, kind, self.table.table_id, self.range_id, sequence, ending, error)
        )
