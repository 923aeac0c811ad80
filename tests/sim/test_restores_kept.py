"""A cluster is restored whose scheduler has a journal, and dies at any step of that (S10, S18).

A restore is there when it is durable: before that the cluster goes on as it was, and whoever asked
for it asks again; from then on the cluster before is over, whoever dies. While nodes come to the
new timeline the scheduler dies too.

Oracles, beside those of restores and of starts:
    CL-1  No number of the cluster before is given again by one that went on from a journal.
    S10   Who is of an older timeline hears that from a scheduler that was not there when it ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest

from ps_core.cluster_view import Session
from scheduler.journal import records
from scheduler.journal.decision_buffer import DecisionBuffer
from scheduler.machine.checkpoint_state import CheckpointMade
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import Transition
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_restores import (
    AGAIN_S,
    Restoration,
    RestoredSimulation,
    RestoreSimulation,
)
from tests.sim.test_scheduler_restarts import MOST_STARTS, RestartSimulation
from tests.sim.test_simulation import run_seeds
from tests.sim.timelines import Address

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
MOST_DEATHS = 3
"""Of a scheduler, until there is a cluster again."""


class KeptRestoreSimulation(RestartSimulation, RestoreSimulation):
    """One seed: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler started again", "died before a restore was kept", "died when one was kept",
        "died while nodes came", "restored in place", "restored elsewhere", "registered again",
        "keeps its values", "restored a second time", "ranges loaded", "joined", "failovers",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4}

    # --- what is told of it

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        assert not (self.is_past and transitions), f"S10: an older timeline's call: {transitions}"
        for transition in transitions:
            if isinstance(transition, CheckpointMade):
                self.saver.decided(transition.number)
        super()._publish(transitions)

    def _reach(self, action: Callable[[], None]) -> None:
        if self.is_past:
            RestoreSimulation._reach(self, action)
        else:
            super()._reach(action)

    # --- who comes and goes

    def restart(self) -> None:
        """A server that was not there before."""
        RestoreSimulation.restart(self)

    def come(self, address: Address) -> None:
        """A server process registers that has nothing, until it is answered."""
        asking = self.asking_at(address)

        def comes(decision: Decision[Session]) -> None:
            self.addresses[decision.reply.node_id] = address
            self.join(decision)

        def arrive() -> None:
            if self.is_past:
                self.newest.come(address)
            else:
                self._asked_to_admit(asking, comes)

        self._reach(arrive)

    def _replace(self, rank: int) -> None:
        if not self.is_past:
            super()._replace(rank)

    def _takes_over(self, decision: Decision[Session]) -> None:
        self.callers.others[decision.reply.incarnation] = decision.reply
        super()._takes_over(decision)

    def _leave(self, session: Session) -> None:
        def arrive() -> None:
            if not self.is_past:
                ReplacementSimulation._leave(self, session)

        self._reach(arrive)

    # --- restores

    def _restore(self, *, is_open: bool) -> None:
        """When all is told that was decided before, unless the scheduler dies."""
        is_told = self._writing is None and not self._untold.newest
        if is_told and not self._dies_first():
            super()._restore(is_open=is_open)
        else:
            self.world.after(AGAIN_S, self._may_restore)

    def _dies_first(self) -> bool:
        """Whether the scheduler dies before the restore is durable."""
        may_die = self._start_number < MOST_STARTS and not self.calamities.is_calm
        if not may_die or self.fates.random() >= 0.2:
            return False
        self._die_for(2.0 * self.fates.random(), "died before a restore was kept")
        return True

    def restoration(self) -> Restoration:
        """The time until there is a cluster again."""
        return _KeptRestoration(self)

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _KeptRestoredSimulation(began)


class _KeptRestoration(Restoration):
    """Each step is durable before it is told; between two of them the scheduler may die."""

    def __init__(self, before: KeptRestoreSimulation) -> None:
        self._journals: tuple[DecisionBuffer, dict[str, bytes]] | None = None
        self._former_journal = before._untold, before._records
        self._fates = random.Random(f"fates of {before.seed}, restored after {before.number}")
        self._has_died, self._death_count = False, 0
        super().__init__(before)
        if self._fates.random() < 0.3:
            self._die("died when one was kept")

    @property
    def journal(self) -> tuple[DecisionBuffer, dict[str, bytes]]:
        """What is not durable, and what is; another cluster has one of its own."""
        if self._journals is None:
            self._journals = (DecisionBuffer(), {}) if self.is_elsewhere else self._former_journal
            self._journals[0].cluster_replaced()
        return self._journals

    def _changed(self) -> None:
        untold, kept = self.journal
        untold.decided((), is_news=True)
        now_s = self.world.now_s
        delta = untold.take(partial(self.scheduler.journaled, now_s), self.scheduler.view)
        assert delta is not None
        for key in delta.removed:
            del kept[key]
        kept |= delta.encoded()
        untold.written()

    def _die(self, when: str) -> None:
        """It is started again after a while."""
        self.world.say(f"SCHEDULER DIED: {when}")
        self.world.counts[when] += 1
        self._has_died = True
        self._death_count += 1
        self._away_until_s = self.world.now_s + self._fates.choice((0.1, 1.0, 8.0))

    def _reach(self, action: Callable[[], None]) -> None:
        if self._has_died:
            self._waiting.append(action)
        else:
            super()._reach(action)

    def _look(self) -> None:
        if self._has_died and self.world.now_s >= self._away_until_s:
            self._start_again()
        super()._look()
        may_die = self.following is None and not self._has_died
        if may_die and self._death_count < MOST_DEATHS and self._fates.random() < 0.05:
            self._die("died while nodes came")

    def _start_again(self) -> None:
        kept = records.read(self.journal[1])
        assert kept is not None
        began, before = Cluster.resumed(kept, self.world.now_s), self.scheduler.view
        view = began.reply.view
        assert view.view_number >= before.view_number, "S18: the view's number goes back"
        assert {n.node_id for n in view.nodes} >= {n.node_id for n in before.nodes}, "S18: a node"
        assert view.restored_from == before.restored_from, "S18: what it was restored from"
        self.scheduler = began.reply
        self._has_died = False
        self._journals = DecisionBuffer(), self.journal[1]
        self._changed()
        self.world.say("SCHEDULER STARTED AGAIN")


class _KeptRestoredSimulation(RestoredSimulation, KeptRestoreSimulation):
    """A timeline that began with a checkpoint."""

    def _journal(self) -> tuple[DecisionBuffer, dict[str, bytes]]:
        assert isinstance(self.began, _KeptRestoration)
        return self.began.journal


@pytest.mark.timeout(300)
def test_a_restore_is_there_when_it_is_durable(sim_seeds: tuple[int, ...]) -> None:
    """Whenever the scheduler dies, what it restored is as its checkpoint had it."""
    run_seeds(KeptRestoreSimulation, sim_seeds[:FEW_SEEDS] if len(sim_seeds) > 1 else sim_seeds)
