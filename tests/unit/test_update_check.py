"""The check that authors call finds every way to depend on what an update must not depend on."""

# ruff: noqa: ARG002 - what an update is called with is the contract's to say

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ps_core.errors import InvalidConfig
from ps_server.values.custom_updates import checked
from ps_server.values.update_check import check_update, self_test
from tests.unit.sample_updates import BREACHES, Counting, Decaying, Given, Lion

GOOD = [Lion, Decaying, Counting]


@pytest.mark.parametrize("kind", GOOD)
def test_good_updates_pass(kind: type) -> None:
    check_update(kind)
    assert len(self_test(checked("good", kind))) == 16


class Wrong:
    """A plain step; the classes below each get one thing wrong."""

    hyperparameters: ClassVar = {"lr": 0.5}
    slots: ClassVar = {"m": 0.0}

    def update(
        self, values: Tensor, state: Any, gradient: Tensor, numbers: Any, step: int
    ) -> tuple[Tensor, Any]:
        return values.sub_(self.direction(gradient), alpha=numbers["lr"]), state

    def direction(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class Normed(Wrong):
    """Divides by the norm of what happens to be in the vector."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.div(gradient.norm())


class Summing(Wrong):
    """Adds up what lies before an element."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.cumsum(0)


class Placed(Wrong):
    """Takes every second element for another."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient * (torch.arange(gradient.numel()) % 2)


class Random(Wrong):
    """Adds noise."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


class Remembering(Wrong):
    """Has a state of its own."""

    def __init__(self) -> None:
        self.last = 0.0

    def direction(self, gradient: Tensor) -> Tensor:
        before, self.last = self.last, float(gradient[0])
        return gradient * (1.0 if before == self.last else 1.0 + before)


class Reusing(Wrong):
    """Gives back memory that the next call writes to."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    def update(
        self, values: Tensor, state: Any, gradient: Tensor, numbers: Any, step: int
    ) -> tuple[Tensor, Any]:
        key = values.numel(), values.dtype
        scratch = self.scratch.setdefault(key, torch.empty_like(values))
        return torch.sub(values, gradient, out=scratch), state


class Diverging(Wrong):
    """Ends at infinity."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient * 1e38 * 1e38


class Blurring(Wrong):
    """Loses its state."""

    def update(
        self, values: Tensor, state: Any, gradient: Tensor, numbers: Any, step: int
    ) -> tuple[Tensor, Any]:
        return values, {"m": state["m"] / 0.0}


FINDINGS: dict[type, str] = {
    Normed: "depends on how the vector is cut, or on an element's neighbours",
    Summing: "depends on how the vector is cut, or on an element's neighbours",
    Placed: "depends on how the vector is cut",
    Random: "gives other results for the same input",
    Remembering: "(gives other results for the same input|remembers what it was called with)",
    Reusing: "changes what it has given back before",
    Diverging: "gave values that are not finite, or state with a NaN, at step 1",
    Blurring: "gave values that are not finite, or state with a NaN, at step 1",
}


@pytest.mark.parametrize("kind", FINDINGS)
def test_what_is_wrong_is_found(kind: type) -> None:
    with pytest.raises(InvalidConfig, match=FINDINGS[kind]):
        check_update(kind)


@pytest.mark.parametrize("kind", [kind for kind in FINDINGS if "NaN" not in FINDINGS[kind]])
def test_a_server_finds_it_too(kind: type) -> None:
    with pytest.raises(InvalidConfig, match=f"'wrong' {FINDINGS[kind]}"):
        self_test(checked("wrong", kind))


@pytest.mark.parametrize("breach", BREACHES)
def test_what_breaks_the_contract_is_found(breach: str) -> None:
    then, words = BREACHES[breach]
    if breach == "infinity":
        words = "gave values that are not finite"
    elif "NaN" in breach:  # in the first element, whichever that is
        words = "depends on how the vector is cut"
    with pytest.raises(InvalidConfig, match=words):
        check_update(Given(then))


class Rooted(Wrong):
    """Wants positive values."""

    def update(
        self, values: Tensor, state: Any, gradient: Tensor, numbers: Any, step: int
    ) -> tuple[Tensor, Any]:
        return values.sqrt() * numbers["lr"], state


def test_values_and_numbers_may_be_said() -> None:
    with pytest.raises(InvalidConfig, match="not finite"):
        check_update(Rooted)
    check_update(Rooted, values=(0.5, 2.0), numbers={"lr": 0.25})
    self_test(checked("rooted", Rooted))
    with pytest.raises(InvalidConfig, match="no hyperparameter rate"):
        check_update(Rooted, numbers={"rate": 0.25})


class Slower(Decaying):
    hyperparameters: ClassVar = {"lr": 0.999}


class Later(Counting):
    slots: ClassVar = {"count": 2.0}


def test_the_hash_tells_arithmetic_defaults_and_state_apart() -> None:
    kinds = [*GOOD, Slower, Later, Given(lambda v, s: (v, s))]
    hashes = [self_test(checked("mine", kind)) for kind in kinds]
    assert len(set(hashes)) == len(kinds)
    assert [self_test(checked("mine", kind)) for kind in kinds] == hashes
