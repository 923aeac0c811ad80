"""A worker has left, and the others make tables after that: nobody waits for it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ps_worker as ps
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until

WORKERS = 3
DEADLINE_S = 45.0


@pytest.fixture
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=2, workers=WORKERS) as running:
        yield running


class Trainer:
    """A script that unfreezes the second half of its model in the middle."""

    def __init__(self, client: ps.Client, consistency: str) -> None:
        self.client = client
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)
        self.optimizer = ps.DistributedOptimizer(
            client,
            self.first.parameters(),
            ps.SGD(lr=0.1),
            consistency=consistency,
            block_elements=64,
        )

    def unfreeze(self) -> None:
        self.optimizer.add_param_group({"params": self.second.parameters()})

    def step(self) -> None:
        draw = torch.Generator().manual_seed(1000 * self.client.rank + self.optimizer.clock)
        self.optimizer.zero_grad()
        hidden = torch.tanh(self.first(torch.randn(16, 6, generator=draw)))
        self.second(hidden).square().mean().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def _each(
    pool: ThreadPoolExecutor, trainers: list[Trainer], what: Callable[[Trainer], None]
) -> None:
    for future in [pool.submit(what, trainer) for trainer in trainers]:
        future.result(DEADLINE_S)


def _connected(cluster: LaneCluster) -> list[ps.Client]:
    return [
        ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
        for rank in range(WORKERS)
    ]


def _leave(client: ps.Client, seen_by: ps.Client) -> None:
    client.leave()
    node_id = client.session.node_id
    until(lambda: not seen_by.engine.view.nodes_by_id[node_id].state.is_member, "the others know")


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("consistency", ["bsp", "ssp:0"])
def test_who_has_less_to_do_leaves_and_the_others_unfreeze_layers(
    cluster: LaneCluster, consistency: str
) -> None:
    clients = _connected(cluster)
    with ThreadPoolExecutor(WORKERS) as pool:
        trainers = list(pool.map(lambda client: Trainer(client, consistency), clients))
        _each(pool, trainers, lambda trainer: trainer.steps(3))
        _leave(clients[2], seen_by=clients[0])
        _each(pool, trainers[:2], Trainer.unfreeze)
        _each(pool, trainers[:2], lambda trainer: trainer.steps(3))
        assert [trainer.optimizer.clock for trainer in trainers[:2]] == [6, 6]
        if consistency == "bsp":
            ours, theirs = (
                [*trainer.first.parameters(), *trainer.second.parameters()]
                for trainer in trainers[:2]
            )
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine, other)
        assert cluster.metric("pushpull_server_short_updates_total") == 0, "nobody is missing"
        for client in clients[:2]:
            pool.submit(client.close).result(DEADLINE_S)


@pytest.mark.timeout(120)
def test_a_table_that_would_start_from_its_values_says_so(cluster: LaneCluster) -> None:
    clients = _connected(cluster)
    with ThreadPoolExecutor(WORKERS) as pool:
        trainers = list(pool.map(lambda client: Trainer(client, "bsp"), clients))
        _leave(clients[0], seen_by=clients[1])
        with pytest.raises(ps.InvalidConfig, match="gets none: worker 0 has left the cluster"):
            trainers[1].unfreeze()
        for client in clients[1:]:
            client.close(leave=False)
