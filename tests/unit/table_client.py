"""Tables in training without a cluster: a client that makes them as the real one does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import nn

from ps_core.errors import WaitExpired
from ps_core.keys import TableId
from ps_core.tables.table import Table
from ps_worker.client.client import Client
from ps_worker.spec.flat_layout import named_group, table_layouts
from ps_worker.spec.optimizers import ServerOptimizer
from ps_worker.spec.settings import BSP, table_spec
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.held_values import HeldValues
from ps_worker.steps.steps import PullTicket, PushBody, TableHandle, TableStep, TableSteps
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.window.push_window import StepTerms


class TableClient:
    """Makes tables; what is sent of their steps goes nowhere, and what is pulled does not come.

    Attributes:
        submitted: the pushes of all steps.
        terms: of all seals.
        held: by the memory of the last pull.
    """

    def __init__(self) -> None:
        self._count = 0
        self.connection = self.tables = self.pulls = self
        self.may_share_memory = False
        self.submitted: list[PushBody] = []
        self.terms: list[StepTerms] = []
        self.pulled_blocks: list[Any] = []  # of each pull
        self.pulls_begun: list[PullTicket[Any]] = []
        self.held = HeldValues()

    def create_table(self, name: str, layout: Any, *, optimizer: Any, **options: Any) -> Any:
        self._count += 1
        spec = table_spec(name, layout, optimizer, cast(Any, options))
        table = Table(TableId(self._count), 0, spec)
        return TableHandle(table, TableSteps(table, self))

    # --- its steps and pulls

    def begin_step(self, handle: TableHandle) -> TableStep:
        return handle.steps.open_step()

    def start(
        self, handle: TableHandle, raw: Any, *, held: HeldValues, blocks: Any = None
    ) -> PullTicket[Any]:
        del raw
        self.held = held
        self.pulled_blocks.append(blocks)
        self.pulls_begun.append(PullTicket(handle.table, Future()))
        return self.pulls_begun[-1]

    def wait_all(self, tickets: Sequence[PullTicket[Any]]) -> None:
        """Wait no longer than now."""
        for ticket in tickets:
            if not ticket.done():
                raise WaitExpired("now")
            ticket.future.result()

    def open_step(self, table: Table, clock: int, future: Future[Any]) -> None:
        """Nothing ends it."""

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        """Remembered."""
        del table, clock
        self.submitted += bodies

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        """Nothing has left."""

    def together(self, steps: Sequence[tuple[Table, int]]) -> None:
        """Nothing of it matters here."""

    def seal(self, table: Table, clock: int, terms: StepTerms) -> None:
        """Remembered."""
        del table, clock
        self.terms.append(terms)


def trained_tables(
    optimizer: ServerOptimizer,
    *groups: list[nn.Parameter],
    client: TableClient | None = None,
    **options: Any,
) -> list[TrainedTable]:
    """The tables of these groups of parameters."""
    checked = TrainingOptions.of(cast(Any, {"block_elements": 64, **options}), BSP())
    made_by = cast(Client, client or TableClient())
    made: list[TrainedTable] = []
    position = 0
    for number, parameters in enumerate(groups):
        group = named_group({"params": parameters}, None, position)
        position += len(parameters)
        layouts = table_layouts(f"model/{number}", group)
        made += [TrainedTable(made_by, each, number, optimizer, checked) for each in layouts]
    return made


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))
