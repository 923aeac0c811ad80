"""Between what the machines decide and what is done: what others must have first is held.

    effects --decide--> done at once | record to the backups, and held --committed--> released, done

Rules:
    - Sums are made at once: nobody sees them. What was summed for an update is detached when the
      update is decided, since the next one may have its clock.
    - Outcomes, reads and changes of values are held by the range's log; `RECEIVED`, credit and
      refusals promise nothing and are not.
    - What changes without an effect, a prepared change, is told by `tell_prepared`.

Invariants:
    OC-1  What is done of a range, and could be seen, is done in the order in which it was decided.
    OC-2  It is released under a lease that holds then, however long ago it was decided.

What it deliberately does not do: carry anything out, or send (its caller does both).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ps_core.change import ChangeResult
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.work import Work, at_once
from ps_server.ranges.events import (
    Accumulate,
    Apply,
    Assign,
    Drop,
    Effect,
    Forget,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
)
from ps_server.ranges.range_copy import Delta, Facts, WorkerFacts, delta_of, facts_of
from ps_server.ranges.server_machine import PreparedChange, ServerMachine
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.replication.range_roles import Replication
from ps_server.values.mutations import Assigned, Change, Dropped, Kept, Put

_Place = tuple[TableId, RangeId]
CommittedEffect = Effect | Change
"""What there is to do."""


class Sums(Protocol):
    """Whoever makes the sums."""

    def accumulate(self, effect: Accumulate) -> None:
        """One worker's step goes into the sum of its clock."""

    def reducing(self, record: Record) -> Work[tuple[float, ...]]:
        """The sum of the record's clock is whole: reduce it; the squares of its blocks."""

    def kept(self, record: Record) -> object:
        """The accumulator of a sum that was reduced; it stays where it is."""

    def take(self, record: Record) -> object:
        """Detach the accumulator of the record's sum."""

    def drop(self, record: Record) -> None:
        """Forget the record's sum."""


@dataclass(slots=True)
class _Decided:
    """What an event did to one part."""

    effects: list[Effect] = field(default_factory=list)
    held: list[object] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    counted: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class _Told:
    """What the backups were told last of a part."""

    facts: Facts
    workers: dict[Incarnation, WorkerFacts]


class Told(NamedTuple):
    """Held: the backups have been told of what a part has prepared or decided, the newest at that
    time. `prepared` is None while there is nobody to tell, and nothing is held.
    """

    place: _Place
    number: int
    prepared: object


class OutputCommit:
    """The outputs of one server.

    Args:
        machine: its machine.
        replication: of the same.
        sums: its sums.
        send: how a log record gets to a server.
        write: how a log record gets to the update log, where there is one.
        encode: makes a log record ready for both, in steps.
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
        self._told: dict[_Place, _Told] = {}
        self._kept: set[tuple[TableId, RangeId, int]] = set()
        self._untold: dict[_Place, Told] = {}
        self._known: dict[_Place, object] = {}  # what the backups know to be prepared or decided
        self._marks = itertools.count(1)

    def decide(self, effects: Iterable[Effect], now_s: float) -> list[CommittedEffect]:
        """`deciding`, at once."""
        return at_once(self.deciding(effects, lambda: now_s))

    def deciding(
        self, effects: Iterable[Effect], now: Callable[[], float]
    ) -> Work[list[CommittedEffect]]:
        """Hold what must not be seen yet. `now` is asked when something is released: long after
        this began, a lease may be over (OC-2).

        Returns:
            What is to be done now, in order.
        """
        committed: list[CommittedEffect] = []
        parts: dict[_Place, _Decided] = {}
        work = list(effects)
        if not work:
            return committed
        for effect in work:  # grows by what follows from a sum
            place = _place_of(effect)
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
                into = parts.get(place)
                if into is None:
                    into = parts[place] = _Decided()
                yield from self._hold(effect, into, work)
        for place, decided in parts.items():
            committed += yield from self._decide(place, decided)
        return committed + self.release(now(), {range_id for _, range_id in parts})

    def _hold(self, effect: Effect, into: _Decided, work: list[Effect]) -> Work[None]:
        change: Change | None = None
        match effect:
            case Reduce(record):
                squares = yield from self._sums.reducing(record)
                into.changes.append(Kept(record, self._sums.kept(record)))
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
            case Assign(record, parts):
                change = Assigned(record, parts)
            case Drop(record):
                self._sums.drop(record)
                self._kept.discard(_key_of(record))
                change = Dropped(record)
        if change is not None:
            into.changes.append(change)
            into.held.append(change)
        else:
            into.effects.append(effect)
            into.held.append(effect)

    def _decide(self, place: _Place, decided: _Decided) -> Work[list[CommittedEffect]]:
        part = self._machine.shards.get(place)
        primary = self._replication.primaries.get(place[1])
        if part is None or primary is None:  # it was given up
            return [effect for effect in decided.effects if isinstance(effect, RefusePull)]
        delta = delta_of(part.state, decided.effects, decided.counted)
        news = self._news(place, delta)
        # Who joins is told all anew: where nobody listens, reads need not wait for what is told.
        is_heard = news is not None and primary.is_heard
        if not decided.changes and not delta.endings and not is_heard:
            if news is not None:  # a copy that is kept elsewhere does not have them
                primary.log.decide_alone()
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

    def _news(self, place: _Place, delta: Delta) -> tuple[WorkerFacts, ...] | None:
        """The workers of which the backups have not been told as they are; None: nor is there
        anything else.
        """
        told = self._told.get(place)
        if told is None:
            self._told[place] = _Told(delta.facts, {w.incarnation: w for w in delta.workers})
            return delta.workers
        news = tuple(w for w in delta.workers if told.workers.get(w.incarnation) != w)
        is_known = not news and told.facts == delta.facts
        told.facts = delta.facts
        told.workers.update((w.incarnation, w) for w in news)
        if len(told.workers) > len(delta.workers):  # who is past is forgotten
            told.workers = {w.incarnation: w for w in delta.workers}
        return None if is_known else news

    def tell_prepared(self, now_s: float) -> list[CommittedEffect]:
        """`telling_prepared`, at once."""
        return at_once(self.telling_prepared(lambda: now_s))

    def telling_prepared(self, now: Callable[[], float]) -> Work[list[CommittedEffect]]:
        """Tell what changed without an effect: what is prepared of a table, before anybody is told.

        Args, Returns:
            As `deciding`.
        """
        told: set[RangeId] = set()
        for place, part in tuple(self._machine.shards.items()):
            yield
            schedule = part.state.schedule
            prepared = schedule.prepared, schedule.hold_point, schedule.taken
            if self._replication.decides_alone(place[1]):
                self._untold.pop(place, None)
                self._known[place] = prepared
                continue
            before = self._told.get(place)
            is_news = before is None or before.facts != facts_of(part.state)
            marked = self._untold.get(place)  # it may be of a promise before this one
            is_marked = marked is not None and marked.prepared == prepared
            if is_news or (self._is_prepare_unheard(place) and not is_marked):
                is_said = self._can_be_told(place[1])
                mark = Told(place, next(self._marks), prepared if is_said else None)
                self._untold[place] = mark
                if is_said:
                    yield from self._decide(place, _Decided(held=[mark]))
                    told.add(place[1])
            elif not is_marked:
                if marked is not None and marked.prepared is None:  # it came with something else
                    del self._untold[place]
                if schedule.is_open:
                    self._known[place] = prepared
        return self.release(now(), told)

    def _can_be_told(self, range_id: RangeId) -> bool:
        """Whether it is of use to tell anything: with too few servers and nobody who listens it
        would stand in the way of reads until somebody joins, who is told all anew.
        """
        primary = self._replication.primaries.get(range_id)
        return primary is None or not primary.log.is_short or primary.is_heard

    def _is_prepare_unheard(self, place: _Place) -> bool:
        """Whether a promise, or what became of it, may be on its way to the backups, with something
        else.
        """
        primary = self._replication.primaries.get(place[1])
        is_open = self._machine.shards[place].state.schedule.is_open
        return is_open and primary is not None and not primary.log.is_settled

    @property
    def prepared_changes(self) -> tuple[PreparedChange, ...]:
        """What the backups know that this server has prepared; nothing while it is to serve a range
        that it does not serve yet, which may have reached a later clock; nor while another may be
        made primary of one in its place, which knows nothing of it.
        """
        if self._replication.waits or self._replication.has_candidates:
            return ()
        untold = {table_id for table_id, _ in self._untold}
        return tuple(p for p in self._machine.prepared_changes if p.table_id not in untold)

    def outcome(self, table_id: TableId, number: int) -> ChangeResult | None:
        """What became of a change, if the range that decides is here and its backups know it; None:
        it is open.

        Raises:
            TableNotFound, NotOwner: that range is not here.
        """
        settled, part = self._machine.outcome(table_id, number), self._machine.decider(table_id)
        schedule, place = part.state.schedule, (table_id, part.state.range_id)
        is_known = self._known.get(place) == (
            schedule.prepared,
            schedule.hold_point,
            schedule.taken,
        )
        return settled if is_known and place not in self._untold else None

    def release(self, now_s: float, range_ids: Iterable[RangeId]) -> list[CommittedEffect]:
        """What was held of these ranges and may be done now, in order."""
        committed: list[CommittedEffect] = []
        for held in self._replication.release(now_s, range_ids):
            if not isinstance(held, Told):
                committed.append(held)  # type: ignore[arg-type]
            elif self._untold.get(held.place) is held:
                del self._untold[held.place]
                self._known[held.place] = held.prepared
        return committed

    def copies(
        self, now_s: float, has_room: Callable[[NodeId], bool]
    ) -> Iterator[tuple[NodeId, Work[Snapshot]]]:
        """As `Replication.copies`: who joins is told all anew from then on."""
        for node_id, copying in self._replication.copies(now_s, has_room):
            yield node_id, self._telling_anew(copying)

    def snapshotting_for_log(self, range_id: RangeId) -> Work[Snapshot]:
        """As `Replication.snapshotting_for_log`: the update log is told all anew from then on."""
        return self._telling_anew(self._replication.snapshotting_for_log(range_id))

    def _telling_anew(self, copying: Work[Snapshot]) -> Work[Snapshot]:
        snapshot = yield from copying
        self._forget_told((snapshot.range_id,))
        return snapshot

    def forget(self, range_ids: Collection[RangeId]) -> None:
        """Nothing of these ranges is here any more."""
        self._forget_told(range_ids)
        self._untold = {p: mark for p, mark in self._untold.items() if p[1] not in range_ids}
        self._known = {p: told for p, told in self._known.items() if p[1] not in range_ids}
        self._kept = {key for key in self._kept if key[1] not in range_ids}

    def forget_tables(self, table_ids: Collection[TableId]) -> None:
        """Nothing of these tables is here any more."""
        for of_places in (self._told, self._untold, self._known):
            for place in [place for place in of_places if place[0] in table_ids]:
                del of_places[place]
        self._kept = {key for key in self._kept if key[0] not in table_ids}

    def _forget_told(self, range_ids: Collection[RangeId]) -> None:
        for place in [place for place in self._told if place[1] in range_ids]:
            del self._told[place]


def _key_of(record: Record) -> tuple[TableId, RangeId, int]:
    return record.table_id, record.range_id, record.clock


def _place_of(effect: Effect) -> _Place:
    if isinstance(effect, Apply | Reduce | Drop | Assign):
        return effect.record.table_id, effect.record.range_id
    return effect.table_id, effect.range_id
