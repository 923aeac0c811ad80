"""What `pushpull compare` reads of a step that had to be computed anew."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

import ps_worker as ps
from ps_cli.compare.figures import figures_of
from ps_cli.compare.records import read_records
from ps_worker.training.step_times import StepTimes


def test_a_round_is_a_line_of_its_own(tmp_path: Path) -> None:
    """The table that had no part in it does not make it a skipped step."""
    first, second = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, record=str(tmp_path)) as client,
        ps.connect(cluster.address, rank=1, record=str(tmp_path)) as peer,
        ThreadPoolExecutor(1) as thread,
    ):
        beginning = thread.submit(StepTimes, peer)  # workers that record begin together
        optimizer = ps.DistributedOptimizer(
            client,
            [{"params": [first]}, {"params": [second]}],
            ps.SGD(lr=0.1),
            consistency=ps.ASP(reject=0),
            name="twice",
        )
        beginning.result()
        table = peer.table("twice/1/float32")
        evaluations: list[float] = []

        def closure() -> float:
            if not evaluations:
                peer.wait(peer.push(table, np.ones(64, np.float32)))
            optimizer.zero_grad()
            loss: torch.Tensor = (first * second).sum()
            loss.backward()
            evaluations.append(loss.item())
            return loss.item()

        optimizer.step(closure)
        client.report(loss=evaluations[-1])
        assert [result.round_count for result in optimizer.results] == [1, 1]
    lines = [json.loads(line) for line in (tmp_path / "worker-0.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["clock"] for line in steps] == [1, 2]
    assert [line["rejected"] for line in steps] == [1, 0]
    assert [line["applied"] for line in steps] == [True, True]
    assert steps[1]["loss"] == evaluations[1]


def test_a_recorded_worker_leaves_out_clocks_as_any_other(tmp_path: Path) -> None:
    """The table by which recorded workers begin together is none that they train."""

    def trainer(client: ps.Client) -> tuple[torch.nn.Parameter, ps.DistributedOptimizer]:
        weights = torch.nn.Parameter(torch.ones(64))
        return weights, ps.DistributedOptimizer(
            client, [weights], ps.SGD(lr=0.1), consistency="bsp:backup=1", name="late"
        )

    def step(weights: torch.nn.Parameter, optimizer: ps.DistributedOptimizer) -> tuple[bool, int]:
        """True if the step was discarded, and the clock after it."""
        weights.grad = torch.ones(64)
        optimizer.step()
        return optimizer.results[0].discarded, optimizer.clock

    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, record=str(tmp_path)) as client,
        ps.connect(cluster.address, rank=1, record=str(tmp_path)) as peer,
        ThreadPoolExecutor(2) as threads,
    ):
        fast, slow = threads.map(trainer, (client, peer))
        assert [step(*fast) for _ in range(3)] == [(False, 1), (False, 2), (False, 3)]
        assert [step(*slow) for _ in range(2)] == [(True, 3), (False, 4)]


def test_a_recorded_worker_may_take_data_in_shards(tmp_path: Path) -> None:
    with (
        ps.local_cluster(servers=1, workers=1) as cluster,
        ps.connect(cluster.address, record=str(tmp_path), consistency="asp") as client,
    ):
        StepTimes(client)
        shards = client.data_shards(4, shard_size=2)
        assert sorted(shards.ranges()) == [(0, 2), (2, 4)]


def test_an_early_outer_step_is_said_to_be_one(tmp_path: Path) -> None:
    """`pushpull compare` counts the inner steps, and their losses at these."""
    weights = torch.nn.Parameter(torch.ones(64))
    outer = ps.Outer(partial(torch.optim.SGD, lr=0.1), inner_steps=2)
    with (
        ps.local_cluster(servers=1, workers=1) as cluster,
        ps.connect(cluster.address, rank=0, record=str(tmp_path)) as client,
    ):
        optimizer = ps.DistributedOptimizer(client, [weights], outer, name="outer")
        for _ in range(3):
            weights.grad = torch.ones(64)
            optimizer.step()
        optimizer.synchronize()
        client.report(loss=2.0)
    (record,) = read_records(tmp_path)
    assert [step.is_early for step in record.steps] == [False, False, False, True]
    assert [step.staleness is None for step in record.steps] == [True, False, True, False]
    assert [loss.step for loss in record.losses] == [3]
    assert figures_of([record]).step_count == 3
