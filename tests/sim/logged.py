"""A server of a simulation that keeps an update log, and the log itself, which outlives it."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_core.sliced_work import Work, at_once
from ps_core.tables.table import Table
from ps_server.ranges.range_copy import ShardCopy, fresh_copy
from ps_server.replication.backup import Replica
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.replication.output_commit import CommittedEffect, OutputCommit
from ps_server.replication.peer_pacing import PeerPacing
from ps_server.replication.range_roles import Replication
from ps_server.replication.replication_log import RangeLog
from ps_server.update_log.disk_stall import DiskStall
from ps_server.update_log.format import FrameKind
from ps_server.update_log.logged_ranges import LoggedRanges
from ps_server.update_log.segments import LogSegments
from scheduler.machine.state import UpdateLogClaim
from tests.sim.replicated import LEASE_S, Place, ReplicatedServer
from tests.sim.shown import shows
from tests.sim.truth import Settings
from tests.sim.world import World

BOUND_FRAMES = 24
"""A frame counts as a byte here: every range gets many snapshots."""

ROOM_FRAMES = 20
"""No snapshot is taken while more frames wait to be written."""

BASES_TAKE_S = (0.0, 1.0, 6.0)
"""At most, before there is room for the next, in a seed: of a large model they come one by one, and
updates are in the log before most of them.
"""

CRAWLS_S = 6.0
"""What each operation of a slow disk takes: less than a disk may."""

EARLY_S = 0.5
"""By how much a disk may be given up sooner: clocks drift."""

PAUSE_COUNTS_S = 1.0
"""And for each pause of its server: so much of one may a look count."""

LATE_S = 1.5
"""And later: the first look sees an operation, and it looks four times a second."""

KINDS = {
    "begin": FrameKind.BEGIN,
    "taken over": FrameKind.TAKEN_OVER,
    "snapshot": FrameKind.SNAPSHOT,
    "record": FrameKind.RECORD,
    "end": FrameKind.END,
}

TIMELINE = bytes(16)


class Frame(NamedTuple):
    """One item of the log. `what` is a Record, a snapshot with its values, or nothing."""

    kind: str
    segment: int
    range_id: RangeId
    term: AssignmentEpoch
    assignment_epoch: AssignmentEpoch
    number: int
    what: object = None


class SimLog:
    """A log: what is written, what is on its way there, and who writes it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.log_id = bytes([200 + number]) * 16
        self.former_ids: tuple[bytes, ...] = ()
        self.timeline = TIMELINE
        self.frames: list[Frame] = []
        self.writer: LoggedServer | None = None
        self.segments = LogSegments(BOUND_FRAMES, {}, {})
        self.withheld: set[RangeId] = set()
        self._has_segments = True
        self._former = 0  # the newest segment of a log of before, of another id
        self._pending: deque[Frame] = deque()
        self._delay_s = world.draw.choice((0.001, 0.05, 0.5))
        self._bases_take_s = world.draw.choice(BASES_TAKE_S)
        self._base_until_s = 0.0
        self._answers_s = self._crawls_until_s = 0.0
        self._written_count = 0

    @property
    def is_busy(self) -> bool:
        """See `LogWriter`, as all of these."""
        return len(self._pending) > ROOM_FRAMES or self.world.now_s < self._base_until_s

    @property
    def lagging(self) -> Sequence[RangeId]:
        return self.segments.lagging

    # --- its disk

    def stall(self, for_s: float) -> None:
        """Its disk takes what it is given, and answers nothing for a while."""
        self._answers_s = max(self._answers_s, self.world.now_s + for_s)

    def crawl(self, for_s: float) -> None:
        """Its disk answers, one operation after the other, each of which takes its time."""
        self._crawls_until_s = self.world.now_s + for_s

    def be_well(self) -> None:
        """Its disk answers at once."""
        self._answers_s = self._crawls_until_s = self.world.now_s
        writer = self.writer
        for _ in self._pending:
            self.world.after(0.0, lambda: self._write(writer))

    @property
    def is_well(self) -> bool:
        """Whether its disk answers at once."""
        return self.world.now_s >= max(self._answers_s, self._crawls_until_s)

    @property
    def answers_within_s(self) -> float:
        """Until its disk answers."""
        return max(0.0, self._answers_s - self.world.now_s)

    @property
    def operation(self) -> int:
        """As of `UpdateLog`: the number of what its disk is busy with; 0: nothing."""
        return self._written_count + 1 if self._pending else 0

    # --- what is written

    def begin(self, log: RangeLog) -> None:
        self._append("begin", log.range_id, log.term, log.assignment_epoch, log.released)

    def take_over(self, log: RangeLog) -> None:
        assert (has := self._newest(log.range_id)) == log.released, (
            f"S13: range {log.range_id} goes on from {log.released} in a log that has {has}"
        )
        self._append("taken over", log.range_id, log.term, log.assignment_epoch, log.released)

    def write_snapshot(self, snapshot: Snapshot) -> Work[None]:
        yield
        assert self.writer is not None
        copies = {t: copy.twin() for t, copy in snapshot.copies.items()}
        what = (snapshot._replace(copies=copies), self.writer._values_of(snapshot.range_id))
        self.world.counts["log snapshots"] += 1
        self._base_is_under_way()
        self._append(
            "snapshot", snapshot.range_id, snapshot.term, snapshot.assignment_epoch,
            snapshot.number, what,
        )  # fmt: skip

    def _base_is_under_way(self) -> None:
        self._base_until_s = self.world.now_s + self._bases_take_s * self.world.draw.random()

    def write_record(self, record: LogRecord) -> None:
        self._append(
            "record", record.range_id, record.term, record.assignment_epoch, record.number, record
        )

    def end(self, range_id: RangeId) -> None:
        counts = self.world.counts
        counts["ranges ended in a log"] += 1
        counts["ended as placed anew"] += self._is_of_before(range_id)
        if range_id in self.withheld:
            counts["withheld ranges ended"] += 1
            assert self._may_end(range_id), (
                f"LOG-2: nobody has range {range_id}, and it is ended in a log"
            )
            self.withheld.discard(range_id)
        self._append("end", range_id, AssignmentEpoch(0), AssignmentEpoch(0), 0)

    def _may_end(self, range_id: RangeId) -> bool:
        """Whether nobody needs what it has of a range that was not asked for: a server that lives
        has it, or the range has no values, or had none when it was placed anew.
        """
        assert self.writer is not None
        watch = self.writer.watch
        return (
            watch.is_held(range_id)
            or self._is_of_before(range_id)
            or range_id not in ranges_with_values(watch._view())
        )

    def _is_of_before(self, range_id: RangeId) -> bool:
        """Whether the range was placed anew since all that is written of it."""
        assert self.writer is not None
        begin = self._all_begins().get(range_id)
        placed_epoch = self.writer.watch._view().ranges[range_id].placed_epoch
        return begin is not None and self._epoch_of(range_id, begin) < placed_epoch

    def _append(
        self,
        kind: str,
        range_id: RangeId,
        term: AssignmentEpoch,
        assignment_epoch: AssignmentEpoch,
        number: int,
        what: object = None,
    ) -> None:
        self.segments.append(KINDS[kind], range_id, 1)
        newest = self.segments.newest
        frame = Frame(kind, newest, range_id, term, assignment_epoch, number, what)
        self._pending.append(frame)
        writer = self.writer
        self.world.after(self._delay_s * self.world.draw.random(), lambda: self._write(writer))

    def _write(self, writer: LoggedServer | None) -> None:
        """The thread of the server gets on, paused or not is another matter."""
        if writer is None or writer is not self.writer or not self._pending:
            return
        if self.answers_within_s:
            self.world.after(self.answers_within_s, lambda: self._write(writer))
            return
        if self.world.now_s < self._crawls_until_s:
            self._answers_s = self.world.now_s + CRAWLS_S
        frame = self._pending.popleft()
        self._written_count += 1
        self.frames.append(frame)
        writer.heard_of_log(frame)

    def open(self, writer: LoggedServer) -> None:
        """A server goes on with it."""
        self.writer = writer
        if self.frames:  # snapshots of other ranges, which the seed has no tables in, come first
            self._base_is_under_way()
        sizes = Counter(frame.segment for frame in self.frames)
        starts = {range_id: self.frames[at].segment for range_id, at in self.begins().items()}
        self.withheld = self._all_begins().keys() - starts.keys()
        kept_to = self._former if self.withheld else 0
        self.segments = LogSegments(BOUND_FRAMES, sizes, starts, self.withheld, kept_to)
        self.segments.begin(0)
        self._has_segments = True

    def heard(self, frame: Frame) -> None:
        """Its server knows that the frame is written."""
        if frame.kind in ("begin", "snapshot"):
            self.segments.wrote(1)

    def turn(self) -> None:
        """Another segment; what no range needs goes."""
        if self.segments.is_full(0):
            self.segments.begin(0)
        gone = set(self.segments.let_go())
        before = len(self.frames)
        self.frames = [frame for frame in self.frames if frame.segment not in gone]
        self.world.counts["frames let go"] += before - len(self.frames)

    def crash(self) -> None:
        """Its server is killed: the system has some of what was on its way."""
        self.writer = None
        for _ in range(self.world.draw.randint(0, len(self._pending))):
            self.frames.append(self._pending.popleft())
        self.world.counts["frames lost"] += len(self._pending)
        self._pending.clear()

    def reboot(self) -> None:
        """The machine was started again: frames may be lost, so another log begins."""
        segments = (frame.segment for frame in self.frames)  # the next one's number follows these
        self._former, self._has_segments = max(segments, default=0), False
        self.former_ids = (self.log_id, *self.former_ids)[: limits.MAX_FORMER_LOGS]
        self.log_id = self.log_id[:-1] + bytes([(self.log_id[-1] + 1) % 256])

    def begin_timeline(self, timeline: bytes) -> None:
        """Who goes on with it is of that timeline: what it has of another is of no matter."""
        if timeline != self.timeline:
            self.timeline, self.frames = timeline, []
            self._former, self._has_segments = 0, True

    def begins(self) -> dict[RangeId, int]:
        """Where the newest beginning of each range is, among the frames of this log."""
        begins = self._all_begins()
        return {r: at for r, at in begins.items() if self.frames[at].segment > self._former}

    def _all_begins(self) -> dict[RangeId, int]:
        found: dict[RangeId, int] = {}
        for index, frame in enumerate(self.frames):
            if frame.kind in ("begin", "snapshot"):
                found[frame.range_id] = index
            elif frame.kind == "end":
                found.pop(frame.range_id, None)
        return found

    def claim(self) -> UpdateLogClaim:
        """What is told to the scheduler."""
        if not self._has_segments:
            return UpdateLogClaim(self.log_id, former_log_ids=self.former_ids)
        begins = sorted(self.begins().items())
        range_ids = tuple(range_id for range_id, _ in begins)
        epochs = tuple(self._epoch_of(range_id, at) for range_id, at in begins)
        return UpdateLogClaim(self.log_id, self.timeline, range_ids, self.former_ids, epochs)

    def _epoch_of(self, range_id: RangeId, begin: int) -> AssignmentEpoch:
        """As a server claims it, which has read all: that of who went on with it last counts."""
        return max(f.assignment_epoch for f in self.frames[begin:] if f.range_id == range_id)

    def _newest(self, range_id: RangeId) -> int | None:
        """The newest record that it has of a range, what is on its way included."""
        found = [frame for frame in (*self.frames, *self._pending) if frame.range_id == range_id]
        return None if not found or found[-1].kind == "end" else found[-1].number

    def has(self, range_id: RangeId, term: AssignmentEpoch, number: int) -> bool:
        """Whether all of a range up to that record could be read from it. What it goes on with is
        of the term before, until it is written that it does.
        """
        found = [frame for frame in self._readable(range_id) if frame.number >= number]
        goes_on = any(
            frame.kind == "taken over" and (frame.range_id, frame.term) == (range_id, term)
            for frame in self._pending
        )
        return any(frame.term == term for frame in found) or (bool(found) and goes_on)

    def goes_beyond(self, range_id: RangeId, term: int, number: int) -> bool:
        """The same, where what it has of the range may be of a later term."""
        return any(
            (frame.term, frame.number) >= (term, number) for frame in self._readable(range_id)
        )

    def _readable(self, range_id: RangeId) -> list[Frame]:
        """What a server that comes with it could read of a range."""
        begin = self.begins().get(range_id)
        if begin is None or (self.frames[begin].kind == "begin" and self.frames[begin].number):
            return []
        return [frame for frame in self.frames[begin:] if frame.range_id == range_id]


class LoggedServer(ReplicatedServer):
    """A server that keeps a log, which may have been another's before."""

    def __init__(
        self,
        world: World,
        node_id: NodeId,
        settings: Settings,
        worker_count: int,
        place: Place,
    ) -> None:
        assert isinstance(place.log, SimLog)
        self.log = place.log
        self.on_log_failure: Callable[[LoggedServer], None] = lambda _: None
        self._stall = DiskStall()
        self._disk_busy = 0, 0.0, 0
        self._pause_count = 0
        super().__init__(world, node_id, settings, worker_count, place)

    def _replicate(self, min_in_sync: int) -> None:
        self.replication = Replication(
            self.node_id, self.machine, LEASE_S, min_in_sync, has_update_log=True
        )
        self.output = OutputCommit(
            self.machine,
            self.replication,
            self,
            self._send,
            lambda record: self.logged.write(record),
        )
        self.pacing = PeerPacing(self.replication, LEASE_S, self.queues)
        self.logged = LoggedRanges(self.log, self.replication, self.output)
        self.log.open(self)

    def _shown(self, log: RangeLog) -> int:
        """With a log nothing but a read is decided without a record, while too few hold the range:
        nobody misses that it was.
        """
        return log.released

    # --- its life, and its disk

    def kill(self) -> None:
        """It does and hears nothing any more; its log has some of what it was given last."""
        super().kill()
        self.log.crash()

    def pause(self) -> None:
        """It does nothing, and what comes waits for it."""
        self._pause_count += not self.is_paused
        super().pause()

    def _check_log(self) -> None:
        """As `ReplicatedRanges.check_log`: a server whose log has failed ends."""
        busy_s, pause_count = self._disk_busy_s()
        if self._stall.is_too_long(self.log.operation, self.now_s):
            early_s = EARLY_S + pause_count * PAUSE_COUNTS_S
            assert busy_s > limits.LOG_STALL_S - early_s, (
                f"S13: server {self.node_id} gives a disk up that was busy for {busy_s:.1f} s, in "
                f"which it was paused {pause_count} times"
            )
            self.on_log_failure(self)
            return
        assert busy_s < limits.LOG_STALL_S + LATE_S, (
            f"LIVE: server {self.node_id} has waited {busy_s:.1f} s for its disk, and so has who "
            "waits for its ranges"
        )

    def _disk_busy_s(self) -> tuple[float, int]:
        """For how long its disk is busy with one operation, but for pauses, by the world's time;
        and in how many of these.
        """
        awake_s, (operation, since_s, paused) = self.world.now_s - self.paused_s, self._disk_busy
        if self.log.operation != operation or not operation:
            since_s, paused = awake_s, self._pause_count
        self._disk_busy = self.log.operation, since_s, paused
        return awake_s - since_s, self._pause_count - paused

    def recover(self, blocks: Callable[[TableId, RangeId], ShardCopy]) -> None:
        """Before the first view: what the log has."""
        begins = self.log.begins()
        for table in self._tables():  # each segment names them, whatever else it has
            for range_id in begins.keys() & table.blocks_by_range(self._range_count).keys():
                self.held((table.table_id, range_id))
        replicas: dict[RangeId, Replica] = {}
        numbers = itertools.count()
        for frame in self.log.frames:
            index = next(numbers)
            if frame.range_id not in begins or index < begins[frame.range_id]:
                continue
            replica = replicas.get(frame.range_id)
            self.world.counts["frames of the taken over"] += frame.kind == "taken over"
            if frame.kind in ("begin", "taken over"):
                assert replica is None or replica.number == frame.number, f"S13: {frame}"
                replicas[frame.range_id] = Replica(
                    frame.range_id, frame.assignment_epoch, LEASE_S, frame.term,
                    {} if replica is None else replica.copies, frame.number,
                )  # fmt: skip
            elif isinstance(frame.what, LogRecord):
                assert replica is not None
                record = frame.what
                assert replica.follows(record), f"S13: {frame} follows {replica.term}"
                is_next = replica.take(record, lambda b=record: blocks(b.table_id, b.range_id))  # type: ignore[misc]
                assert is_next, f"S13: {frame} follows {replica.number}"
                at_once(self._making(record))
            elif isinstance(frame.what, tuple):
                snapshot, values = frame.what
                copies = {t: copy.twin() for t, copy in snapshot.copies.items()}
                at_once(self._becoming(snapshot, values))
                replicas[frame.range_id] = Replica(
                    frame.range_id, frame.assignment_epoch, LEASE_S, frame.term, copies,
                    frame.number,
                )  # fmt: skip
        self.world.counts["ranges read from a log"] += len(replicas)
        named = [table.table_id for table in self._tables()]
        self.replication.recover(replicas.values(), named)
        self.logged.recover(begins, self.log.withheld)

    def heard_of_log(self, frame: Frame) -> None:
        """The log's thread has written something: the loop hears of it in its turn."""
        if self._is_away(lambda: self.heard_of_log(frame)):
            return
        self.log.heard(frame)
        if frame.kind in ("record", "snapshot"):
            self.logged.written({(frame.range_id, frame.term): frame.number})
            self._release([frame.range_id])
        self.works.begin(self._looking())

    def _observing(self, view: ClusterView) -> Work[None]:
        is_first = self._view is None
        yield from super()._observing(view)
        if is_first:
            of_keys = self.machine.shards, self.values, self.numbers.shards.stores
            held = {key[0] for keys in of_keys for key in keys}
            held |= {table for each in self.replication.replicas.values() for table in each.copies}
            found = sorted(filter(view.is_removed, held))
            assert not found, f"S19: server {self.node_id} has tables {found} from a log"

    def _looking(self) -> Work[None]:
        yield from self.logged.looking()
        self.log.turn()

    def _lost(self, range_ids: Sequence[RangeId]) -> None:
        self.logged.observe(range_ids)

    def _doing(self, committed: Sequence[CommittedEffect]) -> Work[None]:
        for range_id in {
            range_id for effect in committed if (range_id := shows(effect)) is not None
        }:
            log = self.replication.primaries[range_id].log
            assert self.log.has(range_id, log.term, log.released), (
                f"LOG-1: record {log.released} of range {range_id} is seen, and is not in the log"
            )
        yield from super()._doing(committed)


def ranges_with_values(view: ClusterView) -> set[RangeId]:
    """Those that have blocks of tables."""
    return {r for table in view.tables for r in table.blocks_by_range(len(view.ranges))}


def fresh_part(
    tables: Sequence[Table], range_count: int
) -> Callable[[TableId, RangeId], ShardCopy]:
    """What a part is like of which nothing was decided."""

    def make(table_id: TableId, range_id: RangeId) -> ShardCopy:
        (table,) = [t for t in tables if t.table_id == table_id]
        return fresh_copy(table, table.blocks_by_range(range_count)[range_id])

    return make
