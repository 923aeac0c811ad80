"""Batches of bags under keys: the layout is TorchRec's, and what is no batch is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pushpull.errors import InvalidKeys, InvalidTensor, PushpullError
from pushpull.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

VALUES = torch.tensor([7, 3, 5, 3, 9])
LENGTHS = torch.tensor([2, 0, 1, 1, 1, 0])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
KEYS = ["clicks", "buys"]


def batch(**options: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(KEYS, VALUES, LENGTHS, **options)


def test_bags_lie_feature_by_feature() -> None:
    features = batch(weights=WEIGHTS)
    assert (features.keys(), features.stride()) == (KEYS, 3)
    assert (features.length_per_key(), features.offset_per_key()) == ([3, 2], [0, 3, 5])
    assert features.offsets().tolist() == [0, 2, 2, 3, 4, 5, 5]
    clicks, buys = features["clicks"], features.to_dict()["buys"]
    assert [bag.tolist() for bag in clicks.to_dense()] == [[7, 3], [], [5]]
    assert [bag.tolist() for bag in buys.to_dense()] == [[3], [9], []]
    assert buys.lengths().tolist() == [1, 1, 0]
    assert buys.weights().tolist() == [4.0, 5.0]
    assert repr(features) == (
        "KeyedJaggedTensor(3 bags a feature, values: {'clicks': 3, 'buys': 2})"
    )


def test_lengths_offsets_and_lists_make_the_same() -> None:
    given = batch(weights=WEIGHTS)
    by_offsets = KeyedJaggedTensor.from_offsets_sync(KEYS, VALUES, given.offsets(), WEIGHTS)
    by_lists = KeyedJaggedTensor.from_jt_dict(
        {
            key: JaggedTensor.from_dense(
                bags.to_dense(), bags.weights().split(bags.lengths().tolist())
            )
            for key, bags in given.to_dict().items()
        }
    )
    for other in (by_offsets, by_lists, given.to("cpu")):
        assert other.keys() == given.keys()
        assert other.stride() == given.stride()
        for name in ("values", "lengths", "offsets", "weights"):
            assert getattr(other, name)().tolist() == getattr(given, name)().tolist()


def test_there_may_be_no_example_and_no_feature() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert KeyedJaggedTensor(KEYS, nothing, lengths=nothing).stride() == 0
    assert KeyedJaggedTensor([], nothing, lengths=nothing, stride=4).stride() == 4
    assert JaggedTensor.from_dense([]).offsets().tolist() == [0]


def test_a_keyed_tensor_has_each_part_by_its_name() -> None:
    values = torch.arange(10).reshape(2, 5)
    keyed = KeyedTensor(KEYS, [2, 3], values)
    assert keyed.offset_per_key() == [0, 2, 5]
    assert keyed["buys"].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert keyed.to_dict()["clicks"].tolist() == [[0, 1], [5, 6]]
    assert (keyed.length_per_key(), keyed.key_dim()) == ([2, 3], 1)
    assert str(keyed) == "KeyedTensor({'clicks': 2, 'buys': 3})"
    with pytest.raises(InvalidKeys, match="no 'views'; expected one of clicks, buys"):
        keyed["views"]


REFUSED: list[tuple[Callable[[], Any], type[PushpullError], str]] = [
    (
        lambda: KeyedJaggedTensor(KEYS, VALUES[:4], lengths=LENGTHS),
        InvalidTensor, r"sum to 5, and there are 4 values",
    ),
    (
        lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=torch.tensor([2, 0, 1, 1, 1])),
        InvalidTensor, r"5 lengths for 2 features; expected 2 of each",
    ),
    (
        lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=torch.tensor([3, -1, 1, 1, 1, 0])),
        InvalidTensor, r"length -1",
    ),
    (
        lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS.float()),
        InvalidTensor, r"of torch\.float32",
    ),
    (lambda: KeyedJaggedTensor(KEYS, VALUES), InvalidTensor, r"neither lengths nor offsets"),
    (
        lambda: KeyedJaggedTensor(KEYS, VALUES, offsets=torch.tensor([0, 2, 2, 3, 4])),
        InvalidTensor, r"begin with 0 and to end with 5",
    ),
    (
        lambda: KeyedJaggedTensor(KEYS, VALUES, WEIGHTS[:4], lengths=LENGTHS),
        InvalidTensor, r"4 weights for 5 values",
    ),
    (
        lambda: KeyedJaggedTensor(["clicks", "clicks"], VALUES, lengths=LENGTHS),
        InvalidKeys, r"'clicks' comes twice",
    ),
    (lambda: batch()["views"], InvalidKeys, r"no 'views'"),
    (lambda: batch().weights(), InvalidTensor, r"no weights"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), REFUSED)
def test_what_is_no_batch_is_refused(
    make: Callable[[], Any], error: type[PushpullError], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()
