"""Servers that die, fall silent, or are slow, while everything else goes on (G1 to G4, S8, S9)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import (
    HAND_OVER_FEATURE,
    BackupRequest,
    ClusterView,
    RangeAssignment,
    Role,
    Session,
)
from ps_core.errors import Fenced, InvalidConfig
from ps_core.keys import Incarnation, NodeId, RangeId
from ps_core.sliced_work import at_once
from ps_server.ranges.range_copy import ShardCopy, WorkerFacts, copying
from scheduler.machine.cluster import Decision
from scheduler.machine.placement import hand_overs
from scheduler.machine.state import (
    BackupsSet,
    BackupsSpared,
    ClusterSettings,
    HandOversAdvised,
    NodeSilent,
    RangesFailedOver,
    RangesHandedOver,
    RangesLost,
    Registration,
    Transition,
    WorkerGone,
)
from tests.sim.actors import Layout, SimWorker
from tests.sim.calamities import STRIKES, Calamities, Plan
from tests.sim.given import GivenNumbers
from tests.sim.replicated import LEASE_S, Place, ReplicatedServer
from tests.sim.scheduled import BEAT_S, SCHEDULER, VIEW_DELAY_S, ScheduledSimulation
from tests.sim.server import SimServer
from tests.sim.serving import Watch
from tests.sim.test_simulation import WORKERS, run_seeds
from tests.sim.worker_views import WorkerViews

QUIET_S = 180.0
"""In which backups catch up, the dead are declared gone and primaries are spread evenly, once all
is calm."""

LIVELY_S = 75.0
"""In which every worker gets further, once all is calm: so long may a change wait for a server."""

WORKER_TIMEOUT_S = 10.0

CLOCKS = 30


class FailoverSimulation(ScheduledSimulation):
    """One seed of all that may befall servers."""

    often: ClassVar[frozenset[str]] = frozenset({
        *(f"fault: {kind}" for kind in (*STRIKES, "restarted", "drift")),
        "lost", "duplicated", "resets", "cut", "slowed", "silent servers", "failovers",
        "reconfigured", "ranges taken over", "ranges given up", "snapshots", "joined ranges",
        "parked waits", "equal replicas", "gone", "checkpoints", "checkpoints that failed",
        "streams broken", "lost with a stream", "heard beside the next stream",
        "sent again when late", "snapshots before their view", "views lost", "views cut",
        "perhaps back in views that were missed",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "failovers": 1, "joined ranges": 1}
    may_group = True

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.servers: dict[NodeId, ReplicatedServer] = {}
        self._has_steps = False
        self.given = GivenNumbers()
        self.watch = Watch(self.servers, lambda: self.scheduler.view, LEASE_S)
        super().__init__(seed, narrate=narrate)
        self.world.faults = self.world.faults.with_peers(random.Random(f"streams of {seed}"))
        self.clip(self.layout.tables[:2])
        self.calamities = self.calamities_of(self.plan)
        self.worker_views = WorkerViews(self.world, seed, self.calamities)
        self.worker_views.blind(self.workers)
        self._moved_s = dict.fromkeys(self.workers, (0, 0.0))
        self._ask()
        self._remind()
        self._look_for_life()

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        plan = Plan.drawn(self.world.draw)
        self.world.counts["fault: drift"] += plan.drift > 0
        if not plan.resets:
            self.world.faults = replace(self.world.faults, reset_every_s=1e9)
        return replace(plan, worker_deaths=0) if self.groups.leaders else plan

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        return Calamities(self, plan)

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        return replace(
            super().settings(),
            server_count=self.plan.server_count,
            replica_count=self.plan.replica_count,
            lease_s=LEASE_S,
            worker_timeout_s=WORKER_TIMEOUT_S,
        )

    def server(self, node_id: NodeId) -> SimServer:
        """One of the servers."""
        place = Place(
            self.plan.clock(self.world.draw), self.servers, self.watch, self.plan.min_in_sync
        )
        made = self.made(node_id, place)
        self.servers[node_id] = made
        return made

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place."""
        return ReplicatedServer(self.world, node_id, self.layout.settings, WORKERS, place)

    def layout_of(self) -> Layout:
        """What a worker knows: views come to each of them at another time."""
        ours = self.layout
        return replace(ours, owner=dict(ours.owner), epoch=dict(ours.epoch))

    def step_count(self) -> int:
        """So many that the tables together get through enough clocks; some leave before."""
        count = max(10, -(-CLOCKS // len(self.layout.tables)))
        is_first, self._has_steps = not self._has_steps, True
        return count if is_first else self.world.draw.choice((count, count, 2, count // 2))

    # --- what befalls it

    @property
    def living(self) -> list[ReplicatedServer]:
        """The servers that were not killed."""
        return [server for server in self.servers.values() if not server.is_dead]

    def may_lose(self, server: ReplicatedServer, *, for_good: bool) -> bool:
        """Whether every range that has lost a server still has one that lives and is heard."""
        if for_good and any(other.asks for other in self.living):
            return False  # one may be about to be left without backups
        dead = self.lost()
        away = {node_id for node_id, count in self.calamities.away.items() if count > 0}
        lost = dead | {server.node_id} if for_good else dead
        for r in self.ranges_to_keep():
            holders = {n for n in (r.primary, *r.backups) if n is not None}
            left = holders - lost - away - {server.node_id}
            if holders & lost and not any(
                self.watch.has(self.servers[node_id], r.range_id) for node_id in left
            ):
                return False
        return True

    def ranges_to_keep(self) -> Sequence[RangeAssignment]:
        """Ranges that must have a holder that lives."""
        return self.scheduler.view.ranges

    def too_many_unnoticed(self, server: SimServer) -> bool:
        """Whether as many servers as hold a range would be dead, and members still: all holders of
        what is placed before the scheduler misses one of them may be among these.
        """
        unnoticed = (self.lost() | {server.node_id}) & self.scheduler.view.living_servers
        return len(unnoticed) >= self.plan.replica_count

    def lost(self) -> set[NodeId]:
        """The servers whose copies do not count any more."""
        return {node_id for node_id, server in self.servers.items() if server.is_dead}

    def kill(self, server: ReplicatedServer) -> None:
        """For good."""
        server.kill()

    def restart(self) -> None:
        """A server that was not there before: what it had is lost."""
        number = self.newcomer_number()
        asking = Registration(
            bytes([100 + number]) * 16,
            Role.SERVER,
            self.newcomer_address(number),
            kernel_fingerprint="sim",
            features=(HAND_OVER_FEATURE,),
        )
        self._refuse_other_kernels(asking)
        self._reach(lambda: self.join(self.scheduler.register(asking, self.world.now_s)))

    def newcomer_number(self) -> int:
        """Of the server that comes next."""
        return len(self.servers)

    def newcomer_address(self, number: int) -> str:
        """Of that server."""
        return f"sim:{2000 + number}"

    def _refuse_other_kernels(self, asking: Registration) -> None:
        """Whose results would differ becomes no server (S8)."""
        try:
            self.scheduler.register(replace(asking, kernel_fingerprint="other"), self.world.now_s)
        except InvalidConfig:
            self.world.counts["other kernels refused"] += 1
            return
        raise AssertionError("S8: a server whose kernels differ was admitted")

    def join(self, decision: Decision[Session]) -> None:
        """A server has registered while the others train."""
        session = decision.reply
        server = self.server(session.node_id)
        self.cluster[session.node_id] = server
        for worker in self.workers:
            worker.meet(server)
        self.world.say(f"RESTARTED as server {session.node_id}")
        self.world.counts["servers restarted"] += 1
        self._beat(session, None)
        self._prepare(session, server)
        self._ask_for(session)
        self._publish(decision.transitions)

    def kill_worker(self, worker: SimWorker) -> None:
        """For good."""
        worker.stop()

    # --- the scheduler

    def _beat(self, session: Session, worker: SimWorker | None) -> None:
        if worker is not None:
            super()._beat(session, worker)
            return

        server = self.servers[session.node_id]
        view_number, sent_s = server.view_number, self.world.now_s

        def arrive() -> None:
            has_waited = self.world.now_s > sent_s + LEASE_S  # for a scheduler that was away
            if not self._comes(session.node_id) or (has_waited and server.is_dead):
                return
            with self._no_answer_for(session):
                now_s = self.world.now_s
                self._publish(self.scheduler.heartbeat(session, now_s, view_number).transitions)
            if not self.world.cut[SCHEDULER, session.node_id]:  # it is answered
                server.heard_s = self.world.now_s

        if self._is_up(session.node_id):
            link = session.node_id, SCHEDULER
            self.world.send("heartbeat", lambda: self._reach(arrive), link)
        self.world.after(BEAT_S / 2, lambda: self._beat(session, worker))

    def _comes(self, node_id: NodeId) -> bool:
        """Whether a sign of life comes that was on its way when its server may have died."""
        del node_id
        return True

    @contextlib.contextmanager
    def _no_answer_for(self, session: Session) -> Iterator[None]:
        """What the dead sent may come when they have left; nobody hears the answer."""
        try:
            yield
        except Fenced:
            assert self.servers[session.node_id].is_dead

    def _is_up(self, node_id: NodeId) -> bool:
        server = self.servers[node_id]
        return not server.is_dead and not server.is_paused

    def _prepare(self, session: Session, server: SimServer) -> None:
        if self._is_up(session.node_id):
            for prepared in server.prepared_changes:
                self.watch.prepared(self.servers[session.node_id], prepared)
            super()._prepare(session, server)
        else:
            self.world.after(0.5, lambda: self._prepare(session, server))

    def _ask(self) -> None:
        for session in self.sessions[:-WORKERS]:
            self._ask_for(session)

    def _ask_for(self, session: Session) -> None:
        """A primary asks for other backups."""
        server = self.servers[session.node_id]
        for request in server.asked if self._is_up(session.node_id) else ():
            link = session.node_id, SCHEDULER
            asking = self._asking(session, request)
            say = f"{session.node_id}: {request}"
            self.world.send(say, lambda asking=asking: self._reach(asking), link)  # type: ignore[misc]
        server.asked = []
        self.world.after(0.5, lambda: self._ask_for(session))

    def _asking(self, session: Session, backup_request: BackupRequest) -> Callable[[], None]:
        def arrive() -> None:
            with self._no_answer_for(session):
                decision = self.scheduler.set_backups(session, [backup_request])
                for range_id in decision.reply:
                    self.world.counts["void requests"] += 1
                    self.world.say(f"void: range {range_id}")
                self._publish(decision.transitions)

        return arrive

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        counts = self.world.counts
        if isinstance(transition, RangesFailedOver | BackupsSet):
            ranges = self.scheduler.view.ranges
            for range_id in transition.range_ids:
                self.world.say(f"range {range_id}: {ranges[range_id]}")
            counts["reconfigured"] += len(transition.range_ids)
            counts["failovers"] += isinstance(transition, RangesFailedOver)
        if isinstance(transition, RangesHandedOver):
            counts["hand-overs"] += len(transition.range_ids)
        counts["hand-overs advised"] += isinstance(transition, HandOversAdvised)
        counts["backups spared"] += isinstance(transition, BackupsSpared)
        if isinstance(transition, BackupsSet):
            self.watch.configured(transition.range_ids)
        if isinstance(transition, RangesLost):
            self.watch.lost(transition.range_ids)
        counts["silent servers"] += isinstance(transition, NodeSilent) and (
            transition.node.node_id in self.servers
        )
        if isinstance(transition, WorkerGone):
            dead = transition.node.incarnation
            may_be = [*self.calamities.dead_workers, *(w for w in self.workers if w.failed)]
            assert dead in {worker.incarnation for worker in may_be}
            counts["gone"] += 1
            self.truth.gone.add(dead)
            self.truth.left |= {(table.table_id, dead) for table in self.layout.tables}

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        super()._publish(transitions)
        if transitions:
            self.given.told(self.scheduler.view)
            self._adopt(self.layout, self.scheduler.view)
            for worker in self.workers:
                self._tell_worker(worker)

    def _tell(self, server: SimServer, view: ClusterView) -> None:
        delay_s = self.world.draw.random() * VIEW_DELAY_S
        link = SCHEDULER, server.node_id

        def arrive() -> None:
            self.world.arrive(link, lambda: server.observe(view))

        self.world.after(delay_s, arrive)

    def _tell_worker(self, worker: SimWorker) -> None:
        self.worker_views.send(worker, self.told_view)

    @property
    def told_view(self) -> ClusterView:
        """The newest that is told to anybody."""
        return self.scheduler.view

    def _remind(self) -> None:
        """A stream of views that broke begins anew with the newest."""
        self.world.after(1.0, self._remind)
        if not self.is_there:
            return
        for server in self.living:
            if server.view_number < self.told_view.view_number:
                self._tell(server, self.told_view)
        self.worker_views.remind(self.told_view)

    @staticmethod
    def _adopt(layout: Layout, view: ClusterView) -> None:
        epochs = {r.range_id: int(r.assignment_epoch) for r in view.ranges}
        if any(layout.epoch[range_id] > epoch for range_id, epoch in epochs.items()):
            return
        layout.epoch.update(epochs)
        layout.owner.update({r.range_id: r.primary for r in view.ranges if r.primary is not None})

    # --- the end

    def _look_for_life(self) -> None:
        """Once all is calm nobody waits for long."""
        self.world.after(1.0, self._look_for_life)
        now_s = self.world.now_s
        for worker, (moves, since_s) in self._moved_s.items():
            if worker.moves != moves or not self.calamities.is_calm:
                self._moved_s[worker] = worker.moves, now_s
            elif not worker.finished and not worker.is_down:
                waited_s = now_s - since_s
                assert waited_s < LIVELY_S, f"LIVE: worker {worker.rank}: {self._standstill()}"

    def _is_over(self) -> bool:
        for worker in self.workers:  # noqa: SIM110 - it is asked after each event
            if not (worker.finished or worker.is_down):
                return False
        return True

    def _check_end(self) -> None:
        self.calamities.calm()
        self.change_every_s = (
            self.world.now_s + 1e6
        )  # while a table changes no range is handed over
        settled = self.world.run(self._is_quiet, self.world.now_s + QUIET_S)
        assert settled, f"LIVE: the backups never caught up: {self.scheduler.view.ranges}"
        for server in self.servers.values():
            if server.is_dead:  # nobody looks at what it holds
                server.machine = type(server.machine)(server.node_id, WORKERS)
                server.sums.clear()
        super()._check_end()
        for assignment in self.scheduler.view.ranges:
            for backup in assignment.backups:
                assert assignment.primary is not None
                primary = self.servers[assignment.primary]
                self._check_equal(primary, self.servers[backup], assignment.range_id)

    def _is_quiet(self) -> bool:
        view = self.scheduler.view
        return (
            all(self._stands(r) for r in view.ranges if r.primary is not None)
            and all(s.view_number == view.view_number for s in self.living)
            and all(s.is_settled and not s.asked for s in self.living)
            and self._are_declared_gone()
            and self.is_even()
        )

    def is_even(self) -> bool:
        """Whether nothing is left to hand over (S9). Servers with update logs never do, nor
        does anybody while a checkpoint waits for a worker, which may take an hour.
        """
        state, view = self.scheduler._state, self.scheduler.view
        if any(s.replication.is_handing_over for s in self.living):
            return False
        if state.checkpoint is not None:
            return True
        living = view.living_servers
        logs = (state.members[node_id].registration.update_log for node_id in living)
        known = view.ranges, state.range_bytes, living
        more = hand_overs(*known, lambda _: living, 1)
        return any(logs) or not (more or any(r.hand_over_to for r in view.ranges))

    def _stands(self, assignment: RangeAssignment) -> bool:
        """Whether its primary serves the range, and as many as should have it live and have it:
        nobody holds it who died last.
        """
        assert assignment.primary is not None
        range_id, holders = assignment.range_id, [self.servers[n] for n in assignment.in_sync]
        serving = self.servers[assignment.primary].replication.primaries.get(range_id)
        needed = min(self.plan.replica_count, len(self.living))
        waits = self.scheduler._state.checkpoint is not None  # until then no backup is spared
        return (
            (len(holders) == needed or (waits and len(holders) > needed))
            and not any(holder.is_dead for holder in holders)
            and serving is not None
            and serving.log.is_confirmed
            and all(  # one that was deposed is suspended until its target has left it out (S8)
                range_id in self.servers[backup].replication.replicas
                for backup in assignment.backups
            )
        )

    def _are_declared_gone(self) -> bool:
        """Whether nobody waits for the dead any more."""
        return all(w.incarnation in self.truth.gone for w in self.calamities.dead_workers)

    def _check_equal(
        self, primary: ReplicatedServer, backup: ReplicatedServer, range_id: RangeId
    ) -> None:
        for table in self.checked_tables:
            blocks = table.blocks_by_range(self.layout.range_count).get(range_id)
            if blocks is None:
                continue
            for block in blocks:
                key = table.table_id, block
                values = primary.values[key], backup.values[key]
                assert values[0] == values[1], f"EQUAL: replicas differ in {key}: {values}"
            part = primary.machine.shards[table.table_id, range_id]
            bits = [s.bits((table.table_id, range_id)) for s in (primary, backup)]
            assert bits[0] == bits[1], f"EQUAL: bits of range {range_id}: {bits}"
            copy = backup.replication.replicas[range_id].copies.get(table.table_id)
            if copy is not None:
                mine, gone = at_once(copying(part.state)), self.truth.gone
                past = set(copy.workers) - set(mine.workers)  # the backup may not be told yet
                assert past <= gone
                ours, theirs = (_known(c, gone, past) for c in (mine, copy))
                assert ours == theirs, f"EQUAL: {ours} is copied as {theirs}"
        self.world.counts["equal replicas"] += 1


def _known(copy: ShardCopy, gone: set[Incarnation], past: set[Incarnation]) -> object:
    """What two copies have alike: which outcomes their workers saw and who is `past` is told in
    passing, and who is gone each server knows from its view.
    """
    return (
        copy.facts,
        copy.versions,
        [
            (_decided(worker.facts, gone), worker.own_updates, worker.ledger.low_water)
            for incarnation, worker in sorted(copy.workers.items())
            if worker.ledger.low_water  # else nothing of it was decided
            and incarnation not in past
        ],
    )


def _decided(facts: WorkerFacts, gone: set[Incarnation]) -> WorkerFacts:
    facts = facts._replace(confirmed=0, predecessor=None)
    if facts.incarnation in gone:
        return facts._replace(left_clock=None, final_seal_clock=None)
    return facts


@pytest.mark.timeout(300)
def test_training_goes_on_without_the_dead(sim_seeds: tuple[int, ...]) -> None:
    """Whatever was answered is there once, whoever serves it."""
    run_seeds(FailoverSimulation, sim_seeds)
