"""The cluster view as values: members, ranges and tables.

Rules:
    - A view is immutable and numbered; a node acts on the newest that it has seen.
    - `assignment_epoch` is per range and only grows; it is independent of the view number.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ps_core.change import Checkpoint
from ps_core.errors import TableNotFound, listed
from ps_core.keys import AssignmentEpoch, Incarnation, KeyRange, NodeId, RangeId, TableId
from ps_core.runs import Run, words
from ps_core.tables.table import Table

_NEVER = AssignmentEpoch(0)

HAND_OVER_FEATURE = "hand-over"
"""Feature of servers that can hand ranges over."""

RESTORE = (
    "Restore a checkpoint (client.restore, or a new run with --resume), or start the cluster anew"
)
"""Remedy for lost values."""


class Role(Enum):
    """Purpose of a node."""

    SERVER = "server"
    WORKER = "worker"
    READER = "reader"
    OPERATOR = "operator"


class NodeState(Enum):
    """State of a node's membership."""

    ALIVE = "alive"
    SILENT = "silent"
    LEFT = "left"
    GONE = "gone"

    @property
    def is_member(self) -> bool:
        """True until the membership ends."""
        return self in (NodeState.ALIVE, NodeState.SILENT)


@dataclass(frozen=True, slots=True)
class Session:
    """A node's identity, issued by the scheduler."""

    cluster_id: str
    timeline: bytes
    node_id: NodeId
    incarnation: Incarnation
    role: Role
    rank: int = 0
    token: bytes = b""
    run: str = ""

    def signed(self, token_key: bytes) -> bytes:
        """The token that proves this identity: HMAC-SHA256 over its fields (PROTOCOL.md)."""
        node = (self.cluster_id, self.timeline.hex(), self.node_id, self.incarnation)
        fields = (*node, self.role.value, self.rank)
        text = "|".join(map(str, (*fields, self.run) if self.run else fields))
        return hmac.digest(token_key, text.encode(), "sha256")

    def is_genuine(self, token_key: bytes) -> bool:
        """True if the token was made with `token_key` for exactly these fields."""
        return hmac.compare_digest(self.token, self.signed(token_key))


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as the scheduler knows it."""

    node_id: NodeId
    incarnation: Incarnation
    role: Role
    rank: int
    address: str
    state: NodeState
    silence_ms: int = 0
    """The silence after which it was declared GONE, or given up as LEFT."""
    run: str = ""
    """Run of a worker or reader."""

    @property
    def gone_words(self) -> str:
        """Message on a gone worker, with the reason."""
        if not self.silence_ms:
            return f"worker {self.rank} was declared gone: its process has ended"
        silence_s = round(self.silence_ms / 1000, 1)
        return f"worker {self.rank} was declared gone after {silence_s:g} s of silence"

    @property
    def ended_words(self) -> str:
        """Message on a worker whose membership has ended."""
        if self.state is NodeState.GONE:
            return self.gone_words
        return f"worker {self.rank} has left the cluster"

    @property
    def fence_words(self) -> str:
        """Message to the node if it calls after its membership has ended."""
        if self.state is NodeState.GONE:
            return (
                f"{self.gone_words} (node {self.node_id}, incarnation {self.incarnation}): the "
                "others go on without it, and nothing that it sends counts any more. End this "
                "process and register again as a new worker; where such pauses are normal, raise "
                "the scheduler's worker_timeout_s"
            )
        if not self.silence_ms and self.run:
            return (
                f"node {self.node_id} has left the cluster: by itself, or since {words(self.run)} "
                "was ended by an operator. Nobody joins a run that is over: to train again, start "
                "a run of another name"
            )
        if not self.silence_ms:
            return f"node {self.node_id} has left the cluster; register again to come back"
        return (
            f"node {self.node_id} ({self.role.value}) has left the cluster: it was given up after "
            f"{round(self.silence_ms / 1000, 1):g} s of silence, and nobody waits for it. To come "
            "back, restart this process: it must register again, as a new node"
        )


@dataclass(frozen=True, slots=True)
class RangeAssignment:
    """The configuration of a range.

    Attributes:
        assignment_epoch: grows with each configuration.
        primary: None until the range is placed, and again while it has no values and no server.
        backups: servers that hold all committed updates.
        catching_up: servers that are being brought up to date.
        initial_holders: holders since the range was placed, empty. They were sent every update
            since, so one that has none has everything that was seen.
        is_lost: no server that is there, or may come back, has the values.
        term: the epoch since which the range's records are numbered: its primary was given the
            range then, or took it over from a former primary that handed it over under that term.
        placed_epoch: the epoch under which the range was placed last, empty. What a server had of
            it before is of removed tables. 0: it was not placed, or an old journal does not say.
        hand_over_to: the backup to which the primary is to hand the range over, or the server that
            becomes a backup first.
    """

    range_id: RangeId
    slots: KeyRange
    assignment_epoch: AssignmentEpoch
    primary: NodeId | None
    backups: tuple[NodeId, ...] = ()
    catching_up: tuple[NodeId, ...] = ()
    initial_holders: tuple[NodeId, ...] = ()
    is_lost: bool = False
    term: AssignmentEpoch = _NEVER
    placed_epoch: AssignmentEpoch = _NEVER
    hand_over_to: NodeId | None = None

    @property
    def in_sync(self) -> tuple[NodeId, ...]:
        """Holders of all committed updates, the primary first; none before the placement."""
        return () if self.primary is None else (self.primary, *self.backups)

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """Servers that hold the range, or are catching up."""
        return (*self.in_sync, *self.catching_up)


def lost_among(ranges: Sequence[RangeAssignment], tables: Iterable[Table]) -> list[RangeAssignment]:
    """Lost ranges with values of these tables."""
    lost = [assignment for assignment in ranges if assignment.is_lost]
    if not lost:
        return []
    held = {range_id for table in tables for range_id in table.blocks_by_range(len(ranges))}
    return [assignment for assignment in lost if assignment.range_id in held]


@dataclass(frozen=True, slots=True)
class BackupRequest:
    """A primary's request for the full set of its range's backups, valid at one epoch. A primary
    that `is_missing` the values requests another primary. One that has stopped to `hand_over_to` a
    backup, which has everything, as all others have, requests that one as primary.
    """

    range_id: RangeId
    assignment_epoch: AssignmentEpoch
    backups: frozenset[NodeId]
    is_missing: bool = False
    hand_over_to: NodeId | None = None


@dataclass(frozen=True)
class ClusterView:
    """The cluster at one moment. Nodes, ranges and tables are by id. `worker_count` is that of the
    run without a name, `runs` are the named ones. `next_table_id` is 0 until a table is removed.
    """

    view_number: int
    cluster_id: str
    worker_count: int
    server_count: int
    nodes: tuple[Node, ...]
    ranges: tuple[RangeAssignment, ...]
    tables: tuple[Table, ...]
    finished: bool = False
    checkpoint: Checkpoint | None = None
    restored_from: str = ""
    runs: tuple[Run, ...] = ()
    next_table_id: int = 0

    def is_removed(self, table_id: TableId) -> bool:
        """True if a table with this id existed, of any run, and was removed. An id that this view
        does not know may belong to a newer table.
        """
        return table_id < self.next_table_id and table_id not in self.tables_by_id

    def is_to_come(self, table_id: TableId) -> bool:
        """True if the table is in newer views than this one alone."""
        return table_id not in self.tables_by_id and table_id >= self.next_table_id

    def table(self, table_id: TableId) -> Table:
        """The table with this id; TableNotFound if it was removed."""
        found = self.tables_by_id.get(table_id)
        if found is None:
            raise TableNotFound(f"there is no table {table_id} any more: its run was removed")
        return found

    def of_run(self, name: str) -> ClusterView:
        """The view of one run: its workers, readers and tables, and all servers and ranges.
        Checkpoints belong to the run without a name.
        """
        if not (self.runs or name):
            return self  # there is no other run
        found = self._by_run.get(name)
        if found is None:
            found = self._by_run[name] = replace(
                self,
                worker_count=self.worker_count_of(name),
                nodes=tuple(n for n in self.nodes if n.role is Role.SERVER or n.run == name),
                tables=tuple(table for table in self.tables if table.run == name),
                checkpoint=None if name else self.checkpoint,
                restored_from="" if name else self.restored_from,
                runs=(),
            )
        return found

    @cached_property
    def _by_run(self) -> dict[str, ClusterView]:
        return {}

    def worker_count_of(self, name: str) -> int:
        """Workers that must be there to open clock 1 of a run's tables."""
        return next((run.worker_count for run in self.runs if run.name == name), self.worker_count)

    def reusing(self, before: ClusterView) -> ClusterView:
        """The view with the equal tables of an older one, so that their caches stay and thousands
        of objects need not be freed.
        """
        known = before.tables_by_id
        tables = (
            found if (found := known.get(table.table_id)) == table else table
            for table in self.tables
        )
        return replace(self, tables=tuple(tables))

    @cached_property
    def tables_by_id(self) -> dict[TableId, Table]:
        return {table.table_id: table for table in self.tables}

    @cached_property
    def tables_by_name(self) -> dict[str, Table]:
        """Tables by name; in the view of one run."""
        return {table.spec.name: table for table in self.tables}

    @cached_property
    def ended_workers(self) -> tuple[Node, ...]:
        """Workers whose membership has ended."""
        return tuple(n for n in self.nodes if n.role is Role.WORKER and not n.state.is_member)

    @cached_property
    def world_size(self) -> int:
        """Workers that the run was started for, there or not, and late joiners that are members."""
        return self.worker_count + sum(rank >= self.worker_count for rank in self._ranks_here)

    @cached_property
    def awaited_ranks(self) -> tuple[int, ...]:
        """Ranks that others may wait for: members, and first workers that have not registered."""
        given = {node.rank for node in self.nodes if node.role is Role.WORKER}
        return tuple(sorted(self._ranks_here | (set(range(self.worker_count)) - given)))

    @property
    def _ranks_here(self) -> set[int]:
        return {n.rank for n in self.nodes if n.role is Role.WORKER and n.state.is_member}

    @cached_property
    def living_servers(self) -> frozenset[NodeId]:
        alive = (n for n in self.nodes if n.role is Role.SERVER and n.state is NodeState.ALIVE)
        return frozenset(node.node_id for node in alive)

    def in_sync_count(self, assignment: RangeAssignment) -> int:
        """Live servers that hold all committed updates of a range."""
        return sum(node_id in self.living_servers for node_id in assignment.in_sync)

    @cached_property
    def lost_ranges(self) -> tuple[RangeAssignment, ...]:
        """Ranges whose values no server has any more."""
        return tuple(r for r in self.ranges if r.is_lost)

    @property
    def lost_words(self) -> str:
        """Message on lost ranges, with the remedy; empty if there is none."""
        lost = self.lost_ranges
        if not lost:
            return ""
        servers = sorted({r.primary for r in lost if r.primary is not None})
        names = sorted(
            table.spec.name
            for table in self.tables
            if not {r.range_id for r in lost}.isdisjoint(table.blocks_by_range(len(self.ranges)))
        )
        tables = listed([f"'{name}'" for name in names], 3)
        return (
            f"{len(lost)} of {len(self.ranges)} key ranges are lost, with values of {tables}:"
            f" server {', '.join(map(str, servers))} had the only copy, and is gone for good. "
            f"{RESTORE}"
        )

    @property
    def awaited_words(self) -> str:
        """Message on ranges whose only holders are silent, or empty; `lost_words` has lost ones."""
        held = {r for table in self.tables for r in table.blocks_by_range(len(self.ranges))}
        silent: set[NodeId] = set()
        count = 0
        for each in self.ranges:
            states = {self.nodes_by_id[holder].state for holder in each.in_sync}
            if each.range_id not in held or each.is_lost or NodeState.ALIVE in states:
                continue
            silent.update(each.in_sync)
            count += bool(each.in_sync)
        if not silent:
            return ""
        nodes = [self.nodes_by_id[node_id] for node_id in sorted(silent)]
        who = " and ".join(f"server {node.node_id} at {node.address}" for node in nodes)
        have, they = ("has", "it") if len(nodes) == 1 else ("have", "they")
        return (
            f"{count} of {len(self.ranges)} key ranges wait for {who}, not heard for a lease, "
            f"which alone {have} their values. Where {they} cannot come back, restore a checkpoint "
            "(client.restore, or a new run with --resume), or start the cluster anew"
        )

    @cached_property
    def nodes_by_id(self) -> dict[NodeId, Node]:
        return {node.node_id: node for node in self.nodes}
