"""A simulated cluster with its scheduler at work: heartbeats, views, and tables that change.

Heartbeats and prepared_changes go over the faulty network; views come late, and each server sees
others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from ps_core.change import ChangeOutcome
from ps_core.cluster_view import ClusterView, Session
from ps_core.errors import Fenced, InvalidConfig
from ps_core.keys import Incarnation, TableId
from ps_core.tables.table import Table
from ps_worker.spec.loop_places import LoopReport, LoopReports
from scheduler.machine.changes import ChangeRequest
from scheduler.machine.cluster import Decision
from scheduler.machine.state import (
    ChangeCommitted,
    ChangeDecided,
    ChangeProposed,
    ChangeWithdrawn,
    Transition,
)
from tests.sim.actors import RESEND_S, SimWorker
from tests.sim.checkpointing import Checkpointer
from tests.sim.server import SimServer
from tests.sim.test_simulation import WORKERS, Simulation
from tests.sim.training import awake_tables

BEAT_S = 1.0
LOOK_S = 0.25
VIEW_DELAY_S = 1.5
SCHEDULER = "scheduler"


class ScheduledSimulation(Simulation):
    """One seed in which an operator changes the tables' consistency while they are trained."""

    often: ClassVar[frozenset[str]] = frozenset({
        "proposed", "changed", "moved", "withdrawn", "rejected", "discarded", "scaled",
        "forgotten", "reads of bsp after a change", "reads of ssp after a change",
        "checkpoints", "checkpoints that failed", "checkpoints that wait for a change",
        "blocks captured under bsp", "blocks captured under ssp",
    })  # fmt: skip

    may_differ = False
    may_group = False
    has_checkpoints = True

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._said: dict[Incarnation, tuple[object, LoopReport]] = {}  # to which scheduler
        super().__init__(seed, narrate=narrate)
        self.checkpointer = self.checkpointer_of(seed)
        self.layout.settings.may_change = not self.groups.leaders  # these need BSP
        for session in self.sessions[:-WORKERS]:
            self._beat(session, None)
            self._prepare(session, self.cluster[session.node_id])
        for session, worker in zip(self.sessions[-WORKERS:], self.workers, strict=True):
            self._beat(session, worker)
        self._look()
        self.change_every_s = self.world.draw.choice((0.5, 3.0, 20.0))
        if self.layout.settings.may_change:
            self.world.after(self.world.draw.random(), self._change)

    def checkpointer_of(self, seed: int) -> Checkpointer:
        """Who makes checkpoints."""
        return Checkpointer(self, seed, may_begin=self.has_checkpoints)

    def _no_answer_for(self, session: Session) -> contextlib.AbstractContextManager[None]:
        """Where nobody may hear the answer any more."""
        del session
        return contextlib.nullcontext()

    def _joined_after(self, incarnation: Incarnation) -> dict[TableId, int]:
        """After which clock a worker has joined each table, where it has."""
        return {
            table.table_id: join.after_clock
            for table in self.scheduler.view.tables
            for join in table.joins
            if join.incarnation == incarnation
        }

    def _is_heard(self, worker: SimWorker) -> bool:
        """Whether its heartbeats come."""
        return not worker.is_down

    def _beat(self, session: Session, worker: SimWorker | None) -> None:
        said = None if worker is None else self._report(worker)

        def arrive() -> None:
            try:
                self._publish(self.scheduler.heartbeat(session, self.world.now_s).transitions)
                if said is not None:
                    self._said[session.incarnation] = self.scheduler, said
            except Fenced as error:
                assert worker is not None
                fenced = error
                self.world.send("fenced", lambda: worker.told_fenced(fenced))

        if worker is not None:
            self.checkpointer.sessions[worker] = session
            worker.between = self.checkpointer.between
            worker.reports = lambda: self._reports_for(worker)
        if worker is None:
            self._reach(arrive)
        elif self._is_heard(worker):
            self.world.send("heartbeat", lambda: self._reach(arrive))
        self.world.after(BEAT_S, lambda: self._beat(session, worker))

    def _report(self, worker: SimWorker) -> LoopReport | None:
        """What its heartbeat tells of its loop."""
        if worker.loop.place is None:
            return None
        sealed = self.truth.sealed
        stepped = [table.table_id for table in awake_tables(worker)]
        clocks = {each: sealed.get((each, worker.incarnation), 0) for each in stepped}
        return LoopReport(True, clocks, worker.loop.place)

    def _reports_for(self, worker: SimWorker) -> LoopReports:
        """As `GetClusterStatus` answers."""
        if not self.is_there:
            return LoopReports()
        view = self.scheduler.view
        nodes = {node.incarnation: node for node in view.nodes}
        late_joiners = {join.incarnation for table in view.tables for join in table.joins}
        told, all_have_told = [], True
        for other in self.workers:
            scheduler, report = self._said.get(other.incarnation, (None, None))
            node = nodes.get(other.incarnation)
            if node is None or other.layout.run != worker.layout.run or other is worker:
                continue
            is_alive = node.state.is_member
            if report is not None and scheduler is self.scheduler:
                told.append(report._replace(is_alive=is_alive))
            elif is_alive and other.incarnation not in late_joiners:
                all_have_told = False
        return LoopReports(told, all_have_told)

    is_there = True
    """Whether the scheduler is."""

    def _reach(self, action: Callable[[], None]) -> None:
        """A message is at the scheduler."""
        action()

    def _look(self) -> None:
        if self.is_there:
            self._publish(self.scheduler.tick(self.world.now_s).transitions)
        self.world.after(LOOK_S, self._look)

    def _change(self) -> None:
        """The operator wants another setting for a table, or the scheduler moves its bound."""
        draw, table = self.world.draw, self.world.draw.choice(self.layout.tables)
        self.world.after(draw.expovariate(1 / self.change_every_s), self._change)
        if not self.is_there:
            return
        setting = self.scheduler.view.tables_by_id[table.table_id].consistency
        if setting.moves and draw.random() < 0.7:
            bound = draw.randint(setting.least, setting.most)
            moved = replace(setting, staleness=bound)
            move = ChangeRequest(table.spec.name, moved, 0, self.world.now_s + 2.0, run=table.run)
            self._publish(self.scheduler.move_bound(move, self.world.now_s).transitions)
            return
        wanted = ChangeRequest(
            table.spec.name,
            self.drawn_consistency(draw),
            draw.choice((0, 0, 0, draw.randint(0, 14))),
            self.world.now_s + draw.choice((1.0, 5.0, 60.0)),
        )
        worker = draw.choice(self._askers(table))
        try:
            decision = self.scheduler.set_consistency(worker, wanted, self.world.now_s)
        except (Fenced, InvalidConfig) as error:
            self.world.say(f"no change: {error}")
        else:
            self._publish(decision.transitions)

    def _askers(self, table: Table) -> Sequence[Session]:
        """Who may want another setting for a table: workers of its run."""
        del table
        return self.sessions[-WORKERS:]

    def _prepare(self, session: Session, server: SimServer) -> None:
        """What stands is sent again and again."""
        if server not in self.checkpointer.sessions:
            self.checkpointer.sessions[server] = session
            server.on_view = lambda view: self.checkpointer.viewed(server, view)
        for prepared in server.prepared_changes:

            def arrive(
                table_id: object = prepared.table_id,
                number: int = prepared.number,
                clock: int = prepared.clock,
                outcome: ChangeOutcome | None = prepared.outcome,
            ) -> None:
                with self._no_answer_for(session):
                    decision: Decision[None] = self.scheduler.prepare_change(
                        session,
                        table_id,  # type: ignore[arg-type]
                        number,
                        clock,
                        outcome,
                    )
                    self._publish(decision.transitions)

            link = session.node_id, SCHEDULER
            self.world.send("prepared", lambda arrive=arrive: self._reach(arrive), link)  # type: ignore[misc]
        self.world.after(RESEND_S / 2, lambda: self._prepare(session, server))

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        for transition in transitions:
            self.world.say(_words(transition))
            self._happened(transition)
        if transitions:
            view = self.scheduler.view
            for server in self.cluster.values():
                self._tell(server, view)
            self.checkpointer.published()

    def _happened(self, transition: Transition) -> None:
        counts = self.world.counts
        self.checkpointer.happened(transition)
        if isinstance(transition, ChangeCommitted) and transition.change.join is not None:
            counts["joined"] += 1
        elif isinstance(transition, ChangeCommitted):
            counts["changed"] += 1
            counts["moved"] += transition.change.consistency.staleness > 0 and (
                transition.change.consistency.moves
            )
            self.layout.settings.change(transition.table.table_id, transition.change)
        counts["proposed"] += isinstance(transition, ChangeProposed)
        counts["withdrawn"] += isinstance(transition, ChangeWithdrawn)

    def _tell(self, server: SimServer, view: ClusterView) -> None:
        delay_s = self.world.draw.random() * VIEW_DELAY_S
        self.world.after(delay_s, lambda: server.observe(view))


def _words(transition: Transition) -> str:
    match transition:
        case (
            ChangeProposed(table, change)
            | ChangeDecided(table, change)
            | ChangeCommitted(table, change)
        ):
            name = type(transition).__name__
            return (
                f"{name} {table.spec.name} number {change.number} after {change.after_clock}: "
                f"{change.consistency}"
            )
        case ChangeWithdrawn(table, reason):
            return f"ChangeWithdrawn {table.spec.name}: {reason}"
        case _:
            return str(transition)
