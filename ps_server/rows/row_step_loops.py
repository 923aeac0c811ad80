"""The optimizers of `row_optimizers` as loops over rows, compiled by numba: a row is read and
written once. The results are the same, to the bit: each element goes through the same operations,
in the same order. Only `row_kernels` imports this module.

Rows go in groups. The processor is told of all rows of a group before the first changes, so that it
loads them side by side.

Arguments are as of the functions of the same names there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps_core.compiled_loops import compiled, to_write

_GROUP_COUNT = 32


@compiled(error_model="numpy")
def _announce(rows: Any, numbers: Any, begin: Any, end: Any) -> None:
    """Have the rows of a group loaded, which are about to change."""
    line = 64 // rows.itemsize
    for at in range(begin, end):
        for j in range(0, rows.shape[1], line):
            to_write(rows, numbers[at], j)


@compiled(error_model="numpy")
def rowwise_adagrad(arrays: Any, numbers: Any, gradients: Any, terms: Any) -> None:
    values, sums = arrays
    rate, eps, length = terms[0], terms[1], terms[2]
    count = values.shape[1]
    whole_count = count - count % 8
    factors = np.empty(_GROUP_COUNT, values.dtype)
    for begin in range(0, len(numbers), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(numbers))
        _announce(values, numbers, begin, end)
        _announce(sums, numbers, begin, end)
        for at in range(begin, end):
            own = gradients[at]
            zero = own.dtype.type(0)
            a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
            for j in range(0, whole_count, 8):
                a += own[j] * own[j]
                b += own[j + 1] * own[j + 1]
                c += own[j + 2] * own[j + 2]
                d += own[j + 3] * own[j + 3]
                e += own[j + 4] * own[j + 4]
                f += own[j + 5] * own[j + 5]
                g += own[j + 6] * own[j + 6]
                h += own[j + 7] * own[j + 7]
            total = ((a + e) + (c + g)) + ((b + f) + (d + h))
            for j in range(whole_count, count):
                total += own[j] * own[j]
            factors[at - begin] = total / length
        for at in range(begin, end):
            number = numbers[at]
            sums[number, 0] += factors[at - begin]
            factors[at - begin] = rate / (np.sqrt(sums[number, 0]) + eps)
        for at in range(begin, end):
            own, row, factor = gradients[at], values[numbers[at]], factors[at - begin]
            for j in range(count):
                row[j] += own[j] * factor


@compiled(error_model="numpy")
def adagrad(arrays: Any, numbers: Any, gradients: Any, terms: Any) -> None:
    values, sums = arrays
    rate, eps = terms[0], terms[1]
    for begin in range(0, len(numbers), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(numbers))
        _announce(values, numbers, begin, end)
        _announce(sums, numbers, begin, end)
        for at in range(begin, end):
            own, row, held = gradients[at], values[numbers[at]], sums[numbers[at]]
            for j in range(len(row)):
                held[j] += own[j] * own[j]
                row[j] += own[j] / (np.sqrt(held[j]) + eps) * rate


@compiled(error_model="numpy")
def adam(arrays: Any, numbers: Any, gradients: Any, scales: Any, terms: Any) -> None:
    values, first, second = arrays
    new_first, old_second, new_second, eps = terms[0], terms[1], terms[2], terms[3]
    for begin in range(0, len(numbers), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(numbers))
        _announce(values, numbers, begin, end)
        _announce(first, numbers, begin, end)
        _announce(second, numbers, begin, end)
        for at in range(begin, end):
            number, divisor, factor = numbers[at], scales[at, 0], scales[at, 1]
            own, row, m, v = gradients[at], values[number], first[number], second[number]
            for j in range(len(row)):
                m[j] += (own[j] - m[j]) * new_first
                v[j] = v[j] * old_second + own[j] * own[j] * new_second
                row[j] += m[j] / (np.sqrt(v[j]) / divisor + eps) * factor


@compiled(error_model="numpy")
def ftrl(arrays: Any, numbers: Any, gradients: Any, terms: Any) -> None:
    values, sums, helds = arrays
    sign, l1, l2, beta, inverse_rate = terms[0], terms[1], terms[2], terms[3], terms[4]
    most, has_beta = terms[5], terms[3] > 0
    for begin in range(0, len(numbers), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(numbers))
        _announce(values, numbers, begin, end)
        _announce(sums, numbers, begin, end)
        _announce(helds, numbers, begin, end)
        for at in range(begin, end):
            number = numbers[at]
            own, row, total, held = gradients[at], values[number], sums[number], helds[number]
            for j in range(len(row)):
                s = total[j] + own[j] * own[j]
                s = most if s > most else s
                total[j] = s
                rate = (np.sqrt(s) + beta) * inverse_rate
                h, w = held[j] + own[j] * sign, row[j]
                z = h - rate * w
                kept = -l1 if z < -l1 else (l1 if z > l1 else z)
                has_rate = has_beta or rate > 0
                if has_rate:
                    w = w - (h + l2 * w - kept) / (rate + l2)
                    if z == kept:
                        w = own.dtype.type(0)
                    row[j] = w
                    h = kept - l2 * w
                held[j] = h
