"""The first difference of two table specifications, in words, short at any size: a long tuple is
narrowed to its first difference, bytes to a position. NaN equals NaN. Inner steps are those of all
fragments together, as scripts give them.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from ps_core.consistency import Consistency
from ps_core.tables.optimizers import OptimizerSpec
from ps_core.tables.table_spec import TableSpec

_SHOWN_CHARACTERS = 120


def first_difference(exists: TableSpec, came: TableSpec) -> str | None:
    """The first field that differs, as "field is x; got y", or None. Both are `validated`. Tensors
    come first between models: a layer says more than "element_count is 9; got 12".
    """
    if exists == came:
        return None
    if len(exists.tensors) > 1:
        tensors = _differs("tensors", exists.tensors, came.tensors)
        if tensors is not None:
            return tensors
    return _differs("", exists, came)


def _differs(path: str, exists: object, came: object) -> str | None:
    if exists == came or (exists != exists and came != came):
        return None
    if isinstance(exists, OptimizerSpec) and isinstance(came, OptimizerSpec):
        exists, came = _as_given(exists), _as_given(came)
    if isinstance(exists, Consistency):  # shown as one word
        return f"{path} is {exists}; got {came}"
    if dataclasses.is_dataclass(exists) and type(exists) is type(came):
        parts = (
            _differs(
                f"{path}.{field.name}" if path else field.name,
                getattr(exists, field.name),
                getattr(came, field.name),
            )
            for field in dataclasses.fields(exists)
        )
        return next((part for part in parts if part is not None), None)
    if isinstance(exists, tuple) and isinstance(came, tuple):
        pairs = enumerate(zip(exists, came, strict=False))
        found = (_differs(f"{path}[{index}]", *pair) for index, pair in pairs)
        part = next((part for part in found if part is not None), None)
        if part is None and len(exists) == len(came):
            return None
        if not all(isinstance(value, int | float | str) for value in (*exists, *came)):
            return part or f"{path} has {len(exists)} entries; got {len(came)}"
    elif isinstance(exists, bytes) and isinstance(came, bytes):
        if len(exists) != len(came):
            return f"{path} has {len(exists)} bytes; got {len(came)}"
        first = next(i for i, (a, b) in enumerate(zip(exists, came, strict=True)) if a != b)
        return f"{path} has byte {exists[first]:#04x} at {first}; got {came[first]:#04x}"
    return f"{path} is {_shown(exists)}; got {_shown(came)}"


def _as_given(optimizer: OptimizerSpec) -> OptimizerSpec:
    fragment_count = max(optimizer.fragment_count, 1)
    return dataclasses.replace(optimizer, inner_steps=optimizer.inner_steps * fragment_count)


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
