"""What the scheduler knows of a checkpoint that is made, as values; see `scheduler.checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_core.cluster_view import Node
from ps_core.keys import NodeId, TableId
from ps_core.tables import Table


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker can write its own state down next: at these clocks."""

    rank: int
    clocks: Mapping[TableId, int]
    has_state: bool


@dataclass(frozen=True, slots=True)
class Written:
    """What a node wrote of one table: so many blocks, the highest clock of its ranges, and whether
    each is as it was at a moment of its own.
    """

    block_count: int
    clock: int
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A node's file, or why there is none; no file and no problem: it has nothing to write.

    Of its blocks some may be referred to in other checkpoints: how many, their bytes, and the
    directories that have them.
    """

    file: str = ""
    byte_count: int = 0
    header_sha256: str = ""
    tables: Mapping[TableId, Written] = field(default_factory=dict)
    problem: str = ""
    referred_block_count: int = 0
    referred_byte_count: int = 0
    bases: tuple[str, ...] = ()


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
    parts: dict[NodeId, Part] = field(default_factory=dict)
    is_cut: bool = False
    is_written: bool = False

    def lose(self, worker: Node, reason: str) -> None:
        """There will be nothing of this worker's own in it."""
        self.workers.setdefault(worker.node_id, WorkerPlace(worker.rank, {}, has_state=True))
        self.parts[worker.node_id] = Part(problem=reason)


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
class CheckpointFailed:
    """It was given up; what there is of it in `url` is nothing."""

    number: int
    url: str
    reason: str
