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
from ps_core.keys import Incarnation
from ps_core.tables import OptimizerKind
from ps_server.ranges.events import AnswerPull, Effect, PullEvent, RefusePull
from ps_server.ranges.range_state import RangeState

_EXPLAINED_COUNT = 256


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

    def pull(self, event: PullEvent, now_s: float) -> list[Effect]:
        worker = (
            self._state.workers.get(event.incarnation) if event.incarnation is not None else None
        )
        if worker is not None:
            worker.last_heard_s = now_s
        out: list[Effect] = []
        mixed = self._mixed(event)
        if self._state.failure is not None:
            out.append(self._refuse(event, self._state.failure))
        elif mixed is not None:
            out.append(self._refuse(event, mixed))
        elif event.consistent and self._state.initialized and self._is_past(event):
            out.append(self._refuse(event, self._past(event)))
        elif self._may_read(event):
            out.append(self._answer(event))
        elif (problem := self._unanswerable(event)) is not None:
            out.append(self._refuse(event, problem))
        else:
            self._waiters[event.waiter] = event
        return out

    def _unanswerable(self, event: PullEvent) -> PushpullError | None:
        """The error of a pull that can neither be answered now nor wait."""
        return self._lost() or self._dispute_of(event) or self._ahead_of(event)

    def _is_past(self, event: PullEvent) -> bool:
        """True if the range, or any of its values, has passed the pull's clock. A cut asks for
        values alone: final seals may have brought the range further.
        """
        state = self._state
        clock = state.clock if event.cut_id is None else state.formed_clock
        return max(clock, state.changed_clock) > event.clock

    def _past(self, event: PullEvent) -> AlreadyPast:
        clock = max(self._state.clock, self._state.changed_clock)
        return AlreadyPast(
            f"range {self._state.range_id} of table '{self._state.name}' is at clock {clock}; the "
            f"pull asked for {event.clock}",
            clock=clock,
        )

    def _mixed(self, event: PullEvent) -> PushpullError | None:
        """The error of a consistent pull at a clock at which ranges may hold different steps. It
        needs a clock of BSP, or one that its reader has cut at.
        """
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
        """A change was decided: refuse pulls that can never be answered under the new setting, and
        answer others.
        """
        for event in list(self._waiters.values()):
            problem: PushpullError | None = None
            if event.consistent and event.cut_id is None:  # it waits for an update of BSP
                is_past = self._is_past(event)
                problem = self._mixed(event) or (self._past(event) if is_past else None)
            if problem is not None:
                del self._waiters[event.waiter]
                out.append(self._refuse(event, problem))
        self.release(out)

    def _ahead_of(self, event: PullEvent) -> PushpullError | None:
        """The error of a pull beyond its worker's clock. The seal may be on its way on another
        stream, but no further ahead than a step may be.
        """
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
            del self._waiters[event.waiter]
            out.append(self._refuse(event, problem))

    def _dispute_of(self, event: PullEvent) -> PushpullError | None:
        """The open dispute that a worker's pull would wait for."""
        if event.incarnation is None:
            return None
        clocks = [c for c in self._disputes if self._state.clock < c <= event.clock]
        return self._disputes[min(clocks)] if clocks else None

    def ended(self, node: Node, out: list[Effect]) -> None:
        """Refuse the pulls of a worker whose membership ended, and every pull if only that worker
        could have made one possible.
        """
        lost = self._lost()
        for event in list(self._waiters.values()):
            is_own = event.incarnation == node.incarnation
            if is_own or lost is not None:
                del self._waiters[event.waiter]
                problem = lost if lost is not None and not is_own else Fenced(node.fence_words)
                out.append(self._refuse(event, problem))

    def _lost(self) -> PushpullError | None:
        """The error of every pull, if the initial values can never come."""
        state = self._state
        if not state.awaits_rank_zero or 0 not in state.ended:
            return None
        return InvalidConfig(
            f"table '{state.name}' (range {state.range_id}) has no initial values and gets none: "
            f"{state.ended[0].ended_words}, before it had assigned them. Create the table under "
            "another name"
        )

    def waits_for(self, waiter: int) -> bool:
        return waiter in self._waiters

    def fail(self, error: PushpullError, out: list[Effect]) -> None:
        """Refuse all parked pulls."""
        out += [self._refuse(event, error) for event in self._waiters.values()]
        self._waiters.clear()

    def cancel(self, waiter: int) -> None:
        event = self._waiters.pop(waiter, None)
        if event is not None and event.cut_id is not None:
            self._state.schedule.end_cut(event.cut_id)

    def tick(self, now_s: float) -> list[Effect]:
        """Refuse pulls whose deadline has passed, naming the workers that they waited for, and
        those whose cut has ended.
        """
        out: list[Effect] = []
        for event in list(self._waiters.values()):
            problem: PushpullError | None = None
            if event.deadline_s <= now_s:
                problem = WaitExpired(self.explain(event, now_s))
            elif event.cut_id is not None:
                problem = self._mixed(event)
            if problem is not None:
                del self._waiters[event.waiter]
                out.append(self._refuse(event, problem))
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
        """The clock that counts for a worker's pull; a worker that joined begins further on than it
        knows.
        """
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
        state = self._state
        worker = state.workers.get(event.incarnation) if event.incarnation is not None else None
        return state.formed_clock if worker is None else worker.done_clock

    def _answer(self, event: PullEvent) -> AnswerPull:
        state = self._state
        is_sum = state.table.spec.optimizer.kind is OptimizerKind.AGGREGATE
        asked = event.clock if is_sum and event.incarnation is not None else state.clock
        worker = state.workers.get(event.incarnation) if event.incarnation is not None else None
        asked_clock = self._asked_clock(event)
        if event.incarnation is not None:
            state.read_clock = max(state.read_clock, asked_clock + 1)
        if event.cut_id is not None:
            state.schedule.end_cut(event.cut_id)
        is_new = asked_clock > event.clock  # it has joined, and begins there
        return AnswerPull(
            event.waiter,
            state.table.table_id,
            state.range_id,
            asked,
            max(state.clock, asked_clock) if is_new else state.clock,
            dict(state.versions),
            {} if worker is None else dict(worker.own_updates),
            self._keeps_for(event, asked_clock),
        )

    def _keeps_for(self, event: PullEvent, asked_clock: int) -> Incarnation | None:
        """The reader, if its gradients will be corrected for the values that it is given."""
        next_setting = self._state.schedule.at(asked_clock + 1)
        keeps = next_setting.policy is StalePolicy.COMPENSATE
        return event.incarnation if keeps else None

    def _refuse(self, event: PullEvent, error: PushpullError) -> RefusePull:
        if event.cut_id is not None:
            self._state.schedule.end_cut(event.cut_id)
        return RefusePull(event.waiter, self._state.table.table_id, self._state.range_id, error)

    def explain(self, event: PullEvent, now_s: float) -> str:
        """A sentence that says why a parked pull waits and names the missing workers (G6)."""
        name = f"table '{self._state.name}' (range {self._state.range_id})"
        if not self._state.initialized:
            if not self._state.awaits_rank_zero:
                return f"{name} waits for its server to load the checkpoint that it starts from"
            return f"{name} waits for its initial values from {self._who(0, now_s)}"
        state = self._state
        if state.schedule.copied_for:
            return (
                f"the pull of {name} at clock {event.clock} waits for its server, which writes "
                f"checkpoint {state.schedule.copied_for} and has no memory for more copies: its "
                "store is slow"
            )
        event = event._replace(clock=self._asked_clock(event))
        setting = state.schedule.at(event.clock + 1)
        if self._is_joining(event):
            return (
                f"the pull of {name} waits for the scheduler: worker {event.rank} has not joined "
                "the table yet"
            )
        if self._waits_for_change(event):
            return (
                f"the pull of {name} at clock {event.clock} waits for the scheduler: a change of "
                f"its consistency after clock {state.schedule.hold_point} is proposed and not "
                "decided"
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
            worker = None if event.incarnation is None else state.workers.get(event.incarnation)
            gap = worker.gap_words if worker is not None else ""
            return (
                f"the pull of {name} at clock {event.clock} waits for its own worker's seal; "
                f"the newest in effect is {self._done_clock(event)}"
                + (f", and the next {gap}" if gap else "")
            )
        clock = event.clock - setting.staleness
        late = ", ".join(self._behind(clock, now_s))
        return (
            f"the pull of {name} at clock {event.clock} waits for clock {clock} of {late}: "
            f"{setting} allows no more"
        )

    def _behind(self, clock: int, now_s: float) -> list[str]:
        state = self._state
        return [
            self._who(rank, now_s)
            for rank in state.ranks
            if state.is_member(rank, clock)
            and (rank not in state.by_rank or state.by_rank[rank].sealed_clock < clock)
        ]

    def _waits_for_change(self, event: PullEvent) -> bool:
        is_worker = event.incarnation is not None
        if self._is_joining(event):
            return True
        return self._state.schedule.holds_reads(event.clock + 1 if is_worker else event.clock)

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
        worker = state.workers.get(event.incarnation) if event.incarnation is not None else None
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
