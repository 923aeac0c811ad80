"""Optimizer state that is read and loaded, against a dumb twin that has one number an element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import InvalidKeys
from ps_core.keys import TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType, pack_presence
from ps_core.tables.optimizers import STEP_ARRAY, VALUES_ARRAY, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_server.values.shard_store import ShardStore

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


def assign(
    store: ShardStore,
    name: str,
    values: list[float],
    present: tuple[bool, ...],
    edit: bytes = b"edit",
) -> None:
    """Of tensors that are not present, something else lies in their place."""
    flat = np.array(values, np.float32)
    for block, here in ((0, present[:2]), (1, present[1:])):
        payload = flat[block * 64 : (block + 1) * 64].tobytes()
        part = store.decode(block, Codec.FP32, payload, pack_presence(here))
        store.assign([(block, part)], name, edit)


KINDS = st.sampled_from([OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.ADAGRAD])
PRESENT = st.tuples(st.booleans(), st.booleans(), st.booleans())
LOADS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.lists(st.integers(-2, 40), min_size=3, max_size=3),
        PRESENT,
        st.sampled_from([b"edit", b"edit", b"another"]),
    ),
    max_size=8,
)


class Twin:
    """One number an element; what is laid beside is a copy, under one name."""

    def __init__(self, names: list[str], first: float) -> None:
        self.arrays = {name: [first] * COUNT for name in names}
        self.arrays[STEP_ARRAY] = [0.0] * COUNT
        self.arrays[VALUES_ARRAY] = [0.0] * COUNT
        self.laid: dict[str, list[float]] = {}
        self.laid_as = b""

    def assign(
        self, name: str, values: list[float], present: tuple[bool, ...], edit: bytes
    ) -> None:
        if edit != self.laid_as:
            self.laid, self.laid_as = {}, edit
        if name == STEP_ARRAY:
            self.arrays |= self.laid
            self.laid = {}
            target = self.arrays[name]
        else:
            target = self.laid.setdefault(name, list(self.arrays[name]))
        for at, is_here in enumerate(np.repeat(present, LENGTHS).tolist()):
            if is_here:
                target[at] = max(values[at], 0.0) if name == STEP_ARRAY else values[at]


@given(KINDS, LOADS)
def test_arrays_are_what_was_loaded_once_it_is_in_place(
    kind: OptimizerKind, loads: list[tuple[int, list[int], tuple[bool, bool, bool], bytes]]
) -> None:
    """A copy for a backup has what is laid beside, too; a checkpoint has not."""
    store = fresh(kind)
    names = [*store.table.spec.optimizer.state_arrays, STEP_ARRAY, VALUES_ARRAY]
    twin = Twin(names, 0.5 if kind is OptimizerKind.ADAGRAD else 0.0)
    for which, numbers, present, edit in loads:
        name = names[which % len(names)]
        values = np.repeat(np.array(numbers, float), LENGTHS).tolist()
        assign(store, name, values, present, edit)
        twin.assign(name, values, present, edit)
        again = fresh(kind)
        at_once(again.restoring(store.snapshot()))
        assert again.state_bytes == store.state_bytes
        store = again
    assert {name: read(store, name) for name in names} == twin.arrays
    assert store.version(0) == store.version(1) == 0
    assert (
        np.frombuffer(store.read(0, None, None)[0], np.float32).tolist()
        == (twin.arrays[VALUES_ARRAY][:64])
    )
    for block in (0, 1):
        saved = {name for name, _ in store.saved(block).tensors}
        assert saved <= {*names}


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
