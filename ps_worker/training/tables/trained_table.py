"""One table of parameters in training: gradients go out, parameters or reduced gradients come in.

Rules:
    - The table starts with rank 0's parameters; everybody else takes them over.
    - A step's staging is touched again only when the step has been committed: until then it is
      what a resend would send.
    - A table of frozen parameters sleeps (no steps, no pulls) until one of them is unfrozen.

What it deliberately does not do: know groups, loss scaling or other tables
(`ps_worker.training.distributed_optimizer` does).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from ps_core.errors import GradientChangedAfterPush, InvalidConfig, InvalidTensor
from ps_core.tables import Hyperparameters, pack_presence, unpack_presence
from ps_worker.client.pending import PendingTickets
from ps_worker.spec.flat_layout import TORCH_DTYPE, FlatLayout
from ps_worker.spec.optimizers import Add, ServerOptimizer
from ps_worker.spec.settings import FromRank0
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.spec.values import BlockValues
from ps_worker.training.tables.device_copies import Arrival, from_host
from ps_worker.training.tables.edits import WrittenValues
from ps_worker.training.tables.staging import FlatBuffer, GradientStaging, blocks_in, is_finite
from ps_worker.training.tables.step_scale import StepScale

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import Pulled, PullTicket, PushTicket

_REMEDIES = (
    "use mode='sealed' (the default), which sends it again; or change gradients only before their "
    "hooks fire, give accumulate= the number of backward passes of a step, call zero_grad() only "
    "right after step(), and freeze with requires_grad_(False) what another loss passes through"
)

_LOOK_EVERY = 16
"""Steps from one look at every bit of a table that sleeps to the next."""


class TrainedTable:
    """The parameters of one layout, on the servers.

    Args:
        client: a worker's client.
        layout: the parameters and where they lie.
        group: the number of their parameter group.
        optimizer: what the servers do with the gradients.
        options: the optimizer's options.

    Blocking: until the table exists.

    Raises:
        TableExists: another worker has made the table from another model.
    """

    def __init__(
        self,
        client: Client,
        layout: FlatLayout,
        group: int,
        optimizer: ServerOptimizer,
        options: TrainingOptions,
    ) -> None:
        self.layout = layout
        self.group = group
        self.is_asleep = layout.is_frozen
        self.handle = client.create_table(
            layout.table_name,
            [(entry.name, tuple(entry.tensor.shape)) for entry in layout.placed],
            optimizer=optimizer,
            dtype=layout.dtype.value,
            init=FromRank0(),
            consistency=options.consistency,
            reduction=options.reduction,
            block_elements=options.block_elements,
            allow_non_finite=options.allow_non_finite,
            gate_bytes=options.gate_bytes,
            kernels=options.kernels,
        )
        self._client = client
        self._options = options
        self._adds = isinstance(optimizer, Add)
        self._applies_on_arrival = options.applies_on_arrival
        self._eager: Hyperparameters | None = None
        self._was_skipped = False
        self._received = FlatBuffer(layout)
        self._written = WrittenValues(layout, self._received)
        self._edit: FlatBuffer | None = None
        self._look_count = 0
        self._landing: list[Arrival] = []
        self._staging: GradientStaging | None = None
        # Hooks run on autograd's threads, one for each device; one of them may end the step before.
        self._lock = threading.RLock()
        self._moved: FlatBuffer | None = None
        self._only: frozenset[int] | None = None
        self._pending = PendingTickets(client)
        self._pull: PullTicket[Pulled] | None = None

    @property
    def name(self) -> str:
        """The table's name."""
        return self.handle.name

    @property
    def dtype(self) -> torch.dtype:
        """Of the table's elements."""
        return TORCH_DTYPE[self.layout.dtype]

    @property
    def staging(self) -> GradientStaging:
        """The gradients; made at first use, since a table that sleeps has none."""
        with self._lock:
            if self._staging is None:
                staging = GradientStaging(
                    self.layout,
                    self.handle.table,
                    self._options.accumulate,
                    is_shared=self._client.connection.may_share_memory,
                )
                staging.restrict(self._only)
                self._staging = staging
        return self._staging

    # --- at the start

    def begin_assign(self) -> None:
        """Rank 0: gives the servers its parameters.

        Blocking: no; `finish` waits.
        """
        for entry, view in zip(self.layout.placed, self._received.views, strict=True):
            view.copy_(entry.tensor.detach())
        step = self._client.tables.begin_assign(self.handle)
        step.push_blocks(self._received.blocks(self.handle.table))
        self._pending.add(step.seal())
        self._written.written()
        for block in range(self.handle.table.block_count):  # as if it had pulled what it gave
            self.handle.steps.saw(block, 0)

    # --- while backward runs

    def hooked(self, index: int, hyperparameters: Hyperparameters) -> None:
        """Parameter `index` has its gradient; blocks that it completes leave.

        Args:
            index: its place in the layout.
            hyperparameters: the group's numbers now; for blocks that are applied on arrival.

        Raises:
            InvalidTensor: the gradient is sparse.
            WaitExpired: the step before could not be ended, and still cannot.
        """
        with self._lock:
            self.settle()
            self._push(self.staging.hooked(index), hyperparameters)

    def discard(self) -> None:
        """The gradients were zeroed."""
        if self._staging is not None and not self._pending:
            self._staging.discard()

    # --- a step of some blocks

    def restrict(self, blocks: Collection[int] | None) -> None:
        """From now on only these blocks are pushed; None: all, as at first."""
        self._only = None if blocks is None else frozenset(blocks)
        if self._staging is not None:
            self._staging.restrict(blocks)

    @property
    def is_restricted(self) -> bool:
        """Whether the step is one of some blocks, perhaps of other tables' alone."""
        return self._only is not None

    @property
    def takes_part(self) -> bool:
        """Whether anything of this table may be pushed."""
        return self._only is None or bool(self._only)

    def restricted_to(self) -> set[torch.Tensor]:
        """The parameters that the blocks of this step have a part of."""
        blocks = range(self.handle.table.block_count) if self._only is None else self._only
        placed = self.layout.placed
        return {placed[s.tensor].tensor for b in blocks for s in self.handle.table.segments(b)}

    def pass_clock(self) -> None:
        """Seals a step in which this table has no part.

        Blocking: no; `settle` waits.
        """
        self._pending.add(self._client.tables.begin_step(self.handle).seal(skip=True))

    def check_dtype(self) -> None:
        """Refuse a model that was moved to another dtype: its servers would train on in the first.

        Raises:
            InvalidConfig: naming a parameter whose dtype is not the table's.
        """
        for entry in self.layout.placed:
            if entry.tensor.dtype is not self.dtype:
                raise InvalidConfig(
                    f"parameter '{entry.name}' is {entry.tensor.dtype}, and was {self.dtype} when "
                    "its optimizer was made; move the model to its dtype (model.double(), "
                    ".bfloat16(), .to(dtype)) before its optimizer is made"
                )

    # --- what the script has changed

    def edited(self) -> list[int]:
        """The parameters whose values are not those that were written last, as places in the
        layout; none before that.

        Blocking: reads every parameter once (CPU), or waits for the device. Of a table that sleeps
        only those that autograd knows of are looked for, and all of them in one step of
        `_LOOK_EVERY`: to read a large frozen model would cost as much as a pass through it.
        """
        if not self._written.is_known:
            return []
        if self.is_asleep:
            self._look_count += 1
            if self._look_count % _LOOK_EVERY and not self._written.is_touched:
                return []
        found = self._written.edited()
        if not found:
            self._written.mark()
        return found

    def edit(self, indexes: Collection[int], name: bytes, array: str = "") -> PushTicket:
        """Ends a step that is an edit: the servers take over these parameters, if all workers say
        the same; and asks for what comes of it. What has left of gradients takes no part.

        Args:
            indexes: the parameters, as places in the layout; none where only other tables have any.
            name: the edit's.
            array: empty, or `VALUES_ARRAY` where they are loaded together with optimizer state.

        Blocking: copies the parameters; `finish` waits.
        """
        parts: list[BlockValues] = []
        if indexes:
            self._edit = FlatBuffer(self.layout, is_shared=self._client.connection.may_share_memory)
            for index in indexes:
                self._edit.views[index].copy_(self.layout.placed[index].tensor.detach())
            values = self._edit.values
            if array:  # which is in the dtype of the table's arithmetic
                is_double = values.dtype is torch.float64
                values = values.to(torch.float64 if is_double else torch.float32)
            parts = [
                BlockValues(part.block, part.payload, pack_presence(present))
                for part in blocks_in(self.handle.table, values)
                if any(present := self._presence(part.block, indexes))
            ]
        return self._end_edit(parts, name, array)

    def load(self, array: str, values: torch.Tensor | None, name: bytes) -> PushTicket:
        """Ends a step that is an edit of optimizer state, as `edit` does one of parameters.

        Args:
            array: the name of the state.
            values: all elements of the table; None where only other tables have any.
            name: the edit's.

        Shapes:
            values: 1-D, contiguous, in the dtype of the table's arithmetic. It must not change
            before the step has ended.

        Blocking: no; `finish` waits.
        """
        parts: Iterator[BlockValues] | tuple[BlockValues, ...] = ()
        if values is not None:
            parts = blocks_in(self.handle.table, values)
        return self._end_edit(parts, name, array)

    def _end_edit(self, parts: Iterable[BlockValues], name: bytes, array: str) -> PushTicket:
        ticket = self._client.tables.begin_step(self.handle).edit(parts, name, array)
        self._pending.add(ticket)
        self.begin_pull()
        return ticket

    def start_state_pull(self, array: str, values: torch.Tensor) -> PullTicket[Pulled]:
        """Begins to pull an array of optimizer state.

        Shapes:
            values: as in `load`; written until the ticket is done.

        Blocking: no.
        """
        raw = values.view(torch.uint8).numpy()
        return self._client.pulls.start_state(self.handle, raw, array)

    def _presence(self, block: int, indexes: Collection[int]) -> tuple[bool, ...]:
        return tuple(s.tensor in indexes for s in self.handle.table.segments(block))

    # --- when the step ends

    def check_final(self, hyperparameters: Hyperparameters) -> None:
        """Eager mode: refuse what has changed since its block left.

        Raises:
            GradientChangedAfterPush: naming the parameter or the hyperparameter, and the remedies.
        """
        changed = self.staging.changed_after_leaving()
        if changed is not None:
            raise GradientChangedAfterPush(
                f"the gradient of '{changed}' changed after it had been pushed to table "
                f"'{self.name}' in eager mode; {_REMEDIES}"
            )
        if self._eager is not None and self._eager != hyperparameters:
            before, now = dict(self._eager), dict(hyperparameters)
            name = next(name for name in before if before[name] != now[name])
            raise GradientChangedAfterPush(
                f"'{name}' of table '{self.name}' is {now[name]} and was {before[name]} when the "
                "first gradients of this step left; in eager mode change it right after step(), or "
                "use mode='sealed' (the default)"
            )

    def push_rest(self, hyperparameters: Hyperparameters) -> str | None:
        """Sends what has not left in its present form.

        Returns:
            The name of a parameter whose gradient is not finite, unless such are allowed, or are
            refused block by block (eager steps under ASP). Then nothing more is sent.
        """
        if not self.takes_part:
            return None
        if self._adds:
            return self._push_moved()
        for parts in self.staging.arriving():
            self._push(parts, hyperparameters)
        parts = self.staging.take()
        if not self._options.allow_non_finite and not self._applies_on_arrival:
            bad = self.staging.non_finite()
            if bad is not None:
                return bad
        self._push(parts, hyperparameters)
        return None

    def _push_moved(self) -> str | None:
        """ADD: sends how far the parameters have moved from what was pulled last.

        Returns:
            As `push_rest`.
        """
        if self._moved is None:
            self._moved = FlatBuffer(
                self.layout, is_shared=self._client.connection.may_share_memory
            )
        for arrival in self._landing:
            arrival.synchronize()
        placed, bases = self.layout.placed, self._received.views
        for entry, view, base in zip(placed, self._moved.views, bases, strict=True):
            view.copy_(entry.tensor.detach()).sub_(base)
            if not self._options.allow_non_finite and not is_finite(view):
                return entry.name
        parts = self._moved.blocks(self.handle.table)
        if self._only is not None:
            parts = (part for part in parts if part.block in self._only)
        self._client.tables.begin_step(self.handle).push_blocks(parts)
        return None

    def seal(self, hyperparameters: Hyperparameters, scale: StepScale, *, skip: bool) -> PushTicket:
        """Ends the step and asks for what comes of it.

        Args:
            hyperparameters: its numbers.
            scale: what its gradients count for.
            skip: it takes no part.

        Returns:
            The step's ticket.

        Blocking: no; `finish` waits.
        """
        step = self._client.tables.begin_step(self.handle)
        ticket = step.seal(
            hyperparameters,
            contribution_scale=scale.contribution_scale,
            skip=skip,
            clip_scale=scale.clip_scale,
        )
        self._pending.add(ticket)
        self._was_skipped = skip
        self.begin_pull()
        return ticket

    def wait_for(self, ticket: PushTicket) -> None:
        """The step has not ended before this has.

        Blocking: no; `finish` waits.
        """
        self._pending.add(ticket)

    def begin_pull(self) -> None:
        """Asks for the table as of this worker's clock.

        Blocking: no; `finish` waits.
        """
        for arrival in self._landing:  # of what the pull before has brought
            arrival.synchronize()
        self._landing.clear()
        self._written.is_known = False
        self._pull = self._client.pulls.start(self.handle, self._received.raw)
        self._pending.add(self._pull)

    def settle(self) -> None:
        """Waits for a step that an earlier call could not see the end of.

        Raises:
            PushpullError: as `Client.wait`.
        """
        if self._pending or self._pull is not None:
            # Blocks that left before the step was found to be skipped may have been refused.
            self._pending.wait((InvalidTensor,) if self._was_skipped else ())
            self._ended()

    def finish(self) -> Pulled | None:
        """Waits for the end of the step and of the pull; a pull that has expired is begun again.

        Raises:
            PushpullError: as `Client.wait`; what is not done stays to be settled.
        """
        if self._pull is not None and self._pull.has_expired:
            self.begin_pull()
        pull = self._pull
        self.settle()
        return None if pull is None else pull.future.result()

    def begin_refresh(self) -> None:
        """Asks for the table as it is now, between two steps; at once where that was done.

        Blocking: no; `finish_refresh` waits.
        """
        if self._pull is None or self._pull.has_expired:
            self.begin_pull()

    def finish_refresh(self) -> None:
        """Waits for it; what there is of gradients stays as it is.

        Raises:
            PushpullError: as `Client.wait`; another `begin_refresh` goes on.
        """
        self._pending.wait()
        self._pull = None

    def left(self) -> None:
        """The wait for what was asked for has ended early, and the script goes on: what it changes
        in the parameters from now on is not written over.
        """
        self._written.left()

    def write_parameters(self, but: Collection[int] = ()) -> None:
        """What was pulled becomes the parameters' values, save of those that were changed while
        it was waited for: they are edits, which come after it.

        Args:
            but: parameters that keep theirs, as places in the layout.
        """
        but = {*but, *self._written.changed_since_left()}
        pairs = zip(self.layout.placed, self._received.views, strict=True)
        moves = [(entry.tensor, view) for i, (entry, view) in enumerate(pairs) if i not in but]
        with torch.no_grad():
            self._landing = from_host(moves)
        self._written.written(but)

    def write_gradients(self, pulled: Pulled) -> None:
        """AGGREGATE: what was pulled becomes the gradients; tensors absent everywhere get None."""
        absent = set(range(len(self.layout.placed)))
        for block in range(self.handle.table.block_count):
            segments = self.handle.table.segments(block)
            present = unpack_presence(pulled.presence.get(block, b""), len(segments))
            absent -= {s.tensor for s, here in zip(segments, present, strict=True) if here}
        moves = []
        for index, entry in enumerate(self.layout.placed):
            parameter = entry.tensor
            if index in absent:
                parameter.grad = None
                continue
            # Of one memory format at all workers: a norm is summed in the order of the memory.
            if parameter.grad is None or parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter)
            moves.append((parameter.grad, self._received.views[index]))
        self._landing = from_host(moves)

    def _ended(self) -> None:
        self._pull = None
        self._edit = None
        self._eager = None
        self._was_skipped = False
        if self._staging is not None:
            self._staging.finish()

    def _push(self, parts: list[BlockValues], hyperparameters: Hyperparameters) -> None:
        if not parts:
            return
        if self._applies_on_arrival and self._eager is None:
            self._eager = hyperparameters
        self._client.tables.begin_step(self.handle).push_blocks(parts, eager=self._eager)
