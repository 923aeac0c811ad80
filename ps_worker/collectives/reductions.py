"""Reductions of collective calls: what can be reduced, and the sum, mean, minimum or maximum.

Rules:
    - A reduction takes the workers in the order of their ranks, so it is the same at each.
    - Python's integers stay exact; its floats are added as float64. A tensor is reduced in its own
      dtype, float16 and bfloat16 in float32, and comes back in its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ps_core.errors import InvalidConfig, InvalidTensor

OPS = ("sum", "mean", "min", "max")

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def reducible(value: Any, op: str, at: str = "value") -> Any:
    """A value as it is sent for a reduction: numbers, tensors on the CPU, and dicts, lists and
    tuples of these. Refuses one that `op` cannot reduce.
    """
    if op not in OPS:
        raise InvalidConfig(f"op is {op!r}; expected one of {', '.join(OPS)}")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return _reducible_tensor(value.detach().cpu(), op, at)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InvalidTensor(f"{at} has keys that are not strings; expected strings")
        return {key: reducible(value[key], op, f"{at}[{key!r}]") for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [reducible(one, op, f"{at}[{n}]") for n, one in enumerate(value)]
    raise InvalidTensor(
        f"{at} is a {type(value).__name__}; expected a number, a tensor, an array, or a dict, list "
        "or tuple of these"
    )


def _reducible_tensor(tensor: torch.Tensor, op: str, at: str) -> torch.Tensor:
    if tensor.dtype not in _FLOATS + _INTEGERS:
        raise InvalidTensor(
            f"{at} is of {tensor.dtype}; expected floating-point numbers or integers"
        )
    if op == "mean" and tensor.dtype in _INTEGERS:
        raise InvalidTensor(
            f"{at} is of {tensor.dtype}, which has no mean; give it as .double(), or take the sum"
        )
    return tensor


def shape_words(value: Any) -> str:
    """The shapes, dtypes and keys of a value, which a reduction needs equal at all workers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shape_words(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shape_words, value)) + "]"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "a number"


def reduced(values: Sequence[Any], op: str) -> Any:
    """The reduction of all workers' `reducible` values, in the order of ranks."""
    first = values[0]
    if isinstance(first, dict):
        return {key: reduced([value[key] for value in values], op) for key in first}
    if isinstance(first, list):
        return [reduced(ones, op) for ones in zip(*values, strict=True)]
    if isinstance(first, torch.Tensor):
        return _reduced_tensors(values, op)
    return _reduced_numbers(values, op)


def _reduced_numbers(values: Sequence[float], op: str) -> float:
    if op in ("min", "max"):
        if any(math.isnan(value) for value in values):
            return math.nan
        return min(values) if op == "min" else max(values)
    total: float = 0
    for value in values:
        total += value
    return total / len(values) if op == "mean" else total


def _reduced_tensors(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    accumulate: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "min": torch.minimum,
        "max": torch.maximum,
    }
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype in _HALF else tensors[0].clone()
    for tensor in tensors[1:]:
        total = accumulate.get(op, torch.add)(total, tensor.to(total.dtype))
    if op == "mean":
        total = total / len(tensors)
    return total.to(dtype)


def as_given(value: Any, given: Any) -> Any:
    """A result with the types and on the device of the caller's value."""
    if isinstance(given, dict):
        return {key: as_given(value[key], one) for key, one in given.items()}
    if isinstance(given, list | tuple):
        ones = [as_given(one, other) for one, other in zip(value, given, strict=True)]
        return tuple(ones) if isinstance(given, tuple) else ones
    if isinstance(given, torch.Tensor):
        return value.to(given.device)
    return value.numpy() if isinstance(given, np.ndarray) else value
