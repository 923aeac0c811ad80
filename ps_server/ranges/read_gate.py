"""The read gate: pulls that wait, and their reasons (SEMANTICS S5).

Invariants:
    RM-4  A pull is answered only from committed state that its gate allows.
"""

from __future__ import annotations

import itertools
from enum import Enum

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.consistency import Mode, StalePolicy
from ps_core.errors import AlreadyPast, Fenced, InvalidConfig, PushpullError, WaitExpired
from ps_core.tables.optimizers import OptimizerKind
from ps_server.ranges.events import AnswerPull, Effect, PullEvent, RefusePull
from ps_server.ranges.range_state import RangeState

_EXPLAINED_COUNT = 256

ASSIGN_WITHIN_S = 5.0
"""A worker that replaces rank 0, and reads values that it has to give itself, waits so long: they
may be on their way on another stream."""


class WaitCause(Enum):
    """The reason for which a pull is parked."""

    INITIAL_VALUES = "initial_values"
    OWN_STEP = "own_step"
    WORKERS = "workers"
    CONSISTENT = "consistent"
    CHANGE = "change"


class ReadGate:
    """The pulls of one table in one range."""

    def __init__(self, state: RangeState) -> None:
        self._state = state
        self._waiters: dict[int, PullEvent] = {}
        self._disputes: dict[int, PushpullError] = {}  # by clock, until it forms
        self._ungiven_s: float | None = None  # since when rank 0 waits for its own values

    def pull(self, event: PullEvent, now_s: float) -> list[Effect]:
        worker = self._state.worker(event.incarnation)
        if worker is not None:
            worker.last_heard_s = now_s
        mixed = self._mixed(event)
        problem = self._state.failure or mixed
        if problem is None and event.consistent and self._state.initialized:
            problem = self._past(event)
        if problem is None and self._may_read(event):
            return [self._answer(event)]
        problem = problem or self._lost() or self._dispute_of(event) or self._ahead_of(event)
        if problem is not None:
            return [self._refuse(event, problem)]
        self._waiters[event.waiter] = event
        return []

    def _past(self, event: PullEvent) -> AlreadyPast | None:
        """The error if the range, or any of its values, has passed the pull's clock. A cut asks for
        values alone: final seals may have brought the range further.
        """
        state = self._state
        clock = state.clock if event.cut_id is None else state.formed_clock
        if max(clock, state.changed_clock) <= event.clock:
            return None
        clock = max(state.clock, state.changed_clock)
        return AlreadyPast(
            f"range {state.range_id} of table '{state.name}' is at clock {clock}; the pull asked "
            f"for {event.clock}",
            clock=clock,
        )

    def _mixed(self, event: PullEvent) -> PushpullError | None:
        """The error of a consistent pull at a clock at which ranges may hold different steps."""
        state = self._state
        if not event.consistent:
            return None
        name = f"table '{state.name}' (range {state.range_id})"
        if event.cut_id is not None:
            if state.schedule.name_cut(event.cut_id, event.clock):
                return None
            return WaitExpired(
                f"the cut of {name} is not held up to clock {event.clock}: it took too long; cut "
                "again"
            )
        if state.schedule.is_bsp(event.clock):
            return None
        return InvalidConfig(
            f"{name} is {state.schedule.at(event.clock)} at clock {event.clock}, not BSP: a "
            "consistent pull there needs a cut"
        )

    def settled(self, out: list[Effect]) -> None:
        """A change was decided: refuse the pulls that can never be answered now. Before any step
        goes on under it, which may bring the range to their clock.
        """
        for event in list(self._waiters.values()):
            if event.consistent and event.cut_id is None:  # it waits for an update of BSP
                self._refuse_parked(event, self._mixed(event) or self._past(event), out)

    def _ahead_of(self, event: PullEvent) -> PushpullError | None:
        """The error of a pull too far ahead; a seal may be on its way on another stream."""
        if event.incarnation is None:
            return None
        state = self._state
        worker = state.workers.get(event.incarnation)
        newest = max(0 if worker is None else worker.sealed_clock, state.clock)
        if event.clock <= newest + limits.MAX_CLOCK_LEAD_COUNT:
            return None
        return InvalidConfig(
            f"a pull of table '{state.name}' asks for clock {event.clock}; expected its worker's, "
            f"at most {limits.MAX_CLOCK_LEAD_COUNT} beyond {newest}, the newest seal in effect"
        )

    def dispute(self, clock: int, problem: PushpullError, out: list[Effect]) -> None:
        """Workers disagree about `clock`: refuse the pulls that wait for it."""
        self._disputes[clock] = problem
        for event in [e for e in self._waiters.values() if self._dispute_of(e) is not None]:
            self._refuse_parked(event, problem, out)

    def _dispute_of(self, event: PullEvent) -> PushpullError | None:
        """The open dispute that a worker's pull would wait for."""
        if event.incarnation is None:
            return None
        clocks = [c for c in self._disputes if self._state.clock < c <= event.clock]
        return self._disputes[min(clocks)] if clocks else None

    def ended(self, node: Node, out: list[Effect]) -> None:
        """Refuse the pulls of a worker that ended, and all if only it could have released them."""
        lost = self._lost()
        for event in list(self._waiters.values()):
            is_own = event.incarnation == node.incarnation
            self._refuse_parked(event, Fenced(node.fence_words) if is_own else lost, out)

    def _lost(self) -> PushpullError | None:
        """The error of every pull, if the initial values can never come."""
        state = self._state
        if not state.awaits_rank_zero or 0 not in state.ended:
            return None
        return InvalidConfig(
            f"table '{state.name}' (range {state.range_id}) has no initial values and gets none: "
            f"{state.ended[0].ended_words}, before it had assigned them. Create the table under "
            "another name, or start the run anew"
        )

    def _refuse_giver(self, now_s: float, out: list[Effect]) -> None:
        """Refuse reads of a worker that replaced rank 0 and waits for values that none but it can
        give, and of which it has sent nothing.
        """
        state = self._state
        giver = state.by_rank.get(0) if state.awaits_rank_zero else None
        own: list[PullEvent] = []
        if giver is not None and not giver.is_first and 0 not in giver.steps:
            own = [e for e in self._waiters.values() if e.incarnation == giver.incarnation]
        if not own:
            self._ungiven_s = None
            return
        if self._ungiven_s is None:
            self._ungiven_s = now_s
        if now_s < self._ungiven_s + ASSIGN_WITHIN_S:
            return
        error = InvalidConfig(
            f"table '{state.name}' (range {state.range_id}) has no initial values: the worker of "
            "rank 0 before this one ended before it had assigned them. Assign them, create the "
            "table under another name, or start the run anew"
        )
        for event in own:
            self._refuse_parked(event, error, out)

    def waits_for(self, waiter: int) -> bool:
        return waiter in self._waiters

    def fail(self, error: PushpullError, out: list[Effect]) -> None:
        """Refuse all parked pulls."""
        for event in list(self._waiters.values()):
            self._refuse_parked(event, error, out)

    def cancel(self, waiter: int) -> None:
        event = self._waiters.pop(waiter, None)
        if event is not None and event.cut_id is not None:
            self._state.schedule.end_cut(event.cut_id)

    def tick(self, now_s: float) -> list[Effect]:
        """Refuse pulls past their deadline, naming workers waited for, and those of ended cuts."""
        out: list[Effect] = []
        for event in list(self._waiters.values()):
            if event.deadline_s <= now_s:
                self._refuse_parked(event, WaitExpired(self.explain(event, now_s)), out)
            elif event.cut_id is not None:
                self._refuse_parked(event, self._mixed(event), out)
        self._refuse_giver(now_s, out)
        return out

    def release(self, out: list[Effect]) -> None:
        """Answer the parked pulls that may be answered now."""
        if not self._waiters and not self._disputes:
            return
        for clock in [c for c in self._disputes if c <= self._state.clock]:
            del self._disputes[clock]
        for event in [e for e in self._waiters.values() if self._may_read(e)]:
            del self._waiters[event.waiter]
            out.append(self._answer(event))

    def _may_read(self, event: PullEvent) -> bool:
        """RM-4. A worker pulls for its next step, so the setting of that clock counts."""
        state = self._state
        if not state.initialized:
            return False
        if event.incarnation is None:
            return not event.consistent or state.clock >= event.clock
        clock = self._asked_clock(event)
        if state.schedule.holds_reads(clock + 1) or self._is_joining(event):
            return False
        setting = state.schedule.at(clock + 1)
        if setting.mode is Mode.BSP:
            return state.clock >= clock
        if self._done_clock(event) < clock:
            return False
        return setting.mode is Mode.ASP or state.clock >= clock - setting.staleness

    def _asked_clock(self, event: PullEvent) -> int:
        """The clock that counts: a worker that joined begins further on than it knows."""
        if event.incarnation is None:
            return event.clock
        worker = self._state.workers.get(event.incarnation)
        first_clock = self._state.first_clock if worker is None else worker.joined_clock
        return max(event.clock, first_clock)

    def _is_joining(self, event: PullEvent) -> bool:
        """True if the reader joins while others train, and has not joined here yet."""
        state = self._state
        if event.incarnation is None or event.incarnation in state.workers:
            return False
        return state.is_to_join(event.rank, event.incarnation)

    def _done_clock(self, event: PullEvent) -> int:
        """The clock up to which everything is decided for the reader."""
        worker = self._state.worker(event.incarnation)
        return self._state.formed_clock if worker is None else worker.done_clock

    def _answer(self, event: PullEvent) -> AnswerPull:
        state = self._state
        is_sum = state.table.spec.optimizer.kind is OptimizerKind.AGGREGATE
        worker = state.worker(event.incarnation)
        asked_clock = self._asked_clock(event)
        if event.incarnation is not None:
            state.read_clock = max(state.read_clock, asked_clock + 1)
        if event.cut_id is not None:
            state.schedule.end_cut(event.cut_id)
        range_clock = state.clock
        if event.incarnation is None:  # a final seal may have brought the range further
            named_clock = event.clock if event.consistent else 0
            range_clock = min(range_clock, max(state.stepped_clock, named_clock))
        elif asked_clock > event.clock:  # it has joined, and begins there
            range_clock = max(range_clock, asked_clock)
        keeps = state.schedule.at(asked_clock + 1).policy is StalePolicy.COMPENSATE
        return AnswerPull(
            event.waiter,
            state.table.table_id,
            state.range_id,
            event.clock if is_sum and event.incarnation is not None else state.clock,
            range_clock,
            dict(state.versions),
            {} if worker is None else dict(worker.own_updates),
            event.incarnation if keeps else None,
            None if is_sum or state.table.spec.rows is not None else state.edit_count,
        )

    def _refuse_parked(
        self, event: PullEvent, problem: PushpullError | None, out: list[Effect]
    ) -> None:
        if problem is not None:
            del self._waiters[event.waiter]
            out.append(self._refuse(event, problem))

    def _refuse(self, event: PullEvent, error: PushpullError) -> RefusePull:
        if event.cut_id is not None:
            self._state.schedule.end_cut(event.cut_id)
        return RefusePull(event.waiter, self._state.table.table_id, self._state.range_id, error)

    def explain(self, event: PullEvent, now_s: float) -> str:
        """A sentence that says why a parked pull waits and names the missing workers (G6)."""
        state = self._state
        name = f"table '{state.name}' (range {state.range_id})"
        if not state.initialized:
            if not state.awaits_rank_zero:
                return f"{name} waits for its server to load the checkpoint that it starts from"
            return f"{name} waits for its initial values from {self._who(0, now_s)}"
        if state.schedule.copied_for:
            return (
                f"the pull of {name} at clock {event.clock} waits for its server, which writes "
                f"checkpoint {state.schedule.copied_for} and has no memory for more copies: its "
                "store is slow"
            )
        event = event._replace(clock=self._asked_clock(event))
        setting = state.schedule.at(event.clock + 1)
        waits = f"the pull of {name} at clock {event.clock} waits for"
        if self._is_joining(event):
            return (
                f"the pull of {name} waits for the scheduler: worker {event.rank} has not joined "
                "the table yet"
            )
        if self._waits_for_change(event):
            return (
                f"{waits} the scheduler: a change of its consistency after clock "
                f"{state.schedule.hold_point} is proposed and not decided"
            )
        clock = state.clock + 1
        if setting.mode is Mode.BSP and state.schedule.is_bsp(clock):
            if state.unscaled is not None:
                ranks = [part.rank for part in state.unscaled.contributors if not part.skip]
                who = " or ".join(self._who(rank, now_s) for rank in ranks)
                return f"update {clock} of {name} waits for the scale that clips it, from {who}"
            late = ", ".join(self._behind(clock, now_s)) or "any worker: all have left"
            backup_workers = state.schedule.at(clock).backup_workers
            if backup_workers:
                late = f"all but {backup_workers} of {late}"
            return f"update {clock} of {name} waits for {late}"
        if setting.mode is not Mode.BSP and self._done_clock(event) < event.clock:
            worker = state.worker(event.incarnation)
            gap = worker.gap_words if worker is not None else ""
            return (
                f"{waits} its own worker's seal; the newest in effect is {self._done_clock(event)}"
                + (f", and the next {gap}" if gap else "")
            )
        clock = event.clock - setting.staleness
        late = ", ".join(self._behind(clock, now_s))
        return f"{waits} clock {clock} of {late}: {setting} allows no more"

    def _behind(self, clock: int, now_s: float) -> list[str]:
        state = self._state
        return [
            self._who(rank, now_s)
            for rank in state.ranks
            if state.is_member(rank, clock)
            and (rank not in state.by_rank or state.by_rank[rank].sealed_clock < clock)
        ]

    def _waits_for_change(self, event: PullEvent) -> bool:
        clock = event.clock + (event.incarnation is not None)
        return self._is_joining(event) or self._state.schedule.holds_reads(clock)

    def cause(self, waiter: int) -> WaitCause | None:
        """The reason for which a pull is parked; None if it is not."""
        event = self._waiters.get(waiter)
        if event is None:
            return None
        state = self._state
        if not state.initialized:
            return WaitCause.INITIAL_VALUES
        if event.consistent and event.incarnation is None:
            return WaitCause.CONSISTENT
        event = event._replace(clock=self._asked_clock(event))
        if self._waits_for_change(event) or state.schedule.copied_for:
            return WaitCause.CHANGE
        worker = state.worker(event.incarnation)
        is_bsp = state.schedule.is_bsp(event.clock)
        clock = -1 if worker is None else worker.sealed_clock if is_bsp else worker.done_clock
        return WaitCause.OWN_STEP if clock < event.clock else WaitCause.WORKERS

    def waits(self, now_s: float) -> tuple[str, ...]:
        """Sentences that explain the parked pulls, each once; of thousands, the first that came."""
        some = itertools.islice(self._waiters.values(), _EXPLAINED_COUNT)
        return tuple(sorted({self.explain(event, now_s) for event in some}))

    def _who(self, rank: int, now_s: float) -> str:
        worker = self._state.by_rank.get(rank)
        if worker is None:
            return f"worker {rank} (not heard yet)"
        heard_s = now_s - worker.last_heard_s
        gap = worker.gap_words and f"; its next seal {worker.gap_words}"
        return (
            f"worker {rank} (clock {max(worker.sealed_clock, 0)}, last heard {heard_s:.1f} s "
            f"ago{gap})"
        )
