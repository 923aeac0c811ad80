"""Parameter groups as torch.optim saves them: filled up with what the namesake has, and taken over.

Rules:
    - A saved group has every key of the namesake's, so that torch's own `load_state_dict` takes it.
    - A group that is loaded is checked before anything is taken over. What torch says how to
      compute with (`foreach`, `fused`, ...) is kept and has no effect here.

What it deliberately does not do: touch state (`ps_worker.training.served_state` does).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ps_core.errors import InvalidConfig
from ps_worker.spec.optimizers import ServerOptimizer

_OWN_KEYS = ("params", "param_names")
_DECOUPLED = "decoupled_weight_decay"
"""How torch tells Adam and AdamW apart."""

_ADAMS = {"Adam": False, "AdamW": True}


def fill_groups(groups: Sequence[dict[str, Any]], optimizer: ServerOptimizer) -> None:
    """What groups lack that those of the torch.optim namesake have; nothing where there is none."""
    cls = getattr(torch.optim, type(optimizer).__name__, None)
    if cls is None:
        return
    (namesake,) = cls([torch.zeros(1)]).param_groups
    for group in groups:
        for key, value in namesake.items():
            group.setdefault(key, value)


def checked_groups(
    saved: object, groups: Sequence[Mapping[str, Any]], optimizer: ServerOptimizer
) -> list[dict[str, Any]]:
    """The groups as they will be when `saved` has been taken over, with their own parameters.

    Raises:
        InvalidConfig: there are others, of other sizes, or another optimizer's.
    """
    if not isinstance(saved, Sequence) or not all(isinstance(each, Mapping) for each in saved):
        raise InvalidConfig("the state_dict has no 'param_groups'; expected a torch optimizer's")
    if len(saved) != len(groups):
        raise InvalidConfig(
            f"the state_dict has {len(saved)} parameter groups; this optimizer has {len(groups)}"
        )
    found = []
    for number, (theirs, own) in enumerate(zip(saved, groups, strict=True)):
        count = len(theirs.get("params", ()))
        if count != len(own["params"]):
            raise InvalidConfig(
                f"parameter group {number} of the state_dict has {count} parameters; this "
                f"optimizer's has {len(own['params'])}"
            )
        _check_kind(number, theirs, own, optimizer)
        kept = {key: own[key] for key in (*_OWN_KEYS, "clamp") if key in own}
        new = copy.deepcopy({key: value for key, value in theirs.items() if key not in _OWN_KEYS})
        found.append({**kept, **new})
    return found


def _check_kind(
    number: int, theirs: Mapping[str, Any], own: Mapping[str, Any], optimizer: ServerOptimizer
) -> None:
    name = type(optimizer).__name__
    optional = {"clamp", "initial_lr", *_OWN_KEYS}
    lacking = sorted((optimizer.defaults().keys() & own.keys()) - optional - theirs.keys())
    if lacking:
        raise InvalidConfig(
            f"parameter group {number} of the state_dict has no '{lacking[0]}', which {name} "
            "needs: it is another optimizer's"
        )
    expected = _ADAMS.get(name)
    if expected is not None and bool(theirs.get(_DECOUPLED, expected)) is not expected:
        other = next(each for each in _ADAMS if each != name)
        raise InvalidConfig(
            f"parameter group {number} of the state_dict is {other}'s; this optimizer is {name}"
        )


def numbered(
    state: Mapping[Any, Any], saved: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """State by the place of its parameter among all; `saved` says which number each had.

    Raises:
        InvalidConfig: state of a parameter that no group has, or that is no dict.
    """
    numbers = [number for group in saved for number in group["params"]]
    places = {number: place for place, number in enumerate(numbers)}
    found: dict[int, Mapping[str, Any]] = {}
    for number, entry in state.items():
        if number not in places:
            raise InvalidConfig(
                f"the optimizer state has an entry for {number!r}; expected one of the numbers in "
                "its 'param_groups'"
            )
        if not isinstance(entry, Mapping):
            raise InvalidConfig(
                f"the optimizer state of parameter {number} is {type(entry).__name__}; expected a "
                "dict of arrays by name"
            )
        found[places[number]] = entry
    return found
