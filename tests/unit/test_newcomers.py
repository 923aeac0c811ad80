"""Workers that come beyond those that a table was made for, at a range's machine (SEMANTICS S6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Join, TableChange
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import parsed
from ps_core.errors import Fenced, Recovering
from ps_core.keys import Incarnation, NodeId
from ps_core.ledger import Outcome
from ps_server.ranges.events import (
    AnswerPull,
    Apply,
    Effect,
    PullEvent,
    PushEvent,
    SealEvent,
    SealTerms,
    Sender,
)
from tests.unit.machine_harness import (
    PLACE,
    Bench,
    answers,
    applied,
    make_table,
    outcomes,
    problem,
    told,
)

FIRST = 2
"""Workers that the table was made for: ranks 0 and 1."""


class Growing(Bench):
    """A bench that more workers come to; `incarnation` is what a rank's newest worker has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.incarnations: dict[int, int] = {}
        self.change_number = 0

    def sender_of(self, rank: int) -> Sender:
        incarnation = self.incarnations.get(rank, 1000 + rank)
        return Sender(Incarnation(incarnation), rank, rank)

    def register(self, rank: int) -> None:
        """A new worker has this rank from now on."""
        self.incarnations[rank] = self.incarnations.get(rank, 2000 + rank) + 1000

    def join(self, rank: int, *, reached_elsewhere: int = 0, is_new: bool = True) -> int:
        """The clock after which the new worker is there."""
        if is_new:
            self.register(rank)
        join = Join(rank, self.sender_of(rank).incarnation)
        self.change_number += 1
        change = TableChange(self.change_number, 0, self.table.consistency, join)
        self.table = replace(self.table, proposed=change)
        self.observe(self.table)
        held = self.machine.state.schedule.hold_point
        assert held is not None
        join = replace(join, after_clock=max(held, reached_elsewhere))
        others = tuple(other for other in self.table.joins if other.rank != rank)
        self.table = replace(self.table, proposed=None, joins=(*others, join))
        self.observe(self.table)
        return join.after_clock

    def step(self, rank: int, clock: int, sequence: int = 0, **terms: object) -> list[Effect]:
        """One push and its seal; a step takes two numbers."""
        sequence = sequence or 2 * clock - 1
        sender = self.sender_of(rank)
        push = PushEvent(PLACE, sender, sequence, clock, 0, 256, (rank, sequence))
        seal = SealEvent(PLACE, sender, sequence + 1, SealTerms(clock, **terms))  # type: ignore[arg-type]
        found = self._note(self.machine.entry(push, self.now_s))
        return found + self._note(self.machine.entry(seal, self.now_s))

    def read(self, rank: int, clock: int, waiter: int) -> list[Effect]:
        sender = self.sender_of(rank)
        event = PullEvent(
            PLACE, waiter, sender.incarnation, clock, False, self.now_s + 10, rank=rank
        )
        return self._note(self.machine.pull(event, self.now_s))

    def node(self, rank: int, state: NodeState) -> Node:
        sender = self.sender_of(rank)
        return Node(NodeId(90 + rank), sender.incarnation, Role.WORKER, rank, "", state, 30_000)


def growing(text: str = "bsp", *, from_rank_zero: bool = False) -> Growing:
    return Growing(make_table(parsed(text), from_rank_zero=from_rank_zero), workers=FIRST)


def steps(bench: Growing, clock: int, *ranks: int) -> None:
    for rank in ranks:
        bench.step(rank, clock)


def test_updates_have_it_from_its_first_clock_on_and_in_rank_order() -> None:
    bench = growing()
    steps(bench, 1, 0, 1)
    assert bench.join(2) == 1
    steps(bench, 2, 1, 0)
    assert [clock for clock, _ in applied(bench.effects)] == [1], "update 2 waits for it"
    bench.step(2, 2, sequence=1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1)]), (2, [(0, 3), (1, 3), (2, 1)])]
    records = [e.record for e in bench.effects if isinstance(e, Apply)]
    assert [r.contributor_count for r in records] == [2, 3], "means divide by them"


def test_one_that_does_not_know_its_place_is_told_how_it_learns_that() -> None:
    bench = growing()
    steps(bench, 1, 0, 1)
    assert bench.join(2) == 1
    push = PushEvent(PLACE, bench.sender_of(2), 1, 1, 0, 256, (2, 1))
    said = problem(bench.machine.entry(push, bench.now_s)).message
    assert said.startswith("clock 1 of table 'model' by worker 2; expected 2 (at most")
    assert "pulls the table before its first push" in said


def test_the_update_that_is_under_way_forms_without_it() -> None:
    bench = growing()
    bench.step(0, 1)
    assert bench.join(2) == 1
    bench.step(1, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1)])]


def test_it_neither_pushes_nor_reads_before_it_has_joined() -> None:
    bench = growing()
    bench.register(2)
    steps(bench, 1, 0, 1)
    effects = bench.step(2, 1)
    assert all(isinstance(e.error, Recovering) for e in effects)  # type: ignore[union-attr]
    bench.read(2, 0, waiter=5)
    (said,) = bench.machine.read_gate.waits(bench.now_s)
    assert "worker 2 has not joined the table" in said
    assert bench.join(2, is_new=False) == 1
    (answer,) = [e for e in bench.effects if isinstance(e, AnswerPull)]
    assert (answer.waiter, answer.range_clock) == (5, 1)


def test_a_rank_that_nobody_has_between_others_is_not_waited_for() -> None:
    bench = growing()
    steps(bench, 1, 0, 1)
    assert bench.join(4) == 1
    bench.step(4, 2, sequence=1)
    steps(bench, 2, 0, 1)
    assert [clock for clock, _ in applied(bench.effects)] == [1, 2]
    bench.read(0, 2, waiter=3)
    assert bench.join(3) == 2, "a read at clock 2 is no step 3"
    for clock, sequence in ((3, 3), (4, 5)):
        bench.step(3, clock, sequence=sequence - 2)
        bench.step(4, clock, sequence=sequence)
        steps(bench, clock, 0, 1)
    assert applied(bench.effects)[2:] == [
        (3, [(0, 5), (1, 5), (3, 1), (4, 3)]),
        (4, [(0, 7), (1, 7), (3, 3), (4, 5)]),
    ]


def test_one_that_joins_between_ranks_that_are_folded_folds_nobody_twice() -> None:
    bench = growing()
    bench.join(3)
    bench.step(0, 1)
    bench.step(3, 1)
    assert bench.join(2) == 1
    bench.step(1, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1), (3, 1)])]


@pytest.mark.parametrize("text", ["ssp:1", "ssp:0"])
def test_ssp_waits_for_it_from_where_it_begins(text: str) -> None:
    bench = growing(text)
    staleness = bench.table.consistency.staleness
    for clock in (1, 2, 3):
        steps(bench, clock, 0, 1)
    begun = bench.join(2)
    assert begun == 3
    for clock in (4, 5, 6):
        steps(bench, clock, 0, 1)
    waits = begun + staleness + 1
    assert answers(bench.read(0, waits - 1, waiter=1)) == [1]
    assert answers(bench.read(0, waits, waiter=2)) == []
    (said,) = bench.machine.read_gate.waits(bench.now_s)
    assert "worker 2 (clock 3" in said
    assert answers(bench.step(2, 4, sequence=1)) == [2]


def test_asp_takes_its_steps_too() -> None:
    bench = growing("asp")
    bench.step(0, 1)
    bench.join(2)
    bench.step(2, 2, sequence=1)
    assert applied(bench.effects) == [(1, [(0, 1)]), (2, [(2, 1)])]


def test_backup_workers_are_of_all_members() -> None:
    bench = growing("bsp:backup=1")
    bench.join(2)
    bench.step(2, 1)
    assert applied(bench.effects) == [], "one of three is not all but one"
    bench.step(0, 1)
    assert [clock for clock, _ in applied(bench.effects)] == [1]


def test_it_takes_part_in_clipping() -> None:
    bench = growing()
    bench.join(2)
    for rank in (0, 1, 2):
        bench.step(rank, 1, clip_scale=1.0)
    assert told(bench.effects, 2)[1] == told(bench.effects, 0)[1]
    bench.scale(0, 3, 1, 0.5)
    (record,) = [e.record for e in bench.effects if isinstance(e, Apply)]
    assert record.update_scale == 0.5


def test_where_initial_values_are_missing_it_begins_at_the_same_clock_as_elsewhere() -> None:
    bench = growing(from_rank_zero=True)
    assert bench.join(2, reached_elsewhere=1) == 1
    bench.read(2, 0, waiter=9)
    sender = bench.sender_of(0)
    value = PushEvent(PLACE, sender, 1, 0, 0, 256, (0, 1), is_assign=True)
    bench._note(bench.machine.entry(value, bench.now_s))
    bench._note(bench.machine.entry(SealEvent(PLACE, sender, 2, SealTerms(0)), bench.now_s))
    bench.step(0, 1, sequence=3)
    bench.step(1, 1)
    assert [clock for clock, _ in applied(bench.effects)] == [0, 1]
    (answer,) = [e for e in bench.effects if isinstance(e, AnswerPull)]
    assert (answer.waiter, answer.range_clock) == (9, 1)
    bench.step(2, 2, sequence=1)
    bench.step(0, 2, sequence=5)
    bench.step(1, 2)
    assert applied(bench.effects)[2:] == [(2, [(0, 5), (1, 3), (2, 1)])]


@pytest.mark.parametrize("state", [NodeState.GONE, NodeState.LEFT])
def test_its_rank_is_given_anew_when_its_membership_has_ended(state: NodeState) -> None:
    bench = growing()
    bench.join(2)
    steps(bench, 1, 2)
    bench.gone(bench.node(2, state))
    steps(bench, 1, 0, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1), (2, 1)])], "what it sealed counts"
    bench.step(0, 2)
    assert bench.join(2) == 2
    bench.step(1, 2)
    assert applied(bench.effects)[1:] == [(2, [(0, 3), (1, 3)])]
    bench.step(2, 3, sequence=1)
    steps(bench, 3, 0, 1)
    assert applied(bench.effects)[2:] == [(3, [(0, 5), (1, 5), (2, 1)])]


def test_one_that_left_by_a_seal_is_replaced_in_its_rank() -> None:
    bench = growing()
    bench.join(2)
    steps(bench, 1, 0, 1, 2)
    seal = SealEvent(PLACE, bench.sender_of(2), 3, SealTerms(2, skip=True, last=True))
    assert outcomes(bench._note(bench.machine.entry(seal, bench.now_s)))[2, 3] is Outcome.APPLIED
    assert bench.gone(bench.node(2, NodeState.LEFT)) == []
    steps(bench, 2, 0, 1)
    assert bench.join(2) == 2
    steps(bench, 3, 0, 1)
    bench.step(2, 3, sequence=1)
    assert [(c, len(parts)) for c, parts in applied(bench.effects)] == [(1, 3), (2, 2), (3, 3)]


def test_one_that_dies_before_it_has_joined_is_nobody_but_to_its_own_reads() -> None:
    bench = growing()
    bench.register(2)
    bench.read(2, 0, waiter=4)
    assert isinstance(problem(bench.gone(bench.node(2, NodeState.GONE))), Fenced)
    assert bench.gone(bench.node(2, NodeState.GONE)) == []
    steps(bench, 1, 0, 1)
    (record,) = [e.record for e in bench.effects if isinstance(e, Apply)]
    assert record.gone_count == 0


def test_one_that_dies_and_joins_then_is_not_waited_for() -> None:
    """The commit of its join was under way when it was declared gone."""
    bench = growing()
    bench.register(2)
    dead = bench.node(2, NodeState.GONE)
    bench.gone(dead)
    bench.join(2, is_new=False)
    bench.gone(dead)  # as `ServerMachine.settle` does
    steps(bench, 1, 0, 1)
    assert [clock for clock, _ in applied(bench.effects)] == [1]


def test_who_is_left_goes_on_when_all_of_the_first_have_left() -> None:
    bench = growing()
    bench.join(2)
    steps(bench, 1, 0, 1, 2)
    for rank in (0, 1):
        terms = SealTerms(2, skip=True, last=True)
        bench._note(bench.machine.entry(SealEvent(PLACE, bench.sender_of(rank), 3, terms), 100.0))
    bench.step(2, 2)
    assert applied(bench.effects)[1:] == [(2, [(2, 3)])]
