"""Which ranges the scheduler gives to a server that comes with an update log (SEMANTICS S13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import errors
from ps_core.cluster_view import NodeState, Role, Session
from ps_core.keys import AssignmentEpoch, RangeId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.update_offer import UpdateOffer
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.edge.requests import registration_of
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
        claim = UpdateLogClaim(log_id, timeline, range_ids)
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
    assert registration_of(request).update_log == expected


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
