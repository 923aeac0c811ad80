"""Decisions are published when they are durable, and not with an earlier write."""

from __future__ import annotations

import pytest

from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.errors import InvariantViolation
from ps_core.keys import Incarnation, NodeId
from scheduler.journal.decision_buffer import DecisionBuffer
from scheduler.machine.state import ClusterState, JournaledCluster, NodeHeardAgain, Transition
from tests.unit.cluster_harness import SETTINGS


def view(number: int) -> ClusterView:
    return ClusterView(number, "c", 1, 1, (), (), ())


def heard(number: int) -> tuple[Transition, ...]:
    address, node_id = "127.0.0.1:1", NodeId(number)
    node = Node(node_id, Incarnation(number), Role.SERVER, -1, address, NodeState.ALIVE)
    return (NodeHeardAgain(node),)


def journaled() -> JournaledCluster:
    return JournaledCluster(SETTINGS, ClusterState(Incarnation(1), []))


def test_what_is_decided_while_a_write_runs_goes_with_the_next_one() -> None:
    buffer = DecisionBuffer()
    assert buffer.take(journaled, view(1)) is None
    assert buffer.newest == 0
    buffer.decided(heard(1), is_news=False)
    buffer.decided(heard(2), is_news=True)
    assert buffer.newest == 1
    assert buffer.take(journaled, view(1)) is not None
    buffer.decided(heard(3), is_news=False)
    assert buffer.newest == 2
    assert buffer.take(journaled, view(2)) is None, "a write is running"
    first = buffer.written()
    assert (first.number, first.view, first.is_news) == (1, view(1), True)
    assert first.transitions == heard(1) + heard(2)
    assert buffer.newest == 2
    assert buffer.take(journaled, view(2)) is not None
    second = buffer.written()
    assert (second.number, second.view, second.is_news) == (2, view(2), False)
    assert second.transitions == heard(3)
    assert buffer.newest == 0
    with pytest.raises(InvariantViolation, match="JR-2"):
        buffer.written()


def test_what_no_write_has_is_void_when_the_cluster_is_replaced() -> None:
    buffer = DecisionBuffer()
    buffer.decided(heard(1), is_news=False)
    buffer.take(journaled, view(1))
    buffer.decided(heard(2), is_news=False)
    buffer.cluster_replaced()
    buffer.decided(heard(3), is_news=False)
    assert buffer.written().transitions == heard(1)
    buffer.take(journaled, view(2))
    assert buffer.written().transitions == heard(3)
