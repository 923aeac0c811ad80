"""The device, and one cluster for all of its tests: they train one model after the other on it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
import torch
from torch.cuda import _sanitizer

import ps_worker as ps
from tests.device.training_pairs import cuda_device, one_worker

# This process has it on by now, if it is wanted; servers compute on the CPU.
os.environ.pop("TORCH_CUDA_SANITIZER", None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A script may change a gradient under its copy, which staging finds (STG-1). The sanitizer
    must find fault with the tests that do, and with no other.
    """
    if not _sanitizer.cuda_sanitizer.enabled or pyfuncitem.get_closest_marker("racing") is None:
        return (yield)
    with pytest.raises(_sanitizer.CUDASanitizerErrors):
        yield
    return True


@pytest.fixture(scope="session")
def device() -> torch.device:
    return cuda_device()


@pytest.fixture(scope="session")
def client(device: torch.device) -> Iterator[ps.Client]:
    yield from one_worker()
