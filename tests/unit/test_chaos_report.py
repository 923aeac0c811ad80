"""The rates in the report of a chaos run."""

from __future__ import annotations

from tests.chaos.faults import KILLED
from tests.chaos.report import Loop, Rate, Report


def goodput_lines(calm_steps_s: float) -> list[str]:
    report = Report(lease_s=1.0, worker_count=2, server_count=3, seed=1)
    report.loops = {
        KILLED: Loop(Rate(172.0, 34.0), Rate(100.0, 42.5)),
        "rolling restart": Loop(Rate(28.0, 32.0), Rate(15.0, 40.0)),
    }
    report.calm = Rate(172.0, calm_steps_s)
    return [line for line in report.lines() if line.startswith("goodput")]


def test_the_target_is_of_the_run_without_faults_and_the_other_ratio_stands_beside() -> None:
    kills, restarts = goodput_lines(40.0)
    assert kills == (
        "goodput, SIGKILL: 34.0 steps/s over 172 s, 85% of the run without faults (target 80%: "
        "met), 80% of the 42.5 in the 100 s between the faults"
    )
    assert restarts == (
        "goodput, rolling restart: 32.0 steps/s over 28 s, 80% of the run without faults, 80% of "
        "the 40.0 in the 15 s between the faults"
    )


def test_a_target_that_is_missed_says_so_whatever_the_other_ratio_is() -> None:
    kills, _ = goodput_lines(50.0)
    assert "68% of the run without faults (target 80%: MISSED), 80% of the 42.5" in kills
