"""Upper bounds of the size of a cluster view as a message.

Every node gets the whole view, clients in other languages included. A view over gRPC's default
limit would reach no node and stop the cluster, so additions are checked here first.

Invariants:
    VS-1  The bounds are never below the serialized size (tested against the real messages).
"""

from __future__ import annotations

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.runs import Run
from ps_core.tables.table_spec import TableSpec, TupleCache
from scheduler.machine.state import ClusterSettings, ClusterState

MAX_VIEW_BYTES = limits.FOREIGN_MAX_MESSAGE_BYTES

_FIELD_BYTES = 11  # a tag, and the widest varint
_LENGTH_BYTES = 6  # a tag, and the length of a field
_NODE_ID_BYTES = 5  # the widest varint of 32 bits

_NAMED_NUMBER_BYTES = 3 * _LENGTH_BYTES + 8
"""A hyperparameter without its name; the value is a double."""

CHANGE_BYTES = 2 * (40 + 26 + 6)
"""The last change of a table, and a proposal; counted from the first proposal on."""

CUT_BYTES = 2 * _LENGTH_BYTES + 3 * _FIELD_BYTES
"""The last cut of a table, and the clock at which it was restored."""

JOIN_BYTES = 32  # one join of a replacement worker or late joiner, in one table

_LAYOUT_BYTES = TupleCache[int]()


def table_bytes(spec: TableSpec) -> int:
    """Most bytes of a table in a view; `spec` is validated."""
    fixed = 24 * _FIELD_BYTES + CUT_BYTES + len(spec.name.encode()) + len(spec.initializer.inline)
    fixed += 0 if spec.rows is None else 8 * _FIELD_BYTES
    optimizer = spec.optimizer
    optimizer_bytes = _LENGTH_BYTES + len(optimizer.custom_update.encode())
    optimizer_bytes += sum(
        _NAMED_NUMBER_BYTES + len(name.encode()) for name, _ in optimizer.hyperparameters
    )
    tensors = _LAYOUT_BYTES.find(spec.tensors)
    if tensors is None:
        tensors = sum(
            4 * _LENGTH_BYTES + _FIELD_BYTES * (1 + len(t.shape)) + len(t.name.encode())
            for t in spec.tensors
        )
        _LAYOUT_BYTES.put(spec.tensors, tensors)
    return fixed + optimizer_bytes + tensors


def node_bytes(node: Node) -> int:
    return 7 * _FIELD_BYTES + len(node.address.encode()) + of_run_bytes(node.run)


def of_run_bytes(run: str) -> int:
    """Bytes of the run's name in a node or a table."""
    return _LENGTH_BYTES + len(run.encode()) if run else 0


def run_bytes(run: Run) -> int:
    """Most bytes of a run in a view, without its nodes and tables."""
    return 5 * _FIELD_BYTES + len(run.name.encode())


def fixed_bytes(cluster_id: str, range_count: int, replica_count: int) -> int:
    """Most bytes of a view without its nodes and tables."""
    range_bytes = 9 * _FIELD_BYTES
    range_bytes += _LENGTH_BYTES + replica_count * _NODE_ID_BYTES  # holders since the placement
    if replica_count > 1:  # backups and servers that catch up: at most twice the backups
        range_bytes += 2 * _LENGTH_BYTES + 2 * (replica_count - 1) * _NODE_ID_BYTES
    urls = 2 * (limits.MAX_CHECKPOINT_URL_BYTES + limits.CHECKPOINT_DIRECTORY_BYTES)
    return 16 * _FIELD_BYTES + urls + len(cluster_id.encode()) + range_count * range_bytes


def free_bytes(settings: ClusterSettings, state: ClusterState) -> int:
    fixed = fixed_bytes(settings.cluster_id, len(state.ranges), settings.replica_count)
    return MAX_VIEW_BYTES - fixed - state.view_bytes
