"""What the scheduler knows of a checkpoint that is made, as values; see
`scheduler.machine.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_core.cluster_view import Node
from ps_core.keys import NodeId, TableId
from ps_core.manifest import PartReport
from ps_core.tables import Table


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker can write its own state down next: at these clocks."""

    rank: int
    clocks: Mapping[TableId, int]
    has_state: bool


@dataclass(frozen=True, slots=True)
class LeftPart:
    """What a worker wrote of its own when it left."""

    node_id: NodeId
    part: PartReport


@dataclass(slots=True)
class Attempt:
    """A checkpoint that is made.

    Attributes:
        number: it counts them.
        url: the directory that its files go to.
        reason: why it is made.
        base: the checkpoint that it may refer to; 0: it is a full one.
        cut_by_s: when it is given up if it is not cut.
        written_by_s: when it is given up if it is not written.
        tables: what is cut.
        awaited: workers that have not said where they are.
        workers: those that have.
        cuts: the tables as they were when the cuts were settled; empty before.
        servers: those with a part of these tables.
        parts: what was reported, by node.
        staying: workers whose scripts wait for it, and the clocks that they stay at.
        left: what workers that have left wrote then, by rank: it belongs to this cut, too.
    """

    number: int
    url: str
    reason: str
    base: int
    cut_by_s: float
    written_by_s: float
    tables: list[TableId] = field(default_factory=list)
    awaited: set[NodeId] = field(default_factory=set)
    workers: dict[NodeId, WorkerPlace] = field(default_factory=dict)
    cuts: dict[TableId, Table] = field(default_factory=dict)
    servers: frozenset[NodeId] = frozenset()
    parts: dict[NodeId, PartReport] = field(default_factory=dict)
    staying: dict[NodeId, Mapping[TableId, int]] = field(default_factory=dict)
    left: dict[int, PartReport] = field(default_factory=dict)
    is_cut: bool = False
    is_written: bool = False

    @property
    def steps(self) -> dict[TableId, int]:
        """Which step each table is cut after; not what each range is cut in at its own moment."""
        found = {table_id: table.cut_step for table_id, table in self.cuts.items()}
        return {table_id: step for table_id, step in found.items() if step is not None}

    def lose(self, worker: Node, reason: str) -> None:
        """There will be nothing of this worker's own in it."""
        self.workers.setdefault(worker.node_id, WorkerPlace(worker.rank, {}, has_state=True))
        self.parts[worker.node_id] = PartReport(problem=reason)


@dataclass(frozen=True, slots=True)
class CheckpointCut:
    """Every table is cut: after which clocks, by name."""

    number: int
    clocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Every part is there: what is missing is the manifest."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """It is complete."""

    number: int
    url: str


@dataclass(frozen=True, slots=True)
class CheckpointBegunAgain:
    """It was cut after a step that nobody takes; `again` is at the steps that workers are at. What
    there is of it in `url` is nothing.
    """

    number: int
    url: str
    again: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """It was given up; what there is of it in `url` is nothing."""

    number: int
    url: str
    reason: str
