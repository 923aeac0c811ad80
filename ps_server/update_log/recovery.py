"""A server's update log when the server starts: opened, read, claimed, gone on with (S13).

    lock --scan--> what may be claimed --followed--> values here --registered--> a log to write to

Rules:
    - What may be claimed is of one timeline, the newest, and has outlived whatever befell its
      writer: a log that is not synced claims nothing in another boot of the machine.
    - What is of another timeline than the cluster that the server has registered with is no part of
      it, wherever its ranges are placed: the values go.
    - A damaged log claims nothing; it is set aside, and another begins.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from ps_core.cluster_view import Session
from ps_core.errors import InvalidUpdateLog, Recovering
from ps_core.keys import RangeId
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_server.lane.shards import Shards
from ps_server.replication.backup import Replica
from ps_server.update_log.directory import LogDirectory, boot_id
from ps_server.update_log.reader import FORMAT_VERSION, LogContents, Start, scan
from ps_server.update_log.replay import replayed
from ps_server.update_log.writer import LogSetting, UpdateLog
from pushpull.v1 import scheduler_pb2, update_log_pb2


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """A log that was opened, with what was read from it.

    Attributes:
        directory: its lock is held.
        timeline: of what was read; empty: nothing was.
        replicas: the ranges that it has all of; their values are in the server's stores.
        segments: the segment in which each of these begins.
        sizes: of all segments, in bytes.
        kernel_fingerprint: of this server.
        boot_id: of this machine.
    """

    directory: LogDirectory
    timeline: bytes
    replicas: dict[RangeId, Replica]
    segments: dict[RangeId, int]
    sizes: dict[int, int]
    kernel_fingerprint: str
    boot_id: str

    def claim(self) -> scheduler_pb2.UpdateLogClaim:
        """What the scheduler is told of it."""
        return scheduler_pb2.UpdateLogClaim(
            log_id=self.directory.log_id, timeline=self.timeline, range_ids=sorted(self.replicas)
        )

    def of(self, session: Session, shards: Shards) -> RecoveredLog:
        """What counts where the server has registered; the stores have nothing else then."""
        if self.timeline == session.timeline:
            return self
        for range_id in self.replicas:
            shards.remove(range_id)
        return replace(self, replicas={}, segments={})

    def begin(self, session: Session, range_count: int, setting: LogSetting) -> UpdateLog:
        """Go on with it, as the server that has registered."""
        header = update_log_pb2.UpdateLogHeader(
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
        )
        return UpdateLog(self.directory, header, setting, self.sizes, self.segments)


async def open_log(
    path: Path, shards: Shards, kernel_fingerprint: str, deadline_s: float
) -> RecoveredLog:
    """Take a log's lock, and read what it has into the server's stores, which are empty.

    Blocking: until whoever has the lock has ended, at most `deadline_s`; and while it is read.

    Raises:
        Recovering: another process still has the lock.
        InvalidUpdateLog: no log can be kept there.
    """
    end_s = clock.now_s() + deadline_s
    told = False
    while True:
        try:
            directory = await asyncio.to_thread(LogDirectory, path)
            break
        except Recovering as error:
            wait_s = error.retry_after_ms / 1000
            if clock.now_s() + wait_s >= end_s:
                raise
            if not told:
                logs.warning("waiting_for_update_log", reason=error.message)
                told = True
            await asyncio.sleep(wait_s)
    try:
        return await asyncio.to_thread(read_log, directory, shards, kernel_fingerprint)
    except BaseException:
        await asyncio.to_thread(directory.close)
        raise


def read_log(directory: LogDirectory, shards: Shards, kernel_fingerprint: str) -> RecoveredLog:
    """Read what a log has, and may be gone on with, into stores, which are empty.

    Blocking: reads what is needed of it.

    Raises:
        InvalidUpdateLog: it is damaged, and cannot be set aside; or the disk does not give it.
    """
    try:
        return _read(directory, shards, kernel_fingerprint)
    except OSError as error:
        raise InvalidUpdateLog(
            f"{directory.path}: the update log cannot be gone on with: {error}. It is left as it "
            "is: start the server again when the disk is well, or with another directory, which "
            "has nothing"
        ) from error


def _read(directory: LogDirectory, shards: Shards, kernel_fingerprint: str) -> RecoveredLog:
    begun_s = clock.now_s()
    paths = directory.segments()
    sizes = {number: path.stat().st_size for number, path in paths.items()}
    boot = boot_id()
    nothing = RecoveredLog(directory, b"", {}, {}, sizes, kernel_fingerprint, boot)
    try:
        contents = scan(paths)
        for number in paths.keys() - contents.segments.keys():  # torn when it was begun: else it is
            directory.disk.remove(directory.segment(number))  # damage when there are newer ones
            del sizes[number]
        newest = contents.newest
        if newest is None:
            return nothing
        starts = claimable(contents, boot, kernel_fingerprint)
        replay = replayed(replace(contents, starts=starts or {}), shards)
        if newest.header.is_synced:
            directory.settle(newest.number, newest.mapped[: newest.end], newest.last_group)
        elif newest.is_torn:
            directory.cut(newest.number, newest.end)
    except InvalidUpdateLog as error:
        logs.error("update_log_damaged", reason=error.message)
        for range_id in {range_id for _, range_id in shards.stores}:
            shards.remove(range_id)
        directory.set_aside()
        return replace(nothing, sizes={})
    if starts is None:
        reason = "it is of another boot and was not synced, or other kernels wrote it"
        logs.warning("update_log_not_claimed", reason=reason)
        return nothing
    logs.info(
        "update_log_read",
        path=str(directory.path),
        ranges=len(replay.replicas),
        records=sum(replica.number for replica in replay.replicas.values()),
        took_s=round(clock.now_s() - begun_s, 3),
    )
    segments = {range_id: start.segment for range_id, start in starts.items()}
    return replace(
        nothing,
        timeline=newest.header.timeline,
        replicas=replay.replicas,
        segments=segments,
    )


def claimable(
    contents: LogContents, boot: str, kernel_fingerprint: str
) -> dict[RangeId, Start] | None:
    """The ranges of a log that this server may go on with, and where each begins; None: not with
    all of its newest timeline, so with nothing.
    """
    newest = contents.newest
    if newest is None:
        return {}
    timeline = newest.header.timeline
    present = {
        range_id: start
        for range_id, start in contents.starts.items()
        if contents.segments[start.segment].header.timeline == timeline
    }
    first = newest.number + 1  # of those that go on without a break to the newest
    for number, segment in reversed(contents.segments.items()):
        header = segment.header
        lasts = header.is_synced or header.boot_id == boot
        if not (lasts and header.kernel_fingerprint == kernel_fingerprint):
            break
        first = number
    return present if all(start.segment >= first for start in present.values()) else None
