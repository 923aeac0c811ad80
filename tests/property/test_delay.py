"""Delay compensation against the formula of its paper, element by element, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import Incarnation, TableId
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_server.ranges.events import Compensation
from ps_server.values.shard_store import ShardStore

LENGTHS = (40, 60)
ONE, TWO = Incarnation(1), Incarnation(2)
LR = 0.5


def _store() -> ShardStore:
    spec = TableSpec(
        "w",
        DType.FLOAT64,
        sum(LENGTHS),
        OptimizerSpec(OptimizerKind.SGD, (("lr", LR),)),
        block_elements=64,
        tensors=(TensorSpec("a", (LENGTHS[0],), 0), TensorSpec("b", (LENGTHS[1],), LENGTHS[0])),
        initializer=Initializer(InitializerKind.CONSTANT, 1.0),
    )
    table = Table(TableId(1), 0, spec.validated())
    return ShardStore(table, range(table.block_count))


class Twin:
    """The same with one number after the other; block 0: 40 elements of a, 24 of b."""

    def __init__(self, strength: float, *, adaptive: bool) -> None:
        self.strength, self.adaptive = strength, adaptive
        self.values = [1.0] * 64
        self.means = [0.0] * 64
        self.kept: dict[Incarnation, list[float]] = {}

    def step(self, who: Incarnation, gradient: list[float], present: tuple[bool, bool]) -> None:
        kept = self.kept.get(who)
        for i, g in enumerate(gradient):
            if not present[i >= LENGTHS[0]]:
                continue
            if kept is not None:
                strength = self.strength
                if self.adaptive:
                    self.means[i] = 0.95 * self.means[i] + 0.05 * g * g
                    strength /= (self.means[i] + 1e-7) ** 0.5
                g += strength * g * g * (self.values[i] - kept[i])
            self.values[i] -= LR * g


STEPS = st.tuples(
    st.sampled_from(["pull", "step"]),
    st.sampled_from([ONE, TWO]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(True, True), (True, False), (False, True)]),
)


@given(st.floats(0.01, 3.0), st.booleans(), st.lists(STEPS, min_size=1, max_size=12))
def test_it_is_the_papers_formula(
    strength: float, adaptive: bool, steps: list[tuple[str, Incarnation, int, tuple[bool, bool]]]
) -> None:
    store, twin = _store(), Twin(strength, adaptive=adaptive)
    for clock, (verb, who, seed, present) in enumerate(steps, 1):
        if verb == "pull":
            store.keep(who, 0)
            twin.kept[who] = list(twin.values)
            continue
        gradient = np.random.default_rng(seed).normal(0, 0.3, 64)
        bits = b"" if all(present) else bytes([present[0] + 2 * present[1]])
        payload = gradient.tobytes()
        part = store.decode(0, Codec.FP64, payload, bits)
        store.accumulate(clock, [(0, part)], 1.0, Compensation(who, strength, adaptive))
        store.apply(clock, (), 1)
        assert payload == gradient.tobytes(), "the payload is the sender's"
        twin.step(who, gradient.tolist(), present)
    found = np.frombuffer(bytes(store.read(0, None, None)[0]))
    np.testing.assert_allclose(found, twin.values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_a_pull_between_nothing_is_compensated(adaptive: bool) -> None:
    store = _store()
    store.keep(ONE, 0)
    payload = np.full(64, 0.25).tobytes()
    store.accumulate(
        1, [(0, store.decode(0, Codec.FP64, payload, b""))], 1.0, Compensation(ONE, 1.0, adaptive)
    )
    store.apply(1, (), 1)
    np.testing.assert_array_equal(np.frombuffer(bytes(store.read(0, None, None)[0])), 0.875)


def test_what_is_kept_counts_until_its_reader_has_gone() -> None:
    store = _store()
    before = store.state_bytes
    store.keep(ONE, 0)
    store.keep(ONE, 0)
    store.keep(TWO, 1)
    assert store.state_bytes == before + 2 * 64 * 8
    store.forget(ONE)
    assert store.state_bytes == before + 64 * 8


def test_the_scale_of_a_seal_comes_first() -> None:
    """With loss scaling the gradient is what the scale makes of what came."""
    scaled, plain = _store(), _store()
    for store, factor in ((scaled, 8.0), (plain, 1.0)):
        store.keep(ONE, 0)
        for clock, who in ((1, TWO), (2, ONE)):
            payload = np.full(64, 0.25 * factor).tobytes()
            part = store.decode(0, Codec.FP64, payload, b"")
            store.accumulate(clock, [(0, part)], 1 / factor, Compensation(who, 1.0, False))
            store.apply(clock, (), 1)
    assert bytes(scaled.read(0, None, None)[0]) == bytes(plain.read(0, None, None)[0])
