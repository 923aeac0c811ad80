"""A module's buffers as tables: which, in what, and how they come back; and the names of tables."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch
from torch import nn

from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import Incarnation, NodeId
from ps_core.tables.elements import DType
from ps_core.tables.table import Table
from ps_worker.client.client import Client
from ps_worker.spec.settings import BSP
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.held_values import HeldValues
from ps_worker.steps.steps import PullTicket, TableHandle
from ps_worker.training.among_workers.later_groups import birth_clock, known_birth, table_prefix
from ps_worker.training.module_buffers import (
    BufferTable,
    buffer_layouts,
    check_exact,
    check_shape,
    giver_of,
    persistent_buffers,
    present_buffer,
    write_values,
)
from tests.unit.table_client import TableClient


class Child(nn.Module):
    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("shared", shared)
        self.register_buffer("absent", None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = torch.zeros(4, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.one = Child(shared)
        self.other = Child(shared)
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))


def test_each_persistent_buffer_comes_once_in_order_of_registration() -> None:
    model = Model()
    found = dict(persistent_buffers(model))
    assert list(found) == ["count", "mask", "one.mean", "one.shared", "other.mean"]
    assert found["one.shared"] is model.other.shared
    assert found.keys() | {"other.shared"} == model.state_dict().keys()


def test_a_compiled_module_has_the_names_of_the_plain_one() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Child(torch.zeros(1))

    assert [name for name, _ in persistent_buffers(Compiled())] == ["mean", "shared"]


def test_floats_have_a_table_of_their_type_and_integers_share_one_of_float64() -> None:
    layouts = buffer_layouts("model", Model())
    assert [(each.table_name, each.dtype, [p.name for p in each.placed]) for each in layouts] == [
        ("model/buffers/integer", DType.FLOAT64, ["count", "mask"]),
        ("model/buffers/float32", DType.FLOAT32, ["one.mean", "other.mean"]),
        ("model/buffers/float64", DType.FLOAT64, ["one.shared"]),
    ]


def test_a_complex_buffer_is_refused_by_name() -> None:
    module = nn.Module()
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidConfig, match=r"buffer 'phase' is torch\.complex64"):
        buffer_layouts("model", module)


def test_integers_are_rounded_to_the_nearest_and_floats_are_not() -> None:
    values = torch.tensor([0.4, 0.6, -1.6], dtype=torch.float64)
    for dtype, expected in (
        (torch.int64, [0, 1, -2]),
        (torch.bool, [False, True, True]),
        (torch.float64, [0.4, 0.6, -1.6]),
    ):
        target = torch.zeros(3, dtype=dtype)
        write_values(target, values)
        assert target.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_up_to_the_largest_exact_one_are_taken(dtype: torch.dtype) -> None:
    most = min(2**53, torch.iinfo(dtype).max)
    check_exact(
        [
            ("least", torch.tensor([-most, 1], dtype=dtype)),
            ("empty", torch.zeros(0, dtype=dtype)),
            ("most", torch.tensor([most, 1], dtype=dtype)),
        ]
    )
    if dtype is torch.int64:
        for beyond in (most + 1, -most - 1):
            good = ("good", torch.tensor([1]))
            with pytest.raises(InvalidTensor, match=r"buffer 'n' has \d+; .* up to 2\*\*53"):
                check_exact([good, ("n", torch.tensor([beyond, 1]))])


def test_a_buffer_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(InvalidTensor, match=r"'n' has shape \(3,\); expected \(2,\)"):
        check_shape("n", torch.zeros(3), torch.zeros(2))


def test_a_buffer_that_was_removed_is_refused_by_name() -> None:
    model = Model()
    assert present_buffer(model, "one.mean") is model.one.mean
    model.one.mean = torch.ones(3)
    assert present_buffer(model, "one.mean").tolist() == [1.0, 1.0, 1.0]
    del model.count
    model.other.mean = None  # type: ignore[assignment]
    model.one = nn.Identity()  # type: ignore[assignment]
    for name in ("count", "other.mean", "one.mean"):
        with pytest.raises(InvalidTensor, match=f"no buffer '{name}' any more.* buffers=None"):
            present_buffer(model, name)


ALIVE, SILENT, LEFT, GONE = NodeState


@pytest.mark.parametrize(
    ("workers", "giver"),
    [
        ([], 0),  # none has registered
        ([(1, ALIVE)], 0),
        ([(0, ALIVE), (1, ALIVE)], 0),
        ([(0, SILENT), (1, ALIVE)], 0),
        ([(0, GONE), (1, ALIVE), (2, ALIVE)], 1),
        ([(0, LEFT), (1, ALIVE), (2, ALIVE)], 1),
        ([(0, GONE), (1, ALIVE), (0, ALIVE)], 1),  # it is back, and comes after who was there
        ([(0, GONE), (1, GONE), (1, ALIVE), (0, ALIVE)], 1),
        ([(0, GONE), (1, GONE), (0, ALIVE), (1, ALIVE)], 0),
        ([(0, GONE), (1, GONE), (0, ALIVE), (2, ALIVE)], 0),
        ([(0, LEFT), (1, LEFT)], -1),
    ],
)
def test_the_lowest_rank_that_was_there_first_gives_the_buffers(
    workers: list[tuple[int, NodeState]], giver: int
) -> None:
    assert giver_of(view_of(workers)) == giver


def view_of(workers: list[tuple[int, NodeState]]) -> ClusterView:
    nodes = tuple(
        Node(NodeId(number), Incarnation(number), Role.WORKER, rank, "", state)
        for number, (rank, state) in enumerate(workers, 1)
    )
    return ClusterView(1, "demo", 2, 1, nodes, (), ())


class Member(TableClient):
    """A worker whose steps and pulls end at once, and its view."""

    def __init__(self, rank: int, *, is_late_joiner: bool = False) -> None:
        super().__init__()
        self.rank, self.is_late_joiner = rank, is_late_joiner
        self.engine = self
        self.view = view_of([(0, ALIVE), (1, ALIVE)])

    def open_step(self, table: Table, clock: int, future: Future[Any]) -> None:
        del table, clock
        future.set_result(None)

    def start(
        self, handle: TableHandle, raw: Any, *, held: HeldValues, blocks: Any = None
    ) -> PullTicket[Any]:
        ticket = super().start(handle, raw, held=held, blocks=blocks)
        ticket.future.set_result(None)
        return ticket

    def shares(self, module: nn.Module) -> BufferTable:
        options = TrainingOptions.of(cast(Any, {"block_elements": 64}), BSP())
        (layout,) = buffer_layouts("model", module)
        return BufferTable(cast(Client, self), module, layout, options)

    def gives(self, buffers: BufferTable, step_count: int) -> list[bool]:
        """True for each of the next steps in which it gives its buffers."""
        before = len(self.terms)
        for _ in range(step_count):
            buffers.push()
            buffers.seal()
            buffers.finish()
        return [not terms.skip for terms in self.terms[before:]]


def test_who_takes_over_gives_nothing_in_two_steps_which_the_one_before_may_have_sealed() -> None:
    """Of which the second only if this one was left out of the first, as a backup worker."""
    first, second = Member(0), Member(1)
    assert first.gives(first.shares(Child(torch.zeros(2))), 2) == [True, True]
    buffers = second.shares(Child(torch.zeros(2)))
    assert second.gives(buffers, 2) == [False, False]
    second.view = view_of([(0, GONE), (1, ALIVE)])
    assert second.gives(buffers, 4) == [False, False, True, True]
    late = Member(0, is_late_joiner=True)
    buffers = late.shares(Child(torch.zeros(2)))
    late.view = view_of([(0, GONE), (1, GONE), (0, ALIVE)])  # in its first step already
    assert late.gives(buffers, 4) == [False, False, True, True]


def test_who_gives_keeps_what_its_module_has_counted_since() -> None:
    """With `Outer` and `overlap` the pull ends some inner steps after the push."""
    member, module = Member(1), Child(torch.zeros(2))
    buffers, mean = member.shares(module), module.get_buffer("mean")
    member.view = view_of([(0, GONE), (1, ALIVE)])
    for is_given in (False, False, True):
        mean.fill_(1.0)
        buffers.push()
        buffers.seal()
        mean.fill_(2.0)
        buffers.finish()
        assert mean.tolist() == [2.0 if is_given else 0.0] * 3


# --- names of tables


def test_a_tables_name_has_the_clock_of_its_groups_birth() -> None:
    assert table_prefix("model", 0, 0) == "model/0"
    assert table_prefix("model", 12, 120) == "model/12@120"
    assert birth_clock("model/0/float32") == 0
    assert birth_clock("model/12@120/float32/frozen") == 120


def test_a_groups_birth_is_known_by_any_of_its_tables() -> None:
    names = ["model/0/float32", "model/1@120/float32", "model/12@7/float32", "other/2@5/float32"]
    assert [known_birth("model", group, names) for group in (0, 1, 2, 12)] == [0, 120, None, 7]
