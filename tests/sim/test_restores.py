"""A running cluster is taken back to one of its checkpoints, or another is started from it (S10).

That happens beside failover, replacement, changes of consistency and a scheduler that is away. The
servers and workers of the old timeline live on until they hear of it, and what they send goes to
who is there now. Servers come to the new timeline as they hear of it, others start, and tables lie
on as many as there are then; it may be restored in its turn.

Oracles, beside those of `tests.sim.timelines`:
    S10   Whatever the old timeline pushed after the cut is in nothing of the new one: that holds
          what its checkpoint has, and what its own workers sealed, each once.
    CL-1  No number of a node is given again by the cluster that takes another's place.
    LIVE  The new timeline trains to its end, and whoever lives of the old one hears that it ended.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import NodeState, Role, Session
from ps_core.consistency import StalePolicy
from ps_core.errors import Fenced, PushpullError
from ps_core.keys import Incarnation, NodeId
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.service.node import Sessions
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import ClusterSettings, Registration, Transition
from tests.sim.actors import SimWorker
from tests.sim.arithmetic import may_be_read_last
from tests.sim.calamities import Calamities, Plan
from tests.sim.checkpointing import Checkpointer
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.scheduled import BEAT_S, LOOK_S, SCHEDULER
from tests.sim.server import SimServer
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_scheduler_away import AwaySimulation
from tests.sim.test_simulation import (
    QUICK_SEEDS,
    WORKERS,
    drawn_consistency,
    run_seeds,
)
from tests.sim.timelines import (
    Address,
    Callers,
    Saved,
    Saver,
    TimelineServer,
    is_welcome,
    reader_beside,
)
from tests.sim.truth import Settings
from tests.sim.world import Faults, World

pytestmark = pytest.mark.slow

AGAIN_S = 0.2
"""Between two looks whether it is time for something."""

PATIENCE_S = 4.0
"""After which servers that were not there before are started, where the others do not come."""

HEARD_S = 60.0
"""In which whoever lives of an old timeline hears that it ended, once all is calm."""

CALM_FIRST_S = 12.0
"""In which there should be a checkpoint."""

MOST_TIMELINES = 3


class TimelineStrikes(Calamities):
    """What befalls one timeline, while it lasts."""

    def __init__(self, simulation: RestoreSimulation, plan: Plan) -> None:
        self._simulation = simulation
        super().__init__(simulation, plan)

    def calm(self) -> None:
        """Nothing more happens to whoever there is."""
        if not self._simulation.is_past:
            super().calm()
            for former in self._simulation.former:
                former.wake()

    def _strike(self, kind: str) -> None:
        if self._simulation.is_past:
            return
        if self._simulation.is_early:
            self._world.after(AGAIN_S, lambda: self._strike(kind))
        else:
            super()._strike(kind)


class RestoreSimulation(AwaySimulation, ReplacementSimulation):
    """One seed in which a cluster is restored: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "restored in place", "restored elsewhere", "restored beside an open change",
        "restored by an away scheduler", "restored onto more servers", "restored a second time",
        "ranges loaded", "values read beside a work", "Push refused", "Pull refused",
        "Replicate refused", "registered again",
        "keeps its values", "failovers while values are loaded", "gradients of a new timeline",
        "fault: killed", "fault: worker killed", "failovers", "joined ranges", "equal replicas",
        "replacements", "joined", "changed", "checkpoints",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "restored onto fewer servers", "registered late", "restored with another consistency",
    })  # fmt: skip
    many: ClassVar[int] = 200
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4}

    number = 1
    """Of the timeline."""
    server_kind: ClassVar[type[TimelineServer]] = TimelineServer

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.seed = seed
        self.is_past = self.restores = False
        self.former: list[RestoreSimulation] = []
        self.following: Restoration | None = None
        self.callers = Callers(fenced=self._told_fenced)
        self.addresses: dict[NodeId, Address] = {}
        self._kept: set[NodeId] = set()
        super().__init__(seed, narrate=narrate)
        self._dies = False
        draw = self.world.draw
        self._evaluator = reader_beside(self.sessions[0], self.scheduler.settings.token_key)
        self.callers.others[Incarnation(0)] = self._evaluator
        self.callers.others |= self.first
        self.restores = self.number < MOST_TIMELINES and (
            draw.random() < (1.0 if self.number == 1 else 0.25)
        )
        self._waits_for_a_change = draw.random() < 0.5
        self._after_s = draw.choice((0.1, 2.0, 6.0)) * draw.random()
        self._restores_s = math.inf
        self.change_every_s = draw.choice((1.0, 3.0, 10.0))
        self.world.after(AGAIN_S, self._may_restore)

    @cached_property
    def plan(self) -> Plan:
        """What happens: less than elsewhere, since it happens in each timeline."""
        plan = super().plan
        draw = self.world.draw
        return replace(
            plan, strike_count=draw.randint(1, 3), calm_s=6.0 + draw.random() * 12.0,
            worker_deaths=draw.choice((1, 1, 2)),
        )  # fmt: skip

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        return TimelineStrikes(self, plan)

    def checkpointer_of(self, seed: int) -> Checkpointer:
        """Who makes checkpoints."""
        self.saver = Saver(self, f"{seed}, timeline {self.number}")
        return self.saver

    def step_count(self) -> int:
        """Some more than until it is restored."""
        return (
            self.world.draw.randint(12, 18) if self.number == 1 else self.world.draw.randint(4, 8)
        )

    @property
    def is_early(self) -> bool:
        """Whether nothing befalls it: it has no checkpoint yet, and could have one."""
        return self.restores and not self.saver.complete and self.world.now_s < CALM_FIRST_S

    # --- its servers

    def registered(self) -> list[Session]:
        """The first nodes."""
        nodes = super().registered()
        self.callers.servers |= {node.node_id: node for node in nodes[:-WORKERS]}
        return nodes

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place."""
        address = self.addresses.setdefault(node_id, Address())
        terms = self.callers, address, self.scheduler.settings.token_key
        settings = self.layout.settings
        return self.server_kind(self.world, node_id, settings, WORKERS, place, terms)

    def join(self, decision: Decision[Session]) -> None:
        """A server has registered while the others train."""
        self.callers.servers[decision.reply.node_id] = decision.reply
        super().join(decision)

    def restart(self) -> None:
        """A server that was not there before."""
        if not self.is_past:
            self.come(Address())

    def come(self, address: Address) -> None:
        """A server process registers that has nothing."""

        def register() -> None:
            if self.is_past:
                self.newest.come(address)
                return
            asking = self.asking_at(address)
            self._refuse_other_kernels(asking)
            decision = self.scheduler.register(asking, self.world.now_s)
            self.addresses[decision.reply.node_id] = address
            self.join(decision)

        self._reach(register)

    def asking_at(self, address: Address) -> Registration:
        """What the server process there registers with, later than the first."""
        del address
        return self.asking_server()

    def asking_server(self) -> Registration:
        """What a server registers with that comes later."""
        asking = self.asking(0, Role.SERVER)
        drawn = self.world.draw.randbytes(16)
        return replace(asking, registration_id=drawn, address=f"sim-{drawn[:8].hex()}:1")

    def free_addresses(self) -> list[Address]:
        """Where servers have died, and others may be started."""
        return [
            self.addresses[server.node_id] for server in self.servers.values() if server.is_dead
        ]

    def _replace(self, rank: int) -> None:
        """Another worker takes the rank, as soon as somebody can give it."""
        holder = self.scheduler._state.workers_by_rank("")[rank]
        if self.is_past or holder.state is not NodeState.GONE:
            return
        if not self.is_there:
            self.world.after(LOOK_S, lambda: self._replace(rank))
            return
        super()._replace(rank)

    def _return_as_itself(self, worker: SimWorker) -> None:
        if self.is_there and not self.is_past:
            super()._return_as_itself(worker)
        elif not self.is_past:
            self.world.after(LOOK_S, lambda: self._return_as_itself(worker))

    def _takes_over(self, decision: Decision[Session]) -> None:
        super()._takes_over(decision)
        self.callers.others |= self.first
        self.world.say(f"replacement: {decision.reply.incarnation}")

    def _deregister_some(self) -> None:
        if self.is_there and not self.is_past:
            super()._deregister_some()
        elif not self.is_past:
            self.world.after(LOOK_S, self._deregister_some)

    def _told_fenced(self, incarnation: Incarnation, server: NodeId, error: PushpullError) -> None:
        """Somebody was, by a server."""
        for worker in [worker for worker in self.workers if worker.incarnation == incarnation]:
            link, tell = (server, worker.end), worker.told_fenced
            self.world.send("fenced", lambda tell=tell: tell(error), link)  # type: ignore[misc]

    # --- what becomes of it

    @property
    def newest(self) -> RestoreSimulation | Restoration:
        """The timeline that there is now."""
        return self if self.following is None else self.following.newest

    def _may_restore(self) -> None:
        """Somebody restores the cluster, when there is a checkpoint."""
        if self.is_past or not self.restores or not self.is_there:
            if self.restores and not self.is_past:
                self.world.after(AGAIN_S, self._may_restore)
            return
        now_s = self.world.now_s
        if self.saver.complete:
            self._restores_s = min(self._restores_s, now_s + self._after_s)
        is_open = any(table.proposed is not None for table in self.scheduler.view.tables)
        waits = self._waits_for_a_change and not is_open and now_s < self._restores_s + 2.0
        if now_s < self._restores_s or waits:
            self.world.after(AGAIN_S, self._may_restore)
            return
        self._restore(is_open=is_open)

    def _restore(self, *, is_open: bool) -> None:
        """Now."""
        self.world.counts["restored beside an open change"] += is_open
        self.world.counts["restored a second time"] += self.number > 1
        self.is_past = True
        self.following = self.restoration()

    def restoration(self) -> Restoration:
        """The time until there is a cluster again."""
        return Restoration(self)

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows, to which enough nodes have come."""
        return RestoredSimulation(began)

    def wake(self) -> None:
        """Whoever is paused or slow is not any more."""
        for server in self.living:
            server.wake()
        for worker in self.paused | self.slow:
            worker.wake()

    @contextlib.contextmanager
    def _as_its_successor(self) -> Iterator[None]:
        """The scheduler that is there now answers."""
        own, self.scheduler = self.scheduler, self.newest.scheduler
        try:
            yield
        finally:
            self.scheduler = own

    def _reach(self, action: Callable[[], None]) -> None:
        def answer() -> None:
            with self._as_its_successor():
                action()

        if self.is_past:
            self.newest._reach(answer)
        else:
            super()._reach(action)

    @property
    def is_there(self) -> bool:  # type: ignore[override]
        """Whether this timeline's scheduler does anything."""
        return not self.is_past and super().is_there

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        assert not self.is_past, f"S10: an older timeline's call was taken: {transitions}"
        super()._publish(transitions)

    @contextlib.contextmanager
    def _no_answer_for(self, session: Session) -> Iterator[None]:
        """Servers of an older timeline hear that they are."""
        try:
            yield
        except Fenced as error:
            if not self.is_past:
                assert self.servers[session.node_id].is_dead
                return
            link, told = (SCHEDULER, session.node_id), error
            self.world.send("fenced", lambda: self._ended(session.node_id, told), link)

    def _ended(self, node_id: NodeId, error: Fenced) -> None:
        """A server of an older timeline hears of the newer one: it registers again, with nothing;
        or keeps what it has, where that is another cluster.
        """
        server = self.servers[node_id]
        if server.is_dead or server.is_paused or node_id in self._kept:
            return
        if not is_welcome(error):
            self._kept.add(node_id)
            self.world.counts["keeps its values"] += 1
            return
        self.world.say(f"server {node_id} REGISTERS AGAIN")
        self.world.counts["registered again"] += 1
        server.kill()
        assert isinstance(server, TimelineServer)
        self.newest.come(server.address)

    def _pause(self) -> bool:
        return self.is_past or super()._pause()

    def _remind(self) -> None:
        if not self.is_past:
            super()._remind()

    def _look_for_life(self) -> None:
        if not self.is_past:
            super()._look_for_life()

    def _go(self, how: Callable[[], bool], patience_s: float) -> None:
        if self.is_early:
            self.world.after(AGAIN_S, lambda: self._go(how, patience_s))
        elif not self.is_past:
            super()._go(how, patience_s)

    def _is_over(self) -> bool:
        """Unless it is restored before."""
        if self.following is not None:
            return self.following._is_over()
        return super()._is_over() and not (self.restores and self.saver.complete)

    def _happened(self, transition: Transition) -> None:
        before = self.world.counts["failovers"]
        super()._happened(transition)
        if self.number > 1 and self.world.counts["failovers"] > before:
            parts = [p for s in self.cluster.values() for p in s.machine.shards.values()]
            is_loading = any(not part.state.initialized for part in parts)
            self.world.counts["failovers while values are loaded"] += is_loading

    def _check_end(self) -> None:
        if self.following is None:
            self.restores = False
            super()._check_end()
            return
        newest = self.newest
        assert isinstance(newest, RestoredSimulation)
        newest._check_end()


class Restoration:
    """From when the scheduler begins anew until there is a cluster again: nodes come to it.

    Args:
        before: the newest timeline.
    """

    def __init__(self, before: RestoreSimulation) -> None:
        self.before, self.world = before, before.world
        self.former = [*before.former, before]
        draw, counts = self.world.draw, self.world.counts
        self.saved: Saved = draw.choice(before.saver.complete[-2:])
        self.is_elsewhere = draw.random() < 0.3
        counts["restored elsewhere" if self.is_elsewhere else "restored in place"] += 1
        self.world.say(f"RESTORED from {self.saved.number}, elsewhere: {self.is_elsewhere}")
        self.settings = self._elsewhere() if self.is_elsewhere else self._in_place()
        self.scheduler = Cluster(self.settings, self.world.now_s)
        self._changed()
        self.servers: dict[NodeId, tuple[Session, Address]] = {}
        self.workers: list[Session] = []
        self.following: RestoredSimulation | None = None
        self._waiting: list[Callable[[], None]] = []
        self._began_s = self.world.now_s
        self._away_until_s = self._began_s + draw.choice((0.0, 0.0, 1.0, 5.0)) * draw.random()
        self._free = before.free_addresses()
        self._late_s = draw.choice((0.0, 1.0, 3.0)) * draw.random()
        counts["restored by an away scheduler"] += self._away_until_s > self._began_s
        for _ in range(WORKERS):
            self.world.after(draw.random() * 2.0, lambda: self._reach(self._worker))
        if self.is_elsewhere:
            self._start_others()
        self._look()

    def _in_place(self) -> ClusterSettings:
        draw, former = self.world.draw, self.before.scheduler
        return former.in_new_timeline(self.saved.restored, draw.randbytes(16), draw.randbytes(32))

    def _elsewhere(self) -> ClusterSettings:
        """Another cluster, that somebody starts from the checkpoint."""
        draw, former = self.world.draw, self.before.scheduler.settings
        replica_count = draw.choice((2, 2, 3))
        server_count = draw.randint(replica_count, 5)
        counts = self.world.counts
        counts["restored onto more servers"] += server_count > former.server_count
        counts["restored onto fewer servers"] += server_count < former.server_count
        return replace(
            former,
            cluster_id=f"sim-{self.before.number + 1}",
            restored=self.saved.restored,
            timeline=draw.randbytes(16),
            token_key=draw.randbytes(32),
            first_incarnation=Incarnation(1_000_000 * (self.before.number + 1)),
            first_node_id=1_000 * (self.before.number + 1),
            server_count=server_count,
            servers_at_restore=0,
            replica_count=replica_count,
            min_in_sync=draw.choice((1, min(2, replica_count))),
            range_count=draw.choice((8, 8, 5, 3)),
            replaced_timelines=frozenset(),
        )

    @property
    def newest(self) -> RestoreSimulation | Restoration:
        """The timeline that there is now."""
        return self if self.following is None else self.following.newest

    def _start_others(self) -> None:
        """Servers that were not there before; some where others died."""
        draw = self.world.draw
        for _ in range(self.settings.servers_to_form - len(self.servers)):
            address = self._free.pop() if self._free else Address()
            self.world.after(draw.random() * 2.0, lambda address=address: self.come(address))  # type: ignore[misc]

    def _reach(self, action: Callable[[], None]) -> None:
        """A message is at the scheduler."""
        if self.following is not None:
            self.following._reach(action)
        elif self.world.now_s < self._away_until_s:
            self._waiting.append(action)
        else:
            action()

    def come(self, address: Address) -> None:
        """A server process registers that has nothing."""

        def register() -> None:
            if self.following is not None:
                self.world.counts["registered late"] += 1
                self.following.come(address)
                return
            asking = self.before.asking_at(address)
            session = self.scheduler.register(asking, self.world.now_s).reply
            self._changed()
            self._check_new(session)
            self.servers[session.node_id] = session, address
            address.sessions = Sessions(session, self.settings.token_key)
            self._beat(session)

        self._reach(register)

    def _worker(self) -> None:
        asking = self.before.asking(len(self.workers), Role.WORKER)
        asking = replace(asking, registration_id=self.world.draw.randbytes(16))
        session = self.scheduler.register(asking, self.world.now_s).reply
        self._changed()
        self._check_new(session)
        self.workers.append(session)
        self._beat(session)

    def _check_new(self, session: Session) -> None:
        for former in self.former:
            callers = former.callers
            known = {(s.node_id, s.incarnation) for s in callers.servers.values()}
            known |= {(s.node_id, s.incarnation) for i, s in callers.others.items() if i}
            nodes, incarnations = zip(*known, strict=True)
            assert session.node_id not in nodes, f"CL-1: {session}"
            assert session.incarnation not in incarnations, f"CL-1: {session}"

    def _beat(self, session: Session) -> None:
        if self.following is None:
            if self.world.now_s >= self._away_until_s:
                self.scheduler.heartbeat(session, self.world.now_s)
            self.world.after(BEAT_S / 2, lambda: self._beat(session))

    def _changed(self) -> None:
        """The scheduler has decided something."""

    def _look(self) -> None:
        """Whether all have come."""
        now_s, wanted = self.world.now_s, self.settings.servers_to_form
        if now_s >= self._away_until_s:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                action()
            if self.scheduler.tick(now_s).transitions:
                self._changed()
        after_s = now_s - max(self._began_s, self._away_until_s)
        if after_s > PATIENCE_S and len(self.servers) < wanted:
            self._start_others()
            self._away_until_s = now_s  # they have some time
        is_there = len(self.servers) >= wanted and len(self.workers) == WORKERS
        if is_there and after_s >= self._late_s:
            self.following = self.before.restored(self)
        else:
            self.world.after(LOOK_S, self._look)

    def _is_over(self) -> bool:
        return self.following is not None and self.following._is_over()


class RestoredSimulation(RestoreSimulation):
    """A timeline that began with a checkpoint."""

    def __init__(self, began: Restoration) -> None:
        self.began, self.number = began, began.before.number + 1
        super().__init__(began.before.seed)
        self.former = began.former
        self.world.faults = Faults.drawn(self.world.draw)
        for server in self.servers.values():
            self._give(server)
        self._restore_truth()
        for worker in self.workers:
            worker.start(self.program(worker))
        tables = [table for table in self.layout.tables if may_be_read_last(table)]
        if tables:
            self.evaluator.layout = replace(self.layout, tables=tables)
            self.evaluator.start()

    # --- what there is

    def world_of(self, seed: int, *, narrate: bool) -> World:
        """The one that there is."""
        del seed, narrate
        return self.began.world

    def scheduler_of(self) -> Cluster:
        """The one that nodes have come to."""
        return self.began.scheduler

    def registered(self) -> list[Session]:
        """Those who have come."""
        servers = self.began.servers
        self.addresses = {node_id: address for node_id, (_, address) in servers.items()}
        self.callers.servers = {node_id: session for node_id, (session, _) in servers.items()}
        workers = sorted(self.began.workers, key=lambda session: session.rank)
        return [*self.callers.servers.values(), *workers]

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        plan, settings = super().plan, self.began.settings
        return replace(
            plan,
            server_count=settings.server_count,
            replica_count=settings.replica_count,
            min_in_sync=settings.min_in_sync,
        )

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        self.plan  # noqa: B018 - drawn by now
        return self.began.settings

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables of the checkpoint, as a script may make them now."""
        del seed
        draw, found = self.world.draw, []
        for table in self.began.saved.restored.tables.values():
            spec = table.spec
            if draw.random() < 0.2:
                setting = drawn_consistency(draw)
                optimizer = spec.optimizer
                is_of_gradients = optimizer.kind is not OptimizerKind.ADD
                has_delay = is_of_gradients and not optimizer.inner_steps and spec.rows is None
                may_have = has_delay or setting.policy is not StalePolicy.COMPENSATE
                if optimizer.kind is OptimizerKind.AGGREGATE or self.groups.leaders:
                    may_have = False  # these need BSP
                if may_have and not (optimizer.fragment_count and setting.backup_workers):
                    spec = replace(spec, consistency=setting).validated()
                    self.world.counts["restored with another consistency"] += 1
            found.append(spec)
        draw.shuffle(found)
        return found

    def truth_settings(self, tables: Iterable[Table]) -> Settings:
        """Which consistency the clocks of the tables have."""
        settings = Settings(tables)
        for table in tables:
            assert table.restored_clock is not None
            settings.stepped[table.table_id] = table.restored_clock
            if table.change is not None:
                settings.change(table.table_id, table.change)
        return settings

    def _restore_truth(self) -> None:
        """What the checkpoint has is there from the start."""
        truth = self.truth
        for table in self.layout.tables:
            table_id, clock = table.table_id, table.restored_clock
            assert clock is not None
            truth.restored[table_id] = clock
            for worker in self.workers:
                truth.sealed[table_id, worker.incarnation] = clock
            for block in range(table.block_count):
                saved = self.began.saved.blocks[table.spec.name, block].restored()
                truth.contributions[table_id, block] = set(saved.grads)
                truth.twin.restore(table_id, block, saved.state)

    def _give(self, server: SimServer) -> None:
        assert isinstance(server, TimelineServer)
        blocks = self.began.saved.blocks
        server.saved = {key: block.restored() for key, block in blocks.items()}

    def join(self, decision: Decision[Session]) -> None:
        """A server has registered while the others train."""
        super().join(decision)
        self._give(self.servers[decision.reply.node_id])

    # --- the end

    def _check_end(self) -> None:
        if self.following is None:
            self.restores = False  # a checkpoint may come to be complete while it is looked at
            self.calamities.calm()
            heard = self.world.run(self._have_heard, self.world.now_s + HEARD_S)
            assert heard, f"LIVE: {self._unheard()} never heard that their timeline has ended"
            self._check_kept()
        super()._check_end()

    def _unheard(self) -> list[object]:
        """Who lives of an older timeline of this cluster, and has not heard of it; servers of
        another cluster keep what they have.
        """
        ours = self.scheduler.settings.cluster_id
        found: list[object] = []
        for former in self.former:
            if former.scheduler.settings.cluster_id == ours:
                found += [f"server {server.node_id}" for server in former.living]
        return found

    def _have_heard(self) -> bool:
        return not self._unheard()

    def _check_kept(self) -> None:
        """KEPT."""
        for table in [table for table in self.checked_tables if not table.run]:
            for block in range(table.block_count):
                range_id = table.range_of_block(block, self.layout.range_count)
                server = self.cluster[self.layout.owner[range_id]]
                found = server.values[table.table_id, block]
                saved = self.began.saved.blocks[table.spec.name, block].restored().grads
                self.world.counts["gradients of a new timeline"] += len(found) - len(saved)
                assert tuple(found[: len(saved)]) == saved, f"KEPT: block {block}: {found}; {saved}"
        for worker in [worker for worker in self.workers if not worker.layout.run]:
            assert not worker.failed or worker.fence is not None, f"LIVE: {worker.rank} has failed"


@pytest.mark.timeout(300)
def test_a_restored_cluster_has_what_its_checkpoint_had(sim_seeds: tuple[int, ...]) -> None:
    """S10: and nothing else of what was before, whoever still sends it."""
    run_seeds(RestoreSimulation, sim_seeds[:QUICK_SEEDS] if len(sim_seeds) > 1 else sim_seeds)
