"""LOW_RANK payloads: the two factors of a matrix of low rank, which has the block row by row.

    payload = columns, rank, first (uint32 each) | left factor (float32, rows x rank, row by row)
              | right factor (float32, rank x columns, row by row)
    element i is at the place first + i of the matrix, counted row by row; it ends in the last row
    an element = the sum of left[row, k] * right[k, column], in the order of k, and each product and
                 each sum rounded to float32: all servers decode the same bits

Rules:
    - A gradient's factors come from one step of a power iteration, which goes on from the right
      factor of the gradient before (Vogels et al., PowerSGD, 2019). Each worker sends its own:
      theirs are not reduced, so they need no second round.
    - What the product does not say is given back to the caller, to be added to the next gradient.
    - An element that is not finite, or whose product would be infinite, makes factors that
      `is_finite` tells of: the caller sends another codec.

Invariants:
    LR-1  decoded(payload) + what is left = the gradient + what was left before, as float32 rounds;
          of finite factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

import numpy as np

from ps_core.codecs import low_rank_passes
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats, draws
from ps_core.codecs.kernels import Kernels
from ps_core.errors import InvalidTensor

_HEADER = Struct("<III")
_PRODUCT_COUNT = 2**17
"""Products of one call of BLAS, which does so few on the caller's thread. It shares more with other
threads, and waits for these a hundred times as long as it works where cores are busy.
"""
_LARGEST = 3e38
"""A float32 may be a little larger; sums are rounded."""

KERNELS = Kernels(low_rank_passes, "ps_core.codecs.low_rank_loops")
"""Those of this process."""


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """The matrix that has a block's elements, and the rank of its factors.

    Attributes:
        element_count: of the block.
        first: the column of the block's first element.
    """

    element_count: int
    columns: int
    rank: int
    first: int = 0

    @classmethod
    def square(cls, element_count: int, rank: int) -> BlockMatrix:
        """The one with about as many rows as columns."""
        return cls(element_count, math.isqrt(element_count), rank)

    @property
    def rows(self) -> int:
        return -(-(self.first + self.element_count) // self.columns)

    @property
    def payload_bytes(self) -> int:
        return _HEADER.size + 4 * self.rank * (self.rows + self.columns)


def matrix_of(payload: Bytes, element_count: int) -> BlockMatrix:
    """The matrix that a payload names. Shapes: payload has the length of some (`check_length`).

    Raises:
        InvalidTensor: for so many elements, the factors of that one have another length.
    """
    columns, rank, first = _HEADER.unpack(payload[: _HEADER.size].tobytes())
    matrix = BlockMatrix(element_count, columns, rank, first)
    if first >= columns or matrix.payload_bytes != payload.nbytes:
        raise InvalidTensor(
            f"factors of rank {rank} for {columns} columns, from column {first}, in "
            f"{payload.nbytes} bytes; expected a column below the columns, and {_HEADER.size} "
            "bytes + 4 for each number of the factors"
        )
    return matrix


def factors(payload: Bytes, matrix: BlockMatrix) -> tuple[Floats, Floats]:
    """A payload's factors, as views. Shapes: (rows, rank), (rank, columns)."""
    numbers = payload[_HEADER.size :].view(np.float32)
    end = matrix.rows * matrix.rank
    return numbers[:end].reshape(-1, matrix.rank), numbers[end:].reshape(matrix.rank, -1)


def encode_gradient(
    gradient: Floats,
    before: Floats,
    left: Floats,
    payload: Bytes,
    matrix: BlockMatrix,
    start: Floats,
) -> Floats:
    """Encode a gradient plus what earlier ones have left (LR-1).

    Args:
        start: rows to begin with, none of zeros alone.

    Returns:
        The rows that the next gradient's iteration goes on from, of length 1, or 0 where this one
        has no such direction.

    Shapes:
        gradient, before, left: (n,); `before` was left by earlier ones, `left` is written.
        payload: (matrix.payload_bytes,), aligned to 4 bytes; written.
        start, and the result: (rank, columns).
    """
    payload[: _HEADER.size] = np.frombuffer(
        _HEADER.pack(matrix.columns, matrix.rank, matrix.first), np.uint8
    )
    whole = np.zeros(matrix.rows * matrix.columns, np.float32)
    elements = whole[matrix.first :][: len(gradient)]
    by_row, (basis, right) = whole.reshape(matrix.rows, -1), factors(payload, matrix)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=elements)
        for rows in _chunks(matrix):
            np.matmul(by_row[rows], start.T, out=basis[rows])
        basis[:] = np.linalg.qr(basis)[0]
        right[:] = 0
        for rows in _chunks(matrix):
            right += basis[rows].T @ by_row[rows]
        decode(payload, left)
        np.subtract(elements, left, out=left)
        lengths = np.linalg.norm(right.astype(np.float64), axis=1, keepdims=True)
        following: Floats = (right / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return following


def _chunks(matrix: BlockMatrix) -> Iterator[slice]:
    """The matrix's rows, a few at a time."""
    step = max(1, _PRODUCT_COUNT // (matrix.columns * matrix.rank))
    for row in range(0, matrix.rows, step):
        yield slice(row, row + step)


def started(rows: Floats, key: int) -> Floats:
    """Rows to begin an iteration with: those given, and a drawn one in place of each of zeros.

    Args:
        key: of the draws; 0 to 2**32 - 1.

    Shapes: (rank, columns), and the same.
    """
    drawn = draws(rows.size, np.uint32(key)).reshape(rows.shape) - np.float32(2**15)
    return np.where(rows.any(axis=1, keepdims=True), rows, drawn)


def decode(payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of `encode_gradient`; payload may change at any
    time, as shared memory does.

    Raises:
        InvalidTensor: as `matrix_of`.
    """
    matrix = matrix_of(payload, len(out))
    left, right = factors(payload, matrix)
    KERNELS.used().decode(left, right, matrix.first, out)


def is_finite(payload: Bytes, element_count: int) -> bool:
    """True if all elements are; False: perhaps. Raises InvalidTensor as `matrix_of`."""
    matrix = matrix_of(payload, element_count)
    left, right = (float(np.abs(each).max()) for each in factors(payload, matrix))
    return left * right * matrix.rank < _LARGEST
