"""A checkpoint that a script asked for, and that failed: who waits is told, else the log."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ps_core.errors import Fenced, InvalidConfig, WaitExpired
from ps_runtime.checkpoint.calls import MadeCheckpoint
from ps_worker.client.checkpoints import CheckpointTicket
from ps_worker.client.connection import GRACE_S

DEADLINE_S = 20.0
NO_PLACE = InvalidConfig("this cluster has no place for checkpoints")


class Watched(Future[MadeCheckpoint]):
    """A future that says when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: Future[None] = Future()
        self._callback_count = 0

    def add_done_callback(self, fn: object) -> None:
        super().add_done_callback(fn)  # type: ignore[arg-type]
        self._callback_count += 1
        if self._callback_count > 1:  # the ticket's own is the first
            self.waited_for.set_result(None)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_nobody_waits_and_the_log_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[MadeCheckpoint] = Future()
    ticket = CheckpointTicket(future, DEADLINE_S, None)
    assert not ticket.done()
    assert not caplog.text
    future.set_exception(NO_PLACE)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f'event=checkpoint_failed error="{NO_PLACE.message}"'
    with pytest.raises(InvalidConfig, match="no place for checkpoints"):
        ticket.wait()
    assert len(caplog.records) == 1


def test_one_that_failed_at_once_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[MadeCheckpoint] = Future()
    future.set_exception(NO_PLACE)
    CheckpointTicket(future, DEADLINE_S, None)
    assert "event=checkpoint_failed" in caplog.text


def test_who_waits_has_the_error_and_the_log_has_nothing(
    caplog: pytest.LogCaptureFixture, pool: ThreadPoolExecutor
) -> None:
    future = Watched()
    waiting = pool.submit(CheckpointTicket(future, DEADLINE_S, None).wait)
    future.waited_for.result(DEADLINE_S)
    future.set_exception(NO_PLACE)
    with pytest.raises(InvalidConfig, match="no place for checkpoints"):
        waiting.result(DEADLINE_S)
    assert not caplog.records


def test_who_gave_up_waiting_is_told_by_the_log(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[MadeCheckpoint] = Future()
    ticket = CheckpointTicket(future, DEADLINE_S, None)
    with pytest.raises(WaitExpired):
        ticket.wait(-GRACE_S)
    assert not caplog.records
    future.set_exception(NO_PLACE)
    assert "event=checkpoint_failed" in caplog.text


def test_nothing_is_said_of_one_that_is_made_or_whose_session_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, closed, cancelled = Future[MadeCheckpoint](), Future[MadeCheckpoint](), Watched()
    for future in (made, closed, cancelled):
        CheckpointTicket(future, DEADLINE_S, None)
    made.set_result(MadeCheckpoint(1, "runs/7/1", 10))
    closed.set_exception(Fenced("the link to the scheduler is closed"))
    cancelled.cancel()
    assert not caplog.records
