"""A worker's own torch optimizer, for `Aggregate`, `Add` and `Outer`; and the pace of `Outer`."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

import torch

from ps_core import limits
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.tables.table import Table
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.compression.push_encoder import BEYOND_HALF
from ps_worker.spec.flat_layout import table_layouts
from ps_worker.spec.optimizers import NAMESAKES, Add, Aggregate, Outer, ServerOptimizer
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.inner_steps import InnerSteps
from ps_worker.steps.setting_by_clock import SettingByClock
from ps_worker.steps.steps import PushTicket, StepResult, TableHandle
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.tables.trained_table import TrainedTable


def outer_of(optimizer: ServerOptimizer, inner_steps: int) -> Outer:
    """`Outer` with the namesake of `optimizer` in torch.optim, for the setting `outer_steps`;
    InvalidConfig if it has none, or a clamp.
    """
    name = type(optimizer).__name__
    if name not in NAMESAKES:
        raise InvalidConfig(
            f"outer_steps is {inner_steps}, and the optimizer is {name}; expected one of "
            f"{', '.join(NAMESAKES)}, whose namesake in torch.optim takes the inner steps"
        )
    settings = optimizer.defaults()
    if "clamp" in settings:
        raise InvalidConfig(
            f"outer_steps is {inner_steps}, and {name} has clamp={settings['clamp']}, which "
            "torch.optim does not have; expected none"
        )
    return Outer(partial(getattr(torch.optim, name), **settings), inner_steps)


def inner_optimizer(
    optimizer: Aggregate | Add | Outer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The factory's torch optimizer for these groups; InvalidConfig if it makes none."""
    kind = type(optimizer).__name__
    if optimizer.factory is None:
        raise InvalidConfig(f"{kind} has no factory; expected one that makes a torch optimizer")
    if not callable(optimizer.factory):
        raise InvalidConfig(
            f"{kind}'s factory is {type(optimizer.factory).__name__}; expected a function that "
            "makes a torch optimizer of parameter groups, such as "
            "functools.partial(torch.optim.SGD, lr=0.1)"
        )
    inner = optimizer.factory(groups)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, torch.optim.LBFGS):
        raise InvalidConfig(
            f"{kind}'s factory made a {type(inner).__name__}; expected a torch optimizer that "
            "uses one gradient a step"
        )
    return inner


def check_shared(
    groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], name: str
) -> None:
    """Refuse `param_groups` that are not those of the torch optimizer which takes the steps."""
    if len(own) != len(groups) or any(map(operator.is_not, own, groups)):
        raise InvalidConfig(
            f"the param_groups of '{name}' are other groups than those of the torch optimizer "
            "that takes its steps: one of them was set, or loaded without the other. Change the "
            "groups in place, and load by load_state_dict of the optimizer that has both"
        )


def check_fragments(
    outer: Outer | None, groups: Sequence[Mapping[str, Any]], options: TrainingOptions
) -> None:
    """Refuse more fragments than the model has blocks, before its tables are made; and as
    `check_waits_for_all`.
    """
    check_waits_for_all(outer, options)
    if outer is None or outer.fragments == 1:
        return
    size = options.block_elements or limits.DEFAULT_BLOCK_ELEMENTS
    layouts = (layout for group in groups for layout in table_layouts("", group))
    count = sum(-(-layout.element_count // size) for layout in layouts)
    if count < outer.fragments:
        raise InvalidConfig(
            f"Outer: fragments is {outer.fragments}, and '{options.name}' has {count} blocks of up "
            f"to {size:,} elements; expected at most as many fragments, or smaller block_elements"
        )


def check_waits_for_all(outer: Outer | None, options: TrainingOptions) -> None:
    """Refuse fragments with backup workers: a worker that was left out learns by pulls of whole
    tables how far the others are.
    """
    if outer is not None and outer.fragments > 1 and options.consistency.backup_workers:
        raise InvalidConfig(
            f"Outer: fragments is {outer.fragments} with {options.consistency} for "
            f"'{options.name}'; expected no fragments with backup workers"
        )


def skipped_step(problem: str, options: TrainingOptions) -> str:
    """Words for a step that was skipped because of a gradient; empty without a problem."""
    if not problem:
        return ""
    if options.applies_on_arrival:
        return (
            f"{problem}. Blocks that had left before were applied (mode='eager'), the others of "
            "the step were not"
        )
    if BEYOND_HALF in problem:  # else an infinity would be applied
        return f"{problem}. The step was skipped on every server"
    return (
        f"{problem}; expected finite values. The step was skipped on every server "
        "(allow_non_finite=True would apply it)"
    )


def refused_inner_step(problem: str) -> str:
    """As `skipped_step`, for an inner step that was not taken."""
    if not problem:
        return ""
    return (
        f"{problem}; expected finite values. The inner step was not taken, and counts, so that "
        "workers stay in step"
    )


class OuterNeeds(NamedTuple):
    """The needs of one worker's next outer step.

    Attributes:
        waits_for_others: it may end only when the others take one, too.
        least_clock: the clock that each worker must be at before it can end.
        enough: the workers whose steps make its update, with backup workers; 0: it has those of
            all.
    """

    waits_for_others: bool
    least_clock: int
    enough: int


class SettingsByClock:
    """The settings of a model's tables, by clock."""

    def __init__(self, newest: Callable[[TableHandle], Table]) -> None:
        self._newest = newest
        self._seen: defaultdict[TableId, SettingByClock] = defaultdict(SettingByClock)

    def ahead(self, clocks: int, handles: Iterable[tuple[TableHandle, bool]]) -> list[Consistency]:
        """The settings of the step so many clocks ahead, 1 or 2, by the views at each call; of
        those of the handles whose table takes steps.
        """
        awake = [handle for handle, is_awake in handles if is_awake]
        newest = [(self._newest(handle), handle.clock + clocks) for handle in awake]
        return [self._seen[table.table_id].at(table, clock) for table, clock in newest]

    def needs_after(
        self, clock: int, handles: Sequence[tuple[TableHandle, bool]], worker_count: int
    ) -> OuterNeeds:
        """The needs of the outer step after `clock`. Args as of `ahead`."""
        settings = self.ahead(1, handles)
        after = self.ahead(2, handles)  # of what the step pulls
        waits = any(setting.mode is not Mode.ASP for setting in (*settings, *after))
        # The step ends when each table has its update: that with fewest backup workers needs most.
        backup_workers = min((setting.backup_workers for setting in settings), default=0)
        if backup_workers:  # all take it at one clock, so that enough can be chosen
            return OuterNeeds(waits, clock, max(worker_count - backup_workers, 1))
        return OuterNeeds(waits, max((least_clock(each, clock) for each in after), default=0), 0)


def least_clock(setting: Consistency, clock: int) -> int:
    """The clock that all workers must reach before one at `clock` reads under this setting."""
    if setting.mode is Mode.BSP and not setting.backup_workers:
        return clock
    return clock - setting.staleness if setting.mode is Mode.SSP else 0


class OuterSteps:
    """The outer steps of one model (`Outer`): the blocks that each exchanges, and when the worker
    merges what has come of them.

    Args:
        outer: the optimizer; None if it is another, whose every step exchanges all blocks.
        tables, buffers: the owner adds them.

    Attributes:
        inner: the inner steps since the last outer step.
        chosen_at: the clock that the blocks were chosen for last.
    """

    def __init__(
        self, outer: Outer | None, tables: Sequence[TrainedTable], buffers: Sequence[BufferTable]
    ) -> None:
        self.chosen_at = 0
        self._outer = outer
        self._tables = tables
        self._buffers = buffers
        self.inner = InnerSteps(1 if outer is None else outer.steps_per_clock)
        self._failed: Mapping[TrainedTable, PushTicket] = {}
        self._was_skipped = False  # the one that failed

    def choose(self, clock: int, *, is_whole: bool = False) -> None:
        """Choose the blocks of the outer step after `clock`; all, if it `is_whole`."""
        is_merged = self._outer is not None and self._outer.merges and not is_whole
        self.chosen_at, first = clock, 0
        for table in self._tables:
            table.moves.fragment = None
            if is_merged:
                table.moves.choose(clock, first)
            first += table.handle.table.block_count

    def sealed(self) -> None:
        """The outer step is sealed. Where only a fragment is, the parameters stay moved."""
        self.inner.taken = 0
        self.inner.has_kept = self._has_fragments

    @property
    def _has_fragments(self) -> bool:
        return any(table.moves.fragment is not None for table in self._tables)

    def take(
        self, table: TrainedTable, result: StepResult | None, *, is_again: bool = False
    ) -> None:
        """As `TrainedTable.take_result`; the next step has what the servers did not take."""
        self.inner.has_kept |= table.take_result(result, is_again=is_again)

    def failed(self, tickets: Mapping[TrainedTable, PushTicket], *, is_skipped: bool) -> None:
        """The outer step has ended with an error. The parameters stay moved until `take_failed`,
        since some of its tickets and pulls may still end.
        """
        if self._outer is not None:
            self.inner.has_kept = True
            self._failed, self._was_skipped = tickets, is_skipped

    def take_failed(self) -> None:
        """Wait for all of an outer step that ended with an error, and take it over: the next step
        has the moves of tables that were refused. Raises as `TrainedTable.finish`.
        """
        if not self._failed:
            return
        for table in self._failed:
            table.finish_failed()
        with uninterrupted():
            self.inner.has_kept = self._has_fragments
            for table, ticket in self._failed.items():
                if self._was_skipped:
                    table.write_parameters()
                else:
                    is_refused = ticket.future.exception() is not None
                    self.take(table, None if is_refused else ticket.future.result())
            self._failed = {}
            if not self.is_overlapped:
                self.merge()

    @property
    def is_overlapped(self) -> bool:
        """True if the worker takes another inner step before it waits for the last outer step."""
        return self._outer is not None and self.inner.taken < self._outer.overlap

    def merge(self) -> None:
        """Merge values that have come, and show buffers."""
        for table in self._tables:
            table.moves.merge()
        for buffers in self._buffers:
            buffers.show()


class _LocalState(defaultdict[torch.Tensor, Any]):
    """A local optimizer's state, which is true before the first step, too."""

    def __bool__(self) -> bool:
        return True


def local_state(inner: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """The state of a local optimizer, which is its own from now on in a form that is never false:
    torch.distributed.checkpoint would call `step` to have a false one made.
    """
    if type(inner.state) is defaultdict:
        inner.state = _LocalState(inner.state.default_factory, inner.state)
    return inner.state


class StateBefore:
    """A copy of an optimizer's state before a step that may have to be repeated in part."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {tensor: copy.deepcopy(state) for tensor, state in optimizer.state.items()}

    def step_again(self, tensors: AbstractSet[torch.Tensor]) -> None:
        """Repeat the step for these tensors alone, from the copied state."""
        state = self._optimizer.state
        for tensor in tensors:
            state.pop(tensor, None)
            if tensor in self._state:
                state[tensor] = copy.deepcopy(self._state[tensor])
        others = [
            (tensor, tensor.grad)
            for group in self._optimizer.param_groups
            for tensor in group["params"]
            if tensor not in tensors
        ]
        try:
            for tensor, _ in others:
                tensor.grad = None
            self._optimizer.step()
        finally:
            for tensor, gradient in others:
                tensor.grad = gradient
