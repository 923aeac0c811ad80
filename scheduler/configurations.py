"""Who is primary of each range and who backs it up: configurations (SEMANTICS S8).

    [primary, backups]  --primary silent-->        [a live backup], under the next epoch
                        --the primary asks-->      the set that it asks for, under the next epoch
    too few backups     --a server is free-->      it is named as joining; the primary brings it up
                                                   to date and then asks for it

The scheduler decides configurations and nothing else. Whether a primary may serve, its backups say
(`ps_server.range_log`, `ps_server.replica`).

Rules:
    - A request names the epoch that it starts from; if another configuration came first, it is
      void. So of a primary that lost its backup and a scheduler that lost the primary one wins.
    - A promoted backup is alone: another one may be a batch behind or ahead of it, and joins anew.

Invariants:
    CF-1  An epoch names one configuration of its range, and epochs grow.
    CF-2  A primary is never its own backup, and who joins is neither.

What it deliberately does not do: move ranges for balance, or know what they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ps_core.cluster_view import NodeState, RangeAssignment, Role
from ps_core.errors import StaleAssignment, check
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from scheduler.cluster_state import ClusterState, RangesReconfigured, Transition


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
        for range_id in range_ids:
            assignment = self._state.ranges[range_id]
            others = self._free_servers(assignment)[: self._backup_count]
            self._state.ranges[range_id] = replace(assignment, backups=tuple(others))

    def look(self) -> list[Transition]:
        """Promote where a primary is silent; name servers that shall join where there are too few.

        To be called when servers have fallen silent, were heard again, or came.
        """
        promoted = [r for r in self._state.ranges if self._promote(r)]
        joining = [r for r in self._state.ranges if self._fill(r)]
        if not promoted and not joining:
            return []
        return [RangesReconfigured(tuple(r.range_id for r in promoted), len(joining))]

    def request(
        self,
        primary: NodeId,
        range_id: RangeId,
        assignment_epoch: AssignmentEpoch,
        backups: set[NodeId],
    ) -> list[Transition]:
        """The primary wants these backups.

        Raises:
            StaleAssignment: another configuration came first; the caller may not be primary.
        """
        assignment = self._state.ranges[range_id]
        known = {*assignment.backups, *assignment.joining}
        if (assignment.primary, assignment.assignment_epoch) != (
            primary,
            assignment_epoch,
        ) or backups - known:
            raise StaleAssignment(
                f"range {range_id} is at assignment_epoch {assignment.assignment_epoch} with "
                f"primary {assignment.primary}; {primary} asked for {sorted(backups)} at "
                f"{assignment_epoch}"
            )
        # The same set too: whoever asks has asked for another before, which is void from now on.
        joining = tuple(node_id for node_id in assignment.joining if node_id not in backups)
        self._commit(assignment, primary, tuple(sorted(backups)), joining)
        return [RangesReconfigured((range_id,), 0)]

    def _promote(self, assignment: RangeAssignment) -> bool:
        """Whether the primary is silent, and a backup took its place."""
        if assignment.primary is None or self._is_alive(assignment.primary):
            return False
        living = [node_id for node_id in assignment.backups if self._is_alive(node_id)]
        if not living:
            return False
        counts = self._counts()
        chosen = min(living, key=lambda node_id: (counts[node_id], node_id))
        self._commit(assignment, chosen, (), ())
        return True

    def _commit(
        self,
        assignment: RangeAssignment,
        primary: NodeId,
        backups: tuple[NodeId, ...],
        joining: tuple[NodeId, ...],
    ) -> None:
        all_of_them = (primary, *backups, *joining)
        check(len(set(all_of_them)) == len(all_of_them), "CF-2", f"{all_of_them}")
        self._state.ranges[assignment.range_id] = replace(
            assignment,
            assignment_epoch=AssignmentEpoch(assignment.assignment_epoch + 1),
            primary=primary,
            backups=backups,
            joining=joining,
        )

    def _fill(self, old: RangeAssignment) -> bool:
        """Whether another server was named as joining, or one that joined is no more."""
        assignment = self._state.ranges[old.range_id]
        if assignment.primary is None or not self._is_alive(assignment.primary):
            return False
        joining = [node_id for node_id in assignment.joining if self._is_alive(node_id)]
        missing = self._backup_count - len(assignment.backups) - len(joining)
        if missing > 0:
            joining += self._free_servers(assignment)[:missing]
        if tuple(joining) == assignment.joining:
            return False
        self._state.ranges[old.range_id] = replace(assignment, joining=tuple(joining))
        return True

    def _free_servers(self, assignment: RangeAssignment) -> list[NodeId]:
        """Living servers that hold nothing of the range, who hold least first."""
        taken = {assignment.primary, *assignment.backups, *assignment.joining}
        counts = self._counts()
        free = [
            node.node_id
            for node in self._state.nodes_of(Role.SERVER)
            if node.state is NodeState.ALIVE and node.node_id not in taken
        ]
        return sorted(free, key=lambda node_id: (counts[node_id], node_id))

    def _counts(self) -> Counter[NodeId]:
        """How many ranges each server holds, as whatever."""
        return Counter(
            node_id
            for r in self._state.ranges
            for node_id in (r.primary, *r.backups, *r.joining)
            if node_id is not None
        )

    def _is_alive(self, node_id: NodeId) -> bool:
        member = self._state.members.get(node_id)
        return member is not None and member.node.state is NodeState.ALIVE
