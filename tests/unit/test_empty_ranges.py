"""Ranges whose values went with a removed run: nothing of them can be lost (SEMANTICS S8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_core.cluster_view import BackupRequest, RangeAssignment, Role, Session
from ps_core.keys import RangeId
from ps_core.tables.table_spec import TableSpec
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.backup import Replica
from ps_server.replication.range_roles import Replication
from scheduler.machine.cluster import Created
from scheduler.machine.state import RangesLost, RangesUnplaced, UpdateLogClaim
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness

LARGE = replace(SPEC, element_count=64 * 64)  # blocks in each of the ranges


class Emptied(Harness):
    """Two servers, and a named run that may be removed with its table."""

    def __init__(self, *, has_logs: bool = False, **settings: Any) -> None:
        super().__init__(server_count=2, range_count=8, **settings)
        logs = [UpdateLogClaim(bytes([number]) * 16) if has_logs else None for number in (1, 2)]
        self.servers = [self.join(Role.SERVER, update_log=log) for log in logs]
        self.worker = self.join(Role.WORKER, run="a", world_size=1)
        self.made(self.worker)

    def made(self, session: Session, spec: TableSpec = LARGE) -> Created:
        found = self.create(session, spec)
        assert isinstance(found, Created), found
        return found

    def remove(self) -> None:
        """The run's worker leaves, and an operator removes the run."""
        self.leave(self.worker)
        removed = self.cluster.remove_run(self.join(Role.OPERATOR), "a")
        self.transitions += removed.transitions

    @property
    def ranges(self) -> tuple[RangeAssignment, ...]:
        return self.cluster.view.ranges

    def held_by(self, session: Session) -> list[RangeAssignment]:
        return [each for each in self.ranges if session.node_id in each.in_sync]

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.transitions if isinstance(each, kind)]


def test_a_server_without_values_that_leaves_loses_nothing() -> None:
    cluster = Emptied()
    left, stays = cluster.servers
    before = {each.range_id: each for each in cluster.held_by(left)}
    assert before
    cluster.remove()
    cluster.leave(left)
    cluster.pass_time(0.5, stays)
    assert cluster.cluster.view.lost_words == ""
    assert not cluster.of(RangesLost)
    (unplaced,) = cluster.of(RangesUnplaced)
    assert set(unplaced.range_ids) == before.keys()
    for range_id, was in before.items():
        now = cluster.ranges[range_id]
        assert (now.primary, now.holders, now.initial_holders) == (None, (), ())
        assert now.assignment_epoch == was.assignment_epoch + 1


@pytest.mark.parametrize("has_logs", [False, True])
def test_a_silent_server_without_values_is_given_up(*, has_logs: bool) -> None:
    """No table would be made in its ranges otherwise, until it comes back."""
    cluster = Emptied(has_logs=has_logs)
    silent, stays = cluster.servers
    cluster.remove()
    for _ in range(200):
        cluster.pass_time(0.5, stays)
    (unplaced,) = cluster.of(RangesUnplaced)
    assert unplaced.primary.node_id == silent.node_id
    assert not cluster.held_by(silent)


def test_another_table_places_them_anew() -> None:
    cluster = Emptied()
    left, stays = cluster.servers
    cluster.remove()
    cluster.leave(left)
    comes = cluster.join(Role.SERVER)
    epochs = [each.assignment_epoch for each in cluster.ranges]
    cluster.made(cluster.join(Role.WORKER))
    assert {each.primary for each in cluster.ranges} == {stays.node_id, comes.node_id}
    for each, epoch in zip(cluster.ranges, epochs, strict=True):
        if each.assignment_epoch > epoch:
            assert (each.term, each.initial_holders) == (epoch + 1, (each.primary,))


def test_what_was_lost_is_forgotten_with_its_run() -> None:
    cluster = Emptied()
    left, stays = cluster.servers
    cluster.leave(left)
    assert cluster.cluster.view.lost_words
    cluster.remove()
    cluster.pass_time(0.5, stays)
    assert cluster.cluster.view.lost_words == ""
    cluster.join(Role.SERVER)
    cluster.made(cluster.join(Role.WORKER))


def test_a_server_without_values_may_leave_and_has_nothing_alone() -> None:
    cluster = Emptied()
    assert cluster.cluster.held_alone(cluster.servers[0])
    cluster.remove()
    assert cluster.cluster.held_alone(cluster.servers[0]) == ()


def test_those_with_values_of_others_are_lost_all_the_same() -> None:
    cluster = Emptied()
    one_block = replace(SPEC, element_count=64)
    table = cluster.made(cluster.join(Role.WORKER), one_block).table
    (held,) = table.blocks_by_range(len(cluster.ranges))
    cluster.remove()
    (owner,) = (s for s in cluster.servers if s.node_id == cluster.ranges[held].primary)
    cluster.leave(owner)
    (lost,) = cluster.of(RangesLost)
    assert lost.range_ids == (held,)
    assert [each.range_id for each in cluster.cluster.view.lost_ranges] == [held]


def test_one_that_is_placed_anew_has_its_backups_at_once() -> None:
    """Whoever held it before knows by the epoch that it is empty."""
    cluster = Emptied(replica_count=2)
    cluster.remove()
    for server in cluster.servers:
        cluster.leave(server)
    assert all(each.primary is None for each in cluster.ranges)
    servers = [cluster.join(Role.SERVER) for _ in range(2)]
    worker = cluster.join(Role.WORKER)
    cluster.made(worker)
    assert all((len(each.backups), each.catching_up) == (1, ()) for each in cluster.ranges)
    assert all(each.initial_holders == each.in_sync for each in cluster.ranges)
    before = cluster.ranges
    cluster.pass_time(0.5, *servers, worker)
    assert cluster.ranges == before


def test_a_primary_that_misses_nothing_but_emptiness_is_primary_no_more() -> None:
    cluster = Emptied(replica_count=2)
    one, other = cluster.servers
    cluster.leave(other)
    cluster.remove()
    (first, *_) = cluster.held_by(one)
    dropped = BackupRequest(first.range_id, first.assignment_epoch, frozenset())
    cluster.transitions += cluster.cluster.set_backups(one, [dropped]).transitions
    alone = cluster.ranges[first.range_id]
    assert alone.in_sync == (one.node_id,)
    missing = BackupRequest(alone.range_id, alone.assignment_epoch, frozenset(), True)
    cluster.transitions += cluster.cluster.set_backups(one, [missing]).transitions
    now = cluster.ranges[first.range_id]
    assert (now.primary, now.is_lost) == (None, False)
    assert now.assignment_epoch == alone.assignment_epoch + 1


class Silent(Emptied):
    """A server that is primary of ranges whose former primary is silent, and misses one of them."""

    def __init__(self) -> None:
        super().__init__(replica_count=2)
        self.one, self.other = self.servers
        self.pass_time(30.0, self.one, self.worker)
        (self.first, *_) = (r for r in self.held_by(self.one) if self.other.node_id in r.backups)

    def misses(self) -> RangeAssignment:
        asked = BackupRequest(self.first.range_id, self.first.assignment_epoch, frozenset(), True)
        self.transitions += self.cluster.set_backups(self.one, [asked]).transitions
        return self.ranges[self.first.range_id]


def test_nobody_waits_for_a_holder_that_has_left_where_the_primary_misses_the_values() -> None:
    cluster = Silent()
    assert cluster.misses() == cluster.first, "the other may come back"
    cluster.leave(cluster.other)
    assert cluster.misses().is_lost
    assert len(cluster.of(RangesLost)) == 1


def test_nobody_waits_for_a_silent_holder_where_there_are_no_values() -> None:
    """A table that is made there would wait for it, since it has what nobody ever saw."""
    cluster = Silent()
    cluster.remove()
    assert cluster.misses().primary is None


class Missing(Emptied):
    """A server that has left a range, of which it is the only holder, and says that it misses it:
    the range is not placed any more.
    """

    def __init__(self) -> None:
        super().__init__(replica_count=2)
        self.one, self.other = self.servers
        self.server = Replication(self.one.node_id, ServerMachine(self.one.node_id, 1), 1.0)
        self.see()
        (self.range_id, *_) = (
            each.range_id for each in self.ranges if self.one.node_id in each.backups
        )
        self.server.leave(self.range_id)
        self.leave(self.other)
        self.see()
        self.remove()
        self.cluster.set_backups(self.one, self.server.backup_requests(0.0))
        assert self.ranges[self.range_id].primary is None

    def see(self) -> None:
        self.server.observe(self.cluster.view, 0.0)
        self.server.serve(0.0)


@pytest.mark.parametrize("sees_it_unplaced", [True, False])
def test_who_missed_a_range_begins_it_when_it_is_placed_anew(*, sees_it_unplaced: bool) -> None:
    """It is an initial holder in both views that it has: the epoch of the placement tells."""
    cluster = Missing()
    if sees_it_unplaced:
        cluster.see()
    cluster.made(cluster.join(Role.WORKER))
    placed = cluster.ranges[cluster.range_id]
    assert placed.initial_holders == (cluster.one.node_id,)
    cluster.see()
    assert cluster.server.missing == ()
    assert cluster.server.primaries[cluster.range_id].log.number == 0


def test_a_scheduler_that_is_started_again_knows_where_ranges_were_placed() -> None:
    cluster = Missing()
    cluster.made(cluster.join(Role.WORKER))
    placed = {each.placed_epoch for each in cluster.ranges}
    assert placed == {2, 5}
    before = cluster.ranges
    cluster.start_again()
    assert cluster.ranges == before


def test_a_scheduler_that_is_started_again_has_them_unplaced() -> None:
    cluster = Emptied()
    left, _ = cluster.servers
    cluster.remove()
    cluster.leave(left)
    before = cluster.ranges
    assert any(each.primary is None for each in before)
    cluster.start_again()
    assert cluster.ranges == before


@pytest.mark.parametrize("is_stale", [True, False])
def test_a_log_with_what_was_removed_gives_back_an_empty_range(*, is_stale: bool) -> None:
    """Its server died before the log had the range as it was placed anew."""
    cluster = Emptied()
    left, stays = cluster.servers
    range_ids = tuple(each.range_id for each in cluster.held_by(left))
    former = cluster.ranges[range_ids[0]].assignment_epoch
    cluster.remove()
    cluster.leave(left)
    cluster.pass_time(0.5, stays)
    timeline = SETTINGS.timeline
    claim = UpdateLogClaim(b"l" * 16, timeline, range_ids, (), (former,) * len(range_ids))
    killed = cluster.join(Role.SERVER, update_log=claim)
    cluster.made(cluster.join(Role.WORKER))
    placed = [each for each in cluster.held_by(killed) if each.range_id in range_ids]
    assert placed
    assert all(each.placed_epoch > former for each in placed)
    epochs = (former if is_stale else placed[0].placed_epoch,) * len(range_ids)
    again = cluster.join(Role.SERVER, update_log=replace(claim, assignment_epochs=epochs))
    for before in placed:
        after = cluster.ranges[before.range_id]
        assert after.primary == again.node_id
        assert after.initial_holders == ((again.node_id,) if is_stale else ())


class LeftLog(Emptied):
    """A server that has left with its log, and whose ranges have no values."""

    def __init__(self) -> None:
        super().__init__(has_logs=True)
        self.left, self.stays = self.servers
        self.had = tuple(self.held_by(self.left))
        self.remove()
        self.leave(self.left)

    def come_back(self) -> Session:
        """Another server comes with the log, which has the ranges as they were."""
        range_ids = tuple(each.range_id for each in self.had)
        epochs = tuple(each.assignment_epoch for each in self.had)
        claim = UpdateLogClaim(bytes([1]) * 16, SETTINGS.timeline, range_ids, (), epochs)
        return self.join(Role.SERVER, update_log=claim)

    def lost_at(self, session: Session) -> list[RangeId]:
        """What is lost there, of what the log has, as the server sees its first view."""
        server = Replication(session.node_id, ServerMachine(session.node_id, 1), 1.0)
        replicas = [
            Replica(each.range_id, each.assignment_epoch, 1.0, each.term, {}, 11)
            for each in self.had
        ]
        server.recover(replicas)
        lost, _ = server.observe(self.cluster.view, 0.0)
        assert not server.replicas
        assert not server.missing
        assert all(primary.log.number == 0 for primary in server.primaries.values())
        return lost


def test_nobody_waits_for_an_update_log_of_ranges_without_values() -> None:
    """A new table would, until the machine that has the log returns."""
    cluster = LeftLog()
    (unplaced,) = cluster.of(RangesUnplaced)
    assert set(unplaced.range_ids) == {each.range_id for each in cluster.had}
    cluster.join(Role.SERVER)
    cluster.made(cluster.join(Role.WORKER))
    assert not cluster.held_by(cluster.left)


@pytest.mark.parametrize("is_placed_anew", [False, True])
def test_who_brings_that_log_is_given_nothing_and_ends_it(*, is_placed_anew: bool) -> None:
    """Whether the ranges have been placed elsewhere meanwhile, or have no primary yet."""
    cluster = LeftLog()
    if is_placed_anew:
        cluster.join(Role.SERVER)
        cluster.made(cluster.join(Role.WORKER))
    before = cluster.ranges
    comes = cluster.come_back()
    assert cluster.ranges == before
    assert set(cluster.lost_at(comes)) == {each.range_id for each in cluster.had}


def test_who_brings_that_log_begins_what_is_placed_there_before_its_first_view() -> None:
    cluster = LeftLog()
    comes = cluster.come_back()
    cluster.made(cluster.join(Role.WORKER))
    had = {each.range_id for each in cluster.had}
    assert had.intersection(each.range_id for each in cluster.held_by(comes))
    assert set(cluster.lost_at(comes)) == had


def test_the_log_of_ranges_with_values_is_waited_for() -> None:
    cluster = Emptied(has_logs=True)
    left, stays = cluster.servers
    before = cluster.ranges
    cluster.leave(left)
    cluster.pass_time(0.5, stays)
    assert cluster.ranges == before
    cluster.remove()
    cluster.pass_time(0.5, stays)
    assert not cluster.held_by(left)
