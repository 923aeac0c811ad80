"""The optimizers' arithmetic on rows that have a gradient; all other rows stay as they are.

    sgd              w -= lr * g
    adagrad          s += g * g;            w -= lr * (g / (sqrt(s) + eps))
    rowwise_adagrad  s += mean of g * g;    w -= lr * (g / (sqrt(s) + eps)), s a number for each row

The result for a row depends on its own history only.

Reference: `torch.optim.SGD` and `torch.optim.Adagrad` on sparse gradients; row-wise Adagrad as in
Gupta et al., "Training Recommender Models with Distributed Sparse Adagrad" (FBGEMM's
EXACT_ROWWISE_ADAGRAD).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ps_core.tables import OptimizerKind, OptimizerSpec
from ps_server.values.row_partition import Rows

SUM = "sum"


class RowOptimizer:
    """The update of one table's rows.

    Attributes:
        widths: the elements of each array of optimizer state in a row of `length` elements.
    """

    def __init__(self, spec: OptimizerSpec, length: int) -> None:
        self._kind = spec.kind
        self._sign = 1.0 if spec.maximize else -1.0
        self._first = dict(spec.hyperparameters).get("initial_accumulator_value", 0.0)
        self.widths: dict[str, int] = {}
        if self._kind is not OptimizerKind.SGD:
            self.widths[SUM] = length if self._kind is OptimizerKind.ADAGRAD else 1

    def first_state(self, count: int, dtype: npt.DTypeLike) -> dict[str, Rows]:
        """The state of new rows."""
        return {
            name: np.full((count, width), self._first, dtype) for name, width in self.widths.items()
        }

    def apply(
        self,
        values: Rows,
        state: Mapping[str, Rows],
        gradients: Rows,
        hyperparameters: Mapping[str, float],
    ) -> None:
        """One step, in the memory of `values` and `state`; the gradients are only read."""
        number = values.dtype.type
        rate = number(self._sign * hyperparameters["lr"])
        if self._kind is OptimizerKind.SGD:
            values += gradients * rate
            return
        sums = state[SUM]
        squares = np.square(gradients)
        if self._kind is OptimizerKind.ROWWISE_ADAGRAD:
            squares = squares.mean(axis=1, dtype=np.float64, keepdims=True).astype(values.dtype)
        sums += squares
        roots = np.sqrt(sums)
        roots += number(hyperparameters["eps"])
        values += gradients / roots * rate
