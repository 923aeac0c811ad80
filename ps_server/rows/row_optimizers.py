"""The optimizers' arithmetic on rows that have a gradient; all other rows stay as they are.

    sgd              w -= lr * g
    adam             as torch.optim.Adam steps a parameter: each row counts its own steps
    adagrad          s += g * g;            w -= lr * (g / (sqrt(s) + eps))
    rowwise_adagrad  s += mean of g * g;    w -= (lr / (sqrt(s) + eps)) * g, s a number for each row
    ftrl             n += g * g;            r = (beta + sqrt(n)) / lr;    z += g - (r - last r) * w
                                            w = 0 if |z| <= l1 else (sign(z) * l1 - z) / (r + l2)

The result for a row depends on its own history only.

`last r` is the rate at the row's last update, and 0 before the first. With the same `lr` and `beta`
in all updates and w = 0 before the first, ftrl is algorithm 1 of the paper, whose sigma is the
growth of r. Otherwise r - last r is what keeps w when a rate changes, and the initial value in the
first update: without penalties a step is w -= g / r. While r is 0 (no gradient yet, and beta is 0),
w stays.

Reference: `torch.optim.SGD` and `torch.optim.Adagrad` on sparse gradients; row-wise Adagrad as in
Gupta et al., "Training Recommender Models with Distributed Sparse Adagrad" (FBGEMM's
EXACT_ROWWISE_ADAGRAD); FTRL-Proximal as in McMahan et al., "Ad Click Prediction: a View from the
Trenches" (2013), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.tables import STEP_ARRAY, VALUES_ARRAY, OptimizerKind, OptimizerSpec
from ps_server.rows.row_partition import Rows

SUM, FIRST, SECOND = "sum", "exp_avg", "exp_avg_sq"
Z, N, RATE = "z", "n", "rate"
"""The arrays of ftrl: `RATE` has beta / lr and 1 / lr of the row's last update, or zeros."""


def state_widths(kind: OptimizerKind, length: int) -> dict[str, int]:
    """The elements of each array of optimizer state in a row of `length` elements."""
    match kind:
        case OptimizerKind.ADAM:
            return {FIRST: length, SECOND: length, STEP_ARRAY: 1}
        case OptimizerKind.ADAGRAD:
            return {SUM: length}
        case OptimizerKind.ROWWISE_ADAGRAD:
            return {SUM: 1}
        case OptimizerKind.FTRL:
            return {Z: length, N: length, RATE: 2}
    return {}


class RowOptimizer:
    """The update of one table's rows.

    Attributes:
        widths: as of `state_widths`.
        arrays: the arrays that `step` takes: the state, and the values if it sets them.
    """

    def __init__(self, spec: OptimizerSpec, length: int) -> None:
        self._kind = spec.kind
        self._sign = 1.0 if spec.maximize else -1.0
        self._first = dict(spec.hyperparameters).get("initial_accumulator_value", 0.0)
        self.widths = state_widths(spec.kind, length)
        self.arrays = (*self.widths,)
        if spec.kind is OptimizerKind.FTRL:  # a change that is added would leave a rest beside 0
            self.arrays = (VALUES_ARRAY, *self.widths)

    def first_state(self, count: int, dtype: npt.DTypeLike) -> dict[str, Rows]:
        """The state of new rows."""
        return {
            name: np.full((count, width), self._first, dtype) for name, width in self.widths.items()
        }

    def step(
        self, arrays: Mapping[str, Rows], gradients: Rows, hyperparameters: Mapping[str, float]
    ) -> Rows | None:
        """The change of the values, or None if `arrays` has them; the arrays change in their own
        memory. The gradients are only read. Shapes: (rows, width of each).
        """
        if self._kind is OptimizerKind.FTRL:
            _ftrl(arrays, gradients, -self._sign, hyperparameters)
            return None
        number = gradients.dtype.type
        rate = number(self._sign * hyperparameters["lr"])
        change: Rows
        if self._kind is OptimizerKind.SGD:
            change = gradients * rate
            return change
        if self._kind is OptimizerKind.ADAM:
            return _adam(arrays, gradients, rate, hyperparameters)
        sums, eps = arrays[SUM], number(hyperparameters["eps"])
        if self._kind is OptimizerKind.ROWWISE_ADAGRAD:
            squares = np.einsum("ij,ij->i", gradients, gradients)
            sums[:, 0] += squares / number(gradients.shape[1])
            change = gradients * (rate / (np.sqrt(sums) + eps))
            return change
        sums += np.square(gradients)
        change = np.sqrt(sums)
        change += eps
        np.divide(gradients, change, out=change)
        change *= rate
        return change


def _adam(
    state: Mapping[str, Rows],
    gradients: Rows,
    rate: np.floating[Any],
    hyperparameters: Mapping[str, float],
) -> Rows:
    number = gradients.dtype.type
    beta1, beta2 = hyperparameters["beta1"], hyperparameters["beta2"]
    first, second, steps = state[FIRST], state[SECOND], state[STEP_ARRAY]
    steps += 1
    first += (gradients - first) * number(1 - beta1)
    second *= number(beta2)
    second += np.square(gradients) * number(1 - beta2)
    counts = steps.astype(np.float64)
    roots = np.sqrt(second)
    roots /= np.sqrt(1 - beta2**counts).astype(gradients.dtype)
    roots += number(hyperparameters["eps"])
    np.divide(first, roots, out=roots)
    roots *= (rate / (1 - beta1**counts)).astype(gradients.dtype)
    return roots


def _ftrl(
    arrays: Mapping[str, Rows],
    gradients: Rows,
    sign: float,
    hyperparameters: Mapping[str, float],
) -> None:
    number = gradients.dtype.type
    values, z, n, rate = (arrays[name] for name in (VALUES_ARRAY, Z, N, RATE))
    last = np.sqrt(n)
    last *= rate[:, 1:]
    last += rate[:, :1]
    n += np.square(gradients)
    rate[:] = hyperparameters["beta"] / hyperparameters["lr"], 1.0 / hyperparameters["lr"]
    present = np.sqrt(n)
    present *= rate[:, 1:]
    present += rate[:, :1]
    np.subtract(present, last, out=last)
    last *= values
    z += gradients * number(sign)
    z -= last
    l1 = number(hyperparameters["l1"])
    found = np.copysign(l1, z)
    found -= z
    found[np.abs(z) <= l1] = 0.0
    has_rate = present > 0.0
    present += number(hyperparameters["l2"])
    np.divide(found, present, out=values, where=has_rate)
