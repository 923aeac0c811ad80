"""Inner steps: a worker takes so many by itself between two outer steps, each of which has a clock
(SEMANTICS S12).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class InnerSteps:
    """The inner steps of one model's tables; without `Outer` every step has a clock.

    Attributes:
        per_clock: the inner steps of an outer step.
        taken: those since the last outer step.
        has_kept: the servers have not taken all of the last outer step.
        script_count: those of the script, before a checkpoint that it goes on from as far as clocks
            tell; 0: none.
    """

    per_clock: int = 1
    taken: int = 0
    has_kept: bool = False
    script_count: int = 0

    def take(self, clock: int) -> None:
        """Count one, of a worker at `clock`."""
        self.taken += 1
        self.script_count = self.script_count + 1 if self.script_count else self.at(clock)

    @property
    def have_moved(self) -> bool:
        """True if the parameters have moved, as no server knows."""
        return self.taken > 0 or self.has_kept

    @property
    def are_all_taken(self) -> bool:
        """True if the outer step is due."""
        return self.taken >= self.per_clock

    def at(self, clock: int) -> int:
        """The steps from the first clock until now, at a worker at `clock`."""
        return clock * self.per_clock + self.taken

    def clock_after(self, steps: int) -> int:
        """The clock of a worker that has taken so many."""
        return steps // self.per_clock
