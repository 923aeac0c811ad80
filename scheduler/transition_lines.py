"""One log line for each transition of the cluster."""

from __future__ import annotations

from ps_core.change import Change
from ps_core.cluster_view import Node
from ps_core.tables import Table
from ps_runtime import logs
from scheduler.cluster_state import (
    ChangeCommitted,
    ChangeProposed,
    ChangeWithdrawn,
    ClusterFinished,
    NodeHeardAgain,
    NodeLeft,
    NodeRegistered,
    NodeSilent,
    RangesPlaced,
    RangesReconfigured,
    TableCreated,
    Transition,
    WorkerGone,
)


def log_transition(transition: Transition) -> None:
    """Log it, at the level that a person wants to see it at."""
    match transition:
        case NodeRegistered(node):
            logs.info("node_registered", incarnation=node.incarnation, **_named(node))
        case NodeSilent(node, quiet_s):
            logs.warning("node_silent", quiet_s=quiet_s, **_named(node))
        case NodeHeardAgain(node):
            logs.info("node_heard_again", **_named(node))
        case NodeLeft(node, reason):
            logs.info("node_left", reason=reason, **_named(node))
        case WorkerGone(node):
            logs.warning("worker_gone", reason=node.gone_words, **_named(node))
        case TableCreated(table):
            logs.info(
                "table_created",
                table=table.spec.name,
                table_id=table.table_id,
                elements=table.spec.element_count,
                blocks=table.block_count,
                optimizer=table.spec.optimizer.label,
                consistency=str(table.spec.consistency),
            )
        case RangesPlaced(counts):
            shares = ",".join(f"{node_id}:{count}" for node_id, count in counts)
            logs.info("ranges_placed", ranges_by_node=shares)
        case RangesReconfigured(range_ids, joining_count):
            ranges = ",".join(map(str, range_ids))
            logs.warning("ranges_reconfigured", ranges=ranges, joining=joining_count)
        case ChangeProposed(table, change, reason):
            because = {"reason": reason} if reason else {}
            logs.info("change_proposed", **_change(table, change), **because)
        case ChangeCommitted(table, change):
            logs.info("change_committed", **_change(table, change))
        case ChangeWithdrawn(table, reason):
            logs.warning("change_withdrawn", table=table.spec.name, reason=reason)
        case ClusterFinished():
            logs.info("cluster_finished", reason="all workers have left or are gone")


def _change(table: Table, change: Change) -> dict[str, object]:
    fields: dict[str, object] = {"table": table.spec.name, "number": change.number}
    fields["after_clock"] = change.after_clock
    if change.join is not None:
        fields |= {"joins": f"worker {change.join.rank}", "incarnation": change.join.incarnation}
    else:
        fields["consistency"] = str(change.consistency)
    return fields


def _named(node: Node) -> dict[str, object]:
    """Who it is; a rank and an address only where the role has one."""
    fields: dict[str, object] = {"role": node.role.value, "node_id": node.node_id}
    if node.role.value == "worker":
        fields["rank"] = node.rank
    if node.address:
        fields["address"] = node.address
    return fields
