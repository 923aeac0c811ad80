"""Consistent reads where workers are at different clocks: cuts, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker as ps
from tests.integration.lane_cluster import until

pytestmark = pytest.mark.slow

WORKERS = 3
BLOCK = 64
ELEMENTS = 40 * BLOCK
"""Blocks in ranges of both servers."""

DEADLINE_S = 30.0
_names = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ps.LocalCluster]:
    with ps.local_cluster(servers=2, workers=WORKERS) as running:
        yield running


@pytest.fixture(scope="module")
def workers(cluster: ps.LocalCluster) -> Iterator[list[ps.Client]]:
    found = [
        ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
        for rank in range(WORKERS)
    ]
    yield found
    for worker in found:
        worker.close(leave=False)


@pytest.fixture
def reader(cluster: ps.LocalCluster) -> Iterator[ps.Client]:
    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as client:
        yield client


def _tables(workers: list[ps.Client], consistency: str) -> list[ps.TableHandle]:
    """A new table; its value is the number of steps that are in it."""
    name = f"table {next(_names)}"
    return [
        worker.create_table(
            name,
            ELEMENTS,
            optimizer=ps.SGD(lr=1.0, maximize=True),
            consistency=consistency,
            block_elements=BLOCK,
        )
        for worker in workers
    ]


@contextmanager
def _training(step: Callable[[int], Any]) -> Iterator[None]:
    """Every worker takes steps until the end of the block."""
    stop = threading.Event()

    def train(rank: int) -> None:
        while not stop.is_set():
            step(rank)

    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(train, rank) for rank in range(WORKERS)]
        try:
            yield
        finally:
            stop.set()
    for end in running:
        end.result()


@pytest.mark.thorough
def test_under_ssp_every_part_has_the_same_steps_of_everyone(
    workers: list[ps.Client], reader: ps.Client
) -> None:
    tables = _tables(workers, "ssp:3")

    def step(rank: int) -> None:
        workers[rank].push_pull(tables[rank], np.ones(ELEMENTS, np.float32))

    handle = reader.table(tables[0].name)
    with _training(step):
        found = [np.unique(reader.pull(handle, consistent=True)) for _ in range(15)]
    for values in found:
        assert len(values) == 1, f"parts differ: {values}"
        assert values[0] % WORKERS == 0, "not the same number of steps of every worker"
    clocks = [float(values[0]) for values in found]
    assert clocks == sorted(clocks)
    assert clocks[-1] > clocks[0]


def test_a_part_of_a_table_is_read_and_the_rest_is_let_go(
    workers: list[ps.Client], reader: ps.Client
) -> None:
    tables = _tables(workers, "ssp:2")
    for worker, table in zip(workers, tables, strict=True):
        worker.wait(worker.push(table, np.ones(ELEMENTS, np.float32)))
    handle = reader.table(tables[0].name)
    part = reader.pull(handle, slice=slice(0, BLOCK), consistent=True)
    assert np.all(np.asarray(part) == WORKERS)
    workers[0].wait(workers[0].push(tables[0], np.ones(ELEMENTS, np.float32)), timeout_s=2.0)


def test_a_reader_that_dies_holds_nobody_up_for_long(
    workers: list[ps.Client], cluster: ps.LocalCluster
) -> None:
    tables = _tables(workers, "ssp:2")
    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader:
        handle = reader.table(tables[0].name)
        engine = reader.engine
        begun = reader.connection.loop.start(engine.consistent.begin_cut(7, [handle.table], 3.0))
        assert begun.result(10.0) == {handle.table.table_id: 0}
    ticket = workers[0].push(tables[0], np.ones(ELEMENTS, np.float32))
    with pytest.raises(ps.WaitExpired):
        workers[0].wait(ticket, timeout_s=0.5)
    workers[0].wait(ticket, timeout_s=10.0)


@pytest.mark.thorough
def test_a_cut_waits_for_the_slow_and_says_so_when_it_gives_up(
    workers: list[ps.Client], reader: ps.Client
) -> None:
    """Worker 0 is two steps ahead, as it may be: the others have to come, or nobody reads."""
    tables = _tables(workers, "ssp:4")
    for _ in range(2):
        workers[0].push_pull(tables[0], np.ones(ELEMENTS, np.float32))
    handle = reader.table(tables[0].name)
    with pytest.raises(ps.WaitExpired):
        reader.pull(handle, consistent=True, timeout_s=1.0)
    reading = reader.pull(handle, consistent=True, callback=lambda _: None)
    for rank in (1, 2):
        for _ in range(2):
            workers[rank].push_pull(tables[rank], np.ones(ELEMENTS, np.float32))
    assert np.all(np.asarray(reader.wait(reading)) == 2 * WORKERS)


def test_under_asp_each_range_is_as_it_is_and_nobody_waits(
    workers: list[ps.Client], reader: ps.Client
) -> None:
    tables = _tables(workers, "asp")
    workers[0].push_pull(tables[0], np.ones(ELEMENTS, np.float32))
    handle = reader.table(tables[0].name)
    assert np.all(np.asarray(reader.pull(handle, consistent=True, timeout_s=5.0)) == 1.0)


def test_a_worker_asks_for_no_cut(workers: list[ps.Client]) -> None:
    tables = _tables(workers, "ssp:1")
    engine = workers[0].engine
    begun = workers[0].connection.loop.start(engine.consistent.begin_cut(1, [tables[0].table], 1.0))
    with pytest.raises(ps.NotPermitted, match="BeginCut is for readers"):
        begun.result(10.0)
    with pytest.raises(ps.InvalidConfig, match="needs a cut"):
        workers[0].pull(tables[0], consistent=True)


def _trained(workers: list[ps.Client], name: str) -> list[ps.DistributedOptimizer]:
    """Two tables of one model (two groups), both zero; `_step` adds 1 to every parameter."""
    models = [torch.nn.Linear(30, 20) for _ in workers]
    for model in models:
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)

    def optimizer(rank: int) -> ps.DistributedOptimizer:
        model = models[rank]
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
        return ps.DistributedOptimizer(
            workers[rank],
            groups,
            ps.SGD(lr=1.0, maximize=True),
            module=model,
            name=name,
            consistency=ps.SSP(2),
            block_elements=BLOCK,
        )

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(optimizer, range(WORKERS)))


def _step(optimizer: ps.DistributedOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _read_clock(reader: ps.Client, name: str) -> int:
    """Pull the model; the clock whose steps all of its values have."""
    evaluated = torch.nn.Linear(30, 20)
    clock = ps.pull_model(reader, evaluated, name)
    found = torch.cat([parameter.flatten() for parameter in evaluated.parameters()])
    assert torch.all(found == WORKERS * clock), (found.unique(), clock)
    return clock


@pytest.mark.thorough
def test_an_evaluator_gets_one_state_of_a_whole_model(
    workers: list[ps.Client], reader: ps.Client
) -> None:
    name = f"model {next(_names)}"
    optimizers = _trained(workers, name)
    with _training(lambda rank: _step(optimizers[rank])):
        clocks = [_read_clock(reader, name) for _ in range(8)]
    assert clocks == sorted(clocks)
    assert clocks[-1] > clocks[0]


def test_an_evaluator_gets_one_state_while_another_setting_is_still_to_come(
    workers: list[ps.Client], reader: ps.Client
) -> None:
    name = f"model {next(_names)}"
    optimizers = _trained(workers, name)
    for optimizer in optimizers:
        _step(optimizer)
    handles = reader.tables.open_all(f"{name}/", lambda specs: len(specs) == 2, DEADLINE_S)

    def change(setting: str) -> None:
        optimizers[0].set_consistency(setting, after_clock=1000)
        until(
            lambda: all(reader.consistency_of(handle).mode.value == setting for handle in handles),
            "the reader hears of it",
        )

    change("bsp")
    assert _read_clock(reader, name) == 1
    change("asp")
    for _ in range(2):
        _step(optimizers[0])
    reading = reader.pull(handles[0], consistent=True, callback=lambda _: None)
    with ThreadPoolExecutor(1) as pool:
        evaluating = pool.submit(_read_clock, reader, name)
        for optimizer in optimizers[1:] * 2:
            _step(optimizer)
        assert evaluating.result() == 3
    assert np.all(np.asarray(reader.wait(reading)) == WORKERS * 3)
