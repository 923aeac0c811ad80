"""SIGN payloads: a bit an element, and all else is left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs import payload_codec
from ps_core.codecs import payloads, sign, sign_loops, sign_passes
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.tables.elements import Codec

SINGLE = st.floats(width=32, allow_subnormal=True)
FINITE = st.floats(-(2.0**60), 2.0**60, width=32)


def encoded(gradient: Floats, before: Floats) -> tuple[Bytes, Floats, Floats]:
    """A payload, what it decodes to, and what is left."""
    payload = np.full(Codec.SIGN.payload_bytes(len(gradient)), 255, np.uint8)
    left, out = np.full_like(gradient, 9), np.full_like(gradient, 9)
    sign.encode_gradient(gradient, before, left, payload)
    sign.decode(payload, out)
    return payload, out, left


@given(st.lists(FINITE, min_size=1, max_size=40), st.sampled_from((1, 7, 8, 256, 257, 700)))
def test_nothing_is_lost(some: list[float], count: int) -> None:
    """SG-1, and each group has the mean of its absolute values, with the signs."""
    gradient = np.resize(np.array(some, np.float32), count)
    before = np.resize(gradient[::-1] / np.float32(3), count)
    payload, out, left = encoded(gradient, before)
    asked = gradient + before
    assert np.array_equal(left, asked - out)
    assert np.array_equal(out, payload_codec.decode_sign(payload.tobytes(), count))
    for begin in range(0, count, 256):
        part = slice(begin, begin + 256)
        mean = np.abs(asked[part]).mean(dtype=np.float64)
        assert np.allclose(np.abs(out[part]), mean, rtol=1e-5, atol=1e-40)
        assert np.array_equal(np.signbit(out[part]), np.signbit(asked[part]))


@given(st.lists(SINGLE, min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_loops_and_passes_give_the_same_bits(some: list[float], groups: int, seed: int) -> None:
    """Of numbers that are written by hand, and of drawn ones, whose sums depend on their order."""
    drawn = np.random.default_rng(seed).standard_normal(256 * groups, np.float32)
    for gradient in (np.resize(np.array(some, np.float32), 256 * groups), drawn):
        before = np.roll(gradient, 1) / np.float32(3)
        found = []
        for kernels in (sign_passes, sign_loops):
            scales, bits = np.zeros(groups, np.float32), np.zeros(32 * groups, np.uint8)
            left, out = np.zeros_like(gradient), np.zeros_like(gradient)
            kernels.encode(gradient, before, left, scales, bits)
            kernels.decode(scales, bits, out)
            floats = (np.nan_to_num(each, nan=7.0).tobytes() for each in (scales, left, out))
            found.append((*floats, bits.tobytes()))
        assert found[0] == found[1]


def test_errors_add_up_to_nothing_over_many_steps() -> None:
    gradient = np.array([1.0, -0.5, 0.25, 0.0], np.float32)
    left, applied = np.zeros(4, np.float32), np.zeros(4)
    for _ in range(1000):
        _, out, left = encoded(gradient, left)
        applied += out
    assert np.abs(left).max() < 10
    assert np.allclose(applied / 1000, gradient, atol=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_says_so_and_leaves_what_was_left(bad: float) -> None:
    gradient, before = np.ones(600, np.float32), np.full(600, 0.25, np.float32)
    gradient[300] = bad
    payload, out, left = encoded(gradient, before)
    assert np.isnan(out[256:512]).all()
    assert np.isfinite(out[:256]).all()
    assert np.isfinite(out[512:]).all()
    assert (left[256:512] == 0.25).all()
    assert not payloads.is_finite(Codec.SIGN, payload, 600)
    assert payloads.is_finite(Codec.SIGN, payload[:36], 256)


def test_the_largest_numbers_do_not_overflow() -> None:
    most = np.finfo(np.float32).max
    for count in (1, 2, 7, 255, 256, 1000):
        gradient = np.resize(np.array([most, -most], np.float32), count)
        _, out, left = encoded(gradient, np.zeros(count, np.float32))
        assert np.isfinite(out).all()
        assert np.allclose(out, gradient, rtol=1e-5)
        assert np.isfinite(left).all()


@given(st.integers(1, 600), st.binary(min_size=1, max_size=80))
def test_any_bytes_decode_to_something(count: int, some: bytes) -> None:
    size = Codec.SIGN.payload_bytes(count)
    payload = np.resize(np.frombuffer(some, np.uint8), size).copy()
    out = np.empty(count, np.float32)
    sign.decode(payload, out)
    expected = payload_codec.decode_sign(payload.tobytes(), count)
    assert np.array_equal(out, expected, equal_nan=True)
