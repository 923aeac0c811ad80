"""A cluster is taken back to a checkpoint while it runs: nothing of the timeline before counts."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

import ps_worker as ps
from ps_core.errors import PushpullError
from ps_runtime.checkpoint.store import resolve
from ps_runtime.cluster import wire
from ps_runtime.grpc.errors import from_rpc_error
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc
from tests.integration.open_files import open_files
from tests.integration.warm_processes import warm_context

pytestmark = pytest.mark.slow

COUNT, BLOCK, DEADLINE_S = 2_000, 64, 30.0
ONES = np.ones(COUNT, np.float32)


def counting_table(client: ps.Client) -> ps.TableHandle:
    return client.create_table(
        "counted", COUNT, optimizer=ps.SGD(lr=1.0), reduction="sum", block_elements=BLOCK
    )


def connect(cluster: ps.LocalCluster, rank: int, lane: str) -> ps.Client:
    return ps.connect(cluster.address, rank=rank, lane=lane, request_deadline_s=DEADLINE_S)


def both_step(clients: list[ps.Client], tables: list[ps.TableHandle], count: int) -> None:
    for _ in range(count):
        tickets = [c.push(t, ONES) for c, t in zip(clients, tables, strict=True)]
        for client, ticket in zip(clients, tickets, strict=True):
            client.wait(ticket)


def refusal_of(address: str, request: parameters_pb2.PushRequest) -> PushpullError:
    """What a server says to a push stream that begins so."""
    with grpc.insecure_channel(address) as channel:
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Push(itertools.chain([request]), timeout=DEADLINE_S))
    return from_rpc_error(refused.value)


def test_a_push_that_is_on_its_way_never_lands(tmp_path: Path) -> None:
    check_never_lands(tmp_path, "shm")


def check_never_lands(tmp_path: Path, lane: str) -> None:
    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(2, 2, checkpoint_url=root) as cluster:
        clients = [connect(cluster, rank, lane) for rank in range(2)]
        tables = [counting_table(client) for client in clients]
        both_step(clients, tables, 3)
        made = clients[0].checkpoint().wait()
        both_step(clients, tables, 2)
        # On its way: received everywhere, and waiting for the other worker's.
        waiting = clients[1].push(tables[1], 100 * ONES)
        old = wire.session_to_proto(clients[1].session)
        servers = {n.address for n in clients[1].engine.view.nodes if n.role.value == "server"}

        clients[0] = clients[0].restore(made.url)
        with pytest.raises(ps.Fenced, match="timeline"):
            clients[1].wait(waiting)
        with pytest.raises(ps.Fenced):
            clients[1].push(tables[1], 100 * ONES)
        clients[1] = clients[1].restore(made.url)
        assert [client.rank for client in clients] == [0, 1]
        assert {client.restored_from for client in clients} == {made.url}

        tables = [counting_table(client) for client in clients]
        assert [table.clock for table in tables] == [3, 3]
        for client, table in zip(clients, tables, strict=True):
            assert np.array_equal(np.asarray(client.pull(table)), -6 * ONES)
        # The old session, as a worker that was paused would use it, at servers with its address.
        header = parameters_pb2.PushRequest(header=parameters_pb2.StreamHeader(session=old))
        for address in servers:
            assert isinstance(refusal_of(address, header), ps.Fenced)

        both_step(clients, tables, 1)
        assert np.array_equal(np.asarray(clients[1].pull(tables[1])), -8 * ONES)
        both_step(clients, tables, 1)
        again = clients[1].checkpoint("of the new timeline").wait()
        assert again.number > made.number
        with resolve(root).reader as reader:
            assert reader.manifest.table("counted").clock == 5
        for client in clients:
            client.close()


@pytest.mark.thorough
def test_a_worker_whose_session_ended_otherwise_is_told_that_nothing_is_restored(
    tmp_path: Path,
) -> None:
    with ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster:
        replaced = ps.connect(cluster.address, rank=0, identity="pod-0")
        table = counting_table(replaced)
        replaced.push_pull(table, ONES)
        made = replaced.checkpoint().wait()
        replaced.push_pull(table, ONES)
        replacing = warm_context().Process(target=replace_and_end, args=(cluster.address,))
        replacing.start()
        replacing.join(DEADLINE_S)
        with pytest.raises(ps.Fenced, match="another process registered with the identity"):
            replaced.restore(made.url)
        replaced.close(leave=False)
        with ps.connect(cluster.address, rank=0, identity="pod-0") as client:
            assert client.restored_from == ""
            assert np.array_equal(np.asarray(client.pull(counting_table(client))), -2 * ONES)


def replace_and_end(address: str) -> None:
    """A worker takes the place of the test's own, and is killed."""
    ps.connect(address, rank=0, identity="pod-0")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
def test_what_is_no_good_checkpoint_changes_nothing(tmp_path: Path) -> None:
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(tmp_path / "none")) as cluster,
        connect(cluster, 0, "grpc") as client,
    ):
        table = counting_table(client)
        client.push_pull(table, ONES)
        for url in ("", str(tmp_path / "none" / "00000007-abcdef01")):
            with pytest.raises(ps.InvalidCheckpoint, match=r"no good|no manifest"):
                client.restore(url)
        assert np.array_equal(np.asarray(client.push_pull(table, ONES)), -2 * ONES)


@pytest.mark.thorough
def test_servers_that_can_write_no_checkpoint_any_more_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = tmp_path / "checkpoints", tmp_path / "other"
    monkeypatch.setenv("PUSHPULL_CHECKPOINT_ROOTS", str(other))
    with ps.local_cluster(2, 1, checkpoint_url=str(place)) as cluster:
        client = connect(cluster, 0, "grpc")
        table = counting_table(client)
        client.push_pull(table, ONES)
        client.checkpoint().wait()
        client.push_pull(table, ONES)
        place.rename(other)
        place.write_text("no directory")
        client = client.restore(str(other))
        table = counting_table(client)
        assert np.array_equal(np.asarray(client.push_pull(table, ONES)), -2 * ONES)
        client.close()


class Position:
    """A place in the data."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"at": 7}


@pytest.mark.thorough
def test_a_state_of_each_worker_that_the_checkpoint_lacks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster:
        client = connect(cluster, 0, "grpc")
        client.attach_state("there", Position(), per_rank=True)
        client.push_pull(counting_table(client), ONES)
        made = client.checkpoint().wait()
        client = client.restore(made.url)
        for name in ("there", "not there"):
            client.attach_state(name, Position(), per_rank=True)
        ps.DistributedSampler(client, 8, name="sampler")
        client.close()
    told = [r.getMessage() for r in caplog.records if "state_not_in_checkpoint" in r.getMessage()]
    assert told == [
        f"event=state_not_in_checkpoint name={name} url={made.url}"
        for name in ('"not there"', "sampler")
    ]


@pytest.mark.thorough
def test_nothing_of_the_timeline_before_stays_in_memory(tmp_path: Path) -> None:
    """What is shared has no name: only whoever has it can let go of it."""
    with ps.local_cluster(1, 1, checkpoint_url=str(tmp_path / "checkpoints")) as cluster:
        client = connect(cluster, 0, "shm")
        server = cluster.process_ids["server 0"]
        both_step([client], [counting_table(client)], 1)
        client.checkpoint().wait()
        before = shared_segments(server)
        for _ in range(2):
            client = client.restore()
            both_step([client], [counting_table(client)], 1)
            assert shared_segments(server) == before
        client.close()


def shared_segments(process_id: int) -> tuple[int, int]:
    """How many a process has open, and mapped."""
    links = open_files(process_id)
    maps = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()
    name = "memfd:pushpull"
    return sum(name in link for link in links), sum(name in each for each in maps)


@pytest.mark.thorough
def test_a_client_that_a_restore_has_closed_restores_nothing_and_is_collected(
    tmp_path: Path,
) -> None:
    """Its module goes on at the next client."""
    module = torch.nn.Linear(4, 1)

    def step(client: ps.Client) -> weakref.ref[ps.Client]:
        optimizer = ps.DistributedOptimizer(client, module, ps.SGD(lr=0.1), name="model")
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return weakref.ref(client)

    with ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster:
        client = connect(cluster, 0, "auto")
        closed = step(client)
        made, before = client.checkpoint().wait(), client
        client = client.restore(made.url)
        with pytest.raises(ps.InvalidConfig, match="has been closed; connect again"):
            before.restore(made.url)
        del before
        step(client)  # else it were fenced by a further restore
        gc.collect()
        assert closed() is None
        client.close()


@pytest.mark.thorough
@pytest.mark.parametrize("overlap_pull", [False, True])
def test_the_same_module_goes_on_with_another_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, overlap_pull: bool
) -> None:
    """The optimizer before it has hooks there, and perhaps values on their way. Nothing collects
    it meanwhile.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def optimizer_of(client: ps.Client) -> ps.DistributedOptimizer:
        return ps.DistributedOptimizer(
            client, model, ps.SGD(lr=0.1), name="model", overlap_pull=overlap_pull
        )

    def step(optimizer: ps.DistributedOptimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    gc.disable()
    try:
        with ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster:
            client = connect(cluster, 0, "auto")
            optimizer = optimizer_of(client)
            step(optimizer)
            made = client.checkpoint().wait()
            saved = {name: each.clone() for name, each in model.state_dict().items()}
            step(optimizer)
            client = client.restore(made.url)
            assert ("values_not_awaited" in caplog.text) is overlap_pull
            optimizer = optimizer_of(client)
            assert optimizer.clock == 1
            torch.testing.assert_close(model.state_dict(), saved, rtol=0, atol=0)
            step(optimizer)
            assert optimizer.clock == 2
            client.close(leave=False)
            assert set(model.state_dict()) == set(saved)
    finally:
        gc.enable()


@pytest.mark.thorough
def test_workers_that_disagreed_take_no_step_until_all_are_taken_back(tmp_path: Path) -> None:
    """Whoever had its seal refused is told so by each later call, at once, also if it agrees."""
    root = str(tmp_path / "checkpoints")

    def begin(client: ps.Client) -> ps.DistributedOptimizer:
        model = torch.nn.Linear(2, 2)
        optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="m")
        take(optimizer, 0.1)
        return optimizer

    def take(optimizer: ps.DistributedOptimizer, rate: float) -> None:
        (group,) = optimizer.param_groups
        group["lr"] = rate
        optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in group["params"]]).sum().backward()
        optimizer.step()

    def disagree(optimizer: ps.DistributedOptimizer, rate: float) -> None:
        with pytest.raises(ps.InvalidConfig, match=r"disagree about clock 2 .* client\.restore"):
            take(optimizer, rate)

    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster, ThreadPoolExecutor(2) as pool:
        clients = [connect(cluster, rank, "shm") for rank in range(2)]
        optimizers = list(pool.map(begin, clients))
        made, _ = pool.map(lambda client: client.checkpoint().wait(), clients)
        list(pool.map(disagree, optimizers, [0.1, 0.2]))
        (refused,) = [client for client in clients if client.engine.pushes.refused]
        (table,) = [each for each in refused.tables.handles if "buffers" not in each.name]
        for _ in range(2):
            with pytest.raises(
                ps.InvalidConfig, match=r"disagree about clock 2 .* can take no step of it"
            ):
                refused.push(table, np.ones(6, np.float32), hyperparameters={"lr": 0.1})
            with pytest.raises(ps.InvalidConfig, match="disagree about clock 2"):
                take(optimizers[clients.index(refused)], 0.1)
        clients = list(pool.map(lambda client: client.restore(made.url), clients))
        assert [each.clock for each in pool.map(begin, clients)] == [2, 2]
        for client in clients:
            client.close()
