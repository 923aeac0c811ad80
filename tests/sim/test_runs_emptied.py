"""Ranges whose values went with a removed run, and that lose all their holders, are placed anew.

Named runs are removed when they are over. Then all holders of a range without values die, or one
of them has lost track of it and the others die. Servers come, often to the address of one that is
dead, whose membership ends. Whenever a range has no holder any more, another run begins at once,
whose tables place it anew: also at servers that have had it, and that hear of the placement in the
same view as of what came before it.

Oracles, beside those of `tests.sim.test_runs` and `tests.sim.test_effects`:
    S8     No range is lost, since one that has values always has a holder that lives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import ClusterView, NodeState, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from ps_core.sliced_work import Work
from ps_core.tables.table_spec import TableSpec
from scheduler.machine.cluster import Decision
from scheduler.machine.state import (
    ClusterSettings,
    RangesLost,
    RangesPlaced,
    RangesUnplaced,
    Registration,
    RunRemoved,
    Transition,
)
from tests.sim.calamities import Plan
from tests.sim.replicated import LEASE_S, ReplicatedServer
from tests.sim.scheduled import LOOK_S, SCHEDULER
from tests.sim.test_effects import EffectSimulation, MortalServer
from tests.sim.test_restores import AGAIN_S, Restoration, RestoredSimulation
from tests.sim.test_runs import PatientRunSimulation, RunSimulation
from tests.sim.test_runs_beside import RunRestoreSimulation, _RunRestoredSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation, _AsTold
from tests.sim.test_simulation import _spec, run_seeds
from tests.sim.timelines import TimelineServer

pytestmark = pytest.mark.slow

RANGES = 8
FEW_BLOCKS = 2
"""Of the table of the run without a name, at most: it has values in so many ranges."""
MANY_BLOCKS = RANGES
"""Of the tables of a run that begins when ranges have no holder, at least: they need all ranges."""
MOST_RUNS = 4
"""That begin then."""
_LOSES_TRACK = 0.5
"""Of the ranges that lose all who have them: one holder lives, and has nothing of it."""
_AT_AN_ADDRESS = 0.8
"""Of the servers that come: at the address of one that is dead, if the scheduler misses any."""
_IN_ONE_VIEW = 0.8
"""Of those that miss a range: they hear nothing before it is placed anew."""
_LASTS_S = (6.0, 12.0, 20.0)
"""Of a run that has a name: then an operator ends it."""
_PATIENCE_S = 30.0
"""For which holders are looked for that may die."""


class PlacedAnewServer(ReplicatedServer):
    """A server that counts what it hears of in one view."""

    def _observing(self, view: ClusterView) -> Work[None]:
        ranges = () if self._view is None else self._view.ranges
        for old, new in zip(ranges, view.ranges, strict=False):
            if old.primary is not None and old.placed_epoch < new.placed_epoch:
                self._count_placed(old, new)
        yield from super()._observing(view)

    def _count_placed(self, old: RangeAssignment, new: RangeAssignment) -> None:
        """A range was placed anew, and no view in between has come."""
        counts, own = self.world.counts, self.node_id
        counts["placed anew in one view"] += 1
        if own in old.initial_holders and own in new.initial_holders:
            counts["placed anew at a holder in one view"] += 1
            is_missing = not self.watch.has(self, new.range_id)
            counts["placed anew in one view where it was missed"] += is_missing


class EmptiedServer(PlacedAnewServer, MortalServer):
    """One whose effects may fail."""


class _EmptiedTimelineServer(PlacedAnewServer, TimelineServer):
    """One of a timeline."""


class Emptied(RunSimulation):
    """What empties ranges and lets them be placed anew, beside whatever else befalls runs.

    Attributes:
        replica_counts: one of them is drawn for a seed.
        strikes_at_removals: ranges that lose their holders for each run that is removed.
    """

    replica_counts: ClassVar[tuple[int, ...]] = (2, 2, 2, 3)
    strikes_at_removals: ClassVar[int] = 1

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._holders = random.Random(f"holders of {self.which(seed)}")
        self._beside = random.Random(f"replicas of {self.which(seed)}")
        self._awaited: set[RangeId] = set()
        """Ranges that are about to have no holder any more."""
        self._placed: dict[RangeId, AssignmentEpoch] = {}
        self._begun_count = 0
        self._taken_addresses: set[str] = set()
        super().__init__(seed, narrate=narrate)
        for name in self._sizes:
            self._end_soon(name)

    def _end_soon(self, name: str) -> None:
        """A run does not last long, and is removed when it is over."""
        ends_s = self._holders.choice(_LASTS_S) * (0.5 + self._holders.random())
        self.world.after(ends_s, lambda: self._end_run(name))
        self.world.after(1.0, lambda: self._remove(name))

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        return replace(super().settings(), range_count=RANGES)

    def specs(self, seed: int) -> list[TableSpec]:
        """One small table, so that other runs alone have values in most ranges."""
        numbers = random.Random(f"numbers of {seed}")
        while True:
            spec = _spec(self.world.draw, 0, numbers)
            if spec.element_count <= FEW_BLOCKS * spec.block_elements:
                return [spec.validated()]

    @cached_property
    def plan(self) -> Plan:
        """What happens: of five servers two may die, and of three one that has the most in common
        with another.
        """
        count, plan = self._holders.choice((3, 3, 5)), super().plan
        replica_count = self._beside.choice(self.replica_counts)
        return replace(
            plan,
            server_count=5 if replica_count > 2 else count,
            replica_count=replica_count,
            min_in_sync=min(plan.min_in_sync, replica_count),
        )

    def ranges_to_keep(self) -> Sequence[RangeAssignment]:
        """Ranges that must have a holder that lives: those with values."""
        view = self.scheduler.view
        held = {r for t in view.tables for r in t.blocks_by_range(len(view.ranges))}
        return [r for r in view.ranges if r.range_id in held]

    def newcomer_address(self, number: int) -> str:
        """Of the server that comes next."""
        return self.address_of_dead() or super().newcomer_address(number)

    def address_of_dead(self) -> str:
        """Often that of a server that is dead, and silent."""
        silent = [
            node.address
            for node in self.scheduler.view.nodes
            if node.role is Role.SERVER
            and node.state is NodeState.SILENT
            and node.node_id in self.lost()
            and node.address not in self._taken_addresses  # by one that has not registered yet
        ]
        if not silent or self._holders.random() >= _AT_AN_ADDRESS:
            return ""
        address = self._holders.choice(silent)
        self._taken_addresses.add(address)
        return address

    # --- ranges that lose their holders

    def _strike_holders(self, until_s: float) -> None:
        """All holders of a range without values die, or all that have it."""
        if self.calamities.is_calm or self.world.now_s > until_s:
            return
        if not self.is_there:
            self.world.after(LOOK_S, lambda: self._strike_holders(until_s))
            return
        kept = {r.range_id for r in self.ranges_to_keep()}
        empty = [r for r in self.scheduler.view.ranges if r.in_sync and r.range_id not in kept]
        self._holders.shuffle(empty)
        loses_track = self._holders.random() < _LOSES_TRACK
        for assignment in empty:
            lives = self._who_may_lose_track(assignment) if loses_track else None
            victims = {n for n in assignment.in_sync if lives is None or n != lives.node_id}
            if (lives or not loses_track) and self._may_lose_all(victims):
                self._awaited.add(assignment.range_id)
                if lives is not None:
                    self._lose_track_of(lives, empty, victims)
                self._kill_all_of(victims)
                return
        self.world.after(LOOK_S, lambda: self._strike_holders(until_s))

    def _who_may_lose_track(self, assignment: RangeAssignment) -> ReplicatedServer | None:
        for node_id in assignment.backups:
            server = self.servers[node_id]
            if server.is_awake and assignment.range_id in server.replication.replicas:
                return server
        return None

    def _lose_track_of(
        self, server: ReplicatedServer, ranges: Sequence[RangeAssignment], others: set[NodeId]
    ) -> None:
        """The server has nothing any more of the ranges that it and these alone hold."""
        for each in ranges:
            is_theirs = (
                server.node_id in each.backups and {*each.in_sync} - {server.node_id} <= others
            )
            if is_theirs and each.range_id in server.replication.replicas:
                server.lose_track(each.range_id)
                self._awaited.add(each.range_id)
                self.world.counts["fault: lost track of a range without values"] += 1

    def _may_lose_all(self, victims: set[NodeId]) -> bool:
        """Whether each range with values has a holder beside these that lives and is heard."""
        away = {node_id for node_id, count in self.calamities.away.items() if count > 0}
        gone = self.lost() | victims | away
        living = [server for server in self.living if server.node_id not in victims]
        return (
            len(living) > 1
            and not self.lost() & self.scheduler.view.living_servers
            and not any(server.asks for server in self.living)  # victims may ask to be alone
            and all(
                any(self.watch.has(self.servers[n], r.range_id) for n in set(r.in_sync) - gone)
                for r in self.ranges_to_keep()
            )
        )

    def _kill_all_of(self, victims: set[NodeId]) -> None:
        for node_id in sorted(victims):
            server = self.servers[node_id]
            if not server.is_dead:
                self.world.say(f"KILLED server {node_id}, which holds ranges without values")
                self.world.counts["fault: killed with ranges without values"] += 1
                self._kill_holder(server)

    def _kill_holder(self, server: ReplicatedServer) -> None:
        """Another server comes, when it is silent."""
        self.kill(server)
        come_s = LEASE_S + 1.0 + 4.0 * self._holders.random()
        self.world.after(come_s, self.restart)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        counts = self.world.counts
        assert not isinstance(transition, RangesLost), f"S8: {transition}"
        if isinstance(transition, RunRemoved):
            until_s = self.world.now_s + _PATIENCE_S
            for _ in range(self.strikes_at_removals):
                self.world.after(self._holders.random(), lambda: self._strike_holders(until_s))
        elif isinstance(transition, RangesUnplaced):
            counts["ranges unplaced"] += len(transition.range_ids)
            kept = {each.range_id for each in self.ranges_to_keep()}
            assert kept.isdisjoint(transition.range_ids), f"LOST: values with {transition}"
            self.watch.unplaced(transition.range_ids)
            self._awaited.difference_update(transition.range_ids)
            self._begin_another(self.servers[transition.primary.node_id])
        elif isinstance(transition, RangesPlaced):
            anew = self._placed_anew()
            counts["ranges placed anew"] += len(anew)
            self._were_placed(anew)

    def _placed_anew(self) -> list[RangeAssignment]:
        """Ranges that were, and are placed once more since this was asked."""
        anew: list[RangeAssignment] = []
        for each in self.scheduler.view.ranges:
            if self._placed.get(each.range_id, each.placed_epoch) < each.placed_epoch:
                anew.append(each)
            if each.placed_epoch:
                self._placed[each.range_id] = each.placed_epoch
        return anew

    def _were_placed(self, anew: Sequence[RangeAssignment]) -> None:
        """These were placed anew."""

    def _look(self) -> None:
        super()._look()
        if self.is_there:
            self._check_unplaced()

    def _check_unplaced(self) -> None:
        """Nobody waits for who has left to bring a range back that has no values."""
        view = self.scheduler.view
        members = {node.node_id for node in view.nodes if node.state.is_member}
        gone = {r.range_id for r in view.ranges if r.in_sync and members.isdisjoint(r.in_sync)}
        if gone:
            empty = gone - {r.range_id for r in self.ranges_to_keep()}
            assert not empty, f"S8: all have left who had ranges {empty}, which have no values"

    # --- a run that begins then

    def _begin_another(self, primary: ReplicatedServer) -> None:
        draw = self._holders
        if not primary.is_dead and not self.calamities.is_calm and draw.random() < _IN_ONE_VIEW:
            self.calamities._cut([(SCHEDULER, primary.node_id)], 1.0 + 2.0 * draw.random())
        self._begin_run()

    def _begin_run(self) -> None:
        """Unless another one is about to begin."""
        draw, name = self._holders, f"again-{self._begun_count}"
        is_begun = name in self._opened | self._over or not self._begun_count
        if self.calamities.is_calm or not is_begun or self._begun_count >= MOST_RUNS:
            return
        self._begun_count += 1
        name = f"again-{self._begun_count}"
        self._sizes[name] = size = draw.choice((1, 1, 2))
        self._to_come += size
        for rank in range(size):
            come_s = 0.2 + draw.random() * draw.choice((0.1, 1.0))
            self.world.after(come_s, lambda rank=rank: self._come_to_run(name, rank))  # type: ignore[misc]
        self._end_soon(name)

    def _specs_of(self, run: str) -> list[TableSpec]:
        found = super()._specs_of(run)
        while run not in ("a", "b") and sum(map(_block_count, found)) < MANY_BLOCKS:
            found = super()._specs_of(run)
        return found

    def _has_made(self, session: Session, spec: TableSpec) -> bool:
        return self._may_make() and super()._has_made(session, spec)

    def _may_make(self) -> bool:
        """Whether no values would be lost at once: where all who have a range are dead, and the
        scheduler has not missed them yet, or who is left misses it and has not said so.
        """
        view = self.scheduler.view
        if self._are_too_many_dead():
            self.world.counts["tables that waited for the dead to be missed"] += 1
            return False
        for each in view.ranges:
            if each.primary in view.living_servers and not self._has_it(each):
                self.world.counts["tables that waited for what is missed"] += 1
                return False
        return True

    def _are_too_many_dead(self) -> bool:
        """Whether all holders of what is placed now may be dead."""
        dead = self.lost() & self.scheduler.view.living_servers
        return len(dead) >= self.plan.replica_count

    def _has_it(self, assignment: RangeAssignment) -> bool:
        """Whether a holder that lives could go on with the range."""
        holders = [server for server in self.living if server.node_id in assignment.in_sync]
        return any(self.watch.has(server, assignment.range_id) for server in holders)

    # --- the end

    def _is_over(self) -> bool:
        awaits = self._awaited and not self.calamities.is_calm
        return not awaits and super()._is_over()

    def _is_quiet(self) -> bool:
        """Whether each range without values is held by who lives, or is not placed."""
        if not super()._is_quiet():
            return False
        kept = {r.range_id for r in self.ranges_to_keep()}
        return all(
            r.primary is None or r.range_id in kept or self.watch.is_held(r.range_id)
            for r in self.scheduler.view.ranges
        )


def _block_count(spec: TableSpec) -> int:
    if spec.rows is not None:
        return spec.rows.partition_count
    return -(-spec.element_count // spec.block_elements)


class EmptiedSimulation(Emptied, EffectSimulation):
    """One seed in which holders of ranges without values die, and lose track of them."""

    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed with ranges without values", "fault: replica broken", "failovers", "gone",
        "joined ranges", "equal replicas", "runs begun late", "runs removed", "trained in a run",
        "ranges unplaced", "ranges placed anew", "placed anew in one view", "tables that waited",
        "placed anew at a holder in one view", "placed anew in one view where it was missed",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges placed anew": 1}
    server_kind = EmptiedServer


class EmptiedRestartSimulation(Emptied, PatientRunSimulation, RestartSimulation, EffectSimulation):
    """One seed in which the scheduler dies, too, and another goes on from its journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed with ranges without values", "scheduler started again", "runs removed",
        "ranges unplaced", "ranges placed anew", "placed anew in one view",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "scheduler started again": 1}
    server_kind = EmptiedServer

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._refused: set[bytes] = set()
        super().__init__(seed, narrate=narrate)

    def _may_lose_all(self, victims: set[NodeId]) -> bool:
        """By what it has decided, and by what it would go on from."""
        told = self._told_view
        if not super()._may_lose_all(victims) or told is None:
            return False
        own, self.scheduler = self.scheduler, _AsTold(self.scheduler, told)  # type: ignore[assignment]
        may = super()._may_lose_all(victims)
        self.scheduler = own
        return may

    def _start_again(self) -> None:
        """What was read is written before anything else is decided, as `SchedulerServicer` does it:
        so the records of what is removed next are known.
        """
        super()._start_again()
        self._untold.decided((), is_news=True)
        self.write_at_once()

    def _asked_to_admit(
        self, asking: Registration, comes: Callable[[Decision[Session]], None]
    ) -> None:
        run = self.scheduler._state.runs.get(asking.run)
        if run is None or not run.has_ended:
            super()._asked_to_admit(asking, comes)
        elif asking.world_size and asking.registration_id not in self._refused:
            self._refused.add(asking.registration_id)  # one of the first comes no more
            self._to_come -= 1

    def _change(self) -> None:
        """Of a table that the scheduler has: what it has removed may not be told yet."""
        known = self.scheduler._state.tables
        if all(table.key in known for table in self.layout.tables):
            super()._change()
        else:
            self.world.after(LOOK_S, self._change)

    def _end_run(self, name: str) -> None:
        """Until it is answered."""
        self._reach(lambda: super(EmptiedRestartSimulation, self)._end_run(name))

    def _remove(self, name: str) -> None:
        self._reach(lambda: super(EmptiedRestartSimulation, self)._remove(name))

    def _has_made(self, session: Session, spec: TableSpec) -> bool:
        """When it is told: a scheduler that dies before has not made it."""
        told = self._told_view
        if told is None or not self.is_there:
            return False
        if any(table.key == (session.run, spec.name) for table in told.tables):
            return super()._has_made(session, spec)
        if self._may_make():
            decision = self.scheduler.create_table(session, spec, self.world.now_s)
            self._publish(decision.transitions)
        return False


class EmptiedRestoreSimulation(Emptied, RunRestoreSimulation):
    """One seed in which the cluster is restored, too: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed with ranges without values", "restored in place", "restored elsewhere",
        "restored after runs", "ranges loaded", "runs begun in a new timeline", "runs removed",
        "ranges unplaced", "fault: lost track of a range without values",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "ranges placed anew", "placed anew in a new timeline", "placed anew in one view",
        "restored beside ranges that are not placed",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 1}
    server_kind = _EmptiedTimelineServer

    def asking_server(self) -> Registration:
        """What a server registers with that comes later."""
        asking = super().asking_server()
        found = "" if self.is_past else self.address_of_dead()  # else it comes to another cluster
        return replace(asking, address=found or asking.address)

    def _may_restore(self) -> None:
        """Not while ranges are about to have no holder, or to be placed anew: who comes for the
        dead would come to a timeline that is past.
        """
        waits = (self._awaited or self._to_come) and not self.calamities.is_calm
        if waits and not self.is_past:
            self.world.after(AGAIN_S, self._may_restore)
            return
        super()._may_restore()

    def _restore(self, *, is_open: bool) -> None:
        counts, ranges = self.world.counts, self.scheduler.view.ranges
        are_unplaced = any(r.primary is None and r.placed_epoch for r in ranges)
        counts["restored beside ranges that are not placed"] += are_unplaced
        super()._restore(is_open=is_open)

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _EmptiedRestoredSimulation(began)

    def _happened(self, transition: Transition) -> None:
        before = self.world.counts["ranges placed anew"]
        super()._happened(transition)
        placed = self.world.counts["ranges placed anew"] - before
        self.world.counts["placed anew in a new timeline"] += placed if self.number > 1 else 0


class _EmptiedRestoredSimulation(_RunRestoredSimulation, EmptiedRestoreSimulation):
    """A timeline that began with a checkpoint."""


@pytest.mark.timeout(300)
def test_a_range_without_values_is_placed_anew_when_all_have_died(
    sim_seeds: tuple[int, ...],
) -> None:
    """Whoever had it, and whatever views came."""
    run_seeds(EmptiedSimulation, sim_seeds[:1])
