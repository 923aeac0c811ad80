"""A client's pulls: into the caller's memory, into arrays, and with callbacks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from ps_core.errors import InvalidKeys
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.client.connection import ClientConnection
from ps_worker.client.tables import ClientTables
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
from ps_worker.steps.steps import Pulled, PullTicket, TableHandle
from ps_worker.transport.consistent_pulls import Moment
from ps_worker.transport.loop import CallbackThread
from ps_worker.transport.pulls import PullOrder


class Pulls:
    """The pulls of one client. Thread-safe."""

    def __init__(self, connection: ClientConnection, tables: ClientTables) -> None:
        self._connection = connection
        self._tables = tables
        self._engine = connection.engine
        self._callbacks = CallbackThread()

    def start(
        self,
        table: TableHandle,
        raw: Raw,
        *,
        consistent: bool = False,
        timeout_s: float | None = None,
        at: Moment | None = None,
    ) -> PullTicket[Pulled]:
        """Begin to pull a whole table at this worker's clock into `raw`.

        With `consistent` a reader may name the moment `at`; the ticket ends with AlreadyPast if a
        range is past it.

        Shapes:
            raw: 1-D uint8, writable; the table's elements in its dtype. The background thread
            writes it until the ticket is done.

        Raises:
            InvalidKeys: `raw` has another length than the table.
        """
        order = self._order(table, raw, None, timeout_s, consistent=consistent)
        if at is not None:
            order = replace(order, clock=at.clock, cut=at.cut, is_reader=False)
        return PullTicket(table.table, self._connection.loop.start(self._engine.pull(order)))

    def start_state(self, table: TableHandle, raw: Raw, array: str) -> PullTicket[Pulled]:
        """Begin to pull an array of a table's optimizer state, at this worker's clock, into `raw`.

        Args:
            array: see `OptimizerSpec.has_array`.

        Shapes:
            raw: 1-D uint8, writable; all elements of the table in the dtype of its arithmetic.

        Raises:
            InvalidKeys: `raw` has another length.
        """
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
        """Begin to pull a region of a table into `out`, or into a new array."""
        if out is not None:
            check_shape(shape_of(out), region, "out")
        values = empty(region.shape, table.dtype) if out is None else out
        raw = writable_raw_of(values, table.dtype, "out")
        order = self._order(table, raw, region, timeout_s, consistent=consistent)
        return PullTicket(table.table, self._connection.loop.start(self._values(order, values)))

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
        """Wait for the callbacks, and end their thread."""
        self._callbacks.stop()
