"""What a server may offer as a custom update, rule by rule."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.update_offer import GROUP_KEYS, UpdateOffer

OFFER = UpdateOffer("lion", (("beta1", 0.9), ("lr", 0.1)), "zoo 1.0;selftest=aa")


def refuses(offer: UpdateOffer, words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        offer.validated()


def test_a_good_offer_is_taken_as_it_is() -> None:
    assert OFFER.validated() is OFFER
    bare = UpdateOffer("lion", fingerprint="f")
    assert (bare.validated().hyperparameters, bare.problem) == ((), "")


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("name", limits.MAX_CUSTOM_UPDATE_NAME_BYTES),
        ("fingerprint", limits.MAX_CUSTOM_UPDATE_FINGERPRINT_BYTES),
        ("problem", limits.MAX_CUSTOM_UPDATE_PROBLEM_BYTES),
    ],
)
def test_a_text_has_so_many_bytes_at_most(field: str, most: int) -> None:
    for text in ("x" * most, "\u00fc" * (most // 2)):
        offer = replace(OFFER, **{field: text})  # type: ignore[arg-type]
        assert offer.validated() is offer
    long = replace(OFFER, **{field: "\u00fc" * (most // 2 + 1)})  # type: ignore[arg-type]
    refuses(long, f"its {field} has {most // 2 * 2 + 2} bytes; expected ")


def test_an_offer_has_a_name_and_a_fingerprint_unless_it_cannot_be_run() -> None:
    refuses(replace(OFFER, name=""), "its name has 0 bytes; expected 1 to")
    refuses(replace(OFFER, fingerprint=""), "its fingerprint has 0 bytes; expected 1 to")
    one = UpdateOffer("n", fingerprint="f")
    assert one.validated() is one
    broken = UpdateOffer("lion", problem="zoo 1.0 cannot be loaded")
    assert broken.validated() is broken
    assert broken.fingerprint == ""
    refuses(replace(broken, name=""), "its name has 0 bytes; expected 1 to")


def test_an_offer_has_so_many_numbers_at_most() -> None:
    most = limits.MAX_HYPERPARAMETER_COUNT
    numbers = tuple((f"n{index:02}", 0.0) for index in range(most + 1))
    assert replace(OFFER, hyperparameters=numbers[:most]).validated().hyperparameters
    refuses(replace(OFFER, hyperparameters=numbers), f"has {most + 1} hyperparameters; expected")


@pytest.mark.parametrize(
    "name", ["", "2nd", "a-b", "a b", "lambda", "params", "n" * 65, "\u00fc" * 33]
)
def test_a_number_is_called_as_an_argument_may_be(name: str) -> None:
    refuses(replace(OFFER, hyperparameters=((name, 0.0),)), f"has a hyperparameter {name!r}")


@pytest.mark.parametrize("name", ["lr", "_x", "n" * 64, "\u00fc" * 32, "match"])
def test_other_names_will_do(name: str) -> None:
    asked = replace(OFFER, hyperparameters=((name, 0.0),))
    assert asked.validated() is asked


@pytest.mark.parametrize("sign", [1, -1])
def test_a_default_has_any_sign_up_to_a_magnitude(sign: int) -> None:
    most = sign * limits.MAX_HYPERPARAMETER_MAGNITUDE
    asked = replace(OFFER, hyperparameters=(("lr", most),))
    assert asked.validated() is asked
    for value in (most * 1.001, sign * math.inf, math.nan):
        refuses(replace(OFFER, hyperparameters=(("lr", value),)), f"default of 'lr' is {value}")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_every_number_is_looked_at(position: int) -> None:
    numbers = [("a", 0.0), ("b", 0.0), ("c", 0.0)]
    numbers[position] = ("lr", math.nan)
    refuses(replace(OFFER, hyperparameters=tuple(numbers)), "default of 'lr' is nan")


def test_what_torch_keeps_in_a_group_for_itself_is_no_number_of_an_update() -> None:
    """What optimizers and schedulers of the installed torch put there beside real numbers."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([("w", weight)], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler
    schedule.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=True)
    schedule.OneCycleLR(optimizer, 0.1, total_steps=3)
    numbers = {"lr", "momentum", "dampening", "weight_decay", "nesterov"}
    found = set(optimizer.param_groups[0])
    assert found - numbers <= GROUP_KEYS
    assert found | set(torch.optim.Adam([weight]).param_groups[0]) >= GROUP_KEYS
