"""Runs on the same servers (S19) beside update logs, departures and restores (S13, S8, S10).

Oracles, beside those of `tests.sim.test_runs` and of what runs are beside:
    S19    Nothing of a run that was removed comes back with a server, from whatever it has.
    S10    A cluster is restored when no named run trains, and is refused before that. Nothing of
           the named runs before is in what follows; their names begin runs anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidConfig
from ps_core.keys import Incarnation, NodeId
from ps_core.tables.table import Table
from scheduler.machine.cluster import Decision
from scheduler.machine.state import RunBegun, RunEnded, RunRemoved, Transition
from tests.sim.actors import SimWorker
from tests.sim.calamities import Plan
from tests.sim.departing import Departing
from tests.sim.replicated import ReplicatedServer
from tests.sim.scheduled import LOOK_S
from tests.sim.test_departures import with_tells
from tests.sim.test_logs import LogSimulation
from tests.sim.test_restores import AGAIN_S, Restoration, RestoredSimulation, RestoreSimulation
from tests.sim.test_runs import SOONER_S, STRANGER_INCARNATION, PatientRunSimulation, RunSimulation
from tests.sim.test_simulation import run_seeds

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
_AT_ONCE = 0.6
"""Of the seeds in which nobody but logs has anything: all servers die at once, at some time."""
_AT_REMOVALS = 0.5
"""Of the removals of runs: servers die before they have heard of it."""
_WITHIN_S = 0.5
_RUNS_LAST_S = 6.0
"""Since a restore was refused first: then an operator ends them."""


class RunLogSimulation(RunSimulation, LogSimulation):
    """One seed in which every server keeps a log, and all of them die now and then."""

    often: ClassVar[frozenset[str]] = frozenset({
        "all died at once", "died as a run was removed", "removed tables read from a log",
        "came back with its ranges", "ranges read from a log", "log snapshots", "frames let go",
        "runs begun", "runs removed", "tables given up", "trained in a run", "changed in a run",
        "gone", "joined in a run", "checkpoints beside a run", "disks stalled",
        "disks stalled for long", "disks crawled", "waited for a disk to come back",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"frames lost", "logs given up"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "runs begun": 1, "trained in a run": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        if self._removals.random() < _AT_ONCE:
            self.world.after(20.0 * self._removals.random(), self._kill_all)

    def logged_tables(self) -> Sequence[Table]:
        """A log may have what was removed since."""
        return (*super().logged_tables(), *self.removed)

    def server(self, node_id: NodeId) -> ReplicatedServer:
        """One of the servers."""
        made = super().server(node_id)
        copies = [t for r in made.replication.replicas.values() for t in r.copies]
        removed = {table.table_id for table in self.removed}
        self.world.counts["removed tables read from a log"] += len(removed.intersection(copies))
        return made

    def _kill_all(self) -> None:
        """All of them within half a second, where each of them comes back with all it had."""
        if self.calamities.is_calm or self.plan.replica_count > 1:
            return
        self.world.say("ALL DIE")
        self.world.counts["all died at once"] += 1
        for server in self.living:
            self.world.after(_WITHIN_S * self._removals.random(), lambda s=server: self._die(s))  # type: ignore[misc]

    def _die(self, server: ReplicatedServer) -> None:
        if not self.calamities.is_calm and self.may_lose(server, for_good=True):
            self.kill(server)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RunRemoved) and self._removals.random() < _AT_REMOVALS:
            for server in self.living:
                if not self.calamities.is_calm and self.may_lose(server, for_good=True):
                    self.world.counts["died as a run was removed"] += 1
                    self.kill(server)

    def _is_quiet(self) -> bool:
        """Whoever has a range has come back, too, though nobody may wait for it."""
        primaries = {r.primary for r in self.scheduler.view.ranges if r.primary is not None}
        return super()._is_quiet() and not primaries & self.lost()


class RunDepartureSimulation(Departing, RunSimulation):
    """One seed in which servers are told to stop, too: often as a run ends, or begins."""

    often: ClassVar[frozenset[str]] = frozenset({
        "told to stop", "let go", "told as a run began", "told as a run was over",
        "runs begun", "runs ended", "runs removed", "trained in a run", "gone",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "let go": 1, "runs begun": 1}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RunBegun):
            self._tell_one("told as a run began")
        elif isinstance(transition, RunEnded | RunRemoved):
            self._tell_one("told as a run was over")

    def _tell_one(self, when: str) -> None:
        untold = [s for s in self.living if s.node_id not in self.told and not s.is_paused]
        if untold and not self.calamities.is_calm and self._removals.random() < _AT_REMOVALS:
            self.world.counts[when] += 1
            self.tell(self._removals.choice(untold))


class RunRestoreSimulation(PatientRunSimulation, RestoreSimulation):
    """One seed in which the cluster is restored when no named run trains: its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "restored in place", "restored elsewhere", "restored after runs", "restores refused",
        "ranges loaded", "runs begun in a new timeline", "runs begun while values are loaded",
        "trained in a run", "runs ended", "runs removed", "failovers", "gone", "joined",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"restored a second time"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4, "runs begun": 2}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        self._refused_s = 0.0
        stranger = replace(
            self.callers.others[Incarnation(0)],
            role=Role.WORKER,
            incarnation=STRANGER_INCARNATION,
        )
        token = stranger.signed(self.scheduler.settings.token_key)
        self.callers.others[STRANGER_INCARNATION] = replace(stranger, token=token)

    def which(self, seed: int) -> str:
        """What its draws are of."""
        return f"{seed}, timeline {self.number}"

    @cached_property
    def plan(self) -> Plan:
        """What happens: as where there are no other runs."""
        plan = super().plan
        return replace(plan, calm_s=plan.calm_s + SOONER_S)

    def step_count(self) -> int:
        """Of a worker of the run without a name."""
        return RestoreSimulation.step_count(self)

    # --- runs, in a timeline that may be past

    def _when_there(self, action: Callable[[], None]) -> None:
        if not self.is_past:
            super()._when_there(action)

    def _has_come(self, decision: Decision[Session]) -> None:
        self.callers.others[decision.reply.incarnation] = decision.reply
        super()._has_come(decision)

    def _open(self, session: Session, worker: SimWorker) -> None:
        if self.is_there:
            super()._open(session, worker)
        elif not self.is_past:
            self.world.after(LOOK_S, lambda: self._open(session, worker))

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RunBegun) and self.number > 1:
            counts = self.world.counts
            counts["runs begun in a new timeline"] += 1
            parts = [
                p for s in self.living for p in s.machine.shards.values() if not p.state.table.run
            ]
            is_loading = any(not part.state.initialized for part in parts)
            counts["runs begun while values are loaded"] += is_loading

    # --- restores

    def _may_restore(self) -> None:
        """Not while a named run trains: an operator ends it, after a while."""
        if self.is_past or not self.restores or not self.is_there or not self.saver.complete:
            super()._may_restore()
            return
        try:
            self.scheduler.check_runs_are_over()
        except InvalidConfig:
            self._refused_s = self._refused_s or self.world.now_s
            self.world.counts["restores refused"] += 1
            if self.world.now_s > self._refused_s + _RUNS_LAST_S:
                for name in [n for n in self.scheduler._state.runs if n not in self._over]:
                    self._end_run(name)
        else:
            super()._may_restore()
            return
        self.world.after(AGAIN_S, self._may_restore)

    def _restore(self, *, is_open: bool) -> None:
        for name in self.scheduler._state.runs:
            trains = [n for n in self.scheduler._state.workers_of(name) if n.state.is_member]
            assert not trains, f"S10: restored while run {name!r} trains: {trains}"
        self.world.counts["restored after runs"] += bool(self.scheduler._state.runs)
        super()._restore(is_open=is_open)

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _RunRestoredSimulation(began)

    def _is_over(self) -> bool:
        if self.following is not None:
            return self.following._is_over()
        return super()._is_over()

    def _check_end(self) -> None:
        if self.following is None:
            super()._check_end()
        else:
            RestoreSimulation._check_end(self)


class _RunRestoredSimulation(RestoredSimulation, RunRestoreSimulation):
    """A timeline that began with a checkpoint: of no named run."""

    def registered(self) -> list[Session]:
        """The first nodes."""
        view = self.scheduler.view
        assert not view.runs, f"S10: runs {view.runs} are there after a restore"
        assert not view.tables, f"S10: tables {view.tables} are there after a restore"
        return super().registered()


@pytest.mark.timeout(300)
def test_a_removed_run_is_in_no_log(sim_seeds: tuple[int, ...]) -> None:
    """And one that trains comes back whole."""
    run_seeds(RunLogSimulation, sim_seeds[:FEW_SEEDS])


@pytest.mark.timeout(300)
def test_a_restore_is_of_the_run_without_a_name(sim_seeds: tuple[int, ...]) -> None:
    """Runs that were over are not in what follows, where their names begin others."""
    run_seeds(RunRestoreSimulation, sim_seeds[:FEW_SEEDS])
