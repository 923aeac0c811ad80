"""The tables of a cluster, as a client sees them: making, opening and changing them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

from ps_core.cluster_view import ClusterView
from ps_core.consistency import Consistency, Mode
from ps_core.tables import OptimizerSpec, Table, TableSpec
from ps_worker.client.connection import GRACE_S, Connection
from ps_worker.client.shown_options import THE_CLIENTS, shows
from ps_worker.spec.settings import (
    TABLE_DEFAULTS,
    Layout,
    SupportsSpec,
    TableOptions,
    consistency_of,
    table_spec,
)
from ps_worker.steps.table_handle import TableHandle, check_handle
from ps_worker.transport.consistent_pulls import new_cut


class Catalogue(Connection):
    """The middle of `ps_worker.client.client.Client`: its calls about whole tables."""

    @shows(TableOptions, {**TABLE_DEFAULTS, "consistency": THE_CLIENTS})
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
            optimizer: what the servers do with an update: `SGD`, `Adam`, ...

        Options:
            dtype (str, 'float32'): the element type of pushes and pulls: "float32", "float64",
                "float16" or "bfloat16". The two halves keep float32 values on the servers.
            consistency (Consistency | str, the client's): `BSP()`, `SSP(staleness)` or `ASP()`, or
                their short form ("ssp:4"). The client's is BSP unless its option says otherwise.
            reduction (str, 'mean'): "mean": sum in rank order, one multiply by 1 / contributors; or
                "sum". Under SSP and ASP each step is applied whole in both cases.
            init (Initial, Zeros()): the values it starts with: `Zeros()`, `Constant(value)`,
                `Inline(values)` or `FromRank0()`.
            block_elements (int, 0): elements a block, a multiple of 64; 0 means 262144.
            allow_non_finite (bool, False): accept gradients with infinities and NaNs; else they are
                refused.
            gate_bytes (int, 0): the bound of memory for waiting steps on each server; 0 means the
                server's own.
            kernels (str, 'fast'): "fast", or "exact": bit-equal with torch.optim.
            timeout_s (float | None, None): how long to wait for the cluster's servers; None means
                the client's request_deadline_s.

        Blocking: until every server of the table knows this client; waits for servers that have not
        registered yet, at most `timeout_s`.

        Raises:
            InvalidConfig: a setting is wrong.
            TableExists: a table of that name differs; the message names the first difference.
            WaitExpired: servers are missing; the message says how many.
        """
        self.check_may_push("create tables")
        options.setdefault("consistency", self.consistency)
        spec = table_spec(name, layout, optimizer, options)
        deadline_s = self.deadline_s(options.get("timeout_s"))
        creating = self._loop.start(self.engine.create_table(spec, deadline_s))
        handle = self.adopt(self._result(creating, deadline_s + GRACE_S))
        self.record.table(handle.spec)
        return handle

    def table(self, name: str, timeout_s: float | None = None) -> TableHandle:
        """Open a table that somebody creates; waits for it.

        Args:
            name: the table's name.
            timeout_s: how long to wait for it; None means the client's connect_deadline_s.

        Blocking: until it exists and its servers know this client.

        Raises:
            TableNotFound: nobody created it in time; the message names the tables that there are.
        """
        self.check_usable()
        deadline_s = self._config.connect_deadline_s if timeout_s is None else timeout_s
        opening = self._loop.start(self.engine.open_table(name, deadline_s))
        return self.adopt(self._result(opening, deadline_s + GRACE_S))

    def tables_under(
        self,
        prefix: str,
        is_complete: Callable[[list[TableSpec]], bool],
        timeout_s: float | None = None,
    ) -> list[TableHandle]:
        """Open all tables whose names begin with `prefix`.

        Args:
            prefix: the beginning of the names.
            is_complete: called on the background thread; whether these tables are all.
            timeout_s: how long to wait for that; None means the client's connect_deadline_s.

        Returns:
            The tables there are: all of them, unless time was up before.

        Blocking: until they are complete or time is up.
        """
        self.check_usable()
        deadline_s = self._config.connect_deadline_s if timeout_s is None else timeout_s
        opening = self._loop.start(self.engine.open_tables(prefix, is_complete, deadline_s))
        return [self.adopt(table) for table in self._result(opening, deadline_s + GRACE_S)]

    def join_tables(self, tables: Sequence[TableHandle]) -> None:
        """Wait until this worker has joined these tables, which others train; the clock of each
        handle is then the one after which it has joined.

        Blocking: up to the client's request_deadline_s.

        Raises:
            WaitExpired: the scheduler has not settled it in time.
        """
        self.check_usable()
        for table in tables:
            check_handle(table)
        deadline_s = self._config.request_deadline_s
        table_ids = {handle.table.table_id for handle in tables}
        joining = self._loop.start(self.engine.joined_after(table_ids, deadline_s))
        joined = self._result(joining, deadline_s + GRACE_S)
        for handle in tables:
            handle.steps.reached(joined[handle.table.table_id])

    def set_consistency(
        self,
        table: TableHandle | str,
        consistency: Consistency | str,
        *,
        after_clock: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Change how far a table's workers may run apart, while they train.

        Every server changes at the same clock: what belongs to a clock up to the one that is
        returned is treated as before, everything beyond under the new setting. Out of SSP or ASP
        into BSP, workers that are ahead wait at that clock for the others. All workers may call it
        with the same setting: the first call changes the table, the others find it changed.

        Args:
            table: a handle, or the name of any table of the cluster.
            consistency: `BSP()`, `SSP(staleness)`, `ASP()`, or their short form ("ssp:4").
            after_clock: the setting of before holds up to this clock at least; the same number at
                every worker makes runs repeatable. 0 (default): as soon as can be.
            timeout_s: how long to wait for it; None means the client's request_deadline_s.

        Returns:
            The last clock of the setting before; 0 for a table that was made with this setting and
            never changed.

        Blocking: until every server with a part of the table has promised to change, and the
        scheduler has said so; a few milliseconds where all are well.

        Raises:
            TableNotFound: there is no table of that name.
            InvalidConfig: the setting is wrong, or the table's optimizer cannot have it.
            WaitExpired: a server has not promised in time, named by the message; nothing changed.
        """
        self.check_usable()
        if not isinstance(table, str):
            check_handle(table)
        name = table if isinstance(table, str) else table.name
        wanted = consistency_of(consistency)
        deadline_s = self.deadline_s(timeout_s)
        changing = self._loop.start(
            self.engine.set_consistency(name, wanted, after_clock, deadline_s)
        )
        return self._result(changing, deadline_s + GRACE_S).after_clock

    def consistency_of(self, table: TableHandle) -> Consistency:
        """The newest setting of a table, as the cluster's newest view has it."""
        self.check_usable()
        check_handle(table)
        return self.engine.table(table.table.table_id).consistency

    def await_view(
        self, holds: Callable[[ClusterView], bool], what: str, deadline_s: float
    ) -> None:
        """Wait for a view of the cluster for which `holds`; `what` names it in the error.

        Blocking: at most `deadline_s`.

        Raises:
            WaitExpired: none came.
        """
        waiting = self._loop.start(self.engine.view_where(holds, what, deadline_s))
        self._result(waiting, deadline_s + GRACE_S)

    def why_no_edit(self, table: TableHandle) -> str:
        """Why the next step of a table cannot be an edit, as far as the newest view says; empty if
        it can.
        """
        engine = self.engine
        return _why_not(engine.table(table.table.table_id), table.clock + 1, engine.worker_count)

    @contextlib.contextmanager
    def cut(self, tables: Sequence[TableHandle], lasts_s: float) -> Iterator[tuple[int, list[int]]]:
        """Readers: hold all of these tables, at most `lasts_s`, while consistent reads of one clock
        of each are made. Gives the cut's number, for `start_pull`, and each table's lowest clock.

        Blocking: until every server has answered; at the end, until each has let go.

        Raises:
            PushpullError: a server did not answer, or refused.
        """
        self.check_usable()
        number, held = new_cut(), [table.table for table in tables]
        try:
            begun = self._loop.start(self.engine.begin_cut(number, held, lasts_s))
            clocks = self._result(begun, lasts_s + GRACE_S)
            yield number, [clocks[table.table_id] for table in held]
        finally:
            self._result(self._loop.start(self.engine.end_cut(number, held)), GRACE_S)


def _why_not(table: Table, clock: int, worker_count: int) -> str:
    """Why a step of that clock cannot be an edit, as far as this worker knows; empty if it can."""
    setting, change = table.consistency, table.change
    if worker_count == 1 and all(join.rank == 0 for join in table.joins):
        return "" if not setting.backup_workers else f"under {setting}"
    if setting.mode is not Mode.BSP or setting.backup_workers:
        return f"under {setting}, where no step is all workers'"
    if change is not None and change.join is None and clock <= change.after_clock:
        return f"before step {change.after_clock + 1}, from which on {setting} holds"
    return ""
