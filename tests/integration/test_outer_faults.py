"""Outer while a server or a worker dies between two outer steps."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest
import torch

import ps_worker as ps
from tests.integration.lane_cluster import lane_cluster, until
from tests.integration.outer_training import (
    INNER_STEPS,
    WORKERS,
    Trainer,
    Values,
    adamw,
    differences,
    is_same,
    together,
    twin,
    values_of,
)
from tests.integration.replicated_cluster import DEADLINE_S, replicated_cluster
from tests.integration.test_worker_gone import PATIENCE, victim

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 4 * INNER_STEPS


def test_a_server_killed_between_outer_steps_changes_no_bit() -> None:
    with replicated_cluster(servers=3, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]

        def train(client: ps.Client) -> list[Values]:
            trainer = Trainer(client, "model", adamw())
            for step in range(STEPS):
                if client.rank == 0 and step == INNER_STEPS + 1:
                    cluster.healed()
                    cluster.kill(cluster.a_primary())
                trainer.step()
            return trainer.history

        found = sorted(together(clients, lambda c: (c.rank, train(c))), key=lambda pair: pair[0])
    for (rank, history), expected in zip(found, twin(adamw(), STEPS), strict=True):
        for step, (own, theirs) in enumerate(zip(history, expected, strict=True)):
            assert not differences(own, theirs), f"{rank=} {step=}"


def train_to_the_end(address: str, lane: str, _: str, pipe: Connection) -> None:
    """A worker process: says how many steps it has taken."""
    trainer = Trainer(
        ps.connect(address, rank=1, lane=lane, request_deadline_s=DEADLINE_S), "model", adamw()
    )
    try:
        while True:
            trainer.step()
            pipe.send(trainer.step_count)
    finally:
        os._exit(0)


@pytest.mark.thorough
def test_a_worker_killed_between_outer_steps_is_replaced() -> None:
    """What its inner steps did is lost; the other one gives its outer step without it, and the
    replacement begins with the servers' parameters.
    """
    with (
        lane_cluster(servers=2, workers=WORKERS, environment=PATIENCE) as cluster,
        victim(cluster, "auto", "", train_to_the_end) as dead,
        ThreadPoolExecutor(1) as pool,
        ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as client,
    ):
        target: list[int] = []

        def go_on(trainer: Trainer) -> Values:
            while not target or trainer.step_count < target[0]:
                trainer.step()
            return values_of(trainer.model)

        other = pool.submit(lambda: go_on(Trainer(client, "model", adamw())))
        while dead.hear() != INNER_STEPS + 1:
            pass
        dead.signal(signal.SIGKILL)
        until(lambda: any(n.state.value == "gone" for n in client.engine.view.nodes), "it is gone")
        with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as late:
            assert (late.rank, late.is_replacement) == (1, True)
            trainer = Trainer(late, "model", adamw())
            begun = trainer.optimizer.clock
            assert begun >= 1
            assert trainer.step_count == begun * INNER_STEPS, "as the other, at its last outer step"
            served = torch.from_numpy(late.pull(late.table("model/0/float32")))
            own = torch.cat([each.flatten() for each in values_of(trainer.model)])
            assert torch.equal(own, served)
            target.append(trainer.step_count + STEPS)
            assert is_same(go_on(trainer), other.result(DEADLINE_S))
            assert trainer.optimizer.clock == begun + STEPS // INNER_STEPS
