"""A server of a simulation whose ranges have backups: the real machines of replication."""

from __future__ import annotations

from ps_core.cluster_view import BackupWish, ClusterView
from ps_core.keys import NodeId, RangeId, TableId
from ps_server.changes import Assigned, Dropped, Kept, Put
from ps_server.events import Effect, EntryEvent, Fold, Record
from ps_server.output_commit import Deed, OutputCommit
from ps_server.part_copy import PartCopy, fresh_copy
from ps_server.range_log import Batch
from ps_server.replication import Ack, Beat, Grant, Replication, Snapshot
from ps_server.server_machine import Promise
from tests.sim.server import TICK_S, SimServer
from tests.sim.truth import Grad, Settings
from tests.sim.world import World

LEASE_S = 3.0


class ReplicatedServer(SimServer):
    """A server that is primary of some ranges and backs up others."""

    def __init__(
        self, world: World, node_id: NodeId, worker_count: int, settings: Settings
    ) -> None:
        self.is_down = False
        self.is_cut_off = False
        """From the scheduler and the other servers; workers still reach it."""
        self.peers: dict[NodeId, ReplicatedServer] = {}
        self.asked: list[BackupWish] = []
        self._view: ClusterView | None = None
        super().__init__(world, node_id, worker_count, settings)
        self.replication = Replication(node_id, self.machine, LEASE_S)
        self.output = OutputCommit(self.machine, self.replication, self, self._send)

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
        self._do(self.output.settle(self.world.now_s))

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
        self.output.forget(range_id)

    def _tick(self) -> None:
        if not self.is_down:
            now_s = self.world.now_s
            if self.replication.waits:
                self._serve()
            self.carry_out(self.machine.tick(now_s))
            for peer, beat in self.replication.beats(now_s).items():
                self._send(peer, beat)
            for peer, batch in list(self.replication.resends(self.peers)):
                self._send(peer, batch)
            self._give_snapshots()
            self.asked = self.replication.wishes(now_s)
        self.world.after(TICK_S, self._tick)

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        if not self.is_down:
            super().entry(event)

    def read(self, event: object, on_answer: object) -> None:
        """A read of one range arrived."""
        if not self.is_down:
            super().read(event, on_answer)  # type: ignore[arg-type]

    # --- what is decided

    def carry_out(self, effects: list[Effect]) -> None:
        """As `ps_server.node` does: what anybody could see when the backups have it."""
        self._do(self.output.decide(effects, self.world.now_s))
        self._give_snapshots()

    def _release(self) -> None:
        self._do(self.output.release(self.world.now_s, list(self.replication.logs)))
        self._give_snapshots()

    def _do(self, deeds: list[Deed]) -> None:
        for deed in deeds:
            if isinstance(deed, Put | Assigned):
                self._put(deed)
            elif not isinstance(deed, Kept | Dropped):
                super().carry_out([deed])

    def _put(self, change: Put | Assigned) -> None:
        table_id = change.record.table_id
        if isinstance(change, Assigned):
            for block, grad in change.parts:
                assert isinstance(grad, Grad)
                self.values[table_id, block] = [grad]
            return
        assert isinstance(change.total, tuple)
        for grad in change.total:
            self.values[table_id, grad.block].append(grad)

    # --- its sums

    def fold(self, effect: Fold) -> None:
        """See `Sums`, as all of these."""
        super().carry_out([effect])

    def reduce(self, record: Record) -> tuple[float, ...]:
        return self._squares(record)

    def kept(self, record: Record) -> object:
        return tuple(self.sums[_key_of(record)])

    def take(self, record: Record) -> object:
        key = _key_of(record)
        if key in self.reduced:
            del self.reduced[key]
            table = self.machine.table(record.table_id)
            self.settings.scaled(table, record.clock, record.update_scale)
            self.world.counts["scaled updates"] += 1
        self._count(record)
        return tuple(self.sums.pop(key, ()))

    def drop(self, record: Record) -> None:
        self._drop(record)

    def _count(self, record: Record) -> None:
        """It has been decided who took part in which update."""
        taking_part = record.summed_by or record.contributors
        workers = {part.incarnation for part in taking_part if not part.skip}
        for block in record.blocks:
            self.updates[record.table_id, block].append(workers)

    @property
    def promises(self) -> tuple[Promise, ...]:
        """Those that every backup has."""
        return self.output.promises

    @property
    def is_settled(self) -> bool:
        """Whether every backup has all that was decided."""
        return all(log.is_settled for log in self.replication.logs.values())

    # --- between servers

    def _send(self, peer: NodeId, message: object) -> None:
        self.world.counts["between servers"] += 1
        receiver = self.peers.get(peer)
        if receiver is None:  # not there yet
            return
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
                case Put(record, total):
                    kept = self._forget_sum(record)
                    self._put(Put(record, kept if total is None else total))
                    self._count(record)
                case Assigned():
                    self._put(change)
                case Kept(record, total):
                    assert isinstance(total, tuple)
                    self.reduced[_key_of(record)] = record
                    self.sums[_key_of(record)] = list(total)
                case Dropped(record):
                    self._forget_sum(record)

    def _forget_sum(self, record: Record) -> tuple[Grad, ...]:
        self.reduced.pop(_key_of(record), None)
        return tuple(self.sums.pop(_key_of(record), ()))

    def _give_snapshots(self) -> None:
        for peer, snapshot in self.output.snapshots(self.world.now_s):
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
            self._do(list(snapshot.held))
            self.world.counts["joined ranges"] += 1
        self._send(sender, ack)

    def _tables(self) -> tuple:  # type: ignore[type-arg]
        return () if self._view is None else self._view.tables

    @property
    def _range_count(self) -> int:
        return 0 if self._view is None else len(self._view.ranges)


def _key_of(record: Record) -> tuple[TableId, RangeId, int]:
    return record.table_id, record.range_id, record.clock
