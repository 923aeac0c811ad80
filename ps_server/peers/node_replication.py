"""One server's replication: joins its machines, its values and the streams to other servers.

Records, beats, snapshots and their answers pass here between the machines of replication and the
wire. `node` carries out the effects that replication releases.

Everything belongs to one event loop.

Invariants:
    RR-1  A backup's values have every record that it acknowledged, or it gives the range up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ps_core.cluster_view import BackupRequest, ClusterView, Session
from ps_core.errors import PushpullError
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.sliced_work import Work, at_once
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.http2.protocol.streams import MessagePiece
from ps_runtime.observe import logs
from ps_server.fail_stop import FailStop, decides
from ps_server.peers.peer_links import PeerLinks
from ps_server.ranges.events import Effect
from ps_server.ranges.range_copy import ShardCopy, fresh_copy
from ps_server.ranges.server_machine import ServerMachine, ShardAdded
from ps_server.replication.backup import Replica
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, RangeCopy, Snapshot
from ps_server.replication.output_commit import CommittedEffect, OutputCommit
from ps_server.replication.peer_pacing import BEATS_A_LEASE, PeerPacing
from ps_server.replication.peer_queues import PeerQueues
from ps_server.replication.range_roles import Replication
from ps_server.stores import Shards, fixed_for_backup, for_backup
from ps_server.update_log.encoder import EncodedLog
from ps_server.update_log.logged_ranges import LoggedRanges
from ps_server.update_log.writer import UpdateLog, Written
from ps_server.values.mutations import Put
from ps_server.wire.replication_wire import (
    Pieces,
    answers_from,
    beat_message,
    cutting_log_record,
    log_record_messages,
)
from ps_server.wire.snapshot_wire import snapshot_messages

_FIRST_VIEW_LEASES = 5
"""Leases for which a snapshot waits for the first view: as long as its sender waits for it."""

_SOON_S = 0.02
"""Seconds between beats that a range waits for."""


@dataclass(frozen=True, slots=True)
class ReplicationSetting:
    """The cluster's settings, from the scheduler."""

    lease_s: float
    min_in_sync: int = 1


class ReplicatedRanges:
    """The replication of one server.

    Args:
        now: the clock, in seconds; it counts suspended time.

    Attributes:
        release: called with ranges of which held effects may be released. `released` is then to be
            called between two works: within one, a later decision could overtake them (OC-1).
        log_has_space: called when records were written to the log: `logged.looking` may be called.
        ask: called with requests that the scheduler is to get at once.
        backup_requests: the newest requests to the scheduler.
    """

    def __init__(
        self,
        session: Session,
        machine: ServerMachine,
        shards: Shards,
        setting: ReplicationSetting,
        now: Callable[[], float],
        update_log: UpdateLog | None = None,
    ) -> None:
        node_id = NodeId(session.node_id)
        has_log = update_log is not None
        self.replication = Replication(
            node_id, machine, setting.lease_s, setting.min_in_sync, has_update_log=has_log
        )
        write = self._write if has_log else None
        self._queues: PeerQueues[bytes] = PeerQueues()
        self._pacing = PeerPacing(self.replication, setting.lease_s, self._queues)
        self.output = OutputCommit(
            machine, self.replication, shards, self._send, write, self._encoding
        )
        self.update_log = update_log
        if update_log is not None:
            self._encoded_log = EncodedLog(update_log, shards, self._logged_messages)
            self.logged = LoggedRanges(self._encoded_log, self.replication, self.output)
            update_log.on_written = self._written
        self.release: Callable[[Iterable[RangeId]], object] = self.released
        self.log_has_space: Callable[[], None] = _nothing
        self.health = FailStop()
        self.ask: Callable[[Sequence[BackupRequest]], None] = _nothing
        self.backup_requests: Sequence[BackupRequest] = ()
        self._node_id = node_id
        self._shards = shards
        self._lease_s = setting.lease_s
        self._now = now
        self._links = PeerLinks(wire.session_to_proto(session), self, self._queues, setting.lease_s)
        self._view: ClusterView | None = None
        self._view_came = asyncio.Event()
        self._tables: dict[TableId, Table] = {}
        self._blocks: dict[tuple[TableId, RangeId], tuple[int, ...]] = {}
        self._encoded: tuple[LogRecord, Sequence[bytes]] | None = None
        self._cut: tuple[LogRecord, Sequence[Pieces]] | None = None
        self._missing: tuple[RangeId, ...] = ()

    def recover(
        self, replicas: Mapping[RangeId, Replica], withheld: Iterable[RangeId] = ()
    ) -> None:
        """Take the ranges that were recovered from the update log, and the names of those that were
        not claimed from it; before the first view.
        """
        named = {table_id for table_id, _ in self._shards.stores}
        self.replication.recover(replicas.values(), named)
        self.logged.recover(replicas, withheld)

    # --- views

    def observing(self, view: ClusterView) -> Work[tuple[list[RangeId], list[Effect]]]:
        """Take the roles of a newer view. Returns the ranges that are lost here, and the effects on
        waiting reads. `serve` must follow.
        """
        self._links.observe(view)
        removed = self.replication.removed_by(view)
        lost, effects = yield from self.replication.observing(view, self._now())
        if lost:
            yield from self._shards.removing(set(lost))
            self.output.forget(set(lost))
        handed_over = self.replication.handed_over
        if handed_over:
            self.output.forget(handed_over)
            self._shards.forget_undecided(handed_over)
            most_s = round(max(handed_over.values()), 3)
            count = len(handed_over)
            logs.info("ranges_handed_over", view=view.view_number, ranges=count, stopped_s=most_s)
        if removed:
            self.output.forget_tables(removed)
            if self.update_log is not None:
                self._encoded_log.forget_tables(removed)
            yield from self._shards.removing_tables(removed)
        self._view = view
        self._view_came.set()
        yield from self._adding_stores(view)
        if self.update_log is not None:
            self._encoded_log.observe_tables(view.tables_by_id)
            self.logged.observe(lost)
        anew = self.replication.placed_anew
        if anew:
            logs.info("ranges_placed_anew", view=view.view_number, ranges=len(anew))
        left = self.replication.not_backed_up - anew
        if left:
            logs.info("backups_given_up", view=view.view_number, ranges=len(left))
        given_up = set(lost) - anew - left
        if given_up:
            logs.warning("ranges_given_up", view=view.view_number, ranges=len(given_up))
        kept = self.replication.deposed.difference(lost)
        if kept:
            logs.warning("ranges_suspended", view=view.view_number, ranges=len(kept))
        self._send_all(self._pacing.renewed())
        if self.replication.can_hand_over:
            self._ask_at_once()
        missing = self.replication.missing
        if missing != self._missing:
            self._missing = missing
            if missing:
                logs.error("ranges_missing", view=view.view_number, ranges=len(missing))
        return lost, effects

    def _send_all(self, records: Iterable[tuple[NodeId, LogRecord]]) -> None:
        for peer, record in records:
            self._send(peer, record)

    def _adding_stores(self, view: ClusterView) -> Work[None]:
        """Add stores for ranges that this server backs up, or is about to."""
        self._tables = view.tables_by_id
        held = {
            a.range_id
            for a in view.ranges
            if self._node_id in (*a.backups, *a.catching_up)
            or a.range_id in self.replication.replicas
        }
        self._blocks = {}
        for table in view.tables if held else ():
            yield
            parts = [
                ShardAdded(table, range_id, blocks)
                for range_id, blocks in table.blocks_by_range(len(view.ranges)).items()
                if range_id in held
            ]
            for part in parts:
                self._blocks[table.table_id, part.range_id] = part.blocks
            if parts:
                self._shards.add(parts)

    def serve(self) -> ClusterView:
        """See `Replication.serve`. The scheduler is asked at once to leave out the candidates of
        ranges that are served from now on: nothing of them is released before. With an update log
        it is asked when the log has them.
        """
        before = set(self.replication.primaries)
        view = self.replication.serve(self._now())
        taken = set(self.replication.primaries) - before
        if taken:
            logs.info("ranges_served", view=view.view_number, ranges=len(taken))
            self._ask_at_once()
        return view

    def _ask_at_once(self) -> None:
        self._pacing.hurry()
        self.keep_up()
        self.ask(self.backup_requests)

    @property
    def serves_within_s(self) -> float:
        """Seconds until an old lease runs out, and `serve` is to be called again; or until beats
        are due that a range waits for, which was handed over.
        """
        within_s = self.replication.serves_within(self._now())
        return min(within_s, _SOON_S) if self.replication.awaits_grants else within_s

    # --- decisions

    def deciding(self, effects: Iterable[Effect]) -> Work[list[CommittedEffect]]:
        """See `OutputCommit.deciding`."""
        return self.output.deciding(effects, self._now)

    def telling_prepared(self) -> Work[list[CommittedEffect]]:
        """See `OutputCommit.tell_prepared`. The machine has observed the view that `serve` gave."""
        if self.update_log is not None:
            yield from self.logged.looking()
        return (yield from self.output.telling_prepared(self._now))

    def check_log(self) -> None:
        """Look at the update log; to be called several times a second, whatever is under way.

        Raises:
            InvalidUpdateLog: it has failed, and this server ends.
        """
        log = self.update_log
        if log is not None:
            log.look(self._now())
            if log.failure is not None:
                raise log.failure

    def keep_up(self) -> None:
        """Ask for the lease, and send unacknowledged records again; to be called at least ten times
        a lease, whatever is under way.
        """
        now_s = self._now()
        if self.replication.awaits_grants:
            self._pacing.hurry()
        self._links.look(now_s)
        self._send_all(self._pacing.late(now_s))
        due = self._pacing.beats(now_s)
        if due is None:
            return
        for peer, beat in due.beats.items():
            link = self._links.find(peer)
            if link is not None:
                link.send_beat(beat_message(beat))
        for peer in due.useless:
            self._links.reset(peer)
        self.backup_requests = due.backup_requests

    def going_on(self) -> Work[list[CommittedEffect]]:
        """Send snapshots, and write those that the log needs. Returns the effects that may be
        carried out now.
        """
        yield from self._giving_snapshots()
        log = self.update_log
        if log is not None:
            yield from self.logged.looking()
            log.turn(self._shards.state_bytes)
        return self.output.release(self._now(), self.replication.primaries)

    def released(self, range_ids: Iterable[RangeId]) -> list[CommittedEffect]:
        """Held effects of these ranges that may be carried out now. A range that is stopped may
        have nothing more to release: then the scheduler is asked for its target.
        """
        committed = self.output.release(self._now(), range_ids)
        if self.replication.can_hand_over:
            self._ask_at_once()
        return committed

    def _write(self, record: LogRecord) -> None:
        self.logged.write(record)

    def _send(self, peer: NodeId, record: LogRecord) -> None:
        link = self._links.find(peer)
        if link is not None:
            link.send(self._messages(record))

    @decides
    def _written(self, written: Written) -> None:
        ranges = self.logged.written(written.numbers)
        self.release(ranges)
        self.log_has_space()
        if any(not self.replication.primaries[r].log.is_confirmed for r in ranges):
            self._ask_at_once()

    def _encoding(self, record: LogRecord) -> Work[None]:
        """Encode a record: as messages if servers get it, else in pieces for the log."""
        primary = self.replication.primaries.get(record.range_id)
        if primary is None or not primary.holders:
            if self.update_log is not None:
                self._cut = record, (yield from self._cutting(record))
            return
        messages = []
        for pieces in (yield from cutting_log_record(_for_backups(record))):
            messages.append(b"".join(pieces))
            yield
        self._encoded = record, messages

    def _messages(self, record: LogRecord) -> Sequence[bytes]:
        if self._encoded is None or self._encoded[0] is not record:
            self._encoded = record, log_record_messages(_for_backups(record))
        return self._encoded[1]

    def _logged_messages(self, record: LogRecord) -> Sequence[Pieces]:
        """A record for the update log. A sum is written from where it lies, since it is applied,
        and its memory used again, only when the log has it (LOG-1). Other values are copied.
        """
        if self._encoded is not None and self._encoded[0] is record:
            return [(message,) for message in self._encoded[1]]
        cut, self._cut = self._cut, None
        if cut is not None and cut[0] is record:
            return cut[1]
        return at_once(self._cutting(record))

    def _cutting(self, record: LogRecord) -> Work[Sequence[Pieces]]:
        told = []
        for change in record.changes:
            is_put = isinstance(change, Put)
            told.append(for_backup(change) if is_put else fixed_for_backup(change))
            yield
        return (yield from cutting_log_record(record._replace(changes=tuple(told))))

    # --- values that are loaded

    def close_only(self, range_ids: Collection[RangeId]) -> None:
        """See `Replication.close_only`."""
        self.replication.close_only(range_ids)

    def may_load(self, range_id: RangeId) -> bool:
        """See `Replication.may_load`."""
        return self.replication.may_load(range_id)

    def is_without_replicas(self, range_id: RangeId) -> bool:
        """See `Primary.is_without_replicas`; True for a range that is not served here."""
        primary = self.replication.primaries.get(range_id)
        return primary is None or primary.is_without_replicas

    def replaced(self, range_id: RangeId, *, is_last: bool) -> None:
        """See `Primary.replaced`."""
        primary = self.replication.primaries.get(range_id)
        if primary is not None:
            primary.replaced(is_last=is_last)

    # --- figures

    @property
    def held_count(self) -> int:
        """Decisions that wait for backups or the update log."""
        return sum(p.log.held_count for p in self.replication.primaries.values())

    @property
    def queued_bytes(self) -> int:
        """Unsent bytes of messages to other servers."""
        return self._queues.queued_bytes

    def _giving_snapshots(self) -> Work[None]:
        for peer, copying in self.output.copies(self._now(), self._has_space):
            copy = yield from self._shards.copying((yield from copying))
            messages = []
            for message in snapshot_messages(copy):
                messages.append(message)
                yield
            link = self._links.find(peer)
            if link is not None:
                link.send(messages)

    def _has_space(self, peer: NodeId) -> bool:
        link = self._links.find(peer)
        if link is None:
            return False
        link.begin()
        return self._queues.has_space(peer)

    # --- answers of backups

    @decides
    def peer_opened(self, peer: NodeId) -> None:
        self._send_all(self._pacing.opened(peer))

    def peer_said(self, peer: NodeId, response: MessagePiece) -> None:
        self._heard(peer, answers_from(response))

    @decides
    def _heard(self, peer: NodeId, answers: Iterable[Ack | Grant]) -> None:
        now_s = self._now()
        freed: dict[RangeId, None] = {}
        for answer in answers:
            if isinstance(answer, Ack):
                self.replication.acked(peer, answer, now_s)
                freed[answer.range_id] = None
            else:
                first = self.replication.granted(peer, answer, now_s)
                if first:
                    self._send_all(self._pacing.first_granted(peer, first))
                freed |= dict.fromkeys(answer.range_ids)
        self.release(freed)

    # --- messages of primaries

    @decides
    def taking(self, record: LogRecord) -> Work[Ack | None]:
        """Take a record of a primary, and change the values."""
        try:
            is_taken, ack = self.replication.take(record, lambda: self._fresh(record))
            for change in record.changes if is_taken else ():
                yield from self._shards.making(change)
        except Exception as error:  # noqa: BLE001 - whatever it is, not all of the record is here
            self._lost_track(record.range_id, error)
            return None
        return ack

    async def view_of(self, snapshot: Snapshot) -> None:
        """Wait a moment for the view of a snapshot: one that comes too early is dropped. A server
        without any view waits longer: nothing that others need comes behind the snapshot.
        """
        leases = _FIRST_VIEW_LEASES if self._view is None else 1 / BEATS_A_LEASE
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leases * self._lease_s):
                while not self.replication.knows(snapshot):
                    self._view_came.clear()
                    await self._view_came.wait()

    @decides
    def joining(self, copy: RangeCopy) -> Work[Ack | None]:
        """Take a snapshot of a primary, with its values."""
        range_id = copy.snapshot.range_id
        before = self.replication.replicas.get(range_id)
        copy = copy.of(self.replication.living(copy.snapshot))
        ack = self.replication.join(copy.snapshot)
        if ack is None or self.replication.replicas.get(range_id) is before:
            return ack
        try:
            yield from self._shards.restoring(copy)
        except Exception as error:  # noqa: BLE001 - as in `taking`
            self._lost_track(range_id, error)
            return None
        logs.debug("range_joined", range_id=range_id, number=ack.number)
        return ack

    def _lost_track(self, range_id: RangeId, error: Exception) -> None:
        """Give up a range that cannot be followed any more (RR-1)."""
        if isinstance(error, PushpullError):
            logs.error("replica_broken", range_id=range_id, error=error.message)
        else:
            logs.exception("replica_broken", error, range_id=range_id)
        self.replication.leave(range_id)
        self._shards.remove(range_id)
        if self._view is not None:
            at_once(self._adding_stores(self._view))

    def _fresh(self, record: LogRecord) -> ShardCopy | None:
        blocks = self._blocks.get((record.table_id, record.range_id))
        return None if blocks is None else fresh_copy(self._tables[record.table_id], blocks)

    @decides
    def grant(self, beat: Beat) -> Grant:
        return self.replication.beat(beat, self._now())

    async def close(self) -> None:
        await self._links.close()
        if self.update_log is not None:
            await self.update_log.close()


def _for_backups(record: LogRecord) -> LogRecord:
    return record._replace(changes=tuple(for_backup(change) for change in record.changes))


def _nothing(*_: object) -> None: ...
