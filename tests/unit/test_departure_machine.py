"""When a server that was told to stop may end."""

from __future__ import annotations

from ps_core.errors import Fenced, Recovering
from ps_server.replication.departure_machine import Departure, DepartureStep

LEASE_S = 3.0


def test_who_is_named_is_waited_for_however_quiet_heartbeats_are() -> None:
    departure = Departure(end_s=30.0, lease_s=LEASE_S)
    assert departure.awaited == ""
    waits = Recovering("it waits for server 2", retry_after_ms=250)
    assert departure.answered(waits, silent_s=2 * LEASE_S) is DepartureStep.STAYS
    assert departure.awaited == "it waits for server 2"
    assert departure.answered(None, silent_s=0.0) is DepartureStep.LEAVES


def test_a_scheduler_that_does_not_listen_is_waited_for_as_long_as_a_lease() -> None:
    """gRPC's own failure is a `Recovering` too, which names nobody."""
    departure = Departure(end_s=30.0, lease_s=LEASE_S)
    nobody = Recovering("UNAVAILABLE: failed to connect")
    assert departure.answered(nobody, silent_s=LEASE_S) is DepartureStep.STAYS
    assert departure.answered(nobody, silent_s=LEASE_S + 0.1) is DepartureStep.LEAVES_UNHEARD
    assert departure.awaited == ""


def test_who_alone_has_values_waits_for_a_scheduler_that_may_save_them() -> None:
    departure = Departure(end_s=30.0, lease_s=LEASE_S)
    nobody = Recovering("UNAVAILABLE: failed to connect")
    said = departure.answered(nobody, silent_s=2 * LEASE_S, may_be_saved=True)
    assert said is DepartureStep.STAYS
    said = departure.answered(nobody, silent_s=0.0, may_be_saved=True, is_fenced=True)
    assert said is DepartureStep.LEAVES_UNHEARD


def test_who_is_no_member_any_more_has_nothing_to_wait_for() -> None:
    departure = Departure(end_s=30.0, lease_s=LEASE_S)
    assert departure.answered(Fenced("left"), silent_s=0.0) is DepartureStep.STAYS
    assert (
        departure.answered(Fenced("left"), silent_s=0.0, is_fenced=True)
        is DepartureStep.LEAVES_UNHEARD
    )


def test_the_grace_ends() -> None:
    departure = Departure(end_s=30.0, lease_s=LEASE_S)
    assert departure.left_s(29.0) == 1.0
    assert departure.left_s(31.0) == 0.0
