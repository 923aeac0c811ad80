"""Primaries are spread evenly again: which ranges are handed over, when, and to whom (S9)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ps_core.cluster_view import HAND_OVER_FEATURE, BackupRequest, RangeAssignment, Role, Session
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, key_ranges
from scheduler.machine.changes import ChangeRequest
from scheduler.machine.cluster import Cluster as ClusterMachine
from scheduler.machine.cluster import Created
from scheduler.machine.placement import hand_overs
from scheduler.machine.state import (
    HandOversAdvised,
    RangesHandedOver,
    Restored,
    ServerMemory,
    UpdateLogClaim,
)
from tests.unit.cluster_harness import SPEC, Harness, refused

FEATURES = (HAND_OVER_FEATURE,)
LEASES_S = 15.0
"""Longer than it must be quiet before a range is handed over."""


class Cluster(Harness):
    """Servers that hand over what they are advised to, at once, and copy to whoever joins."""

    def __init__(
        self, server_count: int = 2, replica_count: int = 2, run: str = "", **fields: object
    ) -> None:
        super().__init__(server_count=server_count, replica_count=replica_count, range_count=8)
        self.fields = {"features": FEATURES} | fields
        self.servers = [self.come() for _ in range(server_count)]
        self.worker = self.join(Role.WORKER, run=run, world_size=1 if run else 0)
        self.create(self.worker)
        self.obeys = self.hands_over = True

    def come(self) -> Session:
        return self.join(Role.SERVER, **self.fields)

    @property
    def ranges(self) -> tuple[RangeAssignment, ...]:
        return self.cluster.view.ranges

    @property
    def advised(self) -> list[RangeAssignment]:
        return [r for r in self.ranges if r.hand_over_to is not None]

    def counts(self) -> list[int]:
        """Ranges of each server as primary."""
        primaries = Counter(r.primary for r in self.ranges)
        return [primaries[session.node_id] for session in self.servers]

    def ask(self, *requests: BackupRequest) -> tuple[RangeId, ...]:
        """The primary of the first of these ranges asks."""
        primary = self.ranges[requests[0].range_id].primary
        (session,) = [s for s in self.servers if s.node_id == primary]
        decision = self.cluster.set_backups(session, requests)
        self.transitions += decision.transitions
        return decision.reply

    def go_on(self, seconds: float) -> None:
        """Time goes by, and the servers do as they are advised."""
        for _ in range(int(seconds * 2)):
            before = self.ranges
            self.pass_time(0.5, *self.servers, self.worker)
            for each in self.ranges if self.obeys else ():
                self.obey(each)
            for old, new in zip(before, self.ranges, strict=True):
                assert len(new.in_sync) >= min(len(old.in_sync), 2)

    def obey(self, each: RangeAssignment) -> None:
        if each.catching_up:
            self.ask(let_in(each))
        elif each.hand_over_to in each.backups and self.hands_over:
            self.ask(handed_over(each))


def let_in(each: RangeAssignment) -> BackupRequest:
    backups = frozenset((*each.backups, *each.catching_up))
    return BackupRequest(each.range_id, each.assignment_epoch, backups)


def handed_over(each: RangeAssignment, target: NodeId | None = None) -> BackupRequest:
    target = each.hand_over_to if target is None else target
    backups = frozenset(each.backups)
    return BackupRequest(each.range_id, each.assignment_epoch, backups, hand_over_to=target)


def uneven() -> Cluster:
    """Another server has come: it has nothing."""
    cluster = Cluster()
    cluster.servers.append(cluster.come())
    cluster.transitions.clear()
    return cluster


def piled_up() -> Cluster:
    """One of two servers was away: the other has become primary of all ranges, and let it in."""
    cluster = Cluster()
    cluster.pass_time(10.0, cluster.servers[1], cluster.worker)
    assert cluster.counts() == [0, 8]
    alone = [BackupRequest(r.range_id, r.assignment_epoch, frozenset()) for r in cluster.ranges]
    cluster.ask(*alone)
    return cluster


def test_who_comes_is_copied_to_and_then_takes_its_share() -> None:
    """No range has fewer copies meanwhile, and in the end none has more than it needs."""
    cluster = uneven()
    assert cluster.counts() == [4, 4, 0]
    cluster.go_on(60.0)
    assert sorted(cluster.counts()) == [2, 3, 3]
    assert all(len(r.backups) == 1 and not r.catching_up for r in cluster.ranges)
    cluster.transitions.clear()
    cluster.go_on(60.0)
    assert cluster.transitions == []


def test_after_a_restore_in_place_who_comes_too_late_takes_its_share() -> None:
    """Its table waits for no more servers than the cluster was started for."""
    cluster = uneven()
    settings = cluster.cluster.in_new_timeline(Restored("runs/1", {}), b"n" * 16, b"k" * 32)
    cluster.cluster = ClusterMachine(settings, cluster.now_s)
    cluster.servers = [cluster.come() for _ in range(2)]
    cluster.worker = cluster.join(Role.WORKER)
    assert isinstance(cluster.create(cluster.worker), Created)
    cluster.servers.append(cluster.come())
    assert cluster.counts() == [4, 4, 0]
    cluster.go_on(60.0)
    assert sorted(cluster.counts()) == [2, 3, 3]


def test_a_backup_takes_ranges_where_its_primary_has_too_many() -> None:
    """After a failover, when the one that was away is back and has caught up."""
    cluster = piled_up()
    cluster.go_on(60.0)
    assert cluster.counts() == [4, 4]
    assert all(len(r.in_sync) == 2 for r in cluster.ranges)


def test_a_hand_over_keeps_the_term_and_takes_two_epochs() -> None:
    """CL-2. Records keep their numbers; with the epoch by which a range comes back, three pass."""
    cluster = uneven()
    cluster.obeys = False
    (before, *_) = cluster.ranges
    (target,) = before.backups
    cluster.ask(handed_over(before, target))
    after = cluster.ranges[before.range_id]
    assert (after.primary, after.backups) == (target, (before.primary,))
    assert after.assignment_epoch == before.assignment_epoch + 2
    assert after.term == before.term
    assert after.initial_holders == before.initial_holders
    (told,) = [t for t in cluster.transitions if isinstance(t, RangesHandedOver)]
    assert (told.primary, told.counts) == (before.primary, ((target, 1),))


@pytest.mark.parametrize("former", [1, 2])
def test_the_former_primary_stays_a_backup_where_another_may_be_dead(former: int) -> None:
    """Its target was copied to first. The other backup fell silent when the primary had asked: the
    range had one living copy where it had had two.
    """
    cluster = uneven()
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    cluster.ask(*[let_in(each) for each in cluster.advised if each.primary == former])
    before = next(r for r in cluster.advised if r.hand_over_to in r.backups)
    (other,) = {*before.backups} - {before.hand_over_to}
    cluster.pass_time(4.0, *(s for s in cluster.servers if s.node_id != other), cluster.worker)
    cluster.ask(handed_over(before))
    after = cluster.ranges[before.range_id]
    assert after.primary == before.hand_over_to
    assert former in after.backups


def test_what_is_not_granted_begins_another_epoch_all_the_same() -> None:
    """The primary has stopped, and goes on only then; asked for the epoch before, it is void."""
    cluster = uneven()
    before = cluster.ranges[0]
    (target,) = before.backups
    cluster.pass_time(10.0, *(s for s in cluster.servers if s.node_id != target), cluster.worker)
    assert cluster.ranges[0].primary == before.primary
    now = cluster.ranges[0]
    assert cluster.ask(handed_over(now, target)) == ()
    after = cluster.ranges[0]
    assert (after.primary, after.backups) == (now.primary, now.backups)
    assert after.assignment_epoch == now.assignment_epoch + 1
    assert cluster.ask(handed_over(now, target)) == (now.range_id,)


def test_a_range_is_handed_over_to_one_of_its_backups() -> None:
    cluster = uneven()
    stranger = cluster.servers[2].node_id
    wanted = handed_over(cluster.ranges[0], stranger)
    refused(
        InvalidConfig, "expected one of its backups", by=lambda: cluster.ask(wanted), of=cluster
    )


def test_nothing_is_advised_before_it_has_been_quiet_for_some_leases() -> None:
    cluster = uneven()
    cluster.obeys = False
    cluster.go_on(8.0)
    assert cluster.advised == []
    cluster.servers.append(cluster.come())
    cluster.go_on(8.0)
    assert cluster.advised == []
    cluster.go_on(2.0)
    assert 0 < len(cluster.advised) <= 4


@pytest.mark.parametrize(
    "fields",
    [{"features": ()}, {"update_log": UpdateLogClaim(b"a" * 16)}],
    ids=["older server", "update log"],
)
def test_nothing_is_advised_where_a_server_cannot(fields: dict[str, object]) -> None:
    """A view changes as seldom as before: nothing is tried again and again."""
    cluster = uneven()
    cluster.fields = {"features": FEATURES} | fields
    cluster.servers.append(cluster.come())
    number = cluster.cluster.view.view_number
    cluster.go_on(60.0)
    assert cluster.counts()[:2] == [4, 4]
    assert cluster.cluster.view.view_number == number


def _changing(cluster: Cluster) -> None:
    change = ChangeRequest(SPEC.name, parsed("ssp:2"), 0, cluster.now_s + 1000.0)
    cluster.cluster.set_consistency(cluster.worker, change, cluster.now_s)


def test_nothing_is_advised_nor_granted_while_a_table_changes() -> None:
    cluster = uneven()
    _changing(cluster)
    cluster.go_on(LEASES_S)
    assert cluster.advised == []
    before = cluster.ranges[0]
    cluster.ask(handed_over(before, before.backups[0]))
    assert cluster.ranges[0].primary == before.primary


def test_who_is_let_in_while_a_table_changes_takes_its_range_afterwards() -> None:
    """Its primary would stop, and a checkpoint that it is writing would fail."""
    cluster = uneven()
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    before = cluster.advised[0]
    _changing(cluster)
    cluster.go_on(2.0)
    assert cluster.ranges[before.range_id] == before, "what is copied to goes on"
    cluster.ask(let_in(before))
    after = cluster.ranges[before.range_id]
    assert (after.hand_over_to, after.backups) == (None, (*before.backups, before.hand_over_to))
    cluster.go_on(30.0)
    assert cluster.ranges[before.range_id] == after


def test_advice_to_stop_ends_when_a_table_is_about_to_change() -> None:
    """The change waits for ranges that have stopped."""
    cluster = piled_up()
    cluster.hands_over = False
    while not cluster.advised:
        cluster.go_on(0.5)
    (before, *_) = cluster.advised
    _changing(cluster)
    cluster.go_on(0.5)
    assert cluster.advised == []
    assert cluster.ranges[before.range_id] == replace(before, hand_over_to=None)


def test_nothing_is_advised_while_a_server_is_stopping() -> None:
    cluster = uneven()
    asked = cluster.cluster.refusal_to_leave(cluster.servers[0], cluster.now_s)
    assert asked.reply is not None
    cluster.go_on(LEASES_S)
    assert cluster.advised == []


def test_who_does_not_follow_advice_is_left_alone_for_some_leases() -> None:
    """So the view does not change for ever, whatever keeps a primary from it."""
    cluster = piled_up()
    cluster.hands_over = False
    cluster.go_on(30.0)
    cluster.transitions.clear()
    cluster.go_on(300.0)
    advised = [t for t in cluster.transitions if isinstance(t, HandOversAdvised)]
    assert 6 <= len(advised) <= 12
    assert [t.withdrawn_count for t in advised[-2:]] in ([0, 4], [4, 0])
    assert cluster.counts() == [0, 8]


def _copying() -> tuple[Cluster, list[RangeAssignment]]:
    """Ranges are copied to a server that came; the ranges that are."""
    cluster = uneven()
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    assert all(r.catching_up == (r.hand_over_to,) for r in cluster.advised)
    return cluster, cluster.advised


def test_advice_ends_when_a_server_comes_and_its_target_is_dropped() -> None:
    cluster, advised = _copying()
    cluster.come()
    cluster.pass_time(1.0, *cluster.servers, cluster.worker)
    assert cluster.advised == []
    for before in advised:
        now = cluster.ranges[before.range_id]
        assert now.catching_up == ()
        assert now.assignment_epoch > before.assignment_epoch


def test_who_fell_silent_while_it_was_copied_to_holds_off_no_hand_over() -> None:
    """With fewer servers than replicas it is named for as long as no other has come."""
    cluster = Cluster(server_count=3, replica_count=3)
    first = cluster.servers[0]
    cluster.pass_time(10.0, first, cluster.worker)
    cluster.ask(
        *[BackupRequest(r.range_id, r.assignment_epoch, frozenset()) for r in cluster.ranges]
    )
    silent = cluster.come()
    cluster.pass_time(10.0, first, cluster.worker)
    cluster.servers = [first, cluster.come()]
    backups = frozenset({cluster.servers[1].node_id})
    cluster.ask(*[BackupRequest(r.range_id, r.assignment_epoch, backups) for r in cluster.ranges])
    assert all(r.catching_up == (silent.node_id,) for r in cluster.ranges)
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    assert {r.hand_over_to for r in cluster.advised} == backups


def test_a_range_whose_table_was_removed_keeps_no_backup_beyond_those_it_needs() -> None:
    """The one that was to take it over had been let in before."""
    cluster = Cluster(run="a")
    cluster.servers.append(cluster.come())
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    cluster.ask(let_in(cluster.advised[0]))
    assert max(len(r.in_sync) for r in cluster.ranges) == 3
    cluster.leave(cluster.worker)
    cluster.cluster.remove_run(cluster.join(Role.OPERATOR), "a")
    for _ in range(60):
        cluster.pass_time(1.0, *cluster.servers)
        for each in cluster.ranges:
            cluster.obey(each)
    assert all(len(r.in_sync) == 2 for r in cluster.ranges)


def test_a_target_that_is_copied_to_replaces_a_backup_that_fell_silent() -> None:
    """Its copy was thrown away when the range needed it, and begun again."""
    cluster, advised = _copying()
    silent, *others = cluster.servers
    cluster.pass_time(5.0, *others, cluster.worker)
    assert cluster.advised == []
    (before, *_) = [each for each in advised if silent.node_id in each.backups]
    assert cluster.ranges[before.range_id] == replace(before, hand_over_to=None)
    cluster.ask(BackupRequest(before.range_id, before.assignment_epoch, frozenset()))
    now = cluster.ranges[before.range_id]
    assert (now.backups, now.catching_up) == ((), before.catching_up)
    cluster.ask(let_in(now))
    assert cluster.ranges[before.range_id].backups == before.catching_up


def test_what_is_not_followed_keeps_no_other_range_from_being_handed_over() -> None:
    """The ranges that come first could not be handed over, and were chosen again each time."""
    cluster = piled_up()
    cluster.go_on(1.0)
    cluster.hands_over = False
    for _ in range(120):
        cluster.go_on(1.0)
        for each in cluster.advised:
            if each.range_id > 1:
                cluster.ask(handed_over(each))
    assert cluster.counts() == [4, 4]
    assert {cluster.ranges[0].primary, cluster.ranges[1].primary} == {cluster.servers[1].node_id}


def test_who_may_not_reach_a_primary_is_copied_to_by_the_others_first() -> None:
    cluster = uneven()
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    first = cluster.advised[0]
    former, came = first.primary, cluster.servers[2].node_id
    cluster.ask(let_in(first))
    first = cluster.ranges[first.range_id]
    apart = BackupRequest(first.range_id, first.assignment_epoch, frozenset(first.backups) - {came})
    cluster.ask(apart)
    for each in cluster.advised:
        cluster.ask(BackupRequest(each.range_id, each.assignment_epoch, frozenset(each.backups)))
    cluster.obeys = True
    cluster.go_on(90.0)
    told = [t for t in cluster.transitions if isinstance(t, RangesHandedOver)]
    taken = [t.primary for t in told if t.counts[0][0] == came]
    assert taken[0] != former
    assert former in taken, "it is tried at last"


def _range_bytes(cluster: Cluster) -> list[int]:
    """That tables take of a server for each range, the smallest first."""
    return sorted(cluster.cluster._state.range_memory_bytes.values())


def test_who_has_little_memory_is_copied_to_no_more_ranges_than_fit() -> None:
    """It was ended by the system, came back, and was copied to again."""
    cluster = Cluster()
    cluster.fields["memory"] = ServerMemory(2 * _range_bytes(cluster)[0] - 1)
    small = cluster.come()
    cluster.servers.append(small)
    most = 0
    for _ in range(60):
        cluster.go_on(1.0)
        most = max(most, sum(small.node_id in r.holders for r in cluster.ranges))
    assert most == 1
    assert cluster.counts()[2] == 1


def test_a_table_is_not_refused_for_copies_that_are_needed_for_a_time_alone() -> None:
    cluster = Cluster()
    cluster.fields["memory"] = ServerMemory(sum(_range_bytes(cluster)[-2:]))
    cluster.servers.append(cluster.come())
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    assert len(cluster.advised) == 2
    assert isinstance(cluster.create(cluster.worker, replace(SPEC, name="b")), Created)
    cluster.ask(*[let_in(each) for each in cluster.advised if each.primary == 1])
    assert isinstance(cluster.create(cluster.worker, replace(SPEC, name="c")), Created)


def test_advice_and_its_end_outlive_the_scheduler() -> None:
    cluster = uneven()
    cluster.obeys = False
    cluster.go_on(LEASES_S)
    advised = cluster.advised
    cluster.start_again()
    assert cluster.advised == advised
    cluster.obeys = True
    cluster.go_on(90.0)
    assert sorted(cluster.counts()) == [2, 3, 3]


def _spread(draw: random.Random) -> tuple[list[RangeAssignment], dict[RangeId, int], list[NodeId]]:
    servers = [NodeId(n) for n in range(1, draw.randint(2, 6) + 1)]
    count = draw.choice((1, 8, 64))
    ranges = []
    for index, slots in enumerate(key_ranges(count)):
        primary, *backups = draw.sample(servers, min(len(servers), draw.randint(2, 3)))
        epoch = AssignmentEpoch(2)
        ranges.append(RangeAssignment(RangeId(index), slots, epoch, primary, tuple(backups)))
    sizes = draw.choice(((100,), (0, 1, 1000), range(1, 500)))
    return ranges, {r.range_id: draw.choice(sizes) for r in ranges}, servers


def _moved(
    ranges: Iterable[RangeAssignment], targets: dict[RangeId, NodeId]
) -> list[RangeAssignment]:
    return [replace(r, primary=targets.get(r.range_id, r.primary)) for r in ranges]


@pytest.mark.parametrize("seed", range(30))
def test_from_every_spread_the_hand_overs_end(seed: int) -> None:
    """Each makes the sum of the squares of the primaries' bytes smaller, so none is undone."""
    ranges, sizes, servers = _spread(random.Random(seed))

    def squares() -> int:
        held = Counter[NodeId]()
        for each in ranges:
            held[each.in_sync[0]] += sizes[each.range_id]
        return sum(count * count for count in held.values())

    before = squares()
    for _ in range(200):
        targets = hand_overs(ranges, sizes, servers, lambda _: servers, 4)
        if not targets:
            break
        assert len(targets) <= 4
        ranges = _moved(ranges, targets)
        assert squares() < before
        before = squares()
    else:
        raise AssertionError("it goes on for ever")
    held = Counter(dict.fromkeys(servers, 0))
    for each in ranges:
        held[each.in_sync[0]] += sizes[each.range_id]
    if len(set(sizes.values())) == 1 and len(ranges) >= 64:
        spread = max(held.values()) - min(held.values())
        assert spread <= max(2 * 100, sum(held.values()) / len(servers) / 10)


def test_empty_ranges_and_those_of_nobody_stay() -> None:
    (first, second) = key_ranges(2)
    epoch, servers = AssignmentEpoch(2), [NodeId(1), NodeId(2)]
    ranges = [
        RangeAssignment(RangeId(0), first, epoch, None),
        RangeAssignment(RangeId(1), second, epoch, NodeId(1), (NodeId(2),)),
    ]
    assert hand_overs(ranges, {RangeId(0): 5}, servers, lambda _: servers, 4) == {}
