"""A module's buffers (BatchNorm's running statistics) as tables, so that all workers share them.

Rules:
    - Only persistent buffers are shared: the others are caches, which every process makes itself.
    - Floating-point buffers have a table of their dtype; integers and booleans share one of
      float64, which holds every integer up to 2**53, and are rounded when they come back.
    - "rank0": rank 0's values replace all others in each step; once it has gone, those of the
      lowest rank that is there (`giver_of`). "mean": the mean of the workers'.
    - Whoever takes over gives none in the first two steps that it begins without the one before,
      who may have sealed either: with backup workers this one may be left out of the first, and
      begins the next update, which that one began. Nobody has sealed a later step.
    - The giver keeps its own: with an outer step that overlaps they are newer than what comes back.
      The others write what came at the merge, however early a call has waited for it.
    - Buffers of a step that is skipped count, as in one process.
    - A module may replace a buffer's tensor, and may not remove a buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ps_core.cluster_view import ClusterView
from ps_core.collective_calls import is_late_joiner, workers_here
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables.elements import DType
from ps_runtime.observe import logs
from ps_worker.client.pending import PendingTickets
from ps_worker.spec.flat_layout import (
    TABLE_DTYPE,
    FlatLayout,
    check_own_memory,
    layout_of,
    plain_name,
)
from ps_worker.spec.optimizers import Assign
from ps_worker.spec.settings import FromRank0
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.held_values import HeldValues
from ps_worker.training.tables.device_copies import Arrival, from_host, has_streams, to_host
from ps_worker.training.tables.inspection import Answers, true_numbers
from ps_worker.training.tables.staging import FlatBuffer, blocks_in, check_as_given

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import Pulled, PullTicket, TableStep

_MAX_EXACT_INTEGER = 2**53
"""The integer up to which float64 holds every one."""

_HELD_BACK_COUNT = 2
"""Steps in which whoever takes over gives no buffers."""


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of `module.state_dict()`, each once, in order of registration, by the names of
    the plain module if it is compiled.
    """
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def buffer_layouts(prefix: str, module: nn.Module) -> list[FlatLayout]:
    """The tables of a module's buffers, in order of first appearance."""
    bins: dict[tuple[str, DType], list[tuple[str, torch.Tensor]]] = {}
    check_own_memory(module.named_parameters(), persistent_buffers(module))
    for name, buffer in persistent_buffers(module):
        dtype = TABLE_DTYPE.get(buffer.dtype)
        if dtype is None and not _is_integer(buffer):
            raise InvalidConfig(
                f"buffer '{name}' is {buffer.dtype}; expected a float, integer or bool tensor "
                "(register it with persistent=False, or choose buffers=None)"
            )
        key = ("integer", DType.FLOAT64) if dtype is None else (dtype.value, dtype)
        bins.setdefault(key, []).append((name, buffer))
    layouts = [
        layout_of(f"{prefix}/buffers/{kind}", dtype, named) for (kind, dtype), named in bins.items()
    ]
    return [layout for layout in layouts if layout is not None]


def check_none_is_new(module: nn.Module, tables: Iterable[BufferTable]) -> None:
    """Refuse buffers that came into the module after its optimizer was made."""
    known = {name for table in tables for name in table.names}
    new = [n for n, each in persistent_buffers(module) if each.numel() and n not in known]
    if new:
        raise InvalidConfig(
            f"buffer '{new[0]}' came into the module after its optimizer was made, so that workers "
            "would not share it, nor checkpoints have it; expected the layer in the module before "
            "the optimizer is made, from parameters without the layer's and module=, and its "
            "parameters by add_param_group later; or choose buffers=None, with which each worker "
            "keeps its own"
        )


def write_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` into `target`, rounded to the nearest integer if `target` has integers."""
    with torch.no_grad():
        target.copy_(values if target.dtype.is_floating_point else values.round())


def giver_of(view: ClusterView) -> int:
    """The rank whose buffers all workers have with "rank0". A late joiner comes after all that were
    there before it, whatever its rank, so that a worker ceases to be it by its end alone.
    """
    late = {
        rank: worker.incarnation
        for rank, worker in workers_here(view).items()
        if is_late_joiner(view, worker)
    }
    return min(view.awaited_ranks, key=lambda rank: (late.get(rank, 0), rank), default=-1)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


class BufferTable:
    """The buffers of one layout, on the servers; making it blocks until their table exists.

    Attributes:
        is_pulled: each step pulls the buffers; False for the first worker of rank 0.
        arrived: pulled buffers by name, which `show` writes into the module.
    """

    def __init__(
        self, client: Client, module: nn.Module, layout: FlatLayout, options: TrainingOptions
    ) -> None:
        self._client = client
        self._module = module
        self._layout = layout
        self._is_mean = options.buffers == "mean"
        self.is_pulled = self._is_mean or client.rank != 0 or client.is_late_joiner
        # The steps in which this worker, if all have its buffers, gives none yet.
        self._held_back = 0 if client.rank == 0 and not client.is_late_joiner else _HELD_BACK_COUNT
        self._publishes = False  # in this step
        self._sent = FlatBuffer(layout)
        self._received = FlatBuffer(layout)
        self._held = HeldValues()
        self._pending = PendingTickets(client)
        self._pull: PullTicket[Pulled] | None = None
        self.arrived: dict[str, torch.Tensor] = {}
        self._left: dict[str, torch.Tensor] = {}
        self._arrivals: list[Arrival] = []
        self.handle = client.create_table(
            layout.table_name,
            layout.shapes(),
            optimizer=Assign(),
            dtype=layout.dtype.value,
            init=FromRank0(),
            consistency=options.consistency.without_policy(),
            # "rank0" has at most one contributor, whose sum is its values, bit for bit.
            reduction="mean" if options.buffers == "mean" else "sum",
            block_elements=options.block_elements,
            allow_non_finite=True,
        )

    @property
    def names(self) -> list[str]:
        """The names of its buffers."""
        return [entry.name for entry in self._layout.placed]

    def begin_assign(self) -> None:
        """Give the servers rank 0's buffers."""
        step = self._push(self._client.tables.begin_assign(self.handle))
        self.handle.steps.initial_values = self._sent.raw
        self._pending.add(step.seal())

    def check_as_given(self) -> None:
        """Refuse other buffers than those that an interrupted call has given the table."""
        if self.handle.steps.initial_values is not None:
            self._stage()
            check_as_given(self.handle, self._layout, self._sent)

    def push(self) -> None:
        """Push the present buffers, if this worker publishes them; refuses a module that lacks one,
        at every worker, so that none waits for another.
        """
        for entry in self._layout.placed:
            present_buffer(self._module, entry.name)
        self._publishes = self._is_mean or self._gives()
        if self._publishes:
            self._push(self._client.tables.begin_step(self.handle))

    def _gives(self) -> bool:
        """True if this worker's buffers are those of all in the step that begins."""
        client = self._client
        if giver_of(client.engine.view) != client.rank:
            self._held_back = _HELD_BACK_COUNT
            return False
        if self._held_back == 0:
            return True
        if self._held_back == _HELD_BACK_COUNT:
            logs.info("buffers_taken_over", table=self._layout.table_name, rank=client.rank)
        self._held_back -= 1
        return False

    def seal(self) -> None:
        """End the step on this table, and begin to pull; `finish` waits."""
        self._seal(skip=not self._publishes)
        if self.is_pulled:
            self.begin_pull()

    def pass_clock(self) -> None:
        """Seal a step in which the buffers have no part; `wait_pending` waits."""
        self._seal(skip=True)

    def _seal(self, *, skip: bool) -> None:
        self._pending.add(self._client.tables.begin_step(self.handle).seal(skip=skip))

    def begin_pull(self) -> None:
        """Begin to pull the buffers at this worker's clock."""
        for arrival in self._arrivals:  # of a copy that reads the last pull's values
            arrival.synchronize()
        self._arrivals = []
        self._pull = self._client.pulls.start(self.handle, self._received.raw, held=self._held)
        self._pending.add(self._pull)

    def wait_pending(self) -> None:
        """Wait for a step that an earlier call did not see the end of."""
        self._pending.wait()

    def left(self) -> None:
        """A wait for the buffers was given up: changes from now on are not overwritten."""
        if self._pull is not None and not self._left:
            with contextlib.suppress(InvalidTensor):  # `finish` and `push` say that one is missing
                current = self._current(self._received)
                self._left = {name: buffer.detach().clone() for name, buffer, _ in current}

    def finish(self, *, is_shown: bool = True) -> None:
        """Wait for the end of the step. A pull that has expired is begun again.

        Args:
            is_shown: `show` what has come; else a later call does.
        """
        if self._pull is not None and self._pull.has_expired:
            self.begin_pull()
        self.wait_pending()
        pull, self._pull = self._pull, None
        if pull is not None:
            self.arrived = {}
            if self._is_mean or not self._publishes:
                self._take_pulled()
            else:
                self._left = {}
        if is_shown:
            self.show()

    def _take_pulled(self) -> None:
        here = self._received.views
        current = list(self._current(self._received))
        devices = {target.device for _, target, _ in current}
        if len(devices) == 1 and has_streams(device := devices.pop()):
            # One copy for all buffers, which the device then divides.
            far = torch.empty_like(self._received.values, device=device)
            self._arrivals = from_host([(far, self._received.values)])
            here = self._layout.views(far)
        self.arrived = {name: values for (name, _, _), values in zip(current, here, strict=True)}

    def show(self) -> None:
        """Write the buffers that have come into the module, except those that the script has
        changed since a wait was given up; the giver's stay.
        """
        if not self.arrived:
            return
        arrived, self.arrived = self.arrived, {}
        before, self._left = self._left, {}
        for name, values in arrived.items():
            target = present_buffer(self._module, name)
            check_shape(name, target, values)
            if name not in before or torch.equal(before[name], target):
                write_values(target, values)

    def load_arrived(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Go on from those `arrived` in a checkpoint; it may have those of other tables, too."""
        names = [entry.name for entry in self._layout.placed if entry.name in buffers]
        self.arrived = {name: buffers[name] for name in names}

    def _push(self, step: TableStep) -> TableStep:
        self._stage()
        step.push_blocks(blocks_in(self.handle.table, self._sent.values))
        return step

    def _stage(self) -> None:
        current = list(self._current(self._sent))
        for name, source, staged in current:
            check_shape(name, source, staged)
        check_exact((name, source) for name, source, _ in current)
        sources = [source.detach() for _, source, _ in current]
        if len({source.device for source in sources}) == 1 and has_streams(sources[0].device):
            flat = torch.cat([source.reshape(-1).to(self._sent.values.dtype) for source in sources])
            arrival = to_host([(self._sent.values, flat)])
            if arrival is not None:
                arrival.synchronize()
        else:
            for source, (_, _, staged) in zip(sources, current, strict=True):
                staged.copy_(source)

    def _current(self, flat: FlatBuffer) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each buffer as the module has it now, because modules may replace the tensor."""
        for entry, view in zip(self._layout.placed, flat.views, strict=True):
            yield entry.name, present_buffer(self._module, entry.name), view


def present_buffer(module: nn.Module, name: str) -> torch.Tensor:
    """The module's buffer; InvalidTensor if the script has removed it."""
    try:
        found: torch.Tensor | None = module.get_buffer(name)
    except AttributeError:
        found = None
    if found is None:
        raise InvalidTensor(
            f"the module has no buffer '{name}' any more, and had it when the optimizer was made, "
            "so that the workers share it; expected the same buffers until the end. Change the "
            "module (prune.remove, another layer, no running statistics) before its optimizer is "
            "made, or choose buffers=None, with which each worker keeps its own"
        )
    return found


def check_exact(buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse integers that float64 does not hold; looks at all of them in one transfer."""
    wide = [each for each in buffers if each[1].dtype in (torch.int64, torch.uint64)]
    most = [
        Answers([i], (each.abs().max() > _MAX_EXACT_INTEGER).reshape(1))
        for i, (_, each) in enumerate(wide)
        if each.numel()
    ]
    for index in sorted(true_numbers(most)):
        name, buffer = wide[index]
        raise InvalidTensor(
            f"buffer '{name}' has {int(buffer.abs().max())}; expected integers up to 2**53 in "
            "magnitude (choose buffers=None, or persistent=False)"
        )


class OwnBuffers:
    """The attached state of buffers that workers do not share: each worker's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The buffers by name."""
        return {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write the buffers of a checkpoint; one that it does not have stays as it is."""
        for name, buffer in persistent_buffers(self._module):
            if name in state:
                check_shape(name, buffer, state[name])
                write_values(buffer, state[name])


def check_shape(name: str, buffer: torch.Tensor, view: torch.Tensor) -> None:
    if buffer.shape != view.shape:
        raise InvalidTensor(
            f"buffer '{name}' has shape {tuple(buffer.shape)}; expected {tuple(view.shape)}, as "
            "when the optimizer was made"
        )
