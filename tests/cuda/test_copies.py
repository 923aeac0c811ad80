"""Copies between a device and the host: beside what the device computes, in the right order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps_worker.spec.flat_layout import dtype_of, layout_of
from ps_worker.spec.values import BlockValues
from ps_worker.training.tables.device_copies import (
    from_host,
    pin_in_place,
    stream_from_host,
    stream_to_host,
    to_host,
)
from ps_worker.training.tables.staging import FlatBuffer
from ps_worker.transport.lane import empty_shared, find
from tests.unit.staging_loop import Loop, has_changed, sums_of

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(180)]

COUNT = 1 << 20
BUSY_CYCLES = 500_000_000
"""A quarter of a second: what is queued behind has not been done when the next line runs."""


def keep_busy(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)


def pinned(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value, pin_memory=True)


def everywhere(device: torch.device, value: float) -> torch.Tensor:
    tensor = torch.full((COUNT,), value, device=device)
    torch.cuda.synchronize()
    return tensor


def test_a_copy_to_the_host_holds_nothing_up(device: torch.device) -> None:
    source, target = everywhere(device, 7.0), pinned(0.0)
    keep_busy(stream_to_host(source.device))
    arrival = to_host([(target, source)])
    assert arrival is not None
    torch.cuda.current_stream().synchronize()
    assert not arrival.query()
    arrival.synchronize()
    assert arrival.query()
    assert torch.equal(target, torch.full((COUNT,), 7.0))


def test_a_copy_to_the_host_has_what_was_computed_before(device: torch.device) -> None:
    source, target = everywhere(device, 1.0), pinned(0.0)
    keep_busy(torch.cuda.current_stream())
    source.fill_(3.0)
    arrival = to_host([(target, source)])
    assert arrival is not None
    assert not arrival.query()
    arrival.synchronize()
    assert torch.equal(target, torch.full((COUNT,), 3.0))


def test_what_is_computed_after_a_copy_to_the_device_has_its_values(device: torch.device) -> None:
    target, source = everywhere(device, 1.0), pinned(5.0)
    keep_busy(stream_from_host(target.device))
    (arrival,) = from_host([(target, source)])
    seen = target.clone()
    arrival.synchronize()
    assert torch.equal(seen.cpu(), torch.full((COUNT,), 5.0))


def test_what_was_computed_before_a_copy_to_the_device_has_the_old_values(
    device: torch.device,
) -> None:
    target, source = everywhere(device, 1.0), pinned(5.0)
    keep_busy(torch.cuda.current_stream())
    seen = target.clone()
    (arrival,) = from_host([(target, source)])
    assert not arrival.query()
    arrival.synchronize()
    assert torch.equal(seen.cpu(), torch.full((COUNT,), 1.0))
    assert torch.equal(target.cpu(), torch.full((COUNT,), 5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_of_any_layout_go_there_and_back(device: torch.device, dtype: torch.dtype) -> None:
    ordered = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    source = ordered.to(device).to(memory_format=torch.channels_last)
    host = torch.zeros(2, 3, 4, 5, dtype=dtype, pin_memory=True)
    arrival = to_host([(host, source)])
    assert arrival is not None
    arrival.synchronize()
    assert torch.equal(host, ordered)
    back = torch.zeros_like(source)
    on_host = torch.zeros(2, 3, 4, 5, dtype=dtype)
    (landing,) = from_host([(back, host), (on_host, host)])
    assert torch.equal(back.cpu(), ordered)
    assert torch.equal(on_host, ordered)
    landing.synchronize()


def test_buffers_of_tensors_on_a_device_are_pinned(device: torch.device) -> None:
    parameter = torch.ones(3, 30, device=device)
    layout = layout_of("t", dtype_of("p", parameter), [("p", parameter)])
    assert layout is not None
    assert FlatBuffer(layout).values.is_pinned()
    shared = FlatBuffer(layout, is_shared=True)
    assert shared.values.is_pinned()
    assert find(shared.raw.data) is not None, "servers of this host read it where it lies"


def test_a_buffer_pins_its_own_bytes_and_those_of_frozen_tensors_when_they_are_trained(
    device: torch.device,
) -> None:
    parameter = torch.ones((1 << 20) + 1, device=device)
    layout = layout_of("t", dtype_of("p", parameter), [("p", parameter)])
    assert layout is not None
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    buffer = FlatBuffer(layout)
    assert buffer.values.is_pinned()
    # torch's own would take the next power of two.
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    frozen = FlatBuffer(layout, is_pinned=False)
    assert not frozen.values.is_pinned()
    assert frozen.pin()
    assert frozen.pin()
    assert frozen.values.is_pinned()


def test_shared_memory_is_pinned_until_its_array_is_dropped(device: torch.device) -> None:
    array = empty_shared(1 << 16, "uint8")
    memory = torch.from_numpy(array.base)
    assert not memory.is_pinned()
    assert pin_in_place(array, device)
    assert memory.is_pinned()
    assert not pin_in_place(array, device), "it is pinned"
    assert torch.ones(3, device=device).sum().item() == 3.0, "a refusal is no error of later work"
    del array
    assert not memory.is_pinned()


def test_fingerprints_see_what_changed_on_the_device(device: torch.device) -> None:
    gradient = torch.ones(COUNT, device=device)
    before = sums_of(gradient)
    assert not has_changed(before, gradient)
    gradient.data[3] = -1.0  # neither address nor version tells
    assert has_changed(before, gradient)
    gradient.data[3] = 1.0
    gradient.mul_(1.0)
    assert not has_changed(before, gradient)


def parameters_on(device: torch.device, *counts: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(count, device=device)) for count in counts]


def all_that_left(loop: Loop) -> list[BlockValues]:
    """During backward, and as the rest arrived."""
    return [*loop.left, *(part for parts in loop.staging.arriving() for part in parts)]


def test_each_block_leaves_once(device: torch.device) -> None:
    loop = Loop(*parameters_on(device, 40, 40, 1000))
    for scale in (1.0, 2.0, 3.0):
        loop.zero_grad()
        loop.backward(0, 1, 2, scale=scale)
        parts = all_that_left(loop)
        assert sorted(part.block for part in parts) == list(range(loop.table.block_count))
        for block in loop.held(parts).values():
            assert torch.equal(block, torch.full_like(block, 2.0 * scale**2))
        assert loop.staging.take() == []
        loop.staging.finish()


def test_a_gradient_changed_after_its_block_left_leaves_again(device: torch.device) -> None:
    loop = Loop(*parameters_on(device, 64, 64))
    loop.backward(0, 1)
    assert len(all_that_left(loop)) == 2
    gradient = loop.parameters[1].grad
    assert gradient is not None
    gradient.data.mul_(0.5)  # .data: no _version to see it by
    assert loop.staging.changed_after_leaving() == "p1"
    parts = loop.staging.take()
    assert [part.block for part in parts] == [1]
    assert torch.equal(loop.held(parts)[1], torch.ones(64))


@pytest.mark.racing
def test_a_gradient_changed_under_its_copy_leaves_as_it_is_in_the_end(device: torch.device) -> None:
    loop = Loop(*parameters_on(device, COUNT))
    keep_busy(stream_to_host(loop.parameters[0].device))
    loop.backward(0)
    gradient = loop.parameters[0].grad
    assert gradient is not None
    gradient.mul_(0.5)
    assert all_that_left(loop) == []
    parts = loop.staging.take()
    assert len(parts) == loop.table.block_count
    assert all(torch.equal(held, torch.ones_like(held)) for held in loop.held(parts).values())


def test_gradients_of_a_device_and_of_the_host_share_a_block(device: torch.device) -> None:
    (far,) = parameters_on(device, 40)
    loop = Loop(far, nn.Parameter(torch.ones(24)))
    far.grad, loop.parameters[1].grad = torch.full_like(far, 2.0), torch.full((24,), 3.0)
    parts = [part for index in (0, 1) for part in loop.staging.hooked(index)]
    parts += [part for arrived in loop.staging.arriving() for part in arrived]
    (held,) = loop.held(parts).values()
    assert torch.equal(held, torch.cat([torch.full((40,), 2.0), torch.full((24,), 3.0)]))
    assert loop.staging.take() == []
