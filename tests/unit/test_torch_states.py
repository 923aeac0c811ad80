"""torch's own objects, saved and loaded, go on exactly like ones that were never saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.optim import swa_utils

from tests.unit.torch_schedules import SCHEDULERS
from tests.unit.worker_files import from_file, to_file

Optimizer = torch.optim.Optimizer


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.01, max_iter=2),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)  # ten numbers on many threads wait for the slowest of a busy machine
    yield
    torch.set_num_threads(count)


class Training:
    """A small model, what trains it and what follows it, from the same start each time."""

    def __init__(self, optimizer: str = "SGD", scheduler: str = "StepLR") -> None:
        torch.manual_seed(3)
        self.inputs = torch.randn(20, 8, 4)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.average = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        self.parts = (self.model, self.optimizer, self.scheduler, self.average, self.scaler)

    def run(self, begin: int, end: int) -> list[Any]:
        """Steps `begin` to `end`; everything that can be seen after each."""
        return [self._step(number) for number in range(begin, end)]

    def _step(self, number: int) -> Any:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(self.inputs[number]).square().mean()
            self.scaler.scale(loss).backward()
            return loss

        loss = closure()
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.average.update_parameters(self.model)
        if isinstance(self.scheduler, rates.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        else:
            self.scheduler.step()
        return (
            loss.item(),
            [float(group["lr"]) for group in self.optimizer.param_groups],
            [parameter.tolist() for parameter in self.model.parameters()],
            [tensor.tolist() for tensor in self.average.state_dict().values()],
            self.scaler.get_scale(),
        )

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def check_it_goes_on(path: Path, build: Callable[[], Training]) -> None:
    never_saved = build().run(0, 14)
    training = build()
    assert training.run(0, 5) == never_saved[:5]
    to_file(path, training.state_dict())
    assert training.run(5, 14) == never_saved[5:], "saving changed it"
    other = build()
    other.run(0, 2)
    other.load_state_dict(from_file(path).state)
    assert other.run(5, 14) == never_saved[5:]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_go_on(tmp_path: Path, optimizer: str) -> None:
    check_it_goes_on(tmp_path / "part", lambda: Training(optimizer))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_go_on(tmp_path: Path, scheduler: str) -> None:
    check_it_goes_on(tmp_path / "part", lambda: Training("SGD", scheduler))


def test_every_scheduler_of_torch_is_tried() -> None:
    offered = {name for name in rates.__all__ if name != "LRScheduler"}
    assert offered <= SCHEDULERS.keys()
