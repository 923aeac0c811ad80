"""Parameter groups as flat tables."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

from ps_core.errors import InvalidConfig
from ps_core.tables.elements import DType
from ps_worker.spec.flat_layout import (
    FlatLayout,
    KnownParameters,
    named_group,
    named_groups,
    table_layouts,
)


def layouts(parameters: Any, module: nn.Module | None = None) -> list[FlatLayout]:
    groups = named_groups(parameters, module)
    return [
        layout
        for number, group in enumerate(groups)
        for layout in table_layouts(f"m/{number}", group)
    ]


def test_a_module_is_one_group_in_registration_order() -> None:
    """FL-1."""
    (layout,) = layouts(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    assert layout.table_name == "m/0/float32"
    assert [(e.name, e.offset) for e in layout.placed] == [
        ("0.weight", 0), ("0.bias", 6), ("1.weight", 8), ("1.bias", 10),
    ]  # fmt: skip
    assert layout.element_count == 11
    assert [shape for _, shape in layout.shapes()] == [(2, 3), (2,), (1, 2), (1,)]


def test_one_table_for_each_dtype_and_frozenness_of_a_group() -> None:
    """FL-1."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2).double()
    second.weight.requires_grad_(False)
    found = layouts([{"params": first.parameters()}, {"params": [*second.parameters()], "lr": 1}])
    assert [(layout.table_name, layout.dtype, layout.is_frozen) for layout in found] == [
        ("m/0/float32", DType.FLOAT32, False),
        ("m/1/float64/frozen", DType.FLOAT64, True),
        ("m/1/float64", DType.FLOAT64, False),
    ]
    assert [e.name for layout in found for e in layout.placed] == [
        "parameter.0", "parameter.1", "parameter.2", "parameter.3",
    ]  # fmt: skip


def test_tied_parameters_are_there_once_under_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    (by_module,) = layouts(model)
    (by_list,) = layouts(model.named_parameters(remove_duplicate=False))
    (by_tensors,) = layouts([model[0].weight, model[1].weight], model)
    for layout in (by_module, by_list, by_tensors):
        assert [e.name for e in layout.placed] == ["0.weight"]


def test_values_lie_in_logical_order_whatever_the_memory_format() -> None:
    weight = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    parameter = nn.Parameter(weight.to(memory_format=torch.channels_last))
    (layout,) = layouts([("w", parameter)])
    flat = torch.zeros(layout.element_count)
    layout.views(flat)[0].copy_(parameter.detach())
    assert torch.equal(flat, torch.arange(120.0))


def test_tensors_without_elements_have_a_place_and_no_table_of_their_own() -> None:
    empty, one = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(()))
    (layout,) = layouts([("e", empty), ("o", one)])
    assert [(e.offset, e.end) for e in layout.placed] == [(0, 0), (0, 1)]
    assert layouts([("e", empty)]) == []


def test_later_groups_count_their_parameters_on() -> None:
    group = named_group({"params": nn.Parameter(torch.zeros(1)), "lr": 0.5}, None, 7)
    assert group["param_names"] == ["parameter.7"]
    assert group["lr"] == 0.5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], "empty"),
        (torch.zeros(1), "one tensor"),
        ([3], "got int"),
        ([{"lr": 1}], "'params'"),
        ([{"params": {nn.Parameter(torch.zeros(1))}}], "a set"),
        ([nn.Parameter(torch.zeros(1, dtype=torch.complex64))], "complex64"),
        ([nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)], "int32"),
        ([("a", nn.Parameter(torch.zeros(1))), ("a", nn.Parameter(torch.zeros(1)))], "named 'a'"),
    ],
)
def test_what_is_no_parameter_is_refused(parameters: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        layouts(parameters)


# --- groups that a script has changed


def known(groups: list[dict[str, Any]]) -> KnownParameters:
    found = KnownParameters()
    for group in groups:
        found.add(group)
    return found


def two_groups() -> list[dict[str, Any]]:
    first, second = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))
    given: list[dict[str, Any]] = [{"params": first.parameters()}, {"params": [second]}]
    return named_groups(given)


def test_groups_of_the_same_parameters_are_known_whatever_their_hyperparameters() -> None:
    groups = two_groups()
    found = known(groups)
    groups[0]["lr"] = 0.5
    groups[1] = {**groups[1], "params": [*groups[1]["params"]]}  # as load_state_dict leaves it
    found.check(groups, "model")
    groups.append({"params": []})
    found.add(groups[-1])
    found.check(groups, "model")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda g: operator.setitem(g[0]["params"], 1, nn.Parameter(torch.zeros(2))),
            "group 0 of 'model' has another parameter at place 1; its tables",
        ),
        (lambda g: g[0]["params"].reverse(), "group 0 of 'model' has another parameter at place 0"),
        (
            lambda g: g[1]["params"].append(nn.Parameter(torch.zeros(2))),
            "group 1 of 'model' had 1 parameters, and has 2; .* add_param_group",
        ),
        (
            lambda g: g[0]["params"].pop(0),
            r"group 0 of 'model' had 2 parameters, and has 1; .* requires_grad_\(False\)",
        ),
        (lambda g: g[1].update(params=[]), "group 1 of 'model' had 1 parameters, and has 0"),
        (lambda g: g.pop(), "'model' had 2 parameter groups, and has 1; its tables"),
        (
            lambda g: g.append({"params": [nn.Parameter(torch.zeros(2))]}),
            "'model' had 2 parameter groups, and has 3; .* close.* name=",
        ),
    ],
)
def test_parameters_without_a_table_are_refused(change: Any, words: str) -> None:
    groups = two_groups()
    found = known(groups)
    change(groups)
    with pytest.raises(InvalidConfig, match=words):
        found.check(groups, "model")
