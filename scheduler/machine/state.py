"""What the scheduler knows and what it says: settings, state, requests and transitions, as values.

Rules:
    - `ClusterState` is everything that the journal keeps, or computes again from what it keeps
      (`scheduler.store.records`): when a node was last heard and what it said of its progress are
      not part of it.
    - A transition is one thing that changed; the edge logs each, once.

What it deliberately does not do: decide (`scheduler.machine.cluster` does).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ps_core import limits
from ps_core.change import Change, Join
from ps_core.cluster_view import Node, NodeState, RangeAssignment, Role
from ps_core.consistency import Consistency
from ps_core.errors import InvalidConfig
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.manifest import Imported
from ps_core.runs import Run
from ps_core.tables import Table, TableSpec
from ps_core.update_offer import UpdateOffer
from scheduler.machine.adaptation import KeptCourse
from scheduler.machine.checkpoint_state import (
    Attempt,
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointWritten,
    LeftPart,
)

Counts = tuple[tuple[NodeId, int], ...]
"""Numbers of ranges, by node id."""

TIMELINE_BYTES = 16
MIN_TOKEN_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class RestoredTable:
    """A table of the checkpoint that a cluster starts from; `consistency` is what it had then."""

    spec: TableSpec
    consistency: Consistency
    clock: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that a cluster starts from: its directory, and its tables by name; or, of one
    that was imported, what it has for whichever tables there will be. `lineage` has its timeline,
    and those that it went on from.
    """

    url: str
    tables: Mapping[str, RestoredTable]
    imported: Imported | None = None
    lineage: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What a cluster is told when it is formed. The random parts are drawn by the caller.

    Attributes:
        cluster_id: the cluster's identity, random; not empty.
        timeline: what a restore starts anew, random; 16 bytes.
        token_key: what session tokens are made with, random and secret; at least 16 bytes.
        first_incarnation: the incarnation of the first node; later ones count up. At least 1;
            random, so that two clusters do not give the same ones.
        worker_count: the number of workers that opens clock 1 of a BSP table; at least 1.
        server_count: the number of servers that a table waits for; at least 1.
        max_workers: how many workers there may be at a time, those that join while others train
            included; at least `worker_count`. 0: `worker_count`.
        stop_when_done: whether the cluster is finished when all workers have left.
        range_count: key ranges; fixed for the life of the cluster.
        heartbeat_interval_s: how often nodes call, in seconds; at most half of `lease_s`.
        lease_s: after this time without a word a node counts as silent, in seconds.
        worker_timeout_s: a worker that is silent for longer is declared gone, in seconds; above
            `lease_s`. 0: never, the others wait for it.
        adaptation_interval_s: how often the bound of a table whose bound moves is looked at, in
            seconds, at most; above 0.
        replica_count: servers that hold each range, the primary included, where there are as
            many; 1 to `server_count`.
        min_in_sync: in-sync replicas, the primary included, below which a range takes no pushes;
            1 to `replica_count`.
        features: what the cluster can do, for nodes to compare with what they need.
        checkpoint_url: where checkpoints go; at most `limits.MAX_CHECKPOINT_URL_BYTES`. Empty:
            there are none.
        checkpoint_count: the largest number of a checkpoint that is there already.
        checkpoint_full_every: of so many checkpoints in a row one is full, and the others have only
            what changed; 1: all are full.
        restored: what the cluster starts from, if it does not start anew.
        first_node_id: of the first node; later ones count up.
        replaced_timelines: those that this cluster was restored in the place of: whose nodes may
            forget what they have, and register again.
    """

    cluster_id: str
    timeline: bytes
    token_key: bytes
    first_incarnation: Incarnation
    worker_count: int
    server_count: int
    max_workers: int = 0
    stop_when_done: bool = False
    range_count: int = limits.RANGE_COUNT
    heartbeat_interval_s: float = limits.HEARTBEAT_INTERVAL_S
    lease_s: float = limits.LEASE_S
    worker_timeout_s: float = limits.WORKER_TIMEOUT_S
    adaptation_interval_s: float = limits.ADAPTATION_INTERVAL_S
    features: tuple[str, ...] = ()
    replica_count: int = 1
    min_in_sync: int = 1
    checkpoint_url: str = ""
    checkpoint_count: int = 0
    checkpoint_full_every: int = 1
    restored: Restored | None = None
    first_node_id: int = 1
    replaced_timelines: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        _require(bool(self.cluster_id), "cluster_id is empty; expected a random name")
        _require(
            len(self.timeline) == TIMELINE_BYTES,
            f"timeline has {len(self.timeline)} bytes; expected {TIMELINE_BYTES}",
        )
        _require(
            len(self.token_key) >= MIN_TOKEN_KEY_BYTES,
            f"token_key has {len(self.token_key)} bytes; expected at least {MIN_TOKEN_KEY_BYTES}",
        )
        _require(
            self.first_incarnation >= 1,
            f"first_incarnation is {self.first_incarnation}; expected at least 1",
        )
        for name, count in (("workers", self.worker_count), ("servers", self.server_count)):
            _require(
                1 <= count <= limits.MAX_NODE_COUNT // 2,
                f"{name} is {count}; expected 1 to {limits.MAX_NODE_COUNT // 2}",
            )
        _require(
            1 <= self.replica_count <= self.server_count,
            f"replicas is {self.replica_count}; expected 1 to the number of servers, "
            f"{self.server_count}",
        )
        _require(
            1 <= self.min_in_sync <= self.replica_count,
            f"min_in_sync is {self.min_in_sync}; expected 1 to the number of replicas, "
            f"{self.replica_count}",
        )
        _require(
            self.max_workers == 0
            or self.worker_count <= self.max_workers <= limits.MAX_NODE_COUNT // 2,
            f"max_workers is {self.max_workers}; expected {self.worker_count}, the number of "
            f"workers, to {limits.MAX_NODE_COUNT // 2}, or 0 for none beyond these",
        )
        _require(
            0 < self.heartbeat_interval_s <= self.lease_s / 2,
            f"heartbeat interval is {self.heartbeat_interval_s} s; expected above 0 and at most "
            f"half of the lease of {self.lease_s} s",
        )
        _require(
            self.worker_timeout_s == 0 or self.lease_s < self.worker_timeout_s < math.inf,
            f"worker timeout is {self.worker_timeout_s} s; expected above the lease of "
            f"{self.lease_s} s, or 0 for never",
        )
        _require(
            0 < self.adaptation_interval_s < math.inf,
            f"adaptation interval is {self.adaptation_interval_s} s; expected above 0",
        )
        _require(
            self.checkpoint_full_every >= 1,
            f"checkpoint_full_every is {self.checkpoint_full_every}; expected at least 1",
        )
        _require(
            1 <= self.range_count <= limits.MAX_RANGE_COUNT,
            f"ranges is {self.range_count}; expected 1 to {limits.MAX_RANGE_COUNT}, or 0 for as "
            "many as suit the servers",
        )
        urls = (self.checkpoint_url, self.restored.url if self.restored else "")
        for url in urls:
            _require(
                len(url.encode()) <= limits.MAX_CHECKPOINT_URL_BYTES,
                f"the checkpoint URL '{url[:80]}...' has {len(url.encode())} bytes; expected at "
                f"most {limits.MAX_CHECKPOINT_URL_BYTES}",
            )

    @property
    def rank_count(self) -> int:
        """Ranks are below it."""
        return self.max_workers or self.worker_count

    def of_run(self, run: Run) -> ClusterSettings:
        """The settings that the workers of a run go by."""
        if not run.name:
            return self
        most = max(self.max_workers, run.worker_count)
        return replace(self, worker_count=run.worker_count, max_workers=most)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidConfig(message)


@dataclass(frozen=True, slots=True)
class UpdateLogClaim:
    """The update log that a server keeps; see `pushpull.v1.UpdateLogClaim`."""

    log_id: bytes
    timeline: bytes = b""
    range_ids: tuple[RangeId, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """What memory a server has for tables; see `pushpull.v1.ServerMemory`. 0: not said."""

    byte_count: int = 0
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """Asks to become a node; the fields are those of `pushpull.v1.RegisterNodeRequest`."""

    registration_id: bytes
    role: Role
    address: str = ""
    requested_rank: int | None = None
    protocol_version: int = 1
    features: tuple[str, ...] = ()
    kernel_fingerprint: str = ""
    cluster_id: str = ""
    custom_updates: tuple[UpdateOffer, ...] = ()
    waited_s: float | None = None
    update_log: UpdateLogClaim | None = None
    memory: ServerMemory = ServerMemory()
    launch_id: bytes = field(default=b"", repr=False)
    world_size: int = 0
    run: str = ""
    identity: str = ""

    def shares_log(self, other: Registration) -> bool:
        """Whether both keep the same update log: one of them has ended, since it has one lock."""
        ours, theirs = self.update_log, other.update_log
        return ours is not None and theirs is not None and ours.log_id == theirs.log_id


@dataclass(frozen=True, slots=True)
class Member:
    """A node and the request that made it one."""

    node: Node
    registration: Registration


@dataclass(slots=True)
class Proposal:
    """A change of a table that servers are asked to promise, until a deadline. `clocks` has the
    promises that came.
    """

    servers: frozenset[NodeId]
    deadline_s: float
    clocks: dict[NodeId, int] = field(default_factory=dict)

    @property
    def missing(self) -> set[NodeId]:
        """Who has not promised."""
        return set(self.servers - self.clocks.keys())


@dataclass(slots=True)
class ClusterState:
    """Membership, tables and ownership. Dictionaries are in order of creation. `tables` are by run
    and name, `runs` are those that have a name.

    `range_bytes` is what each range holds, absent where nothing; `range_memory_bytes` what each
    holder of it may take for that; `view_bytes` is what the nodes and
    tables take of a view. Both are sums, kept so that an event costs only what it adds.
    """

    next_incarnation: Incarnation
    ranges: list[RangeAssignment]
    view_number: int = 1
    next_node_id: int = 1
    next_ordinal: int = 0
    next_table_id: int = 0  # 0 until a table is removed: they are numbered without gaps
    members: dict[NodeId, Member] = field(default_factory=dict)
    node_of_registration: dict[bytes, NodeId] = field(default_factory=dict)
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    range_bytes: dict[RangeId, int] = field(default_factory=dict)
    range_memory_bytes: dict[RangeId, int] = field(default_factory=dict)
    change_counts: dict[TableId, int] = field(default_factory=dict)
    proposals: dict[TableId, Proposal] = field(default_factory=dict)
    withdrawals: dict[TableId, str] = field(default_factory=dict)  # why the last one was
    joins_due: dict[TableId, list[Join]] = field(default_factory=dict)
    join_rooms: set[tuple[TableId, int]] = field(default_factory=set)  # ranks, in `view_bytes`
    failed_over: set[RangeId] = field(default_factory=set)  # ranges that a backup took over, ever
    has_formed: bool = False  # all servers that it was started for have been here at once
    finished: bool = False
    view_bytes: int = 0
    checkpoint: Attempt | None = None
    checkpoint_count: int = 0
    checkpoint_base: int = 0  # the newest complete one of this cluster; 0: none may be referred to
    checkpoints_since_full: int = 0  # complete ones, the full one included
    left_parts: dict[int, LeftPart] = field(default_factory=dict)  # by rank
    courses: dict[TableId, KeptCourse] = field(default_factory=dict)  # of bounds that move
    checkpoint_ends: dict[int, str] = field(default_factory=dict)  # why it failed, or nothing
    checkpoint_again: dict[int, int] = field(default_factory=dict)  # begun again under that number

    @classmethod
    def empty(cls, settings: ClusterSettings) -> ClusterState:
        """The state of a cluster that nobody has joined."""
        ranges = [
            RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), None)
            for index, slots in enumerate(key_ranges(settings.range_count))
        ]
        return cls(
            next_incarnation=settings.first_incarnation,
            ranges=ranges,
            next_node_id=settings.first_node_id,
            checkpoint_count=settings.checkpoint_count,
        )

    @property
    def holders(self) -> frozenset[NodeId]:
        """The servers that hold anything of any range, or are to."""
        return frozenset(node_id for r in self.ranges for node_id in r.holders)

    def workers_by_rank(self, run: str) -> dict[int, Node]:
        """The newest worker of each rank that a run has given."""
        return {node.rank: node for node in self.workers_of(run)}  # in order of their ids

    def workers_of(self, run: str) -> list[Node]:
        """The workers of a run, by id."""
        return [node for node in self.nodes_of(Role.WORKER) if node.run == run]

    def predecessor_of(self, request: Registration) -> Node | None:
        """The worker that had the identity of a worker that comes, and has not left: its process
        has ended. None if there is none, or the request asks for another rank.
        """
        if not request.identity or request.role is not Role.WORKER:
            return None
        for rank, node in self.workers_by_rank(request.run).items():
            is_its = self.members[node.node_id].registration.identity == request.identity
            is_meant = request.requested_rank in (None, rank)
            if is_its and is_meant and node.state is not NodeState.LEFT:
                return node
        return None

    def tables_of(self, run: str) -> list[Table]:
        """The tables of a run."""
        return [table for table in self.tables.values() if table.run == run]

    def worker_count_of(self, run: str, settings: ClusterSettings) -> int:
        """The number of workers that opens clock 1 of a run's tables."""
        return self.runs[run].worker_count if run in self.runs else settings.worker_count

    def nodes_of(self, role: Role) -> list[Node]:
        """The nodes of one role, by id."""
        return [m.node for m in self.members.values() if m.node.role is role]


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a journal keeps of a cluster.

    Attributes:
        settings: the cluster's.
        state: the cluster's.
        returning_s: workers that ended in the middle, and for how long each may be followed by
            another.
    """

    settings: ClusterSettings
    state: ClusterState
    returning_s: Mapping[NodeId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A node joined."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """A node was not heard within the lease; `quiet_s` is for how long."""

    node: Node
    quiet_s: float


@dataclass(frozen=True, slots=True)
class NodeHeardAgain:
    """A silent node spoke."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node ended its membership, or was given up, silent for long; `reason` says why."""

    node: Node
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker was silent for too long: its membership has ended."""

    node: Node


@dataclass(frozen=True, slots=True)
class TableCreated:
    """A table came to be."""

    table: Table


@dataclass(frozen=True, slots=True)
class RangesPlaced:
    """Ranges got their servers; `counts` says how many each server got."""

    counts: Counts


@dataclass(frozen=True, slots=True)
class RangesFailedOver:
    """A server is silent, has left, or has nothing of ranges that are its own: their backups are
    primaries of them now, or who came with its update log; `counts` says of how many each.
    """

    lost: Node
    range_ids: tuple[RangeId, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class RangesLost:
    """Ranges whose values no server has that is there, or may come back. Their primary has left, or
    has nothing of them. It `is_wanted` where a person stopped the server.
    """

    primary: Node
    range_ids: tuple[RangeId, ...]
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class BackupsSet:
    """A primary has the backups of these ranges that it asked for; `left_out` and `let_in` say of
    how many ranges each server is a backup no more, and has become one.
    """

    primary: NodeId
    range_ids: tuple[RangeId, ...]
    left_out: Counts
    let_in: Counts


@dataclass(frozen=True, slots=True)
class JoinersNamed:
    """Ranges have too few backups: of how many each server has to become one now; of how many it
    had to, and has left before it was.
    """

    named: Counts
    dropped: Counts


@dataclass(frozen=True, slots=True)
class DepartureAsked:
    """A server was told to stop. Others have all that it holds; it leaves when they have shown that
    they live, which they do by acting on the view that follows.
    """

    node: Node


@dataclass(frozen=True, slots=True)
class ChangeProposed:
    """The servers are asked to hold a table's later clocks; `reason` says why, if nobody asked."""

    table: Table
    change: Change
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ChangeDecided:
    """All servers have promised a change of a table: its first range takes it."""

    table: Table
    change: Change


@dataclass(frozen=True, slots=True)
class ChangeCommitted:
    """A table has another consistency from a clock on."""

    table: Table
    change: Change


@dataclass(frozen=True, slots=True)
class ChangeWithdrawn:
    """Not every server promised in time; `reason` says who."""

    table: Table
    reason: str


@dataclass(frozen=True, slots=True)
class RunBegun:
    """The first worker of a run came."""

    run: Run


@dataclass(frozen=True, slots=True)
class RunEnded:
    """An operator ended a run."""

    run: Run


@dataclass(frozen=True, slots=True)
class RunRemoved:
    """An operator removed a run: so many tables, which took so many bytes of all servers."""

    run: Run
    table_count: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class ClusterFinished:
    """All workers have left or are gone, and the cluster was told to end then."""


Transition = (
    NodeRegistered
    | NodeSilent
    | NodeHeardAgain
    | NodeLeft
    | WorkerGone
    | TableCreated
    | RangesPlaced
    | RangesFailedOver
    | RangesLost
    | BackupsSet
    | JoinersNamed
    | DepartureAsked
    | ChangeProposed
    | ChangeDecided
    | ChangeCommitted
    | ChangeWithdrawn
    | CheckpointCut
    | CheckpointWritten
    | CheckpointMade
    | CheckpointBegunAgain
    | CheckpointFailed
    | RunBegun
    | RunEnded
    | RunRemoved
    | ClusterFinished
)
"""One thing that changed."""
