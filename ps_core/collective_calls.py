"""Rounds of collective calls as values.

Rules:
    - A round has one share of each of its workers, in the order of their ranks.
    - A joining worker takes part in rounds of workers beyond the clock after which it has joined:
      until then they may be in a round that they began without it.

`ps_server.ranges.collective_rounds` decides when a round ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ps_core.cluster_view import ClusterView, Node, Role
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId

_SHARE_BYTES = 32
"""Bytes of a share's numbers in a message."""

WAITS_FOR = "it waits for"
"""Start of a host's message on a round that waits."""


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's share of the round `call`; `clock` is its newest seal on any table."""

    rank: int
    incarnation: Incarnation
    call: str
    clock: int = 0
    payload: bytes = b""

    @property
    def byte_count(self) -> int:
        """Bytes that count for the limits."""
        return len(self.call.encode()) + len(self.payload) + _SHARE_BYTES


@dataclass(frozen=True, slots=True)
class Round:
    """A round that has ended; it failed if it has a `problem`."""

    number: int
    shares: tuple[Share, ...]
    problem: str = ""

    def has(self, incarnation: Incarnation) -> bool:
        """True if the worker took part."""
        return any(share.incarnation == incarnation for share in self.shares)


class Host(NamedTuple):
    """The server that hosts collective calls, at range 0's epoch. A host never comes back."""

    server: NodeId
    assignment_epoch: AssignmentEpoch


def host_of(view: ClusterView) -> Host | None:
    """The host of collective calls: the primary of range 0, or the server with the lowest id while
    there is none, without a table or with its server gone. None without servers.
    """
    assignment_epoch = view.ranges[0].assignment_epoch if view.ranges else AssignmentEpoch(0)
    if view.ranges and view.ranges[0].primary is not None:
        return Host(view.ranges[0].primary, assignment_epoch)
    servers = [n.node_id for n in view.nodes if n.role is Role.SERVER and n.state.is_member]
    return Host(min(servers), assignment_epoch) if servers else None


def workers_here(view: ClusterView) -> dict[int, Node]:
    """Workers that are members, by rank."""
    return {n.rank: n for n in view.nodes if n.role is Role.WORKER and n.state.is_member}


def is_late_joiner(view: ClusterView, worker: Node) -> bool:
    """True if the worker registered when all first workers had."""
    return worker.rank >= view.worker_count or any(
        other.rank == worker.rank and other.incarnation < worker.incarnation
        for other in view.ended_workers
    )


def joined_after(view: ClusterView, incarnation: Incarnation) -> int | None:
    """The clock after which a late joiner has joined, the highest of all tables; None while it has
    not joined each of them, so is beyond none of the others. A restored table that nobody had
    trained by then does not count: it may be created later, at any clock.
    """
    clocks = [
        0 if join.after_clock == table.restored_clock else join.after_clock
        for table in view.tables
        for join in table.joins
        if join.incarnation == incarnation
    ]
    return max(clocks) if clocks and len(clocks) == len(view.tables) else None
