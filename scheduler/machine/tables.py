"""The tables of a cluster, and the needs of a new one: a free name, space in the view, servers.

Rules:
    - A range gets its primary when the first table puts a block into it, and stays there while it
      holds blocks, except for failover (`scheduler.machine.configurations`).
    - A range without blocks whose servers will not come back is placed anew by the next table.
    - Only servers that are alive get ranges, and only when `server_count` are: an early table must
      not lie on the few servers that came first. With replicas it is enough that as many were alive
      once, so a dead server delays nobody; after a restore in place, as many as were alive then.
    - A table is created whole, with a server for each of its blocks, or waits.
    - A removed table's ranges stay on their servers, and its id and ordinals are never given again.

Invariants: CL-1 for tables and ordinals, CL-2, CL-3 and CL-5 of `scheduler.machine.cluster`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ps_core import limits
from ps_core.change import Join, TableChange
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidCheckpoint, InvalidConfig, TableExists, check
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_core.tables.elements import Initializer, InitializerKind
from ps_core.tables.optimizers import Kernels, OptimizerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction, TableSpec
from scheduler.machine import placement, server_memory, view_size
from scheduler.machine.configurations import Configurations
from scheduler.machine.spec_difference import first_difference
from scheduler.machine.state import (
    ClusterSettings,
    ClusterState,
    RangesPlaced,
    RestoredTable,
    TableCreated,
    Transition,
)


class TableCatalogue:
    """The tables of a cluster."""

    def __init__(
        self,
        settings: ClusterSettings,
        state: ClusterState,
        describe: Callable[[Node, float], str],
        configurations: Configurations,
    ) -> None:
        self._settings = settings
        self._state = state
        self._describe = describe
        self._configurations = configurations

    def find(self, spec: TableSpec, run: str) -> Table | None:
        """The identical table of a run, or None; TableExists names the first field that differs."""
        existing = self._state.tables.get((run, spec.name))
        if existing is None:
            return None
        difference = first_difference(existing.spec, spec)
        if difference is not None:
            raise TableExists(f"table '{spec.name}' exists and differs: its {difference}")
        return existing

    def with_partitions(self, spec: TableSpec, run: str) -> TableSpec:
        """The spec with a number of partitions, where its creator names none: that of the run's
        table of this name, that of the checkpoint's, or as many as the servers want.
        """
        if spec.rows is None or spec.rows.partition_count:
            return spec
        state, checkpoint = self._state, self._settings.restored
        saved = {} if run or checkpoint is None else checkpoint.tables
        known = state.tables.get((run, spec.name)) or saved.get(spec.name)
        if known is not None and known.spec.rows is not None:
            count = known.spec.rows.partition_count
        else:
            servers = [node for node in state.nodes_of(Role.SERVER) if node.state.is_member]
            server_count = max(self._settings.server_count, len(servers))
            count = limits.default_partition_count(server_count)
        return replace(spec, rows=replace(spec.rows, partition_count=count))

    def check_replicable(self, spec: TableSpec) -> None:
        """Raise InvalidConfig for a custom update where there are replicas or update logs."""
        if spec.optimizer.kind is not OptimizerKind.CUSTOM:
            return
        for node in self._state.nodes_of(Role.SERVER):
            has_log = self._state.members[node.node_id].registration.update_log is not None
            if has_log and node.state.is_member:
                raise InvalidConfig(
                    f"table '{spec.name}' has the custom update '{spec.optimizer.custom_update}', "
                    f"and server node {node.node_id} keeps an update log; custom updates are not "
                    "logged: expected one of the built-in optimizers, or no --update-log"
                )
        replica_count = self._settings.replica_count
        if replica_count > 1:
            raise InvalidConfig(
                f"table '{spec.name}' has the custom update '{spec.optimizer.custom_update}', and "
                f"replicas is {replica_count}; custom updates are not replicated: expected one of "
                "the built-in optimizers, or replicas=1"
            )

    def create(
        self, spec: TableSpec, run: str, joins: tuple[Join, ...], now_s: float
    ) -> tuple[Table | str, list[Transition]]:
        """Create a table from a validated spec with a free name, or return the reason to wait."""
        # A cluster is restored from a checkpoint of the run without a name.
        state, restored = self._state, None if run else self._restored(spec)
        table_id = TableId(state.next_table_id or len(state.tables) + 1)
        table = Table(table_id, state.next_ordinal, spec, joins=joins, run=run)
        if restored is not None:
            table = restored_as(table, restored)
        needed_bytes = view_size.table_bytes(spec) + view_size.JOIN_BYTES * len(joins)
        needed_bytes += view_size.of_run_bytes(run)
        needed_bytes += 0 if table.change is None else view_size.CHANGE_BYTES
        self._check_view_space(spec, needed_bytes)
        self._check_reach(table)
        added_bytes = placement.bytes_by_range(table, len(state.ranges))
        reason = self._missing_servers(added_bytes, now_s)
        if reason:
            return f"table '{spec.name}' waits for {reason}", []
        placed = self._placed(table, added_bytes)
        state.tables[table.key] = table
        state.view_bytes += needed_bytes
        if table.change is not None:
            state.change_counts[table_id] = table.change.number
        state.counted_joins |= {(table.table_id, join.rank) for join in joins}
        state.next_ordinal += table.block_count
        if state.next_table_id:
            state.next_table_id += 1
        return table, [TableCreated(table), *placed]

    def remove(self, table: Table) -> int:
        """Remove a table; its ranges stay. Returns its bytes on all servers together."""
        state, table_id, range_count = self._state, table.table_id, len(self._state.ranges)
        joins = {each for each in state.counted_joins if each[0] == table_id}
        state.next_table_id = state.next_table_id or len(state.tables) + 1  # CL-1
        del state.tables[table.key]
        state.counted_joins -= joins
        state.view_bytes -= view_size.table_bytes(table.spec) + view_size.of_run_bytes(table.run)
        state.view_bytes -= view_size.JOIN_BYTES * len(joins)
        if state.change_counts.pop(table_id, 0):
            state.view_bytes -= view_size.CHANGE_BYTES
        for of_tables in (state.proposals, state.withdrawals, state.joins_due):
            of_tables.pop(table_id, None)
        for range_id, size_bytes in placement.bytes_by_range(table, range_count).items():
            _subtract(state.range_bytes, range_id, size_bytes)
        held_bytes = 0
        for range_id, needed in server_memory.needed_by_range(table, range_count).items():
            _subtract(state.range_memory_bytes, range_id, needed.total)
            held_bytes += needed.total * len(state.ranges[range_id].holders)
        return held_bytes

    def _missing_servers(self, range_ids: Iterable[RangeId], now_s: float) -> str:
        """Servers that new blocks in these ranges have to wait for, in words; empty if none."""
        servers = self._state.nodes_of(Role.SERVER)
        alive = [n for n in servers if n.state is NodeState.ALIVE]
        silent = [n for n in servers if n.state is NodeState.SILENT]
        expected = self._settings.servers_to_form
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

    def _hold(self, added_bytes: Mapping[RangeId, int]) -> list[Transition]:
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
                placed_epoch=assignment_epoch,
                initial_holders=(node_id,),
            )
        self._configurations.place_backups(placed)
        return [RangesPlaced(tuple(sorted(Counter(placed.values()).items())))]

    def _placed(self, table: Table, added_bytes: Mapping[RangeId, int]) -> list[Transition]:
        """Place the ranges of a table; changes nothing if they do not fit into memory."""
        state = self._state
        needed = server_memory.needed_by_range(table, len(state.ranges))
        before = list(state.ranges), dict(state.range_bytes)
        placed = self._hold(added_bytes)
        try:
            holders = self._configurations.needed_holders()
            server_memory.check_fits(state, table.spec.name, needed, holders)
        except InvalidConfig:
            state.ranges[:], state.range_bytes = before
            raise
        held = state.range_memory_bytes
        for range_id, more in needed.items():
            held[range_id] = held.get(range_id, 0) + more.total
        return placed

    def _restored(self, spec: TableSpec) -> RestoredTable | None:
        """The table of that name in the checkpoint that the cluster starts from; from an import,
        any table with its tensors.
        """
        checkpoint = self._settings.restored
        if checkpoint is None:
            return None
        imported = checkpoint.imported
        if imported is not None:
            if not imported.is_for(spec.name):
                return None
            imported.check(spec)
            return RestoredTable(spec, spec.consistency, clock=0)
        found = checkpoint.tables.get(spec.name)
        if found is None:
            return None
        difference = first_difference(comparable(found.spec), comparable(spec))
        if difference is not None:
            raise InvalidCheckpoint(
                f"table '{spec.name}' is another one in checkpoint {checkpoint.url}: its "
                f"{difference}"
            )
        return found

    def _check_view_space(self, spec: TableSpec, needed_bytes: int) -> None:
        table_count = len(self._state.tables)
        if table_count >= limits.MAX_TABLE_COUNT:
            raise InvalidConfig(
                f"table '{spec.name}' would be table number {table_count + 1} of the cluster; it "
                f"can have {limits.MAX_TABLE_COUNT}"
            )
        block_count = -(-spec.element_count // spec.block_elements)
        most = limits.MAX_TABLE_BLOCK_COUNT
        if block_count > most:
            unit = limits.BLOCK_ALIGNMENT_ELEMENTS
            enough = -(-spec.element_count // (most * unit)) * unit
            remedy = f"block_elements of {enough} or more, or " * (
                enough <= limits.MAX_BLOCK_ELEMENTS
            )
            raise InvalidConfig(
                f"table '{spec.name}': element_count {spec.element_count} makes {block_count} "
                f"blocks of {spec.block_elements}; expected at most {most}: "
                f"{remedy}several tables"
            )
        free_bytes = view_size.free_bytes(self._settings, self._state)
        free_bytes -= limits.VIEW_RESERVED_BYTES  # for nodes that register later
        if needed_bytes > free_bytes:
            raise InvalidConfig(
                f"table '{spec.name}' takes up to {needed_bytes} bytes of the cluster's view "
                f"({len(spec.tensors)} tensors, {len(spec.initializer.inline)} bytes of inline "
                f"values), which may grow by {free_bytes} to {view_size.MAX_VIEW_BYTES}"
            )

    def _check_reach(self, table: Table) -> None:
        """One step of the table must fit the sequence numbers that a ledger keeps open."""
        range_id, count = placement.fullest_range(table, len(self._state.ranges))
        if count > limits.MAX_RANGE_BLOCK_COUNT:
            spec = table.spec
            raise InvalidConfig(
                f"table '{spec.name}' has {table.block_count} blocks of {spec.block_elements} "
                f"elements, {count} of them in range {range_id} of {len(self._state.ranges)}; "
                f"expected at most {limits.MAX_RANGE_BLOCK_COUNT} in a range: take larger blocks"
            )


def _subtract(held: dict[RangeId, int], range_id: RangeId, byte_count: int) -> None:
    """Subtract bytes of a range, which is not in `held` while it has none."""
    held[range_id] -= byte_count
    if not held[range_id]:
        del held[range_id]


def comparable(spec: TableSpec) -> TableSpec:
    """The fields in which two tables must agree for one to take over the other's values."""
    optimizer = replace(spec.optimizer, hyperparameters=(), nesterov=False, maximize=False)
    return replace(
        spec,
        optimizer=replace(optimizer, kernels=Kernels.FAST),
        consistency=Consistency(Mode.BSP),
        initializer=Initializer(InitializerKind.ZEROS),
        reduction=Reduction.MEAN,
        allow_non_finite=False,
        gate_bytes=0,
    )


def restored_as(table: Table, restored: RestoredTable) -> Table:
    """The table as it continues a restored one, with its `first_consistency`. Replacement workers
    and late joiners begin where all workers do.
    """
    joins = tuple(replace(join, after_clock=restored.clock) for join in table.joins)
    table = replace(table, restored_clock=restored.clock, joins=joins)
    first = first_consistency(table.spec, restored)
    if first == table.spec.consistency:
        return table
    return replace(table, change=TableChange(1, restored.clock, first))


def first_consistency(spec: TableSpec, restored: RestoredTable) -> Consistency:
    """The consistency with which a table continues a restored one: that which the checkpoint's
    table had come to, if both were created with the same one; else its own.
    """
    is_as_created = spec.consistency == restored.spec.consistency
    return restored.consistency if is_as_created else spec.consistency
