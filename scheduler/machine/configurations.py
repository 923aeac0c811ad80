"""Configurations of ranges: the primary, its backups, and the servers that catch up (SEMANTICS S8).

    [primary, backups]  --primary silent-->       [a live backup, the others and the old primary]
                        --primary requests-->     the requested set
                        --primary hands over-->   [the backup that it names, the others and itself]
                        --its log comes back-->   [the server that came with the log]
                        --it is missing values--> [a live backup, the others]
    no holder returns   --it has no values-->     no primary, until the next table places it anew
    too few backups     --a server is free-->     it catches up; the primary requests it afterwards

Each of the first six begins another epoch. The scheduler only decides configurations; backups
decide whether a primary may serve (`ps_server.replication`).

Rules:
    - A backup request names the epoch that it starts from, and is void after another configuration.
      So if a primary loses its backup and the scheduler loses the primary, one of both wins. Each
      request of a call is judged by itself; one that no correct primary would send fails the call.
    - A promoted backup keeps the others until it requests to drop them, and shows no values before
      that: if it is dead too, another one is promoted. The others may lag or lead it by a record
      and catch up anew. The old primary is one of them while it is a member, because it may live.
    - A range is placed empty. Its first holders (`initial_holders`) may be primary or backup
      without catching up: every holder has whatever was seen, so what they missed nobody saw. A
      later holder is let in when it has everything.
    - A primary that is missing the values of a range reports it: the other backups are tried, each
      once. When none is left that may come back, the range is lost.
    - A range without values (a removed run had them) is never lost. Once no holder is a member it
      has no primary any more: nobody waits for their logs. When it is placed again, the new
      `placed_epoch` tells who held it, or comes with a log of it, that it is empty.
    - A primary's update log has everything that it committed. A server that has the log has its
      lock, so the old primary is dead, silent or not (SEMANTICS S13); `admission` refuses a copy.
    - A promoted backup that others hold the range beside has acknowledged nothing before its first
      request is granted. Until then the range comes back with the former primary's log, too, and
      with the log of whoever was promoted since, if it has the range under such a term: both have
      all that was acknowledged.
    - A server catches up until the epoch ends or it leaves, silent or not, because it drops its
      values once it is not named, which the primary may not learn in time. Too many silent ones
      are therefore dropped under a new epoch, from which the primary begins again.
    - A live server that a primary had left out may not reach it. Others are named before it, and
      beside it, until that primary lets it in to some range. This is a preference: a scheduler that
      starts again has forgotten it.
    - Primaries are spread evenly again (`HandOvers`): a primary is advised to hand a range over,
      and does so by a request. A request that cannot be granted begins another epoch all the same:
      the primary has stopped, and goes on under that one. Where the target is to be copied to
      first, the range has one backup more than it needs for a time, and never one less.
    - A hand-over takes two epochs, so that a range that comes back has passed three: the former
      primary has given up what it had not decided (SEMANTICS S8).

Invariants:
    CF-2  A primary is never its own backup, and a server that catches up is neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ps_core.cluster_view import (
    HAND_OVER_FEATURE,
    BackupRequest,
    Node,
    NodeState,
    RangeAssignment,
    Role,
)
from ps_core.errors import InvalidConfig, InvalidKeys, check
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from scheduler.machine import placement
from scheduler.machine.server_memory import Space
from scheduler.machine.state import (
    BackupsSet,
    BackupsSpared,
    ClusterState,
    Counts,
    HandOversAdvised,
    JoinersNamed,
    LogSource,
    RangesFailedOver,
    RangesHandedOver,
    RangesLost,
    RangesUnplaced,
    Transition,
    UpdateLogClaim,
)

_AT_ONCE = 4
"""Ranges that are handed over at a time: the others go on meanwhile."""

_PAUSE_LEASES = 1
"""Leases between two of these: a step may wait for each."""

_QUIET_LEASES = 3
"""Leases in which no server came, fell silent or caught up, before ranges are handed over."""

_ADVICE_LEASES = 3
"""Leases that a primary has to hand a range over to one of its backups."""

_COPY_LEASES = 200
"""Leases in which the target of a range must have become a backup."""

_HAND_OVER_EPOCHS = 2

_REST_LEASES, _MOST_DOUBLINGS = 4, 6
"""Leases without advice after some that was not followed; twice as many each time."""


class Configurations:
    """The configurations of all ranges."""

    def __init__(self, state: ClusterState, replica_count: int) -> None:
        self._state = state
        self._backup_count = replica_count - 1
        self._apart: set[tuple[NodeId, NodeId]] = set()  # primaries, and whom they had left out

    def place_backups(self, range_ids: Iterable[RangeId]) -> None:
        """Give backups to ranges whose primaries were just placed."""
        servers = _Servers(self._state)
        for range_id in range_ids if self._backup_count else ():
            old = self._state.ranges[range_id]
            backups = tuple(servers.free_for(old)[: self._backup_count])
            new = replace(old, backups=backups, initial_holders=(*old.initial_holders, *backups))
            servers.move(old, new)
            self._state.ranges[range_id] = new

    def look(self) -> list[Transition]:
        """Promote backups of silent primaries, let servers catch up where backups are too few, and
        note ranges that no server will bring back: after a server fell silent, was heard again,
        registered or left.
        """
        if self._state.finished:
            return []
        gone = [r.range_id for r in self._state.ranges if r.in_sync and self._is_gone(r)]
        transitions = self._give_up(gone)
        if not self._backup_count:
            return transitions
        servers = _Servers(self._state)
        everything = [assignment.range_id for assignment in self._state.ranges]
        return transitions + self._promoted(servers, everything) + self._filled(servers)

    def give_back(self, node: Node, claim: UpdateLogClaim) -> list[Transition]:
        """A server that came with an update log becomes primary of the ranges of the log's former
        primary. Their backups may lack updates, and catch up anew.

        A range that was never failed over had only primaries with this log. If the log lacks it,
        nobody has seen values of it, and it begins empty. So it is with a range that was placed
        anew since the log had it.
        """
        given: dict[NodeId, list[RangeId]] = {}
        for old in list(self._state.ranges):
            if old.primary is None or old.primary == node.node_id:
                continue
            since = self._given_since(old, old.primary, claim)
            if since is not None:
                new = replace(old, primary=node.node_id, backups=(), catching_up=(), is_lost=False)
                is_empty = not claim.has(old)
                self._commit(replace(new, initial_holders=(node.node_id,) if is_empty else ()))
                self._state.log_sources[old.range_id] = LogSource(node.node_id, since)
                given.setdefault(old.primary, []).append(old.range_id)
        return [
            RangesFailedOver(
                self._state.members[lost].node, tuple(ranges), ((node.node_id, len(ranges)),)
            )
            for lost, ranges in given.items()
        ]

    def _given_since(
        self, old: RangeAssignment, primary: NodeId, claim: UpdateLogClaim
    ) -> AssignmentEpoch | None:
        """The epoch since which the claimed log has all that was acknowledged of a range, however
        little it has; None if it may lack something.
        """
        source = self._source(old, primary)
        if self._had_log(source.node_id, claim):
            has_all = claim.has(old, source.since) or old.range_id not in self._state.failed_over
            return source.since if has_all else None
        promoted_epoch = source.promoted_epoch
        if promoted_epoch is None or not claim.has(old, promoted_epoch):
            return None
        is_of_one = any(self._had_log(node_id, claim) for node_id in old.in_sync)
        return promoted_epoch if is_of_one else None

    def _had_log(self, node_id: NodeId, claim: UpdateLogClaim) -> bool:
        member = self._state.members.get(node_id)
        before = None if member is None else member.registration.update_log
        return before is not None and before.log_id == claim.log_id

    def _source(self, assignment: RangeAssignment, primary: NodeId) -> LogSource:
        found = self._state.log_sources.get(assignment.range_id)
        return found or LogSource(primary, assignment.term)

    def _source_id(self, assignment: RangeAssignment) -> NodeId | None:
        found = self._state.log_sources.get(assignment.range_id)
        return assignment.primary if found is None else found.node_id

    @property
    def living(self) -> set[NodeId]:
        return _Servers(self._state).living

    def held_alone(self, node_id: NodeId, doubted: Collection[NodeId] = ()) -> tuple[RangeId, ...]:
        """Ranges with values, of a server, that no other live server outside `doubted` holds in
        sync.

        Without the ranges that come back with the server's update log: no live server would take
        them over, and none ever was failed over. A failed-over range may not be in the log yet.
        """
        living = self.living - {node_id}
        sure = living.difference(doubted)
        has_log = self._state.members[node_id].registration.update_log is not None
        return tuple(
            r.range_id
            for r in self._state.ranges
            if node_id in r.in_sync
            and sure.isdisjoint(r.in_sync)
            and self._state.range_bytes.get(r.range_id)
            and not (
                has_log
                and r.range_id not in self._state.failed_over
                and self._source_id(r) == node_id
                and living.isdisjoint(r.in_sync)
            )
        )

    def in_log_alone(self, node_id: NodeId) -> tuple[RangeId, ...]:
        """Ranges with values, of a server, that no other live server holds in sync, and that come
        back with its update log.
        """
        lost, others = set(self.held_alone(node_id)), self.living - {node_id}
        return tuple(
            r.range_id
            for r in self._state.ranges
            if node_id in r.in_sync and others.isdisjoint(r.in_sync)
            if self._state.range_bytes.get(r.range_id) and r.range_id not in lost
        )

    def set_backups(
        self,
        primary: NodeId,
        backup_requests: Sequence[BackupRequest],
        *,
        may_hand_over: bool = False,
    ) -> tuple[tuple[RangeId, ...], list[Transition]]:
        """A primary requests backups of its ranges, or another primary of ranges whose values it is
        missing, or that it hands over. Returns the ranges whose requests are void, and the
        transitions of the others.
        """
        self._check(primary, backup_requests)
        servers, targets = _Servers(self._state), dict[RangeId, NodeId]()
        refused: list[RangeId] = []
        missing: list[RangeId] = []
        left_out: Counter[NodeId] = Counter()
        far: set[NodeId] = set()
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
            target = asked.hand_over_to
            if may_hand_over and target is not None and self._may_take(target, old, asked, servers):
                self._hand_over(old, target, servers)
                targets[asked.range_id] = target
                continue
            # A request for the present set is granted too: it voids the primary's earlier one.
            kept = asked.backups & set(old.backups)
            # More may have caught up than are missing, if one was silent for a time.
            added = self._let_in(old, asked.backups - kept, len(kept))
            is_full = len(kept) + len(added) >= self._backup_count
            joining = () if is_full else tuple(n for n in old.catching_up if n not in added)
            backups, target = tuple(sorted((*kept, *added))), old.hand_over_to
            target = target if may_hand_over else None
            self._commit(replace(old, backups=backups, catching_up=joining, hand_over_to=target))
            is_first = self._is_unconfirmed(asked.range_id)  # it leaves out all others
            self._confirm(asked.range_id, primary)
            left_out.update(set(old.backups) - kept)
            far.update(() if is_first else set(old.backups) - kept)
            let_in.update(added)
        if far or let_in:
            self._keep_apart(primary, far, let_in.keys())
        others = {*refused, *missing, *targets}
        granted = tuple(w.range_id for w in backup_requests if w.range_id not in others)
        transitions: list[Transition] = []
        if granted:
            transitions.append(BackupsSet(primary, granted, _sorted(left_out), _sorted(let_in)))
        if targets:
            taken = _sorted(Counter(targets.values()))
            transitions.append(RangesHandedOver(primary, tuple(targets), taken))
        if missing:
            transitions += self._passed_on(primary, missing)
            ranges = self._state.ranges
            refused += [range_id for range_id in missing if ranges[range_id].primary == primary]
        return tuple(w.range_id for w in backup_requests if w.range_id in refused), transitions

    def _let_in(
        self, old: RangeAssignment, caught_up: AbstractSet[NodeId], kept_count: int
    ) -> list[NodeId]:
        """The servers that become backups: as many as are missing, and the target."""
        target = old.hand_over_to
        first = [target] if target is not None and target in caught_up else []
        missing = max(self._backup_count - kept_count - len(first), 0)
        return first + sorted(caught_up - {target})[:missing]

    # --- hand-overs

    def _may_take(
        self, target: NodeId, old: RangeAssignment, asked: BackupRequest, servers: _Servers
    ) -> bool:
        """True if the target may be primary now: it has everything, as all others have."""
        is_same = asked.backups == set(old.backups) and not old.catching_up
        return is_same and target in old.backups and target in servers.living

    def _hand_over(self, old: RangeAssignment, target: NodeId, servers: _Servers) -> None:
        """All others stay backups: one may be dead by now. See `spare`."""
        others = [node_id for node_id in old.in_sync if node_id != target]
        new = replace(old, primary=target, backups=tuple(sorted(others)))
        servers.move(old, new)
        self._commit(new, is_handed_over=True)
        self._state.log_sources.pop(old.range_id, None)
        self._state.failed_over.add(old.range_id)

    def advise(self, targets: Mapping[RangeId, NodeId | None]) -> list[Transition]:
        """Advise primaries to hand ranges over, or not to any more (None). A target that is no
        backup catches up first. One that shall not any more is dropped under a new epoch, unless
        it may replace a backup that is not alive.
        """
        named, living = Counter[NodeId](), self.living
        for range_id, target in targets.items():
            old = self._state.ranges[range_id]
            if target is None:
                new = replace(old, hand_over_to=None)
                is_needed = len(living.intersection(old.backups)) < self._backup_count
                if not is_needed or old.hand_over_to not in living:
                    kept = tuple(n for n in old.catching_up if n != old.hand_over_to)
                    new = replace(new, catching_up=kept)
                self._state.ranges[range_id] = new
                if new.catching_up != old.catching_up:
                    self._commit(new)
                continue
            joining = () if target in old.backups else (target,)
            self._state.ranges[range_id] = replace(old, hand_over_to=target, catching_up=joining)
            named[target] += 1
        withdrawn_count = sum(target is None for target in targets.values())
        return [HandOversAdvised(_sorted(named), withdrawn_count)] if targets else []

    def spare(self, range_ids: Iterable[RangeId]) -> list[Transition]:
        """Leave out backups beyond those that are needed, on the servers with most ranges."""
        servers, spared = _Servers(self._state), Counter[NodeId]()
        for old in [self._state.ranges[range_id] for range_id in range_ids]:
            if len(old.backups) <= self._backup_count:
                continue
            kept = self._needed(old, servers)
            new = replace(old, backups=tuple(sorted(kept)))
            servers.move(old, new)
            self._commit(new)
            spared.update(set(old.backups) - set(kept))
        return [BackupsSpared(_sorted(spared))] if spared else []

    def _needed(self, assignment: RangeAssignment, servers: _Servers) -> list[NodeId]:
        """The backups of a range without those beyond the need."""
        target, living = assignment.hand_over_to, servers.living

        def last(node_id: NodeId) -> tuple[bool, bool, tuple[int, NodeId]]:
            return node_id == target, node_id not in living, servers.load(node_id)

        return sorted(assignment.backups, key=last)[: self._backup_count]

    def needed_holders(self) -> list[set[NodeId]]:
        """The servers that hold each range, or are to, whether it is handed over or not."""
        servers, found = _Servers(self._state), []
        for each in self._state.ranges:
            backups = self._needed(each, servers)
            joining = {*each.catching_up} - {each.hand_over_to}
            found.append({n for n in (each.primary, *backups, *joining) if n is not None})
        return found

    def is_apart(self, primary: NodeId | None, node_id: NodeId) -> bool:
        """True if a server may not reach a primary, which had left it out."""
        return (primary, node_id) in self._apart

    def is_whole(self, assignment: RangeAssignment, living: AbstractSet[NodeId]) -> bool:
        """True if a range has all the backups that it can have, all of them live, and its primary
        may acknowledge something.
        """
        needed = min(self._backup_count, len(living) - 1)
        target = assignment.hand_over_to
        return (
            0 < needed <= len(assignment.backups)
            and not set(assignment.in_sync) - living
            and not (living & {*assignment.catching_up}) - {target}
            and not self._is_unconfirmed(assignment.range_id)
        )

    def _keep_apart(
        self, primary: NodeId, left_out: AbstractSet[NodeId], let_in: AbstractSet[NodeId]
    ) -> None:
        """Note whom a primary left out though it lives, and forget whom it let in, or has left."""
        self._apart |= {(primary, node_id) for node_id in left_out & self.living}
        self._apart -= {(primary, node_id) for node_id in let_in}
        members = self._state.members
        self._apart = {pair for pair in self._apart if all(node_id in members for node_id in pair)}

    def _confirm(self, range_id: RangeId, primary: NodeId) -> None:
        """The primary may acknowledge something from now on."""
        source = self._state.log_sources.get(range_id)
        if source is None or source.promoted_epoch is None:
            return
        if source.node_id == primary:  # it was promoted again
            self._state.log_sources[range_id] = replace(source, promoted_epoch=None)
        else:
            del self._state.log_sources[range_id]
            self._state.failed_over.add(range_id)

    def _is_unconfirmed(self, range_id: RangeId) -> bool:
        """True if the primary was promoted, and has not been granted a request since."""
        source = self._state.log_sources.get(range_id)
        return source is not None and source.promoted_epoch is not None

    def _passed_on(self, primary: NodeId, range_ids: Sequence[RangeId]) -> list[Transition]:
        """Try other live backups where the primary is missing the values; the rest is lost, unless
        a former primary's log may have it. Where there are none, nobody has to be tried.
        """
        servers = _Servers(self._state)
        servers.living.discard(primary)
        servers.members.discard(primary)  # it is not asked again
        ranges, held = self._state.ranges, self._state.range_bytes
        lost = [
            r
            for r in range_ids
            if not held.get(r)
            or not (
                any(map(self._may_come_back, ranges[r].backups))
                or (self._source_id(ranges[r]) != primary and self._has_log_of_source(ranges[r]))
            )
        ]
        transitions = self._promoted(servers, [r for r in range_ids if r not in lost])
        return transitions + self._give_up(lost)

    def _give_up(self, range_ids: Iterable[RangeId]) -> list[Transition]:
        """No server will bring these back: they are lost, noted once, or unplaced if empty."""
        lost: dict[NodeId, list[RangeId]] = {}
        unplaced: dict[NodeId, list[RangeId]] = {}
        for old in [self._state.ranges[range_id] for range_id in range_ids]:
            if old.primary is None:
                continue
            if not self._state.range_bytes.get(old.range_id):
                gone = replace(old, primary=None, backups=(), catching_up=(), is_lost=False)
                self._commit(gone)
                self._state.failed_over.discard(old.range_id)
                self._state.log_sources.pop(old.range_id, None)
                unplaced.setdefault(old.primary, []).append(old.range_id)
            elif not old.is_lost:
                self._state.ranges[old.range_id] = replace(old, is_lost=True)
                lost.setdefault(old.primary, []).append(old.range_id)
        members = self._state.members
        return [
            *(RangesUnplaced(members[each].node, tuple(ids)) for each, ids in unplaced.items()),
            *(RangesLost(members[each].node, tuple(ids)) for each, ids in lost.items()),
        ]

    def _is_gone(self, assignment: RangeAssignment) -> bool:
        """True if nobody will bring a range back. Where there are no values, nobody waits for an
        update log: what it has of the range is of removed tables.
        """
        has_values = self._state.range_bytes.get(assignment.range_id)
        is_awaited = self._may_come_back if has_values else self._is_member
        if has_values and self._has_log_of_source(assignment):
            return False
        return not any(map(is_awaited, assignment.in_sync))

    def _may_come_back(self, node_id: NodeId) -> bool:
        """True if a server's values may still exist: it may live, or another may bring its log."""
        return self._has_log(node_id) or self._is_member(node_id)

    def _has_log_of_source(self, assignment: RangeAssignment) -> bool:
        """True if a server may still come with the log of the range's last primary (S13)."""
        return self._has_log(self._source_id(assignment))

    def _has_log(self, node_id: NodeId | None) -> bool:
        member = None if node_id is None else self._state.members.get(node_id)
        return member is not None and member.registration.update_log is not None

    def _is_member(self, node_id: NodeId) -> bool:
        return self._state.members[node_id].node.state.is_member

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
            if asked.hand_over_to is not None and asked.hand_over_to not in asked.backups:
                raise InvalidConfig(
                    f"range {asked.range_id} is handed over to node {asked.hand_over_to}; expected "
                    f"one of its backups, {sorted(asked.backups)}"
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
        """Promote a live backup of each of the ranges whose primary is not alive."""
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
            source = self._source(old, old.primary)
            self._commit(new)
            if source.promoted_epoch is None:
                promoted_epoch = self._state.ranges[old.range_id].assignment_epoch
                source = replace(source, promoted_epoch=promoted_epoch)
            self._state.log_sources[old.range_id] = source
            if not new.backups and not self._has_log(chosen):  # it asks for nothing
                self._confirm(old.range_id, chosen)
            taken.setdefault(old.primary, {})[old.range_id] = chosen
        return [
            RangesFailedOver(
                self._state.members[lost].node, tuple(ranges), _sorted(Counter(ranges.values()))
            )
            for lost, ranges in taken.items()
        ]

    def _commit(self, assignment: RangeAssignment, *, is_handed_over: bool = False) -> None:
        all_of_them = assignment.holders
        check(len(set(all_of_them)) == len(all_of_them), "CF-2", f"{all_of_them}")
        before = self._state.ranges[assignment.range_id]
        epochs = _HAND_OVER_EPOCHS if is_handed_over else 1
        assignment_epoch = AssignmentEpoch(assignment.assignment_epoch + epochs)
        goes_on = is_handed_over or before.primary == assignment.primary
        target = assignment.hand_over_to
        has_come = target in assignment.backups and target not in before.backups
        self._state.ranges[assignment.range_id] = replace(
            assignment,
            assignment_epoch=assignment_epoch,
            term=before.term if goes_on else assignment_epoch,
            hand_over_to=target if has_come else None,
            initial_holders=tuple(n for n in assignment.initial_holders if n in assignment.in_sync),
        )

    def _filled(self, servers: _Servers) -> list[Transition]:
        """Let more servers catch up on ranges with too few backups; silent ones do not count."""
        named: Counter[NodeId] = Counter()
        dropped: Counter[NodeId] = Counter()
        for old in self._state.ranges:
            if old.primary is None or old.primary not in servers.living:
                continue
            joining = [node_id for node_id in old.catching_up if node_id in servers.members]
            added = self._added(old, old.primary, servers)
            is_too_much = len(old.backups) + len(joining) + len(added) > 2 * self._backup_count
            if is_too_much and self._is_unconfirmed(old.range_id):
                continue  # its next epoch tells the primary that it is confirmed
            if is_too_much:  # for a view (VS-1): drop the silent, and void their epoch
                joining = [node_id for node_id in joining if node_id in servers.living]
                if len(old.backups) + len(joining) + len(added) > 2 * self._backup_count:
                    joining = [n for n in joining if (old.primary, n) not in self._apart]
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

    def _added(self, old: RangeAssignment, primary: NodeId, servers: _Servers) -> list[NodeId]:
        """Further servers that are to catch up; those that may not reach the primary come last."""
        missing = self._backup_count - len(old.backups)
        if missing <= 0:
            return []
        free, named = servers.free_for(old), servers.living.intersection(old.catching_up)
        far = {node_id for node_id in (*free, *named) if (primary, node_id) in self._apart}
        missing = max(missing - len(named - far), 0)
        added = [node_id for node_id in free if node_id not in far][:missing]
        missing = max(missing - len(added) - len(named & far), 0)
        return added + [node_id for node_id in free if node_id in far][:missing]


class HandOvers:
    """Advice to primaries, so that the primaries' bytes are spread evenly over the servers.

    Nothing is advised while anything else moves: before membership has been quiet for some leases,
    and every range with values is whole. A few ranges are handed over at a time.
    """

    def __init__(self, state: ClusterState, configurations: Configurations, lease_s: float) -> None:
        self._state = state
        self._configurations = configurations
        self._lease_s = lease_s
        self._living: set[NodeId] | None = None
        self._quiet_s = 0.0  # from when on nothing has moved for long enough
        self._late_s: dict[RangeId, tuple[bool, float]] = {}  # target is a backup; until when
        self._late_count = 0  # how often in a row advice was not followed
        self._late_ranges: set[tuple[RangeId, NodeId]] = set()  # that a backup did not take in time
        self._late_pairs: set[tuple[NodeId, NodeId]] = (
            set()
        )  # of primaries, and whom they copied to
        self._even_view = 0  # the view with which there was nothing to do

    def look(self, now_s: float, *, is_busy: bool) -> list[Transition]:
        """Advise what is due. To be called several times a lease.

        Args:
            is_busy: a change of a table or a checkpoint is under way, or a server is stopping.
        """
        living, ranges = self._configurations.living, self._state.ranges
        advised = {r.range_id: r for r in ranges if r.hand_over_to is not None}
        if living != self._living or not self._is_steady(living):
            if living != self._living:
                self._late_ranges, self._late_pairs = set(), set()
            self._living, self._quiet_s = living, now_s + _QUIET_LEASES * self._lease_s
            return self._configurations.advise(dict.fromkeys(advised))
        stopped = [r.range_id for r in advised.values() if r.hand_over_to in r.backups]
        if is_busy and stopped:  # what is under way would wait for them
            return self._configurations.advise(dict.fromkeys(stopped))
        late = self._late(advised.values(), now_s)
        if late:
            leases = _REST_LEASES << min(self._late_count, _MOST_DOUBLINGS)
            self._late_count, self._late_s = self._late_count + 1, {}
            self._quiet_s = now_s + leases * self._lease_s
            self._put_off(advised[range_id] for range_id in late)
            return self._configurations.advise(dict.fromkeys(late))
        if is_busy or advised or now_s < self._quiet_s:
            return []
        return self._next(living)

    def _is_steady(self, living: set[NodeId]) -> bool:
        held = self._state.range_bytes
        return all(map(self._can_hand_over, living)) and all(
            self._configurations.is_whole(r, living)
            for r in self._state.ranges
            if held.get(r.range_id)
        )

    def _can_hand_over(self, node_id: NodeId) -> bool:
        """False for an older server, and for one with an update log: as primary it would serve
        nothing before the log has all of the range.
        """
        registration = self._state.members[node_id].registration
        return HAND_OVER_FEATURE in registration.features and registration.update_log is None

    def _late(self, advised: Collection[RangeAssignment], now_s: float) -> list[RangeId]:
        """Ranges whose primary has not followed its advice in time."""
        before, self._late_s = self._late_s, {}
        if not advised and before:  # all were handed over, or could not be
            self._late_count = 0
            self._quiet_s = max(self._quiet_s, now_s + _PAUSE_LEASES * self._lease_s)
        for each in advised:
            is_backup = each.hand_over_to in each.backups
            leases = _ADVICE_LEASES if is_backup else _COPY_LEASES
            until_s = is_backup, now_s + leases * self._lease_s
            known = before.get(each.range_id, until_s)
            self._late_s[each.range_id] = known if known[0] == is_backup else until_s
        return [range_id for range_id, (_, until_s) in self._late_s.items() if now_s >= until_s]

    def _next(self, living: set[NodeId]) -> list[Transition]:
        """The next advice. A hand-over that has failed since a server came or fell silent is tried
        when nothing else is left.
        """
        state = self._state
        if state.view_number == self._even_view:
            return []
        transitions = self._chosen(living, self._is_put_off)
        transitions = transitions or self._chosen(living, lambda _range, _target: False)
        if not transitions:
            self._even_view = state.view_number
        return transitions

    def _put_off(self, late: Iterable[RangeAssignment]) -> None:
        for each in late:
            target = each.hand_over_to
            if target in each.backups:
                self._late_ranges.add((each.range_id, target))
            elif target is not None and each.primary is not None:
                self._late_pairs.add((each.primary, target))

    def _is_put_off(self, each: RangeAssignment, target: NodeId) -> bool:
        if (each.range_id, target) in self._late_ranges:
            return True
        is_late = (each.primary, target) in self._late_pairs
        return is_late or self._configurations.is_apart(each.primary, target)

    def _chosen(
        self, living: set[NodeId], is_put_off: Callable[[RangeAssignment, NodeId], bool]
    ) -> list[Transition]:
        state = self._state
        known = state.ranges, state.range_bytes, living

        def able(each: RangeAssignment) -> list[NodeId]:
            return [n for n in each.backups if not is_put_off(each, n)]

        targets = placement.hand_overs(*known, able, _AT_ONCE)
        if targets:
            return self._configurations.advise(targets)
        transitions = self._configurations.spare(
            r.range_id for r in state.ranges if self._configurations.is_whole(r, living)
        )
        if transitions:
            return transitions
        space = Space(state)

        def free(each: RangeAssignment) -> list[NodeId]:
            others = living - {*each.backups}
            return [n for n in others if space.has(n, each.range_id) and not is_put_off(each, n)]

        for range_id, target in placement.hand_overs(*known, free, _AT_ONCE).items():
            if space.has(target, range_id):  # beside those before
                space.take(target, range_id)
                targets[range_id] = target
        return self._configurations.advise(targets)


class _Servers:
    """Live servers, members, and the ranges that each holds, while configurations are decided."""

    def __init__(self, state: ClusterState) -> None:
        nodes = state.nodes_of(Role.SERVER)
        self.living = {node.node_id for node in nodes if node.state is NodeState.ALIVE}
        self.members = {node.node_id for node in nodes if node.state.is_member}
        self._counts = Counter(node_id for r in state.ranges for node_id in r.holders)

    def load(self, node_id: NodeId) -> tuple[int, NodeId]:
        """Sort key: servers with fewest ranges first, then by id."""
        return self._counts[node_id], node_id

    def free_for(self, assignment: RangeAssignment) -> list[NodeId]:
        """Live servers that do not hold the range, by load."""
        return sorted(self.living.difference(assignment.holders), key=self.load)

    def move(self, old: RangeAssignment, new: RangeAssignment) -> None:
        self._counts.subtract(old.holders)
        self._counts.update(new.holders)


def _sorted(counts: Counter[NodeId]) -> Counts:
    return tuple(sorted(counts.items()))
