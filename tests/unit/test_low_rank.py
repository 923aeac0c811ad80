"""Gradients as two factors of low rank: exact where they can be, nothing lost, any bytes refused or
decoded to one set of bits.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs import payload_codec
from ps_core.codecs import low_rank, low_rank_loops, low_rank_passes, payloads
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.codecs.low_rank import BlockMatrix
from ps_core.errors import InvalidTensor
from ps_core.tables.elements import Codec, check_length

COUNTS = st.integers(100, 700)
COLUMNS = st.integers(4, 25)
RANKS = st.integers(1, 3)


def drawn(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def encoded(
    matrix: BlockMatrix, gradient: Floats, before: Floats | None = None, start: Floats | None = None
) -> tuple[Bytes, Floats, Floats]:
    """The payload, what is left, and the rows that the next iteration goes on from."""
    payload, left = np.full(matrix.payload_bytes, 255, np.uint8), np.full_like(gradient, 9)
    before = np.zeros_like(gradient) if before is None else before
    start = np.zeros((matrix.rank, matrix.columns), np.float32) if start is None else start
    rows = low_rank.started(start, 7)
    return payload, left, low_rank.encode_gradient(gradient, before, left, payload, matrix, rows)


def decoded(payload: Bytes, count: int) -> Floats:
    out = np.full(count, 9, np.float32)
    low_rank.decode(payload, out)
    return out


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_no_higher_rank_arrives_at_once(rank: int) -> None:
    """Also one whose products are more than one call of BLAS."""
    for rows, columns in ((50, 40), (400, 300)):
        gradient = (drawn(1, rows, rank) @ drawn(2, rank, columns)).reshape(-1)
        payload, left, _ = encoded(BlockMatrix(rows * columns, columns, 4), gradient)
        assert np.abs(left).max() < 1e-5 * np.abs(gradient).max()
        found = decoded(payload, rows * columns)
        assert np.abs(found - gradient).max() < 1e-5 * np.abs(gradient).max()


@given(COUNTS, COLUMNS, RANKS, st.integers(0, 24), st.integers(0, 99), st.integers(-30, 30))
def test_nothing_is_lost(
    count: int, columns: int, rank: int, first: int, seed: int, power: int
) -> None:
    """LR-1, whatever the place of the block in its matrix."""
    matrix = BlockMatrix(count, columns, rank, first % columns)
    gradient, before = drawn(seed, 2, count) * np.float32(10.0**power)
    payload, left, _ = encoded(matrix, gradient, before)
    check_length(payload.nbytes, Codec.LOW_RANK, count)
    assert low_rank.matrix_of(payload, count) == matrix
    found = decoded(payload, count)
    size = np.abs(found).max() + np.abs(left).max()
    assert np.abs(found + left - (gradient + before)).max() <= 1e-6 * size
    lengths = [np.linalg.norm(each.astype(np.float64)) for each in (left, gradient + before)]
    assert lengths[0] < lengths[1]
    assert low_rank.is_finite(payload, count)


def test_the_same_gradient_again_and_again_comes_near_the_best_of_its_rank() -> None:
    gradient = drawn(3, 60, 40) @ np.diag(1e-3 * 0.8 ** np.arange(40, dtype=np.float32))
    best = np.linalg.norm(np.linalg.svd(gradient)[1][4:])
    matrix, start, lengths = BlockMatrix(2400, 40, 4), None, []
    for _ in range(12):
        _, left, start = encoded(matrix, gradient.reshape(-1), start=start)
        lengths.append(np.linalg.norm(left) / best)
        assert np.linalg.norm(start, axis=1) == pytest.approx(1)
    assert lengths[0] > 1.1
    assert lengths[-1] == pytest.approx(1, abs=0.01)


def test_errors_add_up_to_nothing_over_many_steps() -> None:
    gradient, total = drawn(5, 400), np.zeros(400)
    left, start = np.zeros(400, np.float32), None
    for _ in range(300):
        payload, left, start = encoded(BlockMatrix.square(400, 1), gradient, left, start)
        total += decoded(payload, 400)
    assert np.abs(total / 300 - gradient).max() < 0.2
    assert np.linalg.norm(left) < 20 * np.linalg.norm(gradient)


def test_zeros_arrive_as_zeros_and_the_next_iteration_begins_anew() -> None:
    matrix, zeros = BlockMatrix(400, 20, 2), np.zeros(400, np.float32)
    payload, left, start = encoded(matrix, zeros)
    assert not decoded(payload, 400).any()
    assert not left.any()
    assert not start.any()
    gradient = (drawn(1, 20, 2) @ drawn(2, 2, 20)).reshape(-1)
    assert np.abs(encoded(matrix, gradient, start=start)[1]).max() < 1e-5


def test_only_a_start_of_zeros_is_drawn() -> None:
    rows = np.zeros((3, 500), np.float32)
    rows[1, 7] = 1e-20
    first, again, other = (low_rank.started(rows, key) for key in (0, 0, 1))
    assert np.array_equal(first, again)
    assert np.array_equal(first[1], rows[1])
    for row in (0, 2):
        assert np.count_nonzero(first[row] == other[row]) < 5
        assert abs(first[row].mean()) < 0.1 * first[row].std()
    assert np.count_nonzero(first[0] == first[2]) < 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_factors_of_what_is_not_finite_or_nearly_so_are_told(bad: float) -> None:
    gradient = drawn(1, 400)
    gradient[7:9] = bad
    payload, _, _ = encoded(BlockMatrix(400, 20, 2), gradient)
    assert not payloads.is_finite(Codec.LOW_RANK, payload, 400)


def test_factors_that_are_finite_may_have_a_product_that_is_not() -> None:
    for value, is_finite in ((1.2e19, True), (1.3e19, False)):
        left, right = np.full((20, 2), value), np.full((2, 20), value)
        payload = np.frombuffer(payload_codec.encode_low_rank(left, right), np.uint8)
        assert low_rank.is_finite(payload, 400) is is_finite
        assert np.isfinite(decoded(payload, 400)).all() == (2 * value**2 < 3.4e38)


def test_a_matrix_ends_with_the_row_of_the_last_element() -> None:
    assert [BlockMatrix(100, 10, 1, first).rows for first in (0, 1, 9)] == [10, 11, 11]
    assert [BlockMatrix(count, 10, 1).rows for count in (91, 100, 101)] == [10, 10, 11]
    assert BlockMatrix(100, 10, 2, 1).payload_bytes == 12 + 4 * 2 * 21
    assert BlockMatrix.square(150, 3) == BlockMatrix(150, 12, 3)


@given(
    st.integers(9, 3000),
    st.sampled_from([1, 7, 40, 3000]),
    st.integers(1, 5),
    st.integers(0, 2999),
    st.lists(st.floats(width=32), min_size=1, max_size=50),
)
def test_loops_passes_and_the_page_give_the_same_bits(
    count: int, columns: int, rank: int, first: int, some: list[float]
) -> None:
    matrix = BlockMatrix(count, min(columns, count), rank, first % min(columns, count))
    numbers = np.resize(np.array(some, np.float32), rank * (matrix.rows + matrix.columns))
    left = numbers[: rank * matrix.rows].reshape(-1, rank)
    right = numbers[rank * matrix.rows :].reshape(rank, -1)
    found = np.full((2, count), 9, np.float32)
    low_rank_passes.decode(left, right, matrix.first, found[0])
    low_rank_loops.decode(left, right, matrix.first, found[1])
    payload = payload_codec.encode_low_rank(left, right, matrix.first)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = payload_codec.decode_low_rank(payload, count)
    for each in found:
        assert np.array_equal(each, expected, equal_nan=True)
    is_number = ~np.isnan(expected)
    assert found[0][is_number].tobytes() == found[1][is_number].tobytes()


def test_a_large_matrix_is_summed_in_chunks() -> None:
    """With the bits of a loop: fused or in another order there would be others."""
    left, right, found = drawn(1, 20_000, 4), drawn(2, 4, 15), np.zeros((2, 299_980), np.float32)
    low_rank_passes.decode(left, right, 14, found[0])
    low_rank_loops.decode(left, right, 14, found[1])
    assert found[0].tobytes() == found[1].tobytes()
    assert found[0].all()


@given(
    st.integers(9, 200),
    st.tuples(*[st.integers(0, 20) | st.integers(0, 2**32 - 1)] * 3),
    st.integers(2, 60),
    st.binary(min_size=4, max_size=40),
)
def test_any_bytes_decode_or_are_refused(
    count: int, header: tuple[int, int, int], number_count: int, some: bytes
) -> None:
    numbers = np.resize(np.frombuffer(some[: len(some) // 4 * 4], np.float32), number_count)
    payload = np.frombuffer(np.array(header, "<u4").tobytes() + numbers.tobytes(), np.uint8)
    columns, rank, first = header
    rows = -(-(first + count) // max(columns, 1))
    out = np.full(count, 9, np.float32)
    if first < columns and rank * (rows + columns) == number_count:
        low_rank.decode(payload, out)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = payload_codec.decode_low_rank(payload.tobytes(), count)
        assert np.array_equal(out, expected, equal_nan=True)
    else:
        with pytest.raises(InvalidTensor, match=re.escape(f"rank {rank} for {columns} columns")):
            low_rank.decode(payload, out)
        assert (out == 9).all()


def test_loops_are_loaded_where_a_table_needs_them() -> None:
    payloads.load_kernels(Codec.LOW_RANK)
    assert low_rank.KERNELS.used() is low_rank_loops
