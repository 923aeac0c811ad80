"""Servers that are told to stop, as `ps_server.service.departure` does it, beside all else (S8).

    told --asks, again and again--> the scheduler lets it go --the answer comes--> ended
      +-- the scheduler is not heard for a lease --> ended, if a server may be lost then

Another server takes its place: before it goes, or after.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from functools import partial

from ps_core.cluster_view import NodeState, Session
from ps_core.errors import Fenced, PushpullError, Recovering
from ps_core.keys import NodeId
from ps_server.replication.departure_machine import Departure, Step
from scheduler.machine.cluster import Decision
from scheduler.machine.state import RangesLost, Transition
from tests.sim.calamities import Calamities, Plan
from tests.sim.replicated import LEASE_S, ReplicatedServer
from tests.sim.scheduled import SCHEDULER
from tests.sim.server import SimServer
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import WORKERS

ASK_AGAIN_S = 0.2
ANSWER_S = 1.0
"""For which it waits for an answer."""
FOREVER_S = 1e9
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
        """A holder of its ranges dies when it may."""
        found, draw = self._untold(), self._world.draw
        server = draw.choice(found) if found else None
        holders = [] if server is None else self._holders(server)
        if server is None or not holders:
            return False
        self._tell_one(server)
        until_s = self._world.now_s + 2 * LEASE_S
        self._undo(draw.random(), partial(self._kill_soon, draw.choice(holders), until_s))
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
        """Before the scheduler knows that the other is dead."""
        victim = self._victim(for_good=True)
        holders = [] if victim is None else self._holders(victim)
        if victim is None or not holders:
            return False
        server = self._world.draw.choice(holders)
        self._kill(victim)
        self._undo(self._world.draw.random() * LEASE_S, partial(self._tell_one, server))
        return True


class Departing(FailoverSimulation):
    """A simulation in which servers are told to stop.

    Attributes:
        told: who was, and what became of it.
    """

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.told: dict[NodeId, Departure] = {}
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
        session, answer = self._identities[server.node_id], None
        try:
            self.scheduler.check_kept(session, self.world.now_s)
            decision = self.scheduler.deregister(session, "told to stop", self.world.now_s)
        except PushpullError as error:
            answer = error
        else:
            self.world.counts["let go"] += 1
            self._publish(decision.transitions)
        self.world.send(
            f"server {server.node_id} is told: {answer}",
            lambda: self._answered(server, number, answer),
            (SCHEDULER, server.node_id),
        )

    def _answered(self, server: ReplicatedServer, number: int, error: PushpullError | None) -> None:
        if server.is_dead or number != self._asked[server.node_id]:
            return
        if server.is_paused:
            self.world.after(ASK_AGAIN_S, lambda: self._answered(server, number, error))
            return
        silent_s = self.world.now_s - server.heard_s
        step = self.told[server.node_id].answered(error, silent_s)
        if step is Step.STAYS and error is not None and not error.retry_after_ms:
            assert silent_s <= LEASE_S, (
                f"LIVE: {server.node_id} waits for a scheduler of which it has not heard for "
                f"{silent_s:.1f} s"
            )
        match step:
            case Step.LEAVES:
                self._end(server, "left when others had all")
                return
            case Step.LEAVES_UNHEARD if self.may_lose(server, for_good=True):
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
        """Who may be let go at any moment counts on the others, so they do not count on it."""
        return super().lost() | {s.node_id for s in self._leaving if self._counts_on_others(s)}

    def _counts_on_others(self, server: ReplicatedServer) -> bool:
        session = self._identities[server.node_id]
        try:
            return not self.scheduler.held_alone(session)
        except Fenced:  # it has been let go
            return True

    def _comes(self, node_id: NodeId) -> bool:
        """The dead have no connections."""
        return not self.servers[node_id].is_dead

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

    def _tell(self, server: SimServer, view: object) -> None:
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
