"""How a client's part begins and ends: leaving, dying, forks, readers, servers that go away."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ps_worker as ps
from ps_core.cluster_view import NodeState, Role

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0
SHORT_S = 1.0
SIZE = 64 * 20


@pytest.fixture
def cluster() -> Iterator[ps.LocalCluster]:
    """For tests of how one worker's end is another's business."""
    with ps.local_cluster(servers=2, workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def large_cluster() -> Iterator[ps.LocalCluster]:
    """For tests whose workers wait for nobody; each takes a rank that no other test has."""
    with ps.local_cluster(servers=1, workers=10) as cluster:
        yield cluster


def worker(cluster: ps.LocalCluster, rank: int | None = None, **options: Any) -> ps.Client:
    return ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S, **options)


def table(client: ps.Client, name: str = "w", **options: Any) -> ps.TableHandle:
    return client.create_table(name, SIZE, optimizer=ps.SGD(lr=1.0), block_elements=64, **options)


def ones(value: float = 1.0) -> npt.NDArray[np.float32]:
    return np.full(SIZE, value, dtype=np.float32)


def values_of(client: ps.Client, handle: ps.TableHandle, **options: Any) -> npt.NDArray[Any]:
    return np.asarray(client.pull(handle, **options))


@pytest.mark.thorough
def test_a_worker_without_its_record_is_not_in_the_cluster_nor_kept_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "worker-0.jsonl")
    reads = os.open(tmp_path / "worker-0.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    with ps.local_cluster() as cluster:
        with pytest.raises(ps.InvalidConfig, match="nothing can be written"):
            worker(cluster, record=str(tmp_path / "file" / "below"))
        second = worker(cluster, record=str(tmp_path))
        assert second.rank == 0
        os.close(reads)
        second.close()  # which cannot write the end of the record
        with ps.connect(cluster.address, role="operator") as operator:
            workers = [n for n in operator.engine.view.nodes if n.role is Role.WORKER]
            assert {each.state for each in workers} <= {NodeState.LEFT, NodeState.GONE}


# --- leaving


@pytest.mark.thorough
def test_a_worker_that_leaves_is_not_waited_for(cluster: ps.LocalCluster) -> None:
    with worker(cluster, 0) as first:
        with worker(cluster, 1) as second:
            ours, theirs = table(first), table(second)
            second.push(theirs, ones(3.0))
            first.push_pull(ours, ones(1.0))
            second.push(theirs, ones(50.0), seal=False)  # left open: takes no part
        assert second.is_closed
        unseen = table(first, "made after the leave")
        for clock in range(2, 5):
            assert np.all(np.asarray(first.push_pull(ours, ones(1.0))) == -1.0 - clock)
        assert np.all(np.asarray(first.push_pull(unseen, ones(1.0))) == -1.0)
        first.close(leave=False)


@pytest.mark.thorough
def test_a_worker_whose_work_is_done_ends_well_beside_a_scheduler_that_answers_nothing() -> None:
    """The end of its steps is committed by the servers; the scheduler finds out by its silence."""
    with ps.local_cluster() as cluster:
        client = worker(cluster)
        handle = table(client)
        client.push_pull(handle, ones())
        os.kill(cluster.process_ids["scheduler"], signal.SIGSTOP)
        try:
            client.close()
        finally:
            os.kill(cluster.process_ids["scheduler"], signal.SIGCONT)


def test_a_client_that_is_closed_says_so(large_cluster: ps.LocalCluster) -> None:
    client = worker(large_cluster)
    handle = table(client, "closed", consistency=ps.ASP())
    client.leave()
    client.close()
    for call in (
        lambda: client.push(handle, ones()),
        lambda: client.pull(handle),
        lambda: client.table("closed"),
        lambda: client.report(loss=1.0),
    ):
        with pytest.raises(ps.InvalidConfig, match="closed; connect again"):
            call()


@pytest.mark.thorough
def test_who_ends_with_an_exception_is_gone_and_another_may_have_its_rank(
    cluster: ps.LocalCluster,
) -> None:
    """Nobody waits until it has been silent for too long; a notebook may run its cell again."""

    def fail() -> None:
        with worker(cluster, 1) as client:
            table(client)
            raise RuntimeError("on purpose")

    with worker(cluster, 0) as first:
        handle = table(first)
        with pytest.raises(RuntimeError, match="on purpose"):
            fail()
        first.push_pull(handle, ones())
        again = worker(cluster, 1)
        assert again.rank == 1
        again.close(leave=False)


@pytest.mark.parametrize(
    ("rank", "code", "state"),
    [
        (6, 0, NodeState.LEFT),
        (7, None, NodeState.LEFT),
        (8, 1, NodeState.GONE),
        (9, "it failed", NodeState.GONE),
    ],
)
def test_sys_exit_within_the_with_block_is_a_normal_end_if_its_status_is_0(
    large_cluster: ps.LocalCluster, rank: int, code: object, state: NodeState
) -> None:
    with pytest.raises(SystemExit), worker(large_cluster, rank) as client:
        sys.exit(code)  # type: ignore[arg-type]
    with ps.connect(large_cluster.address, role="reader") as reader:
        assert reader.engine.view.nodes_by_id[client.session.node_id].state is state


@pytest.mark.thorough
def test_workers_that_disagree_are_told_both_values(cluster: ps.LocalCluster) -> None:
    first, second = worker(cluster, 0), worker(cluster, 1)
    tickets = [
        (first, first.push(table(first), ones(), hyperparameters={"lr": 0.25})),
        (second, second.push(table(second), ones(), hyperparameters={"lr": 0.5})),
    ]
    errors = []
    for client, ticket in tickets:
        try:
            client.wait(ticket, 3.0)
        except ps.InvalidConfig as error:
            errors.append(str(error))
        except ps.WaitExpired:
            continue  # it sealed first; the other one is told
    assert errors
    assert all("0.25" in text and "0.5" in text for text in errors)
    for client in (first, second):
        client.close(leave=False)


# --- processes


def _in_a_child(client: ps.Client, handle: ps.TableHandle, answers: Any) -> None:
    found = []
    for call in (lambda: client.pull(handle), lambda: ps.connect("nowhere:1"), client.close):
        try:
            call()
            found.append("")
        except ps.PushpullError as error:
            found.append(f"{type(error).__name__}: {error}")
    answers.put(found)


def test_a_forked_child_can_neither_use_nor_close_the_client(
    large_cluster: ps.LocalCluster,
) -> None:
    with worker(large_cluster) as client:
        handle = table(client, "forked", consistency=ps.ASP())
        fork = multiprocessing.get_context("fork")
        answers = fork.Queue()
        child = fork.Process(target=_in_a_child, args=(client, handle, answers))
        child.start()
        pulled, connected, closed = answers.get(timeout=DEADLINE_S)
        child.join(DEADLINE_S)
        assert child.exitcode == 0
        assert f"belongs to process {os.getpid()}" in pulled
        assert "start it by 'spawn'" in connected
        assert closed == ""
        assert np.all(np.asarray(client.push_pull(handle, ones())) == -1.0)


class Garbage:
    """An object that only the collector can free: it holds itself."""

    def __init__(self) -> None:
        self.itself = self


def _collect(left: weakref.ref[Garbage]) -> None:
    """Collect in a child, which leaves its parent's garbage alone."""
    gc.collect()
    assert left() is not None


@pytest.mark.thorough
def test_children_that_are_forked_beside_a_client_neither_crash_nor_hang(
    large_cluster: ps.LocalCluster,
) -> None:
    """gRPC's own handlers of forks made some of ten crash, and its destructors, run by the child's
    collector, made three of a thousand wait for ever.
    """
    fork = multiprocessing.get_context("fork")
    with worker(large_cluster):
        for _ in range(10):
            gc.disable()
            child = fork.Process(target=_collect, args=(weakref.ref(Garbage()),))
            child.start()
            gc.enable()
            child.join(DEADLINE_S)
            assert child.exitcode == 0


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_data_loaders_with_processes_do_not_hang(
    large_cluster: ps.LocalCluster, method: str
) -> None:
    data = TensorDataset(torch.arange(8.0))
    with worker(large_cluster) as client:
        handle = table(client, f"loaded by {method}", consistency=ps.ASP())
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=method)
        for epoch in (1, 2):
            for (batch,) in loader:
                client.push(handle, ones(float(batch.sum())))
            client.wait(client.seal(handle))
            assert np.all(values_of(client, handle) == -28.0 * epoch)


# --- readers


def test_a_reader_only_reads(large_cluster: ps.LocalCluster) -> None:
    with worker(large_cluster) as client, worker(large_cluster, role="reader") as reader:
        opened: list[ps.TableHandle] = []
        opening = threading.Thread(target=lambda: opened.append(reader.table("read")))
        opening.start()  # waits until the worker creates it
        handle = table(client, "read", consistency=ps.ASP())
        opening.join(DEADLINE_S)
        client.wait(client.push(handle, ones()))
        assert reader.is_reader
        assert np.all(values_of(reader, opened[0]) == -1.0)
        for call in (
            lambda: reader.push(opened[0], ones()),
            lambda: reader.seal(opened[0]),
            lambda: reader.assign(opened[0], ones()),
            lambda: table(reader, "mine"),
        ):
            with pytest.raises(ps.NotPermitted, match="reader"):
                call()
        assert np.all(values_of(reader, opened[0], consistent=True) == -1.0)
        with pytest.raises(ps.InvalidConfig, match="not BSP: a consistent pull there needs a cut"):
            client.pull(handle, consistent=True)


@pytest.mark.thorough
def test_consistent_reads_see_one_clock_while_training_goes_on(cluster: ps.LocalCluster) -> None:
    with (
        worker(cluster, 0) as first,
        worker(cluster, 1) as second,
        worker(cluster, role="reader") as reader,
        ThreadPoolExecutor(1) as threads,
    ):
        ours, theirs = table(first), table(second)
        stop = threading.Event()

        def train() -> None:
            while not stop.is_set():
                second.push(theirs, ones())
                first.push_pull(ours, ones())

        training = threads.submit(train)
        try:
            handle = reader.table("w")
            clocks = []
            for _ in range(10):
                found = values_of(reader, handle, consistent=True)
                assert np.all(found == found[0])
                clocks.append(-found[0])
        finally:
            stop.set()
            training.result(DEADLINE_S)
        assert clocks == sorted(clocks)
        assert clocks[-1] > clocks[0]
        assert np.all(values_of(reader, handle, consistent=True) == -ours.clock)
        assert np.all(values_of(first, ours, consistent=True) == -ours.clock)


# --- servers that go away


def test_a_server_that_dies_is_named_by_every_wait(cluster: ps.LocalCluster) -> None:
    client = worker(cluster, 0)
    handle = table(client, consistency=ps.ASP())
    client.push_pull(handle, ones())
    os.kill(cluster.process_ids["server 0"], signal.SIGKILL)
    ticket = client.push(handle, ones())
    with pytest.raises(ps.WaitExpired, match=r"server \d+ at .* cannot be reached"):
        client.wait(ticket, SHORT_S)
    with pytest.raises(ps.WaitExpired, match="pull of table 'w'"):
        client.pull(handle, timeout_s=SHORT_S)
    client.close(leave=False)


@pytest.mark.thorough
def test_a_cluster_that_is_not_there_is_named() -> None:
    with ps.local_cluster(servers=1, workers=1) as cluster:
        address = cluster.address
    with pytest.raises(ps.WaitExpired, match=address):
        ps.connect(address, connect_deadline_s=SHORT_S)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_leaving_a_cluster_that_is_gone_ends_soon(how: signal.Signals) -> None:
    """A script whose cluster ended first, as a notebook's does, is told; it does not hang."""
    with ps.local_cluster(servers=1, workers=1) as cluster:
        client = worker(cluster, 0)
        client.push_pull(table(client), ones())
        if how is signal.SIGKILL:
            os.kill(cluster.process_ids["server 0"], how)
        else:
            cluster.stop()
        words = r"cannot be left in order: server 1 |are lost, .*: server 1 had the only copy"
        with pytest.raises((ps.WaitExpired, ps.ValuesLost), match=words):
            client.close()
