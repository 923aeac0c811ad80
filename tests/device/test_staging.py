"""Staging on a device: of gradients that several streams make, and what has changed there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps_worker.training.tables.gradient_marks import GradientMarks
from ps_worker.training.tables.inspection import ColumnSums, true_numbers
from tests.unit.staging_loop import Loop
from tests.unit.test_written_values import Written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_what_was_gathered_is_copied_after_the_streams_that_made_it(device: torch.device) -> None:
    runtime = torch.get_device_module(device)
    parameters = [nn.Parameter(torch.zeros(count, device=device)) for count in (64, 1024)]
    loop, stream, source = Loop(*parameters), runtime.Stream(device), torch.full((64,), 7.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameters[0].grad
    assert gradient is not None
    stream.wait_stream(runtime.current_stream(device))
    with runtime.stream(stream):
        if device.type == "cuda":
            torch.cuda._sleep(20_000_000)
        gradient.copy_(source, non_blocking=True)
        assert loop.staging.hooked(0) == []
        assert loop.staging.begun_copy() is None, "it is gathered"
    left = [*loop.staging.hooked(1), *loop.staging.take()]
    assert torch.equal(loop.held(left)[0], source)


def test_what_has_gone_to_another_device_has_changed(device: torch.device) -> None:
    """Zeros have the sums of what was never there."""
    before, now = ColumnSums([10]), ColumnSums([10])
    before.take([(0, torch.ones(10))])
    assert true_numbers(now.differing(before, [(0, torch.zeros(10, device=device))])) == {0}


def ones(device: torch.device, count: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(count, device=device))


def test_edits_are_found_on_a_device_whatever_autograd_knows(device: torch.device) -> None:
    written = Written(ones(device, 2000), ones(device, 10))
    assert written.edited() == []
    written.parameters[0].data[1999] = 2.0
    assert written.edited() == [0]
    written.parameters[1].data.zero_()
    assert written.edited() == [0, 1]
    written.parameters[0].data[1999] = 1.0
    assert written.edited() == [1]


def test_what_was_not_overwritten_stays_an_edit(device: torch.device) -> None:
    """The script had changed it while a wait for the new values was given up."""
    written = Written(ones(device, 2000), ones(device, 10))
    written.parameters[0].data[3] = 2.0
    written.values.wrote_all(but=[0])
    assert written.edited() == [0]


def test_marks_find_what_was_written_without_a_trace(device: torch.device) -> None:
    """As the replay of a graph does."""
    gradient = torch.ones(2000, device=device)
    before = GradientMarks([gradient])
    assert not GradientMarks([gradient]).differ_from(before)
    gradient.data[1999] = 2.0
    assert GradientMarks([gradient]).differ_from(before)
    gradient.data[1999] = 1.0
    assert not GradientMarks([gradient]).differ_from(before)
