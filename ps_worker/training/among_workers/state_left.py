"""A model that workers keep, each its own copy, and a script that goes on before a step of it has
ended: what it changes comes after that step, as at the workers whose scripts have seen its end.

    step --a deadline, or Ctrl-C--> StateLeft; the script's changes; a later call
        --in_place: the state left--> the local optimizer's step --> the changes again
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

_NO_SETTINGS = ("params", "param_names")


class StateLeft:
    """Parameters, and the settings of an optimizer's groups, as they are now. The copies of the
    parameters are in host memory.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], parameters: Iterable[torch.Tensor] = ()
    ) -> None:
        self._groups = [(cast("dict[str, Any]", each), _settings_in(each)) for each in groups]
        self._parameters = [
            (each, version_of(each), each.detach().to("cpu", copy=True)) for each in parameters
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts them back for the block; afterwards what the script has changed since is there
        again. Settings that the block changes stay, unless the script has changed them.
        """
        changed = [
            (each, before, each.detach().clone())
            for each, version, before in self._parameters
            if version_of(each) != version
        ]
        settings = [(group, old, _differing(group, old)) for group, old in self._groups]
        for parameter, before, _ in changed:
            parameter.copy_(before)
        for group, old, new in settings:
            group.update((name, old[name]) for name in new)
        try:
            yield
        finally:
            for parameter, _, own in changed:
                parameter.copy_(own)
            for group, _, new in settings:
                group.update(new)


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's version of a tensor, which tells of changes; -1 for one without."""
    try:
        return tensor._version
    except RuntimeError:  # it was made in inference mode
        return -1


def _settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a group's settings."""
    return {name: copy.deepcopy(v) for name, v in group.items() if name not in _NO_SETTINGS}


def _differing(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings that are others than `before`."""
    names = [name for name in before if name in group]
    return {n: group[n] for n in names if not torch.as_tensor(group[n] == before[n]).all()}
