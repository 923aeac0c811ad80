"""A server writes its part of a checkpoint while updates go on; they do where it cannot, too."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.change import Checkpoint, TableChange, TableCut
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.consistency import parsed
from ps_core.errors import UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.manifest import PartReport
from ps_core.rows import partition_of
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, RowStorage, TableSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import MAX_HEADER_BYTES, read_header, read_tensor
from ps_runtime.checkpoint.part_writer import PlannedTable
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.observe.metrics import ServerMetrics
from ps_runtime.system.disk import DISK, Disk
from ps_server.checkpoint.checkpoint_parts import _STATE_NAMES, CheckpointParts
from ps_server.ranges.events import Place, PullEvent, PushEvent, SealEvent, SealTerms, Sender
from ps_server.rows.row_partition import RowSnapshot
from ps_server.service.node import ParameterNode
from ps_server.values.row_gradients import payload_of
from tests.integration.lane_cluster import until
from tests.integration.open_files import open_files
from tests.unit.reluctant_store import Gate, reluctant_store

SERVER = Session("cluster", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
MODEL = TableId(1)
BLOCKS, LENGTH, RANGES = 5, 64, 2
OPTIMIZER = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))


class Server:
    """One server of one worker, whose every gradient is one: values count its steps down."""

    def __init__(
        self, url: str, setting: str = "bsp", blocks: int = BLOCKS, length: int = LENGTH
    ) -> None:
        self.length = length
        metrics = ServerMetrics(CollectorRegistry())
        self.now_s = 0.0
        self.node = ParameterNode(SERVER, b"k" * 16, 1, metrics, lambda: self.now_s)
        self.reports: list[tuple[int, PartReport]] = []
        self.reported = asyncio.Event()
        self.parts = CheckpointParts(self.node, self._report, 0)
        spec = replace(self.spec_of(blocks), consistency=parsed(setting))
        self.table = Table(MODEL, 0, spec.validated())
        self.others: tuple[Table, ...] = ()
        self.url, self.view_number = url, 0
        self.stream = self.node.open_stream(replace(SERVER, role=Role.WORKER))
        self._sequences = dict.fromkeys(range(RANGES), 0)
        self.see(None)

    def spec_of(self, blocks: int) -> TableSpec:
        count = blocks * self.length
        return TableSpec("model", DType.FLOAT32, count, OPTIMIZER, block_elements=self.length)

    def begin_parts(self, buffer_bytes: int, disk: Disk = DISK, stall_s: float = 15.0) -> None:
        """With so much room for copies."""
        self.parts = CheckpointParts(self.node, self._report, 0, buffer_bytes, disk, stall_s)

    async def _report(self, number: int, part: PartReport) -> None:
        self.reports.append((number, part))
        self.reported.set()

    def see(self, checkpoint: Checkpoint | None, *, is_under_way: bool = False) -> None:
        """A newer view; if `is_under_way`, ranges that are suspended are served a little later."""
        self.view_number += 1
        ranges = tuple(
            RangeAssignment(RangeId(i), keys, AssignmentEpoch(1), NodeId(1))
            for i, keys in enumerate(key_ranges(RANGES))
        )
        view = ClusterView(
            self.view_number, "cluster", 1, 1, (), ranges, (self.table, *self.others),
            checkpoint=checkpoint,
        )  # fmt: skip
        if is_under_way:
            self.parts.observe(view)
            for range_id in range(RANGES):
                self.node.machine.resume(RangeId(range_id))
        self.node.observe(view)
        self.parts.observe(view)

    def propose(self, number: int = 1, *, base: int = 0, is_under_way: bool = False) -> None:
        """All is to be cut; `is_under_way` as of `see`."""
        setting = self.table.consistency
        proposed = TableChange(self.view_number, 0, setting, checkpoint=number)
        self.table = replace(self.table, proposed=proposed)
        self.see(Checkpoint(number, self.url, base=base), is_under_way=is_under_way)

    def cut(self, clock: int, number: int = 1) -> None:
        """It is settled."""
        self.table = replace(self.table, proposed=None, cut=TableCut(number, clock))
        self.see(Checkpoint(number, self.url, is_cut=True))

    def give_up(self) -> None:
        """Nothing comes of it."""
        self.table = replace(self.table, proposed=None, cut=None)
        self.see(None)

    def gradient_of(self, block: int) -> memoryview:
        del block
        return memoryview(np.ones(self.length, np.float32).tobytes())

    def step(self, clock: int, but: Collection[int] = ()) -> None:
        """The worker's, on all blocks but these."""
        sender = Sender(Incarnation(11), 0, self.stream.origin)
        for range_id, blocks in self.table.blocks_by_range(RANGES).items():
            place = Place(MODEL, range_id, AssignmentEpoch(1))
            for block in blocks:
                if block in but:
                    continue
                gradient = self.gradient_of(block)
                payload = self.node.shards.decode(place, block, Codec.FP32, gradient, b"")
                event = PushEvent(
                    place, sender, self._next(range_id), clock, block, gradient.nbytes, payload
                )
                self.node.entries(self.stream, [event])
            seal = SealEvent(place, sender, self._next(range_id), SealTerms(clock, ()))
            self.node.entries(self.stream, [seal])

    def _next(self, range_id: int) -> int:
        self._sequences[range_id] += 1
        return self._sequences[range_id]

    @property
    def clocks(self) -> set[int]:
        """Of its ranges, once all that was begun is done."""
        self.node.works.finish()
        return {part.state.clock for part in self.node.machine.shards.values()}

    async def report(self) -> PartReport:
        """What it says of its part."""
        await asyncio.wait_for(self.reported.wait(), 20)
        ((_, report),) = self.reports
        return report

    def values(self, report: PartReport) -> dict[str, set[float]]:
        """By tensor, what its file has."""
        directory = CheckpointDirectory(locate(self.url))
        with directory.open(report.file) as file:
            header = read_header(file, "a part", report.byte_count, report.header_sha256)
            return {
                name: set(np.frombuffer(read_tensor(file, header, name), np.float32).tolist())
                for name in header.tensors
            }


class RowServer(Server):
    """Rows in fewer bits, of which a turn copies eight: two partitions in each range."""

    rows = RowsSpec(2 * RANGES, storage=RowStorage.INT8)
    row_bytes = limits.ROW_ID_BYTES + 4 * (1 << 15)  # as they are written
    row_count = 24  # of each partition

    def spec_of(self, blocks: int) -> TableSpec:
        del blocks
        return TableSpec("rows", DType.FLOAT32, 1 << 15, OPTIMIZER, rows=self.rows)

    def gradient_of(self, block: int) -> memoryview:
        numbers = (each for each in range(10_000) if partition_of(each, self.rows) == block)
        ids = np.fromiter(itertools.islice(numbers, self.row_count), np.uint64)
        return memoryview(payload_of(ids, np.ones((len(ids), 1 << 15), np.float32)))

    def snapshots(self) -> list[RowSnapshot]:
        """Of all partitions that are captured."""
        stores = self.node.shards.stores.values()
        parts = [each for store in stores for each in store._partitions.values()]  # type: ignore[union-attr]
        return [each.snapshot for each in parts if each.snapshot is not None]


def run(tmp_path: Path, drive: Callable[[Server], Awaitable[None]], setting: str = "bsp") -> None:
    """Drive a server; at its end nothing of a checkpoint is left in it."""

    async def driven() -> None:
        server = Server(f"file://{tmp_path}/00000001-c", setting)
        await drive(server)
        await server.parts.close()
        assert server.node.shards.snapshots is None

    asyncio.run(driven())


@pytest.mark.parametrize("buffer_bytes", [limits.CHECKPOINT_BUFFER_BYTES, 0])
def test_a_part_has_the_cut_whatever_is_applied_while_it_is_written(
    tmp_path: Path, buffer_bytes: int
) -> None:
    """With room for copies, and where each block has to be written before it may change."""

    async def drive(server: Server) -> None:
        server.begin_parts(buffer_bytes)
        server.step(1)
        server.propose()
        server.step(2)
        assert server.clocks == {1}
        server.cut(2)
        assert server.clocks == {2}
        for clock in (3, 4):
            server.step(clock)
        assert server.clocks == ({4} if buffer_bytes else {2})
        report = await server.report()
        assert not report.problem
        assert server.clocks == {4}
        (table,) = report.tables.values()
        assert (table.block_count, table.clock, table.is_torn) == (BLOCKS, 2, False)
        values = server.values(report)
        assert {name.split("/")[-1] for name in values} == {"values"}
        assert list(values.values()) == [{-2.0}] * BLOCKS

    run(tmp_path, drive)


def test_a_part_has_nothing_of_a_table_of_another_run_that_has_the_same_name(
    tmp_path: Path,
) -> None:
    async def drive(server: Server) -> None:
        server.others = (replace(server.table, table_id=TableId(2), first_ordinal=BLOCKS, run="b"),)
        server.step(1)
        server.propose()
        server.cut(1)
        report = await server.report()
        assert not report.problem
        assert report.tables.keys() == {MODEL}
        values = server.values(report)
        assert len(values) == BLOCKS
        assert list(values.values()) == [{-1.0}] * BLOCKS

    run(tmp_path, drive)


def test_a_part_has_ranges_that_are_served_here_after_its_proposal(tmp_path: Path) -> None:
    """They were taken over, and what that takes was under way when the proposal came."""

    async def drive(server: Server) -> None:
        server.step(1)
        at_once(server.node.machine.suspending([RangeId(0), RangeId(1)]))
        server.propose(is_under_way=True)
        server.cut(1)
        report = await server.report()
        assert not report.problem
        assert list(server.values(report).values()) == [{-1.0}] * BLOCKS

    run(tmp_path, drive)


class SlowDisk(Disk):
    """Files are made when somebody says so."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def create(self, path: Path) -> int:
        self.go_on.wait(20)
        return super().create(path)


@pytest.mark.parametrize("setting", ["bsp", "asp"])
def test_the_loop_waits_for_no_store_and_steps_without_room_for_copies_do(
    tmp_path: Path, setting: str
) -> None:
    """The room is that of one of the two ranges."""
    disk, room = SlowDisk(), 3 * LENGTH * 4

    async def drive(server: Server) -> None:
        server.begin_parts(room, disk)
        server.step(1)
        server.propose()
        server.cut(1)
        for clock in (2, 3):
            server.step(clock)  # nothing here waits: the file is not there
        assert server.clocks == {1, 3}
        parts = server.node.machine.shards
        (held,) = (each for each in parts.values() if each.state.clock == 1)
        read = PullEvent(
            Place(MODEL, held.state.range_id, AssignmentEpoch(1)), 1, None, 2, False, 9
        )
        assert "checkpoint 1 and has no memory" in held.read_gate.explain(read, 0.0)
        disk.go_on.set()
        report = await server.report()
        assert not report.problem
        assert server.clocks == {3}
        assert list(server.values(report).values()) == [{-1.0}] * BLOCKS

    run(tmp_path, drive, setting)


@pytest.mark.parametrize("unchanged", [(), (0, 2)])
def test_rows_in_fewer_bits_change_once_their_copies_fit(
    tmp_path: Path, unchanged: tuple[int, ...]
) -> None:
    """Copies have them in all their bits. Some partitions may be as in the checkpoint before."""
    room = 8 * RowServer.row_bytes

    async def drive() -> None:
        server = RowServer(f"file://{tmp_path}/00000001-c")
        server.begin_parts(room)
        server.step(1)
        server.propose()
        server.cut(1)
        assert not (await server.report()).problem
        server.reports.clear()
        server.reported.clear()
        server.url = f"file://{tmp_path}/00000002-c"
        server.step(2, but=unchanged)
        server.propose(2, base=1)
        server.cut(2, 2)
        assert server.clocks == {2}
        captured = server.snapshots()
        assert len(captured) == 4 - len(unchanged)
        server.step(3)
        assert server.clocks == {2}
        report = await server.report()
        assert not report.problem
        assert report.referred_block_count == len(unchanged)
        assert server.clocks == {3}
        assert max(each._kept_count for each in captured) * server.row_bytes <= room
        await server.parts.close()

    asyncio.run(drive())


def test_a_store_that_takes_nothing_holds_training_for_a_while_only(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def drive(server: Server) -> None:
        server.begin_parts(0, disk, 0.05)
        server.propose()
        server.cut(1)
        server.step(1)
        server.step(2)
        assert server.clocks == {1}

        def go_on() -> None:
            moved_on.append(server.clocks == {2})
            disk.go_on.set()

        moved_on: list[bool] = []
        asyncio.get_running_loop().call_later(1.0, go_on)
        assert "has taken nothing for 0.05 s" in (await server.report()).problem
        assert moved_on == [True], "training waited for the store"

    run(tmp_path, drive)


def test_a_cut_that_comes_late_is_no_stall(tmp_path: Path) -> None:
    """The store's time counts from when training waits for it."""

    async def drive(server: Server) -> None:
        server.begin_parts(0, stall_s=0.6)
        server.propose()
        server.cut(1)  # which nobody has reached
        asyncio.get_running_loop().call_later(1.0, server.step, 1)
        report = await server.report()
        assert not report.problem
        assert list(server.values(report).values()) == [{-1.0}] * BLOCKS

    run(tmp_path, drive)


def test_what_is_asynchronous_is_written_as_it_is_and_said_to_be_torn(tmp_path: Path) -> None:
    async def drive(server: Server) -> None:
        server.step(1)
        server.propose()
        server.cut(5)
        report = await server.report()
        (table,) = report.tables.values()
        assert (table.block_count, table.clock, table.is_torn) == (BLOCKS, 5, True)
        assert list(server.values(report).values()) == [{-1.0}] * BLOCKS

    run(tmp_path, drive, "asp")


def test_a_place_that_cannot_be_written_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    """The news of the cut may be on its way while it says so."""
    (tmp_path / "00000001-c").write_text("no directory")

    async def drive(server: Server) -> None:
        server.propose()
        report = await server.report()
        assert "00000001-c" in report.problem
        server.cut(1)
        server.step(1)
        server.step(2)
        server.give_up()
        assert server.clocks == {2}
        server.step(3)
        assert server.clocks == {3}

    run(tmp_path, drive)


def test_a_checkpoint_that_is_given_up_holds_nothing_and_a_later_one_is_made(
    tmp_path: Path,
) -> None:
    async def drive(server: Server) -> None:
        server.propose()
        server.cut(2)
        server.step(1)
        server.give_up()
        for clock in (2, 3):
            server.step(clock)
        assert server.clocks == {3}
        (await server.report()).problem.index("given up")
        server.reports.clear()
        server.reported.clear()
        server.propose(2)
        server.cut(3, 2)
        report = await server.report()
        assert list(server.values(report).values()) == [{-3.0}] * BLOCKS

    run(tmp_path, drive)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_server_that_ends_leaves_no_half_part(tmp_path: Path, *, is_cut: bool) -> None:
    """As when a restore has begun another timeline."""

    async def drive(server: Server) -> None:
        server.propose()
        if is_cut:
            server.cut(2)
            server.step(1)
        await asyncio.to_thread(until_there, tmp_path / "00000001-c")
        await server.parts.close()
        assert left_in(tmp_path) == []
        assert server.reports == []

    run(tmp_path, drive)


def test_a_server_ends_though_its_store_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its loop nor the interpreter waits for a thread that writes."""
    disk = SlowDisk()

    async def drive(server: Server) -> None:
        before = set(threading.enumerate())
        server.begin_parts(0, disk, 0.05)
        server.propose()
        async with asyncio.timeout(5.0):
            await server.parts.close()
        writing = set(threading.enumerate()) - before
        assert writing
        assert all(thread.daemon for thread in writing)

    try:
        run(tmp_path, drive)
    finally:
        disk.go_on.set()
    assert "event=checkpoint_part_left number=1" in caplog.text


def test_a_server_that_ends_while_its_part_is_put_leaves_no_spool_file() -> None:
    """On an object store that takes it for longer than the server waits."""

    async def live(store: CheckpointStore) -> None:
        server = Server(store.directory(1, "c").url)
        server.begin_parts(limits.CHECKPOINT_BUFFER_BYTES, DISK, 0.05)
        putting = Gate("put_file", ".safetensors")
        server.step(1)
        server.propose()
        server.cut(1)
        await asyncio.to_thread(putting.wait)
        assert server.parts._part is not None
        _, spooled, _ = server.parts._part._opening.result()
        assert spooled.exists()
        await server.parts.close()
        assert not spooled.exists()
        putting.let_go()

    with reluctant_store() as store:
        asyncio.run(live(store))


def left_in(place: Path) -> list[str]:
    """Files that are there, or that this process has open."""
    return [str(each) for each in place.rglob("*.*")] + [
        each for each in open_files(os.getpid()) if str(place) in each
    ]


def until_there(directory: Path) -> None:
    until(lambda: directory.is_dir() and any(directory.iterdir()), "the file is begun")


class LongNamed(Server):
    """Its table's name is long: each tensor's takes as much of the header."""

    def spec_of(self, blocks: int) -> TableSpec:
        momentum = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0), ("momentum", 0.5)))
        return replace(super().spec_of(blocks), name="m" * 200, optimizer=momentum)


@pytest.mark.parametrize("later", ["asp:compensate=1,adaptive", "asp"])
def test_a_part_has_the_state_of_adaptive_compensation(tmp_path: Path, later: str) -> None:
    """Which blocks keep under a later setting."""

    async def driven() -> None:
        server = LongNamed(f"file://{tmp_path}/00000001-c", "asp:compensate=1,adaptive", 50)
        for store in server.node.shards.stores.values():
            for block in store.blocks:
                store.keep(Incarnation(11), block)  # as a pull of the worker's does
        server.step(1)
        assert server.clocks == {1}
        if later != "asp:compensate=1,adaptive":
            server.table = replace(server.table, change=TableChange(1, 1, parsed(later)))
        server.propose()
        server.cut(1)
        report = await server.report()
        assert not report.problem
        kinds = {name.rpartition("/")[2] for name in server.values(report)}
        assert kinds == {"values", "momentum_buffer", "delay_mean_square"}
        await server.parts.close()

    asyncio.run(driven())


def test_a_plan_looks_at_each_store_once(tmp_path: Path) -> None:
    """It is made in one turn of the loop, for thousands of tables, too."""
    calls_of: dict[int, int] = {}

    def drive_with(count: int) -> Callable[[Server], Awaitable[None]]:
        async def drive(server: Server) -> None:
            spec = server.spec_of(1)
            server.others = tuple(
                Table(TableId(number), 0, replace(spec, name=f"other-{number}").validated())
                for number in range(2, 2 + count)
            )
            server.see(None)
            calls_of[count] = calls_within(server.propose)

        return drive

    for count in (50, 200):
        run(tmp_path / str(count), drive_with(count))
    assert calls_of[200] < 6 * calls_of[50]


def calls_within(work: Callable[[], None]) -> int:
    """The calls of functions of the part, and of the looks at a store, that the work makes."""
    count = 0

    def noted(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        code = frame.f_code
        is_look = code.co_filename.endswith("checkpoint_parts.py") or code.co_name == "has_means"
        count += event == "call" and is_look

    sys.setprofile(noted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_table_that_fails_before_its_cut_fails_the_part(tmp_path: Path) -> None:
    async def drive(server: Server) -> None:
        server.propose()
        server.cut(2)
        server.node.refuse_table(MODEL, UpdateFailed("it has a bug"))
        assert "it has a bug" in (await server.report()).problem

    run(tmp_path, drive)


def test_a_cut_that_is_not_reached_in_time_fails_the_part_and_holds_nobody(tmp_path: Path) -> None:
    async def drive(server: Server) -> None:
        server.propose()
        server.cut(1)
        server.now_s += limits.CHECKPOINT_CUT_S
        server.node.tick()
        assert (await server.report()).problem
        for clock in (1, 2):
            server.step(clock)
        assert server.clocks == {2}

    run(tmp_path, drive)


def test_a_header_has_space_for_as_many_blocks_as_the_page_says() -> None:
    """CHECKPOINT_FORMAT: 115 GiB of parameters with Adam; a block of several tensors takes more."""
    spec = TableSpec("model/0/float32", DType.FLOAT32, 1, OptimizerSpec(OptimizerKind.ADAM))
    block_bytes = limits.DEFAULT_BLOCK_ELEMENTS * 4
    names = ("values", *_STATE_NAMES[spec.optimizer.kind])
    for gib, fits in ((115, True), (121, False)):
        planned = PlannedTable(spec.name, gib * 2**30 // block_bytes, names)
        assert (planned.header_bytes < MAX_HEADER_BYTES) is fits
