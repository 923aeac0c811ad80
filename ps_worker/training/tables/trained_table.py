"""One table of parameters in training: gradients go out, parameters or reduced gradients come in.

Rules:
    - The table starts with rank 0's parameters, which all other workers take over.
    - A step's staging does not change before the step is committed, because a resend reads it.
    - A table of frozen parameters sleeps (no steps, no pulls) until one of them is unfrozen.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ps_core.errors import (
    GradientChangedAfterPush,
    InvalidCheckpoint,
    InvalidConfig,
    InvalidTensor,
    PushpullError,
    TableExists,
)
from ps_core.tables.elements import Codec, pack_presence, unpack_presence
from ps_core.tables.optimizers import Hyperparameters
from ps_worker.client.pending import PendingTickets
from ps_worker.compression.push_encoder import BEYOND_HALF
from ps_worker.spec.flat_layout import TORCH_DTYPE, FlatLayout
from ps_worker.spec.optimizers import Add, Outer, ServerOptimizer
from ps_worker.spec.settings import FromRank0
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.spec.values import BlockValues
from ps_worker.steps.held_values import HeldValues
from ps_worker.training.tables.awaited_values import AwaitedValues
from ps_worker.training.tables.device_copies import Arrival, from_host
from ps_worker.training.tables.edits import WrittenValues
from ps_worker.training.tables.inspection import (
    is_finite,
    non_finite,
    stored_values,
    true_numbers,
)
from ps_worker.training.tables.landings import LANDINGS
from ps_worker.training.tables.local_moves import LocalMoves
from ps_worker.training.tables.shown_values import ShownValues
from ps_worker.training.tables.staging import (
    FlatBuffer,
    GradientStaging,
    blocks_in,
    check_as_given,
    check_dense,
)
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.tables.unrounded_values import UnroundedValues, arithmetic_dtype

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import (
        Pulled,
        PullTicket,
        PushResiduals,
        PushTicket,
        StepResult,
        TableHandle,
    )

_REMEDIES = (
    "use mode='sealed' (the default), which sends it again; or change gradients only before their "
    "hooks fire, give accumulate= the number of backward passes of a step, call zero_grad() only "
    "right after step(), and freeze with requires_grad_(False) what another loss passes through"
)


_FROZEN_THEN = (
    "If other parameters are frozen now (requires_grad) than when the model's first optimizer was "
    "made: freeze the same ones, make the optimizer, and then unfreeze them"
)


def _created(
    client: Client, layout: FlatLayout, optimizer: ServerOptimizer, options: TrainingOptions
) -> TableHandle:
    try:
        return client.create_table(
            layout.table_name,
            layout.shapes(),
            optimizer=optimizer,
            dtype=layout.dtype.value,
            init=FromRank0(),
            consistency=options.consistency,
            reduction=options.reduction,
            block_elements=options.block_elements,
            allow_non_finite=options.allow_non_finite,
            gate_bytes=options.gate_bytes,
            kernels=options.kernels,
            push_codec=options.push_codec,
            pull_codec=options.pull_codec,
        )
    except (TableExists, InvalidCheckpoint) as error:
        if not any(f"its {what}" in error.message for what in ("element_count", "tensors")):
            raise
        raise type(error)(f"{error.message}. {_FROZEN_THEN}") from None


class TrainedTable:
    """The parameters of one layout, on the servers; making it blocks until their table exists.

    Attributes:
        options: those of the model.
        group: the number of their parameter group.
        is_followed: another worker pushes and pulls for this one.
        pending: the tickets that `finish` waits for.
        unrounded: the servers' own values, for an edit.
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
        self.is_followed = False
        self.handle = _created(client, layout, optimizer, options)
        self._client = client
        self.options = options
        self._is_outer = isinstance(optimizer, Outer)
        self._pushes_moves = self._is_outer or isinstance(optimizer, Add)
        self._eager: Hyperparameters | None = None
        self._was_skipped = False
        self._received = FlatBuffer(layout, is_pinned=not layout.is_frozen)
        self._shown = ShownValues(
            self.handle.table, layout, self._received, self._left_of_updates()
        )
        self._written = WrittenValues(layout, self._shown.buffer)
        self._held = HeldValues()  # of `_received`; what parameters have does not count
        self._awaited = AwaitedValues(
            client, self.handle, layout, self._received, self._held, self._written
        )
        self.moves = LocalMoves(self.handle.table, layout, self._shown.buffer, optimizer)
        self._edit: FlatBuffer | None = None
        self.unrounded = UnroundedValues(client, self.handle, layout)
        self._arrivals: list[Arrival] = []
        self._staging: GradientStaging | None = None
        # Hooks run on autograd's threads, one for each device, one of which may end the last step;
        # copies end on another.
        self._lock = threading.RLock()
        self._is_ended = False  # the step is, so nothing leaves until the next one begins
        self._landing_terms: Hyperparameters = ()
        self._only: frozenset[int] | None = None
        self.pending = PendingTickets(client)
        self._pull: PullTicket[Pulled] | None = None
        self._pulled_blocks: range | None = None

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def _checks_finite(self) -> bool:
        """True if a step with a gradient that is not finite is skipped as a whole."""
        return not self.options.allow_non_finite and not self.options.applies_on_arrival

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPE[self.layout.dtype]

    @property
    def staging(self) -> GradientStaging:
        """The gradients; made at first use, because a table that sleeps has none."""
        with self._lock:
            if self._staging is None:
                staging = GradientStaging(
                    self.layout,
                    self.handle.table,
                    self.options.accumulate,
                    is_shared=self._client.connection.may_share_memory,
                    asks_finite=self._checks_finite,
                )
                staging.restrict(self._only)
                self._staging = staging
        return self._staging

    def wake(self) -> None:
        """One of its parameters is trained from now on."""
        if self.is_asleep:
            self.is_asleep = False
            self._received.pin()
            self._shown.buffer.pin()

    def _left_of_updates(self) -> PushResiduals | None:
        """ADD: what its codec has left of this worker's updates, if it sends a part of each."""
        push = self.handle.codecs.push
        sends_part = push is not None and push.codec.is_for_pushes_alone
        is_add = self._pushes_moves and not self._is_outer
        return self.handle.steps.residuals if is_add and sends_part else None

    # --- at the start

    def begin_assign(self) -> None:
        """Give the servers the parameters of rank 0; `finish` waits."""
        self._take_parameters()
        is_rounded = self.handle.codecs.pull is not None  # by the pull that overwrites them
        raw = self._received.raw
        self.handle.steps.initial_values = raw.copy() if is_rounded else raw
        step = self._client.tables.begin_assign(self.handle)
        step.push_blocks(blocks_in(self.handle.table, self._received.values))
        self.pending.add(step.seal())
        self._shown.take()
        self._written.wrote_all()
        for block in range(self.handle.table.block_count):  # as if it had pulled them
            self.handle.steps.peer_versions[block] = 0

    def check_as_given(self) -> None:
        """Refuse other parameters than those that an interrupted call has given the table."""
        if self.handle.steps.initial_values is not None:
            self._take_parameters()
            check_as_given(self.handle, self.layout, self._received)

    def _take_parameters(self) -> None:
        for entry, view in zip(self.layout.placed, self._received.views, strict=True):
            view.copy_(entry.tensor.detach())

    def begin_as_pulled(self) -> None:
        """Write the pulled values into the parameters, which begin with them."""
        self.write_parameters()
        if self.handle.steps.initial_values is not None:
            self.handle.steps.initial_values = self._received.raw

    # --- while backward runs

    def hooked(self, index: int, hyperparameters: Hyperparameters) -> None:
        """Stage the gradient of parameter `index` (its place in the layout); blocks that it
        completes leave, with the present hyperparameters if they are applied on arrival. Ends the
        last step, if an earlier call has not seen its end.
        """
        with self._lock:
            self.wait_pending()
            self._push(self.staging.hooked(index), hyperparameters)
            self._landing_terms = hyperparameters
            copy = self.staging.begun_copy()
        if copy is not None:
            LANDINGS.tell(copy, self._landed)

    def _landed(self) -> None:
        """Copies have ended: what they complete leaves."""
        with self._lock:
            if not self._is_ended and self._staging is not None:
                with contextlib.suppress(PushpullError):  # the step pushes it again, and says it
                    self._push(self._staging.landed(), self._landing_terms)

    def discard(self) -> None:
        """The gradients were zeroed: start the step over. Blocks that are applied on arrival cannot
        leave again: `check_final` refuses other gradients of theirs.
        """
        if self._staging is not None and not self.pending and self._eager is None:
            self._staging.discard()

    # --- a step of some blocks

    def restrict(self, blocks: Collection[int] | None) -> None:
        """Push only these blocks from now on; None: all."""
        self._only = None if blocks is None else frozenset(blocks)
        if self._staging is not None:
            self._staging.restrict(blocks)

    @property
    def is_restricted(self) -> bool:
        """True in a step of some blocks, perhaps only of other tables."""
        return self._only is not None

    @property
    def takes_part(self) -> bool:
        """True if any block of this table may be pushed."""
        return self._only is None or bool(self._only)

    def restricted_to(self) -> set[torch.Tensor]:
        """The parameters with elements in the blocks of this step."""
        blocks = range(self.handle.table.block_count) if self._only is None else self._only
        placed = self.layout.placed
        return {placed[s.tensor].tensor for b in blocks for s in self.handle.table.segments(b)}

    def pass_clock(self) -> None:
        """Seal a step in which this table has no part; `wait_pending` waits."""
        with self._lock:
            self.pending.add(self._client.tables.begin_step(self.handle).seal(skip=True))
            self._is_ended = True

    def check_parameters(self) -> None:
        """Refuse a model that was moved to another dtype, which the servers do not follow, and a
        gradient that they cannot take: before anything is sealed, so that a step can follow.
        """
        for entry in self.layout.placed:
            if entry.tensor.dtype is not self.dtype:
                raise InvalidConfig(
                    f"parameter '{entry.name}' is {entry.tensor.dtype}, and was {self.dtype} when "
                    "its optimizer was made; move the model to its dtype (model.double(), "
                    ".bfloat16(), .to(dtype)) before its optimizer is made"
                )
            gradient = None if self._pushes_moves else entry.tensor.grad
            if gradient is not None:
                check_dense(entry.name, entry.tensor, gradient)

    # --- edits

    def edited(self, *, looks: bool) -> list[int]:
        """The parameters that the script has changed since they were written, as places in the
        layout. Reads every parameter once (CPU), or waits for the device. A table that sleeps is
        read only if autograd knows of a change, or this call `looks`, because reading a large
        frozen model would cost as much as a pass through it.
        """
        self.await_values(len(self.layout.placed) - 1)
        if not self._written.is_known:
            return []
        if self.is_asleep and not (looks or self._written.is_touched):
            return []
        found = self._written.edited()
        if not found:
            self._written.mark()
        return found

    def edit(self, indexes: Collection[int], name: bytes, array: str = "") -> PushTicket:
        """End a step that is an edit: the servers take over these parameters, if all workers make
        the same edit. Then begin to pull the result; `finish` waits. Gradients that have left take
        no part.

        Args:
            indexes: the parameters, as places in the layout; empty if only other tables have any.
            name: the edit's.
            array: empty, or `VALUES_ARRAY` for parameters loaded together with optimizer state.
        """
        blocks: list[BlockValues] = []
        is_wide = bool(array) or self.unrounded.are_here
        if indexes:
            self._edit = FlatBuffer(self.layout, is_shared=self._client.connection.may_share_memory)
            for index in indexes:
                self._edit.views[index].copy_(self.layout.placed[index].tensor.detach())
            values = now = self._edit.values
            if is_wide:
                values = now.to(arithmetic_dtype(self.handle), copy=True)
                self.unrounded.put_into(values, now, self._received.values, indexes)
            for block, payload, _ in blocks_in(self.handle.table, values):
                present = tuple(s.tensor in indexes for s in self.handle.table.segments(block))
                if any(present):
                    blocks.append(BlockValues(block, payload, pack_presence(present)))
        return self._end_edit(blocks, name, array, is_wide=is_wide)

    def load(self, array: str, values: torch.Tensor | None, name: bytes) -> PushTicket:
        """End a step that is an edit of optimizer state; `finish` waits.

        Shapes:
            values: all elements of the table, 1-D, contiguous, in the dtype of the table's
            arithmetic; None if only other tables have any. They must not change before the step
            has ended.
        """
        blocks = () if values is None else blocks_in(self.handle.table, values)
        return self._end_edit(blocks, name, array)

    def _end_edit(
        self, blocks: Iterable[BlockValues], name: bytes, array: str, *, is_wide: bool = True
    ) -> PushTicket:
        with self._lock:
            step = self._client.tables.begin_step(self.handle)
            ticket = step.edit(blocks, name, array, is_wide=is_wide)
            self.pending.add(ticket)
            self._is_ended = True
        self._begin_result(None)
        return ticket

    def start_state_pull(self, array: str, values: torch.Tensor) -> PullTicket[Pulled]:
        """Begin to pull an array of optimizer state into `values`, of the shape of `load`'s."""
        raw = values.view(torch.uint8).numpy()
        return self._client.pulls.start_state(self.handle, raw, array)

    # --- when the step ends

    def check_final(self, hyperparameters: Hyperparameters) -> None:
        """Eager mode: refuse gradients and hyperparameters that changed after a block left."""
        changed = self.staging.changed_after_leaving()
        if changed is not None:
            raise GradientChangedAfterPush(
                f"the gradient of '{changed}' changed after it had been pushed to table "
                f"'{self.name}' in eager mode; {_REMEDIES}"
            )
        if self._eager is not None and self._eager != hyperparameters:
            before, now = dict(self._eager), dict(hyperparameters)
            for name in before.keys() | now.keys():
                if before.get(name) != now.get(name):
                    raise GradientChangedAfterPush(
                        f"'{name}' of table '{self.name}' is {now.get(name)} and was "
                        f"{before.get(name)} when the first gradients of this step left; in eager "
                        "mode change it right after step(), or use mode='sealed' (the default)"
                    )

    def push_rest(self, hyperparameters: Hyperparameters) -> str | None:
        """Push the blocks that have not left in their present form.

        Returns:
            Words for a gradient that is not finite, or that its codec cannot hold; then no more is
            pushed. None if all are finite, or need not be, or servers refuse them block by block
            (eager steps under ASP).
        """
        if self.is_followed or not self.takes_part:
            return None
        if self._pushes_moves:
            return self._push_moved()
        with self._lock:
            return self._push_staged(hyperparameters)

    def _push_staged(self, hyperparameters: Hyperparameters) -> str | None:
        for blocks in self.staging.arriving():
            if (beyond := self._push(blocks, hyperparameters)) is not None:
                return beyond
        blocks = self.staging.take()
        if self._checks_finite:
            bad = self.staging.non_finite()
            if bad is not None:
                return self.not_finite(bad)
        return self._push(blocks, hyperparameters)

    def _push_moved(self) -> str | None:
        """ADD: push the parameters' distance from the last pull; OUTER: its opposite, which is a
        gradient's direction. Returns as `push_rest`.
        """
        self._wait_arrivals()
        bad = self.moves.measure(
            is_shared=self._client.connection.may_share_memory,
            may_be_infinite=self.options.allow_non_finite,
        )
        if bad is not None:
            what = "pseudo-gradient" if self._is_outer else "gradient"
            return self.not_finite(bad.name, what)
        blocks = self.moves.blocks()
        if self._only is not None:
            blocks = (each for each in blocks if each.block in self._only)
        try:
            self._client.tables.begin_step(self.handle).push_blocks(blocks)
        except InvalidTensor as error:
            return error.message
        return None

    def non_finite_gradient(self) -> str:
        """Words for a gradient that is not finite; empty if all are. Reads those of the host, or
        waits for the device.
        """
        gradients = ((i, entry.tensor.grad) for i, entry in enumerate(self.layout.placed))
        values = ((i, None if g is None else stored_values(g.detach())) for i, g in gradients)
        dense = [(i, each) for i, each in values if each is not None]
        bad = true_numbers(non_finite([(i, each) for i, each in dense if not each.is_cpu]))
        bad.update(i for i, each in dense if each.is_cpu and not is_finite(each))
        return self.not_finite(self.layout.placed[min(bad)].name) if bad else ""

    @property
    def pushes_half(self) -> bool:
        """True if its codec refuses what float16 cannot hold."""
        push = self.handle.codecs.push
        return push is not None and push.codec is Codec.FP16 and not self.options.allow_non_finite

    def beyond_codec(self) -> str:
        """Words for a finite gradient that its codec cannot hold; empty without one."""
        gradients = ((e.name, e.tensor.grad) for e in self.layout.placed if self.pushes_half)
        for name, gradient in gradients:
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if not is_finite(gradient.detach().half()):
                return f"the gradient of '{name}' is {BEYOND_HALF}"
        return ""

    def not_finite(self, name: str, what: str = "gradient") -> str:
        """Words for a parameter's gradient that is not finite."""
        step = f"step {self.handle.clock + 1} of table '{self.name}'"
        return f"the {what} of '{name}' has an infinity or a NaN at {step}"

    def seal(
        self,
        hyperparameters: Hyperparameters,
        scale: StepScale,
        *,
        skip: bool,
        is_awaited: bool = False,
    ) -> PushTicket:
        """Seal the step, and begin to pull its result; `finish` waits for both, or, if the values
        are awaited when they are read, for the step and the first of them.
        """
        with self._lock:
            step = self._client.tables.begin_step(self.handle)
            ticket = step.seal(
                hyperparameters,
                contribution_scale=scale.contribution_scale,
                skip=skip,
                clip_scale=scale.clip_scale,
            )
            self.pending.add(ticket)
            self._is_ended = True
            self._was_skipped = skip
            self._shown.hide_left(is_hidden=False)
        if is_awaited:
            self._take_arrivals()
            self.pending.add(self._awaited.begin())
        else:
            self._begin_result(self.moves.fragment)
        return ticket

    def _begin_result(self, blocks: range | None) -> None:
        """Begin to pull the result of a step, unless another worker does."""
        if self.is_followed:
            self._prepare_pull()
            self._held.forget()
        else:
            self.begin_pull(blocks)

    def begin_pull(self, blocks: range | None = None) -> None:
        """Begin to pull the table, or some blocks, at this worker's clock; `finish` waits."""
        self._prepare_pull()
        self._pulled_blocks = blocks
        self._pull = self._client.pulls.start(
            self.handle, self._received.raw, held=self._held, blocks=blocks
        )
        self.pending.add(self._pull)

    def _prepare_pull(self) -> None:
        self._take_arrivals()
        self._written.begin()

    def _take_arrivals(self) -> None:
        self._wait_arrivals()
        self._arrivals.clear()

    def _wait_arrivals(self) -> None:
        """Wait until no copy to a device reads the last pull's values."""
        for arrival in self._arrivals:
            arrival.synchronize()

    @property
    def pulled_bytes(self) -> torch.Tensor:
        """The memory of the values that were pulled last."""
        return self._received.values.view(torch.uint8)

    @property
    def has_awaited(self) -> bool:
        """True if parameters have not got the values of the last step."""
        return bool(self._awaited)

    def await_values(self, index: int) -> None:
        """Wait for the values that the last step did not wait for, up to those of a parameter (its
        place in the layout), and write them. Any thread.
        """
        if self._awaited:
            with self._lock:
                self._arrivals += self._awaited.write(index)

    def wait_pending(self) -> None:
        """Wait for a step that an earlier call did not see the end of. A pull that has expired is
        begun again.
        """
        if self.pending or self._pull is not None:
            self._renew_pull()
            self._wait_tickets()
            self._ended()

    def _renew_pull(self) -> None:
        if self._pull is not None and self._pull.has_expired:
            self.begin_pull(self._pulled_blocks)

    def _wait_tickets(self) -> None:
        # Blocks that left before the step was found to be skipped may have been refused.
        self.pending.wait((InvalidTensor,) if self._was_skipped else ())

    def finish(self) -> Pulled | None:
        """Wait for the end of the step and of the pull; a pull that has expired is begun again.
        After an error, a later call waits for the rest.
        """
        self._renew_pull()
        pull = self._pull
        self.wait_pending()
        return None if pull is None else pull.future.result()

    def finish_failed(self) -> None:
        """After an error of `finish`: wait for the rest. A pull that failed is begun again."""
        self._wait_tickets()
        if self._pull is not None and self._pull.future.exception() is not None:
            self.begin_pull(self._pulled_blocks)
        self.finish()

    def begin_refresh(self) -> None:
        """Begin to pull the table between two steps, unless begun; `finish_refresh` waits."""
        if self._pull is None or self._pull.has_expired:
            self.begin_pull()

    def finish_refresh(self) -> None:
        """Wait for the pull; staged gradients stay. After an error, `begin_refresh` goes on."""
        self.pending.wait()
        self._pull = None

    def left(self) -> None:
        """A wait for the pull was given up: changes from now on are not overwritten."""
        self._written.left()

    def forget_left(self) -> None:
        """No pull is waited for any more: changes from now on are moves, or edits, as others."""
        self._written.forget_left()

    def write_parameters(self, but: Collection[int] = ()) -> Collection[int]:
        """Write the pulled values into the parameters, except `but` (places in the layout) and
        those that the script has changed since a wait was given up: they are edits of the next
        step. Values that are awaited are written when they are read. Returns the exceptions.
        """
        if self._awaited:
            if not self._written.is_known:
                self._written.left()
            return but
        but = {*but, *self._written.changed_since_left()}
        self._wait_arrivals()
        self._shown.take()
        pairs = zip(self.layout.placed, self._shown.buffer.views, strict=True)
        moves = [(entry.tensor, view) for i, (entry, view) in enumerate(pairs) if i not in but]
        with torch.no_grad():
            self._arrivals = from_host(moves)
        self._written.wrote_all(but)
        return but

    def write_common_values(self) -> None:
        """As `write_parameters`, of the values that all workers have: of none of them has what is
        still to be sent.
        """
        self._shown.hide_left(is_hidden=True)
        self.write_parameters()

    def take_result(self, result: StepResult | None, *, is_again: bool = False) -> bool:
        """OUTER: write the pulled values into the parameters, and keep how far inner steps moved
        them in blocks that the servers did not take; the next outer step pushes that. Returns True
        if there are any. The values of a fragment wait for `moves.merge`.

        Args:
            result: the step's; None: it was refused, and the servers took nothing of it.
            is_again: an earlier call has had it.
        """
        blocks = set(self.moves.exchanged if result is None else result.rejected)
        # Else the codec brings what was discarded.
        if result is not None and self.handle.steps.residuals is None:
            blocks.update(result.discarded_blocks)
        if self.moves.fragment is None:
            changed = self.write_parameters()
            if blocks:
                self.moves.move_again(blocks, but=changed)
        else:
            self.forget_left()
            if not is_again:  # it may be merged by now
                self.moves.arrived(blocks)
        return bool(blocks)

    def local_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """OUTER: the values that were pulled last, and those of the parameters: all elements of the
        table, 1-D, in host memory.
        """
        own = torch.empty_like(self._received.values)
        for entry, view in zip(self.layout.placed, self.layout.views(own), strict=True):
            view.copy_(entry.tensor.detach())
        return self._received.values, own

    def load_local(self, pulled: torch.Tensor, own: torch.Tensor) -> None:
        """OUTER: go on from the result of `local_values`."""
        self._held.forget()
        self._received.values.copy_(pulled)  # a copy to a device that still reads it is made again
        self.write_parameters()
        with torch.no_grad():
            for entry, view in zip(self.layout.placed, self.layout.views(own), strict=True):
                entry.tensor.copy_(view)

    def write_gradients(self, pulled: Pulled) -> None:
        """AGGREGATE: write the pulled sums into the gradients; None if absent at all workers."""
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
            # One memory format at all workers, because a norm is summed in the order of memory.
            if parameter.grad is None or parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter)
            moves.append((parameter.grad, self._received.views[index]))
        self._arrivals = from_host(moves)

    def _ended(self) -> None:
        with self._lock:
            self._pull = self._edit = self._eager = None
            self._was_skipped = False
            if self._staging is not None:
                self._staging.finish()
            self._is_ended = False

    def _push(self, blocks: list[BlockValues], hyperparameters: Hyperparameters) -> str | None:
        """Push blocks. Returns words for an element that the codec cannot hold: then they stay for
        `push_rest`, before which a script may clip them.
        """
        if not blocks:
            return None
        if self.options.applies_on_arrival and self._eager is None:
            self._eager = hyperparameters
        try:
            self._client.tables.begin_step(self.handle).push_blocks(blocks, eager=self._eager)
        except PushpullError as error:
            self.staging.stay([each.block for each in blocks])
            if not isinstance(error, InvalidTensor):
                raise
            return error.message
        return None
