"""Which parameters a script has changed since a table wrote them (SEMANTICS S16)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ps_worker.spec.flat_layout import dtype_of, layout_of
from ps_worker.training.tables.edits import WrittenValues
from ps_worker.training.tables.staging import FlatBuffer


class Written:
    """Parameters that were written from pulled values."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        self.parameters = parameters
        named = [(f"p{i}", each) for i, each in enumerate(parameters)]
        layout = layout_of("t", dtype_of("p0", parameters[0]), named)
        assert layout is not None
        received = FlatBuffer(layout)
        for view, each in zip(received.views, parameters, strict=True):
            view.copy_(each.detach())
        self.values = WrittenValues(layout, received)
        self.values.wrote_all()

    def edited(self) -> list[int]:
        return self.values.edited()

    def touched(self) -> bool:
        return self.values.is_touched


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def test_what_is_as_it_was_written_is_no_edit() -> None:
    written = Written(ones(3), ones(2, 2))
    assert written.values.is_known
    assert written.edited() == []


def test_a_change_is_found_however_it_was_made() -> None:
    written = Written(ones(3), ones(2, 2), ones(4), ones(5))
    with torch.no_grad():
        written.parameters[0][1] = 7.0
        written.parameters[3].mul_(2.0)
    written.parameters[2].data.fill_(5.0)
    assert written.edited() == [0, 2, 3]


def test_bits_decide() -> None:
    """A NaN is itself, and no zero is the other."""
    written = Written(nn.Parameter(torch.tensor([math.nan, 0.0])), nn.Parameter(torch.zeros(2)))
    assert written.edited() == []
    written.parameters[1].data[0] = -0.0
    assert written.edited() == [1]


def test_other_memory_with_the_same_values_is_no_edit() -> None:
    written = Written(ones(2, 3))
    written.parameters[0].data = torch.ones(3, 2).t()
    assert written.edited() == []
    written.parameters[0].data[1, 2] = 4.0
    assert written.edited() == [0]


def test_values_in_another_order_of_the_memory_are_other_values() -> None:
    square = nn.Parameter(torch.arange(4.0).view(2, 2))
    written = Written(square)
    square.data = square.data.t()
    assert written.edited() == [0]


def test_another_shape_is_an_edit_though_its_elements_are_the_same() -> None:
    written = Written(ones(3), ones(3))
    written.parameters[0].data = written.parameters[0].data[:2]
    written.parameters[1].data = torch.ones(1)
    assert written.edited() == [0, 1]


def test_a_model_in_another_dtype_is_compared_as_it_was_rounded() -> None:
    written = Written(nn.Parameter(torch.tensor([1.0, 1.001])))
    written.parameters[0].data = written.parameters[0].data.to(torch.bfloat16)
    assert written.edited() == []
    written.parameters[0].data[1] = 2.0
    assert written.edited() == [0]


def test_the_same_bits_in_another_dtype_are_other_values() -> None:
    written = Written(ones(3, dtype=torch.float16))
    written.parameters[0].data = written.parameters[0].data.view(torch.bfloat16)
    assert written.edited() == [0]


def test_autograd_knows_of_most_changes_and_a_mark_forgets_them() -> None:
    written = Written(ones(3), ones(3))
    assert not written.touched()
    written.parameters[1].data.fill_(2.0)
    assert not written.touched(), "it bypasses the version"
    with torch.no_grad():
        written.parameters[1].add_(0.0)
    assert written.touched()
    written.values.mark()
    assert not written.touched()
    written.parameters[0].data = torch.ones(3)
    assert written.touched(), "it lies elsewhere"
    written.values.wrote_all()
    assert not written.touched()


def test_what_changes_after_a_wait_was_given_up_is_told_until_all_is_written() -> None:
    written = Written(ones(3), ones(3), ones(3))
    assert written.values.changed_since_left() == set()
    written.parameters[0].data.fill_(2.0)
    written.values.left()
    written.parameters[1].data.fill_(2.0)
    written.values.left()  # interrupted again: the first time counts
    written.parameters[2].data.fill_(2.0)
    assert written.values.changed_since_left() == {1, 2}
    assert written.values.changed_since_left([0, 2]) == {2}
    written.values.wrote_all({1, 2})
    assert written.values.changed_since_left() == set()


def test_while_the_values_of_before_are_kept_what_differs_from_them_has_changed() -> None:
    written = Written(ones(3), ones(3), ones(3))
    written.parameters[1].data.fill_(2.0)
    written.parameters[2].data.fill_(2.0)
    assert written.values.changed_since_sealed([0, 1]) == {1}
    written.parameters[1].data.fill_(1.0)
    assert written.values.changed_since_sealed([0, 1, 2]) == {2}


def test_while_they_are_not_known_what_has_changed_since_the_wait_has() -> None:
    written = Written(ones(3), ones(3))
    written.parameters[0].data.fill_(2.0)
    written.values.begin()
    written.values.left()
    written.parameters[1].data.fill_(2.0)
    assert written.values.changed_since_sealed([0, 1]) == {1}


def test_another_shape_since_then_is_a_change_though_its_elements_are_the_same() -> None:
    written = Written(ones(3), ones(3))
    written.values.left()
    written.parameters[1].data = torch.ones(1)
    assert written.values.changed_since_left() == {1}


@pytest.mark.parametrize("count", [1020, 1021, 1022, 5000])
def test_a_swap_of_two_elements_since_then_is_a_change(count: int) -> None:
    """Sums by column, and the bits of a last row that is not whole."""
    written = Written(nn.Parameter(torch.arange(float(count))))
    written.values.left()
    data = written.parameters[0].data
    data[-2:] = data[-2:].flip(0)
    assert written.values.changed_since_left() == {0}
