"""Who asks for a checkpoint, when another is being made, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_core.errors import StaleAssignment
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from ps_runtime.cluster import wire
from ps_runtime.grpc.errors import from_rpc_error
from ps_worker.client.checkpoints import CheckpointTicket
from ps_worker.client.connection import GRACE_S
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.integration.resumed_training import DEADLINE_S, Position, together

pytestmark = pytest.mark.slow

COUNT = 500


class Script:
    """A worker that takes steps and says where they end."""

    def __init__(self, client: ps.Client) -> None:
        self._client = client
        self._table = client.create_table(
            "counted", COUNT, optimizer=ps.SGD(lr=1.0), reduction="sum", block_elements=64
        )
        self._own = Position()
        client.attach_state("steps", self._own, per_rank=True)

    def step(self, count: int = 1, then: Callable[[], object] = lambda: None) -> None:
        """Take steps; do something before the last one's save point."""
        for left in reversed(range(count)):
            self._client.push_pull(self._table, np.ones(COUNT, np.float32))
            self._own.seen += 1
            if not left:
                then()
            self._client.save_point()


@pytest.mark.thorough
@pytest.mark.parametrize("worker_count", [1, 2])
def test_the_last_step_has_two_and_both_are_waited_for(tmp_path: Path, worker_count: int) -> None:
    """The second is asked for while the first is written, and no step follows. Who knows already
    where the first is cut, which is after that step, is given that one.
    """
    root = str(tmp_path / "checkpoints")

    def work(client: ps.Client) -> list[int]:
        script = Script(client)
        script.step(3)
        tickets = [client.checkpoint("one"), client.checkpoint("another")]
        return [ticket.wait(DEADLINE_S).number for ticket in tickets]

    with ps.local_cluster(1, worker_count, checkpoint_url=root) as cluster:
        for first, second in together(cluster.address, worker_count, work):
            assert first == 1
            assert second in (1, 2)
    with resolve(root).reader as reader:
        assert [table.clock for table in reader.manifest.tables] == [3]
        assert [worker.clock for worker in reader.manifest.workers] == [3] * worker_count


@pytest.mark.thorough
def test_all_that_ask_after_the_same_step_have_the_same(tmp_path: Path) -> None:
    """The second asks when the first one's is complete: it has all that there is."""
    root = str(tmp_path / "checkpoints")
    asked: Future[CheckpointTicket] = Future()

    def work(client: ps.Client) -> list[int]:
        script = Script(client)
        if client.rank == 0:
            script.step(3)
            asked.set_result(client.checkpoint())
        else:
            script.step(3, lambda: asked.result(DEADLINE_S))
        first = asked.result().wait(DEADLINE_S).number
        tickets = [client.checkpoint()] if client.rank else []
        script.step()
        tickets.append(client.checkpoint())
        return [first, *(ticket.wait(DEADLINE_S).number for ticket in tickets)]

    with ps.local_cluster(2, 2, checkpoint_url=root) as cluster:
        assert together(cluster.address, 2, work) == [[1, 2], [1, 1, 2]]
    with resolve(root).reader as reader:
        assert [table.clock for table in reader.manifest.tables] == [4]


@pytest.mark.thorough
def test_one_that_waits_for_its_own_next_step_is_told(tmp_path: Path) -> None:
    """The other one has begun it; when both have taken it, the checkpoint is there."""
    begun: Future[None] = Future()

    def work(client: ps.Client) -> int:
        script = Script(client)
        script.step(2)
        if client.rank:
            begun.set_result(None)
            script.step()
            return 0
        begun.result(DEADLINE_S)
        ticket = client.checkpoint()
        with pytest.raises(ps.WaitExpired, match=r"checkpoint 1 is of step 3 .* is at 2"):
            ticket.wait(DEADLINE_S)
        script.step()
        return ticket.wait(DEADLINE_S).number

    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        assert together(cluster.address, 2, work) == [1, 0]


@pytest.mark.thorough
def test_a_ticket_may_be_waited_for_while_training_goes_on(tmp_path: Path) -> None:
    """In another thread waiting is no save point: the states are as of the steps' ends."""
    root = str(tmp_path / "checkpoints")
    with (
        ps.local_cluster(1, 1, checkpoint_url=root) as cluster,
        ps.connect(cluster.address, rank=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        script = Script(client)
        script.step()
        waiting = pool.submit(client.checkpoint().wait, DEADLINE_S)
        while not waiting.done():
            script.step()
        assert waiting.result().number == 1
    with resolve(root).reader as reader:
        (worker,), (table,) = reader.manifest.workers, reader.manifest.tables
        assert worker.clock == table.clock == 1


@pytest.mark.thorough
def test_who_does_not_know_of_a_cut_is_told(tmp_path: Path) -> None:
    """It may have all the caller's steps: a newer view says so."""
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(tmp_path / "checkpoints")) as cluster,
        ps.connect(cluster.address, rank=0) as client,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        Script(client).step()
        assert client.checkpoint().wait(DEADLINE_S).number == 1
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = scheduler_pb2.CreateCheckpointRequest(
            session=wire.session_to_proto(client.session), view_number=1
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.CreateCheckpoint(request, timeout=DEADLINE_S)
        assert isinstance(from_rpc_error(caught.value), StaleAssignment)


@pytest.mark.thorough
@pytest.mark.parametrize("first", [0, 1])
def test_all_wait_after_the_same_step_whatever_they_have_begun(tmp_path: Path, first: int) -> None:
    """The second to ask had begun its next step when the first one's was cut, and takes none."""
    root = str(tmp_path / "checkpoints")
    asked: Future[CheckpointTicket] = Future()

    def work(client: ps.Client) -> list[int]:
        model = nn.Linear(4, 1)
        optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=0.1))
        found = []
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if client.rank == first:
            asked.set_result(client.checkpoint())
            found.append(asked.result().wait(DEADLINE_S).number)
        else:
            asked.result(DEADLINE_S)
            found.append(client.checkpoint().wait(DEADLINE_S).number)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        found.append(client.checkpoint().wait(DEADLINE_S).number)
        return found

    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        (one, other) = together(cluster.address, 2, work)
    assert one == other
    assert one[0] < one[1]
    store = CheckpointStore(root)
    assert len(store.names()) == 2, "what was begun again left nothing"
    for name, clock in zip(sorted(store.names()), (2, 3), strict=True):
        with store.open(name) as reader:
            assert {table.clock for table in reader.manifest.tables} == {clock}
            assert [worker.clock for worker in reader.manifest.workers] == [clock] * 2
            assert not any(worker.problem for worker in reader.manifest.workers)


def test_a_wait_that_expires_says_so() -> None:
    ticket = CheckpointTicket(Future(), DEADLINE_S, None)
    with pytest.raises(ps.WaitExpired, match=r"is not complete after .* wait again"):
        ticket.wait(-GRACE_S)


@pytest.mark.thorough
@pytest.mark.parametrize("says_so", [True, False], ids=["save_point", "at zero_grad"])
def test_one_waits_for_it_while_the_others_wait_for_that_one(tmp_path: Path, says_so: bool) -> None:
    """`if client.is_main: client.checkpoint().wait()` before a barrier: all are at one step."""
    root = str(tmp_path / "checkpoints")

    def work(client: ps.Client) -> int:
        model = nn.Linear(4, 1)
        optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=0.1))
        client.attach_state("steps", own := Position(), per_rank=True)
        for _ in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                own.seen += 1
                if says_so:
                    client.save_point()
            if client.is_main:
                client.checkpoint().wait(DEADLINE_S / 3)
            client.barrier()
        return optimizer.clock

    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        assert together(cluster.address, 2, work) == [4, 4]
    store = CheckpointStore(root)
    assert len(store.names()) == 2
    for name, clock in zip(sorted(store.names()), (2, 4), strict=True):
        with store.open(name) as reader:
            assert {table.clock for table in reader.manifest.tables} == {clock}
            assert [worker.clock for worker in reader.manifest.workers] == [clock] * 2
            assert not any(worker.problem for worker in reader.manifest.workers)
