"""Has a script made another gradient since? On the host its place and its version say so."""

from __future__ import annotations

import torch

from ps_worker.training.tables.gradient_marks import GradientMarks


def test_marks_tell_of_a_gradient_that_was_written_replaced_or_dropped() -> None:
    first, second = torch.ones(3), torch.ones(2000)
    before = GradientMarks([first, second, None])
    assert not GradientMarks([first, second, None]).differ_from(before)
    assert GradientMarks([first, second.clone(), None]).differ_from(before)
    assert GradientMarks([first, None, None]).differ_from(before)
    assert GradientMarks([first, second, torch.ones(1)]).differ_from(before)
    assert GradientMarks([first, second]).differ_from(before)
    second.mul_(1.0)
    assert GradientMarks([first, second, None]).differ_from(before)


def test_no_gradients_are_like_none() -> None:
    assert not GradientMarks([]).differ_from(GradientMarks([]))
    sparse = torch.ones(3).to_sparse()
    assert not GradientMarks([None]).differ_from(GradientMarks([sparse])), "staging refuses it"
