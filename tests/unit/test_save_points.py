"""Where a worker writes its own state down: the script on one thread, views on another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from ps_core.change import Checkpoint, TableChange
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.manifest import PartReport, ReportedTable
from ps_worker.steps.inner_steps import InnerSteps
from tests.unit.saving_worker import WAIT_S, A, B, Resting, State, Worker, clocks_of


@pytest.fixture
def worker() -> Worker:
    found = Worker()
    found.model(A)
    found.attach()
    return found


# --- what it answers


def test_a_script_in_a_step_is_answered_for_with_the_save_point_that_it_comes_to(
    worker: Worker,
) -> None:
    worker.points.reach()
    worker.propose()
    assert worker.joined == [(1, {A: 1, B: 0}, True)]
    worker.propose()
    assert len(worker.joined) == 1


def test_a_step_that_is_sealed_is_not_answered_for_as_the_next(worker: Worker) -> None:
    """The script has not come to its save point yet."""
    worker.points.reach()
    worker.step()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}


def test_a_model_that_the_script_has_stepped_no_more_is_answered_for_where_it_is() -> None:
    """It has trained one after the other, as with several calls of Lightning's `fit`."""
    worker = Worker()
    worker.model(A)
    worker.model(B)
    worker.attach()
    for table in (A, B, A, B):
        worker.points.reach(is_explicit=False)
        worker.step(table)
    worker.propose(1)
    assert clocks_of(worker) == {A: 3, B: 2}
    worker.see(None)
    for _ in range(20):
        worker.points.reach(is_explicit=False)
        worker.step(B)
    worker.points.reach(is_explicit=False)
    worker.propose(2)
    assert clocks_of(worker) == {A: 2, B: 23}


def test_a_cut_at_a_step_of_such_a_model_is_out_of_reach(worker: Worker) -> None:
    worker.model(B)
    worker.points.reach(is_explicit=False)
    worker.step(A)
    worker.points.reach(is_explicit=False)
    worker.propose()
    assert clocks_of(worker) == {A: 2, B: 1}
    worker.step(B)
    worker.cut(2, 1)
    for _ in range(16):
        worker.points.reach(is_explicit=False)
        worker.step(B)
    assert worker.stayed == []
    worker.points.reach(is_explicit=False)
    assert worker.stayed == [(1, {A: 1, B: 17}, True)]
    assert worker.copied == []


@pytest.mark.parametrize("begins", ["reach", "asks"])
def test_a_worker_has_begun_at_its_first_save_point(worker: Worker, begins: str) -> None:
    worker.propose()
    assert not worker.has_begun
    worker.see(None)
    getattr(worker.points, begins)()
    worker.propose(2)
    assert worker.has_begun


def test_rows_in_no_model_have_no_save_point_beside_one(worker: Worker) -> None:
    worker.points.reach_alone(worker)
    worker.propose()
    assert not worker.has_begun


def test_a_script_at_a_save_point_is_answered_for_with_that(worker: Worker) -> None:
    worker.step()
    worker.points.reach()
    worker.step()
    asked = threading.Event()
    resting = Resting(lambda: worker.points.rest(asked.is_set))
    assert resting.waits
    worker.propose()
    assert clocks_of(worker) == {A: 2, B: 0}
    assert resting.waits
    worker.cut(2)
    assert resting.is_over()


def test_a_worker_without_a_state_says_where_it_is_and_waits_for_nothing() -> None:
    worker = Worker()
    worker.model(A)
    worker.step()
    worker.propose()
    assert worker.joined == [(1, {A: 1, B: 0}, False)]
    worker.points.reach(is_explicit=False)
    worker.cut(1)
    worker.points.reach(is_explicit=False)
    assert worker.copied == []


def test_a_cut_that_comes_first_is_not_answered(worker: Worker) -> None:
    """Nobody waits for it: it has been made without this worker."""
    worker.cut(1)
    worker.step()
    worker.points.reach()
    assert (worker.joined, worker.copied) == ([], [])


def test_save_points_without_a_step_between_them_are_one(worker: Worker) -> None:
    """`checkpoint()` is one, and `save_point()` may follow it."""
    worker.step()
    worker.points.rest(lambda: True)
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 2, B: 0}


# --- it does not leave before the cut


def test_the_save_point_that_was_named_is_not_left_before_the_cut_is_settled(
    worker: Worker,
) -> None:
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.cut(1)
    assert resting.is_over()
    assert worker.copied == [(1, 1, {"clocks": {"value": (1, 0)}})]
    ((number, report),) = worker.report()
    tables = {A: ReportedTable(0, 1), B: ReportedTable(0, 0)}
    assert (number, report) == (1, PartReport("worker-0", 9, "ab", tables))


def test_the_state_is_saved_where_the_worker_comes_to_the_cut(worker: Worker) -> None:
    """SV-1."""
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(3)
    assert resting.is_over()
    for _ in range(3):
        assert worker.copied == [] or worker.steps[A].clock >= 3
        worker.step()
        worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [3]
    assert len(worker.report()) == 1


def test_a_checkpoint_that_is_given_up_lets_it_go(worker: Worker) -> None:
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.see(None)
    assert resting.is_over()
    assert worker.copied == []


# --- one that is there already


def covered_by(worker: Worker) -> int:
    """What will do for a script that asks now."""
    return worker.points.asks()()[0]


def test_one_that_was_cut_while_it_was_asked_for_will_do(worker: Worker) -> None:
    """The request may be on its way meanwhile, or be refused since it knows of no such cut."""
    worker.step()
    found = worker.points.asks()
    assert found()[0] == 0
    asking = Resting(lambda: worker.points.rest(lambda: False))
    worker.propose()
    worker.cut(1)
    assert asking.is_over()
    number, view_number = found()
    assert (number, view_number) == (1, worker.view.view_number)
    assert covered_by(worker) == 0, "the script has it now"


def test_one_with_all_steps_of_before_the_call_will_do_however_late_that_is_looked_at(
    worker: Worker,
) -> None:
    """The request is made, or repeated, on another thread; the script goes on meanwhile."""
    worker.step()
    found = worker.points.asks()
    assert found()[0] == 0
    asking = Resting(lambda: worker.points.rest(lambda: False))
    worker.propose()
    worker.cut(1)
    assert asking.is_over()
    worker.step()
    worker.propose(2)
    worker.cut(2, number=2)
    assert found()[0] == 1


@pytest.mark.parametrize("taken", [2, 3])
def test_one_whose_state_lacks_inner_steps_will_not_do(worker: Worker, taken: int) -> None:
    """They have no clock, so the cut says nothing of them."""
    worker.handles[A].inner_steps = inner = InnerSteps(per_clock=10, taken=2)
    worker.propose()
    worker.cut(0)
    worker.points.reach()
    assert [number for number, _ in worker.report()] == [1]
    inner.taken = taken
    assert covered_by(worker) == (1 if taken == 2 else 0)


def test_one_that_failed_will_not_do(worker: Worker) -> None:
    """It is asked for again, and the next one is cut meanwhile."""
    found = worker.points.asks()
    for number in (1, 2):
        worker.propose(number)
        worker.cut(0, number=number)
    assert [found()[0] for _ in range(3)] == [1, 2, 0]


def test_a_checkpoint_with_all_its_steps_will_do_once(worker: Worker) -> None:
    worker.step()
    worker.points.reach()
    assert covered_by(worker) == 0
    worker.propose()
    worker.cut(1)
    worker.see(None)  # it is complete
    assert [covered_by(worker) for _ in range(2)] == [1, 0]


def test_one_that_the_script_has_asked_for_will_not_do_again(worker: Worker) -> None:
    worker.points.asks()
    asking = Resting(lambda: worker.points.rest(lambda: False))
    worker.propose()
    worker.cut(0)
    assert asking.is_over()
    assert covered_by(worker) == 0


def test_the_next_one_is_not_taken_for_that_which_the_script_asked_for(worker: Worker) -> None:
    """Others ask for it before the script's thread goes on from the first."""
    worker.points.asks()
    asking = Resting(lambda: worker.points.rest(lambda: False))
    with worker.points._changed:  # it gets no turn
        for number in (1, 2):
            worker.propose(number)
            worker.cut(0, number=number)
    assert asking.is_over()
    assert covered_by(worker) == 2


def test_nor_is_the_next_one_if_the_first_was_answered_before_the_script_asked(
    worker: Worker,
) -> None:
    """Another worker has the first, and asks after its next step (SSP)."""
    worker.points.reach()
    worker.propose(1)
    worker.step()
    worker.cut(1, number=1)
    assert covered_by(worker) == 1

    def another_asks() -> bool:
        worker.propose(2)
        worker.cut(2, number=2)
        return True

    worker.points.rest(another_asks)
    worker.step()
    assert covered_by(worker) == 2


@pytest.mark.parametrize("lacking", ["a step", "a table", "a clock"])
def test_what_lacks_something_will_not_do(lacking: str) -> None:
    worker = Worker("asp" if lacking == "a clock" else "bsp")
    worker.attach()
    worker.step()
    if lacking == "a table":
        worker.see(Checkpoint(1, "url", is_cut=True), a=1)
    else:
        worker.cut(0 if lacking == "a step" else 1)
    assert covered_by(worker) == 0


def test_a_table_that_is_another_worker_s_lacks_no_step_of_this_one(worker: Worker) -> None:
    worker.drop(B)
    worker.step()
    worker.cut(1)
    assert covered_by(worker) == 1


def test_without_a_table_none_will_do(worker: Worker) -> None:
    """It is an operator's."""
    worker.drop(A)
    worker.drop(B)
    worker.cut(1)
    assert covered_by(worker) == 0


@pytest.mark.parametrize("lacking", ["", "a step", "a state"])
def test_one_table_s_cut_tells_of_an_asynchronous_one_s_steps_where_the_state_is_saved(
    lacking: str,
) -> None:
    worker = Worker()
    free = replace(worker.handles[B].table.spec, consistency=parsed("asp"))
    worker.handles[B].table = replace(worker.handles[B].table, spec=free)
    if lacking != "a state":
        worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step(A, B)
    worker.cut(1)
    worker.points.reach()
    if lacking == "a step":
        worker.step(B)
    assert covered_by(worker) == (0 if lacking else 1)


def test_what_workers_in_step_have_at_one_step_will_do_under_any_consistency() -> None:
    worker = Worker("asp")
    worker.attach()
    worker.points.keep_in_step()
    worker.step()
    worker.cut(1)
    assert covered_by(worker) == 1
    worker.step()
    worker.cut(1, number=2)
    assert covered_by(worker) == 0


# --- a script that waits takes no step


def test_a_script_that_waits_is_answered_for_with_where_it_is(worker: Worker) -> None:
    """Also when another checkpoint is being written; each has its state."""
    worker.step()
    over = threading.Event()
    worker.see(Checkpoint(1, "url", is_cut=True))
    resting = Resting(lambda: worker.points.stay(over.is_set, WAIT_S))
    for number in (2, 3):
        worker.propose(number)
        assert clocks_of(worker) == {A: 1, B: 0}
        worker.cut(1, number=number)
        assert [each for each, _ in worker.report(number - 1)] == list(range(2, number + 1))
    assert resting.waits
    over.set()
    worker.points.wake()
    assert resting.is_over(0.4)


def test_what_was_answered_for_a_script_in_a_step_is_taken_back_when_it_waits(
    worker: Worker,
) -> None:
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}
    worker.points.stay(lambda: True, WAIT_S)
    assert worker.joined[1:] == [(1, {A: 0, B: 0}, True)]


def test_a_script_that_waits_for_its_own_next_step_is_told(worker: Worker) -> None:
    """Another worker was in its next step; this one has one of two tables there."""
    worker.must_step = True
    worker.step()
    told: list[str] = []

    def wait() -> None:
        try:
            worker.points.stay(lambda: False, WAIT_S)
        except WaitExpired as error:
            told.append(error.message)

    resting = Resting(wait)
    worker.propose(7)
    worker.cut(2, number=7)
    assert resting.is_over()
    (said,) = told
    assert said.startswith("checkpoint 7 is of step 2 of table 'a', and this worker is at 1: ")
    worker.step()
    worker.points.reach()
    assert [number for number, _ in worker.report()] == [7]


def test_a_script_that_waits_for_a_step_that_nobody_takes_is_saved_where_it_is(
    worker: Worker,
) -> None:
    """The cut was a guess: the scheduler hears that it stays, and begins again."""
    worker.step()
    over = threading.Event()
    resting = Resting(lambda: worker.points.stay(over.is_set, WAIT_S))
    worker.propose(7)
    worker.cut(2, number=7)
    with worker.heard:
        assert worker.heard.wait_for(lambda: bool(worker.stayed), WAIT_S)
    assert worker.stayed[0] == (7, {A: 1, B: 0}, True)
    assert resting.waits
    worker.propose(8)
    assert clocks_of(worker) == {A: 1, B: 0}
    worker.cut(1, number=8)
    assert [number for number, _ in worker.report()] == [8]
    over.set()
    worker.points.wake()
    assert resting.is_over(0.4)


def test_a_script_waits_so_long_and_no_longer(worker: Worker) -> None:
    assert Resting(lambda: worker.points.stay(lambda: False, 0.05)).is_over()


# --- a call that all workers make


def test_a_call_is_no_save_point_where_nobody_waits(worker: Worker) -> None:
    """Other workers are in their steps, and come to the call; the step's end may come after it."""
    worker.step()
    over = threading.Event()
    calling = Resting(lambda: worker.points.accompany(over.is_set, WAIT_S))
    worker.propose(7)
    worker.cut(1, number=7)
    with worker.heard:
        assert worker.heard.wait_for(lambda: bool(worker.asked), WAIT_S)
    assert calling.waits
    over.set()
    worker.points.wake()
    assert calling.is_over(0.4)
    assert not worker.copied
    worker.points.reach()
    assert [number for number, _ in worker.report()] == [7]


def test_a_call_is_a_save_point_where_another_waits_for_a_checkpoint_first(worker: Worker) -> None:
    """The cut was a guess: it is begun again, of the step that all are at."""
    worker.is_awaited = True
    worker.step()
    over = threading.Event()
    calling = Resting(lambda: worker.points.accompany(over.is_set, WAIT_S))
    worker.propose(7)
    worker.cut(2, number=7)
    with worker.heard:
        assert worker.heard.wait_for(lambda: bool(worker.stayed), WAIT_S)
    assert worker.stayed[0] == (7, {A: 1, B: 0}, True)
    worker.propose(8)
    assert clocks_of(worker) == {A: 1, B: 0}
    worker.cut(1, number=8)
    assert [number for number, _ in worker.report()] == [8]
    assert calling.waits
    over.set()
    worker.points.wake()
    assert calling.is_over(0.4)


def test_a_call_in_which_a_step_is_missed_goes_on_all_the_same(worker: Worker) -> None:
    worker.is_awaited = worker.must_step = True
    worker.step()
    calling = Resting(lambda: worker.points.accompany(lambda: False, WAIT_S))
    worker.propose(7)
    worker.cut(2, number=7)
    assert calling.is_over()


# --- it is not held for ever


def test_a_cut_that_never_comes_lets_it_go() -> None:
    worker = Worker(patience_s=0.05)
    worker.attach()
    worker.propose()
    worker.points.reach()


def test_what_is_proposed_while_a_state_is_copied_is_answered_with_this_save_point(
    worker: Worker,
) -> None:
    """And not left behind: the first may be given up, and the next be proposed, meanwhile."""

    def next_one() -> str:
        if len(worker.joined) == 1:
            worker.see(None)
            worker.propose(2)
        return "copied"

    worker.points.attach("slow", State(next_one))
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(1)
    with worker.heard:
        assert worker.heard.wait_for(lambda: len(worker.joined) == 2, WAIT_S)
    assert clocks_of(worker) == {A: 1, B: 0}
    assert resting.waits
    worker.cut(1, number=2)
    assert resting.is_over()
    assert [(number, clock) for number, clock, _ in worker.copied] == [(1, 1), (2, 1)]


# --- explicit and implicit points


def test_implicit_points_count_until_the_script_has_its_own(worker: Worker) -> None:
    worker.step()
    worker.points.reach(is_explicit=False)
    worker.propose(1)
    assert clocks_of(worker) == {A: 2, B: 0}
    worker.see(None)
    worker.step()
    worker.points.reach()
    worker.step()
    worker.points.reach(is_explicit=False)  # the beginning of a step that its own point precedes
    worker.propose(2)
    assert clocks_of(worker) == {A: 3, B: 0}
    worker.step()
    Resting(lambda: worker.points.reach(is_explicit=False)).is_over()
    worker.cut(3, number=2)
    assert worker.copied == []
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [4]


def test_two_models_are_answered_for_together() -> None:
    """One that took no step since the last save point takes none before the next."""
    worker = Worker()
    worker.model(A)
    worker.model(B)
    worker.attach()
    for tables in ((A, B), (A,)):
        worker.points.reach()
        worker.step(*tables)
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 3, B: 1}


def test_a_table_that_sleeps_is_answered_for_where_it_is() -> None:
    worker = Worker()
    worker.model(A)
    worker.model(B, is_awake=False)
    worker.attach()
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}


def test_both_models_must_be_at_the_cut() -> None:
    worker = Worker()
    worker.model(A, B)
    worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step(A, B)
    resting = Resting(worker.points.reach)
    worker.cut(1, 2)
    assert resting.is_over()
    assert worker.copied == []
    worker.step(A, B)
    worker.points.reach()
    assert [value for _, _, value in worker.copied] == [{"clocks": {"value": (2, 2)}}]


def test_models_that_step_at_different_rates_are_answered_for_at_the_rates_of_the_last_pass() -> (
    None
):
    worker = Worker()
    worker.model(A)
    worker.model(B)
    worker.attach()
    worker.points.reach()
    worker.step(A, A, A, B)
    worker.points.reach()
    worker.step(A)
    worker.propose()
    assert clocks_of(worker) == {A: 6, B: 2}
    worker.step(A, A, B)
    worker.cut(6, 2)
    worker.points.reach()
    assert [value for _, _, value in worker.copied] == [{"clocks": {"value": (6, 2)}}]


def test_what_is_asynchronous_is_saved_where_it_is() -> None:
    worker = Worker("asp")
    worker.model(A)
    worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step()
    worker.points.reach()  # it does not wait: a silent worker may keep the others from their cut
    worker.cut(40)
    worker.step()
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [2]


def test_workers_in_step_are_saved_at_one_step_under_any_consistency() -> None:
    worker = Worker("asp")
    worker.model(A)
    worker.attach()
    worker.points.keep_in_step()
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits  # for the step that another may have named
    worker.cut(2)
    assert resting.is_over()
    assert worker.copied == []
    worker.step()
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [2]


def test_one_that_waits_where_others_in_step_are_further_is_told() -> None:
    worker = Worker("asp")
    worker.must_step = True
    worker.model(A)
    worker.attach()
    worker.points.keep_in_step()
    worker.propose()
    worker.cut(1)
    with pytest.raises(WaitExpired, match="is of step 1 of table 'a', and this worker is at 0"):
        worker.points.stay(lambda: False, WAIT_S)


# --- what goes wrong


class Broken(State):
    def __init__(self) -> None:
        super().__init__(lambda: None)

    def state_dict(self) -> dict[str, object]:
        raise RuntimeError("no state today")


def saved(worker: Worker) -> PartReport:
    """What comes of a checkpoint at the first clock."""
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(1)
    assert resting.is_over()
    ((_, report),) = worker.report()
    return report


def test_a_state_that_cannot_be_copied_is_reported_as_lost(worker: Worker) -> None:
    worker.points.attach("broken", Broken())
    assert "no state today" in saved(worker).problem


def test_a_state_that_cannot_be_written_is_reported_as_lost(worker: Worker) -> None:
    worker.problem = InvalidConfig("the disk is full")
    assert saved(worker).problem == "the disk is full"


class Half(State):
    """With parameters that no server has, or without."""

    begins_anew = "none"

    def __init__(self, keeps_parameters: bool) -> None:
        super().__init__(lambda: 1)
        self.keeps_parameters = keeps_parameters

    def is_part_of(self, tables: Collection[str]) -> bool:
        """As asked."""
        raise AssertionError(tables)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_report_tells_of_parameters_that_no_server_has(
    worker: Worker, keeps: bool, is_full: bool
) -> None:
    worker.points.attach("half", Half(keeps))
    worker.problem = InvalidConfig("the disk is full") if is_full else None
    report = saved(worker)
    assert (report.has_parameters, bool(report.problem)) == (keeps, is_full)


def test_names_are_unique_and_states_have_their_methods(worker: Worker) -> None:
    points = worker.points
    state = State(lambda: 1)
    points.attach("mine", state)
    points.attach("mine", state)
    with pytest.raises(InvalidConfig, match="another state is attached as 'mine'"):
        points.attach("mine", State(lambda: 2))
    for name in ("", "x" * 201):
        with pytest.raises(InvalidConfig, match="1 to 200 bytes"):
            points.attach(name, state)
    with pytest.raises(InvalidConfig, match=r"a object without state_dict\(\)"):
        points.attach("none", object())  # type: ignore[arg-type]


def written_late(worker: Worker) -> threading.Event:
    """An event; only once it is set, the worker's file is written."""
    written = threading.Event()

    def late(*_: object) -> Callable[[], PartReport]:
        def write() -> PartReport:
            assert written.wait(WAIT_S)
            return PartReport("worker-0", 9, "ab")

        return write

    worker.points._write = late
    return written


def test_a_worker_that_leaves_waits_for_what_is_written_and_no_longer(worker: Worker) -> None:
    written = written_late(worker)
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(1)
    assert resting.is_over()
    closing = Resting(lambda: worker.points.close(WAIT_S))
    assert closing.waits
    written.set()
    assert closing.is_over()
    assert worker.report()[0][1].file == "worker-0"
    worker.points.close(0.0)


def test_what_is_not_written_when_a_worker_has_left_is_lost(worker: Worker) -> None:
    """Without a word there would have been nothing to write."""
    written = written_late(worker)
    worker.points.leave()
    worker.points.leave_behind("left")
    worker.points.close(0.0)
    assert worker.report() == [(0, PartReport(problem="it was not written within 0 s"))]
    written.set()


def test_a_close_ends_a_wait_for_a_cut(worker: Worker) -> None:
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.points.close(0.0)
    assert resting.is_over()


def test_a_change_of_the_setting_after_the_cut_is_no_matter() -> None:
    """What the cut's own clock had is what counts."""
    worker = Worker()
    worker.model(A)
    worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    handle = worker.handles[A]
    handle.table = replace(handle.table, change=TableChange(1, 9, parsed("asp")))
    worker.cut(3)
    assert resting.is_over()
    assert worker.copied == []
