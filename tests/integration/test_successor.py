"""A worker takes the place of one that was killed: it joins every table where the others are."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker as ps
from ps_core.errors import JoinRefused
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until
from tests.integration.test_worker_gone import (
    DEADLINE_S,
    PATIENCE,
    VICTIM,
    WORKERS,
    Victim,
    gradient,
    living,
    table,
    take_steps,
    victim,
)

pytestmark = pytest.mark.thorough

STEPS = 12


@pytest.fixture
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=2, workers=WORKERS, environment=PATIENCE) as running:
        yield running


def _gone(client: ps.Client) -> bool:
    """Whether the client's view says that a worker is gone."""
    return any(node.state.value == "gone" for node in client.engine.view.nodes)


def _successor(cluster: LaneCluster, rank: int | None = None) -> ps.Client:
    client = ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
    assert client.is_replacement
    return client


@pytest.mark.parametrize(
    ("consistency", "lane"), [("bsp", "shm"), ("ssp:1", "grpc"), ("asp", "shm")]
)
def test_it_trains_on_with_the_others(cluster: LaneCluster, consistency: str, lane: str) -> None:
    with (
        victim(cluster, lane, consistency, take_steps) as dead,
        living(cluster) as clients,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        handles = [table(client, consistency) for client in clients]
        target: list[int] = []

        def go_on(index: int) -> list[float]:
            """Step until all are where the successor will end; the first value after each."""
            found = []
            while not target or handles[index].clock < target[0]:
                values = clients[index].push_pull(handles[index], gradient(clients[index].rank))
                if target and consistency == "bsp":
                    assert len(np.unique(values)) == 1, "one state in all ranges"
                found.append(float(np.asarray(values)[0]))
            return found

        others = [pool.submit(go_on, index) for index in range(2)]
        dead.hear()
        dead.signal(signal.SIGKILL)
        until(lambda: _gone(clients[0]), "the victim is gone")
        late = _successor(cluster)
        assert late.rank == VICTIM
        clients.append(late)
        handles.append(table(late, consistency))
        at_start = np.asarray(late.pull(handles[2]))
        begun = handles[2].clock
        assert begun >= 2, "it begins where the others are"
        target.append(begun + STEPS)
        found = go_on(2)
        for other in others:
            other.result(DEADLINE_S)
        assert len(found) == STEPS
        late.close(leave=False)
        clients.remove(late)
    mean = -float(gradient(0)[0] + gradient(1)[0] + gradient(2)[0]) / WORKERS
    if consistency == "bsp":  # its steps are in every update since
        assert len(np.unique(at_start)) == 1, "one state in all ranges"
        assert np.all(np.diff([at_start[0], *found]) == mean)


NEVER_GIVEN_UP = {"PUSHPULL_LEASE_S": "60", "PUSHPULL_WORKER_TIMEOUT_S": "0"}


def take_steps_as(
    identity: str, address: str, lane: str, consistency: str, pipe: Connection
) -> None:
    """A worker process that says which rank it has and where it begins, and takes steps without
    end; it says so much of them as a pipe that nobody reads can hold.
    """
    client = ps.connect(address, identity=identity, lane=lane, request_deadline_s=DEADLINE_S)
    handle = table(client, consistency)
    client.pull(handle)
    begun = handle.clock
    pipe.send((client.rank, client.is_replacement, begun))
    while True:
        client.push_pull(handle, gradient(client.rank))
        if handle.clock <= begun + STEPS:
            pipe.send(handle.clock)


def test_who_is_started_again_with_its_identity_waits_for_no_lease() -> None:
    """The scheduler declares nobody gone by itself here: without one they would stand for ever."""

    def comes(number: int) -> AbstractContextManager[Victim]:
        return victim(standing, "auto", "bsp", functools.partial(take_steps_as, f"pod-{number}"))

    with (
        lane_cluster(servers=2, workers=2, environment=NEVER_GIVEN_UP) as standing,
        comes(0) as other,
    ):
        with comes(1) as dead:
            ranks = [each.hear()[0] for each in (other, dead)]
            assert sorted(ranks) == [0, 1]
            assert dead.hear() == 1
            dead.signal(signal.SIGKILL)
        with comes(1) as again:
            rank, is_replacement, begun = again.hear()
            assert (rank, is_replacement) == (ranks[1], True)
            assert begun >= 1, "it begins where the other is"
            steps = [again.hear() for _ in range(STEPS)]
            assert steps == list(range(begun + 1, begun + 1 + STEPS))


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    )


def _optimizer(client: ps.Client, model: torch.nn.Module) -> ps.DistributedOptimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    return ps.DistributedOptimizer(
        client,
        groups,
        ps.SGD(lr=0.1),
        module=model,
        buffers="mean",
        block_elements=64,
    )


class Trainer:
    """A training loop as users write it, that can begin in the middle."""

    def __init__(self, client: ps.Client) -> None:
        self.client = client
        self.model = _model()
        self.optimizer = _optimizer(client, self.model)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 / (1 + step), last_epoch=self.optimizer.clock - 1
        )

    def step(self) -> int:
        draw = torch.Generator().manual_seed(1000 * self.client.rank + self.optimizer.clock)
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 6, generator=draw)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        return self.optimizer.clock

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def _with_another_layer(trainer: Trainer) -> torch.Tensor:
    """The layer's weights as all workers have them: rank 0's, which are its rank."""
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(layer.weight, float(trainer.client.rank))
    trainer.optimizer.add_param_group({"params": layer.parameters()})
    return layer.weight.detach().clone()


def train_as_rank_0(address: str, lane: str, _: str, pipe: Connection) -> None:
    """A worker process that gives the first values, and then takes steps."""
    client = ps.connect(address, rank=0, lane=lane, request_deadline_s=DEADLINE_S)
    try:
        trainer = Trainer(client)
        while True:
            pipe.send(trainer.step())
    finally:
        os._exit(0)


def test_even_rank_0_is_replaced_and_the_models_stay_equal(cluster: LaneCluster) -> None:
    """BSP with BatchNorm, two groups of parameters and a schedule that all must agree on."""
    with (
        victim(cluster, "auto", "", train_as_rank_0) as dead,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        clients = [
            ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S) for rank in (1, 2)
        ]
        trainers = list(pool.map(Trainer, clients))
        target: list[int] = []

        def go_on(trainer: Trainer) -> None:
            while not target or trainer.optimizer.clock < target[0]:
                trainer.step()

        running = [pool.submit(go_on, trainer) for trainer in trainers]
        assert dead.hear() >= 1
        dead.signal(signal.SIGKILL)
        until(lambda: _gone(clients[0]), "the victim is gone")
        late = _successor(cluster, rank=0)
        trainers.append(Trainer(late))
        assert trainers[2].optimizer.clock >= 1
        target.append(trainers[2].optimizer.clock + 5)
        go_on(trainers[2])
        for ending in running:
            ending.result(DEADLINE_S)
        first, *others = [trainer.state() for trainer in trainers]
        for other in others:
            for name, value in first.items():
                assert torch.equal(value, other[name]), name
        # Of a table that is made from now on it has the initial values, as any rank 0.
        grown = list(pool.map(_with_another_layer, trainers))
        for weight in grown:
            assert torch.equal(weight, torch.zeros(1, 2))
        for client in [*clients, late]:
            client.close(leave=False)


def test_what_only_the_workers_have_cannot_be_taken_over(cluster: LaneCluster) -> None:
    with victim(cluster, "auto", "asp", take_steps) as dead, living(cluster) as clients:
        dead.hear()
        dead.signal(signal.SIGKILL)
        until(lambda: _gone(clients[0]), "the victim is gone")
        late = _successor(cluster)
        optimizer = ps.Aggregate(functools.partial(torch.optim.SGD, lr=0.1))
        with pytest.raises(JoinRefused, match=r"with Aggregate .* start all workers again"):
            ps.DistributedOptimizer(late, _model(), optimizer)
        late.close(leave=False)
