"""Which server catches up on a range, and which backup becomes its primary (S8)."""

from __future__ import annotations

from collections import Counter

from ps_core.cluster_view import BackupRequest, RangeAssignment, Role
from ps_core.keys import NodeId
from tests.unit.cluster_harness import Harness


def backup_request(assignment: RangeAssignment, *backups: NodeId) -> BackupRequest:
    epoch = assignment.assignment_epoch
    return BackupRequest(assignment.range_id, epoch, frozenset(backups))


def test_while_more_catch_up_than_are_missing_no_further_server_does() -> None:
    """One was silent for a while, and another was named in its place."""
    cluster = Harness(server_count=6, replica_count=2, range_count=8)
    servers = [cluster.join(Role.SERVER) for _ in range(6)]
    cluster.create(cluster.join(Role.WORKER))
    primary = servers[0]
    first = next(r for r in cluster.cluster.view.ranges if r.primary == primary.node_id)
    cluster.cluster.set_backups(primary, [backup_request(first)])
    cluster.pass_time(1, *servers)

    def catching_up() -> set[NodeId]:
        return set(cluster.cluster.view.ranges[first.range_id].catching_up)

    (joining,) = catching_up()
    cluster.pass_time(20, *(each for each in servers if each.node_id != joining))
    (other,) = catching_up() - {joining}
    assert catching_up() == {joining, other}
    cluster.pass_time(1, *servers)
    assert catching_up() == {joining, other}


def test_of_several_backups_the_one_with_the_fewest_ranges_is_promoted() -> None:
    cluster = Harness(server_count=4, replica_count=3, range_count=16)
    servers = [cluster.join(Role.SERVER) for _ in range(4)]
    cluster.create(cluster.join(Role.WORKER))
    first = cluster.cluster.view.ranges[0]
    victim = next(each for each in servers if each.node_id == first.primary)
    heavy, light = sorted(first.backups)
    for primary in servers:  # the server with the higher number has few ranges from now on
        mine = [r for r in cluster.cluster.view.ranges if r.primary == primary.node_id]
        asked = [backup_request(r, *(set(r.backups) - {light})) for r in mine]
        if primary is not victim and primary.node_id != light:
            cluster.cluster.set_backups(primary, asked)
    before = cluster.cluster.view.ranges
    counts = Counter(node_id for r in before for node_id in r.holders)
    assert counts[light] < counts[heavy]
    cluster.leave(victim)
    after = cluster.cluster.view.ranges
    for was in before:
        if was.primary == victim.node_id and light in was.backups:
            assert after[was.range_id].primary == light
    assert after[first.range_id].primary == light
