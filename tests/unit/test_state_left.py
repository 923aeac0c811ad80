"""What a script changes before a step has ended, in an optimizer's groups."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ps_worker.training.among_workers.state_left import StateLeft


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.1, 0.2),
        ((0.9, 0.99), (0.8, 0.99)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        ((torch.zeros(3), torch.zeros(2)), (torch.zeros(3), torch.ones(2))),
        ([torch.zeros(3)], []),
    ],
)
def test_settings_are_those_of_then_for_the_block(before: Any, after: Any) -> None:
    group = {"params": [], "setting": before}
    left = StateLeft([group])
    group["setting"] = after
    with left.in_place():
        assert repr(group["setting"]) == repr(before)
    assert group["setting"] is after


def test_a_setting_that_is_changed_in_place_is_put_back_too() -> None:
    group: dict[str, Any] = {"params": [], "lr": torch.tensor(0.1)}
    left = StateLeft([group])
    group["lr"].fill_(0.2)
    with left.in_place():
        assert group["lr"] == torch.tensor(0.1)
    assert group["lr"] == torch.tensor(0.2)


@pytest.mark.parametrize("kept", [threading.Lock(), torch.Generator(), {"a": torch.zeros(3)}])
def test_what_has_no_plain_value_stays(kept: Any) -> None:
    """It may be no copy's own: a lock, or random numbers that a step goes on with."""
    group = {"params": [], "kept": kept, "lr": 0.1}
    with StateLeft([group]).in_place():
        assert group["kept"] is kept


def test_what_the_step_changes_stays() -> None:
    group = {"params": [], "step_count": 1}
    with StateLeft([group]).in_place():
        group["step_count"] = 2
    assert group["step_count"] == 2
