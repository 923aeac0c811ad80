"""A cluster is restored from a checkpoint of which some blocks cannot be read (S10, G7).

Nobody can read them, or not the server that tries first. Their table fails, there and wherever the
range goes, and workers that are told so train without it. If the first server dies before anybody
was told, another reads all of it.

Oracles, beside those of restores:
    SM-4   Nothing of a table that has failed is read by who asks then, and no other table fails.
    LIVE   The other tables of its ranges are served, and backed up; and logged, where servers keep
           update logs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.errors import InvalidCheckpoint, PushpullError, UpdateFailed
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.checkpoint.restored_ranges import Key
from ps_server.ranges.events import AnswerPull, RefusePull
from ps_server.ranges.range_machine import RangeMachine
from ps_worker.window.push_window import EntryKey
from tests.sim.actors import SimWorker
from tests.sim.server import SimServer
from tests.sim.test_logs_beside import (
    LoggedTimelineServer,
    LogRestoreSimulation,
    _LogRestoredSimulation,
)
from tests.sim.test_restores import Restoration, RestoredSimulation, RestoreSimulation
from tests.sim.test_simulation import run_seeds
from tests.sim.timelines import READ_S, TimelineServer
from tests.sim.truth import Settings

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
MOST_BLOCKS = 2
"""Of a table, that cannot be read."""
FOR_ONE = 0.5
"""Of these: for one server alone."""
DIES = 0.5
"""Of the servers that cannot read a block: before anybody is told."""

Block = tuple[str, int]
"""Its table's name, and its number there."""


class Unreadable:
    """The blocks of one checkpoint that cannot be read: by nobody, or not by the first who tries.

    Attributes:
        told: the tables that somebody was told to have failed: nobody reads all of them any more.
    """

    def __init__(self, draw: random.Random, tables: Iterable[Table]) -> None:
        self.told: set[str] = set()
        self.draw = draw
        found = list(tables)
        self.tables = draw.sample(found, draw.randint(1, max(1, len(found) - 1)))
        self._first: dict[Block, NodeId | None] = {}
        self._for_one: set[Block] = set()
        for table in self.tables:
            count = draw.randint(1, min(MOST_BLOCKS, table.block_count))
            for block in draw.sample(range(table.block_count), count):
                self._first[table.spec.name, block] = None
                if draw.random() < FOR_ONE:
                    self._for_one.add((table.spec.name, block))

    def is_so(self, node_id: NodeId, name: str, block: int) -> bool:
        """Whether the server, which tries it, cannot read a block."""
        if (name, block) not in self._first:
            return False
        first = self._first[name, block] or node_id
        self._first[name, block] = first
        return name in self.told or (name, block) not in self._for_one or first == node_id


class UnreadableServer(TimelineServer):
    """A server that cannot read all of its checkpoint."""

    unreadable: Unreadable | None = None
    """What of it; None: nothing."""
    on_unread: Callable[[UnreadableServer], None] = staticmethod(lambda _: None)

    @cached_property
    def _failed_at(self) -> dict[TableId, int]:
        """Which read came next when a table failed here."""
        return {}

    def _read(self, key: Key) -> None:
        """A thread reads, for a while: its range may go meanwhile, or its table fail."""
        part = self._ranges.begin(key)
        if part is not None and not self.is_dead:
            lasts_s = self.world.draw.choice(READ_S) * self.world.draw.random()
            self.world.after(lasts_s, lambda: self._end_read(key, part))

    def _end_read(self, key: Key, part: RangeMachine) -> None:
        if self.is_dead:
            return
        if self.machine.shards.get(key) is not part:
            self.world.counts["gone while it was read"] += 1
            self._was_read(lambda: self._ranges.end_read(part))
            return
        try:
            versions = self._read_blocks(key, part)
        except InvalidCheckpoint as error:
            failed = UpdateFailed(error.message)
            self.on_unread(self)
            self._was_read(lambda: self._cannot_read(key, part, failed))
        else:
            self.world.counts["read beside what has failed"] += part.state.failure is not None
            self._was_read(lambda: self._ranges.was_read(key, part, versions))

    def _check_readable(self, name: str, block: int) -> None:
        if self.unreadable is not None and self.unreadable.is_so(self.node_id, name, block):
            raise InvalidCheckpoint(f"block {block} of '{name}' cannot be read")

    def _cannot_read(self, key: Key, part: RangeMachine, error: UpdateFailed) -> None:
        """As `RestoredValues`: the table fails, wherever this server has some of it."""
        self.world.counts["tables refused"] += 1
        self.world.say(f"server {self.node_id} cannot read {key}")
        self._ranges.end_read(part)
        self.works.finish()
        self._failed_at.setdefault(key[0], next(self.waiters))
        try:
            effects = self.machine.refuse_table(key[0], error)
        except PushpullError:  # nothing of it is here any more
            return
        self.carry_out(effects)

    def _answer_read(self, effect: AnswerPull | RefusePull) -> None:
        part = self.machine.shards.get((effect.table_id, effect.range_id))
        if part is not None and isinstance(effect, AnswerPull):
            # What was asked for before may have been decided before, and have waited since.
            asked_before = effect.waiter < self._failed_at.get(effect.table_id, 0)
            assert part.state.initialized and (part.state.failure is None or asked_before), (  # noqa: PT018
                f"SM-4: range {effect.range_id} of table {effect.table_id}, which has failed, is "
                "read"
            )
        if isinstance(effect, RefusePull) and isinstance(effect.error, UpdateFailed):
            assert self.unreadable is not None
            self.unreadable.told.add(self.table(effect.table_id).spec.name)
        super()._answer_read(effect)


class UnreadableRestoreSimulation(RestoreSimulation):
    """One seed in which not all can be read of what a cluster is restored from: this is its first
    timeline.
    """

    often: ClassVar[frozenset[str]] = frozenset({
        "tables refused", "tables dropped", "tables that failed", "ranges beside what has failed",
        "killed as it could not read", "restored in place",
        "restored elsewhere", "ranges loaded", "failovers while values are loaded",
        "gradients of a new timeline", "joined ranges", "equal replicas", "consistent reads",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "gone while it was read", "tables read by another server", "read beside what has failed",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 2}
    server_kind = UnreadableServer

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables: one of them can be read."""
        while True:
            found = super().specs(seed)
            if len(found) > 1:
                return found

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _UnreadableRestoredSimulation(began)


class _UnreadableRestoredSimulation(RestoredSimulation, UnreadableRestoreSimulation):
    """A timeline that began with a checkpoint."""

    unreadable: Unreadable

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables of the checkpoint."""
        return RestoredSimulation.specs(self, seed)

    def truth_settings(self, tables: Iterable[Table]) -> Settings:
        """Which consistency the clocks of the tables have."""
        settings = super().truth_settings(tables)
        drawn = random.Random(f"unreadable of {self.seed}, timeline {self.number}")
        self.unreadable = Unreadable(drawn, tables)
        settings.unreadable = {table.table_id for table in self.unreadable.tables}
        return settings

    def _give(self, server: SimServer) -> None:
        super()._give(server)
        assert isinstance(server, UnreadableServer)
        server.unreadable, server.on_unread = self.unreadable, self._may_kill

    def _may_kill(self, server: UnreadableServer) -> None:
        is_due = not self.calamities.is_calm and self.unreadable.draw.random() < DIES
        if is_due and self.may_lose(server, for_good=True):
            self.world.counts["killed as it could not read"] += 1
            self.calamities._kill(server)

    # --- what may be, where a table has failed

    def _waits_on(self, worker: SimWorker, key: EntryKey) -> bool:
        """A worker that came late has passed steps of a table before it heard that it has failed:
        where it has not, they wait for the others' steps.
        """
        return key.table_id in worker.dropped or super()._waits_on(worker, key)

    # --- the end

    def _failed(self) -> set[TableId]:
        told = self.unreadable.told
        return {t.table_id for t in self.unreadable.tables if t.spec.name in told}

    def _check_end(self) -> None:
        if self.following is None:
            self._check_failed()
        super()._check_end()

    def _check_failed(self) -> None:
        """Those who train have dropped what has failed, and nothing else."""
        failed, counts = self._failed(), self.world.counts
        for worker in self.workers:
            if worker.finished and not worker.failed:
                assert worker.dropped == failed, f"SM-4: worker {worker.rank}: {worker.dropped}"
        ranges: set[RangeId] = set()
        for server in self.living:
            for (table_id, range_id), part in server.machine.shards.items():
                if part.state.failure is not None:
                    assert table_id in failed, f"SM-4: table {table_id} has failed"
                    ranges.add(range_id)
        others = self.checked_tables
        served = {r for t in others for r in t.blocks_by_range(self.layout.range_count)}
        counts["tables that failed"] += len(failed)
        counts["ranges beside what has failed"] += len(ranges & served)
        counts["tables read by another server"] += len(self.unreadable.tables) - len(failed)

    @property
    def checked_tables(self) -> Sequence[Table]:
        """Those that have not failed."""
        failed = self._failed()
        return [table for table in self.layout.tables if table.table_id not in failed]


class _UnreadableLogServer(UnreadableServer, LoggedTimelineServer):
    """One that keeps an update log, too."""


class UnreadableLogRestoreSimulation(  # type: ignore[misc]
    UnreadableRestoreSimulation, LogRestoreSimulation
):
    """One seed in which servers keep update logs, too: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "tables refused", "tables dropped", "tables that failed", "ranges beside what has failed",
        "restored in place", "restored elsewhere", "ranges loaded", "ranges read from a log",
        "came back with its ranges", "log snapshots", "killed as it could not read",
        "handed over while the log waits for it", "restored ranges read from a log",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"tables read by another server"})
    server_kind = _UnreadableLogServer

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _UnreadableLogRestoredSimulation(began)


class _UnreadableLogRestoredSimulation(  # type: ignore[misc]
    _UnreadableRestoredSimulation, _LogRestoredSimulation, UnreadableLogRestoreSimulation
):
    """A timeline that began with a checkpoint."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [UnreadableRestoreSimulation, UnreadableLogRestoreSimulation])
def test_a_table_that_cannot_be_read_fails_alone(
    kind: type[RestoreSimulation], sim_seeds: tuple[int, ...]
) -> None:
    """Whoever reads it, and whatever befalls the servers meanwhile."""
    run_seeds(kind, sim_seeds[:FEW_SEEDS] if len(sim_seeds) > 1 else sim_seeds)
