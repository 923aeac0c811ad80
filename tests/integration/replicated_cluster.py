"""A cluster whose servers die and come: every wait is for a view, a line of a log or a call."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

import ps_worker as ps
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_runtime.cluster.wire import session_to_proto, view_from_proto
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleProcess, start_scheduler, start_server
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.integration.lane_cluster import NOTHING, Served

LEASE_S = 1.0
DEADLINE_S = 45.0
"""Of any one wait: it ends in a few leases, or in as many seconds as two cores need for torch."""

_LINE_COUNT = 4096


class Views:
    """The newest view, as the scheduler streams it to a reader of the cluster."""

    def __init__(self, address: str) -> None:
        self._reader = ps.connect(address, role="reader")
        self._channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        session = session_to_proto(self._reader.session)
        self._status = partial(
            stub.GetClusterStatus, scheduler_pb2.GetClusterStatusRequest(session=session)
        )
        self._call = stub.WatchCluster(scheduler_pb2.WatchClusterRequest(session=session))
        self._news = threading.Condition()
        self._view: ClusterView | None = None
        self.on_view: list[Callable[[ClusterView], None]] = []
        self._thread = threading.Thread(target=self._watch, name="views", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            for response in self._call:
                view = view_from_proto(response.view)
                for listener in self.on_view:
                    listener(view)
                with self._news:
                    self._view = view
                    self._news.notify_all()
        except grpc.RpcError:
            return  # closed, or the cluster has ended: who waits then says for what

    @property
    def newest(self) -> ClusterView:
        """The newest view that came."""
        return self.until(lambda _: True, "a view")

    def until(
        self, condition: Callable[[ClusterView], bool], what: str, deadline_s: float = DEADLINE_S
    ) -> ClusterView:
        """The first view of which it is so."""
        with self._news:
            self._news.wait_for(
                lambda: self._view is not None and condition(self._view), deadline_s
            )
            assert self._view is not None, f"no view came within {deadline_s:g} s"
            assert condition(self._view), f"not within {deadline_s:g} s: {what}"
            return self._view

    def catch_up(self) -> ClusterView:
        """Wait for the view that the scheduler has at this moment: a stream may be behind."""
        least = self._status(timeout=DEADLINE_S).view.view_number
        return self.until(lambda view: view.view_number >= least, f"view {least}")

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()
        self._thread.join()
        self._channel.close()
        self._reader.close()


class ReplicatedCluster:
    """A scheduler and servers that come and die. Made by `replicated_cluster`."""

    def __init__(self, launcher: Launcher, shape: ClusterShape, lines: Lines) -> None:
        self._launcher = launcher
        self._shape = shape
        self._lines = lines
        self._count = 0
        self._environments: dict[int, Mapping[str, str]] = {}  # settings of some servers' own
        ready = start_scheduler(launcher, shape)
        self.address, self.scheduler_http = ready.address, ready.http_address
        self.scheduler = launcher.processes[0]
        self.servers: list[Served] = []
        self.views = Views(self.address)
        self.start(shape.server_count)

    def kill_scheduler(self) -> None:
        """SIGKILL; returns when the process has ended. `views` know nothing from then on."""
        self.scheduler.send(signal.SIGKILL)
        assert self.scheduler.wait(DEADLINE_S) is not None

    def begin_scheduler_again(self) -> None:
        """Start another one where it was, and go on; `scheduler_served` waits for it."""
        self.scheduler = self._launcher.start_again(self.scheduler.command)

    def scheduler_served(self) -> None:
        """Wait until the one that was started again serves, and `views` are its."""
        self._launcher.wait_ready(self.scheduler, DEADLINE_S)
        self.views.close()
        self.views = Views(self.address)

    def start_scheduler_again(self) -> None:
        """Start another one where it was, and wait until it serves."""
        self.begin_scheduler_again()
        self.scheduler_served()

    @property
    def journal_directory(self) -> Path:
        """Where the scheduler keeps its journal, if it does."""
        return self._launcher.journal_directory

    # --- servers

    @property
    def living(self) -> list[Served]:
        """The servers that were neither killed nor have ended."""
        return [server for server in self.servers if server.process.exit is None]

    def begin(self, environment: Mapping[str, str] = NOTHING) -> RoleProcess:
        """Start another server, and go on; `served` waits for it."""
        self._count += 1
        self._environments[self._count - 1] = environment
        return self._launch(self._count - 1)

    def _launch(self, index: int) -> RoleProcess:
        environment = {**self._shape.environment, **self._environments.get(index, NOTHING)}
        shape = replace(self._shape, environment=environment)
        return start_server(self._launcher, shape, self.address, index)

    def served(self, process: RoleProcess) -> Served:
        """A server that was begun, when it serves and `views` know it."""
        ready = self._launcher.wait_ready(process, 2 * DEADLINE_S)
        self.views.catch_up()
        self.servers.append(Served(process, ready.address, ready.http_address))
        return self.servers[-1]

    def start(self, count: int = 1) -> list[Served]:
        """Start more servers, and wait until they serve."""
        return [self.served(process) for process in [self.begin() for _ in range(count)]]

    def begin_again(self, server: Served) -> RoleProcess:
        """Start a server with the arguments of another one, its update log among them."""
        index = server.process.command.index
        assert index is not None
        return self._launch(index)

    def start_again(self, server: Served) -> Served:
        """The same, and wait until it serves."""
        return self.served(self.begin_again(server))

    def stop(self, server: Served) -> None:
        """SIGTERM; returns when the process has ended."""
        server.process.send(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) is not None

    def kill(self, server: Served) -> None:
        """SIGKILL; returns when the process has ended."""
        server.process.send(signal.SIGKILL)
        assert server.process.wait(DEADLINE_S) is not None

    def have(self, count: int) -> list[Served]:
        """So many living servers, every range at its replicas; the newest are at the end."""
        if len(self.living) < count:
            self.start(count - len(self.living))
        self.healed()
        while len(self.living) > count:
            self.kill(self.living[0])
            self.healed()
        return self.living

    # --- ranges

    def node_id(self, server: Served) -> int:
        """The number that the scheduler gave it."""
        found = [n.node_id for n in self.views.newest.nodes if n.address == server.address]
        assert found, server.address
        return max(found)  # a port may have been that of one that died

    def healed(self, deadline_s: float = DEADLINE_S) -> ClusterView:
        """Wait until the living hold every range as often as they shall, and none that is dead
        does.
        """
        addresses = {server.address for server in self.living}
        count = min(len(addresses), max(1, self._shape.replica_count))

        def is_healed(view: ClusterView) -> bool:
            ids = {node.node_id for node in view.nodes if node.address in addresses}
            return len(ids) == len(addresses) and all(
                len(r.in_sync) == count and ids.issuperset(r.holders)
                for r in view.ranges
                if r.primary is not None  # else it holds nothing yet
            )

        return self.views.until(is_healed, f"every range has {count} replicas", deadline_s)

    def primary_of(self, server: Served) -> list[RangeAssignment]:
        """The ranges that it is primary of."""
        node_id = self.node_id(server)
        return [r for r in self.views.newest.ranges if r.primary == node_id]

    def a_primary(self) -> Served:
        """A living server that is primary of something, once one is: the oldest of them."""

        def found(view: ClusterView) -> list[Served]:
            primaries = {r.primary for r in view.ranges}
            newest = {n.address: n.node_id for n in sorted(view.nodes, key=lambda n: n.node_id)}
            return [server for server in self.living if newest.get(server.address) in primaries]

        return found(self.views.until(lambda view: bool(found(view)), "one is a primary"))[0]

    def taken_over_from(self, server: Served) -> ClusterView:
        """Wait until it is primary of nothing."""
        node_id = self.node_id(server)
        return self.views.until(
            lambda view: all(r.primary != node_id for r in view.ranges),
            f"others serve what server {node_id} did",
        )

    # --- what roles say

    def wait_line(self, role: RoleProcess, pattern: str, count: int = 1) -> list[str]:
        """Wait until so many lines of a role have it; all of those that have."""
        return self._lines.wait(role, pattern, count)

    def lines(self, role: RoleProcess, pattern: str) -> list[str]:
        """The lines of a role that have it."""
        return self._lines.find(role, pattern)

    def close(self) -> None:
        """End the watching; the launcher ends the processes."""
        self.views.close()


class Lines:
    """All that roles print, by process."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._lines: dict[int, deque[str]] = {}

    def add(self, role: RoleProcess, line: str) -> None:
        with self._news:
            self._lines.setdefault(role.pid, deque(maxlen=_LINE_COUNT)).append(line)
            self._news.notify_all()

    def find(self, role: RoleProcess, pattern: str) -> list[str]:
        with self._news:
            return self._found(role, pattern)

    def _found(self, role: RoleProcess, pattern: str) -> list[str]:
        return [line for line in self._lines.get(role.pid, ()) if re.search(pattern, line)]

    def wait(self, role: RoleProcess, pattern: str, count: int) -> list[str]:
        with self._news:
            self._news.wait_for(lambda: len(self._found(role, pattern)) >= count, DEADLINE_S)
            found = self._found(role, pattern)
            said = "\n".join(list(self._lines.get(role.pid, ()))[-20:])
        assert len(found) >= count, f"{role.name} did not say {pattern!r} {count} times:\n{said}"
        return found


@contextmanager
def replicated_cluster(
    servers: int = 2, workers: int = 2, environment: Mapping[str, str] = NOTHING, **shape: Any
) -> Iterator[ReplicatedCluster]:
    """A running cluster of two replicas a range and a lease of a second; `shape` as of
    `ClusterShape`.
    """
    given = {"replica_count": 2, "lease_s": LEASE_S, **shape}
    lines = Lines()
    with Launcher(on_line=lines.add) as launcher:
        made = ClusterShape(servers, workers, environment=environment, **given)
        cluster = ReplicatedCluster(launcher, made, lines)
        try:
            yield cluster
        finally:
            for role in launcher.processes:  # one that is paused would not hear that it shall stop
                role.send(signal.SIGCONT)
            cluster.close()


def together(runs: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run them on a thread each; what they return, or the first that one raised."""
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run(index: int, each: Callable[[], Any]) -> None:
        try:
            results[index] = each()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(runs)]
    give_up_s = time.monotonic() + 2 * DEADLINE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, give_up_s - time.monotonic()))
    if failures:
        raise failures[0]
    assert len(results) == len(threads), "a worker does not come to an end"
    return [results[index] for index in sorted(results)]
