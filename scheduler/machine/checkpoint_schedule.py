"""The schedule of checkpoints: when one is due, by the workers' clocks or by time.

    by clocks   the highest clock of a worker has passed a multiple of `every_clocks` that the last
                complete checkpoint had not; or a worker has taken so many steps of a table since,
                as when a script trains one model after another, or where one that had more has left
    by time     `every_s` after the last complete one, if the highest clock has moved since, or a
                worker's below it, or no worker has reported one

Rules:
    - A multiple of clocks is looked at before the time.
    - None is due while one runs, without a table, and without a place for checkpoints.
    - Once one was begun, the next is due `RETRY_S` later at the earliest, unless it is complete.
    - The first interval begins when the first look finds a table, with the clock of the checkpoint
      that the cluster restored, or 0.
    - A scheduler that was started again goes on with the interval and the clock of the newest
      complete one. Without one the interval is over, so that a scheduler that is often started
      again makes one. None is due for a lease, in which it hears how far workers are.

Heartbeats say where workers are, so a cut is some steps after the multiple. Only the run without a
name has checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ps_core.cluster_view import ClusterView
from ps_core.keys import NodeId, TableId
from scheduler.machine.checkpoints import UNNAMED
from scheduler.machine.state import ClusterSettings

RETRY_S = 10.0
"""Wait after a scheduled checkpoint was begun, in seconds, until the next if it fails."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When checkpoints are made, and how many are kept; `scheduler.config` describes each."""

    every_s: float = 0.0
    every_clocks: int = 0
    keep: int = 0


class CheckpointSchedule:
    """The schedule of one cluster, and the clocks that it goes by.

    Attributes:
        reached: clocks in the last heartbeat of each worker.
    """

    def __init__(self, policy: CheckpointPolicy, settings: ClusterSettings) -> None:
        self._has_place = bool(settings.checkpoint_url)
        self._policy = policy
        self._restored = settings.restored
        self._lease_s = settings.lease_s
        self.reached: dict[NodeId, Mapping[TableId, int]] = {}
        self._clocks: dict[NodeId, int] = {}  # the highest of each in `reached`
        self._last_s: float | None = None  # None before training begins
        self._last_clock = 0
        # As in `reached`, when the last one was complete. None: those of the next look.
        self._last_clocks: dict[NodeId, Mapping[TableId, int]] | None = {}
        self._first_clocks: dict[tuple[NodeId, TableId], int] = {}  # where there are none of then
        self._heard_from_s = 0.0  # workers have been heard by then
        self._retried_from_s = 0.0

    @property
    def clock(self) -> int:
        """Highest clock that a worker has reported."""
        return max(self._clocks.values(), default=0)

    def heard(self, node_id: NodeId, clocks: Mapping[TableId, int]) -> None:
        """A node is at these clocks. Clocks that are all 0 are no report."""
        clock = max(clocks.values(), default=0)
        if clock:
            self._clocks[node_id] = clock
            self.reached[node_id] = clocks

    def look(self, view: ClusterView, now_s: float) -> str:
        """The reason to begin a checkpoint now; empty if none is due."""
        if not self._has_place or now_s < max(self._heard_from_s, self._retried_from_s):
            return ""
        view = view.of_run(UNNAMED)
        if not view.tables or view.checkpoint is not None:
            return ""
        if self._last_s is None:  # training begins
            self._last_s = now_s
            self._last_clock = self._clock_before(view)
        every_s, every = self._policy.every_s, self._policy.every_clocks
        steps = self._steps_since(view)
        if every and (
            self.clock // every > self._last_clock // every or max(steps, default=0) >= every
        ):
            return f"every {every} clocks"
        has_moved = self.clock != self._last_clock or not self._clocks or any(steps)
        if every_s and now_s >= self._last_s + every_s and has_moved:
            return f"every {every_s:g} s"
        return ""

    def resumed(self, view: ClusterView, newest: tuple[int, float] | None, now_s: float) -> None:
        """The scheduler was started again; `newest` has the clock of the newest complete checkpoint
        and when it was complete, as a moment of this clock.
        """
        self._last_clock, self._last_s = newest or (self._clock_before(view), -math.inf)
        self._heard_from_s, self._last_clocks = now_s + self._lease_s, None

    def begun(self, now_s: float) -> None:
        """A checkpoint that was due is under way."""
        self._retried_from_s = now_s + RETRY_S

    def made(self, clock: int, now_s: float) -> None:
        """A checkpoint, scheduled or not, is complete; all its parts were written at `now_s`."""
        self._last_clock, self._last_s = clock, now_s
        self._note_clocks()
        self._retried_from_s = 0.0

    def unneeded(self, now_s: float) -> None:
        """None was made, since nothing has moved."""
        self._last_s = now_s

    def _note_clocks(self) -> dict[NodeId, Mapping[TableId, int]]:
        """Count steps from where the workers are."""
        self._last_clocks, self._first_clocks = dict(self.reached), {}
        return self._last_clocks

    def _steps_since(self, view: ClusterView) -> list[int]:
        """The steps since the last complete checkpoint of each worker and table below its clock. A
        worker that was not heard before counts from where it is first, unless nobody had the table.
        """
        last = self._note_clocks() if self._last_clocks is None else self._last_clocks
        first = {table.table_id: table.restored_clock or 0 for table in view.tables}
        had = {table_id for clocks in last.values() for table_id in clocks}
        found = []
        for node_id, clocks in self.reached.items():
            for table_id, clock in clocks.items():
                if clock >= self._last_clock:
                    continue
                before = last.get(node_id, {}).get(table_id)
                if before is None:
                    began = clock if table_id in had else first.get(table_id, clock)
                    before = self._first_clocks.setdefault((node_id, table_id), began)
                found.append(max(clock - before, 0))
        return found

    def _clock_before(self, view: ClusterView) -> int:
        """Clock of the newest checkpoint when this scheduler starts, resumed or restored."""
        tables = () if self._restored is None else self._restored.tables.values()
        cuts = (table.cut.after_clock for table in view.tables if table.cut is not None)
        return max([*(table.clock for table in tables), *cuts], default=0)
