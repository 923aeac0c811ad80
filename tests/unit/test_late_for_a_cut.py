"""What a checkpoint that is cut waits for: the step of a worker, or the files of servers."""

from __future__ import annotations

import pytest

from ps_core.keys import NodeId
from tests.unit.test_cluster_checkpoints import MODEL, OTHER, Saving


def test_who_has_not_come_to_the_cut_is_named_and_not_the_servers_that_wait_for_it() -> None:
    cluster = Saving()
    checkpoints = cluster.cluster.checkpoints
    ahead, behind = (worker.node_id for worker in cluster.workers)
    checkpoints.reached = {ahead: {MODEL: 5}, behind: {MODEL: 4, OTHER: 4}, NodeId(99): {MODEL: 1}}
    cluster.cut()
    assert f"waits for a step of worker node {behind} (" in checkpoints.reason(cluster.now_s)
    for at in range(2):
        cluster.report(cluster.servers[at], cluster.written(at))
    assert "waits for the files of worker" in checkpoints.reason(cluster.now_s)


@pytest.mark.parametrize("consistency", ["asp", "bsp:backup=1"])
def test_a_cut_that_waits_for_no_late_worker_names_the_servers(consistency: str) -> None:
    cluster = Saving(consistency=consistency)
    checkpoints = cluster.cluster.checkpoints
    checkpoints.reached = {cluster.workers[1].node_id: {MODEL: 1}}
    cluster.cut()
    assert "waits for the files of server" in checkpoints.reason(cluster.now_s)
