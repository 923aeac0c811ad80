"""A table as a worker's training thread sees it: its handle, and the steps on it.

    handle = client.create_table(...)
    step = client.tables.begin_step(handle)    # clock = last sealed clock + 1
    step.push_blocks(parts)                    # as often as a block changes; the last counts
    ticket = step.seal(hyperparameters=...)    # the end: nothing may be pushed to it now
    client.wait(ticket)                        # every server committed it

Rules:
    - A table has at most one open step; its clock is one more than the last sealed one.
    - A payload is read on the background thread, later and perhaps more than once: its memory must
      not change before the step's ticket is done, or before the block is pushed again.
    - A step has one future, completed on the background thread when every entry of the step has its
      outcome; all tickets of the step share it.
    - A ticket of a step that has not been sealed is never waited for: that would hang, so it
      raises.

What it deliberately does not do: network; everything is handed to the background thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ps_core.codec import check_length
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.tables import NATIVE_CODEC, DType, Hyperparameters, Table, TableSpec
from ps_worker.spec.values import Array, BlockPart, merged, region_of, tensor_named
from ps_worker.window.push_window import SealTerms

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step ended: `applied` is False where it was sealed with skip."""

    clock: int
    applied: bool
    staleness: int
    """SSP, ASP: the most updates by others to one of its blocks since this worker pulled it."""
    rejected: tuple[int, ...] = ()
    """ASP with a bound: the blocks that were too stale. Pull, then compute and push them anew."""
    discarded: bool = False
    """BSP with backup workers: some part of the table formed its update without the step."""
    squares: Mapping[int, float] = field(default_factory=dict)
    """BSP with `clip_scale`: of each block, the sum of the squares of the reduced gradient; the
    update waits for `Client.scale_update`. Else empty."""
    round_count: int = 0
    """`DistributedOptimizer.step(closure)`: how often it computed rejected blocks anew. `clock` is
    that of the last time, and `rejected` what was given up."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought beside the values.

    Shapes:
        versions: block -> updates applied to it so far.
        presence: block -> bitmap of the tensors that had a gradient in this sum (AGGREGATE tables
            only, `ps_core.tables.unpack_presence` reads it); blocks where all had one are absent.
    """

    clock: int
    """The lowest clock of the ranges read. BSP: the newest update that all of it holds; else the
    slowest worker's clock."""
    versions: dict[int, int] = field(default_factory=dict)
    presence: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class PushTicket:
    """A step on one table, or a part of it; `client.wait` blocks until the servers committed it."""

    table: Table
    clock: int
    future: Future[StepResult]
    is_sealed: Callable[[], bool]

    def done(self) -> bool:
        """Whether every entry of the step has its outcome; never blocks."""
        return self.future.done()

    def check_sealed(self) -> None:
        """Refuse to wait for a step that nobody has sealed.

        Raises:
            InvalidConfig: the step is still open.
        """
        if not self.is_sealed():
            raise InvalidConfig(
                f"step {self.clock} of table '{self.table.spec.name}' has not been sealed, so it "
                "would never be committed; call client.seal(table) first, or push with seal=True"
            )


@dataclass(eq=False)
class PullTicket(Generic[ResultT]):
    """A pull on its way; `client.wait` blocks until its values are there and returns them."""

    table: Table
    future: Future[ResultT]

    def done(self) -> bool:
        """Whether the pull has ended; never blocks."""
        return self.future.done()

    @property
    def has_expired(self) -> bool:
        """Whether the pull has ended because its time was up."""
        return self.done() and isinstance(self.future.exception(), WaitExpired)


def wait_until_ended(futures: Sequence[Future[Any]], timeout_s: float) -> None:
    """Wait until all are done, or the first has failed, or time is up: as
    `concurrent.futures.wait` does, in fewer calls, which a small `push_pull` feels.

    Blocking: up to `timeout_s`; Ctrl-C interrupts it.
    """
    numbers = itertools.count(1)
    ended = threading.Lock()
    ended.acquire()

    def note(future: Future[Any]) -> None:
        if next(numbers) == len(futures) or future.cancelled() or future.exception() is not None:
            with contextlib.suppress(RuntimeError):  # a failure has ended the wait before
                ended.release()

    for future in futures:
        future.add_done_callback(note)
    if futures:
        ended.acquire(timeout=timeout_s)


MAX_UNCOMMITTED_STEP_COUNT = 8
"""Sealed steps of one table that may be on their way; beginning another waits for the oldest."""


_MAX_SKEW = 8
"""Clocks that the joins of one model's tables may be apart; tables further apart are so for a
reason, such as parameters that were unfrozen later."""


def left_out(missed_counts: Sequence[int]) -> tuple[int, ...]:
    """How many clocks a worker leaves out on each of the tables that it steps together.

    Args:
        missed_counts: of each table, how many updates have formed without the worker beyond its
            clock.

    Returns:
        The same number for all (SEMANTICS S7): between two tables the clocks of all workers stay
        equally far apart. So nobody who has to be waited for on one table waits on another for who
        waits for it, when there are backup workers no more.
    """
    count = min(missed_counts, default=0)
    return (count,) * len(missed_counts)


def passed(clocks: Sequence[int], first_clocks: Sequence[int]) -> tuple[int, ...]:
    """How many steps a worker that joins ends with nothing on each table of a model, to be where
    the others are.

    Args:
        clocks: of each table, after which it has joined.
        first_clocks: where each table began: a checkpoint may have had them a step apart, and they
            have been for everybody since.
    """
    taken = [clock - first for clock, first in zip(clocks, first_clocks, strict=True)]
    most = max(taken, default=0)
    return tuple(most - count if most - count <= _MAX_SKEW else 0 for count in taken)


class PushBody(NamedTuple):
    """What a push says of one block, opaque to the push window; the payload is in the table's own
    codec, or, of optimizer state, in that of its arithmetic.
    """

    block: int
    payload: memoryview
    presence: bytes
    eager: Hyperparameters | None
    pulled_peer_version: int | None
    is_assign: bool = False
    is_state: bool = False


class StepSink(Protocol):
    """The way to the push driver on the background thread. Each call returns at once."""

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        """A step begins; `future` is completed when it has ended."""

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody], priority: int) -> None:
        """Blocks of an open step, in the order in which they shall leave."""

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        """Withdraw all blocks of an open step but these."""

    def seal(self, table: Table, clock: int, terms: SealTerms) -> None:
        """The end of a step."""


class Step:
    """One step of this worker on one table, written block by block. Not thread-safe.

    Made by `Tables.begin_step` of a client, or `begin_assign` for initial values (clock 0).
    """

    def __init__(self, table: Table, clock: int, sink: StepSink, steps: TableSteps) -> None:
        self.table = table
        self.clock = clock
        self._sink = sink
        self._steps = steps
        self._sealed = False
        self._parts: dict[int, BlockPart] = {}
        width = NATIVE_CODEC[table.spec.dtype].element_bytes
        self._block_bytes = table.spec.block_elements * width
        self._last_block = table.block_count - 1
        self._last_bytes = table.block_length(self._last_block) * width
        future: Future[StepResult] = Future()
        self.ticket = PushTicket(table, clock, future, lambda: self._sealed)
        sink.open_step(table, clock, future)

    @property
    def is_sealed(self) -> bool:
        """True once the step has ended for its worker."""
        return self._sealed

    def push_blocks(
        self,
        parts: Iterable[BlockPart],
        *,
        priority: int = 0,
        eager: Hyperparameters | None = None,
    ) -> None:
        """Send blocks; a second push of a block in this step replaces the first.

        Args:
            parts: the blocks, in the order in which they shall leave; handed over together.
            priority: lower goes first where the window is full.
            eager: ASP tables: the hyperparameters that the seal will repeat; the blocks are then
                applied on arrival. None (default) holds them until the seal.

        Shapes:
            parts: payloads in the table's own dtype. Not copied: they must not change before the
            step's ticket is done, or the block has been pushed again.

        Blocking: no; the window bounds what is in flight, not what is handed over.

        Raises:
            InvalidConfig: the step has been sealed.
            InvalidKeys: there is no such block.
            InvalidTensor: a payload has another length than its block.
        """
        self._check_open()
        peer_version = self._steps.pulled_peer_version
        bodies = []
        for block, payload, presence in parts:
            self._check_length(block, payload)
            is_initial = self.clock == 0
            bodies.append(
                PushBody(block, payload, presence, eager, peer_version(block), is_initial)
            )
        if bodies:
            self._sink.submit(self.table, self.clock, bodies, priority)

    def edit(self, parts: Iterable[BlockPart], edit: bytes, array: str = "") -> PushTicket:
        """Make an edit of the step, and end it: these values replace those of the tensors present,
        if all workers say the same edit. What was pushed before takes no part.

        Args:
            parts: the blocks with tensors that were changed.
            edit: names all that was changed in the model, alike at every worker that did the same.
            array: of optimizer state, that they are of; empty means the values.

        Shapes:
            parts: as `push_blocks` has them; of optimizer state in the dtype of the table's
            arithmetic.

        Raises: as `push_blocks`.

        Blocking: no. The ticket raises EditRefused where the workers do not all mean this.
        """
        self._check_open()
        bodies = []
        for block, payload, presence in parts:
            if array:
                length = self.table.block_length(block)
                check_length(payload.nbytes, self.table.spec.arithmetic_codec, length)
            else:
                self._check_length(block, payload)
            body = PushBody(block, payload, presence, None, None, True, bool(array))
            bodies.append(body)
        self._sink.withdraw(self.table, self.clock, frozenset(body.block for body in bodies))
        if bodies:
            self._sink.submit(self.table, self.clock, bodies, 0)
        return self._end(SealTerms(edit=edit, array=array))

    def push_parts(self, parts: Iterable[BlockPart]) -> None:
        """Send tensors of blocks, beside those that this step has pushed of them before."""
        whole = []
        for part in parts:
            older = self._parts.get(part.block)
            if older is not None and part.presence:
                part = merged(self.table, older, part)
            self._parts[part.block] = part
            whole.append(part)
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
            hyperparameters: this step's numbers, sorted by name; those left out are the table's.
            contribution_scale: this worker's gradients are multiplied by it.
            skip: the step takes no part in the update (an overflow of mixed precision).
            last: from the next clock on nobody waits for this worker.
            clip_scale: the gradient is clipped by its norm: what this worker's own is multiplied by
                where each step is an update of its own. Under BSP the update waits for
                `TableSteps.scale`.

        Blocking: no.

        Raises:
            InvalidConfig: sealed already, or a hyperparameter that the table's optimizer lacks.
        """
        self._check_open()
        if hyperparameters:
            self.table.spec.optimizer.merged(hyperparameters)
        return self._end(SealTerms(hyperparameters, contribution_scale, skip, last, clip_scale))

    def _end(self, terms: SealTerms) -> PushTicket:
        self._sealed = True
        self._parts = {}  # its ticket and this step hold each other: the values shall not wait
        self._steps.sealed(self)
        self._sink.seal(self.table, self.clock, terms)
        return self.ticket

    def _check_length(self, block: int, payload: memoryview) -> None:
        expected_bytes = self._last_bytes if block == self._last_block else self._block_bytes
        if payload.nbytes != expected_bytes or not 0 <= block <= self._last_block:
            codec = NATIVE_CODEC[self.table.spec.dtype]
            check_length(payload.nbytes, codec, self.table.block_length(block))

    def _check_open(self) -> None:
        if self._sealed:
            raise InvalidConfig(
                f"step {self.clock} of table '{self.table.spec.name}' has been sealed; begin the "
                "next"
            )


class TableSteps:
    """The clock of this worker on one table, its open step, and what its pulls have seen.

    Thread-safe.

    Args:
        table: the table.
        sink: where its steps go.
        is_alone: whether the worker trains nothing beside it. Only then does a pull alone take it
            past updates that formed without it: a clock is left out on all tables that are stepped
            together, or on none (SEMANTICS S7).
        joins: whether others train the table already: the first pull says where its worker begins.
        owed_count: how many clocks its worker had left out when the table was made.

    Attributes:
        owed_count: clocks that are to be passed before the first step.
        left_out_count: clocks that the worker left out here while it trained no other table than
            those that it steps together with this one: a later table passes as many.
    """

    def __init__(
        self,
        table: Table,
        sink: StepSink,
        *,
        is_alone: Callable[[], bool] = lambda: True,
        joins: bool = False,
        owed_count: int = 0,
    ) -> None:
        self.table = table
        self.owed_count = 0 if joins else owed_count
        self.left_out_count = 0 if joins else owed_count
        self._sink = sink
        self._is_alone = is_alone
        self._joins = joins
        self._lock = threading.Lock()
        self._clock = self._newest_clock = table.restored_clock or 0
        self._open: Step | None = None
        self._assign: Step | None = None
        self._tickets: list[PushTicket] = []
        self._peer_versions: dict[int, int] = {}

    @property
    def clock(self) -> int:
        """The clock of the last step that this worker sealed on the table, or of the newest update
        that formed without it.
        """
        return self._clock

    def open_step(self) -> Step:
        """The open step; begins one if there is none."""
        with self._lock:
            if self._open is None:
                self._open = Step(self.table, self._clock + 1, self._sink, self)
            return self._open

    def assign_step(self) -> Step:
        """The step of clock 0 that gives initial values.

        Raises:
            InvalidConfig: the values have been given.
        """
        with self._lock:
            if self._assign is None:
                self._assign = Step(self.table, 0, self._sink, self)
            if self._assign.is_sealed:
                raise InvalidConfig(
                    f"table '{self.table.spec.name}' has been given its initial values already"
                )
            return self._assign

    def sealed(self, step: Step) -> None:
        """`step` has ended for this worker."""
        with self._lock:
            if len(self._tickets) >= MAX_UNCOMMITTED_STEP_COUNT:
                self._tickets = [ticket for ticket in self._tickets if not ticket.done()]
            self._tickets.append(step.ticket)
            if step.clock:
                self._clock, self._open = step.clock, None

    def scale(self, clock: int, scale: float) -> PushTicket:
        """Say what the update of a step is multiplied by, which was sealed with a `clip_scale` and
        has ended with `squares`. Its ticket is done when every range has applied it.

        Blocking: no.
        """
        future: Future[StepResult] = Future()
        ticket = PushTicket(self.table, clock, future, lambda: True)
        self._sink.open_step(self.table, clock, future)
        self._sink.seal(self.table, clock, SealTerms(update_scale=scale))
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def uncommitted(self) -> list[PushTicket]:
        """Sealed steps that have not ended, oldest first."""
        with self._lock:
            return [ticket for ticket in self._tickets if not ticket.done()]

    def oldest_of_too_many(self) -> PushTicket | None:
        """The oldest sealed step that has not ended, if there are as many as may be."""
        if len(self._tickets) < MAX_UNCOMMITTED_STEP_COUNT:
            return None
        tickets = self.uncommitted()
        return tickets[0] if len(tickets) >= MAX_UNCOMMITTED_STEP_COUNT else None

    def reached(self, clock: int) -> None:
        """A pull of the whole table found it at `clock`, perhaps without this worker."""
        with self._lock:
            self._newest_clock = max(self._newest_clock, clock)
            is_begin, self._joins = self._joins, False
        if is_begin:
            self.leave_out(self.missed_count, is_owed=False)
        elif self._is_alone():
            self.leave_out(self.missed_count)

    @property
    def has_open_step(self) -> bool:
        """Whether a step was begun that is not sealed."""
        return self._open is not None

    @property
    def missed_count(self) -> int:
        """Updates that have formed without this worker beyond its clock, as far as it knows."""
        return max(self._newest_clock - self._clock, 0)

    def leave_out(self, count: int, *, is_owed: bool = True) -> None:
        """So many clocks are left out, whose updates have formed without this worker: its next step
        is for the one after them. An open step stays what it is, and the next takes its turn.
        """
        with self._lock:
            if self._open is None:
                self._clock += count
                self.left_out_count += count if is_owed else 0

    def saw(self, block: int, peer_version: int) -> None:
        """A pull brought `block` with that peer version."""
        self._peer_versions[block] = peer_version

    def pulled_peer_version(self, block: int) -> int | None:
        """What the last pull of the block brought; None if it was never pulled."""
        return self._peer_versions.get(block)


class TableHandle:
    """What `create_table` and `table` hand back; pass it to the client's verbs.

    A handle belongs to its client. Two calls for the same table give the same handle.
    """

    def __init__(self, table: Table, steps: TableSteps) -> None:
        self.table = table
        self.steps = steps

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.spec.name

    @property
    def spec(self) -> TableSpec:
        """What the table is, every default filled in."""
        return self.table.spec

    @property
    def dtype(self) -> DType:
        """The element type of pushes and pulls."""
        return self.table.spec.dtype

    @property
    def element_count(self) -> int:
        """Elements of the table."""
        return self.table.spec.element_count

    @property
    def clock(self) -> int:
        """Steps that this worker has sealed on the table; 0 for readers."""
        return self.steps.clock

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
        """The shape in which a pull gives that part of the table.

        Raises:
            InvalidKeys: the table has no such part.
        """
        return region_of(self.table, part).shape

    def __repr__(self) -> str:
        return (
            f"TableHandle({self.name!r}, {self.element_count} elements of {self.dtype.value}, "
            f"{self.table.block_count} blocks, clock {self.clock})"
        )


def check_handle(table: object) -> None:
    """Refuse what is no handle; a table's name is what is mostly given instead.

    Raises:
        InvalidConfig: it is none.
    """
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
