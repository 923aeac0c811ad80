"""Primaries are spread evenly again under load, after a server was killed and another came, and
after each server was stopped and started in turn (S9).

Real processes, two replicas, a lease of a second. Nothing is lost, nothing counts twice, no call
raises, and no step waits for long.
"""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

import ps_worker as ps
from ps_core.cluster_view import ClusterView
from tests.integration import counted_steps
from tests.integration.counted_steps import Counted
from tests.integration.replicated_cluster import DEADLINE_S, ReplicatedCluster, replicated_cluster

pytestmark = pytest.mark.timeout(240)

WORKERS = 2
COUNTED = Counted(WORKERS, block_count=24)
GOES_ON_S = 8.0
MOST_STOPPED_S = 1.0
"""For which a range may have stopped on a machine that does much else; 0.1 s is usual."""


def _spread(view: ClusterView) -> list[int]:
    """Ranges of each living server as primary, the fewest first."""
    held = Counter(r.primary for r in view.ranges if r.primary is not None)
    return sorted(held[node_id] for node_id in view.living_servers)


def _is_even(view: ClusterView) -> bool:
    spread = _spread(view)
    is_whole = all(len(r.in_sync) == 2 and not r.catching_up for r in view.ranges if r.primary)
    return len(spread) == 3 and spread[-1] - spread[0] <= 1 and is_whole


def _metric(cluster: ReplicatedCluster, name: str) -> float:
    with urllib.request.urlopen(f"http://{cluster.scheduler_http}/metrics", timeout=9) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _kill(cluster: ReplicatedCluster) -> None:
    dying = cluster.a_primary()
    cluster.kill(dying)
    cluster.taken_over_from(dying)
    cluster.start()


def _roll(cluster: ReplicatedCluster) -> None:
    """A rolling upgrade: the last one comes back to two that hold everything."""
    for server in list(cluster.living):
        cluster.stop(server)
        cluster.start_again(server)
        cluster.healed()


@pytest.mark.thorough
@pytest.mark.parametrize(("strike", "lane"), [(_kill, "grpc"), (_kill, "shm"), (_roll, "grpc")])
def test_primaries_are_even_again_under_load(
    strike: Callable[[ReplicatedCluster], None], lane: str
) -> None:
    with replicated_cluster(servers=3, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S)
            )
            for _ in range(WORKERS)
        ]
        made = [(client, COUNTED.create(client, "model")) for client in clients]
        cluster.healed()
        waits: list[tuple[float, float]] = []
        with counted_steps.under_load(COUNTED, made, GOES_ON_S, DEADLINE_S) as loads:
            strike(cluster)
            counted_steps.progress(loads, GOES_ON_S)
            cluster.healed()
            for load in loads:
                load.on_commit = lambda begun_s, ended_s: waits.append((begun_s, ended_s))
            began_s = time.monotonic()
            view = cluster.views.until(_is_even, "primaries are even")
            ended_s = time.monotonic()
            counted_steps.progress(loads, GOES_ON_S)
        most_s = max(after - before for before, after in waits)
        said = [line for s in cluster.servers for line in cluster.lines(s.process, "stopped_s=")]
        stopped = sorted(float(line.split("stopped_s=")[1].split()[0]) for line in said)
        took = sorted(after - before for before, after in waits)
        print(
            f"{_spread(view)} after {ended_s - began_s:.1f} s; a step waited {most_s:.3f} s at "
            f"most, {took[len(took) // 2]:.3f} s as a rule; ranges had stopped for {stopped} s"
        )
        assert stopped
        assert stopped[-1] < MOST_STOPPED_S
        lines = cluster.lines(cluster.scheduler, "event=ranges_handed_over")
        assert lines
        assert _metric(cluster, "pushpull_scheduler_hand_overs_total") >= len(lines)
