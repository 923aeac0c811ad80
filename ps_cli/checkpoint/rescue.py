"""`pushpull checkpoint rescue`: the parameters of servers whose scheduler is gone, as one file.

Rules:
    - Every range is read from its primary. If one cannot be read, no file is written.
    - A range of parameters is as it was at one moment, and so is each partition of a table of rows:
      one that is pushed to while it is read is read anew.
    - Parameters are in memory meanwhile; rows are on disk, beside the file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import numpy as np
from rich.progress import MofNCompleteColumn

from ps_cli.checkpoint.commands import progress_bars
from ps_cli.console.output import Output
from ps_cli.console.spool import Spool, SpooledRows
from ps_cli.console.tensor_file import Written, write_tables
from ps_core import limits
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.errors import NotOwner, Overloaded, PushpullError
from ps_core.keys import TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_runtime.cluster import kept_values
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.grpc.errors import error_from_proto, from_rpc_error, has_expired_unheard
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, types_pb2

_DEADLINE_S = 60.0
_ATTEMPT_COUNT = 20
"""Times that a partition is read from its beginning, if it is pushed to while it is read."""


def rescue(values_file: Path, out: Path, output: Output) -> int:
    """Read all parameters from their servers, and write them as `checkpoint export` does."""
    session, view = kept_values.read(values_file)
    found = [t for t in view.tables if t.spec.optimizer.kind is not OptimizerKind.AGGREGATE]
    tables = [table for table in found if not table.run]
    dense = [table for table in tables if table.spec.rows is None]
    with Spool(out) as spool:
        reading = _Reading(session, view)
        rows = {t.table_id: SpooledRows(t, spool) for t in tables if t.spec.rows is not None}
        with progress_bars(output, MofNCompleteColumn()) as bars:
            count = sum(len(table.blocks_by_range(len(view.ranges))) for table in tables)
            task = bars.add_task("reading ranges", total=count)
            asyncio.run(reading.read(tables, rows, lambda: bars.advance(task)))
        beside: list[Written] = [each for spooled in rows.values() for each in spooled.written()]
        written = write_tables(
            out, dense, lambda table, block: reading.blocks[table.spec.name, block], beside
        )
    row_count = sum(spooled.count for spooled in rows.values())
    of_rows = f", with {row_count:,} rows" if rows else ""
    output.say(
        f"{out}: {written} tensors of {len(tables)} tables{of_rows}, without optimizer state"
    )
    others = sorted({table.run for table in found if table.run})
    if others:
        output.say(f"not in it: tables of runs that have a name ({', '.join(others)})")
    return 0


class _Reading:
    """Reads tables from their servers, as a reader of the last view.

    Attributes:
        blocks: of the tables of parameters.
    """

    def __init__(self, session: types_pb2.SessionIdentity, view: ClusterView) -> None:
        self._session = session
        self._view = view
        self.blocks: dict[tuple[str, int], bytes] = {}

    async def read(
        self, tables: list[Table], rows: dict[TableId, SpooledRows], told: Callable[[], None]
    ) -> None:
        """Read all ranges of the tables, one after the other; `told` is called after each."""
        addresses = {node.node_id: node.address for node in self._view.nodes}
        channels: dict[str, grpc.aio.Channel] = {}
        async with contextlib.AsyncExitStack() as stack:
            for table in tables:
                for range_id, blocks in table.blocks_by_range(len(self._view.ranges)).items():
                    assignment = self._view.ranges[range_id]
                    where = f"range {range_id} of table '{table.spec.name}'"
                    if assignment.primary is None:
                        raise NotOwner(f"{where} has no primary")
                    address = addresses[assignment.primary]
                    if address not in channels:
                        channels[address] = await stack.enter_async_context(aio_channel(address))
                    backups = tuple(addresses[b] for b in assignment.backups if b in addresses)
                    at = f"{where} at {address}"
                    shard = _Shard(table, assignment, at, backups, channels[address])
                    if table.spec.rows is None:
                        async for value in self._values(shard):
                            self.blocks[table.spec.name, value.block] = value.payload
                    for block in blocks if table.spec.rows is not None else ():
                        await self._read_rows(shard, block, rows[table.table_id])
                    told()

    async def _read_rows(self, shard: _Shard, partition: int, rows: SpooledRows) -> None:
        """Read a partition as it is at one moment: with one version in all answers."""
        for _ in range(_ATTEMPT_COUNT):
            rows.forget(partition)
            versions: set[int] = set()
            count, is_whole = 0, False
            while not is_whole and len(versions) <= 1:
                pulled = self._values(shard, (partition,), (count,))
                (value,) = [each async for each in pulled]
                versions.add(value.version)
                more = _add_rows(shard.table, partition, value.payload, rows)
                count, is_whole = count + more, not more
            if len(versions) == 1:
                return
        raise Overloaded(
            f"partition {partition} in {shard.where} was pushed to each of the {_ATTEMPT_COUNT} "
            "times that it was read: end its workers, and say the command again"
        )

    async def _values(
        self, shard: _Shard, blocks: tuple[int, ...] = (), skips: tuple[int, ...] = ()
    ) -> AsyncIterator[parameters_pb2.BlockValue]:
        is_wide = shard.table.spec.dtype is DType.FLOAT64
        part = parameters_pb2.RangePull(
            range_id=shard.assignment.range_id,
            assignment_epoch=shard.assignment.assignment_epoch,
            blocks=blocks,
            skipped_row_counts=skips,
        )
        request = parameters_pb2.PullRequest(
            session=self._session,
            table_id=shard.table.table_id,
            ranges=[part],
            deadline_ms=round(_DEADLINE_S * 500),
            codec=types_pb2.CODEC_FP64 if is_wide else types_pb2.CODEC_FP32,
        )
        stub = parameters_pb2_grpc.ParameterServiceStub(shard.channel)
        try:
            async for response in stub.Pull(request, timeout=_DEADLINE_S):
                if response.HasField("error"):
                    refusal = error_from_proto(response.error.error)
                    raise unread(shard.where, shard.backups, refusal)
                yield response.block
        except grpc.RpcError as failure:
            raise unread(shard.where, shard.backups, from_rpc_error(failure)) from failure


class _Shard(NamedTuple):
    """A table in one range, at its primary. `backups` are the addresses of the others."""

    table: Table
    assignment: RangeAssignment
    where: str
    backups: tuple[str, ...]
    channel: grpc.aio.Channel


def unread(where: str, backups: Sequence[str], error: PushpullError) -> PushpullError:
    """The error of a range that cannot be read. A primary answers nothing while a backup is silent,
    since that may have taken its place.
    """
    why = error.message
    if backups and has_expired_unheard(error):
        why = f"no answer came within {_DEADLINE_S:g} s; it takes the servers that back it up too: "
        why += ", ".join(backups)
    return type(error)(f"{where} cannot be read: {why}")


def _add_rows(table: Table, partition: int, payload: bytes, rows: SpooledRows) -> int:
    """Add the rows of an answer; their number."""
    spec = table.spec
    row_bytes = spec.element_count * spec.accumulator_element_bytes
    count = len(payload) // (limits.ROW_ID_BYTES + row_bytes)
    ids = np.frombuffer(payload, "<u8", count)
    values = np.frombuffer(payload, np.dtype(spec.dtype.value), offset=ids.nbytes)
    rows.add(partition, ids, values.reshape(count, spec.element_count))
    return count
