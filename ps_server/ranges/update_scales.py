"""Updates that wait for their scale: clipping by global norm under BSP (SEMANTICS S4).

    formed --reduced--> its squares are told --UpdateScale--> applied, by that scale
                                             --nobody left to say it--> dropped

The norm is that of the whole model, which lies in many ranges. Each worker finds the same scale
from the squares of all ranges, and says it to all of them. The first counts; the others must agree.

Invariants:
    US-1  An update is applied once, by one scale, or dropped.
"""

from __future__ import annotations

from ps_core.errors import AlreadyPast, InvalidConfig, InvariantViolation, PushpullError
from ps_core.ledger import Ending, Outcome
from ps_server.ranges.events import Record, ScaleEvent
from ps_server.ranges.range_state import PendingStep, RangeState, RangeWorker, UpdateScale

_KEPT_COUNT = 4
"""Clocks whose squares are kept for late steps: their workers are asked too."""

_NAMED_COUNT = 64
"""Clocks of which it is known that they were clipped; beyond `_KEPT_COUNT`, squares are empty."""


class UpdateScales:
    """The scales of one table in one range."""

    def __init__(self, state: RangeState) -> None:
        self._state = state

    def reduced(self, clock: int, squares: tuple[float, ...]) -> None:
        """Keep the squares of the sum of `clock`."""
        found = self._state.squares
        found[clock] = squares
        for old in list(found):
            if old <= clock - _NAMED_COUNT:
                del found[old]
            elif old <= clock - _KEPT_COUNT:
                found[old] = ()

    def squares_of_late(self, step: PendingStep) -> tuple[float, ...]:
        """The squares for a worker whose step came too late. If nothing was clipped, a worker that
        asks is told zeros, since updates of other ranges may wait for its scale.
        """
        found, clock = self._state.squares, step.clock
        is_forgotten = clock in found or clock <= max(found, default=clock) - _NAMED_COUNT
        if is_forgotten or step.sealed_by.terms.clip_scale is None:
            return found.get(clock, ())
        return (0.0,) * len(self._state.blocks)

    def ending(self, event: ScaleEvent, worker: RangeWorker) -> Ending | None:
        """The outcome of a scale entry; None if its update waits for it."""
        problem = self._problem(event, worker)
        if problem is not None:
            return Ending(Outcome.INVALID, problem)
        if self._waits(event.clock):
            return None
        said = self._state.said
        if said is None or said.clock != event.clock:  # dropped, or long past
            clock = self._state.clock
            words = f"update {event.clock} of table '{self._state.name}' waits for no scale"
            return Ending(Outcome.DISCARDED, AlreadyPast(words, clock=clock))
        are_nan = said.scale != said.scale and event.scale != event.scale
        if said.scale == event.scale or are_nan:
            return Ending(Outcome.APPLIED)
        problem = InvalidConfig(
            f"workers {said.rank} and {worker.rank} disagree about the scale of update "
            f"{event.clock} of table '{self._state.name}': {said.scale!r} and {event.scale!r}. The "
            "first was applied; do they clip by the same norm?"
        )
        return Ending(Outcome.INVALID, problem)

    def _waits(self, clock: int) -> bool:
        unscaled = self._state.unscaled
        return unscaled is not None and unscaled.clock == clock

    def _problem(self, event: ScaleEvent, worker: RangeWorker) -> PushpullError | None:
        state = self._state
        if state.failure is not None:
            return state.failure
        if event.clock > state.clock and not self._waits(event.clock):
            return InvalidConfig(
                f"worker {worker.rank} says the scale of update {event.clock} of table "
                f"'{state.name}', which has not formed; expected it after the seal's answer"
            )
        is_usable = event.scale >= 0.0 and event.scale != float("inf")
        if not is_usable and not state.table.spec.allow_non_finite:
            return InvalidConfig(
                f"the scale of update {event.clock} of table '{state.name}' is {event.scale}; "
                "expected a finite number, 0 or above"
            )
        return None

    def take(self, event: ScaleEvent, worker: RangeWorker) -> Record:
        """Take the sum that waited for this scale."""
        unscaled = self._state.unscaled
        if unscaled is None or unscaled.clock != event.clock:
            raise InvariantViolation("US-1", f"update {event.clock} waits for no scale")
        self._state.unscaled = None
        self._state.said = UpdateScale(event.clock, event.scale, worker.rank)
        return unscaled

    def orphan(self) -> Record | None:
        """Take the update that waits although all workers that could say its scale are gone."""
        state, unscaled = self._state, self._state.unscaled
        for contributor in () if unscaled is None else unscaled.contributors:
            if not contributor.skip and not state.has_ended(state.workers[contributor.incarnation]):
                return None
        state.unscaled = None
        return unscaled
