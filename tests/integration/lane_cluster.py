"""A cluster for tests of the lanes, whose servers' mappings and metrics can be looked at."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleProcess, start_scheduler, start_servers

SETTLE_DEADLINE_S = 20.0
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass
class Served:
    """One server: its process, and where its metrics are."""

    process: RoleProcess
    address: str
    http_address: str

    def metric(self, name: str) -> float:
        """The present value of a metric, summed over its labels."""
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not among the metrics"
        return sum(map(float, found))

    @property
    def shm_sessions(self) -> int:
        """Sessions that share memory with it."""
        return int(self.metric("pushpull_server_shm_sessions"))

    @property
    def mappings(self) -> list[str]:
        """The names of the memfds that it has mapped."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8")
        return re.findall(r"/memfd:(\S+)", maps)


@dataclass
class LaneCluster:
    """A scheduler and its servers."""

    address: str
    servers: list[Served] = field(default_factory=list)
    roles: list[RoleProcess] = field(default_factory=list)

    @property
    def shm_sessions(self) -> list[int]:
        """Sessions that share memory, server by server."""
        return [server.shm_sessions for server in self.servers]

    def metric(self, name: str) -> float:
        """A metric, summed over the servers."""
        return sum(server.metric(name) for server in self.servers)


@contextmanager
def lane_cluster(
    servers: int = 2, workers: int = 2, environment: Mapping[str, str] = NOTHING
) -> Iterator[LaneCluster]:
    """A running cluster; `environment` is its roles'."""
    shape = ClusterShape(servers, workers, environment=environment)
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, shape)
        cluster = LaneCluster(scheduler.address)
        for process in start_servers(launcher, shape, scheduler.address):
            ready = launcher.wait_ready(process)
            cluster.servers.append(Served(process, ready.address, ready.http_address))
        cluster.roles += launcher.processes
        yield cluster


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask again and again, each time over the network or the kernel, until it is so."""
    give_up_s = time.monotonic() + SETTLE_DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {SETTLE_DEADLINE_S} s: {what}"
