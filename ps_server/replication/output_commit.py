"""Between what the machines decide and what is done: what others must have first is held.

    effects --decide--> done at once | record to the backups, and held --committed--> released, done

Sums are made at once: nobody sees them. An update's accumulator is detached when the update is
decided, since the next one may have its clock. `RECEIVED`, credit and refusals commit to nothing,
and are not held.

Invariants:
    OC-1  Visible effects of a range are carried out in the order in which they were decided.
    OC-2  An effect is released under a lease that holds then, however long ago it was decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ps_core.change import ChangeResult
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.sliced_work import Work
from ps_server.ranges.events import (
    Accumulate,
    Apply,
    AssignValues,
    Drop,
    Effect,
    Forget,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
    place_of,
)
from ps_server.ranges.range_copy import RangeDelta, RangeFacts, WorkerFacts, delta_of, facts_of
from ps_server.ranges.server_machine import PreparedChange, ServerMachine
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.replication.range_roles import Replication
from ps_server.values.mutations import Assigned, Dropped, KeptSum, Mutation, Put

_Place = tuple[TableId, RangeId]
CommittedEffect = Effect | Mutation
"""Something to carry out."""


class Sums(Protocol):
    """Sums of workers' steps."""

    def accumulate(self, effect: Accumulate) -> None:
        """Add one worker's step to the sum of its clock."""

    def reducing(self, record: Record) -> Work[tuple[float, ...]]:
        """Reduce the whole sum of the record's clock. Returns the squares of its blocks."""

    def kept(self, record: Record) -> object:
        """The accumulator of a sum that was reduced; it stays where it is."""

    def take(self, record: Record) -> object:
        """Detach the accumulator of the record's sum."""

    def drop(self, record: Record) -> None:
        """Forget the record's sum."""


@dataclass(slots=True)
class _Decided:
    """Decisions of an event in one table shard."""

    effects: list[Effect] = field(default_factory=list)
    held: list[object] = field(default_factory=list)
    changes: list[Mutation] = field(default_factory=list)
    counted: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class _LastTold:
    """Facts of a table shard in its last record."""

    facts: RangeFacts
    workers: dict[Incarnation, WorkerFacts]


class ToldMark(NamedTuple):
    """Mark in a range's log: the backups know what a table shard has prepared or decided; None if
    there is no backup, and then nothing is held.
    """

    place: _Place
    number: int
    prepared: object


class OutputCommit:
    """The outputs of one server.

    Args:
        send: sends a log record to a server.
        write: writes a log record to the update log, where there is one.
        encode: encodes a log record for both, in steps.
    """

    def __init__(
        self,
        machine: ServerMachine,
        replication: Replication,
        sums: Sums,
        send: Callable[[NodeId, LogRecord], None],
        write: Callable[[LogRecord], None] | None = None,
        encode: Callable[[LogRecord], Work[None]] | None = None,
    ) -> None:
        self._machine = machine
        self._replication = replication
        self._sums = sums
        self._send = send
        self._write = write
        self._encode = encode
        self._told: dict[_Place, _LastTold] = {}
        self._kept: set[tuple[TableId, RangeId, int]] = set()
        self._untold: dict[_Place, ToldMark] = {}
        self._known: dict[_Place, object] = {}  # what the backups know to be prepared or decided
        self._marks = itertools.count(1)

    def deciding(
        self, effects: Iterable[Effect], now: Callable[[], float]
    ) -> Work[list[CommittedEffect]]:
        """Hold effects that nobody may see yet. Returns those to carry out now, in order.

        `now` is asked at the release: a lease may be over by then (OC-2).
        """
        committed: list[CommittedEffect] = []
        by_place: dict[_Place, _Decided] = {}
        work = list(effects)
        if not work:
            return committed
        for effect in work:  # grows by what follows from a sum
            place = place_of(effect)
            if self._replication.decides_alone(place[1]):
                committed.append(effect)
            elif isinstance(effect, Accumulate):
                for some in effect.pieces:
                    self._sums.accumulate(some)
                    yield
            elif isinstance(effect, Forget) or (
                isinstance(effect, ReplyTo) and effect.ending is None
            ):
                committed.append(effect)
            else:
                into = by_place.get(place)
                if into is None:
                    into = by_place[place] = _Decided()
                yield from self._hold(effect, into, work)
        for place, decided in by_place.items():
            committed += yield from self._decide(place, decided)
        return committed + self.release(now(), {range_id for _, range_id in by_place})

    def _hold(self, effect: Effect, into: _Decided, work: list[Effect]) -> Work[None]:
        change: Mutation
        match effect:
            case Reduce(record):
                squares = yield from self._sums.reducing(record)
                into.changes.append(KeptSum(record, self._sums.kept(record)))
                self._kept.add(_key_of(record))
                work += self._machine.reduced(record, squares)
                return
            case Apply(record):
                accumulator = self._sums.take(record)
                into.counted.append(record)
                into.held.append(Put(record, accumulator))
                is_kept = _key_of(record) in self._kept
                self._kept.discard(_key_of(record))
                into.changes.append(Put(record, None if is_kept else accumulator))
                return
            case AssignValues(record, blocks):
                change = Assigned(record, blocks)
            case Drop(record):
                self._sums.drop(record)
                self._kept.discard(_key_of(record))
                change = Dropped(record)
            case _:
                into.effects.append(effect)
                into.held.append(effect)
                return
        into.changes.append(change)
        into.held.append(change)

    def _decide(self, place: _Place, decided: _Decided) -> Work[list[CommittedEffect]]:
        shard = self._machine.shards.get(place)
        primary = self._replication.primaries.get(place[1])
        if shard is None or primary is None:  # it was given up
            return [effect for effect in decided.effects if isinstance(effect, RefusePull)]
        delta = delta_of(shard.state, decided.effects, decided.counted)
        news = self._news(place, delta)
        # Servers that join get a snapshot: without a receiver, reads need not wait for a record.
        is_heard = news is not None and primary.is_heard
        if not decided.changes and not delta.endings and not is_heard:
            if news is not None:  # no copy elsewhere has them, nor the log: the next record does
                primary.log.decide_alone()
                self._told.pop(place, None)
            primary.log.follow(decided.held)
            return []
        log_record = primary.log.decide(
            place[0], delta._replace(workers=news or ()), tuple(decided.changes), decided.held
        )
        if self._encode is not None:
            yield from self._encode(log_record)
        for node_id in primary.holders:
            self._send(node_id, log_record)
        if self._write is not None and primary.log.is_written:
            self._write(log_record)
        return []

    def _news(self, place: _Place, delta: RangeDelta) -> tuple[WorkerFacts, ...] | None:
        """Workers whose facts have changed since the last record; None if nothing has changed."""
        told = self._told.get(place)
        if told is None:
            self._told[place] = _LastTold(delta.facts, {w.incarnation: w for w in delta.workers})
            return delta.workers
        news = tuple(w for w in delta.workers if told.workers.get(w.incarnation) != w)
        is_known = not news and told.facts == delta.facts
        told.facts = delta.facts
        told.workers.update((w.incarnation, w) for w in news)
        if len(told.workers) > len(delta.workers):  # some workers are gone
            told.workers = {w.incarnation: w for w in delta.workers}
        return None if is_known else news

    def telling_prepared(self, now: Callable[[], float]) -> Work[list[CommittedEffect]]:
        """Record changes that are prepared, which no effect shows, before the scheduler is told.
        Arguments and result are those of `deciding`.
        """
        told: set[RangeId] = set()
        for place, shard in tuple(self._machine.shards.items()):
            yield
            schedule = shard.state.schedule
            prepared = schedule.changes
            if self._replication.decides_alone(place[1]):
                self._untold.pop(place, None)
                self._known[place] = prepared
                continue
            before = self._told.get(place)
            is_news = before is None or before.facts != facts_of(shard.state)
            marked = self._untold.get(place)  # perhaps of an earlier change
            is_marked = marked is not None and marked.prepared == prepared
            if is_news or (self._is_prepare_unheard(place) and not is_marked):
                is_said = self._can_be_told(place[1])
                mark = ToldMark(place, next(self._marks), prepared if is_said else None)
                self._untold[place] = mark
                if is_said:
                    yield from self._decide(place, _Decided(held=[mark]))
                    told.add(place[1])
            elif not is_marked:
                if marked is not None and marked.prepared is None:  # another record had it
                    del self._untold[place]
                if schedule.is_open:
                    self._known[place] = prepared
        return self.release(now(), told)

    def _can_be_told(self, range_id: RangeId) -> bool:
        """False if a record would only hold up reads: with too few servers and no receiver it waits
        until a server joins, which gets a snapshot.
        """
        primary = self._replication.primaries.get(range_id)
        return primary is None or not primary.log.is_short or primary.is_heard

    def _is_prepare_unheard(self, place: _Place) -> bool:
        """True if another record may carry a prepared or decided change to the backups."""
        primary = self._replication.primaries.get(place[1])
        is_open = self._machine.shards[place].state.schedule.is_open
        return is_open and primary is not None and not primary.log.is_drained

    @property
    def prepared_changes(self) -> tuple[PreparedChange, ...]:
        """Prepared changes that the backups know of.

        Empty while a promoted range waits for its lease, since it may have reached a later clock,
        and while one is handed over;
        and while a candidate, which knows of no such change, may be made primary in this place. Of
        tables that have blocks in a missing range, only outcomes: that range may be beyond, too.
        """
        replication = self._replication
        if replication.waits or replication.has_unconfirmed or replication.is_handing_over:
            return ()
        untold = {table_id for table_id, _ in self._untold}
        prepared = [p for p in self._machine.prepared_changes if p.table_id not in untold]
        missing = self._replication.missing if prepared else ()
        return tuple(
            p
            for p in prepared
            if p.outcome is not None or not self._machine.has_blocks_in(p.table_id, missing)
        )

    def outcome(self, table_id: TableId, number: int) -> ChangeResult | None:
        """Outcome of a change, if its deciding range is here and the backups know it; None: open.

        Raises:
            TableNotFound, NotOwner: that range is not here.
        """
        shard = self._machine.decider(table_id)
        schedule, place = shard.state.schedule, (table_id, shard.state.range_id)
        settled, is_known = schedule.settled(number), self._known.get(place) == schedule.changes
        return settled if is_known and place not in self._untold else None

    def release(self, now_s: float, range_ids: Iterable[RangeId]) -> list[CommittedEffect]:
        """Held effects of these ranges that may be carried out now, in order."""
        committed: list[CommittedEffect] = []
        for held in self._replication.release(now_s, range_ids):
            if not isinstance(held, ToldMark):
                committed.append(held)  # type: ignore[arg-type]
            elif self._untold.get(held.place) is held:
                del self._untold[held.place]
                self._known[held.place] = held.prepared
        return committed

    def copies(
        self, now_s: float, has_space: Callable[[NodeId], bool]
    ) -> Iterator[tuple[NodeId, Work[Snapshot]]]:
        """As `Replication.copies`; the next record has all facts again."""
        for node_id, copying in self._replication.copies(now_s, has_space):
            yield node_id, self._telling_anew(copying)

    def snapshotting_for_log(self, range_id: RangeId) -> Work[Snapshot]:
        """As `Replication.snapshotting_for_log`; the next record has all facts again."""
        return self._telling_anew(self._replication.snapshotting_for_log(range_id))

    def _telling_anew(self, copying: Work[Snapshot]) -> Work[Snapshot]:
        snapshot = yield from copying
        self._forget_told((snapshot.range_id,))
        return snapshot

    def forget(self, range_ids: Collection[RangeId]) -> None:
        """Forget ranges that this server has lost."""
        self._forget_told(range_ids)
        self._untold = {p: mark for p, mark in self._untold.items() if p[1] not in range_ids}
        self._known = {p: told for p, told in self._known.items() if p[1] not in range_ids}
        self._kept = {key for key in self._kept if key[1] not in range_ids}

    def forget_tables(self, table_ids: Collection[TableId]) -> None:
        """Forget removed tables."""
        for of_places in (self._told, self._untold, self._known):
            for place in [place for place in of_places if place[0] in table_ids]:
                del of_places[place]
        self._kept = {key for key in self._kept if key[0] not in table_ids}

    def _forget_told(self, range_ids: Collection[RangeId]) -> None:
        self._told = {p: told for p, told in self._told.items() if p[1] not in range_ids}


def _key_of(record: Record) -> tuple[TableId, RangeId, int]:
    return record.table_id, record.range_id, record.clock
