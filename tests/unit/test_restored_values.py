"""A checkpoint of which something cannot be read: its table fails, and no other does (G7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.errors import UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.checkpoint.restored_values import RestoredValues
from ps_server.service.node import ParameterNode
from tests.unit.checkpoint_files import COUNTERS, SPECS, WEIGHTS, write_checkpoint

KEY = b"k" * 16
LIMIT_S = 20.0
RANGE_COUNT = 3
PART = "server-1.safetensors"
"""It has the even blocks, those of the counters last."""


def restored(tmp_path: Path, cut_off: int = 0, flipped: int = 0) -> dict[str, UpdateFailed | None]:
    """What has failed, by table, on a server that loads a checkpoint of two tables.

    Args:
        cut_off: so many bytes of a part are missing.
        flipped: so many bytes before its end a bit is another.
    """
    place = locate(str(tmp_path / "checkpoint"))
    write_checkpoint(CheckpointDirectory(place), 1)
    part = tmp_path / "checkpoint" / PART
    content = bytearray(part.read_bytes())
    if flipped:
        content[-flipped] ^= 1
    part.write_bytes(content[: len(content) - cut_off])

    own = Session("c", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
    node = ParameterNode(
        replace(own, token=own.signed(KEY)), KEY, 1, ServerMetrics(CollectorRegistry()), lambda: 0.0
    )
    ranges = tuple(
        RangeAssignment(RangeId(number), slots, AssignmentEpoch(1), own.node_id)
        for number, slots in enumerate(key_ranges(RANGE_COUNT))
    )
    tables = tuple(
        Table(TableId(number), 0, spec, restored_clock=41) for number, spec in enumerate(SPECS, 1)
    )
    view = ClusterView(1, "c", 1, 1, (), ranges, tables, restored_from=place.url)
    node.observe(view)
    shards = node.machine.shards.values()

    async def load() -> None:
        values = RestoredValues(node)
        values.observe(view)
        await asyncio.wait(values._tasks)
        await values.close()

    asyncio.run(asyncio.wait_for(load(), LIMIT_S))
    found: dict[str, UpdateFailed | None] = {}
    for shard in shards:
        found.setdefault(shard.state.table.spec.name, shard.state.failure)
        assert found[shard.state.table.spec.name] == shard.state.failure
        assert shard.state.initialized == (shard.state.failure is None)
    return found


def test_a_whole_checkpoint_is_served(tmp_path: Path) -> None:
    assert restored(tmp_path) == {WEIGHTS.name: None, COUNTERS.name: None}


def test_a_block_that_cannot_be_read_fails_its_table_alone(tmp_path: Path) -> None:
    """Whatever was to be loaded with it."""
    found = restored(tmp_path, flipped=1)
    assert found[WEIGHTS.name] is None
    failure = found[COUNTERS.name]
    assert failure is not None
    assert PART in failure.message
    assert "cannot be loaded" in failure.message


def test_a_checkpoint_that_cannot_be_opened_fails_all_its_tables(tmp_path: Path) -> None:
    found = restored(tmp_path, cut_off=1)
    assert set(found) == {WEIGHTS.name, COUNTERS.name}
    assert all(failure is not None and PART in failure.message for failure in found.values())
