"""Workers that die and are replaced while servers fail over (S6 beside S8 and S9).

A worker is killed or paused, often while another one is so slow that ranges hold what the dead one
has sealed, and form nothing of it. A replacement takes its rank, and may die in its turn: when the
dead one was declared gone, or with its identity before anybody knows. Servers are killed, paused
and cut off all the time. Who has finished may leave the cluster.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import Node, NodeState, Role, Session
from ps_core.keys import Incarnation, RangeId
from ps_core.tables.table import Table
from ps_worker.window.push_window import SendPush
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE
from scheduler.machine.cluster import Decision
from scheduler.machine.state import (
    ChangeCommitted,
    RangesFailedOver,
    Registration,
    Transition,
    WorkerGone,
)
from tests.sim.actors import Layout, SimWorker
from tests.sim.calamities import Plan
from tests.sim.grads import Grad
from tests.sim.scheduled import LOOK_S
from tests.sim.test_failover import WORKER_TIMEOUT_S, FailoverSimulation
from tests.sim.test_simulation import WORKERS, run_seeds
from tests.sim.training import training
from tests.sim.truth import Body

pytestmark = pytest.mark.slow

_SLOW_S = (14.0, 39.0)
"""For how long a slow worker takes no step: longer than it takes to replace one that is dead."""


_BAD_SHARE = 0.08
"""Of blocks that are not finite: so that seals which skip are there when a range moves."""

_STEPS = (2, 4, 30, 30)
"""Of a worker, at most."""

_LONGER_S = 60.0
"""Than elsewhere, it is not calm: most get far enough to leave by then."""

_AT_A_MOMENT = 0.6
"""Of the moments at which it matters that workers fall silent and a server goes: they do."""


_AT_ONCE = 0.3
"""Of the workers that die or are paused: they are started again with their identity ..."""

_BACK_WITHIN_S = 4.0
"""... so soon, while they may be members still."""


def identity_of(number: int) -> str:
    """What a worker, and those that replace it, come with; other runs have the same."""
    return f"worker-{number}"


class ReplacementSimulation(FailoverSimulation):
    """One seed in which up to three workers die, one after the other, and are replaced."""

    may_sum = False
    may_group = False
    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed", "fault: worker killed", "failovers", "ranges taken over", "snapshots",
        "gone", "replacements", "joined", "slow worker", "came back", "fenced", "left",
        "failovers after a join", "started again at once",
        *(f"newcomers' steps under {mode}" for mode in ("bsp", "ssp", "asp")), "equal replicas",
        "checkpoints", "seals of what was invalid elsewhere", "final seals beyond all steps",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "newcomers' clipped steps under bsp", "replaced again", "steps that are passed",
        "steps in some ranges only", "undecided steps of the replaced",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {
        "messages": 2_000, "failovers": 1, "gone": 1, "joined": 1,
    }  # fmt: skip

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.slow: set[SimWorker] = set()
        self.paused: set[SimWorker] = set()
        self.has_left: set[SimWorker] = set()
        self.first: dict[Incarnation, Session] = {}
        self._asked_count = 0
        self._who_returns = random.Random(f"identities of {seed}")
        self._is_ending = False
        super().__init__(seed, narrate=narrate)
        self.first = {session.incarnation: session for session in self.sessions[-WORKERS:]}
        self._moments = random.Random(f"moments of {seed}")
        for worker in self.workers:
            worker.bad_share = _BAD_SHARE
            self._strike_at_its_moments(worker)
        self.is_steady = self.world.draw.random() < 0.5
        if self.world.draw.random() < 0.5:
            self._deregister_some()

    @cached_property
    def plan(self) -> Plan:
        """What happens: a worker dies early, and others may later."""
        plan, draw = super().plan, self.world.draw
        others = [kind for kind in plan.kinds[1:] if kind != "worker killed"]
        return replace(
            plan,
            kinds=(plan.kinds[0], "worker killed", *others),
            strike_count=plan.strike_count + draw.randint(1, 3),
            worker_deaths=draw.choice((1, 2, 3)),
            calm_s=plan.calm_s + _LONGER_S,
        )

    def step_count(self) -> int:
        """Some leave early, while servers come and go."""
        return min(super().step_count(), self.world.draw.choice(_STEPS))

    def _change(self) -> None:
        """Under BSP most can wait for who is dead: half of all seeds stay what they are."""
        if not self.is_steady:
            super()._change()

    # --- workers that die, and slow ones

    def kill_worker(self, worker: SimWorker) -> None:
        """For good, or for a while; another one may be slow meanwhile."""
        draw, counts = self.world.draw, self.world.counts
        others = self._others_in_step(worker)
        at_s = 0.0
        if others and not self.slow and draw.random() < 0.7:
            self._slow_down(draw.choice(others))
            at_s = draw.random()
        if self._who_returns.random() < _AT_ONCE:
            back_s = at_s + self._who_returns.random() * _BACK_WITHIN_S
            self.world.after(back_s, lambda: self._return_as_itself(worker))
        if draw.random() < 0.75:
            self.world.after(at_s, worker.stop)
            return
        counts["paused workers"] += 1
        self.paused.add(worker)
        for_s = draw.choice((2.0, WORKER_TIMEOUT_S, 3 * WORKER_TIMEOUT_S)) + draw.random()
        self.world.after(at_s, worker.stop)
        self.world.after(at_s + for_s, lambda: self._wake(worker))

    def _slow_down(self, worker: SimWorker) -> None:
        """Its heartbeats go on."""
        self.world.say(f"SLOW worker {worker.rank}")
        self.world.counts["slow worker"] += 1
        self.slow.add(worker)
        worker.stop()

        def wake() -> None:
            self.slow.discard(worker)
            worker.wake()

        self.world.after(self.world.draw.uniform(*_SLOW_S), wake)

    def _wake(self, worker: SimWorker) -> None:
        self.world.counts["came back"] += 1
        self.world.say(f"WOKE worker {worker.rank}")
        self.paused.discard(worker)
        worker.wake()

    def _is_heard(self, worker: SimWorker) -> bool:
        if worker in self.has_left or worker.failed:
            return False
        return worker in self.slow or super()._is_heard(worker)

    # --- moments

    def _strike_at_its_moments(self, worker: SimWorker) -> None:
        worker.has_sent_whole = lambda effect: self._has_sent_whole(worker, effect)
        worker.says_goodbye = lambda: self._says_goodbye(worker)

    def _strikes_now(self, of: Sequence[SimWorker]) -> bool:
        is_free = bool(of) and not self.slow and not self.calamities.is_calm
        return is_free and self._moments.random() < _AT_A_MOMENT

    def _has_sent_whole(self, worker: SimWorker, effect: SendPush) -> None:
        """Its step has left with its seal, and is wrong: it does not hear so before the range
        moves, and the update does not form, since another has not come so far.
        """
        sealed, body = self.truth.sealed, effect.body
        behind = [
            other
            for other in self._others_in_step(worker)
            if sealed.get((effect.key.table_id, other.incarnation), effect.clock) < effect.clock
        ]
        assert isinstance(body, Body)
        if body.problem is not None and self._strikes_now(behind):
            self._slow_down(worker)
            self._slow_down(self._moments.choice(behind))
            owner = self.layout.owner[effect.key.range_id]
            at_s = 0.5 + self._moments.random()
            self.world.after(at_s, lambda: self.calamities.strike_server(owner))

    def _says_goodbye(self, worker: SimWorker) -> None:
        """It goes when the others take no step for a while, and ranges move before they do."""
        others = self._others_in_step(worker)
        if self._strikes_now(others):
            for other in others:
                self._slow_down(other)
            at_s = 1.0 + 2.0 * self._moments.random()
            self.world.after(at_s, self.calamities.strike_server)

    def _others_in_step(self, worker: SimWorker) -> list[SimWorker]:
        others = [other for other in self.workers if other is not worker]
        return [other for other in others if not other.finished and not other.is_down]

    # --- those who replace them

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, WorkerGone):
            node, delay_s = transition.node, self.world.draw.random() * 4.0
            self.world.after(delay_s, lambda: self._follow(node))
        counts = self.world.counts
        if isinstance(transition, RangesFailedOver):
            counts["failovers after a join"] += counts["joined"] > 0
            for range_id in transition.range_ids:
                self._count_undecided(range_id)
        if isinstance(transition, ChangeCommitted) and transition.change.join is not None:
            predecessors = [w for w in self.workers if w.rank == transition.change.join.rank]
            counts["replaced again"] += len(predecessors) > 2
            if self.slow and self.world.draw.random() < 0.8:
                at_s = self.world.draw.random() * 2.0
                self.world.after(at_s, self.calamities.strike_server)

    def _count_undecided(self, range_id: RangeId) -> None:
        """What nobody will send again is lost with the range's primary."""
        for server in self.servers.values():
            if range_id not in server.replication.primaries:
                continue
            for (_, held_in), part in server.machine.shards.items():
                if held_in == range_id:
                    state = part.state
                    former = set(state.workers.values()) - set(state.by_rank.values())
                    undecided = sum(bool(worker.steps) for worker in former)
                    self.world.counts["undecided steps of the replaced"] += undecided

    def _follow(self, node: Node) -> None:
        """Another worker comes for one that is gone."""
        self._replace(node.rank)

    def asking(self, index: int, role: Role) -> Registration:
        """What one of the first nodes registers with: workers have identities."""
        identity = identity_of(index) if role is Role.WORKER else ""
        return replace(super().asking(index, role), identity=identity)

    def _return_as_itself(self, worker: SimWorker) -> None:
        """A worker comes with the identity of one that is dead, or paused, and is a member still:
        nobody waits until that one is declared gone.
        """
        run, rank = worker.layout.run, worker.rank
        holder = self.scheduler._state.workers_by_rank(run)[rank]
        is_its = holder.incarnation == worker.incarnation and holder.state.is_member
        is_stopped = worker.is_down and worker not in self.slow and not self._is_ending
        if not is_its or not is_stopped or not self._trains(run):
            return
        if rank > 0 or self._has_initial_values(run):
            self.world.counts["started again at once"] += 1
            self._ask_as(run, rank)

    def _replace(self, rank: int) -> None:
        if not self._is_replaced("", rank):
            self.world.after(LOOK_S, lambda: self._replace(rank))

    def _is_replaced(self, run: str, rank: int) -> bool:
        """Another worker takes the rank, unless nobody trains any more; False: later."""
        holder = self.scheduler._state.workers_by_rank(run)[rank]
        if holder.state is not NodeState.GONE or not self._trains(run):
            return True
        if rank == 0 and not self._has_initial_values(run):  # it would have to give them
            return False
        self._ask_as(run, rank)
        return True

    def _ask_as(self, run: str, rank: int) -> None:
        """Another worker registers for the one that had this rank, and its identity."""
        self._asked_count += 1
        before = self.scheduler._state.workers_by_rank(run)[rank]
        asking = Registration(
            f"replacement {self._asked_count}".encode().ljust(16),
            Role.WORKER,
            requested_rank=self._who_returns.choice((None, rank)),
            features=(CHECKPOINTS_FEATURE,),
            run=run,
            identity=self.scheduler._state.members[before.node_id].registration.identity,
        )
        self._admitted(asking, self._takes_over)

    def _trains(self, run: str) -> bool:
        """Whether anybody of the run does."""
        del run
        return not self._is_over()

    def _admitted(self, asking: Registration, comes: Callable[[Decision[Session]], None]) -> None:
        """A node registers, and comes when it is answered."""
        comes(self.scheduler.register(asking, self.world.now_s))

    def _takes_over(self, decision: Decision[Session]) -> None:
        session = decision.reply
        members = [n for n in self.scheduler._state.workers_of(session.run) if n.state.is_member]
        assert len({n.rank for n in members}) == len(members), f"CL-4: {members}"
        worker = SimWorker(
            self.world, self.cluster, self.layout_in(session.run), session.rank, session.incarnation
        )
        worker.is_late_joiner = True
        self._strike_at_its_moments(worker)
        worker.joined_after = lambda: self._joined_after(session.incarnation)
        self.workers.append(worker)
        self.first[session.incarnation] = session
        self._moved_s[worker] = (0, self.world.now_s)
        self._publish(decision.transitions)
        self._beat(session, worker)
        self.world.counts["replacements"] += 1
        self._start_late(worker, self.scheduler.view.view_number)
        if self._is_ending:
            self._end_late(worker)

    def layout_in(self, run: str) -> Layout:
        """What a worker of the run knows."""
        del run
        return self.layout_of()

    def _has_initial_values(self, run: str) -> bool:
        """Whether every range that holds blocks of its tables has a primary with their values, and
        the backups as well: another primary would not have what this one alone has decided.
        """
        owner = self.layout.owner
        for table in [table for table in self.layout.tables if table.run == run]:
            for range_id in table.blocks_by_range(self.layout.range_count):
                server = self.servers[owner[range_id]]
                part = server.machine.shards.get((table.table_id, range_id))
                primary = server.replication.primaries.get(range_id)
                is_alone = primary is not None and primary.log.held_count
                if part is None or not part.state.initialized or is_alone:
                    return False
        return True

    def _start_late(self, worker: SimWorker, view_number: int) -> None:
        """A session waits for the view that has the node."""
        if any(server.view_number < view_number for server in self.living):
            self.world.after(LOOK_S, lambda: self._start_late(worker, view_number))
            return
        worker.start(training(worker, self.truth, self.world.draw.randint(2, 8)))

    # --- those who leave

    def _deregister_some(self) -> None:
        """Who has finished leaves the cluster, while another one trains."""
        self.world.after(LOOK_S, self._deregister_some)
        for worker in self.workers:
            others = [w for w in self.workers if w is not worker and w not in self.has_left]
            if worker in self.has_left or not worker.finished or worker.is_down or worker.failed:
                continue
            if any(self._is_heard(other) and not other.finished for other in others):
                self.has_left.add(worker)
                worker.stop()  # nothing that is still under way to it matters
                self.world.counts["left"] += 1
                self._leave(self.first[worker.incarnation])

    def _leave(self, session: Session) -> None:
        self._publish(self.scheduler.deregister(session, "done", self.world.now_s).transitions)

    # --- the end

    def _is_over(self) -> bool:
        for w in self.workers:
            if not w.finished and (not w.is_down or w in self.slow or w in self.paused):
                return False
        return True

    def _are_declared_gone(self) -> bool:
        """Some were only paused, and woke in time; others died of an error, or were told to end."""
        dead = [worker for worker in self.calamities.dead_workers if worker.is_down]
        dead += [worker for worker in self.workers if worker.failed]
        nodes = self.scheduler.view.nodes
        gone = self.truth.gone | {n.incarnation for n in nodes if n.state is NodeState.LEFT}
        return all(w.incarnation in gone for w in dead if w not in self.has_left)

    def _end_late(self, worker: SimWorker) -> None:
        """It came as the others ended: it is killed, since nobody waits for its end."""
        self.world.counts["came as the others ended"] += 1
        self.calamities.dead_workers.append(worker)
        worker.stop()

    def _check_end(self) -> None:
        self._is_ending = True
        for worker in self.workers:
            if not worker.finished and not worker.is_down:
                self._end_late(worker)
        super()._check_end()
        for table in self.checked_tables:
            if self.layout.settings.is_always_bsp(table):
                self._check_whole(table)

    def _check_whole(self, table: Table) -> None:
        """BSP: each step of the dead is in a range as a whole, or not at all."""
        clocks: dict[tuple[Incarnation, int], set[bool]] = defaultdict(set)
        for range_id, blocks in table.blocks_by_range(self.layout.range_count).items():
            server = self.cluster[self.layout.owner[range_id]]
            found = self._of_the_gone([g for b in blocks for g in server.values[table.table_id, b]])
            sealed = self._of_the_gone(
                [g for b in blocks for g in self.truth.contributions[table.table_id, b]]
            )
            for step, grads in sealed.items():
                clocks[step].add(step in found)
                assert found.get(step, grads) == grads, f"{step} is torn in range {range_id}"
        torn = sum(len(is_in) > 1 for is_in in clocks.values())
        self.world.counts["steps in some ranges only"] += torn

    def _of_the_gone(self, grads: list[Grad]) -> dict[tuple[Incarnation, int], set[Grad]]:
        found: dict[tuple[Incarnation, int], set[Grad]] = defaultdict(set)
        for grad in grads:
            incarnation = Incarnation(grad.incarnation)
            if incarnation in self.truth.gone:
                found[incarnation, grad.clock].add(grad)
        return found


@pytest.mark.timeout(300)
def test_replacements_train_on_whatever_server_is_next(sim_seeds: tuple[int, ...]) -> None:
    """S6 and S8: nobody waits for who was replaced, and what the living sealed is there."""
    run_seeds(ReplacementSimulation, sim_seeds)
