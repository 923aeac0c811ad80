"""Who is primary of each range, who backs it up and who joins: the scheduler's decisions (S8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import errors
from ps_core.cluster_view import BackupRequest, NodeState, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.update_offer import UpdateOffer
from scheduler.machine.cluster import Created, Parked
from scheduler.machine.membership import KEPT_COUNT
from scheduler.machine.state import (
    BackupsSet,
    ClusterSettings,
    DepartureAsked,
    JoinersNamed,
    NodeLeft,
    RangesFailedOver,
    RangesLost,
    UpdateLogClaim,
)
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness, refused


class Replicated(Harness):
    """Three servers with a table whose ranges are each on two of them."""

    def __init__(self) -> None:
        super().__init__(server_count=3, replica_count=2, range_count=8)
        self.servers = [self.join(Role.SERVER) for _ in range(3)]
        self.worker = self.join(Role.WORKER)
        self.create(self.worker)
        self.transitions.clear()

    @property
    def ranges(self) -> tuple[RangeAssignment, ...]:
        return self.cluster.view.ranges

    def of_primary(self, session: Session) -> list[RangeAssignment]:
        return [r for r in self.ranges if r.primary == session.node_id]

    def others(self, *sessions: Session) -> list[Session]:
        return [s for s in self.servers if s not in sessions]

    def set_backups(self, session: Session, *backup_requests: BackupRequest) -> tuple[RangeId, ...]:
        decision = self.cluster.set_backups(session, backup_requests)
        self.transitions += decision.transitions
        return decision.reply


def backup_request(assignment: RangeAssignment, *backups: int) -> BackupRequest:
    wanted = frozenset(map(NodeId, backups))
    return BackupRequest(assignment.range_id, assignment.assignment_epoch, wanted)


def old(one: BackupRequest) -> BackupRequest:
    return replace(one, assignment_epoch=AssignmentEpoch(one.assignment_epoch - 1))


@pytest.fixture
def cluster() -> Replicated:
    return Replicated()


class TestWishes:
    def test_each_of_a_call_is_judged_by_itself(self, cluster: Replicated) -> None:
        primary = cluster.servers[0]
        first, second, third, *_ = cluster.of_primary(primary) + cluster.of_primary(
            cluster.servers[1]
        )
        foreign = cluster.of_primary(cluster.servers[1])[-1]
        number = cluster.cluster.view.view_number
        refused_ids = cluster.set_backups(
            primary,
            backup_request(first),
            old(backup_request(second)),
            backup_request(foreign),
            backup_request(third),
        )
        granted = {r.range_id for r in (first, third) if r.primary == primary.node_id}
        assert set(refused_ids) == {second.range_id, foreign.range_id, third.range_id} - granted
        assert cluster.cluster.view.view_number == number + 1
        for before in (first, second, third, foreign):
            now = cluster.ranges[before.range_id]
            if before.range_id in granted:
                assert now.backups == ()
                assert now.assignment_epoch == before.assignment_epoch + 1
            else:
                assert now == before

    def test_who_is_let_in_joins_no_more_and_is_told_by_server(self, cluster: Replicated) -> None:
        primary = cluster.servers[0]
        mine = cluster.of_primary(primary)
        cluster.set_backups(primary, *(backup_request(r) for r in mine))
        cluster.pass_time(1, *cluster.servers)
        joining = cluster.of_primary(primary)
        assert all(len(r.catching_up) == 1 for r in joining)
        assert (
            cluster.set_backups(primary, *(backup_request(r, *r.catching_up) for r in joining))
            == ()
        )
        assert all(r.catching_up == () for r in cluster.of_primary(primary))
        assert [r.backups for r in cluster.of_primary(primary)] == [r.catching_up for r in joining]
        left_out, named, let_in = cluster.transitions
        assert isinstance(left_out, BackupsSet)
        assert isinstance(named, JoinersNamed)
        assert isinstance(let_in, BackupsSet)
        assert left_out.let_in == let_in.left_out == ()
        for counts in (left_out.left_out, named.named, let_in.let_in):
            assert sum(count for _, count in counts) == len(mine)

    def test_the_set_that_is_there_voids_what_was_asked_before(self, cluster: Replicated) -> None:
        primary = cluster.servers[0]
        mine = cluster.of_primary(primary)[0]
        assert cluster.set_backups(primary, backup_request(mine, *mine.backups)) == ()
        assert cluster.set_backups(primary, backup_request(mine)) == (mine.range_id,)
        now = cluster.ranges[mine.range_id]
        assert now == replace(mine, assignment_epoch=AssignmentEpoch(mine.assignment_epoch + 1))

    def test_a_server_that_neither_backs_up_nor_joins_is_no_choice(
        self, cluster: Replicated
    ) -> None:
        primary = cluster.servers[0]
        mine = cluster.of_primary(primary)[0]
        (stranger,) = [s.node_id for s in cluster.others(primary) if s.node_id not in mine.backups]
        assert cluster.set_backups(primary, backup_request(mine, stranger)) == (mine.range_id,)
        assert cluster.transitions == []

    @pytest.mark.parametrize(
        ("range_id", "backups", "kind", "words"),
        [
            (8, (), errors.InvalidKeys, "range_id is 8; expected 0 to 7"),
            (0, (1,), errors.InvalidConfig, "node 1 is wanted as a backup by itself"),
            (0, (0,), errors.InvalidConfig, "no such node was ever registered"),
            (0, (5,), errors.InvalidConfig, "no such node was ever registered"),
            (0, (4,), errors.InvalidConfig, "it is a worker, expected a server"),
        ],
    )
    def test_what_is_wrong_in_itself_fails_the_call_and_nothing_is_applied(
        self,
        cluster: Replicated,
        range_id: int,
        backups: tuple[int, ...],
        kind: type[errors.PushpullError],
        words: str,
    ) -> None:
        primary = cluster.servers[0]
        assert primary.node_id == 1
        good = cluster.of_primary(primary)[-1]
        bad = BackupRequest(RangeId(range_id), AssignmentEpoch(2), frozenset(map(NodeId, backups)))
        refused(
            kind,
            words,
            by=lambda: cluster.set_backups(primary, backup_request(good), bad),
            of=cluster,
        )

    def test_a_range_that_comes_twice_fails_the_call(self, cluster: Replicated) -> None:
        primary = cluster.servers[0]
        mine = backup_request(cluster.of_primary(primary)[0])
        refused(
            errors.InvalidKeys,
            "comes twice",
            by=lambda: cluster.set_backups(primary, mine, mine),
            of=cluster,
        )

    def test_only_members_that_are_servers_wish(self, cluster: Replicated) -> None:
        mine = backup_request(cluster.ranges[0])
        refused(
            errors.NotPermitted,
            "SetBackups is for servers",
            by=lambda: cluster.set_backups(cluster.worker, mine),
            of=cluster,
        )
        primary = cluster.servers[0]
        cluster.leave(primary)
        refused(
            errors.Fenced,
            "node 1 has left",
            by=lambda: cluster.set_backups(primary, mine),
            of=cluster,
        )


class TestFailover:
    def test_it_is_one_transition_for_a_server(self, cluster: Replicated) -> None:
        victim = cluster.servers[0]
        lost = [r.range_id for r in cluster.of_primary(victim)]
        cluster.pass_time(4, *cluster.others(victim))
        (failed_over,) = [t for t in cluster.transitions if isinstance(t, RangesFailedOver)]
        assert failed_over.lost.node_id == victim.node_id
        assert list(failed_over.range_ids) == lost
        assert sum(count for _, count in failed_over.counts) == len(lost)
        assert not [t for t in cluster.transitions if isinstance(t, JoinersNamed)]
        for promoted in cluster.others(victim):
            mine = [r for r in cluster.of_primary(promoted) if r.range_id in lost]
            assert all(r.backups == (victim.node_id,) for r in mine)
            assert cluster.set_backups(promoted, *(backup_request(r) for r in mine)) == ()
        cluster.pass_time(1, *cluster.others(victim))
        named = [t for t in cluster.transitions if isinstance(t, JoinersNamed)]
        assert sum(count for each in named for _, count in each.named) == len(lost)

    def test_who_joins_and_falls_silent_has_another_beside_it(self, cluster: Replicated) -> None:
        primary = cluster.servers[0]
        cluster.set_backups(primary, *(backup_request(r) for r in cluster.of_primary(primary)))
        cluster.pass_time(1, *cluster.servers)
        before = cluster.of_primary(primary)
        victim = next(s for s in cluster.servers if s.node_id == before[0].catching_up[0])
        cluster.transitions.clear()
        cluster.pass_time(4, *cluster.others(victim))
        left = 6 - primary.node_id - victim.node_id
        for was in before:
            now = cluster.ranges[was.range_id]
            more = (left,) if victim.node_id in was.catching_up else ()
            assert now.catching_up == (*was.catching_up, *more), (
                "it gives up what it has if it is not named"
            )
            assert now.assignment_epoch == was.assignment_epoch
        cluster.transitions.clear()
        cluster.transitions += cluster.cluster.deregister(victim, "done", cluster.now_s).transitions
        assert not any(victim.node_id in r.catching_up for r in cluster.of_primary(primary))
        (told,) = [t for t in cluster.transitions if isinstance(t, JoinersNamed)]
        dropped_count = sum(victim.node_id in was.catching_up for was in before)
        assert dict(told.dropped)[victim.node_id] == dropped_count

    def test_a_promoted_backup_has_the_others_until_it_asks_and_they_join_anew(self) -> None:
        """Another one may be a batch behind or ahead of it, and is needed if that one is dead."""
        harness = Harness(server_count=3, replica_count=3, range_count=8)
        servers = [harness.join(Role.SERVER) for _ in range(3)]
        harness.create(harness.join(Role.WORKER))
        first = harness.cluster.view.ranges[0]
        assert len(first.backups) == 2
        harness.pass_time(4, *[s for s in servers if s.node_id != first.primary])
        now = harness.cluster.view.ranges[0]
        assert now.primary in first.backups
        assert (set(now.backups), now.catching_up) == (set(first.in_sync) - {now.primary}, ())
        promoted = next(s for s in servers if s.node_id == now.primary)
        harness.cluster.set_backups(promoted, [backup_request(now)])
        harness.pass_time(1, *[s for s in servers if s.node_id != first.primary])
        assert set(harness.cluster.view.ranges[0].catching_up) == set(first.backups) - {now.primary}

    def test_who_has_nothing_of_a_range_passes_it_on_until_nobody_is_left(self) -> None:
        harness = Harness(server_count=3, replica_count=3, range_count=1)
        servers = {s.node_id: s for s in (harness.join(Role.SERVER) for _ in range(3))}
        harness.create(harness.join(Role.WORKER))
        first = harness.cluster.view.ranges[0]
        harness.pass_time(4, *[s for s in servers.values() if s.node_id != first.primary])
        harness.pass_time(1, *servers.values())
        tried = []
        for has_next in (True, True, False, False):
            now = harness.cluster.view.ranges[0]
            assert now.primary is not None
            tried.append(now.primary)
            missing = replace(backup_request(now), is_missing=True)
            decision = harness.cluster.set_backups(servers[now.primary], [missing])
            harness.transitions += decision.transitions
            assert decision.reply == (() if has_next else (now.range_id,))
            if has_next:
                assert harness.cluster.view.ranges[0].assignment_epoch == now.assignment_epoch + 1
        assert tried[0] in first.backups
        assert set(tried[1:]) == set(first.in_sync) - {tried[0]}
        assert tried[2:] == [tried[2]] * 2
        (told,) = [t for t in harness.transitions if isinstance(t, RangesLost)]
        assert (told.primary.node_id, told.range_ids) == (tried[2], (first.range_id,))
        old_one = replace(backup_request(first), is_missing=True)
        assert harness.cluster.set_backups(servers[tried[0]], [old_one]).reply == (first.range_id,)

    def test_one_that_has_nothing_waits_for_the_others_that_may_have_it(self) -> None:
        harness = Harness(server_count=3, replica_count=3, range_count=1)
        servers = {s.node_id: s for s in (harness.join(Role.SERVER) for _ in range(3))}
        harness.create(harness.join(Role.WORKER))
        first = harness.cluster.view.ranges[0]
        alone = servers[first.backups[0]]
        harness.pass_time(4, alone)
        now = harness.cluster.view.ranges[0]
        missing = replace(backup_request(now), is_missing=True)
        assert harness.cluster.set_backups(alone, [missing]).reply == (first.range_id,)
        assert harness.cluster.view.ranges[0] == now
        assert not [t for t in harness.transitions if isinstance(t, RangesLost)]
        harness.beat(servers[now.backups[0]])
        assert harness.cluster.set_backups(alone, [missing]).reply == ()
        assert harness.cluster.view.ranges[0].primary == now.backups[0]

    def test_who_holds_a_range_since_it_was_placed_is_told(self, cluster: Replicated) -> None:
        for r in cluster.ranges:
            assert r.initial_holders == r.in_sync
        primary = cluster.servers[0]
        was, *_ = cluster.of_primary(primary)
        cluster.set_backups(primary, backup_request(was))
        assert cluster.ranges[was.range_id].initial_holders == (primary.node_id,)
        cluster.pass_time(1, cluster.worker, *cluster.servers)
        (joining,) = cluster.ranges[was.range_id].catching_up
        cluster.set_backups(primary, backup_request(cluster.ranges[was.range_id], joining))
        now = cluster.ranges[was.range_id]
        assert (now.backups, now.initial_holders) == ((joining,), (primary.node_id,))

    def test_nobody_joins_a_range_whose_primary_is_silent(self) -> None:
        """Who should bring it up to date?"""
        harness = Harness(replica_count=2, range_count=8)
        lone, other = harness.join(Role.SERVER), harness.join(Role.SERVER)
        worker = harness.join(Role.WORKER)
        harness.pass_time(4, worker, lone)  # the other is silent, and backs nothing up
        harness.create(worker)
        harness.pass_time(4, worker)
        harness.beat(other)
        harness.pass_time(1, worker, other)
        ranges = harness.cluster.view.ranges
        assert {r.holders for r in ranges} == {(lone.node_id,)}
        harness.pass_time(1, worker, other, lone)
        assert {r.catching_up for r in harness.cluster.view.ranges} == {(other.node_id,)}

    def test_after_the_end_nothing_is_taken_over(self) -> None:
        harness = Harness(server_count=3, replica_count=2, worker_count=1, stop_when_done=True)
        servers = [harness.join(Role.SERVER) for _ in range(3)]
        worker = harness.join(Role.WORKER)
        harness.create(worker)
        harness.leave(worker)
        ranges = harness.cluster.view.ranges
        for server in servers:
            harness.leave(server)
        assert harness.cluster.view.ranges == ranges


class TestServersThatDie:
    def test_one_that_leaves_is_followed_at_once(self, cluster: Replicated) -> None:
        victim = cluster.servers[0]
        number = cluster.cluster.view.view_number
        cluster.leave(victim)
        assert cluster.of_primary(victim) == []
        assert cluster.cluster.view.view_number == number + 1

    def test_it_holds_up_no_new_table_and_no_new_server(self, cluster: Replicated) -> None:
        victim = cluster.servers[0]
        cluster.pass_time(4, cluster.worker, *cluster.others(victim))
        made = cluster.create(cluster.worker, replace(SPEC, name="late"))
        assert isinstance(made, Created)
        assert cluster.of_primary(victim) == []
        successor = cluster.join(Role.SERVER, address="h1:70")  # where the dead one was
        for other in cluster.others(victim):
            mine = cluster.of_primary(other)
            cluster.set_backups(
                other, *(backup_request(r) for r in mine if victim.node_id in r.backups)
            )
        cluster.pass_time(1, *cluster.others(victim), successor)
        assert all(len(r.holders) == 2 and victim.node_id not in r.holders for r in cluster.ranges)
        assert any(successor.node_id in r.catching_up for r in cluster.ranges)

    def test_a_table_may_lie_on_the_last_server_and_has_backups_when_another_comes(self) -> None:
        harness = Harness(replica_count=2, range_count=8)
        first, second = harness.join(Role.SERVER), harness.join(Role.SERVER)
        worker = harness.join(Role.WORKER)
        harness.pass_time(4, worker, first)
        assert harness.node(second).state is NodeState.SILENT
        assert isinstance(harness.create(worker), Created)
        assert {r.in_sync for r in harness.cluster.view.ranges} == {(first.node_id,)}
        third = harness.join(Role.SERVER)
        harness.pass_time(1, worker, first, third)
        assert {r.catching_up for r in harness.cluster.view.ranges} == {(third.node_id,)}

    def test_the_first_table_waits_for_all_servers_and_each_for_one(self) -> None:
        harness = Harness(replica_count=2)
        first, worker = harness.join(Role.SERVER), harness.join(Role.WORKER)
        early = harness.create(worker)
        assert isinstance(early, Parked)
        assert "1 more server (1 of 2 registered)" in early.reason
        harness.join(Role.SERVER)
        harness.pass_time(4, worker)
        nobody = harness.create(worker)
        assert isinstance(nobody, Parked)
        assert "1 more server (0 of 2 registered; server node 1" in nobody.reason
        harness.beat(first)
        assert isinstance(harness.create(worker), Created)

    def test_without_replicas_its_ranges_are_waited_for_and_who_has_none_is_given_up(self) -> None:
        harness = Harness(range_count=8)
        first, second = harness.join(Role.SERVER), harness.join(Role.SERVER)
        worker = harness.join(Role.WORKER)
        harness.create(worker)
        harness.pass_time(70, worker, first)
        assert harness.node(second).state is NodeState.SILENT
        late = harness.create(worker, replace(SPEC, name="late"))
        assert isinstance(late, Parked)
        idle = harness.join(Role.SERVER)
        harness.pass_time(70, worker, first)
        assert [harness.node(n).state.value for n in (idle, second)] == ["left", "silent"]

    def test_one_that_holds_nothing_is_given_up_and_fenced(self, cluster: Replicated) -> None:
        victim = cluster.servers[0]
        cluster.pass_time(4, *cluster.others(victim))
        for other in cluster.others(victim):  # who notice in time that a backup is missing
            mine = cluster.of_primary(other)
            cluster.set_backups(
                other, *(backup_request(r) for r in mine if victim.node_id in r.backups)
            )
        cluster.pass_time(56, *cluster.others(victim))
        assert cluster.node(victim).state is NodeState.SILENT
        cluster.transitions.clear()
        cluster.pass_time(1, *cluster.others(victim))
        (left,) = [t for t in cluster.transitions if isinstance(t, NodeLeft)]
        assert left.node == cluster.node(victim)
        assert left.reason == "given up after 60.5 s of silence"
        assert cluster.node(victim).state is NodeState.LEFT
        refused(
            errors.Fenced,
            f"node {victim.node_id} (server) has left the cluster: it was given up after 60.5 s",
            "restart this process",
            by=lambda: cluster.beat(victim),
            of=cluster,
        )

    def test_one_that_a_primary_still_counts_on_is_waited_for(self, cluster: Replicated) -> None:
        """The primary says whose word counts; while it does not, nobody else may."""
        victim = cluster.servers[0]
        cluster.pass_time(80, *cluster.others(victim))
        assert any(victim.node_id in r.backups for r in cluster.ranges)
        assert cluster.node(victim).state is NodeState.SILENT
        cluster.beat(victim)
        assert cluster.node(victim).state is NodeState.ALIVE

    def test_ranges_whose_replicas_are_all_dead_wait_for_any_of_them(
        self, cluster: Replicated
    ) -> None:
        whole = cluster.ranges[0]
        (survivor,) = [s for s in cluster.servers if s.node_id not in whole.holders]
        cluster.pass_time(80, survivor)
        assert cluster.ranges[0] == whole
        (backup,) = [s for s in cluster.servers if s.node_id in whole.backups]
        cluster.pass_time(1, survivor, backup)
        assert cluster.ranges[0].primary == backup.node_id

    def test_those_that_come_and_go_do_not_fill_the_view(self) -> None:
        harness = Harness(server_count=1, worker_count=1, replica_count=1)
        keeper = harness.join(Role.SERVER)
        harness.create(harness.join(Role.WORKER))
        held = harness.cluster.view.view_number
        for _ in range(KEPT_COUNT + 5):
            harness.leave(harness.join(Role.SERVER))
        servers = [n for n in harness.cluster.view.nodes if n.role is Role.SERVER]
        assert len(servers) == KEPT_COUNT + 1
        harness.leave(keeper)  # what it holds is nowhere else
        for _ in range(KEPT_COUNT + 5):
            harness.leave(harness.join(Role.SERVER))
        assert keeper.node_id in harness.cluster.view.nodes_by_id
        assert harness.cluster.view.view_number > held

    def test_the_end_waits_for_no_dead_server(self) -> None:
        harness = Harness(
            server_count=2, worker_count=1, replica_count=2, range_count=8, stop_when_done=True
        )
        living, dead = harness.join(Role.SERVER), harness.join(Role.SERVER)
        worker = harness.join(Role.WORKER)
        harness.create(worker)
        harness.pass_time(4, living, worker)
        for r in harness.cluster.view.ranges:
            if dead.node_id in r.backups:
                harness.cluster.set_backups(living, [backup_request(r)])
        harness.leave(worker)
        assert harness.is_finished()
        assert not harness.servers_have_left()
        harness.leave(living)
        assert harness.servers_have_left()


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"replica_count": 3}, "replicas is 3; expected 1 to the number of servers, 2"),
            ({"replica_count": 0}, "replicas is 0"),
            ({"min_in_sync": 2}, "min_in_sync is 2; expected 1 to the number of replicas, 1"),
            ({"replica_count": 2, "min_in_sync": 0}, "min_in_sync is 0"),
        ],
    )
    def test_bounds_are_named(self, given: dict[str, int], words: str) -> None:
        with pytest.raises(errors.InvalidConfig, match=words):
            replace(SETTINGS, **given)  # type: ignore[arg-type]

    def test_the_defaults_replicate_nothing(self) -> None:
        assert (SETTINGS.replica_count, SETTINGS.min_in_sync) == (1, 1)
        assert ClusterSettings.__dataclass_fields__["replica_count"].default == 1

    def test_custom_updates_are_not_replicated(self) -> None:
        custom = OptimizerSpec(OptimizerKind.CUSTOM, custom_update="mine")
        offer = UpdateOffer("mine", (), "v1", "")
        for replica_count in (2, 1):
            harness = Harness(replica_count=replica_count)
            for _ in range(2):
                harness.join(Role.SERVER, custom_updates=(offer,))
            worker = harness.join(Role.WORKER)
            spec = replace(SPEC, optimizer=custom)
            if replica_count == 1:
                harness.create(worker, spec)
                assert harness.cluster.view.tables
                continue
            refused(
                errors.InvalidConfig,
                "table 'model' has the custom update 'mine', and replicas is 2",
                by=lambda h=harness, w=worker, s=spec: h.create(w, s),  # type: ignore[misc]
                of=harness,
            )


def test_one_that_was_promoted_and_is_dead_too_is_followed_by_another() -> None:
    """It is silent a lease after it was made primary; nobody has seen anything of it."""
    harness = Harness(server_count=3, replica_count=3, range_count=8)
    servers = [harness.join(Role.SERVER) for _ in range(3)]
    harness.create(harness.join(Role.WORKER))
    (first, *_) = harness.cluster.view.ranges
    harness.pass_time(4.0, *[s for s in servers if s.node_id != first.primary])
    second = harness.cluster.view.ranges[0]
    assert second.primary in first.backups
    assert set(second.backups) == set(first.in_sync) - {second.primary}
    last = [s for s in servers if s.node_id in set(first.backups) - {second.primary}]
    harness.pass_time(4.0, *last)
    third = harness.cluster.view.ranges[0]
    assert third.primary == last[0].node_id
    assert set(third.backups) == {first.primary, second.primary}


def test_no_more_are_let_in_than_are_missing() -> None:
    """Another was named beside one that was silent for a time; both have caught up."""
    harness = Harness(server_count=4, replica_count=2, range_count=1)
    servers = [harness.join(Role.SERVER) for _ in range(4)]
    worker = harness.join(Role.WORKER)
    harness.create(worker)
    (first,) = harness.cluster.view.ranges
    primary = next(s for s in servers if s.node_id == first.primary)
    harness.cluster.set_backups(primary, [backup_request(first)])
    harness.pass_time(1.0, *servers, worker)
    (joining,) = harness.cluster.view.ranges[0].catching_up
    harness.pass_time(4.0, *[s for s in servers if s.node_id != joining], worker)
    (named,) = harness.cluster.view.ranges
    assert len(named.catching_up) == 2
    assert (
        harness.cluster.set_backups(primary, [backup_request(named, *named.catching_up)]).reply
        == ()
    )
    (after,) = harness.cluster.view.ranges
    assert (len(after.backups), after.catching_up) == (1, ())


def drop_dead(cluster: Replicated, session: Session) -> None:
    """As a primary does that misses a backup: it asks to be without, and another one joins."""
    living = cluster.cluster.view.living_servers
    mine = cluster.of_primary(session)
    cluster.set_backups(session, *(backup_request(r, *(set(r.backups) & living)) for r in mine))
    cluster.pass_time(0.5, session, cluster.worker)


def check_kept(harness: Harness, session: Session) -> None:
    """Raises what the machine answers a server that was told to stop."""
    decision = harness.cluster.refusal_to_leave(session, harness.now_s)
    harness.transitions += decision.transitions
    if decision.reply is not None:
        raise decision.reply


def let_go(cluster: Replicated, session: Session, *heard: Session) -> None:
    """The server may leave, as soon as these have been heard since it asked."""
    with pytest.raises(errors.Recovering, match="waits for a sign of life"):
        check_kept(cluster, session)
    cluster.pass_time(0.5, session, *heard)
    check_kept(cluster, session)


class TestLeaving:
    """A server leaves with nothing that nobody else has (`only_if_kept`)."""

    def test_who_has_a_backup_for_everything_may(self, cluster: Replicated) -> None:
        for server in cluster.servers:
            let_go(cluster, server, *cluster.others(server))
            assert cluster.cluster.held_alone(server) == ()

    def test_who_has_the_only_copy_is_told_whom_it_waits_for(self, cluster: Replicated) -> None:
        first, second, third = cluster.servers
        cluster.leave(second)
        cluster.leave(third)
        with pytest.raises(errors.Recovering, match=r"another server to hold it \(1 of 3 here\)"):
            check_kept(cluster, first)
        newcomer = cluster.join(Role.SERVER)
        words = f"server {newcomer.node_id}, which is being brought up to date"
        with pytest.raises(errors.Recovering, match=words):
            check_kept(cluster, first)
        drop_dead(cluster, first)
        own = cluster.of_primary(first)
        cluster.set_backups(first, *(backup_request(r, newcomer.node_id) for r in own[:-1]))
        with pytest.raises(errors.Recovering, match="the only copy of 1 ranges"):
            check_kept(cluster, first)
        cluster.set_backups(first, backup_request(own[-1], newcomer.node_id))
        let_go(cluster, first, newcomer)

    def test_a_silent_backup_has_nothing_to_rely_on(self, cluster: Replicated) -> None:
        first, *others = cluster.servers
        cluster.leave(others[1])
        cluster.pass_time(2 * SETTINGS.lease_s, first, cluster.worker)
        with pytest.raises(errors.Recovering):
            check_kept(cluster, first)

    def test_who_may_be_dead_is_not_relied_on(self, cluster: Replicated) -> None:
        """A backup was heard a moment ago, and dies: nobody knows of that for a lease."""
        first, second, third = cluster.servers
        shared = [r for r in cluster.ranges if {first.node_id, second.node_id} == set(r.in_sync)]
        assert shared
        words = f"waits for a sign of life of server {second.node_id}, beside which nobody has "
        words += f"{len(shared)} of its ranges"
        with pytest.raises(errors.Recovering, match="waits for a sign of life"):
            check_kept(cluster, first)
        for _ in range(3):
            cluster.pass_time(0.5, first, third)
            with pytest.raises(errors.Recovering, match=words):
                check_kept(cluster, first)
        cluster.beat(second)
        check_kept(cluster, first)

    def test_what_the_dead_had_sent_is_no_sign_of_life(self, cluster: Replicated) -> None:
        """A heartbeat may come late: it says which view its sender had."""
        first, second, third = cluster.servers
        before = cluster.cluster.view.view_number
        with pytest.raises(errors.Recovering, match="waits for a sign of life"):
            check_kept(cluster, first)
        assert isinstance(cluster.transitions[-1], DepartureAsked)
        assert cluster.cluster.view.view_number == before + 1
        cluster.pass_time(0.5, third)
        cluster.cluster.heartbeat(second, cluster.now_s, before)
        with pytest.raises(errors.Recovering, match=f"sign of life of server {second.node_id},"):
            check_kept(cluster, first)
        cluster.cluster.heartbeat(second, cluster.now_s, before + 1)
        check_kept(cluster, first)

    def test_a_round_of_signs_of_life_is_one_view(self, cluster: Replicated) -> None:
        """However often the server asks."""
        first, *_ = cluster.servers
        before = cluster.cluster.view.view_number
        for _ in range(5):
            with pytest.raises(errors.Recovering, match="waits for a sign of life"):
                check_kept(cluster, first)
        assert cluster.cluster.view.view_number == before + 1

    def test_signs_of_life_are_of_one_round(self, cluster: Replicated) -> None:
        """One that was heard while another was waited for may have died since."""
        first, second, third = cluster.servers
        with pytest.raises(errors.Recovering, match="waits for a sign of life"):
            check_kept(cluster, first)
        cluster.pass_time(0.5, first, second)
        cluster.pass_time(2 * SETTINGS.heartbeat_interval_s, first)
        cluster.beat(third)
        with pytest.raises(errors.Recovering, match="waits for a sign of life"):
            check_kept(cluster, first)
        cluster.pass_time(0.5, second, third)
        check_kept(cluster, first)

    def test_of_two_that_ask_one_leaves(self, cluster: Replicated) -> None:
        first, second, third = cluster.servers
        cluster.leave(third)
        for session, backup in ((first, second), (second, first)):
            drop_dead(cluster, session)
            cluster.set_backups(
                session, *(backup_request(r, backup.node_id) for r in cluster.of_primary(session))
            )
        let_go(cluster, first, second)
        let_go(cluster, second, first)
        cluster.leave(first)
        with pytest.raises(errors.Recovering):
            check_kept(cluster, second)

    def test_once_the_work_is_done_nobody_waits(self, cluster: Replicated) -> None:
        first, second, third = cluster.servers
        cluster.leave(second)
        cluster.leave(third)
        for _ in range(SETTINGS.worker_count - 1):
            cluster.leave(cluster.join(Role.WORKER))
        cluster.leave(cluster.worker)
        cluster.cluster.finish()
        assert cluster.is_finished()
        check_kept(cluster, first)

    def test_only_servers_ask(self, cluster: Replicated) -> None:
        with pytest.raises(errors.NotPermitted, match="a server's right"):
            check_kept(cluster, cluster.worker)

    def test_an_update_log_is_a_copy(self) -> None:
        kept = Harness(server_count=2, replica_count=2, range_count=8)
        kept.leave(kept.join(Role.SERVER))
        log = UpdateLogClaim(b"l" * 16)
        server = kept.join(Role.SERVER, update_log=log)
        kept.create(kept.join(Role.WORKER))
        check_kept(kept, server)

    def test_an_update_log_may_lack_what_was_taken_over(self) -> None:
        kept = Harness(server_count=2, replica_count=2, range_count=8)
        log = UpdateLogClaim(b"l" * 16)
        first, second = kept.join(Role.SERVER), kept.join(Role.SERVER, update_log=log)
        kept.create(kept.join(Role.WORKER))
        kept.leave(first)
        with pytest.raises(errors.Recovering, match="has the only copy"):
            check_kept(kept, second)

    def test_an_update_log_is_no_copy_while_a_backup_may_take_over(self) -> None:
        """One that was heard a moment ago, and may be dead, would be primary then."""
        kept = Harness(server_count=2, replica_count=2, range_count=8)
        log = UpdateLogClaim(b"l" * 16)
        first, second = kept.join(Role.SERVER), kept.join(Role.SERVER, update_log=log)
        kept.create(kept.join(Role.WORKER))
        words = f"waits for a sign of life of server {first.node_id}"
        with pytest.raises(errors.Recovering, match=words):
            check_kept(kept, second)
        kept.pass_time(SETTINGS.lease_s + 1.0, second)
        taken_over = tuple(sorted(kept.cluster._state.log_sources))
        assert 0 < len(taken_over) < len(kept.cluster.view.ranges)
        assert kept.cluster.held_alone(second) == taken_over

    def test_without_replicas_no_server_can_have_it(self) -> None:
        single = Harness(server_count=1, range_count=8)
        server = single.join(Role.SERVER)
        single.create(single.join(Role.WORKER))
        check_kept(single, server)
        assert len(single.cluster.held_alone(server)) == len(
            [r for r in single.cluster.view.ranges if r.primary is not None]
        )


class TestLoss:
    """Ranges whose values nobody has are noted, and told once."""

    def test_the_only_copy_that_leaves_is_lost(self) -> None:
        single = Harness(server_count=1, range_count=8)
        server = single.join(Role.SERVER)
        single.create(single.join(Role.WORKER))
        placed = [r.range_id for r in single.cluster.view.ranges if r.primary is not None]
        assert single.cluster.view.lost_words == ""
        single.leave(server)
        assert [r.range_id for r in single.cluster.view.lost_ranges] == placed
        words = f"with values of '{SPEC.name}': server {server.node_id} had the only copy"
        assert words in single.cluster.view.lost_words
        assert [each for each in single.transitions if isinstance(each, RangesLost)] == [
            RangesLost(single.node(server), tuple(placed))
        ]
        count = len(single.transitions)
        single.pass_time(5.0)
        assert not any(isinstance(each, RangesLost) for each in single.transitions[count:])

    def test_a_silent_server_may_come_back(self) -> None:
        single = Harness(server_count=1, range_count=8)
        single.join(Role.SERVER)
        worker = single.join(Role.WORKER)
        single.create(worker)
        single.pass_time(60.0, worker)
        assert single.cluster.view.lost_ranges == ()

    @pytest.mark.parametrize("has_log", [False, True])
    def test_not_where_another_has_its_address(self, has_log: bool) -> None:
        """As a container that is started again has; with an update log its values are somewhere."""
        single = Harness(server_count=1, range_count=8)
        log = UpdateLogClaim(b"l" * 16) if has_log else None
        before = single.join(Role.SERVER, address="h:70", update_log=log)
        worker = single.join(Role.WORKER)
        single.create(worker)
        single.pass_time(4.0, worker)
        single.join(Role.SERVER, address="elsewhere:70")
        assert single.node(before).state is NodeState.SILENT
        single.join(Role.SERVER, address="h:70")
        assert single.node(before).state is NodeState.LEFT
        placed = [r for r in single.cluster.view.ranges if r.primary is not None]
        assert single.cluster.view.lost_ranges == (() if has_log else tuple(placed))
        told = [each for each in single.transitions if isinstance(each, RangesLost)]
        assert [len(each.range_ids) for each in told] == ([] if has_log else [len(placed)])
        refused(errors.Fenced, "has left", by=lambda: single.beat(before), of=single)

    def test_so_may_one_with_an_update_log(self) -> None:
        log = UpdateLogClaim(b"l" * 16)
        single = Harness(server_count=1, range_count=8)
        server = single.join(Role.SERVER, update_log=log)
        single.create(single.join(Role.WORKER))
        single.leave(server)
        assert single.cluster.view.lost_ranges == ()

    def test_the_last_of_two_copies_is_lost(self, cluster: Replicated) -> None:
        first, second, third = cluster.servers
        for server in (second, third):
            cluster.leave(server)
        both = {second.node_id, third.node_id}
        lost = {r.range_id for r in cluster.ranges if r.in_sync and both.issuperset(r.in_sync)}
        assert {r.range_id for r in cluster.cluster.view.lost_ranges} == lost
        cluster.leave(first)
        assert len(cluster.cluster.view.lost_ranges) == len(
            [r for r in cluster.ranges if r.primary is not None]
        )

    def test_a_person_who_stops_it_hears_no_alarm(self) -> None:
        single = Harness(server_count=1, range_count=8)
        server = single.join(Role.SERVER)
        single.create(single.join(Role.WORKER))
        decision = single.cluster.deregister(server, "stopped", 0.0, loss_is_wanted=True)
        (lost,) = [each for each in decision.transitions if isinstance(each, RangesLost)]
        assert lost.is_wanted
