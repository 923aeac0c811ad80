"""A table's handle and its steps, for a worker's training thread.

    handle = client.create_table(...)
    step = client.tables.begin_step(handle)    # clock = last sealed clock + 1
    step.push_blocks(blocks)                   # as often as a block changes; the last counts
    ticket = step.seal(hyperparameters=...)    # ends the step
    client.wait(ticket)                        # every server committed it

Rules:
    - A table has at most one open step; its clock is one more than the last sealed one.
    - The background thread reads a payload later, perhaps more than once: its memory must not
      change before the step's ticket is done, or before the block is pushed again.
    - A step has one future, which all its tickets share. The background thread completes it when
      every entry of the step has its outcome.
    - All network work is the background thread's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ps_core.codecs.int8_passes import Floats
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.keys import TableId
from ps_core.rows import Ids
from ps_core.tables.elements import NATIVE_CODEC, Codec, DType, check_length
from ps_core.tables.optimizers import Hyperparameters
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.system.future_waits import is_done
from ps_worker.compression.push_encoder import PushEncoder, StepEnd
from ps_worker.compression.table_codecs import OWN_CODECS, TableCodecs
from ps_worker.embedding.rows import RowBatch, cut_ids, payloads_of, rows_of
from ps_worker.spec.values import Array, BlockValues, Raw, merged, region_of, tensor_named
from ps_worker.steps.inner_steps import InnerSteps
from ps_worker.window.push_window import StepTerms

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step; `applied` is False if it was sealed with `skip`."""

    clock: int
    applied: bool
    staleness: int
    """SSP, ASP: the most updates by others to one of its blocks since this worker pulled it."""
    rejected: tuple[int, ...] = ()
    """ASP with a bound: the blocks that were too stale. Pull, then compute and push them anew."""
    discarded: bool = False
    """BSP with backup workers: some range of the table was updated without the step."""
    discarded_blocks: tuple[int, ...] = ()
    """The blocks of the step in such ranges; a codec with feedback brings them in later steps."""
    squares: Mapping[int, float] = field(default_factory=dict)
    """BSP with `clip_scale`: block -> the sum of the squares of the reduced gradient; the update
    waits for `Client.scale_update`. Else empty."""
    round_count: int = 0
    """`DistributedOptimizer.step(closure)`: the number of times that it computed rejected blocks
    anew. `clock` is that of the last time; `rejected` has the blocks that it gave up."""


class StepFuture(Future[StepResult]):
    """The end of a step.

    Attributes:
        squares: as of `StepResult`, of a step that has failed: pushes of it were refused, and its
            seals ended all the same. None: they did not, or it has not failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.squares: Mapping[int, float] | None = None


def after_round(earlier: StepResult, result: StepResult) -> StepResult:
    """The result of a step whose rejected blocks were computed anew, with this result."""
    return replace(
        earlier,
        clock=result.clock,
        staleness=max(earlier.staleness, result.staleness),
        rejected=result.rejected,
        round_count=earlier.round_count + 1,
    )


@dataclass(frozen=True, slots=True)
class Pulled:
    """The metadata of pulled values.

    Shapes:
        versions: block -> updates applied to it so far.
        presence: block -> bitmap of the tensors that had a gradient in this sum (AGGREGATE tables
            only, `ps_core.tables.elements.unpack_presence` reads it); blocks where all had one are
            absent.
    """

    clock: int
    """The lowest clock of the pulled ranges. BSP: the newest update that all of them have; else the
    slowest worker's clock."""
    versions: dict[int, int] = field(default_factory=dict)
    presence: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class PushTicket:
    """A step on one table; `client.wait` blocks until the servers committed it."""

    table: Table
    clock: int
    future: Future[StepResult]
    is_sealed: Callable[[], bool]

    def done(self) -> bool:
        """True once every entry of the step has its outcome; never blocks."""
        return is_done(self.future)

    def check_sealed(self) -> None:
        """Raises InvalidConfig if the step is still open, so that a wait would not end."""
        if not self.is_sealed():
            raise InvalidConfig(
                f"step {self.clock} of table '{self.table.spec.name}' has not been sealed, so it "
                "would never be committed; call client.seal(table) first, or push with seal=True"
            )


@dataclass(eq=False)
class PullTicket(Generic[ResultT]):
    """A pull in flight; `client.wait` blocks until its values are there and returns them."""

    table: Table
    future: Future[ResultT]

    def done(self) -> bool:
        """True once the pull has ended; never blocks."""
        return is_done(self.future)

    @property
    def has_expired(self) -> bool:
        """True if the pull has ended because its deadline passed."""
        return self.done() and isinstance(self.future.exception(), WaitExpired)


MAX_UNCOMMITTED_STEP_COUNT = 8
"""The most sealed steps of one table that are not committed; another one waits for the oldest."""

_ENCODED_COUNT = 2
"""Blocks that leave together once they are encoded: others are encoded while they travel."""

_MAX_SKEW = 8
"""The most clocks that the joins of one model's tables may be apart; tables further apart have
another reason, such as parameters that were unfrozen later."""


def skipped_clocks(missed_counts: Sequence[int]) -> tuple[int, ...]:
    """The number of clocks that a worker skips on each of the tables that it steps together, which
    have had `missed_counts` updates beyond its clock, made without it.

    The same number for all (SEMANTICS S7), so the clocks of two tables stay equally far apart for
    all workers. Otherwise two workers could wait for each other, each on another table, once the
    backup workers are no more.
    """
    count = min(missed_counts, default=0)
    return (count,) * len(missed_counts)


def passed(clocks: Sequence[int], first_clocks: Sequence[int]) -> tuple[int, ...]:
    """The number of empty steps that a worker that has joined after `clocks` ends on each table of
    a model, to reach the others. The tables began at `first_clocks`: a checkpoint may have had them
    a step apart, and they stay so for all workers.
    """
    taken = [clock - first for clock, first in zip(clocks, first_clocks, strict=True)]
    most = max(taken, default=0)
    return tuple(most - count if most - count <= _MAX_SKEW else 0 for count in taken)


class PushBody(NamedTuple):
    """A push of one block, opaque to the push window; `codec` None: the table's own."""

    block: int
    payload: memoryview
    presence: bytes
    eager: Hyperparameters | None
    pulled_peer_version: int | None
    is_assign: bool = False
    codec: Codec | None = None


class StepSink(Protocol):
    """Hands steps to the push driver on the background thread. Each call returns at once."""

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        """Begin a step; `future` is completed when it has ended."""

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        """Send blocks of an open step, in this order."""

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        """Withdraw all blocks of an open step except `but`."""

    def together(self, steps: Sequence[tuple[Table, int]]) -> None:
        """Have open steps, of these tables and clocks, take part in their updates all or none."""

    def seal(self, table: Table, clock: int, terms: StepTerms) -> None: ...


class TableStep:
    """This worker's step on a table, block by block; clock 0: initial values. Not thread-safe."""

    def __init__(self, table: Table, clock: int, sink: StepSink, steps: TableSteps) -> None:
        self.table = table
        self.clock = clock
        self._sink = sink
        self._steps = steps
        self._encoder = steps.encoder if clock else None  # initial values come whole
        self.is_sealed = False
        self._tensors: dict[int, BlockValues] = {}
        self._rows: tuple[Ids, npt.NDArray[Any]] | None = None  # all that were pushed
        width = NATIVE_CODEC[table.spec.dtype].element_bytes
        self._block_bytes = table.spec.block_elements * width
        self._last_block = table.block_count - 1
        self._last_bytes = table.block_length(self._last_block) * width
        future = StepFuture()
        self.ticket = PushTicket(table, clock, future, lambda: self.is_sealed)
        sink.open_step(table, clock, future)

    def push_blocks(
        self, blocks: Iterable[BlockValues], *, eager: Hyperparameters | None = None
    ) -> None:
        """Send blocks, in this order; a second push of a block in this step replaces the first.
        Never blocks: the window bounds the bytes in flight, not those handed over.

        Args:
            blocks: payloads in the table's own dtype. Not copied: they must not change before the
                step's ticket is done, or the block has been pushed again.
            eager: ASP tables: the hyperparameters that the seal will repeat; the servers then apply
                the blocks on arrival. None: at the seal.

        Raises:
            InvalidConfig: the step has been sealed.
            InvalidKeys, InvalidTensor: there is no such block, or it has another length, or an
                element that its codec cannot hold; then no block was sent of eager ones.
        """
        self._check_open()
        peer_versions, is_initial = self._steps.peer_versions, self.clock == 0
        encoder = self._encoder
        # What servers have applied cannot be pushed again, with the rest of a batch.
        is_whole = eager is not None and encoder is not None and encoder.may_refuse
        codec = None
        bodies = []
        for each in blocks:
            block, payload, presence = each
            self._check_length(block, payload)
            if encoder is not None:
                codec, coded = encoder.encode(self.clock, each, is_final=eager is not None)
                payload = coded.data
            seen = peer_versions.get(block)
            bodies.append(PushBody(block, payload, presence, eager, seen, is_initial, codec))
            if codec is not None and len(bodies) >= _ENCODED_COUNT and not is_whole:
                self._sink.submit(self.table, self.clock, bodies)
                bodies = []
        if bodies:
            self._sink.submit(self.table, self.clock, bodies)

    def edit(
        self,
        blocks: Iterable[BlockValues],
        edit: bytes,
        array: str = "",
        *,
        is_wide: bool = False,
    ) -> PushTicket:
        """Make the step an edit, and end it: these values replace those of the tensors present, if
        all workers make the same edit. Blocks pushed before are withdrawn.

        Args:
            blocks: as `push_blocks`; of optimizer state in the dtype of the table's arithmetic.
            edit: a name of all changes of the model, equal at every worker that made the same.
            array: the array of optimizer state that `blocks` replace; empty: the values.
            is_wide: `blocks` are in the dtype of the table's arithmetic, as state always is.

        Raises: as `push_blocks`. The ticket raises EditRefused unless all workers make this edit.
        """
        self._check_open()
        bodies = []
        codec = self.table.spec.arithmetic_codec if array or is_wide else None
        for block, payload, presence in blocks:
            if codec is not None:
                check_length(payload.nbytes, codec, self.table.block_length(block))
            else:
                self._check_length(block, payload)
            bodies.append(PushBody(block, payload, presence, None, None, True, codec))
        self._withdraw(frozenset(body.block for body in bodies))
        if bodies:
            self._sink.submit(self.table, self.clock, bodies)
        return self._end(StepTerms(edit=edit, array=array))

    def push_rows(self, ids: Ids, gradients: npt.NDArray[Any], *, is_last: bool = False) -> None:
        """Send gradients of rows, beside those that this step has pushed before; they are copied.

        Args:
            is_last: the step has no more of them.

        Shapes:
            gradients: (ids, length), in the table's dtype. An id may come several times.

        Raises:
            InvalidConfig: the step has been sealed, or has more rows of a partition than a message
                takes.
        """
        self._check_open()
        if self._rows is not None:
            ids = np.concatenate((self._rows[0], ids))
            gradients = np.concatenate((self._rows[1], gradients))
        elif not is_last:
            gradients = gradients.copy()
        self._rows = None if is_last else (ids, gradients)
        batch = cut_ids(ids, rows_of(self.table))
        self.push_bodies(self.row_bodies(batch, gradients, are_summed=False))

    def row_bodies(
        self, batch: RowBatch, gradients: npt.NDArray[Any], *, are_summed: bool
    ) -> list[PushBody]:
        """The pushes of rows, for `push_bodies`. Shapes, errors: as `payloads_of`."""
        seen = self._steps.peer_versions.get
        return [
            PushBody(block, payload, b"", None, seen(block))
            for block, payload in payloads_of(self.table, batch, gradients, are_summed=are_summed)
        ]

    def push_bodies(self, bodies: Sequence[PushBody]) -> None:
        """Send pushes of this step, in this order."""
        self._check_open()
        if bodies:
            self._sink.submit(self.table, self.clock, bodies)

    def withdraw(self) -> None:
        """Withdraw all that this step has pushed."""
        self._check_open()
        self._withdraw(frozenset())

    def _withdraw(self, but: frozenset[int]) -> None:
        if self._encoder is not None:
            self._encoder.keep_only(self.clock, ())
        self._sink.withdraw(self.table, self.clock, but)

    def push_tensors(self, blocks: Iterable[BlockValues]) -> None:
        """Send tensors of blocks, beside those that this step has pushed of them before."""
        whole = []
        for block in blocks:
            older = self._tensors.get(block.block)
            if older is not None and block.presence:
                block = merged(self.table, older, block)
            self._tensors[block.block] = block
            whole.append(block)
        self.push_blocks(whole)

    def seal(
        self,
        hyperparameters: Hyperparameters = (),
        *,
        contribution_scale: float = 1.0,
        skip: bool = False,
        last: bool = False,
        clip_scale: float | None = None,
    ) -> PushTicket:
        """End the step; the seals leave when every block has been received everywhere.

        Args:
            hyperparameters: this step's, sorted by name; the table's fill in.
            contribution_scale: a factor of this worker's gradients.
            skip: the step takes no part in the update (an overflow of mixed precision).
            last: the final seal: from the next clock on no worker waits for this one.
            clip_scale: clip the gradient by its norm: a factor of this worker's own where each step
                is an update of its own. Under BSP the update waits for `TableSteps.scale`.

        Raises:
            InvalidConfig: sealed already, or a hyperparameter that the table's optimizer lacks, or
                a scale that is not finite and above 0.
        """
        self._check_open()
        for name, scale in (("contribution_scale", contribution_scale), ("clip_scale", clip_scale)):
            if scale is not None and not 0.0 < scale < math.inf:
                raise InvalidConfig(f"{name} is {scale}; expected finite and above 0")
        if hyperparameters:
            self.table.spec.optimizer.merged(hyperparameters)
        return self._end(StepTerms(hyperparameters, contribution_scale, skip, last, clip_scale))

    def together(self, others: Iterable[TableStep]) -> None:
        """Have this step and open ones of other tables take part in their updates all or none: none
        does if a server refuses a push of one. Seal them all after this.
        """
        self._sink.together([(each.table, each.clock) for each in (self, *others)])

    def _end(self, terms: StepTerms) -> PushTicket:
        self.is_sealed = True
        if self._encoder is not None:
            takes_part = not terms.skip  # an edit has withdrawn what was pushed
            self._encoder.sealed(
                self.clock,
                terms.contribution_scale,
                takes_part=takes_part,
                clip_scale=terms.clip_scale,
            )
        self._rows = None
        self._tensors = {}  # the ticket and this step hold each other: free the values now
        self._steps.sealed(self)
        self._sink.seal(self.table, self.clock, terms)
        return self.ticket

    def _check_length(self, block: int, payload: memoryview) -> None:
        expected_bytes = self._last_bytes if block == self._last_block else self._block_bytes
        if payload.nbytes != expected_bytes or not 0 <= block <= self._last_block:
            codec = NATIVE_CODEC[self.table.spec.dtype]
            check_length(payload.nbytes, codec, self.table.block_length(block))

    def _check_open(self) -> None:
        if self.is_sealed:
            step = f"step {self.clock} of table '{self.table.spec.name}'"
            raise InvalidConfig(f"{step} has been sealed; begin the next")


class TableSteps:
    """This worker's clock on one table, its open step, and the versions its pulls saw. Thread-safe.

    Args:
        is_alone: True if the worker trains no other table. Only then does a pull alone take it past
            updates made without it, because a clock is skipped on all tables that are stepped
            together, or on none (SEMANTICS S7).
        joins: others train the table already; the first pull gives the clock where it begins.
        encoder: of pushes; None: they are in the table's own codec.

    Attributes:
        clock: of the last step that this worker sealed on the table, or skipped.
        owed_count: clocks to skip before the first step, as on earlier tables.
        skipped_count: clocks that the worker skipped here while it trained only tables that it
            steps together with this one: a later table skips as many.
        residuals: what the encoder has left; None: it leaves nothing.
        peer_versions: of each block, the peer version that the last pull has seen.
        initial_values: the bytes of the values that an optimizer has given the table, until it is
            made: it may be made again, if that was interrupted.
        turn: held by a thread while it pushes or seals, so that each has steps of its own, and
            what it posts comes whole.
    """

    def __init__(
        self,
        table: Table,
        sink: StepSink,
        *,
        is_alone: Callable[[], bool] = lambda: True,
        joins: bool = False,
        owed_count: int = 0,
        encoder: PushEncoder | None = None,
    ) -> None:
        self.table = table
        self.encoder = encoder
        leaves = encoder is not None and encoder.has_residuals
        self.residuals = PushResiduals(self, encoder) if encoder and leaves else None
        self.owed_count = self.skipped_count = 0 if joins else owed_count
        self._sink = sink
        self._is_alone = is_alone
        self._joins = joins
        self._lock = threading.Lock()
        self.turn = threading.RLock()
        self.clock = self._newest_clock = table.restored_clock or 0
        self.peer_versions: dict[int, int] = {}
        self.initial_values: Raw | None = None
        self._open: TableStep | None = None
        self._assign: TableStep | None = None
        self._tickets: list[PushTicket] = []
        self._not_ended: list[PushTicket] = []  # steps that the encoder has to learn the end of

    def open_step(self) -> TableStep:
        """The open step; begins one if there is none."""
        with self._lock:
            if self._open is None:
                self._learn_ends()
                self._open = TableStep(self.table, self.clock + 1, self._sink, self)
            return self._open

    def learn_ends(self) -> None:
        """Have the encoder know what came of the steps that have ended."""
        with self._lock:
            self._learn_ends()

    def _learn_ends(self) -> None:
        if self.encoder is None:
            return
        ended = [ticket for ticket in self._not_ended if ticket.done()]
        for ticket in ended:
            self._not_ended.remove(ticket)
            self.encoder.ended(ticket.clock, _end_of(ticket.future))

    def assign_step(self) -> TableStep:
        """The step of clock 0 that gives initial values; InvalidConfig if they have been given."""
        with self._lock:
            if self._assign is None:
                self._assign = TableStep(self.table, 0, self._sink, self)
            if self._assign.is_sealed:
                raise InvalidConfig(
                    f"table '{self.table.spec.name}' has been given its initial values already"
                )
            return self._assign

    @property
    def has_assigned(self) -> bool:
        """True if this worker has given the initial values, and no server has refused them."""
        with self._lock:
            if self._assign is None or not self._assign.is_sealed:
                return False
            future = self._assign.ticket.future
        return not (future.done() and (future.cancelled() or future.exception() is not None))

    def sealed(self, step: TableStep) -> None:
        with self._lock:
            if len(self._tickets) >= MAX_UNCOMMITTED_STEP_COUNT:
                self._tickets = [ticket for ticket in self._tickets if not ticket.done()]
            self._tickets.append(step.ticket)
            if self.encoder is not None:
                self._not_ended.append(step.ticket)
            if step.clock:
                self.clock, self._open = step.clock, None

    def scale(self, clock: int, scale: float) -> PushTicket:
        """Give the factor of the update of a step that was sealed with a `clip_scale` and has ended
        with `squares`. The ticket is done when every range has applied the update.
        """
        future: Future[StepResult] = Future()
        ticket = PushTicket(self.table, clock, future, lambda: True)
        self._sink.open_step(self.table, clock, future)
        self._sink.seal(self.table, clock, StepTerms(update_scale=scale))
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def uncommitted(self) -> list[PushTicket]:
        """Sealed steps that have not ended, oldest first."""
        with self._lock:
            self._tickets = [ticket for ticket in self._tickets if not ticket.done()]
            return list(self._tickets)

    def oldest_of_too_many(self) -> PushTicket | None:
        """The oldest sealed step that has not ended, if there are the most allowed."""
        is_many = len(self._tickets) >= MAX_UNCOMMITTED_STEP_COUNT
        tickets = self.uncommitted() if is_many else []
        return tickets[0] if len(tickets) >= MAX_UNCOMMITTED_STEP_COUNT else None

    def reached(self, clock: int) -> None:
        """Take note that a pull found the whole table at `clock`, perhaps past this worker's."""
        with self._lock:
            self._newest_clock = max(self._newest_clock, clock)
            is_begin, self._joins = self._joins, False
        if is_begin:
            self.skip_clocks(self.missed_count, is_owed=False)
        elif self.missed_count and self._is_alone():
            self.skip_clocks(self.missed_count)

    @property
    def is_to_join(self) -> bool:
        """True if others train the table, and this worker does not know yet where it begins."""
        return self._joins

    @property
    def has_open_step(self) -> bool:
        return self._open is not None

    @property
    def missed_count(self) -> int:
        """The updates made without this worker beyond its clock, as far as it knows."""
        return max(self._newest_clock - self.clock, 0)

    def skip_clocks(self, count: int, *, is_owed: bool = True) -> None:
        """Skip clocks whose updates were made without this worker, unless a step is open."""
        with self._lock:
            if self._open is None:
                self.clock += count
                self.skipped_count += count if is_owed else 0


def _end_of(future: Future[StepResult]) -> StepEnd:
    """The end of a step, for the encoder of its pushes."""
    if future.exception() is not None:
        return StepEnd(takes_effect=False)
    found = future.result()
    return StepEnd(found.applied, found.discarded_blocks, found.rejected, bool(found.squares))


class PushResiduals:
    """The rounding errors that a table's pushes have left for the next ones, for checkpoints.

    Attributes:
        await_ends: waits for steps that are on their way; the owner sets it.
        are_shown: the worker's parameters may have them; the owner sets it.
    """

    def __init__(self, steps: TableSteps, encoder: PushEncoder) -> None:
        self.are_shown = True
        self.await_ends: Callable[[], None] = lambda: None
        self._steps = steps
        self._encoder = encoder

    def of_block(self, block: int) -> Floats:
        """The rounding errors of a block, as far as `learn_ends` knows, in the unit of what is
        pushed. Shapes: (its elements,).
        """
        return self._encoder.left_of(block)

    def learn_ends(self) -> None:
        """Learn what came of the steps that have ended."""
        self._steps.learn_ends()

    def state_dict(self) -> dict[str, Any]:
        self.await_ends()
        self._steps.learn_ends()
        return {**self._encoder.state_dict(), "are_shown": self.are_shown}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._encoder.load_state_dict(state_dict)
        self.are_shown = state_dict.get("are_shown", True)

    def take_over(self, state_dict: Mapping[str, Any]) -> None:
        """Add what another worker has left, which does not come back."""
        self._encoder.take_over(state_dict)


class TableHandle:
    """A table for the client's verbs; `create_table` and `table` return it.

    A handle belongs to its client. Two calls for the same table give the same handle.
    """

    def __init__(self, table: Table, steps: TableSteps, codecs: TableCodecs = OWN_CODECS) -> None:
        self.table = table
        self.steps = steps
        self.codecs = codecs
        self.inner_steps = InnerSteps()

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.spec.name

    @property
    def spec(self) -> TableSpec:
        """The table's specification, with every default filled in."""
        return self.table.spec

    @property
    def dtype(self) -> DType:
        """The element type of pushes and pulls."""
        return self.table.spec.dtype

    @property
    def element_count(self) -> int:
        """The number of elements of the table."""
        return self.table.spec.element_count

    @property
    def clock(self) -> int:
        """The number of steps that this worker has sealed on the table; 0 for readers."""
        return self.steps.clock

    @property
    def step_count(self) -> int:
        """The steps that this worker has taken on the table, inner ones included."""
        return self.inner_steps.at(self.clock)

    def tensor(self, flat: Array, name: str) -> Array:
        """The tensor `name` within `flat`, as a view.

        Shapes:
            flat: 1-D, all elements of the table, as `client.pull(table)` gives it for a layout.

        Raises:
            InvalidKeys: the table has no such tensor.
        """
        tensor = tensor_named(self.table, name)
        part: Array = flat[tensor.offset : tensor.offset + tensor.element_count]
        return part.reshape(tensor.shape)

    def tensors(self, flat: Array) -> dict[str, Array]:
        """All tensors within `flat`, by name, as views."""
        return {tensor.name: self.tensor(flat, tensor.name) for tensor in self.spec.tensors}

    def shape_of(self, part: slice | str | None = None) -> tuple[int, ...]:
        """The shape of a pull of that slice of the table.

        Raises:
            InvalidKeys: the table has no such slice.
        """
        return region_of(self.table, part).shape

    def __repr__(self) -> str:
        return (
            f"TableHandle({self.name!r}, {self.element_count} elements of {self.dtype.value}, "
            f"{self.table.block_count} blocks, clock {self.clock})"
        )


def check_handle(table: object) -> None:
    """Raises InvalidConfig if `table` is not a handle; callers mostly give its name instead."""
    if isinstance(table, TableHandle):
        return
    if isinstance(table, str):
        raise InvalidConfig(
            f"table is the name '{table}'; expected the handle that create_table returned, or "
            f"client.table('{table}')"
        )
    raise InvalidConfig(
        f"table is {type(table).__name__}; expected the handle that create_table or table returned"
    )


def check_own(table: TableHandle, handles: Mapping[TableId, TableHandle]) -> None:
    """InvalidConfig for a handle that is none of these: of another client."""
    check_handle(table)
    if handles.get(table.table.table_id) is not table:
        raise InvalidConfig(f"the handle of table '{table.name}' belongs to another client")


def checked_hyperparameters(
    table: TableHandle, given: Mapping[str, float] | None
) -> Hyperparameters:
    """The hyperparameters of a step, sorted; InvalidConfig if the table's optimizer lacks one."""
    check_handle(table)
    if not given:
        return ()
    found = tuple(sorted((name, float(value)) for name, value in given.items()))
    table.spec.optimizer.merged(found)
    return found
