"""The range machine, one sentence of SEMANTICS at a time."""

from __future__ import annotations

import pytest

from ps_core.consistency import Mode
from ps_core.errors import (
    AlreadyPast,
    Fenced,
    InvalidConfig,
    InvalidKeys,
    InvalidTensor,
    Recovering,
    WaitExpired,
)
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables.optimizers import OptimizerKind
from ps_server.ranges.events import Apply, PushEvent, RefusePull, ReplyTo, StepId
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

LR = (("lr", 0.5),)


@pytest.fixture
def bsp() -> Bench:
    return Bench(make_table())


@pytest.fixture
def asp() -> Bench:
    return Bench(make_table(Mode.ASP))


# --- S2: sequences, outcomes, ledger


def test_a_resend_of_a_held_push_is_received_again_and_staged_once(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    again = bsp.push(0, 1, 1)
    assert kinds(again) == [ReplyKind.RECEIVED]
    assert bsp.staging.staged_bytes == 256


def test_a_resend_of_an_ended_entry_gets_the_original_answer(asp: Bench) -> None:
    asp.push(0, 1, 1)
    asp.seal(0, 2, 1)
    assert outcomes(asp.push(0, 1, 1)) == {(0, 1): Outcome.APPLIED}
    assert outcomes(asp.seal(0, 2, 1)) == {(0, 2): Outcome.APPLIED}
    assert len(applied(asp.effects)) == 1


def test_an_eager_push_at_6_does_not_hide_a_missing_one_at_5(asp: Bench) -> None:
    for sequence in (1, 2, 3, 4, 6):
        asp.push(0, sequence, 1, block=0 if sequence == 1 else 1, eager=LR, replaces=0)
    late = asp.push(0, 5, 1, block=3, eager=LR)
    assert outcomes(late) == {(0, 5): Outcome.APPLIED}


def test_a_number_that_was_replaced_before_it_arrived_ends_as_replaced(bsp: Bench) -> None:
    first = bsp.push(0, 2, 1, replaces=1)
    assert outcomes(first) == {(0, 1): Outcome.REPLACED}
    assert outcomes(bsp.push(0, 1, 1)) == {(0, 1): Outcome.REPLACED}
    bsp.seal(0, 3, 1)
    bsp.seal(1, 1, 1)
    assert applied(bsp.effects) == [(1, [(0, 2)])]


def test_a_held_push_that_is_replaced_leaves_the_gate(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    replaced = bsp.push(0, 2, 1, replaces=1)
    assert outcomes(replaced) == {(0, 1): Outcome.REPLACED}
    assert bsp.staging.staged_bytes == 256


def test_an_invalid_push_consumes_its_number_and_changes_nothing(bsp: Bench) -> None:
    bad = bsp.push(0, 1, 1, problem=InvalidTensor("non-finite"))
    assert outcomes(bad) == {(0, 1): Outcome.INVALID}
    assert bsp.staging.staged_bytes == 0
    assert outcomes(bsp.push(0, 1, 1)) == {(0, 1): Outcome.INVALID}


def test_a_withdrawn_number_holds_nothing_up(bsp: Bench) -> None:
    bsp.push(0, 2, 1)
    assert kinds(bsp.seal(0, 3, 1)) == [ReplyKind.RECEIVED]
    assert outcomes(bsp.withdraw(0, 1)) == {(0, 1): Outcome.WITHDRAWN}
    assert outcomes(bsp.seal(1, 1, 1))[0, 3] is Outcome.APPLIED


def test_what_is_in_effect_cannot_be_withdrawn(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    bsp.seal(0, 2, 1)
    for sequence in (1, 2):
        assert isinstance(problem(bsp.withdraw(0, sequence)), InvalidKeys)


def test_a_confirmed_outcome_is_forgotten(asp: Bench) -> None:
    asp.push(0, 1, 1)
    asp.seal(0, 2, 1)
    asp.push(0, 3, 2, confirmed=2)
    again = asp.push(0, 1, 1)
    assert kinds(again) == [ReplyKind.ERROR]
    assert "confirmed" in str(problem(again))


@pytest.mark.parametrize(("later", "error"), [(-7, Fenced), (7, Recovering)])
def test_an_incarnation_that_is_not_the_ranks_is_refused(
    bsp: Bench, later: int, error: type[Exception]
) -> None:
    """An older one for good; a newer one until it has joined."""
    bsp.push(0, 1, 1)
    other = bsp.sender(0)
    stranger = type(other)(other.incarnation + later, 0, 0)  # type: ignore[arg-type]
    event = PushEvent(PLACE, stranger, 1, 1, 0, 256, None)
    assert isinstance(problem(bsp.machine.entry(event, bsp.now_s)), error)


# --- S3: room


def test_a_refusal_for_room_is_no_outcome(bsp: Bench) -> None:
    bsp.staging.closed.add(StepId(1, 0))
    refused = bsp.push(0, 1, 1)
    assert kinds(refused) == [ReplyKind.REFUSED]
    assert problem(refused).retry_after_ms > 0
    bsp.staging.closed.clear()
    assert kinds(bsp.push(0, 1, 1)) == [ReplyKind.RECEIVED]


def test_a_sealed_step_may_be_given_back_and_counts_again_when_it_returns(bsp: Bench) -> None:
    bsp.push(1, 1, 1)
    bsp.seal(1, 2, 1)
    given: list[object] = []
    bsp.machine.give_back(StepId(1, 1), given)  # type: ignore[arg-type]
    assert kinds(given) == [ReplyKind.GIVEN_BACK]  # type: ignore[arg-type]
    assert applied(bsp.seal(0, 1, 1)) == []
    lost = bsp.seal(1, 2, 1)
    assert kinds(lost) == [ReplyKind.GIVEN_BACK, ReplyKind.RECEIVED]
    assert applied(bsp.push(1, 1, 1)) == [(1, [(1, 1)])]


@pytest.mark.parametrize("skip", [True, False])
def test_a_worker_that_left_stays_so_when_an_earlier_step_is_given_back(
    bsp: Bench, skip: bool
) -> None:
    bsp.push(1, 1, 1)
    bsp.seal(1, 2, 1)
    bsp.seal(1, 3, 2, skip=skip, last=True)  # without skip this one has no outcome yet
    bsp.machine.give_back(StepId(1, 1), [])
    assert kinds(bsp.push(1, 1, 1)) == [ReplyKind.RECEIVED]
    assert isinstance(problem(bsp.push(1, 9, 3)), InvalidConfig)
    for clock in (1, 2, 3):
        bsp.push(0, 2 * clock - 1, clock)
        bsp.seal(0, 2 * clock, clock)
    assert applied(bsp.effects) == [
        (1, [(0, 1), (1, 1)]),
        (2, [(0, 3)]),
        (3, [(0, 5)]),
    ]


# --- S4: steps


def test_a_seal_waits_for_every_lower_sequence(bsp: Bench) -> None:
    bsp.seal(1, 1, 1)
    bsp.seal(0, 3, 1)
    bsp.push(0, 2, 1, block=1)
    assert applied(bsp.effects) == []
    bsp.push(0, 1, 1, block=0)
    assert applied(bsp.effects) == [(1, [(0, 1), (0, 2)])]


def test_workers_that_disagree_are_told_both_names_and_values(bsp: Bench) -> None:
    bsp.seal(0, 1, 1, LR)
    refused = bsp.seal(1, 1, 1, (("lr", 0.25),))
    assert outcomes(refused) == {(1, 1): Outcome.INVALID}
    assert "workers 0 and 1" in str(problem(refused))
    assert "lr: 0.5 and 0.25" in str(problem(refused))
    assert outcomes(bsp.seal(1, 2, 1, LR))[1, 2] is Outcome.APPLIED


def test_a_disagreement_is_told_in_the_order_of_ranks_whoever_came_first(bsp: Bench) -> None:
    bsp.seal(1, 1, 1, (("lr", 0.25),))
    refused = problem(bsp.seal(0, 1, 1, LR))
    assert "workers 0 and 1 disagree" in str(refused)
    assert "lr: 0.5 and 0.25" in str(refused)


def test_numbers_that_look_alike_are_shown_in_full(bsp: Bench) -> None:
    bsp.seal(0, 1, 1, (("lr", 0.1),))
    refused = problem(bsp.seal(1, 1, 1, (("lr", 0.1 + 1e-9),)))
    assert str(refused).endswith(": lr: 0.1 and 0.100000001")


def test_workers_own_optimizers_are_compared_by_any_names() -> None:
    """Sums: the servers use no hyperparameters, and workers that differ would part."""
    bench = Bench(make_table(kind=OptimizerKind.AGGREGATE))
    given = (("foreach", 1.0), ("lr", 0.5))
    bench.seal(0, 1, 1, given)
    assert outcomes(bench.seal(1, 1, 1, given))[1, 1] is Outcome.APPLIED
    bench.seal(0, 2, 2, (("lr", 0.5), ("only here", 7.0)))
    refused = problem(bench.seal(1, 2, 2, (("lr", 0.25), ("nor there", 7.0))))
    assert isinstance(refused, InvalidConfig)
    assert str(refused).endswith(
        "lr: 0.5 and 0.25, nor there at worker 1 alone, only here at worker 0 alone"
    )
    assert outcomes(bench.seal(1, 3, 2))[1, 3] is Outcome.APPLIED, "none: it has no say"


def test_whoever_waits_for_a_clock_in_dispute_is_told_as_well(bsp: Bench) -> None:
    bsp.seal(0, 1, 1, LR)
    bsp.pull(0, 1)
    refused = bsp.seal(1, 1, 1, (("lr", 0.25),))
    (told,) = [e for e in refused if isinstance(e, RefusePull)]
    assert "workers 0 and 1 disagree" in str(told.error)
    assert isinstance(problem(bsp.pull(0, 1)), InvalidConfig)
    bsp.seal(1, 2, 1, LR)
    assert answers(bsp.pull(0, 1)) == [1]


def test_a_seal_without_hyperparameters_means_the_tables(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    bsp.seal(0, 2, 1)
    (update,) = [e for e in bsp.seal(1, 1, 1) if isinstance(e, Apply)]
    assert dict(update.record.hyperparameters)["lr"] == 1e-3


def test_a_skipped_step_ends_as_skipped_and_frees_its_room(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    bsp.push(1, 1, 1)
    bsp.seal(0, 2, 1, skip=True)
    assert bsp.staging.staged_bytes == 256
    done = bsp.seal(1, 2, 1)
    assert outcomes(done) == {
        (0, 1): Outcome.SKIPPED,
        (0, 2): Outcome.APPLIED,
        (1, 1): Outcome.APPLIED,
        (1, 2): Outcome.APPLIED,
    }
    (update,) = [e for e in done if isinstance(e, Apply)]
    assert update.record.contributor_count == 1


def test_a_step_with_an_invalid_push_takes_no_part(bsp: Bench) -> None:
    bsp.push(0, 1, 1, problem=InvalidTensor("non-finite"))
    bsp.push(0, 2, 1, block=1)
    refused = bsp.seal(0, 3, 1)
    assert outcomes(refused) == {(0, 3): Outcome.INVALID}
    assert "skip" in str(problem(refused))
    bsp.seal(0, 4, 1, skip=True)
    bsp.seal(1, 1, 1)
    assert bsp.machine.state.clock == 1
    assert applied(bsp.effects) == []


def test_an_invalid_push_that_was_replaced_is_forgiven(bsp: Bench) -> None:
    bsp.push(0, 1, 1, problem=InvalidTensor("non-finite"))
    bsp.push(0, 2, 1, replaces=1)
    bsp.seal(0, 3, 1)
    bsp.seal(1, 1, 1)
    assert applied(bsp.effects) == [(1, [(0, 2)])]


def test_an_eager_push_is_applied_on_arrival_and_its_seal_repeats_its_numbers(asp: Bench) -> None:
    assert applied(asp.push(0, 1, 1, eager=LR)) == [(1, [(0, 1)])]
    assert outcomes(asp.seal(0, 2, 1, (("lr", 1.0),))) == {(0, 2): Outcome.INVALID}
    assert outcomes(asp.seal(0, 3, 1, LR)) == {(0, 3): Outcome.APPLIED}
    assert len(applied(asp.effects)) == 1


# --- S1: BSP forms in rank order; initial values


def test_an_update_is_summed_in_rank_order_whatever_came_first(bsp: Bench) -> None:
    """RM-2."""
    bsp.push(1, 1, 1)
    bsp.seal(1, 2, 1)
    bsp.push(0, 1, 1)
    bsp.seal(0, 2, 1)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1)])]


def test_nobody_starts_alone(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    bsp.seal(0, 2, 1)
    assert applied(bsp.effects) == []
    assert bsp.machine.state.clock == 0


def test_a_step_may_come_before_its_clock_has_its_turn(bsp: Bench) -> None:
    for clock in (1, 2):
        bsp.push(0, 2 * clock - 1, clock)
        bsp.seal(0, 2 * clock, clock)
    bsp.seal(1, 1, 1)
    assert [clock for clock, _ in applied(bsp.effects)] == [1]
    bsp.seal(1, 2, 2)
    assert [clock for clock, _ in applied(bsp.effects)] == [1, 2]


@pytest.mark.parametrize("mode", [Mode.BSP, Mode.ASP])
def test_until_rank_0_has_assigned_pushes_and_pulls_wait(mode: Mode) -> None:
    bench = Bench(make_table(mode, from_rank_zero=True))
    bench.pull(1, 0)
    bench.push(1, 1, 1)
    bench.seal(1, 2, 1)
    assert answers(bench.effects) == []
    bench.push(0, 1, 0, is_assign=True)
    done = bench.seal(0, 2, 0)
    assert answers(done) == [1]
    assert applied(bench.effects)[0] == (0, [(0, 1)])


def test_only_rank_0_gives_the_initial_values() -> None:
    bench = Bench(make_table(from_rank_zero=True))
    assert outcomes(bench.push(1, 1, 0, is_assign=True)) == {(1, 1): Outcome.INVALID}


def test_values_are_assigned_once() -> None:
    bench = Bench(make_table(from_rank_zero=True))
    bench.push(0, 1, 0, is_assign=True)
    bench.seal(0, 2, 0)
    assert isinstance(problem(bench.push(0, 3, 0, is_assign=True)), InvalidConfig)


def test_a_sum_of_nothing_is_a_value_of_an_aggregate_table() -> None:
    bench = Bench(make_table(kind=OptimizerKind.AGGREGATE))
    bench.seal(0, 1, 1)
    bench.seal(1, 1, 1)
    assert applied(bench.effects) == [(1, [])]


# --- bad input


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"block": 9}, InvalidKeys),
        ({"clock": 0}, InvalidConfig),
        ({"clock": 1000}, InvalidConfig),
        ({"eager": (("learning_rate", 1.0),)}, InvalidConfig),
        ({"is_assign": True, "clock": 0}, InvalidConfig),
        ({"is_assign": True, "eager": ()}, InvalidConfig),
    ],
)
def test_a_wrong_push_ends_as_invalid(
    bsp: Bench, more: dict[str, object], error: type[Exception]
) -> None:
    settings = {"clock": 1, "block": 0, **more}
    assert isinstance(problem(bsp.push(0, 1, **settings)), error)  # type: ignore[arg-type]


def test_a_second_push_of_a_block_must_name_what_it_replaces(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    assert "replaces" in str(problem(bsp.push(0, 2, 1)))


@pytest.mark.parametrize("sequence", [0, 10_000_000])
def test_a_sequence_out_of_reach_consumes_nothing(bsp: Bench, sequence: int) -> None:
    assert kinds(bsp.push(0, sequence, 1)) == [ReplyKind.ERROR]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_must_be_finite_and_positive(bsp: Bench, scale: float) -> None:
    assert outcomes(bsp.seal(0, 1, 1, contribution_scale=scale)) == {(0, 1): Outcome.INVALID}


def test_a_clock_is_sealed_once(bsp: Bench) -> None:
    bsp.seal(0, 1, 1)
    assert outcomes(bsp.seal(0, 2, 1)) == {(0, 2): Outcome.INVALID}


def test_a_push_after_the_seal_of_its_clock_is_invalid(bsp: Bench) -> None:
    bsp.seal(0, 2, 1)
    assert outcomes(bsp.push(0, 3, 1)) == {(0, 3): Outcome.INVALID}
    bsp.push(0, 1, 1)
    assert outcomes(bsp.seal(1, 1, 1))[0, 2] is Outcome.APPLIED


# --- S5: reads


def test_a_read_waits_for_the_update_of_its_clock(bsp: Bench) -> None:
    """RM-4."""
    bsp.seal(0, 1, 1)
    assert answers(bsp.pull(0, 1)) == []
    assert answers(bsp.seal(1, 1, 1)) == [1]


def test_asp_reads_its_own_writes_and_waits_for_nobody_else(asp: Bench) -> None:
    asp.push(0, 1, 1)
    assert answers(asp.pull(0, 1)) == []
    assert answers(asp.seal(0, 2, 1)) == [1]
    assert answers(asp.pull(1, 0, waiter=2)) == [2]


def test_an_expired_read_names_who_is_missing(bsp: Bench) -> None:
    bsp.seal(1, 1, 1)
    bsp.seal(0, 1, 1)
    bsp.now_s += 7.25
    bsp.pull(0, 2)
    bsp.now_s += 11
    (refusal,) = bsp.machine.read_gate.tick(bsp.now_s)
    error = problem([refusal])
    assert isinstance(error, WaitExpired)
    assert "update 2 of table 'model'" in str(error)
    assert "worker 1 (clock 1, last heard 18.2 s ago)" in str(error)
    assert bsp.machine.read_gate.tick(bsp.now_s) == []


def test_a_consistent_read_is_answered_at_exactly_its_clock(bsp: Bench) -> None:
    bsp.pull(None, 1, consistent=True)
    bsp.seal(0, 1, 1)
    assert answers(bsp.seal(1, 1, 1)) == [1]
    late = bsp.pull(None, 0, waiter=2, consistent=True)
    error = problem(late)
    assert isinstance(error, AlreadyPast)
    assert error.clock == 1


def test_a_reader_waits_for_no_clock(bsp: Bench) -> None:
    assert answers(bsp.pull(None, 99)) == [1]


def test_staleness_counts_others_updates_since_the_pull(asp: Bench) -> None:
    seen = asp.machine.state.versions[0]
    for clock in (1, 2, 3):
        asp.push(1, 2 * clock - 1, clock)
        asp.seal(1, 2 * clock, clock)
    asp.push(0, 1, 1, pulled_peer_version=seen)
    done = asp.seal(0, 2, 1)
    staleness = [
        e.ending.staleness for e in done if isinstance(e, ReplyTo) and e.ending and e.sequence == 1
    ]
    assert staleness == [3]


# --- S6: leaving


def test_a_worker_that_left_is_not_waited_for(bsp: Bench) -> None:
    bsp.seal(1, 1, 1, skip=True, last=True)
    for clock in (1, 2, 3):
        bsp.push(0, 2 * clock - 1, clock)
        bsp.seal(0, 2 * clock, clock)
    assert [clock for clock, _ in applied(bsp.effects)] == [1, 2, 3]


def test_an_empty_last_step_waits_for_nobody(bsp: Bench) -> None:
    bsp.push(1, 1, 1)
    left = bsp.seal(1, 2, 1, skip=True, last=True)
    assert outcomes(left) == {(1, 1): Outcome.SKIPPED, (1, 2): Outcome.APPLIED}
    assert bsp.staging.staged_bytes == 0


def test_a_leavers_unsealed_blocks_are_withdrawn(bsp: Bench) -> None:
    bsp.push(1, 1, 2)
    left = bsp.seal(1, 2, 1, last=True)
    assert outcomes(left) == {(1, 1): Outcome.WITHDRAWN}
    done = bsp.seal(0, 1, 1)
    assert bsp.staging.staged_bytes == 0
    assert outcomes(done)[1, 2] is Outcome.APPLIED
    assert outcomes(bsp.push(1, 3, 2)) == {(1, 3): Outcome.INVALID}


def test_when_all_have_left_a_read_says_so(bsp: Bench) -> None:
    for rank in (0, 1):
        bsp.seal(rank, 1, 1, skip=True, last=True)
    bsp.pull(0, 2)
    assert "all have left" in bsp.machine.read_gate.waits(bsp.now_s)[0]
