"""Updates that wait for the scale that clips them (SEMANTICS S4)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ps_core.change import TableChange
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import Mode, parsed
from ps_core.errors import AlreadyPast, InvalidConfig, UpdateFailed
from ps_core.keys import Incarnation, NodeId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_core.sliced_work import at_once
from ps_core.tables.optimizers import OptimizerKind
from ps_server.ranges.events import (
    Accumulate,
    Apply,
    Drop,
    Effect,
    Reduce,
    RefusePull,
    ReplyTo,
    ScaleEvent,
)
from ps_server.ranges.range_copy import copying, restore
from tests.unit.machine_harness import (
    PLACE,
    Bench,
    answers,
    applied,
    kinds,
    make_table,
    outcomes,
    problem,
    told,
)


def bench(setting: str = "bsp", workers: int = 2, kind: OptimizerKind = OptimizerKind.SGD) -> Bench:
    return Bench(make_table(parsed(setting), kind=kind), workers=workers)


def step(at: Bench, rank: int, clock: int, first: int, **terms: object) -> None:
    """A push and a clipped seal."""
    at.push(rank, first, clock, block=rank)
    at.seal(rank, first + 1, clock, (), clip_scale=0.5, **terms)


def summed(workers: int = 2) -> Bench:
    """All have sealed clock 1; the update waits."""
    at = bench(workers=workers)
    for rank in range(workers):
        step(at, rank, 1, 1)
    return at


def endings(effects: list[Effect], rank: int) -> dict[int, Ending]:
    """How the worker's entries ended, by sequence."""
    return {
        effect.sequence: effect.ending
        for effect in effects
        if isinstance(effect, ReplyTo) and effect.ending is not None and effect.sender.rank == rank
    }


def gone(at: Bench, rank: int, state: NodeState = NodeState.GONE) -> list[Effect]:
    sender = at.sender(rank)
    node = Node(NodeId(rank), sender.incarnation, Role.WORKER, rank, "", state)
    return at.gone(node)


def test_the_update_waits_and_everybody_is_told_what_the_range_has() -> None:
    at = summed()
    assert applied(at.effects) == []
    assert told(at.effects, 0) == told(at.effects, 1) == {1: (1.0, 1.0, 0.0, 0.0)}
    assert at.machine.state.clock == 0
    assert set(outcomes(at.effects).values()) == {Outcome.APPLIED}


def test_who_takes_the_range_over_knows_that_the_step_was_taken() -> None:
    """A worker that joins then takes no part in it: it would wait for its end for ever."""
    at = summed()
    other = Bench(at.table, workers=2)
    restore(at_once(copying(at.machine.state)), other.machine.state, at.now_s)
    state = other.machine.state
    assert (state.clock, state.stepped_clock, state.reached_clock) == (0, 1, 1)


def test_the_first_word_counts_and_the_others_agree() -> None:
    at = summed()
    said = at.scale(1, 3, 1, 0.25)
    (apply,) = [effect for effect in said if isinstance(effect, Apply)]
    assert apply.record.update_scale == 0.25
    assert apply.record.blocks == (0, 1)
    again = at.scale(0, 3, 1, 0.25)
    assert outcomes(again) == {(0, 3): Outcome.APPLIED}
    assert not [effect for effect in again if isinstance(effect, Apply)]
    assert at.machine.state.clock == 1


def test_a_sum_of_nothing_is_dropped_when_its_scale_is_said() -> None:
    """Else a server keeps one more of each clipped step that has no gradient in the range."""
    at = bench()
    for rank in range(2):
        at.seal(rank, 1, 1, (), clip_scale=0.5)
    assert [effect.record.clock for effect in at.effects if isinstance(effect, Reduce)] == [1]
    said = at.scale(1, 2, 1, 0.25)
    (dropped,) = [effect for effect in said if isinstance(effect, Drop | Apply)]
    assert isinstance(dropped, Drop)
    assert dropped.record.summed_by  # nobody is told that an update was lost
    assert at.machine.state.clock == 1


def test_both_are_named_who_disagree_and_the_first_stands() -> None:
    at = summed()
    at.scale(1, 3, 1, 0.25)
    refused = at.scale(0, 3, 1, 0.5)
    assert outcomes(refused) == {(0, 3): Outcome.INVALID}
    assert "workers 1 and 0 disagree" in problem(refused).message
    assert "0.25 and 0.5" in problem(refused).message
    assert len(applied(at.effects)) == 1


def test_a_scale_that_is_no_number_agrees_with_itself() -> None:
    table = make_table(Mode.BSP)
    spec = table.spec
    at = Bench(replace(table, spec=replace(spec, allow_non_finite=True)), workers=2)
    step(at, 0, 1, 1)
    step(at, 1, 1, 1)
    at.scale(0, 3, 1, math.nan)
    assert outcomes(at.scale(1, 3, 1, math.nan)) == {(1, 3): Outcome.APPLIED}


def test_a_lost_answer_is_given_again() -> None:
    at = summed()
    first = at.scale(0, 3, 1, 0.25)
    assert outcomes(at.scale(0, 3, 1, 0.25)) == outcomes(first)
    again = at.seal(0, 2, 1, clip_scale=0.5)
    assert endings(again, 0)[2].squares == (1.0, 1.0, 0.0, 0.0)
    assert len(applied(at.effects)) == 1


def test_reads_wait_for_it_and_say_for_whom() -> None:
    at = summed()
    assert answers(at.pull(0, 1)) == []
    (sentence,) = at.machine.read_gate.waits(at.now_s)
    assert "update 1 of table 'model' (range 0) waits for the scale that clips it" in sentence
    assert "worker 0 (clock 1" in sentence
    assert "worker 1 (clock 1" in sentence
    assert answers(at.scale(0, 3, 1, 1.0)) == [1]


def test_the_next_update_waits_for_this_one() -> None:
    at = bench(workers=1)
    step(at, 0, 1, 1)
    at.push(0, 4, 2)
    at.seal(0, 5, 2, clip_scale=0.5)  # its scale of clock 1 is number 3, and on its way
    assert not [e for e in at.effects if isinstance(e, Accumulate) and e.clock == 2]
    at.scale(0, 3, 1, 0.5)
    assert told(at.effects, 0)[2] == (4.0, 0.0, 0.0, 0.0)
    assert at.machine.state.clock == 1


def test_own_steps_are_clipped_where_each_is_an_update() -> None:
    at = bench("ssp:2")
    step(at, 0, 1, 1, contribution_scale=0.5)
    (found,) = [effect for effect in at.effects if isinstance(effect, Accumulate)]
    assert found.scale == 0.25
    assert len(applied(at.effects)) == 1
    assert told(at.effects, 0) == {}


def test_a_step_that_all_skip_waits_for_nothing() -> None:
    at = bench()
    step(at, 0, 1, 1, skip=True)
    step(at, 1, 1, 1, skip=True)
    assert at.machine.state.clock == 1
    assert not [effect for effect in at.effects if isinstance(effect, Reduce)]


def test_one_that_skips_is_told_too_and_has_no_say_in_whether_it_is_clipped() -> None:
    at = bench()
    step(at, 0, 1, 1)
    at.push(1, 1, 1)
    at.seal(1, 2, 1, skip=True)
    assert told(at.effects, 1) == {1: (1.0, 0.0, 0.0, 0.0)}
    assert outcomes(at.effects)[1, 1] is Outcome.SKIPPED


def test_who_comes_too_late_is_told_as_well() -> None:
    """Else, where each range left somebody else out, nobody knew the whole norm."""
    at = bench("bsp:backup=1", workers=2)
    step(at, 0, 1, 1)
    late = at.push(1, 1, 1, block=1) + at.seal(1, 2, 1, clip_scale=0.5)
    ended = endings(late, 1)
    assert {ending.outcome for ending in ended.values()} == {Outcome.DISCARDED}
    assert ended[2].squares == (1.0, 0.0, 0.0, 0.0)
    assert isinstance(ended[2].error, AlreadyPast)
    assert ended[2].error.clock == 1
    assert outcomes(at.scale(1, 3, 1, 0.5))[1, 3] is Outcome.APPLIED
    assert applied(at.effects) == [(1, [(0, 1)])]


def test_who_comes_while_the_sum_is_reduced_is_told_when_it_is() -> None:
    """A change that is settled lets several seals go at once, before the values are looked at."""
    at = bench("bsp:backup=1", workers=2)
    proposed = replace(at.table, proposed=TableChange(1, 0, parsed("asp")))
    at.observe(proposed)
    step(at, 0, 1, 1)
    step(at, 1, 1, 1)
    assert not [effect for effect in at.effects if isinstance(effect, Reduce)]
    at.observe(replace(at.table, proposed=None))  # withdrawn
    late = endings(at.effects, 1)[2]
    assert late.outcome is Outcome.DISCARDED
    assert late.squares == (1.0, 0.0, 0.0, 0.0)


def test_an_update_that_nobody_can_scale_any_more_is_dropped() -> None:
    at = bench(workers=3)
    step(at, 0, 1, 1)
    step(at, 1, 1, 1)
    at.seal(2, 1, 1, skip=True)  # lives, and has nothing to say
    assert not [e for e in gone(at, 0) if isinstance(e, Drop)]
    (drop,) = [e for e in gone(at, 1) if isinstance(e, Drop)]
    assert drop.record.clock == 1
    assert at.machine.state.clock == 1
    assert at.machine.state.versions[0] == 0
    step(at, 2, 2, 2)
    assert told(at.effects, 2)[2] == (0.0, 0.0, 2.0, 0.0)


def test_an_update_is_dropped_too_if_a_last_seal_was_in_it_and_its_worker_has_left() -> None:
    """As where an operator ends their run."""
    at = bench(workers=2)
    step(at, 0, 1, 1)
    step(at, 1, 1, 1, last=True)
    assert not [e for e in gone(at, 0, NodeState.LEFT) if isinstance(e, Drop)]
    (drop,) = [e for e in gone(at, 1, NodeState.LEFT) if isinstance(e, Drop)]
    assert drop.record.clock == 1
    assert at.machine.state.clock == 1


def test_who_has_sealed_its_last_step_still_says_the_scale() -> None:
    at = bench(workers=2)
    step(at, 0, 1, 1)
    step(at, 1, 1, 1, last=True)
    gone(at, 0)
    at.scale(1, 3, 1, 0.5)
    assert applied(at.effects) == [(1, [(0, 1), (1, 1)])]


def test_a_sum_of_the_dead_alone_waits_for_nobody() -> None:
    """They had sealed it, and were gone before the others ended the step with nothing."""
    at = bench(workers=2)
    step(at, 0, 1, 1)
    gone(at, 0)
    at.seal(1, 1, 1, skip=True)
    assert [e.record.clock for e in at.effects if isinstance(e, Drop)] == [1]
    assert at.machine.state.clock == 1
    assert outcomes(at.effects)[1, 1] is Outcome.APPLIED
    at.push(1, 2, 2)
    at.seal(1, 3, 2, clip_scale=0.5)
    assert told(at.effects, 1)[2] == (2.0, 0.0, 0.0, 0.0)


def test_a_word_for_an_update_that_was_dropped_is_discarded() -> None:
    at = bench(workers=2)
    step(at, 0, 1, 1)
    at.seal(1, 1, 1, skip=True)
    gone(at, 0)
    assert outcomes(at.scale(1, 2, 1, 0.5)) == {(1, 2): Outcome.DISCARDED}


def test_the_living_scale_what_the_dead_had_a_part_in() -> None:
    at = summed()
    gone(at, 0)
    at.scale(1, 3, 1, 0.5)
    assert applied(at.effects) == [(1, [(0, 1), (1, 1)])]


@pytest.mark.parametrize("scale", [-0.5, math.inf, math.nan])
def test_a_scale_that_is_no_scale_is_refused(scale: float) -> None:
    at = summed()
    refused = at.scale(0, 3, 1, scale)
    assert outcomes(refused) == {(0, 3): Outcome.INVALID}
    assert "expected a finite number, 0 or above" in problem(refused).message
    assert applied(at.effects) == []
    at.scale(1, 3, 1, 0.0)
    assert at.machine.state.clock == 1


def test_a_scale_before_its_update_is_refused() -> None:
    at = bench()
    step(at, 0, 1, 1)
    refused = at.scale(0, 3, 1, 0.5)
    assert "says the scale of update 1 of table 'model', which has not formed" in (
        problem(refused).message
    )


def test_who_clips_and_who_does_not_are_named() -> None:
    at = bench()
    at.seal(0, 1, 1)
    refused = at.seal(1, 1, 1, clip_scale=0.5)
    assert isinstance(problem(refused), InvalidConfig)
    assert "worker 1 clips the gradient, worker 0 not" in problem(refused).message


@pytest.mark.parametrize("kind", [OptimizerKind.AGGREGATE, OptimizerKind.ASSIGN, OptimizerKind.ADD])
def test_what_is_no_gradient_is_not_clipped(kind: OptimizerKind) -> None:
    refused = bench(kind=kind).seal(0, 1, 1, clip_scale=0.5)
    assert "no gradient that the servers could clip" in problem(refused).message


@pytest.mark.parametrize(
    "terms",
    [
        {"clip_scale": 0.0},
        {"clip_scale": math.nan},
        {"clip_scale": math.inf},
        {"clip_scale": 1e-200, "contribution_scale": 1e-200},
    ],
)
def test_a_clip_scale_is_finite_and_above_0(terms: dict[str, object]) -> None:
    refused = bench().seal(0, 1, 1, (), **terms)
    assert "clip_scale is" in problem(refused).message


def test_eager_steps_are_not_clipped() -> None:
    at = bench("asp")
    at.push(0, 1, 1, eager=())
    assert "eager steps" in problem(at.seal(0, 2, 1, clip_scale=0.5)).message


def test_a_table_that_fails_says_so_to_those_who_scale() -> None:
    at = summed()
    at.fail(UpdateFailed("it raised"))
    refused = at.scale(0, 3, 1, 0.5)
    assert outcomes(refused) == {(0, 3): Outcome.INVALID}
    assert "it raised" in problem(refused).message
    assert not [e for e in at.effects if isinstance(e, Apply)]
    assert ReplyKind.COMMITTED in kinds(refused)
    assert isinstance(at.pull(0, 1)[0], RefusePull)


def test_the_sender_of_a_scale_is_no_stranger() -> None:
    """A new incarnation of a rank has to join before anything of it counts."""
    at = summed()
    event_sender = at.sender(0)._replace(incarnation=Incarnation(5000))
    effects = at.machine.entry(ScaleEvent(PLACE, event_sender, 1, 1, 0.5), at.now_s)
    assert kinds(effects) == [ReplyKind.ERROR]


@pytest.mark.parametrize(
    ("contribution_scale", "clip_scale"),
    [(1e200, 1e200), (1e39, None), (1e30, 1e30), (1e-200, 1e-200), (math.inf, None)],
)
def test_scales_beyond_what_a_sum_can_have_are_refused_where_they_come_in(
    contribution_scale: float, clip_scale: float | None
) -> None:
    """Found when the update is made it would be too late: the step is decided."""
    at = Bench(make_table(Mode.ASP), workers=1)
    at.push(0, 1, 1)
    said = at.seal(0, 2, 1, contribution_scale=contribution_scale, clip_scale=clip_scale)
    assert outcomes(said)[0, 2] is Outcome.INVALID
    assert "scale" in problem(said).message
    assert not [effect for effect in at.effects if isinstance(effect, Accumulate | Apply)]


def test_who_is_late_for_an_update_of_nothing_clipped_is_told_that_it_adds_nothing() -> None:
    """Another range may wait for that worker to say the scale (S7)."""
    at = bench("bsp:backup=1")
    at.seal(1, 1, 1, skip=True)  # as one that joins passes what it is behind
    step(at, 0, 1, 1)
    assert endings(at.effects, 0)[2] == replace(
        endings(at.effects, 0)[2], outcome=Outcome.DISCARDED, squares=(0.0,) * 4
    )


def test_who_is_later_still_is_told_so_unless_something_was_clipped() -> None:
    at = bench("bsp:backup=1")
    at.seal(1, 1, 1, skip=True)
    for clock in range(2, 8):  # rank 1 goes on alone
        step(at, 1, clock, 3 * clock - 4)
        at.scale(1, 3 * clock - 2, clock, 1.0)
    for number, clock in enumerate((1, 2, 7)):
        step(at, 0, clock, 2 * number + 1)
    found = endings(at.effects, 0)
    assert [found[seal].squares for seal in (2, 4)] == [(0.0,) * 4, ()]  # the second is forgotten
    assert any(found[6].squares)
