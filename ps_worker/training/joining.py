"""A late joiner begins at the clock of the other workers.

The view has the clock after which it has joined each table (SEMANTICS S6). It may join the tables
of one model a step apart; then it ends empty steps on those that are behind, so that all its tables
are equally many steps from their beginning, like the other workers'. It pulls only after that,
because a pull of one table may wait for workers that wait for this one on another.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.cluster_view import ClusterView
from ps_core.errors import WaitExpired
from ps_core.keys import TableId
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.client.client import Client
from ps_worker.spec.late_joiners import (
    ALL_HERE_WITHIN_S,
    LateJoiner,
    all_have_joined,
    clocks_behind,
    joined_tables,
    may_load,
)
from ps_worker.steps.steps import passed
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.training.trained_rows import TrainedRows


def begin_where_the_others_are(
    client: Client,
    tables: Sequence[TrainedTable | BufferTable],
    rows: Sequence[TrainedRows] = (),
) -> None:
    """Join every table of a model, bring them to one step, and pull all but `rows`."""
    joins = client.engine.joins
    handles = [part.handle for part in (*tables, *rows)]
    client.tables.join([handle for handle in handles if joins(handle.table.table_id)])
    firsts = [handle.table.restored_clock or 0 for handle in handles]
    counts = passed([handle.clock for handle in handles], firsts)
    for handle, count in zip(handles, counts, strict=True):
        for _ in range(count):
            client.tables.begin_step(handle).seal(skip=True)
    for table in tables:
        table.begin_pull()
    for table in tables:
        table.finish()


def joins_nobody(
    client: Client, tables: Sequence[TrainedTable], joined_s: float, *, is_at_start: bool
) -> bool:
    """True if all present workers are new, and none has trained without this one, which joined
    these tables at `joined_s`; or if no worker had taken a step by then. Blocks until that is
    known, at most `ALL_HERE_WITHIN_S` after `joined_s`.
    """
    engine, waited_s = client.engine, now_s() - joined_s
    own, joined_ids = client.session.incarnation, _joined_ids(client, tables)
    late_joiner = LateJoiner(own, joined_ids, is_at_start, engine.scheduler.lease_s)
    if may_load(engine.view, late_joiner, waited_s) is None:
        logs.info("waits_for_other_new_workers", at_most_s=round(ALL_HERE_WITHIN_S - waited_s, 1))
    while (may := may_load(engine.view, late_joiner, waited_s)) is None:
        limit_s = next(each for each in late_joiner.limits_s if waited_s < each)

        def is_known(view: ClusterView, waited_s: float = waited_s) -> bool:
            return may_load(view, late_joiner, waited_s) is not None

        try:
            client.tables.await_view(is_known, "the other workers to join", limit_s - waited_s)
            waited_s = max(waited_s, now_s() - joined_s)
        except WaitExpired:
            waited_s = limit_s
    if may and not all_have_joined(engine.view, joined_ids):
        logs.warning("other_workers_did_not_come", waited_s=round(waited_s, 1))
    return may


def clocks_to_pass(client: Client, tables: Sequence[TrainedTable]) -> int:
    """The number of clocks that this worker passes before it loads together with other new ones."""
    joined_ids = _joined_ids(client, tables)
    awake = [table.handle for table in tables if not table.is_asleep]
    clocks = {h.table.table_id: h.clock for h in awake if h.table.table_id in joined_ids}
    return clocks_behind(client.engine.view, clocks)


def _joined_ids(client: Client, tables: Sequence[TrainedTable]) -> frozenset[TableId]:
    table_ids = {table.handle.table.table_id for table in tables}
    return joined_tables(client.engine.view, client.session.incarnation, table_ids)
