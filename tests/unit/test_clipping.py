"""One norm over several tables: the updates that wait for their scale, and the worker's own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ps_core.errors import TableFull, UpdateFailed
from ps_core.keys import TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.steps.steps import PushBody, StepFuture, StepResult, TableHandle, TableSteps
from ps_worker.training.clipping import UpdateScaling, multiply_gradients, norm_and_factor
from ps_worker.window.push_window import StepTerms

CLOCK = 1
BLOCK_COUNTS = (2, 1)
EPSILON = 1e-6


class Servers:
    """What the servers of one table were sent, and the futures that wait for their answers."""

    def __init__(self, table_id: int, block_count: int) -> None:
        spec = TableSpec(
            f"t{table_id}",
            DType.FLOAT32,
            64 * block_count,
            OptimizerSpec(OptimizerKind.SGD),
            block_elements=64,
            allow_non_finite=table_id == 1,
        )
        self.table_id = table_id
        table = Table(TableId(table_id), 0, spec.validated())
        self.steps: list[Future[StepResult]] = []
        self.terms: list[StepTerms] = []
        self.handle = TableHandle(table, TableSteps(table, self))

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        """Remembered."""
        assert (table.table_id, clock) == (self.table_id, CLOCK)
        self.steps.append(future)

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        """Nothing of it matters here."""

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        """Nothing of it matters here."""

    def together(self, steps: Sequence[tuple[Table, int]]) -> None:
        """Nothing of it matters here."""

    def seal(self, table: Table, clock: int, terms: StepTerms) -> None:
        """Remembered."""
        assert (table.table_id, clock) == (self.table_id, CLOCK)
        self.terms.append(terms)

    @property
    def scales(self) -> list[float]:
        """The factors of the update that were sent."""
        return [terms.update_scale for terms in self.terms if terms.update_scale is not None]


class Model:
    """Two tables, each sealed with a `clip_scale`, and what waits for both."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self.servers = [Servers(number, count) for number, count in enumerate(BLOCK_COUNTS, 1)]
        steps = [
            (each.handle, each.handle.steps.open_step().seal(clip_scale=1.0))
            for each in self.servers
        ]
        self.scaling = UpdateScaling(steps, max_norm)

    def answer(self, table: int, squares: Mapping[int, float]) -> None:
        """The step of a table has ended."""
        self.servers[table].steps[0].set_result(StepResult(CLOCK, True, 0, squares=squares))

    def refuse(self, table: int, squares: Mapping[int, float]) -> None:
        """The step of a table has ended, and pushes of it were refused."""
        step = self.servers[table].steps[0]
        assert isinstance(step, StepFuture)
        step.squares = squares
        step.set_exception(TableFull("full"))

    @property
    def norm(self) -> float | None:
        return self.scaling.norm

    @property
    def scales(self) -> list[list[float]]:
        return [each.scales for each in self.servers]

    @property
    def done(self) -> list[bool]:
        return [ticket.done() for ticket in self.scaling.tickets]


def test_each_update_gets_the_factor_of_the_norm_of_all() -> None:
    model = Model(max_norm=1.0)
    model.answer(0, {0: 9.0, 1: 7.0})
    assert (model.norm, model.scales) == (None, [[], []]), "a table has not ended its step"
    model.answer(1, {0: 9.0})
    assert model.norm == 5.0
    assert model.scales == [[1.0 / (5.0 + EPSILON)]] * 2
    assert model.done == [False, False]
    scaled = StepResult(CLOCK, True, 0)
    for number, each in enumerate(model.servers):
        each.steps[1].set_result(scaled)
        assert model.scaling.tickets[number].future.result(timeout=0) is scaled


def test_a_norm_below_the_most_leaves_the_updates_as_they_are() -> None:
    model = Model(max_norm=5.1)
    model.answer(1, {0: 9.0})
    model.answer(0, {0: 9.0, 1: 7.0})
    assert model.scales == [[1.0], [1.0]]


@pytest.mark.parametrize("part", [{0: 9.0}, {1: 9.0}])
def test_a_worker_that_lacks_squares_of_a_block_sends_no_scale(part: dict[int, float]) -> None:
    """Its norm would be too small; the others have all squares, and send the scale."""
    model = Model()
    model.answer(0, part)
    model.answer(1, {0: 16.0})
    assert model.norm is None
    assert model.scales == [[], []]
    results = [ticket.future.result(timeout=0) for ticket in model.scaling.tickets]
    assert [each.squares for each in results] == [part, {0: 16.0}]


def test_a_table_whose_update_does_not_wait_has_no_part_in_the_norm() -> None:
    model = Model(max_norm=2.0)
    model.answer(0, {})
    model.answer(1, {0: 16.0})
    assert model.norm == 4.0
    assert model.scales == [[], [2.0 / (4.0 + EPSILON)]]
    assert model.done == [True, False]


def test_where_no_update_waits_there_is_no_norm() -> None:
    model = Model()
    model.answer(0, {})
    model.answer(1, {})
    assert model.norm is None
    assert model.scales == [[], []]
    assert model.done == [True, True]


def test_a_step_that_failed_sends_no_scale_for_any() -> None:
    model = Model()
    model.answer(0, {0: 9.0, 1: 9.0})
    assert model.done == [False, False]
    model.servers[1].steps[0].set_exception(UpdateFailed("not finite"))
    assert model.done == [True, True]
    assert model.scales == [[], []]


def test_a_step_whose_pushes_were_refused_sends_the_scale_as_the_others() -> None:
    """They have ended with the squares of all workers; perhaps each worker was refused a table."""
    model = Model(max_norm=1.0)
    model.refuse(0, {0: 9.0, 1: 7.0})
    model.answer(1, {0: 9.0})
    assert model.norm == 5.0
    assert model.scales == [[1.0 / (5.0 + EPSILON)]] * 2
    for each in model.servers:
        each.steps[1].set_result(StepResult(CLOCK, True, 0))
    assert model.done == [True, True]


def test_a_table_of_which_all_were_refused_has_no_part_in_the_norm() -> None:
    model = Model(max_norm=2.0)
    model.refuse(0, {})
    model.answer(1, {0: 16.0})
    assert model.scales == [[], [2.0 / (4.0 + EPSILON)]]
    assert model.done == [True, False]


def test_a_scale_that_fails_fails_its_ticket() -> None:
    model = Model()
    model.answer(0, {0: 9.0, 1: 9.0})
    model.answer(1, {0: 9.0})
    error = UpdateFailed("not finite")
    model.servers[0].steps[1].set_exception(error)
    first, second = model.scaling.tickets
    assert first.future.exception(timeout=0) is error
    assert not second.done()


@pytest.mark.parametrize(
    ("square", "norm", "factor"),
    [(1e308, math.inf, 0.0), (math.inf, math.inf, 0.0), (math.nan, math.nan, math.nan)],
)
def test_squares_that_overflow_or_are_no_numbers(square: float, norm: float, factor: float) -> None:
    """A table that takes no NaN would refuse the scale, and its update wait for ever."""
    model = Model()
    model.answer(0, {0: square, 1: square})
    model.answer(1, {0: square})
    assert model.norm == pytest.approx(norm, nan_ok=True)
    (scale,), finite = model.scales
    assert scale == pytest.approx(factor, nan_ok=True)
    assert finite == [0.0]


# --- the worker's own gradients


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        made.append(parameter)
    return made


def test_the_norm_and_the_factor_are_torchs() -> None:
    rng = torch.Generator().manual_seed(7)
    own = [torch.randn(5, generator=rng), torch.randn(9, generator=rng)]
    given = parameters(*(each.clone() for each in own), None)
    norm, factor = norm_and_factor([each.grad for each in given], 1.5, 1.0)
    torchs = parameters(*own)
    assert norm == nn.utils.clip_grad_norm_(torchs, 1.5).item()
    multiply_gradients(given, factor)
    for mine, theirs in zip(given, torchs, strict=False):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_norm_is_of_the_gradients_times_their_scale() -> None:
    norm, factor = norm_and_factor([torch.tensor([3.0, 4.0])], 1.0, 0.5)
    assert norm == 2.5
    assert factor == pytest.approx(1.0 / (2.5 + EPSILON))


def test_a_small_norm_gives_no_factor_above_1() -> None:
    assert norm_and_factor([torch.tensor([3.0, 4.0])], 10.0, 1.0) == (5.0, 1.0)


def test_a_sparse_gradient_counts_as_the_dense_one_that_it_stands_for() -> None:
    """Its rows may come twice: their sum counts."""
    rows = nn.Embedding(4, 2, sparse=True)
    rows(torch.tensor([1, 1, 3])).sum().backward()
    sparse = rows.weight.grad
    assert sparse is not None
    dense, other = sparse.to_dense(), torch.tensor([3.0])
    expected = norm_and_factor([dense, other], 1.5, 0.5)
    assert norm_and_factor([sparse, other], 1.5, 0.5) == expected
    multiply_gradients([rows.weight], 0.25)
    assert rows.weight.grad is not None
    assert torch.equal(rows.weight.grad.to_dense(), dense * 0.25)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (torch.full((16,), 32_768.0, dtype=torch.float16), 131_072.0),
        (torch.tensor([160.0, 231.0], dtype=torch.bfloat16), 281.0),
    ],
    ids=["beyond the largest", "between two numbers"],
)
def test_the_norm_of_halves_is_no_half(gradient: torch.Tensor, expected: float) -> None:
    norm, _ = norm_and_factor([gradient], 1.0, 1.0)
    assert norm == expected


def test_a_factor_of_1_leaves_the_gradients_as_they_are() -> None:
    given = parameters(torch.tensor([3.0]), None)
    version = given[0].grad._version  # type: ignore[union-attr]
    multiply_gradients(given, 1.0)
    assert given[0].grad._version == version  # type: ignore[union-attr]
    multiply_gradients(given, 0.5)
    assert given[0].grad.tolist() == [1.5]  # type: ignore[union-attr]


class Sizes(TorchDispatchMode):
    """The bytes of what each operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        found = func(*args, **(kwargs or {}))
        self.made += [each.nbytes for each in pytree.tree_leaves(found) if torch.is_tensor(each)]
        return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_norm_of_large_gradients_makes_small_tensors(dtype: torch.dtype) -> None:
    gradients = [torch.ones(1_000, dtype=dtype), torch.ones(3, dtype=torch.float64)]
    with Sizes() as sizes:
        norm_and_factor(gradients, 1.0, 1.0)
    assert sizes.made
    assert max(sizes.made) <= 16
