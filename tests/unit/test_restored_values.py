"""A checkpoint of which something cannot be read: its table fails, and no other does (G7)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.errors import UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.manifest import MANIFEST_FILE
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import StoredBlock
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.checkpoint.restored_values import RestoredValues, _Tensors
from ps_server.lane.lane_socket import SharedLanes
from ps_server.service.node import ParameterNode
from ps_server.stores import Shards
from ps_server.values.custom_updates import checked
from ps_server.values.delay_compensation import MEAN_SQUARE
from ps_server.values.shard_store import ShardStore
from tests.unit.checkpoint_files import COUNTERS, SPECS, WEIGHTS, write_checkpoint
from tests.unit.reluctant_store import WAIT_S, Gate, reluctant_store
from tests.unit.sample_updates import Counting

KEY = b"k" * 16
LIMIT_S = 20.0
RANGE_COUNT = 3
PART = "server-1.safetensors"
"""It has the even blocks, those of the counters last."""


def restored(
    tmp_path: Path, cut_off: int = 0, flipped: int = 0, *, is_garbage: bool = False
) -> dict[str, UpdateFailed | None]:
    """What has failed, by table, on a server that loads a checkpoint of two tables.

    Args:
        cut_off: so many bytes of a part are missing.
        flipped: so many bytes before its end a bit is another.
        is_garbage: no block of any part is what was saved.
    """
    place = locate(str(tmp_path / "checkpoint"))
    write_checkpoint(CheckpointDirectory(place), 1)
    part = tmp_path / "checkpoint" / PART
    content = bytearray(part.read_bytes())
    if flipped:
        content[-flipped] ^= 1
    part.write_bytes(content[: len(content) - cut_off])
    for path in (tmp_path / "checkpoint").glob("server-*") if is_garbage else ():
        whole = path.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        path.write_bytes(whole[:begin] + bytes(255 ^ each for each in whole[begin:]))

    node, view = restoring_node(place.url)
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


def restoring_node(
    url: str, specs: Sequence[TableSpec] = SPECS, shards: Shards | None = None
) -> tuple[ParameterNode, ClusterView]:
    """A server that has all ranges of restored tables, and its view."""
    own = Session("c", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
    metrics, own = ServerMetrics(CollectorRegistry()), replace(own, token=own.signed(KEY))
    node = ParameterNode(own, KEY, 1, metrics, lambda: 0.0, shards)
    ranges = tuple(
        RangeAssignment(RangeId(number), slots, AssignmentEpoch(1), own.node_id)
        for number, slots in enumerate(key_ranges(RANGE_COUNT))
    )
    tables = tuple(
        Table(TableId(number), 0, spec, restored_clock=41) for number, spec in enumerate(specs, 1)
    )
    view = ClusterView(1, "c", 1, 1, (), ranges, tables, restored_from=url)
    node.observe(view)
    return node, view


def test_a_whole_checkpoint_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pushpull"):
        assert restored(tmp_path) == {WEIGHTS.name: None, COUNTERS.name: None}
    assert "event=restored " in caplog.text


class Renamed(Counting):
    """Of the state that a checkpoint has it knows one; another is new."""

    slots: ClassVar = {"exp_avg": 0.0, "count": 1.0}


def test_state_that_a_custom_update_has_no_more_is_dropped_and_told_with_what_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for a table, however many ranges it has."""
    directory = CheckpointDirectory(locate(str(tmp_path / "checkpoint")))
    write_checkpoint(directory, 1)
    spec = replace(WEIGHTS, optimizer=OptimizerSpec(OptimizerKind.CUSTOM, custom_update="mine"))
    shards = Shards(SharedLanes(), {"mine": checked("mine", Renamed())})
    node, view = restoring_node(directory.url, [spec], shards)

    async def load() -> None:
        values = RestoredValues(node)
        values.observe(view)
        await asyncio.wait(values._tasks)
        await values.close()

    asyncio.run(asyncio.wait_for(load(), LIMIT_S))
    (told,) = [r.message for r in caplog.records if "custom_state_differs" in r.message]
    assert "update=mine" in told
    assert "begins_anew=count" in told
    assert "dropped=exp_avg_sq" in told
    for (_, range_id), store in shards.stores.items():
        for block in node.machine.shards[TableId(1), range_id].state.blocks:
            assert isinstance(store, ShardStore)
            assert [name for name, _ in store.saved(block).tensors] == ["values", "exp_avg"]


def test_what_delay_compensation_has_summed_goes_on_without_a_slot_of_its_name() -> None:
    spec = replace(WEIGHTS, optimizer=OptimizerSpec(OptimizerKind.CUSTOM, custom_update="mine"))
    shards = Shards(SharedLanes(), {"mine": checked("mine", Renamed())})
    tensors = _Tensors(Table(TableId(1), 0, spec), shards)
    for names in (["values", "exp_avg", "count"], ["values", "exp_avg", "count", MEAN_SQUARE]):
        block = StoredBlock(version=1, steps=(1,), crc32s=dict.fromkeys(names, 0))
        assert list(tensors.loaded_of(block)) == names
    assert not tensors.differ


def test_what_has_failed_as_a_whole_is_not_said_to_be_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pushpull"):
        assert all(failure is not None for failure in restored(tmp_path, is_garbage=True).values())
    assert "event=restore_failed" in caplog.text
    assert "event=restored " not in caplog.text


class Closing(CheckpointReader):
    """One that is not closed well; its twins are closed when it is, and the load has ended, or has
    had time to. `late` are those that were closed when it had.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        super().__init__(directory)
        self.has_ended, self.late, self.first = threading.Event(), list[bool](), self

    def close(self) -> None:
        super().close()
        if self is self.first:
            raise OSError("it is not closed")
        self.late.append(self.has_ended.wait(0.1))


def test_a_load_ends_when_all_its_readers_are_closed(tmp_path: Path) -> None:
    """Else a server that ends would leave their files to threads."""
    directory = CheckpointDirectory(locate(str(tmp_path / "checkpoint")))
    write_checkpoint(directory, 1)
    reader = Closing(directory)

    async def load() -> None:
        values = RestoredValues(restoring_node(directory.url)[0])
        with pytest.raises(OSError, match="it is not closed"):
            await values._load_ranges(reader, [])
        reader.has_ended.set()

    asyncio.run(asyncio.wait_for(load(), LIMIT_S))
    assert not any(reader.late)


def test_a_checkpoint_place_that_does_not_answer_keeps_no_server() -> None:
    """Its process ends, though a thread waits for the place."""
    with reluctant_store() as store:
        directory = store.directory(1, "c")
        reading = Gate("cat_file", MANIFEST_FILE)
        node, view = restoring_node(directory.url)

        async def load() -> None:
            values = RestoredValues(node)
            values.observe(view)
            await asyncio.to_thread(reading.wait)
            await values.close()

        server = threading.Thread(target=lambda: asyncio.run(load()), daemon=True)
        server.start()
        server.join(WAIT_S / 2)
        has_ended = not server.is_alive()
        reading.let_go()
        server.join()
        assert has_ended


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
