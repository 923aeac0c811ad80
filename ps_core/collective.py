"""Rounds of collective calls as values: what a worker gives, and what all are given.

Rules:
    - A round has one share of each worker in it, in the order of their ranks.
    - A worker that joins while others train takes part in rounds of those who are beyond the clock
      after which it has joined: until then they are in what they began without it.

What it deliberately does not do: look at payloads (`ps_worker.collectives.values` does), or decide
when a round ends (`ps_server.ranges.collectives` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ps_core.cluster_view import ClusterView, Node, Role
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId

_SHARE_BYTES = 32
"""Of a message: a share's numbers, and where its texts begin."""

WAITS_FOR = "it waits for"
"""So a host begins to say for whom a round waits."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker gives: `call` says which call it is in, `clock` is the newest clock that it
    has sealed on any table.
    """

    rank: int
    incarnation: Incarnation
    call: str
    clock: int = 0
    payload: bytes = b""

    @property
    def byte_count(self) -> int:
        """What it counts for the limits."""
        return len(self.call.encode()) + len(self.payload) + _SHARE_BYTES


@dataclass(frozen=True, slots=True)
class Round:
    """A round that has ended; with a `problem` it came to nothing."""

    number: int
    shares: tuple[Share, ...]
    problem: str = ""

    def has(self, incarnation: Incarnation) -> bool:
        """Whether that worker was in it."""
        return any(share.incarnation == incarnation for share in self.shares)


class Host(NamedTuple):
    """Where collective calls meet: a server, and range 0's epoch. No host ever comes back."""

    server: NodeId
    assignment_epoch: AssignmentEpoch


def host_of(view: ClusterView) -> Host | None:
    """Where collective calls meet: at the primary of range 0; while nobody is, because there is no
    table yet or its server is gone, at the server that came first. None if there is no server.
    """
    assignment_epoch = view.ranges[0].assignment_epoch if view.ranges else AssignmentEpoch(0)
    if view.ranges and view.ranges[0].primary is not None:
        return Host(view.ranges[0].primary, assignment_epoch)
    servers = [n.node_id for n in view.nodes if n.role is Role.SERVER and n.state.is_member]
    return Host(min(servers), assignment_epoch) if servers else None


def workers_here(view: ClusterView) -> dict[int, Node]:
    """The workers whose membership has not ended, by rank."""
    return {n.rank: n for n in view.nodes if n.role is Role.WORKER and n.state.is_member}


def is_late_joiner(view: ClusterView, worker: Node) -> bool:
    """Whether a worker came to a cluster that had all its workers."""
    return worker.rank >= view.worker_count or any(
        other.rank == worker.rank and other.incarnation < worker.incarnation
        for other in view.ended_workers
    )


def joined_after(view: ClusterView, incarnation: Incarnation) -> int | None:
    """The clock after which a newcomer has joined, the highest of all tables; None where it has not
    joined each of them: it is beyond none of the others then.
    """
    clocks = [
        join.after_clock
        for table in view.tables
        for join in table.joins
        if join.incarnation == incarnation
    ]
    return max(clocks) if clocks and len(clocks) == len(view.tables) else None
