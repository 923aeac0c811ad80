"""The server's thin edge: it feeds its machine and carries effects out, in order, on one thread.

An event and all its effects are one work (`works`): nothing else happens here before it is done,
and a pull is answered between two updates, never in one.

Invariants:
    ND-2  An effect that fails ends the server (`ps_server.fail_stop`).
    ND-1  Every update that backups applied can be applied here: custom updates, which may fail,
          have no backups.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ps_core import limits, rights
from ps_core.change import ChangeResult, TableCut
from ps_core.cluster_view import ClusterView, Node, NodeState, Session
from ps_core.errors import (
    Draining,
    Fenced,
    InvariantViolation,
    NotOwner,
    PushpullError,
    Unauthenticated,
    UpdateFailed,
)
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Outcome, ReplyKind
from ps_core.sliced_work import PIECE_COUNT, Work, at_once
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import ServerMetrics
from ps_runtime.system.turns import Turns
from ps_server.fail_stop import FailStop, carries_out, decides
from ps_server.lane.lane_socket import SharedLanes
from ps_server.peers.node_replication import ReplicatedRanges, ReplicationSetting
from ps_server.ranges.events import (
    Accumulate,
    AnswerPull,
    Apply,
    AssignValues,
    Drop,
    Effect,
    EntryEvent,
    Forget,
    Place,
    PullEvent,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
)
from ps_server.ranges.read_gate import WaitCause
from ps_server.ranges.schedule import checkpoint_cut
from ps_server.ranges.server_machine import Doubt, PreparedChange, ServerMachine, ShardAdded
from ps_server.replication.output_commit import CommittedEffect
from ps_server.service.collective_waits import CollectiveWaits
from ps_server.service.push_stream import PushStream
from ps_server.service.range_read import HeldAnswers, RangeRead
from ps_server.service.read_waits import ReadWaits
from ps_server.service.unread_answers import UnreadAnswers
from ps_server.service.work_queue import Works
from ps_server.stores import Shards
from ps_server.update_log.writer import UpdateLog
from ps_server.values.mutations import Assigned, Dropped, Mutation, Put
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Accumulator
from pushpull.v1 import types_pb2

_DRAIN_RETRY_MS = 500

_REPLY_COUNT = 64
"""Replies that are sent in one step."""

_QUICK = frozenset({ReplyTo, AnswerPull, RefusePull})
"""Effects that change no values."""

_NAMED_COUNT = 8
"""Most tables that a line of the log names; a view may bring thousands."""


class Sessions:
    """The sessions of a server's callers: those that it has checked, and those that have ended."""

    def __init__(self, own: Session, token_key: bytes) -> None:
        self._own = own
        self._token_key = token_key
        self._known: set[Session] = set()
        self._left: dict[NodeId, Node] = {}

    @property
    def count(self) -> int:
        """Sessions that have called."""
        return len(self._known)

    @property
    def gone(self) -> list[Node]:
        """The nodes that were declared gone."""
        return [node for node in self._left.values() if node.state is NodeState.GONE]

    def observe(self, view: ClusterView) -> list[Session]:
        """Take a new view; returns the sessions that it ends."""
        self._left = {node.node_id: node for node in view.nodes if not node.state.is_member}
        # Evaluators come and go; those that the scheduler forgot would be checked again.
        present = view.nodes_by_id.keys() - self._left.keys()
        ended = [session for session in self._known if session.node_id not in present]
        self._known.difference_update(ended)
        return ended

    def admit(self, message: types_pb2.SessionIdentity, method: str) -> Session:
        """Check the session of a caller of a method.

        Raises:
            NotPermitted: its role may not (`ps_core.rights`).
            Unauthenticated: its token was not made for it by this cluster's scheduler.
            Fenced: it belongs to another cluster or timeline, or has left this one, or is gone.
        """
        if not message.session_token:
            raise Unauthenticated(rights.NO_SESSION)
        session = wire.session_from_proto(message)
        if session not in self._known:
            self._check(session)
        rights.check(method, session.role)
        self._known.add(session)
        return session

    def _check(self, session: Session) -> None:
        """Check that a new session is one of this cluster's."""
        if session.cluster_id != self._own.cluster_id:
            raise Fenced("the session is of another cluster than this server's: register again")
        if session.timeline != self._own.timeline:
            raise Fenced("the session is of another timeline than this server's: register again")
        if not session.is_genuine(self._token_key):
            raise Unauthenticated(
                f"the session token of node {session.node_id} is wrong; send the session as "
                "RegisterNode gave it"
            )
        left = self._left.get(session.node_id)
        if left is not None:
            raise Fenced(left.fence_words)


class ParameterNode:
    """The machine, stores and streams of one server.

    Args:
        token_key: what genuine tokens are made with.
        worker_count: the number that opens clock 1 of a BSP table.
        shards: its values, with the custom updates that it offered; None: none of either.
    """

    def __init__(
        self,
        session: Session,
        token_key: bytes,
        worker_count: int,
        metrics: ServerMetrics,
        now: Callable[[], float],
        shards: Shards | None = None,
    ) -> None:
        self.health = FailStop()
        self.session = session
        self.sessions = Sessions(session, token_key)
        self.machine = ServerMachine(NodeId(session.node_id), worker_count)
        self.shards = shards if shards is not None else Shards(SharedLanes(), {})
        self.lanes = self.shards.lanes
        tier = self.shards.row_memory.tier
        if tier is not None:
            tier.on_loss = self.health.failed
        self.now = now
        self.metrics = metrics
        self.is_alone = False
        self.applied_count = 0
        self.read_waits = ReadWaits(self.machine)
        self.replicas: ReplicatedRanges | None = None
        self.on_cut_answered: Callable[[AnswerPull | RefusePull], None] = _nothing
        self._updated_s = -math.inf
        self._ended = {each: metrics.entries.labels(outcome=each.value) for each in Outcome}
        self._streams: dict[int, PushStream] = {}
        self._streams_of: dict[Incarnation, list[PushStream]] = {}
        self._reads: dict[int, RangeRead] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.turns = Turns()
        self.works = Works(self.turns, lambda failure: self.health.failed(failure))
        self._tick_waits = False
        self.unread = UnreadAnswers(now)
        self._held = HeldAnswers()
        self.shards.watched, self.shards.on_change = self._held.reads, self._held.keep
        self.collectives = CollectiveWaits(NodeId(session.node_id))

    def replicate(
        self, setting: ReplicationSetting, update_log: UpdateLog | None = None
    ) -> ReplicatedRanges:
        """Turn replication on, before the first view."""
        replicas = self.replicas = ReplicatedRanges(
            self.session, self.machine, self.shards, setting, self.now, update_log
        )
        replicas.release = self._release
        replicas.log_has_space = lambda: self.works.begin(replicas.logged.looking())
        replicas.health = self.health
        return replicas

    # --- views

    async def prepare(self, view: ClusterView) -> None:
        """Prepare for a view: make what takes long, while others have their turns."""
        own_id = NodeId(self.session.node_id)
        await self.shards.prepare(view, own_id, self.turns, self.machine.prepare)
        await self.works.in_turn(_nothing)
        await self.turns.next_turn()

    def observe(self, view: ClusterView) -> None:
        """Take a new view: serve its ranges, and go on without ended workers."""
        self.works.finish()
        self.works.begin(self._observing(view))
        self.collectives.observe(view)

    @decides
    def _observing(self, view: ClusterView) -> Work[None]:
        if self.replicas is None:
            removed = self.machine.removed_by(view)
            if removed:
                self._do_now((yield from self.machine.removing(removed)))
                yield from self.shards.removing_tables(removed)
            yield from self._serving(view)
        elif view.view_number >= self.machine.view_number:
            lost, effects = yield from self.replicas.observing(view)
            at_once(self._doing(effects))
            error = NotOwner(f"server {self.session.node_id} is not primary any more")
            roles = self.replicas.replication
            moved = roles.deposed.union(lost, roles.handed_over)
            for stream in self._streams.values() if moved else ():
                stream.give_up(moved, error)
            yield from self._serving(self.replicas.serve())

    def _serving(self, view: ClusterView) -> Work[None]:
        added = yield from self.machine.observing(view)
        self.read_waits.observe(view)
        before = {node.node_id for node in self.sessions.gone}
        for session in self.sessions.observe(view):
            self.lanes.forget(session.incarnation)
            yield
        by_table: dict[TableId, list[ShardAdded]] = {}
        for part in added:
            by_table.setdefault(part.table.table_id, []).append(part)
        for parts in by_table.values():
            self.shards.add(parts)
            yield
        if added:
            some = itertools.islice(by_table.values(), _NAMED_COUNT)
            logs.info(
                "ranges_added", view=view.view_number, parts=len(added), tables=len(by_table),
                first_tables=[parts[0].table.spec.name for parts in some],
                blocks=sum(len(part.blocks) for part in added),
            )  # fmt: skip
        for node in self.sessions.gone:
            if node.node_id not in before:
                self._fence(node)
                yield
        ended = yield from self.machine.ending(view.ended_workers, self.now())
        yield from self._carrying_out(ended)
        yield from self._carrying_out((yield from self.machine.observing_changes(self.now())))
        yield from self._telling()

    def _telling(self) -> Work[None]:
        """Tell the backups what was prepared."""
        if self.replicas is not None:
            yield from self._doing((yield from self.replicas.telling_prepared()))
        self._arm()

    @property
    def prepared_changes(self) -> tuple[PreparedChange, ...]:
        """Changes prepared here that would outlive this server. Between two works."""
        return (self.machine if self.replicas is None else self.replicas.output).prepared_changes

    # --- while the scheduler is silent

    def go_on_alone(self) -> None:
        """Give up what the silent scheduler proposed and nobody decided."""
        self.works.finish()
        self._settled(self.machine.go_on_alone(self.now()))

    def change_outcome(self, table_id: TableId, number: int) -> ChangeResult | None:
        """The outcome of a change, in the deciding range, for a server that does not hear the
        scheduler. If this server does not hear it either, an untaken change is given up.
        """
        self.works.finish()
        if self.is_alone:
            self._settled(self.machine.asked(table_id, number, self.now()))
        if self.replicas is None:
            return self.machine.outcome(table_id, number)
        return self.replicas.output.outcome(table_id, number)

    def learn(self, doubt: Doubt, settled: ChangeResult) -> None:
        """Take the outcome of a change from the deciding range."""
        self.works.finish()
        logs.info(
            "change_settled", table_id=doubt.table_id, number=doubt.number,
            outcome=settled.outcome.value, told_by=doubt.decided_by,
        )  # fmt: skip
        self._settled(self.machine.settled(doubt, settled, self.now()))

    def _settled(self, effects: Sequence[Effect]) -> None:
        self.carry_out(effects)
        self.works.finish()  # few ranges have prepared anything
        at_once(self._telling())

    def _fence(self, node: Node) -> None:
        """End the streams of a worker that was declared gone."""
        for stream in self._streams_of.get(node.incarnation, ()):
            stream.end_input(Fenced(node.fence_words))
        logs.warning("worker_gone", reason=node.gone_words)

    # --- entries

    def open_stream(self, session: Session) -> PushStream:
        stream = PushStream(next(self._numbers), session, self.unread.reader())
        self._streams[stream.origin] = stream
        self._streams_of.setdefault(session.incarnation, []).append(stream)
        return stream

    def close_stream(self, stream: PushStream) -> None:
        """Forget a stream: its sender will ask again for replies."""
        if self._streams.pop(stream.origin, None) is not None:
            incarnation = stream.session.incarnation
            self._streams_of[incarnation].remove(stream)
            if not self._streams_of[incarnation]:
                del self._streams_of[incarnation]

    def entries(self, stream: PushStream, events: Iterable[EntryEvent]) -> None:
        self.works.finish()
        effects = self._decided(stream, events)
        if self.replicas is None and _are_quick(effects):
            self._do_now(effects)
        else:
            at_once(self._carrying_out(effects))
        self._arm()

    async def take(self, stream: PushStream, events: Sequence[EntryEvent]) -> None:
        """As `entries`, in as many turns as entries that change many blocks take."""
        await self.works.done(self._taking(stream, events))

    def _taking(self, stream: PushStream, events: Iterable[EntryEvent]) -> Work[None]:
        effects = self._decided(stream, events)
        yield
        yield from self._carrying_out(effects)
        self._arm()

    @decides
    def _decided(self, stream: PushStream, events: Iterable[EntryEvent]) -> list[Effect]:
        now_s = self.now()
        effects: list[Effect] = []
        for event in events:
            place = event.place
            stream.pending.setdefault((place.table_id, place.range_id, event.sequence), now_s)
            effects += self.machine.entry(event, now_s)
        return effects

    def _leaving(self) -> Draining:
        problem = f"server {self.session.node_id} is going away"
        return Draining(problem, retry_after_ms=_DRAIN_RETRY_MS)

    def drain(self) -> None:
        """Refuse everything that waits: the server is going away."""
        leaving = self._leaving()
        self.collectives.drain(leaving)
        for stream in self._streams.values():
            stream.end_input(leaving)
        for number in list(self._reads):
            self._refuse(number, leaving)

    # --- pulls

    @decides
    def begin_cut(self, session: Session, table_id: TableId, cut: int, lasts_s: float) -> int:
        """As `ServerMachine.begin_cut`."""
        self.works.finish()
        self.machine.check_run(table_id, session.run)
        return self.machine.begin_cut(table_id, (session.incarnation, cut), self.now() + lasts_s)

    @decides
    def end_cut(self, session: Session, table_id: TableId, cut: int) -> None:
        self.works.finish()
        cut_id = (session.incarnation, cut)
        self.carry_out(self.machine.end_cut(table_id, cut_id, self.now()))

    @decides
    def begin_read(self, read: RangeRead) -> None:
        """Start the pull of one range; it is answered or refused now or later."""
        if self.works.jobs:
            self.works.finish()
        number = read.number = next(self._numbers)
        self._reads[number] = read
        now_s = self.now()
        self.carry_out(self.machine.pull(read.event, now_s))
        if number in self._reads:
            read.parked_s, read.cause = now_s, self.machine.wait_cause(number)

    def block_count_at(self, table_id: TableId, range_id: RangeId) -> int:
        """Blocks of a table in a range; 0 if they are not here."""
        part = self.machine.shards.get((table_id, range_id))
        return 0 if part is None else len(part.state.blocks)

    def is_quick_at(self, table_id: TableId, range_id: RangeId) -> bool:
        """True unless an update there may take long for another reason than its blocks: rows that
        need larger arrays, or that leave.
        """
        store = self.shards.stores.get((table_id, range_id))
        return not isinstance(store, RowStore) or store.has_space

    def block_bytes_at(self, table_id: TableId, range_id: RangeId) -> int:
        """The most bytes that a block, or a row, has in an answer; 0 if none are here."""
        part = self.machine.shards.get((table_id, range_id))
        if part is None:
            return 0
        spec = part.state.table.spec
        count = spec.block_elements if spec.rows is None else spec.element_count
        return count * spec.accumulator_element_bytes

    def next_number(self) -> int:
        """A number that no other pull, stream or cut of this server has."""
        return next(self._numbers)

    @decides
    def reading_at_cut(
        self, waiter: int, key: tuple[TableId, RangeId], cut: TableCut
    ) -> Work[bool]:
        """Wait for a range's cut for a checkpoint: `on_cut_answered` is called between two updates.
        Asynchronous settings are answered as they are, and torn. True if torn.
        """
        is_torn = self.machine.shards[key].state.schedule.is_torn_at(cut)
        event = PullEvent(
            Place(*key, self.machine.assignment_epoch(key[1])),
            waiter,
            None,
            cut.after_clock,
            not is_torn,
            self.now() + limits.CHECKPOINT_CUT_S,
            None if is_torn else checkpoint_cut(cut.checkpoint),
            run=self.machine.table(key[0]).run,
        )
        yield from self._carrying_out(self.machine.pull(event, self.now()))
        return is_torn

    def hold_copies(self, key: tuple[TableId, RangeId], cut: TableCut) -> None:
        """Hold a range at its cut until it is `copied`: there is no memory for its copies. If it is
        asynchronous, nothing of it changes at all. In a work.
        """
        is_torn = self.machine.shards[key].state.schedule.is_torn_at(cut)
        clock, deadline_s = 0 if is_torn else cut.after_clock, limits.CHECKPOINT_WRITTEN_S
        self.machine.hold_copies(key, cut.checkpoint, clock, self.now() + deadline_s)

    @decides
    def copied(self, key: tuple[TableId, RangeId], number: int) -> None:
        """Release a range: its copies for that checkpoint fit, or nobody needs them."""
        self.works.finish()
        self.carry_out(self.machine.copied(key, number, self.now()))
        self._arm()

    @decides
    def loaded(self, key: tuple[TableId, RangeId], versions: Mapping[int, int]) -> None:
        """A restored range has its values."""
        self.works.finish()
        self.carry_out(self.machine.loaded(key, versions, self.now()))
        self._arm()

    @decides
    def refuse_table(self, table_id: TableId, error: UpdateFailed) -> None:
        """Refuse a table from now on, with `error`."""
        self.works.finish()
        self.carry_out(self.machine.refuse_table(table_id, error))

    @property
    def since_update_s(self) -> float:
        """Seconds since the last update."""
        return self.now() - self._updated_s

    def end_read(self, number: int) -> RangeRead | None:
        """Take a pull out of the waiting ones; None if it does not wait."""
        self.machine.answered(number)
        read = self._reads.pop(number, None)
        if read is not None and read.cause is not None:
            waited_s = self.read_waits.ended(read, read.cause, self.now())
            self.metrics.pull_wait_seconds.labels(cause=read.cause.value).observe(waited_s)
        return read

    def parked_count(self, cause: WaitCause) -> int:
        """Pulls that wait for this cause."""
        return sum(read.cause is cause for read in self._reads.values())

    def tick(self) -> None:
        """Refuse expired pulls, form updates whose grace is over, exchange beats with backups.

        Raises:
            InvalidUpdateLog: the update log has failed, and this server ends.
        """
        self.health.check()
        if self.replicas is not None:
            self.replicas.check_log()
            self.replicas.keep_up()
        if not self._tick_waits:
            self._tick_waits = True
            self.works.begin(self._ticking())

    @decides
    def _ticking(self) -> Work[None]:
        self._tick_waits = False
        if self.replicas is not None:
            if self.replicas.replication.must_serve(self.now()):
                yield from self._serving(self.replicas.serve())
            yield from self._doing((yield from self.replicas.going_on()))
        yield from self._carrying_out(self.machine.tick(self.now()))
        self._arm()

    @property
    def ticks_within_s(self) -> float:
        """Seconds until `tick` is due at the latest; 0: now."""
        return math.inf if self.replicas is None else max(self.replicas.serves_within_s, 0.0)

    def _arm(self) -> None:
        """Set a timer for updates that form by time alone, before the next `tick`."""
        wake_s = self.machine.wake_s
        if wake_s is not None and self._timer is None and not self._is_closed:
            delay_s = max(wake_s - self.now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.tick()

    def close(self) -> None:
        """Stop the timers: the server's timeline has ended."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget(self) -> None:
        """Let go of the values: the server begins anew, and its update log may have as many. Calls
        that are still under way are refused.
        """
        self.health.on_failure = _nothing
        self.health.failed(self._leaving())
        self.shards.clear()

    # --- effects

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry effects out, in order, and what others must have first when they have it."""
        if self.replicas is None and not self.works.jobs and _are_quick(effects):
            self._do_now(effects)
        else:
            self.works.begin(self._carrying_out(effects))

    @carries_out
    def _do_now(self, effects: Sequence[Effect]) -> None:
        replies: list[ReplyTo] = []
        for effect in effects:
            if isinstance(effect, ReplyTo):
                replies.append(effect)
            else:
                self._do_other(effect)
        if replies:
            self._reply_to(replies)

    def _carrying_out(self, effects: Sequence[Effect]) -> Work[None]:
        committed: Sequence[CommittedEffect] = effects
        if self.replicas is not None:
            committed = yield from self._deciding(self.replicas, effects)
        yield from self._doing(committed)

    @carries_out
    def _deciding(
        self, replicas: ReplicatedRanges, effects: Sequence[Effect]
    ) -> Work[list[CommittedEffect]]:
        return (yield from replicas.deciding(effects))

    def _release(self, range_ids: Iterable[RangeId]) -> None:
        self.works.begin(self._releasing(list(range_ids)))

    @decides
    def _releasing(self, range_ids: Sequence[RangeId]) -> Work[None]:
        if self.replicas is not None:
            yield from self._doing(self.replicas.released(range_ids))

    @carries_out
    def _doing(self, committed: Sequence[CommittedEffect]) -> Work[None]:
        """Carry the effects out, then reply."""
        replies: list[ReplyTo] = []
        reduced: list[tuple[Record, tuple[float, ...]]] = []
        piece_count = 0  # blocks that were worked on in this step
        for done_count, effect in enumerate(committed, 1):
            match effect:
                case ReplyTo():
                    replies.append(effect)
                case Accumulate() if len(effect.parts) <= PIECE_COUNT:
                    self.shards.accumulate(effect)
                    piece_count += len(effect.parts)
                case Accumulate():
                    for some in effect.pieces:
                        self.shards.accumulate(some)
                        yield
                case Apply() if self.shards.is_brief(effect.record):
                    self._apply_brief(effect.record)
                    piece_count += len(effect.record.blocks)
                case Apply():
                    failure = yield from self._applying(effect.record)
                    if failure is not None:
                        # Nothing that replication held is of a table that can fail.
                        later = committed[done_count:]
                        rest = [*replies, *(e for e in later if not isinstance(e, Mutation))]
                        yield from self._carrying_out(self._failed(effect.record, failure, rest))
                        return
                case Put():
                    failure = yield from self._applying(effect.record, effect.accumulator)
                    if failure is not None:
                        raise InvariantViolation("ND-1", f"a replicated update: {failure.message}")
                case Reduce():
                    squares = yield from self.shards.reducing(effect.record)
                    reduced.append((effect.record, squares))
                case AssignValues():
                    yield from self.shards.assigning(effect)
                case Assigned():
                    yield from self.shards.assigning(AssignValues(effect.record, effect.parts))
                case _:
                    self._do_other(effect)
            if piece_count >= PIECE_COUNT:
                piece_count = 0
                yield
        for begin in range(0, len(replies), _REPLY_COUNT):
            self._reply_to(replies[begin : begin + _REPLY_COUNT])
            yield
        for record, squares in reduced:
            yield from self._carrying_out(self.machine.reduced(record, squares))

    def _do_other(self, effect: CommittedEffect) -> None:
        """Carry out an effect that takes no steps."""
        match effect:
            case Drop():
                self.shards.drop(effect.record)
                self._dropped(effect.record)
            case Dropped():
                self._dropped(effect.record)
            case AnswerPull():
                read = self.end_read(effect.waiter)
                if read is None:
                    self.on_cut_answered(effect)
                else:
                    key = effect.table_id, effect.range_id
                    read.answer(effect, self.machine.shards[key].state, self.shards)
                    self._held.hold(key, read)
            case Forget():
                self.shards.forget(effect)
            case RefusePull():
                if not self._refuse(effect.waiter, effect.error):
                    self.on_cut_answered(effect)

    def _failed(
        self, record: Record, failure: UpdateFailed, rest: Sequence[Effect]
    ) -> list[Effect]:
        """Fail a table; the effects to carry out in place of `rest`."""
        effects = self.machine.failed(record, failure, rest)
        self.shards.abandon(record.table_id)
        self.metrics.failed_updates.inc()
        logs.error("table_failed", table_id=record.table_id, reason=failure.message)
        return effects

    def _reply_to(self, effects: Iterable[ReplyTo]) -> None:
        now_s = self.now()
        counts: dict[Outcome, int] = {}
        for effect in effects:
            ending = effect.ending
            if ending is not None:
                counts[ending.outcome] = counts.get(ending.outcome, 0) + 1
                if ending.outcome is Outcome.APPLIED:
                    self.metrics.staleness_updates.observe(ending.staleness)
            elif effect.error is not None and effect.kind is ReplyKind.ERROR:
                self.metrics.errors.labels(code=effect.error.code).inc()
            elif effect.error is not None:
                self.metrics.quota_refusals.inc()
            if effect.kind is not ReplyKind.RECEIVED:
                self._end_entry(effect)
            stream = self._streams.get(effect.sender.origin)
            if stream is not None:
                since_s = stream.reply(effect)
                if since_s is not None and ending is not None:
                    self.metrics.push_duration_seconds.observe(now_s - since_s)
        for outcome, count in counts.items():
            self._ended[outcome].inc(count)

    def _end_entry(self, effect: ReplyTo) -> None:
        """End an entry that was sent again on another stream: its first one owes nothing more."""
        for other in self._streams_of.get(effect.sender.incarnation, ()):
            if other.origin != effect.sender.origin:
                other.end((effect.table_id, effect.range_id, effect.sequence))

    def _applying(
        self, record: Record, accumulator: Accumulator | None = None
    ) -> Work[UpdateFailed | None]:
        """Returns the error if the update could not be computed; nothing has changed then."""
        begun_s = self.now()
        failure = yield from self.shards.applying(record, accumulator)
        self._count_update(record, begun_s, is_applied=failure is None)
        return failure

    def _apply_brief(self, record: Record) -> None:
        """As `_applying`, for an update of one step, which cannot fail."""
        begun_s = self.now()
        self.shards.apply_brief(record)
        self._count_update(record, begun_s, is_applied=True)

    def _count_update(self, record: Record, begun_s: float, *, is_applied: bool) -> None:
        self._updated_s = self.now()
        self.metrics.apply_duration_seconds.observe(self._updated_s - begun_s)
        if is_applied:
            self.applied_count += 1
            self.metrics.applied_updates.inc()
            if record.gone_count:
                self.metrics.short_updates.inc()

    def _dropped(self, record: Record) -> None:
        if not record.contributor_count or record.summed_by:  # its workers disagree; or it is empty
            return
        self.metrics.short_updates.inc()
        logs.warning(
            "update_dropped",
            table_id=record.table_id,
            range_id=record.range_id,
            clock=record.clock,
            reason="every worker that took part had left or died before it said the update's scale",
        )

    def _refuse(self, waiter: int, error: PushpullError) -> bool:
        """Refuse a waiting pull; False if it does not wait."""
        read = self.end_read(waiter)
        if read is not None:
            read.refuse(error)
        return read is not None


def _are_quick(effects: Sequence[Effect]) -> bool:
    """True if no effect takes steps, as for most pushes and pulls."""
    for effect in effects:  # noqa: SIM110 - `all` makes a generator, for one effect at times
        if type(effect) not in _QUICK:
            return False
    return True


def _nothing(*_: object) -> None: ...
