"""A whole cluster on a virtual clock: every seed another schedule of delays, losses and resets.

Reproduce one with ``make sim SEED=...``; its transcript is printed when it fails.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from ps_core.cluster_view import HAND_OVER_FEATURE, Role, Session
from ps_core.consistency import Consistency, StalePolicy, parsed
from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.window.push_window import EntryKey
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE
from scheduler.machine.cluster import Cluster as SchedulerMachine
from scheduler.machine.cluster import Created
from scheduler.machine.state import ClusterSettings, Registration
from tests.sim.actors import Layout, SimWorker, Waits
from tests.sim.arithmetic import (
    in_fragments,
    may_be_read_last,
    may_clip,
    of_rows,
    one_thread,
    optimizer_of,
    reduction_of,
    tensors_of,
)
from tests.sim.edits import Edits
from tests.sim.evaluator import Evaluator
from tests.sim.groups import Groups, in_groups
from tests.sim.server import SimServer
from tests.sim.training import training
from tests.sim.truth import Settings, Truth, scale_of, square
from tests.sim.world import World

SERVERS = 2
WORKERS = 3
LIMIT_S = 2_000.0
FEW = 20
QUICK_SEEDS = 8
"""Of a kind that is only tried out in `make test`: `make sim` has the others."""
CONSISTENCIES = (
    "bsp", "bsp:backup=1", "bsp:backup=2,grace=200ms", "ssp:0", "ssp:1", "ssp:3", "ssp:0..4",
    "asp", "asp:reject=1", "asp:damp=0.5", "asp:divide", "asp:compensate=0.01",
)  # fmt: skip


def drawn_consistency(draw: random.Random) -> Consistency:
    """One of them; delay compensation is adaptive as often as not."""
    found = parsed(draw.choice(CONSISTENCIES))
    if found.policy is not StalePolicy.COMPENSATE:
        return found
    return replace(found, adaptive=copy.copy(draw).random() < 0.5)  # later draws stay as they were


def _settings(max_workers: int) -> ClusterSettings:
    return ClusterSettings(
        cluster_id="sim",
        timeline=bytes(16),
        token_key=bytes(16),
        first_incarnation=Incarnation(1),
        worker_count=WORKERS,
        server_count=SERVERS,
        max_workers=max_workers,
        range_count=8,
    )


def _spec(
    draw: random.Random,
    index: int,
    numbers: random.Random,
    *,
    may_sum: bool = False,
    may_have_rows: bool = False,
) -> TableSpec:
    blocks = draw.choice((1, 2, 5, 9))
    optimizer = optimizer_of(numbers, may_sum=may_sum and not index)
    consistency = parsed("bsp") if index == 0 else drawn_consistency(draw)
    if consistency.policy is StalePolicy.COMPENSATE and optimizer.kind is OptimizerKind.ADD:
        optimizer = OptimizerSpec(OptimizerKind.SGD)
    spec = TableSpec(
        name=f"table-{index}",
        dtype=DType.FLOAT32,
        element_count=64 * blocks,
        optimizer=optimizer,
        block_elements=64,
        tensors=tensors_of(64 * blocks),
        consistency=consistency,
        reduction=reduction_of(numbers),
        initializer=Initializer(InitializerKind.FROM_RANK_ZERO),
        gate_bytes=draw.choice((1, 1, 0, 4096)),
    )
    return of_rows(spec, numbers) if may_have_rows else spec


class Simulation:
    """One seed.

    Attributes:
        often: what must have happened in a run of many seeds.
        seldom: and in one of `many` seeds, as `make sim-seldom` runs them.
        medians: of a seed, at least.
        may_sum: whether servers may keep sums only: then no worker comes after the first ones.
        may_differ: whether workers may mean different edits.
        may_group: whether workers may be in groups: then none of them dies.
        may_have_rows: whether tables may be of rows, which take no initial values and no edits.
    """

    max_workers = 0
    may_sum: ClassVar[bool] = True
    may_differ: ClassVar[bool] = True
    may_group: ClassVar[bool] = True
    may_have_rows: ClassVar[bool] = True
    often: ClassVar[frozenset[str]] = frozenset({
        "lost", "duplicated", "resets", "refused", "given_back", "credit", "withdrawals",
        "inline seals", "skipped steps", "eager steps", "consistent reads", "reads too late",
        "cuts", "cuts of ssp",
        "rejected", "discarded", "scaled", "early reads", "scaled updates", "scales", "numbers",
        "edits", "edits refused", "edits disputed", "edits of state", "tables of rows",
        "rows evicted", "gradients of candidates", "models in fragments", "steps of groups",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"corrected"})
    many: ClassVar[int] = 200
    medians: ClassVar[dict[str, int]] = {}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.world = self.world_of(seed, narrate=narrate)
        self.groups = Groups.drawn(seed) if self.may_group else Groups()
        draw, now_s = self.world.draw, self.world.now_s
        scheduler = self.scheduler = self.scheduler_of()
        self.sessions = nodes = self.registered()
        workers = nodes[-WORKERS:]
        for spec in self.specs(seed):
            reply = scheduler.create_table(workers[0], spec, now_s).reply
            assert isinstance(reply, Created), reply
        view = scheduler.view
        self.layout = Layout(
            {r.range_id: r.primary for r in view.ranges if r.primary is not None},
            {r.range_id: r.assignment_epoch for r in view.ranges},
            list(view.tables),
            len(view.ranges),
            self.truth_settings(view.tables),
        )
        self.layout.settings.groups = self.groups
        self.layout.settings.edits = Edits(seed, WORKERS, may_differ=self.may_differ)
        clipped = [t for t in view.tables if draw.random() < 0.4]
        self.clip(clipped)
        self.cluster = {node.node_id: self.server(node.node_id) for node in nodes[:-WORKERS]}
        for server in self.cluster.values():
            server.start(view)
        self.truth = Truth(self.layout.settings)
        self.workers = [
            SimWorker(self.world, self.cluster, self.layout_of(), session.rank, session.incarnation)
            for session in workers
        ]
        self.evaluator = Evaluator(self.world, self.cluster, self.layout, self.truth)

    def world_of(self, seed: int, *, narrate: bool) -> World:
        """Where it happens."""
        return World(seed, narrate=narrate)

    def scheduler_of(self) -> SchedulerMachine:
        """The scheduler's machine."""
        return SchedulerMachine(self.settings(), 0.0)

    def registered(self) -> list[Session]:
        """The first nodes: servers, and then workers."""
        roles = [Role.SERVER] * self.settings().server_count + [Role.WORKER] * WORKERS
        return [
            self.scheduler.register(self.asking(index, role), 0.0).reply
            for index, role in enumerate(roles)
        ]

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables."""
        draw, numbers = self.world.draw, random.Random(f"numbers of {seed}")
        may_have_rows = self.may_have_rows and not self.groups.leaders
        found = [
            _spec(draw, index, numbers, may_sum=self.may_sum, may_have_rows=may_have_rows)
            for index in range(draw.choice((1, 2, 3)))
        ]
        if self.groups.leaders:
            return [in_groups(spec).validated() for spec in found]
        return [spec.validated() for spec in in_fragments(found, numbers)]

    def drawn_consistency(self, draw: random.Random) -> Consistency:
        """One that an operator may want."""
        return drawn_consistency(draw)

    def truth_settings(self, tables: Iterable[Table]) -> Settings:
        """Which consistency the clocks of the tables have."""
        return Settings(tables)

    def clip(self, tables: Iterable[Table]) -> None:
        """Their workers clip by the norm, where there is a gradient to clip."""
        self.layout.settings.clipped |= {t.table_id for t in tables if may_clip(t)}

    def asking(self, index: int, role: Role) -> Registration:
        """What one of the first nodes registers with."""
        return Registration(
            bytes([index + 1]) * 16,
            role,
            f"sim:{1000 + index}" if role is Role.SERVER else "",
            kernel_fingerprint="sim" if role is Role.SERVER else "",
            features=(HAND_OVER_FEATURE if role is Role.SERVER else CHECKPOINTS_FEATURE,),
        )

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        return _settings(self.max_workers)

    def server(self, node_id: NodeId) -> SimServer:
        """One of the servers."""
        return SimServer(self.world, node_id, WORKERS, self.layout.settings)

    def layout_of(self) -> Layout:
        """What a worker knows."""
        return self.layout

    def step_count(self) -> int:
        """How many steps on each table a worker makes."""
        return self.world.draw.randint(6, 12)

    def program(self, worker: SimWorker) -> Waits:
        """What a worker does."""
        steps = self.step_count()
        yield from training(worker, self.truth, self.groups.step_count or steps)

    def run(self) -> Counter[str]:
        """Train, check, and return what happened."""
        for worker in self.workers:
            worker.start(self.program(worker))
        self.evaluator.start()
        with one_thread():
            done = self.world.run(self._is_over, LIMIT_S)
        assert done, f"deadlock: {self._standstill()}"
        self._check_end()
        return self.world.counts

    def _is_over(self) -> bool:
        return all(worker.finished for worker in self.workers)

    def _standstill(self) -> str:
        waits = [
            sentence
            for server in self.cluster.values()
            for part in server.machine.shards.values()
            for sentence in part.read_gate.waits(self.world.now_s)
        ]
        windows = {w.rank: w.window.open_entries() for w in self.workers}
        return f"{waits} {windows}"

    def _check_end(self) -> None:
        """Exactly what was sealed is there, and nothing is left over."""
        for server in self.cluster.values():
            if not server.is_dead:
                server.works.finish()
        for table in self.checked_tables:
            self.world.counts["tables of rows"] += table.spec.rows is not None
            for block in range(table.block_count):
                range_id = table.range_of_block(block, self.layout.range_count)
                server = self.cluster[self.layout.owner[range_id]]
                found = server.values[table.table_id, block]
                expected = self.truth.contributions[table.table_id, block]
                assert sorted(self.truth.living(found)) == sorted(self.truth.living(expected))
                if may_be_read_last(table):
                    read = server.newest((table.table_id, range_id), block)
                    self.truth.twin.check(table, block, found, read)
        twin = self.truth.twin
        self.world.counts["numbers"] += twin.count
        self.world.counts["models in fragments"] += any(
            table.spec.optimizer.fragment_count for table in self.layout.tables
        )
        self.world.counts["rows evicted"] += twin.evicted_count
        self.world.counts["gradients of candidates"] += twin.candidate_count
        for server in self.cluster.values():
            staging = server.machine._staging.items()
            held = {table_id for table_id, each in staging if each.held_bytes}
            held |= {table_id for (table_id, *_), grads in server.sums.items() if grads}
            assert not [table_id for table_id in held if not self._may_hold_steps(table_id)]
        if not self.truth.gone:
            self._check_scales()
        for worker in self.workers:
            if worker.incarnation in self.truth.gone:
                continue
            assert worker.window.in_flight_bytes == 0
            left = [
                key for key, _ in worker.window.open_entries() if not self._waits_on(worker, key)
            ]
            assert not left, f"worker {worker.rank} has no answer to {left}"

    @property
    def checked_tables(self) -> Sequence[Table]:
        """Those that are looked at in the end."""
        return self.layout.tables

    def _may_hold_steps(self, table_id: TableId) -> bool:
        """Whether steps of a table may wait for others that never came."""
        del table_id
        return False

    def _waits_on(self, worker: SimWorker, key: EntryKey) -> bool:
        """A worker whose training ends since a table gets no initial values, or that came as the
        others ended and has not heard so yet, may have passed a step there: the table's ranges
        never decide its seal.
        """
        server = self.cluster[self.layout.owner[key.range_id]]
        state = server.machine.shards[key.table_id, key.range_id].state
        return (worker.failed or not worker.finished) and not state.initialized

    def _check_scales(self) -> None:
        """Every update of BSP was scaled by what the whole of its gradient needs."""
        for table in self.checked_tables:
            grads = [g for (t, _), of in self.truth.contributions.items() for g in of
                     if t == table.table_id]  # fmt: skip
            for (table_id, clock), scale in self.layout.settings.scales.items():
                setting = self.layout.settings.at(table, clock)
                if table_id == table.table_id and not setting.backup_workers:
                    assert scale == scale_of(square(g) for g in grads if g.clock == clock)
                    self.world.counts["scales"] += 1


class Run:
    """What happened in the seeds of one kind."""

    def __init__(self, kind: type[Simulation]) -> None:
        self.total: Counter[str] = Counter()
        self._kind = kind
        self._seeds: list[Counter[str]] = []

    def add(self, counts: Counter[str]) -> None:
        """One seed's."""
        self.total += counts
        self._seeds.append(counts)

    def report(self) -> str:
        """It, in two lines."""
        names = ("messages", "parked waits", *self._kind.medians)
        medians = ", ".join(f"{self._median(name):.0f} {name}" for name in dict.fromkeys(names))
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.total.items()))
        return f"{len(self._seeds)} seeds, medians of a seed: {medians}\n{counts}"

    @property
    def lacks_something(self) -> bool:
        """Whether something has not happened that should now and then, in however many seeds."""
        return not self._kind.often | self._kind.seldom <= set(self.total)

    def lacks(self) -> list[str]:
        """What should have happened in so many seeds, and did not."""
        expected: frozenset[str] = frozenset()
        if len(self._seeds) >= FEW:
            expected |= self._kind.often
        if len(self._seeds) >= self._kind.many:
            expected |= self._kind.seldom
        found = [f"never happened: {name}" for name in sorted(expected - set(self.total))]
        for name, least in self._kind.medians.items() if len(self._seeds) >= FEW else ():
            if self._median(name) < least:
                found.append(f"median of {name}: {self._median(name)}; expected {least}")
        return found

    def _median(self, name: str) -> float:
        return statistics.median(counts[name] for counts in self._seeds) if self._seeds else 0.0


def run_seeds(kind: type[Simulation], seeds: tuple[int, ...]) -> None:
    """Run each seed, and say what happened in all; one that fails is named, with a transcript."""
    run = Run(kind)
    for seed in seeds:
        simulation = kind(seed, narrate=len(seeds) == 1)
        try:
            run.add(simulation.run())
        except Exception:
            print("\n".join(simulation.world.transcript))
            print(f"SEED={seed}")
            raise
    print(f"\n{run.report()}")
    assert not run.lacks()


def test_every_seed_ends_with_exactly_what_was_sealed(sim_seeds: tuple[int, ...]) -> None:
    """G1, G3, G4 and no deadlock, at a window of two blocks and the smallest gate bound."""
    run_seeds(Simulation, sim_seeds)
