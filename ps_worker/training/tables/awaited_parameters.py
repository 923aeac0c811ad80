"""A module whose parameters are awaited when they are read, by whatever code reads them.

Rules:
    - Modules keep their parameters in dictionaries. Each gets one that waits for a parameter before
      it gives it: to the module's own forward, to that of another (as `MultiheadAttention` reads
      the weights of its `out_proj`), to `parameters()`, `state_dict()`, a copy.
    - Some modules keep their parameters in lists of their own (`LSTM`), so each waits for its own
      before its forward as well.
    - Compiled code reads parameters without either. Once torch has compiled anything, the owner
      ends this; until then, where something may be compiled, all are awaited before the forward of
      the whole module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

Await: TypeAlias = Callable[[Iterable[torch.Tensor]], None]
"""Waits until these parameters have their values."""


class _Awaited(dict[str, nn.Parameter | None]):
    """A module's parameters by name."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], await_: Await) -> None:
        super().__init__(parameters)
        self._await = await_

    def all(self) -> None:
        """Wait for all of them."""
        self._await(each for each in super().values() if each is not None)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        found = super().__getitem__(name)
        if found is not None:
            self._await((found,))
        return found

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

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


class AwaitedParameters:
    """Waits in a module, and in those in it, until `close`."""

    def __init__(self, module: nn.Module, await_: Await) -> None:
        self._modules = list(module.modules())
        self._has_compiled = any(hasattr(each, "_orig_mod") for each in self._modules)
        before_all = partial(_before_compiled, [*self._modules])
        self._hooks = [module.register_forward_pre_hook(before_all, prepend=True)]
        for each in self._modules:
            each._parameters = _Awaited(each._parameters, await_)
            if len(each._parameters):
                self._hooks.append(each.register_forward_pre_hook(_before, prepend=True))

    @property
    def may_be_compiled(self) -> bool:
        """True if a module is compiled, or torch has compiled something in this process."""
        utils = sys.modules.get("torch._dynamo.utils")
        has_compiled = utils is not None and utils.counters["frames"]["total"] > 0
        return has_compiled or self._has_compiled

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module._parameters = dict(module._parameters)


def _before(module: nn.Module, *_: object) -> None:
    if isinstance(module._parameters, _Awaited):
        module._parameters.all()


def _before_compiled(modules: Iterable[nn.Module], *_: object) -> None:
    if "torch._dynamo" in sys.modules:
        for module in modules:
            _before(module)


# The compiler calls them, and does not look into them.
_before._torchdynamo_disable = _before_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]
