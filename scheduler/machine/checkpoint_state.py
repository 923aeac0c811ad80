"""The state of a running checkpoint, as values; see `scheduler.machine.checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_core.cluster_view import Node
from ps_core.keys import NodeId, TableId
from ps_core.manifest import PartReport, SavedDataSet
from ps_core.tables.table import Table


@dataclass(frozen=True, slots=True)
class WorkerClocks:
    """Clocks at which a worker can save its own state next. `has_begun`: its script has come to a
    save point, so what it attaches is attached.
    """

    rank: int
    clocks: Mapping[TableId, int]
    has_state: bool
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class LeftPart:
    """Part that a worker wrote when it left; empty if it had nothing to write. `is_found`: the
    scheduler has seen its file.
    """

    node_id: NodeId
    part: PartReport
    is_found: bool = False


@dataclass(slots=True)
class Attempt:
    """A running checkpoint.

    Attributes:
        base: checkpoint that it may refer to; 0 for a full one.
        awaited: workers that have not named their clocks; `workers` have.
        cuts: tables as of their cuts; empty before.
        servers: servers with a shard of these tables.
        staying: workers whose scripts wait for it, and their clocks.
        left: parts of workers that have left, by rank, valid at this cut.
        data_sets: those of the run, as of the moment of the cut.
    """

    number: int
    url: str
    reason: str
    base: int
    cut_by_s: float
    written_by_s: float
    tables: list[TableId] = field(default_factory=list)
    awaited: set[NodeId] = field(default_factory=set)
    workers: dict[NodeId, WorkerClocks] = field(default_factory=dict)
    cuts: dict[TableId, Table] = field(default_factory=dict)
    servers: frozenset[NodeId] = frozenset()
    parts: dict[NodeId, PartReport] = field(default_factory=dict)
    staying: dict[NodeId, Mapping[TableId, int]] = field(default_factory=dict)
    left: dict[int, PartReport] = field(default_factory=dict)
    data_sets: tuple[SavedDataSet, ...] = ()
    is_cut: bool = False
    is_written: bool = False

    @property
    def steps(self) -> dict[TableId, int]:
        """Step of each table's cut; where its ranges are cut one by one, that of workers that take
        their steps together.
        """
        cuts = {table_id: table.cut for table_id, table in self.cuts.items()}
        return {table_id: cut.after_clock for table_id, cut in cuts.items() if cut is not None}

    def is_taken(self, table_id: TableId) -> bool:
        """True if the step of a table's cut is beyond all that workers named: a server had it."""
        named = (place.clocks.get(table_id, 0) for place in self.workers.values())
        return self.steps[table_id] > max(named, default=0)

    def lose(self, worker: Node, reason: str) -> None:
        """Note that the checkpoint has no state of this worker."""
        self.workers.setdefault(worker.node_id, WorkerClocks(worker.rank, {}, has_state=True))
        self.parts[worker.node_id] = PartReport(problem=reason)


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """The newest complete checkpoint, as the cluster's later schedulers have to know it.

    Attributes:
        clock: highest clock of its tables.
        complete_s: seconds since 1970, since the scheduler's own clock ends with its machine.
        count: complete ones of the cluster until then, with this one.
    """

    url: str
    byte_count: int
    clock: int
    complete_s: float
    count: int


@dataclass(frozen=True, slots=True)
class CheckpointCut:
    """All tables are cut; `clocks` by table name."""

    number: int
    clocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Every part is written; only the manifest is missing."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """A checkpoint is complete."""

    number: int
    url: str


@dataclass(frozen=True, slots=True)
class CheckpointUnneeded:
    """None was made, since nothing has moved since `source`, from which the cluster began.
    `changed` names tables whose consistency was changed since.
    """

    number: int
    url: str
    source: str
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointBegunAgain:
    """A checkpoint that was cut after a step that no worker takes was replaced by `again`."""

    number: int
    url: str
    again: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint failed; its files in `url` count for nothing."""

    number: int
    url: str
    reason: str
