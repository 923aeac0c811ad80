"""Flat tables of parameter groups: the place of each tensor.

A torch parameter group becomes one table per element type; its parameters follow each other in the
order of registration, each flattened in logical (C) order whatever its memory format.

Rules:
    - Parameters that are frozen when their group is registered get a table of their own
      (``.../frozen``): evaluators can pull a whole model, while training moves none of their bytes.
      The table takes part in steps once one of them is unfrozen.
    - Tensors without elements have a place and no bytes; a group without elements has no table.

Invariants:
    FL-1  Every parameter of a group is in exactly one layout, and offsets leave no gap.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ps_core.errors import InvalidConfig
from ps_core.tables.elements import DType

TORCH_DTYPE: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in DType}
"""The torch dtype of each table dtype."""

TABLE_DTYPE: dict[torch.dtype, DType] = {theirs: ours for ours, theirs in TORCH_DTYPE.items()}
"""The inverse of `TORCH_DTYPE`."""


_REMEDY = (
    "its tables have the parameters that it was given. Give further ones to add_param_group; where "
    "they take the place of others, close() it, and make another with a name= of its own; freeze "
    "with requires_grad_(False) what is to be trained no more"
)


def plain_name(name: str) -> str:
    """A tensor's name in the module before `torch.compile`, by which other ranks know it."""
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


Parameters: TypeAlias = (
    nn.Module
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
    | Iterable[Mapping[str, Any]]
)
"""The argument of a torch optimizer, or a module, which means its named parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """A tensor and its place in a table; `offset` is in elements."""

    name: str
    tensor: torch.Tensor
    offset: int

    @property
    def end(self) -> int:
        """The offset after its last element."""
        return self.offset + self.tensor.numel()


@dataclass(frozen=True, slots=True, eq=False)
class FlatLayout:
    """The tensors of one table, in order of their offsets."""

    table_name: str
    dtype: DType
    placed: tuple[PlacedTensor, ...]
    is_frozen: bool = False

    @property
    def element_count(self) -> int:
        return self.placed[-1].end

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The layout as `create_table` takes it."""
        return [(entry.name, tuple(entry.tensor.shape)) for entry in self.placed]

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A table's flat values (1-D, contiguous), cut into tensors that share their memory."""
        return tuple(flat[one.offset : one.end].view(one.tensor.shape) for one in self.placed)


class KnownParameters:
    """The parameters of groups that have tables, in order."""

    def __init__(self) -> None:
        self._by_group: list[tuple[torch.Tensor, ...]] = []

    def add(self, group: Mapping[str, Any]) -> None:
        """The group has tables."""
        self._by_group.append(tuple(group["params"]))

    def check(self, groups: Sequence[Mapping[str, Any]], name: str) -> None:
        """Refuse groups of other parameters, which would never train; reads no tensor."""
        for number, (group, known) in enumerate(zip(groups, self._by_group, strict=False)):
            own = group["params"]
            if len(own) == len(known) and all(map(operator.is_, own, known)):
                continue
            places = enumerate(zip(own, known, strict=False))
            place = next((i for i, (one, other) in places if one is not other), None)
            words = f"had {len(known)} parameters, and has {len(own)}"
            if place is not None and len(own) == len(known):
                words = f"has another parameter at place {place}"
            raise InvalidConfig(f"group {number} of '{name}' {words}; {_REMEDY}")
        if len(groups) != len(self._by_group):
            raise InvalidConfig(
                f"'{name}' had {len(self._by_group)} parameter groups, and has {len(groups)}; "
                f"{_REMEDY}"
            )


def named_groups(
    parameters: Parameters, module: nn.Module | None = None, *, may_be_empty: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups with "params" and, in the same order, "param_names". A tensor that is there
    twice (tied weights) is in its group once, under its first name. Tensors without a name get the
    one that they have in `module`, else ``parameter.<position>``, counted over all groups.
    """
    if isinstance(parameters, nn.Module):
        own = parameters.named_parameters()
        # Its truth would be its length, which a compiled module may not have.
        module = parameters if module is None else module
        return named_groups(own, module, may_be_empty=may_be_empty)
    if isinstance(parameters, torch.Tensor):
        raise InvalidConfig("expected an iterable of parameters; got one tensor")
    given: Any = parameters
    if isinstance(given, type) or not isinstance(given, Iterable):
        words = f"the class {given.__name__}" if isinstance(given, type) else given
        raise InvalidConfig(f"expected a module, or its parameters or groups of them; got {words}")
    entries: list[Any] = list(parameters)
    if not entries and not may_be_empty:
        raise InvalidConfig("expected parameters; got an empty list")
    groups = entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
    known, positions = _names_in(module), itertools.count()
    named = [_named_group(group, known, positions) for group in groups]
    check_own_memory(_named_parameters(named))
    return named


def named_group(
    group: Mapping[str, Any], module: nn.Module | None, position: int
) -> dict[str, Any]:
    """A group that is added later, as in `named_groups`; `position` parameters come before it."""
    return _named_group(group, _names_in(module), itertools.count(position))


class _Span(NamedTuple):
    """A tensor's memory."""

    device: str
    begin: int
    end: int
    kind: str
    name: str
    is_trained: bool


def check_own_memory(
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Refuse parameters that share memory with one another, or, if `buffers` are given, with these:
    the servers would keep several values of it, and each that is pulled would overwrite the others.
    """
    named = [("parameter", *each) for each in parameters]
    named += [("buffer", *each) for each in buffers or ()]
    once = {(kind, id(tensor)): (kind, name, tensor) for kind, name, tensor in named}
    spans = sorted(span for each in once.values() if (span := _span_of(*each)) is not None)
    for one, other in itertools.pairwise(spans):
        is_shared = one.device == other.device and other.begin < one.end
        has_buffer = "buffer" in {one.kind, other.kind}
        if not is_shared or has_buffer is (buffers is None):
            continue
        if not (one.is_trained or other.is_trained):  # they keep their one value
            continue
        remedy = (
            "register the buffer with persistent=False, or choose buffers=None" if has_buffer else
            "tie them as one Parameter (decoder.weight = encoder.weight)"
        )  # fmt: skip
        raise InvalidConfig(
            f"{one.kind} '{one.name}' and {other.kind} '{other.name}' share memory, and the "
            f"servers would have two values of it; give one its own (clone()), or {remedy}"
        )


def _span_of(kind: str, name: str, tensor: torch.Tensor) -> _Span | None:
    """None if it has no memory yet, or gaps, in which others may lie."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or hasattr(tensor, "device_mesh"):
        return None
    places = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in places)
    if not tensor.numel() or extent != tensor.numel() or not (begin := tensor.data_ptr()):
        return None
    device, end = str(tensor.device), begin + tensor.nbytes
    return _Span(device, begin, end, kind, name, tensor.requires_grad)


def _named_parameters(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for group in groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _names_in(module: nn.Module | None) -> dict[int, str]:
    """The names of a module's parameters, by `id`."""
    return {} if module is None else {id(p): name for name, p in module.named_parameters()}


def _named_group(group: Any, known: Mapping[int, str], positions: Iterator[int]) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise InvalidConfig(f"expected a parameter group with 'params'; got {type(group).__name__}")
    given = group["params"]
    if isinstance(given, set):
        raise InvalidConfig("expected parameters in an order; got a set")
    if isinstance(given, nn.Module):
        given = given.named_parameters()
    entries: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    if "param_names" in group:
        entries = list(zip(group["param_names"], entries, strict=True))
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for entry, position in zip(entries, positions, strict=False):
        if isinstance(entry, torch.Tensor):
            name, tensor = known.get(id(entry), f"parameter.{position}"), entry
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.Tensor):
            name, tensor = str(entry[0]), entry[1]
        else:
            raise InvalidConfig(
                f"expected a parameter or a (name, parameter) pair; got {type(entry).__name__}"
            )
        named.setdefault(id(tensor), (plain_name(name), tensor))
    return {
        **group,
        "params": [tensor for _, tensor in named.values()],
        "param_names": [name for name, _ in named.values()],
    }


def table_layouts(prefix: str, group: Mapping[str, Any]) -> Iterator[FlatLayout]:
    """Tables of one of `named_groups`: one an element type and frozenness, by first appearance."""
    bins: dict[tuple[DType, bool], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in zip(group["param_names"], group["params"], strict=True):
        key = (dtype_of(name, tensor), not tensor.requires_grad)
        bins.setdefault(key, []).append((name, tensor))
    for (dtype, is_frozen), named in bins.items():
        table_name = f"{prefix}/{dtype.value}" + ("/frozen" if is_frozen else "")
        layout = layout_of(table_name, dtype, named, is_frozen=is_frozen)
        if layout is not None:
            yield layout


def layout_of(
    table_name: str,
    dtype: DType,
    named: Iterable[tuple[str, torch.Tensor]],
    *,
    is_frozen: bool = False,
) -> FlatLayout | None:
    """A layout of `named` tensors, one after the other; None if they have no elements."""
    placed = []
    names = set()
    end = 0
    for name, tensor in named:
        if name in names:
            raise InvalidConfig(f"table '{table_name}' would have two tensors named '{name}'")
        names.add(name)
        placed.append(PlacedTensor(name, tensor, end))
        end += tensor.numel()
    return FlatLayout(table_name, dtype, tuple(placed), is_frozen) if end else None


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """The table dtype of a parameter; InvalidConfig if no table can have it."""
    if is_lazy(tensor):
        raise InvalidConfig(
            f"parameter '{name}' is a lazy module's and has no shape yet; give the model one batch "
            "before its optimizer is made"
        )
    if tensor.is_meta:
        raise InvalidConfig(
            f"parameter '{name}' is on the meta device and has no values; give the model memory "
            "(model.to_empty(device=...)) and initial values before its optimizer is made"
        )
    if hasattr(tensor, "device_mesh"):
        raise InvalidConfig(
            f"parameter '{name}' is sharded (fully_shard), and the servers train whole tensors; "
            "expected the plain module, or a HybridOptimizer, whose workers keep what is sharded: "
            "fully_shard of the layers that are not in served="
        )
    found = TABLE_DTYPE.get(tensor.dtype)
    if found is None or tensor.layout is not torch.strided:
        expected = ", ".join(map(str, TABLE_DTYPE))
        raise InvalidConfig(
            f"parameter '{name}' is {tensor.dtype} ({tensor.layout}); expected a dense tensor of "
            f"{expected}"
        )
    return found
