"""Servers that live and do not reach each other: who catches up in their place (S8)."""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.cluster_view import RangeAssignment, Role, Session
from ps_core.keys import RangeId
from tests.unit.test_configurations import Replicated, backup_request


def leave_each_other_out(cluster: Replicated, one: Session, other: Session) -> list[RangeId]:
    """The two hear nothing of each other any more; the ranges that lose a backup by that."""
    left_alone = []
    for primary, lost in ((one, other), (other, one)):
        mine = [r for r in cluster.of_primary(primary) if lost.node_id in r.backups]
        kept = [backup_request(r, *(set(r.backups) - {lost.node_id})) for r in mine]
        assert cluster.set_backups(primary, *kept) == ()
        left_alone += [r.range_id for r in mine]
    assert left_alone
    return left_alone


def catching_up(cluster: Replicated, range_ids: Sequence[RangeId]) -> set[tuple[int, ...]]:
    return {cluster.ranges[range_id].catching_up for range_id in range_ids}


def let_in(cluster: Replicated, range_ids: Sequence[RangeId], joined: Session) -> None:
    for range_id in range_ids:
        found: RangeAssignment = cluster.ranges[range_id]
        (primary,) = [s for s in cluster.servers if s.node_id == found.primary]
        cluster.set_backups(primary, backup_request(found, *found.backups, joined.node_id))


def test_whom_a_primary_left_out_does_not_join_it_while_another_lives() -> None:
    cluster = Replicated()
    one, other, third = cluster.servers
    left_alone = leave_each_other_out(cluster, one, other)
    cluster.pass_time(1, *cluster.servers)
    assert catching_up(cluster, left_alone) == {(third.node_id,)}


def test_who_was_left_out_joins_where_nobody_else_lives_and_another_that_comes_joins_too() -> None:
    cluster = Replicated()
    one, other, third = cluster.servers
    cluster.pass_time(30, one, other, cluster.worker)  # the third is silent
    left_alone = leave_each_other_out(cluster, one, other)
    cluster.pass_time(1, one, other)
    joining = catching_up(cluster, left_alone)
    assert joining <= {(one.node_id,), (other.node_id,)}
    fourth = cluster.join(Role.SERVER)
    assert catching_up(cluster, left_alone) == {(*each, fourth.node_id) for each in joining}
    cluster.pass_time(20, one, other, third, fourth)  # nobody else is named, however long it takes
    assert catching_up(cluster, left_alone) == {(*each, fourth.node_id) for each in joining}
    let_in(cluster, left_alone, fourth)
    assert catching_up(cluster, left_alone) == {()}


def test_who_was_let_in_since_is_as_good_as_the_others() -> None:
    cluster = Replicated()
    one, other, third = cluster.servers
    cluster.pass_time(30, one, other, cluster.worker)
    left_alone = leave_each_other_out(cluster, one, other)
    cluster.pass_time(1, one, other)
    for range_id in left_alone:
        found = cluster.ranges[range_id]
        (joined,) = [s for s in cluster.servers if s.node_id in found.catching_up]
        let_in(cluster, [range_id], joined)
    cluster.pass_time(2, one, other, third)
    mine = [r.range_id for r in cluster.of_primary(one) if third.node_id in r.backups]
    cluster.leave(third)
    cluster.pass_time(1, one, other)
    cluster.set_backups(one, *(backup_request(cluster.ranges[range_id]) for range_id in mine))
    cluster.pass_time(1, one, other)
    assert catching_up(cluster, mine) == {(other.node_id,)}
    cluster.join(Role.SERVER)
    assert catching_up(cluster, mine) == {(other.node_id,)}


def test_a_server_that_fell_silent_and_was_left_out_is_not_held_off() -> None:
    cluster = Replicated()
    one, other, third = cluster.servers
    cluster.pass_time(30, one, third, cluster.worker)  # the other is silent
    mine = [r for r in cluster.of_primary(one) if other.node_id in r.backups]
    cluster.set_backups(one, *(backup_request(r) for r in mine))
    cluster.pass_time(1, one, third)
    counts = [cluster.ranges[r.range_id].catching_up for r in mine]
    assert counts == [(third.node_id,)] * len(mine)
    cluster.pass_time(30, one, other, cluster.worker)  # the third is silent now, the other is back
    assert {ids[-1] for ids in catching_up(cluster, [r.range_id for r in mine])} == {other.node_id}
