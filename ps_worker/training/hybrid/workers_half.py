"""The half of a hybrid model that the workers keep, as checkpoints have it.

Rules:
    - It is of the step that the servers' half is of, and otherwise refused when it is loaded.
    - Every worker saves all of it; under FSDP2 its own shards, which fit only as many workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ps_core.errors import InvalidCheckpoint, listed
from ps_worker.client.client import Client
from ps_worker.spec.flat_layout import plain_name
from ps_worker.training.among_workers.gradient_reduction import is_sharded, own_part
from ps_worker.training.module_buffers import persistent_buffers
from ps_worker.training.optimizer_state import RestoredHyperparameters

_SHOWN_COUNT = 5


@dataclass(frozen=True, slots=True, eq=False)
class WorkersHalf:
    """The parameters and buffers that a worker keeps, and its optimizer.

    Attributes:
        served: parameters of the module that are not the workers'.
        clock: the steps of the servers' half.
        on_load: called when the optimizer has other groups.
        restored: the hyperparameters that the checkpoint has.
    """

    client: Client
    module: nn.Module
    optimizer: torch.optim.Optimizer
    served: Iterable[nn.Parameter]
    clock: Callable[[], int]
    on_load: Callable[[], None]
    restored: RestoredHyperparameters = field(default_factory=RestoredHyperparameters)

    keeps_parameters: ClassVar[bool] = True
    begins_anew: ClassVar[str] = "To take over rows alone, export and import them"

    def is_part_of(self, tables: Collection[str]) -> bool:
        """True: rows of any model would go on, and the rest begin anew."""
        return bool(tables)

    def whole(self) -> dict[str, torch.Tensor]:
        """The tensors by name, sharded ones as such."""
        served = set(self.served)
        own = (
            (plain_name(name), parameter)
            for name, parameter in self.module.named_parameters()
            if parameter not in served
        )
        return {**dict(own), **dict(persistent_buffers(self.module))}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """This worker's own, by name."""
        return {name: own_part(each) for name, each in self.whole().items()}

    def _shards(self) -> dict[str, Any]:
        """The worker's rank and their number, and the whole shapes of what is sharded; `is_by_rows`
        if the workers' shards in order are the whole. Empty if nothing is sharded.
        """
        sharded: dict[str, Any] = {n: t for n, t in self.whole().items() if is_sharded(t)}
        if not sharded:
            return {}
        dimensions = {getattr(p, "dim", None) for t in sharded.values() for p in t.placements}
        return {
            "rank": self.client.rank,
            "worker_count": self.client.world_size,
            "shapes": {name: [*tensor.shape] for name, tensor in sharded.items()},
            "is_by_rows": dimensions == {0},
        }

    def state_dict(self) -> dict[str, Any]:
        """The half as of the last step; raises nothing."""
        state = self.optimizer.state_dict()
        state["state"] = {
            number: {key: own_part(value) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        found = {"tensors": self._tensors(), "optimizer": state}
        return {**found, "clock": self.clock(), "shards": self._shards()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; InvalidCheckpoint if it is of another model or step."""
        self._check(state)
        own, saved = self._tensors(), state["tensors"]
        for name, tensor in own.items():
            write_into(tensor, saved[name])
        self.optimizer.load_state_dict(_placed(state["optimizer"], self.optimizer))
        self.restored.keep(state["optimizer"]["param_groups"])
        self.on_load()

    def goes_on_with(self, state: object) -> None:
        """Take the hyperparameters once more, which a schedule's constructor has changed."""
        self.restored.put_back(self.optimizer.param_groups, state)

    def _check(self, state: Mapping[str, Any]) -> None:
        own, saved, where = self._tensors(), state["tensors"], self.client.restored_from
        check_shards(where, state.get("shards", {}), self._shards())
        differing = [
            name
            for name in sorted({*own, *saved})
            if name not in own or name not in saved or own[name].shape != saved[name].shape
        ]
        if differing:
            raise InvalidCheckpoint(
                f"{where} has other parameters: {listed(differing, _SHOWN_COUNT)}; expected the "
                "same model"
            )
        if state.get("clock", self.clock()) != self.clock():
            raise InvalidCheckpoint(
                f"{where} has the servers' half as of step {self.clock()}, and the workers' as of "
                f"step {state['clock']}: it was saved too late; expected an earlier checkpoint "
                "(pushpull checkpoint list), or save points at each step"
            )


def write_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor, also an expanded one, whose places share memory."""
    own = *(slice(None if stride else 1) for stride in tensor.stride()), ...
    tensor[own].copy_(values[own])


def check_shards(where: str, came: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse the shards of other workers, of another number of them, or of none."""
    if came.get("worker_count") != expected.get("worker_count"):
        raise InvalidCheckpoint(
            f"{where} has the parameters {_split_words(came)}, and here they are "
            f"{_split_words(expected)}; expected the same: FSDP2's shards fit only as many workers"
        )
    if came.get("rank") != expected.get("rank"):
        raise InvalidCheckpoint(
            f"{where} has no shards of worker {expected['rank']}, which were lost; expected an "
            "earlier checkpoint (pushpull checkpoint list)"
        )


def _split_words(shards: Mapping[str, Any]) -> str:
    return f"in the shards of {shards['worker_count']} workers (FSDP2)" if shards else "whole"


def _placed(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Saved optimizer state, with the parts of sharded parameters put in their places."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = (number for group in state["param_groups"] for number in group["params"])
    by_number = dict(zip(numbers, parameters, strict=False))
    placed: dict[Any, Any] = {}
    for number, entry in state["state"].items():
        parameter = by_number.get(number)
        placed[number] = {
            key: _shard_of(parameter, value) if parameter is not None else value
            for key, value in entry.items()
        }
    return {**state, "state": placed}


def _shard_of(parameter: Any, value: Any) -> Any:
    """A part of a sharded tensor like `parameter`; other values as they are."""
    if not is_sharded(parameter) or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return type(parameter.detach()).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
