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
    """FD-1, FD-2."""
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert looked_at(detector, 0, 3) == []
    assert looked_at(detector, 3.5, 10) == [(3.5, ONE)]
    assert detector.heard(ONE, 10)


def test_hearing_a_node_puts_the_silence_off() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    detector.heard(TWO, 0)
    assert looked_at(detector, 0, 2) == []
    assert not detector.heard(TWO, 2)
    assert looked_at(detector, 2.5, 5) == [(3.5, ONE)]


def test_hearing_a_silent_node_says_so_once_and_it_can_fall_silent_again() -> None:
    """FD-2."""
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
    assert detector.heard(ONE, 100)


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


def test_any_lease_above_nothing_will_do() -> None:
    detector = FailureDetector(lease_s=0.5, now_s=0)
    detector.heard(ONE, 0)
    assert detector.look(0.25) == ()
    assert detector.look(0.5) == ()
    assert detector.look(0.75) == (ONE,)


def test_who_is_forgotten_while_silent_is_not_silent_when_it_comes_anew() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    assert looked_at(detector, 0, 4) == [(3.5, ONE)]
    detector.forget(ONE)
    assert detector.heard(ONE, 5) is False


@pytest.mark.parametrize(("gap_s", "found"), [(2.0, (ONE,)), (2.001, ())])
def test_a_pause_is_a_gap_of_more_than_half_a_lease(gap_s: float, found: tuple[NodeId]) -> None:
    """FD-3 needs the lease to stand where looks come every half lease."""
    detector = FailureDetector(lease_s=4, now_s=0)
    detector.heard(ONE, 0)
    for now_s in (1, 2, 3):
        assert detector.look(now_s) == ()
    assert detector.look(3 + gap_s) == found


def test_a_look_at_an_older_time_makes_no_pause() -> None:
    detector = FailureDetector(lease_s=3, now_s=10)
    detector.heard(ONE, 10)
    for now_s in (11, 10, 12.25):
        assert detector.look(now_s) == ()
    assert detector.look(13.25) == (ONE,)


def test_the_silence_that_counts_has_no_pause_of_the_observer_in_it() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    detector.heard(ONE, 0)
    detector.look(1)
    assert (detector.silence_s(ONE, 1), detector.quiet_s(ONE, 1)) == (1, 1)
    detector.look(100)
    assert (detector.silence_s(ONE, 102), detector.quiet_s(ONE, 102)) == (2, 102)
    detector.heard(ONE, 103)
    assert detector.silence_s(ONE, 104) == 1
    assert (detector.silence_s(ONE, 50), detector.quiet_s(ONE, 50)) == (0, 0)
    assert (detector.silence_s(TWO, 102), detector.quiet_s(TWO, 102)) == (0, 0)


def test_who_fell_silent_at_once_is_named_in_order() -> None:
    detector = FailureDetector(lease_s=3, now_s=0)
    for node_id in (NodeId(9), TWO, ONE):
        detector.heard(node_id, 0)
    assert looked_at(detector, 0, 3.5) == [(3.5, ONE), (3.5, TWO), (3.5, NodeId(9))]
