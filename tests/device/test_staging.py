"""Staging of gradients that several streams of a device make."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.staging_loop import Loop

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
