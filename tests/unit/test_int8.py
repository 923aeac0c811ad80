"""INT8 payloads: what is rounded off is left, loops and passes give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.codecs import int8, int8_loops, int8_passes
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats
from ps_core.codecs.kernels import Kernels
from ps_core.tables.elements import Codec

COUNTS = st.sampled_from((1, 2, 255, 256, 257, 700))
SINGLE = st.floats(width=32, allow_subnormal=True)


def drawn(data: st.DataObject, count: int, elements: st.SearchStrategy[float]) -> Floats:
    """A few elements of the strategy, over and over."""
    some = data.draw(st.lists(elements, min_size=1, max_size=40))
    return np.resize(np.array(some, np.float32), count)


def empty(count: int) -> tuple[Bytes, Floats]:
    """A payload, and elements."""
    return np.zeros(Codec.INT8.payload_bytes(count), np.uint8), np.zeros(count, np.float32)


@given(st.data(), COUNTS, st.integers(0, 2**32 - 1))
def test_loops_and_passes_give_the_same_bits(data: st.DataObject, count: int, key: int) -> None:
    gradient, before = drawn(data, count, SINGLE), drawn(data, count, SINGLE)
    found = []
    for encode in (int8_passes.encode, int8_loops.encode):
        payload, left = empty(count)
        encode(gradient, before, left, *int8.parts(payload), np.uint32(key))
        found.append((payload.tobytes(), np.nan_to_num(left, nan=7.0).tobytes()))
    assert found[0] == found[1]
    rounded = []
    for encode_values in (int8_passes.round_to_nearest, int8_loops.round_to_nearest):
        payload, _ = empty(count)
        encode_values(gradient, *int8.parts(payload))
        rounded.append(payload.tobytes())
    assert rounded[0] == rounded[1]


@given(st.integers(1, 700), st.data())
def test_loops_and_passes_decode_any_bytes_to_the_same(count: int, data: st.DataObject) -> None:
    size = Codec.INT8.payload_bytes(count)
    some = data.draw(st.binary(min_size=1, max_size=60))
    payload = np.resize(np.frombuffer(some, np.uint8), size).copy()
    found = []
    for decode in (int8_passes.decode, int8_loops.decode):
        out = np.empty(count, np.float32)
        decode(*int8.parts(payload), out)
        found.append(np.nan_to_num(out, nan=7.0).tobytes())
    assert found[0] == found[1]


def test_passes_work_until_loops_are_loaded_which_is_asked_for_once() -> None:
    kernels = Kernels(int8_passes, "ps_core.codecs.int8_loops")
    assert not kernels.must_load(), "nobody has a use for them"
    assert kernels.used() is int8_passes
    assert kernels.must_load()
    kernels.load()
    assert not kernels.must_load()
    assert kernels.used() is int8_loops
    assert not kernels.must_load()


def test_the_parts_of_a_payload_are_its_scales_and_its_numbers() -> None:
    payload, _ = empty(300)
    payload[:8].view(np.float32)[:] = 0.5, 0.25
    payload[8:] = np.arange(300) % 256
    scales, numbers = int8.parts(payload)
    assert scales.tolist() == [0.5, 0.25]
    assert numbers[:3].tolist() == [0, 1, 2]
    assert len(numbers) == 300
    assert numbers[255] == -1


def test_a_payload_says_how_many_elements_it_has() -> None:
    for count in range(1, 1100):
        assert int8.element_count(Codec.INT8.payload_bytes(count)) == count


FINITE = st.floats(-(2.0**99), 2.0**99, width=32)


@given(st.data(), COUNTS, st.integers(0, 2**32 - 1))
def test_nothing_is_lost(data: st.DataObject, count: int, key: int) -> None:
    """Q8-1, and each element is off by one step of its group at most."""
    gradient, before = drawn(data, count, FINITE), drawn(data, count, FINITE)
    payload, left = empty(count)
    int8.encode_gradient(gradient, before, left, payload, key)
    out = np.empty_like(left)
    int8.decode(payload, out)
    asked = gradient + before
    scales = np.repeat(int8.parts(payload)[0], 256)[:count]
    assert np.all(np.abs(left) <= np.maximum(scales * np.float32(1.001), 1e-30))
    assert np.array_equal(left, asked - out)


@given(st.data(), COUNTS)
def test_values_are_rounded_to_the_nearest(data: st.DataObject, count: int) -> None:
    values = drawn(data, count, FINITE)
    payload, out = empty(count)
    int8.encode_values(values, payload)
    int8.decode(payload, out)
    scales = np.repeat(int8.parts(payload)[0], 256)[:count]
    assert np.all(np.abs(out - values) <= np.maximum(scales * np.float32(0.501), 1e-30))


def test_roundings_have_the_right_mean() -> None:
    """Each draw is its own: 4,000 roundings of one gradient."""
    gradient = np.linspace(-1, 1, 300, dtype=np.float32)
    before, total = np.zeros_like(gradient), np.zeros(300)
    for key in range(4000):
        payload, out = empty(300)
        left = np.empty_like(gradient)
        int8.encode_gradient(gradient, before, left, payload, key * 2_654_435_761 % 2**32)
        int8.decode(payload, out)
        total += out
    assert np.abs(total / 4000 - gradient).max() < 5 * (1 / 127) / np.sqrt(12 * 4000) * 2


def test_errors_add_up_to_nothing_over_many_steps() -> None:
    """A thousand steps of one small element beside a large one: fed back, the small one counts."""
    gradient = np.array([1.0, 1e-4], np.float32)
    left, applied = np.zeros(2, np.float32), np.zeros(2)
    for key in range(1000):
        payload, out = empty(2)
        new = np.empty_like(left)
        int8.encode_gradient(gradient, left, new, payload, key)
        int8.decode(payload, out)
        left, applied = new, applied + out
    assert np.allclose(applied + left, gradient.astype(np.float64) * 1000, rtol=1e-5)
    assert abs(applied[1] - 0.1) < 0.02


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_says_so_and_leaves_what_was_left(bad: float) -> None:
    gradient, before = np.ones(600, np.float32), np.full(600, 0.25, np.float32)
    gradient[300] = bad
    payload, left = empty(600)
    int8.encode_gradient(gradient, before, left, payload, 5)
    out = np.empty_like(left)
    int8.decode(payload, out)
    assert np.isnan(out[256:512]).all()
    assert np.isfinite(out[:256]).all()
    assert np.isfinite(out[512:]).all()
    assert (left[256:512] == 0.25).all()


def test_the_largest_numbers_do_not_overflow() -> None:
    most = np.finfo(np.float32).max
    gradient = np.array([most, -most, most / 2], np.float32)
    payload, left = empty(3)
    int8.encode_gradient(gradient, np.zeros(3, np.float32), left, payload, 9)
    out = np.empty_like(left)
    int8.decode(payload, out)
    assert np.isfinite(out).all()
    assert np.isfinite(left).all()


def test_what_is_too_small_for_a_scale_is_left_whole() -> None:
    gradient = np.array([1e-31, -1e-38], np.float32)
    payload, left = empty(2)
    int8.encode_gradient(gradient, np.zeros(2, np.float32), left, payload, 3)
    assert not payload.any()
    assert np.array_equal(left, gradient)
