"""Gradients on their way: what leaves during backward, and what leaves again when the step ends."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ps_core.errors import InvalidTensor
from ps_core.tables.elements import unpack_presence
from ps_worker.spec.flat_layout import dtype_of, layout_of
from ps_worker.training.tables.device_copies import Moves, from_host, to_host
from ps_worker.training.tables.inspection import BitViews, ColumnSums, is_finite, true_numbers
from ps_worker.training.tables.staging import GradientStaging
from tests.unit.staging_loop import Loop, SlowDevice, has_changed, ones, sums_of


def test_blocks_leave_when_all_their_tensors_have_gradients() -> None:
    loop = Loop(ones(40), ones(40), ones(64))  # blocks: p0+p1 | p1+p2 | p2
    assert sorted(loop.backward(0, 1, 2)) == [0, 1, 2]
    assert all(part.presence == b"" for part in loop.left)
    assert loop.staging.take() == []
    assert loop.staging.changed_after_leaving() is None
    assert torch.equal(loop.held(loop.left)[0], torch.full((64,), 2.0))


def test_blocks_with_a_tensor_unused_leave_at_the_end_with_presence_bits() -> None:
    """STG-1."""
    loop = Loop(ones(40), ones(40), ones(64))
    assert loop.backward(0, 2) == [2]
    parts = loop.staging.take()
    assert {p.block: unpack_presence(p.presence, 2) for p in parts} == {
        0: (True, False),
        1: (False, True),
    }


def test_no_gradient_at_all_leaves_nothing() -> None:
    loop = Loop(ones(40))
    assert loop.staging.take() == []


def test_a_gradient_changed_in_place_leaves_again() -> None:
    """STG-1."""
    loop = Loop(ones(64), ones(64))
    assert sorted(loop.backward(0, 1)) == [0, 1]
    gradient = loop.parameters[1].grad
    assert gradient is not None
    gradient.data.mul_(0.5)  # .data: no _version to see it by
    assert loop.staging.changed_after_leaving() == "p1"
    parts = loop.staging.take()
    assert [p.block for p in parts] == [1]
    assert torch.equal(loop.held(parts)[1], torch.ones(64))


@pytest.mark.parametrize("is_first_nan", [True, False])
def test_change_is_a_matter_of_bits(is_first_nan: bool) -> None:
    loop = Loop(ones(64))
    loop.parameters[0].grad = torch.full((64,), float("nan") if is_first_nan else 0.0)
    loop.left.extend(loop.staging.hooked(0))
    loop.parameters[0].grad = torch.full((64,), float("nan") if is_first_nan else -0.0)
    assert [p.block for p in loop.staging.take()] == ([] if is_first_nan else [0])


def test_accumulation_sends_once_with_the_hint_and_again_without() -> None:
    hinted, plain = Loop(ones(64), accumulate=2), Loop(ones(64))
    assert hinted.backward(0) == []
    assert hinted.backward(0) == [0]
    assert hinted.staging.take() == []
    assert plain.backward(0) == [0]
    assert plain.backward(0) == []
    (part,) = plain.staging.take()
    for loop, parts in ((hinted, hinted.left), (plain, [part])):
        assert torch.equal(loop.held(parts)[0], torch.full((64,), 4.0))


def test_a_short_accumulation_leaves_at_the_end() -> None:
    loop = Loop(ones(64), accumulate=3)
    assert loop.backward(0) == []
    assert [p.block for p in loop.staging.take()] == [0]


def test_a_table_whose_gradients_always_change_is_not_streamed_until_they_stop() -> None:
    loop = Loop(ones(64), ones(64))
    streamed = []
    for change in (True, True, False, False, False):
        loop.zero_grad()
        streamed.append(len(loop.backward(0, 1)))
        for parameter in loop.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5 if change else 1.0)
        assert len(loop.staging.take()) == (2 if change else 2 - streamed[-1])
        loop.staging.finish()
    assert streamed == [2, 0, 0, 0, 2]  # the third is not staged


@pytest.mark.parametrize("changed_count", [1, 2, 3])
def test_a_table_is_streamed_while_at_most_half_of_its_blocks_change(changed_count: int) -> None:
    loop = Loop(*(ones(64) for _ in range(4)))
    assert len(loop.backward(0, 1, 2, 3)) == 4
    for parameter in loop.parameters[:changed_count]:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    assert len(loop.staging.take()) == changed_count
    assert loop.staging.streams == (changed_count <= 2)


def test_a_block_that_could_not_have_left_is_not_wasted_by_a_change() -> None:
    loop = Loop(ones(40), ones(24))
    assert loop.backward(0) == []
    gradient = loop.parameters[0].grad
    assert gradient is not None
    gradient.mul_(0.5)
    assert [part.block for part in loop.staging.take()] == [0]
    assert loop.staging.streams


def test_gradients_that_were_thrown_away_are_taken_back() -> None:
    loop = Loop(ones(64), ones(64))
    assert sorted(loop.backward(0, 1)) == [0, 1]  # as a generator's loss does to a discriminator
    loop.zero_grad()
    assert loop.backward(0, scale=3.0) == [0]
    assert loop.staging.changed_after_leaving() == "p1"
    parts = loop.staging.take()
    assert {p.block: unpack_presence(p.presence, 1) for p in parts} == {1: (False,)}
    assert not loop.staging.streams


def test_a_gradient_set_by_hand_and_a_frozen_one_count_as_torch_counts_them() -> None:
    frozen = nn.Parameter(torch.ones(64), requires_grad=False)
    layout = layout_of("t", dtype_of("f", frozen), [("f", frozen)])
    assert layout is not None
    loop_table = Loop(ones(64)).table
    staging = GradientStaging(layout, loop_table)
    frozen.grad = torch.ones(64)
    assert [p.presence for p in staging.take()] == [b""]
    staging.finish()
    assert [p.presence for p in staging.take()] == [b""]  # .grad was not zeroed: torch steps again


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    loop = Loop(nn.Parameter(torch.ones(3, 30, dtype=dtype)))
    assert sorted(loop.backward(0)) == [0, 1]
    assert torch.equal(loop.held(loop.left)[1], torch.full((26,), 2.0, dtype=dtype))
    assert loop.staging.take() == []


def test_channels_last_gradients_are_staged_in_logical_order() -> None:
    values = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    loop = Loop(nn.Parameter(values.clone().to(memory_format=torch.channels_last)))
    loop.backward(0)
    held = torch.cat([loop.held(loop.left)[block] for block in range(2)])
    assert torch.equal(held, 2 * values.flatten())
    assert loop.staging.take() == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_gradients_are_named(value: float) -> None:
    loop = Loop(ones(40), ones(40), ones(40))
    loop.backward(0, 1)
    loop.staging.take()
    assert loop.staging.non_finite() is None
    assert loop.parameters[1].grad is not None
    loop.parameters[1].grad[7] = value
    loop.staging.take()
    assert loop.staging.non_finite() == "p1"


def test_huge_gradients_are_finite() -> None:
    loop = Loop(ones(100))
    loop.backward(0, scale=1e19)
    loop.staging.take()
    gradient = loop.parameters[0].grad
    assert gradient is not None
    assert not gradient.sum().isfinite()
    assert loop.staging.non_finite() is None


def test_stale_values_of_absent_tensors_do_not_count_as_non_finite() -> None:
    loop = Loop(ones(40), ones(40))
    loop.backward(0, 1, scale=float("inf"))
    loop.staging.take()
    loop.staging.finish()
    loop.zero_grad()
    loop.backward(0)
    loop.staging.take()
    assert loop.staging.non_finite() is None


def test_sparse_gradients_are_refused_by_name() -> None:
    loop = Loop(ones(4, 4))
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding.weight = loop.parameters[0]
    with pytest.raises(InvalidTensor, match=r"'p0' is torch\.sparse"):
        embedding(torch.tensor([1])).sum().backward()


def test_a_gradient_of_another_shape_is_refused_by_name() -> None:
    """The script has given the parameter other values meanwhile."""
    loop = Loop(ones(64), ones(64))
    loop.parameters[1].grad = torch.ones(64)
    loop.parameters[1].data = torch.ones(32)
    with pytest.raises(InvalidTensor, match=r"of 'p1' is torch\.strided of shape \(64,\)"):
        loop.staging.take()


def test_no_values_are_finite() -> None:
    assert is_finite(torch.ones(0))
    assert is_finite(torch.ones(2))
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert not is_finite(torch.tensor([1.0, bad]))


def test_fingerprints_see_other_bits_and_no_more() -> None:
    gradient = torch.ones(8)
    before = sums_of(gradient)
    assert not has_changed(before, gradient)
    gradient.data[3] = -1.0  # neither address nor version tells
    assert has_changed(before, gradient)
    gradient.data[3] = 1.0
    assert not has_changed(before, gradient)
    gradient.mul_(1.0)
    assert not has_changed(before, gradient)
    assert not has_changed(before, torch.ones(8))
    assert has_changed(before, torch.zeros(8))


@pytest.mark.parametrize("element_count", [10, 1021, 1022, 5000])
def test_fingerprints_see_every_sign(element_count: int) -> None:
    """A plain sum of bits missed one in five of ten elements: as many signs came as went."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        gradient = torch.randn(element_count, generator=generator)
        before = sums_of(gradient)
        gradient.data.neg_()
        assert has_changed(before, gradient)


def test_sums_of_a_large_gradient_are_those_of_its_parts() -> None:
    """And of nothing less: a change is seen in the first of its parts, and in the last."""
    gradient = torch.randn(2 * 2**23 + 12_345)
    before = sums_of(gradient)
    rows = gradient[: gradient.numel() // 1021 * 1021].view(torch.int32).view(-1, 1021)
    assert torch.equal(before._on(gradient.device).flat[:1021], rows.sum(0))
    for at in (0, 2**23, 2 * 2**23, gradient.numel() - 1):
        gradient.data[at] += 1.0
        assert has_changed(before, gradient)
        before = sums_of(gradient)
        assert not has_changed(before, gradient)


def test_views_of_bits_are_kept_while_their_tensor_is_where_it_was() -> None:
    views, tensor = BitViews(), torch.randn(3000)
    first, other = views.of(0, tensor), torch.randn(3000)
    assert views.of(0, tensor) is first
    rows, rest = views.of(0, other)
    assert rows is not None
    assert rest is not None
    assert rows.data_ptr() == other.data_ptr()
    assert torch.equal(rest, other.view(torch.int32)[2042:])
    gaps = torch.zeros(60, 70)[:, ::2][:, :30]
    assert not any(each is not None and bool(each.any()) for each in views.of(0, gaps))
    gaps += 1.0
    assert any(each is not None and bool(each.any()) for each in views.of(0, gaps)), "a copy is old"
    memory = weakref.ref(other.untyped_storage())
    rows, rest = views.of(0, other)
    del other, rows, rest
    assert memory() is not None
    views.keep([1])
    assert memory() is None
    assert views.of(0, tensor) is not first


def test_only_those_are_answered_that_are_asked_about() -> None:
    before, now = ColumnSums([3000, 10]), ColumnSums([3000, 10])
    first, second = torch.ones(3000), torch.ones(10)
    before.take([(0, first), (1, second)])
    first[7] = second[7] = 2.0
    assert true_numbers(now.differing(before, [(0, first)])) == {0}
    assert true_numbers(now.differing(before, [(1, second)])) == {1}


def test_fingerprints_of_gradients_that_are_not_contiguous() -> None:
    """By where their elements lie: a change is seen, in gaps and beyond nothing is."""
    memory = torch.randn(2, 70, 40)
    for gradient in (
        memory.permute(2, 0, 1),
        memory.to(memory_format=torch.contiguous_format)[:, ::2, 1:],
        torch.randn(1, 3, 64, 64).to(memory_format=torch.channels_last),
        torch.ones(1).expand(3000),
        torch.randn(3000).as_strided((3000, 1), (1, 7)),  # contiguous, as one column has no next
    ):
        before = sums_of(gradient)
        assert not has_changed(before, gradient)
        first = gradient[(0,) * gradient.dim()]
        first.data.mul_(-1.0)
        assert has_changed(before, gradient)
        first.data.mul_(-1.0)
        assert not has_changed(before, gradient)


def test_gradients_of_a_device_leave_when_they_have_arrived() -> None:
    device = SlowDevice(lag_count=1)
    loop = Loop(ones(64), ones(64), ones(64), copy=device.copy)
    assert loop.backward(0, 1, 2) == [2]  # backward goes from the last to the first
    arriving = [[part.block for part in parts] for parts in loop.staging.arriving()]
    assert arriving == [[1], [0]]
    assert loop.staging.take() == []
    assert loop.staging.changed_after_leaving() is None


def test_a_block_leaves_with_the_last_of_its_gradients() -> None:
    device = SlowDevice(lag_count=3)
    loop = Loop(ones(40), ones(40), ones(48), copy=device.copy)  # blocks: p0+p1 | p1+p2
    assert loop.backward(0, 1, 2) == []
    arriving = [[part.block for part in parts] for parts in loop.staging.arriving()]
    assert arriving == [[], [1], [0]]


def test_what_is_touched_before_it_arrives_leaves_once() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    assert loop.backward(0, 1) == []
    gradient = loop.parameters[0].grad
    assert gradient is not None
    gradient.mul_(0.5)
    assert [part.block for parts in loop.staging.arriving() for part in parts] == [1]
    parts = loop.staging.take()
    assert [part.block for part in parts] == [0]
    assert torch.equal(loop.held(parts)[0], torch.ones(64))


def test_what_changed_unseen_before_it_arrived_leaves_again() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    assert loop.backward(0, 1) == []
    gradient = loop.parameters[1].grad
    assert gradient is not None
    gradient.data.mul_(0.5)  # the copy reads this already; the checksum was taken before
    assert [part.block for parts in loop.staging.arriving() for part in parts] == [1, 0]
    assert loop.staging.changed_after_leaving() == "p1"
    parts = loop.staging.take()
    assert torch.equal(loop.held(parts)[1], torch.ones(64))


def test_of_a_gradient_that_arrives_only_the_blocks_of_the_step_leave() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(128), copy=device.copy)
    loop.staging.restrict({1})
    assert loop.backward(0) == []
    assert [part.block for parts in loop.staging.arriving() for part in parts] == [1]
    assert loop.staging.take() == []


def test_a_table_that_is_not_streamed_leaves_nothing_that_arrives() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    loop.staging.streams = False
    assert loop.backward(0, 1) == []
    assert list(loop.staging.arriving()) == []
    assert [part.block for part in loop.staging.take()] == [0, 1]


def test_a_step_that_was_skipped_leaves_no_copy_for_the_next() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    loop.backward(0, 1)
    loop.staging.finish()  # an overflow: nothing was taken
    for parameter in loop.parameters:
        parameter.grad = None  # as the model's zero_grad does, which no optimizer hears of
    assert loop.backward(0, 1, scale=3.0) == []
    parts = [part for parts in loop.staging.arriving() for part in parts]
    assert sorted(part.block for part in parts) == [0, 1]
    for values in loop.held(parts).values():
        assert torch.equal(values, torch.full((64,), 18.0))
    assert loop.staging.take() == []


def test_gradients_that_are_thrown_away_on_their_way_are_not_waited_for_later() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    loop.backward(0, 1)
    loop.zero_grad()
    assert device.waiting_count == 0
    assert list(loop.staging.arriving()) == []
    assert loop.staging.take() == []


def test_copies_on_the_host_have_ended_when_the_call_has() -> None:
    source, target = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    assert to_host([(target, source)]) is None
    assert torch.equal(target, source)
    back = torch.zeros(2, 3)
    assert from_host([(back, target)]) == []
    assert torch.equal(back, source)


def test_a_gradient_of_a_device_that_was_written_with_its_own_bits_leaves_once() -> None:
    device = SlowDevice(lag_count=1)
    loop = Loop(ones(64), ones(64), ones(64), copy=device.copy)
    assert loop.backward(0, 1, 2) == [2]
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(1.0)  # as `clip_grad_norm_` does with a norm that is small enough
    later = [part.block for parts in loop.staging.arriving() for part in parts]
    assert later + [part.block for part in loop.staging.take()] == [0, 1]
    assert loop.staging.streams


def test_a_gradient_of_a_device_in_another_order_of_memory_leaves_again() -> None:
    device = SlowDevice(lag_count=0)
    loop = Loop(nn.Parameter(torch.arange(64.0).reshape(8, 8)), copy=device.copy)
    assert loop.backward(0) == []
    assert [part.block for parts in loop.staging.arriving() for part in parts] == [0]
    gradient = loop.parameters[0].grad
    assert gradient is not None
    loop.parameters[0].grad = gradient.t()  # the same bits in memory
    parts = loop.staging.take()
    assert torch.equal(loop.held(parts)[0].reshape(8, 8), gradient.t())


def test_staging_that_is_wasted_step_after_step_pauses_longer_and_longer() -> None:
    loop = Loop(ones(64))
    copied: list[int] = []
    copy = loop.staging._copy_to_host

    def counted(moves: Moves) -> object:
        copied[-1] += 1
        return copy(moves)

    loop.staging._copy_to_host = counted  # type: ignore[assignment]
    for step in range(40):
        copied.append(0)
        loop.backward(0)
        gradient = loop.parameters[0].grad
        assert gradient is not None
        if step < 30:
            gradient.mul_(0.5)
        parts = loop.staging.take() or loop.left
        assert torch.equal(loop.held(parts)[0], gradient)
        loop.staging.finish()
        loop.parameters[0].grad = None
    # Staged and wasted: 0, 1, 3, 6, 11, 20. From 30 on nothing is: 37 ends the last pause.
    assert [step for step, count in enumerate(copied) if count == 2] == [0, 1, 3, 6, 11, 20]
    assert loop.staging.streams
    assert loop.backward(0) == [0]


def test_devices_say_which_of_their_gradients_are_finite() -> None:
    device = SlowDevice(lag_count=0)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    loop.backward(0, 1)
    loop.staging.take()
    loop.staging._buffer.values.fill_(float("nan"))  # nobody reads what a device has looked at
    assert loop.staging.non_finite() is None
    gradient = loop.parameters[1].grad
    assert gradient is not None
    gradient[3] = float("inf")
    loop.staging.take()
    assert loop.staging.non_finite() == "p1"
    loop.staging.finish()
    loop.zero_grad()
    loop.backward(0)
    loop.staging.take()
    assert loop.staging.non_finite() is None


def test_what_lands_of_a_table_that_is_not_streamed_stays() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    loop.staging.streams = False
    loop.backward(0, 1)
    while device.waiting_count:
        device.run_one()
    assert loop.staging.landed() == []
    assert [part.block for part in loop.staging.take()] == [0, 1]


def test_what_lands_leaves_unless_it_was_touched() -> None:
    device = SlowDevice(lag_count=2)
    loop = Loop(ones(64), ones(64), copy=device.copy)
    loop.backward(0, 1)
    assert loop.staging.landed() == []
    gradient = loop.parameters[0].grad
    assert gradient is not None
    gradient.mul_(0.5)
    while device.waiting_count:
        device.run_one()
    assert [part.block for part in loop.staging.landed()] == [1]
    assert [part.block for part in loop.staging.take()] == [0]


def test_a_block_that_could_not_leave_leaves_with_the_step() -> None:
    """STG-1."""
    loop = Loop(ones(64), ones(64))
    assert sorted(loop.backward(0, 1)) == [0, 1]
    loop.staging.stay([1])
    assert [part.block for part in loop.staging.take()] == [1]
    assert loop.staging.take() == []
