"""Which clocks a worker leaves out: on all tables that it steps together, or on none (S7)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.steps.steps import PushBody, StepResult, TableSteps, passed, skipped_clocks
from ps_worker.window.push_window import StepTerms


class Sealed:
    """What was sealed, in order."""

    def __init__(self) -> None:
        self.seals: list[tuple[Table, int, StepTerms]] = []

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        """Nothing is sent here."""

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        """Nothing is sent here."""

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        """Nothing is sent here."""

    def together(self, steps: Sequence[tuple[Table, int]]) -> None:
        """Nothing of it matters here."""

    def seal(self, table: Table, clock: int, terms: StepTerms) -> None:
        """Remembered."""
        self.seals.append((table, clock, terms))


def table() -> Table:
    spec = TableSpec("w", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD), block_elements=64)
    return Table(TableId(1), 0, spec.validated())


@given(st.lists(st.integers(0, 50), min_size=1))
def test_all_tables_go_forward_alike_and_none_beyond_what_has_formed(missed: list[int]) -> None:
    counts = skipped_clocks(missed)
    assert len(set(counts)) == 1
    assert all(count <= there for count, there in zip(counts, missed, strict=True))


def test_a_worker_of_one_table_goes_where_the_others_are() -> None:
    steps = TableSteps(table(), Sealed())
    steps.open_step().seal()
    steps.reached(5)
    assert (steps.clock, steps.skipped_count) == (5, 4)


def test_a_pull_of_one_of_several_tables_leaves_out_nothing() -> None:
    steps = TableSteps(table(), Sealed(), is_alone=lambda: False)
    steps.open_step().seal()
    steps.reached(5)
    assert (steps.clock, steps.missed_count) == (1, 4)
    steps.skip_clocks(2)
    assert (steps.clock, steps.missed_count) == (3, 2)


def test_an_open_step_keeps_its_clock() -> None:
    steps = TableSteps(table(), Sealed())
    step = steps.open_step()
    steps.reached(5)
    assert (step.clock, steps.clock) == (1, 0)


def test_a_worker_that_joins_begins_where_its_first_pull_says() -> None:
    steps = TableSteps(table(), Sealed(), is_alone=lambda: False, joins=True, owed_count=3)
    steps.reached(7)
    assert (steps.clock, steps.skipped_count, steps.owed_count) == (7, 0, 0)
    steps.reached(9)
    assert steps.clock == 7


def test_a_worker_that_joins_is_where_the_others_are_on_every_table() -> None:
    assert passed([5, 4, 5], [0, 0, 0]) == (0, 1, 0)
    assert passed([], []) == ()
    assert passed([50, 3], [0, 0]) == (0, 0)  # apart for a reason


def test_tables_that_a_checkpoint_had_a_step_apart_stay_so() -> None:
    """The others have them so: at one clock, each would wait on one table for who waits for it on
    another.
    """
    assert passed([5, 4], [3, 2]) == (0, 0)
    assert passed([5, 5], [3, 2]) == (1, 0)
    assert passed([90, 3], [87, 0]) == (0, 0)
