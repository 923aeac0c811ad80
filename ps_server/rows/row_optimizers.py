"""The optimizers' arithmetic on rows that have a gradient; all other rows stay as they are.

    sgd              w -= lr * g
    adam             as torch.optim.Adam steps a parameter: each row counts its own steps
    adagrad          s += g * g;            w -= lr * (g / (sqrt(s) + eps))
    rowwise_adagrad  s += mean of g * g;    w -= (lr / (sqrt(s) + eps)) * g, s a number for each row
    ftrl             s += g * g;            r = (beta + sqrt(s)) / lr;    z = h + g - r * w
                     w = 0 if |z| <= l1 else (sign(z) * l1 - z) / (r + l2);    h = z + r * w

The result for a row depends on its own history only.

ftrl has h = z + r * w for its state where the paper has z, so it need not know the last update's r:
the paper's z + g - sigma * w, where sigma is the growth of r, is h + g - r * w. What h has is what
the penalties hold back, 0 without them; a step is w -= g / r then. A row begins with h = 0, so with
z = -beta / lr * w: its initial value is where its first step starts. The paper has rows begin with
w = 0, where that is the same. While r is 0 (beta is 0, and no gradient came) w stays.

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

from ps_core.tables.optimizers import STEP_ARRAY, VALUES_ARRAY, OptimizerKind, OptimizerSpec
from ps_server.rows.row_arrays import Rows

SUM, FIRST, SECOND, HELD = "sum", "exp_avg", "exp_avg_sq", "held"


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
            return {SUM: length, HELD: length}
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
    values, sums, held = arrays[VALUES_ARRAY], arrays[SUM], arrays[HELD]
    l1, l2 = number(hyperparameters["l1"]), number(hyperparameters["l2"])
    beta = number(hyperparameters["beta"])
    sums += np.square(gradients)
    np.minimum(sums, np.finfo(sums.dtype).max, out=sums)  # an infinite rate times 0 is no number
    rates = np.sqrt(sums)
    rates += beta
    rates *= number(1.0 / hyperparameters["lr"])
    has_rate = np.True_ if beta > 0.0 else rates > 0.0
    held += gradients * number(sign)
    z = held - rates * values
    ends = np.clip(z, -l1, l1)  # what the penalty of l1 holds back of z
    is_zero = z == ends
    # (sign(z) * l1 - z) / (r + l2), as a change of w: without a rounding of the whole of w.
    change = held + l2 * values
    change -= ends
    values -= np.divide(change, rates + l2, out=np.zeros_like(change), where=has_rate)
    np.copyto(values, 0.0, where=is_zero & has_rate)
    np.subtract(ends, l2 * values, out=held, where=has_rate)
