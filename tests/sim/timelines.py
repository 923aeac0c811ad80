"""Timelines of a simulated cluster: what a checkpoint has, where servers are, and who calls them.

A server that has been restored over lives on, as do its peers and workers, until it hears that its
timeline has ended: it then registers again, with nothing, under the address that it had. What those
who have not heard of that send there comes to its successor, which checks them all as it should.

Oracles:
    S10   Whoever is of another timeline is told Fenced, by whatever server is there now; a server
          that goes on serves all members of its own.
    KEPT  What a checkpoint has is in its blocks once, in its order, whatever comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ps_core.change import TableCut
from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.errors import Fenced, ForeignCluster, NotOwner, PushpullError
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.manifest import SavedDataSet
from ps_core.sliced_work import Work
from ps_runtime.cluster import wire
from ps_server.checkpoint.restored_ranges import Key, RestoredRanges
from ps_server.ranges.events import AnswerPull, EntryEvent, PullEvent, RefusePull
from ps_server.ranges.range_machine import RangeMachine
from ps_server.ranges.schedule import CutId
from ps_server.replication.messages import Ack, Grant
from ps_server.service.node import Sessions
from scheduler.machine.checkpoint_state import CheckpointMade, CheckpointWritten
from scheduler.machine.state import Restored, RestoredTable, Transition
from tests.sim.arithmetic import BlockState
from tests.sim.checkpointing import Captured, Checkpointer
from tests.sim.grads import Grad
from tests.sim.peer_streams import Stream, Welcome
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.server import SimServer
from tests.sim.truth import Settings
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.test_restores import RestoreSimulation

READ_S = (0.01, 0.5, 4.0)
"""How long a range takes to be read from a checkpoint, at most."""


class SavedBlock(NamedTuple):
    """A block, as a checkpoint has it."""

    grads: tuple[Grad, ...]
    updates: tuple[frozenset[Incarnation], ...]
    state: BlockState
    version: int
    steps: tuple[int, ...]
    tensors: tuple[tuple[str, bytes], ...]

    def restored(self) -> SavedBlock:
        """The same for those who begin with it: steps of another timeline are initial values."""
        grads = tuple(
            Grad(0, 0, grad.block, index, None, Incarnation(0))
            for index, grad in enumerate(self.grads)
        )
        values = list(self.state.values)
        state = replace(
            self.state, done=list(grads), updates=list(self.updates), past={len(grads): values}
        )
        return self._replace(grads=grads, state=state)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete: blocks by the name of their table."""

    number: int
    restored: Restored
    blocks: Mapping[tuple[str, int], SavedBlock]


class Saver(Checkpointer):
    """Checkpoints that have what they captured."""

    share = 1.0

    def __init__(self, simulation: RestoreSimulation, seed: str) -> None:
        super().__init__(simulation, seed)  # type: ignore[arg-type]
        self._every_s = self.draw.choice((0.7, 2.0, 4.0))
        self._timeline = simulation
        self._blocks: dict[int, dict[tuple[str, int], SavedBlock]] = {}
        self._tables: dict[int, dict[str, RestoredTable]] = {}
        self._data_sets: dict[int, tuple[SavedDataSet, ...]] = {}
        self.complete: list[Saved] = []

    def happened(self, transition: Transition) -> None:
        """Something changed."""
        super().happened(transition)
        if isinstance(transition, CheckpointWritten):
            self._data_sets[transition.attempt.number] = transition.attempt.data_sets
        if isinstance(transition, CheckpointMade):
            self.complete.append(self._made(transition.number))

    def _complete(self, number: int) -> None:
        """Another scheduler knows nothing of who wrote the manifest."""
        if not self._timeline.is_past:
            super()._complete(number)

    def decided(self, number: int) -> None:
        """It is complete, which is not told yet; another may be cut before it is."""
        tables = self._tables[number] = {}
        for table in self.simulation.scheduler.view.of_run("").tables:
            assert table.cut is not None
            clock = table.cut.after_clock
            tables[table.spec.name] = RestoredTable(table.spec, table.consistency, clock)

    def _made(self, number: int) -> Saved:
        if number not in self._tables:  # it is told at once
            self.decided(number)
        tables, data_sets = self._tables.pop(number), self._data_sets.pop(number)
        restored = Restored(f"sim/{number}", tables, data_sets=data_sets)
        return Saved(number, restored, self._blocks[number])

    def _answered(
        self, server: SimServer, part: Captured, cut: TableCut, effect: AnswerPull | RefusePull
    ) -> None:
        key = part.waiters.get(effect.waiter)
        super()._answered(server, part, cut, effect)
        if key is None or isinstance(effect, RefusePull):
            return
        table = self.simulation.layout.table(key[0])
        blocks = self._blocks.setdefault(part.number, {})
        for block in table.blocks_by_range(self._range_count)[key[1]]:
            blocks[table.spec.name, block] = self._saved(server, key, block)

    def _saved(self, server: SimServer, key: Key, block: int) -> SavedBlock:
        """As `CheckpointParts` writes it; and its numbers are the twin's."""
        table, at = self.simulation.layout.table(key[0]), (key[0], block)
        grads = tuple(server.values[at])
        state = self.simulation.truth.twin.state(table, block, grads, server.newest(key, block))
        saved = server.held(key).shards.stores[key].saved(block)
        decided = server.updates[at]  # some of them are not seen yet
        updates = tuple(frozenset(workers) for workers in decided[: saved.version])
        assert len(updates) == saved.version, f"{at}: version {saved.version} of {decided}"
        state.updates = [set(workers) for workers in updates]
        tensors = tuple((name, bytes(payload)) for name, payload in saved.tensors)
        return SavedBlock(grads, updates, state, saved.version, saved.steps, tensors)


@dataclass(eq=False)
class Address:
    """Where a server process is, whichever timeline it is of."""

    sessions: Sessions | None = None
    """What checks its callers; None: nobody has registered there."""
    log: Any = None
    """Its update log, a `SimLog`; None: it keeps none."""


@dataclass
class Callers:
    """The sessions of one timeline's nodes.

    Attributes:
        servers: by node.
        others: workers and readers, by incarnation.
        fenced: what is done with one of `others` that was told so.
    """

    servers: dict[NodeId, Session] = field(default_factory=dict)
    others: dict[Incarnation, Session] = field(default_factory=dict)
    fenced: Callable[[Incarnation, NodeId, PushpullError], None] = lambda *_: None
    _messages: dict[Session, object] = field(default_factory=dict)

    def message(self, session: Session) -> object:
        """What the session shows with each call."""
        if session not in self._messages:
            self._messages[session] = wire.session_to_proto(session)
        return self._messages[session]


class TimelineServer(ReplicatedServer):
    """A server that checks whoever calls, and may begin with a checkpoint.

    Args:
        callers: all of its timeline.
        address: where it is.
        token_key: what sessions are made with.
    """

    def __init__(
        self,
        world: World,
        node_id: NodeId,
        settings: Settings,
        worker_count: int,
        place: Place,
        terms: tuple[Callers, Address, bytes],
    ) -> None:
        super().__init__(world, node_id, settings, worker_count, place)
        self.callers, self.address, token_key = terms
        self.sessions = Sessions(self.callers.servers[node_id], token_key)
        self.address.sessions = self.sessions
        self.saved: Mapping[tuple[str, int], SavedBlock] = {}
        self._ranges = RestoredRanges(self.machine.shards, self)

    def _observing(self, view: ClusterView) -> Work[None]:
        self.sessions.observe(view)
        yield from super()._observing(view)
        self.works.between(self._look)

    def _tick(self) -> None:
        super()._tick()
        if not self.is_dead and not self.is_paused:
            self.works.between(self._look)

    # --- who calls

    @property
    def _is_succeeded(self) -> bool:
        return self.address.sessions is not self.sessions

    def _admits(self, session: Session, method: str) -> PushpullError | None:
        """Why not, if it does not take a call of the session; nobody is there: NotOwner."""
        if self.is_dead and not self._is_succeeded:
            return NotOwner("nobody is there")
        sessions = self.address.sessions
        assert sessions is not None
        if self._is_succeeded and sessions._own.timeline == self.sessions._own.timeline:
            return NotOwner("the server that is meant is not there any more")
        refused = _refusal(sessions, self.callers.message(session), method)
        if refused is None:
            assert not self._is_succeeded, f"S10: who succeeded {self.node_id} takes {session}"
            return None
        assert isinstance(refused, Fenced), f"S10: {session} is told {refused!r} by {self.node_id}"
        self.world.counts[f"{method} refused" if self._is_succeeded else "ended"] += 1
        return refused

    def _refuses(self, incarnation: Incarnation, method: str) -> PushpullError | None:
        if self.is_paused and not self.is_dead:  # it waits for it
            return None
        error = self._admits(self.callers.others[incarnation], method)
        if isinstance(error, Fenced):
            self.callers.fenced(incarnation, self.node_id, error)
        return error

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        if self._refuses(event.sender.incarnation, "Push") is None:
            super().entry(event)

    def read(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of one range arrived."""
        incarnation = event(0).incarnation or Incarnation(0)
        if self._refuses(incarnation, "Pull") is None:
            super().read(event, on_answer)

    def capture(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of its own, for a checkpoint: nobody calls."""
        if not self._is_away(lambda: self.capture(event, on_answer)):
            super().capture(event, on_answer)

    def begin_cut(self, table_id: TableId, cut_id: CutId, lasts_s: float) -> int:
        """A reader is about to ask for one state of a table."""
        if self._refuses(Incarnation(0), "BeginCut") is not None:
            raise NotOwner("it has ended")
        return super().begin_cut(table_id, cut_id, lasts_s)

    def hear(self, sender: NodeId, message: object, stream: Stream | None = None) -> None:
        """A message of another server."""
        is_waiting = self.is_paused and not self.is_dead
        is_call = not isinstance(message, Welcome | Ack | Grant)
        if is_waiting or not is_call:
            super().hear(sender, message, stream)
            return
        method = "SettleChange" if stream is None else "Replicate"
        if self._admits(self.callers.servers[sender], method) is None:
            super().hear(sender, message, stream)

    # --- values that are restored, as in `ps_server.checkpoint.restored_values`

    def _look(self) -> None:
        if not self.saved:
            return
        self._hand_over()
        for key in self._ranges.look():
            delay_s = self.world.draw.choice(READ_S) * self.world.draw.random()
            self.world.after(delay_s, lambda key=key: self._read(key))  # type: ignore[misc]

    def _read(self, key: Key) -> None:
        """A thread reads: values come to lie where they are served."""
        part = self._ranges.begin(key)
        if part is None or self.is_dead:
            return
        versions = self._read_blocks(key, part)
        self._was_read(lambda: self._ranges.was_read(key, part, versions))

    def _read_blocks(self, key: Key, part: RangeMachine) -> dict[int, int]:
        """Read all of them; their versions."""
        store, name = self.held(key).shards.stores[key], part.state.table.spec.name
        found = {block: self.saved[name, block] for block in part.state.blocks}
        rooms = {b: store.load(b, saved.version, saved.steps) for b, saved in found.items()}
        for block, saved in found.items():
            self._check_readable(name, block)
            for tensor, payload in saved.tensors:
                rooms[block](tensor, len(payload))[:] = payload
            store.end_load(block)
        return {block: saved.version for block, saved in found.items()}

    def _check_readable(self, name: str, block: int) -> None:
        """Raise InvalidCheckpoint for a block that cannot be read."""

    def _was_read(self, note: Callable[[], None]) -> None:
        """The loop hears of it, when it gets to that, whatever is under way."""
        if not self._is_away(lambda: self._was_read(note)):
            self.world.counts["values read beside a work"] += self.works.is_busy
            note()
            self._hand_over()

    def _hand_over(self) -> None:
        self.works.finish()
        for key, versions in self._ranges.hand_over():
            name = self.machine.shards[key].state.table.spec.name
            for block in versions:
                saved, at = self.saved[name, block], (key[0], block)
                self.values[at] = list(saved.grads)
                self.updates[at] = [set(workers) for workers in saved.updates]
            self.world.counts["ranges loaded"] += 1
            self.carry_out(self.machine.loaded(key, versions, self.now_s))
            if self.works.is_busy:
                self.works.between(self._hand_over)
                return

    def may_load(self, range_id: RangeId) -> bool:
        """As `ReplicatedRanges`, as all of these."""
        return self.replication.may_load(range_id)

    def close_only(self, range_ids: Collection[RangeId]) -> None:
        self.replication.close_only(range_ids)

    def is_without_replicas(self, range_id: RangeId) -> bool:
        primary = self.replication.primaries.get(range_id)
        is_so = primary is None or primary.is_without_replicas
        if primary is not None and is_so and not (primary.log.is_drained or primary.log.is_short):
            self.world.counts["handed over while the log waits for it"] += 1
        return is_so

    def replaced(self, range_id: RangeId, *, is_last: bool) -> None:
        if range_id in self.replication.primaries:
            self.replication.primaries[range_id].replaced(is_last=is_last)


def _refusal(sessions: Sessions, message: object, method: str) -> PushpullError | None:
    try:
        sessions.admit(message, method)  # type: ignore[arg-type]
    except PushpullError as error:
        return error
    return None


def is_welcome(error: Fenced) -> bool:
    """Whether who is told so may register again; whoever has values keeps them otherwise."""
    assert isinstance(error, ForeignCluster) or error.retry_after_ms, f"S10: {error!r}"
    return not isinstance(error, ForeignCluster)


def reader_beside(other: Session, token_key: bytes) -> Session:
    """The session of an evaluator in the cluster of another node."""
    made = replace(other, node_id=NodeId(0), incarnation=Incarnation(0), role=Role.READER, rank=0)
    return replace(made, token=made.signed(token_key))
