"""The scheduler dies at any step of what it does, and another goes on from its journal (S18).

That happens beside failover, replacement, changes of consistency and checkpoints. What was not
durable is lost, and what was being written may be durable without anybody having been told. A call
that is not answered is made again.

Oracles, beside those of failover and of replacements:
    CL-1  No node's number, and no incarnation, is given to two registrations.
    S18   The scheduler that goes on has all that was told: its view is not older, no epoch goes
          back, and no range moves by a restart alone. It judges nobody before a lease has passed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest

from ps_core.cluster_view import HAND_OVER_FEATURE, ClusterView, Role, Session
from ps_core.errors import Recovering
from ps_core.keys import TableId
from scheduler.journal import records
from scheduler.journal.decision_buffer import DecisionBuffer, DurableBatch
from scheduler.machine.checkpoint_state import CheckpointMade
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import (
    ChangeCommitted,
    NodeSilent,
    RangesFailedOver,
    Registration,
    Transition,
)
from tests.sim.actors import SimWorker
from tests.sim.replicated import LEASE_S
from tests.sim.scheduled import LOOK_S
from tests.sim.server import SimServer
from tests.sim.summing import Summing
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_scheduler_away import AwaySimulation
from tests.sim.test_simulation import QUICK_SEEDS, run_seeds

pytestmark = pytest.mark.slow

FATAL = (0.0, 0.02, 0.1)
"""Of the steps of a scheduler: it dies there."""
WRITES_S = (0.0, 0.001, 0.05, 1.0)
"""How long a write may take."""
MOST_STARTS = 12
FOUND = (134, 2181)
"""Seeds that were red."""
FEW_SEEDS = 4
MORE_STEPS, MOST_MORE_STEPS = (2, 4), 8
"""Of a worker, when another scheduler has begun; and in a seed."""


class _AsTold:
    """The machine, with the view that is told and not the one that it has."""

    def __init__(self, machine: Cluster, view: ClusterView) -> None:
        self.machine, self.view = machine, view

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)


class RestartSimulation(AwaySimulation, ReplacementSimulation):
    """One seed in which the scheduler has a journal, and dies."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler started again", "died before the write", "died in the write, which was whole",
        "died in the write, which is lost", "died when it was written", "calls made again",
        "away with a change open", "away with a cut open", "killed while it was away", "gone",
        "replacements", "joined", "failovers", "checkpoints", "changed", "equal replicas",
        "withdrawn at a start",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "scheduler started again": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.fates = random.Random(f"fates of {seed}")
        self._fatal, self._writes_s = self.fates.choice(FATAL), self.fates.choice(WRITES_S)
        self._untold, self._records = self._journal()
        self._told_view: ClusterView | None = None
        self._writing: records.JournalDelta | None = None
        self._unanswered: list[tuple[int, Callable[[], None]]] = []
        self._answers: list[tuple[int, Callable[[], None]]] = []
        self._late: tuple[Transition, ...] = ()  # durable, and told to nobody, by whoever died
        self._start_number, self._started_s = 0, 0.0
        self._has_died = False
        self._given: dict[int, bytes] = {}
        super().__init__(seed, narrate=narrate)
        self._dies = False
        self._untold.decided((), is_news=True)
        self._put(self._take())
        self._tell_all(self._untold.written())

    def _journal(self) -> tuple[DecisionBuffer, dict[str, bytes]]:
        """What is not durable yet, and what is, when it begins."""
        return DecisionBuffer(), {}

    # --- what is durable, and told

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        """It is told when it is durable."""
        for transition in transitions:
            is_early = self.world.now_s - self._started_s <= LEASE_S
            assert not (isinstance(transition, NodeSilent) and is_early), "S18: judged at once"
        if transitions:
            self._untold.decided(transitions, is_news=True)
            if self._told_view is not None:
                self._may_die("died before the write")
                self._write()

    def _take(self) -> records.JournalDelta | None:
        return self._untold.take(
            partial(self.scheduler.journaled, self.world.now_s), self.scheduler.view
        )

    def _write(self) -> None:
        if self._is_away or self._writing is not None:
            return
        self._writing = self._take()
        if self._writing is not None:
            number = self._start_number
            delay_s = self.fates.random() * self._writes_s
            self.world.after(delay_s, lambda: self._written(number))

    def _written(self, start_number: int) -> None:
        if start_number != self._start_number or self._has_died:
            return
        delta, self._writing = self._writing, None
        self._put(delta)
        if self._may_die("died when it was written"):
            self._late = self._untold.written().transitions
            return
        self._tell_all(self._untold.written())
        self._write()

    def _put(self, delta: records.JournalDelta | None) -> None:
        assert delta is not None
        for key in delta.removed:
            del self._records[key]
        self._records |= delta.encoded()

    def _tell_all(self, told: DurableBatch) -> None:
        own, before = self.scheduler, self._told_view
        assert before is None or told.view.view_number >= before.view_number, "S18: it goes back"
        self._told_view = told.view
        self._late = ()  # they came first
        self.scheduler = _AsTold(own, told.view)  # type: ignore[assignment]
        super()._publish(told.transitions)
        self.scheduler = own
        self._unanswered = [each for each in self._unanswered if each[0] > told.number]
        answers, self._answers = self._answers, []
        for number, answer in answers:
            if number > told.number:
                self._answers.append((number, answer))
            else:
                answer()

    def _reach(self, action: Callable[[], None]) -> None:
        """A call that is not answered is made again."""
        start_number = self._start_number
        super()._reach(action)
        if start_number != self._start_number:
            self._waiting.append(action)
        elif not self._is_away and self._untold.newest:
            self._unanswered.append((self._untold.newest, action))

    def _tell(self, server: SimServer, view: ClusterView) -> None:
        del view
        assert self._told_view is not None
        super()._tell(server, self._told_view)

    @property
    def told_view(self) -> ClusterView:
        """That of the newest decision that is durable."""
        return self._told_view or self.scheduler.view

    def _remind(self) -> None:
        """With what is told."""
        if self._told_view is None:
            self.world.after(1.0, self._remind)
        else:
            super()._remind()

    def _admitted(self, asking: Registration, comes: Callable[[Decision[Session]], None]) -> None:
        begin_s = self.world.now_s

        def ask() -> None:
            """Another scheduler may have a server at its address that the one before had missed."""
            waited_s = self.world.now_s - begin_s
            is_server = asking.role is Role.SERVER
            try:
                self._asked_to_admit(
                    replace(asking, waited_s=waited_s) if is_server else asking, comes
                )
            except Recovering:
                self.world.counts["asked again for an address"] += 1
                self.world.after(1.0, lambda: self._reach(ask))

        self._reach(ask)

    def _asked_to_admit(
        self, asking: Registration, comes: Callable[[Decision[Session]], None]
    ) -> None:
        start_number = self._start_number
        decision = self.scheduler.register(asking, self.world.now_s)
        self._publish(decision.transitions)
        if start_number == self._start_number:  # else nobody answers
            self._answered(asking, decision.reply, comes)

    def _answered(
        self, asking: Registration, session: Session, comes: Callable[[Decision[Session]], None]
    ) -> None:
        def answer() -> None:
            given = self._given.setdefault(int(session.incarnation), asking.registration_id)
            assert given == asking.registration_id, f"CL-1: {session.incarnation} is given twice"
            comes(Decision(session))

        if self._untold.newest:
            self._answers.append((self._untold.newest, answer))
        else:
            answer()

    def restart(self) -> None:
        """A server that was not there before registers until it is answered."""
        self._server_count = getattr(self, "_server_count", len(self.servers)) + 1
        number = self._server_count
        asking = Registration(
            bytes([100 + number]) * 16,
            Role.SERVER,
            self.newcomer_address(number),
            kernel_fingerprint="sim",
            features=(HAND_OVER_FEATURE,),
        )
        self._admitted(asking, self.join)

    def _leave(self, session: Session) -> None:
        self._reach(lambda: super(RestartSimulation, self)._leave(session))

    def _replace(self, rank: int) -> None:
        if self.is_there:
            super()._replace(rank)
        else:
            self.world.after(LOOK_S, lambda: self._replace(rank))

    # --- its deaths

    def _may_die(self, when: str) -> bool:
        """Whether it dies at this step."""
        is_due = self._fatal and self.fates.random() < self._fatal
        if not is_due or self._is_away or self.calamities.is_calm or self._is_over():
            return False
        if self._start_number >= MOST_STARTS:
            return False
        self._die_for(self.fates.choice((0.0, 0.5, 3.0, 12.0)) * (0.5 + self.fates.random()), when)
        return True

    def _die_for(self, for_s: float, when: str) -> None:
        """It dies, with what is not durable, and is started again after so long."""
        self.world.say(f"SCHEDULER DIED: {when}")
        self.world.counts[when] += 1
        self._is_away = self._has_died = True
        self._start_number += 1
        writing, self._writing = self._writing, None
        if writing is not None and self.fates.random() < 0.5:
            self._put(writing)
            self._late = self._untold.written().transitions
            self.world.counts["died in the write, which was whole"] += 1
        elif writing is not None:
            self.world.counts["died in the write, which is lost"] += 1
        again, self._unanswered = self._unanswered, []
        self._answers = []
        self.world.counts["calls made again"] += len(again)
        self._waiting += [action for _, action in again]
        self.world.after(for_s, self._come_back)

    def _pause(self) -> bool:
        """Or it dies, at no step of its own."""
        if self.calamities.is_calm or self._start_number >= MOST_STARTS:
            return True
        if self.fates.random() < 0.5:
            return super()._pause()
        for_s = self.fates.choice((0.0, 1.0, 8.0, 20.0)) * (0.5 + self.fates.random())
        self._die_for(for_s, "died at no step")
        following_s = for_s + self.fates.random() * 15.0
        self.world.after(following_s, lambda: self._go(self._pause, 5.0))
        return True

    def _come_back(self) -> None:
        if self._has_died:
            self._start_again()
        super()._come_back()
        self._write()

    def write_at_once(self) -> None:
        """What was decided, as `SchedulerServicer` writes what it has read when it begins."""
        self._writing, number = self._take(), self._start_number
        self.world.after(self.fates.random() * self._writes_s, lambda: self._written(number))

    def _start_again(self) -> None:
        kept = records.read(self._records)
        assert kept is not None
        began = Cluster.resumed(kept, self.world.now_s)
        self._check_resumed(began.reply.view)
        self.scheduler = began.reply
        self._has_died = False
        self._started_s = self.world.now_s
        self._untold = DecisionBuffer()
        self.world.say("SCHEDULER STARTED AGAIN")
        self.world.counts["scheduler started again"] += 1
        self.world.counts["withdrawn at a start"] += len(began.transitions)
        late = (*self._late, *began.transitions)
        self._untold.decided(late, is_news=bool(late))
        written = began.reply.view.checkpoint
        if written is not None:  # the directory says whether it has its manifest
            self.world.after(0.1, lambda: self._reach(lambda: self._settle(written.number)))

    def _settle(self, number: int) -> None:
        self.checkpointer._complete(number)

    def _check_resumed(self, view: ClusterView) -> None:
        """All that was told holds."""
        told = self._told_view
        assert told is not None
        assert view.view_number >= told.view_number, "S18: the view's number goes back"
        if view.view_number == told.view_number:
            assert view.ranges == told.ranges, "S18: a range has moved"
        for before, now in zip(told.ranges, view.ranges, strict=True):
            assert now.assignment_epoch >= before.assignment_epoch, "S18: an epoch goes back"

    # --- what may befall others meanwhile

    def may_lose(self, server: SimServer, *, for_good: bool) -> bool:
        """By what it has decided, and by what it would go on from."""
        if not super().may_lose(server, for_good=for_good):
            return False
        if self._told_view is None:
            return True
        own, self.scheduler = self.scheduler, _AsTold(self.scheduler, self._told_view)  # type: ignore[assignment]
        may = super().may_lose(server, for_good=for_good)
        self.scheduler = own
        return may


class LongRestartSimulation(RestartSimulation):
    """One seed in which workers train on whenever another scheduler has begun: it decides as much
    as the one before.
    """

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler started again", "trained on after a start", "changed after a start",
        "joined after a start", "failovers after a start", "checkpoints after a start", "gone",
        "equal replicas",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {
        "messages": 2_000, "scheduler started again": 1, "trained on after a start": 1,
    }  # fmt: skip

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._more_steps = 0
        self._had_sealed: dict[SimWorker, dict[TableId, int]] = {}
        """What workers had sealed when they were to train on last."""
        super().__init__(seed, narrate=narrate)

    def _start_again(self) -> None:
        """What was read is written before anything else is decided, as `SchedulerServicer` does."""
        super()._start_again()
        self.write_at_once()
        more = min(self.fates.randint(*MORE_STEPS), MOST_MORE_STEPS - self._more_steps)
        self._more_steps += more
        for worker in self.workers if more else ():
            if not (worker.finished or worker.is_at_its_last):
                worker.extra_steps += more
                sealed, own = self.truth.sealed, worker.incarnation
                tables = [table.table_id for table in worker.layout.tables]
                self._had_sealed[worker] = {t: sealed.get((t, own), 0) for t in tables}

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        counts = self.world.counts
        if not counts["scheduler started again"]:
            return
        match transition:
            case ChangeCommitted(change=change):
                what = "changed" if change.join is None else "joined"
                counts[f"{what} after a start"] += 1
            case RangesFailedOver():
                counts["failovers after a start"] += 1
            case CheckpointMade():
                counts["checkpoints after a start"] += 1

    def _check_end(self) -> None:
        super()._check_end()
        for worker, had_sealed in self._had_sealed.items():
            is_harmed = worker.failed or worker.is_down or worker.incarnation in self.truth.gone
            if is_harmed and worker not in self.has_left:
                continue
            for table_id, before in had_sealed.items():
                sealed = self.truth.sealed[table_id, worker.incarnation]
                assert sealed > before, (
                    f"LIVE: worker {worker.rank} had sealed clock {before} of table {table_id} "
                    f"when another scheduler began, and seals no more than {sealed}"
                )
            self.world.counts["trained on after a start"] += 1


class SumRestartSimulation(Summing, RestartSimulation):
    """One seed in which tables are of sums, or workers in groups: so none of them dies."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler started again", "with a table of sums", "steps of groups", "failovers",
        "checkpoints", "checkpoints with a table of sums", "equal replicas",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 1_500, "scheduler started again": 1}


@pytest.mark.timeout(300)
def test_sums_and_groups_go_on_beside_another_scheduler(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(SumRestartSimulation, sim_seeds[:FEW_SEEDS] if len(sim_seeds) > 1 else sim_seeds)


@pytest.mark.timeout(300)
def test_workers_train_on_beside_another_scheduler(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(LongRestartSimulation, sim_seeds[:FEW_SEEDS] if len(sim_seeds) > 1 else sim_seeds)


@pytest.mark.timeout(300)
def test_a_scheduler_that_dies_at_any_step_goes_on_from_its_journal(
    sim_seeds: tuple[int, ...],
) -> None:
    """Nothing is given twice, nothing that was told is taken back, and training goes on."""
    quick = (*sim_seeds[: QUICK_SEEDS - len(FOUND)], *FOUND)
    run_seeds(RestartSimulation, quick if len(sim_seeds) > 1 else sim_seeds)
