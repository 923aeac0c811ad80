"""What is watched while servers serve: who may, and what everybody has of what was seen.

Oracles:
    G2    One server serves a range: when another begins to, no lease of the one before holds any
          more, on that one's own clock, and nothing that it decided is seen from then on.
    HELD  What was seen of a range is at every server that the scheduler could name its primary; or
          that one has lost track of the range, has nothing of it, and will say so.
    LOST  A range is lost only where no server that lives has all that was seen of it.
    LIVE  Who was made primary serves when the lease that it granted can have run out everywhere,
          or waits no more, since it knows that another is.
    HEARD A backup that knows the newest view, and to which a stream lasts, has within a lease what
          was decided: what it could not take when it came is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ps_core.change import ChangeOutcome, ChangeResult
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.keys import NodeId, RangeId, TableId
from ps_server.ranges.range_copy import RangeFacts, facts_of
from ps_server.ranges.server_machine import PreparedChange

if TYPE_CHECKING:
    from tests.sim.replicated import ReplicatedServer

Place = tuple[TableId, RangeId]

PATIENCE_S = 1.0
"""That a server may take beyond a lease and its drift: ticks, and what it is doing."""
_HEARD_LEASES = 1.2
"""Half a lease until it is sent again, and what messages take."""


class Watch:
    """The oracles of one simulation.

    Args:
        servers: all there are, and were.
        view: the newest, as the scheduler has it.
        lease_s: of the cluster.
    """

    def __init__(
        self,
        servers: Mapping[NodeId, ReplicatedServer],
        view: Callable[[], ClusterView],
        lease_s: float,
    ) -> None:
        self._servers = servers
        self._view = view
        self._lease_s = lease_s
        self._newest: dict[RangeId, tuple[int, NodeId]] = {}  # term and server
        self._seen: dict[RangeId, tuple[int, int]] = {}  # term and number
        self._without: set[tuple[NodeId, RangeId]] = set()
        self._lacks: dict[tuple[NodeId, NodeId, RangeId], tuple[int, float]] = {}
        self._looked_s: dict[NodeId, float] = {}

    def begins(self, server: ReplicatedServer, range_id: RangeId) -> None:
        """The server serves the range from now on."""
        term = server.replication.primaries[range_id].log.term
        before = self._newest.get(range_id, (0, server.node_id))
        assert term > before[0], f"G2: term {term} of range {range_id} after {before}"
        self._newest[range_id] = term, server.node_id
        for other in self._servers.values():
            primary = other.replication.primaries.get(range_id)
            if other is server or primary is None or primary.log.candidates or other.is_dead:
                continue
            assert not primary.log.may_serve(other.now_s), (
                f"G2: {server.node_id} begins to serve range {range_id} and {other.node_id} still "
                "holds a lease"
            )

    def seen(self, server: ReplicatedServer, range_id: RangeId, number: int) -> None:
        """Somebody sees of the range what the server decided, up to record `number`."""
        term = server.replication.primaries[range_id].log.term
        newest = self._newest[range_id]
        assert (term, server.node_id) == newest, (
            f"G2: {server.node_id} serves range {range_id} under term {term} after {newest}"
        )
        self._seen[range_id] = term, number
        assignment = self._view().ranges[range_id]
        for node_id in {assignment.primary, *assignment.backups} - {server.node_id, None}:
            assert node_id is not None
            if self._is_without(node_id, range_id):
                continue
            has = self._history(self._servers[node_id], range_id)
            assert (term, number) <= has < (term + 1, 0), (
                f"HELD: record {number} of range {range_id} under term {term} is seen; "
                f"{node_id}, which could be its primary, has {has}"
            )

    def seen_of(self, range_id: RangeId) -> tuple[int, int] | None:
        """What was seen of a range: under which term, and up to which record; None: nothing."""
        return self._seen.get(range_id)

    @staticmethod
    def _history(server: ReplicatedServer, range_id: RangeId) -> tuple[int, int]:
        """The newest record of a range that the server has, unless it serves it: term, number."""
        replica = server.replication.replicas.get(range_id)
        if replica is not None:
            return replica.term, replica.number
        suspended = server.replication.suspended.get(range_id)
        return (0, 0) if suspended is None else (suspended.log.term, suspended.log.number)

    def lost(self, range_ids: Sequence[RangeId]) -> None:
        """The scheduler says that nobody has the values of these any more."""
        for range_id in range_ids:
            for server in self._servers.values():
                primary = server.replication.primaries.get(range_id)
                has = self._history(server, range_id)
                if primary is not None:
                    has = primary.log.term, primary.log.number
                assert server.is_dead or not (0, 0) < self._seen.get(range_id, (0, 0)) <= has, (
                    f"LOST: range {range_id} is lost, says the scheduler, though {server.node_id} "
                    f"lives and has {has} of it; {self._seen[range_id]} was seen"
                )

    def looks(self, server: ReplicatedServer, now_s: float) -> None:
        """The server looks after its backups, several times a lease; one that was paused itself has
        sent nothing meanwhile.
        """
        if now_s - self._looked_s.get(server.node_id, now_s) > self._lease_s:
            for key in [key for key in self._lacks if key[0] == server.node_id]:
                del self._lacks[key]
        self._looked_s[server.node_id] = now_s
        for range_id, primary in server.replication.primaries.items():
            log = primary.log
            for peer in log.backups:
                key, number = (server.node_id, peer, range_id), log.acked_by(peer)
                before = self._lacks.pop(key, None)
                is_behind = number < log.number and peer not in log.candidates
                if not is_behind or not self._may_hear(server, peer, range_id):
                    continue
                since_s = now_s if before is None or before[0] != number else before[1]
                self._lacks[key] = number, since_s
                assert now_s - since_s < self._lease_s * _HEARD_LEASES, (
                    f"HEARD: {peer} has range {range_id} of {server.node_id} up to record {number} "
                    f"of {log.number} since {now_s - since_s:.1f} s, and nothing is in its way"
                )

    def _may_hear(self, server: ReplicatedServer, peer: NodeId, range_id: RangeId) -> bool:
        other = self._servers[peer]
        return (
            not server.is_slow  # what it was told waits
            and peer in server.links
            and server.links[peer].is_clear
            and other.view_number == server.view_number
            and other.is_awake
            and range_id in other.replication.replicas
        )

    def prepared(self, server: ReplicatedServer, prepared: PreparedChange) -> None:
        """The scheduler is told that the server holds what is beyond a clock of a table; of one
        that was removed, which the server has not heard, that says nothing.
        """
        if prepared.table_id not in self._view().tables_by_id:
            return
        for (table_id, range_id), part in server.machine.shards.items():
            if table_id != prepared.table_id or range_id not in server.replication.primaries:
                continue
            for node_id in set(self._view().ranges[range_id].backups) - {server.node_id}:
                if self._is_without(node_id, range_id):
                    continue
                facts = self._facts(self._servers[node_id], (table_id, range_id))
                is_known = (
                    prepared.outcome is not ChangeOutcome.TAKEN
                    or (facts is not None and facts.change_number >= prepared.number)
                    or (facts is not None and facts.taken[0] >= prepared.number)
                )
                is_known = is_known or range_id != min(
                    r for t, r in server.machine.shards if t == table_id
                )
                assert facts is not None and facts.prepared >= prepared.number and is_known, (  # noqa: PT018
                    f"HELD: {prepared} of range {range_id} is told and {node_id} does not have it: "
                    f"{part.state.schedule.hold_point}"
                )

    @staticmethod
    def _facts(server: ReplicatedServer, place: Place) -> RangeFacts | None:
        """What the server knows of a part, and goes on from if it is made primary."""
        replica = server.replication.replicas.get(place[1])
        if replica is not None:
            copy = replica.copies.get(place[0])
            return None if copy is None else copy.facts
        part = server.machine.shards.get(place) or server.machine.suspended.get(place)
        return None if part is None else facts_of(part.state)

    def told(self, server: ReplicatedServer, place: Place, number: int, told: ChangeResult) -> None:
        """Somebody is told by the server what became of a change, which the range decides."""
        view = self._view()
        assignment = view.ranges[place[1]]
        for node_id in {assignment.primary, *assignment.backups} - {server.node_id, None}:
            assert node_id is not None
            if place[0] in view.tables_by_id and not self._is_without(node_id, place[1]):
                assert _knows(self._servers[node_id], place, number, told), (
                    f"HELD: change {number} of table {place[0]} is {told.outcome.value}, says "
                    f"{server.node_id}; {node_id}, which could be its range's primary, has not "
                    "heard of it"
                )

    def lost_track(self, server: ReplicatedServer, range_id: RangeId) -> None:
        """The server has left a range that it backed up."""
        self._without.add((server.node_id, range_id))

    def _is_without(self, node_id: NodeId, range_id: RangeId) -> bool:
        server = self._servers[node_id]
        return (node_id, range_id) in self._without and not self.has(server, range_id)

    def have_taken(
        self, server: ReplicatedServer, table_id: TableId, range_id: RangeId, number: int
    ) -> bool:
        """Whether all that could be primary of the range know that it took the change."""
        assignment = self._view().ranges[range_id]
        for node_id in {assignment.primary, *assignment.backups} - {server.node_id, None}:
            assert node_id is not None
            facts = self._facts(self._servers[node_id], (table_id, range_id))
            if facts is None or facts.taken[0] < number:
                return False
        return True

    def has(self, server: ReplicatedServer, range_id: RangeId) -> bool:
        """Whether the server could go on with the range."""
        replication = server.replication
        held = replication.primaries, replication.replicas, replication.suspended
        return any(range_id in ranges for ranges in held)

    def waits(self, server: ReplicatedServer, assignment: RangeAssignment, for_s: float) -> None:
        """The server has been made primary so long ago, and does not serve yet; `assignment` is
        the newest that it knows.
        """
        assert assignment.primary == server.node_id, (
            f"LIVE: {server.node_id} waits to serve range {assignment.range_id} and knows that "
            f"{assignment.primary} is its primary"
        )
        assert for_s < self._lease_s * 1.1 + PATIENCE_S, (
            f"LIVE: {server.node_id} was made primary {for_s:.1f} s ago and does not serve"
        )


def _knows(server: ReplicatedServer, place: Place, number: int, told: ChangeResult) -> bool:
    """Whether the server could not say otherwise of the change."""
    facts = Watch._facts(server, place)
    if facts is None:
        return False
    if told.outcome is ChangeOutcome.TAKEN:
        return facts.taken[0] >= number
    return facts.prepared > number or (facts.prepared == number and facts.hold_point is None)
