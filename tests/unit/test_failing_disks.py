"""Disks that are full, broken, or lose what they were not asked to keep: whoever writes says so,
and what was said to be durable is read afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidCheckpoint, InvalidUpdateLog, Recovering
from ps_core.keys import Incarnation, NodeId, RangeId
from ps_core.sliced_work import Work
from ps_runtime.checkpoint.part_file import StoredWorker
from ps_runtime.checkpoint.part_writer import (
    PartWriter,
    PlannedTable,
    WorkerTensor,
    write_worker_part,
)
from ps_runtime.system.disk import DISK, Disk, Payload
from ps_server.lane.lane_socket import SharedLanes
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory, segments_in
from ps_server.update_log.format import HEAD_BYTES, FrameKind
from ps_server.update_log.recovery import read_log
from ps_server.update_log.segments import LogSegments
from ps_server.update_log.writer import LogItem, LogSetting, UpdateLog
from pushpull.v1.update_log_pb2 import UpdateLogHeader
from tests.file_limits import no_file_above
from tests.unit.logged_server import (
    KERNELS,
    RANGES,
    TIMELINE,
    LoggedServer,
    Setting,
    recovered,
)
from tests.unit.power_cut import Operation, RecordingDisk, restart_after


class BrokenDisk(RecordingDisk):
    """One that does not sync, while it is broken.

    Args:
        forgets: the system takes for written what could not be, as Linux does.

    Attributes:
        begins, goes_on: a sync has begun, and waits for this.
    """

    def __init__(self, *, forgets: bool = True) -> None:
        super().__init__()
        self.is_broken = False
        self.begins, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self._forgets = forgets

    def sync(self, descriptor: int) -> None:
        was_broken = self.is_broken
        self.begins.set()
        assert self.goes_on.wait(20)
        if not was_broken:
            super().sync(descriptor)
            return
        if self._forgets:
            self.fail_to_sync(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


# --- the update log


@pytest.mark.parametrize("forgets", [True, False])
def test_a_log_that_was_not_synced_is_gone_on_with_and_the_power_goes(
    tmp_path: Path, forgets: bool
) -> None:
    """What the first server could not sync the second has read, and builds on."""
    path, disk, answered = tmp_path / "log", BrokenDisk(forgets=forgets), list[tuple[int, int]]()

    async def scene() -> None:
        server = LoggedServer(path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        disk.begins.clear()
        disk.goes_on.clear()
        await server.push(2, waits=False)
        assert await asyncio.to_thread(disk.begins.wait, 20)
        disk.is_broken = True
        await server.push(3, waits=False)  # all of it is synced together, and is not
        disk.goes_on.set()
        await asyncio.to_thread(server.log._writer.join)
        heard = asyncio.Event()
        asyncio.get_running_loop().call_soon(heard.set)
        await heard.wait()
        with pytest.raises(InvalidUpdateLog, match=r"Input/output error; .* start again"):
            server.node.tick()
        answered.extend(server.answered)
        await server.end()
        disk.is_broken = False
        server = LoggedServer(path, 2, Setting(is_synced=True, disk=disk))
        await server.push(4)
        answered.extend(server.answered)
        await server.end()

    asyncio.run(scene())
    for seed, survival in enumerate((0.0, 0.3, 0.9, 1.0)):
        left = tmp_path / f"after {survival}"
        restart_after(disk.operations, tmp_path, seed, survival, left)
        found = recovered(left / "log")
        assert all(found.has(*each) for each in answered), survival
        assert not list(left.rglob("*.damaged"))


class Forgetting(BrokenDisk):
    """One that has lost what it did not sync, once the system has let go of it.

    Attributes:
        lost: so much of the file that is opened again.
    """

    lost = range(0)

    def reopen(self, path: Path) -> int:
        descriptor = super().reopen(path)
        os.pwrite(descriptor, bytes(len(self.lost)), self.lost.start)
        return descriptor


@pytest.mark.parametrize("keeps_first_head", [True, False])
def test_an_end_that_the_disk_has_lost_since_it_was_read_is_not_gone_on_with(
    tmp_path: Path, keeps_first_head: bool
) -> None:
    """Behind what the server writes next, it would be damage. The next start cuts it: nothing of it
    was answered.
    """
    disk = Forgetting()

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        answered, begin = list(server.answered), server.byte_count
        disk.is_broken = True
        await server.push(2, waits=False)
        await asyncio.to_thread(server.log._writer.join)
        disk.is_broken = False
        disk.lost = range(begin + (HEAD_BYTES if keeps_first_head else 0), server.byte_count)
        await server.end()
        with (
            LogDirectory(tmp_path, disk) as directory,
            pytest.raises(
                InvalidUpdateLog, match=r"cannot be continued: .* lost its end .*00000001"
            ),
        ):
            read_log(directory, Shards(SharedLanes(), {}), KERNELS)
        disk.lost = range(0)
        server = LoggedServer(tmp_path, 2, Setting(is_synced=True, disk=disk))
        await server.push(2)
        answered += server.answered
        await server.end()
        found = recovered(tmp_path)
        assert all(found.has(*each) for each in answered)

    asyncio.run(scene())
    assert not list(tmp_path.glob("*.damaged"))


def test_a_log_whose_disk_does_not_answer_has_failed(tmp_path: Path) -> None:
    """Its server ends, and does not wait for the disk. The lock stays: the disk may go on, and then
    the log has more than what was answered.
    """
    path, disk = tmp_path / "log", BrokenDisk()

    async def scene() -> None:
        server = LoggedServer(path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        answered = list(server.answered)
        disk.begins.clear()
        disk.goes_on.clear()
        await server.push(2, waits=False)
        assert await asyncio.to_thread(disk.begins.wait, 20)
        # Before the clock's own time, which goes on when the log ends.
        looks = (number / 2 - 2 * limits.LOG_STALL_S for number in itertools.count())
        begin_s = now_s = next(looks)
        while server.log.failure is None:
            server.log.look(now_s)
            now_s = next(looks)
        assert now_s - begin_s >= limits.LOG_STALL_S
        with pytest.raises(InvalidUpdateLog, match=r"does not answer for 20 s; .* start again"):
            server.node.tick()
        await server.end()
        with pytest.raises(Recovering, match="another server writes this update log"):
            LogDirectory(path, disk)
        disk.goes_on.set()
        await asyncio.to_thread(server.log._writer.join)
        heard = asyncio.Event()  # behind what the writer says
        asyncio.get_running_loop().call_soon(heard.set)
        await heard.wait()
        assert server.answered == answered
        server.recovered_log.directory.close()  # as the end of the process

    asyncio.run(scene())
    assert recovered(path).recovered_log.is_claimed


def test_a_log_that_its_disk_does_not_let_end_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the header of its end it gives nothing back after another boot."""
    disk = BrokenDisk()

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(disk=disk))
        await server.push(1)
        disk.begins.clear()
        disk.goes_on.clear()
        server.log._have_synced()  # which may last, as at the end
        assert await asyncio.to_thread(disk.begins.wait, 20)
        # Before the clock's own time, which goes on when the log ends.
        for number in range(int(2 * limits.LOG_STALL_S)):
            server.log.look(number / 2 - 2 * limits.LOG_STALL_S)
        assert server.log.failure is None
        await server.end()
        disk.goes_on.set()
        await asyncio.to_thread(server.log._writer.join)
        server.recovered_log.directory.close()  # as the end of the process

    asyncio.run(scene())
    assert "event=update_log_not_closed" in caplog.text
    assert "mend the disk" in caplog.text


class ClosingLate(Disk):
    """A disk that says when it closes a file, and waits with it."""

    def __init__(self) -> None:
        self.closes, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def close(self, descriptor: int) -> None:
        self.closes.set()
        assert self.goes_on.wait(20)
        super().close(descriptor)


def test_a_log_whose_disk_does_not_close_its_last_file_has_failed(tmp_path: Path) -> None:
    """A network's file is written when it is closed. The server would never end."""
    disk = ClosingLate()

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(disk=disk))
        await server.push(1)
        disk.closes.clear()
        disk.goes_on.clear()
        server.log._queue.put(None)
        assert await asyncio.to_thread(disk.closes.wait, 20)
        for number in range(int(3 * limits.LOG_STALL_S)):
            server.log.look(number / 2 - 2 * limits.LOG_STALL_S)
        assert server.log.failure is not None
        await server.end()
        disk.goes_on.set()
        await asyncio.to_thread(server.log._writer.join)
        server.recovered_log.directory.close()  # as the end of the process

    asyncio.run(scene())
    assert recovered(tmp_path).recovered_log.is_claimed


class ClosingBadly(Disk):
    """A disk that closes a file, and says that this failed.

    Attributes:
        closed: the number of each file.
    """

    is_bad = False

    def __init__(self) -> None:
        self.closed: list[int] = []

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        if self.is_bad:
            self.closed.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("is_last", [True, False])
def test_a_file_that_is_not_closed_well_is_closed_once_and_the_lock_is_free(
    tmp_path: Path, is_last: bool
) -> None:
    """Else a server that registers again would wait for its own lock; and a file of another thread
    may have the number by then.
    """
    disk = ClosingBadly()

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(disk=disk))
        await server.push(1)
        disk.is_bad = True
        if not is_last:
            server.log._next_segment()
        await server.end()
        heard = asyncio.Event()
        asyncio.get_running_loop().call_soon(heard.set)
        await heard.wait()
        assert server.log.failure is not None
        assert "Input/output error" in server.log.failure.message

    asyncio.run(scene())
    assert len(set(disk.closed)) == len(disk.closed) > 0
    assert recovered(tmp_path).recovered_log.is_claimed


def test_a_failed_log_ends_a_server_whatever_that_is_at(tmp_path: Path) -> None:
    """What it is at may wait for the same disk, and would keep its ranges for as long."""
    disk = BrokenDisk()

    def waiting(for_what: Future[None]) -> Work[None]:
        yield for_what

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        disk.is_broken = True
        await server.push(2, waits=False)
        await asyncio.to_thread(server.log._writer.join)
        heard = asyncio.Event()
        asyncio.get_running_loop().call_soon(heard.set)
        await heard.wait()
        other_thread: Future[None] = Future()
        server.node.works.begin(waiting(other_thread))
        with pytest.raises(InvalidUpdateLog, match="Input/output error"):
            server.node.tick()
        other_thread.set_result(None)
        await server.end()

    asyncio.run(scene())


def test_a_log_of_a_server_that_was_paused_has_not_failed(tmp_path: Path) -> None:
    """Its disk has done nothing meanwhile, and neither has a disk that has nothing to do."""
    disk = BrokenDisk()

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        for now_s in (0.0, 1.0, 1e3, 1e6):
            server.log.look(now_s)
        disk.begins.clear()
        disk.goes_on.clear()
        await server.push(2, waits=False)
        assert await asyncio.to_thread(disk.begins.wait, 20)
        for now_s in (2e6, 3e6, 4e6):
            server.log.look(now_s)
        disk.goes_on.set()
        await server.written()
        assert server.log.failure is None
        await server.end()

    asyncio.run(scene())


class SlowDisk(Disk):
    """One that takes its time, and goes on: a sync lasts in proportion to its bytes. The server
    looks at its log twice a second meanwhile. Written bytes are thrown away.
    """

    BYTES_A_SECOND = 5_000_000

    def __init__(self) -> None:
        self.log: Future[UpdateLog] = Future()
        self.longest_s = self.now_s = 0.0
        self._unsynced_bytes = 0

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        del descriptor, offset
        byte_count = sum(map(len, pieces))
        self._unsynced_bytes += byte_count
        return byte_count

    def reopen(self, path: Path) -> int:
        self._unsynced_bytes = path.stat().st_size
        return super().reopen(path)

    def sync(self, descriptor: int) -> None:
        del descriptor
        lasts_s, self._unsynced_bytes = self._unsynced_bytes / self.BYTES_A_SECOND, 0
        self.longest_s = max(self.longest_s, lasts_s)
        for _ in range(int(2 * lasts_s)):
            self.now_s += 0.5
            self.log.result(20).look(self.now_s)


@pytest.mark.parametrize("of", ["a snapshot", "another segment", "a former segment"])
def test_a_slow_disk_that_goes_on_has_not_failed(
    tmp_path: Path, of: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is synced: a server that ended so would be followed by others that end so too."""
    disk, piece = SlowDisk(), bytes(1 << 23)
    size_bytes = int(disk.BYTES_A_SECOND * limits.LOG_STALL_S * 1.5)
    if of == "a former segment":
        with (tmp_path / "00000001.log").open("wb") as file:
            file.truncate(size_bytes)

    async def scene() -> None:
        former = {} if of != "a former segment" else {1: size_bytes}
        segments = LogSegments(size_bytes // 2, former, {})
        log = UpdateLog(
            LogDirectory(tmp_path, disk),
            UpdateLogHeader(),
            LogSetting(size_bytes // 2, is_synced=True),
            segments,
            tuple(former),
        )
        disk.log.set_result(log)
        heard = asyncio.Event()
        log.on_written = lambda _: heard.set()
        pieces = [(piece,)] * (0 if former else size_bytes // len(piece) + 1)
        log.append(LogItem(FrameKind.BEGIN, ((b"",),)))
        if of == "a snapshot":
            log.append(LogItem(FrameKind.SNAPSHOT, pieces, number=1))
        for each in pieces if of == "another segment" else ():
            log.append(LogItem(FrameKind.RECORD, [each], number=1))
        if of == "another segment":
            log._next_segment()
        while log.queued_bytes and log.failure is None:
            heard.clear()
            await asyncio.wait_for(heard.wait(), 30)
        assert log.failure is None
        await log.close()

    asyncio.run(scene())
    is_former = of == "a former segment"
    assert (disk.longest_s > limits.LOG_STALL_S) == is_former
    assert "event=waiting_for_log_disk" in caplog.text


@pytest.mark.parametrize("timeline", [TIMELINE, b"n" * 16])
def test_an_unsynced_end_that_is_lost_whole_is_missed(tmp_path: Path, timeline: bytes) -> None:
    """The power cut leaves nothing of its updates behind segments that were synced, of this run or
    of one before: the log is not taken for a whole one.
    """
    path, disk = tmp_path / "log", RecordingDisk()
    session = Session("c", timeline, NodeId(2), Incarnation(102), Role.SERVER)

    async def scene() -> bytes:
        server = LoggedServer(path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        await server.end()
        found = read_log(LogDirectory(path, disk), Shards(SharedLanes(), {}), KERNELS)
        assert found.is_claimed
        log = replace(found, boot_id="another").begin(session, RANGES, LogSetting(1_000_000))
        written = asyncio.Event()
        log.on_written = lambda each: written.set() if each.begin_count else None
        log.append(LogItem(FrameKind.BEGIN, ((b"",),), RangeId(0)))
        await asyncio.wait_for(written.wait(), 30)
        written_count = len(disk.operations)
        await log.close()
        del disk.operations[written_count:]  # as if it had been killed
        return found.directory.log_id

    former_id = asyncio.run(scene())
    left = tmp_path / "after"
    restart_after(disk.operations, tmp_path, 0, 0.0, left)
    found = recovered(left / "log").recovered_log
    assert not found.is_claimed
    assert found.directory.log_id != former_id


def test_what_was_written_without_sync_is_synced_before_what_follows_with_it(
    tmp_path: Path,
) -> None:
    """A power cut at the synced header, and before snapshots follow it, takes nothing."""
    path, disk, answered = tmp_path / "log", RecordingDisk(), list[tuple[int, int]]()

    async def scene() -> None:
        for number in (1, 2):
            server = LoggedServer(path, number, Setting(disk=disk))
            await server.push(number)
            answered.extend(server.answered)
            written_count = len(disk.operations)
            await server.end()
            del disk.operations[written_count:]  # as if it had been killed
            list(segments_in(path).values())[-1].unlink()
        server = LoggedServer(path, 3, Setting(is_synced=True, disk=disk))
        await server.end()

    asyncio.run(scene())
    header = Operation("sync", path / "00000003.log")
    until = disk.operations.index(header) + 2  # with the directory
    left = tmp_path / "after"
    restart_after(disk.operations[:until], tmp_path, 0, 0.0, left)
    found = recovered(left / "log")
    assert answered
    assert all(found.has(*each) for each in answered)


def test_a_log_that_cannot_be_read_now_is_left_as_it_is(tmp_path: Path) -> None:
    disk = BrokenDisk()

    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(is_synced=True, disk=disk))
        await server.push(1)
        await server.end()

    asyncio.run(scene())
    before = {each: each.read_bytes() for each in segments_in(tmp_path).values()}
    disk.is_broken = True
    with LogDirectory(tmp_path, disk) as directory:
        log_id = directory.log_id
        with pytest.raises(InvalidUpdateLog, match=r"cannot be continued: .*Input/output error"):
            read_log(directory, Shards(SharedLanes(), {}), KERNELS)
    assert {each: each.read_bytes() for each in segments_in(tmp_path).values()} == before
    found = recovered(tmp_path)
    assert found.recovered_log.replicas
    assert found.recovered_log.directory.log_id == log_id


# --- parts of checkpoints


PLANNED = [PlannedTable("model", 1, ("values",))]


def test_a_part_that_was_not_synced_is_not_finished_by_asking_again(tmp_path: Path) -> None:
    """The second time the system would say that all is well, and it is not."""
    disk = BrokenDisk()
    writer = PartWriter(tmp_path / "part", PLANNED, disk)
    writer.append("model", 0, "values", bytes(400))
    writer.note_block("model", 0, 1, [1])
    disk.is_broken = True
    with pytest.raises(InvalidCheckpoint, match="part cannot be written: Input/output error"):
        writer.finish(1, "c")
    disk.is_broken = False
    with pytest.raises(InvalidCheckpoint, match="it cannot be finished"):
        writer.finish(1, "c")
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("payload", [bytes(5000), np.zeros(1250, np.float32).data])
def test_a_write_that_is_short_is_gone_on_with_or_fails(tmp_path: Path, payload: Payload) -> None:
    descriptor = DISK.create(tmp_path / "file")
    with no_file_above(3000), pytest.raises(OSError, match="File too large"):
        DISK.write(descriptor, payload, 0)
    assert (tmp_path / "file").stat().st_size == 3000
    with no_file_above(3000), pytest.raises(OSError, match="File too large"):
        DISK.write_all(descriptor, [bytes(2000), bytes(2000)], 0)
    assert DISK.write_all(descriptor, [bytes(2000), bytes(2000)], 0) == 4000
    DISK.close(descriptor)


def test_a_workers_part_that_does_not_fit_leaves_nothing_there(tmp_path: Path) -> None:
    tensors = {"w": WorkerTensor("F32", (1000,), bytes(4000))}
    part = (1, "c"), StoredWorker(rank=0, clock=1, state={})
    with (
        no_file_above(3000),
        pytest.raises(InvalidCheckpoint, match="cannot be written: File too large"),
    ):
        write_worker_part(tmp_path / "part", *part, tensors)
    assert list(tmp_path.iterdir()) == []
    write_worker_part(tmp_path / "part", *part, tensors)
