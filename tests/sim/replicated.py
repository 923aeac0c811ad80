"""A server of a simulation whose ranges have backups: the real machines of replication."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ps_core.change import ChangeResult
from ps_core.cluster_view import BackupRequest, ClusterView, NodeState, Role
from ps_core.errors import NotOwner, TableNotFound
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.sliced_work import Work, at_once
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    Accumulate,
    AnswerPull,
    Effect,
    EntryEvent,
    PullEvent,
    Record,
    RefusePull,
)
from ps_server.ranges.range_copy import ShardCopy, fresh_copy
from ps_server.ranges.schedule import CutId
from ps_server.ranges.server_machine import Doubt, PreparedChange
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, Snapshot
from ps_server.replication.output_commit import CommittedEffect, OutputCommit
from ps_server.replication.peer_pacing import BEATS_A_LEASE, PeerPacing
from ps_server.replication.peer_queues import PeerQueues
from ps_server.replication.range_roles import Replication
from ps_server.replication.replication_log import RangeLog
from ps_server.values.mutations import Assigned, KeptSum, Mutation, Put
from ps_server.values.store_copy import StoreCopy
from tests.sim.arithmetic import Numbers, Sum
from tests.sim.grads import Grad
from tests.sim.peer_streams import PIECES, CopyPiece, Greeting, SimLink, Stream, Welcome
from tests.sim.server import TICK_S, SimServer
from tests.sim.serving import Watch
from tests.sim.shown import places, shows
from tests.sim.truth import Settings
from tests.sim.world import World

LEASE_S = 3.0


class Clock(NamedTuple):
    """A server's: how fast it runs, and where it began."""

    rate: float = 1.0
    offset_s: float = 0.0

    def read(self, world_s: float) -> float:
        """What it shows; it runs while its server is paused."""
        return self.offset_s + self.rate * world_s


class Place(NamedTuple):
    """Where a server is."""

    clock: Clock
    peers: dict[NodeId, ReplicatedServer]
    watch: Watch
    min_in_sync: int
    log: Any = None  # a `SimLog`


class ReplicatedServer(SimServer):
    """A server that is primary of some ranges and backs up others."""

    on_lost_track: Callable[[RangeId], None] = staticmethod(lambda _: None)

    def __init__(
        self,
        world: World,
        node_id: NodeId,
        settings: Settings,
        worker_count: int,
        place: Place,
    ) -> None:
        self.is_paused = False
        self.paused_s = self._paused_at_s = 0.0
        """For how long it was paused, in all; and since when."""
        self._takes_s = 0.0
        self._is_at_work = False
        self.peers, self.watch, self._clock = place.peers, place.watch, place.clock
        self.asked: list[BackupRequest] = []
        self._view: ClusterView | None = None
        self.known: tuple[Sequence[Table], int] = (), 0
        """Tables and how many ranges there are, before the first view."""
        self._inbox: list[Callable[[], None]] = []
        self._at_next_view: list[Callable[[], None]] = []
        self.queues: PeerQueues[object] = PeerQueues()
        self.links: dict[NodeId, SimLink] = {}
        self._waits_since_s: dict[RangeId, float] = {}
        self._begun: dict[RangeId, tuple[object, int]] = {}  # primaries and terms that were served
        super().__init__(world, node_id, worker_count, settings)
        self._replicate(place.min_in_sync)

    def _replicate(self, min_in_sync: int) -> None:
        self.replication = Replication(self.node_id, self.machine, LEASE_S, min_in_sync)
        self.output = OutputCommit(self.machine, self.replication, self, self._send)
        self.pacing = PeerPacing(self.replication, LEASE_S, self.queues)

    @property
    def now_s(self) -> float:
        """On its own clock."""
        return self._clock.read(self.world.now_s)

    def now(self) -> float:
        """As `now_s`."""
        return self.now_s

    @property
    def view_number(self) -> int:
        """Of the newest view that came."""
        return 0 if self._view is None else self._view.view_number

    # --- its life

    def kill(self) -> None:
        """It does and hears nothing any more."""
        self.is_dead = True
        for peer in self.peers.values():
            if self.node_id in peer.links:
                peer.links[self.node_id].peer_died()

    def pause(self) -> None:
        """It does nothing, and what comes waits for it."""
        if not self.is_paused:
            self.is_paused, self._paused_at_s = True, self.world.now_s

    def wake(self) -> None:
        """It goes on where it was, with what has come meanwhile; only its clock has run on."""
        if self.is_paused:
            self.is_paused, self._waits_since_s = False, {}
            self.paused_s += self.world.now_s - self._paused_at_s
        while self._inbox and not self.is_paused and not self._takes_s:
            self._inbox.pop(0)()
        for link in self.links.values():
            link.pump()

    def slow_down(self, takes_s: float) -> None:
        """From now on each message takes so long, and those that come meanwhile wait."""
        if not self._takes_s:
            self.world.after(takes_s, self._work)
        self._takes_s = takes_s

    def speed_up(self) -> None:
        """It gets on with what has come."""
        self._takes_s = 0.0
        if not self.is_paused:
            self.wake()

    def _work(self) -> None:
        """The next message, while it is slow."""
        if not self._takes_s or self.is_dead:
            return
        if self._inbox and not self.is_paused:
            self._is_at_work = True
            self.world.counts["late messages"] += 1
            self._inbox.pop(0)()
            self._is_at_work = False
        self.world.after(self._takes_s, self._work)

    def _is_away(self, action: Callable[[], None]) -> bool:
        """Whether it does not get the message now."""
        is_slow = self._takes_s > 0.0 and not self._is_at_work
        if self.is_paused or is_slow:
            self._inbox.append(action)
        return self.is_dead or self.is_paused or is_slow

    @property
    def is_slow(self) -> bool:
        """Whether its loop takes its time for each message."""
        return bool(self._takes_s)

    @property
    def is_awake(self) -> bool:
        """Whether it does at once what comes."""
        return not (self.is_dead or self.is_paused or self._takes_s or self.works.is_busy)

    def in_turn(self, action: Callable[[], None]) -> None:
        """Its loop gets to it: now, or when it gets on."""
        if not self._is_away(lambda: self.in_turn(action)):
            action()

    def on_view_once(self, action: Callable[[], None]) -> None:
        """Called when the next view has come."""
        self._at_next_view.append(action)

    def start(self, view: ClusterView) -> None:
        """The first view."""
        at_once(self._observing(view))

    def observe(self, view: ClusterView) -> None:
        """As `ParameterNode`: between two works."""
        if not self._is_away(lambda: self.observe(view)):
            super().observe(view)

    def _observe(self, view: ClusterView) -> None:
        if view.view_number > self.view_number:
            self._begin_to_observe(view)

    def _observing(self, view: ClusterView) -> Work[None]:
        self._view = view
        self._keep_links(view)
        waited = {r for r, replica in self.replication.replicas.items() if replica.is_promoted}
        suspended = set(self.replication.suspended)
        removed = self.replication.removed_by(view)
        lost, effects = self.replication.observe(view, self.now_s)
        self._forget_tables(removed)
        deposed = {r.range_id for r in view.ranges if r.primary != self.node_id}
        self.world.counts["deposed before it served"] += len(waited & deposed)
        self.world.counts["ranges suspended"] += len(self.replication.deposed.difference(lost))
        self.world.counts["primary again"] += len(suspended & self.replication.primaries.keys())
        for range_id in lost:
            self._forget(range_id)
        self._lost(lost)
        self._forget_undecided()
        self._send_all(self.pacing.renewed())
        waiting, self._at_next_view = self._at_next_view, []
        for action in waiting:
            self.world.after(0.0, action)
        at_once(self._doing(effects))
        yield from self._serving()

    def _forget_undecided(self) -> None:
        """It backs up from now on what it was primary of: what it has not decided is gone."""
        handed_over = self.replication.handed_over
        self.world.counts["ranges handed over"] += len(handed_over)
        self.output.forget(handed_over)
        self.numbers.shards.forget_undecided(handed_over)
        for key in [k for k in self.sums if k[1] in handed_over and k not in self.reduced]:
            del self.sums[key]
        for table, block, reader in list(self.given) if handed_over else ():
            if self.table(table).range_of_block(block, self._range_count) in handed_over:
                del self.given[table, block, reader]

    def _check_log(self) -> None:
        """As `ReplicatedRanges`: it may have failed."""

    def _lost(self, range_ids: Sequence[RangeId]) -> None:
        """Nothing of these is here any more."""

    def _keep_links(self, view: ClusterView) -> None:
        """As `PeerLinks.observe`."""
        present = {
            node.node_id
            for node in view.nodes
            if node.role is Role.SERVER
            and node.state is not NodeState.LEFT
            and node.node_id != self.node_id
        }
        for peer in self.links.keys() - present:
            self.links.pop(peer).close()
            self.queues.remove(peer)
        for peer in sorted(present - self.links.keys()):
            self.links[peer] = SimLink(self, peer, self.queues.add(peer))

    def _serving(self) -> Work[None]:
        """Take up what may be served now."""
        self.machine.observe(self.replication.serve(self.now_s))
        for range_id in self.replication.primaries:
            self._begin(range_id)
        if self._view is not None:
            yield from self._going_on_without(self._view)
        yield from self._telling()

    def _telling(self) -> Work[None]:
        """As `ParameterNode._telling`."""
        yield from self._looking()
        yield from self._doing((yield from self.output.telling_prepared(self.now)))

    def _looking(self) -> Work[None]:
        """As `ReplicatedRanges`: what is served now gets into the log."""
        yield from ()

    def _begin(self, range_id: RangeId) -> None:
        """The first moment at which it could show something of the range."""
        primary = self.replication.primaries[range_id]
        log, known = primary.log, self._begun.get(range_id)
        is_new = known is None or known[0] is not primary or known[1] != log.term
        if is_new and log.is_confirmed and log.may_serve(self.now_s):
            self._begun[range_id] = primary, log.term
            self.world.counts["ranges taken over"] += self.world.now_s > 0
            self._check_stepped(range_id)
            self.watch.begins(self, range_id)

    def _check_stepped(self, range_id: RangeId) -> None:
        """S10: a checkpoint is cut at a step that somebody has taken."""
        for (table_id, held_in), part in self.machine.shards.items():
            joined = [worker.joined_clock for worker in part.state.workers.values()]
            stepped = max(self.settings.stepped[table_id], *joined, 0)
            if held_in == range_id:
                final_seals = [
                    worker.final_seal_clock or 0 for worker in part.state.workers.values()
                ]
                is_ahead = max(final_seals, default=0) > stepped
                self.world.counts["final seals beyond all steps"] += is_ahead
            assert held_in != range_id or part.state.stepped_clock <= stepped, (
                f"S10: {part.state.stepped_clock} in range {range_id} of table {table_id}: no "
                f"worker has taken more than step {stepped}"
            )

    def _forget(self, range_id: RangeId) -> None:
        """Another is primary: nothing that is here counts."""
        self.world.counts["ranges given up"] += 1
        for table in self._tables():
            for block in table.blocks_by_range(self._range_count).get(range_id, ()):
                self.values.pop((table.table_id, block), None)
                self.updates.pop((table.table_id, block), None)
                for given in [g for g in self.given if g[:2] == (table.table_id, block)]:
                    del self.given[given]
        for key in [key for key in self.sums if key[1] == range_id]:
            del self.sums[key]
        for key in [key for key in self.reduced if key[1] == range_id]:
            del self.reduced[key]
        self.numbers.forget(range_id)
        self.output.forget((range_id,))

    def _forget_tables(self, table_ids: Collection[TableId]) -> None:
        """They were removed."""
        self.world.counts["tables given up"] += len(table_ids)
        dicts: list[dict[Any, Any]] = [self.values, self.updates, self.given, self.sums]
        for of_keys in (*dicts, self.reduced):
            for key in [key for key in of_keys if key[0] in table_ids]:
                del of_keys[key]
        at_once(self.numbers.shards.removing_tables(table_ids))
        self.output.forget_tables(table_ids)

    def lose_track(self, range_id: RangeId) -> None:
        """It has nothing any more of a range that it backed up; as `ReplicatedRanges.taking`."""
        self.world.counts["fault: replica broken"] += 1
        self.world.say(f"server {self.node_id} lost track of range {range_id}")
        self.replication.leave(range_id)
        self._forget(range_id)
        self.watch.lost_track(self, range_id)
        self.on_lost_track(range_id)

    def _tick(self) -> None:
        if not (self.is_dead or self.is_paused):
            self._check_log()
        if self.is_dead or self.is_paused:
            self.world.counts["ticks of servers"] += 1
            self.world.after(TICK_S, self._tick)
            return
        self._watch_waits()
        self.watch.looks(self)
        self._keep_up(self.now_s)
        super()._tick()
        self.world.counts["ticks of servers"] += 1
        self.works.between(self._look_alone)

    def _keep_up(self, now_s: float) -> None:
        """As `ReplicatedRanges.keep_up`, whatever is under way."""
        if self.replication.awaits_grants or self.replication.can_hand_over:
            self.pacing.hurry()
        again = self.pacing.late(now_s)
        self.world.counts["sent again when late"] += len(again)
        self._send_all(again)
        beats = self.pacing.beats(now_s)
        if beats is not None:
            for peer, beat in beats.beats.items():
                if peer in self.links:
                    self.links[peer].send_beat(beat)
            for peer in beats.useless:
                self.links[peer].reset()
            self.asked = list(beats.backup_requests)

    def _ticking(self) -> Work[None]:
        self._tick_waits = False
        if self.replication.must_serve(self.now_s):
            yield from self._serving()
        yield from self._giving_snapshots()
        yield from self._looking()
        yield from self._doing(self.output.release(self.now_s, self.replication.primaries))
        yield from super()._ticking()

    # --- without the scheduler

    @property
    def is_alone(self) -> bool:
        """Whether it does not hear the scheduler."""
        return self.world.now_s - self.heard_s > LEASE_S

    def _look_alone(self) -> None:
        """As `ps_server.service.change_doubts`."""
        if self.is_dead or not self.is_alone:
            return
        for table in self._tables():  # what lies beyond a cut's clock goes on: it may fail
            if table.proposed is not None and table.proposed.checkpoint:
                self.settings.cuts_given_up.add(table.proposed.checkpoint)
        self.works.finish()
        self._settled(self.machine.go_on_alone(self.now_s))
        for doubt in self.machine.doubts:
            if doubt.decided_by == self.node_id:
                with contextlib.suppress(NotOwner):  # it does not serve it yet
                    self._learn(doubt, self._outcome(doubt))
            else:
                self._ask(doubt.decided_by, doubt)

    def _settled(self, effects: Sequence[Effect]) -> None:
        """As `ParameterNode._settled`."""
        self.carry_out(effects)
        self.works.finish()
        at_once(self._telling())

    def _outcome(self, doubt: Doubt) -> ChangeResult | None:
        self.works.finish()
        if self.is_alone:
            self._settled(self.machine.asked(doubt.table_id, doubt.number, self.now_s))
        return self.output.outcome(doubt.table_id, doubt.number)

    def _answer(self, sender: NodeId, doubt: Doubt) -> None:
        with contextlib.suppress(NotOwner, TableNotFound):
            settled = self._outcome(doubt)
            if settled is not None:
                self.world.counts["doubts answered"] += 1
                table = self.machine.table(doubt.table_id)
                place = doubt.table_id, table.deciding_range(self._range_count)
                self.watch.told(self, place, doubt.number, settled)
                self._ask(sender, (doubt, settled))

    def _learn(self, doubt: Doubt, settled: ChangeResult | None) -> None:
        if settled is not None:
            self.world.counts[f"changes {settled.outcome.value}, heard of by asking"] += 1
            self.works.finish()
            self._settled(self.machine.settled(doubt, settled, self.now_s))

    def _is_told(self, table_id: TableId, number: int) -> bool:
        """Whether every server that could go on with the table's first range has it."""
        table = self.machine.table(table_id)
        range_id = table.deciding_range(self._range_count)
        if range_id not in self.replication.primaries:  # it learned of it by asking
            return False
        return self.watch.have_taken(self, table_id, range_id, number)

    def _watch_waits(self) -> None:
        replicas = self.replication.replicas.items()
        waiting = [range_id for range_id, replica in replicas if replica.is_promoted]
        now_s = self.world.now_s
        if self.works.is_stuck or (self.is_slow and self.works.is_busy):
            # The open work's next turn waits behind all that came before it, and a tick that
            # would serve waits for that work: it serves when it is no longer slow.
            self._waits_since_s = {}
        self._waits_since_s = {r: self._waits_since_s.get(r, now_s) for r in waiting}
        for range_id, since_s in self._waits_since_s.items():
            assert self._view is not None
            self.watch.waits(self, self._view.ranges[range_id], now_s - since_s)

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        if not self._is_away(lambda: self.entry(event)):
            super().entry(event)

    def read(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of one range arrived."""
        if not self._is_away(lambda: self.read(event, on_answer)):
            super().read(event, on_answer)

    def begin_cut(self, table_id: TableId, cut_id: CutId, lasts_s: float) -> int:
        """A reader is about to ask for one state of a table."""
        if self.is_dead or self.is_paused:
            raise NotOwner("nobody is there")
        return super().begin_cut(table_id, cut_id, lasts_s)

    # --- what is decided

    def _carrying_out(self, effects: Sequence[Effect]) -> Work[None]:
        """What anybody could see when the backups have it."""
        if not effects:
            yield from self._doing(())
            return
        notes = [self.watch.deciding(self, place) for place in sorted(set(places(effects)))]
        committed = yield from self.output.deciding(effects, self.now)
        for note in notes:
            note()
        yield from self._doing(committed)

    def _release(self, range_ids: Iterable[RangeId]) -> None:
        self.works.begin(self._releasing(tuple(range_ids)))

    def _releasing(self, range_ids: Sequence[RangeId]) -> Work[None]:
        yield from self._doing(self.output.release(self.now_s, range_ids))

    def _doing(self, committed: Sequence[CommittedEffect]) -> Work[None]:
        self._note_taken()
        if not committed:
            yield
            return
        for range_id in {
            range_id for effect in committed if (range_id := shows(effect)) is not None
        }:
            log = self.replication.primaries[range_id].log
            self._begin(range_id)
            self.watch.seen(self, range_id, self._shown(log))
        yield from super()._doing(committed)

    def _shown(self, log: RangeLog) -> int:
        """Up to which record a copy must have the range, to have all that somebody saw."""
        return log.released + log._is_past

    def _putting(self, change: Put) -> Work[None]:
        record = change.record
        assert isinstance(change.accumulator, Sum)
        numbers = self.held((record.table_id, record.range_id))
        yield from numbers.putting(record, change.accumulator)
        yield from self._landing(record, change.accumulator.grads)

    def table(self, table_id: TableId) -> Table:
        """One that the newest view has."""
        (found,) = [table for table in self._tables() if table.table_id == table_id]
        return found

    def bits(self, key: tuple[TableId, RangeId]) -> StoreCopy:
        """Values and optimizer state of a part."""
        return self.held(key).shards.stores[key].snapshot()

    def held(self, key: tuple[TableId, RangeId]) -> Numbers:
        """The numbers, with room for that part."""
        if key not in self.numbers.shards.stores:
            table = self.table(key[0])
            blocks = table.blocks_by_range(self._range_count)[key[1]]
            self.numbers.hold(table, key[1], blocks)
        return self.numbers

    # --- its sums

    def accumulate(self, effect: Accumulate) -> None:
        """See `Sums`, as all of these."""
        self._fold(effect)

    def reducing(self, record: Record) -> Work[tuple[float, ...]]:
        return (yield from self._reducing(record))

    def kept(self, record: Record) -> object:
        key = _key_of(record)
        return self.held(key[:2]).kept(record, self.sums[key])

    def take(self, record: Record) -> object:
        key = _key_of(record)
        if key in self.reduced:
            del self.reduced[key]
            table = self.machine.table(record.table_id)
            self.settings.scaled(table, record.clock, record.update_scale)
            self.world.counts["scaled updates"] += 1
        self._check_enough(record)
        self._count(record)
        return self.held(key[:2]).taken(record, self.sums.pop(key, ()))

    def drop(self, record: Record) -> None:
        self._drop(record)

    def _count(self, record: Record) -> None:
        """It has been decided who took part in which update."""
        taking_part = record.summed_by or record.contributors
        workers = {part.incarnation for part in taking_part if not part.skip}
        for block in record.blocks:
            self.updates[record.table_id, block].append(workers)

    @property
    def prepared_changes(self) -> tuple[PreparedChange, ...]:
        """Those that every backup has."""
        return () if self.works.is_busy else self.output.prepared_changes

    @property
    def asks(self) -> bool:
        """Whether the scheduler owes it an answer."""
        return any(p._asked is not None for p in self.replication.primaries.values())

    @property
    def is_settled(self) -> bool:
        """Whether every backup has all that was decided."""
        logs = [primary.log for primary in self.replication.primaries.values()]
        return all(log.is_drained for log in logs) and not self.works.is_busy

    # --- between servers

    def _send(self, peer: NodeId, log_record: LogRecord) -> None:
        """As `ReplicatedRanges._send`."""
        self.world.counts["between servers"] += 1
        if peer in self.links:
            self.links[peer].send(log_record)

    def _send_all(self, log_records: Iterable[tuple[NodeId, LogRecord]]) -> None:
        for peer, log_record in log_records:
            self._send(peer, log_record)

    def _ask(self, peer: NodeId, message: object) -> None:
        """A call of its own."""
        receiver = self.peers.get(peer)
        if receiver is None:  # not there yet
            return
        self.world.send(
            f"server {self.node_id} -> {peer}: {type(message).__name__}",
            lambda: receiver.hear(self.node_id, message),
            (self.node_id, peer),
        )

    def hear(self, sender: NodeId, message: object, stream: Stream | None = None) -> None:
        """A message of another server."""
        if self._is_away(lambda: self.hear(sender, message, stream)):
            return
        match message:
            case Doubt():
                self._answer(sender, message)
            case (Doubt() as doubt, ChangeResult() as settled):
                self._learn(doubt, settled)
            case _:
                assert stream is not None
                self._hear_on(stream, sender, message)

    def _hear_on(self, stream: Stream, sender: NodeId, message: object) -> None:
        """As `PeerLink`, `ReplicatedRanges` and `ReplicationServicer`."""
        match message:
            case Welcome() | Ack() | Grant():
                if not stream.is_broken:
                    self._said(stream, sender, message)
                return
            case _ if stream.waits(message):
                return
            case CopyPiece((snapshot, _), False) if not self.replication.knows(snapshot):
                self.world.counts["snapshots before their view"] += 1
                stream.wait(message, LEASE_S / BEATS_A_LEASE)
                return
        stream.taken(message)
        self.world.counts["heard of a broken stream"] += stream.is_broken
        self.world.counts["heard beside the next stream"] += stream.is_followed
        answer: object = None
        match message:
            case Greeting():
                answer = Welcome()
            case LogRecord():
                self._handle(stream, self._following(message))
            case Beat():
                answer = self.replication.beat(message, self.now_s)
            case CopyPiece((snapshot, values)):
                self._handle(stream, self._catching_up(snapshot, values))
        if answer is not None:
            stream.answer(answer)

    def _said(self, stream: Stream, sender: NodeId, message: Welcome | Ack | Grant) -> None:
        now_s = self.now_s
        match message:
            case Welcome():
                if sender in self.links and self.links[sender].greeted(stream):
                    self._send_all(self.pacing.opened(sender))
            case Ack():
                self.replication.acked(sender, message, now_s)
                self._release([message.range_id])
            case Grant():
                first = self.replication.granted(sender, message, now_s)
                self._send_all(self.pacing.first_granted(sender, first) if first else ())
                self._release(message.range_ids)

    def _handle(self, stream: Stream, work: Work[object]) -> None:
        """What comes after it on the stream waits until it is done."""
        go_on = stream.hold()

        def ended(answer: object) -> None:
            if answer is not None:
                stream.answer(answer)
            go_on()

        self.works.done(work, ended)

    def _following(self, log_record: LogRecord) -> Work[Ack | None]:
        is_taken, ack = self.replication.take(log_record, lambda: self._fresh(log_record))
        is_removed = self._view is not None and self._view.is_removed(log_record.table_id)
        self.world.counts["decisions of removed tables"] += is_removed
        if ack is not None:
            self.watch.acknowledges(self, ack.range_id)
        if is_taken:
            yield from self._making(log_record)
        return ack

    def _fresh(self, log_record: LogRecord) -> ShardCopy | None:
        for table in self._tables():
            if table.table_id == log_record.table_id:
                blocks = table.blocks_by_range(self._range_count)[log_record.range_id]
                return fresh_copy(table, blocks)
        return None

    def _making(self, log_record: LogRecord) -> Work[None]:
        """The values follow the copy."""
        for change in log_record.changes:
            yield from self._making_change(change)
            if isinstance(change, Put):
                self._count(change.record)

    def _making_change(self, change: Mutation) -> Work[None]:
        """As a backup does what its primary decided."""
        record = change.record
        if isinstance(change, Assigned):
            yield from self._assigning(record, change.parts)
            return
        kept = () if isinstance(change, KeptSum) else self._forget_sum(record)
        match change:
            case Put(_, accumulator):
                assert accumulator is None or isinstance(accumulator, Sum)
                yield from self._landing(record, kept if accumulator is None else accumulator.grads)
            case KeptSum(_, accumulator):
                assert isinstance(accumulator, Sum)
                self.reduced[_key_of(record)] = record
                self.sums[_key_of(record)] = list(accumulator.grads)
        numbers = self.held((record.table_id, record.range_id))
        yield from numbers.making(self.table(record.table_id), change)

    def _forget_sum(self, record: Record) -> tuple[Grad, ...]:
        self.reduced.pop(_key_of(record), None)
        return tuple(self.sums.pop(_key_of(record), ()))

    def _giving_snapshots(self) -> Work[None]:
        for peer, copying in self.output.copies(self.now_s, self._has_space):
            snapshot = at_once(copying)
            self.world.counts["snapshots"] += 1
            yield
            whole = snapshot, self._values_of(snapshot.range_id)
            yield
            if peer in self.links:
                self.links[peer].send(*[CopyPiece(None)] * (PIECES - 1), CopyPiece(whole))

    def _values_of(self, range_id: RangeId) -> dict[str, dict]:  # type: ignore[type-arg]
        """A copy of what is here of a range, beside what the machine knows."""
        kept = {key: record for key, record in self.reduced.items() if key[1] == range_id}
        return {
            "values": self._of_range(range_id, self.values),
            "updates": self._of_range(range_id, self.updates),
            "reduced": kept,
            "sums": {key: list(self.sums[key]) for key in kept},
            "numbers": self.numbers.copies(range_id),
        }

    def _has_space(self, peer: NodeId) -> bool:
        """As `ReplicatedRanges._has_space`."""
        if peer not in self.links:
            return False
        self.links[peer].begin()
        return self.queues.has_space(peer)

    def _of_range(self, range_id: RangeId, found: dict[tuple[TableId, int], list]) -> dict:  # type: ignore[type-arg]
        return {
            (table.table_id, block): list(found[table.table_id, block])
            for table in self._tables()
            for block in table.blocks_by_range(self._range_count).get(range_id, ())
        }

    def _catching_up(self, snapshot: Snapshot, values: dict[str, dict]) -> Work[Ack | None]:  # type: ignore[type-arg]
        before, came = self.replication.replicas.get(snapshot.range_id), snapshot
        snapshot = self.replication.living(came)
        if snapshot is not came:
            self.world.counts["copies without what was removed"] += 1
            values = {
                what: {
                    key: value
                    for key, value in of_keys.items()
                    if (key[0] if isinstance(key, tuple) else key) in snapshot.copies
                }
                for what, of_keys in values.items()
            }
        copies = {t: c.twin() for t, c in snapshot.copies.items()}  # both go on
        ack = self.replication.join(snapshot._replace(copies=copies))
        if ack is not None:
            self.watch.acknowledges(self, ack.range_id)
        if ack is None or self.replication.replicas.get(snapshot.range_id) is before:
            return ack
        yield from self._becoming(snapshot, values)
        self.world.counts["joined ranges"] += 1
        return ack

    def _becoming(self, snapshot: Snapshot, values: dict[str, dict]) -> Work[None]:  # type: ignore[type-arg]
        self._forget(snapshot.range_id)
        self.values.update({key: list(grads) for key, grads in values["values"].items()})
        self.updates.update({key: list(who) for key, who in values["updates"].items()})
        self.reduced.update(values["reduced"])
        self.sums.update({key: list(grads) for key, grads in values["sums"].items()})
        yield
        for table_id in values["numbers"]:
            self.held((table_id, snapshot.range_id))
        self.numbers.restore(snapshot.range_id, values["numbers"])
        yield
        for change in snapshot.held:
            yield from self._making_change(change)

    def _tables(self) -> Sequence[Table]:
        return self.known[0] if self._view is None else self._view.tables

    @property
    def _range_count(self) -> int:
        return self.known[1] if self._view is None else len(self._view.ranges)


def _key_of(record: Record) -> tuple[TableId, RangeId, int]:
    return record.table_id, record.range_id, record.clock
