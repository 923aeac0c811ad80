"""Where a worker writes its own state down whose script pushes to its tables itself."""

from __future__ import annotations

import threading

import pytest

from tests.unit.saving_worker import A, B, Resting, Worker, clocks_of

# --- tables of a script that has no model


def test_raw_tables_take_the_steps_that_they_took_last() -> None:
    worker = Worker()
    worker.attach()
    worker.step(A)
    worker.points.reach()
    worker.propose(1)
    assert clocks_of(worker) == {A: 2, B: 0}
    worker.see(None)
    worker.step(A, A)
    worker.points.reach()
    worker.step(A)
    worker.propose(2)
    assert clocks_of(worker) == {A: 5, B: 0}


def test_another_worker_is_a_step_further_than_the_save_point_that_a_raw_table_is_at() -> None:
    """It has sealed the step that this one is about to take."""
    worker = Worker()
    worker.attach()
    for _ in range(2):
        worker.step(A)
        worker.points.rest(lambda: True)
    asked = threading.Event()
    resting = Resting(lambda: worker.points.rest(asked.is_set))
    assert resting.waits
    worker.propose()
    assert clocks_of(worker)[A] == 2
    worker.cut(3)
    assert resting.is_over()
    assert worker.copied == []
    worker.step(A)
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [3]


def test_a_raw_table_that_begins_at_a_checkpoint_has_taken_no_steps_to_there() -> None:
    worker = Worker()
    worker.begin_at(40)
    worker.attach()
    worker.points.reach()
    worker.propose(1)
    assert clocks_of(worker) == {A: 40, B: 40}
    worker.see(None)
    worker.step(A)
    worker.points.reach()
    worker.propose(2)
    assert clocks_of(worker) == {A: 42, B: 40}


def test_a_newcomers_first_clock_is_not_taken_for_steps() -> None:
    worker = Worker()
    worker.attach()
    worker.steps[A].clock = 700
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 701, B: 0}


def test_a_state_that_is_of_a_later_clock_than_the_cut_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SV-1."""
    worker = Worker()
    worker.attach()
    worker.propose()
    assert clocks_of(worker) == {A: 0, B: 0}
    worker.cut(0)
    worker.step(A)
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [1]
    assert "checkpoint_state_late" in caplog.text
