"""A model that workers keep, each its own copy, and a script that goes on before a step of it has
ended: what it changes comes after that step, as at the workers whose scripts have seen its end.

    step --a deadline, or Ctrl-C--> StateLeft; the script's changes; a later call
        --in_place: the state left--> the local optimizer's step --> the changes again
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
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
    """Copies of a group's settings that have plain values; others may be no copy's own."""
    given = {name: value for name, value in group.items() if name not in _NO_SETTINGS}
    return {name: _copy_of(value) for name, value in given.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Number | str | torch.Tensor)


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(_copy_of, value)) if type(value) in (tuple, list) else value


def _differing(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings that are others than `before`."""
    return {n: group[n] for n in before if n in group and not _is_same(group[n], before[n])}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(torch.as_tensor(one == other).all())
