"""Ctrl-C at a save point of a script that goes on."""

from __future__ import annotations

import pytest

from tests.unit.saving_worker import A, State, Worker


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
