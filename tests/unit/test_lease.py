"""Both ends of a range's lease: who may serve, and from when another may."""

from __future__ import annotations

from ps_core.keys import NodeId
from ps_server.replication.lease import MAX_DRIFT, GrantedLease, HeldLease

LEASE_S = 2.0
ONE, TWO = NodeId(1), NodeId(2)


def test_a_primary_without_backups_needs_no_lease() -> None:
    assert HeldLease(LEASE_S).holds((), 1e9)


def test_each_backup_must_have_granted_and_the_oldest_grant_counts() -> None:
    lease = HeldLease(LEASE_S)
    lease.granted(ONE, 10.0)
    assert lease.holds((ONE,), 10.0)
    assert not lease.holds((ONE, TWO), 10.0)
    lease.granted(TWO, 11.0)
    assert lease.holds((ONE, TWO), 11.9)
    assert not lease.holds((ONE, TWO), 10.0 + LEASE_S)


def test_an_answer_that_is_overtaken_takes_nothing_back() -> None:
    held, granted = HeldLease(LEASE_S), GrantedLease(LEASE_S)
    held.granted(ONE, 10.0)
    held.granted(ONE, 9.0)
    assert held.holds((ONE,), 11.9)
    granted.grant(10.0)
    granted.grant(9.0)
    assert granted.ends_s == 10.0 + LEASE_S * (1.0 + MAX_DRIFT)


def test_a_backup_that_counts_again_grants_anew() -> None:
    lease = HeldLease(LEASE_S)
    lease.granted(ONE, 10.0)
    lease.granted(TWO, 10.0)
    lease.exclude(ONE)
    assert not lease.holds((ONE,), 10.0)
    assert lease.holds((TWO,), 10.0)
    lease.clear()
    assert not lease.holds((TWO,), 10.0)


def test_one_that_never_granted_need_not_wait() -> None:
    assert GrantedLease(LEASE_S).ends_s < 0.0


def test_a_copy_that_begins_anew_waits_for_what_the_one_before_granted() -> None:
    before, after = GrantedLease(LEASE_S), GrantedLease(LEASE_S)
    before.grant(10.0)
    after.take_over(before)
    assert after.ends_s == before.ends_s


def test_a_primary_has_stopped_before_a_backup_serves_even_if_clocks_drift() -> None:
    """G2: the beat was sent before it was answered, and both clocks may be off by MAX_DRIFT."""
    held, granted = HeldLease(LEASE_S), GrantedLease(LEASE_S)
    held.granted(ONE, 10.0)
    granted.grant(10.0)
    slow_s = 10.0 + (granted.ends_s - 10.0) / (1.0 + MAX_DRIFT)
    assert not held.holds((ONE,), slow_s)
