"""Who is in the cluster and who serves what, as values.

Rules:
    - A view is immutable and numbered; a node acts on the newest that it has seen.
    - `assignment_epoch` is per range and only grows; the view number is another thing.

What it deliberately does not do: decide (`scheduler.machine.cluster` does), or know protobuf.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ps_core.change import Checkpoint
from ps_core.errors import TableNotFound
from ps_core.keys import AssignmentEpoch, Incarnation, KeyRange, NodeId, RangeId, TableId
from ps_core.runs import Run
from ps_core.tables import Table

_NEVER = AssignmentEpoch(0)


class Role(Enum):
    """What a node is for."""

    SERVER = "server"
    WORKER = "worker"
    READER = "reader"
    OPERATOR = "operator"


class NodeState(Enum):
    """Where a node is in its life."""

    ALIVE = "alive"
    SILENT = "silent"
    LEFT = "left"
    GONE = "gone"

    @property
    def is_member(self) -> bool:
        """Whether its membership has not ended."""
        return self in (NodeState.ALIVE, NodeState.SILENT)


@dataclass(frozen=True, slots=True)
class Session:
    """A node's identity, as the scheduler issued it."""

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
        fields = (
            self.cluster_id,
            self.timeline.hex(),
            str(self.node_id),
            str(self.incarnation),
            self.role.value,
            str(self.rank),
        )
        text = "|".join((*fields, self.run) if self.run else fields)
        return hmac.new(token_key, text.encode(), hashlib.sha256).digest()

    def is_genuine(self, token_key: bytes) -> bool:
        """Whether the token was made with `token_key` for exactly these fields."""
        return hmac.compare_digest(self.token, self.signed(token_key))


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the scheduler knows it."""

    node_id: NodeId
    incarnation: Incarnation
    role: Role
    rank: int
    address: str
    state: NodeState
    silence_ms: int = 0
    """The silence after which it was declared GONE, or given up as LEFT."""
    run: str = ""
    """Workers and readers: the run that it is of."""

    @property
    def gone_words(self) -> str:
        """Of a worker that is gone: who, and why."""
        if not self.silence_ms:
            return f"worker {self.rank} was declared gone: its process has ended"
        silence_s = round(self.silence_ms / 1000, 1)
        return f"worker {self.rank} was declared gone after {silence_s:g} s of silence"

    @property
    def ended_words(self) -> str:
        """Of a worker whose membership has ended: who, and how."""
        if self.state is NodeState.GONE:
            return self.gone_words
        return f"worker {self.rank} has left the cluster"

    @property
    def fence_words(self) -> str:
        """What it is told when it comes back after all."""
        if self.state is not NodeState.GONE and not self.silence_ms:
            return f"node {self.node_id} has left the cluster; register again to come back"
        if self.state is not NodeState.GONE:
            silence_s = round(self.silence_ms / 1000, 1)
            return (
                f"node {self.node_id} ({self.role.value}) has left the cluster: it was given up "
                f"after {silence_s:g} s of silence, and nobody waits for it. To come back, start "
                "this process again: register again, as a new node"
            )
        return (
            f"{self.gone_words} (node {self.node_id}, incarnation {self.incarnation}): the others "
            "go on without it, and nothing that it sends counts any more. End this process and "
            "register again as a new worker; where such pauses are normal, raise the scheduler's "
            "worker_timeout_s"
        )


@dataclass(frozen=True, slots=True)
class RangeAssignment:
    """Who serves a range; `primary` is None while nobody does. `backups` hold all that is
    committed; who is `joining` is being brought up to date. `initial_holders` were given the range
    when it was placed, empty, and have held it since: what there is of it they were told as it came
    about, and one that was told nothing has all that anybody may have seen. `term` is the epoch
    under which the primary became one. It is `is_lost` when no server that is there, or may come
    back, has its values.
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

    @property
    def in_sync(self) -> tuple[NodeId, ...]:
        """Who holds all that is committed, the primary first; nobody while nobody serves it."""
        return () if self.primary is None else (self.primary, *self.backups)

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """Who holds anything of it, or is to."""
        return (*self.in_sync, *self.catching_up)


@dataclass(frozen=True, slots=True)
class BackupRequest:
    """What a range's primary asks the scheduler for: all backups that it shall have, if it is at
    that epoch still. One that `is_missing` the range has nothing of it: another is to be primary.
    """

    range_id: RangeId
    assignment_epoch: AssignmentEpoch
    backups: frozenset[NodeId]
    is_missing: bool = False


@dataclass(frozen=True)
class ClusterView:
    """The cluster at one moment. Nodes by id, ranges by id, tables by id. `worker_count` is of the
    run without a name, `runs` are the others. Once tables were removed, `next_table_id` is above
    all that were given; else 0.
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
        """Whether there was a table of that number, of any run, and is no more. A number that this
        view has not heard of may be of a table that is newer.
        """
        return table_id < self.next_table_id and table_id not in self.tables_by_id

    def table(self, table_id: TableId) -> Table:
        """A table that there was.

        Raises:
            TableNotFound: it was removed.
        """
        found = self.tables_by_id.get(table_id)
        if found is None:
            raise TableNotFound(f"there is no table {table_id} any more: its run was removed")
        return found

    def of_run(self, name: str) -> ClusterView:
        """The cluster as a run sees it: its own workers, readers and tables, and all servers and
        ranges. Checkpoints are of the run without a name.
        """
        if not (self.runs or name):
            return self  # which is the only one
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
        """The number of workers that opens clock 1 of a run's tables."""
        return next((run.worker_count for run in self.runs if run.name == name), self.worker_count)

    def reusing(self, before: ClusterView) -> ClusterView:
        """The same, with the tables of an older view where they are equal: what is known of these
        is known then, and nobody has to clear thousands of them away.
        """
        known = before.tables_by_id
        tables = (
            found if (found := known.get(table.table_id)) == table else table
            for table in self.tables
        )
        return replace(self, tables=tuple(tables))

    @cached_property
    def tables_by_id(self) -> dict[TableId, Table]:
        """The tables by their number."""
        return {table.table_id: table for table in self.tables}

    @cached_property
    def tables_by_name(self) -> dict[str, Table]:
        """The tables by their name."""
        return {table.spec.name: table for table in self.tables}

    @cached_property
    def ended_workers(self) -> tuple[Node, ...]:
        """The workers whose membership has ended: nobody waits for them any more."""
        return tuple(n for n in self.nodes if n.role is Role.WORKER and not n.state.is_member)

    @cached_property
    def world_size(self) -> int:
        """How many workers the cluster counts: those that it was started for, come or gone, and
        those that came beyond these and are here.
        """
        return self.worker_count + sum(rank >= self.worker_count for rank in self._ranks_here)

    @cached_property
    def awaited_ranks(self) -> tuple[int, ...]:
        """Whom others may wait for: those whose membership has not ended, and those of the first
        that have not come.
        """
        given = {node.rank for node in self.nodes if node.role is Role.WORKER}
        return tuple(sorted(self._ranks_here | (set(range(self.worker_count)) - given)))

    @property
    def _ranks_here(self) -> set[int]:
        return {n.rank for n in self.nodes if n.role is Role.WORKER and n.state.is_member}

    @cached_property
    def living_servers(self) -> frozenset[NodeId]:
        """The servers that are alive."""
        alive = (n for n in self.nodes if n.role is Role.SERVER and n.state is NodeState.ALIVE)
        return frozenset(node.node_id for node in alive)

    def in_sync_count(self, assignment: RangeAssignment) -> int:
        """How many living servers hold all of a range that is committed."""
        return sum(node_id in self.living_servers for node_id in assignment.in_sync)

    @cached_property
    def lost_ranges(self) -> tuple[RangeAssignment, ...]:
        """The ranges whose values nobody has any more."""
        return tuple(r for r in self.ranges if r.is_lost)

    @property
    def lost_words(self) -> str:
        """What is lost, with whom, and what to do; empty if nothing is."""
        lost = self.lost_ranges
        if not lost:
            return ""
        servers = sorted({r.primary for r in lost if r.primary is not None})
        names = sorted(
            table.spec.name
            for table in self.tables
            if not {r.range_id for r in lost}.isdisjoint(table.blocks_by_range(len(self.ranges)))
        )
        tables = ", ".join(f"'{name}'" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"{len(lost)} of {len(self.ranges)} key ranges are lost, with values of {tables}{more}:"
            f" server {', '.join(map(str, servers))} had the only copy, and is gone for good. "
            "Restore a checkpoint (pushpull checkpoint restore), or start the cluster anew"
        )

    @property
    def awaited_words(self) -> str:
        """Which ranges wait for servers that are silent and alone have their values; empty if none
        does. What is lost is told elsewhere.
        """
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
            "(pushpull checkpoint restore), or start the cluster anew"
        )

    @cached_property
    def nodes_by_id(self) -> dict[NodeId, Node]:
        """The nodes by their id."""
        return {node.node_id: node for node in self.nodes}
