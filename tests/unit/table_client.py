"""Tables in training without a cluster: a client that makes them as the real one does."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ps_core.keys import TableId
from ps_core.tables import Table
from ps_worker.client.client import Client
from ps_worker.spec.flat_layout import named_group, table_layouts
from ps_worker.spec.optimizers import ServerOptimizer
from ps_worker.spec.settings import BSP, table_spec
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import TableHandle
from ps_worker.training.tables.trained_table import TrainedTable


class TableClient:
    """Makes tables; sends and pulls nothing."""

    def __init__(self) -> None:
        self._count = 0
        self.connection = self
        self.may_share_memory = False

    def create_table(self, name: str, layout: Any, *, optimizer: Any, **options: Any) -> Any:
        self._count += 1
        spec = table_spec(name, layout, optimizer, cast(Any, options))
        return TableHandle(Table(TableId(self._count), 0, spec), cast(Any, None))


def trained_tables(
    optimizer: ServerOptimizer, *groups: list[nn.Parameter], **options: Any
) -> list[TrainedTable]:
    """The tables of these groups of parameters."""
    client = cast(Client, TableClient())
    checked = TrainingOptions.of(cast(Any, {"block_elements": 64, **options}), BSP())
    made: list[TrainedTable] = []
    position = 0
    for number, parameters in enumerate(groups):
        group = named_group({"params": parameters}, None, position)
        position += len(parameters)
        layouts = table_layouts(f"model/{number}", group)
        made += [TrainedTable(client, each, number, optimizer, checked) for each in layouts]
    return made


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))
