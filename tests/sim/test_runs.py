"""Two or three runs on the same servers, which die meanwhile, as workers do (S19).

The run without a name trains from the start, and checkpoints are of it. Others begin sooner or
later, with tables of the same names and other numbers of workers, which come one by one. A run ends
when its workers have left, or by an operator, whatever they are doing.

Oracles, beside those of every simulation, which each table and each worker has for itself:
    S19    Who is fenced was lost, or its run was ended; no worker fails where nobody of its run
           did, and it was not ended. Who is of another run is told that a table is not there,
           whether it reads or sends. Nobody joins a run that is over. Nothing is left of one that
           was removed. A change of a table goes on where another's server dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import Node, NodeState, Role, Session
from ps_core.errors import Fenced, InvalidConfig, NotOwner, Recovering, TableNotFound
from ps_core.keys import Incarnation, RangeId, TableId
from ps_core.ledger import ReplyKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.ranges.events import ReplyTo, SealEvent, SealTerms, Sender
from ps_server.replication.range_roles import table_of
from scheduler.machine.checkpoint_state import CheckpointMade
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE
from scheduler.machine.cluster import Created, Decision, Parked
from scheduler.machine.state import (
    ChangeCommitted,
    ChangeProposed,
    ChangeWithdrawn,
    NodeLeft,
    RangesFailedOver,
    Registration,
    RunBegun,
    RunEnded,
    RunRemoved,
    Transition,
    WorkerGone,
)
from tests.sim.actors import Layout, Reads, ReadTerms, SimWorker, Waits
from tests.sim.arithmetic import in_fragments
from tests.sim.calamities import Plan
from tests.sim.evaluator import Evaluator
from tests.sim.scheduled import LOOK_S
from tests.sim.server import SimServer
from tests.sim.test_replacements import ReplacementSimulation, identity_of
from tests.sim.test_scheduler_away import AwaySimulation
from tests.sim.test_simulation import QUICK_SEEDS, _spec, run_seeds
from tests.sim.training import training

pytestmark = pytest.mark.slow

_NAMES = ("a", "b")
_SIZES = (1, 2, 2, 3)
_STEPS = (2, 3, 6)
_STEPS_BESIDE = (2, 4, 10)
"""Of a worker of the run without a name, at most."""
SOONER_S = 30.0
"""Than where workers are replaced, it is calm: a seed has more workers."""
_BEGIN_S = (0.1, 3.0, 12.0)
"""At the latest."""
_COME_WITHIN_S = 4.0
_ENDED = 0.4
"""Of the named runs: by an operator."""
_REMOVED = 0.7
"""Of the named runs: when they are over."""
_BESIDE = 0.1
"""Of the changes of tables that some servers have nothing of: one of these is struck meanwhile."""
STRANGER = -1
"""The stream of who is of another run."""
STRANGER_INCARNATION = Incarnation(10_000)


class Strangers:
    """Who asks for tables of other runs than theirs, and sends them something, all the time."""

    def __init__(self, simulation: RunSimulation, draw: random.Random) -> None:
        self._simulation, self._draw = simulation, draw
        self._reads: Reads | None = None
        simulation.world.after(1.0, self._look)

    def _look(self) -> None:
        self._check_answered()
        simulation, draw = self._simulation, self._draw
        simulation.world.after(2.0 + 2.0 * draw.random(), self._look)
        table = draw.choice(simulation.layout.tables)
        other = draw.choice([run for run in ("", *_NAMES) if run != table.run])
        layout = replace(simulation.layout, run=other)
        self._reads = Reads(simulation.world, simulation.cluster, layout)
        self._reads.begin(table, ReadTerms(0, None))
        range_id = draw.choice(layout.ranges_of(table.table_id))
        self._send(simulation.cluster[layout.owner[range_id]], layout, table)

    def _check_answered(self) -> None:
        if self._reads is None:
            return
        self._reads.is_down = True
        assert not self._reads.answers, f"S19: it is read by another run: {self._reads.answers}"
        for error in self._reads.refusals:
            # A server on its way out, and one that has just come, have no tables either.
            is_unseen = isinstance(error, TableNotFound | NotOwner | Recovering)
            assert is_unseen, f"S19: a read by another run: {error!r}"
        self._simulation.world.counts["reads by another run"] += bool(self._reads.refusals)

    def _send(self, server: SimServer, layout: Layout, table: Table) -> None:
        """A seal, of a worker whose rank the table's run has, too."""

        def reply(effect: ReplyTo) -> None:
            assert effect.kind is ReplyKind.ERROR, f"S19: a seal by another run: {effect}"
            # Without a view it knows no table yet. Once it has one, RECOVERING would come from
            # the table's own range, which another run's seal must not reach.
            has_no_view = not server.machine.view_number
            expected = Recovering if has_no_view else TableNotFound
            assert isinstance(effect.error, expected), f"S19: {effect.error!r}"
            self._simulation.world.counts["seals by another run"] += 1

        server.outbox[STRANGER] = reply
        for range_id in layout.ranges_of(table.table_id):
            if layout.owner[range_id] == server.node_id:
                sender = Sender(STRANGER_INCARNATION, 0, STRANGER, layout.run)
                place = layout.place(table.table_id, range_id)
                server.entry(SealEvent(place, sender, 1, SealTerms(1, skip=True)))


class RunSimulation(ReplacementSimulation):
    """One seed in which the servers have one or two runs more."""

    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed", "fault: worker killed", "failovers", "gone", "replacements", "joined",
        "fenced", "left", "changed", "checkpoints", "equal replicas", "consistent reads",
        "runs begun", "runs begun late", "runs ended", "runs ended while they train",
        "runs that are over", "refused as the run is over", "joined in a run", "gone in a run",
        "reads by another run", "seals by another run", "checkpoints beside a run",
        "changed in a run", "trained in a run", "beside runs that ended", "runs removed",
        "tables given up", "struck beside a change", "changed as another's server was lost",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "replaced again", "decisions of removed tables",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "runs begun": 1, "trained in a run": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        which = self.which(seed)
        self._draw = random.Random(f"runs of {which}")
        self._table_numbers = random.Random(f"numbers of runs of {which}")
        self._removals = random.Random(f"removals of runs of {which}")
        self._to_come = 0
        self._sizes: dict[str, int] = {}
        self._opened: set[str] = set()
        self._specs: dict[str, list[TableSpec]] = {}
        self._over: set[str] = set()
        self.removed: list[Table] = []
        self._open_changes: dict[TableId, bool] = {}
        """Tables with a change that is proposed; whether a server died that had nothing of it."""
        self._moved: tuple[float, frozenset[RangeId]] = 0.0, frozenset()
        super().__init__(seed, narrate=narrate)
        own = replace(self.layout, tables=list(self.layout.tables))
        self.evaluator = Evaluator(self.world, self.cluster, own, self.truth)
        for name in _NAMES[: self._draw.choice((1, 2))]:
            self._plan_run(name)
        Strangers(self, self._draw)

    def which(self, seed: int) -> str:
        """What its draws are of."""
        return f"{seed}"

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        plan = super().plan
        return replace(plan, calm_s=plan.calm_s - SOONER_S)

    def may_lose(self, server: SimServer, *, for_good: bool) -> bool:
        """Not too many while runs begin: their tables' ranges are placed then."""
        if for_good and self._to_come and self.too_many_unnoticed(server):
            return False
        return super().may_lose(server, for_good=for_good)  # type: ignore[arg-type]

    def step_count(self) -> int:
        """Of a worker of the run without a name."""
        return min(super().step_count(), self._draw.choice(_STEPS_BESIDE))

    def layout_of(self) -> Layout:
        """What a worker of the run without a name knows."""
        return self.layout_in("")

    def layout_in(self, run: str) -> Layout:
        """What a worker of the run knows."""
        tables = [table for table in self.layout.tables if table.run == run]
        return replace(super().layout_of(), run=run, tables=tables)

    def _askers(self, table: Table) -> Sequence[Session]:
        if not table.run:
            return super()._askers(table)
        return [session for session in self.first.values() if session.run == table.run]

    # --- a run begins

    def _plan_run(self, name: str) -> None:
        draw = self._draw
        self._sizes[name] = size = draw.choice(_SIZES)
        self._to_come += size
        at_s, ranks = draw.choice(_BEGIN_S) * draw.random(), list(range(size))
        draw.shuffle(ranks)
        for rank in ranks:
            self.world.after(at_s, lambda rank=rank: self._come_to_run(name, rank))  # type: ignore[misc]
            at_s += draw.random() * draw.choice((0.1, _COME_WITHIN_S))
        if draw.random() < _ENDED:
            self.world.after(at_s + draw.random() * 8.0, lambda: self._end_run(name))
        if self._removals.random() < _REMOVED:
            self.world.after(at_s, lambda: self._remove(name))

    def _come_to_run(self, name: str, rank: int) -> None:
        """One of the run's first workers."""
        asking = Registration(
            f"{name} {rank}".encode().ljust(16),
            Role.WORKER,
            requested_rank=rank,
            features=(CHECKPOINTS_FEATURE,),
            run=name,
            world_size=self._sizes[name],
            identity=identity_of(rank),
        )
        if name not in self._over:
            self._admitted(asking, self._has_come)
        else:
            self._to_come -= 1
            self._check_refused(asking)

    def _has_come(self, decision: Decision[Session]) -> None:
        session = decision.reply
        run, rank, incarnation = session.run, session.rank, session.incarnation
        worker = SimWorker(self.world, self.cluster, self.layout_in(run), rank, incarnation)
        self._strike_at_its_moments(worker)
        worker.joined_after = lambda: self._joined_after(incarnation)
        self.workers.append(worker)
        self.first[incarnation] = session
        self._moved_s[worker] = 0, self.world.now_s
        self._to_come -= 1
        self._publish(decision.transitions)
        self._beat(session, worker)
        self._open(session, worker)

    def _open(self, session: Session, worker: SimWorker) -> None:
        """The first worker that comes so far makes the tables; then each trains."""
        is_stopped = worker.is_down and worker not in self.slow | self.paused
        if session.run in self._over or is_stopped:
            return
        if session.run not in self._opened:
            if session.run not in self._specs:
                self._specs[session.run] = self._specs_of(session.run)
            specs = self._specs[session.run]
            try:
                while specs and not worker.is_down and self._has_made(session, specs[0]):
                    specs.pop(0)
            except Fenced as error:  # it was paused meanwhile, and declared gone
                worker.told_fenced(error)
                return
            if specs:
                self.world.after(LOOK_S, lambda: self._open(session, worker))
                return
            self._opened.add(session.run)
            tables = [table for table in self.layout.tables if table.run == session.run]
            own = replace(self.layout, run=session.run, tables=tables)
            if self._draw.random() < 0.5:
                Evaluator(self.world, self.cluster, own, self.truth).start()
        worker.layout.tables[:] = self.layout_in(session.run).tables
        self._begin_when_known(worker, self.scheduler.view.view_number)

    def _specs_of(self, run: str) -> list[TableSpec]:
        """Their names are those of the tables of other runs."""
        found: list[TableSpec] = []
        count = self._draw.choice((1, 1, 2))
        while len(found) < count:
            spec = _spec(self._draw, len(found), self._table_numbers, may_have_rows=True)
            if spec.consistency.backup_workers < self._sizes[run]:
                found.append(spec)
        return [spec.validated() for spec in in_fragments(found, self._table_numbers)]

    def _has_made(self, session: Session, spec: TableSpec) -> bool:
        """Whether the table is there: with its ranges' first it waits for all servers."""
        decision = self.scheduler.create_table(session, spec, self.world.now_s)
        self.world.counts["tables that waited"] += isinstance(decision.reply, Parked)
        if isinstance(decision.reply, Parked):
            return False
        assert isinstance(decision.reply, Created), decision.reply
        table = decision.reply.table
        assert table.run == session.run, f"S19: {spec.name} is a table of run {table.run!r}"
        self.layout.settings.add(table)
        if self._sizes[table.run] == 1:
            self.layout.settings.of_one.add(table.table_id)
        if self._draw.random() < 0.4:
            self.clip([table])
        self.layout.tables.append(table)
        self._publish(decision.transitions)
        return True

    def _begin_when_known(self, worker: SimWorker, view_number: int) -> None:
        """A session waits for the view that has the node."""
        if any(server.view_number < view_number for server in self.living):
            self.world.after(LOOK_S, lambda: self._begin_when_known(worker, view_number))
        else:
            worker.start(self._trained(worker))

    def _trained(self, worker: SimWorker) -> Waits:
        ranges = {r for t in worker.layout.tables for r in worker.layout.ranges_of(t.table_id)}
        yield lambda: ranges <= worker.layout.owner.keys()
        yield from training(worker, self.truth, self._draw.choice(_STEPS))
        self.world.counts["trained in a run"] += 1
        self.world.counts["beside runs that ended"] += bool(self._over - {worker.layout.run})

    # --- workers that are replaced, and leave

    def _start_late(self, worker: SimWorker, view_number: int) -> None:
        """Whoever comes before its run's tables are made opens them, as the first workers do: the
        tables have its join from the start, so the others wait for its steps.
        """
        if not worker.layout.run or worker.layout.run in self._opened:
            super()._start_late(worker, view_number)
        else:
            session = self.first[worker.incarnation]
            self.world.after(LOOK_S, lambda: self._open(session, worker))

    def _follow(self, node: Node) -> None:
        if not node.run:
            super()._follow(node)
        elif not self._is_replaced(node.run, node.rank):
            self.world.after(LOOK_S, lambda: self._follow(node))

    def _trains(self, run: str) -> bool:
        waiting = self.slow | self.paused
        return run not in self._over and any(
            worker.layout.run == run
            and not worker.finished
            and (not worker.is_down or worker in waiting)
            for worker in self.workers
        )

    def _has_initial_values(self, run: str) -> bool:
        return (not run or run in self._opened) and super()._has_initial_values(run)

    def _others_in_step(self, worker: SimWorker) -> list[SimWorker]:
        others = super()._others_in_step(worker)
        return [other for other in others if other.layout.run == worker.layout.run]

    # --- a run ends

    def _end_run(self, name: str) -> None:
        """An operator wants that."""
        if name not in self.scheduler._state.runs or self._is_over():
            return
        self.world.counts["runs ended while they train"] += self._trains(name)
        operator = self.scheduler.register(Registration(b"operator".ljust(16), Role.OPERATOR), 0.0)
        self._publish(self.scheduler.end_run(operator.reply, name).transitions)

    def _remove(self, name: str) -> None:
        """An operator has no use for a run that is over, at once or later."""
        is_over = name in self._over or self.scheduler.members.is_over(name)
        if name in self.scheduler._state.runs and is_over and self._removals.random() < 0.5:
            operator = Registration(b"operator".ljust(16), Role.OPERATOR)
            session = self.scheduler.register(operator, 0.0).reply
            self._publish(self.scheduler.remove_run(session, name).transitions)
        else:
            self.world.after(0.1 + self._removals.random(), lambda: self._remove(name))

    def _has_removed(self, name: str) -> None:
        counts, tables = self.world.counts, self.layout.tables
        counts["runs removed"] += 1
        self._over.add(name)
        self.removed += [table for table in tables if table.run == name]
        for table in self.removed:
            self._open_changes.pop(table.table_id, None)
        tables[:] = [table for table in tables if table.run != name]

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        counts = self.world.counts
        if isinstance(transition, RangesFailedOver):
            moved_s, before = self._moved
            before = before if moved_s == self.world.now_s else frozenset()
            self._moved = self.world.now_s, before.union(transition.range_ids)
            for table_id in self._open_changes:
                table = self.layout.table(table_id)
                if not self._has_moved(table):
                    self._open_changes[table_id] = True
        elif isinstance(transition, ChangeProposed) and not transition.change.checkpoint:
            self._open_changes[transition.table.table_id] = False
            self._may_strike_beside(transition.table)
        elif isinstance(transition, ChangeWithdrawn):
            self._withdrawn(transition)
        elif isinstance(transition, RunRemoved):
            self._has_removed(transition.run.name)
        elif isinstance(transition, RunBegun):
            counts["runs begun"] += 1
            counts["runs begun late"] += self.world.now_s > 1.0
        elif isinstance(transition, RunEnded):
            counts["runs ended"] += 1
            self._over.add(transition.run.name)
        elif isinstance(transition, WorkerGone):
            counts["gone in a run"] += bool(transition.node.run)
        elif isinstance(transition, ChangeCommitted):
            is_beside = self._open_changes.pop(transition.table.table_id, False)
            counts["changed as another's server was lost"] += is_beside
            what = "changed" if transition.change.join is None else "joined"
            counts[f"{what} in a run"] += bool(transition.table.run)
        elif isinstance(transition, CheckpointMade):
            counts["checkpoints beside a run"] += any(map(self._trains, self._opened))
        elif isinstance(transition, NodeLeft) and transition.node.run in self._over:
            self._has_ended(transition.node.incarnation)

    def _withdrawn(self, transition: ChangeWithdrawn) -> None:
        """A change, or a cut; these are of all tables, and wait for all."""
        table, is_change = transition.table, transition.table.table_id in self._open_changes
        self._open_changes.pop(table.table_id, None)
        if is_change and "to prepare it was lost" in transition.reason:
            assert self._has_moved(table), (
                f"S19: a change of table '{table.title}' is withdrawn, which had nothing on who is "
                "lost"
            )

    def _has_moved(self, table: Table) -> bool:
        """Whether ranges that have blocks of the table had another primary last."""
        return not self._moved[1].isdisjoint(table.blocks_by_range(self.layout.range_count))

    def _may_strike_beside(self, table: Table) -> None:
        """Now and then a server is struck that has nothing of a table whose change is open, and is
        primary of what another run trains.
        """
        ranges = self.scheduler.view.ranges
        others = {r for t in self.scheduler.view.tables if t.run != table.run
                  for r in t.blocks_by_range(len(ranges))}  # fmt: skip
        own = {ranges[r].primary for r in table.blocks_by_range(len(ranges))}
        found = sorted({n for r in others if (n := ranges[r].primary) is not None} - own)
        if found and self._removals.random() < _BESIDE:
            node_id, at_s = self._removals.choice(found), self._removals.random()
            self.world.counts["struck beside a change"] += 1
            self.world.after(at_s, lambda: self.calamities.strike_server(node_id))

    def _has_ended(self, incarnation: Incarnation) -> None:
        """The worker's membership, by an operator; it has not heard so yet, nor perhaps, where a
        journal held both back, that it was registered.
        """
        if not any(
            worker.incarnation == incarnation and worker.finished and not worker.failed
            for worker in self.workers
        ):
            self.truth.gone.add(incarnation)
            self.truth.left |= {(t.table_id, incarnation) for t in self.layout.tables}

    def _check_refused(self, asking: Registration) -> None:
        """Nobody joins a run that is over."""
        with pytest.raises(InvalidConfig, match="is over"):
            self.scheduler.register(asking, self.world.now_s)
        self.world.counts["refused as the run is over"] += 1

    # --- the end

    def _is_over(self) -> bool:
        return not self._to_come and super()._is_over()

    def _check_end(self) -> None:
        super()._check_end()
        self._check_removed()
        dead = {worker.layout.run for worker in self.calamities.dead_workers}
        for worker in self.workers:
            run, is_fenced = worker.layout.run, worker.fence is not None
            is_ended = run in self._over or worker.incarnation in self.truth.gone
            assert not is_fenced or is_ended, (
                f"S19: worker {worker.rank} of run {run!r} is fenced: {worker.fence}"
            )
            assert run in dead | self._over or not (is_fenced or worker.failed), (
                f"S19: worker {worker.rank} of run {run!r}, of which nobody died, has failed"
            )
        for name in self._sizes:
            self._check_over(name)

    def _may_hold_steps(self, table_id: TableId) -> bool:
        """An operator may end a run for which some of its workers never came: its first steps stay
        until it is removed.
        """
        run = self.scheduler.view.tables_by_id[table_id].run
        known = self.scheduler._state.runs.get(run)
        ranks = self.scheduler._state.workers_by_rank(run)
        return known is not None and known.has_ended and len(ranks) < known.worker_count

    def _check_removed(self) -> None:
        """Nothing is left anywhere of a run that was removed."""
        removed = {table.table_id for table in self.removed}
        for server in self.living:
            machine, replication = server.machine, server.replication
            of_keys = (
                machine.shards, machine.suspended, machine._adopted, server.values, server.updates,
                server.given, server.sums, server.reduced, server.numbers.shards.stores,
            )  # fmt: skip
            found = {key[0] for keys in of_keys for key in keys if key[0] in removed}
            found |= removed & machine._staging.keys()
            for replica in replication.replicas.values():
                found |= removed & replica.copies.keys()
            for primary in (*replication.primaries.values(), *replication.suspended.values()):
                found |= removed & {table_of(held) for held in primary.log.held}
            assert not found, f"S19: server {server.node_id} has tables {found}, which were removed"

    def _check_over(self, name: str) -> None:
        newest = self.scheduler._state.workers_by_rank(name).values()
        is_left = {node.state for node in newest} == {NodeState.LEFT}
        if name in self._over or is_left:
            self.world.counts["runs that are over"] += 1
            self._check_refused(
                Registration(f"after {name}".encode().ljust(16), Role.WORKER, run=name)
            )


class PatientRunSimulation(RunSimulation):
    """Runs beside a scheduler that may be away: whoever wants something of it waits for it."""

    def _when_there(self, action: Callable[[], None]) -> None:
        if self.is_there:
            action()
            return
        self.world.counts["came when the scheduler was back"] += 1
        self.world.after(LOOK_S, lambda: self._when_there(action))

    def _come_to_run(self, name: str, rank: int) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._come_to_run(name, rank))

    def _end_run(self, name: str) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._end_run(name))

    def _replace(self, rank: int) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._replace(rank))

    def _follow(self, node: Node) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._follow(node))

    def _remove(self, name: str) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._remove(name))

    def _return_as_itself(self, worker: SimWorker) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._return_as_itself(worker))

    def _leave(self, session: Session) -> None:
        self._when_there(lambda: super(PatientRunSimulation, self)._leave(session))


class RunAwaySimulation(PatientRunSimulation, AwaySimulation):
    """One seed in which the scheduler is paused and late too; it comes back each time."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler paused", "scheduler late", "failovers", "runs begun", "runs ended", "joined",
        "came when the scheduler was back", "trained in a run", "changed in a run",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "runs begun": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        self._dies = False


@pytest.mark.timeout(300)
def test_a_run_is_as_if_it_were_alone(sim_seeds: tuple[int, ...]) -> None:
    """Whatever befalls the others, and the servers that they share."""
    run_seeds(RunSimulation, sim_seeds[:QUICK_SEEDS])
