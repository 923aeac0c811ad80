"""The host of collective calls, one sentence of SEMANTICS S17 each."""

from __future__ import annotations

import pytest

from ps_core import limits
from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.collective_calls import Round, Share
from ps_core.errors import Fenced, StaleAssignment
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId
from ps_server.ranges.collective_rounds import CollectiveRounds

HOST = Node(NodeId(1), Incarnation(1), Role.SERVER, 0, "host:1", NodeState.ALIVE)


def worker(rank: int, incarnation: int, state: NodeState = NodeState.ALIVE) -> Node:
    return Node(NodeId(incarnation), Incarnation(incarnation), Role.WORKER, rank, "", state)


def view_of(*workers: Node, worker_count: int = 2) -> ClusterView:
    return ClusterView(1, "demo", worker_count, 1, (HOST, *workers), (), ())


def share(node: Node, call: str = "barrier", payload: bytes = b"") -> Share:
    return Share(node.rank, node.incarnation, call, 0, payload)


FIRST, SECOND = worker(0, 11), worker(1, 12)


def host(*workers: Node) -> CollectiveRounds:
    machine = CollectiveRounds(HOST.node_id)
    machine.observe(view_of(*workers))
    return machine


def enter(machine: CollectiveRounds, node: Node, ended: int = 0, last: Round | None = None) -> None:
    machine.enter(node.incarnation, ended, last, share(node))


def test_a_round_ends_when_all_are_in_it_and_has_their_shares_by_rank() -> None:
    machine = host(FIRST, SECOND)
    enter(machine, SECOND)
    assert machine.answer(SECOND.incarnation, 0) is None
    enter(machine, FIRST)
    expected = Round(1, (share(FIRST), share(SECOND)))
    assert machine.answer(FIRST.incarnation, 0) == machine.answer(SECOND.incarnation, 0) == expected


def test_it_waits_for_a_worker_that_has_not_come_and_says_so() -> None:
    machine = host(FIRST)
    enter(machine, FIRST)
    assert machine.answer(FIRST.incarnation, 0) is None
    assert machine.missing() == "worker 1, which has not come yet"


def test_it_says_who_has_not_made_the_call_and_who_is_silent() -> None:
    silent = worker(1, 12, NodeState.SILENT)
    machine = host(FIRST, silent)
    enter(machine, FIRST)
    assert machine.missing() == "worker 1 (node 12), which has not made the call, and is silent"


def test_it_names_eight_and_counts_the_others() -> None:
    machine = CollectiveRounds(HOST.node_id)
    machine.observe(view_of(worker_count=11))
    assert machine.missing().endswith("worker 7, which has not come yet and 3 more")


def test_a_worker_that_has_ended_or_is_forgotten_is_in_no_round() -> None:
    """Its share may come after the view that says so."""
    for ended in ((worker(1, 12, NodeState.GONE),), ()):
        machine = host(FIRST, *ended)
        with pytest.raises(Fenced, match="membership has ended"):
            enter(machine, SECOND)
        enter(machine, FIRST)
        assert (machine.answer(FIRST.incarnation, 0) is not None) == bool(ended)


@pytest.mark.parametrize("state", [NodeState.LEFT, NodeState.GONE])
def test_it_goes_on_without_a_worker_that_has_ended(state: NodeState) -> None:
    machine = host(FIRST, SECOND)
    enter(machine, FIRST)
    enter(machine, SECOND, ended=0)
    enter(machine, FIRST, ended=1)
    machine.observe(view_of(FIRST, worker(1, 12, state)))
    assert machine.answer(FIRST.incarnation, 1) == Round(2, (share(FIRST),))


def test_the_share_of_a_worker_that_has_ended_does_not_count() -> None:
    machine = host(FIRST, SECOND)
    enter(machine, SECOND)
    machine.observe(view_of(FIRST, worker(1, 12, NodeState.GONE)))
    enter(machine, FIRST)
    assert machine.answer(FIRST.incarnation, 0) == Round(1, (share(FIRST),))


def test_who_asks_again_is_given_the_same_round_and_is_in_no_other() -> None:
    machine = host(FIRST, SECOND)
    enter(machine, FIRST)
    enter(machine, SECOND)
    enter(machine, FIRST)
    assert machine.answer(FIRST.incarnation, 0) == Round(1, (share(FIRST), share(SECOND)))
    enter(machine, SECOND, ended=1)
    assert machine.answer(SECOND.incarnation, 1) is None


def test_a_newcomer_that_has_not_spoken_is_waited_for_and_one_that_has_not_joined_is_not() -> None:
    newcomer = worker(2, 13)
    machine = host(FIRST, SECOND, newcomer)
    enter(machine, FIRST)
    enter(machine, SECOND)
    assert machine.answer(FIRST.incarnation, 0) is None
    machine.enter(newcomer.incarnation, 0, None, None)
    assert machine.answer(FIRST.incarnation, 0) == Round(1, (share(FIRST), share(SECOND)))


def test_a_newcomer_that_was_in_a_round_is_waited_for_from_then_on() -> None:
    newcomer = worker(2, 13)
    machine = host(FIRST, SECOND, newcomer)
    for node in (newcomer, FIRST, SECOND):
        enter(machine, node)
    for node in (FIRST, SECOND):
        enter(machine, node, ended=1)
    assert machine.answer(FIRST.incarnation, 1) is None
    assert machine.missing() == "worker 2 (node 13), which has not made the call"
    assert machine.answer(newcomer.incarnation, 0) is not None, "it was not given it yet"


def test_another_host_has_to_be_told_of_the_last_round() -> None:
    machine = host(FIRST, SECOND)
    with pytest.raises(StaleAssignment, match="round 4 is not known here"):
        enter(machine, FIRST, ended=4)
    last = Round(4, (share(FIRST), share(SECOND)))
    before = Round(3, (share(FIRST), share(SECOND)))
    enter(machine, SECOND, ended=3, last=before)  # was given no answer by the host before
    enter(machine, FIRST, ended=4, last=last)
    assert machine.answer(SECOND.incarnation, 3) == last
    enter(machine, SECOND, ended=4, last=last)
    assert machine.answer(SECOND.incarnation, 4) == Round(5, (share(FIRST), share(SECOND)))


def test_who_means_another_host_is_told_where_calls_meet() -> None:
    machine = host(FIRST)
    machine.check_host(AssignmentEpoch(0))
    with pytest.raises(StaleAssignment, match="at server 1"):
        machine.check_host(AssignmentEpoch(1))
    elsewhere = CollectiveRounds(NodeId(2))
    with pytest.raises(StaleAssignment, match="nowhere"):
        elsewhere.check_host(AssignmentEpoch(0))


def test_too_much_of_all_together_comes_to_nothing_for_all() -> None:
    machine = host(FIRST, SECOND)
    half = bytes(limits.MAX_COLLECTIVE_ROUND_BYTES // 2)
    for node in (FIRST, SECOND):
        machine.enter(node.incarnation, 0, None, share(node, "gather", half))
    ended = machine.answer(FIRST.incarnation, 0)
    assert ended is not None
    assert f"expected at most {limits.MAX_COLLECTIVE_ROUND_BYTES}" in ended.problem
    assert [one.payload for one in ended.shares] == [b"", b""]
    less = bytes(limits.MAX_COLLECTIVE_ROUND_BYTES // 2 - len("gather") - 32)
    for node in (FIRST, SECOND):
        machine.enter(node.incarnation, 1, None, share(node, "gather", less))
    fits = machine.answer(FIRST.incarnation, 1)
    assert fits is not None
    assert not fits.problem
