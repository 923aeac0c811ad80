"""An evaluator: it reads one state of a whole table, again and again, while training goes on."""

from __future__ import annotations

from ps_core.consistency import Mode
from ps_core.errors import (
    AlreadyPast,
    InvalidConfig,
    NotOwner,
    Overloaded,
    PushpullError,
    Recovering,
    StaleAssignment,
    TableNotFound,
    UpdateFailed,
    WaitExpired,
)
from ps_core.keys import Incarnation, NodeId
from ps_core.tables.table import Table
from tests.sim.actors import Cluster, Layout, Reads, ReadTerms, Waits
from tests.sim.truth import Truth
from tests.sim.world import World

EVALUATOR = Incarnation(99)
CUT_S = 3.0
LOOK_S = 0.05


class Evaluator:
    """Reads at a clock that it names ahead, or by a cut."""

    def __init__(self, world: World, cluster: Cluster, layout: Layout, truth: Truth) -> None:
        self.world, self.cluster, self.layout, self.truth = world, cluster, layout, truth
        self.reads = Reads(world, cluster, layout)
        self._program = self._evaluate()
        self._clock = 0
        self._cut_count = 0

    def start(self) -> None:
        """Go on until the simulation ends."""
        self._advance(lambda: True)

    def _advance(self, condition: object) -> None:
        while callable(condition) and condition():
            condition = next(self._program, None)
        if condition is not None:
            self.world.after(LOOK_S, lambda: self._advance(condition))

    def _evaluate(self) -> Waits:
        draw = self.world.draw
        while True:
            if draw.random() < 0.4:
                yield from self._read_ahead(self.layout.tables[0])
            else:
                yield from self._read_by_cut(draw.choice(self.layout.tables))

    def _read_ahead(self, table: Table) -> Waits:
        self.reads.begin(table, ReadTerms(self._clock, None, consistent=True))
        yield lambda: self.reads.is_done()
        if not self.reads.refusals:
            self.world.counts["consistent reads"] += 1
            assert self.layout.settings.at(table, self._clock).mode is Mode.BSP
            self._check(table, self._clock)
            self._clock += 1
            return
        error = self.reads.refusals[0]
        if isinstance(error, AlreadyPast):
            self.world.counts["reads too late"] += 1
            self._clock = error.clock + self.world.draw.choice((0, 1, 2))
        else:
            self._clock = 0

    def _read_by_cut(self, table: Table) -> Waits:
        self._cut_count += 1
        cut_id = (EVALUATOR, self._cut_count)
        owners = {self.layout.owner[r] for r in table.blocks_by_range(self.layout.range_count)}
        clocks: dict[NodeId, int] = {}
        for owner in owners:
            self._begin_cut(table, owner, cut_id, clocks)
        until_s = self.world.now_s + CUT_S / 2
        yield lambda: clocks.keys() == owners or self.world.now_s >= until_s
        if clocks.keys() != owners:
            self.world.counts["cuts given up"] += 1
            return
        clock = max(clocks.values())
        self.reads.begin(table, ReadTerms(clock, None, consistent=True, cut_id=cut_id))
        yield lambda: self.reads.is_done()
        if self.reads.refusals:
            self._check_refused(table, self.reads.refusals[0])
            return
        mode = self.layout.settings.at(table, clock).mode
        self.world.counts["cuts"] += 1
        self.world.counts[f"cuts of {mode.value}"] += 1
        self._check(table, clock)

    def _begin_cut(
        self,
        table: Table,
        owner: NodeId,
        cut_id: tuple[Incarnation, int],
        clocks: dict[NodeId, int],
    ) -> None:
        def arrive() -> None:
            try:
                clock = self.cluster[owner].begin_cut(table.table_id, cut_id, CUT_S)
            except (NotOwner, Overloaded, Recovering, TableNotFound):  # the view may not be there
                return
            except UpdateFailed:
                assert table.table_id in self.layout.settings.unreadable
                return
            self.world.send("cut", lambda: clocks.update({owner: clock}))

        self.world.send("begin cut", arrive)

    def _check_refused(self, table: Table, error: PushpullError) -> None:
        moved = NotOwner | StaleAssignment | TableNotFound
        is_new = isinstance(error, Recovering) and "has no view" in error.message
        is_failed = isinstance(error, UpdateFailed)
        if not is_failed or table.table_id not in self.layout.settings.unreadable:
            refused = WaitExpired | AlreadyPast | InvalidConfig | moved
            assert is_new or isinstance(error, refused), error
        self.world.counts["cuts too slow"] += 1

    def _check(self, table: Table, clock: int) -> None:
        """All of the table is as the steps up to that clock made it, of everyone alike."""
        if self.layout.settings.loses(table, clock):
            return
        for answer in self.reads.answers.values():
            for block, found in answer.blocks.items():
                expected = self.truth.upto(table.table_id, block, clock)
                differing = set(self.truth.living(found)) ^ expected
                assert not differing, f"clock {clock} of block {block}: {sorted(differing)}"
