"""A backup's knowledge of one table in one range, and the deltas that change it (SEMANTICS S8).

    RangeState --facts--> RangeDelta --record--> ShardCopy --restored--> a new primary's RangeState

A backup decides nothing. It has no steps that wait at the gate, seals that formed nothing yet, nor
pulls: their senders send them again.

Invariants:
    PC-1  A shard that is restored from its copy answers every entry that the primary has answered
          for good as the primary did, and decides every other one as the primary might have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_core.errors import InvalidKeys, UpdateFailed
from ps_core.keys import Incarnation
from ps_core.ledger import Ending, Ledger
from ps_core.sliced_work import Work
from ps_core.tables.elements import InitializerKind
from ps_core.tables.table import Table
from ps_server.ranges.events import Effect, Record, ReplyTo
from ps_server.ranges.range_state import RangeState, RangeWorker, UpdateScale
from ps_server.ranges.schedule import Schedule, Settings


class RangeFacts(NamedTuple):
    """Facts of a shard that belong to no worker; see `RangeState` and `Schedule`."""

    clock: int
    formed_clock: int
    changed_clock: int
    newest_join_clock: int
    update_count: int
    record_count: int
    initialized: bool
    unscaled: Record | None
    squares: tuple[tuple[int, tuple[float, ...]], ...]
    said: UpdateScale | None
    settings: Settings
    change_number: int
    prepared: int
    hold_point: int | None
    minds_reads: bool
    failure: UpdateFailed | None
    past_reached_clock: int = 0
    past_stepped_clock: int = 0
    taken: tuple[int, int] = (0, 0)
    is_for_join: bool = False


class WorkerFacts(NamedTuple):
    """Facts of a worker in a shard. `sealed_clock`: its newest decided seal (later seals come
    again). `left_clock`: its last clock, if that is decided. `confirmed`: the sequence up to which
    it has seen outcomes. `predecessor`: the incarnation that had its rank before and is still
    known; 0: it was forgotten; None: there was none.
    """

    incarnation: Incarnation
    rank: int
    sealed_clock: int
    done_clock: int
    left_clock: int | None
    joined_clock: int
    confirmed: int
    final_seal_clock: int | None = None
    predecessor: Incarnation | None = None


class RangeDelta(NamedTuple):
    """Changes that an event made to a shard: all its facts, ended entries, updates that count."""

    facts: RangeFacts
    workers: tuple[WorkerFacts, ...]
    endings: tuple[tuple[Incarnation, int, Ending], ...]
    counted: tuple[Record, ...]


@dataclass(slots=True)
class WorkerCopy:
    """A worker, at a backup."""

    facts: WorkerFacts
    ledger: Ledger = field(default_factory=Ledger)
    own_updates: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class ShardCopy:
    """A shard, at a backup."""

    facts: RangeFacts
    versions: dict[int, int]
    workers: dict[Incarnation, WorkerCopy] = field(default_factory=dict)

    def twin(self) -> ShardCopy:
        """A copy that shares nothing."""
        workers = {
            incarnation: WorkerCopy(w.facts, w.ledger.copy(), dict(w.own_updates))
            for incarnation, w in self.workers.items()
        }
        return ShardCopy(self.facts, dict(self.versions), workers)

    def take(self, delta: RangeDelta) -> None:
        """Apply a delta.

        Raises:
            InvalidKeys: its worker or block is not known here; the copy is of no use from then on.
        """
        self.facts = delta.facts
        for facts in delta.workers:
            worker = self.workers.get(facts.incarnation)
            if worker is None:
                worker = self.workers[facts.incarnation] = WorkerCopy(facts)
            worker.facts = facts
        for incarnation, sequence, ending in delta.endings:
            ledger = self._worker(incarnation).ledger
            if not ledger.has_ended(sequence):  # else it is a repeated answer
                ledger.end(sequence, ending)
        for worker in self.workers.values():
            worker.ledger.confirm(worker.facts.confirmed)
        for record in delta.counted:
            self._count(record)
        for facts in delta.workers:
            if facts.predecessor is not None:
                self._forget_before(facts)

    def _forget_before(self, facts: WorkerFacts) -> None:
        """Forget the earlier workers of the same rank, except the chain of predecessors."""
        kept = {facts.incarnation}
        before = facts.predecessor
        while before:
            kept.add(before)
            found = self.workers.get(before)
            before = None if found is None else found.facts.predecessor
        for worker in [w.facts for w in self.workers.values() if w.facts.rank == facts.rank]:
            if worker.incarnation < facts.incarnation and worker.incarnation not in kept:
                del self.workers[worker.incarnation]

    def _worker(self, incarnation: Incarnation) -> WorkerCopy:
        worker = self.workers.get(incarnation)
        if worker is None:
            raise InvalidKeys(f"a record is of worker {incarnation}, of which no fact has come")
        return worker

    def _count(self, record: Record) -> None:
        for block in record.blocks:
            if block not in self.versions:
                raise InvalidKeys(f"a record counts an update of block {block}, which is not here")
            self.versions[block] += 1
        for contributor in record.summed_by or record.contributors:
            if not contributor.skip:
                own_updates = self._worker(contributor.incarnation).own_updates
                for block in record.blocks:
                    own_updates[block] = own_updates.get(block, 0) + 1


def fresh_copy(table: Table, blocks: Sequence[int]) -> ShardCopy:
    """The copy of a shard before its first decision."""
    schedule = Schedule(table)
    is_restored, first = table.restored_clock is not None, table.restored_clock or 0
    kind = table.spec.initializer.kind
    initialized = not is_restored and kind is not InitializerKind.FROM_RANK_ZERO
    facts = RangeFacts(
        first, first, first, 0, 0, 0, initialized, None, (), None, schedule.settings,
        schedule.number, 0, None, True, None,
    )  # fmt: skip
    return ShardCopy(facts, dict.fromkeys(blocks, 0))


def facts_of(state: RangeState) -> RangeFacts:
    schedule = state.schedule
    return RangeFacts(
        state.clock,
        state.formed_clock,
        state.changed_clock,
        state.newest_join_clock,
        state.update_count,
        state.record_count,
        state.initialized,
        state.unscaled,
        tuple(state.squares.items()),
        state.said,
        schedule.settings,
        schedule.number,
        schedule.prepared,
        schedule.hold_point,
        schedule.minds_reads,
        state.failure,
        state.past_reached_clock,
        state.past_stepped_clock,
        schedule.taken,
        schedule.is_for_join,
    )


def _facts_of(worker: RangeWorker, state: RangeState) -> WorkerFacts:
    sealed = min(worker.sealed_clock, worker.done_clock)
    # A worker repeats its final seal unless it was answered.
    left = None if worker.holds_last_seal else worker.left_clock
    if left is not None and state.has_ended(worker):  # it sends nothing again
        left = min(left, sealed)
    before = Incarnation(0) if worker.predecessor is None else worker.predecessor.incarnation
    return WorkerFacts(
        worker.incarnation,
        worker.rank,
        sealed,
        worker.done_clock,
        left,
        worker.joined_clock,
        worker.ledger.confirmed,
        None if left is None else worker.final_seal_clock,
        None if worker.is_first else before,
    )


def delta_of(state: RangeState, effects: Iterable[Effect], counted: Iterable[Record]) -> RangeDelta:
    """The delta of an event, from the state after it and its effects."""
    endings = tuple(
        (effect.sender.incarnation, effect.sequence, effect.ending)
        for effect in effects
        if isinstance(effect, ReplyTo) and effect.ending is not None
    )
    workers = tuple([_facts_of(worker, state) for worker in state.workers.values()])
    return RangeDelta(facts_of(state), workers, endings, tuple(counted))


def copying(state: RangeState) -> Work[ShardCopy]:
    """A copy for a new backup; nothing of it is shared with the shard."""
    workers = {}
    for incarnation, worker in state.workers.items():
        copy = WorkerCopy(_facts_of(worker, state), worker.ledger.copy(), dict(worker.own_updates))
        workers[incarnation] = copy
        yield
    return ShardCopy(facts_of(state), dict(state.versions), workers)


def restore(copy: ShardCopy, state: RangeState, now_s: float) -> None:
    """Restore a fresh state from the copy, which is used up."""
    facts = copy.facts
    state.clock, state.formed_clock = facts.clock, facts.formed_clock
    state.changed_clock, state.newest_join_clock = facts.changed_clock, facts.newest_join_clock
    state.update_count, state.record_count = facts.update_count, facts.record_count
    state.initialized, state.failure = facts.initialized, facts.failure
    state.unscaled, state.versions = facts.unscaled, copy.versions
    state.squares, state.said = dict(facts.squares), facts.said
    state.past_reached_clock = facts.past_reached_clock
    state.past_stepped_clock = facts.past_stepped_clock
    state.schedule.settings, state.schedule.number = facts.settings, facts.change_number
    state.schedule.restore(
        facts.prepared,
        facts.hold_point,
        facts.taken,
        minds_reads=facts.minds_reads,
        is_for_join=facts.is_for_join,
    )
    for worker in sorted(copy.workers.values(), key=lambda w: w.facts.incarnation):
        _restore_worker(worker, state, now_s)
    # A worker may have been answered the pull for the step after its newest; any worker, the pull
    # for the first step.
    begun = state.first_clock if state.initialized else -1
    done_clocks = [worker.done_clock for worker in state.workers.values()]
    done_clock = max([begun, state.past_reached_clock or begun, *done_clocks])
    # Only a hold for another setting is beyond all that was pulled for.
    is_bound = facts.minds_reads and not facts.is_for_join
    held = state.schedule.hold_point if is_bound else None
    state.read_clock = done_clock + 1 if held is None else min(done_clock + 1, held)


def _restore_worker(copy: WorkerCopy, state: RangeState, now_s: float) -> None:
    facts = copy.facts
    worker = RangeWorker(facts.rank, facts.incarnation, facts.sealed_clock, facts.done_clock, now_s)
    worker.ledger, worker.own_updates = copy.ledger, copy.own_updates
    worker.left_clock, worker.joined_clock = facts.left_clock, facts.joined_clock
    worker.final_seal_clock, worker.is_first = facts.final_seal_clock, facts.predecessor is None
    before = state.by_rank.get(facts.rank)
    if before is not None:
        worker.is_first, state.replaced[before.incarnation] = False, before
        worker.predecessor = before if facts.joined_clock else None
    state.workers[facts.incarnation] = worker
    state.by_rank[facts.rank] = worker
    state.ranks = tuple(sorted({*state.ranks, facts.rank}))
