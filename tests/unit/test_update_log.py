"""A server goes on from its update log: whatever was answered is there, and nothing is made up."""

from __future__ import annotations

import asyncio
import errno
import logging
import queue
import random
import shutil
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidUpdateLog, Recovering
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId
from ps_core.tables.elements import Initializer, InitializerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from ps_runtime.system.disk import Disk
from ps_server.lane.lane_socket import SharedLanes
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory, boot_id, segments_in
from ps_server.update_log.encoder import EncodedLog
from ps_server.update_log.format import HEAD_BYTES, MAGIC, FrameKind, frame_bytes, head_at
from ps_server.update_log.reader import scan
from ps_server.update_log.recovery import Claimable, claimable, read_log
from ps_server.update_log.writer import LogItem, LogSetting, _OldSegment, _Writer
from tests.unit.logged_server import (
    KERNELS,
    MODEL,
    RANGES,
    TIMELINE,
    LoggedServer,
    Setting,
    Values,
    recovered,
)
from tests.unit.power_cut import RecordingDisk, restart_after

STEPS = 5
SESSION = Session("c", TIMELINE, NodeId(2), Incarnation(102), Role.SERVER)


def ran(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A scene on a loop of its own."""
    asyncio.run(scene())


def heads(path: Path) -> list[tuple[int, FrameKind]]:
    """Where each frame of a segment begins, and its kind."""
    raw, offset, found = memoryview(path.read_bytes()), len(MAGIC), []
    while (head := head_at(raw, offset)) is not None:
        found.append((offset, head.kind))
        offset += frame_bytes(head.length)
    return found


# --- what survives


def cut_anywhere(path: Path, said: Sequence[tuple[int, int, int]], states: list[Values]) -> None:
    """A process that died left any prefix: what was answered by then is there, and the values are
    those after some update.
    """
    segment, log_id = path / "00000001.log", path / "log_id"
    whole, its_id, chooser = segment.read_bytes(), log_id.read_bytes(), random.Random(0)
    edges = [at for at, _ in heads(segment)][1:]
    places = {*edges, *(at + 1 for at in edges), *(at - 1 for at in edges), len(whole)}
    places |= {chooser.randrange(edges[0], len(whole)) for _ in range(20)}
    for place in sorted(places):
        segment.write_bytes(whole[:place])
        log_id.write_bytes(its_id)
        found = recovered(path)
        for size_bytes, range_id, sequence in said:
            assert size_bytes > place or found.has(range_id, sequence), (place, range_id, sequence)
        for block, value in found.values.items():
            assert any(value == state.get(block) for state in states), (place, block)
    segment.write_bytes(whole)


def test_what_was_answered_survives_at_any_byte(tmp_path: Path) -> None:
    said: list[tuple[int, int, int]] = []
    states: list[Values] = []

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        states.append(server.values)
        for step in range(1, STEPS):
            known = len(server.answered)
            await server.push(step)
            said.extend((server.byte_count, *each) for each in server.answered[known:])
        states.extend(server.history)
        await server.end()

    ran(scene)
    cut_anywhere(tmp_path, said, states)


def test_who_goes_on_ends_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    ends: list[Values] = []

    async def scene(path: Path, restarts: Sequence[int]) -> None:
        number, server = 1, LoggedServer(path, 1, Setting())
        for step in range(1, STEPS):
            await server.push(step)
            if step in restarts:
                await server.end()
                number += 1
                server = LoggedServer(path, number, Setting())
                assert server.recovered_log.replicas.keys() == {RangeId(0), RangeId(1)}
        ends.append(server.values)
        await server.end()

    ran(lambda: scene(tmp_path / "calm", ()))
    ran(lambda: scene(tmp_path / "struck", (1, 3, 4)))
    assert ends[0] == ends[1]


def of_another_run(server: LoggedServer) -> Table:
    """A table that waits for its initial values."""
    initializer = Initializer(InitializerKind.FROM_RANK_ZERO)
    spec = replace(server.table.spec, name="other", initializer=initializer)
    return Table(TableId(2), 1, spec, run="a")


def test_nothing_is_here_of_a_removed_table_that_a_log_only_names(tmp_path: Path) -> None:
    """No range has anything of it: its values would have memory for as long as the server lives."""

    async def scene() -> None:
        first = LoggedServer(tmp_path, 1, Setting())
        removed = wire.table_to_proto(of_another_run(first)).SerializeToString()
        first.log.add_table(TableId(2), removed)
        await first.push(1)
        await first.end()
        second = LoggedServer(tmp_path, 3, Setting())
        assert second.recovered_log.replicas.keys() == {0, 1}
        assert {table_id for table_id, _ in second.node.shards.stores} == {MODEL}
        await second.end()

    ran(scene)


def test_segments_that_begin_later_name_no_removed_table(tmp_path: Path) -> None:
    """A server that reads them makes room for each table that they name."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(bound_bytes=60_000))
        tables = (server.table, of_another_run(server))
        server.node.observe(replace(server.view, view_number=2, tables=tables))
        server.node.observe(replace(server.view, view_number=3, next_table_id=3))
        await pushed_until_the_first_segment_goes(server)
        await server.end()
        shards = Shards(SharedLanes(), {})
        with LogDirectory(tmp_path) as directory:
            assert read_log(directory, shards, KERNELS).replicas.keys() == {0, 1}
        assert {table_id for table_id, _ in shards.stores} == {MODEL}

    ran(scene)


async def remove_the_second(server: LoggedServer, tables: tuple[Table, ...]) -> None:
    """A step with both tables; then one is removed, and all that follows is written."""
    server.node.observe(replace(server.view, view_number=2, tables=tables))
    await server.push(1)
    server.node.observe(replace(server.view, view_number=3, next_table_id=3))
    for _ in range(RANGES + 1):
        server.node.tick()
        await server.written()


def test_a_segment_begins_that_names_no_removed_table(tmp_path: Path) -> None:
    """Else a server that is started again has to make room for what the machine may not hold."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        tables = (server.table, of_another_run(server))
        await remove_the_second(server, tables)
        assert server.log.segments.newest == 2
        expected = server.values
        await server.end()
        shards = Shards(SharedLanes(), {})
        with LogDirectory(tmp_path) as directory:
            assert read_log(directory, shards, KERNELS).replicas.keys() == {0, 1}
        assert {table_id for table_id, _ in shards.stores} == {MODEL}
        assert recovered(tmp_path).values == expected

    ran(scene)


def test_a_small_run_that_is_removed_begins_no_segment(tmp_path: Path) -> None:
    """Each would have snapshots of all that the server has."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        tables = (server.table, replace(of_another_run(server), spec=a_small_spec(server)))
        await remove_the_second(server, tables)
        assert server.log.segments.newest == 1
        assert {table_id for table_id, _ in server.node.shards.stores} == {MODEL}
        await server.end()

    ran(scene)


def a_small_spec(server: LoggedServer) -> TableSpec:
    """Of a table with one block of a few values."""
    return replace(server.table.spec, name="small", element_count=4)


async def pushed_until_the_first_segment_goes(server: LoggedServer) -> None:
    """Its worker takes steps until then."""
    step = 1
    await server.push(step)
    while min(server.path.glob("*.log")).name == "00000001.log":
        for _ in range(5):
            step += 1
            await server.push(step)
        server.node.tick()


def test_old_segments_go_and_the_newest_bases_are_enough(tmp_path: Path) -> None:
    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(bound_bytes=60_000))
        await pushed_until_the_first_segment_goes(server)
        expected = server.values
        await server.end()
        assert recovered(tmp_path).values == expected

    ran(scene)
    assert sum(each.stat().st_size for each in tmp_path.glob("*.log")) < 120_000


class Stopped(Disk):
    """A disk that takes nothing for a while."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        assert self.goes_on.wait(20)
        return super().write_all(descriptor, pieces, offset)


def test_a_disk_that_is_never_idle_is_given_snapshots_too(tmp_path: Path) -> None:
    """As many bytes as of updates: else no old segment goes, and the log fills the disk."""
    megabyte = memoryview(bytes(2**20))

    async def scene() -> None:
        disk = Stopped()
        server = LoggedServer(tmp_path, 1, Setting(disk=disk))
        log, encoded = server.log, EncodedLog(server.log, server.node.shards, NotImplemented)

        def append(kind: FrameKind, size_mb: int) -> None:
            log.append(LogItem(kind, ((megabyte,) * size_mb,), RangeId(0), 1))

        are_busy = []
        append(FrameKind.RECORD, 20)
        for kind, size_mb in ((FrameKind.SNAPSHOT, 10), (FrameKind.SNAPSHOT, 12)):
            append(kind, size_mb)
            are_busy.append(encoded.is_busy)
        append(FrameKind.RECORD, 3)
        are_busy.append(encoded.is_busy)
        log._next_segment()
        are_busy.append(encoded.is_busy)
        assert are_busy == [False, True, False, True]
        disk.goes_on.set()
        await server.end()

    ran(scene)


def test_a_server_at_rest_writes_nothing_whatever_its_size(tmp_path: Path) -> None:
    """Its values alone are more than the bound."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(bound_bytes=1_000))
        for step in range(1, STEPS):
            await server.push(step)
        for _ in range(20):
            server.node.tick()
            await server.written()
        at_rest = server.log.segments.newest, server.log.segments.byte_count
        for _ in range(20):
            server.node.tick()
            await server.written()
        assert (server.log.segments.newest, server.log.segments.byte_count) == at_rest
        await server.end()

    ran(scene)


def test_a_range_that_ends_with_its_base_does_not_keep_the_newest_segment_for_ever(
    tmp_path: Path,
) -> None:
    """Both are written in one group: nobody hears that the snapshot is there."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(bound_bytes=1_000))
        await server.push(1)
        for range_id in map(RangeId, range(RANGES)):
            server.log.append(LogItem(FrameKind.SNAPSHOT, ((b"",),), range_id))
            server.log.append(LogItem(FrameKind.END, ((b"",),), range_id))
        await server.written()
        newest = server.log.segments.newest
        server.log.turn(state_bytes=0)
        assert server.log.segments.newest == newest + 1
        await server.end()

    ran(scene)


def test_the_segment_in_which_a_range_is_about_to_begin_is_kept(tmp_path: Path) -> None:
    """Nothing else begins anywhere, and the log is above its bound."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        await server.push(1)
        for range_id in map(RangeId, range(RANGES)):
            server.log.append(LogItem(FrameKind.END, ((b"",),), range_id))
        await server.written()
        server.log.append(LogItem(FrameKind.BEGIN, ((b"",),), RangeId(0)))
        begins_in = server.log.segments.newest
        server.log.segments._sizes[begins_in] += 1_000_000_000
        server.log.turn(state_bytes=0)
        server.log.turn(state_bytes=0)
        await server.written()
        assert (tmp_path / f"{begins_in:08d}.log").exists()
        await server.end()

    ran(scene)


def test_a_range_that_is_placed_anew_is_not_said_to_be_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its server was not silent; here it is primary of it again."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        await server.push(1)
        ranges = tuple(
            replace(each, assignment_epoch=AssignmentEpoch(9), placed_epoch=AssignmentEpoch(9))
            for each in server.view.ranges
        )
        with caplog.at_level(logging.INFO, "pushpull"):
            server.node.observe(replace(server.view, view_number=2, ranges=ranges))
            server.node.works.finish()
        await server.end()

    ran(scene)
    assert "event=ranges_placed_anew view=2 ranges=2" in caplog.text
    assert "ranges_given_up" not in caplog.text


# --- what does not


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_flipped_bit_is_damage_or_ends_the_log(tmp_path: Path, is_synced: bool) -> None:
    """Never values that nobody ever had; and it ends the log at its end only: there all or nothing
    is claimed (ULF-1, ULR-1).
    """
    states: list[Values] = []

    async def scene() -> None:
        server = LoggedServer(tmp_path / "log", 1, Setting(is_synced=is_synced))
        states.append(server.values)
        for step in range(1, STEPS):
            await server.push(step)
        states.extend(server.history)
        await server.end()

    ran(scene)
    segment = tmp_path / "log" / "00000001.log"
    whole, chooser = segment.read_bytes(), random.Random(1)
    frames = heads(segment)
    groups = {group_of(whole, at): at for at, _ in reversed(frames)}
    end = groups[sorted(groups)[-2]] if is_synced else frames[-1][0]
    records = [at for at, kind in frames if kind is FrameKind.RECORD and at < end]
    places = [at + byte for at in (len(MAGIC), records[1], records[-1]) for byte in range(32)]
    places += [chooser.randrange(len(MAGIC), len(whole)) for _ in range(60)]
    for place in places:
        bit = 1 << chooser.randrange(8)
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "log", copy)
        broken = bytearray(whole)
        broken[place] ^= bit
        (copy / "00000001.log").write_bytes(broken)
        found = recovered(copy)
        for block, value in found.values.items():
            assert any(value == state.get(block) for state in states), (place, bit, block)
        assert place >= end or found.values in ({}, states[-1]), (place, bit)
        shutil.rmtree(copy)


def group_of(raw: bytes, at: int) -> int:
    """Of the frame that begins there."""
    head = head_at(memoryview(raw), at)
    assert head is not None
    return head.group


def id_of(path: Path) -> bytes:
    """The log's."""
    with LogDirectory(path) as directory:
        return directory.log_id


def without_last_segment(path: Path) -> None:
    """As if the writer had been killed once all was written."""
    list(segments_in(path).values())[-1].unlink()


async def killed(server: LoggedServer) -> None:
    await server.end()
    without_last_segment(server.path)


def test_a_log_of_another_boot_or_other_kernels_claims_nothing(tmp_path: Path) -> None:
    """Its server was killed."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        await server.push(1)
        await killed(server)

    ran(scene)
    contents = scan(segments_in(tmp_path))
    log_id = id_of(tmp_path)
    assert claimable(contents, log_id, boot_id(), KERNELS) == Claimable(contents.starts)
    withheld = frozenset(contents.starts)
    assert withheld
    rebooted = claimable(contents, log_id, "another boot", KERNELS)
    assert rebooted == Claimable({}, withheld, 1, is_claimed=False, is_whole=False)
    others = claimable(contents, log_id, boot_id(), "other kernels")
    assert others == Claimable({}, withheld, 1, is_claimed=False)


def test_a_log_that_was_closed_outlives_the_boot(tmp_path: Path) -> None:
    """Two servers wrote it without sync, one after the other; the first was killed. The disk keeps
    nothing that it was not asked to keep.
    """
    disk = RecordingDisk()
    states: list[Values] = []

    async def scene() -> None:
        server = LoggedServer(tmp_path / "log", 1, Setting(disk=disk))
        await server.push(1)
        written_count = len(disk.operations)
        await killed(server)
        del disk.operations[written_count:]
        server = LoggedServer(tmp_path / "log", 2, Setting(disk=disk))
        await server.push(2)
        states.append(server.values)
        await server.end()

    ran(scene)
    restart_after(disk.operations, tmp_path, 0, 0.0, tmp_path / "after")
    contents = scan(segments_in(tmp_path / "after" / "log"))
    log_id = id_of(tmp_path / "log")
    assert claimable(contents, log_id, "another boot", KERNELS).starts == contents.starts != {}
    assert recovered(tmp_path / "after" / "log").values == states[-1]


def test_segments_that_a_server_may_not_go_on_with_stay(tmp_path: Path) -> None:
    """Without them the next start would take their ranges for what nobody has seen."""

    def begun_with(kernels: str) -> bool:
        """Whether a server that starts, and ends at once, has ranges of the log."""
        found = read_log(LogDirectory(tmp_path), Shards(SharedLanes(), {}), kernels)

        async def scene() -> None:
            log = found.begin(SESSION, RANGES, LogSetting(1_000, is_synced=False))
            log.turn(0)
            await log.close()

        ran(scene)
        return bool(found.claim().timeline)

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        for step in range(1, 1 + STEPS):
            await server.push(step)
        await server.end()

    ran(scene)
    before = recovered(tmp_path).values
    for _ in range(3):
        assert not begun_with("other kernels")
    assert recovered(tmp_path).values == before, "the remedy"
    assert min(segments_in(tmp_path)) == 1


def test_segments_go_of_ranges_that_others_are_seen_to_have(tmp_path: Path) -> None:
    """The log is claimed again then: here its next server is primary of all."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        for step in range(1, 1 + STEPS):
            await server.push(step)
        await server.end()
        server = LoggedServer(tmp_path, 2, Setting(bound_bytes=1_000, kernels="other kernels"))
        assert server.recovered_log.withheld == {0, 1}
        assert not server.recovered_log.is_claimed
        server.node.tick()
        await server.end()
        server = LoggedServer(tmp_path, 3, Setting(bound_bytes=1_000, kernels="other kernels"))
        assert server.recovered_log.is_claimed
        assert server.recovered_log.replicas.keys() == {0, 1}
        assert min(segments_in(tmp_path)) > 1
        await server.end()

    ran(scene)


def test_a_synced_log_outlives_the_boot(tmp_path: Path) -> None:
    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True))
        await server.push(1)
        await server.end()

    ran(scene)
    contents = scan(segments_in(tmp_path))
    log_id = id_of(tmp_path)
    assert claimable(contents, log_id, "another boot", KERNELS).starts == contents.starts != {}

    async def unsynced() -> None:
        found = read_log(LogDirectory(tmp_path), Shards(SharedLanes(), {}), KERNELS)
        log = found.begin(SESSION, RANGES, LogSetting(1_000, is_synced=False))
        log.turn(0)
        await log.close()

    ran(unsynced)
    without_last_segment(tmp_path)
    contents = scan(segments_in(tmp_path))
    assert claimable(contents, log_id, boot_id(), KERNELS).starts == contents.starts != {}
    lost = claimable(contents, log_id, "another boot", KERNELS)
    assert not lost.is_claimed, "what followed may be lost"


def test_a_frame_that_is_missing_is_damage(tmp_path: Path) -> None:
    """LF-1."""

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        for step in range(1, STEPS):
            await server.push(step)
        await server.end()

    ran(scene)
    segment = tmp_path / "00000001.log"
    whole = segment.read_bytes()
    records = [at for at, kind in heads(segment) if kind is FrameKind.RECORD]
    segment.write_bytes(whole[: records[3]] + whole[records[4] :])
    assert recovered(tmp_path).recovered_log.replicas == {}
    assert recovered(tmp_path).recovered_log.timeline == b""


# --- the disk


class Failing(Disk):
    """A disk that is full from some write on; and one that says when it has synced."""

    def __init__(self) -> None:
        self.is_full = False
        self.synced_bytes = 0
        self._written_bytes = 0

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._written_bytes = offset + super().write_all(descriptor, pieces, offset)
        return self._written_bytes - offset

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.synced_bytes = self._written_bytes


async def ended(server: LoggedServer) -> None:
    """The log's thread has, and what it said last is heard."""
    await asyncio.to_thread(server.log._writer.join)
    heard = asyncio.Event()
    asyncio.get_running_loop().call_soon(heard.set)
    await heard.wait()


def test_nothing_is_answered_that_a_full_disk_did_not_take(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = Failing()
        server = LoggedServer(tmp_path, 1, Setting(disk=disk))
        await server.push(1)
        answered = list(server.answered)
        disk.is_full = True
        await server.push(2, waits=False)
        await ended(server)
        with pytest.raises(InvalidUpdateLog, match=r"cannot be written.*No space left"):
            server.node.tick()
        assert server.answered == answered
        await server.end()

    ran(scene)


def test_whatever_ends_the_thread_ends_the_server(tmp_path: Path) -> None:
    """Else everybody would wait for a log that nobody writes."""

    class Broken(Failing):
        def write_all(
            self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int
        ) -> int:
            if self.is_full:
                raise MemoryError
            return super().write_all(descriptor, pieces, offset)

    async def scene() -> None:
        disk = Broken()
        server = LoggedServer(tmp_path, 1, Setting(disk=disk))
        disk.is_full = True
        await server.push(1, waits=False)
        await ended(server)
        with pytest.raises(InvalidUpdateLog, match=r"cannot be written: MemoryError"):
            server.node.tick()
        await server.end()

    ran(scene)


def test_a_synced_log_answers_when_the_disk_has_it(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = Failing()
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True, disk=disk))
        for step in range(1, STEPS):
            await server.push(step)
            assert disk.synced_bytes == server.byte_count
        await server.end()

    ran(scene)


def test_a_log_is_in_use_before_anything_is_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting())
        await server.push(1)
        await server.written()
        assert not (tmp_path / "unused").exists()
        await server.end()

    with LogDirectory(tmp_path):
        assert (tmp_path / "unused").exists()
    asyncio.run(scene())


class Removing(Disk):
    """A disk that says when it removes a segment, and waits with it."""

    def __init__(self) -> None:
        self.removes, self.goes_on = threading.Event(), threading.Event()

    def remove(self, path: Path) -> None:
        if path.suffix == ".log":
            self.removes.set()
            assert self.goes_on.wait(20)
        super().remove(path)


def test_a_torn_end_is_no_damage_though_a_segment_was_removed_before_it(tmp_path: Path) -> None:
    """The removal alone wrote no frame. If it were counted as a group, one would seem to be lost
    between those before the torn end and what is intact of that.
    """

    async def scene() -> Values:
        disk = Removing()
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        answered = server.values
        server.log._queue.put(_OldSegment(99))
        assert await asyncio.to_thread(disk.removes.wait, 20)
        await server.push(2, waits=False)
        server.node.works.finish()
        disk.goes_on.set()
        await server.written()
        await server.end()
        return answered

    answered = asyncio.run(scene())
    segment = tmp_path / "00000001.log"
    raw = segment.read_bytes()
    frames = [at for at, _ in heads(segment)]
    torn, *behind = [at for at in frames if group_of(raw, at) == group_of(raw, frames[-1])]
    assert behind
    begin, end = torn + HEAD_BYTES, behind[0]
    segment.write_bytes(raw[:begin] + bytes(end - begin) + raw[end:])
    found = recovered(tmp_path)
    assert found.recovered_log.is_claimed
    assert found.values == answered


def test_a_log_ends_whatever_is_appended_behind_its_end(tmp_path: Path) -> None:
    """Streams go on while a server ends."""
    source: queue.SimpleQueue[LogItem | None] = queue.SimpleQueue()
    source.put(None)
    source.put(LogItem(FrameKind.END, ((b"",),), RangeId(1)))
    with LogDirectory(tmp_path) as directory:
        writer = _Writer(directory, False, source, lambda _written, _problem: None)  # type: ignore[arg-type]
        writer.start()
        writer.join(30.0)
        assert not writer.is_alive()


# --- the directory


def test_one_process_has_a_directory(tmp_path: Path) -> None:
    """LOG-3."""
    first = LogDirectory(tmp_path)
    with pytest.raises(Recovering, match="another server writes this update log"):
        LogDirectory(tmp_path)
    first.close()
    first.close()
    with LogDirectory(tmp_path) as second:
        assert second.log_id == first.log_id


def test_a_directory_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(InvalidUpdateLog, match="file"):
        LogDirectory(file)
    (tmp_path / "log_id").write_text("what")
    with pytest.raises(InvalidUpdateLog, match="log_id"):
        LogDirectory(tmp_path)
    (tmp_path / "log_id").unlink()
    (tmp_path / "log_id").mkdir()
    with pytest.raises(InvalidUpdateLog, match="log_id"):
        LogDirectory(tmp_path)


def test_a_segment_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "00000001.log").write_bytes(b"x" * 100)
    with pytest.raises(InvalidUpdateLog, match=r"00000001\.log"):
        scan(segments_in(tmp_path))
