"""Workers that are declared gone, at the servers' machines (SEMANTICS S6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role
from ps_core.consistency import Consistency, Mode
from ps_core.errors import Fenced, InvalidConfig, InvalidTensor, Recovering
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, key_ranges
from ps_core.ledger import Outcome, ReplyKind
from ps_core.sliced_work import at_once
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    Apply,
    Effect,
    PullEvent,
    PushEvent,
    RefusePull,
    ReplyTo,
    SealEvent,
    SealTerms,
    Sender,
    StepId,
)
from ps_server.ranges.server_machine import ServerMachine
from tests.unit.machine_harness import (
    PLACE,
    Bench,
    answers,
    applied,
    kinds,
    make_table,
    outcomes,
    problem,
)

WORKERS = 3
LR = (("lr", 0.5),)
SAYS = "worker 2 was declared gone after 30 s of silence"


def dead(rank: int = 2) -> Node:
    """The worker of a rank, as a view shows it when it is gone."""
    incarnation = Incarnation(1000 + rank)
    return Node(
        NodeId(10 + rank), incarnation, Role.WORKER, rank, "", NodeState.GONE, silence_ms=30_000
    )


def bench(mode: Mode | Consistency = Mode.BSP, *, from_rank_zero: bool = False) -> Bench:
    return Bench(make_table(mode, from_rank_zero=from_rank_zero), workers=WORKERS)


def declare_gone(of: Bench, rank: int = 2) -> list[Effect]:
    found = of.machine.ended(dead(rank), of.now_s)
    of.effects += found
    return found


def refusals(effects: list[Effect]) -> dict[int, Exception]:
    return {e.waiter: e.error for e in effects if isinstance(e, RefusePull)}


def step(of: Bench, rank: int, clock: int) -> list[Effect]:
    """One push and its seal; a step takes two numbers."""
    of.push(rank, 2 * clock - 1, clock)
    return of.seal(rank, 2 * clock, clock)


# --- BSP


def test_an_update_that_waited_forms_with_the_steps_of_the_others() -> None:
    bsp = bench()
    for rank in (0, 1):
        step(bsp, rank, 1)
    bsp.pull(0, 1)
    found = declare_gone(bsp)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1)])]
    assert answers(found) == [1]
    for clock in (2, 3):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert [clock for clock, _ in applied(bsp.effects)] == [1, 2, 3]


def test_a_worker_that_this_range_never_heard_of_is_not_waited_for() -> None:
    bsp = bench()
    declare_gone(bsp)
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1)])]


def test_what_it_sealed_counts_however_far_ahead() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    step(bsp, 2, 2)
    bsp.push(2, 5, 3)
    declare_gone(bsp)
    for clock in (1, 2, 3):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert applied(bsp.effects) == [
        (1, [(0, 1), (1, 1), (2, 1)]),
        (2, [(0, 3), (1, 3), (2, 3)]),
        (3, [(0, 5), (1, 5)]),
    ]


@pytest.mark.parametrize("seals", [False, True])
def test_a_half_delivered_step_is_dropped_and_its_room_is_free(seals: bool) -> None:
    bsp = bench()
    bsp.push(2, 1, 1, block=0)
    bsp.push(2, 3, 1, block=2)  # number 2 never arrives
    if seals:
        assert kinds(bsp.seal(2, 4, 1)) == [ReplyKind.RECEIVED]
    assert bsp.staging.staged_bytes == 512
    found = declare_gone(bsp)
    assert bsp.staging.staged_bytes == 0
    ended = {1, 3, 4} if seals else {1, 3}
    assert outcomes(found) == {(2, n): Outcome.WITHDRAWN for n in ended}
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1)])]


def test_a_step_of_it_that_is_folded_already_counts() -> None:
    bsp = bench()
    step(bsp, 0, 1)  # its turn has come: it is in the sum of update 1
    declare_gone(bsp, 0)
    step(bsp, 1, 1)
    step(bsp, 2, 1)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1), (2, 1)])]
    step(bsp, 1, 2)
    step(bsp, 2, 2)
    assert applied(bsp.effects)[1:] == [(2, [(1, 3), (2, 3)])]


def test_updates_without_it_say_so_in_their_record() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    declare_gone(bsp)
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    records = [e.record for e in bsp.effects if isinstance(e, Apply)]
    assert [(r.clock, r.gone_count, r.contributor_count) for r in records] == [
        (1, 0, 3),
        (2, 1, 2),
    ]


def test_one_that_left_this_table_before_it_crashed_changes_nothing() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    bsp.seal(2, 3, 2, skip=True, last=True)
    declare_gone(bsp)
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 3), (2, 2)]


def test_a_sealed_step_that_is_given_back_for_room_will_not_come_again() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    bsp.push(2, 3, 2)
    bsp.seal(2, 4, 2)
    declare_gone(bsp)
    found: list[Effect] = []
    bsp.machine.give_back(StepId(2, 2), found)
    bsp.staging.staged_bytes -= 256  # as the room does before it says so
    assert outcomes(found) == {(2, 3): Outcome.WITHDRAWN, (2, 4): Outcome.WITHDRAWN}
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 3), (2, 2)]
    assert bsp.staging.staged_bytes == 0


@pytest.mark.parametrize("is_gone_first", [True, False])
def test_one_that_left_and_crashed_before_it_sent_again_what_was_given_back(
    is_gone_first: bool,
) -> None:
    bsp = bench()
    step(bsp, 2, 1)
    bsp.seal(2, 3, 2, skip=True, last=True)
    if is_gone_first:
        declare_gone(bsp)
    bsp.machine.give_back(StepId(1, 2), [])
    if not is_gone_first:
        declare_gone(bsp)
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 2), (2, 2)]


def test_all_but_one_may_go() -> None:
    bsp = bench()
    for rank in (0, 1, 2):
        step(bsp, rank, 1)
    declare_gone(bsp, 0)
    declare_gone(bsp, 2)
    step(bsp, 1, 2)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 3), (2, 1)]
    declare_gone(bsp, 1)
    assert bsp.machine.state.clock == 2


def test_it_is_said_twice_and_done_once() -> None:
    bsp = bench()
    bsp.push(2, 1, 1)
    declare_gone(bsp)
    assert declare_gone(bsp) == []


def test_another_incarnation_that_has_the_rank_stays() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    older = Node(NodeId(3), Incarnation(7), Role.WORKER, 2, "", NodeState.GONE)
    assert bsp.machine.ended(older, bsp.now_s) == []
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    assert [len(parts) for _, parts in applied(bsp.effects)] == [3]
    step(bsp, 0, 2)
    step(bsp, 1, 2)
    assert len(applied(bsp.effects)) == 1  # it is waited for


# --- backup workers


def test_with_backup_workers_no_grace_is_given_to_the_dead() -> None:
    bsp = bench(Consistency(backup_workers=1, grace_ms=500))
    for rank in (0, 1):
        step(bsp, rank, 1)
    assert applied(bsp.effects) == []
    assert bsp.machine.wake_s is not None
    declare_gone(bsp)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1)])]
    assert bsp.machine.wake_s is None


def test_with_backup_workers_two_deaths_leave_one_who_goes_on() -> None:
    bsp = bench(Consistency(backup_workers=1))
    step(bsp, 0, 1)
    declare_gone(bsp, 1)
    declare_gone(bsp, 2)
    step(bsp, 0, 2)
    assert [clock for clock, _ in applied(bsp.effects)] == [1, 2]


# --- SSP and ASP


def test_ssp_reads_no_longer_wait_for_its_clock() -> None:
    ssp = bench(Consistency(Mode.SSP, staleness=1))
    step(ssp, 2, 1)
    for clock in (1, 2, 3, 4):
        for rank in (0, 1):
            step(ssp, rank, clock)
    assert ssp.pull(0, 4) == []
    found = declare_gone(ssp)
    assert answers(found) == [1]
    assert ssp.machine.state.clock == 4


def test_ssp_reads_do_not_wait_for_one_that_was_never_heard() -> None:
    ssp = bench(Consistency(Mode.SSP, staleness=0))
    for rank in (0, 1):
        step(ssp, rank, 1)
    assert ssp.pull(0, 1) == []
    assert answers(declare_gone(ssp)) == [1]


@pytest.mark.parametrize("mode", [Consistency(Mode.SSP, staleness=2), Consistency(Mode.ASP)])
def test_an_unsealed_step_is_dropped_in_every_mode(mode: Consistency) -> None:
    table = bench(mode)
    step(table, 2, 1)
    table.push(2, 3, 2)
    declare_gone(table)
    assert table.staging.staged_bytes == 0
    assert applied(table.effects) == [(1, [(2, 1)])]


def test_what_it_pushed_eagerly_is_applied_already_and_stays() -> None:
    asp = bench(Mode.ASP)
    asp.push(2, 1, 1, eager=LR)
    assert outcomes(declare_gone(asp)) == {}
    assert applied(asp.effects) == [(1, [(2, 1)])]


# --- reads, and initial values


def test_its_parked_reads_are_refused_and_those_of_others_are_answered() -> None:
    bsp = bench()
    for rank in (0, 1, 2):
        step(bsp, rank, 1)
    step(bsp, 0, 2)
    step(bsp, 1, 2)
    bsp.pull(2, 2, waiter=7)
    bsp.pull(0, 2, waiter=8)
    found = declare_gone(bsp)
    assert answers(found) == [8]
    (error,) = refusals(found).values()
    assert isinstance(error, Fenced)
    assert SAYS in str(error)


def test_reads_of_a_table_that_gets_no_initial_values_are_refused() -> None:
    bsp = bench(from_rank_zero=True)
    bsp.pull(1, 0, waiter=5)
    bsp.pull(None, 0, waiter=6)
    found = declare_gone(bsp, 0)
    assert sorted(refusals(found)) == [5, 6]
    for error in [*refusals(found).values(), problem(bsp.pull(2, 0, waiter=7))]:
        assert isinstance(error, InvalidConfig)
        assert "no initial values and gets none: worker 0 was declared gone after 30 s" in str(
            error
        )


def test_a_half_assigned_range_has_no_initial_values() -> None:
    bsp = bench(from_rank_zero=True)
    bsp.push(0, 1, 0, is_assign=True)
    bsp.pull(1, 0)
    assert list(refusals(declare_gone(bsp, 0))) == [1]
    assert bsp.staging.staged_bytes == 0


def test_a_range_that_rank_zero_had_assigned_goes_on_without_it() -> None:
    bsp = bench(from_rank_zero=True)
    bsp.push(0, 1, 0, is_assign=True)
    bsp.seal(0, 2, 0)
    declare_gone(bsp, 0)
    assert answers(bsp.pull(1, 0)) == [1]
    step(bsp, 1, 1)
    step(bsp, 2, 1)
    assert applied(bsp.effects)[1:] == [(1, [(1, 1), (2, 1)])]


def test_another_worker_that_is_gone_before_the_initial_values_came() -> None:
    bsp = bench(from_rank_zero=True)
    bsp.pull(1, 0)
    assert declare_gone(bsp) == []
    bsp.push(0, 1, 0, is_assign=True)
    assert answers(bsp.seal(0, 2, 0)) == [1]


def test_what_it_sent_that_was_invalid_holds_nothing_up() -> None:
    bsp = bench()
    bsp.push(2, 1, 1, problem=InvalidTensor("non-finite"))
    declare_gone(bsp)
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    assert len(applied(bsp.effects)) == 1


# --- the server: fences, new parts, room


class Server:
    """A server machine that serves every range of one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        ranges = tuple(
            RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), NodeId(1))
            for index, slots in enumerate(key_ranges(1))
        )
        self.view = ClusterView(1, "c", WORKERS, 1, (), ranges, (table,))
        self.machine = ServerMachine(NodeId(1), WORKERS)

    def observe(self) -> None:
        self.machine.observe(self.view)

    def push(self, rank: int, sequence: int, clock: int, block: int = 0) -> list[Effect]:
        sender = Sender(Incarnation(1000 + rank), rank, rank)
        event = PushEvent(PLACE, sender, sequence, clock, block, 256, (rank, sequence))
        return self.machine.entry(event, 100.0)

    def seal(self, rank: int, sequence: int, clock: int) -> list[Effect]:
        sender = Sender(Incarnation(1000 + rank), rank, rank)
        return self.machine.entry(SealEvent(PLACE, sender, sequence, SealTerms(clock)), 100.0)


@pytest.fixture
def server() -> Server:
    made = Server(make_table())
    made.observe()
    return made


@pytest.mark.parametrize("send", [Server.push, Server.seal])
def test_whatever_it_sends_after_its_fence_is_refused(
    server: Server, send: Callable[[Server, int, int, int], list[Effect]]
) -> None:
    """SM-3."""
    server.push(2, 1, 1)
    at_once(server.machine.ending([dead()], 100.0))
    found = send(server, 2, 2, 1)
    assert kinds(found) == [ReplyKind.ERROR]
    assert isinstance(problem(found), Fenced)
    assert SAYS in str(problem(found))
    assert server.machine.gate_bytes == 0


def test_it_cannot_read_either(server: Server) -> None:
    """SM-3."""
    at_once(server.machine.ending([dead()], 100.0))
    event = PullEvent(PLACE, 1, dead().incarnation, 0, False, 110.0)
    assert isinstance(problem(server.machine.pull(event, 100.0)), Fenced)


def test_a_table_that_is_made_later_does_not_wait_for_it() -> None:
    server = Server(make_table())
    at_once(server.machine.ending([dead()], 100.0))
    server.observe()
    at_once(server.machine.ending([dead()], 100.0))
    for rank in (0, 1):
        server.push(rank, 1, 1)
    assert applied(server.seal(0, 2, 1) + server.seal(1, 2, 1))[0][0] == 1


def test_a_server_without_a_view_asks_to_come_again() -> None:
    """It may have the address of one that is gone; that there is no such table is not known."""
    server = Server(make_table())
    event = PullEvent(PLACE, 1, Incarnation(1000), 0, False, 110.0)
    for found in (server.machine.pull(event, 100.0), server.push(0, 1, 1)):
        assert isinstance(problem(found), Recovering)


def test_those_who_waited_for_its_room_get_credit() -> None:
    table = make_table(blocks=4)
    server = Server(replace(table, spec=replace(table.spec, gate_bytes=1)))
    server.observe()
    for rank in (0, 2):  # there is room for a sum and a step
        for block in range(4):
            server.push(rank, block + 1, 1, block)
    assert kinds(server.push(1, 1, 2)) == [ReplyKind.REFUSED]
    found = at_once(server.machine.ending([dead()], 100.0))
    credited = [
        e.sender.rank for e in found if isinstance(e, ReplyTo) and e.kind is ReplyKind.CREDIT
    ]
    assert credited == [1]
    assert server.machine.gate_bytes == 4 * 256
    assert kinds(server.push(1, 1, 2)) == [ReplyKind.RECEIVED]
