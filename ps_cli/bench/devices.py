"""Devices that workers compute on."""

from __future__ import annotations

import importlib.util
import sys

from ps_core.errors import InvalidConfig
from ps_runtime.system.capacity import usable_core_count

CPU, CUDA = DEVICES = ("cpu", "cuda")


def name_of(device: str) -> str:
    """The name of a device: "cpu", or CUDA's name of the card."""
    if device == CPU:
        return CPU
    if device != CUDA:
        raise InvalidConfig(f"device is '{device}'; expected one of {', '.join(DEVICES)}")
    if importlib.util.find_spec("torch") is None:
        raise InvalidConfig(f"device is 'cuda', and {sys.executable} has no torch")
    import torch

    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"device is 'cuda', and torch {torch.__version__} of {sys.executable} sees no CUDA "
            "device on this machine"
        )
    return str(torch.cuda.get_device_name())


def transformer_thread_count() -> int:
    """Torch's threads on a CPU in each process that trains the transformer: half of the cores,
    because a cluster's servers need some.
    """
    return max(1, usable_core_count() // 2)
