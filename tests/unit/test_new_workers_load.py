"""Who may load what it brings to a model that it joins, and how many clocks it passes (S16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ps_core.change import Join
from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.spec.late_joiners import (
    ALL_HERE_WITHIN_S,
    LateJoiner,
    all_have_joined,
    clocks_behind,
    has_trained_alone,
    joined_tables,
    may_load,
)

ALIVE, SILENT, _, GONE = NodeState
SPEC = TableSpec("w", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD), 64)
ONE, TWO = TableId(1), TableId(2)
BOTH = frozenset({ONE, TWO})
LEASE_S = 3.0
SHOWN_S = 3.6
"""From when it has joined: then who is dead is silent."""
OLD, NEW, OTHER, BEYOND = map(Incarnation, (10, 20, 21, 22))
"""One from before, of rank 1; this worker, of rank 0; the one that follows OLD; one of rank 2."""
OWN = LateJoiner(NEW, BOTH, is_at_start=False, lease_s=LEASE_S)


def worker(incarnation: Incarnation, rank: int, state: NodeState = ALIVE) -> Node:
    return Node(NodeId(incarnation), incarnation, Role.WORKER, rank, "host:1", state)


def view_of(
    *others: Node, joins: Mapping[Incarnation, tuple[int, ...]], restored: int | None = None
) -> ClusterView:
    """Of a cluster for two workers, whose rank 0 was another; who has joined two tables after which
    clocks.
    """
    tables = [Table(table_id, 0, SPEC, restored_clock=restored) for table_id in (ONE, TWO)]
    for incarnation, clocks in joins.items():
        for place, clock in enumerate(clocks):
            both = (*tables[place].joins, Join(0, incarnation, clock))
            tables[place] = replace(tables[place], joins=both)
    nodes = worker(Incarnation(1), 0, GONE), worker(NEW, 0), *others
    return ClusterView(1, "demo", 2, 1, nodes, (), tuple(tables))


GONE_BEFORE = worker(OLD, 1, GONE)
FOLLOWS = GONE_BEFORE, worker(OTHER, 1)


def test_who_joins_one_that_trains_loads_nothing_and_knows_it_when_a_lease_is_over() -> None:
    view = view_of(worker(OLD, 1), joins={NEW: (5, 5)})
    assert [may_load(view, OWN, s) for s in (0.0, 3.5, SHOWN_S, 40.0)] == [None, None, False, False]


def test_beside_one_that_lives_it_loads_before_anybodys_first_step() -> None:
    """Once that one would be silent if it were dead: then its follower would be waited for."""
    own = OWN._replace(is_at_start=True)
    view = view_of(worker(OLD, 1), joins={NEW: (0, 0)})
    assert [may_load(view, own, s) for s in (0.0, SHOWN_S)] == [None, True]


@pytest.mark.parametrize("is_at_start", [False, True])
def test_who_is_silent_is_waited_for_until_another_follows(is_at_start: bool) -> None:
    own = OWN._replace(is_at_start=is_at_start)
    view = view_of(worker(OLD, 1, SILENT), joins={NEW: (5, 5)})
    assert [may_load(view, own, s) for s in (0.0, SHOWN_S, 29.9)] == [None] * 3
    assert may_load(view, own, ALL_HERE_WITHIN_S) is is_at_start
    view = view_of(*FOLLOWS, joins={NEW: (5, 5), OTHER: (5, 6)})
    assert may_load(view, own, 10.0) is True


def test_new_workers_alone_load_when_all_have_joined_every_table() -> None:
    late = view_of(GONE_BEFORE, joins={NEW: (5, 5)})
    half = view_of(*FOLLOWS, joins={NEW: (5, 5), OTHER: (5,)})
    both = view_of(*FOLLOWS, joins={NEW: (5, 5), OTHER: (5, 5)})
    assert [may_load(view, OWN, 10.0) for view in (late, half, both)] == [None, None, True]
    assert [all_have_joined(view, BOTH) for view in (late, half, both)] == [False, False, True]


def test_after_a_while_it_loads_without_those_that_did_not_come() -> None:
    view = view_of(GONE_BEFORE, joins={NEW: (5, 5)})
    assert [may_load(view, OWN, s) for s in (29.9, ALL_HERE_WITHIN_S)] == [None, True]


def test_one_beyond_the_first_that_has_not_joined_is_waited_for() -> None:
    joins = {NEW: (5, 5), OTHER: (5, 5)}
    assert may_load(view_of(*FOLLOWS, worker(BEYOND, 2), joins=joins), OWN, 10.0) is None


@pytest.mark.parametrize(
    ("other", "is_alone"),
    [
        ((4, 4), False),  # it has read what there is, and waits
        ((6, 6), False),
        ((3, 3), True),
        ((7, 7), True),
        ((3, 5), False),  # two clocks of its first table were ended with nothing
        ((3,), False),  # it has not joined the other one yet
    ],
)
def test_who_took_more_than_a_step_before_another_came_trains(
    other: tuple[int, ...], is_alone: bool
) -> None:
    view = view_of(*FOLLOWS, joins={NEW: (5, 5), OTHER: other})
    assert has_trained_alone(view, NEW, BOTH) is is_alone
    if is_alone:
        assert may_load(view, OWN, 0.0) is False


def test_a_chain_of_single_steps_is_nobodys_training() -> None:
    """Each waited for the next."""
    joins = {NEW: (5, 5), OTHER: (6, 6), BEYOND: (7, 7)}
    assert not has_trained_alone(view_of(*FOLLOWS, worker(BEYOND, 2), joins=joins), NEW, BOTH)


def test_who_has_trained_and_is_gone_is_nobody_that_is_joined() -> None:
    gone = worker(OLD, 1, GONE)
    assert not has_trained_alone(view_of(gone, joins={NEW: (9, 9), OLD: (2, 2)}), NEW, BOTH)


def test_tables_of_a_checkpoint_begin_where_it_was_cut() -> None:
    """They may be a step apart there, and for everybody."""
    view = view_of(*FOLLOWS, joins={NEW: (8, 8), OTHER: (9, 9)}, restored=8)
    moved = replace(view.tables[1], restored_clock=7, joins=(Join(0, NEW, 7), Join(1, OTHER, 8)))
    view = replace(view, tables=(view.tables[0], moved))
    assert not has_trained_alone(view, NEW, BOTH)


def test_a_table_that_was_made_since_is_not_joined() -> None:
    view = view_of(*FOLLOWS, joins={NEW: (5,), OTHER: (5, 5)})
    assert joined_tables(view, NEW, BOTH) == {ONE}
    assert joined_tables(view, OTHER, [TWO]) == {TWO}


def test_it_passes_the_clocks_to_where_the_last_of_those_that_are_here_has_joined() -> None:
    joins = {NEW: (5, 5), OTHER: (7, 6), OLD: (9, 9)}
    view = view_of(*FOLLOWS, joins=joins)
    assert clocks_behind(view, {ONE: 5, TWO: 5}) == 2
    assert clocks_behind(view, {TWO: 5}) == 1
    assert clocks_behind(view, {ONE: 8, TWO: 8}) == 0
    assert clocks_behind(view, {}) == 0


@pytest.mark.parametrize(("lease_s", "limits_s"), [(3.0, (3.6, 30.0)), (60.0, (30.0, 30.0))])
def test_nobody_waits_longer_than_for_all_others(
    lease_s: float, limits_s: tuple[float, float]
) -> None:
    assert OWN._replace(lease_s=lease_s).limits_s == pytest.approx(limits_s)
