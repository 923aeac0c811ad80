"""What collective calls give, against Python's own arithmetic and torch's."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core import limits
from ps_core.collective_calls import Round, Share
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import Incarnation
from ps_worker.collectives import encoding, reductions
from tests.examples import examples

NUMBERS = st.integers() | st.floats(allow_nan=False, width=64)


def through(given: list[Any], op: str) -> Any:
    """What each worker computes of what all of them have sent."""
    sent = [encoding.packed(reductions.reducible(one, op), "all_reduce") for one in given]
    return reductions.reduced([encoding.unpacked(payload) for payload in sent], op)


@given(st.lists(st.integers(), min_size=1, max_size=6))
@settings(max_examples=examples(200))
def test_integers_are_exact(numbers: list[int]) -> None:
    assert through(list(numbers), "sum") == sum(numbers)
    assert through(list(numbers), "min") == min(numbers)
    assert through(list(numbers), "max") == max(numbers)
    assert type(through(list(numbers), "sum")) is int


@given(st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=6))
@settings(max_examples=examples(100))
def test_a_mean_of_integers_is_rounded_once(numbers: list[int]) -> None:
    assert through(list(numbers), "mean") == float(Fraction(sum(numbers), len(numbers)))


@given(st.lists(st.floats(), min_size=1, max_size=6))
@settings(max_examples=examples(200))
def test_floats_are_added_in_the_order_of_ranks(numbers: list[float]) -> None:
    expected = reduce(lambda total, number: total + number, numbers)
    found = through(list(numbers), "sum")
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@given(st.lists(st.floats(), min_size=2, max_size=4), st.sampled_from(["min", "max"]))
@settings(max_examples=examples(100))
def test_a_nan_is_seen_wherever_it_is(numbers: list[float], op: str) -> None:
    found = through(list(numbers), op)
    if any(map(math.isnan, numbers)):
        assert math.isnan(found)
    else:
        assert found == (min if op == "min" else max)(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("op", reductions.OPS)
def test_a_tensor_is_reduced_in_its_own_dtype_as_in_one_process(
    dtype: torch.dtype, op: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [(torch.randn(5, 3, generator=generator) * 9).to(dtype) for _ in range(3)]
    if op == "mean" and not dtype.is_floating_point:
        with pytest.raises(InvalidTensor, match=r"has no mean; give it as \.double\(\)"):
            through(tensors, op)
        return
    folds = {"min": torch.minimum, "max": torch.maximum}
    expected = reduce(folds.get(op, torch.add), tensors)
    assert torch.equal(through(tensors, op), expected / 3 if op == "mean" else expected)
    assert through(tensors, op).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_in_float32(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([one], dtype=dtype) for one in (256.0, 0.5, 0.5, 1.0)]
    assert torch.equal(through(tensors, "sum"), torch.tensor([258.0], dtype=dtype))


def test_dicts_and_lists_are_reduced_item_by_item_and_come_back_as_they_were() -> None:
    one = {"loss": np.float64(0.5), "by class": np.array([1, 2]), "t": (torch.ones(2), [3])}
    found = reductions.as_given(through([one, one], "sum"), one)
    assert found["loss"] == 1.0
    assert isinstance(found["by class"], np.ndarray)
    assert found["by class"].tolist() == [2, 4]
    assert isinstance(found["t"], tuple)
    assert found["t"][0].tolist() == [2.0, 2.0]
    assert found["t"][1] == [6]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", "value is a str; expected a number"),
        ({1: 2}, "value has keys that are not strings"),
        ({"a": [None]}, r"value\['a'\]\[0\] is a NoneType"),
        (torch.tensor([True]), "value is of torch.bool"),
    ],
)
def test_what_cannot_be_reduced_is_refused_by_its_place(value: Any, words: str) -> None:
    with pytest.raises(InvalidTensor, match=words):
        reductions.reducible(value, "sum")


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="op is 'avg'; expected one of sum, mean, min, max"):
        reductions.reducible(1, "avg")


def test_too_much_is_refused_with_what_to_do() -> None:
    fits = torch.zeros(limits.MAX_COLLECTIVE_BYTES // 4 - 64)
    assert encoding.unpacked(encoding.packed(fits, "gather")).shape == fits.shape
    with pytest.raises(InvalidTensor, match=r"gather was given .* Push larger values to a table"):
        encoding.packed(torch.zeros(limits.MAX_COLLECTIVE_BYTES // 4), "gather")


def test_what_is_sent_comes_back() -> None:
    value = {
        "none": None,
        "s": "ü",
        "t": torch.zeros(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int8),
    }
    found = encoding.unpacked(encoding.packed(value, "gather"))
    assert found["s"] == "ü"
    assert found["t"].shape == (0, 3)
    assert torch.equal(found["scalar"], torch.tensor(2, dtype=torch.int8))


@pytest.mark.parametrize("payload", [b"", b"\x05\0\0\0{}", b"\x02\0\0\0{}", b"\xff\xff\xff\xff"])
def test_bytes_of_another_version_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidTensor, match="another version"):
        encoding.unpacked(payload)


def round_of(*calls: str, problem: str = "") -> Round:
    shares = (Share(rank, Incarnation(rank), call) for rank, call in enumerate(calls))
    return Round(1, tuple(shares), problem)


def test_calls_that_differ_are_named_with_their_ranks() -> None:
    encoding.check_agreement(round_of("barrier", "barrier"))
    with pytest.raises(InvalidConfig, match="rank 0 called barrier, rank 2 called gather"):
        encoding.check_agreement(round_of("barrier", "barrier", "gather", "gather"))


def test_a_round_that_came_to_nothing_says_why() -> None:
    with pytest.raises(InvalidTensor, match="gather: too much"):
        encoding.check_agreement(round_of("gather", problem="too much"))


def test_words_that_are_too_long_still_differ() -> None:
    long = [encoding.words_of("all_reduce(sum)", "n", "x" * 2000 + end) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(one.encode()) <= limits.MAX_COLLECTIVE_CALL_BYTES for one in long)
    assert encoding.words_of("gather", "n", "a number") == "gather 'n' of a number"
