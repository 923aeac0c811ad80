"""Where a worker writes its own state down: the script on one thread, views on another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ps_core import limits
from ps_core.change import Change, Checkpoint, TableCut
from ps_core.cluster_view import ClusterView
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.part_report import PartReport, ReportedTable
from ps_core.tables import DType, OptimizerKind, OptimizerSpec, Table, TableSpec
from ps_worker.save_points import SavePoints
from ps_worker.table_handle import TableHandle

A, B = TableId(1), TableId(2)
WAIT_S = 10.0


@dataclass
class Steps:
    """What a handle asks for its clock."""

    clock: int = 0


class State:
    """Something attached: it is what its worker has counted."""

    def __init__(self, value: Callable[[], object]) -> None:
        self._value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self._value()}

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError(state_dict)


@dataclass
class Worker:
    """A worker's save points, what it has said, and the newest view."""

    setting: str = "bsp"
    patience_s: float = limits.CHECKPOINT_CUT_S
    joined: list[tuple[int, dict[TableId, int], bool]] = field(default_factory=list)
    reported: list[tuple[int, PartReport]] = field(default_factory=list)
    copied: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heard = threading.Condition()
        self.problem: Exception | None = None
        spec = TableSpec(
            "a", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD),
            consistency=parsed(self.setting),
        )  # fmt: skip
        specs = {A: spec.validated(), B: replace(spec, name="b").validated()}
        self.steps = {A: Steps(), B: Steps()}
        self.handles = {
            table_id: TableHandle(Table(table_id, 0, specs[table_id]), steps)  # type: ignore[arg-type]
            for table_id, steps in self.steps.items()
        }
        self.view = ClusterView(1, "c", 1, 1, (), (), tuple(h.table for h in self.handles.values()))
        handles = list(self.handles.values())
        self.points = SavePoints(self, lambda: handles, self._write, self.patience_s)

    def begin_at(self, clock: int) -> None:
        """Its tables are of a checkpoint of this clock."""
        for table_id, handle in self.handles.items():
            handle.table = replace(handle.table, restored_clock=clock)
            self.steps[table_id].clock = clock

    # --- as the scheduler hears it

    def join_checkpoint(
        self, number: int, clocks: Mapping[TableId, int], *, has_state: bool
    ) -> None:
        with self.heard:
            self.joined.append((number, dict(clocks), has_state))
            self.heard.notify_all()

    def report_part(self, number: int, part: PartReport) -> None:
        with self.heard:
            self.reported.append((number, part))
            self.heard.notify_all()

    def _write(
        self, checkpoint: Checkpoint, clock: int, states: Mapping[str, Mapping[str, Any]]
    ) -> Callable[[], PartReport]:
        self.copied.append((checkpoint.number, clock, {k: dict(v) for k, v in states.items()}))

        def write() -> PartReport:
            if self.problem is not None:
                raise self.problem
            return PartReport("worker-0", 9, "ab")

        return write

    def report(self, count: int = 1) -> list[tuple[int, PartReport]]:
        """What it has reported, as soon as that is so many."""
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.reported) >= count, WAIT_S)
            return self.reported

    # --- what the cluster says

    def see(self, checkpoint: Checkpoint | None, **cuts: int) -> None:
        """A newer view, with tables cut after these clocks."""
        number = 0 if checkpoint is None else checkpoint.number
        tables = tuple(
            replace(h.table, cut=TableCut(number, cuts[h.name])) if h.name in cuts else h.table
            for h in self.handles.values()
        )
        view_number = self.view.view_number + 1
        self.view = replace(
            self.view, view_number=view_number, tables=tables, checkpoint=checkpoint
        )
        self.points.take_view(self.view)

    def propose(self, number: int = 1) -> None:
        self.see(Checkpoint(number, "url"))

    def cut(self, a: int, b: int = 0, number: int = 1) -> None:
        self.see(Checkpoint(number, "url", is_cut=True), a=a, b=b)

    # --- what the script does

    def model(self, *tables: TableId, is_awake: bool = True) -> None:
        self.points.add_model(lambda: [(self.handles[t], is_awake) for t in tables])

    def attach(self) -> None:
        self.points.attach("clocks", State(lambda: (self.steps[A].clock, self.steps[B].clock)))

    def step(self, *tables: TableId) -> None:
        for table_id in tables or (A,):
            self.steps[table_id].clock += 1


class Resting:
    """A script at a save point, on a thread of its own."""

    def __init__(self, reach: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=reach, daemon=True)
        self._thread.start()

    def is_over(self, within_s: float = WAIT_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    @property
    def waits(self) -> bool:
        """It does not go on; as far as a moment tells."""
        return not self.is_over(0.05)


@pytest.fixture
def worker() -> Worker:
    found = Worker()
    found.model(A)
    found.attach()
    return found


def clocks_of(worker: Worker) -> dict[TableId, int]:
    return worker.joined[-1][1]


# --- what it answers


def test_a_script_in_a_step_is_answered_for_with_the_save_point_that_it_comes_to(
    worker: Worker,
) -> None:
    worker.points.reach()
    worker.propose()
    assert worker.joined == [(1, {A: 1, B: 0}, True)]
    worker.propose()
    assert len(worker.joined) == 1


def test_a_step_that_is_sealed_is_not_answered_for_as_the_next(worker: Worker) -> None:
    """The script has not come to its save point yet."""
    worker.points.reach()
    worker.step()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}


def test_a_script_at_a_save_point_is_answered_for_with_that(worker: Worker) -> None:
    worker.step()
    worker.points.reach()
    worker.step()
    asked = threading.Event()
    resting = Resting(lambda: worker.points.rest(asked.is_set))
    assert resting.waits
    worker.propose()
    assert clocks_of(worker) == {A: 2, B: 0}
    assert resting.waits
    worker.cut(2)
    assert resting.is_over()


def test_a_worker_without_a_state_says_where_it_is_and_waits_for_nothing() -> None:
    worker = Worker()
    worker.model(A)
    worker.step()
    worker.propose()
    assert worker.joined == [(1, {A: 1, B: 0}, False)]
    worker.points.reach(is_explicit=False)
    worker.cut(1)
    worker.points.reach(is_explicit=False)
    assert worker.copied == []


def test_a_cut_that_comes_first_is_not_answered(worker: Worker) -> None:
    """Nobody waits for it: it has been made without this worker."""
    worker.cut(1)
    worker.step()
    worker.points.reach()
    assert (worker.joined, worker.copied) == ([], [])


def test_save_points_without_a_step_between_them_are_one(worker: Worker) -> None:
    """`checkpoint()` is one, and `save_point()` may follow it."""
    worker.step()
    worker.points.rest(lambda: True)
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 2, B: 0}


# --- it does not leave before the cut


def test_the_save_point_that_was_named_is_not_left_before_the_cut_is_settled(
    worker: Worker,
) -> None:
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.cut(1)
    assert resting.is_over()
    assert worker.copied == [(1, 1, {"clocks": {"value": (1, 0)}})]
    ((number, report),) = worker.report()
    tables = {A: ReportedTable(0, 1), B: ReportedTable(0, 0)}
    assert (number, report) == (1, PartReport("worker-0", 9, "ab", tables))


def test_the_state_is_saved_where_the_worker_comes_to_the_cut(worker: Worker) -> None:
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(3)
    assert resting.is_over()
    for _ in range(3):
        assert worker.copied == [] or worker.steps[A].clock >= 3
        worker.step()
        worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [3]
    assert len(worker.report()) == 1


def test_a_checkpoint_that_is_given_up_lets_it_go(worker: Worker) -> None:
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.see(None)
    assert resting.is_over()
    assert worker.copied == []


def test_a_cut_that_never_comes_lets_it_go() -> None:
    worker = Worker(patience_s=0.05)
    worker.attach()
    worker.propose()
    worker.points.reach()


def test_what_is_proposed_while_a_state_is_copied_is_answered_with_this_save_point(
    worker: Worker,
) -> None:
    """And not left behind: the first may be given up, and the next be proposed, meanwhile."""

    def next_one() -> str:
        if len(worker.joined) == 1:
            worker.see(None)
            worker.propose(2)
        return "copied"

    worker.points.attach("slow", State(next_one))
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(1)
    with worker.heard:
        assert worker.heard.wait_for(lambda: len(worker.joined) == 2, WAIT_S)
    assert clocks_of(worker) == {A: 1, B: 0}
    assert resting.waits
    worker.cut(1, number=2)
    assert resting.is_over()
    assert [(number, clock) for number, clock, _ in worker.copied] == [(1, 1), (2, 1)]


# --- explicit and implicit points


def test_implicit_points_count_until_the_script_has_its_own(worker: Worker) -> None:
    worker.step()
    worker.points.reach(is_explicit=False)
    worker.propose(1)
    assert clocks_of(worker) == {A: 2, B: 0}
    worker.see(None)
    worker.step()
    worker.points.reach()
    worker.step()
    worker.points.reach(is_explicit=False)  # the beginning of a step that its own point precedes
    worker.propose(2)
    assert clocks_of(worker) == {A: 3, B: 0}
    worker.step()
    Resting(lambda: worker.points.reach(is_explicit=False)).is_over()
    worker.cut(3, number=2)
    assert worker.copied == []
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [4]


def test_two_models_are_answered_for_together() -> None:
    """One that took no step since the last save point takes none before the next."""
    worker = Worker()
    worker.model(A)
    worker.model(B)
    worker.attach()
    for tables in ((A, B), (A,)):
        worker.points.reach()
        worker.step(*tables)
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 3, B: 1}


def test_a_table_that_sleeps_is_answered_for_where_it_is() -> None:
    worker = Worker()
    worker.model(A)
    worker.model(B, is_awake=False)
    worker.attach()
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 1, B: 0}


def test_both_models_must_be_at_the_cut() -> None:
    worker = Worker()
    worker.model(A, B)
    worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step(A, B)
    resting = Resting(worker.points.reach)
    worker.cut(1, 2)
    assert resting.is_over()
    assert worker.copied == []
    worker.step(A, B)
    worker.points.reach()
    assert [value for _, _, value in worker.copied] == [{"clocks": {"value": (2, 2)}}]


def test_models_that_step_at_different_rates_are_answered_for_at_the_rates_of_the_last_pass() -> (
    None
):
    worker = Worker()
    worker.model(A)
    worker.model(B)
    worker.attach()
    worker.points.reach()
    worker.step(A, A, A, B)
    worker.points.reach()
    worker.step(A)
    worker.propose()
    assert clocks_of(worker) == {A: 6, B: 2}
    worker.step(A, A, B)
    worker.cut(6, 2)
    worker.points.reach()
    assert [value for _, _, value in worker.copied] == [{"clocks": {"value": (6, 2)}}]


# --- tables of a script that has no model


def test_raw_tables_take_the_steps_that_they_took_last() -> None:
    worker = Worker()
    worker.attach()
    worker.step(A)
    worker.points.reach()
    worker.propose(1)
    assert clocks_of(worker) == {A: 2, B: 0}
    worker.see(None)
    worker.step(A, A)
    worker.points.reach()
    worker.step(A)
    worker.propose(2)
    assert clocks_of(worker) == {A: 5, B: 0}


def test_another_worker_is_a_step_further_than_the_save_point_that_a_raw_table_is_at() -> None:
    """It has sealed the step that this one is about to take."""
    worker = Worker()
    worker.attach()
    for _ in range(2):
        worker.step(A)
        worker.points.rest(lambda: True)
    asked = threading.Event()
    resting = Resting(lambda: worker.points.rest(asked.is_set))
    assert resting.waits
    worker.propose()
    assert clocks_of(worker)[A] == 2
    worker.cut(3)
    assert resting.is_over()
    assert worker.copied == []
    worker.step(A)
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [3]


def test_a_raw_table_that_begins_at_a_checkpoint_has_taken_no_steps_to_there() -> None:
    worker = Worker()
    worker.begin_at(40)
    worker.attach()
    worker.points.reach()
    worker.propose(1)
    assert clocks_of(worker) == {A: 40, B: 40}
    worker.see(None)
    worker.step(A)
    worker.points.reach()
    worker.propose(2)
    assert clocks_of(worker) == {A: 42, B: 40}


def test_a_newcomers_first_clock_is_not_taken_for_steps() -> None:
    worker = Worker()
    worker.attach()
    worker.steps[A].clock = 700
    worker.points.reach()
    worker.propose()
    assert clocks_of(worker) == {A: 701, B: 0}


def test_a_state_that_is_of_a_later_clock_than_the_cut_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.attach()
    worker.propose()
    assert clocks_of(worker) == {A: 0, B: 0}
    worker.cut(0)
    worker.step(A)
    worker.points.reach()
    assert [clock for _, clock, _ in worker.copied] == [1]
    assert "checkpoint_state_late" in caplog.text


def test_what_is_asynchronous_is_saved_where_it_is() -> None:
    worker = Worker("asp")
    worker.model(A)
    worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(40)
    assert resting.is_over()
    assert [clock for _, clock, _ in worker.copied] == [1]


# --- what goes wrong


class Broken(State):
    def __init__(self) -> None:
        super().__init__(lambda: None)

    def state_dict(self) -> dict[str, object]:
        raise RuntimeError("no state today")


def saved(worker: Worker) -> PartReport:
    """What comes of a checkpoint at the first clock."""
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(1)
    assert resting.is_over()
    ((_, report),) = worker.report()
    return report


def test_a_state_that_cannot_be_copied_is_reported_as_lost(worker: Worker) -> None:
    worker.points.attach("broken", Broken())
    assert "no state today" in saved(worker).problem


def test_a_state_that_cannot_be_written_is_reported_as_lost(worker: Worker) -> None:
    worker.problem = InvalidConfig("the disk is full")
    assert saved(worker).problem == "the disk is full"


def test_names_are_unique_and_states_have_their_methods(worker: Worker) -> None:
    points = worker.points
    state = State(lambda: 1)
    points.attach("mine", state)
    points.attach("mine", state)
    with pytest.raises(InvalidConfig, match="another state is attached as 'mine'"):
        points.attach("mine", State(lambda: 2))
    for name in ("", "x" * 201):
        with pytest.raises(InvalidConfig, match="1 to 200 bytes"):
            points.attach(name, state)
    with pytest.raises(InvalidConfig, match=r"a object without state_dict\(\)"):
        points.attach("none", object())  # type: ignore[arg-type]


def test_a_worker_that_leaves_waits_for_what_is_written_and_no_longer(worker: Worker) -> None:
    written = threading.Event()

    def late(*_: object) -> Callable[[], PartReport]:
        def write() -> PartReport:
            assert written.wait(WAIT_S)
            return PartReport("worker-0", 9, "ab")

        return write

    worker.points._write = late
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    worker.cut(1)
    assert resting.is_over()
    closing = Resting(lambda: worker.points.close(WAIT_S))
    assert closing.waits
    written.set()
    assert closing.is_over()
    assert worker.report()[0][1].file == "worker-0"
    worker.points.close(0.0)


def test_a_close_ends_a_wait_for_a_cut(worker: Worker) -> None:
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    assert resting.waits
    worker.points.close(0.0)
    assert resting.is_over()


def test_a_change_of_the_setting_after_the_cut_is_no_matter() -> None:
    """What the cut's own clock had is what counts."""
    worker = Worker()
    worker.model(A)
    worker.attach()
    worker.points.reach()
    worker.propose()
    worker.step()
    resting = Resting(worker.points.reach)
    handle = worker.handles[A]
    handle.table = replace(handle.table, change=Change(1, 9, parsed("asp")))
    worker.cut(3)
    assert resting.is_over()
    assert worker.copied == []
