"""Tables that are made while servers die: every range that is placed is served (G1, S8).

Nothing drops or resizes a table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest

from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.tables.table import Table
from ps_server.ranges.events import AnswerPull, EntryEvent, PullEvent, RefusePull
from scheduler.machine.cluster import Created
from tests.sim.actors import Layout, SimWorker, Waits
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import QUICK_SEEDS, WORKERS, _spec, run_seeds
from tests.sim.training import training

pytestmark = pytest.mark.slow

LATE_TABLES = (2, 3, 5)
LATE_STEPS = 4
RANGES = 16
"""More than the first tables have blocks for: the others are placed late."""


class PatientServer(ReplicatedServer):
    """A server that lets nobody in whose view is newer than its own, as OpenSession does: what is
    sent for a table of which it has not heard is as lost, and comes again.
    """

    def _knows(self, table_id: TableId) -> bool:
        return any(table.table_id == table_id for table in self._tables())

    def entry(self, event: EntryEvent) -> None:
        """An entry arrived."""
        if self.is_paused or self._knows(event.place.table_id):
            super().entry(event)

    def read(
        self,
        event: Callable[[int], PullEvent],
        on_answer: Callable[[AnswerPull | RefusePull], None],
    ) -> None:
        """A read of one range arrived."""
        if self.is_paused or self._knows(event(0).place.table_id):
            super().read(event, on_answer)


class LateTableSimulation(FailoverSimulation):
    """One seed in which workers make further tables, and train each when they are done with those
    before it.
    """

    may_group = False
    often: ClassVar[frozenset[str]] = FailoverSimulation.often - {
        "checkpoints",
        "checkpoints that failed",
    } | {"late tables", "ranges placed late", "late tables that were trained"}
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "failovers": 1, "late tables": 2}
    has_checkpoints = False  # a worker that waits for a table names no clock of it

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.late: list[Table] = []
        self._numbers = random.Random(f"numbers of late tables of {seed}")
        super().__init__(seed, narrate=narrate)
        self._late_count = self.world.draw.choice(LATE_TABLES)
        self._every_s = self.world.draw.choice((0.3, 2.0, 6.0))
        self.world.after(self.world.draw.random() * 3.0, self._make)

    def settings(self) -> object:  # type: ignore[override]
        """Of the cluster."""
        return replace(super().settings(), range_count=RANGES)

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place."""
        return PatientServer(self.world, node_id, self.layout.settings, WORKERS, place)

    def may_lose(self, server: ReplicatedServer, *, for_good: bool) -> bool:
        """Not too many while tables are to come: their ranges are placed then."""
        is_done = len(self.late) >= self._late_count
        if for_good and not is_done and self.too_many_unnoticed(server):
            return False
        return super().may_lose(server, for_good=for_good)

    def layout_of(self) -> Layout:
        """What a worker knows, and which tables it trains now."""
        known = super().layout_of()
        return replace(known, tables=list(known.tables))

    def _make(self) -> None:
        """The tables are made in their order, each by whoever asks first."""
        draw = self.world.draw
        drawn = _spec(draw, 1, self._numbers, may_have_rows=True)
        spec = replace(drawn, name=f"late-{len(self.late)}").validated()
        ranges = self.scheduler.view.ranges
        before = {r.range_id for r in ranges if r.primary is not None}
        session = draw.choice(self.sessions[-WORKERS:])
        made = None
        if session.incarnation in self.members:
            decision = self.scheduler.create_table(session, spec, self.world.now_s)
            made = decision.reply
            self._publish(decision.transitions)
        if isinstance(made, Created):
            after = {r.range_id for r in self.scheduler.view.ranges if r.primary is not None}
            self.world.counts["ranges placed late"] += len(after - before)
            self.world.counts["late tables"] += 1
            self._open(made.table)
        if len(self.late) < self._late_count and not self._is_over():
            self.world.after(draw.expovariate(1 / self._every_s), self._make)

    @property
    def members(self) -> set[Incarnation]:
        """Workers that are up, and whose place no other has."""
        nodes = self.scheduler.view.nodes
        known = {node.incarnation for node in nodes if node.state.is_member}
        return known & {Incarnation(w.incarnation) for w in self.workers if not w.is_down}

    def _open(self, table: Table) -> None:
        self.layout.settings.add(table)
        if self.world.draw.random() < 0.4:
            self.clip([table])
        self.truth.left |= {(table.table_id, incarnation) for incarnation in self.truth.gone}
        self.layout.tables.append(table)
        self.late.append(table)

    def program(self, worker: SimWorker) -> Waits:
        """The tables that there were, then each that comes."""
        yield from super().program(worker)
        for index in range(self._late_count):
            yield lambda index=index: len(self.late) > index  # type: ignore[misc]
            table = self.late[index]
            ranges = table.blocks_by_range(self.layout.range_count)
            # As a client does: not before it has a view with the table.
            yield lambda ranges=ranges: set(ranges) <= worker.layout.owner.keys()  # type: ignore[misc]
            worker.layout.tables[:] = [table]
            worker.clocks[table.table_id] = 0
            yield from training(worker, self.truth, LATE_STEPS)
            self.world.counts["late tables that were trained"] += 1

    def _check_end(self) -> None:
        super()._check_end()
        for server in self.living:
            missing = server.replication.missing
            assert not missing, f"LOST: ranges {missing} are server {server.node_id}'s: no values"


@pytest.mark.timeout(300)
def test_what_is_made_while_servers_die_is_served(sim_seeds: tuple[int, ...]) -> None:
    """Nobody has seen anything of a range whose first holders died before they heard of it."""
    run_seeds(LateTableSimulation, sim_seeds[:QUICK_SEEDS])
