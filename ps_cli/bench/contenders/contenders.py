"""The processes of a benchmark, which start together and end together."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from ps_cli.bench.contenders.child import Child, Done, started
from ps_runtime.launch.cluster_shape import NO_UPDATE_LOG, ClusterShape, UpdateLogPlan
from ps_worker.client.local_cluster import LocalCluster

ContenderT = TypeVar("ContenderT")

ALONE, HEAD_WIDTH = "alone", 64
"""A way of the contender `transformer`, and its width of a head; that file imports torch."""


def enter_all(
    stack: ExitStack, contenders: Sequence[AbstractContextManager[ContenderT]]
) -> list[ContenderT]:
    """Start contenders at once; they end with `stack`. If one fails, the others start first."""
    # The pool stays as long, because children end with the thread that forked them.
    pool = stack.enter_context(ThreadPoolExecutor(max_workers=len(contenders)))
    starting = [pool.submit(stack.enter_context, contender) for contender in contenders]
    wait(starting)
    return [each.result() for each in starting]


@dataclass(frozen=True, slots=True)
class Pair:
    """A client that does actions, and its server.

    `is_restless`: both use the processor while they are idle, so they are paused between actions.
    Their own check of what they have done is the action "check".
    """

    client: Child
    server: Child
    is_restless: bool = False

    def do(self, action: str) -> Done:
        if not self.is_restless:
            return self.client.do(action)
        for child in (self.server, self.client):
            child.resume()
        try:
            return self.client.do(action)
        finally:
            self.pause()

    def pause(self) -> None:
        """Take both off the processor."""
        for child in (self.client, self.server):
            child.pause()


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """A pushpull cluster, with workers that do actions."""

    lane: str
    workers: list[Child]
    server_pids: tuple[int, ...]
    server_http_addresses: tuple[str, ...]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self.workers)

    @property
    def server_pid(self) -> int:
        """The process id of the only server."""
        (pid,) = self.server_pids
        return pid

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, the servers' last."""
        return (*self.worker_pids, *self.server_pids)


class Servers(NamedTuple):
    """A cluster's servers. Update logs are in the system's temporary folder, so its disk counts.
    `environment` is added to that of its scheduler and servers.
    """

    server_count: int = 1
    replica_count: int = 1
    has_update_log: bool = False
    environment: Mapping[str, str] = MappingProxyType({})


ONE_SERVER = Servers()


@contextlib.contextmanager
def raw_grpc(byte_count: int, call_count: int) -> Iterator[Pair]:
    size = str(byte_count)
    with started(("raw_grpc:server", size)) as (server,):
        address = server.do("address").result
        server.tell("serve")
        with started(("raw_grpc:client", size, address, str(call_count))) as (client,):
            pair = Pair(client, server)
            yield pair
            pair.do("check")


@contextlib.contextmanager
def torch_rpc(lane: str, byte_count: int, call_count: int) -> Iterator[Pair]:
    """A torch RPC parameter server and its trainer; `lane` is one of its module's."""
    with tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder:
        given = (lane, str(byte_count), str(Path(folder) / "store"))
        commands = ("torch_rpc:server", *given), ("torch_rpc:client", *given, str(call_count))
        with _restless(commands) as pair:
            yield pair


@contextlib.contextmanager
def torch_rows(lane: str, row_count: int) -> Iterator[Pair]:
    """A torch RPC server of rows and its trainer; `lane` is one of `torch_rpc`."""
    with tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder:
        given = (lane, str(Path(folder) / "store"))
        commands = ("rows:rpc_server", *given), ("rows:rpc_client", *given, str(row_count))
        with _restless(commands) as pair:
            yield pair


@contextlib.contextmanager
def _restless(commands: tuple[tuple[str, ...], tuple[str, ...]]) -> Iterator[Pair]:
    """The server and the client of torch RPC."""
    with started(*commands) as (server, client):
        # Its shared-memory transport polls: two idle processes would keep two cores busy.
        pair = Pair(client, server, is_restless=True)
        pair.pause()
        yield pair
        pair.do("check")


def members(
    count: int, byte_count: int, names: Sequence[str] = ("sgd",), call_count: int = 0
) -> list[tuple[str, ...]]:
    """The commands of so many workers, each with a table of this size for each name; for latencies
    a worker makes `call_count` calls.
    """
    given = (str(byte_count), str(call_count), *names)
    return [("worker:member", str(rank), *given) for rank in range(count)]


@contextlib.contextmanager
def cluster(
    lane: str,
    commands: Sequence[tuple[str, ...]],
    servers: Servers = ONE_SERVER,
    worker_count: int | None = None,
) -> Iterator[MeasuredCluster]:
    """A scheduler, servers, and processes with `worker_count` workers (None: one each), which use
    the lane; the scheduler's address and the lane go before the arguments of each command.
    """
    with ExitStack() as stack:
        log = NO_UPDATE_LOG
        if servers.has_update_log:
            folder = tempfile.TemporaryDirectory(prefix="pushpull-bench-")
            log = UpdateLogPlan(stack.enter_context(folder))
        shape = ClusterShape(
            servers.server_count,
            worker_count or len(commands),
            environment=servers.environment,
            replica_count=servers.replica_count,
            update_log=log,
        )
        roles = stack.enter_context(LocalCluster.of(shape))
        workers = stack.enter_context(
            started(*((entry, roles.address, lane, *given) for entry, *given in commands))
        )
        pids = roles.process_ids
        server_pids = tuple(pids[f"server {index}"] for index in range(servers.server_count))
        yield MeasuredCluster(lane, workers, server_pids, roles.server_http_addresses)
