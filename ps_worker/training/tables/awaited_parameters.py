"""Parameters of a module that are awaited when they are read, by whatever code reads them.

Rules:
    - Modules keep their parameters in dictionaries. While values are awaited, each has one in its
      place that waits for a parameter before it gives it: to the module's own forward, to that of
      another (as `MultiheadAttention` reads the weights of its `out_proj`), to `parameters()`,
      `state_dict()`, a copy.
    - Some modules keep their parameters elsewhere as well, so each waits for its own before its
      forward.
    - Compiled code reads parameters without either: where anything may be compiled, all are awaited
      before the forward of the whole module.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_core.errors import InvalidConfig
from ps_runtime.observe import logs

if TYPE_CHECKING:
    from ps_worker.training.tables.trained_table import TrainedTable

Await: TypeAlias = Callable[[Iterable[torch.Tensor]], None]
"""Waits until these parameters have their values."""


def check_in_module(module: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse parameters that would be read without being awaited."""
    known = {id(parameter) for parameter in module.parameters()}
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if id(parameter) not in known:
                raise InvalidConfig(
                    f"parameter '{name}' is not in the module; with overlap_pull all have to "
                    "be, because reads of the module's parameters wait for them"
                )


class _Awaited(dict[str, nn.Parameter | None]):
    """A module's parameters by name, in the place of `plain`; `awaits` has one for each optimizer
    whose values are awaited.
    """

    def __init__(self, plain: dict[str, nn.Parameter | None]) -> None:
        super().__init__(plain)
        self.plain = plain
        self.awaits: list[Await] = []

    def all(self) -> None:
        """Wait for all of them."""
        self._await([each for each in super().values() if each is not None])

    def _await(self, parameters: list[nn.Parameter]) -> None:
        for await_ in list(self.awaits):  # each goes when it has all of its own
            await_(parameters)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        found = super().__getitem__(name)
        if found is not None:
            self._await([found])
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
    """The tables of one module whose values are awaited, and the waits in it, until `close`.

    Attributes:
        is_on: there is a module to wait in.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.is_on = module is not None
        self._module = module
        self._waiting: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        if module is not None:
            before = module.register_forward_pre_hook(self._before_compiled, prepend=True)
            self._hooks.append(before)
            self._hook([each for each in module.modules() if each._parameters])
        # By the identity of the parameter: its table and its place there.
        self._places: dict[int, tuple[TrainedTable, int]] = {}

    def begin(self, tables: Iterable[TrainedTable]) -> None:
        """The values of these tables are awaited from now on, unless they have been written."""
        for table in tables:
            if table.has_awaited:
                places = enumerate(table.layout.placed)
                self._places |= {id(entry.tensor): (table, at) for at, entry in places}
        if self._module is None or not self._places:
            return
        # Some may have come since the last step.
        self._waiting = [each for each in self._module.modules() if each._parameters]
        self._hook(self._waiting)  # some are new
        for module in self._waiting:
            awaited: Any = module._parameters
            if not isinstance(awaited, _Awaited):
                # As an attribute it would be looked at by torch, which takes microseconds.
                awaited = vars(module)["_parameters"] = _Awaited(awaited)
            awaited.awaits.append(self.wait_for)

    def _hook(self, modules: Iterable[nn.Module]) -> None:
        """Have these wait before their forward."""
        for module in modules:
            if module not in self._hooked:
                self._hooked.add(module)
                hook = module.register_forward_pre_hook(_before, prepend=True)
                self._hooks.append(hook)

    def wait(self) -> None:
        """Wait for all values, and write them."""
        for table, index in list(self._places.values()):
            table.await_values(index)
        self._end()

    def give_up(self) -> None:
        """The client ends: what has not been written keeps the values that it has."""
        if self._places:
            logs.warning("values_not_awaited", tensors=len(self._places))
            self._end()

    def wait_for(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for the values of these, if they are awaited. Any thread."""
        places = self._places
        for parameter in parameters:
            if (place := places.get(id(parameter))) is not None:
                table, index = place
                table.await_values(index)
        if not any(table.has_awaited for table, _ in places.values()):
            self._end()

    def _end(self) -> None:
        self._places = {}
        for module in self._waiting:
            awaited = module._parameters
            if not isinstance(awaited, _Awaited):
                continue
            awaited.awaits = [each for each in awaited.awaits if each != self.wait_for]
            if not awaited.awaits:
                awaited.plain.clear()
                awaited.plain.update(awaited)
                vars(module)["_parameters"] = awaited.plain

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module has its hook, which waits for nothing."""
        self.wait()
        return AwaitedParameters, (None,)

    def close(self) -> None:
        """Wait for all values, and wait no more in the module."""
        self.wait()
        self.is_on = False
        for hook in self._hooks:
            hook.remove()

    def _before_compiled(self, *_: object) -> None:
        if "torch._dynamo" in sys.modules and self._places:
            torch.compiler.disable(self.wait)()


def _before(module: nn.Module, *_: object) -> None:
    if isinstance(module._parameters, _Awaited):
        module._parameters.all()
