"""Rows through the death of a server: the recovery, and every row's value afterwards.

Workers push whole numbers to random rows of a replicated table, a server that is primary of ranges
is ended by SIGKILL, and in the end each row must have the sum of all steps, each counted once.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from rich.table import Table as TextTable

import ps_worker as ps
from ps_cli.bench.contenders.child import Child, started
from ps_cli.bench.contenders.counted_rows import (
    BATCH_COUNT,
    LENGTH,
    all_rows,
    expected_rows,
    wrong_ids,
)
from ps_cli.bench.instruments.sampling import figures_table, rounded
from ps_cli.bench.settings import BenchSettings
from ps_core.cluster_view import ClusterView
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.keys import NodeId
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleProcess, start_scheduler, start_servers

ROW_COUNT = 1_000_000
QUICK_ROW_COUNT = 20_000
WORKER_COUNT = 2
LEASE_S = 1.0
"""As of `make chaos`, whose recoveries are those of a dense table."""

CALM_S, QUICK_CALM_S = 5.0, 1.0
"""Seconds of the rates before the kill, and after the ranges have their replicas again."""

_GOES_ON_S = 60.0
_HEALS_S = 120.0
_POLL_S = 0.02
_NAMED_COUNT = 5


class Death(NamedTuple):
    """One run, in which one server was killed.

    Attributes:
        range_count: the ranges that the server was primary of.
        recovery_s: from the kill to the first commit of a step that was begun after it.
        healed_s: from the kill until each range had its replicas again.
        worst_step_s: the longest from the push of a step to its commit.
        before_steps_s: steps a second of all workers before the kill.
        after_steps_s: the same when each range had its replicas again.
        step_count: steps of all workers.
        wrong_ids: the rows whose values are not the sums of what was pushed.
    """

    range_count: int
    recovery_s: float
    healed_s: float
    worst_step_s: float
    before_steps_s: float
    after_steps_s: float
    step_count: int
    wrong_ids: list[int]


def failover(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes some minutes, a new cluster for each round and lane."""
    shape = _shape(settings)
    row_count = QUICK_ROW_COUNT if settings.quick else ROW_COUNT
    calm_s = QUICK_CALM_S if settings.quick else CALM_S
    deaths: dict[str, list[Death]] = {lane: [] for lane in settings.lanes}
    for number in range(1, settings.round_count + 1):
        for lane, made in deaths.items():
            listener = settings.within(f"{lane}, round {number} of {settings.round_count}")
            made.append(_death(shape, lane, row_count, calm_s, listener.on_progress))
    return {
        "environment": {
            "row_count": row_count,
            "row_elements": LENGTH,
            "batch_ids": BATCH_COUNT,
            "lease_s": shape.lease_s,
            "calm_s": calm_s,
            "round_count": settings.round_count,
        },
        "ceilings": {},
        "rows": [_row(shape, lane, made) for lane, made in deaths.items()],
        "samples_s": {
            lane: [rounded(death.recovery_s) for death in made] for lane, made in deaths.items()
        },
    }


def _shape(settings: BenchSettings) -> ClusterShape:
    """The cluster: by default with a server more than replicas, so that each range has all of its
    replicas again after the death of one.
    """
    replica_count = settings.replica_count
    if settings.size_mb:
        raise InvalidConfig(
            f"sparse is measured on rows of {LENGTH} elements; leave the size of "
            f"{settings.size_mb} MB out"
        )
    server_count = settings.server_count or replica_count + 1
    if server_count < replica_count:
        raise InvalidConfig(
            f"replicas is {replica_count} and servers is {server_count}, but each replica of a "
            f"range needs a server of its own; give --servers {replica_count + 1}, which is the "
            "default"
        )
    return ClusterShape(server_count, WORKER_COUNT, replica_count=replica_count, lease_s=LEASE_S)


def _row(shape: ClusterShape, lane: str, deaths: Sequence[Death]) -> dict[str, Any]:
    def median(name: str) -> float:
        return rounded(statistics.median(getattr(death, name) for death in deaths))

    wrong = sorted({each for death in deaths for each in death.wrong_ids})
    return {
        "lane": lane,
        "workers": shape.worker_count,
        "servers": shape.server_count,
        "replicas": shape.replica_count,
        "kill_count": len(deaths),
        "range_count": min(death.range_count for death in deaths),
        "recovery_s": median("recovery_s"),
        "recovery_max_s": rounded(max(death.recovery_s for death in deaths)),
        "healed_s": median("healed_s"),
        "worst_step_s": rounded(max(death.worst_step_s for death in deaths)),
        "before_steps_s": median("before_steps_s"),
        "after_steps_s": median("after_steps_s"),
        "step_count": sum(death.step_count for death in deaths),
        "wrong_row_count": sum(len(death.wrong_ids) for death in deaths),
        "wrong_ids": wrong[:_NAMED_COUNT],
    }


# --- one run


def _death(
    shape: ClusterShape,
    lane: str,
    row_count: int,
    calm_s: float,
    on_progress: Callable[[str], None],
) -> Death:
    with ExitStack() as stack:
        on_progress("starting")
        launcher = stack.enter_context(Launcher())
        scheduler = start_scheduler(launcher, shape).address
        processes = start_servers(launcher, shape, scheduler)
        servers = {launcher.wait_ready(each).address: each for each in processes}
        commands = [
            ("counted_rows:member", scheduler, lane, str(rank), str(row_count))
            for rank in range(shape.worker_count)
        ]
        load = _Load(stack.enter_context(started(*commands)))
        reader = stack.enter_context(ps.connect(scheduler, role="reader", lane=lane))
        cluster = _Watched(reader, servers, shape.replica_count)

        on_progress("pushing")
        load.push()
        cluster.healed()
        before_steps_s = load.rate(calm_s)
        cluster.healed()  # else the only holder of a range might be the one that is killed
        victim, range_count = cluster.busiest()
        on_progress(f"killing a server that is primary of {range_count} ranges")
        killed_s = time.perf_counter()
        cluster.kill(victim)
        recovered_s = load.first_commit(time.perf_counter())
        cluster.healed(without=victim)
        healed_s = time.perf_counter() - killed_s
        on_progress("pushing")
        after_steps_s = load.rate(calm_s)
        step_counts = load.stop()

        on_progress("comparing all rows")
        found = all_rows(reader, row_count)
        wrong = wrong_ids(found, expected_rows(step_counts, row_count))
    return Death(
        range_count,
        recovered_s - killed_s,
        healed_s,
        load.worst_step_s,
        before_steps_s,
        after_steps_s,
        sum(step_counts.values()),
        wrong.tolist(),
    )


class _Watched:
    """The cluster as a reader sees it, and its servers by address."""

    def __init__(
        self, reader: ps.Client, servers: dict[str, RoleProcess], replica_count: int
    ) -> None:
        self._reader = reader
        self._servers = servers
        self._replica_count = replica_count

    @property
    def _view(self) -> ClusterView:
        return self._reader.engine.view

    def busiest(self) -> tuple[NodeId, int]:
        """The server that is primary of most ranges, and their number."""
        primaries = [r.primary for r in self._view.ranges if r.primary is not None]
        victim = max(set(primaries), key=primaries.count)
        return victim, primaries.count(victim)

    def kill(self, victim: NodeId) -> None:
        """Returns when its process has ended."""
        (address,) = (node.address for node in self._view.nodes if node.node_id == victim)
        self._servers[address].send(signal.SIGKILL)
        _until(lambda: self._servers[address].exit is not None, "the killed server ends", _HEALS_S)

    def healed(self, without: NodeId | None = None) -> None:
        """Wait until each range has its replicas, on other servers than `without`."""
        living_count = len(self._servers) - (without is not None)
        count = min(self._replica_count, living_count)

        def is_healed() -> bool:
            ranges = [r for r in self._view.ranges if r.primary is not None]
            return bool(ranges) and all(
                len(r.in_sync) == count and not r.catching_up and without not in r.in_sync
                for r in ranges
            )

        _until(is_healed, f"each range has {count} replicas", _HEALS_S)


class _Load:
    """The workers, and all steps that they have told of."""

    def __init__(self, workers: list[Child]) -> None:
        self._workers = workers
        self._commits: list[tuple[float, float]] = []

    def push(self) -> None:
        """All begin to push; returns when each has committed a step."""
        self._all("push")
        self.first_commit(time.perf_counter(), len(self._workers))

    def rate(self, lasts_s: float) -> float:
        """Committed steps a second from now on."""
        began_s = time.perf_counter()
        time.sleep(lasts_s)
        ended_s = time.perf_counter()
        self._hear()
        return sum(began_s <= each < ended_s for _, each in self._commits) / (ended_s - began_s)

    def first_commit(self, since_s: float, worker_count: int = 1) -> float:
        """The first commit of a step that was begun after `since_s`; returns when so many workers
        have one.
        """
        firsts: dict[int, float] = {}

        def is_found() -> bool:
            for worker, commits in enumerate(self._hear()):
                ends = [ended_s for began_s, ended_s in commits if began_s >= since_s]
                if ends:
                    firsts.setdefault(worker, ends[0])
            return len(firsts) >= worker_count

        _until(is_found, "the workers commit steps", _GOES_ON_S)
        return min(firsts.values())

    def stop(self) -> dict[int, int]:
        """The steps of each rank, all committed."""
        step_counts = dict(enumerate(self._all("stop")))
        self._hear()
        return step_counts

    @property
    def worst_step_s(self) -> float:
        return max(ended_s - began_s for began_s, ended_s in self._commits)

    def _hear(self) -> list[list[tuple[float, float]]]:
        """The new commits of each worker."""
        heard = self._all("commits")
        for commits in heard:
            self._commits += map(tuple, commits)
        return heard

    def _all(self, action: str) -> list[Any]:
        for worker in self._workers:
            worker.tell(action)
        return [worker.answer().result for worker in self._workers]


def _until(condition: Callable[[], bool], what: str, deadline_s: float) -> None:
    give_up_s = time.perf_counter() + deadline_s
    while not condition():
        if time.perf_counter() > give_up_s:
            raise WaitExpired(f"not within {deadline_s:g} s: {what}")
        time.sleep(_POLL_S)


# --- what is said of it


def failover_view(document: dict[str, Any]) -> TextTable:
    environment, first = document["environment"], document["rows"][0]
    table = figures_table(
        f"sparse, {first['replicas']} replicas on {first['servers']} servers, one killed: "
        f"{environment['row_count']:,} rows",
        *("recovery", "most", "healed", "worst", "before", "after", "sums"),
        caption="seconds from the kill to a commit, and to all replicas, and of the longest step; "
        "steps a second before the kill, and when all replicas are there again; "
        f"a lease of {environment['lease_s']:g} s, a new cluster for each kill",
    )
    for row in document["rows"]:
        plural = "" if row["kill_count"] == 1 else "s"
        table.add_row(
            f"{row['lane']}, {row['kill_count']} kill{plural}",
            *(
                f"{row[name]:.2f}"
                for name in ("recovery_s", "recovery_max_s", "healed_s", "worst_step_s")
            ),
            *(f"{row[name]:.1f}" for name in ("before_steps_s", "after_steps_s")),
            "WRONG" if row["wrong_row_count"] else "exact",
        )
    return table


def failover_fault(document: dict[str, Any]) -> str:
    """The reason why the benchmark failed; empty: all sums are exact."""
    row_count = document["environment"]["row_count"]
    return "; ".join(
        f"{row['lane']}: {row['wrong_row_count']} of {row_count * row['kill_count']} rows differ "
        f"from the sums of what was pushed, such as {', '.join(map(str, row['wrong_ids']))}"
        for row in document["rows"]
        if row["wrong_row_count"]
    )
