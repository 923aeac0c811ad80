"""Servers that are killed or paused while everything else goes on: nothing happens (G1, G2)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.cluster_view import BackupWish, ClusterView, Session
from ps_core.errors import Fenced
from ps_core.keys import NodeId, RangeId
from scheduler.cluster_state import (
    BackupsSet,
    ClusterSettings,
    NodeSilent,
    RangesFailedOver,
    Transition,
)
from tests.sim.actors import Layout, SimWorker
from tests.sim.replicated import LEASE_S, ReplicatedServer
from tests.sim.scheduled import BEAT_S, VIEW_DELAY_S, ScheduledSimulation
from tests.sim.server import SimServer
from tests.sim.test_simulation import WORKERS, run_seeds

SERVERS = 3
FATES = ("killed", "killed", "paused", "cut off")
QUIET_S = 60.0


class FailoverSimulation(ScheduledSimulation):
    """One seed in which a server is killed or paused, and another when all have backups again."""

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        draw = self.world.draw
        for server in self.servers.values():
            server.peers = self.servers
        self.layout.settings.clipped |= {t.table_id for t in self.layout.tables[:2]}
        self.strikes = draw.choice((1, 1, 2, 3))
        self.dead: set[NodeId] = set()
        self.world.after(draw.random() * draw.choice((1.0, 5.0, 20.0)), self._strike)
        self._ask()

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        settings = super().settings()
        return replace(settings, server_count=SERVERS, replica_count=2, lease_s=LEASE_S)

    def server(self, node_id: NodeId) -> SimServer:
        """One of the servers."""
        return ReplicatedServer(self.world, node_id, WORKERS, self.layout.settings)

    @property
    def servers(self) -> dict[NodeId, ReplicatedServer]:
        """All servers."""
        return {n: s for n, s in self.cluster.items() if isinstance(s, ReplicatedServer)}

    def layout_of(self) -> Layout:
        """What a worker knows: views come to each of them at another time."""
        ours = self.layout
        return replace(ours, owner=dict(ours.owner), epoch=dict(ours.epoch))

    # --- servers that die

    def _strike(self) -> None:
        """When every range has its backups."""
        draw = self.world.draw
        if not self._is_whole() or self._is_over():
            if not self._is_over():
                self.world.after(0.5, self._strike)
            return
        victim = draw.choice([s for n, s in self.servers.items() if n not in self.dead])
        fate = draw.choice(("paused", "cut off", "cut off") if self.dead else FATES)
        self.world.say(f"server {victim.node_id} {fate.upper()}")
        self.world.counts[f"servers {fate}"] += 1
        if fate == "cut off":
            victim.is_cut_off = True
        else:
            victim.stop()
        if fate == "killed":
            self.dead.add(victim.node_id)
        else:
            pause_s = draw.choice((1.0, 4.0, 15.0)) + draw.random()
            self.world.after(pause_s, lambda: self._wake(victim))
        self.strikes -= 1
        if self.strikes:
            self.world.after(1.0 + draw.random() * 10.0, self._strike)

    def _wake(self, server: ReplicatedServer) -> None:
        """It goes on as if nothing had been, until the newest view reaches it."""
        server.wake()
        self._tell(server, self.scheduler.view)

    def _is_whole(self) -> bool:
        return all(
            len(r.backups) == 1 and not self._is_down(r.primary)
            for r in self.scheduler.view.ranges
            if r.primary is not None
        ) and not any(self._is_down(n) for n in self.servers if n not in self.dead)

    def _is_down(self, node_id: NodeId | None) -> bool:
        if node_id is None:
            return False
        return self.servers[node_id].is_down or self.servers[node_id].is_cut_off

    # --- the scheduler

    def _beat(self, session: Session, worker: SimWorker | None) -> None:
        if worker is not None:
            super()._beat(session, worker)
            return

        def arrive() -> None:
            self._publish(self.scheduler.heartbeat(session, self.world.now_s).transitions)

        if not self._is_down(session.node_id):
            self.world.send("heartbeat", arrive)
        self.world.after(BEAT_S / 2, lambda: self._beat(session, worker))

    def _promise(self, session: Session, server: SimServer) -> None:
        if not self._is_down(session.node_id):
            super()._promise(session, server)
        else:
            self.world.after(0.5, lambda: self._promise(session, server))

    def _ask(self) -> None:
        """Primaries ask for other backups."""
        for session in self.sessions[:-WORKERS]:
            server = self.servers[session.node_id]
            for request in () if self._is_down(server.node_id) else server.asked:

                def arrive(session: Session = session, request: object = request) -> None:
                    wish = BackupWish(
                        request.range_id,  # type: ignore[attr-defined]
                        request.assignment_epoch,  # type: ignore[attr-defined]
                        frozenset(request.backups),  # type: ignore[attr-defined]
                    )
                    try:
                        decision = self.scheduler.set_backups(session, [wish])
                    except Fenced as error:
                        self.world.say(f"refused: {error}")
                        return
                    for range_id in decision.reply:
                        self.world.say(f"void: range {range_id}")
                    self._publish(decision.transitions)

                self.world.send(f"request {session.node_id}: {request}", arrive)
            server.asked = []
        self.world.after(0.5, self._ask)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RangesFailedOver | BackupsSet):
            self.world.counts["reconfigured"] += len(transition.range_ids)
        self.world.counts["silent servers"] += isinstance(transition, NodeSilent) and (
            transition.node.node_id in self.servers
        )

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        super()._publish(transitions)
        if transitions:
            view = self.scheduler.view
            self._adopt(self.layout, view)
            for worker in self.workers:
                delay_s = self.world.draw.random() * VIEW_DELAY_S
                self.world.after(delay_s, lambda w=worker: self._tell_worker(w, view))  # type: ignore[misc]

    def _tell_worker(self, worker: SimWorker, view: ClusterView) -> None:
        if self._adopt(worker.layout, view):
            worker.window.assign(worker.layout.owner)

    @staticmethod
    def _adopt(layout: Layout, view: ClusterView) -> bool:
        """Whether the view is newer than what is known."""
        epochs = {r.range_id: int(r.assignment_epoch) for r in view.ranges}
        if any(layout.epoch[range_id] > epoch for range_id, epoch in epochs.items()):
            return False
        layout.epoch.update(epochs)
        layout.owner.update({r.range_id: r.primary for r in view.ranges if r.primary is not None})
        return True

    # --- the end

    def _check_end(self) -> None:
        for server in self.servers.values():
            if not self._is_down(server.node_id):
                continue
            if server.node_id not in self.dead:
                self._wake(server)
        settled = self.world.run(self._is_quiet, self.world.now_s + QUIET_S)
        assert settled, "backups never caught up"
        for node_id in self.dead:  # nobody looks at what they hold
            server = self.servers[node_id]
            server.machine = type(server.machine)(node_id, WORKERS)
            server.sums.clear()
        super()._check_end()
        for assignment in self.scheduler.view.ranges:
            for backup in assignment.backups:
                assert assignment.primary is not None
                primary = self.servers[assignment.primary]
                self._check_equal(primary, self.servers[backup], assignment.range_id)

    def _is_quiet(self) -> bool:
        return self._is_whole() and all(
            server.is_settled and not server.asked
            for node_id, server in self.servers.items()
            if node_id not in self.dead
        )

    def _check_equal(
        self, primary: ReplicatedServer, backup: ReplicatedServer, range_id: RangeId
    ) -> None:
        for table in self.layout.tables:
            for block in table.blocks_by_range(self.layout.range_count).get(range_id, ()):
                key = table.table_id, block
                assert primary.values[key] == backup.values[key], f"replicas differ in {key}"
        self.world.counts["equal replicas"] += 1


@pytest.mark.timeout(300)
def test_training_goes_on_without_the_dead(sim_seeds: tuple[int, ...]) -> None:
    """Whatever was answered is there once, whoever serves it."""
    total = run_seeds(FailoverSimulation, sim_seeds)
    if len(sim_seeds) >= 20:
        missing = {
            "servers killed", "servers paused", "servers cut off", "silent servers", "reconfigured",
            "ranges taken over", "ranges given up", "snapshots", "joined ranges", "equal replicas",
        } - set(total)  # fmt: skip
        assert not missing, f"never happened: {missing}"
