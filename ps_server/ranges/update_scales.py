"""Updates that wait for their scale: clipping by global norm under BSP (SEMANTICS S4).

    formed --reduced--> its squares are told --UpdateScale--> applied, by that scale
                                             --nobody left to say it--> dropped

The norm is that of the whole model, whose parts are in many ranges. So each range tells the workers
how large its part is; each of them finds the same scale from what all ranges told, and says it to
all of them; the first word counts and the others must agree.

Invariants:
    US-1  An update is applied once, by one scale, or dropped.

What it deliberately does not do: know norms. What the scale is made of is the workers' business.
"""

from __future__ import annotations

from ps_core.errors import AlreadyPast, InvalidConfig, InvariantViolation, PushpullError
from ps_core.ledger import Ending, Outcome
from ps_server.ranges.events import Record, ScaleEvent
from ps_server.ranges.range_state import PendingStep, RangeState, RangeWorker, Said

_KEPT_COUNT = 4
"""Clocks whose squares are kept, for steps that come too late: their workers are asked too."""

_NAMED_COUNT = 64
"""Clocks of which it is known whether anything was clipped; squares that are forgotten are empty.
"""


class UpdateScales:
    """The scales of one table in one range."""

    def __init__(self, state: RangeState) -> None:
        self._state = state

    def reduced(self, clock: int, squares: tuple[float, ...]) -> None:
        """The sum of `clock` is that large."""
        found = self._state.squares
        found[clock] = squares
        for old in [kept for kept in found if kept <= clock - _KEPT_COUNT]:
            found[old] = ()
        for old in [named for named in found if named <= clock - _NAMED_COUNT]:
            del found[old]

    def squares(self, clock: int) -> tuple[float, ...]:
        """What was told of `clock`; empty if nothing was, or too long ago."""
        return self._state.squares.get(clock, ())

    def squares_of_late(self, step: PendingStep) -> tuple[float, ...]:
        """What the worker of a step is told whose update has formed without it. In an update of
        which nothing was clipped there is nothing that counts in a norm: a worker that asks is told
        so, since updates of other ranges may wait for it to say their scale.
        """
        found, clock = self._state.squares, step.clock
        is_forgotten = clock in found or clock <= max(found, default=clock) - _NAMED_COUNT
        if is_forgotten or step.sealed_by.terms.clip_scale is None:
            return found.get(clock, ())
        return (0.0,) * len(self._state.blocks)

    def ending(self, event: ScaleEvent, worker: RangeWorker) -> Ending | None:
        """How an entry ends; None if it is what the update waits for."""
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
        if not _same(said.scale, event.scale):
            return Ending(Outcome.INVALID, self._disagreement(event, worker, said))
        return Ending(Outcome.APPLIED)

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

    def _disagreement(self, event: ScaleEvent, worker: RangeWorker, said: Said) -> PushpullError:
        return InvalidConfig(
            f"workers {said.rank} and {worker.rank} disagree about the scale of update "
            f"{event.clock} of table '{self._state.name}': {said.scale!r} and {event.scale!r}. The "
            "first was applied; do they clip by the same norm?"
        )

    def take(self, event: ScaleEvent, worker: RangeWorker) -> Record:
        """The sum that waited for this scale; it waits no more."""
        unscaled = self._state.unscaled
        if unscaled is None or unscaled.clock != event.clock:
            raise InvariantViolation("US-1", f"update {event.clock} waits for no scale")
        self._state.unscaled = None
        self._state.said = Said(event.clock, event.scale, worker.rank)
        return unscaled

    def orphan(self) -> Record | None:
        """The update that waits although all are gone who could say its scale; it waits no more."""
        unscaled = self._state.unscaled
        if unscaled is None:
            return None
        workers = self._state.workers
        for contributor in unscaled.contributors:
            if not contributor.skip and not self._state.has_ended(workers[contributor.incarnation]):
                return None
        self._state.unscaled = None
        return unscaled


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)
