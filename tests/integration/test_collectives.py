"""Collective calls of real workers: what they give, who is missing, and what they outlive (S17)."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import ps_worker as ps
from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.collective_calls import host_of
from pushpull.v1 import parameters_pb2
from tests.integration.ctrl_c import ctrl_c_after, ctrl_c_in
from tests.integration.lane_cluster import LaneCluster, Served, lane_cluster, until
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
    together,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

ResultT = TypeVar("ResultT")

WORKERS = 3
WAIT_S = 5.0
PATIENCE = {
    "PUSHPULL_HEARTBEAT_INTERVAL_S": "0.2",
    "PUSHPULL_LEASE_S": "1.0",
    "PUSHPULL_WORKER_TIMEOUT_S": "1.5",
    "PUSHPULL_MAX_WORKERS": "4",
}


def connected(address: str, count: int, **options: Any) -> list[ps.Client]:
    options.setdefault("request_deadline_s", DEADLINE_S)
    return [ps.connect(address, rank=rank, **options) for rank in range(count)]


def at_each(clients: list[ps.Client], call: Callable[[ps.Client], ResultT]) -> list[ResultT]:
    """What a call returns at each of them, all at the same time."""
    return together([partial(call, client) for client in clients])


def error_of(call: Callable[[], object]) -> ps.PushpullError:
    with pytest.raises(ps.PushpullError) as failure:
        call()
    return failure.value


@pytest.fixture(scope="module")
def clients() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster, ExitStack() as stack:
        yield [stack.enter_context(client) for client in connected(cluster.address, WORKERS)]


# --- what they give


def test_numbers_tensors_and_dicts_are_reduced_the_same_at_each(clients: list[ps.Client]) -> None:
    def call(client: ps.Client) -> Any:
        value = {"seen": 2**60 + client.rank, "loss": 0.1 * client.rank, "by class": np.arange(3)}
        return client.all_reduce(value), client.all_reduce(client.rank, "mean", name="rank")

    for found, mean in at_each(clients, call):
        assert found["seen"] == 3 * 2**60 + 3
        assert found["loss"] == 0.0 + 0.1 + 0.2
        assert found["by class"].tolist() == [0, 3, 6]
        assert mean == 1.0


def test_a_host_at_an_older_view_says_so_within_the_requests_deadline(
    clients: list[ps.Client],
) -> None:
    connection = clients[0].connection
    view = connection.engine.view
    host = host_of(view)
    link = connection.engine.links.find(host.server) if host is not None else None
    assert link is not None
    ahead = parameters_pb2.EnterCollectiveRequest(view_number=view.view_number + 9, deadline_ms=300)
    asking = link.enter_collective(ahead, limits.DEFAULT_SESSION_DEADLINE_S / 2)
    failure = error_of(lambda: connection.asked(asking, DEADLINE_S))
    assert isinstance(failure, ps.WaitExpired)
    assert f"for view {view.view_number + 9} of the cluster" in failure.message
    assert f"the view is {view.view_number}," in failure.message


def test_a_tensor_that_requires_a_gradient_is_reduced_without_it(clients: list[ps.Client]) -> None:
    def call(client: ps.Client) -> torch.Tensor:
        given = torch.full((2,), float(client.rank), requires_grad=True)
        found: torch.Tensor = client.all_reduce(given, "max")
        assert not found.requires_grad
        assert given.tolist() == [float(client.rank)] * 2
        return found

    assert [found.tolist() for found in at_each(clients, call)] == [[2.0, 2.0]] * WORKERS


def test_gather_has_what_each_gives_by_rank(clients: list[ps.Client]) -> None:
    gathered = at_each(clients, lambda client: client.gather({"r": client.rank, "t": (1, b"x")}))
    assert gathered == [[{"r": rank, "t": (1, b"x")} for rank in range(WORKERS)]] * WORKERS


def test_broadcast_has_what_one_gives(clients: list[ps.Client]) -> None:
    assert (
        at_each(clients, lambda client: client.broadcast(f"of {client.rank}", src=1))
        == ["of 1"] * WORKERS
    )


def test_rank_0_is_main(clients: list[ps.Client]) -> None:
    assert [client.is_main for client in clients] == [True, False, False]


def test_nobody_leaves_a_barrier_before_all_are_there(clients: list[ps.Client]) -> None:
    arrived: list[int] = []

    def call(client: ps.Client) -> int:
        if client.rank:
            until(lambda: client.rank in arrived or len(arrived) >= client.rank, "those before")
        arrived.append(client.rank)
        client.barrier()
        return len(arrived)

    assert at_each(clients, call) == [WORKERS] * WORKERS


# --- what is refused


def test_calls_that_differ_are_refused_at_each_and_the_next_is_well(
    clients: list[ps.Client],
) -> None:
    def differ(client: ps.Client) -> ps.PushpullError:
        if client.rank == 1:
            return error_of(client.barrier)
        return error_of(lambda: client.all_reduce(torch.ones(2)))

    for error in at_each(clients, differ):
        assert isinstance(error, ps.InvalidConfig)
        assert "rank 0 called all_reduce(sum) of float32[2], rank 1 called barrier" in str(error)
    for error in at_each(
        clients,
        lambda client: error_of(lambda: client.all_reduce(torch.ones(1 + client.rank % 2))),
    ):
        assert "rank 0 called all_reduce(sum) of float32[1], rank 1" in str(error)
    assert at_each(clients, lambda client: client.all_reduce(1)) == [3, 3, 3]


def test_what_is_too_much_is_refused_before_it_is_sent_or_for_all(
    clients: list[ps.Client],
) -> None:
    too_long = bytes(limits.MAX_COLLECTIVE_BYTES)
    assert "expected at most" in str(error_of(lambda: clients[0].gather(too_long)))
    each = torch.zeros(3 * limits.MAX_COLLECTIVE_BYTES // 16)  # 3/4 of what one may give
    found = at_each(clients, lambda client: len(client.gather(each)))
    assert found == [WORKERS] * WORKERS
    clients[0].connection.check_usable()


def test_a_rank_that_is_not_here_has_nothing_to_hand_on(clients: list[ps.Client]) -> None:
    for error in at_each(clients, lambda client: error_of(lambda: client.broadcast(1, src=7))):
        assert "no worker of that rank takes part" in str(error)


# --- calls that are interrupted


def test_a_wait_that_expires_says_who_is_missing_and_the_call_goes_on(
    clients: list[ps.Client],
) -> None:
    first, *others = clients
    late = error_of(lambda: first.all_reduce(5, name="n", timeout_s=0.2))
    assert isinstance(late, ps.WaitExpired)
    for client in others:
        assert f"worker {client.rank} (node {client.session.node_id})" in str(late)
    assert "all_reduce(sum) 'n' of a number is not over after 0.2 s" in str(late)
    other = error_of(first.barrier)
    assert "was interrupted, and others may count on it: make that call again" in str(other)
    found = at_each(
        clients, lambda client: client.all_reduce(client.rank if client.rank else 700, name="n")
    )
    assert found == [5 + 1 + 2] * WORKERS, "what was given first counts, once"


@pytest.mark.thorough
def test_the_status_says_whom_a_call_waits_for(clients: list[ps.Client]) -> None:
    thread = threading.Thread(target=partial(clients[0].barrier, "shown"), daemon=True)
    thread.start()
    until(lambda: "worker 2" in clients[0].progress().waiting_for, "it waits")
    said = clients[0].progress().waiting_for
    assert said.startswith("barrier 'shown': it waits for worker 1 (node ")
    together([partial(client.barrier, "shown") for client in clients[1:]])
    thread.join(DEADLINE_S)
    assert clients[0].progress().waiting_for == ""


def test_ctrl_c_interrupts_a_call_and_the_same_call_goes_on(clients: list[ps.Client]) -> None:
    first, second, third = clients

    def interrupt() -> None:
        """As soon as the first worker's share is where they meet."""
        until(
            lambda: "worker 0" not in str(error_of(lambda: second.barrier("c", timeout_s=0.05))),
            "the first worker has made the call",
        )
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        first.barrier("c")
    thread.join()
    third_found, second_found, first_found = together(
        [partial(each.barrier, "c") for each in (third, second, first)]
    )
    assert (third_found, second_found, first_found) == (None, None, None)
    assert at_each(clients, lambda client: client.all_reduce(1)) == [3, 3, 3]


@pytest.mark.parametrize("verb", ["all_reduce", "broadcast", "gather"])
def test_ctrl_c_in_the_result_of_a_call_leaves_it_to_the_same_call(
    clients: list[ps.Client], verb: str
) -> None:
    """The others have theirs, and would not make the call again."""
    first, *others = clients

    def call(client: ps.Client) -> Any:
        return getattr(client, verb)(torch.ones(2), name="result", timeout_s=WAIT_S)

    with ThreadPoolExecutor(len(others)) as threads:
        found = [threads.submit(call, each) for each in others]
        with ctrl_c_after("unpacked"):
            call(first)
    assert str(call(first)) == str(found[0].result())
    assert at_each(clients, lambda client: client.all_reduce(1)) == [3, 3, 3]


def test_ctrl_c_at_a_lock_of_a_call_locks_the_client_s_thread_out_of_nothing(
    clients: list[ps.Client],
) -> None:
    with ctrl_c_in("__exit__", "threading.py"):
        clients[0].barrier("locked")
    at_each(clients, lambda client: client.barrier("locked", timeout_s=WAIT_S))


def test_ctrl_c_at_the_beginning_of_a_call_leaves_the_thread_its_calls(
    clients: list[ps.Client],
) -> None:
    """They were refused for good: another thread was said to be in a call."""
    with ctrl_c_after("_calling"):
        clients[0].barrier("begun")
    assert error_of(lambda: clients[0].barrier("begun", timeout_s=0.1)).code == "WAIT_EXPIRED"
    at_each(clients, lambda client: client.barrier("begun"))


# --- who comes and goes


@pytest.fixture
def small() -> Iterator[LaneCluster]:
    with lane_cluster(servers=1, workers=2, environment=PATIENCE) as cluster:
        yield cluster


def step_to(client: ps.Client, clock: int) -> ps.TableHandle:
    """Steps until it has taken that one; a worker that joins begins where the others are."""
    table = client.create_table("w", 64, optimizer=ps.SGD(lr=1.0), block_elements=64)
    client.pull(table)
    while table.clock < clock:
        client.push_pull(table, np.ones(64, np.float32))
    return table


@pytest.mark.thorough
def test_the_others_go_on_without_who_is_gone_and_its_successor_takes_part_when_it_steps(
    small: LaneCluster,
) -> None:
    first, second = clients = connected(small.address, 2)
    at_each(clients, partial(step_to, clock=1))
    assert at_each(clients, lambda client: client.all_reduce(10 + client.rank)) == [21, 21]
    second.close(leave=False)  # as a crash would
    assert first.all_reduce(10) == 10, "it was declared gone meanwhile"
    successor = ps.connect(small.address, rank=1, request_deadline_s=DEADLINE_S)
    assert successor.is_replacement
    successor.barrier()  # before its first step: nobody else is in it
    refused = error_of(lambda: successor.all_reduce(1))
    assert "worker 1 joins others that train" in str(refused)
    assert "if not client.is_late_joiner" in str(refused)
    assert first.all_reduce(10) == 10, "nobody waits for it before it steps"
    words = str(error_of(lambda: first.broadcast(src=1)))
    assert "or has joined and not taken a step yet" in words, "it is here"
    at_each([first, successor], partial(step_to, clock=5))
    found = at_each([first, successor], lambda client: client.all_reduce(10 + client.rank))
    assert found == [21, 21]
    for client in (first, successor):
        client.close()


def test_who_has_left_is_not_waited_for(small: LaneCluster) -> None:
    first, second = clients = connected(small.address, 2)
    at_each(clients, lambda client: client.barrier())
    second.close()
    assert first.gather("last") == ["last"]
    first.close()


@pytest.mark.thorough
def test_a_worker_beyond_the_first_takes_part_when_it_steps(small: LaneCluster) -> None:
    clients = connected(small.address, 2)
    at_each(clients, partial(step_to, clock=1))
    third = ps.connect(small.address, request_deadline_s=DEADLINE_S)
    assert third.rank == 2
    assert at_each(clients, lambda client: client.all_reduce(1)) == [2, 2]
    clients.append(third)
    at_each(clients, partial(step_to, clock=5))
    assert at_each(clients, lambda client: client.all_reduce(1)) == [3, 3, 3]
    for client in clients:
        client.close(leave=False)


def test_a_reader_is_refused(small: LaneCluster) -> None:
    with ps.connect(small.address, role="reader") as reader:
        assert not reader.is_main
        assert isinstance(error_of(reader.barrier), ps.NotPermitted)


# --- what they outlive


@pytest.mark.thorough
def test_a_host_that_does_not_answer_is_named(small: LaneCluster) -> None:
    first, second = connected(small.address, 2)
    at_each([first, second], partial(step_to, clock=1))
    small.servers[0].process.send(signal.SIGKILL)
    late = error_of(lambda: first.barrier(timeout_s=0.5))
    assert isinstance(late, ps.WaitExpired)
    assert re.match(
        "barrier is not over after 0.5 s: the round's host is server 1, and ", str(late)
    )
    for client in (first, second):
        client.close(leave=False)


@pytest.fixture(scope="module")
def replicated() -> Iterator[ReplicatedCluster]:
    with replicated_cluster(servers=3, workers=2) as cluster:
        yield cluster


def hosting(view: ClusterView) -> int:
    host = host_of(view)
    assert host is not None
    return host.server


class Counting:
    """A worker that makes calls until it is told to stop; each has a number of its own."""

    def __init__(self, client: ps.Client) -> None:
        self.client = client
        self.found: list[list[tuple[int, int]]] = []
        self.stop_at = 1 << 30

    def run(self) -> list[list[tuple[int, int]]]:
        while len(self.found) < self.stop_at:
            call = len(self.found)
            self.found.append(self.client.gather((self.client.rank, call)))
        return self.found


@pytest.mark.thorough
def test_calls_go_on_when_their_host_is_paused_killed_or_stopped_and_count_once(
    replicated: ReplicatedCluster,
) -> None:
    clients = connected(replicated.address, 2)
    at_each(clients, partial(step_to, clock=1))
    runs = [Counting(client) for client in clients]
    threads = [threading.Thread(target=run.run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()

    def pause(server: Served) -> None:
        server.process.send(signal.SIGSTOP)

    for end_host in (pause, replicated.kill, replicated.stop):
        count = len(runs[0].found)
        until(lambda count=count: len(runs[0].found) > count + 20, "calls are made")  # type: ignore[misc]
        node_id = hosting(replicated.views.newest)
        (dying,) = [s for s in replicated.living if replicated.node_id(s) == node_id]
        end_host(dying)
        replicated.views.until(lambda view: hosting(view) != node_id, "another host")  # noqa: B023
        count = len(runs[0].found)
        until(lambda count=count: len(runs[0].found) > count + 20, "calls go on")  # type: ignore[misc]
        dying.process.send(signal.SIGCONT)
        if end_host is pause:
            replicated.healed()
    end = max(len(run.found) for run in runs) + 20
    for run in runs:
        run.stop_at = end
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    expected = [[(0, call), (1, call)] for call in range(end)]
    assert [run.found[:end] for run in runs] == [expected, expected]
    for client in clients:
        client.close(leave=False)


@pytest.mark.thorough
def test_calls_need_no_scheduler() -> None:
    with lane_cluster(servers=1, workers=2) as cluster:
        clients = connected(cluster.address, 2)
        tables = at_each(clients, partial(step_to, clock=1))
        scheduler = cluster.roles[0]
        scheduler.send(signal.SIGKILL)
        assert scheduler.wait(DEADLINE_S) is not None
        assert at_each(clients, lambda client: client.all_reduce(1)) == [2, 2]
        gradient = np.ones(64, np.float32)
        together(
            [
                partial(client.push_pull, table, gradient)
                for client, table in zip(clients, tables, strict=True)
            ]
        )
        assert at_each(clients, lambda client: client.broadcast(client.rank)) == [0, 0]
        for client in clients:
            client.close(leave=False)
