"""A server of a simulation: the real machine, with lists for tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

from ps_core.change import Change
from ps_core.cluster_view import ClusterView, Node, NodeState
from ps_core.consistency import Mode, StalePolicy
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables import OptimizerKind, Table
from ps_core.work import at_once
from ps_server.changes import Assigned
from ps_server.events import (
    AnswerPull,
    Apply,
    Assign,
    Drop,
    Effect,
    EntryEvent,
    Fold,
    Forget,
    PullEvent,
    PushEvent,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
)
from ps_server.schedule import CutId
from ps_server.server_machine import Promise, ServerMachine
from tests.sim.arithmetic import Numbers, Reading
from tests.sim.grads import Arrived, Grad
from tests.sim.truth import Settings, square
from tests.sim.world import World

TICK_S = 0.25


class SimServer:
    """A server machine and the values that its effects make."""

    def __init__(
        self, world: World, node_id: NodeId, worker_count: int, settings: Settings
    ) -> None:
        self.world = world
        self.settings = settings
        self.node_id = node_id
        self.machine = ServerMachine(node_id, worker_count)
        self.values: dict[tuple[TableId, int], list[Grad]] = defaultdict(list)
        self.numbers = Numbers()
        self.sums: dict[tuple[TableId, RangeId, int], list[Grad]] = defaultdict(list)
        self.updates: dict[tuple[TableId, int], list[set[Incarnation]]] = defaultdict(
            list
        )  # by whom
        self.given: dict[tuple[TableId, int, Incarnation], int] = {}
        """How many gradients were in a block that a reader was given last."""
        self.reduced: dict[tuple[TableId, RangeId, int], Record] = {}  # it waits for its scale
        self.outbox: dict[int, Callable[[ReplyTo], None]] = {}
        self.reads: dict[int, Callable[[AnswerPull | RefusePull], None]] = {}
        self.waiters = itertools.count(1)
        self.fenced: dict[int, set[tuple[TableId, Grad]]] = {}  # by rank, what had landed before
        self.given_back: set[int] = set()  # ranks that had to give room after their fence
        self.heard_s = 0.0
        """When it heard the scheduler last."""
        self.came_late = False
        """Whether it came while others trained."""
        self.on_view: Callable[[ClusterView], None] = lambda _: None
        world.after(TICK_S, self._tick)

    @property
    def now_s(self) -> float:
        """On its own clock."""
        return self.world.now_s

    def start(self, view: ClusterView) -> None:
        """The first view."""
        self.machine.observe(view)

    def observe(self, view: ClusterView) -> None:
        """As `ps_server.node` does."""
        if view.view_number > self.machine.view_number:
            self.machine.observe(view)
            self._go_on_without(view)

    @property
    def promises(self) -> tuple[Promise, ...]:
        """What it tells the scheduler."""
        return self.machine.promises

    def _go_on_without(self, view: ClusterView) -> None:
        gone = [node for node in view.nodes if node.state is NodeState.GONE]
        for node in gone:
            self.fenced.setdefault(node.rank, self._landed(node))
        self.carry_out(self.machine.ended(view.ended_workers, self.now_s))
        effects = self.machine.settle(self.now_s)
        self._note_taken()
        self.carry_out(effects)
        self.on_view(view)

    def _note_taken(self) -> None:
        """What a table's first range has taken is in force, whatever the scheduler knows of it."""
        for (table_id, _), part in self.machine.parts.items():
            schedule = part.state.schedule
            number, after_clock = schedule.taken
            if number and number == schedule.number and self._is_told(table_id, number):
                change = Change(number, after_clock, schedule.at(after_clock + 1))
                self.settings.change(table_id, change)

    def _is_told(self, table_id: TableId, number: int) -> bool:
        """Whether what was decided holds, whoever dies."""
        del table_id, number
        return True

    def _landed(self, node: Node) -> set[tuple[TableId, Grad]]:
        """What counts of a worker that is gone: what is applied or summed, and what it sealed."""
        found = {
            (table_id, grad)
            for (table_id, _), grads in self.values.items()
            for grad in grads
            if grad.incarnation == node.incarnation
        }
        for (table_id, _, _), grads in self.sums.items():
            found |= {(table_id, grad) for grad in grads if grad.incarnation == node.incarnation}
        for (table_id, _), part in self.machine.parts.items():
            worker = part.state.workers.get(node.incarnation)
            if worker is None:
                continue
            for step in worker.steps.values():
                is_cut_off = step.clock > worker.sealed_clock
                self.world.counts["steps cut off"] += is_cut_off
                for push in step.pushes.values():
                    if isinstance(push.payload, Grad) and not is_cut_off:
                        self.world.counts["sealed and held"] += 1
                        found.add((table_id, push.payload))
        return found

    def _tick(self) -> None:
        self.carry_out(self.machine.tick(self.now_s))
        self.world.after(TICK_S, self._tick)

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        if isinstance(event, PushEvent) and isinstance(event.payload, Grad):
            key = event.place.table_id, event.place.range_id
            if key in self.machine.parts:  # else the machine answers it
                payload = self.held(key).arrived(self.table(key[0]), key[1], event.payload)
                event = event._replace(payload=payload)
        self.carry_out(self.machine.entry(event, self.now_s))

    def carry_out(self, effects: list[Effect]) -> None:
        """As `ps_server.node` does, with lists for tensors."""
        reduced: list[tuple[Record, tuple[float, ...]]] = []
        for effect in effects:
            if isinstance(effect, ReplyTo):
                self.world.counts[effect.kind.value] += 1
                self.outbox[effect.sender.origin](effect)
                self._check_rejected(effect)
                if effect.kind is ReplyKind.GIVEN_BACK and effect.sender.rank in self.fenced:
                    self.given_back.add(effect.sender.rank)
            elif isinstance(effect, Fold):
                key = (effect.table_id, effect.range_id, effect.clock)
                for _, payload in effect.parts:
                    assert isinstance(payload, Grad)
                    self.sums[key].append(payload)
                    self._check_staleness(effect, payload)
                    self._note_delay(effect, payload)
                self.held(key[:2]).fold(effect)
            elif isinstance(effect, Reduce):
                reduced.append((effect.record, self._squares(effect.record)))
            elif isinstance(effect, Drop):
                self._drop(effect.record)
            elif isinstance(effect, Apply):
                record = effect.record
                key = (record.table_id, record.range_id, record.clock)
                if key in self.reduced:
                    contributors = self.reduced.pop(key).contributors
                    table = self.machine.table(record.table_id)
                    self.settings.scaled(table, record.clock, record.update_scale)
                    self.world.counts["scaled updates"] += 1
                else:
                    assert record.update_scale == 1.0
                    contributors = record.contributors
                self._check_enough(record)
                workers = {part.incarnation for part in contributors if not part.skip}
                for block in record.blocks:
                    self.updates[record.table_id, block].append(workers)
                assert self.held(key[:2]).shards.apply(record) is None
                for grad in self.sums.pop(key, []):
                    self.values[record.table_id, grad.block].append(grad)
            elif isinstance(effect, Assign):
                self.assigned(effect.record, effect.parts)
            elif isinstance(effect, Forget):
                self.world.counts["forgotten"] += 1
                self._forget_given(effect)
            else:
                on_answer = self.reads.pop(effect.waiter, None)
                self.machine.answered(effect.waiter)
                if on_answer is not None:
                    on_answer(effect)
        for record, squares in reduced:
            self.carry_out(self.machine.reduced(record, squares))

    def assigned(self, record: Record, parts: Sequence[tuple[int, object]]) -> None:
        """Initial values."""
        key = record.table_id, record.range_id
        for block, grad in parts:
            assert isinstance(grad, Grad)
            self.values[record.table_id, block] = [grad]
        self.held(key).make(self.table(record.table_id), Assigned(record, tuple(parts)))

    def table(self, table_id: TableId) -> Table:
        """One that it has heard of."""
        return self.machine.table(table_id)

    def held(self, key: tuple[TableId, RangeId]) -> Numbers:
        """The numbers, with room for that part."""
        if key not in self.numbers.shards.stores:
            self.numbers.hold(self.table(key[0]), key[1], self.machine.parts[key].state.blocks)
        return self.numbers

    def _note_delay(self, fold: Fold, grad: Grad) -> None:
        """What it is corrected for, if so."""
        if fold.compensation is not None:
            given = self.given.get((fold.table_id, grad.block, fold.compensation.reader))
            if given is not None:
                assert isinstance(grad, Arrived)
                grad.delay = given, len(self.values[fold.table_id, grad.block])
                self.world.counts["corrected"] += grad.delay[0] != grad.delay[1]

    def _forget_given(self, effect: Forget) -> None:
        key = effect.table_id, effect.range_id
        for block in self.machine.parts[key].state.blocks if key in self.machine.parts else ():
            self.given.pop((effect.table_id, block, effect.reader), None)
        if key in self.numbers.shards.stores:
            self.numbers.forget_given(effect)

    def reading(self, effect: AnswerPull, block: int) -> tuple[list[Grad], Reading]:
        """A block, as it is read: of a table of sums what is of the clock that is asked for."""
        table, at = self.table(effect.table_id), (effect.table_id, block)
        if effect.keeps_for is not None:
            key = effect.table_id, effect.range_id
            self.held(key).give(key, effect.keeps_for, block)
            self.given[effect.table_id, block, effect.keeps_for] = len(self.values[at])
        grads, clock = list(self.values[at]), effect.clock
        if table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            grads = [grad for grad in grads if grad.clock <= clock]
        read = self.held((effect.table_id, effect.range_id)).read
        numbers = read(table, effect.range_id, block, clock)
        return grads, Reading(clock, numbers, tuple(self.updates[at]))

    def newest(self, key: tuple[TableId, RangeId], block: int) -> Reading:
        """A block, as it is now."""
        numbers = self.held(key).read(self.table(key[0]), key[1], block, None)
        return Reading(0, numbers, tuple(self.updates[key[0], block]))

    def _check_enough(self, record: Record) -> None:
        """No more are left behind than may be (S7), and none is counted that skipped (S1)."""
        table = self.machine.table(record.table_id)
        setting = self.settings.at(table, record.clock)
        for part in record.summed_by or record.contributors:
            step = record.table_id, record.clock, part.incarnation
            assert part.skip or step not in self.settings.skipped, f"S1: {part} in {record}"
        place = record.table_id, record.range_id
        if setting.mode is not Mode.BSP or self._takes_unseen(place, record.clock):
            return
        state = self.machine.parts[record.table_id, record.range_id].state
        members = [rank for rank in state.ranks if state.is_member(rank, record.clock)]
        took_part = record.summed_by or record.contributors
        assert len(took_part) >= len(members) - setting.backup_workers, f"S7: {took_part}"

    def _squares(self, record: Record) -> tuple[float, ...]:
        key = (record.table_id, record.range_id, record.clock)
        self.reduced[key] = record
        at_once(self.held(key[:2]).shards.reducing(record))
        found = dict.fromkeys(self.machine.parts[key[:2]].state.blocks, 0.0)
        for grad in self.sums[key]:
            found[grad.block] += square(grad)
        return tuple(found[block] for block in sorted(found))

    def _drop(self, record: Record) -> None:
        """Only those who are gone had a part in it."""
        key = (record.table_id, record.range_id, record.clock)
        del self.reduced[key]
        self.held(key[:2]).shards.drop(record)
        for grad in self.sums.pop(key, []):
            self.fenced[grad.rank].discard((record.table_id, grad))
        self.world.counts["dropped updates"] += 1

    def _takes_unseen(self, place: tuple[TableId, RangeId], clock: int) -> bool:
        """Whether the clock is under a change that the range took and its backups do not know: what
        is decided under it is seen by nobody before they do.
        """
        schedule = self.machine.parts[place].state.schedule
        number, after_clock = schedule.taken
        return clock > after_clock and number > self.settings.number_of(place[0])

    def _check_staleness(self, fold: Fold, grad: Grad) -> None:
        """What is applied is not too stale, and is scaled as its staleness says (S1)."""
        if self._takes_unseen((fold.table_id, fold.range_id), fold.clock):
            return
        table = self.machine.table(fold.table_id)
        consistency = self.settings.at(table, fold.clock)
        updates = self.updates[fold.table_id, grad.block]
        others = sum(1 for workers in updates if grad.incarnation not in workers)
        tau = 0 if grad.pulled is None else max(0, others - grad.pulled)
        scale = self.settings.contribution_scale(table, grad.incarnation, fold.clock)
        scale *= self.settings.clip_scale(table, fold.clock)
        match consistency.policy:
            case StalePolicy.REJECT:
                assert tau <= consistency.bound, f"{grad} is {tau} stale under {consistency}"
            case StalePolicy.DAMP:
                scale *= 1 / (1 + consistency.alpha * tau)
            case StalePolicy.DIVIDE:
                scale *= 1 / tau if tau else 1.0
        assert fold.scale == scale, (fold.scale, tau, consistency)
        self.world.counts["scaled"] += fold.scale != 1.0

    def _check_rejected(self, reply: ReplyTo) -> None:
        ending = reply.ending
        if ending is not None and ending.outcome is Outcome.REJECTED:
            self.world.counts["rejected"] += 1
            bounds = self.settings.bounds(self.machine.table(reply.table_id))
            assert ending.staleness > min(bounds), (ending, bounds)

    def begin_cut(self, table_id: TableId, cut_id: CutId, lasts_s: float) -> int:
        """A reader is about to ask for one state of a table."""
        return self.machine.begin_cut(table_id, cut_id, self.now_s + lasts_s)

    def read(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of one range arrived."""
        number = next(self.waiters)
        self.reads[number] = on_answer
        self.carry_out(self.machine.pull(event(number), self.now_s))
        self.world.counts["parked waits"] += self.machine.wait_cause(number) is not None

    def capture(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of its own, for a checkpoint."""
        self.read(event, on_answer)
