"""Hybrid training goes on after a restore in place that came while one worker was in a step, which
the other never took.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import ps_worker as ps
from tests.integration.ordered_workers import REMEDY, Worker
from tests.integration.warm_processes import warm_context

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120)]

WORKERS = 2


def live(rank: int, address: str, groups: Path | None, pipe: Connection) -> None:
    """Do what is ordered, and say what comes of it."""
    torch.set_num_threads(1)
    if groups is not None:
        store = distributed.FileStore(str(groups / "store"), WORKERS)  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    client = ps.connect(address, rank=rank, request_deadline_s=30.0)
    optimizer: Any = None
    process_groups = weakref.WeakSet[Any]()

    def grouped() -> str:
        nonlocal optimizer
        optimizer = ps.DistributedOptimizer(
            client, model, ps.SGD(lr=0.1), name="model", aggregate_within="all"
        )
        process_groups.add(distributed.group.WORLD)
        return "made"

    def left() -> int:
        gc.collect()
        return len({*process_groups} - {distributed.group.WORLD})

    def made() -> str:
        nonlocal optimizer
        local, served = torch.optim.SGD(model[0].parameters(), lr=0.1), list(model[1].parameters())
        optimizer = ps.HybridOptimizer(
            client, model, local, served=served, server_optimizer=ps.SGD(lr=0.1), name="model"
        )
        process_groups.add(distributed.group.WORLD)
        return "made"

    def stepped() -> list[float]:
        optimizer.zero_grad()
        pipe.send("begins")
        model(torch.full((2, 4), float(rank))).sum().backward()
        optimizer.step()
        return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()

    def restored(url: str) -> str:
        nonlocal client
        client = client.restore(url)
        return "restored"

    orders: dict[str, Callable[[], Any]] = {
        "make": made,
        "make grouped": grouped,
        "left": left,
        "step": stepped,
        "checkpoint": lambda: client.checkpoint().wait().url,
        "end": client.close,
    }
    order = ""
    while order != "end":
        order = pipe.recv()
        try:
            pipe.send(orders[order]() if order in orders else restored(order))
        except ps.PushpullError as error:
            pipe.send((type(error).__name__, str(error)))


@contextmanager
def workers(address: str, groups: Path | None) -> Iterator[list[Worker]]:
    context = warm_context()
    with ExitStack() as stack:
        found = []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=partial(live, rank, address, groups, theirs))
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(ours.close)
            found.append(Worker(process, ours))
        yield found
        for worker in found:
            worker.pipe.send("end")
        for worker in found:
            worker.process.join(30.0)
            assert worker.process.exitcode == 0


def all_do(found: list[Worker], order: str) -> list[Any]:
    for worker in found:
        worker.pipe.send(order)
    said = [worker.hear() for worker in found]
    return [worker.hear() for worker in found] if order == "step" else said


def restored_in_a_step(found: list[Worker], make: str = "make") -> None:
    """Worker 1 is in the second step, and worker 0 restores before it."""
    assert all_do(found, make) == ["made"] * WORKERS
    first = all_do(found, "step")
    assert first[0] == first[1]
    [url, _] = all_do(found, "checkpoint")
    found[1].pipe.send("step")
    assert found[1].hear() == "begins"
    found[0].pipe.send(url)
    assert found[0].hear() == "restored"
    kind, said = found[1].hear()
    assert kind == "Fenced"
    assert "restored from a checkpoint" in said
    found[1].pipe.send(url)
    assert found[1].hear() == "restored"


@pytest.mark.parametrize("make", ["make", "make grouped"])
def test_a_restore_beside_a_step_leaves_no_call_of_the_workers_behind(
    tmp_path: Path, make: str
) -> None:
    """Nor a process group of all workers."""
    with (
        ps.local_cluster(1, WORKERS, checkpoint_url=str(tmp_path)) as cluster,
        workers(cluster.address, None) as found,
    ):
        restored_in_a_step(found, make)
        assert all_do(found, make) == ["made"] * WORKERS
        values = all_do(found, "step")
        assert values[0] == values[1]
        assert isinstance(values[0], list)
        assert all_do(found, "left") == [0] * WORKERS


def test_a_worker_in_a_step_hears_of_a_restore_whose_worker_makes_its_optimizer_at_once(
    tmp_path: Path,
) -> None:
    with (
        ps.local_cluster(1, WORKERS, checkpoint_url=str(tmp_path)) as cluster,
        workers(cluster.address, None) as found,
    ):
        assert all_do(found, "make") == ["made"] * WORKERS
        all_do(found, "step")
        [url, _] = all_do(found, "checkpoint")
        found[1].pipe.send("step")
        assert found[1].hear() == "begins"
        found[0].pipe.send(url)
        found[0].pipe.send("make")
        assert found[0].hear() == "restored"
        kind, said = found[1].hear()
        assert kind == "Fenced"
        assert "restored from a checkpoint" in said
        found[1].pipe.send(url)
        assert found[1].hear() == "restored"
        found[1].pipe.send("make")
        assert [worker.hear() for worker in found] == ["made"] * WORKERS


def test_a_group_that_the_script_made_is_refused_after_a_restore(tmp_path: Path) -> None:
    with (
        ps.local_cluster(1, WORKERS, checkpoint_url=str(tmp_path / "c")) as cluster,
        workers(cluster.address, tmp_path) as found,
    ):
        restored_in_a_step(found)
        for kind, said in all_do(found, "make"):
            assert kind == "WorkerLost"
            assert said.startswith("a restore has replaced the cluster that this torch.distributed")
            assert REMEDY in said
