"""SSP, ASP with policies, BSP with backup workers: who waits for whom; what becomes of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_core.change import TableChange
from ps_core.consistency import Mode, parsed
from ps_core.errors import AlreadyPast, InvalidConfig, WaitExpired
from ps_core.ledger import Outcome
from ps_core.tables.optimizers import OptimizerKind
from ps_server.ranges.events import Accumulate, Apply, Effect, RefusePull, ReplyTo
from ps_server.ranges.read_gate import WaitCause
from ps_worker.spec.settings import SSP
from tests.unit.machine_harness import Bench, answers, applied, make_table, outcomes, problem

LR = (("lr", 0.5),)


def _bench(text: str, workers: int = 2) -> Bench:
    return Bench(make_table(parsed(text)), workers=workers)


class Steps:
    """Steps of one block a worker, whose sequences are counted here."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sequences: dict[int, int] = {}

    def step(self, rank: int, clock: int, **push: Any) -> list[Effect]:
        """One push and its seal."""
        sequence = self.sequences.get(rank, 0) + 2
        self.sequences[rank] = sequence
        pushed = self.bench.push(rank, sequence - 1, clock, **push)
        return pushed + self.bench.seal(rank, sequence, clock)


def _scales(effects: list[Effect]) -> list[float]:
    return [effect.scale for effect in effects if isinstance(effect, Accumulate)]


def _endings(effects: list[Effect]) -> list[tuple[int, Outcome, int]]:
    return [
        (e.sequence, e.ending.outcome, e.ending.staleness)
        for e in effects
        if isinstance(e, ReplyTo) and e.ending is not None
    ]


# --- SSP


def test_ssp_lets_a_worker_run_ahead_by_its_bound_and_no_further() -> None:
    bench = _bench("ssp:2")
    steps = Steps(bench)
    for clock in (1, 2, 3):
        assert applied(steps.step(0, clock)) == [(clock, [(0, 2 * clock - 1)])]
    assert answers(bench.pull(0, 2, waiter=2)) == [2]
    assert answers(bench.pull(0, 3, waiter=3)) == []  # worker 1 has sealed nothing
    assert answers(steps.step(1, 1)) == [3]


def test_ssp_reads_its_own_writes() -> None:
    bench = _bench("ssp:4")
    assert answers(bench.pull(0, 1)) == []
    assert answers(Steps(bench).step(0, 1)) == [1]


def test_ssp_of_0_waits_for_every_worker_at_each_clock() -> None:
    bench = _bench("ssp:0", workers=3)
    steps = Steps(bench)
    steps.step(0, 1)
    steps.step(1, 1)
    assert answers(bench.pull(0, 1)) == []
    assert answers(steps.step(2, 1)) == [1]


def test_ssp_goes_on_without_a_worker_that_left() -> None:
    bench = _bench("ssp:1")
    steps = Steps(bench)
    for clock in (1, 2, 3):
        steps.step(0, clock)
    assert answers(bench.pull(0, 3)) == []
    assert answers(bench.seal(1, 1, 1, skip=True, last=True)) == [1]


def test_a_read_that_expires_under_ssp_names_the_bound_and_who_is_behind() -> None:
    bench = _bench("ssp:1", workers=3)
    steps = Steps(bench)
    for clock in (1, 2, 3):
        steps.step(0, clock)
    steps.step(1, 1)
    bench.pull(0, 3)
    (refusal,) = bench.machine.tick(bench.now_s + 11)
    assert isinstance(refusal, RefusePull)
    assert isinstance(refusal.error, WaitExpired)
    assert (
        "at clock 3 waits for clock 2 of worker 1 (clock 1, last heard 11.0 s ago), worker 2 "
        in (refusal.error.message)
    )
    assert "ssp:1 allows no more" in refusal.error.message


def test_a_wait_has_a_cause() -> None:
    bench = _bench("ssp:0")
    reads = bench.machine.read_gate
    bench.pull(0, 1, waiter=1)
    assert reads.cause(1) is WaitCause.OWN_STEP
    Steps(bench).step(0, 1)
    assert reads.cause(1) is WaitCause.WORKERS
    Steps(bench).step(1, 1)
    assert reads.cause(1) is None


@pytest.mark.parametrize(
    ("rank", "consistent", "cause"),
    [(0, False, WaitCause.WORKERS), (None, True, WaitCause.CONSISTENT)],
)
def test_causes_under_bsp(rank: int | None, consistent: bool, cause: WaitCause) -> None:
    bench = _bench("bsp")
    Steps(bench).step(0, 1)
    bench.pull(rank, 1, consistent=consistent)
    assert bench.machine.read_gate.cause(1) is cause


def test_a_table_without_values_is_a_cause_of_its_own() -> None:
    bench = Bench(make_table(Mode.ASP, from_rank_zero=True))
    bench.pull(1, 0)
    assert bench.machine.read_gate.cause(1) is WaitCause.INITIAL_VALUES


@pytest.mark.parametrize("text", ["bsp", "ssp:1", "asp"])
def test_a_read_far_in_the_future_is_refused_and_a_near_one_waits(text: str) -> None:
    bench = _bench(text)
    Steps(bench).step(0, 1)
    assert bench.pull(0, 65, waiter=1) == []
    (refusal,) = bench.pull(0, 66, waiter=2)
    assert isinstance(refusal, RefusePull)
    assert isinstance(refusal.error, InvalidConfig)
    assert "asks for clock 66; expected its worker's, at most 64 beyond 1" in refusal.error.message


# --- ASP with a policy


def _stale(text: str, others: int) -> list[Effect]:
    """Worker 0 pulled, worker 1 took `others` steps, worker 0 pushes."""
    bench = _bench(text)
    steps = Steps(bench)
    for clock in range(1, others + 1):
        steps.step(1, clock)
    return steps.step(0, 1, pulled_peer_version=0)


@pytest.mark.parametrize(
    ("text", "others", "scale"),
    [
        ("asp", 3, 1.0),
        ("asp:damp=0.5", 0, 1.0),
        ("asp:damp=0.5", 3, 0.4),
        ("asp:divide", 0, 1.0),
        ("asp:divide", 1, 1.0),
        ("asp:divide", 4, 0.25),
    ],
)
def test_a_stale_push_is_scaled(text: str, others: int, scale: float) -> None:
    effects = _stale(text, others)
    assert _scales(effects) == [pytest.approx(scale)]
    assert _endings(effects)[0] == (1, Outcome.APPLIED, others)


def test_scales_of_seal_and_staleness_multiply() -> None:
    bench = _bench("asp:divide")
    steps = Steps(bench)
    for clock in (1, 2):
        steps.step(1, clock)
    bench.push(0, 1, 1, pulled_peer_version=0)
    assert _scales(bench.seal(0, 2, 1, contribution_scale=0.5)) == [0.25]


def test_blocks_of_one_step_are_scaled_each_by_its_own_staleness() -> None:
    bench = _bench("asp:divide")
    steps = Steps(bench)
    for clock in (1, 2):
        steps.step(1, clock, block=0)
    bench.push(0, 1, 1, block=0, pulled_peer_version=0)
    bench.push(0, 2, 1, block=1, pulled_peer_version=0)
    effects = bench.seal(0, 3, 1)
    accumulations = [
        (f.scale, [b for b, _ in f.parts]) for f in effects if isinstance(f, Accumulate)
    ]
    assert accumulations == [(1.0, [1]), (0.5, [0])]
    assert len(applied(effects)) == 1


def test_what_is_too_stale_is_turned_away_block_by_block() -> None:
    bench = _bench("asp:reject=1")
    steps = Steps(bench)
    for clock in (1, 2):
        steps.step(1, clock, block=0)
    bench.push(0, 1, 1, block=0, pulled_peer_version=0)
    bench.push(0, 2, 1, block=1, pulled_peer_version=0)
    effects = bench.seal(0, 3, 1)
    assert _endings(effects) == [
        (1, Outcome.REJECTED, 2),
        (2, Outcome.APPLIED, 0),
        (3, Outcome.APPLIED, 0),
    ]
    assert applied(effects) == [(1, [(0, 2)])]
    assert bench.staging.staged_bytes == 0


def test_a_step_that_is_turned_away_whole_is_a_step_all_the_same() -> None:
    effects = _stale("asp:reject=1", 2)
    assert _endings(effects) == [(1, Outcome.REJECTED, 2), (2, Outcome.APPLIED, 0)]
    assert applied(effects) == []


def test_the_bound_itself_is_accepted() -> None:
    assert _endings(_stale("asp:reject=2", 2))[0] == (1, Outcome.APPLIED, 2)


def test_an_eager_push_is_judged_when_it_arrives() -> None:
    bench = _bench("asp:reject=1")
    steps = Steps(bench)
    for clock in (1, 2):
        steps.step(1, clock, block=0)
    turned_away = bench.push(0, 1, 1, block=0, pulled_peer_version=0, eager=LR)
    assert _endings(turned_away) == [(1, Outcome.REJECTED, 2)]
    assert bench.staging.staged_bytes == 0
    taken = bench.push(0, 2, 1, block=1, pulled_peer_version=0, eager=LR)
    assert _endings(taken) == [(2, Outcome.APPLIED, 0)]
    assert _endings(bench.seal(0, 3, 1, LR)) == [(3, Outcome.APPLIED, 0)]


def test_a_rejection_is_answered_again_as_it_was() -> None:
    bench = _bench("asp:reject=1")
    steps = Steps(bench)
    for clock in (1, 2):
        steps.step(1, clock)
    steps.step(0, 1, pulled_peer_version=0)
    assert _endings(bench.push(0, 1, 1, pulled_peer_version=0)) == [(1, Outcome.REJECTED, 2)]


# --- BSP with backup workers


def test_an_update_forms_without_the_slowest() -> None:
    bench = _bench("bsp:backup=1", workers=3)
    steps = Steps(bench)
    steps.step(2, 1)
    formed = steps.step(0, 1)
    assert applied(bench.effects) == [(1, [(2, 1), (0, 1)])]  # as they came
    assert outcomes(formed) == {
        (rank, sequence): Outcome.APPLIED for rank in (0, 2) for sequence in (1, 2)
    }


def test_a_late_step_is_discarded_and_says_where_the_range_is() -> None:
    bench = _bench("bsp:backup=1", workers=3)
    steps = Steps(bench)
    for clock in (1, 2):
        steps.step(0, clock)
        steps.step(1, clock)
    late = steps.step(2, 1)
    assert outcomes(late) == {(2, 1): Outcome.DISCARDED, (2, 2): Outcome.DISCARDED}
    assert applied(late) == []
    assert bench.staging.staged_bytes == 0
    endings = [e.ending for e in late if isinstance(e, ReplyTo) and e.ending is not None]
    error = endings[0].error
    assert isinstance(error, AlreadyPast)
    assert error.clock == 2


def test_a_discarded_worker_goes_on_from_the_newest_clock() -> None:
    bench = _bench("bsp:backup=1", workers=3)
    steps = Steps(bench)
    for clock in (1, 2, 3):
        steps.step(0, clock)
        steps.step(1, clock)
    steps.step(2, 1)
    assert answers(bench.pull(2, 1)) == [1]
    steps.step(2, 4)
    steps.step(0, 4)
    assert applied(bench.effects)[-1] == (4, [(2, 3), (0, 7)])  # as they came


def test_nobody_skips_an_update_that_has_not_formed() -> None:
    """RM-6."""
    bench = _bench("bsp:backup=1", workers=3)
    steps = Steps(bench)
    steps.step(2, 2)  # clock 1 has not formed
    assert applied(steps.step(0, 1)) == []
    steps.step(1, 1)
    steps.step(1, 2)  # worker 2's turn has come
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1)]), (2, [(2, 1), (1, 3)])]


def test_the_first_step_says_the_learning_rate() -> None:
    """Who was left behind is elsewhere in its schedule; the update needs one rate."""
    bench = _bench("bsp:backup=1", workers=3)
    for rank, rate in ((2, 0.25), (0, 0.5)):
        bench.push(rank, 1, 1)
        assert not [e for e in bench.seal(rank, 2, 1, (("lr", rate),)) if isinstance(e, RefusePull)]
    (record,) = [effect.record for effect in bench.effects if isinstance(effect, Apply)]
    assert dict(record.hyperparameters)["lr"] == 0.25
    assert [contributor.rank for contributor in record.contributors] == [2, 0]


def test_the_grace_time_gives_the_slowest_a_chance() -> None:
    bench = _bench("bsp:backup=1,grace=50ms", workers=3)
    steps = Steps(bench)
    steps.step(0, 1)
    assert applied(steps.step(1, 1)) == []
    assert bench.machine.wake_s == pytest.approx(bench.now_s + 0.05)
    bench.now_s += 0.04
    assert applied(bench.machine.tick(bench.now_s)) == []
    steps.step(2, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1), (2, 1)])]
    assert bench.machine.wake_s is None


def test_the_grace_time_ends() -> None:
    bench = _bench("bsp:backup=1,grace=50ms", workers=3)
    steps = Steps(bench)
    steps.step(0, 1)
    steps.step(1, 1)
    bench.pull(0, 1)
    bench.now_s += 0.05
    effects = bench.machine.tick(bench.now_s)
    assert applied(bench.effects + effects) == [(1, [(0, 1), (1, 1)])]
    assert answers(effects) == [1]
    assert bench.machine.wake_s is None
    late = steps.step(2, 1)
    assert set(outcomes(late).values()) == {Outcome.DISCARDED}


def test_those_who_left_are_not_counted_twice() -> None:
    """With one of three gone, a backup worker is one of the two that are left."""
    bench = _bench("bsp:backup=1", workers=3)
    steps = Steps(bench)
    bench.seal(2, 1, 1, skip=True, last=True)
    assert applied(steps.step(0, 1)) == [(1, [(0, 1)])]
    assert set(outcomes(steps.step(1, 1)).values()) == {Outcome.DISCARDED}


def test_a_wait_says_that_some_may_be_missing() -> None:
    bench = _bench("bsp:backup=1", workers=3)
    Steps(bench).step(0, 1)
    bench.pull(0, 1)
    error = problem(bench.machine.tick(bench.now_s + 11))
    assert "waits for all but 1 of worker 1 (not heard yet), worker 2 (not heard yet)" in (
        error.message
    )


# --- settings


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (OptimizerKind.AGGREGATE, "ssp:1"),
        (OptimizerKind.AGGREGATE, "bsp:backup=1"),
        (OptimizerKind.ASSIGN, "asp:damp=1"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(kind: OptimizerKind, text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"expected|needs"):
        replace(make_table(kind=kind).spec, consistency=parsed(text)).validated()


@pytest.mark.parametrize(
    ("staleness", "most", "text"), [(4, None, "ssp:4"), (2, 8, "ssp:2..8"), (0, 3, "ssp:0..3")]
)
def test_a_script_says_the_bounds(staleness: int, most: int | None, text: str) -> None:
    assert SSP(staleness, most=most) == parsed(text)


@pytest.mark.parametrize(("staleness", "most"), [(8, 2), (2, 2), (0, 0), (-1, 2), (2, -8)])
def test_a_script_says_bounds_that_cannot_be(staleness: int, most: int) -> None:
    with pytest.raises(InvalidConfig, match=r"is .*; expected"):
        SSP(staleness, most=most)


def test_a_bound_that_moves_begins_at_its_lowest_and_a_table_does() -> None:
    setting = parsed("ssp:2..8@5")
    assert (setting.staleness, setting.as_requested) == (5, parsed("ssp:2..8"))
    assert parsed("ssp:5").as_requested == parsed("ssp:5")
    assert make_table(setting).consistency == parsed("ssp:2..8")
    assert setting.without_policy() == setting


def test_what_holds_is_where_the_bound_is() -> None:
    for text, clock in (("ssp:1..8@3", 3), ("ssp:1..8@4", 4)):
        bench = Bench(make_table(), workers=2)
        change = TableChange(1, 0, parsed(text))
        bench.machine.observe(replace(bench.machine.state.table, change=change), bench.now_s)
        steps = Steps(bench)
        for own_clock in range(1, clock + 2):
            steps.step(0, own_clock)
        assert len(answers(bench.pull(0, clock))) == 1
        assert answers(bench.pull(0, clock + 1)) == []
        error = problem(bench.machine.tick(bench.now_s + 11))
        assert f"clock 1 of worker 1 (not heard yet): {text} allows no more" in error.message
