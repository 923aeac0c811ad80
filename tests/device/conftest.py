"""The device: one in Python (`tests.fake_accelerator`), or with `--device cuda` a real one; and one
cluster for all of its tests, which train one model after the other on it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
import torch
from torch.cuda import _sanitizer

import ps_worker as ps
from tests import fake_accelerator
from tests.device.training_pairs import cuda_device, one_worker

# This process has it on by now, if it is wanted; servers compute on the CPU.
os.environ.pop("TORCH_CUDA_SANITIZER", None)


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Have the device in Python before the first backward pass of any test: autograd counts the
    devices then. A process with it has no other: torch takes it for its accelerator.
    """
    if config.getoption("--device") == fake_accelerator.NAME:
        fake_accelerator.register()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A script may change a gradient under its copy, which staging finds (STG-1). The sanitizer
    must find fault with no test but those that do: with each on the device in Python, whose copies
    are late, and with some on a real one, where most copies have ended by then.
    """
    is_racing = pyfuncitem.get_closest_marker("racing") is not None
    if pyfuncitem.config.getoption("--device") == fake_accelerator.NAME:
        fake_accelerator.RUNTIME.forget()
        found = yield
        assert (fake_accelerator.RUNTIME.race_count > 0) == is_racing
        return found
    try:
        return (yield)
    except _sanitizer.CUDASanitizerErrors:
        if not is_racing:
            raise
        return True


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    is_fake = request.config.getoption("--device") == fake_accelerator.NAME
    return fake_accelerator.register() if is_fake else cuda_device()


@pytest.fixture(scope="session")
def client(device: torch.device) -> Iterator[ps.Client]:
    yield from one_worker()
