"""Servers that are told to stop, as `until_kept` of a server does it, beside all else (S8).

    told --asks, again and again--> the scheduler lets it go --the answer comes--> ended
      +-- the scheduler is not heard for a lease --> ended, if a server may be lost then

Another server takes its place: before it goes, or after. Others die before and after it is told,
whatever they hold beside it, until it is let go; what they had sent to the scheduler still comes.

Oracle:
    KEPT   Who is let go leaves a living holder of each of its ranges, or one that died when it had
           been told, and no more than two heartbeats before. Two servers are lost at once then: it
           is as if the answer had been lost, and the training goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from functools import partial

from ps_core.cluster_view import ClusterView, NodeState, RangeAssignment, Session
from ps_core.errors import Fenced, PushpullError, Recovering
from ps_core.keys import NodeId
from ps_server.replication.departure_machine import Departure, DepartureStep, held_alone
from scheduler.machine.cluster import Decision
from scheduler.machine.state import RangesLost, Transition
from tests.sim.calamities import Calamities, Plan
from tests.sim.replicated import LEASE_S, ReplicatedServer
from tests.sim.scheduled import BEAT_S, SCHEDULER
from tests.sim.server import SimServer
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import WORKERS
from tests.sim.world import Link

ASK_AGAIN_S = 0.2
ANSWER_S = 1.0
"""For which it waits for an answer."""
FOREVER_S = 1e9
ROUND_S = 2 * BEAT_S
"""How old a sign of life may be that a departure counts on: two heartbeats."""
TELLS = ("told to stop", "two told to stop", "told, and a holder dies", "a holder dies, then told")


class Departures(Calamities):
    """The calamities, and servers that are told to stop."""

    def __init__(self, stage: Departing, plan: Plan) -> None:
        super().__init__(stage, plan)
        self._departing = stage
        self._strikes |= {
            "told to stop": lambda: self._tell(1),
            "two told to stop": lambda: self._tell(2),
            "told, and a holder dies": self._tell_and_kill,
            "a holder dies, then told": self._kill_and_tell,
        }

    def _untold(self) -> list[ReplicatedServer]:
        told = self._departing.told
        return [s for s in self._stage.living if s.node_id not in told and not s.is_paused]

    def _tell(self, count: int) -> bool:
        draw, found = self._world.draw, self._untold()
        if len(found) < count:
            return False
        for server in draw.sample(found, count):
            self._undo(draw.choice((0.0, 0.3)) * draw.random(), partial(self._tell_one, server))
        return True

    def _tell_one(self, server: ReplicatedServer) -> None:
        if not server.is_dead:
            self._departing.tell(server)

    def _holders(self, server: ReplicatedServer) -> list[ReplicatedServer]:
        """Who holds a range that it holds."""
        ranges = self._departing.scheduler.view.ranges
        others = {n for r in ranges if server.node_id in r.in_sync for n in r.in_sync}
        return [s for s in self._untold() if s.node_id in others and s is not server]

    def _tell_and_kill(self) -> bool:
        """A holder of its ranges dies when it may. Others often get no view meanwhile, so that the
        server waits for them.
        """
        found, draw = self._untold(), self._world.draw
        server = draw.choice(found) if found else None
        holders = [] if server is None else self._holders(server)
        if server is None or not holders:
            return False
        self._tell_one(server)
        victim, until_s = draw.choice(holders), self._world.now_s + 2 * LEASE_S
        dies_s = 2.0 * draw.random()
        if draw.random() < 0.5:
            links: list[Link] = [(SCHEDULER, h.node_id) for h in holders if h is not victim]
            self._cut(links, dies_s + 2.0 * draw.random())
        self._undo(dies_s, partial(self._kill_soon, victim, until_s))
        return True

    def _kill_soon(self, server: ReplicatedServer, until_s: float) -> None:
        if server.is_dead or self._world.now_s > until_s:
            return
        if self._stage.may_lose(server, for_good=True):
            self._world.counts["a holder died beside who was told"] += 1
            self._kill(server)
        else:
            self._undo(0.1, partial(self._kill_soon, server, until_s))

    def _kill_and_tell(self) -> bool:
        """Before the scheduler knows that the other is dead; what that one had sent often comes
        after the other asks.
        """
        victim, draw = self._victim(for_good=True), self._world.draw
        holders = [] if victim is None else self._holders(victim)
        if victim is None or not holders:
            return False
        server = draw.choice(holders)
        if draw.random() < 0.5:
            self._delay(victim)
            self._undo(BEAT_S * draw.random(), partial(self._kill_then_tell, victim, server))
        else:
            self._kill(victim)
            self._undo(draw.random() * LEASE_S, partial(self._tell_one, server))
        return True

    def _kill_then_tell(self, victim: ReplicatedServer, server: ReplicatedServer) -> None:
        if not victim.is_dead and self._stage.may_lose(victim, for_good=True):
            self._kill(victim)
            self._undo(0.1 * self._world.draw.random(), partial(self._tell_one, server))

    def _delay(self, server: ReplicatedServer) -> None:
        """What it says comes late to the scheduler, for a while."""
        link = server.node_id, SCHEDULER
        self._world.slow[link] = LEASE_S
        self._undo(2 * LEASE_S, partial(self._faster, link))


class Departing(FailoverSimulation):
    """A simulation in which servers are told to stop.

    Attributes:
        told: who was, and what became of it.
    """

    may_group = False

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.told: dict[NodeId, Departure] = {}
        self._told_s: dict[NodeId, float] = {}
        self._died_s: dict[NodeId, float] = {}
        self._identities: dict[NodeId, Session] = {}
        self._asked: dict[NodeId, int] = {}
        self._followed: set[ReplicatedServer] = set()
        self._coming_count = 0
        self._numbers = itertools.count(1)
        self._newcomer_numbers = itertools.count(20)
        self._newcomers = random.Random(f"newcomers of {seed}")
        super().__init__(seed, narrate=narrate)
        self._identities |= {s.node_id: s for s in self.sessions[:-WORKERS]}

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        return Departures(self, plan)

    def join(self, decision: Decision[Session]) -> None:
        """A server has registered while the others train."""
        super().join(decision)
        self._identities[decision.reply.node_id] = decision.reply
        self._coming_count = max(0, self._coming_count - 1)

    def kill(self, server: SimServer) -> None:
        """For good; there will be enough who are not told."""
        super().kill(server)  # type: ignore[arg-type]
        self._died_s[server.node_id] = self.world.now_s
        self._make_up()

    def _make_up(self) -> None:
        """Servers come until there are enough that could take what those hold who were told."""
        needed = max(self.plan.replica_count, self.plan.min_in_sync)
        if len(self.living) - len(self._leaving) + self._coming_count < needed:
            self._come()

    def _come(self) -> None:
        self._coming_count += 1
        self.world.after(0.2 + self._newcomers.random() * 5.0, self.restart)

    def newcomer_number(self) -> int:
        """Of the server that comes next: several may come while the scheduler is away."""
        return next(self._newcomer_numbers)

    # --- who is told

    def tell(self, server: ReplicatedServer) -> None:
        """SIGTERM."""
        if server.node_id in self.told:
            return
        self.world.say(f"TOLD server {server.node_id} to stop")
        self.world.counts["told to stop"] += 1
        self.told[server.node_id] = Departure(FOREVER_S, LEASE_S)
        self._told_s[server.node_id] = self.world.now_s
        if self._newcomers.random() < 0.5:
            self._come_for(server)
        self._make_up()
        self._ask_to_leave(server)

    def _come_for(self, server: ReplicatedServer) -> None:
        """A server comes in its place."""
        if server not in self._followed:
            self._followed.add(server)
            self._come()

    def _ask_to_leave(self, server: ReplicatedServer) -> None:
        if server.is_dead:
            return
        if server.is_paused:
            self.world.after(ASK_AGAIN_S, lambda: self._ask_to_leave(server))
            return
        number = self._asked[server.node_id] = next(self._numbers)
        link = server.node_id, SCHEDULER
        self.world.send(
            f"server {server.node_id} asks to leave",
            lambda: self._reach(lambda: self._let_go(server, number)),
            link,
        )
        nobody = Recovering("UNAVAILABLE: the scheduler does not answer")  # as gRPC's own is told
        self.world.after(ANSWER_S, lambda: self._answered(server, number, nobody))

    def _let_go(self, server: ReplicatedServer, number: int) -> None:
        """As `SchedulerServicer.DeregisterNode`."""
        if server.is_dead:  # its connection has broken, and the request with it
            return
        session = self._identities[server.node_id]
        answer: PushpullError | None
        try:
            decision = self.scheduler.refusal_to_leave(session, self.world.now_s)
            answer = decision.reply
            self._publish(decision.transitions)
            if answer is None:
                if self._loses_two(server):
                    return
                left = self.scheduler.deregister(session, "told to stop", self.world.now_s)
                self.world.counts["let go"] += 1
                self._publish(left.transitions)
        except PushpullError as error:
            answer = error
        self.world.send(
            f"server {server.node_id} is told: {answer}",
            lambda: self._answered(server, number, answer),
            (SCHEDULER, server.node_id),
        )

    def _loses_two(self, server: ReplicatedServer) -> bool:
        """Whether a range is lost if it leaves now, with a holder that has just died (KEPT). One
        without values keeps no server.
        """
        now_s, node_id, view = self.world.now_s, server.node_id, self.scheduler.view
        with_values = {r for t in view.tables for r in t.blocks_by_range(len(view.ranges))}
        lost = [
            r
            for r in view.ranges
            if r.range_id in with_values
            and node_id in r.in_sync
            and not any(self._keeps(n) for n in r.in_sync if n != node_id)
            and not self._has_log(r, node_id)
        ]
        for r in lost:
            died_s = max((self._died_s[n] for n in r.in_sync if n in self._died_s), default=0.0)
            assert died_s >= self._told_s[node_id], (
                f"KEPT: server {node_id} may leave with range {r.range_id}; the other holders of "
                f"{r.in_sync} died before it was told to stop"
            )
            assert now_s - died_s <= ROUND_S, (
                f"KEPT: server {node_id} may leave with range {r.range_id}; the last of the other "
                f"holders of {r.in_sync} died {now_s - died_s:.1f} s ago"
            )
        self.world.counts["a holder died as it was let go"] += bool(lost)
        return bool(lost)

    def _has_log(self, assignment: RangeAssignment, node_id: NodeId) -> bool:
        """Whether an update log has the range when that server has left."""
        del assignment, node_id
        return False

    def _keeps(self, node_id: NodeId) -> bool:
        """Whether the server lives, and has not been let go."""
        server = self.servers[node_id]
        return not server.is_dead and not (node_id in self.told and self._is_let_go(server))

    def _answered(self, server: ReplicatedServer, number: int, error: PushpullError | None) -> None:
        if server.is_dead or number != self._asked[server.node_id]:
            return
        if server.is_paused:
            self.world.after(ASK_AGAIN_S, lambda: self._answered(server, number, error))
            return
        silent_s = self.world.now_s - server.heard_s
        alone = held_alone(server._view, server.node_id)
        self.world.counts["stayed with the only copy"] += bool(alone) and silent_s > LEASE_S
        answered = self.told[server.node_id].answered
        step = answered(error, silent_s, may_be_saved=bool(alone))
        if step is DepartureStep.STAYS and error is not None and not error.retry_after_ms:
            assert alone or silent_s <= LEASE_S, (
                f"LIVE: {server.node_id} waits for a scheduler of which it has not heard for "
                f"{silent_s:.1f} s"
            )
        match step:
            case DepartureStep.LEAVES:
                self._end(server, "left when others had all")
                return
            case DepartureStep.LEAVES_UNHEARD if self.may_lose(server, for_good=True):
                self._end(server, "left unheard")
                return
        self.world.counts["stayed for now"] += 1
        self._asked[server.node_id] = 0
        self.world.after(ASK_AGAIN_S, lambda: self._ask_to_leave(server))

    def _end(self, server: ReplicatedServer, how: str) -> None:
        if server.is_dead:
            return
        self.world.say(f"ENDED server {server.node_id}: {how}")
        self.world.counts[how] += 1
        self.kill(server)
        self._come_for(server)

    @property
    def _leaving(self) -> list[ReplicatedServer]:
        return [server for server in self.living if server.node_id in self.told]

    # --- what may befall others meanwhile

    def lost(self) -> set[NodeId]:
        """Who has been let go counts on the others, so they do not count on it."""
        return super().lost() | {s.node_id for s in self._leaving if self._is_let_go(s)}

    def _is_let_go(self, server: ReplicatedServer) -> bool:
        try:
            self.scheduler.held_alone(self._identities[server.node_id])
        except Fenced:
            return True
        return False

    @contextlib.contextmanager
    def _no_answer_for(self, session: Session) -> Iterator[None]:
        try:
            yield
        except Fenced:
            server = self.servers[session.node_id]
            assert server.is_dead or server.node_id in self.told
            if not server.is_dead:  # what let it go was lost on the way
                self.world.send(
                    f"server {server.node_id} is fenced",
                    lambda: self._end(server, "left, and heard of it late"),
                    (SCHEDULER, server.node_id),
                )

    def _tell(self, server: SimServer, view: ClusterView) -> None:
        """Who has left is told nothing more."""
        nodes = {node.node_id: node for node in self.scheduler.view.nodes}
        node = nodes.get(server.node_id)
        if node is not None and node.state is not NodeState.LEFT:
            super()._tell(server, view)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        assert not isinstance(transition, RangesLost), f"LOST: {transition}"

    # --- the end

    def _is_quiet(self) -> bool:
        return not self._leaving and super()._is_quiet()

    def _standstill(self) -> str:
        waits = {s.node_id: self.told[s.node_id].awaited for s in self._leaving}
        return f"{super()._standstill()}; told to stop, and there: {waits}"
