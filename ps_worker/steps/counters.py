"""A worker's own counters, shown by `pushpull train` and `pushpull status`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_core.errors import InvalidConfig
from ps_core.losses import NO_LOSSES, LossTotals

_MOST_STEPS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's progress; counters count from its start."""

    pushed_bytes: int
    pulled_bytes: int
    unchanged_bytes: int
    """Payload bytes of pulled blocks that did not come, since this client had their values."""
    step_count: int
    loss: float | None
    staleness: int
    waiting_for: str
    planned_step_count: int
    clocks: dict[str, int]
    """The steps sealed on each table, by the table's name."""
    lane: str
    """The lane of payloads: shm, grpc, or mixed; empty before the first session with a server."""


@dataclass(slots=True)
class Counters:
    """The live counters. Each field has one writer; readers may see them out of step."""

    pushed_bytes: int = 0
    pulled_bytes: int = 0
    unchanged_bytes: int = 0
    finished_step_count: int = 0
    inner_step_count: int = 0
    """The inner steps of a model with `Outer`, from its first clock on."""
    reported_step_count: int | None = None
    loss: float | None = None
    losses: LossTotals = NO_LOSSES
    staleness: int = 0
    planned_step_count: int = 0
    waits: dict[object, str] = field(default_factory=dict)
    """The last reason why each waiting request waits."""

    def add_loss(self, loss: float) -> None:
        """Take in a loss that the script reported."""
        self.loss = loss
        self.losses = self.losses.with_loss(loss)

    def add_counts(self, planned: int | None, taken: int | None) -> None:
        """Take in numbers of steps that the script reported.

        Raises:
            InvalidConfig: one is below 0, too large for a heartbeat, or no number.
        """
        planned = None if planned is None else _checked("planned_steps", planned)
        taken = None if taken is None else _checked("step_count", taken)
        self.planned_step_count = self.planned_step_count if planned is None else planned
        self.reported_step_count = self.reported_step_count if taken is None else taken

    @property
    def step_count(self) -> int:
        """The steps that the script reported, else the inner steps of a model with `Outer`, or the
        highest clock committed on any table.
        """
        if self.reported_step_count is not None:
            return self.reported_step_count
        return max(self.finished_step_count, self.inner_step_count)

    @property
    def waiting_for(self) -> str:
        """The reason of one of the waits, for a person; empty if there is none."""
        return next(iter(self.waits.copy().values()), "")


def _checked(name: str, given: int) -> int:
    try:
        count = int(given)
    except (TypeError, ValueError, OverflowError):
        count = -1
    if not 0 <= count <= _MOST_STEPS:
        unknown = "; 0: the script does not say" if name == "planned_steps" else ""
        raise InvalidConfig(f"{name} is {given!r}; expected a number of 0 or more{unknown}")
    return count
