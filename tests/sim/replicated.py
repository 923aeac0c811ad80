"""A server of a simulation whose ranges have backups: the real machines of replication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_core.cluster_view import ClusterView
from ps_core.keys import NodeId, RangeId, TableId
from ps_server.events import (
    Apply,
    Assign,
    Drop,
    Effect,
    EntryEvent,
    Fold,
    Forget,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
)
from ps_server.part_copy import Facts, PartCopy, WorkerFacts, delta_of, facts_of, fresh_copy
from ps_server.range_log import Batch
from ps_server.replication import Ack, Beat, Grant, Replication, Request, Snapshot
from tests.sim.server import TICK_S, SimServer
from tests.sim.truth import Grad, Settings
from tests.sim.world import World

LEASE_S = 3.0

_Place = tuple[TableId, RangeId]


class Put(NamedTuple):
    """A sum becomes values, or initial values do."""

    record: Record
    grads: tuple[Grad, ...]


class Kept(NamedTuple):
    """A sum waits for its scale."""

    record: Record
    grads: tuple[Grad, ...]


class Dropped(NamedTuple):
    """Nothing comes of a sum."""

    record: Record


@dataclass
class _Decided:
    """What an event did to one part."""

    replies: list[Effect] = field(default_factory=list)
    held: list[object] = field(default_factory=list)
    changes: list[object] = field(default_factory=list)
    counted: list[Record] = field(default_factory=list)


class ReplicatedServer(SimServer):
    """A server that is primary of some ranges and backs up others."""

    def __init__(
        self, world: World, node_id: NodeId, worker_count: int, settings: Settings
    ) -> None:
        self.is_down = False
        self.is_cut_off = False
        """From the scheduler and the other servers; workers still reach it."""
        self.peers: dict[NodeId, ReplicatedServer] = {}
        self.asked: list[Request] = []
        self._told: dict[_Place, tuple[Facts, tuple[WorkerFacts, ...]]] = {}
        self._view: ClusterView | None = None
        super().__init__(world, node_id, worker_count, settings)
        self.replication = Replication(node_id, self.machine, LEASE_S)

    # --- its life

    def stop(self) -> None:
        """It is killed, or paused: it does and hears nothing."""
        self.is_down = True

    def wake(self) -> None:
        """It goes on as if nothing had been."""
        self.is_down = self.is_cut_off = False

    def start(self, view: ClusterView) -> None:
        """The first view."""
        self._observe(view)

    def observe(self, view: ClusterView) -> None:
        """As `ps_server.node` does."""
        if self.is_down or self.is_cut_off:
            return
        if self._view is None or view.view_number > self._view.view_number:
            self._observe(view)

    def _observe(self, view: ClusterView) -> None:
        self._view = view
        lost, effects = self.replication.observe(view, self.world.now_s)
        for range_id in lost:
            self._forget(range_id)
        self.carry_out(effects)
        self._serve()

    def _serve(self) -> None:
        """Take up what may be served now."""
        before = set(self.replication.logs)
        self.machine.observe(self.replication.serve(self.world.now_s))
        if self._view is not None:
            self._go_on_without(self._view)
        new = set(self.replication.logs) - before
        self.world.counts["ranges taken over"] += len(new) if self.world.now_s else 0
        self._settle_all()

    def _forget(self, range_id: RangeId) -> None:
        """Another is primary: nothing that is here counts."""
        self.world.counts["ranges given up"] += 1
        for table in self._tables():
            for block in table.blocks_by_range(self._range_count).get(range_id, ()):
                self.values.pop((table.table_id, block), None)
                self.updates.pop((table.table_id, block), None)
        for key in [key for key in self.sums if key[1] == range_id]:
            del self.sums[key]
        for key in [key for key in self.reduced if key[1] == range_id]:
            del self.reduced[key]
        for place in [place for place in self._told if place[1] == range_id]:
            del self._told[place]

    def _tick(self) -> None:
        if not self.is_down:
            now_s = self.world.now_s
            if self.replication.waits:
                self._serve()
            self.carry_out(self.machine.tick(now_s))
            self._settle_all()
            for peer, beat in self.replication.beats(now_s).items():
                self._send(peer, beat)
            for peer, batch in list(self.replication.resends()):
                self._send(peer, batch)
            self._give_snapshots()
            self.asked = self.replication.requests(now_s)
        self.world.after(TICK_S, self._tick)

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        if not self.is_down:
            super().entry(event)
            self._settle([(event.place.table_id, event.place.range_id)])

    def read(self, event: object, on_answer: object) -> None:
        """A read of one range arrived."""
        if not self.is_down:
            super().read(event, on_answer)  # type: ignore[arg-type]

    # --- what is decided

    def carry_out(self, effects: list[Effect]) -> None:
        """Sums at once; what anybody could see when the backups have it."""
        parts: dict[_Place, _Decided] = {}
        work = list(effects)
        for effect in work:  # grows by what follows from a sum
            if isinstance(effect, Fold | Forget) or (
                isinstance(effect, ReplyTo) and effect.ending is None
            ):
                super().carry_out([effect])
                continue
            place = _place_of(effect)
            self._stage(effect, parts.setdefault(place, _Decided()), work)
        for place, decided in parts.items():
            self._decide(place, decided)
        self._release()

    def _stage(self, effect: Effect, into: _Decided, work: list[Effect]) -> None:
        if isinstance(effect, Reduce):
            squares = self._squares(effect.record)
            key = _key_of(effect.record)
            into.changes.append(Kept(effect.record, tuple(self.sums[key])))
            work += self.machine.reduced(effect.record, squares)
        elif isinstance(effect, Apply):
            put = Put(effect.record, tuple(self.sums.pop(_key_of(effect.record), ())))
            self._count(effect.record)
            into.changes.append(put)
            into.held.append(put)
            into.counted.append(effect.record)
        elif isinstance(effect, Assign):
            grads = [payload for _, payload in effect.parts if isinstance(payload, Grad)]
            put = Put(effect.record, tuple(grads))
            into.changes.append(put)
            into.held.append(put)
        elif isinstance(effect, Drop):
            self._drop(effect.record)
            into.changes.append(Dropped(effect.record))
        else:
            into.held.append(effect)
            into.replies.append(effect)

    def _count(self, record: Record) -> None:
        """It has been decided who took part in which update."""
        key = _key_of(record)
        if key in self.reduced:
            del self.reduced[key]
            table = self.machine.table(record.table_id)
            self.settings.scaled(table, record.clock, record.update_scale)
            self.world.counts["scaled updates"] += 1
        taking_part = record.summed_by or record.contributors
        workers = {part.incarnation for part in taking_part if not part.skip}
        for block in record.blocks:
            self.updates[record.table_id, block].append(workers)

    def _decide(self, place: _Place, decided: _Decided) -> None:
        log = self.replication.logs.get(place[1])
        part = self.machine.parts.get(place)
        if log is None or part is None:  # it was given up
            super().carry_out([e for e in decided.replies if isinstance(e, RefusePull)])
            return
        delta = delta_of(part.state, decided.replies, decided.counted)
        known = (delta.facts, delta.workers)
        if not decided.changes and not delta.endings and self._told.get(place) == known:
            log.follow(decided.held)
            return
        self._told[place] = known
        batch = log.decide(place[0], delta, decided.changes, decided.held)
        for peer in self.replication.holders(place[1]):
            self._send(peer, batch)

    def _settle(self, places: Iterable[_Place]) -> None:
        """What changed without an effect is told as well."""
        for place in places:
            part = self.machine.parts.get(place)
            if part is None or not part.state.workers or place[1] not in self.replication.logs:
                continue
            if self._told.get(place, (None,))[0] != facts_of(part.state):
                self._decide(place, _Decided())
        self._release()

    def _settle_all(self) -> None:
        self._settle(list(self.machine.parts))

    def _release(self) -> None:
        for effect in self.replication.release(self.world.now_s):
            if isinstance(effect, Put):
                self._put(effect)
            else:
                super().carry_out([effect])  # type: ignore[list-item]
        self._give_snapshots()

    def _put(self, put: Put) -> None:
        if put.record.is_assign:
            for grad in put.grads:
                self.values[put.record.table_id, grad.block] = [grad]
        else:
            for grad in put.grads:
                self.values[put.record.table_id, grad.block].append(grad)

    @property
    def promises_are_kept(self) -> bool:
        """Whether every backup knows what this server has promised."""
        return all(log.is_settled for log in self.replication.logs.values())

    # --- between servers

    def _send(self, peer: NodeId, message: object) -> None:
        self.world.counts["between servers"] += 1
        receiver = self.peers[peer]
        self.world.send(
            f"server {self.node_id} -> {peer}: {type(message).__name__}",
            lambda: receiver.hear(self.node_id, message),
        )

    def hear(self, sender: NodeId, message: object) -> None:
        """A message of another server."""
        if self.is_down or self.is_cut_off or self.peers[sender].is_cut_off:
            return
        now_s = self.world.now_s
        match message:
            case Batch():
                is_taken, ack = self.replication.take(message, lambda: self._fresh(message))
                if is_taken:
                    self._make(message)
                if ack is not None:
                    self._send(sender, ack)
            case Ack():
                self.replication.acked(sender, message, now_s)
                self._release()
            case Beat():
                self._send(sender, self.replication.beat(message, now_s))
            case Grant():
                self.replication.granted(sender, message, now_s)
                self._release()
            case (Snapshot() as snapshot, dict() as values):
                self._join(sender, snapshot, values)

    def _fresh(self, batch: Batch) -> PartCopy | None:
        for table in self._tables():
            if table.table_id == batch.table_id:
                blocks = table.blocks_by_range(self._range_count)[batch.range_id]
                return fresh_copy(table, blocks)
        return None

    def _make(self, batch: Batch) -> None:
        """The values follow the copy."""
        for change in batch.changes:
            match change:
                case Put():
                    self.reduced.pop(_key_of(change.record), None)
                    self.sums.pop(_key_of(change.record), None)
                    self._put(change)
                    if not change.record.is_assign:
                        taking_part = change.record.summed_by or change.record.contributors
                        workers = {p.incarnation for p in taking_part if not p.skip}
                        for block in change.record.blocks:
                            self.updates[change.record.table_id, block].append(workers)
                case Kept():
                    self.reduced[_key_of(change.record)] = change.record
                    self.sums[_key_of(change.record)] = list(change.grads)
                case Dropped():
                    self.reduced.pop(_key_of(change.record), None)
                    self.sums.pop(_key_of(change.record), None)

    def _give_snapshots(self) -> None:
        for peer, snapshot in self.replication.snapshots(self.world.now_s):
            values: dict[str, object] = {
                "values": self._of_range(snapshot.range_id, self.values),
                "updates": self._of_range(snapshot.range_id, self.updates),
                "reduced": {k: r for k, r in self.reduced.items() if k[1] == snapshot.range_id},
            }
            kept = values["reduced"]
            values["sums"] = {key: list(self.sums[key]) for key in kept}  # type: ignore[attr-defined]
            self.world.counts["snapshots"] += 1
            self._send(peer, (snapshot, values))

    def _of_range(self, range_id: RangeId, found: dict[tuple[TableId, int], list]) -> dict:  # type: ignore[type-arg]
        return {
            (table.table_id, block): list(found[table.table_id, block])
            for table in self._tables()
            for block in table.blocks_by_range(self._range_count).get(range_id, ())
        }

    def _join(self, sender: NodeId, snapshot: Snapshot, values: dict[str, dict]) -> None:  # type: ignore[type-arg]
        has = self.replication.replicas.get(snapshot.range_id)
        before = None if has is None else (has.tenure, has.number)
        copies = {t: c.twin() for t, c in snapshot.copies.items()}  # it may come twice
        ack = self.replication.join(snapshot._replace(copies=copies))
        if ack is None:
            return
        if before is None or before != (snapshot.tenure, ack.number):
            self._forget(snapshot.range_id)
            self.values.update({key: list(grads) for key, grads in values["values"].items()})
            self.updates.update({key: list(who) for key, who in values["updates"].items()})
            self.reduced.update(values["reduced"])
            self.sums.update({key: list(grads) for key, grads in values["sums"].items()})
            self.world.counts["joined ranges"] += 1
        self._send(sender, ack)

    def _tables(self) -> tuple:  # type: ignore[type-arg]
        return () if self._view is None else self._view.tables

    @property
    def _range_count(self) -> int:
        return 0 if self._view is None else len(self._view.ranges)


def _key_of(record: Record) -> tuple[TableId, RangeId, int]:
    return record.table_id, record.range_id, record.clock


def _place_of(effect: Effect) -> _Place:
    if isinstance(effect, Apply | Reduce | Drop | Assign):
        return effect.record.table_id, effect.record.range_id
    return effect.table_id, effect.range_id
