"""`clip_norm` under BSP with optimizers of the servers: the norm over what all servers reduced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker as ps
from tests.integration.clipped_training import (
    DEADLINE_S,
    MAX_NORM,
    MOMENTUM,
    RECIPES,
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

SGD = ps.SGD(lr=0.1, momentum=0.9)


def connected(cluster: ps.LocalCluster, count: int, **options: Any) -> list[ps.Client]:
    return [
        ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S, **options)
        for rank in range(count)
    ]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        clients = connected(cluster, WORKERS)
        yield clients
        for client in clients:
            client.close(leave=False)


def together(sides: Sequence[Side], steps: int) -> None:
    def train(side: Side) -> None:
        for step in range(steps):
            side.backward(step)
            side.step()

    with ThreadPoolExecutor(len(sides)) as threads:
        list(threads.map(train, sides))


def exactly(parameters: Iterator[torch.Tensor]) -> None:
    """Clips by the norm as it is, to the last bit of a float64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = [np.square(g.numpy().astype(np.float64)).ravel() for g in gradients]
    norm = math.sqrt(math.fsum(np.concatenate(squares))) if squares else 0.0
    for gradient in gradients:
        gradient.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", RECIPES)
def test_the_mean_is_clipped_as_in_one_process(workers: list[ps.Client], kind: str) -> None:
    """With accumulation, schedules, and a worker that overflows."""
    recipe = RECIPES[kind]
    histories = train_together(workers, recipe, SGD)
    for step, expected in enumerate(mean_clipped(recipe, MOMENTUM, exactly)):
        for history in histories:
            assert differing(history[step], expected) == [], step
    torchs = list(mean_clipped(recipe, MOMENTUM))
    for name, value in torchs[-1].items():
        torch.testing.assert_close(histories[0][-1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("lane", ["grpc", "shm"])
def test_servers_blocks_and_lanes_change_no_bit(lane: str) -> None:
    """Blocks to the precision of a float64, which these gradients do not feel."""
    ends = []
    for servers, block_elements in ((1, 512), (3, 64)):
        with ps.local_cluster(servers=servers, workers=WORKERS) as cluster:
            clients = connected(cluster, WORKERS, lane=lane)
            histories = train_together(
                clients, RECIPES["plain"], SGD, block_elements=block_elements
            )
            for client in clients:
                client.close(leave=False)
        assert differing(histories[0][-1], histories[1][-1]) == []
        ends.append(histories[0][-1])
    assert differing(*ends) == []


def test_one_norm_over_all_groups(workers: list[ps.Client]) -> None:
    """Each group is a table, with a rate of its own."""

    def optimizer(side_of: int, model: Any, name: str) -> Any:
        heads = [*model.last.parameters()]
        rest = [p for p in model.parameters() if all(p is not h for h in heads)]
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": heads, "lr": 0.01}]
        return ps.DistributedOptimizer(
            workers[side_of], groups, SGD, module=model, name=name, clip_norm=MAX_NORM,
            kernels="exact",
        )  # fmt: skip

    name = f"clip-{next(names)}"
    models = [seeded(Branched) for _ in workers]

    def train(rank: int) -> float:
        mine = optimizer(rank, models[rank], name)
        models[rank](next(batches(1))).square().mean().backward()
        mine.step()
        norm = mine.gradient_norm
        assert isinstance(norm, float)
        return norm

    with ThreadPoolExecutor(WORKERS) as threads:
        found = list(threads.map(train, range(WORKERS)))
    reference: Any = seeded(Branched)
    reference(next(batches(1))).square().mean().backward()
    expected = torch.nn.utils.get_total_norm(p.grad for p in reference.parameters())
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected.item(), rel=1e-6)
    assert differing(*map(values, models)) == []


def test_a_backup_worker_may_be_left_out_and_none_is_stuck(workers: list[ps.Client]) -> None:
    """Each range may leave out another; so those who came too late are told the squares too."""
    sides = sides_of(workers, Recipe(), SGD, consistency="bsp:backup=1")

    def train(side: Side) -> int:
        for step in range(6):
            side.backward(step)
            side.step()
        return int(side.optimizer.clock)

    with ThreadPoolExecutor(WORKERS) as threads:
        clocks = list(threads.map(train, sides))
    assert max(clocks) >= 6
    assert all(value.isfinite().all() for side in sides for value in values(side.model).values())


def next_name() -> str:
    return f"clip-{next(names)}"


@pytest.mark.thorough
@pytest.mark.parametrize("change", [("asp", "bsp"), ("bsp", "ssp:2"), ("bsp", "asp:divide")])
def test_no_step_is_longer_whatever_the_setting_becomes(
    workers: list[ps.Client], change: tuple[str, str]
) -> None:
    """The seal says what both need, so no worker has to know the setting of its clock."""
    before, after = change
    model_before = values(seeded(Branched))
    sides = sides_of(workers, Recipe(), ps.SGD(lr=1.0), consistency=before)
    steps = 6

    def train(side: Side) -> None:
        for step in range(steps):
            if (step, side.rank) == (2, 0):
                side.optimizer.set_consistency(after)
            side.optimizer.zero_grad()
            x = next(batches(1, rank=side.rank))
            (side.model(x).square().mean() * 1e6).backward()
            side.optimizer.step()

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(train, sides))
    moved = [values(sides[0].model)[name] - value for name, value in model_before.items()]
    longest = steps * WORKERS * MAX_NORM
    assert 0 < torch.nn.utils.get_total_norm(moved).item() <= longest * 1.001


def test_where_such_are_allowed_beside_a_nan_all_is_nan(workers: list[ps.Client]) -> None:
    sides = sides_of(workers, Recipe(), ps.SGD(lr=1.0), allow_non_finite=True)

    def train(side: Side) -> None:
        side.backward(0)
        if side.rank == 1:
            side.model.gain.grad.fill_(math.nan)
        side.optimizer.step()

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(train, sides))
    for side in sides:
        assert all(value.isnan().all() for value in values(side.model).values())


def test_a_worker_that_clips_by_another_norm_is_named(workers: list[ps.Client]) -> None:
    """The first word is applied; the other worker is told, and whom it contradicts."""
    name = next_name()
    sides = [
        Side(rank, Recipe(), ours(client, Recipe(), SGD, name, clip_norm=0.1 * (rank + 1)))
        for rank, client in enumerate(workers)
    ]

    def train(side: Side) -> str:
        side.backward(0)
        try:
            side.optimizer.step()
        except ps.InvalidConfig as error:
            return error.message
        return ""

    with ThreadPoolExecutor(WORKERS) as threads:
        words = "".join(threads.map(train, sides))
    assert "disagree about the scale of update 1" in words
    assert "do they clip by the same norm?" in words


def test_by_hand(workers: list[ps.Client]) -> None:
    """What a client in another language does."""

    def train(client: ps.Client) -> tuple[float, list[float]]:
        name = f"by-hand-{by_hand}"
        table = client.create_table(name, 96, optimizer=ps.SGD(lr=1.0), block_elements=64)
        client.push(table, np.full(96, 2.0, np.float32), seal=False)
        told = client.wait(client.seal(table, clip_scale=1.0))
        assert told.squares == {0: 4.0 * 64, 1: 4.0 * 32}
        client.wait(client.scale_update(table, told.clock, 0.25))
        return sum(told.squares.values()), client.pull(table).tolist()

    by_hand = next(names)
    with ThreadPoolExecutor(WORKERS) as threads:
        for squares, pulled in threads.map(train, workers):
            assert squares == 4.0 * 96
            assert pulled == [-0.5] * 96
