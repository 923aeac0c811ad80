"""Checks of a custom update: pure, the same every time, and blind to its neighbours.

    from ps_server.values.update_check import check_update

    def test_lion_is_an_update() -> None:
        check_update(Lion)

A table's values are equal bit for bit on any number of servers only if an element's result depends
on that element's own values, state, gradient and numbers: blocks are cut, and tensors come and go,
without regard to what an update might like to see together. Nobody can prove that of a function,
but most breaches show at once on random input.

`self_test` does the same on a fixed input when a server starts, and hashes what comes of it: two
servers whose updates differ differ there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ps_core.errors import InvalidConfig
from ps_server.values.custom_updates import Broken, CheckedUpdate, checked, padded_copy
from ps_server.values.kernel_fingerprint import fixed_input

_MOST_ELEMENTS = 400
_STEP_COUNT = 3
_DIGEST_CHARS = 16
_DTYPES = (torch.float32, torch.float64)


class _Case(NamedTuple):
    values: Tensor
    state: Mapping[str, Tensor]
    gradient: Tensor
    numbers: Mapping[str, float]
    step: int


class _Result(NamedTuple):
    """The elements after the update, without the padding."""

    values: Tensor
    state: dict[str, Tensor]


def check_update(
    update: object,
    *,
    rounds: int = 20,
    seed: int = 0,
    values: tuple[float, float] = (-1.0, 1.0),
    numbers: Mapping[str, float] | None = None,
) -> None:
    """Try an update on random input; for the tests of whoever wrote it.

    Args:
        update: what the entry point names: a class or an object.
        rounds: how many vectors are drawn, of 1 to 400 elements, half of them float64.
        seed: of the draws.
        values: what parameters are drawn from, uniformly; for an update that wants positive ones.
        numbers: hyperparameters that are not the defaults.

    Raises:
        InvalidConfig: it is no update as a server takes it; says what it did.
    """
    found = checked("checked", update)
    given = dict(found.defaults) | dict(numbers or {})
    unknown = given.keys() - dict(found.defaults).keys()
    if unknown:
        raise InvalidConfig(f"the update has no hyperparameter {', '.join(sorted(unknown))}")
    draws = torch.Generator().manual_seed(seed)
    for number in range(rounds):
        dtype = _DTYPES[number % len(_DTYPES)]
        count = 1 + int(torch.randint(_MOST_ELEMENTS, (), generator=draws))
        drawn, state = _uniform(draws, count, dtype, values), _started(found, count, dtype)
        case = _Case(drawn, state, _uniform(draws, count, dtype, (-1.0, 1.0)), given, 1)
        for _ in range(_STEP_COUNT):
            ends = torch.randint(count + 1, (3,), generator=draws).sort().values.tolist()
            result = _tried(found, case, ends)
            gradient = _uniform(draws, count, dtype, (-1.0, 1.0))
            case = _Case(result.values, result.state, gradient, given, case.step + 1)
            has_nan = any(bool(tensor.isnan().any()) for tensor in result.state.values())
            if has_nan or not torch.isfinite(result.values).all():
                raise InvalidConfig(
                    f"the update gave values that are not finite, or state with a NaN, at step "
                    f"{case.step - 1}, from finite ones; a table refuses them"
                )


def self_test(update: CheckedUpdate) -> str:
    """The hash of the update's result on a fixed input, with its defaults.

    Raises:
        InvalidConfig: it is no update: it raises, remembers, or looks at an element's neighbours.
    """
    digest = hashlib.sha256()
    count = 150  # two whole vectors of 64 and a part
    for dtype in _DTYPES:
        values = fixed_input(0, count, dtype).add(1.0).mul(0.5)  # positive: some updates need it
        state, gradient = _started(update, count, dtype), fixed_input(1, count, dtype)
        case = _Case(values, state, gradient, dict(update.defaults), 1)
        for _ in range(_STEP_COUNT):
            result = _tried(update, case, (7, 64, 101))
            gradient = fixed_input(case.step + 1, count, dtype)
            case = _Case(result.values, result.state, gradient, case.numbers, case.step + 1)
        for _, tensor in sorted([("", case.values), *case.state.items()]):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:_DIGEST_CHARS]


def _tried(update: CheckedUpdate, case: _Case, ends: Sequence[int]) -> _Result:
    """The result, computed in four ways that must agree."""
    first = _run(update, case)
    state = {name: tensor.clone() for name, tensor in first.state.items()}
    said = _Result(first.values.clone(), state)
    _require(said, _run(update, case), update, "gives other results for the same input")
    _run(update, case._replace(gradient=case.gradient.neg(), step=case.step + 1))
    _require(said, first, update, "changes what it has given back before, or keeps memory of it")
    _require(said, _run(update, case), update, "remembers what it was called with before")
    pieces = [_run(update, piece) for piece in _cut(case, ends)]
    joined = _Result(
        torch.cat([piece.values for piece in pieces]),
        {name: torch.cat([piece.state[name] for piece in pieces]) for name in said.state},
    )
    what = "depends on how the vector is cut, or on an element's neighbours"
    _require(said, joined, update, what)
    return said


def _run(update: CheckedUpdate, case: _Case) -> _Result:
    """As a server runs it: on copies, padded to a multiple of 64."""
    count = case.values.numel()
    state = {name: padded_copy(tensor) for name, tensor in case.state.items()}
    elements = padded_copy(case.values), state, padded_copy(case.gradient)
    try:
        values, new_state = update.call(*elements, case.numbers, case.step)
    except Broken as failure:
        raise InvalidConfig(f"custom update '{update.name}' is none: {failure}") from None
    return _Result(values[:count], {name: tensor[:count] for name, tensor in new_state.items()})


def _require(expected: _Result, came: _Result, update: CheckedUpdate, what: str) -> None:
    pairs = [(expected.values, came.values)]
    pairs += [(tensor, came.state[name]) for name, tensor in expected.state.items()]
    if not all(_bits(one).equal(_bits(other)) for one, other in pairs):
        raise InvalidConfig(
            f"custom update '{update.name}' {what}; expected a function of each element alone"
        )


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as whole numbers: equal bits are equal, NaNs included."""
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int64)


def _cut(case: _Case, ends: Sequence[int]) -> Iterator[_Case]:
    count = case.values.numel()
    bounds = sorted({0, *(end for end in ends if end < count), count})
    for part in itertools.starmap(slice, itertools.pairwise(bounds)):
        state = {name: tensor[part] for name, tensor in case.state.items()}
        yield case._replace(values=case.values[part], state=state, gradient=case.gradient[part])


def _started(update: CheckedUpdate, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.full((count,), start, dtype=dtype) for name, start in update.slots.items()}


def _uniform(
    draws: torch.Generator, count: int, dtype: torch.dtype, bounds: tuple[float, float]
) -> Tensor:
    low, high = bounds
    return torch.rand(count, generator=draws, dtype=dtype) * (high - low) + low
