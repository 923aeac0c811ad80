"""The last save point of a worker: it leaves, or its session ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.manifest import PartReport
from ps_worker.checkpoint.save_points import Before
from tests.unit.saving_worker import WAIT_S, A, B, Resting, Worker, clocks_of


@pytest.fixture
def worker() -> Worker:
    found = Worker()
    found.model(A)
    found.attach()
    return found


def test_who_leaves_goes_no_further_whatever_it_has_said(worker: Worker) -> None:
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}, "it was in its next step"
    leaving = Resting(worker.points.leave)
    assert leaving.waits
    assert clocks_of(worker) == {A: 0, B: 0}, "which it does not take"
    worker.cut(0)
    assert leaving.is_over()
    assert [clock for _, clock, _ in worker.copied] == [0]


def test_who_leaves_where_the_cut_is_has_its_state_in_it(worker: Worker) -> None:
    """The script ends after that step, without another save point."""
    worker.points.reach()
    worker.propose()
    worker.cut(1)
    worker.step()
    worker.points.leave()
    assert worker.report()[0][1].file
    assert [clock for _, clock, _ in worker.copied] == [1]


def test_who_leaves_before_the_cut_is_reached_writes_nothing(worker: Worker) -> None:
    worker.points.reach()
    worker.propose()
    worker.cut(5)
    worker.points.leave()
    assert (worker.copied, worker.reported) == ([], [])


def test_who_has_no_state_leaves_at_once() -> None:
    worker = Worker()
    worker.model(A)
    worker.propose()
    worker.points.leave()
    assert len(worker.joined) == 1


def test_nobody_waits_for_a_cut_when_the_session_has_ended(worker: Worker) -> None:
    worker.points.reach()
    worker.step()
    worker.propose()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.points.end()
    assert resting.is_over()
    worker.points.leave()


@pytest.mark.parametrize("has_state", [True, False])
def test_a_goodbye_is_no_step_that_it_has_taken(has_state: bool) -> None:
    worker = Worker()
    worker.model(A)
    if has_state:
        worker.attach()
    worker.step()
    worker.points.leave()
    worker.step()  # as the goodbye's seal does
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}


def test_who_leaves_writes_what_it_has_then(worker: Worker) -> None:
    worker.points.reach()
    worker.step()
    worker.points.leave_behind("left")
    assert worker.copied == [], "it has not said that it goes no further"
    worker.points.leave()
    worker.points.leave_behind("left")
    worker.step()  # as the goodbye's seal does
    worker.points.close(WAIT_S)
    assert worker.copied == [(0, 1, {"clocks": {"value": (1, 0)}})]
    ((number, part),) = worker.reported
    assert (number, part.file) == (0, "worker-0")
    assert {table: each.clock for table, each in part.tables.items()} == {A: 1, B: 0}


def test_who_has_no_state_leaves_nothing_behind() -> None:
    worker = Worker()
    worker.model(A)
    worker.points.leave()
    worker.points.leave_behind("left")
    worker.points.close(WAIT_S)
    assert (worker.copied, worker.reported) == ([], [])


@pytest.mark.parametrize("begins", [False, True])
def test_who_leaves_a_restored_cluster_without_a_state_says_that_it_has_begun(begins: bool) -> None:
    worker = Worker()
    worker.model(A)
    begin_from_a_checkpoint(worker)
    if begins:
        worker.points.reach()
    worker.points.leave()
    worker.points.leave_behind("left")
    worker.points.close(WAIT_S)
    assert (worker.copied, worker.reported) == ([], [(0, PartReport())] if begins else [])


def test_a_state_that_cannot_be_left_behind_is_said(worker: Worker) -> None:
    worker.problem = OSError("no space")
    worker.points.leave()
    worker.points.leave_behind("left")
    worker.points.close(WAIT_S)
    ((number, part),) = worker.reported
    assert (number, part.file) == (0, "")
    assert "no space" in part.problem


BEFORE = Before(frozenset({"clocks"}), frozenset({"a", "b"}))
"""What the checkpoint has that the worker's cluster began from."""


@pytest.mark.parametrize("begins", ["", "save point", "step", "loaded"])
@pytest.mark.parametrize("before", [None, replace(BEFORE, states=frozenset({"clocks", "late"}))])
def test_a_worker_that_leaves_a_restored_cluster_while_it_starts_up_has_lost_its_state(
    worker: Worker, begins: str, before: Before | None
) -> None:
    """What its script had not attached yet is in the checkpoint that the cluster began from."""
    begin_from_a_checkpoint(worker)
    if begins == "save point":
        worker.points.reach()
    elif begins == "step":
        worker.step()
    elif begins == "loaded":
        worker.points.loaded("clocks")
    worker.points.leave()
    worker.points.leave_behind("left", before)
    ((number, part),) = worker.report()
    has_begun = begins in ("save point", "step")
    assert number == 0
    assert bool(part.file) == has_begun
    assert ("left before its first step" in part.problem) == (not has_begun)


def test_who_leaves_before_a_step_with_all_that_the_checkpoint_has_has_it_in_later_ones(
    worker: Worker,
) -> None:
    """Its data gave no batch: the states that it has loaded are as they were."""
    begin_from_a_checkpoint(worker)
    worker.points.loaded("clocks")
    worker.points.leave()
    worker.points.leave_behind("left", BEFORE)
    ((number, part),) = worker.report()
    assert (number, part.file) == (0, "worker-0")
    assert worker.copied == [(0, 5, {"clocks": {"value": (5, 5)}})]


@pytest.mark.parametrize(
    ("before", "is_loaded"),
    [(BEFORE, False), (replace(BEFORE, tables=frozenset({"a", "b", "c"})), True)],
)
def test_who_leaves_with_a_state_that_was_not_loaded_or_without_a_table_has_not_begun(
    worker: Worker, before: Before, is_loaded: bool
) -> None:
    begin_from_a_checkpoint(worker)
    if is_loaded:
        worker.points.loaded("clocks")
    worker.points.leave()
    worker.points.leave_behind("left", before)
    ((_, part),) = worker.report()
    assert "left before its first step" in part.problem


def begin_from_a_checkpoint(worker: Worker) -> None:
    worker.begin_at(5)
    worker.view = replace(worker.view, restored_from="runs/7")
    worker.see(None)
