"""`pull_model`: how long it waits for its tables, and that one pull at a time writes to a table's
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from ps_core.errors import AlreadyPast, InvalidConfig, PushpullError, WaitExpired
from ps_core.tables.table import Table
from ps_runtime.system.clock import now_s
from ps_runtime.system.future_waits import wait_until_ended
from ps_worker.client.client import Client
from ps_worker.client.tables import Pulls
from ps_worker.spec.flat_layout import named_group, table_layouts
from ps_worker.spec.optimizers import SGD
from ps_worker.steps.steps import Pulled, PullTicket, TableHandle
from ps_worker.training.model_pull import pull_model
from ps_worker.transport.loop import background
from ps_worker.transport.pulls import PullOrder
from tests.unit.table_client import TableClient

REQUEST_DEADLINE_S = 0.05
LARGE = "model/1/float32"
"""The table that is not asked for its newest clock."""

End = float | PushpullError
"""A pull lasts so many seconds, or ends with an error."""


class Servers:
    """Pulls end as `ends` says of a table and the number of its pull."""

    def __init__(self, ends: Callable[[str, int], End]) -> None:
        self.ends = ends
        self.orders: list[PullOrder] = []
        self.writing: list[int] = []
        self.overlaps = 0

    def begun(self, name: str) -> list[PullOrder]:
        return [order for order in self.orders if order.table.spec.name == name]

    async def pull(self, order: PullOrder) -> Pulled:
        name, memory = order.table.spec.name, id(order.raw)
        self.orders.append(order)
        self.overlaps += memory in self.writing
        self.writing.append(memory)
        try:
            end = self.ends(name, len(self.begun(name)))
            if isinstance(end, PushpullError):
                raise end
            await passed(end)
            order.raw[:] = 0
            return Pulled(order.clock if order.clock else 7)
        finally:
            await passed(0.01)  # what is being copied ends first
            self.writing.remove(memory)


async def passed(wait_s: float) -> None:
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=wait_s)


class Reader:
    """A reader's client, and its connection and engine, of a model of two tables."""

    is_reader = True

    def __init__(self, servers: Servers) -> None:
        self.engine = servers
        self.connection = self.tables = self
        self.loop = background()
        self.model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 2, bias=False))
        self.handles: list[TableHandle] = []
        maker = TableClient()
        for number, (name, tensor) in enumerate(self.model.named_parameters()):
            group = named_group({"params": [(name, tensor)]}, None, 0)
            for layout in table_layouts(f"model/{number}", group):
                self.handles.append(
                    maker.create_table(layout.table_name, layout.shapes(), optimizer=SGD(lr=0.1))
                )
        self.pulls = Pulls(cast(Any, self), cast(Any, self))

    def open_all(self, *_: Any) -> list[TableHandle]:
        return self.handles

    def check_usable(self) -> None:
        """It is."""

    def check_own(self, table: TableHandle) -> None:
        assert table in self.handles

    def newest(self, table: TableHandle) -> Table:
        return table.table

    def deadline_s(self, timeout_s: float | None) -> float:
        return REQUEST_DEADLINE_S if timeout_s is None else timeout_s

    def wait_all(self, tickets: Sequence[PullTicket[Any]], timeout_s: float | None = None) -> None:
        wait_until_ended([ticket.future for ticket in tickets], self.deadline_s(timeout_s))
        for ticket in tickets:
            if not ticket.done():
                raise WaitExpired("it takes too long")
            ticket.future.result()

    def wait(self, ticket: PullTicket[Any], timeout_s: float | None = None) -> Any:
        self.wait_all([ticket], timeout_s)
        return ticket.future.result()

    def pull_model(self, timeout_s: float) -> int:
        return pull_model(cast(Client, self), self.model, timeout_s=timeout_s)


def test_values_may_travel_longer_than_a_request() -> None:
    """Else it begins pull after pull into the same memory, and none of them ends."""
    servers = Servers(lambda _name, _number: 4 * REQUEST_DEADLINE_S)
    reader = Reader(servers)
    assert reader.pull_model(timeout_s=20.0) == 7
    assert len(servers.begun(LARGE)) == 1
    assert all(torch.all(each == 0) for each in reader.model.parameters())


def test_of_a_lost_attempt_nothing_is_pulled_on() -> None:
    """One table was past the clock: the values of the other, which take minutes, are for nothing;
    and the next attempt writes to the same memory.
    """

    def ends(name: str, number: int) -> End:
        if name == LARGE:
            return 60.0 if number == 1 else 0.0
        return AlreadyPast("past", clock=8) if number == 2 else 0.0

    servers = Servers(ends)
    began_s = now_s()
    assert Reader(servers).pull_model(timeout_s=20.0) == 9
    assert now_s() - began_s < 10.0
    assert [order.clock for order in servers.begun(LARGE)] == [7, 9]
    assert servers.overlaps == 0


def test_a_failed_pull_ends_the_others() -> None:
    def ends(name: str, _number: int) -> End:
        return 60.0 if name == LARGE else InvalidConfig("no")

    servers = Servers(ends)
    reader = Reader(servers)
    with pytest.raises(InvalidConfig, match="no"):
        pull_model(cast(Client, reader), reader.model, consistent=False, timeout_s=20.0)
    assert servers.writing == []
