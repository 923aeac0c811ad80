"""The document of `pushpull status --json`, a pure function of scheduler's and servers' answers.

Times are in seconds (`_s`), sizes in bytes. An unknown value (of a server that does not answer) is
null, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

from ps_cli.console.scheduler_query import ServerAnswer
from ps_cli.console.words import spans
from ps_cli.runs.entries import RunEntry, run_entries
from ps_core.cluster_view import ClusterView, Role
from ps_core.errors import PushpullError
from ps_core.tables.table import Table
from ps_runtime.cluster.wire import node_from_proto, view_from_proto
from pushpull.v1 import parameters_pb2, scheduler_pb2

LANES = ("shm", "grpc", "mixed")
"""A client's payloads travel in memory shared with its servers, as bytes, or in both ways."""


class NodeEntry(TypedDict):
    """One node. Only a worker has a `rank` and `clocks` (by table name), only a worker or a reader
    that has met a server a `lane` (one of `LANES`). `last_heard_s` is None for one that has left or
    is gone.
    """

    node_id: int
    incarnation: int
    role: str
    run: str
    rank: int | None
    address: str
    state: str
    last_heard_s: float | None
    view_number: int
    clocks: dict[str, int]
    step_count: int
    planned_step_count: int
    loss: float | None
    staleness: int
    pushed_bytes: int
    pulled_bytes: int
    lane: str | None
    waiting_for: str


class ServerEntry(TypedDict):
    """One server; `error` is the reason for values that are null. `backup_count` counts the ranges
    that it backs up, `catching_up_count` those on which it is catching up.
    """

    node_id: int
    address: str
    ranges: list[str]
    range_count: int
    backup_count: int
    catching_up_count: int
    block_count: int | None
    state_bytes: int | None
    gate_bytes: int | None
    update_count: int | None
    error: str | None


class TableEntry(TypedDict):
    """One table; `clock` is the lowest of its ranges (BSP: the newest update that all have)."""

    table_id: int
    name: str
    dtype: str
    element_count: int
    block_count: int
    optimizer: str
    hyperparameters: dict[str, float]
    consistency: str
    reduction: str
    clock: int | None
    update_count: int | None
    state_bytes: int | None
    is_initialized: bool | None
    failure: str | None


class WaitEntry(TypedDict):
    """Something that waits; `where` is "worker 3", or "server 2, range 17"."""

    where: str
    table: str | None
    waits_for: str


class CheckpointsEntry(TypedDict):
    """The cluster's checkpoints: `newest` is the directory of the newest complete one, `failure`
    the reason of the last one that failed. Each is null, and so is its age, if there was none.
    `unknown_before`: the scheduler was started again and knows of no complete one.
    """

    url: str
    complete_count: int
    unknown_before: bool
    failed_count: int
    newest: str | None
    newest_age_s: float | None
    failed_number: int | None
    failure: str | None
    failure_age_s: float | None


class KeptValuesEntry(TypedDict):
    """A server that keeps the values of an earlier cluster, and is no node of this one; `file`, on
    its machine, is the one with which they can be read (`pushpull checkpoint rescue`).
    """

    address: str
    cluster_id: str
    file: str | None
    last_heard_s: float


class DataSetEntry(TypedDict):
    """The present pass of a data set, in shards; `reissued_count` counts the leases of all passes
    that ended without a report.
    """

    name: str
    run: str
    sample_count: int
    shard_size: int
    pass_number: int
    shard_count: int
    done_count: int
    leased_count: int
    reissued_count: int


class StatusDocument(TypedDict):
    """The whole document.

    Attributes:
        worker_count: workers that the cluster was started for, in the run without a name.
        world_size: the same, with the workers that joined beyond these.
        runs: those with a name; names of their tables begin with the run's, "run:table".
        checkpoint: the directory of the checkpoint that is being made.
        checkpoints: those made before; null if the cluster makes none.
        restored_from: the checkpoint that the cluster was started from.
        ranges_by_in_sync: counts of the ranges that hold anything, by the number of living replicas
            that hold all that is committed.
        degraded_range_count: those with fewer than `replica_count`.
        lost: a sentence about ranges whose values no server has.
        awaited: a sentence about ranges whose only servers are silent.
    """

    cluster_id: str
    view_number: int
    worker_count: int
    world_size: int
    runs: list[RunEntry]
    server_count: int
    is_finished: bool
    checkpoint: str | None
    checkpoints: CheckpointsEntry | None
    restored_from: str | None
    replica_count: int
    min_in_sync: int
    ranges_by_in_sync: dict[str, int]
    degraded_range_count: int
    unserved_ranges: list[str]
    lost_ranges: list[str]
    lost: str | None
    awaited: str | None
    kept_values: list[KeptValuesEntry]
    data_sets: list[DataSetEntry]
    nodes: list[NodeEntry]
    servers: list[ServerEntry]
    tables: list[TableEntry]
    waits: list[WaitEntry]


def status_document(
    response: scheduler_pb2.GetClusterStatusResponse, answers: Mapping[int, ServerAnswer]
) -> StatusDocument:
    """The document of the scheduler's answer, and of each server's, by node id."""
    view = view_from_proto(response.view)
    known = {
        node_id: answer
        for node_id, answer in sorted(answers.items())
        if not isinstance(answer, PushpullError)
    }
    stats = [entry for answer in known.values() for entry in answer.ranges]
    primaries = [r.primary for r in view.ranges if r.primary is not None]
    in_sync = Counter(view.in_sync_count(r) for r in view.ranges if r.primary is not None)
    replica_count = max(1, response.replica_count)
    return StatusDocument(
        cluster_id=view.cluster_id,
        view_number=view.view_number,
        worker_count=view.worker_count,
        world_size=view.of_run("").world_size,
        runs=[entry for entry in run_entries(view) if entry["name"]],
        server_count=view.server_count,
        is_finished=view.finished,
        checkpoint=None if view.checkpoint is None else view.checkpoint.url,
        checkpoints=_checkpoints(response.checkpoints),
        restored_from=view.restored_from or None,
        replica_count=replica_count,
        min_in_sync=max(1, response.min_in_sync),
        ranges_by_in_sync={str(count): in_sync[count] for count in sorted(in_sync)},
        degraded_range_count=sum(n for count, n in in_sync.items() if count < replica_count),
        unserved_ranges=spans(_unserved(view)),
        lost_ranges=spans(int(r.range_id) for r in view.lost_ranges),
        lost=view.lost_words or None,
        awaited=view.awaited_words or None,
        kept_values=[
            KeptValuesEntry(
                address=kept.address,
                cluster_id=kept.cluster_id,
                file=kept.file or None,
                last_heard_s=kept.last_heard_ms / 1000,
            )
            for kept in response.kept_values
        ],
        data_sets=[_data_set(status) for status in response.data_sets],
        nodes=[_node(status, view) for status in response.nodes],
        servers=[_server(node_id, answer, view) for node_id, answer in sorted(answers.items())],
        tables=[_table(table, stats, known.keys() >= set(primaries)) for table in view.tables],
        waits=[*_worker_waits(response), *_range_waits(known, view)],
    )


def _checkpoints(history: scheduler_pb2.CheckpointHistory) -> CheckpointsEntry | None:
    if not history.url:
        return None
    has_one, has_failed = bool(history.complete_count), bool(history.failed_count)
    return CheckpointsEntry(
        url=history.url,
        complete_count=history.complete_count,
        unknown_before=history.unknown_before,
        failed_count=history.failed_count,
        newest=history.complete_url if has_one else None,
        newest_age_s=history.complete_ms / 1000 if has_one else None,
        failed_number=history.failed_number if has_failed else None,
        failure=history.failed_reason if has_failed else None,
        failure_age_s=history.failed_ms / 1000 if has_failed else None,
    )


def _data_set(status: scheduler_pb2.DataSetStatus) -> DataSetEntry:
    return DataSetEntry(
        name=status.data_set.name,
        run=status.run,
        sample_count=status.data_set.sample_count,
        shard_size=status.data_set.shard_size,
        pass_number=status.pass_number,
        shard_count=status.shard_count,
        done_count=status.done_count,
        leased_count=status.leased_count,
        reissued_count=status.reissued_count,
    )


def _unserved(view: ClusterView) -> list[int]:
    """The ranges that hold blocks and have no primary; ranges without blocks need none."""
    without = {r.range_id for r in view.ranges if r.primary is None}
    if not without:
        return []
    held = {held for table in view.tables for held in table.blocks_by_range(len(view.ranges))}
    return [int(range_id) for range_id in without & held]


def _node(status: scheduler_pb2.NodeStatus, view: ClusterView) -> NodeEntry:
    node, said = node_from_proto(status.node), status.progress
    names = {int(table.table_id): table.title for table in view.tables}
    return NodeEntry(
        node_id=node.node_id,
        incarnation=node.incarnation,
        role=node.role.value,
        run=node.run,
        rank=node.rank if node.role is Role.WORKER else None,
        address=node.address,
        state=node.state.value,
        last_heard_s=status.last_heard_ms / 1000 if node.state.is_member else None,
        view_number=status.view_number,
        clocks={
            names.get(table.table_id, f"table {table.table_id}"): table.clock
            for table in said.tables
        },
        step_count=said.step_count,
        planned_step_count=said.planned_step_count,
        loss=said.loss if said.HasField("loss") else None,
        staleness=said.staleness,
        pushed_bytes=said.pushed_bytes,
        pulled_bytes=said.pulled_bytes,
        lane=said.lane if said.lane in LANES else None,
        waiting_for=said.waiting_for,
    )


def _server(node_id: int, answer: ServerAnswer, view: ClusterView) -> ServerEntry:
    served = [int(r.range_id) for r in view.ranges if r.primary == node_id]

    def total(figure: str) -> int | None:
        if isinstance(answer, PushpullError):
            return None
        figures: list[int] = [getattr(shard, figure) for shard in answer.ranges]
        return sum(figures)

    return ServerEntry(
        node_id=node_id,
        address=next((node.address for node in view.nodes if node.node_id == node_id), ""),
        ranges=spans(served),
        range_count=len(served),
        backup_count=sum(node_id in r.backups for r in view.ranges),
        catching_up_count=sum(node_id in r.catching_up for r in view.ranges),
        block_count=total("block_count"),
        state_bytes=total("state_bytes"),
        gate_bytes=None if isinstance(answer, PushpullError) else answer.gate_bytes,
        update_count=total("update_count"),
        error=answer.message if isinstance(answer, PushpullError) else None,
    )


def _table(table: Table, stats: Sequence[parameters_pb2.RangeStats], knows_all: bool) -> TableEntry:
    own = [entry for entry in stats if entry.table_id == table.table_id]
    spec = table.spec
    is_known = knows_all and bool(own)
    return TableEntry(
        table_id=table.table_id,
        name=table.title,
        dtype=spec.dtype.value,
        element_count=spec.element_count,
        block_count=table.block_count,
        optimizer=spec.optimizer.label,
        hyperparameters=dict(spec.optimizer.hyperparameters),
        consistency=str(table.consistency),
        reduction=spec.reduction.value,
        clock=min(entry.clock for entry in own) if is_known else None,
        update_count=sum(entry.update_count for entry in own) if is_known else None,
        state_bytes=sum(entry.state_bytes for entry in own) if is_known else None,
        is_initialized=all(entry.initialized for entry in own) if is_known else None,
        failure=next((entry.failure for entry in own if entry.failure), None),
    )


def _worker_waits(response: scheduler_pb2.GetClusterStatusResponse) -> list[WaitEntry]:
    found = []
    for status in response.nodes:
        if not status.progress.waiting_for:
            continue
        node = node_from_proto(status.node)
        where = f"worker {node.rank}" if node.role is Role.WORKER else f"node {node.node_id}"
        where += f" of run '{node.run}'" if node.run else ""
        found.append(WaitEntry(where=where, table=None, waits_for=status.progress.waiting_for))
    return found


def _range_waits(
    known: Mapping[int, parameters_pb2.GetRangeStatsResponse], view: ClusterView
) -> list[WaitEntry]:
    names = {int(table.table_id): table.title for table in view.tables}
    return [
        WaitEntry(
            where=f"server {node_id}, range {entry.range_id}",
            table=names.get(entry.table_id),
            waits_for=wait,
        )
        for node_id, answer in known.items()
        for entry in answer.ranges
        for wait in entry.waits
    ]
