"""Inner steps: the steps between two clocks, and the parameters that they have moved."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from ps_core.errors import InvalidConfig, PushpullError, WaitExpired
from ps_worker.spec.optimizers import Outer
from ps_worker.steps.inner_steps import InnerSteps
from ps_worker.steps.steps import PushTicket, StepResult
from ps_worker.training.local_optimizer import OuterSteps
from ps_worker.training.tables.trained_table import TrainedTable
from tests.unit.saving_worker import A, Worker, clocks_of
from tests.unit.table_client import TableClient, trained_tables

OUTER = Outer(torch.optim.SGD, inner_steps=3)


def test_an_outer_step_is_due_after_so_many() -> None:
    assert [InnerSteps(3, taken).are_all_taken for taken in range(4)] == [False] * 3 + [True]
    assert InnerSteps(3, taken=2).at(clock=5) == 17
    assert [InnerSteps(3).clock_after(each) for each in (14, 15, 17, 18)] == [4, 5, 5, 6]
    assert [InnerSteps().at(5), InnerSteps().clock_after(5)] == [5, 5]


# --- save points


@pytest.fixture
def worker() -> Worker:
    """With three inner steps a clock on its table."""
    found = Worker()
    found.handles[A].inner_steps = InnerSteps(3)
    found.model(A)
    found.attach()
    found.points.reach()
    return found


def take_step(worker: Worker) -> None:
    steps = worker.handles[A].inner_steps
    steps.taken += 1
    if steps.are_all_taken:
        steps.taken = 0
        worker.step()


def test_a_save_point_before_the_next_outer_step_is_at_the_clock_of_the_last(
    worker: Worker,
) -> None:
    """A checkpoint does not wait for the outer step."""
    for clock in (0, 0, 1, 1, 1, 2):
        worker.propose(number := worker.view.view_number)
        assert clocks_of(worker)[A] == clock
        worker.see(None)
        take_step(worker)
        worker.points.reach()
        assert worker.joined[-1][0] == number


def test_save_points_further_apart_than_outer_steps_are_counted_in_inner_steps(
    worker: Worker,
) -> None:
    """Five inner steps from one to the next: from the fifth to the tenth."""
    for _ in range(5):
        take_step(worker)
    worker.points.reach()
    take_step(worker)
    worker.propose()
    assert clocks_of(worker)[A] == 10 // 3


# --- parameters


def moved_table(
    client: TableClient | None = None, outer: Outer = OUTER, **options: Any
) -> TrainedTable:
    """Two blocks that were pulled as zeros, moved by -1 and pushed."""
    weight = nn.Parameter(torch.zeros(128))
    (table,) = trained_tables(outer, [weight], client=client, **options)
    table.write_parameters()
    if outer.merges:
        table.moves.choose(0, 0)
    with torch.no_grad():
        weight.sub_(1.0)
    assert table.push_rest(()) is None
    return table


def test_a_pseudo_gradient_leads_back_to_where_the_inner_steps_began() -> None:
    client = TableClient()
    moved_table(client)
    pushed = torch.frombuffer(client.submitted[0].payload, dtype=torch.float32)
    assert pushed.eq(1.0).all()


@pytest.mark.parametrize(
    ("codec", "result", "expected"),
    [
        ("none", {}, [0.0, 0.0]),
        ("none", {"rejected": (1,)}, [0.0, -1.0]),
        ("none", {"discarded_blocks": (0,)}, [-1.0, 0.0]),
        ("int8", {"discarded_blocks": (0,)}, [0.0, 0.0]),  # its residuals have it
        ("int8", {"rejected": (0, 1)}, [-1.0, -1.0]),
    ],
)
def test_blocks_that_the_servers_did_not_take_stay_moved(
    codec: str, result: dict[str, Any], expected: list[float]
) -> None:
    table = moved_table(push_codec=codec)
    if codec == "int8":
        table.handle.steps.residuals = object()  # type: ignore[assignment]
    table.write_parameters()
    table.take_result(StepResult(1, True, 0, **result))
    (entry,) = table.layout.placed
    assert entry.tensor.view(2, 64).eq(torch.tensor(expected)[:, None]).all()
    assert bool(table.edited(looks=True)) == any(expected), "it is in the next pseudo-gradient"


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_outer_step_that_was_refused_stays_moved(codec: str) -> None:
    """All of it, also with a codec: residuals have nothing of a step that took no effect."""
    table = moved_table(push_codec=codec)
    if codec == "int8":
        table.handle.steps.residuals = object()  # type: ignore[assignment]
    assert table.take_result(None)
    (entry,) = table.layout.placed
    assert entry.tensor.eq(-1.0).all()


REFUSED = InvalidConfig("workers disagree")


class FailedStep:
    """The outer step of one moved table, which ended with an error; values of -2 are pulled."""

    def __init__(self, outer: Outer = OUTER, *, is_skipped: bool = False) -> None:
        self.client = TableClient()
        self.table = moved_table(self.client, outer)
        self.steps = OuterSteps(outer, [self.table], [])
        self.steps.inner.taken = outer.inner_steps
        self.steps.sealed()
        self.table.begin_pull()
        self.ticket = PushTicket(self.table.handle.table, 1, Future(), lambda: True)
        self.table.pending.add(self.ticket)
        self.table.left()
        self.steps.failed({self.table: self.ticket}, is_skipped=is_skipped)

    def end(self, error: PushpullError | None = None) -> None:
        if error is None:
            self.ticket.future.set_result(StepResult(1, True, 0))
        else:
            self.ticket.future.set_exception(error)

    def pull(self, error: PushpullError | None = None) -> None:
        if error is not None:
            self.client.pulls_begun[-1].future.set_exception(error)
            return
        self.table.local_values()[0].fill_(-2.0)
        self.client.pulls_begun[-1].future.set_result(None)

    @property
    def weight(self) -> torch.Tensor:
        return self.table.layout.placed[0].tensor.detach()

    def pushed_next(self) -> torch.Tensor:
        """The pseudo-gradient after one more inner step, which moves by -1."""
        self.weight.sub_(1.0)
        assert self.table.moves.measure(is_shared=False, may_be_infinite=False) is None
        blocks = [each.payload for each in self.table.moves.blocks()]
        return torch.cat([torch.frombuffer(each, dtype=torch.float32) for each in blocks])


def test_a_table_that_was_taken_pushes_later_moves_alone_after_an_error_of_another() -> None:
    """Not those of the step once more, nor the others' with the sign reversed."""
    step = FailedStep()
    moved = [step.steps.inner.have_moved]
    with pytest.raises(WaitExpired):
        step.steps.take_failed()
    assert step.weight.eq(-1.0).all(), "not before all has come"
    step.end()
    step.pull()
    step.steps.take_failed()
    assert step.weight.eq(-2.0).all()
    moved.append(step.steps.inner.have_moved)
    assert moved == [True, False], "until then what has moved would be taken for an edit"
    assert step.pushed_next().eq(1.0).all()


def test_a_table_that_was_refused_pushes_its_moves_with_the_next_outer_step() -> None:
    """Upon the values that came all the same."""
    step = FailedStep()
    step.end(REFUSED)
    with pytest.raises(InvalidConfig, match="disagree"):
        step.steps.take_failed()
    step.pull()
    step.steps.take_failed()
    assert step.weight.eq(-3.0).all()
    assert step.steps.inner.have_moved
    assert step.pushed_next().eq(2.0).all()


def test_a_pull_that_failed_is_begun_again_before_its_step_is_taken_over() -> None:
    """Else the worker would go on from the values of before its step."""
    step = FailedStep()
    step.pull(REFUSED)
    with pytest.raises(InvalidConfig, match="disagree"):
        step.steps.take_failed()
    step.end()
    with pytest.raises(WaitExpired):
        step.steps.take_failed()
    step.pull()
    step.steps.take_failed()
    assert step.weight.eq(-2.0).all()


def test_a_failed_outer_step_is_taken_over_once_and_leaves_changes_of_the_script() -> None:
    step = FailedStep()
    step.weight.fill_(5.0)
    step.end()
    step.pull()
    step.steps.take_failed()
    assert step.weight.eq(5.0).all()
    assert step.table.edited(looks=True) == [0]
    step.table.write_parameters()
    step.weight.fill_(6.0)
    step.steps.take_failed()
    assert step.weight.eq(6.0).all()


def test_a_failed_outer_step_that_was_skipped_moves_nothing() -> None:
    step = FailedStep(is_skipped=True)
    step.end()
    step.pull()
    step.steps.take_failed()
    assert step.weight.eq(-2.0).all()
    assert not step.steps.inner.have_moved


@pytest.mark.parametrize(("taken", "expected"), [(0, -1.0), (1, -2.0)])
def test_a_fragment_of_a_failed_outer_step_is_merged_after_its_inner_steps(
    taken: int, expected: float
) -> None:
    step = FailedStep(Outer(torch.optim.SGD, inner_steps=2, overlap=1))
    step.steps.inner.taken = taken
    step.end()
    step.pull()
    step.steps.take_failed()
    assert step.weight.eq(expected).all()
    assert step.table.moves.has_arrived == (taken == 0), "its merge comes later"


def test_a_change_of_the_script_is_not_moved_again() -> None:
    """One that it made while it waited for a step that the servers did not take."""
    table = moved_table()
    table.left()
    (entry,) = table.layout.placed
    entry.tensor.data.fill_(5.0)
    assert table.take_result(StepResult(1, True, 0, rejected=(0, 1)))
    assert entry.tensor.eq(5.0).all()


@pytest.mark.parametrize(
    ("parts", "not_taken", "expected"),
    [
        ({"overlap": 1}, (), 5.0),
        ({"overlap": 1}, (0, 1), 4.0),  # it stays moved by -1
        ({"elastic": 0.5}, (), 2.0),  # half the way from -1 to 5
        ({"elastic": 0.5}, (0, 1), -1.0),  # stays where it is
    ],
)
def test_a_fragment_that_is_taken_over_again_is_merged_once(
    parts: dict[str, Any], not_taken: tuple[int, ...], expected: float
) -> None:
    """As after a wait for buffers that expired."""
    outer = Outer(torch.optim.SGD, inner_steps=2, **parts)
    table = moved_table(outer=outer)
    (entry,) = table.layout.placed
    received, _ = table.local_values()
    received.fill_(5.0)
    for is_again in (False, True):
        table.take_result(StepResult(1, True, 0, rejected=not_taken), is_again=is_again)
        table.moves.merge()
    assert entry.tensor.eq(expected).all()


def test_a_fragment_that_is_taken_over_ends_the_wait_for_it() -> None:
    """After a wait that expired no later move counts as a change of the script, which a later write
    leaves as it is.
    """
    table = moved_table(outer=Outer(torch.optim.SGD, inner_steps=2, elastic=0.5))
    table.left()
    table.take_result(StepResult(1, True, 0))
    table.moves.merge()
    table.write_parameters()
    (entry,) = table.layout.placed
    assert entry.tensor.eq(0.0).all()


def test_a_pull_of_a_fragment_that_expired_is_begun_again_as_it_was() -> None:
    client = TableClient()
    table = moved_table(client)
    table.moves.choose(1, 0)
    fragment = table.moves.fragment
    table.begin_pull(fragment)
    client.pulls_begun[0].future.set_exception(WaitExpired("late"))
    for words in ("late", "now"):
        with pytest.raises(WaitExpired, match=words):
            table.finish()
    assert client.pulled_blocks == [fragment, fragment]


def test_local_values_are_those_that_were_pulled_and_those_of_now() -> None:
    pulled, own = (each.clone() for each in moved_table().local_values())
    assert pulled.eq(0.0).all()
    assert own.eq(-1.0).all()
    weight = nn.Parameter(torch.full((128,), 7.0))
    (other,) = trained_tables(OUTER, [weight])
    other.load_local(pulled + 2.0, own)
    assert weight.eq(-1.0).all()
    assert other.edited(looks=True) == [0], "of what was pulled"
    assert all(each.eq(2.0).all() for each in other.local_values()[:1])
