"""SPARSE payloads: some elements and their places, and all else is left."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs import payload_codec
from ps_core.codecs import int8, int8_loops, payloads, sparse, sparse_loops, sparse_passes
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.errors import InvalidTensor
from ps_core.tables.elements import Codec

FINITE = st.floats(-(2.0**60), 2.0**60, width=32)
COUNTS = st.sampled_from((1, 7, 256, 1023, 1024, 1025, 5000))


def repeated(some: list[float], count: int) -> Floats:
    return np.resize(np.array(some, np.float32), count)


def largest(gradient: Floats, before: Floats, count: int) -> tuple[Bytes, Floats, Floats]:
    """A payload of the largest elements, what it decodes to, and what is left."""
    payload = np.full(8 * count, 255, np.uint8)
    left, out = np.full_like(gradient, 9), np.full_like(gradient, 9)
    sparse.encode_largest(gradient, before, left, payload)
    sparse.decode(payload, out)
    return payload, out, left


@given(st.lists(FINITE, min_size=1, max_size=40), COUNTS, st.floats(0, 1), st.integers(0, 99))
def test_the_largest_go_and_nothing_is_lost(
    some: list[float], count: int, share: float, seed: int
) -> None:
    """SP-1; of equal ones the first go."""
    draw = np.random.default_rng(seed)
    gradient = repeated(some, count) * draw.integers(-1, 2, count).astype(np.float32)
    before = repeated(some[::-1], count) / np.float32(3)
    sent_count = max(1, int(share * count))
    payload, out, left = largest(gradient, before, sent_count)
    asked = gradient + before
    assert np.array_equal(out + left, asked)
    values, places = sparse.parts(payload)
    order = np.lexsort((np.arange(count), -np.abs(asked)))
    assert places.tolist() == sorted(order[:sent_count].tolist())
    assert np.array_equal(values, asked[places])
    assert not left[places].any()
    assert np.array_equal(out, payload_codec.decode_sparse(payload.tobytes(), count))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("power", [1, 5])
def test_a_threshold_from_a_sample_finds_the_largest_of_many(share: float, power: int) -> None:
    gradient = np.random.default_rng(3).standard_normal(200_000, np.float32) ** power
    gradient[:100_000] *= 1e-3  # a sample must not be of one part
    count = int(share * len(gradient))
    _, out, _ = largest(gradient, np.zeros_like(gradient), count)
    least = np.sort(np.abs(gradient))[-count]
    assert np.array_equal(out != 0, np.abs(gradient) >= least)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.4])
def test_a_threshold_lets_half_as_many_again_pass(share: float) -> None:
    draw = np.random.default_rng(5)
    gradient = draw.standard_normal(2_000_000, np.float32)
    before = gradient / np.float32(2)
    count = int(share * len(gradient))
    least = np.int32(sparse.threshold(gradient, before, count)).view(np.float32)
    passing = np.count_nonzero(np.abs(gradient + before) >= least)
    assert passing / count == pytest.approx(1.5, rel=0.15)


def test_a_threshold_is_above_zero_though_most_elements_are_zero_or_too_few_for_a_sample() -> None:
    for count in (100, 5000):
        zeros = np.zeros(count, np.float32)
        assert sparse.threshold(zeros, zeros, 10) == 1
        assert sparse.threshold(zeros + 1, zeros, count - 1) == 1


def test_few_elements_that_are_not_zero_go_with_the_first_zeros() -> None:
    gradient = np.zeros(5000, np.float32)
    gradient[[4000, 4500]] = -1.0, 1e-40
    payload, _, left = largest(gradient, np.zeros_like(gradient), 4)
    assert sparse.parts(payload)[1].tolist() == [0, 1, 4000, 4500]
    assert not left.any()


def test_elements_that_no_sample_has_go_as_well() -> None:
    """Samples are zero, and then samples are larger than all others."""
    for own, other in ((0.0, 1.0), (5.0, 1.0)):
        gradient = np.full(4096, other, np.float32)
        gradient.reshape(-1, 1024)[:, :16] = own
        _, out, _ = largest(gradient, np.zeros_like(gradient), 400)
        assert np.count_nonzero(out) == 400
        assert (out == 5.0).sum() == (64 if own else 0)


@given(st.lists(FINITE, min_size=1, max_size=40), COUNTS, st.floats(0, 1), st.integers(0, 99))
def test_random_places_are_ascending_and_nothing_is_lost(
    some: list[float], count: int, share: float, key: int
) -> None:
    gradient, before = repeated(some, count), repeated(some[::-1], count) / np.float32(3)
    sent_count = max(1, int(share * count))
    payload = np.empty(8 * sent_count, np.uint8)
    left, out = np.empty_like(gradient), np.empty_like(gradient)
    sparse.encode_random(gradient, before, left, payload, key)
    sparse.decode(payload, out)
    assert np.array_equal(out + left, gradient + before)
    bounds = np.arange(sent_count + 1) * count // sent_count
    places = sparse.parts(payload)[1]
    assert (bounds[:-1] <= places).all()
    assert (places < bounds[1:]).all()


def test_random_places_are_every_place_in_time() -> None:
    count, seen = 1000, set[int]()
    for key in range(200):
        payload, left = np.empty(8 * 50, np.uint8), np.zeros(count, np.float32)
        sparse.encode_random(np.ones(count, np.float32), left, left.copy(), payload, key * 77_777)
        seen |= set(sparse.parts(payload)[1].tolist())
    assert len(seen) == count


def test_errors_add_up_to_nothing_over_many_steps() -> None:
    gradient = np.linspace(0.1, 1.0, 100, dtype=np.float32)
    left, applied = np.zeros(100, np.float32), np.zeros(100)
    for _ in range(1000):
        _, out, left = largest(gradient, left, 5)
        applied += out
    assert np.abs(left).max() < 30
    assert np.allclose(applied / 1000, gradient, atol=0.03)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_goes_and_leaves_what_was_left(bad: float) -> None:
    gradient, before = np.ones(3000, np.float32), np.full(3000, 0.25, np.float32)
    gradient[2000], gradient[7] = bad, 9.0
    payload, out, left = largest(gradient, before, 1)
    assert not np.isfinite(out[2000])
    assert left[2000] == 0.25
    assert left[7] == 9.25
    assert np.isfinite(left).all()
    assert not payloads.is_finite(Codec.SPARSE, payload, 3000)
    assert payloads.is_finite(Codec.SPARSE, largest(before, before, 9)[0], 3000)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("places", [(2000,), (1999, 2000, 2001), (0, 2999), tuple(range(3000))])
def test_an_element_that_is_not_finite_goes_whatever_is_drawn(
    bad: float, places: tuple[int, ...]
) -> None:
    """Else it would stay in what is left, for ever, and servers would not refuse the step."""
    before = np.full(3000, 0.25, np.float32)
    gradient, left = np.ones_like(before), np.empty_like(before)
    gradient[[*places]] = bad
    payload = np.empty(8 * 3, np.uint8)
    sparse.encode_random(gradient, before, left, payload, 1)
    assert not payloads.is_finite(Codec.SPARSE, payload, 3000)
    assert (left[[*places]] == 0.25).all()
    assert np.isfinite(left).all()
    sparse.decode(payload, left)  # the places are still ascending


def test_more_elements_that_are_not_finite_than_go_leave_what_was_left() -> None:
    gradient, before = np.full(3000, np.inf, np.float32), np.full(3000, 0.25, np.float32)
    assert (largest(gradient, before, 5)[2] == 0.25).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), COUNTS, st.integers(0, 2**31 - 1))
def test_loops_and_passes_find_the_same(some: list[float], count: int, threshold: int) -> None:
    gradient, before = repeated(some, count), repeated(some[::-1], count)
    for least in (threshold, 0, 1):
        lefts = [np.empty_like(gradient) for _ in range(2)]
        found = [
            add(gradient, before, left, np.int32(least))
            for add, left in zip((sparse_passes.add, sparse_loops.add), lefts, strict=True)
        ]
        assert found[0].dtype == found[1].dtype
        assert found[0].tolist() == found[1].tolist()
        assert np.array_equal(lefts[0], lefts[1], equal_nan=True)
        found_samples = [each.sample(gradient, before) for each in (sparse_passes, sparse_loops)]
        assert found_samples[0].tolist() == found_samples[1].tolist()
        for sent_count in {min(1, len(found[0])), len(found[0]) // 2, len(found[0])} - {0}:
            taken = []
            for kernels in (sparse_passes, sparse_loops):
                left, values = lefts[0].copy(), np.empty(sent_count, np.float32)
                sent = np.empty(sent_count, np.uint32)
                kernels.take_largest(left, found[0].copy(), values, sent)
                taken.append((left.tobytes(), values.tobytes(), sent.tolist()))
            assert taken[0] == taken[1]


def test_loops_are_loaded_where_a_table_needs_them() -> None:
    payloads.load_kernels(Codec.SPARSE)
    assert sparse.KERNELS.used() is sparse_loops
    payloads.load_kernels(Codec.INT8)
    assert int8.KERNELS.used() is int8_loops
    payloads.load_kernels(Codec.BF16)


@pytest.mark.parametrize("places", [[3], [0, 3], [0, 1, 1], [0, 2, 1], [1, 0, 2]])
def test_places_are_ascending_and_below_the_end(places: list[int]) -> None:
    payload = np.frombuffer(payload_codec.encode_sparse([1.0] * len(places), places), np.uint8)
    with pytest.raises(InvalidTensor, match="not below 3"):
        sparse.decode(payload, np.empty(3, np.float32))


@given(
    st.integers(1, 9),
    st.lists(st.integers(0, 9) | st.integers(0, 2**32 - 1), min_size=1, max_size=5, unique=True),
    st.booleans(),
    st.binary(min_size=20, max_size=20),
)
def test_any_bytes_decode_or_are_refused(
    count: int, places: list[int], is_sorted: bool, some: bytes
) -> None:
    places = sorted(places) if is_sorted else [*places, places[-1]]
    elements = np.resize(np.frombuffer(some, np.float32), len(places))
    payload = np.frombuffer(payload_codec.encode_sparse(elements, places), np.uint8).copy()
    out = np.full(count, 9, np.float32)
    if is_sorted and places[-1] < count:
        sparse.decode(payload, out)
        expected = payload_codec.decode_sparse(payload.tobytes(), count)
        assert np.array_equal(out, expected, equal_nan=True)
    else:
        with pytest.raises(InvalidTensor, match=re.escape(f"not below {count}")):
            sparse.decode(payload, out)
