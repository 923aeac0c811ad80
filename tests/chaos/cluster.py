"""The cluster of a chaos run: three servers, in a network of their own where that can be had."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import (
    Launcher,
    RoleCommand,
    RoleProcess,
    start_server,
    worker_command,
)
from tests.chaos.network import Network
from tests.integration.lane_cluster import Served
from tests.integration.replicated_cluster import Lines, ReplicatedCluster

REPLICAS = 2
_FIRST_STEPS_S = 60.0


class ChaosCluster(ReplicatedCluster):
    """Servers in a namespace each, if there is a network."""

    def __init__(
        self, launcher: Launcher, shape: ClusterShape, lines: Lines, network: Network | None
    ) -> None:
        self._network = network
        self.places: dict[int, str] = {}
        super().__init__(launcher, shape, lines)

    def _launch(self, index: int) -> RoleProcess:
        if self._network is None:
            return start_server(self._launcher, self._shape, self.address, index)
        name, address = self._network.add()
        bare = RoleCommand(
            "server", index, "tests.chaos.in_namespace", environment=self._shape.environment
        )
        arguments = (
            *(name, "ps_server"),
            *(f"--listen={address}:0", f"--http-listen={address}:0"),
            f"--scheduler={self.address}",
            f"--ready-file={self._launcher.ready_file(bare)}",
            *self._shape.update_log.server_arguments(index),
        )
        process = self._launcher.start(replace(bare, arguments=arguments))
        self.places[process.pid] = name
        return process

    def place(self, server: Served) -> str:
        """The namespace of a server."""
        return self.places[server.process.pid]


@dataclass
class WorkerNews:
    """What a worker has said."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    taken: int | None = None
    found: list[list[int]] | None = None
    failure: str = ""


class ChaosWorkers:
    """The worker processes, and what they say; they are told to stop by `finish`."""

    def __init__(
        self, launcher: Launcher, address: str, count: int, module: str = "tests.chaos.worker"
    ) -> None:
        self._news = threading.Condition()
        self._said: dict[int, WorkerNews] = {}
        self._launcher = launcher
        self.count = count
        self.processes: list[RoleProcess] = []
        for rank in range(count):
            command = worker_command(rank, address, (str(count),), {})
            command = replace(command, module=module)
            self._said[rank] = WorkerNews()
            self.processes.append(launcher.start(command))

    def hear(self, role: RoleProcess, line: str) -> None:
        """A line of a worker's."""
        if not line.startswith("chaos "):
            return
        said = json.loads(line.removeprefix("chaos "))
        with self._news:
            news = self._said.setdefault(role.command.index or 0, WorkerNews())
            news.steps += [(begun_s, ended_s) for begun_s, ended_s in said.get("steps", ())]
            news.taken = said.get("taken", news.taken)
            news.found = said.get("found", news.found)
            news.failure = said.get("failure", news.failure)
            self._news.notify_all()

    def check(self) -> None:
        """None has failed or ended.

        Raises:
            RuntimeError: one has.
        """
        for rank, process in enumerate(self.processes):
            if self._said[rank].failure or process.exit is not None:
                lines = "\n".join(process.recent_lines[-8:])
                raise RuntimeError(f"worker {rank}: {self._said[rank].failure or lines}")

    @property
    def failed_calls(self) -> list[str]:
        """The calls of workers that failed, in their words."""
        with self._news:
            return [f"worker {rank}: {n.failure}" for rank, n in self._said.items() if n.failure]

    def worst_step_s(self, since_s: float) -> float:
        """The longest step, from its push to its commit, of those that ended after that."""
        with self._news:
            ended = (step for news in self._said.values() for step in news.steps)
            return max((e - b for b, e in ended if e > since_s), default=0.0)

    def rate_within(self, times: Sequence[tuple[float, float]]) -> float:
        """Steps that were committed a second, while any of these times lasted."""
        with self._news:
            ended = [e for news in self._said.values() for _, e in news.steps]
        count = sum(began_s < e <= ended_s for began_s, ended_s in times for e in ended)
        return count / sum(ended_s - began_s for began_s, ended_s in times)

    def first_commits(self, since_s: float, deadline_s: float) -> list[float]:
        """For each worker, the seconds from then to the first commit of a step begun after it."""
        found: dict[int, float] = {}

        def look() -> bool:
            for rank, news in self._said.items():
                later = (e for b, e in reversed(news.steps[-256:]) if b > since_s)
                first_s = min(later, default=None)
                if first_s is not None:
                    found.setdefault(rank, first_s - since_s)
            return len(found) == self.count or any(n.failure for n in self._said.values())

        with self._news:
            self._news.wait_for(look, deadline_s)
        self.check()
        if len(found) < self.count:
            raise RuntimeError(f"within {deadline_s:g} s only workers {sorted(found)} went on")
        return list(found.values())

    def finish(self, deadline_s: float) -> tuple[list[int], list[list[list[int]]]]:
        """Have them stop: how many steps each took, and which numbers of them each found."""
        for process in self.processes:
            process.send(signal.SIGUSR1)
        with self._news:
            self._news.wait_for(
                lambda: all(n.found is not None or n.failure for n in self._said.values()),
                deadline_s,
            )
            said = [self._said[rank] for rank in range(self.count)]
        for rank, news in enumerate(said):
            if news.taken is None or news.found is None:
                raise RuntimeError(f"worker {rank} does not come to an end: {news.failure}")
        for process in self.processes:
            process.wait(deadline_s)
        return [n.taken or 0 for n in said], [n.found or [] for n in said]


@dataclass
class Chaos:
    """A running cluster with workers under way."""

    cluster: ChaosCluster
    workers: ChaosWorkers
    network: Network | None


@contextmanager
def chaos(
    shape: ClusterShape,
    network: Network | None,
    output: Path | None = None,
    worker: str = "tests.chaos.worker",
) -> Iterator[Chaos]:
    """A cluster whose workers, processes of that module, are training; all of it ends with the
    block.
    """
    lines = Lines()
    hearers: list[ChaosWorkers] = []

    def on_line(role: RoleProcess, line: str) -> None:
        lines.add(role, line)
        for workers in hearers:
            workers.hear(role, line)
        if log is not None and not line.startswith("chaos "):
            log.write(f"[{role.name} {role.pid}] {line}\n")

    with ExitStack() as stack:
        log = stack.enter_context(output.open("w", buffering=1)) if output is not None else None
        launcher = stack.enter_context(Launcher(on_line=on_line))
        cluster = ChaosCluster(launcher, shape, lines, network)
        try:
            workers = ChaosWorkers(launcher, cluster.address, shape.worker_count, worker)
            hearers.append(workers)
            workers.first_commits(time.monotonic(), _FIRST_STEPS_S)
            yield Chaos(cluster, workers, network)
        finally:
            for role in launcher.processes:  # one that is paused would not hear that it shall stop
                role.send(signal.SIGCONT)
            cluster.close()


@dataclass(frozen=True)
class Footprint:
    """What a process uses."""

    resident_mib: float
    thread_count: int
    descriptor_count: int


def footprint(process: RoleProcess) -> Footprint:
    """Of a running process."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    numbers = {
        name: int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads")
    }
    descriptors = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    return Footprint(int(numbers["VmRSS"]) / 1024, int(numbers["Threads"]), descriptors)
