"""A module whose parameters are awaited when they are read, by whatever code reads them.

Rules:
    - Modules keep their parameters in dictionaries. Each gets one that waits for a parameter before
      it gives it: to the module's own forward, to that of another (as `MultiheadAttention` reads
      the weights of its `out_proj`), to `parameters()`, `state_dict()`, a copy.
    - Some modules keep their parameters in lists of their own (`LSTM`), so each waits for its own
      before its forward as well.
    - Compiled code reads parameters without either: where something may be compiled, all are
      awaited before the forward of the whole module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Await: TypeAlias = Callable[[Iterable[torch.Tensor]], None]
"""Waits until these parameters have their values."""


class _Awaited(dict[str, nn.Parameter | None]):
    """A module's parameters by name."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], await_: Await) -> None:
        super().__init__(parameters)
        self.await_ = await_

    def all(self) -> None:
        self.await_(each for each in super(_Awaited, self).values() if each is not None)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        found = super().__getitem__(name)
        if found is not None:
            self.await_((found,))
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> Any:
        self.all()
        return super().items()

    def values(self) -> Any:
        self.all()
        return super().values()

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module is a plain one."""
        return dict, (self.copy(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(self.copy(), memo)


class AwaitedParameters:
    """Waits in a module and those in it, until `close`."""

    def __init__(self, module: nn.Module, await_: Await) -> None:
        self._modules: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(_before_compiled, prepend=True)
        ]
        for each in module.modules():
            if each._parameters:
                each._parameters = _Awaited(each._parameters, await_)
                self._hooks.append(each.register_forward_pre_hook(_before, prepend=True))
                self._modules.append(each)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module._parameters = dict(module._parameters)
