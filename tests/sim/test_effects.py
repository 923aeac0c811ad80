"""Effects that fail: the server does nothing from there on, and others take over (G1 to G4, S8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import ClusterView, NodeState
from ps_core.errors import Draining
from ps_core.keys import NodeId, RangeId
from ps_core.sliced_work import Work
from ps_server.fail_stop import FailStop, carries_out, decides
from ps_server.ranges.events import Accumulate, AnswerPull, EntryEvent, PullEvent, RefusePull
from ps_server.replication.messages import Ack, LogRecord
from ps_server.replication.output_commit import CommittedEffect
from scheduler.machine.state import RangesFailedOver, Transition
from tests.sim.arithmetic import one_thread
from tests.sim.calamities import STRIKES, Calamities, Plan
from tests.sim.peer_streams import Stream
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.server import TICK_S
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import QUICK_SEEDS, WORKERS, run_seeds

UNTIL_BREAK = (0, 1, 3, 10, 40)
"""So many effects are carried out before the one that fails."""


class BrokenEffect(Exception):
    """An effect failed; whoever called swallows it, as gRPC does with what handlers raise."""


class BrokenReplica(Exception):
    """A record could not be made here."""


class MortalServer(ReplicatedServer):
    """A server whose effects may fail, after some of those that were decided with them."""

    may_break: Callable[[], bool] = staticmethod(lambda: False)
    may_lose: Callable[[RangeId], bool] = staticmethod(lambda _: False)

    def begin(self) -> None:
        """Before anything else."""
        self.health = FailStop()
        self.breaks_in: int | None = None
        self.loses_next = False

    # --- events: what is raised ends in their handler

    @decides
    def _decided(self, event: Callable[[], None]) -> None:
        event()

    def _event(self, event: Callable[[], None]) -> None:
        try:
            self._decided(event)
        except (BrokenEffect, Draining):
            self.world.say(f"server {self.node_id}: an effect failed, and its handler ended")

    def in_turn(self, action: Callable[[], None]) -> None:
        """Its loop gets to it."""
        self._event(lambda: super(MortalServer, self).in_turn(action))

    def observe(self, view: ClusterView) -> None:
        """A view came."""
        self._event(lambda: super(MortalServer, self).observe(view))

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        self._event(lambda: super(MortalServer, self).entry(event))

    def entries(self, events: Iterable[EntryEvent]) -> None:
        """Those of one message."""
        self._event(lambda: super(MortalServer, self).entries(events))

    def read(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of one range arrived."""
        self._event(lambda: super(MortalServer, self).read(event, on_answer))

    def hear(self, sender: NodeId, message: object, stream: Stream | None = None) -> None:
        """A message of another server."""
        self._event(lambda: super(MortalServer, self).hear(sender, message, stream))

    def work_failed(self, failure: Exception) -> None:
        """One that nobody waits for any more; as `ParameterNode`."""
        if not isinstance(failure, BrokenEffect | Draining):
            raise failure
        self.health.failed(failure)

    def _tick(self) -> None:
        before = self.world.counts["ticks of servers"]
        self._event(lambda: super(MortalServer, self)._tick())
        if self.world.counts["ticks of servers"] == before:  # it did not come to its end
            self.world.after(TICK_S, self._tick)

    # --- what fails

    def _breaks_now(self, effect_count: int) -> bool:
        if self.breaks_in is None:
            return False
        if effect_count > self.breaks_in and self.may_break():
            self.breaks_in = None
            return True
        self.breaks_in = max(0, self.breaks_in - effect_count)
        return False

    @carries_out
    def _doing(self, committed: Sequence[CommittedEffect]) -> Work[None]:
        done_count = self.breaks_in or 0
        if self._breaks_now(len(committed)):
            yield from super()._doing(committed[:done_count])
            if self.may_break():  # no other was lost meanwhile
                self.world.counts["fault: effect failed"] += 1
                raise BrokenEffect
            committed = committed[done_count:]
        yield from super()._doing(committed)

    def accumulate(self, effect: Accumulate) -> None:
        """See `Sums`."""
        if self._breaks_now(1):
            self.world.counts["fault: sum failed"] += 1
            raise BrokenEffect
        super().accumulate(effect)

    def _making(self, record: LogRecord) -> Work[None]:
        if self.loses_next and self.may_lose(record.range_id):
            self.loses_next = False
            raise BrokenReplica
        yield from super()._making(record)

    def _following(self, record: LogRecord) -> Work[Ack | None]:
        try:
            return (yield from super()._following(record))
        except BrokenReplica:
            self.lose_track(record.range_id)
            return None


class Failures(Calamities):
    """The calamities, and effects that fail."""

    def __init__(self, stage: EffectSimulation, plan: Plan) -> None:
        super().__init__(stage, plan)
        self._simulation = stage
        self._strikes["effect failed"] = self._break_effect
        self._strikes["replica broken"] = self._break_replica

    def _break_effect(self) -> bool:
        victim = self._victim(for_good=True)
        if not isinstance(victim, MortalServer):
            return False
        victim.breaks_in = self._world.draw.choice(UNTIL_BREAK)
        return True

    def _break_replica(self) -> bool:
        victim = self._world.draw.choice(self._stage.living)
        assert isinstance(victim, MortalServer)
        victim.loses_next = True
        return True

    def broke(self, server: MortalServer) -> None:
        """It is dead from now on."""
        self._world.say(f"BROKEN server {server.node_id}")
        self._stage.kill(server)
        self._may_come_back()

    def lost_track(self, range_id: RangeId) -> None:
        """Its primary dies at times before anybody knows that a backup has lost track, while a
        third server has the range.
        """
        primary = self._simulation.scheduler.view.ranges[range_id].primary
        if primary is not None and self._world.draw.random() < 0.7:
            self._kill_soon(self._simulation.servers[primary], attempts=10)

    def _kill_soon(self, server: ReplicatedServer, attempts: int) -> None:
        """As soon as it may be lost, if that is before the others know."""
        if self.is_calm or server.is_dead or not attempts:
            return
        if not self._stage.may_lose(server, for_good=True):
            self._world.after(0.2, lambda: self._kill_soon(server, attempts - 1))
        else:
            self._world.say(f"KILLED server {server.node_id}, of whose backups one has lost track")
            self._world.counts["fault: killed beside a broken replica"] += 1
            self._stage.kill(server)
            self._may_come_back()


class EffectSimulation(FailoverSimulation):
    """One seed in which effects fail, beside all else."""

    often: ClassVar[frozenset[str]] = FailoverSimulation.often | {
        "fault: effect failed", "fault: replica broken",
    }  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"fault: sum failed", "ranges passed on"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "failovers": 1, "joined ranges": 1}
    server_kind: ClassVar[type[MortalServer]] = MortalServer

    @cached_property
    def plan(self) -> Plan:
        """What happens: one of the two first."""
        plan, draw = super().plan, self.world.draw
        first = draw.choice(("effect failed", "effect failed", "replica broken"))
        second = draw.choice(("effect failed", "replica broken", "killed"))
        others = draw.sample(STRIKES, 2)
        return replace(plan, kinds=(first, second, *others), strike_count=plan.strike_count + 2)

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        return Failures(self, plan)

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place."""
        made = self.server_kind.__new__(self.server_kind)
        made.begin()
        made.__init__(self.world, node_id, self.layout.settings, WORKERS, place)  # type: ignore[misc]
        made.may_break = lambda: self.may_lose(made, for_good=True)
        made.may_lose = lambda range_id: self._has_another(made, range_id)
        made.on_lost_track = self._lost_track
        made.health.on_failure = lambda failure: self._failed(made, failure)
        return made

    def _failed(self, server: MortalServer, failure: Exception) -> None:
        if isinstance(failure, BrokenEffect):
            assert isinstance(self.calamities, Failures)
            self.calamities.broke(server)

    def _lost_track(self, range_id: RangeId) -> None:
        assert isinstance(self.calamities, Failures)
        self.calamities.lost_track(range_id)

    def _has_another(self, server: ReplicatedServer, range_id: RangeId) -> bool:
        """Whether another holder of the range lives, is heard, and has it."""
        return any(
            not other.is_dead
            and self.calamities.away[other.node_id] <= 0
            and self.watch.has(other, range_id)
            for node_id in self.scheduler.view.ranges[range_id].in_sync
            if (other := self.servers[node_id]) is not server
        )

    def may_lose(self, server: ReplicatedServer, *, for_good: bool) -> bool:
        """Nor may a server be lost whose range another holder has lost track of."""
        if not super().may_lose(server, for_good=for_good):
            return False
        for r in self.ranges_to_keep():
            without = [n for n in r.in_sync if not self.watch.has(self.servers[n], r.range_id)]
            if without and not self._has_another(server, r.range_id):
                return False
        return True

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RangesFailedOver):
            is_alive = transition.lost.state is NodeState.ALIVE
            self.world.counts["ranges passed on"] += is_alive * len(transition.range_ids)

    def _check_end(self) -> None:
        super()._check_end()
        for server in self.living:
            missing = server.replication.missing
            assert not missing, f"LOST: ranges {missing} are server {server.node_id}'s: no values"


def test_who_drops_a_range_that_it_has_joined_anew_is_seen() -> None:
    """HELD: it had lost track of the range before, and that says nothing of it since."""
    simulation = FailoverSimulation(0)
    for worker in simulation.workers:
        worker.start(simulation.program(worker))
    watch, servers, view = simulation.watch, simulation.servers, simulation.scheduler.view

    def shown() -> list[RangeId]:
        return [r.range_id for r in view.ranges if r.backups and watch.seen_of(r.range_id)]

    with one_thread():
        assert simulation.world.run(lambda: bool(shown()), 10.0)
    assignment = view.ranges[shown()[0]]
    range_id, primary = assignment.range_id, servers[assignment.in_sync[0]]
    backup, released = servers[assignment.backups[0]], watch.seen_of(assignment.range_id)
    assert released is not None
    replica = backup.replication.replicas[range_id]
    backup.replication.leave(range_id)
    watch.lost_track(backup, range_id)
    watch.seen(primary, range_id, released[1])
    backup.replication.replicas[range_id] = replica
    watch.acknowledges(backup, range_id)
    backup.replication.leave(range_id)
    with pytest.raises(AssertionError, match="HELD"):
        watch.seen(primary, range_id, released[1])


@pytest.mark.timeout(300)
def test_a_server_whose_effect_failed_is_dead(sim_seeds: tuple[int, ...]) -> None:
    """What it decided and did not do, others have, or nobody has seen."""
    run_seeds(EffectSimulation, sim_seeds[:QUICK_SEEDS])
