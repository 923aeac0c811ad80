"""The optimizers' arithmetic on rows that have a gradient; all other rows stay as they are.

    sgd              w -= lr * g
    adam             as torch.optim.Adam steps a parameter: each row counts its own steps
    adagrad          s += g * g;            w -= lr * (g / (sqrt(s) + eps))
    rowwise_adagrad  s += mean of g * g;    w -= (lr / (sqrt(s) + eps)) * g, s a number for each row

The result for a row depends on its own history only.

Reference: `torch.optim.SGD` and `torch.optim.Adagrad` on sparse gradients; row-wise Adagrad as in
Gupta et al., "Training Recommender Models with Distributed Sparse Adagrad" (FBGEMM's
EXACT_ROWWISE_ADAGRAD).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.tables import STEP_ARRAY, OptimizerKind, OptimizerSpec
from ps_server.rows.row_partition import Rows

SUM, FIRST, SECOND = "sum", "exp_avg", "exp_avg_sq"


def state_widths(kind: OptimizerKind, length: int) -> dict[str, int]:
    """The elements of each array of optimizer state in a row of `length` elements."""
    match kind:
        case OptimizerKind.ADAM:
            return {FIRST: length, SECOND: length, STEP_ARRAY: 1}
        case OptimizerKind.ADAGRAD:
            return {SUM: length}
        case OptimizerKind.ROWWISE_ADAGRAD:
            return {SUM: 1}
    return {}


class RowOptimizer:
    """The update of one table's rows.

    Attributes:
        widths: as of `state_widths`.
    """

    def __init__(self, spec: OptimizerSpec, length: int) -> None:
        self._kind = spec.kind
        self._sign = 1.0 if spec.maximize else -1.0
        self._first = dict(spec.hyperparameters).get("initial_accumulator_value", 0.0)
        self.widths = state_widths(spec.kind, length)

    def first_state(self, count: int, dtype: npt.DTypeLike) -> dict[str, Rows]:
        """The state of new rows."""
        return {
            name: np.full((count, width), self._first, dtype) for name, width in self.widths.items()
        }

    def step(
        self, state: Mapping[str, Rows], gradients: Rows, hyperparameters: Mapping[str, float]
    ) -> Rows:
        """The change of the values; the state changes in its own memory. The gradients are only
        read. Shapes: (rows, width of each).
        """
        number = gradients.dtype.type
        rate = number(self._sign * hyperparameters["lr"])
        change: Rows
        if self._kind is OptimizerKind.SGD:
            change = gradients * rate
            return change
        if self._kind is OptimizerKind.ADAM:
            return _adam(state, gradients, rate, hyperparameters)
        sums, eps = state[SUM], number(hyperparameters["eps"])
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
