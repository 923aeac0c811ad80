"""What staging and clipping ask of a CUDA device exists there, for every dtype, and stays there: on
tensors that have a device and no values (`FakeTensorMode`), so without one.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ps_worker.training.clipping import total_norm
from ps_worker.training.tables.staging import column_sums, sums_differ

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "device"),
    [((), "cuda"), ((3,), "cuda"), ((2, 3, 4, 5), "cuda"), ((40, 30), "meta")],
    ids=str,
)
def test_fingerprints_are_made_and_compared_on_the_device(
    dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    """The sums of a long gradient are tried on "meta": a build without CUDA knows no `out=`."""
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        gradient = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 4:
            gradient = gradient.to(memory_format=torch.channels_last)
        sums = column_sums(gradient)
        found = sums_differ(sums, column_sums(gradient))
        is_finite = torch.isfinite(gradient.detach()).all()
    for each in (sums, found, is_finite):
        assert each.device.type == device
    assert (found.dtype, found.dim(), is_finite.dim()) == (torch.bool, 0, 0)
    assert not sums.dtype.is_floating_point


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_made_on_the_device_and_is_no_half(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        gradients = [torch.empty(5000, dtype=dtype, device="cuda") for _ in range(3)]
        norm = total_norm(gradients, 0.5)
    assert (norm.device.type, norm.dim()) == ("cuda", 0)
    assert norm.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
