"""`clip_norm`: the bits of torch.nn.utils.clip_grad_norm_, whoever clips.

Workers without BSP take turns here, so that one process can do the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import ps_worker as ps
from tests.integration.training_models import Branched, batches, differing, seeded, values

WORKERS = 2
STEPS = 6
MAX_NORM = 0.25
"""Some of the gradients' norms are below it."""

DEADLINE_S = 20.0
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

_names = count()


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


def _warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a worker comes by its gradient."""

    passes: int = 1
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] = _warm_up
    autocast: torch.dtype | None = None
    overflow_at: int = -1
    """The step in which worker 1 multiplies its loss by infinity; with a scaler."""


RECIPES = {
    "plain": Recipe(),
    "accumulated": Recipe(passes=3, schedule=_one_cycle),
    "bfloat16": Recipe(autocast=torch.bfloat16, overflow_at=2),
    "float16": Recipe(passes=2, autocast=torch.float16, overflow_at=3),
}


class Side:
    """A model with the optimizer that is stepped, its schedule and its scaler."""

    def __init__(self, rank: int, recipe: Recipe, make: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.recipe = recipe
        self.model: Any = seeded(Branched)
        self.optimizer: Any = make(self.model)
        self.schedule = recipe.schedule(self.optimizer)
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=recipe.autocast is not None, init_scale=2.0**8, growth_interval=2
        )
        self._inputs = list(batches(STEPS * recipe.passes, rank=rank))

    def backward(self, step: int) -> None:
        recipe = self.recipe
        self.optimizer.zero_grad()
        for number in range(recipe.passes):
            x = self._inputs[step * recipe.passes + number]
            with torch.autocast("cpu", recipe.autocast, enabled=recipe.autocast is not None):
                loss = self.model(x, is_long=step % 2 == 0).square().mean() / recipe.passes
            if (step, self.rank) == (recipe.overflow_at, 1):
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def unscaled(self) -> dict[str, torch.Tensor] | None:
        """The gradients that there are; None if they overflowed."""
        self.scaler.unscale_(self.optimizer)
        found = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        return found if all(g.isfinite().all() for g in found.values()) else None


def _ours(
    client: ps.Client, recipe: Recipe, optimizer: Any, name: str, **options: Any
) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        return ps.DistributedOptimizer(
            client,
            model,
            optimizer,
            **{
                "name": name,
                "clip_norm": MAX_NORM,
                "accumulate": recipe.passes,
                "kernels": "exact",
                "block_elements": 64,
                **options,
            },
        )

    return make


def _sides(
    workers: Sequence[ps.Client], recipe: Recipe, optimizer: Any, **options: Any
) -> list[Side]:
    """One for each worker, of one model."""
    name = f"clip-{next(_names)}"
    return [
        Side(rank, recipe, _ours(client, recipe, optimizer, name, **options))
        for rank, client in enumerate(workers)
    ]


def _train_together(
    workers: Sequence[ps.Client], recipe: Recipe, optimizer: Any, **options: Any
) -> list[list[dict[str, torch.Tensor]]]:
    """The parameters after each step of each worker, under BSP."""

    def train(side: Side) -> list[dict[str, torch.Tensor]]:
        history = []
        for step in range(STEPS):
            side.backward(step)
            side.step()
            history.append(values(side.model))
        return history

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(train, _sides(workers, recipe, optimizer, **options)))


def _mean_clipped(recipe: Recipe, factory: Any) -> Iterator[dict[str, torch.Tensor]]:
    """One process: the mean of the workers' gradients, in rank order, clipped by torch."""
    sides = [Side(rank, recipe, lambda m: factory(m.parameters())) for rank in range(WORKERS)]
    main = sides[0]
    for step in range(STEPS):
        found = []
        for side in sides:
            side.model.load_state_dict(main.model.state_dict())
            side.backward(step)
            found.append(side.unscaled())
        taking_part = [gradients for gradients in found if gradients is not None]
        for name, parameter in main.model.named_parameters():
            given = [gradients[name] for gradients in taking_part if name in gradients]
            total = sum(given[1:], given[0].clone()) if given else None
            parameter.grad = None if total is None else total * (1.0 / len(taking_part))
        clip_grad_norm_(main.model.parameters(), MAX_NORM)
        main.optimizer.step()
        main.schedule.step()
        for side in sides:
            side.scaler.update()
        yield values(main.model)


@pytest.mark.parametrize("block_elements", [64, 512])
@pytest.mark.parametrize("kind", RECIPES)
def test_aggregate_clips_the_mean_as_one_process(
    workers: list[ps.Client], kind: str, block_elements: int
) -> None:
    recipe = RECIPES[kind]
    histories = _train_together(
        workers, recipe, ps.Aggregate(MOMENTUM), block_elements=block_elements
    )
    for step, expected in enumerate(_mean_clipped(recipe, MOMENTUM)):
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


@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
@pytest.mark.parametrize("kind", RECIPES)
def test_without_bsp_each_worker_clips_its_own(
    workers: list[ps.Client], kind: str, consistency: str
) -> None:
    recipe = RECIPES[kind]
    sides = _sides(workers, recipe, ps.SGD(lr=0.1, momentum=0.9), consistency=consistency)
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


@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
@pytest.mark.parametrize("kind", RECIPES)
def test_local_optimizers_clip_their_own(
    workers: list[ps.Client], kind: str, consistency: str
) -> None:
    recipe = RECIPES[kind]
    sides = _sides(workers, recipe, ps.Add(MOMENTUM), consistency=consistency)
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


@pytest.mark.parametrize("kind", RECIPES)
def test_the_mean_of_moves_that_were_clipped(workers: list[ps.Client], kind: str) -> None:
    recipe = RECIPES[kind]
    histories = _train_together(workers, recipe, ps.Add(MOMENTUM))
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
    make = _ours(client, Recipe(), optimizer, f"clip-{next(_names)}", **options)
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


def test_half_precision_counts_in_single(workers: list[ps.Client]) -> None:
    """The norm of these gradients is no float16."""
    model = torch.nn.Linear(64, 16, bias=False, dtype=torch.float16)
    torch.nn.init.zeros_(model.weight)
    make = _ours(workers[0], Recipe(), ps.SGD(lr=1.0), f"clip-{next(_names)}", consistency="asp")
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
    sides = _sides(workers, Recipe(), ps.Aggregate(MOMENTUM), allow_non_finite=True)

    def train(side: Side) -> None:
        side.backward(0)
        if side.rank == 1:
            side.model.gain.grad.fill_(float("nan"))
        side.step()

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(train, sides))
    for side in sides:
        assert all(value.isnan().all() for value in values(side.model).values())


def test_the_norm_is_the_same_wherever_gradients_lie(workers: list[ps.Client]) -> None:
    """Sums in the order of memory have other last bits in another order: worker 1's is columns."""
    factory = partial(torch.optim.SGD, lr=1.0)
    models = [torch.nn.Linear(331, 257, bias=False) for _ in workers]
    name = f"clip-{next(_names)}"
    optimizers = [
        _ours(client, Recipe(), ps.Aggregate(factory), name)(model)
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
        ({"consistency": "bsp"}, r"clip_norm is 0\.25 with SGD under bsp: .* Use Aggregate, "),
        ({"consistency": "bsp"}, r"or torch\.nn\.utils\.clip_grad_norm_ .* before the mean"),
        ({"consistency": "bsp:backup=1"}, "with SGD under bsp:backup=1"),
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


def test_changes_keep_the_rule(workers: list[ps.Client]) -> None:
    model, optimizer = _one(workers[0], ps.SGD(lr=0.1), consistency="asp")
    with pytest.raises(ps.InvalidConfig, match="with SGD under bsp"):
        optimizer.set_consistency("bsp")
    assert str(workers[0].consistency_of(_table(workers[0], optimizer))) == "asp"
    assert optimizer.set_consistency("ssp:3") >= 0
    _backward(model)
    optimizer.step()
    reference = seeded(Branched)
    _backward(reference)
    clip_grad_norm_(reference.parameters(), MAX_NORM)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert differing(values(model), values(reference)) == []


def test_add_may_change_into_bsp(workers: list[ps.Client]) -> None:
    sides = _sides(workers, Recipe(), ps.Add(MOMENTUM), consistency="asp")
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


def test_somebody_elses_change_is_refused_before_anything_is_sealed(
    workers: list[ps.Client],
) -> None:
    model, optimizer = _one(workers[0], ps.SGD(lr=0.1), consistency="asp")
    table = _table(workers[0], optimizer)
    _change(workers, table, "bsp")
    _backward(model)
    with pytest.raises(ps.InvalidConfig, match="with SGD under bsp"):
        optimizer.step()
    assert table.clock == 0
    _change(workers, table, "asp")
    optimizer.step()
    assert table.clock == 1


def _table(client: ps.Client, optimizer: ps.DistributedOptimizer) -> ps.TableHandle:
    (name,) = [n for n in client.progress().clocks if n.startswith(f"{optimizer._options.name}/")]
    return client.table(name)


def _change(workers: Sequence[ps.Client], table: ps.TableHandle, setting: str) -> None:
    """Worker 1 changes it; returns when worker 0 knows."""
    workers[1].set_consistency(table.name, setting)
    give_up_s = time.monotonic() + DEADLINE_S
    while str(workers[0].consistency_of(table)) != setting:
        assert time.monotonic() < give_up_s
