"""The client: the verbs on tables, over a session with a cluster. Its parts carry out those that
need nothing else of it, and have their documentation.

For code that moves blocks itself, as `DistributedOptimizer` does, a second level copies nothing:
`Client.tables` (`begin_step` gives a `ps_worker.steps.steps.TableStep`) and `Client.pulls`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sized
from dataclasses import replace
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, overload

import numpy.typing as npt

from ps_core.cluster_view import Session
from ps_core.consistency import Consistency, parsed
from ps_core.errors import InvalidConfig
from ps_core.manifest import DataSetSpec
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.client.adaptive_batches import AdaptiveBatches
from ps_worker.client.checkpoints import ClientCheckpoints
from ps_worker.client.collectives import CollectiveCalls
from ps_worker.client.connection import ClientConnection, Ticket
from ps_worker.client.data_shards import DataShards
from ps_worker.client.open_clients import OPEN, Awaiting, has_worker, is_normal_end, opened
from ps_worker.client.tables import ClientTables, Pulls
from ps_worker.embedding.rows import cut_as_given, gradients_of, ids_of, rows_of
from ps_worker.spec.batch_sizes import BatchSpec
from ps_worker.spec.straggler import ComputeTime
from ps_worker.spec.values import (
    Array,
    BlockValues,
    ElementRun,
    Values,
    cut,
    region_of,
    runs_of,
    shape_of,
)
from ps_worker.steps.counters import Progress
from ps_worker.steps.steps import (
    PullTicket,
    PushTicket,
    StepResult,
    TableHandle,
    check_handle,
    checked_hyperparameters,
)
from ps_worker.transport.config import WorkerConfig

ParamsT = ParamSpec("ParamsT")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

TableSlice: TypeAlias = slice | str | None
"""A slice of a table's elements, a tensor's name, or None for the whole table."""


def _verb(
    part: Callable[[Client], PartT], carry_out: Callable[Concatenate[PartT, ParamsT], ResultT]
) -> Callable[Concatenate[Client, ParamsT], ResultT]:
    """A verb of the client that this part carries out, with the part's signature and docstring."""

    @wraps(carry_out)
    def call(client: Client, /, *args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        return carry_out(part(client), *args, **kwargs)

    return call


def _tables(client: Client) -> ClientTables:
    return client.tables


def _checkpoints(client: Client) -> ClientCheckpoints:
    return client.checkpoints


def _collectives(client: Client) -> CollectiveCalls:
    return client.collectives


class Client:
    """A session with a cluster. Made by `connect`. Several threads may use it: their pushes to a
    table come one after the other, each whole, and each that seals ends a step.

    A normal end (`sys.exit(0)`, too) leaves the cluster: it seals a final step on every table, so
    that no worker waits for this one any more. An end by an exception does not, because the other
    workers must learn that one is missing.

    Ctrl-C cuts no step in two: `TableHandle.clock` says whether a push that it interrupted counts.

    A `timeout_s` of None means the client's request_deadline_s.
    """

    def __init__(self, config: WorkerConfig) -> None:
        if config.identity and has_worker():
            config = replace(config, identity="")
        self.connection = ClientConnection(config)
        self.engine = self.connection.engine
        self.tables = ClientTables(self.connection)
        self.pulls = Pulls(self.connection, self.tables)
        self.awaiting: weakref.WeakSet[Awaiting] = weakref.WeakSet()
        """Modules with parameters whose values may be on their way."""

        self.checkpoints = ClientCheckpoints(self.connection, self.tables)
        self.collectives = CollectiveCalls(self.connection, self.checkpoints.save_points)
        opened(self)

    # --- who and where

    @property
    def session(self) -> Session:
        """The identity that the scheduler gave this client."""
        return self.engine.session

    @property
    def rank(self) -> int:
        """This worker's rank, from 0; 0 for readers."""
        return self.engine.session.rank

    @property
    def world_size(self) -> int:
        """The number of workers of the cluster when this client connected: those that it was
        started for, present or not, and those that had joined beyond them.

        It does not change when workers come or leave. Ranks are below it, unless a worker that
        joined beyond the first ones has left.
        """
        return self.engine.world_size

    @property
    def http_address(self) -> str:
        """The address of /metrics and /healthz in this process; empty if this client did not ask
        for it (`http_listen`), or the port could not be bound.
        """
        return self.connection.http_address

    @property
    def is_replacement(self) -> bool:
        """True if another worker had this rank before, usually one that was declared gone. Then
        `is_late_joiner` is true as well.
        """
        return self.engine.is_replacement

    @property
    def is_late_joiner(self) -> bool:
        """True if this worker joined a cluster that had all its workers: it replaced one that is
        gone, or came beyond the number that the cluster was started for.

        It begins at the clock of the others: at `DistributedOptimizer.clock`, or at a table's
        `clock` after its first pull, which a script makes before its first push.
        """
        return self.engine.is_late_joiner

    @property
    def is_reader(self) -> bool:
        """True if this client is not a worker, but a reader or an operator."""
        return self.connection.is_reader

    @property
    def is_main(self) -> bool:
        """True for the worker of rank 0, which writes files and prints. While rank 0 is gone no
        worker is; its replacement is again.
        """
        return self.rank == 0 and not self.is_reader

    @property
    def consistency(self) -> Consistency:
        """The consistency of tables that name none: the setting `consistency`, else BSP."""
        return parsed(self.connection.config.consistency or "bsp")

    @property
    def compute_time(self) -> ComputeTime | None:
        """The emulated computation (the setting `compute`); None if there is none."""
        compute = self.connection.config.compute
        return ComputeTime.parsed(compute) if compute else None

    @property
    def is_closed(self) -> bool:
        """True once the client has left or has been closed."""
        return self.connection.is_closed

    # --- tables

    create_table = _verb(_tables, ClientTables.create_table)
    create_embedding = _verb(_tables, ClientTables.create_embedding)
    table = _verb(_tables, ClientTables.table)
    set_consistency = _verb(_tables, ClientTables.set_consistency)
    consistency_of = _verb(_tables, ClientTables.consistency_of)

    # --- pushing

    def push(
        self,
        table: TableHandle,
        values: Values | Mapping[str, Values],
        *,
        slice: TableSlice = None,  # noqa: A002 - the verb's own word
        seal: bool = True,
        hyperparameters: Mapping[str, float] | None = None,
        copy: bool = True,
    ) -> PushTicket:
        """Push a gradient, and end the step.

        Args:
            values: the gradient; or, for a table with a layout, a mapping of tensor names to
                gradients: tensors that it leaves out are skipped, as torch skips a grad of None.
            slice: the elements that `values` has: a slice that begins and ends at an edge of a
                block or a tensor, or a tensor's name; None means all.
            seal: end the step with this push; False leaves it open for more, until `seal`: what a
                later push of the step has of the same elements replaces what an earlier one had.
            hyperparameters: the optimizer's, for this step (with `seal`); the table's fill in.
            copy: keep a copy. False saves it: the values must not change before the ticket is done.

        Shapes:
            values: the table's shape, or flat; dtype as the table's.

        Blocking: no, unless MAX_UNCOMMITTED_STEP_COUNT steps of the table are on their way.

        Raises:
            InvalidTensor: another dtype or shape than the table's.
            InvalidKeys: the table has no such slice.
            InvalidConfig: hyperparameters that the optimizer lacks, or that come without `seal`.
            NotPermitted: this is not a worker.
        """
        checked = checked_hyperparameters(table, hyperparameters)
        if hyperparameters and not seal:
            raise InvalidConfig("hyperparameters belong to the seal; give them with it")
        blocks = _blocks(table, values, slice, copy=copy)
        with self.tables.turns.turn(table, is_together=table.steps.encoder is None):
            step = table.steps.open_step()
            step.push_tensors(blocks)
            return step.seal(checked) if seal else step.ticket

    def seal(
        self,
        table: TableHandle,
        *,
        hyperparameters: Mapping[str, float] | None = None,
        contribution_scale: float = 1.0,
        skip: bool = False,
        clip_scale: float | None = None,
    ) -> PushTicket:
        """End the step: the update takes in all that was pushed since the last seal.

        Args:
            hyperparameters: the optimizer's, for this step; the table's fill in.
            contribution_scale: a factor of this worker's gradients; finite, above 0.
            skip: keep the step out of the update.
            clip_scale: clip the gradient by its norm. Under SSP and ASP, where each step is an
                update of its own, this is one more factor of it; finite, above 0. Under BSP the
                update waits: the ticket's result has `squares`, and `scale_update` must follow. All
                workers give it, or none.

        Blocking: as `push`.

        Raises:
            InvalidConfig: hyperparameters that the optimizer lacks, or a scale outside its bounds.
            NotPermitted: this is not a worker.
        """
        checked = checked_hyperparameters(table, hyperparameters)
        with self.tables.turns.turn(table):
            return table.steps.open_step().seal(
                checked, contribution_scale=contribution_scale, skip=skip, clip_scale=clip_scale
            )

    def scale_update(self, table: TableHandle, clock: int, scale: float) -> PushTicket:
        """Give the factor of an update that waits for it. All workers give the same one.

        Args:
            clock: the step, whose result had `squares`.
            scale: 0 or above.

        Blocking: no. The ticket is done when every server has applied the update.

        Raises (the ticket):
            InvalidConfig: another worker gave another factor, or the update waits for none.
        """
        self.connection.check_may_push("scale")
        self.tables.check_own(table)
        return table.steps.scale(clock, scale)

    def assign(
        self,
        table: TableHandle,
        values: Values | Mapping[str, Values],
        *,
        slice: TableSlice = None,  # noqa: A002 - the verb's own word
        seal: bool = True,
        copy: bool = True,
    ) -> PushTicket:
        """Give a table that starts `FromRank0()` its initial values; pulls wait until then.

        Args, Shapes, Blocking: as `push`.

        Raises:
            NotPermitted: this is not rank 0.
            InvalidConfig: the table starts otherwise, or has its values already.
            InvalidTensor: another dtype or shape than the table's.
        """
        check_handle(table)
        blocks = _blocks(table, values, slice, copy=copy)
        with table.steps.turn, uninterrupted():
            step = self.tables.begin_assign(table)
            step.push_tensors(blocks)
            return step.seal() if seal else step.ticket

    def push_pull(
        self,
        table: TableHandle,
        values: Values | Mapping[str, Values],
        *,
        out: Array | None = None,
        hyperparameters: Mapping[str, float] | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """Push a gradient, end the step, and pull the table with the step in it.

        Args, Shapes: as `push` and `pull`.

        Blocking: until the step is committed and the values are here.

        Raises:
            PushpullError: as `push`, `pull` and `wait`.
        """
        check_handle(table)
        with self.pulls.giving_up() as begun:
            with self.tables.turns.turn(table):
                ticket = self.push(table, values, hyperparameters=hyperparameters)
                region = region_of(table.table, None)
                begun.append(self.pulls.start_values(table, region, out, timeout_s=timeout_s))
            self.connection.wait_for([ticket, *begun], timeout_s)
        pulled: Array = begun[0].future.result()
        return pulled

    catch_up = _verb(_tables, ClientTables.catch_up)

    # --- pulling

    @overload
    def pull(
        self,
        table: TableHandle,
        *,
        out: Array | None = None,
        slice: TableSlice = None,
        consistent: bool = False,
        callback: None = None,
        timeout_s: float | None = None,
    ) -> Array: ...

    @overload
    def pull(
        self,
        table: TableHandle,
        *,
        out: Array | None = None,
        slice: TableSlice = None,
        consistent: bool = False,
        callback: Callable[[Array], None],
        timeout_s: float | None = None,
    ) -> PullTicket[Array]: ...

    def pull(
        self,
        table: TableHandle,
        *,
        out: Array | None = None,
        slice: TableSlice = None,  # noqa: A002 - the verb's own word
        consistent: bool = False,
        callback: Callable[[Array], None] | None = None,
        timeout_s: float | None = None,
    ) -> Array | PullTicket[Array]:
        """Pull parameters; under BSP they contain every worker's steps up to this worker's clock.

        Args:
            out: an array or CPU tensor to write into; None makes one.
            slice: a slice of elements to pull, or a tensor's name; None means all.
            consistent: readers: the state after exactly one clock, in the whole table. Under SSP
                workers that are ahead wait until the others reach it, at most `staleness` clocks.
                Under ASP there is no such state: each range is as it was between two updates. A
                worker's pulls under BSP are consistent anyway.
            callback: called with the values on a thread of its own; the pull then returns a ticket
                at once. If the pull fails, `wait` on the ticket raises.

        Returns:
            The values: `out`, or a numpy array (a torch tensor for bfloat16).

        Shapes:
            out: the shape of the slice, or flat; C-contiguous; dtype as the table's. If the pull
            fails its content is undefined, and is not written to afterwards.

        Blocking: until the values are here; not with a callback.

        Raises:
            InvalidTensor: `out` has another dtype or shape.
            InvalidKeys: the table has no such slice.
            InvalidConfig: `consistent` by a worker, on a table that is not BSP.
            WaitExpired: the message says whom the pull waits for.
        """
        check_handle(table)
        region, start = region_of(table.table, slice), self.pulls.start_values
        pull = partial(start, table, region, out, consistent=consistent, timeout_s=timeout_s)
        if callback is None:
            return self.pulls.values(pull, timeout_s)
        return self.pulls.with_callback(pull(), callback)

    # --- rows of embedding tables

    def push_rows(
        self,
        table: TableHandle,
        ids: Values,
        gradients: Values,
        *,
        seal: bool = True,
        hyperparameters: Mapping[str, float] | None = None,
        hashed_ids: bool = False,
    ) -> PushTicket:
        """Push gradients of rows of an embedding table, and end the step.

        Args:
            ids: whole numbers from 0; the gradients of one that comes several times are summed.
            seal: end the step with this push; False leaves it open until `seal`: pushes are summed.
            hyperparameters: the optimizer's, for this step (with `seal`); the table's fill in.
            hashed_ids: negative ids are hashes: their bits count, as unsigned numbers.

        Shapes:
            ids: any; gradients: the same with the row's elements behind, in the table's dtype.

        Blocking: as `push`. The values are copied.

        Raises:
            InvalidKeys: a negative id.
            InvalidTensor: gradients of another dtype or shape; ids that are no whole numbers.
            InvalidConfig: the table is not one of rows, or hyperparameters as for `push`; more rows
                of one partition than a message takes.
            NotPermitted: this is not a worker.
        """
        checked = checked_hyperparameters(table, hyperparameters)
        if hyperparameters and not seal:
            raise InvalidConfig("hyperparameters belong to the seal; give them with it")
        rows_of(table.table)
        found = ids_of(ids, hashed_ids=hashed_ids)
        rows = gradients_of(table.table, found, gradients)
        with self.tables.turns.turn(table):
            step = table.steps.open_step()
            step.push_rows(found, rows, is_last=seal)
            return step.seal(checked) if seal else step.ticket

    def pull_rows(
        self,
        table: TableHandle,
        ids: Values,
        *,
        hashed_ids: bool = False,
        timeout_s: float | None = None,
    ) -> npt.NDArray[Any]:
        """Pull rows of an embedding table; those that no update has made read as their initial
        values, and are not made.

        Args:
            ids, hashed_ids: as of `push_rows`.

        Returns:
            A numpy array. Shapes: that of `ids` with the row's elements behind.

        Blocking: until the rows are here.

        Raises:
            InvalidKeys, InvalidTensor, InvalidConfig: as `push_rows`.
            WaitExpired: the message says whom the pull waits for.
        """
        check_handle(table)
        cut = cut_as_given(ids_of(ids, hashed_ids=hashed_ids), rows_of(table.table))
        rows = self.wait(self.pulls.start_rows(table, cut, timeout_s), timeout_s)
        return cut.as_given(rows).reshape(*shape_of(ids), table.element_count)

    # --- waiting

    @overload
    def wait(self, ticket: PushTicket, timeout_s: float | None = None) -> StepResult: ...

    @overload
    def wait(self, ticket: PullTicket[ResultT], timeout_s: float | None = None) -> ResultT: ...

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Any:
        """Wait for a push to be committed, or for a pull's values.

        Returns:
            For a push, a seal or an assign: the result of its step. For a pull: its values.

        Blocking: until the ticket is done; under BSP a step is committed when all workers have
        sealed theirs.

        Raises:
            InvalidConfig: the ticket's step is not sealed, so it would never be done; or the
                workers disagree about the step's hyperparameters.
            InvalidTensor: a server refused a block (a gradient with NaNs); the step was skipped.
            WaitExpired: the message says which worker is missing. Nothing else changed.
        """
        self.wait_all([ticket], timeout_s)
        return ticket.future.result()

    def wait_all(self, tickets: Iterable[Ticket], timeout_s: float | None = None) -> None:
        """Wait for several tickets; the first failure is raised at once.

        Blocking, Raises: as `wait`.
        """
        self.connection.check_usable()
        waited = list(tickets)
        for ticket in waited:
            if isinstance(ticket, PushTicket):
                ticket.check_sealed()
        self.connection.wait_for(waited, timeout_s)

    # --- checkpoints

    @property
    def restored_from(self) -> str:
        """The directory of the checkpoint that the cluster was started from; empty: none."""
        return self.checkpoints.restored_from

    restored_state = _verb(_checkpoints, ClientCheckpoints.restored_state)
    checkpoint = _verb(_checkpoints, ClientCheckpoints.checkpoint)

    def restore(self, url: str = "", *, timeout_s: float | None = None) -> Self:
        """Restore the whole cluster to a checkpoint, and connect to it again.

        All later updates are lost, on the servers and on their way there: the cluster begins a new
        timeline, and refuses entries of the old one. Every worker calls it, with the same URL; the
        first call restores, the others join. For a worker that does not, the next call fails. Make
        the tables or the `DistributedOptimizer` again, with the returned client: they begin at the
        checkpoint's clock, and `attach_state` loads the attached states.

        Args:
            url: a checkpoint's directory, or a directory of several, whose newest good one is
                taken; empty: the cluster's own checkpoint directory.

        Returns:
            A new client with this one's rank; this one is closed.

        Blocking: until the cluster has restarted and its servers are there again.

        Raises:
            InvalidCheckpoint: there is no good one; nothing has changed.
            Fenced: this session had ended otherwise before; nothing is restored for it.
            WaitExpired: the scheduler or the servers did not restart in time.
        """
        self.checkpoints.restore(url, timeout_s)
        self.close(leave=False)
        rank = None if self.is_reader else self.rank
        return type(self)(replace(self.connection.config, rank=rank))

    attach_state = _verb(_checkpoints, ClientCheckpoints.attach)
    save_point = _verb(_checkpoints, ClientCheckpoints.save_point)

    # --- data

    def data_shards(
        self,
        dataset: Sized | int,
        *,
        shard_size: int,
        name: str = "data",
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> DataShards:
        """Share a data set out while it is trained on: the scheduler leases its shards to whichever
        worker has none, so that fast workers train more of them, and the shards of a worker that is
        gone are issued again. Each worker calls it with the same values.

        Args:
            dataset: the data set, or the number of its samples.
            shard_size: samples of a shard: a multiple of the batch size, and the time of ten steps
                or more. A worker that dies leaves up to two of them to be trained again.
            name: unique in the run; what was done of a pass is in checkpoints under this name.
            seed: draws the order of shards in each pass.
            timeout_s: seconds to wait, at the end of a pass, for shards that other workers have.

        Returns:
            The sampler of a DataLoader, or the ranges for a loader of the script's own.

        Blocking: until the scheduler answers.

        Raises:
            InvalidConfig: the data set is empty or smaller than a shard, or another worker gave
                other values; the message has both.
            NotPermitted: this is not a worker.
        """
        length = dataset if isinstance(dataset, int) else len(dataset)
        spec = DataSetSpec(name, length, shard_size, seed)
        return DataShards(
            self.connection, self.tables, self.checkpoints.save_points, spec, timeout_s
        )

    def adaptive_batches(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        bounds: tuple[int, int] | None = None,
        every: int = 16,
        seed: int = 0,
        name: str = "batches",
    ) -> AdaptiveBatches:
        """Share a data set out in batches whose sizes follow each worker's measured speed, so that
        under BSP all workers end a step at the same time. All batches of a step together have the
        same number of samples. Each worker calls it with the same values.

        Args:
            dataset: the data set, or the number of its samples.
            batch_size: the samples of a batch at first, and on average.
            bounds: the fewest and the most samples of a batch; None means 1 to four times
                `batch_size`.
            every: the steps between two agreements; at least as many as the batches that the
                loader fetches ahead.
            seed: draws the order of the samples in each pass.
            name: of the position in checkpoints; unique in this worker.

        Returns:
            The batch_sampler of a DataLoader, whose `over` gives the batches, and whose `weight`
            belongs to the loss.

        Blocking: reads the position of the checkpoint that the cluster was started from.

        Raises:
            InvalidConfig: a value is out of bounds; the name is taken; the data set has another
                length than in the checkpoint; or (`JoinRefused`) this worker joins others.
            NotPermitted: this is not a worker.
        """
        length = dataset if isinstance(dataset, int) else len(dataset)
        spec = BatchSpec(length, batch_size, *(bounds or (1, 4 * batch_size)), every, seed)
        found = AdaptiveBatches(self.connection, self.tables, self.collectives, spec)
        found.attach(self.checkpoints, name)
        return found

    # --- collective calls

    barrier = _verb(_collectives, CollectiveCalls.barrier)
    all_reduce = _verb(_collectives, CollectiveCalls.all_reduce)
    gather = _verb(_collectives, CollectiveCalls.gather)
    broadcast = _verb(_collectives, CollectiveCalls.broadcast)

    # --- progress

    def progress(self) -> Progress:
        """This client's counters so far; never blocks."""
        counters = self.engine.counters
        return Progress(
            pushed_bytes=counters.pushed_bytes,
            pulled_bytes=counters.pulled_bytes,
            unchanged_bytes=counters.unchanged_bytes,
            step_count=counters.step_count,
            loss=counters.loss,
            staleness=counters.staleness,
            waiting_for=counters.waiting_for,
            planned_step_count=counters.planned_step_count,
            clocks={handle.name: handle.clock for handle in self.tables.handles},
            lane=self.engine.links.lane,
        )

    def report(
        self,
        *,
        loss: float | None = None,
        planned_steps: int | None = None,
        step_count: int | None = None,
        quality: Mapping[str, float] | None = None,
    ) -> None:
        """Report training's progress to `pushpull train` and `pushpull compare`.

        Args:
            loss: the last loss; a one-element tensor will do. An adaptive bound of staleness uses
                it.
            planned_steps: the number of steps that the script plans.
            step_count: the number taken; by default inner steps (`Outer`), or the highest clock.
            quality: at the end of training, measures of the model by name, such as
                {"test accuracy": 0.97}. `compare` takes those of the worker whose last step ended
                last: without a barrier the others' models lack steps.

        Blocking: no; the next heartbeat carries it.

        Raises:
            InvalidConfig: a number of steps is below 0, or is none.
        """
        self.connection.check_usable()
        counters = self.engine.counters
        counters.add_counts(planned_steps, step_count)
        if loss is not None:
            counters.add_loss(float(loss))
            self.connection.record.loss(float(loss), counters.step_count)
        if quality is not None:
            self.connection.record.quality({name: float(value) for name, value in quality.items()})

    # --- leaving

    def leave(self, timeout_s: float | None = None) -> None:
        """Leave the cluster, so that the other workers go on without this one, and close.

        Open steps are dropped: their blocks take no part in an update. A checkpoint whose clock is
        being decided gets this worker's state first, and later checkpoints have its state as of
        now. Idempotent.

        Args:
            timeout_s: seconds for the commit of the steps in flight and of the final seals.

        Blocking: until every server has committed the final seals and the scheduler knows it.

        Raises:
            WaitExpired: they were not committed in time, or cannot be because a server is gone; the
                message says who is missing.
            PushpullError: a table's step was refused, so the table cannot be left.
        """
        if self.connection.is_over:
            return
        self.connection.check_thread()
        if not self.is_reader:
            self.checkpoints.leave()
        has_left = False
        try:
            try:
                for module in list(self.awaiting):
                    module.wait()
            finally:  # others wait for the final seals, whatever has come of it
                if not self.is_reader:
                    self.tables.end_steps(self.connection.deadline_s(timeout_s))
                has_left = True
        finally:
            self._end("left" if has_left else "")

    def abandon(self, reason: str) -> None:
        """End the connection in the middle of the work, and tell the scheduler: no worker waits for
        this worker, and another may take its rank. A reader leaves.

        In a forked child, and a second time, it does nothing. `reason` is for the scheduler's log.

        Blocking: about a second at most, if no scheduler answers.
        """
        if self.connection.is_over:
            return
        if self.is_reader:
            self._end(reason)
            return
        self._end_by(self.engine.abandon(reason))

    def close(self, *, leave: bool = True) -> None:
        """Leave, and end the connection; with `leave` False only end it, as a crash would: then the
        others wait for this worker until its lease expires.

        In a forked child, and a second time, it does nothing.

        Blocking, Raises: as `leave`.
        """
        if leave:
            self.leave()
        elif not self.connection.is_over:
            self._end("")

    def _end(self, reason: str) -> None:
        """Close everything; with a reason tell the scheduler that this node has left."""
        if not self.is_closed:
            self.checkpoints.close(has_left=bool(reason))
            self._end_by(self.engine.stop(reason))

    def _end_by(self, stopping: Coroutine[Any, Any, None]) -> None:
        OPEN.discard(self)
        for module in list(self.awaiting):
            module.give_up()
        self.connection.end(stopping)
        self.pulls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if is_normal_end(error) or self.is_reader:
            self.close()
        else:
            self.abandon(type(error).__name__)


def _blocks(
    table: TableHandle, values: Values | Mapping[str, Values], part: TableSlice, *, copy: bool
) -> list[BlockValues]:
    """The blocks of a push, all checked before the first of them leaves."""
    runs = runs_of(table.table, values, part)
    if copy:
        runs = [ElementRun(run.begin, run.end, run.raw.copy()) for run in runs]
    return list(cut(table.table, runs))
