"""The generators of a process go on, after a save and a load, as if nothing had been."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_worker.checkpoint.random_state import RandomState
from ps_worker.checkpoint.state_codec import decode, encode


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    kept = RandomState()
    state = kept.state_dict()
    yield
    kept.load_state_dict(state)


def drawn(*generators: torch.Generator) -> list[Any]:
    """Numbers of every generator, those among them of which a second is kept for the next call."""
    return [
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
        random.random(),
        random.gauss(0, 1),
        [torch.rand(2, generator=one).tolist() for one in generators],
    ]


def test_the_same_numbers_come_after_a_load() -> None:
    loader = torch.Generator().manual_seed(5)
    state = RandomState(loader=loader)
    drawn(loader)
    saved = encode(state.state_dict())
    expected = [drawn(loader) for _ in range(3)]
    other = torch.Generator()
    RandomState(loader=other).load_state_dict(decode(*saved))
    assert [drawn(other) for _ in range(3)] == expected


def test_a_state_that_was_taken_does_not_move() -> None:
    state = RandomState()
    taken = state.state_dict()
    first = drawn()
    drawn()
    state.load_state_dict(taken)
    assert drawn() == first


def test_it_is_public_and_only_takes_generators() -> None:
    assert ps_worker.RandomState is RandomState
    wrong: Any = 7
    with pytest.raises(InvalidConfig, match=r"loader is a int; expected a torch\.Generator"):
        RandomState(loader=wrong)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"numpy": None}, InvalidCheckpoint, "numpy is no state"),
        ({"numpy": {"bit_generator": "PCG64", "state": {}}}, InvalidCheckpoint, "numpy is no"),
        ({"torch": torch.zeros(3, dtype=torch.uint8)}, InvalidCheckpoint, "torch is no state"),
        ({"torch": "seed"}, InvalidCheckpoint, "torch is no state"),
        ({"python": {}}, InvalidCheckpoint, "python has no words"),
        ({"python": 3}, InvalidCheckpoint, "python has no words"),
        ({"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99}, InvalidConfig, "99 CUDA devices"),
        ({"cuda": 3}, InvalidCheckpoint, "cuda a int"),
        ({"generators": {}}, InvalidConfig, r"has generators \[\]; .* given \['loader'\]"),
        ({"generators": {"loader": 3}}, InvalidCheckpoint, r"generators\.loader is no state"),
        ({"more": 1}, InvalidCheckpoint, "expected cuda, generators, numpy, python, torch"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    loader = torch.Generator().manual_seed(5)
    state = RandomState(loader=loader)
    wrong = {**state.state_dict(), **change}
    before = state.state_dict()
    expected = drawn(loader)
    state.load_state_dict(before)
    with pytest.raises(error, match=words):
        state.load_state_dict(wrong)
    assert drawn(loader) == expected


@pytest.mark.parametrize("name", ["version", "words", "gauss_next"])
def test_a_wrong_state_of_pythons_generator_is_refused(name: str) -> None:
    state = RandomState()
    wrong = state.state_dict()
    wrong["python"][name] = {
        "version": 99,
        "words": np.zeros(5, dtype=np.uint32),
        "gauss_next": "soon",
    }[name]
    with pytest.raises(InvalidCheckpoint, match="python"):
        state.load_state_dict(wrong)


@pytest.mark.parametrize("position", [-1, 625])
def test_numpy_is_not_sent_beyond_its_words(position: int) -> None:
    state = RandomState()
    wrong = state.state_dict()
    wrong["numpy"]["state"]["pos"] = position
    with pytest.raises(InvalidCheckpoint, match=f"pos is {position} of 624"):
        state.load_state_dict(wrong)
