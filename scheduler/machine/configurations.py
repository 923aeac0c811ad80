"""Who is primary of each range and who backs it up: configurations (SEMANTICS S8).

    [primary, backups]  --primary silent-->        [a live backup, the others and the one before],
                                                   under the next epoch
                        --the primary asks-->      the set that it asks for, under the next epoch
                        --its log comes back-->    [who came with it], under the next epoch
                        --it has nothing-->        [a live backup, the others], under the next epoch
    too few backups     --a server is free-->      it is named as joining; the primary brings it up
                                                   to date and then asks for it

The scheduler decides configurations and nothing else. Whether a primary may serve, its backups say
(`ps_server.replication.replication_log`, `ps_server.replication.backup`).

Rules:
    - A wish names the epoch that it starts from; if another configuration came first, it is void.
      So of a primary that lost its backup and a scheduler that lost the primary one wins. Each of a
      call's wishes is judged by itself; what no honest primary would ask for fails the whole call.
    - A promoted backup keeps the others until it asks to be without them, and before that it lets
      nobody see anything: if it is dead too, which shows later, another one takes its place. They
      may be a record behind or ahead of it, so they join anew. The primary before is one of them,
      while it is a member: it may live, and be heard late.
    - A range is placed empty. Who was given it then and has held it since (`initial_holders`) needs
      nothing to be primary or backup of it: whatever it was not told was seen by nobody, since
      every holder has what is seen. Whoever comes later is let in when it has all.
    - A primary that has nothing of a range, and may not begin it anew, says so: the other backups
      are tried, and none that was tried is asked again. Where none is left the range is lost.
    - A primary's update log has all that it committed, and who has that log has its lock: the
      primary is dead, silent or not (SEMANTICS S13).
    - Who is named as joining is so until the epoch ends or it leaves, silent or not: it gives up
      what it has when it is not named, and its primary may not learn of that in time. So silent
      ones that are too many are given up under a new epoch, from which their primary begins anew.

Invariants:
    CF-2  A primary is never its own backup, and who joins is neither.

What it deliberately does not do: move ranges for balance, or know what they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ps_core.cluster_view import BackupRequest, Node, NodeState, RangeAssignment, Role
from ps_core.errors import InvalidConfig, InvalidKeys, check
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from scheduler.machine.state import (
    BackupsSet,
    ClusterState,
    Counts,
    JoinersNamed,
    RangesFailedOver,
    RangesLost,
    Transition,
    UpdateLogClaim,
)


class Configurations:
    """The configurations of all ranges.

    Args:
        state: the cluster's.
        replica_count: servers that hold each range, the primary included.
    """

    def __init__(self, state: ClusterState, replica_count: int) -> None:
        self._state = state
        self._backup_count = replica_count - 1

    def place_backups(self, range_ids: Iterable[RangeId]) -> None:
        """Ranges that hold nothing yet have got their primaries: give them backups."""
        servers = _Servers(self._state)
        for range_id in range_ids if self._backup_count else ():
            old = self._state.ranges[range_id]
            backups = tuple(servers.free_for(old)[: self._backup_count])
            new = replace(old, backups=backups, initial_holders=(*old.initial_holders, *backups))
            servers.move(old, new)
            self._state.ranges[range_id] = new

    def look(self) -> list[Transition]:
        """Promote where a primary is silent; name servers that shall join where there are too few;
        note whose values are lost.

        To be called when servers have fallen silent, were heard again, came or left.
        """
        if self._state.finished:
            return []
        gone = [r.range_id for r in self._state.ranges if r.in_sync
                and not any(map(self._may_come_back, r.in_sync))]  # fmt: skip
        transitions = self._note_lost(gone)
        if not self._backup_count:
            return transitions
        servers = _Servers(self._state)
        everything = [assignment.range_id for assignment in self._state.ranges]
        return transitions + self._promoted(servers, everything) + self._filled(servers)

    def give_back(self, node: Node, claim: UpdateLogClaim) -> list[Transition]:
        """A server came with the update log of others, who are dead: of those ranges whose primary
        kept that log it is primary now. Who backed them up may lack something, and joins anew.

        Of a range that no backup ever took over all primaries kept this log: what is not in it
        nobody has seen, and it begins anew.
        """
        given: dict[NodeId, list[RangeId]] = {}
        for old in list(self._state.ranges):
            has_all = old.range_id in claim.range_ids or old.range_id not in self._state.failed_over
            if old.primary is None or old.primary == node.node_id or not has_all:
                continue
            before = self._state.members[old.primary].registration.update_log
            if before is not None and before.log_id == claim.log_id:
                new = replace(old, primary=node.node_id, backups=(), catching_up=(), is_lost=False)
                is_empty = old.range_id not in claim.range_ids
                self._commit(replace(new, initial_holders=(node.node_id,) if is_empty else ()))
                given.setdefault(old.primary, []).append(old.range_id)
        return [
            RangesFailedOver(
                self._state.members[lost].node, tuple(ranges), ((node.node_id, len(ranges)),)
            )
            for lost, ranges in given.items()
        ]

    @property
    def living(self) -> set[NodeId]:
        """The servers that are heard."""
        return _Servers(self._state).living

    def held_alone(self, node_id: NodeId, doubted: Collection[NodeId] = ()) -> tuple[RangeId, ...]:
        """The ranges of which no other server that lives, and is not in doubt, has all. One that
        was placed with a server that keeps an update log comes back with it, unless somebody is
        there to take it over; of one that was taken over nobody knows here whether all of it is in
        the log yet.
        """
        living = self.living - {node_id}
        sure = living.difference(doubted)
        has_log = self._state.members[node_id].registration.update_log is not None
        return tuple(
            r.range_id
            for r in self._state.ranges
            if node_id in r.in_sync
            and sure.isdisjoint(r.in_sync)
            and not (
                has_log
                and r.range_id not in self._state.failed_over
                and living.isdisjoint(r.in_sync)
            )
        )

    def set_backups(
        self, primary: NodeId, backup_requests: Sequence[BackupRequest]
    ) -> tuple[tuple[RangeId, ...], list[Transition]]:
        """A server wishes for backups of its ranges, or for another primary of those that it has
        nothing of: the ranges whose wishes are void, and what the others led to.

        Raises:
            InvalidKeys: a range does not exist, or comes twice.
            InvalidConfig: a backup was never a node, is no server, or is the caller.
        """
        self._check(primary, backup_requests)
        refused: list[RangeId] = []
        missing: list[RangeId] = []
        left_out: Counter[NodeId] = Counter()
        let_in: Counter[NodeId] = Counter()
        for asked in backup_requests:
            old = self._state.ranges[asked.range_id]
            is_present = (old.primary, old.assignment_epoch) == (primary, asked.assignment_epoch)
            if is_present and asked.is_missing:
                missing.append(asked.range_id)
                continue
            if not is_present or asked.backups - {*old.backups, *old.catching_up}:
                refused.append(asked.range_id)
                continue
            # The same set too: who asks has asked for another before, which is void from now on.
            kept = asked.backups & set(old.backups)
            # More may have joined than are missing, if one was silent for a time.
            added = sorted(asked.backups - kept)[: max(self._backup_count - len(kept), 0)]
            is_full = len(kept) + len(added) >= self._backup_count
            joining = () if is_full else tuple(n for n in old.catching_up if n not in added)
            self._commit(replace(old, backups=tuple(sorted((*kept, *added))), catching_up=joining))
            left_out.update(set(old.backups) - kept)
            let_in.update(added)
        others = {*refused, *missing}
        granted = tuple(w.range_id for w in backup_requests if w.range_id not in others)
        transitions: list[Transition] = []
        if granted:
            transitions.append(BackupsSet(primary, granted, _sorted(left_out), _sorted(let_in)))
        if missing:
            transitions += self._passed_on(primary, missing)
            ranges = self._state.ranges
            refused += [range_id for range_id in missing if ranges[range_id].primary == primary]
        return tuple(w.range_id for w in backup_requests if w.range_id in refused), transitions

    def _passed_on(self, primary: NodeId, range_ids: Sequence[RangeId]) -> list[Transition]:
        """The primary has nothing of these: other backups that live are tried. Those that nobody
        is left for are lost, which is told once.
        """
        servers = _Servers(self._state)
        servers.living.discard(primary)
        servers.members.discard(primary)  # it is not asked again
        lost = [r for r in range_ids if not self._state.ranges[r].backups]
        transitions = self._promoted(servers, [r for r in range_ids if r not in lost])
        return transitions + self._note_lost(lost)

    def _note_lost(self, range_ids: Iterable[RangeId]) -> list[Transition]:
        """Nobody has the values of these; told once."""
        lost: dict[NodeId, list[RangeId]] = {}
        for old in [self._state.ranges[range_id] for range_id in range_ids]:
            if old.primary is not None and not old.is_lost:
                self._state.ranges[old.range_id] = replace(old, is_lost=True)
                lost.setdefault(old.primary, []).append(old.range_id)
        return [
            RangesLost(self._state.members[primary].node, tuple(ids))
            for primary, ids in lost.items()
        ]

    def _may_come_back(self, node_id: NodeId) -> bool:
        """Whether what the server holds is still somewhere: it is a member, silent perhaps, or left
        an update log, with which another may come.
        """
        member = self._state.members[node_id]
        return member.node.state.is_member or member.registration.update_log is not None

    def _check(self, primary: NodeId, backup_requests: Sequence[BackupRequest]) -> None:
        ranges = self._state.ranges
        counts = Counter(asked.range_id for asked in backup_requests)
        for asked in backup_requests:
            if not 0 <= asked.range_id < len(ranges):
                raise InvalidKeys(f"range_id is {asked.range_id}; expected 0 to {len(ranges) - 1}")
            if counts[asked.range_id] > 1:
                raise InvalidKeys(f"range {asked.range_id} comes twice; expected each range once")
            if asked.is_missing and asked.backups:
                raise InvalidConfig(
                    f"range {asked.range_id} is missing, and backups "
                    f"{sorted(asked.backups)} are wanted; expected none"
                )
            for node_id in sorted(asked.backups):
                self._check_backup(primary, asked.range_id, node_id)

    def _check_backup(self, primary: NodeId, range_id: RangeId, node_id: NodeId) -> None:
        wanted = f"range {range_id}: node {node_id} is wanted as a backup"
        if node_id == primary:
            raise InvalidConfig(f"{wanted} by itself; a primary is never its own backup")
        if not 1 <= node_id < self._state.next_node_id:
            raise InvalidConfig(f"{wanted}; no such node was ever registered")
        member = self._state.members.get(node_id)  # None: it has left, and is forgotten
        if member is not None and member.node.role is not Role.SERVER:
            raise InvalidConfig(f"{wanted}; it is a {member.node.role.value}, expected a server")

    def _promoted(self, servers: _Servers, range_ids: Iterable[RangeId]) -> list[Transition]:
        """Those of the ranges whose primary does not live have another, if a backup lives."""
        taken: dict[NodeId, dict[RangeId, NodeId]] = {}
        for old in [self._state.ranges[range_id] for range_id in range_ids]:
            if old.primary is None or old.primary in servers.living:
                continue
            living = [node_id for node_id in old.backups if node_id in servers.living]
            if not living:
                continue
            chosen = min(living, key=servers.load)
            others = [node_id for node_id in old.backups if node_id != chosen]
            if old.primary in servers.members:  # it may live, and has all
                others.append(old.primary)
            new = replace(old, primary=chosen, backups=tuple(sorted(others)), catching_up=())
            servers.move(old, new)
            self._commit(new)
            self._state.failed_over.add(old.range_id)
            taken.setdefault(old.primary, {})[old.range_id] = chosen
        return [
            RangesFailedOver(
                self._state.members[lost].node, tuple(ranges), _sorted(Counter(ranges.values()))
            )
            for lost, ranges in taken.items()
        ]

    def _commit(self, assignment: RangeAssignment) -> None:
        """The configuration holds, under the next epoch."""
        all_of_them = assignment.holders
        check(len(set(all_of_them)) == len(all_of_them), "CF-2", f"{all_of_them}")
        before = self._state.ranges[assignment.range_id]
        assignment_epoch = AssignmentEpoch(assignment.assignment_epoch + 1)
        self._state.ranges[assignment.range_id] = replace(
            assignment,
            assignment_epoch=assignment_epoch,
            term=before.term if before.primary == assignment.primary else assignment_epoch,
            initial_holders=tuple(n for n in assignment.initial_holders if n in assignment.in_sync),
        )

    def _filled(self, servers: _Servers) -> list[Transition]:
        """Ranges with too few backups have others that join, beside who joins and is silent."""
        named: Counter[NodeId] = Counter()
        dropped: Counter[NodeId] = Counter()
        for old in self._state.ranges:
            if old.primary is None or old.primary not in servers.living:
                continue
            joining = [node_id for node_id in old.catching_up if node_id in servers.members]
            living_count = sum(node_id in servers.living for node_id in joining)
            missing = self._backup_count - len(old.backups) - living_count
            added = servers.free_for(old)[:missing] if missing > 0 else []
            is_too_much = len(old.backups) + len(joining) + len(added) > 2 * self._backup_count
            if is_too_much:  # for a view: the silent are given up, and what they were told is void
                joining = [node_id for node_id in joining if node_id in servers.living]
            if not added and len(joining) == len(old.catching_up):
                continue
            new = replace(old, catching_up=(*joining, *added))
            servers.move(old, new)
            self._state.ranges[old.range_id] = new
            if is_too_much:
                self._commit(new)
            named.update(added)
            dropped.update(set(old.catching_up) - set(joining))
        return [JoinersNamed(_sorted(named), _sorted(dropped))] if named or dropped else []


class _Servers:
    """Who lives, and how many ranges each holds, while configurations are decided."""

    def __init__(self, state: ClusterState) -> None:
        nodes = state.nodes_of(Role.SERVER)
        self.living = {node.node_id for node in nodes if node.state is NodeState.ALIVE}
        self.members = {node.node_id for node in nodes if node.state.is_member}
        self._counts = Counter(node_id for r in state.ranges for node_id in r.holders)

    def load(self, node_id: NodeId) -> tuple[int, NodeId]:
        """In the order of this: who holds least first, then by id."""
        return self._counts[node_id], node_id

    def free_for(self, assignment: RangeAssignment) -> list[NodeId]:
        """Living servers that hold nothing of the range, who hold least first."""
        return sorted(self.living.difference(assignment.holders), key=self.load)

    def move(self, old: RangeAssignment, new: RangeAssignment) -> None:
        """A range goes from one configuration to another."""
        self._counts.subtract(old.holders)
        self._counts.update(new.holders)


def _sorted(counts: Counter[NodeId]) -> Counts:
    return tuple(sorted(counts.items()))
