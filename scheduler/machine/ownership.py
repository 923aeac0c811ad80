"""The primary of each key range.

Rules:
    - A range gets its primary when the first table puts a block into it, and stays there while it
      holds blocks, except for failover (`scheduler.machine.configurations`).
    - Only servers that are alive get ranges, and only when `server_count` are: an early table must
      not lie on the few servers that came first. With replicas it is enough that as many were alive
      once, so a dead server delays nobody.

Invariants: CL-2 and CL-3 of `scheduler.machine.cluster`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ps_core.cluster_view import Node, NodeState, Role
from ps_core.errors import check
from ps_core.keys import AssignmentEpoch, RangeId
from scheduler.machine import placement
from scheduler.machine.configurations import Configurations
from scheduler.machine.state import ClusterSettings, ClusterState, RangesPlaced, Transition


class Ownership:
    """The map of ranges to primaries."""

    def __init__(
        self,
        state: ClusterState,
        settings: ClusterSettings,
        describe: Callable[[Node, float], str],
        configurations: Configurations,
    ) -> None:
        self._state = state
        self._settings = settings
        self._configurations = configurations
        self._describe = describe

    def missing_servers(self, range_ids: Iterable[RangeId], now_s: float) -> str:
        """Servers that new blocks in these ranges have to wait for, in words; empty if none."""
        servers = self._state.nodes_of(Role.SERVER)
        alive = [n for n in servers if n.state is NodeState.ALIVE]
        silent = [n for n in servers if n.state is NodeState.SILENT]
        expected = self._settings.server_count
        least = 1 if self._settings.replica_count > 1 and self._state.has_formed else expected
        if len(alive) < least:
            more = least - len(alive)
            tail = "".join(f"; {self._describe(node, now_s)}" for node in silent)
            return (
                f"{more} more server{'s' if more > 1 else ''} ({len(alive)} of {expected} "
                f"registered{tail})"
            )
        alive_ids = {node.node_id for node in alive}
        lost = Counter(
            primary
            for range_id in range_ids
            if (primary := self._state.ranges[range_id].primary) is not None
            and primary not in alive_ids
        )
        return " and ".join(
            f"{self._describe(self._state.members[node_id].node, now_s)}, which has {count} of its "
            f"ranges"
            for node_id, count in sorted(lost.items())
        )

    def hold(self, added_bytes: Mapping[RangeId, int]) -> list[Transition]:
        """Count new blocks in their ranges, and place the ranges without a primary."""
        state = self._state
        for range_id, size_bytes in added_bytes.items():
            state.range_bytes[range_id] = state.range_bytes.get(range_id, 0) + size_bytes
        ranges = state.ranges
        if all(ranges[range_id].primary is not None for range_id in added_bytes):
            return []
        primaries = {r.range_id: r.primary for r in ranges if r.primary is not None}
        servers = [n.node_id for n in state.nodes_of(Role.SERVER) if n.state is NodeState.ALIVE]
        placed = placement.place(primaries, state.range_bytes, servers)
        for range_id, node_id in placed.items():
            old = ranges[range_id]
            check(old.primary is None, "CL-3", f"range {range_id} holds blocks and would move")
            assignment_epoch = AssignmentEpoch(old.assignment_epoch + 1)
            ranges[range_id] = replace(
                old,
                primary=node_id,
                assignment_epoch=assignment_epoch,
                term=assignment_epoch,
                initial_holders=(node_id,),
            )
        self._configurations.place_backups(placed)
        return [RangesPlaced(tuple(sorted(Counter(placed.values()).items())))]
