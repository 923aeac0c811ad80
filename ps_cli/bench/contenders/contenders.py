"""The processes of a benchmark, which start together and end together."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from ps_cli.bench.contenders.ceilings import TcpSender
from ps_cli.bench.contenders.child import Child, Done
from ps_runtime.launch.cluster_shape import NO_UPDATE_LOG, ClusterShape, UpdateLogPlan
from ps_worker.client.local_cluster import LocalCluster

ContenderT = TypeVar("ContenderT")

RAW_GRPC = "ps_cli.bench.contenders.raw_grpc"
TORCH_RPC = "ps_cli.bench.contenders.torch_rpc"


def enter_all(
    stack: ExitStack, contenders: Sequence[AbstractContextManager[ContenderT]]
) -> list[ContenderT]:
    """Start contenders at once; they end with `stack`.

    Blocking: until all have started, or one has failed and the others have started.

    Raises:
        PushpullError: from the first that failed.
    """
    # The pool stays as long, because children end with the thread that forked them.
    pool = stack.enter_context(ThreadPoolExecutor(max_workers=len(contenders)))
    starting = [pool.submit(stack.enter_context, contender) for contender in contenders]
    wait(starting)
    return [started.result() for started in starting]


@dataclass(frozen=True, slots=True)
class Pair:
    """A client that does actions, and its server.

    `is_restless`: both use the processor while they are idle, so they are paused between actions.
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

    @property
    def pids(self) -> tuple[int, int]:
        """The process ids, the client's first."""
        return self.client.pid, self.server.pid


@dataclass(frozen=True, slots=True)
class Cluster:
    """A pushpull cluster, with workers that do actions."""

    lane: str
    workers: list[Child]
    server_pids: tuple[int, ...]

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


@dataclass(frozen=True, slots=True)
class Load:
    """The tables of each worker of a cluster: one of this size for each name (see
    `ps_cli.bench.contenders.worker`). For latencies a worker makes `call_count` calls.
    """

    byte_count: int
    names: tuple[str, ...] = ("sgd",)
    call_count: int = 0


class Servers(NamedTuple):
    """A cluster's servers. Update logs are in the system's temporary folder, so its disk counts."""

    server_count: int = 1
    replica_count: int = 1
    has_update_log: bool = False


ONE_SERVER = Servers()


@contextlib.contextmanager
def raw_grpc(byte_count: int, call_count: int) -> Iterator[Pair]:
    size = str(byte_count)
    with (
        Child(RAW_GRPC, "server", size) as server,
        Child(RAW_GRPC, "client", size, server.ready["address"], str(call_count)) as client,
    ):
        yield Pair(client, server)


@contextlib.contextmanager
def torch_rpc(lane: str, byte_count: int, call_count: int) -> Iterator[Pair]:
    """A torch RPC parameter server and its trainer; `lane` is one of its module's."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pushpull-bench-"))
        store = str(Path(folder) / "store")
        children = Child.start_all(
            (TORCH_RPC, "server", lane, str(byte_count), store),
            (TORCH_RPC, "client", lane, str(byte_count), store, str(call_count)),
        )
        for child in children:
            stack.enter_context(child)
        server, client = children
        # Its shared-memory transport polls: two idle processes would keep two cores busy.
        pair = Pair(client, server, is_restless=True)
        pair.pause()
        yield pair


@contextlib.contextmanager
def cluster(
    lane: str, worker_count: int, load: Load, servers: Servers = ONE_SERVER
) -> Iterator[Cluster]:
    """A scheduler, servers, and workers that use the lane."""
    with ExitStack() as stack:
        log = NO_UPDATE_LOG
        if servers.has_update_log:
            folder = tempfile.TemporaryDirectory(prefix="pushpull-bench-")
            log = UpdateLogPlan(stack.enter_context(folder))
        shape = ClusterShape(
            servers.server_count, worker_count, replica_count=servers.replica_count, update_log=log
        )
        roles = stack.enter_context(LocalCluster.of(shape))
        given = (str(load.byte_count), str(load.call_count), *load.names)
        workers = Child.start_all(
            *(
                ("ps_cli.bench.contenders.worker", roles.address, lane, str(rank), *given)
                for rank in range(worker_count)
            )
        )
        for worker in workers:
            stack.enter_context(worker)
        process_ids = roles.process_ids
        pids = tuple(process_ids[f"server {index}"] for index in range(servers.server_count))
        yield Cluster(lane, workers, pids)


@contextlib.contextmanager
def tcp_loopback(byte_count: int) -> Iterator[TcpSender]:
    """A TCP connection to a process that receives."""
    with Child("ps_cli.bench.contenders.ceilings", str(byte_count)) as receiver:
        port = receiver.do("port").result
        receiver.tell("receive")
        with contextlib.closing(TcpSender(("127.0.0.1", port), byte_count)) as sender:
            yield sender
        receiver.answer()
