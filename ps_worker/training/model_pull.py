"""`pull_model`: a whole model from the servers, for evaluators and servers of predictions.

Rules:
    - The name of a `DistributedOptimizer` finds its tables; the names of the model's parameters and
      persistent buffers find their tensors.
    - Groups added later count from the clock in their tables' names ("model/1@120/float32"); tables
      of parameters that were frozen at first count from when they were unfrozen, and are pulled at
      their own newest clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ps_core import limits
from ps_core.consistency import Mode
from ps_core.errors import (
    AlreadyPast,
    InvalidConfig,
    InvalidTensor,
    PushpullError,
    TableNotFound,
    WaitExpired,
)
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.grpc.retry import Backoff, is_curable
from ps_runtime.system.clock import now_s
from ps_worker.spec.flat_layout import TORCH_DTYPE, plain_name
from ps_worker.spec.values import element_bytes
from ps_worker.steps.held_values import HeldValues
from ps_worker.steps.steps import Pulled
from ps_worker.training.among_workers.later_groups import birth_clock
from ps_worker.training.module_buffers import persistent_buffers, write_values
from ps_worker.transport.loop import Ends
from ps_worker.transport.pulls import Moment, PullOrder

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import TableHandle

_ATTEMPT_S = 10.0
"""The longest that one attempt waits for its clock, because training may have ended before it."""


_OF_AN_ATTEMPT = AlreadyPast, InvalidConfig, WaitExpired
"""The errors that end an attempt, and not the call."""


def pull_model(
    client: Client,
    model: nn.Module,
    name: str = "model",
    *,
    consistent: bool = True,
    timeout_s: float | None = None,
) -> int:
    """Pull parameters and buffers that a `DistributedOptimizer` trains into a model.

    Args:
        client: a reader's client, or a worker's, which pulls at its own clock.
        model: the same architecture as the workers'; its values are replaced.
        name: the optimizer's name.
        consistent: the state after the same step in every table. Under SSP workers that are ahead
            wait for a moment; under ASP there is no such state. Until a change of the setting is in
            effect, workers wait as under SSP. Parameters that were unfrozen since the optimizer was
            made are of their newest step. With False each table is pulled at its newest state.
        timeout_s: None means the client's request_deadline_s.

    Returns:
        The pulled clock: the number of the step; under ASP the slowest worker's.

    A reader's client keeps a copy of the values in host memory: its next call pulls what has
    changed.

    Blocking: until the tables exist, rank 0 has given their first values, and all are pulled.

    Raises:
        TableNotFound: a parameter or buffer is in no table; the message names it.
        InvalidConfig: the tables hold tensors that the model lacks, or belong to `Aggregate`.
        InvalidTensor: a tensor has another shape in the model.
        WaitExpired: it took too long.
    """
    end_s = now_s() + client.connection.deadline_s(timeout_s)
    parameters = {plain_name(name): tensor for name, tensor in model.named_parameters()}
    targets = parameters | dict(persistent_buffers(model))
    tables = _find_tables(client, name, targets, end_s)
    for table in tables:
        _check(table, targets)
    pulls = [_TablePull(client, table) for table in tables]
    training = [pull for pull in pulls if not pull.table.name.endswith("/frozen")]
    if consistent and client.is_reader and training:
        clock = _pull_one_state(training, end_s)
    else:
        clock = _pull(training, consistent and _modes(pulls) == {Mode.BSP}, end_s)
    _pull([pull for pull in pulls if pull not in training], consistent, end_s)
    for pull in pulls:
        for tensor in pull.table.spec.tensors:
            flat = pull.values[tensor.offset : tensor.offset + tensor.element_count]
            write_values(targets[tensor.name], flat.view(tensor.shape))
        if client.is_reader:
            pull.keep()
    return clock


class _TablePull:
    """A table and the memory that it is pulled into, which is kept from an earlier call unless
    another thread has it.
    """

    def __init__(self, client: Client, table: TableHandle) -> None:
        self.client = client
        self.table = table
        self.birth = birth_clock(table.name)
        byte_count = table.element_count * element_bytes(table.dtype)
        kept = client.pulls.kept.pop(table, None)
        self._raw, self._held = kept or (np.empty(byte_count, np.uint8), HeldValues())
        self.values = torch.from_numpy(self._raw).view(TORCH_DTYPE[table.dtype])

    @property
    def newest(self) -> Table:
        """The table as the newest view has it."""
        return self.client.tables.newest(self.table)

    def order(self, consistent: bool, end_s: float, at: Moment | None) -> PullOrder:
        left_s = max(end_s - now_s(), 0.001)
        order = self.client.pulls.order(
            self.table, self._raw, self._held, left_s, consistent=consistent
        )
        if at is None:
            return order
        at = at._replace(clock=max(at.clock - self.birth, 0))
        return replace(order, **at._asdict(), is_reader=False)

    def keep(self) -> None:
        """Keep the memory for the next call; no pull of this one is in flight."""
        self.client.pulls.kept[self.table] = self._raw, self._held


def _find_tables(
    client: Client, name: str, wanted: Iterable[str], end_s: float
) -> Sequence[TableHandle]:
    def missing(specs: Sequence[TableSpec]) -> list[str]:
        known = {tensor.name for spec in specs for tensor in spec.tensors}
        return [tensor for tensor in wanted if tensor not in known]

    found = client.tables.open_all(
        f"{name}/", lambda specs: not missing(specs), max(end_s - now_s(), 0.001)
    )
    specs = [table.spec for table in found]
    absent = missing(specs)
    if absent:
        there = f"{len(specs)} tables" if specs else "no table"
        raise TableNotFound(
            f"the tables of '{name}' ({there}) do not hold '{absent[0]}'"
            + (f" and {len(absent) - 1} more tensors of the model" if absent[1:] else "")
            + "; expected a DistributedOptimizer of that name, made from the module or with "
            "module= (which names the parameters and shares the buffers)"
        )
    return found


def _check(table: TableHandle, targets: dict[str, torch.Tensor]) -> None:
    if table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
        raise InvalidConfig(
            f"table '{table.name}' is Aggregate's: the workers hold its parameters, no server"
        )
    for tensor in table.spec.tensors:
        if tensor.name not in targets:
            raise InvalidConfig(
                f"table '{table.name}' holds '{tensor.name}', which the model does not have"
            )
        shape = tuple(targets[tensor.name].shape)
        if shape != tensor.shape:
            raise InvalidTensor(
                f"'{tensor.name}' has shape {shape} in the model; expected {tensor.shape}, as in "
                f"table '{table.name}'"
            )


def _ends(
    pulls: Sequence[_TablePull], consistent: bool, end_s: float, at: Moment | None = None
) -> Ends[Pulled]:
    """Pull all tables until `end_s`, a reader perhaps at the moment `at`; returns the end of each
    pull, once none of the tables is being written any more. The first failure ends the others.
    """
    if not pulls:
        return []
    client = pulls[0].client
    orders = [pull.order(consistent, end_s, at) for pull in pulls]
    ticket = client.pulls.start_together(orders)
    try:
        ends = client.wait(ticket, max(end_s - now_s(), 0.001))
    finally:
        ticket.future.cancel()  # of a wait that was interrupted
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, _OF_AN_ATTEMPT):
            raise end
    return ends


def _pull(pulls: Sequence[_TablePull], consistent: bool, end_s: float) -> int:
    ends = _ends(pulls, consistent, end_s)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    clocks = [
        pull.birth + end.clock
        for pull, end in zip(pulls, ends, strict=True)
        if isinstance(end, Pulled)
    ]
    return min(clocks, default=0)


def _modes(pulls: Sequence[_TablePull]) -> set[Mode]:
    return {pull.newest.consistency.mode for pull in pulls}


def _pull_one_state(pulls: Sequence[_TablePull], end_s: float) -> int:
    """Pull all tables at one clock; as they are, if one of them is ASP there."""
    modes = _modes(pulls)
    if modes == {Mode.BSP}:
        with suppress(InvalidConfig):  # another setting holds at the clock
            return _pull_at_one_clock(pulls, end_s)
    if Mode.ASP in modes:
        clock = _pull(pulls, consistent=False, end_s=end_s)
        if _has_asp(pulls, clock):
            return clock
    cut_clock = _pull_by_cut(pulls, end_s)
    return _pull(pulls, consistent=False, end_s=end_s) if cut_clock is None else cut_clock


def _has_asp(pulls: Sequence[_TablePull], clock: int) -> bool:
    """True if a table is ASP at the model's clock."""
    return any(pull.newest.is_asp(clock - pull.birth) for pull in pulls)


def _pull_at_one_clock(pulls: Sequence[_TablePull], end_s: float) -> int:
    """Pull all tables at one clock, further ahead each time that a table had passed it."""
    smallest = min(pulls, key=lambda pull: pull.table.element_count)
    margin = 0
    clock: int | None = None
    while True:
        if clock is None:
            clock = _pull([smallest], consistent=True, end_s=end_s)
        try:
            _attempt(pulls, Moment(clock, now_s() + _ATTEMPT_S), end_s)
            return clock
        except AlreadyPast as past:
            margin = max(1, 2 * margin)
            clock = max(clock, past.clock) + margin
            if now_s() >= end_s:
                raise WaitExpired(
                    f"no clock could be pulled before the servers had passed it: {past.message}"
                ) from past
        except WaitExpired:
            if now_s() >= end_s:
                raise
            margin, clock = 0, None  # training has paused or ended before that clock


def _pull_by_cut(pulls: Sequence[_TablePull], end_s: float) -> int | None:
    """Suspend updates of all tables, and pull them at the highest clock of any; None if a table is
    ASP there.
    """
    tables = [pull.table for pull in pulls]
    backoff = Backoff()
    while True:
        lasts_s = min(limits.DEFAULT_CUT_S, max(end_s - now_s(), 0.001))
        try:
            with pulls[0].client.tables.cut(tables, lasts_s) as (cut, clocks):
                clock = max(clock + pull.birth for pull, clock in zip(pulls, clocks, strict=True))
                if _has_asp(pulls, clock):
                    return None
                _attempt(pulls, Moment(clock, now_s() + lasts_s, cut), end_s)
                return clock
        except PushpullError as error:  # a server or a worker took too long, or is gone
            if not (is_curable(error) or isinstance(error, AlreadyPast)):
                raise
            if now_s() >= end_s:
                raise WaitExpired(error.message) from error
            time.sleep(backoff.next_s(error))


def _attempt(pulls: Sequence[_TablePull], at: Moment, end_s: float) -> None:
    """Pull all tables at one clock; raises once none of them is being written any more:
    InvalidConfig if a table needs a cut there, AlreadyPast if one is past it, whose `clock` counts
    from the model's birth, or WaitExpired.
    """
    mixed: InvalidConfig | None = None
    failure: AlreadyPast | WaitExpired | None = None
    for pull, end in zip(pulls, _ends(pulls, True, end_s, at), strict=True):
        if isinstance(end, AlreadyPast):
            furthest = max(end.clock + pull.birth, failure.clock if failure else 0)
            failure = AlreadyPast(end.message, clock=furthest)
        elif isinstance(end, InvalidConfig):
            mixed = end
        elif isinstance(end, WaitExpired):
            failure = failure or end
    worst = mixed or failure
    if worst is not None:
        raise worst
