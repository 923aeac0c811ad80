"""Every learning-rate schedule of torch, by name, for tests of what goes on after a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as rates
from torch.optim import swa_utils

BuildScheduler = Callable[[torch.optim.Optimizer], Any]


def half(_step: int) -> float:
    return 0.5


SCHEDULERS: dict[str, BuildScheduler] = {
    "LambdaLR": lambda o: rates.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: rates.MultiplicativeLR(o, half),
    "StepLR": lambda o: rates.StepLR(o, 3),
    "MultiStepLR": lambda o: rates.MultiStepLR(o, [2, 6, 6, 9]),
    "ConstantLR": lambda o: rates.ConstantLR(o, total_iters=7),
    "LinearLR": lambda o: rates.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: rates.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: rates.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: rates.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: rates.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SequentialLR": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, total_iters=4), rates.MultiStepLR(o, [3, 5])], [6]
    ),
    "ChainedScheduler": lambda o: rates.ChainedScheduler(
        [rates.ExponentialLR(o, 0.9), rates.StepLR(o, 4)], o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, 6),
}
