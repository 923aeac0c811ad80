"""`clip_norm`: the bits of torch.nn.utils.clip_grad_norm_, where workers clip.

Workers without BSP take turns here, so that one process can do the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import ps_worker as ps
from tests.integration.clipped_training import (
    DEADLINE_S,
    MAX_NORM,
    MOMENTUM,
    RECIPES,
    STEPS,
    WORKERS,
    Recipe,
    Side,
    mean_clipped,
    names,
    ours,
    sides_of,
    train_together,
)
from tests.integration.training_models import Branched, batches, differing, seeded, values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        clients = [
            ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
            for rank in range(WORKERS)
        ]
        yield clients
        for client in clients:
            client.close(leave=False)


@pytest.mark.thorough
@pytest.mark.parametrize("block_elements", [64, 512])
@pytest.mark.parametrize("kind", RECIPES)
def test_aggregate_clips_the_mean_as_one_process(
    workers: list[ps.Client], kind: str, block_elements: int
) -> None:
    recipe = RECIPES[kind]
    histories = train_together(
        workers, recipe, ps.Aggregate(MOMENTUM), block_elements=block_elements
    )
    for step, expected in enumerate(mean_clipped(recipe, MOMENTUM)):
        for history in histories:
            assert differing(history[step], expected) == [], step


def _check_turns(sides: Sequence[Side], turn: Callable[[Side, int], None], master: Any) -> None:
    """Workers step one after the other; `turn` does the same to the twin, whose end is `master`."""
    for step in range(STEPS):
        for side in sides:
            turn(side, step)
            side.backward(step)
            side.step()
            assert differing(values(side.model), values(master)) == [], (step, side.rank)


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
@pytest.mark.parametrize("kind", RECIPES)
def test_without_bsp_each_worker_clips_its_own(
    workers: list[ps.Client], kind: str, consistency: str
) -> None:
    recipe = RECIPES[kind]
    sides = sides_of(workers, recipe, ps.SGD(lr=0.1, momentum=0.9), consistency=consistency)
    twins = [Side(rank, recipe, lambda m: MOMENTUM(m.parameters())) for rank in range(WORKERS)]
    master: Any = seeded(Branched)
    servers = MOMENTUM(master.parameters())

    def turn(side: Side, step: int) -> None:
        mine = twins[side.rank]
        mine.backward(step)
        found = mine.unscaled()
        if found is not None:
            clip_grad_norm_(mine.model.parameters(), MAX_NORM)
            for name, parameter in master.named_parameters():
                parameter.grad = found.get(name)
            for number in ("lr", "momentum"):
                servers.param_groups[0][number] = mine.optimizer.param_groups[0][number]
            servers.step()
        mine.step()
        mine.model.load_state_dict(master.state_dict())

    _check_turns(sides, turn, master)


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
@pytest.mark.parametrize("kind", RECIPES)
def test_local_optimizers_clip_their_own(
    workers: list[ps.Client], kind: str, consistency: str
) -> None:
    recipe = RECIPES[kind]
    sides = sides_of(workers, recipe, ps.Add(MOMENTUM), consistency=consistency)
    twins = [Side(rank, recipe, lambda m: MOMENTUM(m.parameters())) for rank in range(WORKERS)]
    master: Any = seeded(Branched)

    def turn(side: Side, step: int) -> None:
        for parameter, moved in zip(
            master.parameters(), _move(twins[side.rank], step), strict=True
        ):
            parameter.detach().add_(moved)
        twins[side.rank].model.load_state_dict(master.state_dict())

    _check_turns(sides, turn, master)


def _move(side: Side, step: int) -> list[torch.Tensor]:
    """How far a local optimizer moves the parameters that it clips by itself."""
    before = [p.detach().clone() for p in side.model.parameters()]
    side.backward(step)
    if side.unscaled() is not None:
        clip_grad_norm_(side.model.parameters(), MAX_NORM)
    side.step()
    return [p.detach() - old for p, old in zip(side.model.parameters(), before, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", RECIPES)
def test_the_mean_of_moves_that_were_clipped(workers: list[ps.Client], kind: str) -> None:
    recipe = RECIPES[kind]
    histories = train_together(workers, recipe, ps.Add(MOMENTUM))
    twins = [Side(rank, recipe, lambda m: MOMENTUM(m.parameters())) for rank in range(WORKERS)]
    master: Any = seeded(Branched)
    for step in range(STEPS):
        moves = [_move(side, step) for side in twins]
        if step == recipe.overflow_at:
            moves = moves[:1]
        for parameter, *moved in zip(master.parameters(), *moves, strict=True):
            parameter.detach().add_(sum(moved[1:], moved[0]) * (1.0 / len(moved)))
        for side in twins:
            side.model.load_state_dict(master.state_dict())
        for history in histories:
            assert differing(history[step], values(master)) == [], step


def _backward(model: Any, seed: int = 0, factor: float = 1.0) -> None:
    model.zero_grad()
    (model(next(batches(1, rank=seed))).square().mean() * factor).backward()


def _one(client: ps.Client, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """A model of one worker, and its optimizer."""
    model: Any = seeded(Branched)
    make = ours(client, Recipe(), optimizer, f"clip-{next(names)}", **options)
    return model, make(model)


def test_nothing_leaves_twice_and_the_norm_is_told(workers: list[ps.Client]) -> None:
    """The factor travels with the seal: gradients stay as backward left them."""
    client = workers[0]
    model, optimizer = _one(client, ps.SGD(lr=0.1), consistency="asp", clip_norm=1e-3)
    assert optimizer.gradient_norm is None
    size_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    for step in range(3):
        pushed_bytes = client.progress().pushed_bytes
        _backward(model, step)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        assert client.progress().pushed_bytes - pushed_bytes == size_bytes
        after = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, before, after))
        assert optimizer.gradient_norm == clip_grad_norm_(model.parameters(), 1.0)


def test_a_codec_keeps_what_it_leaves_of_a_spike_as_clipped(
    workers: list[ps.Client],
) -> None:
    """With the next gradients, which are zero, a quarter of the clipped one comes, and no more."""
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.zeros_(model.weight)
    make = ours(
        workers[0], Recipe(), ps.SGD(lr=1.0), f"clip-{next(names)}",
        consistency="asp", push_codec="topk:0.25",
    )  # fmt: skip
    optimizer = make(model)
    for step, size in enumerate((100.0, 0.0, 0.0, 0.0), 1):
        model.weight.grad = torch.full_like(model.weight, size)
        optimizer.step()
        moved = -model.weight.detach().reshape(-1).sort().values
        expected = torch.zeros(64)
        expected[: 16 * step] = MAX_NORM / 8  # each of 64 elements alike
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_half_precision_counts_in_single(workers: list[ps.Client]) -> None:
    """The norm of these gradients is no float16."""
    model = torch.nn.Linear(64, 16, bias=False, dtype=torch.float16)
    torch.nn.init.zeros_(model.weight)
    make = ours(workers[0], Recipe(), ps.SGD(lr=1.0), f"clip-{next(names)}", consistency="asp")
    optimizer = make(model)
    model.weight.grad = torch.full_like(model.weight, 32768.0)
    optimizer.step()
    assert optimizer.gradient_norm == 32 * 32768.0
    expected = -MAX_NORM / 32  # each of 1024 elements alike
    torch.testing.assert_close(model.weight, torch.full_like(model.weight, expected))


@pytest.mark.parametrize("optimizer", [ps.SGD(lr=0.1, momentum=0.9), ps.Add(MOMENTUM)])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), r"gradient of 'last\.bias' has an infinity or a NaN at step 2 of table"),
        (1e30, r"norm of the gradients is inf at step 2 of 'clip-\d+'"),
    ],
)
def test_a_norm_that_is_not_finite_skips_the_step(
    workers: list[ps.Client], optimizer: Any, value: float, words: str
) -> None:
    """Local optimizers do not even see it."""
    model, ours = _one(workers[0], optimizer, consistency="asp")
    reference = copy.deepcopy(model)
    theirs = MOMENTUM(reference.parameters())
    for step in range(3):
        _backward(model, step)
        if step == 1:
            model.last.bias.grad[1] = value
            with pytest.raises(ps.InvalidTensor, match=words):
                ours.step()
            assert ours.results == ()
            continue
        ours.step()
        _backward(reference, step)
        clip_grad_norm_(reference.parameters(), MAX_NORM)
        theirs.step()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("optimizer", [ps.SGD(lr=0.1, momentum=0.9), ps.Add(MOMENTUM)])
def test_where_such_are_allowed_it_does_as_torch(
    workers: list[ps.Client], optimizer: Any, value: float
) -> None:
    """Gradients beside a NaN become NaN, those beside an infinity 0."""
    model, ours = _one(workers[0], optimizer, consistency="asp", allow_non_finite=True)
    reference = copy.deepcopy(model)
    theirs = MOMENTUM(reference.parameters())
    for side, stepped in ((model, ours), (reference, theirs)):
        for step in range(2):
            _backward(side, step)
            if step == 1:
                side.last.bias.grad[1] = value
            if side is reference:
                clip_grad_norm_(side.parameters(), MAX_NORM)
            stepped.step()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_reduced_gradient_that_is_not_finite_is_nan_for_all(workers: list[ps.Client]) -> None:
    """Without `allow_non_finite` the worker that has it is left out."""
    sides = sides_of(workers, Recipe(), ps.Aggregate(MOMENTUM), allow_non_finite=True)

    def train(side: Side) -> None:
        side.backward(0)
        if side.rank == 1:
            side.model.gain.grad.fill_(float("nan"))
        side.step()

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(train, sides))
    for side in sides:
        assert all(value.isnan().all() for value in values(side.model).values())


@pytest.mark.thorough
def test_the_norm_is_the_same_wherever_gradients_lie(workers: list[ps.Client]) -> None:
    """Sums in the order of memory have other last bits in another order: worker 1's is columns."""
    factory = partial(torch.optim.SGD, lr=1.0)
    models = [torch.nn.Linear(331, 257, bias=False) for _ in workers]
    name = f"clip-{next(names)}"
    optimizers = [
        ours(client, Recipe(), ps.Aggregate(factory), name)(model)
        for client, model in zip(workers, models, strict=True)
    ]
    draw = torch.Generator().manual_seed(5)
    gradient = torch.randn(257, 331, generator=draw)
    models[0].weight.grad = gradient
    models[1].weight.grad = gradient.t().contiguous().t()
    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(lambda optimizer: optimizer.step(), optimizers))
    assert optimizers[0].gradient_norm == optimizers[1].gradient_norm
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"consistency": "asp", "mode": "eager"}, "in 'eager' mode"),
        ({"consistency": "asp", "clip_norm": 0.0}, r"clip_norm is 0\.0; expected a finite number"),
        ({"consistency": "asp", "clip_norm": float("inf")}, "clip_norm is inf"),
        ({"consistency": "asp", "clip_norm": float("nan")}, "clip_norm is nan"),
    ],
)
def test_what_cannot_be_clipped_is_refused(
    workers: list[ps.Client], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ps.InvalidConfig, match=words):
        _one(workers[0], ps.SGD(lr=0.1), **options)


def test_eager_steps_are_not_clipped_by_anybody(workers: list[ps.Client]) -> None:
    with pytest.raises(ps.InvalidConfig, match="in 'eager' mode"):
        _one(workers[0], ps.Aggregate(MOMENTUM), mode="eager")


def test_add_may_change_into_bsp(workers: list[ps.Client]) -> None:
    sides = sides_of(workers, Recipe(), ps.Add(MOMENTUM), consistency="asp")
    for side in sides:
        assert side.optimizer.set_consistency("bsp", after_clock=1) == 1

    def train(side: Side) -> None:
        for step in range(3):
            side.backward(step)
            side.step()

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(train, sides))
    assert differing(*(values(side.model) for side in sides)) == []
    assert all(side.optimizer.gradient_norm > 0 for side in sides)
