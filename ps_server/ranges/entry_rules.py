"""What may be wrong with an entry apart from its payload: pure questions to a range's state.

Each returns the error that the entry ends with, or None.
"""

from __future__ import annotations

from ps_core import limits
from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, InvalidKeys, PushpullError
from ps_core.tables import OptimizerKind, array_words
from ps_server.ranges.events import PushEvent, SealEvent, SealTerms
from ps_server.ranges.range_state import RangeState, StepPart, WorkerPart

_MAX_SHOWN = 64

_WITHOUT_PARAMETERS = frozenset({OptimizerKind.AGGREGATE, OptimizerKind.ASSIGN, OptimizerKind.ADD})


class EntryRules:
    """The rules, over one range's state."""

    def __init__(self, state: RangeState) -> None:
        self._state = state
        self._numbers = state.table.numbers
        self._most_scale = limits.MAX_SCALE[state.table.spec.accumulator_element_bytes]

    def push_problem(
        self, event: PushEvent, worker: WorkerPart, step: StepPart | None
    ) -> PushpullError | None:
        """What is wrong with a push apart from its payload."""
        if self._state.failure is not None:
            return self._state.failure
        name = self._state.name
        if event.block not in self._state.versions:
            return InvalidKeys(
                f"block {event.block} of table '{name}' is not in range {self._state.range_id}"
            )
        is_initial = event.is_assign and event.clock == 0
        if is_initial and (event.sender.rank != 0 or not self._state.awaits_rank_zero):
            return InvalidConfig(
                f"ASSIGN to table '{name}' at clock {event.clock} by rank {event.sender.rank}; "
                "expected clock 0 by rank 0, once, in a table that starts from rank 0"
            )
        problem = self._clock_problem(event.clock, worker)
        if not is_initial and problem is not None:
            return problem
        if event.is_assign and not is_initial:
            problem = self._kind_problem() or self._eager_problem(event)
            if problem is not None:
                return problem
        if step is not None and step.seal is not None and event.sequence > step.seal.sequence:
            return InvalidConfig(
                f"push {event.sequence} comes after the seal of clock {event.clock}"
            )
        if step is not None and event.block in step.blocks:
            return InvalidKeys(
                f"block {event.block} of table '{name}' was pushed at clock {event.clock} already, "
                f"as sequence {step.blocks[event.block]}; name it in `replaces`"
            )
        if event.eager is None:
            return None
        try:
            self._numbers.merged(event.eager)
        except InvalidConfig as error:
            return error
        return None

    def _kind_problem(self) -> PushpullError | None:
        optimizer = self._state.table.spec.optimizer.kind
        if optimizer not in _WITHOUT_PARAMETERS:
            return None
        return InvalidConfig(
            f"table '{self._state.name}' has no parameters that an optimizer steps: its optimizer "
            f"is {optimizer.value}; expected no edit"
        )

    @staticmethod
    def _eager_problem(event: PushEvent) -> PushpullError | None:
        if event.eager is None:
            return None
        return InvalidConfig("an ASSIGN is eager; expected one that waits for its seal")

    def _clock_problem(self, clock: int, worker: WorkerPart) -> PushpullError | None:
        first = max(worker.sealed_clock, 0) + 1
        newest = max(worker.sealed_clock, self._state.clock)  # where who was left behind may go
        last = newest + limits.MAX_CLOCK_LEAD_COUNT
        left = worker.left_clock
        if left is not None and not worker.sealed_clock < clock <= left:  # else it was given back
            return InvalidConfig(
                f"worker {worker.rank} left table '{self._state.name}' at clock "
                f"{worker.left_clock}; got clock {clock}"
            )
        if not first <= clock <= last:
            return InvalidConfig(
                f"clock {clock} of table '{self._state.name}' by worker {worker.rank}; "
                f"expected {first} (at most {last})"
            )
        return None

    def check_replacement(self, event: PushEvent, worker: WorkerPart) -> None:
        """Refuse to replace anything but a lower push of the same step, not yet sealed.

        Raises:
            InvalidKeys: saying what was named instead.
        """
        named = f"sequence {event.sequence} cannot replace {event.replaces}"
        if not 1 <= event.replaces < event.sequence:
            raise InvalidKeys(f"{named}; expected a lower one, from 1")
        step = worker.steps.get(event.clock)
        clock = worker.held.get(event.replaces)
        if clock is not None:
            if step is None or event.replaces not in step.pushes:
                raise InvalidKeys(
                    f"{named}, which is an entry of clock {clock}; expected a push of clock "
                    f"{event.clock}"
                )
            if clock <= worker.sealed_clock:
                raise InvalidKeys(f"{named}: clock {clock} is sealed")
        if step is not None and step.seal is not None and step.seal.sequence < event.sequence:
            raise InvalidKeys(f"{named}: clock {event.clock} was sealed as {step.seal.sequence}")

    def seal_problem(
        self, event: SealEvent, worker: WorkerPart, step: StepPart
    ) -> PushpullError | None:
        """What is wrong with a seal in itself; `disagreement` is about the other workers'."""
        if self._state.failure is not None:
            return self._state.failure
        name, terms = self._state.name, event.terms
        if event.problem is not None:
            return event.problem
        if step.seal is not None:
            return InvalidConfig(
                f"worker {worker.rank} sealed clock {terms.clock} of table '{name}' already"
            )
        problem = self._clock_problem(terms.clock, worker)
        if terms.clock != 0 and problem is not None:
            return problem
        is_given = not self._state.awaits_rank_zero
        if terms.clock == 0 and (worker.rank != 0 or terms.skip or is_given):
            return InvalidConfig(
                f"clock 0 of table '{name}' is sealed by rank 0, without skip, in a table that "
                "starts from rank 0"
            )
        problem = (
            self._scale_problem(terms)
            or self._clip_problem(terms, step)
            or self._edit_problem(terms)
        )
        if problem is not None:
            return problem
        try:
            mine = self._numbers.merged(terms.hyperparameters)
        except InvalidConfig as error:
            return error
        if step.eager is not None and not terms.skip and step.eager != mine:
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{name}' has other hyperparameters "
                f"({mine}) than its eager pushes ({step.eager})"
            )
        return None

    def _scale_problem(self, terms: SealTerms) -> PushpullError | None:
        """What the gradients are multiplied by must be a number of the sums that they go into:
        where it is not, the failure would come after the step was decided.
        """
        most = self._most_scale
        if not 0.0 < terms.contribution_scale <= most:
            return InvalidConfig(
                f"contribution_scale is {terms.contribution_scale}; expected above 0, and at most "
                f"{most:g} in this table"
            )
        if terms.clip_scale is None:
            return None
        if not 0.0 < terms.clip_scale < float("inf") or not (
            0.0 < terms.clip_scale * terms.contribution_scale <= most
        ):
            return InvalidConfig(
                f"clip_scale is {terms.clip_scale}; expected finite and above 0, and times "
                f"contribution_scale ({terms.contribution_scale}) above 0 and at most {most:g}"
            )
        return None

    def _clip_problem(self, terms: SealTerms, step: StepPart) -> PushpullError | None:
        if terms.clip_scale is None:
            return None
        name, optimizer = self._state.name, self._state.table.spec.optimizer.kind
        if optimizer in _WITHOUT_PARAMETERS:
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{name}' has a clip_scale; "
                f"{optimizer.value} has no gradient that the servers could clip"
            )
        if step.eager is not None or terms.clock == 0:
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{name}' has a clip_scale; expected "
                "none for initial values and for eager steps, which are applied as they come"
            )
        return None

    def _edit_problem(self, terms: SealTerms) -> PushpullError | None:
        if not (terms.edit or terms.array):
            return None
        optimizer = self._state.table.spec.optimizer
        if terms.array and not (terms.edit and optimizer.has_array(terms.array)):
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{self._state.name}' is of array "
                f"{terms.array[:_MAX_SHOWN]!r}; expected an edit of {array_words(optimizer)}"
            )
        if terms.clock == 0 or terms.skip or terms.last or terms.clip_scale is not None:
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{self._state.name}' has an edit; "
                "expected a clock above 0, and neither skip, last nor a clip_scale with it"
            )
        return self._kind_problem()

    def disagreement(self, terms: SealTerms, worker: WorkerPart) -> PushpullError | None:
        """BSP: all seals of a clock carry the same numbers (skipped ones have no say).

        With backup workers a worker that was left behind leaves out clocks, so that its schedules
        are elsewhere: there the update takes the numbers of the first step that it holds.
        """
        state = self._state
        setting = state.schedule.at(terms.clock)
        if setting.mode is not Mode.BSP or setting.backup_workers or terms.skip or terms.edit:
            return None
        mine = self._numbers.merged(terms.hyperparameters)
        for other in self._state.workers.values():
            step = other.steps.get(terms.clock)
            if other is worker or step is None or step.seal is None or step.seal.terms.skip:
                continue
            if step.seal.terms.edit:  # `Forming` has the last word on these
                continue
            theirs = step.numbers
            if (step.seal.terms.clip_scale is None) != (terms.clip_scale is None):
                clips, other_rank = (worker.rank, other.rank)
                if terms.clip_scale is None:
                    clips, other_rank = other_rank, clips
                return InvalidConfig(
                    f"workers {clips} and {other_rank} disagree about clock {terms.clock} of table "
                    f"'{state.name}': worker {clips} clips the gradient, worker {other_rank} not"
                )
            if theirs != mine:
                low, high = sorted(((worker.rank, mine), (other.rank, theirs)))
                differing = ", ".join(
                    f"{name}: {a:g} and {b:g}"
                    for (name, a), (_, b) in zip(low[1], high[1], strict=True)
                    if a != b
                )
                return InvalidConfig(
                    f"workers {low[0]} and {high[0]} disagree about clock {terms.clock} of "
                    f"table '{self._state.name}': {differing}"
                )
        return None
