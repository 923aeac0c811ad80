"""How large a cluster view is as a message: upper bounds, so that no view outgrows its nodes.

Rules:
    - A view is sent whole, to every node, clients in other languages included; one that is larger
      than gRPC's default limit would reach nobody, and the cluster would stand still. So whatever
      makes the view larger asks here first.

Invariants:
    VS-1  The bounds are never below the serialized size (tested against the real messages).

What it deliberately does not do: serialize, or know protobuf beyond the widths of its encoding.
"""

from __future__ import annotations

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.runs import Run
from ps_core.tables import Remembered, TableSpec
from scheduler.machine.state import ClusterSettings, ClusterState

MAX_VIEW_BYTES = limits.FOREIGN_MAX_MESSAGE_BYTES

_FIELD_BYTES = 11
"""A tag of one byte and the widest varint."""

_LENGTH_BYTES = 6
"""A tag and the length of a field that has one."""

_NODE_ID_BYTES = 5
"""The widest varint of 32 bits."""

_NAMED_NUMBER_BYTES = 3 * _LENGTH_BYTES + 8
"""A hyperparameter beside its name: a double."""

CHANGE_BYTES = 2 * (40 + 26 + 6)
"""The newest change of a table, and a proposal; room is taken when it is changed first."""

CUT_BYTES = 2 * _LENGTH_BYTES + 3 * _FIELD_BYTES
"""Where a table was cut last, and at which clock it was restored."""

JOIN_BYTES = 32
"""Who has a rank that was given anew, or is beyond the first, in one table."""

_LAYOUT_BYTES = Remembered[int]()


def table_bytes(spec: TableSpec) -> int:
    """The most bytes that a table takes of a view; `spec` is validated."""
    fixed = 24 * _FIELD_BYTES + CUT_BYTES + len(spec.name.encode()) + len(spec.initializer.inline)
    optimizer = spec.optimizer
    numbers = _LENGTH_BYTES + len(optimizer.custom_update.encode())
    numbers += sum(
        _NAMED_NUMBER_BYTES + len(name.encode()) for name, _ in optimizer.hyperparameters
    )
    tensors = _LAYOUT_BYTES.find(spec.tensors)
    if tensors is None:
        tensors = sum(
            4 * _LENGTH_BYTES + _FIELD_BYTES * (1 + len(t.shape)) + len(t.name.encode())
            for t in spec.tensors
        )
        _LAYOUT_BYTES.put(spec.tensors, tensors)
    return fixed + numbers + tensors


def node_bytes(node: Node) -> int:
    """The most bytes that a node takes of a view."""
    return 7 * _FIELD_BYTES + len(node.address.encode()) + of_run_bytes(node.run)


def of_run_bytes(run: str) -> int:
    """What it takes to say of a node or a table that it is of a run."""
    return _LENGTH_BYTES + len(run.encode()) if run else 0


def run_bytes(run: Run) -> int:
    """The most bytes that a run takes of a view, beside its nodes and tables."""
    return 5 * _FIELD_BYTES + len(run.name.encode())


def fixed_bytes(cluster_id: str, range_count: int, replica_count: int) -> int:
    """The most bytes that a view takes beside its nodes and tables."""
    range_bytes = 7 * _FIELD_BYTES
    range_bytes += _LENGTH_BYTES + replica_count * _NODE_ID_BYTES  # since it was placed
    if replica_count > 1:  # who backs it up, and who joins it: together twice what should, at most
        range_bytes += 2 * _LENGTH_BYTES + 2 * (replica_count - 1) * _NODE_ID_BYTES
    urls = 2 * (limits.MAX_CHECKPOINT_URL_BYTES + limits.CHECKPOINT_DIRECTORY_BYTES)
    return 16 * _FIELD_BYTES + urls + len(cluster_id.encode()) + range_count * range_bytes


def room_bytes(settings: ClusterSettings, state: ClusterState) -> int:
    """How much the view of a cluster may grow."""
    fixed = fixed_bytes(settings.cluster_id, len(state.ranges), settings.replica_count)
    return MAX_VIEW_BYTES - fixed - state.view_bytes
