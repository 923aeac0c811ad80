"""A client's tables: creating, opening and changing them, this worker's steps on them, and pulls:
into the caller's memory, into arrays, and with callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.codecs.choices import name_of
from ps_core.consistency import Consistency, Mode, parsed
from ps_core.errors import (
    InvalidConfig,
    InvalidKeys,
    TableNotFound,
    UpdateFailed,
    WaitExpired,
    listed,
)
from ps_core.keys import TableId
from ps_core.tables.elements import NATIVE_CODEC
from ps_core.tables.optimizers import OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.client.connection import GRACE_S, ClientConnection, lost_server
from ps_worker.client.joined_place import JoinedPlace
from ps_worker.client.shown_options import OF_THE_CLIENT, THE_CLIENTS, shows
from ps_worker.client.step_turns import StepTurns
from ps_worker.compression.push_encoder import PushEncoder, load_kernels
from ps_worker.compression.table_codecs import OWN_CODECS, TableCodecs, codecs_of
from ps_worker.embedding.rows import MAX_PULLED_COUNT, CutIds, GivenIds, RowBatch
from ps_worker.spec.settings import (
    ROWS_DEFAULTS,
    TABLE_DEFAULTS,
    Layout,
    RowsOptions,
    SupportsSpec,
    TableOptions,
    check_kinds,
    consistency_of,
    table_spec,
)
from ps_worker.spec.values import (
    Array,
    Raw,
    Region,
    check_shape,
    element_bytes,
    empty,
    region_of,
    shape_of,
    writable_raw_of,
)
from ps_worker.steps.held_values import HeldValues
from ps_worker.steps.setting_by_clock import reduction_of
from ps_worker.steps.steps import (
    Pulled,
    PullTicket,
    TableHandle,
    TableStep,
    TableSteps,
    check_handle,
    check_own,
    skipped_clocks,
)
from ps_worker.transport.loop import CallbackThread, Ends, ended_together
from ps_worker.transport.metrics import tell_of_fall_back
from ps_worker.transport.pulls import PullOrder, new_cut

_LOOK_S = 0.5
_PIECES_IN_FLIGHT = 2
"""While one piece is copied, the next is on its way."""

_NAMED_TABLE_COUNT = 8


class ClientTables:
    """The handles of one client. Thread-safe."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._handles: dict[TableId, TableHandle] = {}
        self._untrained: set[TableId] = set()
        self.place = JoinedPlace(connection)
        self.turns = StepTurns(connection, self._handles)

    @property
    def handles(self) -> list[TableHandle]:
        return list(self._handles.values())

    @property
    def trained(self) -> list[TableHandle]:
        """Those that were not `set_aside`."""
        return [each for each in self.handles if each.table.table_id not in self._untrained]

    def set_aside(self, table: TableHandle) -> None:
        """Say that the script does not train this table, so that it may train another one alone."""
        self._untrained.add(table.table.table_id)

    def check_own(self, table: TableHandle) -> None:
        check_own(table, self._handles)

    # --- making and opening

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
            name: unique in its run; 1 to 200 bytes.
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
                the largest hundredth of each block, or "randomk:0.01", a random one; "lowrank:4",
                two factors of each block, of that rank (PowerSGD). What these five leave out goes
                with the next gradients: see `docs/guides/COMPRESSION.md`.
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
        return self._create(name, layout, optimizer, options)

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
            name: unique in its run; 1 to 200 bytes.
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
            partitions (int, 0): the parts that the servers share out; more servers than these
                have nothing to do. Fixed for the life of the table. 0: those of the table, if
                it is there; a new one has 4 for each server, and 8 at least.
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
        return self._create(name, dim, optimizer, options, has_rows=True)

    def _create(
        self,
        name: str,
        layout: Layout,
        optimizer: SupportsSpec | OptimizerSpec,
        options: TableOptions | RowsOptions,
        *,
        has_rows: bool = False,
    ) -> TableHandle:
        connection = self._connection
        connection.check_may_push("create tables")
        options.setdefault("consistency", parsed(connection.config.consistency or "bsp"))
        spec = table_spec(name, layout, optimizer, options, has_rows=has_rows)
        self._codecs(spec, options)  # refused before the table is made
        deadline_s = connection.deadline_s(options.get("timeout_s"))
        table = connection.asked(self._created(spec, deadline_s), deadline_s)
        codecs = self._agreed_codecs(table, options)
        handle = self._adopt(table, codecs)
        _check_codecs(handle, codecs, options)
        connection.record.table(handle.spec, handle.codecs)
        return handle

    async def _created(self, spec: TableSpec, deadline_s: float) -> Table:
        end_s = now_s() + deadline_s
        table, _ = await self._engine.scheduler.create_table(spec, deadline_s)
        await self._engine.meet(table, end_s)
        return table

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
            NotPermitted: this is an operator.
        """
        chosen = {"push_codec": push_codec, "pull_codec": pull_codec}
        deadline_s = self._opens_within_s(timeout_s)
        table = self._connection.asked(self._opened(name, deadline_s), deadline_s)
        codecs = self._agreed_codecs(table, chosen)
        handle = self._adopt(table, codecs)
        _check_codecs(handle, codecs, chosen)
        return handle

    def _codecs(self, spec: TableSpec, chosen: Mapping[str, object]) -> TableCodecs:
        config = self._connection.config
        return codecs_of(spec, chosen, (config.push_codec, config.pull_codec))

    def _agreed_codecs(self, table: Table, chosen: Mapping[str, object]) -> TableCodecs:
        """As `_codecs`, of those that all servers of the table have: a default that one lacks is
        left out, with a warning, and a choice is refused.
        """
        found = self._codecs(table.spec, chosen)
        push = None if found.push is None else found.push.codec
        for option, codec in (("push_codec", push), ("pull_codec", found.pull)):
            feature = "" if codec is None else codec.feature
            server = self._engine.links.lacking(table, feature) if feature else None
            if server is None:
                continue
            name = table.spec.name
            if chosen.get(option) is not None:
                raise InvalidConfig(
                    f"{option} of table '{name}' is {chosen[option]}, which server {server} does "
                    "not have; expected another codec, or servers of this version"
                )
            logs.warning("codec_left_out", table=name, option=option, codec=codec, server=server)
            found = replace(found, **{option.removesuffix("_codec"): None})
        return found

    async def _opened(self, name: str, deadline_s: float) -> Table:
        end_s = now_s() + deadline_s
        try:
            view = await self._engine.scheduler.view_where(
                lambda view: name in view.tables_by_name, f"table '{name}'", deadline_s
            )
        except WaitExpired as late:
            names = [f"'{table.spec.name}'" for table in self._engine.view.tables]
            there = listed(names, _NAMED_TABLE_COUNT) or "no table"
            raise TableNotFound(
                f"table '{name}' was not created within {deadline_s:g} s; the cluster has {there}"
            ) from late
        table = view.tables_by_name[name]
        await self._engine.meet(table, end_s)
        return table

    def open_all(
        self,
        prefix: str,
        is_complete: Callable[[list[TableSpec]], bool],
        timeout_s: float | None = None,
    ) -> list[TableHandle]:
        """Open all tables whose names begin with `prefix`, but for those of rows, once
        `is_complete`, called on the background thread, says that they are all, or after
        `timeout_s`.
        """
        deadline_s = self._opens_within_s(timeout_s)
        found = self._connection.asked(self._found(prefix, is_complete, deadline_s), deadline_s)
        return [self._adopt(table) for table in found]

    async def _found(
        self, prefix: str, is_complete: Callable[[list[TableSpec]], bool], deadline_s: float
    ) -> list[Table]:
        def found(view: ClusterView) -> list[Table]:
            named = (table for table in view.tables if table.spec.name.startswith(prefix))
            return [table for table in named if table.spec.rows is None]

        end_s = now_s() + deadline_s
        with contextlib.suppress(WaitExpired):
            await self._engine.scheduler.view_where(
                lambda view: is_complete([table.spec for table in found(view)]),
                f"tables '{prefix}*'",
                deadline_s,
            )
        tables = found(self._engine.view)
        for table in tables:
            await self._engine.meet(table, end_s)
        return tables

    def _opens_within_s(self, timeout_s: float | None) -> float:
        self._connection.check_may_open()
        return self._connection.config.connect_deadline_s if timeout_s is None else timeout_s

    def _adopt(self, table: Table, codecs: TableCodecs = OWN_CODECS) -> TableHandle:
        handle = self._handles.get(table.table_id)
        if handle is None:
            encoder, native = None, NATIVE_CODEC[table.spec.dtype]
            if codecs.pull is not None:
                load_kernels(codecs.pull, native)
            if codecs.push is not None and not self._connection.is_reader:
                load_kernels(codecs.push.codec, native)
                told = partial(tell_of_fall_back, table.spec.name, codecs.push)
                reads = reduction_of(table, lambda: self._engine.view)
                encoder = PushEncoder(table, codecs.push, self._engine.session.rank, told, *reads)
            steps = TableSteps(
                table,
                self._engine.steps,
                is_alone=lambda: len(self.trained) == 1,
                joins=self._engine.joins(table.table_id),
                owed_count=max((h.steps.skipped_count for h in self.handles), default=0),
                encoder=encoder,
            )
            handle = self._handles.setdefault(table.table_id, TableHandle(table, steps, codecs))
            if (clock := self.place.clocks.get(table.table_id)) is not None:
                steps.reached(clock)
        return handle

    # --- joining and changing

    def join(self, tables: Sequence[TableHandle], *, at_place: bool = False) -> None:
        """Wait until this worker has joined these tables, which others train; each handle is then
        at the clock after which it joined, or at the place (`at_place`) where it joins all.
        """
        self._connection.check_usable()
        deadline_s, me = self._connection.config.request_deadline_s, self._engine.session
        table_ids = {handle.table.table_id for handle in tables}
        what = f"worker {me.rank} to join {len(table_ids)} tables"
        view = self.await_view(lambda v: table_ids <= self.place.joined(v).keys(), what, deadline_s)
        if at_place and tables:
            self.place.find(self.handles)
        clocks = self.place.joined(view) | self.place.clocks
        for handle in tables:
            handle.steps.reached(clocks[handle.table.table_id])

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
            InvalidConfig: the setting is wrong, or the table's optimizer does not support it, or
                workers have data shards, for which the table stays asynchronous.
            WaitExpired: a server did not prepare in time, named by the message; nothing changed
                unless the message says that the change is made or may be.
        """
        connection = self._connection
        connection.check_usable()
        if not isinstance(table, str):
            check_handle(table)
        name = table if isinstance(table, str) else table.name
        wanted = consistency_of(consistency)
        check_kinds({"after_clock": after_clock})
        deadline_s = connection.deadline_s(timeout_s)
        changing = self._engine.scheduler.set_consistency(name, wanted, after_clock, deadline_s)
        return connection.asked(changing, deadline_s).after_clock

    def consistency_of(self, table: TableHandle) -> Consistency:
        """The consistency of a table in the cluster's newest view."""
        return self.newest(table).consistency

    def newest(self, table: TableHandle) -> Table:
        """The table as the newest view has it; TableNotFound if it was removed, and the error that
        ended this worker's session, if one did.
        """
        self._connection.check_usable()
        check_handle(table)
        return self._engine.view.table(table.table.table_id)

    def why_no_edit(self, table: TableHandle) -> str:
        """The reason why the next step of a table cannot be an edit; empty if it can."""
        view = self._engine.view
        return _why_not(view.table(table.table.table_id), table.clock + 1, view.worker_count)

    def await_view(
        self, holds: Callable[[ClusterView], bool], what: str, deadline_s: float
    ) -> ClusterView:
        """Wait for a view of the cluster for which `holds`; WaitExpired names it by `what`."""
        return self._connection.asked(
            self._engine.scheduler.view_where(holds, what, deadline_s), deadline_s
        )

    @contextlib.contextmanager
    def cut(self, tables: Sequence[TableHandle], lasts_s: float) -> Iterator[tuple[int, list[int]]]:
        """Readers: suspend updates of these tables, at most `lasts_s`, for consistent pulls of one
        clock of each. Gives the cut's number, for `Pulls.start`, and each table's lowest clock.
        """
        connection, consistent = self._connection, self._engine.consistent
        connection.check_usable()
        number, cut_tables = new_cut(), [table.table for table in tables]
        try:
            clocks = connection.asked(consistent.begin_cut(number, cut_tables, lasts_s), lasts_s)
            yield number, [clocks[table.table_id] for table in cut_tables]
        finally:
            with contextlib.suppress(WaitExpired):  # servers end it by themselves soon
                connection.asked(consistent.end_cut(number, cut_tables), 0.0)

    # --- steps

    def begin_step(self, table: TableHandle) -> TableStep:
        """The open step of this worker on `table`; begins one if there is none. Blocks while
        MAX_UNCOMMITTED_STEP_COUNT steps of the table are not committed. Raises the error of a
        seal that a server has refused for good.
        """
        self.turns.await_step(table)
        return table.steps.open_step()

    def begin_assign(self, table: TableHandle) -> TableStep:
        return self.turns.begin_assign(table)

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
        for table in tables:
            self.check_own(table)
        if any(table.steps.has_open_step for table in tables):
            return 0
        counts = skipped_clocks([table.steps.missed_count for table in tables])
        is_all = self.are_all_in(tables)
        for table, count in zip(tables, counts, strict=True):
            table.steps.skip_clocks(count, is_owed=is_all)
        return max(counts, default=0)

    def are_all_in(self, tables: Container[TableHandle]) -> bool:
        return all(handle in tables for handle in self.trained)

    def end_steps(self, deadline_s: float) -> None:
        """Seal a final step on every table, and wait for all steps, as `Client.leave` says."""
        connection, pushes = self._connection, self._engine.pushes
        self._engine.check_alive()
        limit_s = now_s() + deadline_s
        uncommitted = [
            ticket
            for handle in self.handles
            if handle.table.table_id not in pushes.refused
            for ticket in handle.steps.uncommitted()
        ]
        opens_within_s = connection.config.request_deadline_s
        ended = [
            self._adopt(connection.asked(self._opened(name, opens_within_s), opens_within_s))
            for name in self._engine.tables_to_end()
        ]
        unstepped = [each for each in ended if each.clock == (each.table.restored_clock or 0)]
        self.join([each for each in unstepped if self._engine.joins(each.table.table_id)])
        final_seals = [each.steps.open_step().seal(skip=True, last=True) for each in ended]
        for ticket in final_seals + uncommitted:
            while not wait([ticket.future], min(max(limit_s - now_s(), 0.0), _LOOK_S)).done:
                if now_s() >= limit_s:
                    raise WaitExpired(connection.why_open(ticket, deadline_s))
                lost = lost_server(self._engine.view, self._engine.links, GRACE_S)
                if lost:
                    raise WaitExpired(
                        f"table '{ticket.table.spec.name}' cannot be left in order: {lost}"
                    )
        failures = [ticket.future.exception() for ticket in final_seals]
        for failure in (*failures, *pushes.refused.values()):
            # No worker waits for another on a table whose update has failed.
            if failure is not None and not isinstance(failure, UpdateFailed):
                raise failure


class Pulls:
    """The pulls of one client. Thread-safe.

    Attributes:
        kept: memory of `pull_model` between two calls, with the values that it holds.
    """

    def __init__(self, connection: ClientConnection, tables: ClientTables) -> None:
        self._connection = connection
        self._tables = tables
        self._engine = connection.engine
        self.kept: dict[TableHandle, tuple[Raw, HeldValues]] = {}
        self._callbacks = CallbackThread()

    def start(
        self,
        table: TableHandle,
        raw: Raw,
        *,
        held: HeldValues | None = None,
        blocks: Container[int] | None = None,
    ) -> PullTicket[Pulled]:
        """Begin to pull a table, or these blocks of it, at this worker's clock into `raw`, 1-D
        uint8, which has space for all of it, and which the background thread writes until the
        ticket is done. What `held` says that `raw` has, and is still the same, does not come.
        """
        order = replace(self._order(table, raw, None, None), held=held, blocks=blocks)
        return PullTicket(table.table, self._connection.loop.start(self._engine.pull(order)))

    def order(
        self, table: TableHandle, raw: Raw, held: HeldValues, timeout_s: float, *, consistent: bool
    ) -> PullOrder:
        """The pull that `start` begins, for `start_together`."""
        return replace(self._order(table, raw, None, timeout_s, consistent=consistent), held=held)

    def start_together(self, orders: Sequence[PullOrder]) -> PullTicket[Ends[Pulled]]:
        """Begin pulls of which the first that fails ends the others, as `ended_together`."""
        pulling = ended_together(self._engine.pull, orders)
        return PullTicket(orders[0].table, self._connection.loop.start(pulling))

    def start_pieces(
        self, table: TableHandle, raw: Raw, pieces: Sequence[Region], held: HeldValues
    ) -> list[PullTicket[Pulled]]:
        """As `start`, in pieces of whole blocks, in this order; a ticket for each. `raw` is the
        whole table's memory, which has the values `held`.
        """
        width = element_bytes(table.dtype)
        futures: list[Future[Pulled]] = []
        for number, piece in enumerate(pieces):
            memory = raw[piece.begin * width : piece.end * width]
            order = replace(self._order(table, memory, piece, None), held=held)
            before = futures[number - _PIECES_IN_FLIGHT] if number >= _PIECES_IN_FLIGHT else None
            futures.append(self._connection.loop.start(self._pull_after(before, order)))
        return [PullTicket(table.table, future) for future in futures]

    async def _pull_after(self, before: Future[Pulled] | None, order: PullOrder) -> Pulled:
        """Pull when the one `before` has ended, well or not."""
        if before is not None:
            ended = asyncio.wrap_future(before)
            await asyncio.wait([ended])
            ended.exception()  # whoever waits for it is told
        return await self._engine.pull(order)

    def start_state(self, table: TableHandle, raw: Raw, array: str) -> PullTicket[Pulled]:
        """As `start`, of optimizer state (`OptimizerSpec.has_array`), in the arithmetic's dtype."""
        order = self._order(table, raw, None, None, array=array)
        return PullTicket(table.table, self._connection.loop.start(self._engine.pull(order)))

    def start_values(
        self,
        table: TableHandle,
        region: Region,
        out: Array | None,
        *,
        consistent: bool = False,
        timeout_s: float | None = None,
    ) -> PullTicket[Array]:
        if out is not None:
            check_shape(shape_of(out), region, "out")
        values = empty(region.shape, table.dtype) if out is None else out
        raw = writable_raw_of(values, table.dtype, "out")
        order = self._order(table, raw, region, timeout_s, consistent=consistent)
        return PullTicket(table.table, self._connection.loop.start(self._values(order, values)))

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[list[PullTicket[Any]]]:
        """Pulls, for the block to add, that end if it fails: by Ctrl-C, too. Afterwards nothing
        writes into the caller's memory.
        """
        begun: list[PullTicket[Any]] = []
        try:
            yield begun
        except BaseException:
            for ticket in begun:
                self._connection.loop.end(ticket.future, GRACE_S)
            raise

    def values(self, start: Callable[[], PullTicket[Array]], timeout_s: float | None) -> Array:
        """The values of the pull that `start` begins."""
        with self.giving_up() as begun:
            with uninterrupted():
                begun.append(start())
            self._connection.wait_for(begun, timeout_s)
            values: Array = begun[0].future.result()
            return values

    def start_rows(
        self,
        table: TableHandle,
        cut: RowBatch | CutIds | GivenIds,
        timeout_s: float | None = None,
        *,
        clock: int | None = None,
    ) -> PullTicket[npt.NDArray[Any]]:
        """Begin to pull the rows of ids, at this worker's clock unless another one is given.
        Shapes: of the values: (n, length), in the order of `cut.ids`.
        """
        self._connection.check_usable()
        self._tables.check_own(table)
        length = table.element_count
        row_bytes = length * element_bytes(table.dtype)
        values = np.empty((len(cut.ids), length), table.dtype.value)
        raw = values.view(np.uint8).reshape(-1)
        most = min(MAX_PULLED_COUNT, limits.MAX_PULLED_ROW_BYTES // row_bytes)
        whole = self._order(table, raw[:0], Region(0, 0, (0,)), timeout_s)
        if clock is not None:
            whole = replace(whole, clock=clock)
        orders = []
        for piece in cut.pieces(most):
            begin = piece.begin * row_bytes
            part = raw[begin : begin + len(piece.ids) * row_bytes]
            orders.append(replace(whole, raw=part, ids=piece))
        return PullTicket(table.table, self._connection.loop.start(self._rows(orders, values)))

    async def _rows(
        self, orders: Sequence[PullOrder], values: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        if len(orders) == 1:
            await self._engine.pull(orders[0])
        else:
            await asyncio.gather(*map(self._engine.pull, orders))
        return values

    async def _values(self, order: PullOrder, values: Array) -> Array:
        await self._engine.pull(order)
        return values

    def _order(
        self,
        table: TableHandle,
        raw: Raw,
        region: Region | None,
        timeout_s: float | None,
        *,
        consistent: bool = False,
        array: str = "",
    ) -> PullOrder:
        self._connection.check_usable()
        self._tables.check_own(table)
        region = region or region_of(table.table, None)
        deadline_s = self._connection.deadline_s(timeout_s)
        width = table.spec.arithmetic_codec.element_bytes if array else element_bytes(table.dtype)
        expected_bytes = region.element_count * width
        if raw.nbytes != expected_bytes:
            raise InvalidKeys(f"the memory has {raw.nbytes} bytes; expected {expected_bytes}")
        return PullOrder(
            table=table.table,
            region=region,
            raw=raw,
            clock=table.clock,
            consistent=consistent,
            is_reader=self._connection.is_reader and not array,
            deadline_s=now_s() + deadline_s,
            steps=table.steps,
            array=array,
            encoding=None if array else table.codecs.pull,
        )

    def with_callback(
        self, ticket: PullTicket[Array], callback: Callable[[Array], None]
    ) -> PullTicket[Array]:
        """Call `callback` with the values, on a thread of its own; the ticket is done after it."""
        done: Future[Array] = Future()

        def arrived(values: Future[Array]) -> None:
            self._callbacks.call(lambda: finish(values))

        def finish(values: Future[Array]) -> None:
            failure = values.exception()
            if failure is not None:
                logs.warning("pull_failed", table=ticket.table.spec.name, error=failure)
                done.set_exception(failure)
                return
            try:
                callback(values.result())
            finally:
                done.set_result(values.result())

        ticket.future.add_done_callback(arrived)
        return PullTicket(ticket.table, done)

    def close(self) -> None:
        self._callbacks.stop()


def _check_codecs(handle: TableHandle, codecs: TableCodecs, chosen: Mapping[str, object]) -> None:
    """InvalidConfig if a call chooses other codecs than those that the handle has."""
    for option, wanted, own in (
        ("push_codec", codecs.push, handle.codecs.push),
        ("pull_codec", codecs.pull, handle.codecs.pull),
    ):
        if chosen.get(option) is not None and wanted != own:
            raise InvalidConfig(
                f"{option} of table '{handle.name}' is {chosen[option]}, but this client opened it "
                f"with {name_of(own)}; a table has one handle"
            )


def _why_not(table: Table, clock: int, worker_count: int) -> str:
    """As `why_no_edit`, for a step of that clock, as far as this worker knows."""
    setting, change = table.consistency, table.change
    if worker_count == 1 and all(join.rank == 0 for join in table.joins):
        return "" if not setting.backup_workers else f"under {setting}"
    if setting.mode is not Mode.BSP or setting.backup_workers:
        return f"under {setting}, where no step is all workers'"
    if change is not None and change.join is None and clock <= change.after_clock:
        return f"before step {change.after_clock + 1}, from which on {setting} holds"
    return ""
