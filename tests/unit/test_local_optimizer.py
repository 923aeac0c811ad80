"""A worker's own step that is repeated for some of its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps_worker.training.local_optimizer import StateBefore


def stepped(optimizer: torch.optim.Optimizer, *gradients: float) -> None:
    """One step; the gradients of the parameters in their order."""
    tensors = [each for group in optimizer.param_groups for each in group["params"]]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = torch.full_like(tensor, gradient)
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_is_repeated_for_some_tensors_as_if_it_had_not_been_taken(steps: int) -> None:
    """From the state before, or from none; the others keep what the first step gave them."""
    model, once = ([nn.Parameter(torch.zeros(3)) for _ in range(2)] for _ in range(2))
    optimizer, repeated = (torch.optim.Adam(each, lr=0.5) for each in (model, once))
    for each in (optimizer, repeated):
        for number in range(steps):
            stepped(each, 1.0 + number, 2.0)
    start = model[0].detach().clone()
    before = StateBefore(optimizer)
    stepped(optimizer, 8.0, 3.0)
    with torch.no_grad():
        model[0].copy_(start)  # pulled anew
    model[0].grad = torch.full((3,), 4.0)
    before.step_again({model[0]})
    stepped(repeated, 4.0, 3.0)
    for mine, theirs in zip(model, once, strict=True):
        assert torch.equal(mine, theirs)
        for name, value in repeated.state[theirs].items():
            assert torch.equal(optimizer.state[mine][name], value), name
    assert model[1].grad is not None
    assert model[1].grad.eq(3.0).all(), "it has its gradient back"
    before.step_again({model[0]})
    assert float(optimizer.state[model[0]]["step"]) == steps + 1, "as often as it must"
