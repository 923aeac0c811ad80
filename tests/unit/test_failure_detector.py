"""The failure detector, one test per rule."""

from __future__ import annotations

import pytest

from ps_core.errors import InvariantViolation
from ps_core.failure_detector import FailureDetector
from ps_core.keys import NodeId

ONE, TWO = NodeId(1), NodeId(2)


def looked_at(detector: FailureDetector, from_s: float, to_s: float) -> list[tuple[float, NodeId]]:
    """What looks every half second find."""
    found = []
    for half in range(int(from_s * 2), int(to_s * 2) + 1):
        found += [(half / 2, node_id) for node_id in detector.look(half / 2)]
    return found


def test_a_node_is_silent_once_the_lease_has_passed_and_not_at_its_end() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert looked_at(detector, 0, 3) == []
    assert looked_at(detector, 3.5, 10) == [(3.5, ONE)]
    assert detector.is_silent(ONE)


def test_hearing_a_node_puts_the_silence_off() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    detector.heard(TWO, 0)
    assert looked_at(detector, 0, 2) == []
    assert not detector.heard(TWO, 2)
    assert looked_at(detector, 2.5, 5) == [(3.5, ONE)]


def test_hearing_a_silent_node_says_so_once_and_it_can_fall_silent_again() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert looked_at(detector, 0, 4) == [(3.5, ONE)]
    assert detector.heard(ONE, 4)
    assert not detector.heard(ONE, 4)
    assert looked_at(detector, 4, 8) == [(7.5, ONE)]


def test_an_observer_that_was_paused_gives_everyone_a_fresh_lease() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert detector.look(0.5) == ()
    assert detector.look(100) == ()
    assert detector.quiet_s(ONE, 100) == 100
    assert looked_at(detector, 100.5, 103) == []
    assert looked_at(detector, 103.5, 104) == [(103.5, ONE)]


def test_a_pause_does_not_bring_a_silent_node_back() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert looked_at(detector, 0, 4) == [(3.5, ONE)]
    assert detector.look(100) == ()
    assert detector.is_silent(ONE)


def test_a_forgotten_node_is_never_reported() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert ONE in detector
    detector.forget(ONE)
    detector.forget(ONE)
    assert ONE not in detector
    assert list(detector) == []
    assert looked_at(detector, 0, 10) == []
    assert detector.quiet_s(ONE, 10) == 0


def test_an_older_time_never_moves_what_was_heard_back() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 5)
    detector.heard(ONE, 1)
    assert detector.quiet_s(ONE, 6) == 1


def test_a_lease_of_nothing_is_refused() -> None:
    with pytest.raises(InvariantViolation, match="lease is 0 s"):
        FailureDetector(lease_s=0, now_s=0)
