"""Steps of a planned cluster in simulated time, and the resource that is busiest in them.

Workers are alike, and so are servers: all workers are simulated, and of the servers the fullest one
alone (on one host, where they share its cores, all). Bytes and work are grouped: a worker's step
moves in up to 32 segments, each with its share of every server. So 1000 workers take seconds.

A step, or an outer step:
    1. The worker computes; on one host without GPUs it takes one of the cores. Segments of its
       gradient are ready one after the other while backward runs; those of a pseudo-gradient after
       the last inner step. Each passes the worker's processor and link, the network, the server's
       link and its loop, which accumulates it.
    2. When all of them are received, a message there and back later, the seal is with the server.
    3. The gate. BSP: the step of the last worker whose step is waited for starts the update. SSP
       and ASP: each step is an update. With a replica the update goes to a backup before it counts;
       the server is another's backup, so its loop and its link do a backup's work as well.
    4. The pull, when the gate lets it go: segments pass the server's loop and link, the worker's
       link and its processor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

import simpy
from simpy.events import ProcessGenerator

from ps_cli.compare.modes import ComparedMode
from ps_cli.plan.cluster import PlannedCluster, load_of
from ps_cli.plan.costs import Costs
from ps_cli.plan.simulation import Cores, Latch, Station, Thread
from ps_core.consistency import Mode

_FEWEST_SEGMENTS, _MOST_SEGMENTS = 8, 32
_SEGMENTS_A_STEP = 8_000
"""Segments of all workers together, within the limits above."""

_STEP_COUNT = 4
_STRAGGLER_STEP_COUNT = 12
"""Steps of a worker that count, after the warm-up."""

_MOST_WARM_UP = 40
"""Steps in which workers of SSP run apart."""

COMPUTE, WORKER_CPU, WORKER_LINK = "compute", "worker's CPU", "worker's link"
SERVER_CPU, SERVER_LINK, OTHERS = "server's CPU", "server's link", "stragglers"
HOST_CORES = "host's cores"
"""The busiest one if roles share a host, whose computing and processors are parts of it."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A mode's steps, once they are steady. An outer step counts as its inner ones, each with its
    share of what the outer one takes.

    Attributes:
        step_s: the time from one step of a worker to its next, the mean of the workers; under BSP
            from one update to the next.
        steps_per_s: steps of all workers that took part in an update.
        discarded_share: of their steps, those that came too late for theirs (backup workers).
        pushed_bytes: of a worker's step.
        pulled_bytes: of a worker's step.
        server_in_bytes: what the fullest server receives in the time of a step.
        server_out_bytes: what it sends.
        busy: the share of the time that each resource is busy: the busier direction of a link,
            computing, and waiting for the step of a slower worker; means of the workers and of
            one host's cores; of the servers the fullest one.
    """

    step_s: float
    steps_per_s: float
    discarded_share: float
    pushed_bytes: float
    pulled_bytes: float
    server_in_bytes: float
    server_out_bytes: float
    busy: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda name: self.busy[name])


def planned_step(cluster: PlannedCluster, mode: ComparedMode, costs: Costs) -> PlannedStep:
    """Simulate steps of a cluster under `mode`.

    Raises:
        InvalidConfig: the costs lack its codec or its optimizer, or it has too few workers.
    """
    return _Cluster(cluster, mode, costs).steady()


class _Node:
    """A node: the directions of its link, and the one thread of its process that counts."""

    def __init__(self, simulation: simpy.Environment, cores: Cores | None) -> None:
        self.cpu = Thread(simulation, cores) if cores else Station(simulation)
        self.sending, self.receiving = Station(simulation), Station(simulation)
        self.computed_s = self.waited_s = 0.0

    @property
    def link_busy_s(self) -> float:
        return max(self.sending.busy_s, self.receiving.busy_s)


class _Server(_Node):
    """A server with a share of the model. Workers move `moved_share` of theirs with it: all of it
    where it stands for all servers.
    """

    def __init__(
        self, simulation: simpy.Environment, cores: Cores | None, share: float, moved_share: float
    ) -> None:
        super().__init__(simulation, cores)
        self.share, self.moved_share = share, moved_share


class _Gate:
    """The newest clock whose steps are there (`decided`) and applied (`version`), of all workers or
    of so many that an update needs.
    """

    def __init__(self, simulation: simpy.Environment) -> None:
        self.decided = self.version = 0
        self.decided_s: dict[int, float] = {}
        self.arrived: Counter[int] = Counter()
        self._simulation = simulation
        self._applied: dict[int, simpy.Event] = {}

    def passed(self, clock: int) -> simpy.Event:
        """Happens when the clock is applied, or at once if it is."""
        if clock <= self.version:
            return self._simulation.timeout(0)
        return self._applied.setdefault(clock, self._simulation.event())

    def apply(self, clock: int) -> None:
        self.version = clock
        if clock in self._applied:
            self._applied.pop(clock).succeed()


class _Cluster:
    """The processes of a simulated cluster."""

    def __init__(self, planned: PlannedCluster, mode: ComparedMode, costs: Costs) -> None:
        self._planned = planned
        self._consistency = mode.consistency
        self._load = load_of(planned, mode, costs)
        self._inner_count = mode.outer_steps or 1
        self._backward_share = 0.0 if mode.outer_steps else planned.backward_share
        self._simulation = simpy.Environment()
        self._gate = _Gate(self._simulation)
        cores = Cores(self._simulation, planned.host_cores) if planned.host_cores else None
        self._cores = cores
        self._workers = [_Node(self._simulation, cores) for _ in range(planned.worker_count)]
        shares = planned.shares
        moved = [(each, each) for each in shares] if cores else [(shares[0], 1.0)]
        self._servers = [_Server(self._simulation, cores, *each) for each in moved]
        self._byte_s = 0.0 if cores else 1 / planned.bytes_per_s
        self._trip_s = costs.call_s + planned.latency_s
        segments = _SEGMENTS_A_STEP // planned.worker_count
        self._segment_count = max(_FEWEST_SEGMENTS, min(_MOST_SEGMENTS, segments))
        self._step_count = self._taken_count = self._discarded_count = 0

    def steady(self) -> PlannedStep:
        """The steps after the warm-up."""
        planned, load = self._planned, self._load
        count, share = planned.worker_count, planned.shares[0]
        warm_up, steps = 1, _STEP_COUNT
        if planned.compute.slow_s:
            steps = _STRAGGLER_STEP_COUNT
            warm_up += min(_MOST_WARM_UP, 2 * self._consistency.staleness)
        for rank in range(count):
            self._simulation.process(self._worker(rank))
        self._run(warm_up)
        before, began_s = self._busy_s(), self._simulation.now
        taken_before, discarded_before = self._taken_count, self._discarded_count
        self._run(warm_up + steps)
        after, elapsed_s = self._busy_s(), self._simulation.now - began_s
        taken = self._taken_count - taken_before
        discarded = self._discarded_count - discarded_before
        replica_bytes = load.replica_bytes * (1 if self._is_bsp else count)
        inner_count = self._inner_count
        return PlannedStep(
            step_s=elapsed_s / (steps * inner_count),
            steps_per_s=taken * inner_count / elapsed_s,
            discarded_share=discarded / (taken + discarded),
            pushed_bytes=load.pushed_bytes / inner_count,
            pulled_bytes=load.pulled_bytes / inner_count,
            server_in_bytes=share * (count * load.pushed_bytes + replica_bytes) / inner_count,
            server_out_bytes=share * (count * load.pulled_bytes + replica_bytes) / inner_count,
            busy={name: (after[name] - before[name]) / elapsed_s for name in after},
        )

    @property
    def _is_bsp(self) -> bool:
        return self._consistency.mode is Mode.BSP

    def _run(self, step_count: int) -> None:
        """Go on until so many updates are made, or steps of each worker in the mean."""
        ended_count = step_count * self._planned.worker_count
        while self._gate.version < step_count if self._is_bsp else self._step_count < ended_count:
            self._simulation.step()

    def _busy_s(self) -> dict[str, float]:
        workers, fullest, cores = self._workers, self._servers[0], self._cores
        shared = {HOST_CORES: cores.busy_s / self._planned.host_cores} if cores else {}
        return shared | {
            COMPUTE: fmean(node.computed_s for node in workers),
            WORKER_CPU: fmean(node.cpu.busy_s for node in workers),
            WORKER_LINK: fmean(node.link_busy_s for node in workers),
            SERVER_CPU: fullest.cpu.busy_s,
            SERVER_LINK: fullest.link_busy_s,
            OTHERS: fmean(node.waited_s for node in workers),
        }

    def _worker(self, rank: int) -> ProcessGenerator:
        """Steps without end."""
        node, gate, backward_share = self._workers[rank], self._gate, self._backward_share
        segments = range(self._segment_count)
        move_count = len(segments) * len(self._servers)
        clock = 0
        while True:
            clock = max(clock, gate.decided) + 1  # a discarded step leaves clocks out
            compute_s = self._compute_s(rank, clock)
            received = Latch(self._simulation, move_count)
            for _ in segments:
                yield self._computed(compute_s * (1 - backward_share) / len(segments))
            for _ in segments:
                yield self._computed(compute_s * backward_share / len(segments))
                for server in self._servers:
                    self._simulation.process(self._push(node, server, received))
            node.computed_s += compute_s
            yield received.opened
            yield self._simulation.timeout(self._trip_s)
            yield from self._sealed(node, clock)
            pulled = Latch(self._simulation, move_count)
            for server in self._servers:
                self._simulation.process(self._answer(node, server, pulled))
            yield pulled.opened
            self._step_count += 1
            if not self._is_bsp:
                self._taken_count += 1

    def _compute_s(self, rank: int, clock: int) -> float:
        """The computation of a worker's step, or of all inner ones of an outer step."""
        compute, worker_count = self._planned.compute, self._planned.worker_count
        if not compute.slow_s:
            return compute.fast_s * self._inner_count
        first = (clock - 1) * self._inner_count + 1
        inner_clocks = range(first, first + self._inner_count)
        return sum(compute.seconds(rank, worker_count, inner) for inner in inner_clocks)

    def _computed(self, seconds: float) -> simpy.Event:
        """Happens when a worker has computed for so long."""
        if self._cores and not self._planned.has_gpus:
            return self._cores.compute(seconds)
        return self._simulation.timeout(seconds)

    def _push(self, worker: _Node, server: _Server, received: Latch) -> ProcessGenerator:
        load, parts = self._load, self._segment_count
        share, moved_share = server.share / parts, server.moved_share / parts
        yield worker.cpu.serve(load.worker_push_s * moved_share)
        yield worker.sending.serve(load.pushed_bytes * self._byte_s * moved_share)
        yield self._simulation.timeout(self._planned.latency_s / 2)
        yield server.receiving.serve(load.pushed_bytes * self._byte_s * share)
        yield server.cpu.serve(load.server_push_s * share)
        received.arrive()

    def _answer(self, worker: _Node, server: _Server, pulled: Latch) -> ProcessGenerator:
        """A worker's pull, which has one segment at a time in the server's loop, as others have."""
        share = server.share / self._segment_count
        for _ in range(self._segment_count):
            yield server.cpu.serve(self._load.server_pull_s * share)
            self._simulation.process(self._pull(worker, server, pulled))

    def _pull(self, worker: _Node, server: _Server, pulled: Latch) -> ProcessGenerator:
        load, parts = self._load, self._segment_count
        share, moved_share = server.share / parts, server.moved_share / parts
        yield server.sending.serve(load.pulled_bytes * self._byte_s * share)
        yield self._simulation.timeout(self._planned.latency_s / 2)
        yield worker.receiving.serve(load.pulled_bytes * self._byte_s * moved_share)
        yield worker.cpu.serve(load.worker_pull_s * moved_share)
        pulled.arrive()

    def _sealed(self, node: _Node, clock: int) -> ProcessGenerator:
        """The worker's step is with the servers: wait until its pull may go."""
        gate, began_s = self._gate, self._simulation.now
        if clock <= gate.decided:
            self._discarded_count += 1
        if not self._is_bsp:
            yield self._updated()
        needed = self._planned.worker_count - self._consistency.backup_workers
        gate.arrived[clock] += 1
        if gate.arrived[clock] == needed:
            self._simulation.process(self._decided(clock))
        if self._consistency.mode is not Mode.ASP:
            awaited = clock - self._consistency.staleness
            yield gate.passed(awaited)
            node.waited_s += max(0.0, gate.decided_s.get(awaited, began_s) - began_s)

    def _decided(self, clock: int) -> ProcessGenerator:
        """As many workers as an update needs, or all, have sent their steps of the clock."""
        yield self._simulation.timeout(self._consistency.grace_ms / 1000)
        self._gate.decided, taken = clock, self._gate.arrived[clock]
        self._gate.decided_s[clock] = self._simulation.now
        if self._is_bsp:
            yield self._updated()
            self._taken_count += taken
        self._gate.apply(clock)

    def _updated(self) -> simpy.Event:
        """Happens when all servers have applied an update."""
        updated = Latch(self._simulation, len(self._servers))
        for server in self._servers:
            self._simulation.process(self._update(server, updated))
        return updated.opened

    def _update(self, server: _Server, updated: Latch) -> ProcessGenerator:
        load, share = self._load, server.share
        yield server.cpu.serve((load.update_s + load.replica_s) * share)
        if load.replica_bytes:
            yield server.sending.serve(load.replica_bytes * self._byte_s * share)
            yield server.receiving.serve(load.replica_bytes * self._byte_s * share)
            yield self._simulation.timeout(self._trip_s)
        updated.arrive()
