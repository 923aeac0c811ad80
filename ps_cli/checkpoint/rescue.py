"""`pushpull checkpoint rescue`: the parameters of servers whose scheduler is gone, as one file."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc.aio

from ps_cli.console.output import Output
from ps_cli.console.tensor_file import write_tables
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.errors import NotOwner, PushpullError
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_runtime.cluster import kept_values
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.grpc.errors import error_from_proto, from_rpc_error
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, types_pb2

_DEADLINE_S = 60.0
_Blocks = dict[tuple[str, int], bytes]


def rescue(values_file: Path, out: Path, output: Output) -> int:
    """Read all parameters from their servers, and write them as `checkpoint export` does."""
    session, view = kept_values.read(values_file)
    found = [t for t in view.tables if t.spec.optimizer.kind is not OptimizerKind.AGGREGATE]
    tables = [table for table in found if not table.run and table.spec.rows is None]
    blocks = asyncio.run(_read(session, view, tables))
    count = write_tables(out, tables, lambda table, block: blocks[table.spec.name, block])
    output.say(f"{out}: {count} tensors of {len(tables)} tables, without optimizer state")
    others = sorted({table.run for table in found if table.run})
    if others:
        output.say(f"not in it: tables of runs that have a name ({', '.join(others)})")
    of_rows = [table.spec.name for table in found if table.spec.rows is not None]
    if of_rows:
        output.say(f"not in it: tables of rows ({', '.join(of_rows)})")
    return 0


async def _read(
    session: types_pb2.SessionIdentity, view: ClusterView, tables: list[Table]
) -> _Blocks:
    blocks: _Blocks = {}
    addresses = {node.node_id: node.address for node in view.nodes}
    channels: dict[str, grpc.aio.Channel] = {}
    async with contextlib.AsyncExitStack() as stack:
        for table in tables:
            for range_id in table.blocks_by_range(len(view.ranges)):
                assignment = view.ranges[range_id]
                if assignment.primary is None:
                    raise NotOwner(f"range {range_id} of table '{table.spec.name}' has no primary")
                address = addresses[assignment.primary]
                if address not in channels:
                    channels[address] = await stack.enter_async_context(aio_channel(address))
                stub = parameters_pb2_grpc.ParameterServiceStub(channels[address])
                try:
                    await _read_range(stub, session, (table, assignment), blocks)
                except PushpullError as error:
                    where = f"range {range_id} of table '{table.spec.name}' at {address}"
                    message = f"{where} cannot be read: {error.message}"
                    raise type(error)(message) from error
    return blocks


async def _read_range(
    stub: parameters_pb2_grpc.ParameterServiceStub,
    session: types_pb2.SessionIdentity,
    shard: tuple[Table, RangeAssignment],
    blocks: _Blocks,
) -> None:
    table, assignment = shard
    is_wide = table.spec.dtype is DType.FLOAT64
    request = parameters_pb2.PullRequest(
        session=session,
        table_id=table.table_id,
        ranges=[
            parameters_pb2.RangePull(
                range_id=assignment.range_id, assignment_epoch=assignment.assignment_epoch
            )
        ],
        deadline_ms=round(_DEADLINE_S * 500),
        codec=types_pb2.CODEC_FP64 if is_wide else types_pb2.CODEC_FP32,
    )
    try:
        async for response in stub.Pull(request, timeout=_DEADLINE_S):
            if response.HasField("error"):
                raise error_from_proto(response.error.error)
            blocks[table.spec.name, response.block.block] = response.block.payload
    except grpc.RpcError as failure:
        raise from_rpc_error(failure) from failure
