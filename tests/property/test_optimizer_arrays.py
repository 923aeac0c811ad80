"""Optimizer state that is read and loaded, against a dumb twin that has one number an element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import InvalidKeys
from ps_core.keys import TableId
from ps_core.tables import (
    STEP_ARRAY,
    Codec,
    DType,
    OptimizerKind,
    OptimizerSpec,
    Table,
    TableSpec,
    TensorSpec,
    pack_presence,
)
from ps_server.shard_store import ShardStore

LENGTHS = (40, 70, 3)
"""Of tensors, in blocks of 64: the second is in both."""
COUNT = sum(LENGTHS)


def fresh(kind: OptimizerKind, *, may_be_infinite: bool = False) -> ShardStore:
    begins = np.cumsum((0, *LENGTHS)).tolist()
    tensors = tuple(
        TensorSpec(f"t{begin}", (length,), begin)
        for begin, length in zip(begins, LENGTHS, strict=False)
    )
    numbers = (("initial_accumulator_value", 0.5),) if kind is OptimizerKind.ADAGRAD else ()
    spec = TableSpec(
        "model",
        DType.FLOAT32,
        COUNT,
        OptimizerSpec(kind, numbers),
        block_elements=64,
        tensors=tensors,
        allow_non_finite=may_be_infinite,
    )
    return ShardStore(Table(TableId(1), 0, spec.validated()), (0, 1))


def read(store: ShardStore, name: str) -> list[float]:
    parts = [np.frombuffer(store.read_array(block, name), np.float32) for block in (0, 1)]
    found: list[float] = np.concatenate(parts).tolist()
    return found


def assign(store: ShardStore, name: str, values: list[float], present: tuple[bool, ...]) -> None:
    """Of tensors that are not present, something else lies in their place."""
    flat = np.array(values, np.float32)
    for block, here in ((0, present[:2]), (1, present[1:])):
        payload = flat[block * 64 : (block + 1) * 64].tobytes()
        part = store.decode(block, Codec.FP32, payload, pack_presence(here))
        store.assign([(block, part)], name)


KINDS = st.sampled_from([OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.ADAGRAD])
LOADS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.integers(-2, 40), min_size=3, max_size=3),
        st.tuples(st.booleans(), st.booleans(), st.booleans()),
    ),
    max_size=6,
)


@given(KINDS, LOADS)
def test_arrays_are_what_was_loaded(
    kind: OptimizerKind, loads: list[tuple[int, list[int], tuple[bool, bool, bool]]]
) -> None:
    store = fresh(kind)
    names = [*store.table.spec.optimizer.state_arrays, STEP_ARRAY]
    first = 0.5 if kind is OptimizerKind.ADAGRAD else 0.0
    twin = {name: [0.0 if name == STEP_ARRAY else first] * COUNT for name in names}
    for which, numbers, present in loads:
        name = names[which % len(names)]
        values = np.repeat(np.array(numbers, float), LENGTHS).tolist()
        assign(store, name, values, present)
        here = np.repeat(present, LENGTHS).tolist()
        for at, (value, is_here) in enumerate(zip(values, here, strict=True)):
            if is_here:
                twin[name][at] = max(value, 0.0) if name == STEP_ARRAY else value
    assert {name: read(store, name) for name in names} == twin
    assert store.version(0) == store.version(1) == 0
    assert not np.frombuffer(store.read(0, None, None)[0], np.float32).any()
    again = fresh(kind)
    again.restore(store.snapshot())
    assert {name: read(again, name) for name in names} == twin
    assert again.state_bytes == store.state_bytes


@pytest.mark.parametrize(
    ("value", "steps"),
    [(2.9, 2), (-1.0, 0), (1e30, 2**24), (float("nan"), 0), (float("inf"), 2**24)],
)
def test_whatever_comes_as_a_step_is_a_count(value: float, steps: int) -> None:
    """By then it is decided: it cannot be refused any more."""
    store = fresh(OptimizerKind.ADAM, may_be_infinite=True)
    assign(store, STEP_ARRAY, [value] * COUNT, (True, True, True))
    assert read(store, STEP_ARRAY) == [float(steps)] * COUNT


def test_state_that_the_optimizer_has_not_is_refused_and_changes_nothing() -> None:
    store = fresh(OptimizerKind.SGD)
    before = store.snapshot()
    with pytest.raises(InvalidKeys, match="momentum_buffer, step"):
        assign(store, "exp_avg", [1.0] * COUNT, (True, True, True))
    with pytest.raises(InvalidKeys, match="exp_avg"):
        store.read_array(0, "exp_avg")
    assert store.snapshot() == before
