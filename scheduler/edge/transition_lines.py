"""One log line for each transition of the cluster, and the counts of some."""

from __future__ import annotations

from ps_core.change import TableChange
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.tables.table import Table
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import SchedulerMetrics
from scheduler.machine.checkpoint_state import (
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointUnneeded,
    CheckpointWritten,
)
from scheduler.machine.data_shards import DataShardsReturned
from scheduler.machine.state import (
    BackupsSet,
    BackupsSpared,
    ChangeCommitted,
    ChangeDecided,
    ChangeProposed,
    ChangeWithdrawn,
    ClusterFinished,
    Counts,
    DepartureAsked,
    HandOversAdvised,
    JoinersNamed,
    NodeHeardAgain,
    NodeLeft,
    NodeRegistered,
    NodeSilent,
    RangesFailedOver,
    RangesHandedOver,
    RangesLost,
    RangesPlaced,
    RangesUnplaced,
    RunBegun,
    RunEnded,
    RunRemoved,
    TableCreated,
    Transition,
    WorkerGone,
)

_NAMED_COUNT = 5  # tables that a log line names


def log_transition(transition: Transition) -> None:
    match transition:
        case NodeRegistered(node):
            logs.info("node_registered", incarnation=node.incarnation, **_named(node))
        case NodeSilent(node, quiet_s):
            logs.warning("node_silent", quiet_s=quiet_s, **_named(node))
        case NodeHeardAgain(node):
            logs.info("node_heard_again", **_named(node))
        case NodeLeft(node, reason):
            say = logs.warning if node.silence_ms else logs.info
            say("node_left", reason=reason, **_named(node))
        case WorkerGone(node):
            logs.warning("worker_gone", reason=node.gone_words, **_named(node))
        case TableCreated(table):
            _log_table(table)
        case RangesPlaced(counts):
            logs.info("ranges_placed", ranges_by_node=_shares(counts))
        case RangesFailedOver(lost, range_ids, counts):
            taken = {"ranges": len(range_ids), "taken_by": _shares(counts)}
            say = logs.info if lost.state is NodeState.LEFT else logs.warning
            say("ranges_failed_over", state=lost.state.value, **_named(lost), **taken)
        case RangesLost(primary, range_ids, is_wanted):
            say = logs.info if is_wanted else logs.error
            say("ranges_lost", ranges=len(range_ids), **_named(primary))
        case RangesUnplaced(primary, range_ids):
            logs.info("ranges_unplaced", ranges=len(range_ids), **_named(primary))
        case HandOversAdvised() | RangesHandedOver() | BackupsSpared():
            _log_hand_overs(transition)
        case BackupsSet():
            _log_backups(transition)
        case JoinersNamed(named, dropped):
            for node_id, count in named:
                logs.info("backup_joins", node_id=node_id, ranges=count)
            for node_id, count in dropped:
                logs.warning("backup_joins_no_more", node_id=node_id, ranges=count)
        case DepartureAsked(node):
            logs.debug("departure_asked", **_named(node))
        case ChangeProposed(table, change, reason):
            because = {"reason": reason} if reason else {}
            logs.info("change_proposed", **_change(table, change), **because)
        case ChangeDecided(table, change):
            logs.debug("change_decided", **_change(table, change))
        case ChangeCommitted(table, change):
            logs.info("change_committed", **_change(table, change))
        case ChangeWithdrawn(table, reason):
            logs.warning("change_withdrawn", table=table.title, reason=reason)
        case CheckpointCut(number, clocks):
            newest = max(clocks.values(), default=0)
            logs.info("checkpoint_cut", number=number, tables=len(clocks), clock=newest)
        case CheckpointWritten(attempt):
            logs.debug("checkpoint_written", number=attempt.number, parts=len(attempt.parts))
        case CheckpointMade(number, url):
            logs.info("checkpoint_made", number=number, url=url)
        case CheckpointUnneeded():
            _log_unneeded(transition)
        case CheckpointBegunAgain(number, _, again):
            logs.info("checkpoint_begun_again", number=number, again=again)
        case CheckpointFailed(number, url, reason):
            logs.warning("checkpoint_failed", number=number, url=url, reason=reason)
        case RunBegun(run):
            logs.info("run_begun", run=run.name, workers=run.worker_count)
        case RunEnded(run):
            logs.info("run_ended", run=run.name, reason="an operator ended it")
        case RunRemoved(run, table_count, byte_count):
            logs.info("run_removed", run=run.name, tables=table_count, bytes=byte_count)
        case DataShardsReturned(worker, name, number, count):
            what = {"data_set": name, "pass_number": number, "shards": count}
            logs.warning("data_shards_returned", **what, **_named(worker))
        case ClusterFinished():
            logs.info("cluster_finished", reason="all workers have left or are gone")


def count_transition(transition: Transition, metrics: SchedulerMetrics) -> None:
    match transition:
        case RangesFailedOver(_, range_ids):
            metrics.failovers.inc(len(range_ids))
        case RangesHandedOver(_, range_ids):
            metrics.hand_overs.inc(len(range_ids))
        case DataShardsReturned():
            metrics.data_shards.labels(event="returned").inc(transition.shard_count)


def _log_unneeded(unneeded: CheckpointUnneeded) -> None:
    logs.info("checkpoint_unneeded", number=unneeded.number, no_step_since=unneeded.source)
    if unneeded.changed:
        logs.warning(
            "settings_not_in_checkpoint",
            number=unneeded.number,
            tables=",".join(unneeded.changed[:_NAMED_COUNT]),
            count=len(unneeded.changed),
            remedy="set their consistency again after a resume from it",
        )


def _log_table(table: Table) -> None:
    logs.info(
        "table_created",
        table=table.title,
        table_id=table.table_id,
        elements=table.spec.element_count,
        blocks=table.block_count,
        optimizer=table.spec.optimizer.label,
        consistency=str(table.spec.consistency),
    )


def _log_hand_overs(transition: HandOversAdvised | RangesHandedOver | BackupsSpared) -> None:
    shares = _shares(transition.counts)
    match transition:
        case HandOversAdvised(_, withdrawn_count):
            logs.debug("hand_overs_advised", ranges_by_node=shares, withdrawn=withdrawn_count)
        case RangesHandedOver(primary, range_ids):
            logs.info("ranges_handed_over", node_id=primary, ranges=len(range_ids), taken_by=shares)
        case BackupsSpared():
            logs.info("backups_spared", ranges_by_node=shares)


def _log_backups(transition: BackupsSet) -> None:
    primary = transition.primary
    for node_id, count in transition.left_out:
        logs.warning("backup_left_out", node_id=node_id, primary=primary, ranges=count)
    for node_id, count in transition.let_in:
        logs.info("backup_let_in", node_id=node_id, primary=primary, ranges=count)
    if not transition.left_out and not transition.let_in:
        logs.info("backups_confirmed", primary=primary, ranges=len(transition.range_ids))


def _shares(counts: Counts) -> str:
    return ",".join(f"{node_id}:{count}" for node_id, count in counts)


def _change(table: Table, change: TableChange) -> dict[str, object]:
    what: dict[str, object] = {"consistency": str(change.consistency)}
    if change.checkpoint:
        what = {"checkpoint": change.checkpoint}
    elif change.join is not None:
        what = {"joins": f"worker {change.join.rank}", "incarnation": change.join.incarnation}
    return {
        "table": table.title, "number": change.number, "after_clock": change.after_clock, **what,
    }  # fmt: skip


def _named(node: Node) -> dict[str, object]:
    """Fields that identify a node; rank, run and address only where it has one."""
    rank = node.rank if node.role is Role.WORKER else None
    extra = {"rank": rank, "run": node.run or None, "address": node.address or None}
    known = {name: value for name, value in extra.items() if value is not None}
    return {"role": node.role.value, "node_id": node.node_id, **known}
