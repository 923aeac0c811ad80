"""A log that a server finds when it starts."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidUpdateLog, Recovering
from ps_core.keys import Incarnation, NodeId
from ps_runtime.system.disk import Disk, Payload
from ps_server.lane.lane_socket import SharedLanes
from ps_server.replay.run_log import read_run
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory, boot_id, segments_in
from ps_server.update_log.format import HEAD_BYTES, MAGIC, FrameKind, frame_bytes, head_at
from ps_server.update_log.reader import scan
from ps_server.update_log.recovery import (
    RecoveredLog,
    RecoveryMeans,
    durable_segments,
    open_log,
    read_log,
)
from pushpull.v1.update_log_pb2 import UpdateLogHeader
from tests.unit.power_cut import RecordingDisk
from tests.unit.written_logs import LEFT, RIGHT, OlderSyncedLog, Owner, SyncedLog, WrittenLog

DEADLINE_S = 1.0


def opened(path: Path, kernels: str = "") -> RecoveredLog:
    """As a server that starts has it; it ends at once."""
    recovered = asyncio.run(open_log(path, Shards(SharedLanes(), {}), kernels, DEADLINE_S))
    recovered.directory.close()
    return recovered


def test_a_segment_that_was_torn_when_it_was_begun_is_no_damage_later(tmp_path: Path) -> None:
    """Its server was killed before the segment had a header; so was the next one, in the next. A
    power cut leaves zeros.
    """
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path, boot=boot_id())
    log.begin(owner)
    log.record(owner.update(1))
    for torn in (b"", b"pushpull", bytes(100), MAGIC + bytes(100)):
        number = len(list(tmp_path.glob("*.log"))) + 1
        (tmp_path / f"{number:08d}.log").write_bytes(torn)
        recovered = opened(tmp_path)
        assert {r: replica.number for r, replica in recovered.replicas.items()} == {
            LEFT: owner.number
        }
        log.go_on_after(max(recovered.sizes))
        log.taken_over(owner)
        log.record(owner.update(owner.number + 1))
    assert opened(tmp_path).replicas[LEFT].number == owner.number == 5


def test_a_boot_without_an_id_is_no_other_one() -> None:
    """Where the system does not say, the machine may have been started again meanwhile."""

    def headers(boot: str, *are_synced: bool) -> dict[int, UpdateLogHeader]:
        made = (UpdateLogHeader(boot_id=boot, is_synced=each) for each in are_synced)
        return dict(enumerate(made, start=1))

    assert durable_segments(headers("this", False, True, False), "this") == {1, 2, 3}
    assert durable_segments(headers("", False, True, False), "") == {2}
    assert durable_segments(headers("this", False, True, False), "") == {1, 2}
    assert durable_segments(headers("", False), "this") == set()


def test_what_is_of_another_timeline_is_of_no_cluster(tmp_path: Path) -> None:
    owner, log = Owner(LEFT), WrittenLog(tmp_path, timeline=b"t" * 16, boot=boot_id())
    log.begin(owner)
    log.record(owner.update(1))
    shards = Shards(SharedLanes(), {})
    with LogDirectory(tmp_path) as directory:
        recovered = read_log(directory, shards, "")
    assert recovered.replicas.keys() == {LEFT}
    session = Session("c", recovered.timeline, NodeId(1), Incarnation(1), Role.SERVER)
    assert recovered.of(session, shards) == recovered
    assert shards.stores
    new = recovered.of(replace(session, timeline=b"n" * 16), shards)
    assert (new.replicas, new.segments, new.sizes) == ({}, {}, recovered.sizes)
    assert not shards.stores


def test_a_log_that_is_set_aside_is_another_before_its_first_segment_goes(tmp_path: Path) -> None:
    """A server that dies in between must claim nothing of what is left."""
    disk = RecordingDisk()
    with LogDirectory(tmp_path, disk) as directory:
        for number in (1, 2):
            directory.segment(number).touch()
        before, begin = directory.log_id, len(disk.operations)
        directory.set_aside()
        assert directory.former_ids == (before,)
    targets = [each.target for each in disk.operations[begin:] if each.kind == "rename"]
    expected = ("unused", "log_id", "00000001.damaged", "00000002.damaged")
    assert targets == [tmp_path / name for name in expected]


def opened_id(path: Path) -> bytes:
    with LogDirectory(path) as directory:
        return directory.log_id


def claim_of(path: Path) -> tuple[bytes, bool, set[int]]:
    """What a server that starts tells the scheduler: the log, whether it claims, and the ranges."""
    claim = opened(path).claim()
    return claim.log_id, bool(claim.timeline), set(claim.range_ids)


def test_a_log_that_may_have_lost_frames_never_says_what_nobody_has_seen(tmp_path: Path) -> None:
    """A power cut took all that was written of its ranges. The log that its server writes is
    another: the scheduler begins no range anew that the former log was of.
    """
    log = WrittenLog(tmp_path, boot="another")
    former = opened_id(tmp_path)
    new, is_claimed, _ = claim_of(tmp_path)
    assert (new != former, is_claimed) == (True, False)
    log = WrittenLog(tmp_path, boot=boot_id(), after=1)
    assert claim_of(tmp_path) == (new, True, set())
    owner = Owner(LEFT)
    log.begin(owner)
    assert claim_of(tmp_path) == (new, True, {LEFT})


@pytest.mark.parametrize("left", ["nothing", "an empty file", "no frames", "a range"])
def test_a_log_that_becomes_another_says_so(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ranges may be nowhere else: nobody else says what became of them."""
    log = WrittenLog(tmp_path, boot="another")
    if left == "nothing":
        log.newest.unlink()
    elif left == "an empty file":
        log.newest.write_bytes(b"")
    elif left == "a range":
        log.begin(Owner(LEFT))
    assert warned(tmp_path, caplog).endswith('else restore a checkpoint"')


def test_a_log_by_other_kernels_says_who_can_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = WrittenLog(tmp_path, boot=boot_id())
    log.begin(Owner(LEFT))
    assert not caplog.records
    assert "start with the pushpull, the torch" in warned(tmp_path, caplog, "others")


def warned(path: Path, caplog: pytest.LogCaptureFixture, kernels: str = "") -> str:
    """What a server that starts says of what it does not claim; a line."""
    with caplog.at_level(logging.WARNING, "pushpull"):
        opened(path, kernels)
    (line,) = [each.getMessage() for each in caplog.records]
    assert "update_log_not_claimed" in line
    return line


def test_a_synced_run_is_claimed_whatever_ran_there_before_without_sync(tmp_path: Path) -> None:
    """After a power cut, which may have taken what is left of the run before."""
    WrittenLog(tmp_path, timeline=b"o" * 16, boot="another").begin(Owner(RIGHT))
    owner, log = Owner(LEFT), SyncedLog(tmp_path, boot="a third", after=1)
    log.begin(owner)
    log.record(owner.update(1))
    assert claim_of(tmp_path) == (opened_id(tmp_path), True, {LEFT})


def test_a_log_is_whole_if_it_became_synced_before_the_machine_was_started_again(
    tmp_path: Path,
) -> None:
    """Whoever writes it with sync has synced what was written without."""
    owner, log = Owner(LEFT), WrittenLog(tmp_path / "log", boot="another")
    log.begin(owner)
    log.record(owner.update(1))
    log.is_synced = True
    log.segment()
    log.taken_over(owner)
    log.record(owner.update(2))
    log.is_synced = False
    shutil.copytree(log.path, tmp_path / "unsynced again")
    log_id = opened_id(log.path)
    assert claim_of(log.path) == (log_id, True, {LEFT})
    log.path = tmp_path / "unsynced again"
    log.segment()
    assert claim_of(log.path)[:2] != (log_id, True)
    booted = WrittenLog(tmp_path / "booted", boot="another")
    booted.begin(Owner(LEFT))
    SyncedLog(booted.path, boot="a third", after=1).begin(Owner(RIGHT))
    assert not claim_of(booted.path)[1], "it was too late to sync the first"


@pytest.mark.parametrize("was_renewed", [False, True])
def test_a_log_whose_segments_are_gone_is_another(tmp_path: Path, was_renewed: bool) -> None:
    """Whatever has removed them, and if a process died while it drew another id. It is another
    once: until it has a segment nobody has seen it.
    """
    log = WrittenLog(tmp_path, boot=boot_id())
    former = opened_id(tmp_path)
    log.newest.unlink()
    if was_renewed:
        (tmp_path / "unused").write_text("07" * 16, encoding="ascii")
    new, is_claimed, _ = claim_of(tmp_path)
    assert (new != former, is_claimed) == (True, False)


def test_a_log_that_never_had_a_segment_says_so(tmp_path: Path) -> None:
    """Its server died when it had registered: nobody has seen anything of its ranges."""
    log_id = opened_id(tmp_path)
    for _ in range(2):
        claim = opened(tmp_path).claim()
        assert (claim.log_id, claim.timeline, claim.is_unused) == (log_id, b"", True)
    log = WrittenLog(tmp_path, boot=boot_id())
    assert not opened(tmp_path).claim().is_unused
    log.newest.unlink()
    assert opened(tmp_path).claim().log_id != log_id


def test_a_log_names_those_before_it_for_as_long_as_it_is_kept(tmp_path: Path) -> None:
    """Whoever writes it may end before it has registered."""
    ids = [opened_id(tmp_path)]
    for _ in range(limits.MAX_FORMER_LOGS + 2):
        with LogDirectory(tmp_path) as directory:
            directory.has_begun()
        claim = opened(tmp_path).claim()
        assert list(claim.former_log_ids) == ids[: limits.MAX_FORMER_LOGS]
        ids.insert(0, claim.log_id)
    assert len(set(ids)) == len(ids)
    log = WrittenLog(tmp_path, boot=boot_id())
    assert list(opened(tmp_path).claim().former_log_ids) == ids[1 : 1 + limits.MAX_FORMER_LOGS]
    damaged(log)
    assert list(opened(tmp_path).claim().former_log_ids) == ids[: limits.MAX_FORMER_LOGS]


def test_ranges_of_a_former_log_are_withheld_until_they_have_ended(tmp_path: Path) -> None:
    """The next log in the directory claims its own, whatever is left of the former."""
    left, right = Owner(LEFT), Owner(RIGHT)
    log = WrittenLog(tmp_path, boot="another")
    log.begin(left)
    log.record(left.update(1))
    assert opened(tmp_path).withheld == {LEFT}
    log = WrittenLog(tmp_path, boot=boot_id(), after=1)
    log.begin(right)
    found = opened(tmp_path)
    assert (found.withheld, found.kept_to, found.segments) == (frozenset({LEFT}), 1, {RIGHT: 2})
    log.end(LEFT)
    found = opened(tmp_path)
    assert (found.withheld, found.kept_to, found.segments) == (frozenset(), 0, {RIGHT: 2})


def test_kernels_go_on_with_what_they_made_once_the_others_ranges_have_ended(
    tmp_path: Path,
) -> None:
    """And an end is of no kernels: those that made the rest may go on with it."""
    left, right = Owner(LEFT), Owner(RIGHT)
    log = WrittenLog(tmp_path, boot=boot_id())
    log.begin(left)
    log.begin(right)
    log.kernels = "others"
    log.segment()
    log.end(RIGHT)
    log_id = opened_id(tmp_path)
    assert claim_of(tmp_path) == (log_id, True, {LEFT})
    right.term = 3
    log.begin(right)
    found = opened(tmp_path)
    assert (found.withheld, found.kept_to) == (frozenset({LEFT, RIGHT}), 2)
    assert claim_of(tmp_path) == (log_id, False, set())
    assert opened(tmp_path, "others").withheld == {LEFT, RIGHT}
    log.end(LEFT)
    assert claim_of(tmp_path) == (log_id, False, set())
    assert opened(tmp_path, "others").replicas.keys() == {RIGHT}


def damaged(log: WrittenLog) -> None:
    """A power cut: what was not synced is zeros."""
    with log.newest.open("ab") as file:
        file.write(bytes(4096))


def test_what_is_written_after_damage_is_gone_on_with(tmp_path: Path) -> None:
    """Under another id: what was lost is never taken for what nobody has seen."""
    owner, log = Owner(LEFT), WrittenLog(tmp_path, boot=boot_id())
    log.begin(owner)
    log.record(owner.update(1))
    damaged(log)
    with LogDirectory(tmp_path) as directory:
        before = directory.log_id
    recovered = opened(tmp_path)
    assert (recovered.replicas, recovered.timeline) == ({}, b"")
    again, log = (
        Owner(LEFT),
        WrittenLog(tmp_path, boot=boot_id(), after=max(recovered.sizes, default=0)),
    )
    log.begin(again)
    log.record(again.update(1))
    found = opened(tmp_path)
    assert found.replicas[LEFT].number == 1
    assert found.directory.log_id == recovered.directory.log_id != before
    assert len(read_run(tmp_path).changes) == 1


def zero(log: WrittenLog, begin: int, end: int) -> None:
    """A power cut: this part was not synced."""
    with log.newest.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(end - begin))


def written(log: WrittenLog, write: Callable[[], None]) -> range:
    """The place of the first frame that this writes."""
    at = log.newest.stat().st_size
    write()
    head = head_at(memoryview(log.newest.read_bytes()), at)
    assert head is not None
    return range(at, at + frame_bytes(head.length))


@pytest.mark.parametrize(
    ("kind", "own", "number"),
    [
        (OlderSyncedLog, 3, 1),
        (OlderSyncedLog, 0, 1),
        (OlderSyncedLog, 2, None),
        (OlderSyncedLog, 1, None),
        (SyncedLog, 3, None),
        (SyncedLog, 0, None),
    ],
)
def test_a_group_that_is_missing_is_damage_where_all_have_frames(
    tmp_path: Path, kind: type[SyncedLog], own: int, number: int | None
) -> None:
    """Its frame is lost, and `own` is the group that its head has left. Older servers counted jobs
    without frames: the frame may be of the group behind it, which was not synced.
    """
    owner, log = Owner(LEFT), kind(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    log.group = 3
    lost = written(log, lambda: log.record(owner.update(2)))
    log.record(owner.update(3))
    zero(log, lost.start + (HEAD_BYTES if own else 0), lost.stop)
    with log.newest.open("r+b") as file:
        file.seek(lost.start + 8)
        file.write(own.to_bytes(4, "little"))
    found = opened(tmp_path).replicas
    assert {r: each.number for r, each in found.items()} == ({LEFT: number} if number else {})
    assert bool(list(tmp_path.glob("*.damaged"))) == (number is None)


@pytest.mark.parametrize("torn", ["record", "snapshot"])
def test_a_range_whose_newest_snapshot_is_torn_begins_where_it_did_before(
    tmp_path: Path, torn: str
) -> None:
    """Or whose snapshot lies behind a torn frame. The log would say that nobody has seen anything
    of the range, and it would begin anew, without its training.
    """
    left, right = Owner(LEFT), Owner(RIGHT)
    log = SyncedLog(tmp_path)
    for owner in (left, right):
        log.begin(owner)
        log.record(owner.update(1))
    log.group += 1
    record = written(log, lambda: log.record(right.update(2)))
    snapshot = written(log, lambda: log.snapshot(left))
    lost = record if torn == "record" else snapshot
    zero(log, lost.start + HEAD_BYTES, lost.stop)
    numbers = {LEFT: 1, RIGHT: 1 if torn == "record" else 2}
    for _ in range(2):
        assert {r: each.number for r, each in opened(tmp_path).replicas.items()} == numbers
        assert log.newest.stat().st_size == lost.start


def test_a_torn_end_is_cut_by_whoever_writes_next(tmp_path: Path) -> None:
    """Though they claim nothing: behind their segment it would be damage."""
    owner, log = Owner(LEFT), SyncedLog(tmp_path)
    log.begin(owner)
    log.group += 1
    lost = written(log, lambda: log.record(owner.update(1)))
    zero(log, lost.start + HEAD_BYTES, lost.stop)
    assert not opened(tmp_path, "others").replicas
    log.kernels = "others"
    log.segment()
    assert opened(tmp_path).replicas.keys() == {LEFT}


def test_of_damaged_logs_the_newest_is_left(tmp_path: Path) -> None:
    ids = set()
    for count in (3, 1):
        log = WrittenLog(tmp_path, boot=boot_id())
        for _ in range(count - 1):
            log.segment()
        damaged(log)
        ids.add(opened(tmp_path).directory.log_id)
    assert len(ids) == 2
    assert [each.name for each in tmp_path.glob("*.damaged")] == ["00000001.damaged"]
    assert not segments_in(tmp_path)


def test_a_power_cut_takes_nothing_that_was_synced(tmp_path: Path) -> None:
    """Whatever it leaves of the last group, which was not."""
    owner, log = Owner(LEFT), SyncedLog(tmp_path / "log", boot="another")
    log.begin(owner)
    for clock in range(1, 8):
        if clock in (2, 4):
            synced_bytes, log.group = log.newest.stat().st_size, log.group + 1
        log.record(owner.update(clock))
    whole, chooser = log.newest.read_bytes(), random.Random(2)
    found = set()
    for _ in range(100):
        left = bytearray(whole[: chooser.randint(synced_bytes, len(whole))])
        for at in range(synced_bytes, len(left), 64):
            if chooser.random() < 0.03:
                left[at : at + 64] = bytes(len(left[at : at + 64]))
        copy = tmp_path / "copy"
        shutil.copytree(log.path, copy)
        (copy / log.newest.name).write_bytes(left)
        found.add(opened(copy).replicas[LEFT].number)
        shutil.rmtree(copy)
    assert min(found) == 3
    assert len(found) > 1


class Synced(Disk):
    """A disk that notes how long a file is when it is synced."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.sizes.append(os.fstat(descriptor).st_size)


def test_a_torn_end_is_off_the_disk_before_another_segment_is_on_it(tmp_path: Path) -> None:
    """Else a power cut brings it back, where it is no end any more."""
    owner, log = Owner(LEFT), WrittenLog(tmp_path, boot=boot_id())
    log.begin(owner)
    whole_bytes = log.newest.stat().st_size
    with log.newest.open("ab") as file:
        file.write(bytes(5))
    disk = Synced()
    with LogDirectory(tmp_path, disk) as directory:
        disk.sizes.clear()
        read_log(directory, Shards(SharedLanes(), {}), "")
    assert disk.sizes == [whole_bytes] == [log.newest.stat().st_size]


class CutMeanwhile(Disk):
    """A disk that cuts a segment when the directory is given another id."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        os.truncate(self._segment, 4096)


def test_an_end_that_is_written_once_more_is_read_first(tmp_path: Path) -> None:
    """Though nothing is claimed: a page that is not there would end the process with a signal, and
    one that does not come would keep it from saying so.
    """
    WrittenLog(tmp_path, boot="another").begin(Owner(LEFT))
    owner, log = Owner(RIGHT), SyncedLog(tmp_path, boot="a third", after=1)
    log.begin(owner)
    for clock in range(1, 16):
        log.record(owner.update(clock))
    with (
        LogDirectory(tmp_path, CutMeanwhile(log.newest)) as directory,
        pytest.raises(InvalidUpdateLog, match=r"cannot be continued: .*was cut at byte 4096"),
    ):
        read_log(directory, Shards(SharedLanes(), {}), "")


class CutBehind(Disk):
    """A disk that cuts a segment behind each large piece that is written to it."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        super().write(descriptor, payload, offset)
        if len(payload) > 1_000_000:
            os.truncate(self._segment, offset + len(payload))


def test_each_piece_of_an_end_is_read_when_it_is_written_once_more(tmp_path: Path) -> None:
    """An end may be gigabytes: the first pieces that were read have left the memory when the last
    ones have come to it, and whoever used one of them would wait for the disk, or end.
    """
    WrittenLog(tmp_path, boot="another").begin(Owner(LEFT))
    log = SyncedLog(tmp_path, boot="a third", after=1)
    for _ in range(2):
        log._write(FrameKind.RECORD, [bytes(8 << 20)], RIGHT, 1)
    with (
        LogDirectory(tmp_path, CutBehind(log.newest)) as directory,
        pytest.raises(InvalidUpdateLog, match=f"was cut at byte {8 << 20}:"),
    ):
        read_log(directory, Shards(SharedLanes(), {}), "")


# --- a disk that does not answer


class SlowStart:
    """A server that starts with a file whose first byte does not come, until it is let come. It
    looks twice a second, by a clock that stands once `until_told` and it has said that it waits.
    """

    def __init__(self, path: Path, name: str = "00000001.log", *, until_told: bool = False) -> None:
        LogDirectory(path).close()
        self.path = path
        self.told: list[str] = []
        self._pipe = path / name
        self._pipe.unlink(missing_ok=True)
        os.mkfifo(self._pipe)
        self._until_told = until_told
        self._now_s = 0.0

    def _now(self) -> float:
        self._now_s += 0.0 if self.told and self._until_told else 0.5
        return self._now_s

    def _tell(self, reason: str) -> None:
        self.told.append(reason)
        if reason and self._until_told:
            self.answer()

    def answer(self) -> None:
        """The disk answers: there is nothing in the segment."""
        os.close(os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK))

    def opened(self) -> RecoveredLog:
        means = RecoveryMeans(now=self._now, look_s=0.001)
        shards = Shards(SharedLanes(), {})
        return asyncio.run(open_log(self.path, shards, "", DEADLINE_S, self._tell, means))


@pytest.mark.parametrize("name", ["00000001.log", "log_id"])
def test_a_disk_that_does_not_give_a_log_is_waited_for_and_given_up(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It hung without a word. The lock stays, since the thread that reads may yet write."""
    start = SlowStart(tmp_path, name)
    refused = f"{tmp_path}: .* the disk does not answer for 20 s. It is left as it is: start the"
    with pytest.raises(InvalidUpdateLog, match=refused):
        start.opened()
    assert start.told == [f"the disk of the update log in {tmp_path} does not answer"]
    assert f"event=waiting_for_log_disk path={tmp_path} for_s=5.000 remedy=" in caplog.text
    with pytest.raises(Recovering, match="another server writes this update log"):
        LogDirectory(tmp_path)
    start.answer()


def test_a_log_whose_disk_answers_late_is_gone_on_with(tmp_path: Path) -> None:
    start = SlowStart(tmp_path, until_told=True)
    recovered = start.opened()
    assert start.told == [f"the disk of the update log in {tmp_path} does not answer", ""]
    assert recovered.sizes == {}
    recovered.directory.close()
    LogDirectory(tmp_path).close()


class SlowSyncs(Disk):
    """A disk whose syncs each last for longer than one operation may, and whose removals almost as
    long, by a clock that goes on by half a second at each look.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._operations: list[tuple[float, threading.Event]] = []

    def now(self) -> float:
        self._now_s += 0.5
        for end_s, is_done in list(self._operations):
            if self._now_s >= end_s:
                is_done.set()
        return self._now_s

    def sync(self, descriptor: int) -> None:
        del descriptor
        self._last(1.2 * limits.LOG_STALL_S)

    def remove(self, path: Path) -> None:
        self._last(0.8 * limits.LOG_STALL_S)
        super().remove(path)

    def _last(self, for_s: float) -> None:
        is_done = threading.Event()
        self._operations.append((self._now_s + for_s, is_done))
        assert is_done.wait(20)

    def sync_directory(self, path: Path) -> None:
        del path
        self.sync(0)


@pytest.mark.parametrize(
    "left", ["nothing", "another boot's log", "a damaged log", "two damaged logs"]
)
def test_syncs_at_a_start_may_last(tmp_path: Path, left: str) -> None:
    """A directory that is made, and given another id, and a log that is set aside, in place of one
    of before.
    """
    path, disk, told = tmp_path / "log", SlowSyncs(), list[str]()
    if left != "nothing":
        log = WrittenLog(path, boot="another" if left == "another boot's log" else boot_id())
        if left in ("a damaged log", "two damaged logs"):
            damaged(log)
        for number in range(3 if left == "two damaged logs" else 0):
            (path / f"0000001{number}.damaged").touch()
    means = RecoveryMeans(disk, disk.now, look_s=0.001)
    shards = Shards(SharedLanes(), {})
    recovered = asyncio.run(open_log(path, shards, "", DEADLINE_S, told.append, means))
    recovered.directory.close()
    assert recovered.directory.is_new
    assert told[:2] == [f"the disk of the update log in {path} does not answer", ""]


def test_a_segment_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A page that is not there would end the process with a signal."""
    owner, log = Owner(LEFT), WrittenLog(tmp_path)
    log.begin(owner)
    for clock in range(1, 9):
        log.record(owner.update(clock))
    contents = scan(segments_in(tmp_path))
    os.truncate(log.newest, 4096)
    with pytest.raises(OSError, match=f"the file was cut at byte 4096: .*{log.newest.name}"):
        list(contents.frames())
