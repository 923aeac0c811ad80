"""A worker that joins while others train, in the place of one that is gone or beyond the first: it
begins where the others are.

The view says after which clock it has joined each table (SEMANTICS S6). The tables of one model may
be joined a step apart; then it ends the steps that it is behind with nothing, so that from then on
all its tables are as many steps beyond where they began, as the other workers' are. It reads
nothing before: a read of one table may wait for others who wait for it on another.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.errors import InvalidConfig
from ps_worker.buffers import BufferTable
from ps_worker.catalogue import Catalogue
from ps_worker.steps import passed
from ps_worker.trained_table import TrainedTable


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
    client: Catalogue, tables: Sequence[TrainedTable | BufferTable]
) -> None:
    """Put all tables of a model at one step, and read them.

    Blocking: until this worker has joined every table.
    """
    joins = client.engine.joins
    client.join_tables([t.handle for t in tables if joins(t.handle.table.table_id)])
    firsts = [table.handle.table.restored_clock or 0 for table in tables]
    counts = passed([table.handle.clock for table in tables], firsts)
    for table, count in zip(tables, counts, strict=True):
        for _ in range(count):
            client.begin_step(table.handle).seal(skip=True)
    for table in tables:
        table.begin_pull()
    for table in tables:
        table.finish()
