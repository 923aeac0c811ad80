"""Runs of one standing cluster, with real processes: nothing is started again between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ps_worker as ps
from ps_cli.__main__ import app
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until

pytestmark = pytest.mark.slow

SIZE = 300
STEPS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=2, workers=2, environment={"PUSHPULL_REPLICAS": "2"}) as standing:
        yield standing


@pytest.fixture
def address(cluster: LaneCluster) -> str:
    return cluster.address


def trained(address: str, run: str, rank: int, rate: float = 1.0) -> list[float]:
    """What a worker of a run of two sees of its table, which is 'model' in each run, step by step.

    Each step adds 2 * rate; the workers meet after the last one.
    """
    with ps.connect(address, run=run, rank=rank, world_size=2, request_deadline_s=60) as client:
        table = client.create_table("model", SIZE, optimizer=ps.SGD(lr=rate), reduction="sum")
        seen = []
        for _ in range(STEPS):
            (value,) = set(client.push_pull(table, np.full(SIZE, -1.0, np.float32)).tolist())
            seen.append(value)
        client.barrier()
        return seen


def both(address: str, run: str, rate: float) -> list[list[float]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(partial(trained, address, run, rate=rate), range(2)))


def expected(rate: float) -> list[list[float]]:
    return [[2.0 * rate * clock for clock in range(1, STEPS + 1)]] * 2


@pytest.mark.thorough
def test_a_second_run_trains_when_the_first_has_ended(address: str) -> None:
    assert both(address, "first", 1.0) == expected(1.0)
    assert both(address, "second", 2.0) == expected(2.0)


def test_two_runs_train_at_once_and_do_not_meet(address: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(partial(both, address), ("left", "right"), (1.0, 2.0))
    assert (one, other) == (expected(1.0), expected(2.0))
    for run, rate in (("left", 1.0), ("right", 2.0)):
        with ps.connect(address, role="reader", run=run) as reader:
            assert set(reader.pull(reader.table("model")).tolist()) == {2.0 * rate * STEPS}


def test_a_model_of_another_run_begins_with_its_own_values(address: str) -> None:
    """The initial values are rank 0's of the run that asks."""
    found = []
    for value, run in ((1.5, "model-1"), (2.5, "model-2")):
        module = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.constant_(module.weight, value)
        with ps.connect(address, run=run, world_size=1) as client:
            optimizer = ps.DistributedOptimizer(client, module, ps.SGD(lr=0.5))
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        found.append(set(module.weight.flatten().tolist()))
    assert found == [{1.0}, {2.0}]


def test_a_run_that_is_over_is_refused_with_the_remedy(address: str) -> None:
    with ps.connect(address, run="once", world_size=1):
        pass
    with pytest.raises(ps.InvalidConfig, match=r"run 'once' is over.*--run, PUSHPULL_RUN"):
        ps.connect(address, run="once", world_size=1)


def test_the_run_without_a_name_is_there_as_ever(address: str) -> None:
    with (
        ps.connect(address, run="", rank=0) as first,
        ps.connect(address, run="beside", world_size=1) as beside,
    ):
        assert (first.rank, first.world_size, beside.rank, beside.world_size) == (0, 2, 0, 1)


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_an_operator_lists_the_runs_and_ends_one(address: str) -> None:
    at = ("--scheduler", address)
    with ps.connect(address, run="stays", world_size=2, rank=0):
        with pytest.raises(ps.Fenced, match="run 'ended' was ended by an operator"):
            end_a_run(at)
        entries = json.loads(command("runs", "list", "--json", *at))
    states = {entry["name"]: entry["state"] for entry in entries}
    assert (states["ended"], states["stays"]) == ("over", "waiting")
    absent = CliRunner().invoke(app, ["runs", "end", "absent", *at])
    assert (absent.exit_code, "no run 'absent'" in absent.output) == (2, True)


def end_a_run(at: tuple[str, str]) -> None:
    """End a run in which a worker trains; it is told at its next call."""
    with ps.connect(at[1], run="ended", world_size=1) as worker:
        worker.create_table("model", SIZE, optimizer=ps.SGD(lr=1.0))
        listed = command("runs", "list", *at).splitlines()
        assert "run 'ended': running, 1 of 1 workers, 1 tables" in listed
        assert "run 'stays': waiting, 1 of 2 workers, 0 tables" in listed
        assert "ended:model" in command("status", *at)
        assert "run 'ended' has ended; 1 workers were in it" in command("runs", "end", "ended", *at)
        worker.create_table("later", SIZE, optimizer=ps.SGD(lr=1.0))


def test_a_run_that_is_removed_gives_its_memory_back(cluster: LaneCluster) -> None:
    """Its primaries' and its backups': each of the two servers has all of it."""
    size, at = 1024 * 1024, ("--scheduler", cluster.address)

    def held() -> list[float]:
        return [server.metric("pushpull_server_state_bytes") for server in cluster.servers]

    with ps.connect(cluster.address, run="stays-on", world_size=1) as other:
        kept = other.create_table("model", SIZE, optimizer=ps.SGD(lr=1.0))
        other.push_pull(kept, np.full(SIZE, -1.0, np.float32))
        before = held()
        with ps.connect(cluster.address, run="large", world_size=1) as worker:
            large = worker.create_table("model", size, optimizer=ps.SGD(lr=1.0, momentum=0.9))
            worker.push_pull(large, np.ones(size, np.float32))
            refused = CliRunner().invoke(app, ["runs", "remove", "large", *at])
            assert (refused.exit_code, "is not over" in refused.output) == (2, True)
        assert all(now >= was + 2 * 4 * size for now, was in zip(held(), before, strict=True))
        reader = ps.connect(cluster.address, role="reader", run="large")
        read = reader.table("model")
        said = command("runs", "remove", "large", *at)
        assert "run 'large' is removed; it had 1 tables" in said
        assert said.endswith(" MB, without rows of embeddings\n"), "the scheduler knows of none"
        until(lambda: held() == before, "the servers have what they had before")
        with pytest.raises((ps.Fenced, ps.TableNotFound), match="removed"):
            reader.pull(read)
        reader.close(leave=False)
        assert "run 'large': removed, 0 of 1 workers, 0 tables" in command("runs", "list", *at)
        assert set(other.push_pull(kept, np.full(SIZE, -1.0, np.float32)).tolist()) == {2.0}
    with ps.connect(cluster.address, run="next", world_size=1) as again:
        table = again.create_table("model", SIZE, optimizer=ps.SGD(lr=1.0))
        assert set(again.push_pull(table, np.full(SIZE, -3.0, np.float32)).tolist()) == {3.0}
