"""Ctrl-C at a save point of a script that goes on."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from tests.unit.saving_worker import WAIT_S, A, State, Worker


def interrupted(work: Callable[[], None], count: int) -> list[str]:
    """Do the work; Ctrl-C comes when it enters or leaves a function for the nth time. Returns where
    it has been until then.
    """
    moments: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        is_own = re.search(r"/(ps_\w+/.*|threading)\.py$", frame.f_code.co_filename)
        if event in ("call", "return") and is_own:
            moments.append(f"{event} of {frame.f_code.co_qualname}")
            if len(moments) == count:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return moments


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_whose_copy_ctrl_c_ends_is_saved_at_the_next_save_point_before_a_step(
    steps: int,
) -> None:
    """Else the checkpoint, and with it all later ones, would wait for it until its deadline."""
    copies = iter([KeyboardInterrupt, None])

    def copied() -> None:
        if error := next(copies):
            raise error

    worker = Worker()
    worker.model(A)
    worker.points.attach("slow", State(copied))
    worker.points.reach()
    worker.propose()
    worker.step()
    worker.cut(1)
    with pytest.raises(KeyboardInterrupt):
        worker.points.reach()
    for _ in range(steps):
        worker.step()
    worker.points.reach()
    ((number, report),) = worker.report()
    assert (number, bool(report.file)) == (1, not steps)
    assert ("Ctrl-C" in report.problem) is bool(steps)


def test_ctrl_c_at_a_save_point_locks_no_other_thread_out() -> None:
    """The client's thread takes views there: the whole client would wait for good."""
    worker = Worker()
    worker.attach()
    count, moments = 1, interrupted(worker.points.reach, 1)
    while len(moments) == count:
        woken = threading.Thread(target=worker.points.wake, daemon=True)
        woken.start()
        woken.join(WAIT_S)
        assert not woken.is_alive(), moments[-1]
        count += 1
        moments = interrupted(worker.points.reach, count)
    assert count > 20


def test_ctrl_c_at_any_moment_of_a_save_point_leaves_one_report() -> None:
    """Of a state that is not handed over the next save point makes it, of another the thread."""
    count, was_interrupted = 0, True
    while was_interrupted:
        count += 1
        worker = Worker()
        worker.attach()
        worker.points.reach()
        worker.propose()
        worker.cut(0)
        moments = interrupted(worker.points.reach, count)
        was_interrupted = len(moments) == count
        worker.points.reach()
        worker.points.close(WAIT_S)
        assert [bool(part.file) for _, part in worker.reported] == [True], moments
    assert count > 50
