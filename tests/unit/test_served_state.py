"""Optimizer state in torch's layout and as the servers' arrays: there and back, and refused."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import nn

from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables.optimizers import MAX_LOADED_STEP_COUNT, STEP_ARRAY
from ps_worker.spec.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop, ServerOptimizer
from ps_worker.training.served_state import ServedState, arrays_of, is_same, torch_state
from ps_worker.training.tables.trained_table import TrainedTable
from tests.unit.table_client import parameter, trained_tables

OPTIMIZERS: list[ServerOptimizer] = [
    SGD(lr=0.1, momentum=0.9),
    Adam(lr=0.1),
    Adam(lr=0.1, amsgrad=True),
    AdamW(lr=0.1),
    RMSprop(lr=0.1),
    RMSprop(lr=0.1, centered=True, momentum=0.5),
    Adagrad(lr=0.1, initial_accumulator_value=0.25),
]
NAMES = [f"{type(each).__name__}-{number}" for number, each in enumerate(OPTIMIZERS)]


class Model:
    """Two groups of parameters: one of two types, and one of a tensor that takes no step."""

    def __init__(self, optimizer: ServerOptimizer) -> None:
        torch.manual_seed(5)
        self.first = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(70).double())]
        self.second = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))]
        self.tables = trained_tables(optimizer, self.first, self.second)
        kind = getattr(torch.optim, type(optimizer).__name__)
        settings = {k: v for k, v in optimizer.defaults().items() if k != "clamp"}
        self.torchs = kind([{"params": self.first}, {"params": self.second}], **settings)

    def train(self, steps: int) -> None:
        for number in range(steps):
            for each in (*self.first, self.second[0]):
                each.grad = torch.full_like(each, 1.0 + number)
            self.torchs.step()

    @property
    def state(self) -> Any:
        return self.torchs.state_dict()["state"]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.torchs.param_groups  # type: ignore[no-any-return]

    def arrays(self, state: Any = None, *, may_be_infinite: bool = False) -> Any:
        found = self.state if state is None else state
        return arrays_of(found, self.tables, self.groups, may_be_infinite=may_be_infinite)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_state_goes_there_and_back_bit_for_bit(optimizer: ServerOptimizer, steps: int) -> None:
    model = Model(optimizer)
    model.train(steps)
    found = torch_state(model.arrays(), model.groups)
    expected = model.torchs.state
    assert found.keys() == {each for each in expected if expected[each]}
    for tensor, entry in found.items():
        theirs = {name: value for name, value in expected[tensor].items() if value is not None}
        assert entry.keys() == theirs.keys()
        for name, value in entry.items():
            assert value.dtype is theirs[name].dtype
            assert torch.equal(value, theirs[name]), name


def test_a_tensor_that_has_taken_no_step_begins_with_the_first_value() -> None:
    model = Model(Adagrad(lr=0.1, initial_accumulator_value=0.25))
    arrays = model.arrays({})
    assert all(own["sum"].eq(0.25).all() and not own[STEP_ARRAY].any() for own in arrays.values())
    model = Model(Adam(lr=0.1))
    assert all(not value.any() for own in model.arrays({}).values() for value in own.values())


def test_sgd_counts_a_step_once_it_has_momentum() -> None:
    model = Model(SGD(lr=0.1, momentum=0.9))
    state = {0: {"momentum_buffer": torch.ones(2, 3)}, 2: {"momentum_buffer": None}}
    counts = [own[STEP_ARRAY].tolist() for own in model.arrays(state).values()]
    assert counts == [[1.0] * 6, [0.0] * 70, [0.0] * 7]


def test_momentum_that_nobody_uses_has_no_array() -> None:
    model = Model(RMSprop(lr=0.1))
    model.train(1)
    assert all("momentum_buffer" not in own for own in model.arrays().values())
    state = {k: {**v, "momentum_buffer": torch.ones_like(v["square_avg"])} for k, v in
             model.state.items()}  # fmt: skip
    arrays = model.arrays(state)
    assert all("momentum_buffer" in own for own in arrays.values()), "it was saved with momentum"
    assert all("momentum_buffer" not in each for each in torch_state(arrays, model.groups).values())


def adam() -> Model:
    model = Model(Adam(lr=0.1))
    model.train(2)
    return model


def altered(model: Model, place: int, **values: Any) -> dict[int, Any]:
    entry = {k: v for k, v in (model.state[place] | values).items() if v is not ...}
    return {**model.state, place: entry}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"sum": torch.ones(2, 3)},
            r"'parameter\.0' has 'sum'; adam has exp_avg, exp_avg_sq, step",
        ),
        ({"exp_avg": ...}, "'parameter.0' has no 'exp_avg', which adam needs"),
        ({STEP_ARRAY: ...}, "has no 'step'"),
    ],
    ids=["another's array", "an array is missing", "no step"],
)
def test_another_optimizers_state_is_refused(values: dict[str, Any], words: str) -> None:
    model = adam()
    with pytest.raises(InvalidConfig, match=words):
        model.arrays(altered(model, 0, **values))


@pytest.mark.parametrize("count", [-1.0, 0.5, MAX_LOADED_STEP_COUNT + 1.0])
def test_a_step_that_is_no_count_is_refused(count: float) -> None:
    model = adam()
    with pytest.raises(InvalidTensor, match="expected a whole number from 0 to"):
        model.arrays(altered(model, 0, step=torch.tensor(count, dtype=torch.float64)))


def test_steps_up_to_the_most_are_taken() -> None:
    model = adam()
    for count in (0.0, float(MAX_LOADED_STEP_COUNT)):
        first, *_ = model.arrays(altered(model, 0, step=torch.tensor(count))).values()
        assert first[STEP_ARRAY].tolist() == [count] * 6


@pytest.mark.parametrize("values", [torch.ones(3, 2), torch.ones(6), [1.0] * 6])
def test_an_array_of_another_shape_is_refused(values: Any) -> None:
    model = adam()
    with pytest.raises(InvalidTensor, match=r"'exp_avg' is .*; expected \(2, 3\)"):
        model.arrays(altered(model, 0, exp_avg=values))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_state_that_is_not_finite_is_refused_unless_allowed(bad: float) -> None:
    model = adam()
    state = altered(model, 0, exp_avg=torch.full((2, 3), bad))
    with pytest.raises(InvalidTensor, match="an infinity or a NaN"):
        model.arrays(state)
    first, *_ = model.arrays(state, may_be_infinite=True).values()
    assert not first["exp_avg"].isfinite().any()


def test_a_frozen_parameter_has_no_state_here() -> None:
    frozen = parameter(1.0)
    frozen.requires_grad_(False)
    tables: list[TrainedTable] = trained_tables(SGD(lr=1.0), [parameter(2.0), frozen])
    groups = [{"params": [each.layout.placed[0].tensor for each in tables], "momentum": 0.9}]
    awake, _ = tables
    assert arrays_of({}, tables, groups, may_be_infinite=False).keys() == {awake}
    state = {1: {"momentum_buffer": torch.ones(1)}}
    with pytest.raises(InvalidConfig, match=r"'parameter\.1', which is frozen"):
        arrays_of(state, tables, groups, may_be_infinite=False)


def test_state_is_the_same_if_its_bits_are_and_what_is_missing_is_zeros() -> None:
    model = adam()
    arrays, others = model.arrays(), model.arrays()
    assert is_same(arrays, others)
    table = model.tables[0]
    others[table]["exp_avg"][1] += 1.0
    assert not is_same(arrays, others)
    del others[table]["exp_avg"]
    assert not is_same(arrays, others), "they are no zeros"
    arrays[table]["exp_avg"].zero_()
    assert is_same(arrays, others)


# --- what a script finds in `optimizer.state`


@pytest.mark.parametrize(
    "touch",
    [
        lambda state: state[parameter(2)],
        lambda state: operator.setitem(state, parameter(2), {}),
        lambda state: operator.delitem(state, parameter(2)),
        lambda state: state.clear(),
        lambda state: state.pop(parameter(2), None),
        lambda state: state.popitem(),
        lambda state: state.setdefault(parameter(2), {}),
        lambda state: state.update({}),
        lambda state: state.__ior__({}),
    ],
)
def test_the_state_of_the_servers_is_neither_read_nor_written_by_parameter(touch: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"expected state_dict\(\).* To begin anew, .*'state'"):
        touch(ServedState())


def test_it_is_empty_for_who_asks_and_not_for_who_would_have_it_made() -> None:
    """Lightning goes through it; torch.distributed.checkpoint takes a step where it is false."""
    state = ServedState()
    assert isinstance(state, dict)
    assert state
    assert len(state) == 0
    assert [*state.items()] == []
    assert parameter(2) not in state
    assert state.get(parameter(2)) is None
    key = parameter(2)
    with state.holding({key: {"step": 3}}):
        assert [*state] == [key]
    assert len(state) == 0
