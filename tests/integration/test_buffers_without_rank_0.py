"""Rank 0, whose buffers all have, has left or is gone: another worker's take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ps_worker as ps
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until

DEADLINE_S = 45.0
HOW = {"leaves": ps.Client.leave, "dies": lambda client: client.abandon("it died")}


@pytest.fixture
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=1, workers=3) as running:
        yield running


class Trainer:
    """Its inputs have its rank as their mean, so its running statistics tell of it."""

    def __init__(self, client: ps.Client, consistency: str) -> None:
        torch.manual_seed(0)
        self.client, self.consistency = client, consistency
        self.norm = torch.nn.BatchNorm1d(3, momentum=0.5)
        self.optimizer = ps.DistributedOptimizer(
            client, self.norm, ps.SGD(lr=0.01), consistency=consistency
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.norm(torch.randn(16, 3) + 10.0 * self.client.rank).sum().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def mean(self) -> float:
        assert self.norm.running_mean is not None
        return float(self.norm.running_mean.mean())


def _is_gone(client: ps.Client, seen_by: ps.Client) -> bool:
    return not seen_by.engine.view.nodes_by_id[client.session.node_id].state.is_member


def _each(pool: ThreadPoolExecutor, trainers: list[Trainer], count: int) -> None:
    for ending in [pool.submit(trainer.steps, count) for trainer in trainers]:
        ending.result(DEADLINE_S)


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["bsp", "ssp:1"])
@pytest.mark.parametrize("end", HOW.values(), ids=HOW)
def test_the_lowest_rank_that_is_there_gives_them(
    cluster: LaneCluster, end: Callable[[ps.Client], object], consistency: str
) -> None:
    def connected(rank: int) -> ps.Client:
        return ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)

    clients = [connected(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        trainers = list(pool.map(lambda client: Trainer(client, consistency), clients))
        _each(pool, trainers, 3)
        assert all(abs(trainer.mean) < 2 for trainer in trainers)
        end(clients[0])
        until(lambda: all(_is_gone(clients[0], each) for each in clients[1:]), "the others know")
        _each(pool, trainers[1:], 12)
        assert all(trainer.mean == pytest.approx(10, abs=1.5) for trainer in trainers[1:])
        first, second = (trainer.norm.state_dict() for trainer in trainers[1:])
        if consistency == "bsp":
            assert all(torch.equal(first[name], second[name]) for name in first)
            # The two steps after rank 0's end give none: it may have given theirs.
            assert int(first["num_batches_tracked"]) == 3 + 10
        if end is not ps.Client.leave:
            _goes_on_when_rank_0_is_back(pool, trainers[1:], connected)
        for client in clients[1:]:
            client.close(leave=False)


def _goes_on_when_rank_0_is_back(
    pool: ThreadPoolExecutor, trainers: list[Trainer], connected: Callable[[int], ps.Client]
) -> None:
    target: list[int] = []

    def go_on(trainer: Trainer) -> None:
        while not target or trainer.optimizer.clock < target[0]:
            trainer.step()

    running = [pool.submit(go_on, trainer) for trainer in trainers]
    client = connected(0)
    late = Trainer(client, trainers[0].consistency)
    assert late.mean == pytest.approx(10, abs=1.5), "as the others have them"
    target.append(late.optimizer.clock + 5)
    go_on(late)
    for ending in running:
        ending.result(DEADLINE_S)
    assert all(each.mean == pytest.approx(10, abs=1.5) for each in [late, *trainers])
    client.close(leave=False)
