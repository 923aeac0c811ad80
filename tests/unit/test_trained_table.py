"""One table in training: its edits, what it writes, and hooks on several of autograd's threads."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from ps_core.codecs.choices import PushCodec
from ps_core.errors import GradientChangedAfterPush
from ps_core.keys import AssignmentEpoch, TableId
from ps_core.tables.elements import Codec, pack_presence
from ps_core.tables.optimizers import VALUES_ARRAY, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.client.client import Client
from ps_worker.compression.table_codecs import TableCodecs
from ps_worker.spec.flat_layout import dtype_of, layout_of
from ps_worker.spec.optimizers import SGD, Aggregate, Outer, ServerOptimizer
from ps_worker.spec.settings import ASP, tensors_of
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.spec.values import BlockValues
from ps_worker.steps.held_values import HeldValue
from ps_worker.steps.steps import Pulled, TableHandle
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.window.push_window import StepTerms
from tests.unit.table_client import TableClient, parameter, trained_tables

NUMBERS = (("lr", 1.0),)
HELD = HeldValue(AssignmentEpoch(3), 0, 7, 0)


class Pushed:
    """A client that takes whatever is pushed. Who makes a staging meets who else makes one."""

    def __init__(self, table: Table) -> None:
        self.blocks: list[int] = []
        self.made_count = 0
        self._handle = TableHandle(table, cast(Any, None))
        self._both = threading.Barrier(2)
        self.connection = self.tables = self

    def create_table(self, *_: object, **__: object) -> TableHandle:
        return self._handle

    @property
    def may_share_memory(self) -> bool:
        self.made_count += 1
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.2)
        return False

    def begin_step(self, _: TableHandle) -> Pushed:
        return self

    def push_blocks(self, parts: list[BlockValues], eager: object) -> None:
        assert eager == NUMBERS
        self.blocks += [part.block for part in parts]


def test_two_threads_of_autograd_have_one_staging() -> None:
    """Each would let its own blocks leave, and what both hold the part of would leave at the end
    again: an eager step is applied block by block, so once too often.
    """
    parameters = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    dtype = dtype_of("p0", parameters[0])
    layout = layout_of("t", dtype, [(f"p{i}", p) for i, p in enumerate(parameters)])
    assert layout is not None
    spec = TableSpec(
        "t", dtype, layout.element_count, OptimizerSpec(OptimizerKind.SGD), 64,
        tensors_of("", layout.shapes()),
    ).validated()  # fmt: skip
    client = Pushed(Table(TableId(1), 0, spec))
    options = TrainingOptions.of({"mode": "eager"}, ASP())
    table = TrainedTable(cast(Client, client), layout, 0, SGD(lr=1.0), options)
    for index, each in enumerate(parameters):
        each.register_post_accumulate_grad_hook(lambda _, index=index: table.hooked(index, NUMBERS))
    threads = [threading.Thread(target=(each * 2.0).sum().backward) for each in parameters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table.push_rest(NUMBERS)
    assert client.made_count == 1
    assert sorted(client.blocks) == [0, 1]


# --- edits


def frozen_table() -> TrainedTable:
    """It sleeps, and was written."""
    frozen = [parameter(0.0, 0.0), parameter(0.0)]
    for each in frozen:
        each.requires_grad_(False)
    (table,) = trained_tables(SGD(lr=1.0), frozen)
    assert table.is_asleep
    assert table.edited(looks=False) == [], "what was not written cannot have been changed"
    table.write_parameters()
    return table


def test_a_table_that_sleeps_is_compared_bit_by_bit_if_the_call_looks() -> None:
    table = frozen_table()
    table.layout.placed[1].tensor.data.fill_(2.0)  # autograd does not hear of it
    assert [table.edited(looks=looks) for looks in (False, True, False)] == [[], [1], []]


def test_a_change_that_autograd_knows_is_found_at_once() -> None:
    table = frozen_table()
    with torch.no_grad():
        table.layout.placed[0].tensor.add_(0.0)
    assert table.edited(looks=False) == []
    with torch.no_grad():
        table.layout.placed[0].tensor.add_(1.0)
    assert table.edited(looks=False) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_beside_loaded_state_travel_in_the_tables_arithmetic(dtype: torch.dtype) -> None:
    client = TableClient()
    (table,) = trained_tables(SGD(lr=1.0), [parameter(1.5, 2.5, dtype=dtype)], client=client)
    table.edit([0], b"name", VALUES_ARRAY)
    table.begin_pull()
    (body,) = client.submitted
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert torch.frombuffer(bytearray(body.payload), dtype=expected).tolist() == [1.5, 2.5]
    assert (body.is_assign, body.codec) == (True, table.handle.spec.arithmetic_codec)
    assert client.terms == [StepTerms(edit=b"name", array=VALUES_ARRAY)]


def test_an_edit_sends_the_blocks_of_its_parameters_alone() -> None:
    client = TableClient()
    model = [nn.Parameter(torch.full((64,), float(i))) for i in range(3)]
    (table,) = trained_tables(SGD(lr=1.0), model, client=client)
    table.edit([1], b"name")
    (body,) = client.submitted
    assert (body.block, body.codec) == (1, None)
    assert torch.frombuffer(bytearray(body.payload), dtype=torch.float32).eq(1.0).all()


# --- what is written


def test_pulled_values_are_written_except_into_what_the_script_has_changed() -> None:
    (table,) = trained_tables(SGD(lr=1.0), [parameter(float(i)) for i in (1, 2, 3, 4)])
    tensors = [entry.tensor for entry in table.layout.placed]
    table.write_parameters(but=[0])
    assert [each.item() for each in tensors] == [1.0, 0.0, 0.0, 0.0]
    table.left()
    tensors[2].data.fill_(7.0)
    table.write_parameters(but=[1])
    assert [each.item() for each in tensors] == [0.0, 0.0, 7.0, 0.0]
    assert table.edited(looks=False) == [2]
    table.write_parameters()
    assert [each.item() for each in tensors] == [0.0] * 4


def test_a_reduced_gradient_is_none_where_no_worker_had_one() -> None:
    """And lies in memory as its parameter does, at all workers."""
    square = nn.Parameter(torch.ones(2, 3).t().contiguous().t())
    (table,) = trained_tables(Aggregate(), [parameter(1.0, 2.0), square, parameter(3.0)])
    assert square.stride() == (1, 2)
    square.grad = torch.ones(2, 3)
    table.layout.placed[0].tensor.grad = torch.ones(2)
    table.write_gradients(Pulled(1, {}, {0: pack_presence((False, True, True))}))
    absent, reduced, _ = gradients(table)
    assert absent is None
    assert reduced is not None
    assert reduced.stride() == (1, 2)
    assert reduced.eq(0.0).all()
    table.write_gradients(Pulled(2, {}, {}))
    first, again, _ = gradients(table)
    assert first is not None
    assert again is reduced


def gradients(table: TrainedTable) -> list[torch.Tensor | None]:
    return [entry.tensor.grad for entry in table.layout.placed]


# --- which blocks, and when


def test_a_table_takes_part_in_a_step_of_some_blocks_if_it_has_one_of_them() -> None:
    model = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))]
    (table,) = trained_tables(SGD(lr=1.0), model)
    assert (table.takes_part, table.is_restricted) == (True, False)
    assert table.restricted_to() == set(model)
    table.restrict([])
    assert (table.takes_part, table.is_restricted) == (False, True)
    assert table.restricted_to() == set()
    table.restrict([1])
    assert table.takes_part
    assert table.restricted_to() == {model[1]}
    table.restrict(None)
    assert (table.takes_part, table.is_restricted) == (True, False)


def test_eager_blocks_have_the_hyperparameters_of_the_first_which_may_not_change() -> None:
    client = TableClient()
    model = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    (table,) = trained_tables(SGD(lr=1.0), model, client=client, mode="eager", consistency=ASP())
    for index, (each, lr) in enumerate(zip(model, (1.0, 2.0), strict=True)):
        each.grad = torch.ones(64)
        table.hooked(index, (("lr", lr),))
    assert [body.eager for body in client.submitted] == [NUMBERS, NUMBERS]
    table.check_final(NUMBERS)
    with pytest.raises(GradientChangedAfterPush, match=r"'lr' of table .* is 2\.0 and was 1\.0"):
        table.check_final((("lr", 2.0),))
    assert model[0].grad is not None
    model[0].grad.mul_(2.0)
    with pytest.raises(GradientChangedAfterPush, match=r"gradient of 'parameter\.0' changed"):
        table.check_final(NUMBERS)


def test_gradients_that_were_zeroed_after_eager_blocks_had_left_are_refused() -> None:
    client = TableClient()
    (parameter,) = model = [nn.Parameter(torch.ones(64))]
    (table,) = trained_tables(SGD(lr=1.0), model, client=client, mode="eager", consistency=ASP())
    for value in (1.0, 2.0):
        parameter.grad = torch.full((64,), value)
        table.hooked(0, NUMBERS)
        table.discard()
    assert len(client.submitted) == 1
    with pytest.raises(GradientChangedAfterPush, match=r"zero_grad\(\) only right after"):
        table.check_final(NUMBERS)


def test_a_sealed_step_sends_no_hyperparameters_with_its_blocks() -> None:
    client = TableClient()
    (table,) = trained_tables(SGD(lr=1.0), [nn.Parameter(torch.ones(64))], client=client)
    table.layout.placed[0].tensor.grad = torch.ones(64)
    table.hooked(0, NUMBERS)
    assert [body.eager for body in client.submitted] == [None]
    table.check_final((("lr", 2.0),))


# --- what a codec cannot hold


def test_a_sparse_gradient_is_left_to_the_staging_which_refuses_it() -> None:
    tensors = [parameter(1.0, 2.0), parameter(3.0)]
    (table,) = trained_tables(SGD(lr=1.0), tensors)
    table.handle.codecs = TableCodecs(PushCodec(Codec.FP16))
    tensors[0].grad = torch.tensor([1e5, 0.0]).to_sparse()
    assert table.beyond_codec() == ""
    tensors[1].grad = torch.tensor([1e5])
    assert "is beyond what push_codec fp16 can hold" in table.beyond_codec()


# --- what is held of the pulled values


def holding(optimizer: ServerOptimizer) -> tuple[TrainedTable, TableClient]:
    """A table whose memory has the value of its block."""
    client = TableClient()
    (table,) = trained_tables(optimizer, [parameter(1.0, 2.0)], client=client)
    table.begin_pull()
    client.held.take(0, HELD)
    return table, client


def test_a_step_pulls_what_is_not_held() -> None:
    table, client = holding(SGD(lr=1.0))
    table.seal((), StepScale(), skip=True)
    assert client.held.claims([0], HELD.assignment_epoch) == (0, [7])


def test_memory_that_the_leader_of_a_group_fills_holds_nothing() -> None:
    table, client = holding(SGD(lr=1.0))
    table.is_followed = True
    table.seal((), StepScale(), skip=True)
    assert client.held.claims([0], HELD.assignment_epoch) == (0, [None])


def test_memory_with_the_values_of_a_checkpoint_holds_nothing() -> None:
    table, client = holding(Outer(partial(torch.optim.SGD, lr=1.0), inner_steps=2))
    table.load_local(*(each.clone() for each in table.local_values()))
    assert client.held.claims([0], HELD.assignment_epoch) == (0, [None])
