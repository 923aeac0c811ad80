"""Workers that come beyond those that a cluster was started for, at the scheduler's machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_core import errors
from ps_core.change import ChangeOutcome, Join
from ps_core.cluster_view import NodeState, Role, Session
from ps_core.consistency import parsed
from ps_core.keys import TableId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from scheduler.machine.changes import ChangeRequest
from scheduler.machine.cluster import Created
from scheduler.machine.state import ClusterFinished
from tests.unit.cluster_harness import SPEC, Harness, refused


class Growing(Harness):
    """A cluster for two workers at first and four at most, both of which train a table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(max_workers=4, server_count=1, worker_timeout_s=10.0, **settings)
        self.server = self.join(Role.SERVER)
        self.first = [self.join(Role.WORKER) for _ in range(2)]
        assert isinstance(self.create(self.first[0]), Created)

    @property
    def table(self) -> Table:
        return self.cluster.view.tables[0]

    def promise(self, clock: int) -> None:
        """The server promises what is proposed for the first table."""
        assert self.table.proposed is not None
        number = self.table.proposed.number
        for outcome in (None, ChangeOutcome.TAKEN):
            decision = self.cluster.prepare_change(self.server, TableId(1), number, clock, outcome)
            self.transitions += decision.transitions

    def lose(self, session: Session, *others: Session) -> None:
        """The worker is declared gone."""
        self.pass_time(20, self.server, *others)
        assert self.node(session).state is NodeState.GONE


def test_a_later_table_has_whoever_had_a_rank_of_the_first_last_dead_or_not() -> None:
    """And of the ranks beyond only who is there: nobody waits for the others."""
    cluster = Growing()
    cluster.lose(cluster.first[1], cluster.first[0])
    successor, third = cluster.join(Role.WORKER), cluster.join(Role.WORKER)
    assert (successor.rank, third.rank) == (1, 2)
    cluster.lose(successor, cluster.first[0])
    assert cluster.node(third).state is NodeState.GONE
    created = cluster.create(cluster.first[0], replace(SPEC, name="later"))
    assert isinstance(created, Created)
    assert created.table.joins == (Join(1, successor.incarnation),)


def test_it_gets_the_lowest_rank_beyond_and_joins_each_table() -> None:
    cluster = Growing()
    third = cluster.join(Role.WORKER)
    assert third.rank == 2
    assert cluster.table.proposed is not None
    assert cluster.table.proposed.join == Join(2, third.incarnation)
    assert cluster.cluster.view.world_size == 3
    cluster.promise(7)
    assert cluster.table.joins == (Join(2, third.incarnation, 7),)
    created = cluster.create(third, replace(SPEC, name="later"))
    assert isinstance(created, Created)
    assert created.table.joins == (Join(2, third.incarnation, 0),)


def test_joins_wait_for_each_other_and_may_come_in_another_order_than_ranks() -> None:
    cluster = Growing()
    fourth = cluster.join(Role.WORKER, requested_rank=3)
    third = cluster.join(Role.WORKER)
    assert (third.rank, fourth.rank) == (2, 3)
    assert cluster.table.proposed is not None
    assert cluster.table.proposed.join == Join(3, fourth.incarnation)
    cluster.promise(5)
    cluster.pass_time(0.5, cluster.server, *cluster.first, third, fourth)
    cluster.promise(6)
    assert cluster.table.joins == (Join(2, third.incarnation, 6), Join(3, fourth.incarnation, 5))


def test_no_more_come_than_max_workers() -> None:
    cluster = Growing()
    for _ in range(2):
        cluster.join(Role.WORKER)
    refused(
        errors.InvalidConfig,
        "a worker beyond the 4 that the cluster takes (max_workers): every rank is given",
        by=lambda: cluster.join(Role.WORKER),
        of=cluster,
    )
    refused(
        errors.InvalidConfig,
        "requested_rank is 4; the cluster was started for 2 workers and takes up to 4, ranks 0 to",
        by=lambda: cluster.join(Role.WORKER, requested_rank=4),
        of=cluster,
    )
    refused(
        errors.InvalidConfig,
        "rank 3 is taken by worker node",
        by=lambda: cluster.join(Role.WORKER, requested_rank=3),
        of=cluster,
    )


def test_the_first_come_first() -> None:
    harness = Harness(max_workers=3)
    ranks = [harness.join(Role.WORKER).rank for _ in range(3)]
    assert ranks == [0, 1, 2]
    assert harness.cluster.view.tables == ()


def test_the_place_of_one_of_the_first_that_is_gone_comes_before_a_new_one() -> None:
    cluster = Growing()
    cluster.lose(cluster.first[1], cluster.first[0])
    assert [cluster.join(Role.WORKER).rank for _ in range(2)] == [1, 2]


def test_ranks_of_the_first_that_have_left_stay_theirs_and_those_beyond_are_given_anew() -> None:
    cluster = Growing()
    third = cluster.join(Role.WORKER)
    cluster.promise(3)
    cluster.leave(cluster.first[1])
    cluster.leave(third)
    assert cluster.cluster.view.world_size == 2
    again = cluster.join(Role.WORKER)
    assert again.rank == 2
    cluster.promise(9)
    assert cluster.table.joins == (Join(2, again.incarnation, 9),)
    refused(
        errors.InvalidConfig,
        "the rank of a worker that has left is not given again",
        by=lambda: cluster.join(Role.WORKER, requested_rank=1),
        of=cluster,
    )
    cluster.lose(again, cluster.first[0])
    assert cluster.join(Role.WORKER).rank == 2


def test_one_that_has_ended_joins_nothing_any_more() -> None:
    cluster = Growing()
    third = cluster.join(Role.WORKER)
    cluster.leave(third)
    cluster.pass_time(5, cluster.server, *cluster.first)
    assert cluster.table.proposed is None, "withdrawn, and not proposed again"
    assert cluster.table.joins == ()
    created = cluster.create(cluster.first[0], replace(SPEC, name="later"))
    assert isinstance(created, Created)
    assert created.table.joins == ()


def test_room_for_a_rank_in_the_view_is_taken_once() -> None:
    cluster = Growing()
    state = cluster.cluster._state
    taken = []
    for clock in range(4):
        third = cluster.join(Role.WORKER)
        cluster.promise(clock)
        cluster.leave(third)
        taken.append(state.view_bytes)
    node_bytes = taken[1] - taken[0]
    assert taken[3] - taken[1] == 2 * node_bytes
    assert node_bytes < 100, "its node stays in the view, and nothing else"


def test_the_run_ends_when_all_have_left_whoever_they_were() -> None:
    cluster = Growing(stop_when_done=True)
    third = cluster.join(Role.WORKER)
    for session in cluster.first:
        cluster.leave(session)
    assert not cluster.is_finished(), "the third is still there"
    cluster.leave(third)
    assert cluster.is_finished()
    assert isinstance(cluster.transitions[-1], ClusterFinished)


def test_the_run_does_not_end_before_the_first_have_come() -> None:
    harness = Harness(max_workers=3, stop_when_done=True)
    harness.leave(harness.join(Role.WORKER, requested_rank=0))
    harness.leave(harness.join(Role.WORKER, requested_rank=2))
    assert not harness.is_finished()
    harness.leave(harness.join(Role.WORKER))
    assert harness.is_finished()


def test_backup_workers_are_fewer_than_all_that_count() -> None:
    cluster = Growing()
    wanted = ChangeRequest("model", parsed("bsp:backup=2"), 0, cluster.now_s + 9)
    refused(
        errors.InvalidConfig,
        "2 backup workers of 2 workers",
        by=lambda: cluster.cluster.set_consistency(cluster.first[0], wanted, cluster.now_s),
        of=cluster,
    )
    third = cluster.join(Role.WORKER)
    cluster.promise(0)
    cluster.cluster.set_consistency(third, wanted, cluster.now_s)
    assert cluster.table.proposed is not None
    created = cluster.create(third, replace(SPEC, name="b", consistency=wanted.consistency))
    assert isinstance(created, Created)


def test_nobody_comes_late_where_only_the_workers_know_the_parameters() -> None:
    cluster = Growing()
    spec = replace(SPEC, name="sums", optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
    assert isinstance(cluster.create(cluster.first[0], spec), Created)
    for rank in (None, 2):
        refused(
            errors.InvalidConfig,
            "the parameters of table 'sums' (Aggregate) are in the workers",
            by=lambda rank=rank: cluster.join(Role.WORKER, requested_rank=rank),  # type: ignore[misc]
            of=cluster,
        )


@pytest.mark.parametrize("count", [1, 100_000, -1])
def test_max_workers_has_its_bounds(count: int) -> None:
    with pytest.raises(errors.InvalidConfig, match=f"max_workers is {count}; expected 2"):
        Harness(max_workers=count)
