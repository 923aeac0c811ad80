"""The scheduler's values: settings, state, requests and transitions.

Rules:
    - `ClusterState` has everything that the journal keeps, or can compute from it
      (`scheduler.journal.records`), so neither heartbeat times nor the nodes' progress.
    - A transition is one change; the edge logs each, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ps_core import limits
from ps_core.change import Join, TableChange
from ps_core.cluster_view import Node, NodeState, RangeAssignment, Role
from ps_core.consistency import Consistency
from ps_core.errors import InvalidConfig
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.manifest import Imported, SavedDataSet
from ps_core.runs import Run
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_core.update_offer import UpdateOffer
from scheduler.machine.adaptation import CourseRecord
from scheduler.machine.checkpoint_state import (
    Attempt,
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointUnneeded,
    CheckpointWritten,
    CompleteCheckpoint,
    LeftPart,
)
from scheduler.machine.data_shards import DataSet, DataShardsReturned

Counts = tuple[tuple[NodeId, int], ...]  # range counts by node id

TIMELINE_BYTES = 16
MIN_TOKEN_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class RestoredTable:
    """A table of the checkpoint that a cluster starts from, with its consistency at that time."""

    spec: TableSpec
    consistency: Consistency
    clock: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that a cluster starts from: `tables` by name, or else an import's values for
    the tables that will be created. `lineage` has its timeline, and those that it continues.
    """

    url: str
    tables: Mapping[str, RestoredTable]
    imported: Imported | None = None
    lineage: tuple[bytes, ...] = ()
    data_sets: tuple[SavedDataSet, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of a cluster, fixed when it is formed; `scheduler.config` describes those that a
    person gives. The caller draws the random ones.

    Attributes:
        cluster_id: identity; random, not empty.
        timeline: identity between two restores; random, 16 bytes.
        token_key: key of session tokens; random, secret, at least 16 bytes.
        first_incarnation: incarnation of the first node; later ones count up. At least 1, and
            random, so that two clusters do not give the same ones.
        max_workers: at least `worker_count`, late joiners included. 0: `worker_count`.
        features: capabilities that nodes compare with what they need.
        checkpoint_count: largest number of a checkpoint that exists already.
        restored: the checkpoint to start from, or None.
        first_node_id: id of the first node; later ones count up.
        servers_at_restore: of a replicated cluster that a restore replaced in its place, the
            servers that were alive then: tables wait for as many. 0: they wait for `server_count`.
        replaced_timelines: timelines that a restore of this cluster replaced; their nodes drop
            their values and register again.
        left_timelines: if a restore in place began the cluster, those that it had been in before,
            with all that these went on from.
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
    servers_at_restore: int = 0
    replaced_timelines: frozenset[bytes] = frozenset()
    left_timelines: frozenset[bytes] = frozenset()

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
        half, workers, servers = limits.MAX_NODE_COUNT // 2, self.worker_count, self.server_count
        replicas, in_sync, most = self.replica_count, self.min_in_sync, self.max_workers
        lease_s, beat_s, timeout_s = self.lease_s, self.heartbeat_interval_s, self.worker_timeout_s
        interval_s, incarnation = self.adaptation_interval_s, self.first_incarnation
        ranges, most_ranges = self.range_count, limits.MAX_RANGE_COUNT
        full_every = self.checkpoint_full_every
        for holds, name, value, expected in (
            (incarnation >= 1, "first_incarnation", incarnation, "at least 1"),
            (1 <= workers <= half, "workers", workers, f"1 to {half}"),
            (1 <= servers <= half, "servers", servers, f"1 to {half}"),
            (1 <= replicas <= servers, "replicas", replicas,
             f"1 to the number of servers, {servers}"),
            (1 <= in_sync <= replicas, "min_in_sync", in_sync,
             f"1 to the number of replicas, {replicas}"),
            (most == 0 or workers <= most <= half, "max_workers", most,
             f"{workers}, the number of workers, to {half}, or 0 for none beyond these"),
            (0 < beat_s <= lease_s / 2, "heartbeat interval", f"{beat_s} s",
             f"above 0 and at most half of the lease of {lease_s} s"),
            (timeout_s == 0 or lease_s < timeout_s < math.inf, "worker timeout", f"{timeout_s} s",
             f"above the lease of {lease_s} s, or 0 for never"),
            (0 < interval_s < math.inf, "adaptation interval", f"{interval_s} s", "above 0"),
            (full_every >= 1, "checkpoint_full_every", full_every, "at least 1"),
            (1 <= ranges <= most_ranges, "ranges", ranges,
             f"1 to {most_ranges}, or 0 for as many as suit the servers"),
        ):  # fmt: skip
            _require(holds, f"{name} is {value}; expected {expected}")
        for url in (self.checkpoint_url, self.restored.url if self.restored else ""):
            _require(
                len(url.encode()) <= limits.MAX_CHECKPOINT_URL_BYTES,
                f"the checkpoint URL '{url[:80]}...' has {len(url.encode())} bytes; expected at "
                f"most {limits.MAX_CHECKPOINT_URL_BYTES}",
            )

    @property
    def servers_to_form(self) -> int:
        """The first table waits until so many servers are alive at once."""
        return self.servers_at_restore or self.server_count

    @property
    def rank_count(self) -> int:
        """Exclusive upper bound of ranks."""
        return self.max_workers or self.worker_count

    def of_run(self, run: Run) -> ClusterSettings:
        if not run.name:
            return self
        most = max(self.max_workers, run.worker_count)
        return replace(self, worker_count=run.worker_count, max_workers=most)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidConfig(message)


@dataclass(frozen=True, slots=True)
class UpdateLogClaim:
    """The update log that a server keeps; see `pushpull.v1.UpdateLogClaim`. Without
    `assignment_epochs`, which older journals lack, it has each range under its newest epoch.
    """

    log_id: bytes
    timeline: bytes = b""
    range_ids: tuple[RangeId, ...] = ()
    former_log_ids: tuple[bytes, ...] = ()
    assignment_epochs: tuple[AssignmentEpoch, ...] = ()

    def has(self, assignment: RangeAssignment, since: AssignmentEpoch | None = None) -> bool:
        """True if the log has the range, as it was placed last, under the epoch `since` or a later
        one.
        """
        if assignment.range_id not in self.range_ids:
            return False
        placed_epoch = assignment.placed_epoch
        least = placed_epoch if since is None else max(placed_epoch, since)
        known = dict(zip(self.range_ids, self.assignment_epochs, strict=False))
        return known.get(assignment.range_id, least) >= least


@dataclass(frozen=True, slots=True)
class LogSource:
    """The newest primary of a range that may have acknowledged anything: its update log has all of
    the range, if it has something under `since` or a later epoch.

    Attributes:
        promoted_epoch: the epoch under which the first backup after it was promoted; None if it is
            the primary. Whoever was promoted since has acknowledged nothing. If its log has
            something under this epoch or a later one, that is all of the range, too.
    """

    node_id: NodeId
    since: AssignmentEpoch
    promoted_epoch: AssignmentEpoch | None = None


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """A server's memory for tables; see `pushpull.v1.ServerMemory`. 0: not reported."""

    byte_count: int = 0
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """A request to become a node; the fields are those of `pushpull.v1.RegisterNodeRequest`."""

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
        """True if this one keeps the other's update log, or a log in place of it. A directory has
        one lock, so the other is dead.
        """
        ours, theirs = self.update_log, other.update_log
        is_same = ours is not None and theirs is not None and ours.log_id == theirs.log_id
        return is_same or self.replaces_log(other)

    def replaces_log(self, other: Registration) -> bool:
        """True if this one keeps a log in place of the other's, which is never claimed again."""
        ours, theirs = self.update_log, other.update_log
        return ours is not None and theirs is not None and theirs.log_id in ours.former_log_ids


@dataclass(frozen=True, slots=True)
class Member:
    """A node and the request that made it one."""

    node: Node
    registration: Registration


@dataclass(slots=True)
class Proposal:
    """A proposed change of a table. `clocks` has the hold point of each prepared server; the
    others have until `deadline_s`.
    """

    servers: frozenset[NodeId]
    deadline_s: float
    clocks: dict[NodeId, int] = field(default_factory=dict)

    @property
    def missing(self) -> set[NodeId]:
        return set(self.servers - self.clocks.keys())


@dataclass(slots=True)
class ClusterState:
    """Membership, tables, ownership and data sets. Dictionaries are in order of creation; `tables`
    and `data_sets` are by run and name, and `runs` are those with a name. `log_sources` has those
    that are not the primary, since it became the primary. `range_bytes` (of
    parameters), `range_memory_bytes` (that each holder may need) and `view_bytes` (of nodes and
    tables) are running sums, so that an event costs only what it adds.
    """

    next_incarnation: Incarnation
    ranges: list[RangeAssignment]
    view_number: int = 1
    next_node_id: int = 1
    next_ordinal: int = 0
    next_table_id: int = 0  # 0 until a table is removed: until then ids have no gaps
    members: dict[NodeId, Member] = field(default_factory=dict)
    node_of_registration: dict[bytes, NodeId] = field(default_factory=dict)
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    range_bytes: dict[RangeId, int] = field(default_factory=dict)
    range_memory_bytes: dict[RangeId, int] = field(default_factory=dict)
    change_counts: dict[TableId, int] = field(default_factory=dict)
    proposals: dict[TableId, Proposal] = field(default_factory=dict)
    withdrawals: dict[TableId, str] = field(default_factory=dict)  # reason of the last one
    joins_due: dict[TableId, list[Join]] = field(default_factory=dict)
    counted_joins: set[tuple[TableId, int]] = field(default_factory=set)  # ranks, in `view_bytes`
    failed_over: set[RangeId] = field(default_factory=set)  # a backup serves these, or did
    log_sources: dict[RangeId, LogSource] = field(default_factory=dict)
    has_formed: bool = False  # `servers_to_form` servers were alive at once
    finished: bool = False
    view_bytes: int = 0
    checkpoint: Attempt | None = None
    checkpoint_count: int = 0
    checkpoint_base: int = 0  # newest complete one of this cluster; 0: the next one is full
    checkpoint_made: CompleteCheckpoint | None = None  # the newest
    checkpoints_since_full: int = 0  # complete ones, the full one included
    left_parts: dict[int, LeftPart] = field(default_factory=dict)  # by rank
    workers_have_parameters: bool = False  # that no server has, as a worker has reported
    courses: dict[TableId, CourseRecord] = field(default_factory=dict)  # of adaptive bounds
    data_sets: dict[tuple[str, str], DataSet] = field(default_factory=dict)
    checkpoint_ends: dict[int, str] = field(default_factory=dict)  # reason of failure, or empty
    checkpoint_again: dict[int, int] = field(default_factory=dict)  # number of the second attempt

    @classmethod
    def empty(cls, settings: ClusterSettings) -> ClusterState:
        ranges = [
            RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), None)
            for index, slots in enumerate(key_ranges(settings.range_count))
        ]
        saved = () if settings.restored is None else settings.restored.data_sets
        return cls(
            next_incarnation=settings.first_incarnation,
            ranges=ranges,
            next_node_id=settings.first_node_id,
            checkpoint_count=settings.checkpoint_count,
            data_sets={("", each.spec.name): DataSet.restored(each) for each in saved},
        )

    @property
    def holders(self) -> frozenset[NodeId]:
        """Servers that hold a range, or are catching up."""
        return frozenset(node_id for r in self.ranges for node_id in r.holders)

    def workers_by_rank(self, run: str) -> dict[int, Node]:
        """Newest worker of each rank of a run."""
        return {node.rank: node for node in self.workers_of(run)}  # in order of their ids

    def late_or_replacing(self, run: str, worker_count: int) -> list[Node]:
        """The newest worker of each rank of a run, where it did not begin with the run."""
        first = {node.rank: node for node in reversed(self.workers_of(run))}
        newest = self.workers_by_rank(run).items()
        return [n for rank, n in newest if rank >= worker_count or n is not first[rank]]

    def workers_of(self, run: str) -> list[Node]:
        """Workers of a run, by id."""
        return [node for node in self.nodes_of(Role.WORKER) if node.run == run]

    def predecessor_of(self, request: Registration) -> Node | None:
        """The worker with the identity of a registering one, unless it has left: its process has
        ended. None if the request asks for another rank.
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
        return [table for table in self.tables.values() if table.run == run]

    def table(self, table_id: TableId) -> Table | None:
        return next((table for table in self.tables.values() if table.table_id == table_id), None)

    def worker_count_of(self, run: str, settings: ClusterSettings) -> int:
        """Workers that must be there to open clock 1 of a run's tables."""
        return self.runs[run].worker_count if run in self.runs else settings.worker_count

    def nodes_of(self, role: Role) -> list[Node]:
        """Nodes of a role, by id."""
        return [m.node for m in self.members.values() if m.node.role is role]


@dataclass(frozen=True, slots=True)
class JournaledCluster:
    """The journaled part of a cluster. `returning_s` has the workers that ended unfinished, and the
    seconds left for a replacement of each.
    """

    settings: ClusterSettings
    state: ClusterState
    returning_s: Mapping[NodeId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A node registered."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """A node was not heard for a lease, but `quiet_s`."""

    node: Node
    quiet_s: float


@dataclass(frozen=True, slots=True)
class NodeHeardAgain:
    """A silent node was heard."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node left, or was silent until it was given up."""

    node: Node
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker was silent too long, or its process ended: its membership has ended."""

    node: Node


@dataclass(frozen=True, slots=True)
class TableCreated:
    """A table was created."""

    table: Table


@dataclass(frozen=True, slots=True)
class RangesPlaced:
    """Ranges got primaries; `counts` has the ranges of each server."""

    counts: Counts


@dataclass(frozen=True, slots=True)
class RangesFailedOver:
    """Ranges of a server that is silent, has left or is missing their values have another primary:
    a backup, or the server that came with its update log. `counts` has the ranges of each.
    """

    lost: Node
    range_ids: tuple[RangeId, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class RangesLost:
    """No server has these values, or may bring them; `is_wanted` if a person stopped it."""

    primary: Node
    range_ids: tuple[RangeId, ...]
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class RangesUnplaced:
    """No server holds these ranges any more, or may come back to them, and they have no values: the
    next table with blocks there places them anew.
    """

    primary: Node
    range_ids: tuple[RangeId, ...]


@dataclass(frozen=True, slots=True)
class HandOversAdvised:
    """Primaries are asked to hand ranges over, or not to any more; `counts` has the ranges of each
    server that is to take some.
    """

    counts: Counts
    withdrawn_count: int = 0


@dataclass(frozen=True, slots=True)
class RangesHandedOver:
    """A primary handed ranges over; `counts` has the ranges of each server that took some."""

    primary: NodeId
    range_ids: tuple[RangeId, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class BackupsSpared:
    """Ranges with more backups than they need have fewer; `counts` has the ranges of each server
    that is none any more.
    """

    counts: Counts


@dataclass(frozen=True, slots=True)
class BackupsSet:
    """A primary got the backups that it requested; `left_out` and `let_in` count ranges."""

    primary: NodeId
    range_ids: tuple[RangeId, ...]
    left_out: Counts
    let_in: Counts


@dataclass(frozen=True, slots=True)
class JoinersNamed:
    """Servers that start catching up as backups, and those that no longer do, with their ranges."""

    named: Counts
    dropped: Counts


@dataclass(frozen=True, slots=True)
class DepartureAsked:
    """A server is stopping: the other holders must act on the view that follows."""

    node: Node


@dataclass(frozen=True, slots=True)
class ChangeProposed:
    """Servers are asked to prepare a change; `reason` if the scheduler itself requested it."""

    table: Table
    change: TableChange
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ChangeDecided:
    """All servers are prepared: the table's first range takes the change."""

    table: Table
    change: TableChange


@dataclass(frozen=True, slots=True)
class ChangeCommitted:
    """A table's change took effect."""

    table: Table
    change: TableChange


@dataclass(frozen=True, slots=True)
class ChangeWithdrawn:
    """A change was withdrawn, most often because a server was not prepared in time."""

    table: Table
    reason: str


@dataclass(frozen=True, slots=True)
class RunBegun:
    """The first worker of a run registered."""

    run: Run


@dataclass(frozen=True, slots=True)
class RunEnded:
    """An operator ended a run."""

    run: Run


@dataclass(frozen=True, slots=True)
class RunRemoved:
    """An operator removed a run: its tables, and their bytes on all servers together."""

    run: Run
    table_count: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class ClusterFinished:
    """All workers have left or are gone, and the cluster is configured to end then."""


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
    | RangesUnplaced
    | HandOversAdvised
    | RangesHandedOver
    | BackupsSpared
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
    | CheckpointUnneeded
    | CheckpointBegunAgain
    | CheckpointFailed
    | RunBegun
    | RunEnded
    | RunRemoved
    | DataShardsReturned
    | ClusterFinished
)
