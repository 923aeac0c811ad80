"""A worker that joins while others train, in the place of one that is gone or beyond the first: it
begins where the others are.

The view says after which clock it has joined each table (SEMANTICS S6). The tables of one model may
be joined a step apart; then it ends the steps that it is behind with nothing, so that from then on
all its tables are as many steps beyond where they began, as the other workers' are. It reads
nothing before: a read of one table may wait for others who wait for it on another.

Where all workers are new, as when all were started again, none of them joins others that train:
what they load before their first step has one meaning if all load the same (SEMANTICS S16).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ps_core.cluster_view import ClusterView
from ps_core.collective import is_late_joiner, workers_here
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.keys import Incarnation, TableId
from ps_runtime.observe import logs
from ps_worker.client.client import Client
from ps_worker.steps.steps import passed
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.tables.trained_table import TrainedTable

ALL_HERE_WITHIN_S = 30.0
"""How long a worker that brings something waits for the others that the cluster was started for."""


def check_may_join(is_aggregate: bool) -> None:
    """Refuse what no server could tell a newcomer.

    Raises:
        InvalidConfig: the parameters are the workers'.
    """
    if is_aggregate:
        raise InvalidConfig(
            "this worker joins while others train, and with Aggregate the parameters "
            "are the workers': it cannot know them. Start all workers again, or train with Add"
        )


def begin_where_the_others_are(
    client: Client, tables: Sequence[TrainedTable | BufferTable]
) -> None:
    """Put all tables of a model at one step, and read them.

    Blocking: until this worker has joined every table.
    """
    joins = client.engine.joins
    client.tables.join([t.handle for t in tables if joins(t.handle.table.table_id)])
    firsts = [table.handle.table.restored_clock or 0 for table in tables]
    counts = passed([table.handle.clock for table in tables], firsts)
    for table, count in zip(tables, counts, strict=True):
        for _ in range(count):
            client.tables.begin_step(table.handle).seal(skip=True)
    for table in tables:
        table.begin_pull()
    for table in tables:
        table.finish()


def joins_nobody(client: Client, tables: Sequence[TrainedTable]) -> bool:
    """Whether all workers that are there are new, and none has trained without this one, which has
    joined these tables.

    Blocking: where that is so, until all that the cluster was started for have joined, at most
        `ALL_HERE_WITHIN_S`.
    """
    engine, own, joined_ids = client.engine, client.session.incarnation, _joined_ids(client, tables)
    if _trains_without(engine.view, own, joined_ids):
        return False
    if not _all_have_joined(engine.view, joined_ids):
        logs.info("waits_for_other_new_workers", at_most_s=ALL_HERE_WITHIN_S)
        try:
            client.tables.await_view(
                lambda view: (
                    _trains_without(view, own, joined_ids) or _all_have_joined(view, joined_ids)
                ),
                "the other workers to join",
                ALL_HERE_WITHIN_S,
            )
        except WaitExpired:
            logs.warning("other_workers_did_not_come", waited_s=ALL_HERE_WITHIN_S)
    return not _trains_without(engine.view, own, joined_ids)


def clocks_behind(client: Client, tables: Sequence[TrainedTable]) -> int:
    """How many clocks lie between where this worker is and where the last of those that are there
    has joined.
    """
    view, joined_ids = client.engine.view, _joined_ids(client, tables)
    here = {worker.incarnation for worker in workers_here(view).values()}
    return max(
        (
            join.after_clock - table.handle.clock
            for table in tables
            if table.handle.table.table_id in joined_ids and not table.is_asleep
            for join in view.tables_by_id[table.handle.table.table_id].joins
            if join.incarnation in here and join.after_clock > table.handle.clock
        ),
        default=0,
    )


def _joined_ids(client: Client, tables: Sequence[TrainedTable]) -> set[TableId]:
    """Those that were there before this worker; others have it from the start."""
    own, table_ids = client.session.incarnation, {t.handle.table.table_id for t in tables}
    return {
        table.table_id
        for table in client.engine.view.tables
        if table.table_id in table_ids and own in {join.incarnation for join in table.joins}
    }


def _trains_without(view: ClusterView, own: Incarnation, joined_ids: set[TableId]) -> bool:
    """Whether a worker is there that is not new, or took more than a step before another came: one
    that has read a table, and waits, is joined by the next a clock later.
    """
    workers = workers_here(view).values()
    if not all(is_late_joiner(view, worker) for worker in workers):
        return True
    here = {worker.incarnation for worker in workers}
    for table_id in joined_ids:
        joins = view.tables_by_id[table_id].joins
        clocks = sorted({join.after_clock for join in joins if join.incarnation in here | {own}})
        if any(later > earlier + 1 for earlier, later in pairwise(clocks)):
            return True
    return False


def _all_have_joined(view: ClusterView, joined_ids: set[TableId]) -> bool:
    """Whether as many workers are there as the cluster was started for, and all have joined."""
    here = {worker.incarnation for worker in workers_here(view).values()}
    return len(here) >= view.worker_count and all(
        here <= {join.incarnation for join in view.tables_by_id[table_id].joins}
        for table_id in joined_ids
    )
