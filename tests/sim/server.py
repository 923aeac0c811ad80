"""A server of a simulation: the real machine, with lists for tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView, Node, NodeState
from ps_core.consistency import Mode, StalePolicy
from ps_core.errors import Recovering
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Outcome, ReplyKind
from ps_core.sliced_work import Work
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    Accumulate,
    AnswerPull,
    Apply,
    AssignValues,
    Drop,
    Effect,
    EntryEvent,
    Forget,
    PullEvent,
    PushEvent,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
    SealEvent,
)
from ps_server.ranges.schedule import CutId
from ps_server.ranges.server_machine import PreparedChange, ServerMachine
from ps_server.replication.output_commit import CommittedEffect
from ps_server.values.mutations import Assigned, Dropped, KeptSum, Put
from tests.sim.arithmetic import Numbers, Reading
from tests.sim.edits import item_of
from tests.sim.grads import Arrived, Grad
from tests.sim.truth import Settings, square
from tests.sim.works import SimWorks
from tests.sim.world import World

TICK_S = 0.25


class SimServer:
    """A server machine and the values that its effects make."""

    is_dead = False

    def __init__(
        self, world: World, node_id: NodeId, worker_count: int, settings: Settings
    ) -> None:
        self.world = world
        self.settings = settings
        self.node_id = node_id
        self.machine = ServerMachine(node_id, worker_count)
        self.values: dict[tuple[TableId, int], list[Grad]] = defaultdict(list)
        self.numbers = Numbers(f"{world.seed} {node_id}")
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
        self.works = SimWorks(world, self.in_turn, self.work_failed)
        self._tick_waits = False
        self._unread: tuple[object, ...] = ()
        """The last push that was not read."""
        self._beside: list[EntryEvent] | None = None
        """Entries of the message that comes now, if several may be in one."""
        world.after(TICK_S, self._tick)

    @property
    def now_s(self) -> float:
        """On its own clock."""
        return self.world.now_s

    def start(self, view: ClusterView) -> None:
        """The first view."""
        self.machine.observe(view)

    def in_turn(self, action: Callable[[], None]) -> None:
        """Its loop gets to it."""
        action()

    def work_failed(self, failure: Exception) -> None:
        """One that nobody waits for any more."""
        raise failure

    def observe(self, view: ClusterView) -> None:
        """As `ParameterNode`: between two works."""
        self.works.between(lambda: self._observe(view))

    def _observe(self, view: ClusterView) -> None:
        if view.view_number > self.machine.view_number:
            self._begin_to_observe(view)

    def _begin_to_observe(self, view: ClusterView) -> None:
        """As the server's process: who else wants the view has it next."""
        self.works.begin(self._observing(view))
        self.works.between(lambda: self.on_view(view))

    def _observing(self, view: ClusterView) -> Work[None]:
        self.machine.observe(view)
        yield from self._going_on_without(view)

    @property
    def prepared_changes(self) -> tuple[PreparedChange, ...]:
        """What it tells the scheduler, between two works."""
        return () if self.works.is_busy else self.machine.prepared_changes

    def _going_on_without(self, view: ClusterView) -> Work[None]:
        for node in view.nodes:
            if node.state is NodeState.GONE:
                self.fenced.setdefault(node.rank, self._landed(node))
        ended = yield from self.machine.ending(view.ended_workers, self.now_s)
        yield from self._carrying_out(ended)
        effects = yield from self.machine.observing_changes(self.now_s)
        self._note_taken()
        yield from self._carrying_out(effects)

    def _note_taken(self) -> None:
        """What a table's first range has taken is in force, whatever the scheduler knows of it."""
        in_force = self.settings.numbers
        for (table_id, _), part in self.machine.shards.items():
            schedule = part.state.schedule
            if schedule.number <= in_force[table_id]:  # nearly always
                continue
            number, after_clock = schedule.taken
            if number == schedule.number and self._is_told(table_id, number):
                change = TableChange(number, after_clock, schedule.at(after_clock + 1))
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
        for (table_id, _), part in self.machine.shards.items():
            worker = part.state.workers.get(node.incarnation)
            if worker is None:
                continue
            for step in worker.steps.values():
                if step.edit:  # all say the same: whose values they are, nobody can tell
                    continue
                is_cut_off = step.clock > worker.sealed_clock
                self.world.counts["steps cut off"] += is_cut_off
                for push in step.pushes.values():
                    if isinstance(push.payload, Grad) and not is_cut_off:
                        self.world.counts["sealed and held"] += 1
                        found.add((table_id, push.payload))
        return found

    def _tick(self) -> None:
        if not self._tick_waits:
            self._tick_waits = True
            self.works.begin(self._ticking())
        self.world.after(TICK_S, self._tick)

    def _ticking(self) -> Work[None]:
        self._tick_waits = False
        yield from self._carrying_out(self.machine.tick(self.now_s))

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived, and is read; it is taken in its turn."""
        read = self._decoded(event)
        if self._beside is None:
            self.works.begin(self._taking(read))
        else:
            self._beside.append(read)

    def entries(self, events: Iterable[EntryEvent]) -> None:
        """Those of one message: all are decided before anything is done, as in `ParameterNode`."""
        beside = self._beside = []
        for event in events:
            self.entry(event)
        self._beside = None
        self.world.counts["several decided at once"] += len(beside) > 1
        if beside:
            self.works.begin(self._taking(*beside))

    def _decoded(self, event: EntryEvent) -> EntryEvent:
        """As `intake`: what is not here is not read, nor is the seal that comes with it."""
        place, sender = event.place, event.sender
        key = place.table_id, place.range_id
        if isinstance(event, PushEvent) and isinstance(event.payload, Grad):
            if key in self.machine.shards:
                payload = self.held(key).arrived(self.table(key[0]), key[1], event.payload)
                return event._replace(payload=payload)
            self._unread = key, sender, event.sequence
        is_carried = isinstance(event, SealEvent) and event.skip_if_invalid
        number = event.sequence - 1 if is_carried else event.sequence
        if isinstance(event, PushEvent | SealEvent) and self._unread == (key, sender, number):
            self.world.counts["not read in time"] += 1
            return event._replace(problem=Recovering("", retry_after_ms=100))
        return event

    def _taking(self, *events: EntryEvent) -> Work[None]:
        effects: list[Effect] = []
        for event in events:
            if isinstance(event, SealEvent) and event.skip_if_invalid:
                self._count_recalled(event)
            effects += self.machine.entry(event, self.now_s)
        yield
        yield from self._carrying_out(effects)

    def _count_recalled(self, seal: SealEvent) -> None:
        """Seals whose push has ended at a primary before this one."""
        part = self.machine.shards.get((seal.place.table_id, seal.place.range_id))
        worker = None if part is None else part.state.workers.get(seal.sender.incarnation)
        if worker is None or worker.ledger.has_ended(seal.sequence):
            return
        carrier, step = seal.sequence - 1, worker.steps.get(seal.terms.clock)
        is_known = step is not None and carrier in step.invalid
        is_invalid = worker.ledger.outcome(carrier) is Outcome.INVALID
        self.world.counts["seals of what was invalid elsewhere"] += is_invalid and not is_known

    # --- effects, as `ps_server.service.node` carries them out, with lists for tensors

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what the machine wants done."""
        self.works.begin(self._carrying_out(effects))

    def _carrying_out(self, effects: Sequence[Effect]) -> Work[None]:
        yield from self._doing(effects)

    def _doing(self, committed: Sequence[CommittedEffect]) -> Work[None]:
        replies: list[ReplyTo] = []
        reduced: list[tuple[Record, tuple[float, ...]]] = []
        for effect in committed:
            match effect:
                case ReplyTo():
                    replies.append(effect)
                case Accumulate():
                    self._fold(effect)
                    yield
                case Apply():
                    yield from self._applying(effect.record)
                case Put():
                    yield from self._putting(effect)
                case Reduce():
                    reduced.append((effect.record, (yield from self._reducing(effect.record))))
                case AssignValues() | Assigned():
                    yield from self._assigning(effect.record, effect.parts)
                case Drop():
                    self._drop(effect.record)
                case Forget():
                    self.world.counts["forgotten"] += 1
                    self._forget_given(effect)
                case AnswerPull() | RefusePull():
                    self._answer_read(effect)
                case KeptSum() | Dropped():
                    pass
        for reply in replies:
            self._reply(reply)
        yield
        for record, squares in reduced:
            yield from self._carrying_out(self.machine.reduced(record, squares))

    def _reply(self, reply: ReplyTo) -> None:
        self.world.counts[reply.kind.value] += 1
        self.outbox[reply.sender.origin](reply)
        self._check_rejected(reply)
        if reply.kind is ReplyKind.GIVEN_BACK and reply.sender.rank in self.fenced:
            self.given_back.add(reply.sender.rank)

    def _answer_read(self, effect: AnswerPull | RefusePull) -> None:
        on_answer = self.reads.pop(effect.waiter, None)
        self.machine.answered(effect.waiter)
        if on_answer is not None:
            on_answer(effect)

    def _fold(self, effect: Accumulate) -> None:
        key = (effect.table_id, effect.range_id, effect.clock)
        for _, payload in effect.parts:
            assert isinstance(payload, Grad)
            self.sums[key].append(payload)
            self._check_staleness(effect, payload)
            self._note_delay(effect, payload)
        self.held(key[:2]).accumulate(effect)

    def _applying(self, record: Record) -> Work[None]:
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
        assert (yield from self.held(key[:2]).shards.applying(record)) is None
        yield from self._landing(record, self.sums.pop(key, []))

    def _landing(self, record: Record, grads: Iterable[Grad]) -> Work[None]:
        for grad in grads:
            self.values[record.table_id, grad.block].append(grad)
            yield

    def _putting(self, change: Put) -> Work[None]:
        """What others had to have first."""
        raise NotImplementedError

    def _assigning(self, record: Record, parts: Sequence[tuple[int, object]]) -> Work[None]:
        """Initial values, or an edit's."""
        key = record.table_id, record.range_id
        for block, grad in parts:
            assert isinstance(grad, Grad)
            if record.clock:
                self.values[record.table_id, block].append(item_of(grad))
            else:
                self.values[record.table_id, block] = [grad]
            yield
        self.held(key).make(self.table(record.table_id), Assigned(record, tuple(parts)))

    def table(self, table_id: TableId) -> Table:
        """One that it has heard of."""
        return self.machine.table(table_id)

    def held(self, key: tuple[TableId, RangeId]) -> Numbers:
        """The numbers, with room for that part."""
        if key not in self.numbers.shards.stores:
            self.numbers.hold(self.table(key[0]), key[1], self.machine.shards[key].state.blocks)
        return self.numbers

    def _note_delay(self, effect: Accumulate, grad: Grad) -> None:
        """What it is corrected for, if so."""
        if effect.compensation is not None:
            given = self.given.get((effect.table_id, grad.block, effect.compensation.reader))
            if given is not None:
                assert isinstance(grad, Arrived)
                grad.delay = given, len(self.values[effect.table_id, grad.block])
                self.world.counts["corrected"] += grad.delay[0] != grad.delay[1]

    def _forget_given(self, effect: Forget) -> None:
        key = effect.table_id, effect.range_id
        for block in self.machine.shards[key].state.blocks if key in self.machine.shards else ():
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
        updates = tuple(self.updates[at])
        return grads, Reading(clock, numbers, updates, effect.versions[block])

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
        state = self.machine.shards[record.table_id, record.range_id].state
        members = [rank for rank in state.ranks if state.is_member(rank, record.clock)]
        took_part = record.summed_by or record.contributors
        assert len(took_part) >= len(members) - setting.backup_workers, f"S7: {took_part}"

    def _reducing(self, record: Record) -> Work[tuple[float, ...]]:
        key = (record.table_id, record.range_id, record.clock)
        others = [other for other in self.reduced if other[:2] == key[:2]]
        assert not others, f"S4: sums that have their scale stay: {others}"
        self.reduced[key] = record
        yield from self.held(key[:2]).shards.reducing(record)
        found = dict.fromkeys(self.machine.shards[key[:2]].state.blocks, 0.0)
        for grad in self.sums[key]:
            found[grad.block] += square(grad)
        return tuple(found[block] for block in sorted(found))

    def _drop(self, record: Record) -> None:
        """Nobody pushed to it, or only those who are gone did, or the workers disagree."""
        key = (record.table_id, record.range_id, record.clock)
        self.held(key[:2]).shards.drop(record)
        if key not in self.reduced:
            self.world.counts["sums that were disputed"] += 1
            self.sums.pop(key)
            return
        del self.reduced[key]
        if record.summed_by:
            grads = self.sums.pop(key, ())
            assert not grads, f"S4: a sum was dropped that has its scale: {grads}"
            self.world.counts["sums of nothing"] += 1
            return
        for grad in self.sums.pop(key, []):
            self.fenced.get(grad.rank, set()).discard((record.table_id, grad))
        self.world.counts["dropped updates"] += 1

    def _takes_unseen(self, place: tuple[TableId, RangeId], clock: int) -> bool:
        """Whether the clock is under a change that the range took and its backups do not know: what
        is decided under it is seen by nobody before they do.
        """
        schedule = self.machine.shards[place].state.schedule
        number, after_clock = schedule.taken
        return clock > after_clock and number > self.settings.number_of(place[0])

    def _check_staleness(self, effect: Accumulate, grad: Grad) -> None:
        """What is applied is not too stale, and is scaled as its staleness says (S1)."""
        if self._takes_unseen((effect.table_id, effect.range_id), effect.clock):
            return
        table = self.machine.table(effect.table_id)
        consistency = self.settings.at(table, effect.clock)
        updates = self.updates[effect.table_id, grad.block]
        others = sum(1 for workers in updates if grad.incarnation not in workers)
        tau = 0 if grad.pulled is None else max(0, others - grad.pulled)
        scale = self.settings.contribution_scale(table, grad.incarnation, effect.clock)
        scale *= self.settings.clip_scale(table, effect.clock)
        match consistency.policy:
            case StalePolicy.REJECT:
                assert tau <= consistency.bound, f"{grad} is {tau} stale under {consistency}"
            case StalePolicy.DAMP:
                scale *= 1 / (1 + consistency.alpha * tau)
            case StalePolicy.DIVIDE:
                scale *= 1 / tau if tau else 1.0
        assert effect.scale == scale, (effect.scale, tau, consistency)
        self.world.counts["scaled"] += effect.scale != 1.0

    def _check_rejected(self, reply: ReplyTo) -> None:
        ending = reply.ending
        if ending is not None and ending.outcome is Outcome.REJECTED:
            self.world.counts["rejected"] += 1
            bounds = self.settings.bounds(self.machine.table(reply.table_id))
            assert ending.staleness > min(bounds), (ending, bounds)

    def begin_cut(self, table_id: TableId, cut_id: CutId, lasts_s: float) -> int:
        """A reader is about to ask for one state of a table."""
        self.works.finish()
        return self.machine.begin_cut(table_id, cut_id, self.now_s + lasts_s)

    def read(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of one range arrived: it begins between two works."""
        self.works.between(lambda: self.capture(event, on_answer))

    def capture(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """Begin a read."""
        self.works.begin(self.capturing(event, on_answer))

    def capturing(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> Work[None]:
        """As `capture`, in a work; its own reads are, for a checkpoint."""
        number = next(self.waiters)
        self.reads[number] = on_answer
        yield from self._carrying_out(self.machine.pull(event(number), self.now_s))
        self.world.counts["parked waits"] += self.machine.wait_cause(number) is not None
