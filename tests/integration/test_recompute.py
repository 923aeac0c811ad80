"""What is too stale is computed anew by `step(closure)`: rejected blocks alone, equal to a twin.

Worker 0 trains. While it computes worker 1 moves some blocks, so that those are too stale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_worker.transport.metrics import MEASURES
from tests.integration.training_models import BLOCK, seeded

pytestmark = pytest.mark.slow

PEER_GRADIENT = 0.25
DEADLINE_S = 20.0

Blocks = Sequence[int]
_names = count()


class Spread(nn.Module):
    """448 elements in 7 blocks: `long` has 0 to 3, the last of which it shares with `short`;
    `wide` has 4 and 5, `sometimes` 6. The gradient is another one at other values.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.long = nn.Parameter(torch.randn(220))
        self.short = nn.Parameter(torch.randn(36))
        self.wide = nn.Parameter(torch.randn(2, 64))
        self.sometimes = nn.Parameter(torch.randn(64))

    def forward(self, *, is_long: bool) -> torch.Tensor:
        loss = self.long.pow(3).mean() + self.short.cos().sum() * self.long.sum().tanh()
        loss = loss + self.wide.square().sum() * 0.1
        return loss + self.sometimes.exp().mean() if is_long else loss


class Twin:
    """The same in one process, block by block: each is a parameter of a torch optimizer."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model: Any = seeded(Spread)
        self.model.load_state_dict(model.state_dict())
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self.blocks = [nn.Parameter(part.clone()) for part in flat.split(BLOCK)]
        self.optimizer = make(self.blocks)

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([block.detach() for block in self.blocks])

    def gradient(
        self, *, is_long: bool = True, max_norm: float | None = None
    ) -> dict[int, torch.Tensor]:
        """Of every block that has one, at the present values."""
        with torch.no_grad():
            sizes = [p.numel() for p in self.model.parameters()]
            for p, part in zip(self.model.parameters(), self.flat.split(sizes), strict=True):
                p.copy_(part.view_as(p))
        self.model.zero_grad()
        self.model(is_long=is_long).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        found = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return dict(enumerate(torch.cat(found).split(BLOCK)))

    def apply(self, gradient: dict[int, torch.Tensor], blocks: Blocks | None = None) -> None:
        """One update of those blocks."""
        for number, block in enumerate(self.blocks):
            is_in = number in gradient and (blocks is None or number in blocks)
            block.grad = gradient[number].clone() if is_in else None
        self.optimizer.step()

    def disturb(self, blocks: Blocks) -> None:
        for block in blocks:
            self.apply({block: torch.full_like(self.blocks[block], PEER_GRADIENT)})


class Scene:
    """Worker 0's model, and worker 1 who gets in between."""

    def __init__(self, workers: Sequence[ps.Client], optimizer: Any, **options: Any) -> None:
        self.workers = workers
        self.name = f"spread-{next(_names)}"
        self.model: Any = seeded(Spread)
        self.evaluation_count = 0
        given = options.pop("groups", lambda model: model)(self.model)
        self.optimizer = ps.DistributedOptimizer(
            workers[0],
            given,
            optimizer,
            **{
                "name": self.name,
                "consistency": "asp:reject=0",
                "kernels": "exact",
                "block_elements": BLOCK,
                **options,
            },
        )

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def disturb(self, blocks: Blocks, table: str = "0/float32") -> None:
        """Worker 1 moves blocks; it is done when this returns."""
        peer = self.workers[1]
        handle = peer.table(f"{self.name}/{table}")
        for block in blocks:
            gradient = np.full(BLOCK, PEER_GRADIENT, np.float32)
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            peer.wait(peer.push(handle, gradient, slice=part))

    def closure(self, *disturbances: Blocks, is_long: bool = True) -> Callable[[], float]:
        """The n-th evaluation finds that worker 1 has moved the n-th blocks; the last go on."""

        def evaluate() -> float:
            if disturbances:
                self.disturb(disturbances[min(self.evaluation_count, len(disturbances) - 1)])
            self.evaluation_count += 1
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(is_long=is_long)
            loss.backward()
            return loss.item()

        return evaluate

    def clocks(self) -> dict[str, int]:
        clocks = self.workers[0].progress().clocks
        prefix = f"{self.name}/"
        return {n.removeprefix(prefix): c for n, c in clocks.items() if n.startswith(prefix)}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=2) as cluster:
        clients = [
            ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
            for rank in range(2)
        ]
        yield clients
        for client in clients:
            client.close(leave=False)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (ps.SGD(lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adam": (ps.Adam(lr=0.05), partial(torch.optim.Adam, lr=0.05)),
}


@pytest.mark.parametrize("mode", ["sealed", "eager"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_rejected_blocks_alone_are_computed_anew(
    workers: list[ps.Client], kind: str, mode: str
) -> None:
    ours, theirs = OPTIMIZERS[kind]
    scene = Scene(workers, ours, mode=mode)
    twin = Twin(scene.model, theirs)

    stale = (1, 4)  # the middle of `long`, and a half of `wide`
    first = twin.gradient()
    loss = scene.optimizer.step(scene.closure(stale, ()))
    twin.disturb(stale)
    twin.apply(first, [0, 2, 3, 5, 6])
    twin.apply(twin.gradient(), stale)
    assert torch.equal(scene.flat, twin.flat)
    assert scene.evaluation_count == 2
    (result,) = scene.optimizer.results
    assert (result.rejected, result.round_count, result.clock) == ((), 1, 2)
    assert (result.applied, result.staleness) == (True, 1)
    assert loss == seeded(Spread)(is_long=True).item(), "the loss is that of the first evaluation"

    for is_long in (False, True):  # whole steps again; tensors may be left out
        scene.optimizer.step(scene.closure(is_long=is_long))
        twin.apply(twin.gradient(is_long=is_long))
        assert torch.equal(scene.flat, twin.flat)
    assert scene.optimizer.results[0].round_count == 0
    assert scene.clocks() == {"0/float32": 4}


@pytest.mark.parametrize("mode", ["sealed", "eager"])
def test_what_is_too_stale_again_has_another_round(workers: list[ps.Client], mode: str) -> None:
    """Block 3 has two tensors; block 6 is moved in a round that has no part of it."""
    scene = Scene(workers, ps.SGD(lr=0.1), mode=mode)
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    first = twin.gradient()
    scene.optimizer.step(scene.closure((0, 3, 5), (3, 6), ()))
    twin.disturb((0, 3, 5))
    twin.apply(first, [1, 2, 4, 6])
    second = twin.gradient()
    twin.disturb((3, 6))
    twin.apply(second, [0, 5])
    twin.apply(twin.gradient(), [3])
    assert torch.equal(scene.flat, twin.flat)
    (result,) = scene.optimizer.results
    assert (result.rejected, result.round_count, result.clock) == ((), 2, 3)


def test_a_tensor_that_has_no_gradient_any_more_is_left_alone(workers: list[ps.Client]) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1, weight_decay=0.1))
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1, weight_decay=0.1))
    first = twin.gradient()
    whole, short = scene.closure((4, 6), ()), scene.closure((4, 6), (), is_long=False)
    scene.optimizer.step(lambda: (short if scene.evaluation_count else whole)())
    twin.disturb((4, 6))
    twin.apply(first, [0, 1, 2, 3, 5])
    twin.apply(twin.gradient(is_long=False), [4, 6])  # 6 has none
    assert torch.equal(scene.flat, twin.flat)
    assert scene.optimizer.results[0].rejected == ()


@pytest.mark.parametrize("recompute", [0, 2])
def test_rounds_come_to_an_end(workers: list[ps.Client], recompute: int) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1), recompute=recompute)
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    first = twin.gradient()
    before = _counted()
    scene.optimizer.step(scene.closure((2,)))
    twin.disturb([2] * (1 + recompute))
    twin.apply(first, [0, 1, 3, 4, 5, 6])
    assert torch.equal(scene.flat, twin.flat), "what was given up is in nowhere"
    assert scene.evaluation_count == 1 + recompute
    (result,) = scene.optimizer.results
    assert (result.rejected, result.round_count) == ((2,), recompute)
    assert (result.applied, result.clock) == (True, 1 + recompute)
    assert _counted() == (before[0] + recompute, before[1] + 1)


def _counted() -> tuple[float, float]:
    found = {
        sample.name: sample.value
        for metric in (MEASURES.recomputed_blocks, MEASURES.abandoned_blocks)
        for family in metric.collect()
        for sample in family.samples
    }
    return (
        found["pushpull_worker_recomputed_blocks_total"],
        found["pushpull_worker_abandoned_blocks_total"],
    )


def test_without_a_closure_nothing_is_computed_anew(workers: list[ps.Client]) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1))
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    first = twin.gradient()
    scene.closure((2,))()
    scene.optimizer.step()
    twin.disturb((2,))
    twin.apply(first, [0, 1, 3, 4, 5, 6])
    assert torch.equal(scene.flat, twin.flat)
    (result,) = scene.optimizer.results
    assert (result.rejected, result.round_count, result.clock) == ((2,), 0, 1)
    assert scene.evaluation_count == 1


def test_all_tables_of_a_model_keep_step(workers: list[ps.Client]) -> None:
    """Tables without rejected blocks, a frozen one, and buffers."""
    scene = Scene(
        workers,
        ps.SGD(lr=0.1, momentum=0.9),
        groups=_frozen_and_trained,
        module=_Seen(),
    )
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    first = {n: g for n, g in twin.gradient().items() if n != 6}
    scene.optimizer.step(scene.closure((1,), ()))
    twin.disturb((1,))
    twin.apply(first, [0, 2, 3, 4, 5])
    twin.apply(twin.gradient(), [1])  # the other tables have moved once
    assert torch.equal(scene.flat, twin.flat)
    # The one that sleeps stays behind by the steps that it slept, at every worker.
    expected = {"0/float32": 2, "1/float32": 2, "2/float32/frozen": 1, "buffers/float32": 2}
    assert scene.clocks() == expected
    scene.model.sometimes.requires_grad_(True)
    scene.optimizer.step(scene.closure())
    twin.apply(twin.gradient())
    assert torch.equal(scene.flat, twin.flat)
    assert scene.clocks() == {name: clock + 1 for name, clock in expected.items()}


def _frozen_and_trained(model: Any) -> list[dict[str, Any]]:
    model.sometimes.requires_grad_(False)
    return [
        {"params": [model.long, model.short]},
        {"params": [model.wide]},
        {"params": [model.sometimes]},
    ]


class _Seen(nn.Module):
    """Something with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


def test_a_group_that_is_added_after_a_round_keeps_step(workers: list[ps.Client]) -> None:
    """Steps since it was added, and all rounds: else workers' tables would drift apart."""
    scene = Scene(
        workers, ps.SGD(lr=0.1), groups=lambda model: [{"params": [model.long, model.short]}]
    )
    for evaluation in range(2):
        scene.evaluation_count = 0
        scene.optimizer.step(scene.closure((evaluation,), ()))
    assert scene.clocks() == {"0/float32": 4}
    scene.optimizer.add_param_group({"params": [scene.model.wide]})
    assert scene.clocks() == {"0/float32": 4, "1@2/float32": 0}
    scene.evaluation_count = 0
    scene.optimizer.step(scene.closure((0, 1, 2), ()))
    assert scene.clocks() == {"0/float32": 6, "1@2/float32": 4}


def test_schedules_count_calls_and_not_rounds(workers: list[ps.Client]) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1))
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        for optimizer in (scene.optimizer, twin.optimizer)
    ]
    for _ in range(3):
        scene.evaluation_count = 0
        first = twin.gradient()
        scene.optimizer.step(scene.closure((1,), ()))
        # Worker 1 pushes at the table's own rate, whatever worker 0's schedule says.
        with torch.no_grad():
            twin.blocks[1].sub_(torch.full_like(twin.blocks[1], PEER_GRADIENT) * 0.1)
        twin.apply(first, [0, 2, 3, 4, 5, 6])
        twin.apply(twin.gradient(), [1])
        assert torch.equal(scene.flat, twin.flat)
        for schedule in schedules:
            schedule.step()


def test_a_round_is_clipped_by_the_norm_of_the_whole_gradient(workers: list[ps.Client]) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1), clip_norm=0.5)
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    first = twin.gradient(max_norm=0.5)
    scene.optimizer.step(scene.closure((1,), ()))
    twin.disturb((1,))
    twin.apply(first, [0, 2, 3, 4, 5, 6])
    twin.apply(twin.gradient(max_norm=0.5), [1])
    assert torch.equal(scene.flat, twin.flat)


def test_local_optimizers_forget_the_move_that_was_rejected(workers: list[ps.Client]) -> None:
    """ADD: both blocks of `wide` are rejected; its momentum knows the second gradient alone."""
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    scene = Scene(workers, ps.Add(factory))
    reference: Any = seeded(Spread)
    theirs = factory(reference.parameters())

    def step(*, of_wide: bool) -> None:
        reference.zero_grad()
        reference(is_long=True).backward()
        for parameter in reference.parameters():
            if (parameter is reference.wide) != of_wide:
                parameter.grad = None
        theirs.step()

    for _ in range(3):
        scene.evaluation_count = 0
        scene.optimizer.step(scene.closure((4, 5), ()))
        step(of_wide=False)
        with torch.no_grad():
            reference.wide.add_(PEER_GRADIENT)  # worker 1's move is added
        step(of_wide=True)
        for mine, other in zip(scene.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert scene.optimizer.results[0].round_count == 1
    assert scene.model.long.grad is not None, "gradients are there as the closure left them"


def test_a_gradient_that_is_not_finite_ends_the_round(workers: list[ps.Client]) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1))
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    first = twin.gradient()
    whole = scene.closure((1,), ())

    def evaluate() -> float:
        loss = whole()
        if scene.evaluation_count == 2:
            scene.model.long.grad[70] = float("nan")
        return loss

    with pytest.raises(ps.InvalidTensor, match=r"'long' has an infinity or a NaN at step 2"):
        scene.optimizer.step(evaluate)
    twin.disturb((1,))
    twin.apply(first, [0, 2, 3, 4, 5, 6])
    assert torch.equal(scene.flat, twin.flat)
    assert scene.optimizer.results[0].rejected == (1,)
    scene.optimizer.step(whole)
    twin.apply(twin.gradient())
    assert torch.equal(scene.flat, twin.flat)


def test_a_closure_that_raises_leaves_whole_steps(workers: list[ps.Client]) -> None:
    scene = Scene(workers, ps.SGD(lr=0.1))
    twin = Twin(scene.model, partial(torch.optim.SGD, lr=0.1))
    first = twin.gradient()
    whole = scene.closure((1, 6), ())

    def evaluate() -> float:
        loss = whole()
        if scene.evaluation_count == 2:
            raise ArithmeticError("the second time")
        return loss

    with pytest.raises(ArithmeticError):
        scene.optimizer.step(evaluate)  # by then block 1 has left again
    twin.disturb((1, 6))
    twin.apply(first, [0, 2, 3, 4, 5])
    assert torch.equal(scene.flat, twin.flat)
    scene.closure(is_long=False)()
    scene.optimizer.step()
    twin.apply(twin.gradient(is_long=False))
    assert torch.equal(scene.flat, twin.flat)


def test_nothing_is_computed_anew_on_the_way_into_bsp(workers: list[ps.Client]) -> None:
    """A step of some blocks would stand for a whole one in everybody's update."""
    scene = Scene(workers, ps.SGD(lr=0.1))
    whole = scene.closure((1,))
    table = workers[0].table(f"{scene.name}/0/float32")

    def evaluate() -> float:
        loss = whole()
        assert workers[1].set_consistency(table.name, "bsp") == 1
        give_up_s = time.monotonic() + DEADLINE_S
        while str(workers[0].consistency_of(table)) != "bsp":
            assert time.monotonic() < give_up_s
        return loss

    scene.optimizer.step(evaluate)
    (result,) = scene.optimizer.results
    assert (result.rejected, result.round_count, result.clock) == ((1,), 0, 1)


def test_a_scaler_has_no_closures(workers: list[ps.Client]) -> None:
    """It has looked for overflows before the closure is called; torch refuses it by keyword."""
    scene = Scene(workers, ps.SGD(lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(scene.model(is_long=True)).backward()
    with pytest.raises(ps.InvalidConfig, match=r"GradScaler\.step was given a closure"):
        scaler.step(scene.optimizer, scene.closure())
    assert scene.evaluation_count == 0


@pytest.mark.parametrize("recompute", [-1, 65])
def test_the_number_of_rounds_has_bounds(workers: list[ps.Client], recompute: int) -> None:
    with pytest.raises(ps.InvalidConfig, match=f"recompute is {recompute}; expected 0 to 64"):
        Scene(workers, ps.SGD(lr=0.1), recompute=recompute)
