"""Memory check for a new table, on the servers that will hold it.

    a range on a server takes   values, and as much for each tensor of optimizer state
                                + an accumulator and a staged step, or gate_bytes if that is less
                                + `limits.BLOCK_OVERHEAD_BYTES` a block

Rules:
    - Every holder of a range takes all of it, because a backup may become primary at any moment.
    - A table counts from its creation, whether the servers have reserved its memory or not, and for
      the present holders of its ranges, without those that are none any more after a hand-over, and
      without a target. Who has no space for a range beside all that it holds is no target.
    - A table of rows counts for its partitions alone: servers refuse rows that they have no space
      for (`TableFull`).
    - Servers that share the memory of a machine or container share one sum. A server that reports
      no memory refuses nothing. The memory that a process really uses is not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ps_core import limits
from ps_core.cluster_view import Role
from ps_core.errors import InvalidConfig
from ps_core.keys import NodeId, RangeId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from scheduler.machine import placement
from scheduler.machine.state import ClusterState


class Needed(NamedTuple):
    """Bytes that a table takes of one holder, in one range or several."""

    values: int = 0
    state: int = 0
    gate: int = 0
    blocks: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def state_tensor_count(optimizer: OptimizerSpec) -> int:
    """Tensors of optimizer state, each as large as the values; 0 for a custom update: not known."""
    has_momentum = bool(dict(optimizer.hyperparameters).get("momentum"))
    return {
        OptimizerKind.SGD: int(has_momentum),
        OptimizerKind.ADAM: 2 + optimizer.amsgrad,
        OptimizerKind.ADAMW: 2 + optimizer.amsgrad,
        OptimizerKind.RMSPROP: 1 + optimizer.centered + has_momentum,
        OptimizerKind.ADAGRAD: 1,
        OptimizerKind.AGGREGATE: 2,  # the sums of the last two clocks
    }.get(optimizer.kind, 0)


def needed_by_range(table: Table, range_count: int) -> dict[RangeId, Needed]:
    """Memory of a table by range, for each holder, without empty ranges."""
    spec, found = table.spec, {}
    block_bytes = spec.block_elements * spec.accumulator_element_bytes
    for range_id, value_bytes in placement.bytes_by_range(table, range_count).items():
        gate_bytes = 2 * value_bytes
        block_count = -(-value_bytes // block_bytes)
        if spec.rows is not None:
            found[range_id] = Needed(blocks=block_count * limits.BLOCK_OVERHEAD_BYTES)
            continue
        found[range_id] = Needed(
            value_bytes,
            value_bytes * state_tensor_count(spec.optimizer),
            min(spec.gate_bytes or gate_bytes, gate_bytes),
            block_count * limits.BLOCK_OVERHEAD_BYTES,
        )
    return found


class Space:
    """Memory that servers have for tables, and that the present holders of ranges take of it."""

    def __init__(self, state: ClusterState) -> None:
        self._range_bytes = state.range_memory_bytes
        self.pools: dict[NodeId, str] = {}
        self.has_bytes: dict[str, int] = {}
        self._taken: Counter[str] = Counter()
        for node in state.nodes_of(Role.SERVER):
            memory = state.members[node.node_id].registration.memory
            if node.state.is_member and memory.byte_count:
                pool = memory.pool or f"server node {node.node_id}"
                self.pools[node.node_id] = pool
                known = self.has_bytes.get(pool, memory.byte_count)
                self.has_bytes[pool] = min(memory.byte_count, known)
        for each in state.ranges:
            for holder in each.holders:
                self.take(holder, each.range_id)

    def has(self, node_id: NodeId, range_id: RangeId) -> bool:
        """True if a server that does not hold the range has space for it."""
        pool = self.pools.get(node_id)
        if pool is None:
            return True
        free_bytes = self.has_bytes[pool] - self._taken[pool]
        return self._range_bytes.get(range_id, 0) <= free_bytes

    def take(self, node_id: NodeId, range_id: RangeId) -> None:
        pool = self.pools.get(node_id)
        if pool is not None:
            self._taken[pool] += self._range_bytes.get(range_id, 0)


def check_fits(
    state: ClusterState,
    name: str,
    needed: Mapping[RangeId, Needed],
    holders: Sequence[Collection[NodeId]],
) -> None:
    """Refuse a table that does not fit beside the others where its ranges are placed. What it needs
    is not in `range_memory_bytes` yet.

    Args:
        holders: the servers that are to hold each range, in the order of ranges.
    """
    space = Space(state)
    pools, has_bytes = space.pools, space.has_bytes
    taken: Counter[str] = Counter()
    wanted: dict[str, Needed] = {}
    for each, of_range in zip(state.ranges, holders, strict=True):
        for holder in pools.keys() & of_range:
            pool = pools[holder]
            taken[pool] += state.range_memory_bytes.get(each.range_id, 0)
            sums = zip(wanted.get(pool, Needed()), needed.get(each.range_id, Needed()), strict=True)
            wanted[pool] = Needed(*map(sum, sums))
    for pool, more in wanted.items():
        if more.total > has_bytes[pool] - taken[pool] and more.total:
            members = sorted(node_id for node_id, of in pools.items() if of == pool)
            who = f"server node{'s' * (len(members) > 1)} {', '.join(map(str, members))}"
            raise InvalidConfig(
                f"table '{name}' needs {more.total} bytes of memory on {who} (values "
                f"{more.values}, optimizer state {more.state}, staging memory {more.gate}, blocks "
                f"{more.blocks}), where tables may take {has_bytes[pool]} and {taken[pool]} of "
                "these are taken: expected a smaller table, larger blocks, more servers, fewer "
                "replicas, or servers that may take more (memory_mb)"
            )
