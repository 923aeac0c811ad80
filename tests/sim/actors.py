"""The workers of a simulation: the real machines, with the network between them.

A gradient is an identity (who, when, which block, which revision), so that the state of a block is
the list of what is in it, and every loss, double or disorder shows.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Container, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ps_core.errors import Fenced, PushpullError, UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Outcome
from ps_core.tables.optimizers import Hyperparameters
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    AnswerPull,
    EntryEvent,
    Place,
    PullEvent,
    PushEvent,
    RefusePull,
    ReplyTo,
    ScaleEvent,
    SealEvent,
    Sender,
    WithdrawEvent,
)
from ps_server.ranges.events import SealTerms as ServerTerms
from ps_server.ranges.schedule import CutId
from ps_worker.spec.loop_places import LoopReports, TrainingLoop
from ps_worker.steps.held_values import HeldValue, HeldValues
from ps_worker.window.push_window import (
    EntryKey,
    PushWindow,
    Reply,
    SendPush,
    SendSeal,
    SendWithdrawal,
    StepEnded,
    StepRefused,
    StepTerms,
)
from tests.sim.arithmetic import Reading, numbers_of
from tests.sim.grads import Grad
from tests.sim.server import SimServer
from tests.sim.truth import Body, Settings, TableFailed, TrainingEnded, scale_of
from tests.sim.world import World

PULL_DEADLINE_S = 5.0
RESEND_S = 1.0
TICK_S = 0.25
EVERY_BLOCK = range(1 << 32)


Cluster = dict[NodeId, SimServer]


@dataclass
class Layout:
    """Who serves what: the same view for everyone of a run."""

    owner: dict[RangeId, NodeId]
    epoch: dict[RangeId, int]
    tables: list[Table]
    range_count: int
    settings: Settings
    run: str = ""

    def table(self, table_id: TableId) -> Table:
        """The table of that number."""
        (table,) = [table for table in self.tables if table.table_id == table_id]
        return table

    def ranges_of(self, table_id: TableId) -> list[RangeId]:
        """The ranges that hold blocks of the table."""
        return list(self.table(table_id).blocks_by_range(self.range_count))

    def place(self, table_id: TableId, range_id: RangeId) -> Place:
        """Where an entry goes."""
        return Place(table_id, range_id, self.epoch[range_id])  # type: ignore[arg-type]


class RangeAnswer(NamedTuple):
    """A range's answer: its clock; its blocks' values, updates by others, and numbers; the names of
    the values, and the blocks that are unchanged.
    """

    clock: int
    blocks: dict[int, list[Grad]]
    peer_versions: dict[int, int]
    readings: dict[int, Reading]
    names: dict[int, HeldValue]
    unchanged: set[int]


class ReadTerms(NamedTuple):
    """What a read asks for."""

    clock: int
    incarnation: Incarnation | None
    rank: int = 0
    consistent: bool = False
    cut_id: CutId | None = None
    blocks: Container[int] = EVERY_BLOCK
    """The reader takes over only these; ranges without any are not asked."""


class Reads:
    """A read of a whole table, asked again until every range has answered. It has the values of the
    last one, and says so.

    Oracle:
        HELD   What is said to be unchanged is what a read of everything would have brought (S22).
    """

    def __init__(self, world: World, cluster: Cluster, layout: Layout) -> None:
        self.world, self.cluster, self.layout = world, cluster, layout
        self.answers: dict[RangeId, RangeAnswer] = {}
        self.refusals: list[PushpullError] = []
        self.is_down = False
        self.end: Hashable = "reader"
        self._current = 0
        self._held: dict[TableId, HeldValues] = defaultdict(HeldValues)
        self._memory: dict[tuple[TableId, int], tuple[list[Grad], tuple[float, ...]]] = {}
        self._asked: set[RangeId] = set()
        self.taken: Container[int] = EVERY_BLOCK

    def begin(self, table: Table, terms: ReadTerms) -> None:
        """Ask every range; answers to an earlier question no longer count."""
        self._current += 1
        self.taken = terms.blocks
        self.answers, self.refusals = {}, []
        self._asked = {
            range_id
            for range_id, blocks in table.blocks_by_range(self.layout.range_count).items()
            if any(block in terms.blocks for block in blocks)
        }
        self._ask(self._current, table, terms)

    def is_done(self) -> bool:
        """Whether every range that was asked has answered, or one has refused."""
        return bool(self.refusals) or self.answers.keys() == self._asked

    def _ask(self, question: int, table: Table, terms: ReadTerms) -> None:
        if question != self._current or self.is_done():
            return
        for range_id in sorted(self._asked):
            if range_id not in self.answers and not self.is_down:
                self._ask_range(question, table, range_id, terms)
        self.world.after(RESEND_S, lambda: self._ask(question, table, terms))

    def _ask_range(self, question: int, table: Table, range_id: RangeId, terms: ReadTerms) -> None:
        server = self.cluster[self.layout.owner[range_id]]
        back = server.node_id, self.end
        asked = table.blocks_by_range(self.layout.range_count)[range_id]
        claims: dict[int, tuple[AssignmentEpoch, int, list[int | None]]] = {}

        def event(number: int) -> PullEvent:
            until_s = server.now_s + PULL_DEADLINE_S
            place = self.layout.place(table.table_id, range_id)
            epoch = place.assignment_epoch
            claims[number] = epoch, *self._held[table.table_id].claims(asked, epoch)
            return PullEvent(
                place,
                number,
                terms.incarnation,
                terms.clock,
                terms.consistent,
                until_s,
                terms.cut_id,
                terms.rank,
                self.layout.run,
            )

        def on_answer(effect: AnswerPull | RefusePull) -> None:
            if isinstance(effect, RefusePull):
                error = effect.error
                self.world.send("refusal", lambda: self._refused(question, error), back)
                return
            if terms.incarnation is not None:
                read_for = self.layout.settings.read_for
                read_for[table.table_id] = max(read_for[table.table_id], terms.clock + 1)
            part = server.machine.shards[table.table_id, range_id]
            read = {b: server.reading(effect, b) for b in part.state.blocks}
            blocks = {b: grads for b, (grads, _) in read.items()}
            peers = {b: effect.versions[b] - effect.own_updates.get(b, 0) for b in blocks}
            readings = {b: reading for b, (_, reading) in read.items()}
            epoch, edit_count, versions = claims[effect.waiter]
            held = {b: v for b, v in zip(asked, versions, strict=True) if v is not None}
            unchanged = {b for b, v in held.items() if effect.is_unchanged(b, v, edit_count)}
            name = partial(HeldValue, epoch, effect.edit_count or 0)
            names = {b: name(effect.versions[b], peers[b]) for b in blocks}
            found = RangeAnswer(effect.range_clock, blocks, peers, readings, names, unchanged)
            self.world.send(
                "answer", lambda: self._answered(question, table, range_id, found), back
            )

        link = self.end, server.node_id
        self.world.send("read", lambda: server.read(event, on_answer), link)

    def _answered(self, question: int, table: Table, range_id: RangeId, found: RangeAnswer) -> None:
        if question != self._current or self.is_down or range_id in self.answers:
            return
        self.answers[range_id] = found
        self.world.counts["unchanged"] += len(found.unchanged)
        for block, grads in found.blocks.items():
            key, value = (table.table_id, block), (grads, found.readings[block].numbers)
            if block in found.unchanged:
                assert self._memory[key] == value, f"S22: block {key} has changed: {value}"
            self._memory[key] = value
            self._held[table.table_id].take(block, found.names[block])

    def _refused(self, question: int, error: PushpullError) -> None:
        if question == self._current and not self.is_down:
            self.refusals.append(error)


Waits = Generator[Callable[[], bool], None, None]


def _nothing_between(worker: SimWorker, more: bool) -> Waits:
    del worker, more
    yield from ()


class SimWorker:
    """A push window, and a training loop that runs on it."""

    def __init__(
        self, world: World, cluster: Cluster, layout: Layout, rank: int, incarnation: Incarnation
    ) -> None:
        self.world, self.cluster, self.layout = world, cluster, layout
        self.rank, self.incarnation = rank, incarnation
        self.origin = int(incarnation)
        self.view_number = 0
        """Of the newest view that came; those of its first servers and ranges it had before."""
        self.is_late_joiner = False
        self.bad_share = 0.0 if layout.settings.groups.leaders else 0.02
        """Of its blocks that are not finite: groups skip such steps."""
        self.joined_after: Callable[[], dict[TableId, int]] = dict
        """After which clock it has joined each table, as far as the view says."""
        self.loop = TrainingLoop()
        self.loop_number = 0
        """How often all who train had gone through their loop before."""
        self.reports: Callable[[], LoopReports] = LoopReports
        """Of the other workers of its run, as the scheduler has them; none if it is away."""
        self.between: Callable[[SimWorker, bool], Waits] = _nothing_between
        """What its script does between two steps; whether one follows."""
        self.has_sent_whole: Callable[[SendPush], None] = lambda _: None
        """Called when a step of one message has left, with its seal."""
        self.says_goodbye: Callable[[], None] = lambda: None
        """Called when it leaves a table, by a step that it does not take."""
        self.window = PushWindow(world.window_blocks * 256, resend_after_s=RESEND_S)
        self.window.assign(layout.owner)
        self.reads = Reads(world, cluster, layout)
        self.reads.end = self.end = f"worker {incarnation}"
        self.ended: dict[tuple[TableId, int], StepEnded] = {}
        self.summed: dict[tuple[TableId, int], StepEnded] = {}  # they wait for their scale
        self.sent: dict[EntryKey, Grad] = {}
        self._leaving: dict[NodeId, list[EntryEvent]] = {}
        """Entries of one message, where several may be in one."""
        self.lost: set[tuple[TableId, Grad]] = set()  # rejected or discarded
        self.read_early = False  # what was read last is of the newest step
        self.dropped: set[TableId] = set()
        """Tables that it trains without, since they have failed."""
        self.extra_steps = 0
        """So many more than it was to train at first."""
        self.is_at_its_last = False
        """Whether it takes its last step, or has taken it."""
        self.peer_versions: dict[tuple[TableId, int], int] = {}
        self.connection: dict[NodeId, int] = {}
        self.clocks = dict.fromkeys([t.table_id for t in layout.tables], 0)
        self.finished = False
        self.failed = False
        """Whether it finished because of an error."""
        self.rates: dict[tuple[TableId, int], Hyperparameters] = {}
        """What it seals a clock with where its schedule is another than the others'."""
        self.moves = 0
        """How often it went on."""
        self.fence: PushpullError | None = None
        self._condition: Callable[[], bool] = lambda: False
        for server in cluster.values():
            self.meet(server)
        world.after(TICK_S, self._tick)
        world.after(self._until_reset(), self._reset)

    def meet(self, server: SimServer) -> None:
        """A server came."""
        self.connection[server.node_id] = 0
        self.window.connected(server.node_id)
        server.outbox[self.origin] = self._outbox(server.node_id)

    def start(self, program: Waits) -> None:
        """Run the training loop."""
        self._program = program
        self._condition = lambda: True
        self._resume()

    def stop(self) -> None:
        """It is killed, or paused: it does and hears nothing."""
        self.reads.is_down = True

    def wake(self) -> None:
        """It goes on as if nothing had been."""
        self.reads.is_down = False
        self._resume()

    def told_fenced(self, error: PushpullError) -> None:
        """It has been replaced or given up: as a client does, it ends."""
        if self.is_down:
            return
        self.world.say(f"worker {self.rank} FENCED: {error}")
        self.world.counts["fenced"] += 1
        self.fence = error
        self.stop()

    @property
    def is_down(self) -> bool:
        """Whether it does nothing."""
        return self.reads.is_down

    @contextlib.contextmanager
    def without_failed(self, table: Table) -> Iterator[None]:
        """If the table turns out to have failed in here, it goes on with the others."""
        try:
            yield
        except TableFailed:
            self.world.counts["tables dropped"] += 1
            self.dropped.add(table.table_id)
            tables = self.layout.tables
            self.layout.tables = [each for each in tables if each.table_id != table.table_id]

    def go_on(self) -> None:
        """The time has come for which it may wait."""
        self._resume()

    def _resume(self) -> None:
        reads = self.reads
        while not self.finished and not reads.is_down and self._condition():
            self.moves += 1
            try:
                self._condition = next(self._program)
            except StopIteration:
                self.finished = True
            except TrainingEnded as ended:
                self.world.counts[str(ended)] += 1
                self.finished = self.failed = True
        if not reads.is_down:
            self._poll()

    def pause(self) -> Callable[[], bool]:
        """A condition that holds a little later."""
        until_s = self.world.now_s + self.world.draw.random() * 0.3
        self.world.after(until_s - self.world.now_s, self._resume)
        return lambda: self.world.now_s >= until_s

    # --- the network

    def _until_reset(self) -> float:
        return self.world.draw.expovariate(1 / self.world.faults.reset_every_s)

    def _reset(self) -> None:
        server = self.world.draw.choice(sorted(self.cluster))
        self.world.counts["resets"] += 1
        self.world.say(f"RESET worker {self.rank} <-> server {server}")
        self.connection[server] += 1
        self.window.disconnected(server)
        self.window.connected(server)
        self._resume()
        if not self.finished:
            self.world.after(self._until_reset(), self._reset)

    def _tick(self) -> None:
        if not self.is_down:
            self.window.tick(self.world.now_s)
            self._resume()
        self.world.after(TICK_S, self._tick)

    def _outbox(self, server: NodeId) -> Callable[[ReplyTo], None]:
        def reply(effect: ReplyTo) -> None:
            message = Reply(
                effect.kind,
                effect.table_id,
                effect.range_id,
                effect.sequence,
                effect.ending,
                effect.error,
            )
            assert effect.error is None or effect.error.code != "INTERNAL", effect.error
            stream = self.connection[server]
            link = server, self.end
            self.world.send(f"{message.kind}", lambda: self._take(server, stream, message), link)

        return reply

    def _take(self, server: NodeId, stream: int, message: Reply) -> None:
        if stream != self.connection[server] or self.is_down:
            return  # came on a stream that is no more
        if isinstance(message.error, Fenced):
            self.told_fenced(message.error)
            return
        if self.world.narrates:
            self.world.say(f"worker {self.rank} <- {server}: {message}")
        self._note_loss(message)
        self._handle(self.window.reply(server, message, self.world.now_s))
        self._resume()

    def _note_loss(self, message: Reply) -> None:
        ending = message.ending
        if ending is None or ending.outcome not in (Outcome.REJECTED, Outcome.DISCARDED):
            return
        grad = self.sent.get(EntryKey(message.table_id, message.range_id, message.sequence))
        if grad is not None:  # else it is a seal
            self.lost.add((message.table_id, grad))
        elif ending.outcome is Outcome.DISCARDED:
            self.world.counts["discarded"] += 1

    def _poll(self) -> None:
        effects = self.window.poll(self.world.now_s)
        if effects:
            self._handle(effects)

    def _handle(self, effects: Sequence[object]) -> None:
        self._do(effects)
        leaving, self._leaving = self._leaving, {}
        for server, events in leaving.items():
            self.world.counts["entries that came with others"] += len(events) > 1
            self._send(server, events)

    def _do(self, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, StepEnded):
                self._step_ended(effect)
            elif isinstance(effect, StepRefused) and isinstance(effect.error, Fenced):
                self._check_ended(effect)
                self.told_fenced(effect.error)
                return
            elif isinstance(effect, StepRefused):
                is_failed = isinstance(effect.error, UpdateFailed)
                if not is_failed or effect.table_id not in self.layout.settings.unreadable:
                    self.step_refused(effect)
            elif isinstance(effect, SendPush):
                self._carry(effect.server, self._push_event(effect), self._inline(effect))
                if effect.inline_seal is not None:
                    self.has_sent_whole(effect)
            elif isinstance(effect, SendSeal):
                self._carry(effect.server, *self._seal_events(effect))
            elif isinstance(effect, SendWithdrawal):
                self.world.counts["withdrawals"] += 1
                place = self.layout.place(effect.key.table_id, effect.key.range_id)
                event = WithdrawEvent(place, self._sender, effect.key.sequence)
                self._carry(effect.server, event)

    def _check_ended(self, effect: StepRefused) -> None:
        """S6: a seal is withdrawn where its worker's membership has ended, and nowhere else."""
        machines = [server.machine for server in self.cluster.values()]
        is_ended = any(self.incarnation in machine._ended for machine in machines)
        assert is_ended, f"S6: worker {self.rank} is a member: {effect}"

    def step_refused(self, effect: StepRefused) -> None:
        """No step is, where all do as they should."""
        raise AssertionError(f"worker {self.rank}: {effect}")

    def _step_ended(self, effect: StepEnded) -> None:
        """As `ps_worker.training.clipping`: the scale follows as soon as every range told its
        part.
        """
        key = effect.table_id, effect.clock
        if effect.table_id in self.dropped:
            return
        summed = self.summed.pop(key, None)
        assert summed is None or not effect.problems, effect
        if summed is None:
            self._check_losses(effect)
        ranges = self.layout.ranges_of(effect.table_id)
        if summed is not None or not effect.applied or len(effect.squares) != len(ranges):
            self.ended[key] = summed or effect
            return
        self.summed[key] = effect
        squares = [square for _, told in effect.squares for square in told]
        self.window.seal(*key, ranges, StepTerms(update_scale=scale_of(squares)))

    def _check_losses(self, effect: StepEnded) -> None:
        """The worker learns which of a step's blocks no update has (RES-1 builds on it)."""
        mine = effect.table_id, effect.clock
        lost = {g.block for table_id, g in self.lost if (table_id, g.clock) == mine}
        assert lost == {*effect.rejected, *effect.discarded_blocks}, effect
        self.world.counts["blocks discarded"] += len(effect.discarded_blocks)

    def _carry(self, server: NodeId, *events: EntryEvent | None) -> None:
        found = [event for event in events if event is not None]
        if self.world.has_batches:
            self._leaving.setdefault(server, []).extend(found)
        else:
            self._send(server, found)

    def _send(self, server: NodeId, events: Sequence[EntryEvent]) -> None:
        def deliver() -> None:
            if self.world.narrates:
                for event in events:
                    self.world.say(f"worker {self.rank} -> {server}: {event}")
            if self.world.has_batches:
                self.cluster[server].entries(events)
                return
            for event in events:
                self.cluster[server].entry(event)

        narrates = self.world.narrates
        what = f"worker {self.rank} -> {server}: {events}" if narrates else "entries"
        self.world.send(what, deliver, (self.end, server))

    @property
    def _sender(self) -> Sender:
        return Sender(self.incarnation, self.rank, self.origin, self.layout.run)

    def _push_event(self, effect: SendPush) -> PushEvent:
        assert isinstance(effect.body, Body)
        self.sent[effect.key] = effect.body.grad
        return PushEvent(
            self.layout.place(effect.key.table_id, effect.key.range_id),
            self._sender,
            effect.key.sequence,
            effect.clock,
            effect.block,
            256,
            effect.body.grad,
            effect.body.problem,
            effect.body.is_assign,
            effect.replaces,
            effect.confirmed_sequence,
            effect.body.grad.pulled,
            eager=self._numbers(effect) if effect.body.is_eager else None,
        )

    def _numbers(self, effect: SendPush) -> Hyperparameters:
        """Of an eager push."""
        return numbers_of(self.layout.table(effect.key.table_id), effect.clock)

    def _inline(self, effect: SendPush) -> SealEvent | None:
        if effect.inline_seal is None:
            return None
        self.world.counts["inline seals"] += 1
        sequence, terms = effect.inline_seal
        place = self.layout.place(effect.key.table_id, effect.key.range_id)
        return SealEvent(
            place,
            self._sender,
            sequence,
            _terms(effect.clock, terms),
            skip_if_invalid=True,
        )

    def _seal_events(self, effect: SendSeal) -> Sequence[SealEvent | ScaleEvent]:
        scale = effect.terms.update_scale
        if scale is not None:
            return [
                ScaleEvent(
                    self.layout.place(effect.table_id, part.range_id),
                    self._sender,
                    part.sequence,
                    effect.clock,
                    scale,
                    part.confirmed_sequence,
                )
                for part in effect.ranges
            ]
        return [
            SealEvent(
                self.layout.place(effect.table_id, part.range_id),
                self._sender,
                part.sequence,
                _terms(effect.clock, effect.terms),
                part.confirmed_sequence,
            )
            for part in effect.ranges
        ]


def _terms(clock: int, terms: StepTerms) -> ServerTerms:
    return ServerTerms(
        clock,
        terms.hyperparameters,
        terms.contribution_scale,
        terms.skip,
        terms.last,
        terms.clip_scale,
        terms.edit,
        terms.array,
    )
