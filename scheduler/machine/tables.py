"""Which tables there are, and what a new one needs: a free name, room, servers.

Rules:
    - Creation is idempotent by specification: the identical table is found, another of its name is
      refused.
    - A table comes to be whole, with a server for each of its blocks, or not yet.
    - One that is removed leaves its ranges where they are, and its numbers to nobody.

Invariants: CL-1 for tables and ordinals, and CL-5 of `scheduler.machine.cluster`.

What it deliberately does not do: wait for servers (it says which are missing), choose them, or
change a table that is there (`scheduler.machine.changes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ps_core import limits
from ps_core.change import Change, Join
from ps_core.cluster_view import Role
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidCheckpoint, InvalidConfig, TableExists
from ps_core.keys import RangeId, TableId
from ps_core.manifest import Imported
from ps_core.tables import (
    Initializer,
    InitializerKind,
    Kernels,
    OptimizerKind,
    Reduction,
    Table,
    TableSpec,
)
from scheduler.machine import placement, server_memory, view_size
from scheduler.machine.ownership import Ownership
from scheduler.machine.spec_difference import first_difference
from scheduler.machine.state import (
    ClusterSettings,
    ClusterState,
    RestoredTable,
    TableCreated,
    Transition,
)


class Tables:
    """The tables of a cluster.

    Args:
        settings: the cluster's.
        state: the cluster's, changed in place.
        ownership: which server gets the blocks of a new table.
    """

    def __init__(
        self, settings: ClusterSettings, state: ClusterState, ownership: Ownership
    ) -> None:
        self._settings = settings
        self._state = state
        self._ownership = ownership

    def find(self, spec: TableSpec, run: str) -> Table | None:
        """The identical table of a run, if there is one.

        Raises:
            TableExists: one of that name differs; the message names the first field that does.
        """
        existing = self._state.tables.get((run, spec.name))
        if existing is None:
            return None
        difference = first_difference(existing.spec, spec)
        if difference is not None:
            raise TableExists(f"table '{spec.name}' exists and differs: its {difference}")
        return existing

    def check_replicable(self, spec: TableSpec) -> None:
        """Refuse a table that the cluster's servers cannot replicate, or log.

        Raises:
            InvalidConfig: it has a custom update, and there are replicas, or update logs.
        """
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
        """Create a table, or say for whom that has to wait.

        Args:
            spec: validated; no table of the run has its name.
            run: whose it is.
            joins: who has the ranks that were given anew, or are beyond the first.
            now_s: the time.

        Raises:
            InvalidConfig: the cluster has no room for it, or its servers have no memory.
        """
        # What the cluster starts from is a checkpoint of the run without a name.
        state, restored = self._state, None if run else self._restored(spec)
        table_id = TableId(state.next_table_id or len(state.tables) + 1)
        table = Table(table_id, state.next_ordinal, spec, joins=joins, run=run)
        if restored is not None:
            table = restored_as(table, restored)
        needed_bytes = view_size.table_bytes(spec) + view_size.JOIN_BYTES * len(joins)
        needed_bytes += view_size.of_run_bytes(run)
        needed_bytes += 0 if table.change is None else view_size.CHANGE_BYTES
        self._check_room(spec, needed_bytes)
        self._check_reach(table)
        added_bytes = placement.bytes_by_range(table, len(state.ranges))
        reason = self._ownership.missing_servers(added_bytes, now_s)
        if reason:
            return f"table '{spec.name}' waits for {reason}", []
        placed = self._placed(table, added_bytes)
        state.tables[table.key] = table
        state.view_bytes += needed_bytes
        if table.change is not None:
            state.change_counts[table_id] = table.change.number
        state.join_rooms |= {(table.table_id, join.rank) for join in joins}
        state.next_ordinal += table.block_count
        if state.next_table_id:
            state.next_table_id += 1
        return table, [TableCreated(table), *placed]

    def remove(self, table: Table) -> int:
        """The table is no more, nor what was to become of it; its ranges stay where they are. What
        it took of all servers together, in bytes.
        """
        state, table_id, range_count = self._state, table.table_id, len(self._state.ranges)
        rooms = {room for room in state.join_rooms if room[0] == table_id}
        state.next_table_id = state.next_table_id or len(state.tables) + 1  # CL-1
        del state.tables[table.key]
        state.join_rooms -= rooms
        state.view_bytes -= view_size.table_bytes(table.spec) + view_size.of_run_bytes(table.run)
        state.view_bytes -= view_size.JOIN_BYTES * len(rooms)
        if state.change_counts.pop(table_id, 0):
            state.view_bytes -= view_size.CHANGE_BYTES
        for of_tables in (state.proposals, state.withdrawals, state.joins_due):
            of_tables.pop(table_id, None)
        for range_id, size_bytes in placement.bytes_by_range(table, range_count).items():
            state.range_bytes[range_id] -= size_bytes
        held_bytes = 0
        for range_id, needed in server_memory.needed_by_range(table, range_count).items():
            state.range_memory_bytes[range_id] -= needed.total
            held_bytes += needed.total * len(state.ranges[range_id].holders)
        return held_bytes

    def _placed(self, table: Table, added_bytes: Mapping[RangeId, int]) -> list[Transition]:
        """Servers for the ranges of a table; nothing has changed where they have no memory."""
        state = self._state
        needed = server_memory.needed_by_range(table, len(state.ranges))
        before = list(state.ranges), dict(state.range_bytes)
        placed = self._ownership.hold(added_bytes)
        try:
            server_memory.check_fits(state, table.spec.name, needed)
        except InvalidConfig:
            state.ranges[:], state.range_bytes = before
            raise
        held = state.range_memory_bytes
        for range_id, more in needed.items():
            held[range_id] = held.get(range_id, 0) + more.total
        return placed

    def _restored(self, spec: TableSpec) -> RestoredTable | None:
        """The table of that name in the checkpoint that the cluster starts from; of one that was
        imported, a table of these tensors, whatever else it is.

        Raises:
            InvalidCheckpoint: the table there is another one, or its tensors are.
        """
        checkpoint = self._settings.restored
        if checkpoint is not None and checkpoint.imported is not None:
            return _begun(checkpoint.imported, spec)
        found = None if checkpoint is None else checkpoint.tables.get(spec.name)
        if checkpoint is None or found is None:
            return None
        difference = first_difference(comparable(found.spec), comparable(spec))
        if difference is not None:
            raise InvalidCheckpoint(
                f"table '{spec.name}' is another one in checkpoint {checkpoint.url}: its "
                f"{difference}"
            )
        return found

    def _check_room(self, spec: TableSpec, needed_bytes: int) -> None:
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
        room_bytes = view_size.room_bytes(self._settings, self._state)
        room_bytes -= limits.VIEW_RESERVED_BYTES  # for nodes that come, or come back
        if needed_bytes > room_bytes:
            raise InvalidConfig(
                f"table '{spec.name}' takes up to {needed_bytes} bytes of the cluster's view "
                f"({len(spec.tensors)} tensors, {len(spec.initializer.inline)} bytes of inline "
                f"values), which has room for {room_bytes} more of {view_size.MAX_VIEW_BYTES}"
            )

    def _check_reach(self, table: Table) -> None:
        """One step of the table must fit the numbers that a ledger keeps open."""
        range_id, count = placement.fullest_range(table, len(self._state.ranges))
        if count > limits.MAX_RANGE_BLOCK_COUNT:
            spec = table.spec
            raise InvalidConfig(
                f"table '{spec.name}' has {table.block_count} blocks of {spec.block_elements} "
                f"elements, {count} of them in range {range_id} of {len(self._state.ranges)}; "
                f"expected at most {limits.MAX_RANGE_BLOCK_COUNT} in a range: take larger blocks"
            )


def _begun(imported: Imported, spec: TableSpec) -> RestoredTable | None:
    """A table that begins with what was imported; None if that is for others.

    Raises:
        InvalidCheckpoint: a tensor is not there, or is another one.
    """
    if not imported.is_for(spec.name):
        return None
    imported.places(spec)
    return RestoredTable(spec, spec.consistency, clock=0)


def comparable(spec: TableSpec) -> TableSpec:
    """What two tables must have in common for one to take over the other's values and state."""
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
    """The table as it goes on. It has the setting that it was created with or, if that is the one
    of the checkpoint's table as well, the one that this had come to have. Who has a rank of it from
    the start begins where all do.
    """
    joins = tuple(replace(join, after_clock=restored.clock) for join in table.joins)
    table = replace(table, restored_clock=restored.clock, joins=joins)
    is_as_created = table.spec.consistency == restored.spec.consistency
    if not is_as_created or restored.consistency == table.spec.consistency:
        return table
    return replace(table, change=Change(1, restored.clock, restored.consistency))
