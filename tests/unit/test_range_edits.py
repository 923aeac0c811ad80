"""Steps that are edits: all workers' values replace what is there, or nobody's do (S16)."""

from __future__ import annotations

import pytest

from ps_core.consistency import Consistency, Mode
from ps_core.errors import EditRefused, InvalidConfig, InvalidTensor
from ps_core.ledger import Outcome
from ps_core.tables.optimizers import OptimizerKind
from ps_server.ranges.events import Apply, AssignValues, Drop, Effect, ReplyTo
from tests.unit.machine_harness import Bench, answers, make_table, outcomes, problem

A, B = b"one edit", b"another"


@pytest.fixture
def bsp() -> Bench:
    return Bench(make_table(Mode.BSP))


def assigned(effects: list[Effect]) -> list[tuple[int, tuple[tuple[int, object], ...]]]:
    """(clock, parts) of each."""
    return [(e.record.clock, e.parts) for e in effects if isinstance(e, AssignValues)]


def updated(effects: list[Effect]) -> list[int]:
    """The clocks of the updates."""
    return [e.record.clock for e in effects if isinstance(e, Apply)]


def refusals(effects: list[Effect]) -> set[str]:
    """What entries ended with that an edit was refused for."""
    endings = [e.ending for e in effects if isinstance(e, ReplyTo) and e.ending is not None]
    return {ending.error.message for ending in endings if isinstance(ending.error, EditRefused)}


def edit(bench: Bench, rank: int, clock: int, name: bytes, block: int = 0) -> list[Effect]:
    """A worker's whole step, in which it has two entries."""
    bench.push(rank, 2 * clock - 1, clock, block, is_assign=True)
    return bench.seal(rank, 2 * clock, clock, edit=name)


def step(bench: Bench, rank: int, clock: int) -> list[Effect]:
    """The same, of a gradient."""
    bench.push(rank, 2 * clock - 1, clock)
    return bench.seal(rank, 2 * clock, clock)


def test_values_of_the_first_rank_are_taken_when_all_say_the_same(bsp: Bench) -> None:
    assert assigned(edit(bsp, 1, 1, A)) == []
    done = edit(bsp, 0, 1, A)
    assert assigned(done) == [(1, ((0, (0, 1)),))]
    assert outcomes(done) == dict.fromkeys([(0, 1), (0, 2), (1, 1), (1, 2)], Outcome.APPLIED)
    assert (bsp.machine.state.clock, bsp.machine.state.changed_clock) == (1, 1)
    assert bsp.machine.state.versions[0] == 0  # it is no update
    assert bsp.staging.staged_bytes == bsp.staging.summed_bytes == 0


def load(bench: Bench, rank: int, clock: int, array: str, name: bytes = A) -> list[Effect]:
    """As `edit`, of optimizer state."""
    bench.push(rank, 2 * clock - 1, clock, is_assign=True)
    return bench.seal(rank, 2 * clock, clock, edit=name, array=array)


def test_optimizer_state_is_taken_as_values_are_and_the_next_edit_is_of_values(bsp: Bench) -> None:
    load(bsp, 1, 1, "momentum_buffer")
    records = [e.record for e in load(bsp, 0, 1, "momentum_buffer") if isinstance(e, AssignValues)]
    edit(bsp, 0, 2, B)
    records += [e.record for e in edit(bsp, 1, 2, B) if isinstance(e, AssignValues)]
    assert [(r.clock, r.array) for r in records] == [(1, "momentum_buffer"), (2, "")]


@pytest.mark.parametrize(
    ("array", "name", "words"),
    [
        ("step", A, "workers 0 and 1 loaded optimizer state to different values"),
        ("momentum_buffer", B, "workers 0 and 1 loaded optimizer state to different values"),
        ("", A, "workers 0 and 1 loaded optimizer state to different values"),
    ],
)
def test_workers_that_load_different_state_are_told(
    bsp: Bench, array: str, name: bytes, words: str
) -> None:
    load(bsp, 0, 1, "momentum_buffer")
    done = load(bsp, 1, 1, array, name)
    assert assigned(done) == []
    (told,) = refusals(done)
    assert words in told
    assert bsp.machine.state.clock == 1


def test_who_loads_alone_is_named(bsp: Bench) -> None:
    step(bsp, 0, 1)
    (told,) = refusals(load(bsp, 1, 1, "step"))
    assert "worker 1 loaded optimizer state before clock 1" in told
    assert "worker 0 did not" in told


@pytest.mark.parametrize("array", ["exp_avg", "sum", "mean_square"])
def test_state_that_the_optimizer_has_not_is_refused(bsp: Bench, array: str) -> None:
    """Its clock is still open."""
    told = problem(load(bsp, 0, 1, array))
    assert isinstance(told, InvalidConfig)
    assert "momentum_buffer, step" in str(told)


def test_a_step_of_gradients_has_no_array(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    assert isinstance(problem(bsp.seal(0, 2, 1, array="step")), InvalidConfig)


def test_gradients_follow_at_the_next_clock(bsp: Bench) -> None:
    for rank in (0, 1):
        edit(bsp, rank, 1, A)
    for rank in (0, 1):
        step(bsp, rank, 2)
    assert [type(e) for e in bsp.effects if isinstance(e, Apply | AssignValues)] == [
        AssignValues,
        Apply,
    ]
    assert updated(bsp.effects) == [2]


def test_a_read_of_the_clock_waits_for_the_edit(bsp: Bench) -> None:
    bsp.pull(0, 1)
    edit(bsp, 0, 1, A)
    assert answers(bsp.effects) == []
    done = edit(bsp, 1, 1, A)
    assert answers(done) == [1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_workers_that_changed_to_different_values_are_both_named(
    bsp: Bench, order: tuple[int, int]
) -> None:
    for rank in order:
        edit(bsp, rank, 1, (A, B)[rank])
    entries = [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert outcomes(bsp.effects) == dict.fromkeys(entries, Outcome.INVALID)
    (said,) = refusals(bsp.effects)
    assert "workers 0 and 1" in said
    assert "clock 1 of table 'model'" in said
    assert assigned(bsp.effects) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("editor", [0, 1])
def test_an_edit_and_a_gradient_come_to_nothing(
    bsp: Bench, order: tuple[int, int], editor: int
) -> None:
    """The clock is over for both: nobody is half a step ahead, and nobody waits."""
    for rank in order:
        (edit(bsp, rank, 1, A) if rank == editor else step(bsp, rank, 1))
    assert set(outcomes(bsp.effects).values()) == {Outcome.INVALID}
    (said,) = refusals(bsp.effects)
    assert f"worker {editor} changed" in said
    assert f"worker {1 - editor} did not" in said
    assert not [e for e in bsp.effects if isinstance(e, AssignValues | Apply)]
    accumulated = editor == 1  # the gradient of rank 0 had its turn
    assert any(isinstance(e, Drop) for e in bsp.effects) == accumulated
    assert bsp.staging.staged_bytes == bsp.staging.summed_bytes == 0
    assert bsp.machine.state.clock == 1
    for rank in (0, 1):
        step(bsp, rank, 2)
    assert updated(bsp.effects) == [2]


def test_an_outcome_is_the_same_when_an_entry_comes_again(bsp: Bench) -> None:
    edit(bsp, 0, 1, A)
    step(bsp, 1, 1)
    first = refusals(bsp.effects)
    assert refusals(bsp.seal(0, 2, 1, edit=A)) == first
    assert refusals(bsp.push(1, 1, 1)) == first


def test_who_skips_has_no_say() -> None:
    bench = Bench(make_table(), workers=3)
    edit(bench, 0, 1, A)
    bench.seal(1, 1, 1, skip=True)
    edit(bench, 2, 1, A)
    assert [clock for clock, _ in assigned(bench.effects)] == [1]


def test_the_values_may_be_in_other_ranges(bsp: Bench) -> None:
    for rank in (0, 1):
        bsp.seal(rank, 1, 1, edit=A)
    assert assigned(bsp.effects) == []
    assert set(outcomes(bsp.effects).values()) == {Outcome.APPLIED}


def test_a_disagreement_is_seen_where_nothing_was_pushed(bsp: Bench) -> None:
    bsp.seal(0, 1, 1, edit=A)
    bsp.seal(1, 1, 1)
    assert len(refusals(bsp.effects)) == 1


def test_another_rate_beside_an_edit_is_no_disagreement_of_its_own(bsp: Bench) -> None:
    edit(bsp, 0, 1, A)
    bsp.push(1, 1, 1)
    bsp.seal(1, 2, 1, (("lr", 3.0),))
    assert len(refusals(bsp.effects)) == 1


@pytest.mark.parametrize(
    "setting",
    [
        Consistency(Mode.ASP),
        Consistency(Mode.SSP, staleness=2),
        Consistency(Mode.BSP, backup_workers=1),
    ],
    ids=str,
)
def test_a_setting_without_steps_of_all_workers_ends_the_clock_of_the_one(
    setting: Consistency,
) -> None:
    bench = Bench(make_table(setting), workers=3)
    edit(bench, 0, 1, A)
    for rank in (1, 2):
        step(bench, rank, 1)
    assert outcomes(bench.effects)[0, 1] is outcomes(bench.effects)[0, 2] is Outcome.INVALID
    (said,) = refusals(bench.effects)
    assert "worker 0" in said
    assert str(setting) in said
    assert assigned(bench.effects) == []
    assert bench.staging.staged_bytes == 0
    for rank in range(3):
        step(bench, rank, 2)
    assert set(updated(bench.effects)) == {1, 2}


@pytest.mark.parametrize("setting", [Consistency(Mode.ASP), Consistency(Mode.SSP)], ids=str)
def test_one_worker_alone_may_edit_in_every_setting(setting: Consistency) -> None:
    bench = Bench(make_table(setting), workers=1)
    done = edit(bench, 0, 1, A)
    assert assigned(done) == [(1, ((0, (0, 1)),))]
    assert bench.machine.state.changed_clock == 1
    step(bench, 0, 2)
    assert updated(bench.effects) == [2]


def test_gradients_that_had_left_are_withdrawn_or_replaced(bsp: Bench) -> None:
    bsp.push(0, 1, 1, 0)
    bsp.push(0, 2, 1, 1)
    bsp.push(0, 3, 1, 0, is_assign=True, replaces=1)
    bsp.withdraw(0, 2)
    bsp.seal(0, 4, 1, edit=A)
    edit(bsp, 1, 1, A)
    assert assigned(bsp.effects) == [(1, ((0, (0, 3)),))]
    assert bsp.staging.staged_bytes == 0


def test_a_gradient_that_was_refused_is_no_part_of_an_edit(bsp: Bench) -> None:
    bsp.push(0, 1, 1, 1, problem=InvalidTensor("not finite"))
    bsp.push(0, 2, 1, 0, is_assign=True)
    bsp.seal(0, 3, 1, edit=A)
    edit(bsp, 1, 1, A)
    assert len(assigned(bsp.effects)) == 1


def test_values_that_were_refused_refuse_the_edit(bsp: Bench) -> None:
    bsp.push(0, 1, 1, 0, is_assign=True, problem=InvalidTensor("not finite"))
    assert isinstance(problem(bsp.seal(0, 2, 1, edit=A)), InvalidTensor)


@pytest.mark.parametrize(
    "terms", [{"skip": True}, {"last": True}, {"clip_scale": 1.0}, {"clock": 0}], ids=str
)
def test_an_edit_is_nothing_else(bsp: Bench, terms: dict[str, object]) -> None:
    settings = {"clock": 1, "edit": A, **terms}
    assert isinstance(problem(bsp.seal(0, 1, **settings)), InvalidConfig)  # type: ignore[arg-type]


def test_gradients_in_an_edit_take_no_part(bsp: Bench) -> None:
    """Their withdrawal may come later than the seal."""
    bsp.push(0, 1, 1, 1)
    bsp.push(0, 2, 1, 0, is_assign=True)
    done = bsp.seal(0, 3, 1, edit=A)
    assert outcomes(done) == {(0, 1): Outcome.WITHDRAWN}
    assert outcomes(bsp.withdraw(0, 1)) == {(0, 1): Outcome.WITHDRAWN}
    edit(bsp, 1, 1, A)
    assert assigned(bsp.effects) == [(1, ((0, (0, 2)),))]
    assert bsp.staging.staged_bytes == 0


def test_values_without_an_edit_are_refused_but_for_a_skip(bsp: Bench) -> None:
    bsp.push(0, 1, 1, is_assign=True)
    assert isinstance(problem(bsp.seal(0, 2, 1)), InvalidConfig)
    bsp.seal(0, 3, 1, skip=True)
    assert outcomes(bsp.seal(1, 1, 1))[0, 1] is Outcome.SKIPPED


@pytest.mark.parametrize("kind", [OptimizerKind.AGGREGATE, OptimizerKind.ASSIGN, OptimizerKind.ADD])
def test_tables_without_parameters_of_an_optimizer_have_no_edits(kind: OptimizerKind) -> None:
    bench = Bench(make_table(kind=kind))
    assert isinstance(problem(bench.push(0, 1, 1, is_assign=True)), InvalidConfig)
    assert isinstance(problem(bench.seal(0, 2, 1, edit=A)), InvalidConfig)
