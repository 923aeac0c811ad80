"""A worker's own counters, shown by `pushpull train` and `pushpull status`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_core.losses import NO_LOSSES, LossTotals


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

    @property
    def step_count(self) -> int:
        """The steps that the script reported, else the highest clock committed on any table."""
        reported = self.reported_step_count
        return self.finished_step_count if reported is None else reported

    @property
    def waiting_for(self) -> str:
        """The reason of one of the waits, for a person; empty if there is none."""
        return next(iter(self.waits.copy().values()), "")
