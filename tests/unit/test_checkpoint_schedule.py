"""When a checkpoint is due: by the clocks of heartbeats, by time, and never while one runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Checkpoint, TableCut
from ps_core.cluster_view import ClusterView
from ps_core.consistency import Consistency, Mode
from ps_core.keys import NodeId, TableId
from ps_core.runs import Run
from ps_core.tables.table import Table
from scheduler.machine.checkpoint_schedule import RETRY_S, CheckpointPolicy, CheckpointSchedule
from scheduler.machine.state import Restored, RestoredTable
from tests.unit.cluster_harness import SETTINGS
from tests.unit.machine_harness import make_table

MODEL, EMBEDDING = TableId(1), TableId(2)
NEVER = CheckpointPolicy()
CLOCKS = CheckpointPolicy(every_clocks=10)
SECONDS = CheckpointPolicy(every_s=60.0)
BOTH = CheckpointPolicy(every_s=60.0, every_clocks=10)
BY_CLOCKS, BY_TIME = "every 10 clocks", "every 60 s"


def model(cut: int | None = None, run: str = "") -> Table:
    return replace(
        make_table(), cut=None if cut is None else TableCut(checkpoint=1, after_clock=cut), run=run
    )


def view_of(*tables: Table, running: Checkpoint | None = None, run: str = "") -> ClusterView:
    runs = (Run(run, 1),) if run else ()
    return ClusterView(1, "c-1", 2, 2, (), (), tables, checkpoint=running, runs=runs)


def restored(*clocks: int) -> Restored:
    spec = make_table().spec
    tables = {
        f"t{number}": RestoredTable(spec, Consistency(Mode.BSP), clock)
        for number, clock in enumerate(clocks)
    }
    return Restored("runs/1", tables)


class Scheduled:
    """A schedule whose cluster has one table, and a hand on its clock."""

    def __init__(
        self, policy: CheckpointPolicy, *, url: str = "runs/7", of: Restored | None = None
    ) -> None:
        self.schedule = CheckpointSchedule(
            policy, replace(SETTINGS, checkpoint_url=url, restored=of)
        )
        self.view = view_of(model())
        self.now_s = 1_000.0

    def heard(self, clock: int, node: int = 1) -> None:
        self.schedule.heard(NodeId(node), {MODEL: clock})

    def look(self, seconds: float = 0.0) -> str:
        """The reason after that many seconds more."""
        self.now_s += seconds
        return self.schedule.look(self.view, self.now_s)


# --- none is due


@pytest.mark.parametrize("policy", [CLOCKS, SECONDS])
def test_without_a_place_none_is_due(policy: CheckpointPolicy) -> None:
    cluster = Scheduled(policy, url="")
    assert cluster.look() == ""
    cluster.heard(10)
    assert cluster.look(60.0) == ""


def test_without_an_interval_none_is_due() -> None:
    cluster = Scheduled(NEVER)
    assert cluster.look() == ""
    cluster.heard(1_000)
    assert cluster.look(10_000.0) == ""


def test_without_a_table_none_is_due_and_no_interval_has_begun() -> None:
    cluster = Scheduled(SECONDS)
    cluster.view = view_of()
    assert cluster.look() == ""
    assert cluster.look(60.0) == ""
    cluster.view = view_of(model())
    assert cluster.look() == "", "training begins now"
    assert cluster.look(60.0) == BY_TIME


def test_a_table_of_a_named_run_is_no_table_of_the_schedule() -> None:
    cluster = Scheduled(SECONDS)
    cluster.view = view_of(model(run="other"), run="other")
    assert cluster.look() == ""
    assert cluster.look(60.0) == ""


@pytest.mark.parametrize("is_cut", [False, True])
def test_while_one_runs_none_is_due(is_cut: bool) -> None:
    cluster = Scheduled(BOTH)
    assert cluster.look() == ""
    cluster.view = view_of(model(), running=Checkpoint(1, "runs/7/1", is_cut, 0))
    cluster.heard(10)
    assert cluster.look(60.0) == ""
    cluster.view = view_of(model())
    assert cluster.look() == BY_CLOCKS


# --- by clocks


def test_it_is_due_once_any_worker_has_reached_a_multiple() -> None:
    cluster = Scheduled(CLOCKS)
    assert cluster.look() == ""
    cluster.heard(9, node=1)
    cluster.heard(3, node=2)
    assert cluster.look(10_000.0) == ""
    cluster.heard(10, node=1)
    assert cluster.look() == BY_CLOCKS


def test_the_highest_clock_of_any_table_counts() -> None:
    cluster = Scheduled(CLOCKS)
    cluster.schedule.heard(NodeId(1), {MODEL: 2, EMBEDDING: 10})
    assert cluster.look() == BY_CLOCKS


def test_the_next_is_due_at_the_next_multiple_and_not_as_many_clocks_later() -> None:
    cluster = Scheduled(CLOCKS)
    cluster.heard(12)
    assert cluster.look() == BY_CLOCKS
    cluster.schedule.made(13, cluster.now_s)
    cluster.heard(19)
    assert cluster.look() == ""
    cluster.heard(20)
    assert cluster.look() == BY_CLOCKS


def test_a_cut_beyond_a_multiple_has_that_multiple() -> None:
    """A heartbeat said 19, and the cut was after 20: that one is the checkpoint of 20."""
    cluster = Scheduled(CLOCKS)
    cluster.look()
    cluster.schedule.made(20, cluster.now_s)
    cluster.heard(20)
    assert cluster.look() == ""
    cluster.heard(30)
    assert cluster.look() == BY_CLOCKS


def test_a_worker_that_went_back_makes_none_due() -> None:
    cluster = Scheduled(CLOCKS)
    cluster.look()
    cluster.heard(25)
    cluster.schedule.made(25, cluster.now_s)
    cluster.heard(11)
    assert cluster.look() == ""


# --- by time


def test_it_is_due_when_the_interval_is_over() -> None:
    cluster = Scheduled(SECONDS)
    assert cluster.look() == ""
    cluster.heard(1)
    assert cluster.look(59.9) == ""
    assert cluster.look(0.1) == BY_TIME


def test_the_interval_counts_from_the_last_complete_one() -> None:
    cluster = Scheduled(SECONDS)
    assert cluster.look() == ""
    cluster.heard(5)
    cluster.schedule.made(4, cluster.now_s + 50.0)
    assert cluster.look(109.9) == ""
    assert cluster.look(0.1) == BY_TIME


def test_it_is_not_due_while_the_clock_stays() -> None:
    cluster = Scheduled(SECONDS)
    cluster.heard(5)
    assert cluster.look() == ""
    cluster.schedule.made(5, cluster.now_s)
    assert cluster.look(600.0) == ""
    cluster.heard(6)
    assert cluster.look() == BY_TIME


def test_where_no_worker_reports_clocks_time_alone_makes_it_due() -> None:
    cluster = Scheduled(SECONDS)
    assert cluster.look() == ""
    cluster.heard(0)
    assert cluster.look(60.0) == BY_TIME


def test_a_reason_names_a_part_of_a_second() -> None:
    cluster = Scheduled(CheckpointPolicy(every_s=2.5))
    assert cluster.look() == ""
    assert cluster.look(2.5) == "every 2.5 s"


def test_with_both_a_multiple_goes_first_and_either_makes_it_due() -> None:
    cluster = Scheduled(BOTH)
    assert cluster.look() == ""
    cluster.heard(9)
    assert cluster.look(60.0) == BY_TIME
    cluster.heard(10)
    assert cluster.look() == BY_CLOCKS


# --- once more


@pytest.mark.parametrize(("policy", "reason"), [(CLOCKS, BY_CLOCKS), (SECONDS, BY_TIME)])
def test_one_that_was_begun_and_failed_is_due_again_a_while_later(
    policy: CheckpointPolicy, reason: str
) -> None:
    cluster = Scheduled(policy)
    assert cluster.look() == ""
    cluster.heard(10)
    assert cluster.look(60.0) == reason
    assert cluster.look() == reason, "it could not be begun"
    cluster.schedule.begun(cluster.now_s)
    assert cluster.look(RETRY_S - 0.1) == ""
    assert cluster.look(0.1) == reason


def test_one_that_is_complete_ends_the_wait_for_the_next() -> None:
    cluster = Scheduled(CLOCKS)
    cluster.heard(10)
    assert cluster.look() == BY_CLOCKS
    cluster.schedule.begun(cluster.now_s)
    cluster.schedule.made(11, cluster.now_s)
    cluster.heard(20)
    assert cluster.look() == BY_CLOCKS


# --- where it begins


def test_a_new_cluster_begins_at_clock_0() -> None:
    cluster = Scheduled(SECONDS)
    cluster.heard(1)
    assert cluster.look() == ""
    assert cluster.look(60.0) == BY_TIME


@pytest.mark.parametrize(
    ("cluster", "view"),
    [
        (Scheduled(BOTH, of=restored(12, 7)), view_of(model())),
        (Scheduled(BOTH, of=restored(7, 12)), view_of(model())),
        (Scheduled(BOTH), view_of(model(), model(12))),
        (Scheduled(BOTH), view_of(model(12), model(7))),
        (Scheduled(BOTH, of=restored(7)), view_of(model(12))),
        (Scheduled(BOTH, of=restored(12)), view_of(model(7))),
    ],
    ids=["restored", "of two", "resumed", "of two cuts", "both", "cut before it"],
)
def test_it_goes_on_from_the_newest_checkpoint(cluster: Scheduled, view: ClusterView) -> None:
    cluster.view = view
    cluster.heard(12)
    assert cluster.look() == ""
    assert cluster.look(60.0) == "", "nothing has moved since"
    cluster.heard(13)
    assert cluster.look() == BY_TIME
    cluster.heard(20)
    assert cluster.look() == BY_CLOCKS


def test_a_scheduler_started_again_hears_for_a_lease_though_one_was_written_before() -> None:
    """Its journal has the checkpoint, and the store says later that it is complete."""
    cluster = Scheduled(CLOCKS)
    cluster.schedule.resumed(cluster.view, None, cluster.now_s)
    cluster.schedule.made(7, cluster.now_s)
    cluster.heard(20)
    assert cluster.look(SETTINGS.lease_s - 0.1) == ""
    assert cluster.look(0.2) == BY_CLOCKS


def test_a_cut_of_a_named_run_is_no_checkpoint() -> None:
    cluster = Scheduled(CLOCKS)
    cluster.view = view_of(model(), model(40, run="other"), run="other")
    cluster.heard(10)
    assert cluster.look() == BY_CLOCKS


# --- what was heard


def test_the_last_report_of_each_node_stays() -> None:
    cluster = Scheduled(NEVER, url="")
    assert cluster.schedule.clock == 0
    assert cluster.schedule.reached == {}
    cluster.schedule.heard(NodeId(1), {MODEL: 4, EMBEDDING: 9})
    cluster.schedule.heard(NodeId(2), {MODEL: 7})
    assert cluster.schedule.clock == 9
    assert cluster.schedule.reached == {1: {MODEL: 4, EMBEDDING: 9}, 2: {MODEL: 7}}
    cluster.schedule.heard(NodeId(1), {MODEL: 5})
    assert cluster.schedule.clock == 7
    assert cluster.schedule.reached == {1: {MODEL: 5}, 2: {MODEL: 7}}


def test_a_report_without_a_step_is_none() -> None:
    cluster = Scheduled(NEVER)
    cluster.heard(4)
    cluster.heard(0)
    cluster.schedule.heard(NodeId(2), {})
    assert cluster.schedule.reached == {1: {MODEL: 4}}


# --- a script that trains one model after another


@pytest.mark.parametrize(("policy", "reason"), [(CLOCKS, BY_CLOCKS), (SECONDS, BY_TIME)])
def test_it_is_due_while_a_second_model_has_fewer_steps_than_the_first(
    policy: CheckpointPolicy, reason: str
) -> None:
    cluster = Scheduled(policy)
    cluster.view = view_of(model(), replace(make_table(), table_id=EMBEDDING))
    assert cluster.look() == ""
    cluster.heard(95)
    assert cluster.look(60.0) == reason
    cluster.schedule.made(95, cluster.now_s)
    assert cluster.look(60.0) == ""
    for clock in (10, 20):
        cluster.schedule.heard(NodeId(1), {MODEL: 95, EMBEDDING: clock})
        assert cluster.look(60.0) == reason
        cluster.schedule.made(95, cluster.now_s)
        assert cluster.look(60.0) == ""
    again = Scheduled(policy)
    again.view = cluster.view
    again.schedule.resumed(again.view, (95, again.now_s), again.now_s)
    for clock, due in (20, ""), (30, reason):
        again.schedule.heard(NodeId(1), {MODEL: 95, EMBEDDING: clock})
        assert again.look(60.0) == due, "another scheduler knows no clocks of before"


# --- workers at different clocks


@pytest.mark.parametrize(("policy", "reason"), [(CLOCKS, BY_CLOCKS), (SECONDS, BY_TIME)])
def test_it_is_due_while_a_worker_trains_behind_one_that_has_left(
    policy: CheckpointPolicy, reason: str
) -> None:
    """Under ASP a fast worker may leave hours before the others."""
    cluster = Scheduled(policy)
    assert cluster.look() == ""
    cluster.heard(95, node=1)
    cluster.heard(40, node=2)
    assert cluster.look(60.0) == reason
    cluster.schedule.made(95, cluster.now_s)
    assert cluster.look(60.0) == ""
    for clock in (50, 60):
        cluster.heard(clock, node=2)
        assert cluster.look(60.0) == reason
        cluster.schedule.made(95, cluster.now_s)
        assert cluster.look(60.0) == ""
    cluster.heard(60, node=3)
    assert cluster.look(60.0) == "", "it joined there"
    cluster.heard(70, node=3)
    assert cluster.look(60.0) == reason
