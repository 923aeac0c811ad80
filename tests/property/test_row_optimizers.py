"""The row optimizers' compiled loops against numpy: the same bits, whatever comes. Their powers of
step counts are the C library's, whatever was asked before.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.tables.optimizers import ROW_OPTIMIZERS, OptimizerKind, OptimizerSpec
from ps_server.rows import row_step_loops
from ps_server.rows.row_optimizers import BiasCorrections, RowOptimizer

ROW_COUNT = 7
COUNTS = st.lists(st.one_of(st.integers(1, 400), st.integers(1, 2**53)), max_size=9)
BETAS = st.sampled_from([0.0, 0.5, 0.9, 0.999, 1 - 2.0**-20])
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e-38)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in OptimizerKind if kind in ROW_OPTIMIZERS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(st.integers(1, 35), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_loops_and_numpy_give_the_same_bits(
    kind: OptimizerKind,
    dtype: npt.DTypeLike,
    length: int,
    seed: int,
    maximize: bool,
    penalty: float,
) -> None:
    """One server has numba, and its backup has not."""
    draws = np.random.default_rng(seed)
    spec = OptimizerSpec(kind, maximize=maximize)
    hyperparameters = dict(spec.merged(()))
    if kind is OptimizerKind.FTRL:
        hyperparameters |= {"l1": penalty, "l2": penalty / 3, "beta": penalty}
    optimizer = RowOptimizer(spec, length)
    first: Any = draws.standard_normal((ROW_COUNT, length)).astype(dtype)
    ours = {"values": first, **optimizer.first_state(ROW_COUNT, dtype)}
    twins = {name: rows.copy() for name, rows in ours.items()}
    for step in range(3):
        numbers = draws.permutation(ROW_COUNT)[: draws.integers(0, ROW_COUNT + 1)]
        scales = 10.0 ** draws.integers(-6, 6, (len(numbers), 1))
        gradients: Any = (draws.standard_normal((len(numbers), length)) * scales).astype(dtype)
        if step == 2 and gradients.size:
            gradients.flat[:: int(draws.integers(1, 9))] = draws.choice(SPECIAL)
        with np.errstate(all="ignore"):
            optimizer.step(ours, numbers, gradients, hyperparameters, row_step_loops)
            optimizer.step(twins, numbers, gradients, hyperparameters)
    for name, rows in ours.items():
        assert rows.tobytes() == twins[name].tobytes(), name


@given(BETAS, st.lists(COUNTS, min_size=1, max_size=4))
def test_bias_corrections_are_the_c_librarys_whatever_was_asked_before(
    beta: float, calls: list[list[int]]
) -> None:
    corrections = BiasCorrections(beta)
    for counts in [*calls, list(range(1, 900))]:
        expected = [1.0 - math.pow(beta, count) for count in counts]
        assert corrections.of(np.array(counts, np.int64)).tolist() == expected


@pytest.mark.parametrize(("loaded", "taken"), [(-3.0, 0), (np.nan, 0), (2.5, 2), (np.inf, 2**60)])
def test_what_is_no_step_count_is_one(loaded: float, taken: float) -> None:
    optimizer = RowOptimizer(OptimizerSpec(OptimizerKind.ADAM), 2)
    found = []
    for steps in (loaded, taken):
        arrays: Any = {"values": np.ones((1, 2)), **optimizer.first_state(1, np.float64)}
        arrays["step"][:] = steps
        hyperparameters = dict(OptimizerSpec(OptimizerKind.ADAM).merged(()))
        optimizer.step(arrays, np.arange(1), np.ones((1, 2)), hyperparameters)
        found.append(arrays["values"].tolist())
    assert found[0] == found[1]
    assert np.isfinite(found[0]).all()
