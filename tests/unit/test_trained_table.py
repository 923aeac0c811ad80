"""One table in training, whose hooks run on several of autograd's threads."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

import torch
from torch import nn

from ps_core.keys import TableId
from ps_core.tables import OptimizerKind, OptimizerSpec, Table, TableSpec
from ps_worker.client.client import Client
from ps_worker.spec.flat_layout import dtype_of, layout_of
from ps_worker.spec.optimizers import SGD
from ps_worker.spec.settings import ASP, tensors_of
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.spec.values import BlockValues
from ps_worker.steps.steps import TableHandle
from ps_worker.training.tables.trained_table import TrainedTable

NUMBERS = (("lr", 1.0),)


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
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: table.hooked(index, NUMBERS)
        )
    threads = [
        threading.Thread(target=(parameter * 2.0).sum().backward) for parameter in parameters
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table.push_rest(NUMBERS)
    assert client.made_count == 1
    assert sorted(client.blocks) == [0, 1]
