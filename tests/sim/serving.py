"""What is watched while servers serve: who may, and what everybody has of what was seen.

Oracles:
    G2    One server serves a range: when another begins to, no lease of the one before holds any
          more, on that one's own clock, and nothing that it decided is seen from then on.
    HELD  What was seen of a range, and what the scheduler or another server was told of it, is at
          every server that the scheduler could name its primary, when it is seen or told and when
          such a server joins; or that one has lost track of the range, has nothing of it, and will
          say so.
    LOST  A range is lost only where no server that lives has all that was seen of it.
    LIVE  Who was made primary serves when the lease that it granted can have run out everywhere,
          or waits no more, since it knows that another is.
    COPY  Who acknowledges a record has what its primary had decided by then, in a record or not.
    HEARD A backup that knows the newest view, and to which a stream lasts, has within a lease what
          was decided: what it could not take when it came is sent again. While its primary is
          paused, that sends nothing, and no time counts.
    LAG   A backup that acknowledges nothing, and whose stream takes nothing, is one that its
          primary wants to be without, after some leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ps_core.change import ChangeOutcome, ChangeResult
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.keys import NodeId, RangeId, TableId
from ps_server.ranges.range_copy import RangeFacts, facts_of
from ps_server.ranges.server_machine import PreparedChange
from tests.sim.server import TICK_S

if TYPE_CHECKING:
    from tests.sim.replicated import ReplicatedServer

Place = tuple[TableId, RangeId]

PATIENCE_S = 1.0
"""That a server may take beyond a lease and its drift: ticks, and what it is doing."""
_HEARD_LEASES = 1.2
"""Half a lease until it is sent again, and what messages take."""
_LAG_LEASES = 6.0
"""Five, and until the primary has looked."""


class _Decided(NamedTuple):
    """What a primary had decided of a table shard when its log was at a record."""

    term: int
    number: int
    facts: tuple[int, ...]


def _growing(facts: RangeFacts) -> tuple[int, ...]:
    """The facts that never get smaller."""
    return (
        facts.clock,
        facts.formed_clock,
        facts.changed_clock,
        facts.newest_join_clock,
        facts.update_count,
        facts.record_count,
        facts.change_number,
        facts.prepared,
        facts.taken[0],
    )


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
        self._prepared: dict[Place, int] = {}
        self._told: dict[Place, tuple[int, ChangeResult]] = {}
        self._decided: dict[Place, list[_Decided]] = {}  # of the newest term, by number
        self._without: set[tuple[NodeId, RangeId]] = set()
        self._lacks: dict[tuple[NodeId, NodeId, RangeId], tuple[int, float]] = {}
        self._lags: dict[tuple[NodeId, NodeId, RangeId], tuple[object, float]] = {}

    def begins(self, server: ReplicatedServer, range_id: RangeId) -> None:
        """The server serves the range from now on."""
        term = server.replication.primaries[range_id].log.term
        before = self._newest.get(range_id, (0, server.node_id))
        is_handed_over = term == before[0] and server.node_id != before[1]
        assert term > before[0] or is_handed_over, (
            f"G2: term {term} of range {range_id} after {before}"
        )
        self._newest[range_id] = term, server.node_id
        for other in self._servers.values():
            primary = other.replication.primaries.get(range_id)
            if other is server or primary is None or not primary.log.is_confirmed or other.is_dead:
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

    def deciding(self, server: ReplicatedServer, place: Place) -> Callable[[], None]:
        """The server decides on an event in a table shard. Returns what to call once it has."""
        primary = server.replication.primaries.get(place[1])
        shard = server.machine.shards.get(place)
        if primary is None or shard is None:
            return lambda: None
        log, facts = primary.log, facts_of(shard.state)
        # A change is prepared without an event; a record says so before anybody is told.
        said = server.output._told.get(place)
        prepared = 0 if said is None else min(facts.prepared, said.facts.prepared)
        workers = shard.state.by_rank.values()
        is_left = all(worker.left_clock is not None for worker in workers)
        clock = 0 if is_left else facts.clock  # who joins then may be a final seal behind it
        known = _growing(facts._replace(prepared=prepared, clock=clock))

        def decided() -> None:
            newest = _Decided(log.term, log.number + log._is_past, known)
            before = self._decided.setdefault(place, [])
            if before and before[-1].term < log.term:
                before.clear()
            while before and before[-1].term == log.term and before[-1].number >= newest.number:
                before.pop()
            if not before or before[-1].term == log.term:  # else another has begun to serve
                before.append(newest)

        return decided

    def acknowledges(self, server: ReplicatedServer, range_id: RangeId) -> None:
        """The server says of a range that it has all up to the newest record that it knows."""
        self._without.discard((server.node_id, range_id))
        replica = server.replication.replicas[range_id]
        for table_id, copy in replica.copies.items():
            all_decided = self._decided.get((table_id, range_id), ())
            has = _growing(copy.facts)
            for decided in reversed(all_decided):
                if decided.term == replica.term and decided.number <= replica.number:
                    assert all(map(int.__ge__, has, decided.facts)), (
                        f"COPY: {decided} in range {range_id} of table {table_id}; "
                        f"{server.node_id} acknowledges {replica.number} and has {has}"
                    )
                    break

    def configured(self, range_ids: Sequence[RangeId]) -> None:
        """The scheduler has given these ranges the backups that their primaries asked for."""
        view = self._view()
        for range_id in range_ids:
            seen = self._seen.get(range_id, (0, 0))
            _, serving = self._newest.get(range_id, (0, None))
            for node_id in view.ranges[range_id].backups:
                # Another transition that is told with this one may have deposed who serves it.
                if node_id == serving or self._is_without(node_id, range_id):
                    continue
                backup = self._servers[node_id]
                has = self._history(backup, range_id)
                assert has >= seen, (
                    f"HELD: {seen} of range {range_id} was seen; {node_id}, which joins, has {has}"
                )
                self._check_told(backup, range_id)

    def _check_has_told(self, backup: ReplicatedServer, place: Place) -> None:
        facts, prepared = self._facts(backup, place), self._prepared[place]
        assert facts is not None and facts.prepared >= prepared, (  # noqa: PT018
            f"HELD: change {prepared} is prepared in {place}, the scheduler was told; "
            f"{backup.node_id}, which joins, does not have it"
        )
        number, told = self._told.get(place, (0, None))
        assert told is None or _knows(backup, place, number, told), (
            f"HELD: change {number} of {place} is {told.outcome.value}, others were told; "
            f"{backup.node_id}, which joins, has not heard of it"
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

    def unplaced(self, range_ids: Sequence[RangeId]) -> None:
        """No table has values in these: nothing of what was seen of them has to be kept."""
        for range_id in range_ids:
            self._seen.pop(range_id, None)

    def looks(self, server: ReplicatedServer) -> None:
        """The server looks after its backups, as at each tick while it is not paused."""
        for range_id, primary in server.replication.primaries.items():
            log = primary.log
            for peer in log.backups:
                self._check_counts(server, peer, range_id)
                self._check_lag(server, peer, range_id)
                key, number = (server.node_id, peer, range_id), log.acked_by(peer)
                before = self._lacks.pop(key, None)
                is_behind = number < log.number and peer not in log.candidates
                if not is_behind or not self._may_hear(server, peer, range_id):
                    continue
                for_s = 0.0 if before is None or before[0] != number else before[1] + TICK_S
                self._lacks[key] = number, for_s
                assert for_s < self._lease_s * _HEARD_LEASES, (
                    f"HEARD: {peer} has range {range_id} of {server.node_id} up to record {number} "
                    f"of {log.number} for {for_s:.1f} s, and nothing is in its way"
                )

    def _check_lag(self, server: ReplicatedServer, peer: NodeId, range_id: RangeId) -> None:
        """LAG, by the looks of the server: it may be paused between two of them."""
        primaries = server.replication.primaries
        primary, key = primaries[range_id], (server.node_id, peer, range_id)
        before = self._lags.pop(key, None)
        if peer not in primary._configured or primary.log.acked_by(peer) >= primary.log.number:
            return
        if peer in primary.log.candidates and not primary.log.is_logged:
            return  # it waits for its update log, as whatever is seen of the range does (S13)
        logs = (each.log for each in primaries.values())
        acked = tuple(log.acked_by(peer) for log in logs if peer in log.backups)
        # Under another epoch it asks anew: the scheduler may have been away since it did.
        progress = _taken_bytes(server, peer), acked, primary.log.assignment_epoch
        for_s = 0.0 if before is None or before[0] != progress else before[1] + TICK_S
        self._lags[key] = progress, for_s
        is_asked = primary._asked is not None and peer not in primary._asked
        assert is_asked or for_s < self._lease_s * _LAG_LEASES, (
            f"LAG: {peer} and its stream make no progress for {for_s:.1f} s, and {server.node_id} "
            f"does not ask for range {range_id} without it"
        )

    def _check_counts(self, server: ReplicatedServer, peer: NodeId, range_id: RangeId) -> None:
        """A server that counts, and has all that was shown, has what others were told (S9)."""
        log = server.replication.primaries[range_id].log
        if self._newest.get(range_id) != (log.term, server.node_id):  # another serves it
            return
        replica = self._servers[peer].replication.replicas.get(range_id)
        is_told = peer not in log.candidates and log.acked_by(peer) >= log.shown
        if is_told and replica is not None and replica.term == log.term:
            self._check_told(self._servers[peer], range_id)

    def _check_told(self, backup: ReplicatedServer, range_id: RangeId) -> None:
        tables = self._view().tables_by_id
        for place in [p for p in self._prepared if p[1] == range_id and p[0] in tables]:
            self._check_has_told(backup, place)

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
            place = table_id, range_id
            self._prepared[place] = max(self._prepared.get(place, 0), prepared.number)
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
        self._told[place] = number, told
        for node_id in {assignment.primary, *assignment.backups} - {server.node_id, None}:
            assert node_id is not None
            if place[0] in view.tables_by_id and not self._is_without(node_id, place[1]):
                assert _knows(self._servers[node_id], place, number, told), (
                    f"HELD: change {number} of table {place[0]} is {told.outcome.value}, says "
                    f"{server.node_id}; {node_id}, which could be its range's primary, has not "
                    "heard of it"
                )

    def lost_track(self, server: ReplicatedServer, range_id: RangeId) -> None:
        """The server has left a range that it backed up; what it has once it has joined anew counts
        again.
        """
        self._without.add((server.node_id, range_id))

    def _is_without(self, node_id: NodeId, range_id: RangeId) -> bool:
        if (node_id, range_id) in self._without and self.has(self._servers[node_id], range_id):
            self._without.discard((node_id, range_id))
        return (node_id, range_id) in self._without

    def have_taken(
        self, server: ReplicatedServer, table_id: TableId, range_id: RangeId, number: int
    ) -> bool:
        """Whether all that could go on with the range know that it took the change: who has lost
        track of it could not.

        A later one says nothing of it: a server that was deposed may have taken by itself what the
        next primary gave up. Where it was taken, the scheduler said so before it proposed another.
        """
        assignment = self._view().ranges[range_id]
        for node_id in {assignment.primary, *assignment.backups} - {server.node_id, None}:
            assert node_id is not None
            if self._is_without(node_id, range_id):
                continue
            facts = self._facts(self._servers[node_id], (table_id, range_id))
            if facts is None or facts.taken[0] != number:
                return False
        return True

    def has(self, server: ReplicatedServer, range_id: RangeId) -> bool:
        """Whether the server could go on with the range."""
        replication = server.replication
        held = replication.primaries, replication.replicas, replication.suspended
        return any(range_id in ranges for ranges in held)

    def is_held(self, range_id: RangeId) -> bool:
        """Whether somebody who lives could."""
        living = (server for server in self._servers.values() if not server.is_dead)
        return any(self.has(server, range_id) for server in living)

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


def _taken_bytes(server: ReplicatedServer, peer: NodeId) -> int:
    """What the stream to the peer has taken of what waited for it."""
    queue = server.queues._queues.get(peer)
    return 0 if queue is None else queue.backlog._put_bytes - queue.backlog.queued_bytes


def _knows(server: ReplicatedServer, place: Place, number: int, told: ChangeResult) -> bool:
    """Whether the server could not say otherwise of the change."""
    facts = Watch._facts(server, place)
    if facts is None:
        return False
    if told.outcome is ChangeOutcome.TAKEN:
        return facts.taken[0] >= number
    return facts.prepared > number or (facts.prepared == number and facts.hold_point is None)
