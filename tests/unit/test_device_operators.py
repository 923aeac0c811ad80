"""What staging and clipping ask of a CUDA device exists there, for every dtype, and stays there: on
tensors that have a device and no values (`FakeTensorMode`), so without one.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ps_worker.training.clipping import total_norm
from ps_worker.training.tables.inspection import Answers, ColumnSums, non_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5), (40, 30)], ids=str)
def test_sums_are_made_and_compared_on_the_device(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """On "meta": a build without CUDA knows no `out=` there."""
    gradient = torch.empty(shape, dtype=dtype, device="meta")
    if len(shape) == 4:
        gradient = gradient.to(memory_format=torch.channels_last)
    before, now = (ColumnSums([gradient.numel()]) for _ in range(2))
    before.take([(0, gradient)])
    check_answers(now.differing(before, [(0, gradient)]), "meta")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_look_for_infinities_stays_on_the_device(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        found = non_finite([(n, torch.empty(30, dtype=dtype, device="cuda")) for n in range(3)])
    check_answers(found, "cuda")


def check_answers(found: list[Answers], device: str) -> None:
    assert found
    for _, are_true in found:
        assert are_true.device.type == device
        assert (are_true.dtype, are_true.dim()) == (torch.bool, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_made_on_the_device_and_is_no_half(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        gradients = [torch.empty(5000, dtype=dtype, device="cuda") for _ in range(3)]
        norm = total_norm(gradients, 0.5)
    assert (norm.device.type, norm.dim()) == ("cuda", 0)
    assert norm.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
