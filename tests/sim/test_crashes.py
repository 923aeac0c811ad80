"""Workers that are killed or paused in the simulated cluster: the others finish without them.

The scheduler's own machine hears heartbeats over the faulty network and declares the worker gone;
each server learns of it at another moment. A worker that was only paused goes on where it was.
"""

from __future__ import annotations

from typing import ClassVar

from ps_core.cluster_view import NodeState, Role, Session
from ps_core.keys import Incarnation, TableId
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE
from scheduler.machine.state import NodeSilent, Registration, Transition, WorkerGone
from tests.sim.actors import SimWorker
from tests.sim.arithmetic import may_be_read_last
from tests.sim.grads import Grad
from tests.sim.scheduled import LOOK_S, ScheduledSimulation
from tests.sim.server import SimServer
from tests.sim.test_simulation import WORKERS, run_seeds
from tests.sim.training import training

SLOW_S = 40.0
"""A step that takes this long, at a worker whose heartbeats go on: more than the timeout."""


class CrashSimulation(ScheduledSimulation):
    """One seed in which one worker is killed or paused at some moment."""

    often: ClassVar[frozenset[str]] = frozenset({
        "killed", "paused", "silent", "gone", "steps cut off", "fences without loss", "successors",
        "checkpoints",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"fenced", "sealed and held", "no initial values"})
    may_sum = False

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.slow: SimWorker | None = None
        self.late: dict[Incarnation, Session] = {}  # of the workers that came while others trained
        super().__init__(seed, narrate=narrate)
        draw = self.world.draw
        self.victim = draw.choice(self.workers)
        self.is_killed = draw.random() < 0.6
        others = [worker for worker in self.workers if worker is not self.victim]
        self.slow = draw.choice((None, others[0], others[1]))
        self.gone_rank: int | None = None
        self.history: dict[tuple[TableId, int, int], list[Grad]] = {}
        self.strike_clock = draw.choice((0, 1, 2, 4))
        self.world.after(draw.random() * draw.choice((0.1, 1.0, 10.0)), self._strike)

    def _strike(self) -> None:
        """Now, or in the middle of the step that it is to die in: while its seals are under way."""
        if self.victim.finished:
            return
        asleep = self.layout.settings.asleep
        table_id = [t.table_id for t in self.layout.tables if t.table_id not in asleep][-1]
        clock = self.truth.sealed.get((table_id, self.victim.incarnation), 0)
        if self.strike_clock and clock < self.strike_clock:
            self.world.after(LOOK_S / 10, self._strike)
            return
        if self.slow is None:
            self._stop_victim()
            return
        self.slow.stop()  # so long that ranges still hold what the victim seals meanwhile
        self.world.after(SLOW_S, self.slow.wake)
        self.world.after(self.world.draw.random() * 2.0, self._stop_victim)

    def _stop_victim(self) -> None:
        if self.victim.finished:
            return
        self.world.say(f"STOP worker {self.victim.rank}, killed: {self.is_killed}")
        self.world.counts["killed" if self.is_killed else "paused"] += 1
        self.victim.stop()
        if not self.is_killed:
            wake_s = self.world.draw.choice((5.0, 40.0)) + self.world.draw.random()
            self.world.after(wake_s, self.victim.wake)

    def _is_heard(self, worker: SimWorker) -> bool:
        return worker is self.slow or super()._is_heard(worker)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, WorkerGone):
            self.gone_rank = transition.node.rank
            assert transition.node.incarnation == self.victim.incarnation
            self.world.counts["gone"] += 1
            self.truth.gone.add(self.victim.incarnation)
            if self.world.draw.random() < 0.6:
                self.world.after(self.world.draw.random() * 5.0, self._replace)
            victim = self.victim.incarnation
            self.truth.left |= {(table.table_id, victim) for table in self.layout.tables}
        self.world.counts["silent"] += isinstance(transition, NodeSilent)

    def _replace(self) -> None:
        """Another worker takes the victim's rank, and trains from where the others are."""
        rank = self.victim.rank
        is_free = self.scheduler._state.workers_by_rank("")[rank].state is NodeState.GONE
        if is_free and self._may_come(rank):
            worker = self._come("successor", self.world.draw.choice((None, rank)))
            assert worker.rank == rank or rank >= WORKERS

    def _may_come(self, rank: int) -> bool:
        """A successor of rank 0 would have to give what values are missing; with AGGREGATE the
        parameters are the workers', and nobody joins (`ps_worker.training.joining`).
        """
        if not all(may_be_read_last(table) for table in self.layout.tables):
            return False
        parts = [p for s in self.cluster.values() for p in s.machine.shards.values()]
        return rank != 0 or all(part.state.initialized for part in parts)

    def _come(self, name: str, rank: int | None = None) -> SimWorker:
        """A worker joins while the others train."""
        now_s, counts = self.world.now_s, self.world.counts
        asking = Registration(
            name.encode().ljust(16),
            Role.WORKER,
            requested_rank=rank,
            features=(CHECKPOINTS_FEATURE,),
        )
        decision = self.scheduler.register(asking, now_s)
        session = decision.reply
        worker = SimWorker(self.world, self.cluster, self.layout, session.rank, session.incarnation)
        worker.is_late_joiner = True
        worker.joined_after = lambda: self._joined_after(session.incarnation)
        self.workers.append(worker)
        self.late[session.incarnation] = session
        self._publish(decision.transitions)
        self._beat(session, worker)
        counts["successors" if session.rank < WORKERS else "newcomers"] += 1
        parts = [p for s in self.cluster.values() for p in s.machine.shards.values()]
        counts["came before all values"] += not all(p.state.initialized for p in parts)
        self._start_late(worker, self.scheduler.view.view_number)
        return worker

    def _start_late(self, worker: SimWorker, view_number: int) -> None:
        """A session waits for the view that has the node."""
        if any(s.machine.view_number < view_number for s in self.cluster.values()):
            self.world.after(LOOK_S, lambda: self._start_late(worker, view_number))
            return
        worker.start(training(worker, self.truth, self.world.draw.randint(2, 8)))

    def _is_over(self) -> bool:
        """The living have finished, and whoever is gone has been fenced everywhere and knows it."""
        gone = self.truth.gone
        for worker in self.workers:  # a loop: it is asked after each event
            if not worker.finished and worker.incarnation not in gone:
                return False
        if self.gone_rank is None:
            return True
        is_told = self.is_killed or self.victim.fence is not None
        return is_told and all(self.gone_rank in s.fenced for s in self.cluster.values())

    def _check_end(self) -> None:
        super()._check_end()
        for worker in self.workers:
            assert worker.fence is None or worker is self.victim
        if self.gone_rank is None:
            return
        for server in self.cluster.values():
            self._check_landed(server, self.gone_rank)
        for table in self.layout.tables:
            if self.layout.settings.is_always_bsp(table):
                self._check_whole(table.table_id)

    def _check_landed(self, server: SimServer, rank: int) -> None:
        """Nothing of the dead landed after its fence, and what it had sealed here did."""
        found = {
            (table_id, grad)
            for (table_id, _), grads in server.values.items()
            for grad in grads
            if grad.incarnation == self.victim.incarnation
        }
        before = server.fenced[rank]
        assert found <= before, f"landed after the fence: {found - before}"
        if rank not in server.given_back:  # a step that gave room could not be sent again
            assert found == before, f"sealed and lost: {before - found}"
            self.world.counts["fences without loss"] += 1

    def _check_whole(self, table_id: TableId) -> None:
        """BSP: each step of the dead is in a range as a whole, or not at all."""
        clocks: set[tuple[int, bool]] = set()
        for table in self.layout.tables:
            if table.table_id != table_id:
                continue
            for range_id, blocks in table.blocks_by_range(self.layout.range_count).items():
                server = self.cluster[self.layout.owner[range_id]]
                found = self._of_victim([g for b in blocks for g in server.values[table_id, b]])
                sealed = self._of_victim(
                    [g for b in blocks for g in self.truth.contributions[table_id, b]]
                )
                for clock, grads in sealed.items():
                    clocks.add((clock, clock in found))
                    assert found.get(clock, grads) == grads, f"clock {clock} is torn"
        both = {clock for clock, is_in in clocks if (clock, not is_in) in clocks}
        self.world.counts["steps in some ranges only"] += len(both)

    def _of_victim(self, grads: list[Grad]) -> dict[int, set[Grad]]:
        found: dict[int, set[Grad]] = {}
        for grad in grads:
            if grad.incarnation == self.victim.incarnation:
                found.setdefault(grad.clock, set()).add(grad)
        return found


def test_the_living_finish_without_the_dead(sim_seeds: tuple[int, ...]) -> None:
    """S6, whenever it dies; what landed of the dead is what each range held sealed at the fence."""
    run_seeds(CrashSimulation, sim_seeds)
