"""The client: the verbs on tables, over a session with a cluster.

For code that moves blocks itself, as `DistributedOptimizer` does, a second level copies nothing:
`Client.tables` (`begin_step` gives a `ps_worker.steps.steps.TableStep`) and `Client.pulls`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sized
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack, overload

import numpy.typing as npt

from ps_core.cluster_view import Session
from ps_core.consistency import Consistency, parsed
from ps_core.errors import InvalidConfig
from ps_core.manifest import DataSetSpec
from ps_core.tables.optimizers import OptimizerSpec
from ps_worker.checkpoint.save_points import HasState
from ps_worker.client.checkpoints import CheckpointTicket, ClientCheckpoints
from ps_worker.client.collectives import CollectiveCalls
from ps_worker.client.connection import ClientConnection, Ticket
from ps_worker.client.data_shards import DataShards
from ps_worker.client.open_clients import OPEN, has_worker
from ps_worker.client.shown_options import OF_THE_CLIENT, THE_CLIENTS, shows
from ps_worker.client.tables import ClientTables, Pulls
from ps_worker.spec.rows import cut_ids, gradients_of, ids_of, rows_of
from ps_worker.spec.settings import (
    ROWS_DEFAULTS,
    TABLE_DEFAULTS,
    Layout,
    RowsOptions,
    SupportsSpec,
    TableOptions,
)
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

ResultT = TypeVar("ResultT")

TableSlice: TypeAlias = slice | str | None
"""A slice of a table's elements, a tensor's name, or None for the whole table."""


class Client:
    """A session with a cluster. Made by `connect`; its verbs may be called from several threads.

    A normal end leaves the cluster: it seals a final step on every table, so that no worker waits
    for this one any more. An end by an exception does not, because the other workers must learn
    that one is missing.

    A `timeout_s` of None means the client's request_deadline_s.
    """

    def __init__(self, config: WorkerConfig) -> None:
        if config.identity and has_worker():
            config = replace(config, identity="")
        self.connection = ClientConnection(config)
        self.engine = self.connection.engine
        self.tables = ClientTables(self.connection)
        self.pulls = Pulls(self.connection, self.tables)
        self.checkpoints = ClientCheckpoints(self.connection, self.tables)
        self.collectives = CollectiveCalls(self.connection, self.checkpoints.save_points)
        OPEN.add(self)

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
        `clock` after its first pull.
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

    @shows(TableOptions, {**TABLE_DEFAULTS, **dict.fromkeys(OF_THE_CLIENT, THE_CLIENTS)})
    def create_table(
        self,
        name: str,
        layout: Layout,
        *,
        optimizer: SupportsSpec | OptimizerSpec,
        **options: Unpack[TableOptions],
    ) -> TableHandle:
        """Create a table, or open the one of that name if it is identical.

        Args:
            name: unique in the cluster; 1 to 200 bytes.
            layout: the number of elements, or one shape, or (tensor name, shape) pairs.
            optimizer: how the servers apply an update: `SGD`, `Adam`, ...

        Options:
            dtype (str, 'float32'): the element type of pushes and pulls: "float32", "float64",
                "float16" or "bfloat16". The two halves keep float32 values on the servers.
            consistency (Consistency | str, the client's): `BSP()`, `SSP(staleness)` or `ASP()`, or
                their short form ("ssp:4"). The client's is BSP unless its option says otherwise.
            reduction (str, 'mean'): "mean": sum in rank order, one multiply by 1 / contributors; or
                "sum". Under SSP and ASP each step is applied whole in both cases.
            init (Initial, Zeros()): the initial values: `Zeros()`, `Constant(value)`,
                `Inline(values)` or `FromRank0()`.
            block_elements (int, 0): elements of a block, a multiple of 64; 0 means 262144.
            allow_non_finite (bool, False): accept gradients with infinities and NaNs; else they are
                refused.
            gate_bytes (int, 0): the memory quota of waiting steps on each server; 0 means the
                server's own.
            kernels (str, 'fast'): "fast", or "exact": bit-equal with torch.optim.
            push_codec (str | None, the client's): how this worker's gradients travel: "none", as
                the dtype; "bf16" or "fp16"; "int8", a byte an element; "sign", a bit; "topk:0.01",
                the largest hundredth of each block, or "randomk:0.01", a random one. What these
                four leave out goes with the next gradients: see `docs/guides/COMPRESSION.md`.
            pull_codec (str | None, the client's): how values travel to this worker: "none",
                "bf16", "fp16", or "int8", which rounds them to the nearest: nothing is fed back.
            timeout_s (float | None, None): seconds to wait for the cluster's servers.

        Blocking: until every server of the table knows this client; waits for servers that have not
        registered yet, at most `timeout_s`.

        Raises:
            InvalidConfig: a setting is wrong.
            TableExists: a table of that name differs; the message names the first difference.
            WaitExpired: servers are missing; the message says how many.
        """
        return self.tables.create(name, layout, optimizer, options)

    @shows(RowsOptions, {**ROWS_DEFAULTS, "consistency": THE_CLIENTS})
    def create_embedding(
        self,
        name: str,
        dim: int,
        *,
        optimizer: SupportsSpec | OptimizerSpec,
        **options: Unpack[RowsOptions],
    ) -> TableHandle:
        """Create an embedding table, or open the one of that name if it is identical: rows of `dim`
        elements under ids of 64 bits. It has no size: a row is made by its first update, and reads
        as its initial values before that, which are a function of the seed and the id.

        Args:
            name: unique in the cluster; 1 to 200 bytes.
            dim: elements of a row.
            optimizer: `SGD`, `Adam`, `Adagrad`, `RowwiseAdagrad` or `FTRL`; only rows with a
                gradient change, and under Adam each row counts its own steps.

        Options:
            dtype (str, 'float32'): the element type: "float32" or "float64".
            consistency (Consistency | str, the client's): as of `create_table`.
            reduction (str, 'mean'): as of `create_table`; a mean divides by all workers, with or
                without a gradient of the row.
            init (RowsInitial, Zeros()): `Zeros()`, `Constant(value)`, `Uniform(scale)` or
                `Normal(scale)`.
            partitions (int, 16): the parts that the servers share out; more servers than these
                have nothing to do. Fixed for the life of the table.
            seed (int, 0): of the initial values.
            max_rows (int, 0): the most rows of the table, 0 for any number. Beyond them, rows are
                evicted: they read as their initial values again, and their optimizer state is gone.
            eviction (str, 'lru'): the rows that are evicted then: "lru", those whose last update
                was the longest ago, or "lfu", those with the fewest updates.
            evict_after (int, 0): evict a row that so many updates of its partition had no gradient
                of, or up to an eighth more; a step is one update of each partition. 0: none is.
            admit_after (int, 1): make a row by the update that is its so manieth with a gradient of
                it; the gradients of those before are dropped.
            storage (str, 'full'): of the values in the servers' memory: "full" as the dtype;
                "float16" or "bfloat16", 2 bytes an element; "int8", 1 byte an element and 1 a row.
                Each update rounds what it has changed up or down at random, so that the mean is
                right. Optimizer state stays as it is, and pulls and checkpoints are of the dtype.
            allow_non_finite (bool, False): as of `create_table`.
            gate_bytes (int, 0): as of `create_table`.
            timeout_s (float | None, None): seconds to wait for the cluster's servers.

        Blocking, Raises: as `create_table`.
        """
        return self.tables.create(name, dim, optimizer, options, has_rows=True)

    def table(
        self,
        name: str,
        timeout_s: float | None = None,
        *,
        push_codec: str | None = None,
        pull_codec: str | None = None,
    ) -> TableHandle:
        """Open a table that another client creates; waits for it.

        Args:
            name: the table's name.
            timeout_s: None means the client's connect_deadline_s.
            push_codec, pull_codec: as of `create_table`; None: the client's.

        Blocking: until it exists and its servers know this client.

        Raises:
            TableNotFound: no client created it in time; the message names the existing tables.
        """
        codecs = {"push_codec": push_codec, "pull_codec": pull_codec}
        return self.tables.open(name, timeout_s, codecs)

    def set_consistency(
        self,
        table: TableHandle | str,
        consistency: Consistency | str,
        *,
        after_clock: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Change a table's consistency while workers train.

        Every server changes at the same clock: steps up to the returned clock keep the old setting,
        later ones have the new one. From SSP or ASP to BSP, workers that are ahead wait at that
        clock for the others. All workers may call it with the same setting: the first call changes
        the table, and the others return the same clock.

        Args:
            table: a handle, or the name of any table of the cluster.
            consistency: `BSP()`, `SSP(staleness)`, `ASP()`, or their short form ("ssp:4").
            after_clock: the last clock of the old setting, at least; the same number at every
                worker makes runs repeatable. 0: as soon as possible.

        Returns:
            The last clock of the old setting; 0 for a table that was created with this setting and
            never changed.

        Blocking: until every server of the table has prepared the change and the scheduler has
        committed it; a few milliseconds if all servers are healthy.

        Raises:
            TableNotFound: there is no table of that name.
            InvalidConfig: the setting is wrong, or the table's optimizer does not support it.
            WaitExpired: a server did not prepare in time, named by the message; nothing changed.
        """
        return self.tables.set_consistency(table, consistency, after_clock, timeout_s)

    def consistency_of(self, table: TableHandle) -> Consistency:
        """The consistency of a table in the cluster's newest view."""
        return self.tables.consistency_of(table)

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
            seal: end the step with this push; False leaves it open for more, until `seal`.
            hyperparameters: the optimizer's, for this step (with `seal`); the table's fill in.
            copy: keep a copy of the values. False saves the copy; then they must not change before
                the ticket is done.

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
        # Encoded blocks leave at once, while the next are encoded.
        is_coded = table.steps.encoder is not None
        with contextlib.nullcontext() if is_coded else self.connection.loop.together():
            step = self.tables.begin_step(table)
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
            InvalidConfig: hyperparameters that the optimizer lacks.
            NotPermitted: this is not a worker.
        """
        checked = checked_hyperparameters(table, hyperparameters)
        step = self.tables.begin_step(table)
        return step.seal(
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
        blocks = _blocks(table, values, slice, copy=copy)
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
        with self.connection.loop.together():
            ticket = self.push(table, values, hyperparameters=hyperparameters)
            region = region_of(table.table, None)
            pulled = self.pulls.start_values(table, region, out, timeout_s=timeout_s)
        self.connection.wait_for([ticket, pulled], timeout_s)
        return pulled.future.result()

    def catch_up(self, *tables: TableHandle) -> int:
        """Skip clocks whose updates were made without this worker, under backup workers. If every
        one of these tables has such updates, as far as the newest pulls show, the worker skips the
        same number of clocks on all of them, as if its steps had come too late.

        A client that trains one table, or one `DistributedOptimizer` alone, skips them by itself.
        Any other script calls this between two steps, with all tables that it steps together, one
        step each. Clocks that were skipped on one table and not on another would have workers wait
        for each other as soon as the backup workers are no more.

        If these are all tables of the client, a table that it creates later counts as stepped with
        them: its first step skips as many clocks.

        Returns:
            The number of clocks skipped; 0 while a step of any of them is open.

        Raises:
            InvalidConfig: a handle is another client's.
        """
        return self.tables.catch_up(tables)

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
            fails its content is undefined.

        Blocking: until the values are here; not with a callback.

        Raises:
            InvalidTensor: `out` has another dtype or shape.
            InvalidKeys: the table has no such slice.
            InvalidConfig: `consistent` by a worker, on a table that is not BSP.
            WaitExpired: the message says whom the pull waits for.
        """
        check_handle(table)
        region = region_of(table.table, slice)
        ticket = self.pulls.start_values(
            table, region, out, consistent=consistent, timeout_s=timeout_s
        )
        if callback is None:
            return self.wait(ticket, timeout_s)
        return self.pulls.with_callback(ticket, callback)

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
            seal: end the step with this push; False leaves it open for more, until `seal`.
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
        with self.connection.loop.together():
            step = self.tables.begin_step(table)
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
        batch = cut_ids(ids_of(ids, hashed_ids=hashed_ids), rows_of(table.table))
        rows = self.wait(self.pulls.start_rows(table, batch, timeout_s), timeout_s)
        return rows[batch.places].reshape(*shape_of(ids), table.element_count)

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

    def restored_state(self, name: str, *, per_rank: bool = False) -> Any | None:
        """The attached state of this name (`attach_state`) in the checkpoint that the cluster was
        started from; None if it has none.

        Blocking, Raises: as `attach_state`.
        """
        return self.checkpoints.restored_state(name, per_rank=per_rank)

    def checkpoint(self, reason: str = "", *, timeout_s: float | None = None) -> CheckpointTicket:
        """Make a checkpoint of all tables, their optimizers' state, and workers' attached state.

        Workers and operators may call it. For a worker the call is a save point: make it where
        `save_point` would be. If all workers call it after the same step, the checkpoint is of that
        step; if one does, it is of that step or, if others are ahead, of one of the next. So one
        worker may wait for it while the others wait for that one in a collective call (`barrier`).
        Training goes on while it is written. A call made while a checkpoint is about to be made
        returns that one; so does a worker's first call after it, if the worker has taken no step
        beyond it.

        `reason` is for its manifest.

        Blocking: workers: until the clock of the cut is decided, usually some milliseconds.
        """
        return self.checkpoints.create(reason, timeout_s)

    def restore(self, url: str = "", *, timeout_s: float | None = None) -> Self:
        """Restore the whole cluster to a checkpoint, and connect to it again.

        All later updates are lost, on the servers and on their way there: the cluster begins a new
        timeline, and refuses entries of the old one. Every worker calls it, with the same URL; the
        first call restores, the others join. For a worker that does not, the next call fails:
        its session has ended. Make the tables or the `DistributedOptimizer` again, with the
        returned client: they begin at the checkpoint's clock, and `attach_state` loads the attached
        states.

        Args:
            url: a checkpoint's directory, or a directory of several, whose newest good one is
                taken; empty: the cluster's own checkpoint directory.

        Returns:
            A new client with this one's rank; this one is closed.

        Blocking: until the cluster has restarted and its servers are there again.

        Raises:
            InvalidCheckpoint: there is no good one; nothing has changed.
            WaitExpired: the scheduler or the servers did not restart in time.
        """
        self.checkpoints.restore(url, timeout_s)
        self.close(leave=False)
        rank = None if self.is_reader else self.rank
        return type(self)(replace(self.connection.config, rank=rank))

    def attach_state(self, name: str, state: HasState, *, per_rank: bool = False) -> None:
        """Make an object's state part of this worker's checkpoints: a learning rate schedule, a
        GradScaler, `RandomState()`, the position in the data, anything with `state_dict` and
        `load_state_dict`. A `DistributedOptimizer` attaches itself.

        In a cluster that was started from a checkpoint, the state of this name is loaded at once.
        Its values may be None, bools, numbers, strings, bytes, lists, tuples, sets, dicts, torch
        tensors and numpy arrays: nothing is pickled.

        Args:
            name: unique in this worker; the same after a restart.
            state: the object; save points call `state_dict`, and this call `load_state_dict`.
            per_rank: it differs from worker to worker, as a position in the data does. Then a
                worker whose rank the checkpoint does not have keeps `state` as it is; else it takes
                over the lowest rank's.

        Blocking: while the checkpoint's part is read, the first time.

        Raises:
            InvalidConfig: the name is taken, or `state` lacks a method.
            NotPermitted: a reader has no state.
            InvalidCheckpoint: the checkpoint's part cannot be read.
        """
        self.checkpoints.attach(name, state, per_rank=per_rank)

    def save_point(self) -> None:
        """Mark a point where the last step is complete, schedules and data position included, and
        this worker's own state may be saved. Call it at the end of each pass through the training
        loop.

        A script that never calls it has its save points at the beginning of the next step: at
        `zero_grad` or `step`, whichever comes first.

        Blocking: a moment, while the clock of a checkpoint is decided.

        Raises:
            InvalidConfig: there is no attached state: no `DistributedOptimizer`, no `attach_state`.
        """
        self.checkpoints.save_point()

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
        return DataShards(
            self.connection, self.tables, DataSetSpec(name, length, shard_size, seed), timeout_s
        )

    # --- collective calls
    #
    # The same call resumes one that WaitExpired or Ctrl-C interrupted, with the value of the first
    # time. A worker that joins while others train takes part from its first step on: before that,
    # `barrier` returns at once, and the other calls are refused.

    def barrier(self, name: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until all workers have made the call.

        Args:
            name: for error messages; workers whose names differ are refused.

        Blocking: until all workers have made the call.

        Raises:
            WaitExpired: a worker is missing, named by the message. Call it again to go on waiting.
            InvalidConfig: another worker has made another call, named by the message.
            NotPermitted: this is not a worker.
        """
        self.collectives.barrier(name, timeout_s)

    def all_reduce(
        self, value: Any, op: str = "sum", *, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Reduce a value over all workers: sum, mean, minimum or maximum, the same at each of them.

        Args:
            value: a number, a tensor, an array, or a dict, list or tuple of these.
            op: "sum", "mean", "min" or "max".
            name: as for `barrier`.

        Returns:
            A new value of the same kind, a tensor on the same device. Integers are exact, floats
            are added as float64 in the order of ranks, a tensor in its own dtype (float16 and
            bfloat16 in float32).

        Blocking: until all workers have made the call.

        Raises:
            InvalidTensor: `op` cannot reduce the value; more than 512 KiB from one worker, or more
                than 2 MiB from all together.
            InvalidConfig: as `barrier`; also where shapes, dtypes, keys or `op` differ.
            WaitExpired: as `barrier`.
            NotPermitted: as `barrier`.
        """
        return self.collectives.all_reduce(value, op, name, timeout_s)

    def gather(self, value: Any, *, name: str = "", timeout_s: float | None = None) -> list[Any]:
        """Give every worker's value to every worker, by rank: torch's all_gather_object.

        Args:
            value: None, numbers, texts, tensors, arrays, and lists, tuples, sets and dicts of these
                (as for `attach_state`); shapes may differ.
            name: as for `barrier`.

        Returns:
            A list with one item per worker that took part. Tensors are on the CPU.

        Blocking, Raises: as `all_reduce`.
        """
        return self.collectives.gather(value, name, timeout_s)

    def broadcast(
        self, value: Any = None, src: int = 0, *, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Give the value of rank `src` to every worker.

        Args:
            value: as for `gather`; other ranks need not give one.
            name: as for `barrier`.

        Returns:
            A copy, also at `src`. Tensors are on the CPU.

        Blocking: as `all_reduce`.

        Raises:
            InvalidConfig: as `barrier`; also if no worker has that rank.
            InvalidTensor: as `all_reduce`.
            WaitExpired: as `barrier`.
            NotPermitted: as `barrier`.
        """
        return self.collectives.broadcast(value, src, name, timeout_s)

    # --- progress

    def progress(self) -> Progress:
        """This client's counters so far; never blocks."""
        counters = self.engine.counters
        return Progress(
            pushed_bytes=counters.pushed_bytes,
            pulled_bytes=counters.pulled_bytes,
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
            step_count: the number taken; by default the highest clock of its tables.
            quality: at the end of training, measures of the model by name, such as
                {"test accuracy": 0.97}. `compare` takes those of the worker whose last step ended
                last: without a barrier the others' models lack steps.

        Blocking: no; the next heartbeat carries it.
        """
        self.connection.check_usable()
        counters = self.engine.counters
        if loss is not None:
            counters.add_loss(float(loss))
            self.connection.record.loss(float(loss), counters.step_count)
        if planned_steps is not None:
            counters.planned_step_count = int(planned_steps)
        if step_count is not None:
            counters.reported_step_count = int(step_count)
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
        if error is None or self.is_reader:
            self.close()
        else:
            self.abandon(type(error).__name__)


def _blocks(
    table: TableHandle, values: Values | Mapping[str, Values], part: TableSlice, *, copy: bool
) -> list[BlockValues]:
    """The blocks of a push, all checked before the first of them leaves."""
    check_handle(table)
    runs = runs_of(table.table, values, part)
    if copy:
        runs = [ElementRun(run.begin, run.end, run.raw.copy()) for run in runs]
    return list(cut(table.table, runs))
