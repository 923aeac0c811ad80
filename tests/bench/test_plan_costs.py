"""`pushpull plan` measures a machine, and what it plans with that is what clusters do there."""

from __future__ import annotations

import json

import pytest

from ps_cli.bench.measurements.step_costs import step_costs
from ps_cli.console.output import Output
from ps_cli.plan.check import MODES, WORKER_COUNTS, check
from ps_cli.plan.costs import REFERENCE, costs_of
from ps_cli.plan.options import MEASURED_BYTES

pytestmark = pytest.mark.timeout(600)

SHARE_OF_OTHERS = 0.05
"""Of the processor: a step beside more of it says nothing about the plan."""


def test_steps_are_planned_from_what_is_measured() -> None:
    said: list[str] = []
    measured = json.dumps(step_costs(MEASURED_BYTES, said.append))
    costs = costs_of(measured, "measured")
    assert costs.push.keys() == REFERENCE.push.keys()
    assert costs.pull.keys() == REFERENCE.pull.keys()
    assert costs.update_s.keys() == REFERENCE.update_s.keys()
    assert len(said) > 1
    found = check(costs, Output())
    assert len(found) == len(WORKER_COUNTS) * len(MODES.split(","))
    alone = [each for each in found if each.others_share < SHARE_OF_OTHERS]
    assert alone, found
    assert [each for each in alone if abs(each.error) > 0.25] == []
