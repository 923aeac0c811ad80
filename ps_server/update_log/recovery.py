"""Recovery of a server's update log at its start: opened, read, claimed, continued (S13).

    lock --scan--> ranges to claim --replay--> values in stores --registered--> a log to write to

Rules:
    - A server claims ranges of the newest timeline only, and only from a log that outlived whatever
      befell its writer.
    - Segments of older timelines are not judged: nothing of theirs is claimed. One without sync is
      whole once a synced one follows it in the same boot: whoever wrote that had synced it.
    - A claim says too that nobody has seen anything of the ranges that it does not name. So a log
      claims all of its ranges or none, and one that may have lost frames claims none, ever: its
      server writes another log, under another id. A log that is not synced may have lost frames
      when the machine is started again; one that has no segment may have lost all, unless the
      directory says that it never had one. Two boots that the system names by no id may be two.
    - Recovered values of another timeline than the cluster's are dropped.
    - A damaged log claims nothing; it is set aside, and another begins.
    - A disk that does not answer while a log is read is said to be waited for. After `LOG_STALL_S`
      its server ends, and the log is left as it is; the lock stays until the process is gone. Syncs
      may take longer.
    - The last group of a synced log is checked again when the disk has it: the system may have let
      go of what was read, where a sync had failed, and the disk never had it. Then the server ends,
      before it goes on from what is lost; at the next start that is a torn end.
    - Ranges that are not claimed are withheld. Their segments stay beside the bound until each of
      them has ended (`logged_ranges`, LOG-2).
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import InvalidUpdateLog, Recovering
from ps_core.keys import RangeId
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_runtime.system.disk import DISK, Disk
from ps_server.replication.backup import Replica
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory, boot_id, segments_in
from ps_server.update_log.disk_stall import DiskOperations, DiskStall, say_of_wait
from ps_server.update_log.reader import (
    FORMAT_VERSION,
    LogContents,
    RangeStart,
    Segment,
    has_its_last_group,
    scan,
)
from ps_server.update_log.recovered_ranges import replayed
from ps_server.update_log.segments import LogSegments
from ps_server.update_log.writer import LogSetting, UpdateLog
from pushpull.v1 import scheduler_pb2
from pushpull.v1.update_log_pb2 import UpdateLogHeader

ResultT = TypeVar("ResultT")


def _nothing(_: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """An open log with the ranges that were recovered from it.

    Attributes:
        timeline: of the recovered and withheld ranges; empty if there are none.
        replicas: the recovered ranges, whose values are in the server's stores.
        segments: the segment in which each of these begins.
        sizes: bytes of each segment, by number.
        is_claimed: False if the log claims nothing.
        withheld: ranges that the directory has, and this server may not go on with.
        kept_to: the newest segment of these ranges; 0 if there are none.
        unsynced: segments of this log that the disk may not have.
    """

    directory: LogDirectory
    timeline: bytes
    replicas: dict[RangeId, Replica]
    segments: dict[RangeId, int]
    sizes: dict[int, int]
    kernel_fingerprint: str
    boot_id: str
    is_claimed: bool = False
    withheld: frozenset[RangeId] = frozenset()
    kept_to: int = 0
    unsynced: tuple[int, ...] = ()

    def claim(self) -> scheduler_pb2.UpdateLogClaim:
        timeline = self.timeline if self.is_claimed else b""
        range_ids = sorted(self.replicas)
        return scheduler_pb2.UpdateLogClaim(
            log_id=self.directory.log_id,
            timeline=timeline,
            range_ids=range_ids,
            former_log_ids=self.directory.former_ids,
            assignment_epochs=[self.replicas[each].assignment_epoch for each in range_ids],
            is_unused=self.directory.is_new,
        )

    def of(self, session: Session, shards: Shards) -> RecoveredLog:
        """The ranges that count in the session's timeline; values of others leave the stores.
        Segments of withheld ranges of another timeline stay for as long as this server lives.
        """
        if self.timeline == session.timeline:
            return self
        for range_id in self.replicas:
            shards.remove(range_id)
        return replace(self, replicas={}, segments={}, withheld=frozenset())

    def begin(self, session: Session, range_count: int, setting: LogSetting) -> UpdateLog:
        """Write on, as the server that has registered."""
        header = UpdateLogHeader(
            format_version=FORMAT_VERSION,
            log_id=self.directory.log_id,
            cluster_id=session.cluster_id,
            timeline=session.timeline,
            node_id=session.node_id,
            incarnation=session.incarnation,
            range_count=range_count,
            kernel_fingerprint=self.kernel_fingerprint,
            boot_id=self.boot_id,
            is_synced=setting.is_synced,
            groups_are_consecutive=True,
        )
        segments = LogSegments(
            setting.bound_bytes, self.sizes, self.segments, self.withheld, self.kept_to
        )
        return UpdateLog(self.directory, header, setting, segments, self.unsynced)


class RecoveryMeans(NamedTuple):
    """Means of a recovery: the disk, a clock, and the seconds between two looks at the disk."""

    disk: Disk = DISK
    now: Callable[[], float] = clock.now_s
    look_s: float = 0.1


_MEANS = RecoveryMeans()


async def open_log(
    path: Path,
    shards: Shards,
    kernel_fingerprint: str,
    deadline_s: float,
    told: Callable[[str], None] = _nothing,
    means: RecoveryMeans = _MEANS,
) -> RecoveredLog:
    """Take a log's lock, waiting at most `deadline_s`, and `read_log`.

    Args:
        told: called with a reason while the disk does not answer, and with "" when it does.

    Raises:
        Recovering: another process still has the lock.
        InvalidUpdateLog: no log can be kept there, or the disk does not answer.
    """
    operations, waits = DiskOperations(), False
    end_s = means.now() + deadline_s

    def take() -> LogDirectory:
        with operations.under_way():
            return LogDirectory(path, means.disk, operations)

    def read() -> RecoveredLog:
        directory.is_written = True  # by this thread, whoever waits for it
        try:
            return read_log(directory, shards, kernel_fingerprint, operations)
        finally:
            directory.is_written = False

    reading = _Reading(path, operations, told, means)
    while True:
        try:
            directory = await reading.done(take)
            break
        except Recovering as error:
            wait_s = error.retry_after_ms / 1000
            if means.now() + wait_s >= end_s:
                raise
            if not waits:
                logs.warning("waiting_for_update_log", reason=error.message)
                waits = True
            await asyncio.sleep(wait_s)
    try:
        return await reading.done(read)
    except BaseException:
        await asyncio.to_thread(directory.close)
        raise


class _Reading:
    """A thread that reads a log, and a loop that looks at its disk. The thread, which may wait for
    ever, keeps no process from ending.
    """

    def __init__(
        self,
        path: Path,
        operations: DiskOperations,
        told: Callable[[str], None],
        means: RecoveryMeans,
    ) -> None:
        self._path, self._operations = path, operations
        self._told, self._means = told, means

    async def done(self, call: Callable[[], ResultT]) -> ResultT:
        """Make a call in the thread; its result.

        Raises:
            InvalidUpdateLog: the disk does not answer.
        """
        ended: Future[ResultT] = Future()

        def run() -> None:
            try:
                ended.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised below
                ended.set_exception(error)

        threading.Thread(target=run, name="update-log-reader", daemon=True).start()
        end, operations = asyncio.wrap_future(ended), self._operations
        stall, is_told = DiskStall(), False
        while not (await asyncio.wait((end,), timeout=self._means.look_s))[0]:
            has_failed = stall.has_failed(operations, self._means.now())
            if is_told != stall.is_to_be_said:
                is_told = not is_told
                self._tell(waits=is_told)
            if has_failed:
                problem = f"the disk does not answer for {limits.LOG_STALL_S:g} s"
                raise _unreadable(self._path, problem)
        if is_told:
            self._tell(waits=False)
        return end.result()

    def _tell(self, *, waits: bool) -> None:
        reason = f"the disk of the update log in {self._path} does not answer"
        self._told(reason if waits else "")
        say_of_wait(self._path, waits=waits)


def _unreadable(path: Path, problem: object) -> InvalidUpdateLog:
    return InvalidUpdateLog(
        f"{path}: the update log cannot be continued: {problem}. It is left as it is: start the "
        "server again when the disk is well, or with another, empty directory"
    )


def read_log(
    directory: LogDirectory,
    shards: Shards,
    kernel_fingerprint: str,
    operations: DiskOperations | None = None,
) -> RecoveredLog:
    """Recover a log's ranges into stores, which are empty. `operations` are those of this thread on
    the disk.

    Blocking: reads the log from the first segment that is needed.

    Raises:
        InvalidUpdateLog: the log is damaged and cannot be set aside, or the disk cannot be read.
    """
    try:
        return _read(directory, shards, kernel_fingerprint, operations or DiskOperations())
    except OSError as error:
        raise _unreadable(directory.path, error) from error


def _read(
    directory: LogDirectory, shards: Shards, kernel_fingerprint: str, operations: DiskOperations
) -> RecoveredLog:
    begin_s = clock.now_s()
    with operations.under_way():
        paths = segments_in(directory.path)
        sizes = {number: path.stat().st_size for number, path in paths.items()}
    boot = boot_id()
    nothing = RecoveredLog(directory, b"", {}, {}, sizes, kernel_fingerprint, boot)
    try:
        contents = scan(paths, operations)
        # A segment whose writer died when it began it would be damage once newer ones follow.
        for number in paths.keys() - contents.segments.keys():
            with operations.under_way():
                directory.disk.remove(directory.segment(number))
            del sizes[number]
        claim = claimable(contents, directory.log_id, boot, kernel_fingerprint)
        headers = [segment.header for segment in contents.segments.values()]
        if directory.is_marked and directory.log_id not in {each.log_id for each in headers}:
            directory.is_new = True
        is_another = not (claim.is_whole or directory.is_new)
        if is_another:
            with operations.under_way():
                directory.renew()
        if is_another or claim.withheld:
            _warn_of(claim)
        newest = contents.newest
        if newest is None:
            return nothing
        unsynced = tuple(
            number
            for number, segment in contents.segments.items()
            if segment.header.log_id == directory.log_id and not segment.header.is_synced
        )
        replicas = replayed(replace(contents, starts=claim.starts), shards)
        with operations.under_way(may_last=True):
            _make_durable(directory, newest)
    except InvalidUpdateLog as error:
        logs.error("update_log_damaged", reason=error.message)
        for range_id in {range_id for _, range_id in shards.stores}:
            shards.remove(range_id)
        with operations.under_way():
            directory.set_aside()
        return replace(nothing, sizes={})
    found = replace(
        nothing,
        timeline=newest.header.timeline,
        is_claimed=claim.is_claimed,
        withheld=frozenset(claim.withheld),
        kept_to=claim.kept_to,
        unsynced=unsynced,
    )
    if not claim.is_claimed:
        return found
    logs.info(
        "update_log_read",
        path=str(directory.path),
        ranges=len(replicas),
        records=sum(replica.number for replica in replicas.values()),
        took_s=round(clock.now_s() - begin_s, 3),
    )
    segments = {range_id: start.segment for range_id, start in claim.starts.items()}
    return replace(found, replicas=replicas, segments=segments)


def _make_durable(directory: LogDirectory, newest: Segment) -> None:
    """Have the disk take what the log goes on from, and nothing behind it.

    Raises:
        OSError: as of the system; also if the disk has lost the end of a synced log since it was
            read. The next start cuts it.
    """
    if newest.header.is_synced:
        directory.make_durable(newest.number, newest.file, newest.last_group, newest.end)
        if not has_its_last_group(newest):
            raise OSError(
                errno.EIO, "the disk has lost its end since it was read", str(newest.path)
            )
    elif newest.is_torn:
        directory.cut(newest.number, newest.end)


def _warn_of(claim: Claimable) -> None:
    if claim.is_whole and not claim.is_claimed:
        reason = "other kernels or another release wrote it"
        remedy = (
            "start with the pushpull, the torch and the processor that wrote it, or restore a "
            "checkpoint"
        )
    else:
        reason = (
            "it may have lost frames: it has no segment, or was not synced before the machine was "
            "started again, or the system has no boot id that tells. What the server writes now is "
            "another log"
        )
        remedy = "nothing, if other servers go on with its ranges; else restore a checkpoint"
    logs.warning("update_log_not_claimed", ranges=len(claim.withheld), reason=reason, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Claimable:
    """Ranges of a directory's newest timeline, by whether its server may go on with them.

    Attributes:
        starts: the ranges that it may go on with, and where each begins.
        withheld: the ranges that it may not go on with.
        kept_to: the newest segment that has something of a withheld range; 0 if there is none.
        is_claimed: False if the log claims nothing, not even that the rest was never seen.
        is_whole: False if frames of the log may be lost.
    """

    starts: dict[RangeId, RangeStart]
    withheld: frozenset[RangeId] = frozenset()
    kept_to: int = 0
    is_claimed: bool = True
    is_whole: bool = True


def durable_segments(headers: Mapping[int, UpdateLogHeader], boot: str) -> set[int]:
    """Segments of one log that have outlived whatever befell the machine."""
    found = set()
    synced_boots: set[str] = set()  # whoever began a synced segment synced all before it
    for number in sorted(headers, reverse=True):
        header = headers[number]
        if header.is_synced:
            synced_boots.add(header.boot_id)
        boots = {boot, *synced_boots} - {""}  # without an id it may have been another one
        if header.is_synced or header.boot_id in boots:
            found.add(number)
    return found


def claimable(
    contents: LogContents, log_id: bytes, boot: str, kernel_fingerprint: str
) -> Claimable:
    """Tell the ranges that a server may go on with, in the log `log_id`, from all others."""
    segments, newest = contents.segments, contents.newest
    headers = {number: segment.header for number, segment in segments.items()}
    own = {number for number, header in headers.items() if header.log_id == log_id}
    present = {
        range_id: start
        for range_id, start in contents.starts.items()
        if newest is not None and headers[start.segment].timeline == newest.header.timeline
    }
    starts = {range_id: start for range_id, start in present.items() if start.segment in own}
    # A segment without frames of ranges may have lost them. Other timelines claim nothing.
    judged = [
        number
        for number in own
        if newest is not None and headers[number].timeline == newest.header.timeline
    ]
    durable = durable_segments({number: headers[number] for number in own}, boot)
    is_whole = bool(judged) and durable.issuperset(judged)
    by_others = [
        number
        for number in own
        if segments[number].has_ranges and headers[number].kernel_fingerprint != kernel_fingerprint
    ]
    first = max(by_others, default=0)  # ranges must begin in the segments after it
    is_claimed = is_whole and all(start.segment > first for start in starts.values())
    if not is_claimed:
        starts, own = {}, set()
    withheld = frozenset(present.keys() - starts.keys())
    holding = [n for n in segments.keys() - own if withheld and segments[n].has_ranges]
    return Claimable(starts, withheld, max(holding, default=0), is_claimed, is_whole)
