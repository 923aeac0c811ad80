"""Workers that were replaced, at a range's machine, at its backups and at its next primary (S6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ps_core.change import Join
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import Consistency, Mode
from ps_core.errors import Fenced, InvalidConfig, InvalidTensor
from ps_core.keys import Incarnation, NodeId
from ps_core.ledger import Outcome
from ps_core.sliced_work import at_once
from ps_server.ranges.events import (
    Apply,
    Effect,
    PullEvent,
    PushEvent,
    Record,
    RefusePull,
    SealEvent,
    SealTerms,
    Sender,
)
from ps_server.ranges.range_copy import ShardCopy, copying, delta_of, fresh_copy, restore
from ps_server.ranges.read_gate import ASSIGN_WITHIN_S
from ps_server.ranges.schedule import copies_cut
from tests.unit.machine_harness import PLACE, Bench, make_table, outcomes, problem

FIRST, SECOND, THIRD = Incarnation(1000), Incarnation(2000), Incarnation(3000)
"""Who has rank 0, one after the other; rank 1 is incarnation 1001 all the time."""


def ended(incarnation: Incarnation, state: NodeState = NodeState.GONE) -> Node:
    """A worker of rank 0 whose membership has ended."""
    return Node(NodeId(10), incarnation, Role.WORKER, 0, "", state, 30_000)


def join(at: Bench, incarnation: Incarnation, after_clock: int) -> None:
    """It has rank 0 from now on."""
    at.table = replace(at.table, joins=(Join(0, incarnation, after_clock),))
    at.observe(at.table)


def moved(at: Bench, *gone: Incarnation, state: NodeState = NodeState.GONE) -> Bench:
    """The range at its next primary, which has the same view."""
    other = Bench(at.table, workers=at.workers)
    restore(at_once(copying(at.machine.state)), other.machine.state, at.now_s)
    for incarnation in gone:
        other.gone(ended(incarnation, state))
    other.observe(at.table)
    return other


def held() -> Bench:
    """BSP: the first worker has sealed clock 1, died and been replaced; rank 1 is slow."""
    at = Bench(make_table(), workers=2)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    at.gone(ended(FIRST))
    join(at, SECOND, 1)
    return at


def step(at: Bench, sender: Sender, first: int, clock: int, *, skip: bool = False) -> list[Effect]:
    """A push and its seal."""
    push = PushEvent(PLACE, sender, first, clock, 0, 256, (sender.rank, first))
    seal = SealEvent(PLACE, sender, first + 1, SealTerms(clock, skip=skip))
    return at._note(at.machine.entry(push, at.now_s)) + at._note(at.machine.entry(seal, at.now_s))


def test_what_it_sealed_counts_where_it_is_held() -> None:
    at = held()
    effects = step(at, at.sender(1), 1, 1)
    (record,) = [effect.record for effect in effects if isinstance(effect, Apply)]
    assert [part.incarnation for part in record.contributors] == [FIRST, 1001]


def test_what_it_sealed_is_waited_for_at_no_next_primary() -> None:
    """Nobody sends it again."""
    at = moved(held(), FIRST)
    effects = step(at, at.sender(1), 1, 1)
    (record,) = [effect.record for effect in effects if isinstance(effect, Apply)]
    assert [part.incarnation for part in record.contributors] == [1001]


def test_a_backup_knows_when_it_left_as_far_as_that_is_decided() -> None:
    at = held()
    assert at_once(copying(at.machine.state)).workers[FIRST].facts.left_clock == 0
    step(at, at.sender(1), 1, 1)
    at = Bench(make_table(), workers=2)
    for rank in range(2):
        step(at, at.sender(rank), 1, 1)
    at.gone(ended(FIRST))
    assert at_once(copying(at.machine.state)).workers[FIRST].facts.left_clock == 1


def test_a_copy_of_before_its_end_is_enough() -> None:
    """The next primary was told that it had been replaced, and not when it left."""
    at = held()
    copy = at_once(copying(at.machine.state))
    copy.workers[FIRST].facts = copy.workers[FIRST].facts._replace(left_clock=1)
    other = Bench(at.table, workers=2)
    restore(copy, other.machine.state, at.now_s)
    other.gone(ended(FIRST))
    step(other, other.sender(1), 1, 1)
    assert other.machine.state.clock == 1


def test_who_left_while_its_step_waited_is_not_waited_for_at_the_next_primary() -> None:
    """Its goodbye was answered, and its step before that was not: it would have to come again."""
    at = Bench(make_table(), workers=2)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    at.seal(0, 3, 2, skip=True, last=True)
    assert set(outcomes(at.effects)) == {(0, 3)}
    other = moved(at, FIRST, state=NodeState.LEFT)
    step(other, other.sender(1), 1, 1)
    assert other.machine.state.clock == 1


def test_a_goodbye_is_no_step_at_the_next_primary_either() -> None:
    at = Bench(make_table(Consistency(Mode.SSP, staleness=2)), workers=2)
    for rank in range(2):
        at.push(rank, 1, 1)
        at.seal(rank, 2, 1)
    at.seal(0, 3, 2, skip=True, last=True)
    assert at.machine.state.stepped_clock == moved(at).machine.state.stepped_clock == 1
    assert at.machine.state.reached_clock == moved(at).machine.state.reached_clock == 2


def test_it_is_forgotten_once_all_of_it_is_decided() -> None:
    at = held()
    backup = at_once(copying(at.machine.state))
    assert set(at.machine.state.workers) == {FIRST, SECOND}
    backup.take(delta_of(at.machine.state, (), ()))
    assert set(backup.workers) == {FIRST, SECOND}  # its step may still be decided
    effects = step(at, at.sender(1), 1, 1)
    backup.take(delta_of(at.machine.state, effects, counted(effects)))
    assert set(at.machine.state.workers) == set(backup.workers) == {SECOND, 1001}
    assert problem(step(at, Sender(FIRST, 0, 0), 3, 2)[:1]).code == Fenced.code


def counted(effects: list[Effect]) -> list[Record]:
    """What counts as updates."""
    return [effect.record for effect in effects if isinstance(effect, Apply)]


def test_however_many_there_were_a_range_keeps_those_who_are_there() -> None:
    """And knows how far they had come, though they skipped their steps."""
    at = Bench(make_table(Mode.ASP), workers=2)
    backup = fresh_copy(at.table, range(4))
    for number in range(20):
        incarnation = Incarnation(1000 * (number + 1))
        effects = step(at, Sender(incarnation, 0, 0), 1, number + 1, skip=True)
        backup.take(delta_of(at.machine.state, effects, counted(effects)))
        at.gone(ended(incarnation))
        join(at, Incarnation(1000 * (number + 2)), at.machine.state.reached_clock)
        assert at.machine.state.reached_clock == at.machine.state.stepped_clock == number + 1
    backup.take(delta_of(at.machine.state, (), ()))
    assert list(at.machine.state.workers) == list(backup.workers) == [21_000]
    assert clocks(restored(at, backup)) == clocks(at) == (20, 20)


def clocks(at: Bench) -> tuple[int, int]:
    """How far its workers had come."""
    return at.machine.state.reached_clock, at.machine.state.stepped_clock


def restored(at: Bench, copy: ShardCopy) -> Bench:
    """The range as the copy has it."""
    other = Bench(at.table, workers=at.workers)
    restore(copy, other.machine.state, at.now_s)
    return other


def test_one_between_two_is_forgotten_alone() -> None:
    """The first one's step waits; the second died before it took any."""
    at = held()
    at.gone(ended(SECOND))
    join(at, THIRD, 2)
    assert set(at.machine.state.workers) == {FIRST, THIRD}
    backup = at_once(copying(at.machine.state))
    backup.workers[SECOND] = backup.workers[FIRST]
    backup.workers[SECOND].facts = backup.workers[SECOND].facts._replace(incarnation=SECOND)
    backup.workers[FIRST] = at_once(copying(at.machine.state)).workers[FIRST]
    backup.take(delta_of(at.machine.state, (), ()))
    assert set(backup.workers) == {FIRST, THIRD}
    effects = step(at, at.sender(1), 1, 1)
    (record,) = counted(effects)
    assert [part.incarnation for part in record.contributors] == [FIRST, 1001]
    assert ranks_waited_for(at) == {1: [1], 2: [1], 3: [0, 1]}


def ranks_waited_for(at: Bench) -> Mapping[int, list[int]]:
    """By clock."""
    return {c: [r for r in (0, 1) if at.machine.state.is_member(r, c)] for c in (1, 2, 3)}


def test_one_whose_step_is_in_a_sum_is_kept_until_that_has_its_scale() -> None:
    at = Bench(make_table(), workers=2)
    for rank in range(2):
        at.push(rank, 1, 1)
        at.seal(rank, 2, 1, clip_scale=0.5)
    at.gone(ended(FIRST))
    join(at, SECOND, 1)
    other = moved(at, FIRST)
    assert FIRST in other.machine.state.workers
    other.scale(1, 3, 1, 0.25)
    assert other.machine.state.clock == 1
    assert FIRST not in other.machine.state.workers


def test_what_a_seal_came_with_is_known_at_the_next_primary() -> None:
    """A push that was not finite has ended; the seal that it carried has not, and skips there too,
    whether the push comes with it again or not.
    """
    at = Bench(make_table(blocks=1), workers=2)
    carry(at)
    other = moved(at)
    assert carry(other)[0, 1] is Outcome.INVALID
    effects = step(other, other.sender(1), 1, 1)
    (record,) = counted(effects)
    assert [part.skip for part in record.contributors] == [True, False]


def test_what_a_seal_came_with_is_known_when_its_worker_has_confirmed_that() -> None:
    """The seal is held for a checkpoint; meanwhile the worker says, with another entry, that it has
    seen what became of the push: the ledger forgets that, and the step does not.
    """
    at = Bench(make_table(blocks=1), workers=2)
    carry(at)
    other, cut = moved(at), copies_cut(1)
    other.machine.state.schedule.hold(cut, 0, 100.0)
    carry(other)
    again = SealEvent(PLACE, other.sender(0), 2, SealTerms(1, skip=True), 1)
    other.machine.entry(again, other.now_s)
    effects = step(other, other.sender(1), 1, 1)
    effects += other.machine.end_cut(cut, other.now_s)
    (record,) = counted(effects)
    assert [part.skip for part in record.contributors] == [True, False]


def carry(at: Bench) -> Mapping[tuple[int, int], Outcome]:
    """Rank 0's step in one message, of what is not finite; how it ended."""
    invalid = InvalidTensor("non-finite")
    push = PushEvent(PLACE, at.sender(0), 1, 1, 0, 256, None, invalid)
    seal = SealEvent(PLACE, at.sender(0), 2, SealTerms(1), skip_if_invalid=True)
    effects = at.machine.entry(push, at.now_s) + at.machine.entry(seal, at.now_s)
    return outcomes(effects)


def reads_before_it_assigns() -> Bench:
    """The first worker died before it gave the initial values; the one in its place reads them."""
    at = Bench(make_table(from_rank_zero=True), workers=2)
    at.gone(ended(FIRST))
    join(at, SECOND, 0)
    read = PullEvent(PLACE, 7, SECOND, 0, consistent=False, deadline_s=at.now_s + 300)
    assert at.machine.pull(read, at.now_s) == []
    at.pull(1, 0, waiter=8)
    assert at.machine.tick(at.now_s) == [], "they may be on their way"
    at.now_s += ASSIGN_WITHIN_S
    return at


def test_who_replaced_rank_zero_is_told_that_it_has_no_initial_values_to_read() -> None:
    at = reads_before_it_assigns()
    (refused,) = at.machine.tick(at.now_s)
    assert isinstance(refused, RefusePull)
    assert refused.waiter == 7, "the other one waits for it"
    assert isinstance(refused.error, InvalidConfig)
    assert "the worker of rank 0 before this one ended" in str(refused.error)
    assert "start the run anew" in str(refused.error)


def test_who_replaced_rank_zero_may_read_while_it_gives_the_initial_values() -> None:
    at = reads_before_it_assigns()
    giver = Sender(SECOND, 0, 0)
    at.machine.entry(PushEvent(PLACE, giver, 1, 0, 0, 256, (0, 1), is_assign=True), at.now_s)
    assert at.machine.tick(at.now_s) == []
