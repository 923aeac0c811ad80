"""Which ranges the scheduler gives to a server that comes with an update log (SEMANTICS S13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import errors
from ps_core.cluster_view import BackupRequest, NodeState, Role, Session
from ps_core.keys import AssignmentEpoch, RangeId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.update_offer import UpdateOffer
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.edge.requests import registration_of
from scheduler.machine.membership import KEPT_COUNT
from scheduler.machine.state import NodeLeft, RangesFailedOver, RangesLost, UpdateLogClaim
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness, asking, refused

ONE, TWO, OTHER = (bytes([number]) * 16 for number in (1, 2, 9))
RANGES = 8
EPOCHS = (AssignmentEpoch(2), AssignmentEpoch(3))


class Logged(Harness):
    """Two servers that keep logs, and a table whose ranges are theirs."""

    def __init__(self, replica_count: int = 1) -> None:
        super().__init__(server_count=2, range_count=RANGES, replica_count=replica_count)
        self.first = self.join(Role.SERVER, update_log=UpdateLogClaim(ONE))
        self.second = self.join(Role.SERVER, update_log=UpdateLogClaim(TWO))
        self.worker = self.join(Role.WORKER)
        self.create(self.worker)
        self.transitions.clear()

    def of(self, session: Session) -> tuple[RangeId, ...]:
        return tuple(r.range_id for r in self.cluster.view.ranges if r.primary == session.node_id)

    def come(self, log_id: bytes, *range_ids: RangeId, **fields: object) -> Session:
        """A server with a log that has these."""
        timeline = fields.pop("timeline", SETTINGS.timeline)
        assert isinstance(timeline, bytes)
        epochs = fields.pop("epochs", ())
        assert isinstance(epochs, tuple)
        claim = UpdateLogClaim(log_id, timeline, range_ids, (), epochs)
        return self.join(Role.SERVER, update_log=claim, **fields)


def test_it_is_given_what_the_last_primary_with_that_log_had() -> None:
    cluster = Logged()
    had, others = cluster.of(cluster.first), cluster.of(cluster.second)
    epochs = {r.range_id: r.assignment_epoch for r in cluster.cluster.view.ranges}
    again = cluster.come(ONE, *had)
    assert cluster.of(again) == had
    assert cluster.of(cluster.second) == others
    assert cluster.node(cluster.first).state is NodeState.LEFT
    moved = [t for t in cluster.transitions if isinstance(t, RangesFailedOver)]
    assert [(t.range_ids, t.counts) for t in moved] == [(had, ((again.node_id, len(had)),))]
    left = [t for t in cluster.transitions if isinstance(t, NodeLeft)]
    assert f"server node {again.node_id} came with its update log" in left[0].reason
    for r in cluster.cluster.view.ranges:
        assert r.assignment_epoch == epochs[r.range_id] + (r.range_id in had)


class TestCopiedLog:
    """A server with a copy of a living server's log: its lock says nothing of that one."""

    def test_a_living_server_keeps_its_ranges(self) -> None:
        cluster = Logged()
        had = cluster.of(cluster.first)
        refused(
            errors.Recovering,
            "the update log is that of server node 1",
            by=lambda: cluster.come(ONE, *had, waited_s=0.0),
            of=cluster,
        )
        cluster.pass_time(2.0, cluster.first, cluster.second, cluster.worker)
        refused(
            errors.InvalidConfig,
            "the update log is a copy of that of server node 1",
            "empty directory",
            by=lambda: cluster.come(ONE, *had, waited_s=2.0),
            of=cluster,
        )

    def test_a_dead_servers_log_is_taken_when_a_heartbeat_is_missed(self) -> None:
        cluster = Logged()
        had = cluster.of(cluster.first)
        cluster.pass_time(1.6, cluster.second, cluster.worker)
        assert cluster.node(cluster.first).state is NodeState.ALIVE
        assert cluster.of(cluster.come(ONE, *had, waited_s=0.0)) == had

    def test_the_log_of_one_that_another_scheduler_has_not_heard_is_taken(self) -> None:
        cluster = Logged()
        had = cluster.of(cluster.first)
        cluster.start_again()
        assert cluster.node(cluster.first).state is NodeState.ALIVE
        assert cluster.of(cluster.come(ONE, *had, waited_s=0.0)) == had

    def test_a_server_at_the_same_address_is_in_its_place(self) -> None:
        cluster = Logged()
        had, address = cluster.of(cluster.first), cluster.node(cluster.first).address
        assert cluster.of(cluster.come(ONE, *had, address=address, waited_s=0.0)) == had


class PowerCut(Logged):
    """Both servers die within a lease, or one after the other was told to stop and has left: the
    scheduler promotes the second, which is dead, too.
    """

    def __init__(self, *, has_left: bool = False) -> None:
        super().__init__(replica_count=2)
        self.had, self.others = self.of(self.first), self.of(self.second)
        if has_left:
            self.leave(self.first)
        else:
            self.pass_time(1.0, self.second, self.worker)
            self.promote()
        assert self.of(self.second) == tuple(map(RangeId, range(RANGES)))

    def promote(self) -> None:
        while self.of(self.first):
            self.pass_time(0.5, self.worker)

    def configure(self, session: Session) -> None:
        """A promoted server is given the configuration that it asks for; it may serve."""
        ranges = [r for r in self.cluster.view.ranges if r.primary == session.node_id]
        requests = [BackupRequest(r.range_id, r.assignment_epoch, frozenset()) for r in ranges]
        decision = self.cluster.set_backups(session, requests)
        assert decision.reply == ()
        self.transitions += decision.transitions

    def let_in(self, primary: Session, backup: Session) -> None:
        """A server has joined all ranges of another anew."""
        ranges = [r for r in self.cluster.view.ranges if r.primary == primary.node_id]
        joined = frozenset({backup.node_id})
        requests = [BackupRequest(r.range_id, r.assignment_epoch, joined) for r in ranges]
        assert self.cluster.set_backups(primary, requests).reply == ()

    def epochs(self, range_ids: tuple[RangeId, ...]) -> tuple[AssignmentEpoch, ...]:
        ranges = self.cluster.view.ranges
        return tuple(ranges[range_id].assignment_epoch for range_id in range_ids)


class TestPowerCut:
    """All servers of a replicated cluster die at once, and come back with their logs (S13)."""

    @pytest.mark.parametrize("is_restarted", [False, True])
    @pytest.mark.parametrize("is_silent", [False, True])
    @pytest.mark.parametrize("is_first", [False, True])
    def test_the_log_of_the_former_primary_brings_its_ranges_back(
        self, is_restarted: bool, is_silent: bool, is_first: bool
    ) -> None:
        cut = PowerCut()
        if is_silent:
            cut.pass_time(4.0, cut.worker)
        if is_restarted:
            cut.start_again()
        if is_first:
            assert cut.of(cut.come(TWO, *cut.others)) == cut.others
        again = cut.come(ONE, *cut.had)
        assert cut.of(again) == cut.had
        assert lost(cut) == []

    def test_it_may_die_again(self) -> None:
        """Its log may have nothing under its new epoch yet."""
        cut = PowerCut()
        epochs = tuple(AssignmentEpoch(each - 1) for each in cut.epochs(cut.had))
        cut.second = cut.come(TWO, *cut.others)
        cut.first = cut.come(ONE, *cut.had, epochs=epochs)
        cut.let_in(cut.first, cut.second)
        cut.pass_time(1.0, cut.second, cut.worker)
        cut.promote()
        cut.start_again()
        assert cut.of(cut.come(ONE, *cut.had, epochs=epochs)) == cut.had

    def test_ranges_begin_anew_of_which_that_log_has_nothing(self) -> None:
        """Nobody has seen anything of them, though another was promoted."""
        cut = PowerCut()
        own = cut.come(TWO, *cut.others)
        assert cut.of(own) == cut.others
        again = cut.come(ONE)
        assert cut.of(again) == cut.had
        ranges = [r for r in cut.cluster.view.ranges if r.range_id in cut.had]
        assert {r.initial_holders for r in ranges} == {(again.node_id,)}

    def test_the_log_of_the_promoted_one_does_so_too(self) -> None:
        """It may have a snapshot under its term, with all that was acknowledged."""
        cut = PowerCut()
        newer = cut.epochs(cut.had)
        older = tuple(AssignmentEpoch(each - 1) for each in newer)
        again = cut.come(TWO, *cut.had, epochs=newer)
        assert cut.of(again) == tuple(sorted((*cut.had, *cut.others)))
        assert cut.of(cut.come(ONE, *cut.had, epochs=older)) == ()

    def test_the_log_of_the_promoted_one_may_have_an_earlier_term_only(self) -> None:
        cut = PowerCut()
        older = tuple(AssignmentEpoch(each - 1) for each in cut.epochs(cut.had))
        assert cut.of(cut.come(TWO, *cut.had, epochs=older)) == cut.others
        assert cut.of(cut.come(ONE, *cut.had, epochs=older)) == cut.had

    def test_one_that_may_have_acknowledged_more_is_waited_for(self) -> None:
        cut = PowerCut()
        newer = cut.epochs(cut.had)
        cut.configure(cut.second)
        cut.start_again()
        assert cut.of(cut.come(ONE, *cut.had, epochs=newer)) == ()
        assert cut.of(cut.second) == tuple(map(RangeId, range(RANGES)))
        everything = tuple(map(RangeId, range(RANGES)))
        assert cut.of(cut.come(TWO, *everything)) == everything

    @pytest.mark.parametrize("claims", [False, True])
    def test_ranges_are_lost_that_the_only_log_lacks(self, *, claims: bool) -> None:
        """Its server has come with it; one of other kernels claims nothing, and may come again."""
        cut = PowerCut()
        cut.configure(cut.second)
        cut.pass_time(4.0, cut.worker)
        cut.come(ONE, *cut.had)
        assert lost(cut) == []
        cut.come(TWO, *cut.others, timeline=SETTINGS.timeline if claims else b"")
        assert lost(cut) == ([cut.had] if claims else [])

    @pytest.mark.parametrize("is_configured", [False, True])
    def test_one_that_was_promoted_alone_is_the_last_primary_when_its_log_has_the_range(
        self, *, is_configured: bool
    ) -> None:
        """Until it says so the log of the one that has left counts."""
        cut = PowerCut(has_left=True)
        if is_configured:
            cut.configure(cut.second)
        again = cut.come(ONE, *cut.had)
        assert cut.of(again) == (() if is_configured else cut.had)
        assert lost(cut) == []

    def test_a_log_is_waited_for_whose_server_has_left(self) -> None:
        """Whoever was promoted alone came with its log too soon for that to have the range."""
        cut = PowerCut(has_left=True)
        cut.start_again()
        assert cut.of(cut.come(TWO, *cut.others)) == cut.others
        assert lost(cut) == []
        assert cut.of(cut.come(ONE, *cut.had)) == cut.had

    def test_a_log_without_the_end_of_an_earlier_term_is_of_no_use(self) -> None:
        """It was to have one, when its server died, which had joined the range again since."""
        cut = PowerCut()
        cut.pass_time(0.5, cut.first, cut.second, cut.worker)
        older = tuple(AssignmentEpoch(each - 1) for each in cut.epochs(cut.had))
        cut.configure(cut.second)
        cut.pass_time(0.5, cut.first, cut.second, cut.worker)
        cut.let_in(cut.second, cut.first)
        cut.pass_time(4.0, cut.first, cut.worker)
        assert cut.of(cut.first) == tuple(map(RangeId, range(RANGES)))
        cut.configure(cut.first)
        assert cut.of(cut.come(ONE, *cut.had, epochs=older)) == ()


class Three(Harness):
    """Three servers that keep logs and hold one range; its primary has left, as it was told to."""

    def __init__(self) -> None:
        super().__init__(server_count=3, range_count=1, replica_count=3)
        claims = [UpdateLogClaim(log_id) for log_id in (ONE, TWO, OTHER)]
        servers = [self.join(Role.SERVER, update_log=claim) for claim in claims]
        self.create(self.join(Role.WORKER))
        (before,) = self.cluster.view.ranges
        self.left, *self.others = (
            next(s for s in servers if s.node_id == node_id) for node_id in before.in_sync
        )
        self._logs = {s.node_id: claim.log_id for s, claim in zip(servers, claims, strict=True)}
        self.leave(self.left)

    def come_back(self, session: Session, *range_ids: RangeId) -> Session:
        """With the session's log, which has these."""
        claim = UpdateLogClaim(self._logs[session.node_id], SETTINGS.timeline, range_ids)
        return self.join(Role.SERVER, update_log=claim)

    @property
    def comes_back_whole(self) -> bool:
        """Whether the log of the one that left is given the range, which is not lost before."""
        is_lost = self.cluster.view.ranges[0].is_lost
        again = self.come_back(self.left, RangeId(0))
        return not is_lost and self.cluster.view.ranges[0].primary == again.node_id


class TestLogOfOneThatLeft:
    """The others are promoted in its place, and their logs have nothing."""

    def test_it_is_waited_for(self) -> None:
        cluster = Three()
        cluster.pass_time(5.0)
        for each in cluster.others:
            cluster.come_back(each)
        assert cluster.comes_back_whole

    def test_it_is_waited_for_when_the_promoted_one_misses_the_range(self) -> None:
        cluster = Three()
        (after,) = cluster.cluster.view.ranges
        promoted, other = sorted(cluster.others, key=lambda s: s.node_id != after.primary)
        cluster.come_back(other)
        (now,) = cluster.cluster.view.ranges
        missing = BackupRequest(RangeId(0), now.assignment_epoch, frozenset(), True)
        cluster.cluster.set_backups(promoted, [missing])
        assert cluster.comes_back_whole

    def test_it_is_waited_for_however_many_servers_leave_meanwhile(self) -> None:
        cluster = Three()
        cluster.pass_time(5.0)
        for each in cluster.others:
            cluster.come_back(each)
        for _ in range(KEPT_COUNT + 5):
            cluster.come_back(cluster.others[0])
        assert cluster.comes_back_whole


def lost(cluster: Logged) -> list[tuple[RangeId, ...]]:
    """Ranges that were noted as lost, in order."""
    return [t.range_ids for t in cluster.transitions if isinstance(t, RangesLost)]


@pytest.mark.parametrize("has_left", [False, True])
def test_ranges_of_a_log_that_was_replaced_are_lost(has_left: bool) -> None:
    """Nobody comes with it any more: its directory has another, whose server names it."""
    cluster = Logged()
    had, others = cluster.of(cluster.first), cluster.of(cluster.second)
    if has_left:
        address = cluster.node(cluster.first).address
        cluster.pass_time(4.0, cluster.second, cluster.worker)
        cluster.join(Role.SERVER, address=address)
        assert cluster.node(cluster.first).state is NodeState.LEFT
    assert lost(cluster) == []
    claim = UpdateLogClaim(OTHER, former_log_ids=(ONE,))
    again = cluster.join(Role.SERVER, update_log=claim)
    assert cluster.node(cluster.first).state is NodeState.LEFT
    assert lost(cluster) == [had]
    assert (cluster.of(again), cluster.of(cluster.second)) == ((), others)


def test_ranges_are_lost_with_the_last_log_that_may_have_them() -> None:
    cluster = Logged(replica_count=2)
    cluster.pass_time(4.0, cluster.worker)
    cluster.join(Role.SERVER, update_log=UpdateLogClaim(OTHER, former_log_ids=(ONE,)))
    assert lost(cluster) == []
    cluster.join(Role.SERVER, update_log=UpdateLogClaim(b"t" * 16, former_log_ids=(TWO,)))
    assert sorted(r for ids in lost(cluster) for r in ids) == list(range(RANGES))


def test_one_that_is_killed_before_it_serves_may_come_again() -> None:
    cluster = Logged()
    had = cluster.of(cluster.first)
    cluster.come(ONE, *had)
    assert cluster.of(cluster.come(ONE, *had)) == had


def test_another_log_another_timeline_and_none_are_given_nothing() -> None:
    cluster = Logged()
    had = cluster.of(cluster.first)
    cluster.pass_time(4.0, cluster.second, cluster.worker)
    assert cluster.of(cluster.come(OTHER, *had)) == ()
    assert cluster.of(cluster.join(Role.SERVER)) == ()
    assert cluster.of(cluster.come(ONE, *had, timeline=b"x" * 16)) == ()
    assert cluster.of(cluster.come(ONE, RangeId(RANGES), timeline=b"y" * 16)) == ()
    assert cluster.of(cluster.first) == had


def test_what_nobody_has_seen_begins_anew() -> None:
    """It was killed before the log had anything of them; only such logs ever had them."""
    cluster = Logged()
    had = cluster.of(cluster.first)
    assert cluster.of(cluster.come(ONE)) == had


def test_what_a_backup_has_taken_over_is_given_only_if_the_log_has_it() -> None:
    cluster = Logged(replica_count=2)
    had = cluster.of(cluster.first)
    cluster.pass_time(4.0, cluster.second, cluster.worker)
    assert cluster.of(cluster.second) == tuple(map(RangeId, range(RANGES)))
    own = tuple(r for r in cluster.of(cluster.second) if r not in had)
    again = cluster.come(TWO, *own, had[0])
    assert cluster.of(again) == tuple(sorted((*own, had[0])))
    assert cluster.of(cluster.second) == had[1:]


def test_backups_of_the_dead_join_anew() -> None:
    """They may lack what only the log has, or have what it has not."""
    cluster = Logged(replica_count=2)
    had = cluster.of(cluster.first)
    again = cluster.come(ONE, *had)
    for r in cluster.cluster.view.ranges:
        if r.range_id in had:
            assert (r.primary, r.backups) == (again.node_id, ())
            assert r.catching_up == (cluster.second.node_id,)


def test_its_address_is_free_at_once() -> None:
    """The lock proves what silence would show later."""
    cluster = Logged()
    address = cluster.node(cluster.first).address
    had = cluster.of(cluster.first)
    assert cluster.of(cluster.come(ONE, *had, address=address)) == had
    refused(
        errors.InvalidConfig,
        f"'{address}'",
        by=lambda: cluster.come(OTHER, address=address),
        of=cluster,
    )


@pytest.mark.parametrize(
    ("role", "claim", "words"),
    [
        (Role.WORKER, UpdateLogClaim(ONE), "a worker keeps an update log; only servers do"),
        (Role.SERVER, UpdateLogClaim(b"short"), "log_id has 5 bytes; expected 16"),
        (Role.SERVER, UpdateLogClaim(OTHER, former_log_ids=(b"short",)), "has 5 bytes"),
        (Role.SERVER, UpdateLogClaim(OTHER, former_log_ids=(OTHER,)), "and not itself"),
        (Role.SERVER, UpdateLogClaim(OTHER, former_log_ids=(ONE,) * 65), "had 65 others"),
        (Role.SERVER, UpdateLogClaim(ONE, SETTINGS.timeline, (RangeId(RANGES),)), "below 8"),
        (Role.SERVER, UpdateLogClaim(ONE, b"", (RangeId(1), RangeId(1))), "each once"),
        (Role.SERVER, UpdateLogClaim(ONE, b"", (RangeId(1),), (), EPOCHS), "2 epochs of them"),
    ],
)
def test_what_is_wrong_with_a_claim_is_said(role: Role, claim: UpdateLogClaim, words: str) -> None:
    cluster = Logged()
    refused(
        errors.InvalidConfig, words, by=lambda: cluster.join(role, update_log=claim), of=cluster
    )


def test_a_claim_is_read_whole() -> None:
    claim = scheduler_pb2.UpdateLogClaim(
        log_id=ONE,
        timeline=b"t",
        range_ids=[3],
        former_log_ids=[TWO, OTHER],
        assignment_epochs=[2],
    )
    request = scheduler_pb2.RegisterNodeRequest(role=types_pb2.NODE_ROLE_SERVER, update_log=claim)
    expected = UpdateLogClaim(ONE, b"t", (RangeId(3),), (TWO, OTHER), EPOCHS[:1])
    assert registration_of(request, b"").update_log == expected


def test_the_same_registration_has_the_same_claim() -> None:
    cluster = Logged()
    request = replace(asking(Role.SERVER, 1), update_log=UpdateLogClaim(OTHER))
    refused(
        errors.InvalidConfig,
        "with update_log",
        by=lambda: cluster.cluster.register(request, cluster.now_s),
        of=cluster,
    )


def test_custom_updates_are_not_logged() -> None:
    """Neither a table where there is a log, nor a log where there is such a table."""
    offers = {"custom_updates": (UpdateOffer("mine", (), "v1", ""),)}
    spec = replace(SPEC, optimizer=OptimizerSpec(OptimizerKind.CUSTOM, custom_update="mine"))
    logged = Harness(server_count=1)
    logged.join(Role.SERVER, update_log=UpdateLogClaim(ONE), **offers)
    worker = logged.join(Role.WORKER)
    words = "keeps an update log; custom updates are not logged"
    refused(errors.InvalidConfig, words, by=lambda: logged.create(worker, spec), of=logged)
    plain = Harness(server_count=1)
    plain.join(Role.SERVER, **offers)
    plain.create(plain.join(Role.WORKER), spec)
    refused(
        errors.InvalidConfig,
        "which is not logged",
        by=lambda: plain.join(Role.SERVER, update_log=UpdateLogClaim(ONE), **offers),
        of=plain,
    )
