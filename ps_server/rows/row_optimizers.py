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

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ps_core.tables.optimizers import STEP_ARRAY, VALUES_ARRAY, OptimizerKind, OptimizerSpec
from ps_server.rows.row_arrays import Rows
from ps_server.rows.row_kernels import Numbers

Number = np.floating[Any]

_LANE_COUNT = 8

_KEPT_COUNT, _LEAST_COUNT, _KEPT_BETAS = 1 << 16, 64, 16
"""The most bias corrections that are kept of a beta, the least that a call finds, and the betas."""

_MOST_COUNT = 2**53
"""Steps of a row, at most: a float64 would lose steps there."""

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
        arrays: the arrays that an update changes.
    """

    def __init__(self, spec: OptimizerSpec, length: int) -> None:
        self._kind = spec.kind
        self._sign = 1.0 if spec.maximize else -1.0
        self._first = dict(spec.hyperparameters).get("initial_accumulator_value", 0.0)
        self.widths = state_widths(spec.kind, length)
        self.arrays = (VALUES_ARRAY, *self.widths)

    def first_state(self, count: int, dtype: npt.DTypeLike) -> dict[str, Rows]:
        """The state of new rows."""
        return {
            name: np.full((count, width), self._first, dtype) for name, width in self.widths.items()
        }

    def step(
        self,
        arrays: Mapping[str, Rows],
        numbers: Numbers,
        gradients: Rows,
        hyperparameters: Mapping[str, float],
        loops: StepLoops | None = None,
    ) -> None:
        """Update the rows `numbers`, each of which comes once, in their own memory. `loops` does
        it in one pass, to the same bits. The gradients are only read.

        Shapes:
            arrays: of each of `self.arrays`, (rows, its width).
            gradients: (numbers, width of the values).
        """
        number = gradients.dtype.type
        gradients = gradients.view()
        gradients.flags.writeable = False  # or the loops would be compiled for each of both
        does = _PASSES if loops is None else loops
        found = tuple(arrays[name] for name in self.arrays if name != STEP_ARRAY)
        rate = number(self._sign * hyperparameters["lr"])
        match self._kind:
            case OptimizerKind.SGD:
                _add(found[0], numbers, gradients * rate)  # a loop would be slower
            case OptimizerKind.ADAM:
                scales = _adam_scales(arrays[STEP_ARRAY], numbers, rate, hyperparameters)
                beta1, beta2 = hyperparameters["beta1"], hyperparameters["beta2"]
                terms = np.array([1 - beta1, beta2, 1 - beta2, hyperparameters["eps"]], number)
                does.adam(found, numbers, gradients, scales, terms)
            case OptimizerKind.ADAGRAD:
                terms = np.array([rate, hyperparameters["eps"]], number)
                does.adagrad(found, numbers, gradients, terms)
            case OptimizerKind.ROWWISE_ADAGRAD:
                terms = np.array([rate, hyperparameters["eps"], gradients.shape[1]], number)
                does.rowwise_adagrad(found, numbers, gradients, terms)
            case _:
                terms = _ftrl_terms(number, -self._sign, hyperparameters)
                does.ftrl(found, numbers, gradients, terms)


class StepLoops(Protocol):
    """The functions below as compiled loops: `ps_server.rows.row_step_loops`.

    arrays: the values and the state; numbers, gradients: as of `RowOptimizer.step`; terms: numbers
    of the optimizer, in the rows' dtype.
    """

    adam: Callable[..., None]
    adagrad: Callable[..., None]
    rowwise_adagrad: Callable[..., None]
    ftrl: Callable[..., None]


def _add(values: Rows, numbers: Numbers, change: Rows) -> None:
    own = torch.from_numpy(values)  # in half the time of numpy's
    own.index_add_(0, torch.from_numpy(numbers), torch.from_numpy(change))


def _rowwise_adagrad(
    arrays: tuple[Rows, ...], numbers: Numbers, gradients: Rows, terms: Rows
) -> None:
    values, sums = arrays
    rate, eps, length = terms
    held = sums[numbers]
    held[:, 0] += _square_sums(gradients) / length
    _add(values, numbers, gradients * (rate / (np.sqrt(held) + eps)))
    sums[numbers] = held


def _square_sums(rows: Rows) -> npt.NDArray[Any]:
    """The sum of each row's squares, in the order in which eight lanes of a processor add them."""
    squares = np.square(rows)
    whole_count = rows.shape[1] - rows.shape[1] % _LANE_COUNT
    lanes = np.zeros((len(rows), _LANE_COUNT), rows.dtype)
    for begin in range(0, whole_count, _LANE_COUNT):
        lanes += squares[:, begin : begin + _LANE_COUNT]
    lanes = lanes[:, :4] + lanes[:, 4:]
    lanes = lanes[:, :2] + lanes[:, 2:]
    sums: npt.NDArray[Any] = lanes[:, 0] + lanes[:, 1]
    for at in range(whole_count, rows.shape[1]):
        sums += squares[:, at]
    return sums


def _adagrad(arrays: tuple[Rows, ...], numbers: Numbers, gradients: Rows, terms: Rows) -> None:
    values, sums = arrays
    rate, eps = terms
    held = sums[numbers]
    held += np.square(gradients)
    sums[numbers] = held
    change = np.sqrt(held)
    change += eps
    np.divide(gradients, change, out=change)
    change *= rate
    _add(values, numbers, change)


def _adam_scales(
    steps: Rows, numbers: Numbers, rate: Number, hyperparameters: Mapping[str, float]
) -> Rows:
    """Count a step of each row; what its root of squares is divided by, and its mean multiplied
    with. Shapes: (numbers, 2).
    """
    counted = steps[numbers]
    counted += 1
    steps[numbers] = counted
    # What is no count, as a checkpoint may have been given it, is one.
    bounded = np.fmin(np.fmax(counted[:, 0], 1), _MOST_COUNT)
    counts = bounded.astype(np.int64)
    squares = bias_corrections(hyperparameters["beta2"]).of(counts)
    means = bias_corrections(hyperparameters["beta1"]).of(counts)
    divisors = np.sqrt(squares).astype(steps.dtype)
    factors = (rate / means).astype(steps.dtype)
    return np.stack((divisors, factors), axis=1)


class BiasCorrections:
    """`1 - beta ** n` of step counts n, from 1; the powers are the C library's, as torch's own.

    numpy's are others on some processors, and replicas must agree. Those of small counts are kept:
    each call finds as many more as it is asked for, until all further ones are 1.
    """

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._kept: npt.NDArray[np.float64] = np.zeros(1)  # by count

    def of(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The corrections of these counts."""
        most = int(counts.max(initial=1))
        kept = self._grown(most, len(counts))
        last = len(kept) - 1
        if most <= last:
            return kept[counts]
        found = kept[np.minimum(counts, last)]
        if kept[last] < 1.0:
            others = np.flatnonzero(counts > last)
            distinct, which = np.unique(counts[others], return_inverse=True)
            found[others] = self._computed(distinct.tolist())[which]
        return found

    def _grown(self, most: int, new_count: int) -> npt.NDArray[np.float64]:
        kept, begin = self._kept, len(self._kept)
        end = min(most + 1, _KEPT_COUNT, begin + max(new_count, _LEAST_COUNT))
        if end > begin and kept[-1] < 1.0:
            self._kept = kept = np.append(kept, self._computed(range(begin, end)))
        return kept

    def _computed(self, counts: Iterable[int]) -> npt.NDArray[np.float64]:
        powers = map(math.pow, itertools.repeat(self._beta), counts)
        found: npt.NDArray[np.float64] = 1.0 - np.fromiter(powers, np.float64)
        return found


bias_corrections = functools.lru_cache(_KEPT_BETAS)(BiasCorrections)
"""One for each of the last betas: a step may change them."""


def _adam(
    arrays: tuple[Rows, ...], numbers: Numbers, gradients: Rows, scales: Rows, terms: Rows
) -> None:
    values, firsts, seconds = arrays
    new_first, old_second, new_second, eps = terms
    first, second = firsts[numbers], seconds[numbers]
    first += (gradients - first) * new_first
    second *= old_second
    second += np.square(gradients) * new_second
    firsts[numbers], seconds[numbers] = first, second
    roots = np.sqrt(second)
    roots /= scales[:, :1]
    roots += eps
    np.divide(first, roots, out=roots)
    roots *= scales[:, 1:]
    _add(values, numbers, roots)


def _ftrl_terms(
    number: Callable[[Any], Number], sign: float, hyperparameters: Mapping[str, float]
) -> Rows:
    """sign, l1, l2, beta, 1 / lr, and the largest sum: an infinite rate times 0 is no number."""
    given = (sign, *(hyperparameters[name] for name in ("l1", "l2", "beta")))
    terms = np.array([number(each) for each in (*given, 1.0 / hyperparameters["lr"])])
    return np.append(terms, np.finfo(terms.dtype).max)


def _ftrl(arrays: tuple[Rows, ...], numbers: Numbers, gradients: Rows, terms: Rows) -> None:
    all_values, all_sums, all_held = arrays
    sign, l1, l2, beta, inverse_rate, most = terms
    values, sums, held = all_values[numbers], all_sums[numbers], all_held[numbers]
    sums += np.square(gradients)
    np.minimum(sums, most, out=sums)
    rates = np.sqrt(sums)
    rates += beta
    rates *= inverse_rate
    has_rate = np.True_ if beta > 0.0 else rates > 0.0
    held += gradients * sign
    z = held - rates * values
    # What the penalty of l1 holds back of z.
    ends = np.where(z < -l1, -l1, np.where(z > l1, l1, z))
    is_zero = z == ends
    # (sign(z) * l1 - z) / (r + l2), as a change of w: without a rounding of the whole of w.
    change = held + l2 * values
    change -= ends
    values -= np.divide(change, rates + l2, out=np.zeros_like(change), where=has_rate)
    np.copyto(values, 0.0, where=is_zero & has_rate)
    np.subtract(ends, l2 * values, out=held, where=has_rate)
    all_values[numbers], all_sums[numbers], all_held[numbers] = values, sums, held


_PASSES: StepLoops = SimpleNamespace(
    adam=_adam, adagrad=_adagrad, rowwise_adagrad=_rowwise_adagrad, ftrl=_ftrl
)
