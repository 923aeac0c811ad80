"""A worker that joins while others train, in the place of one that is gone or beyond the first: it
begins where the others are.

The view says after which clock it has joined each table (SEMANTICS S6). The tables of one model may
be joined a step apart; then it ends the steps that it is behind with nothing, so that from then on
all its tables are at one clock, as the other workers' are. It reads nothing before: a read of one
table may wait for others who wait for it on another.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.errors import InvalidConfig
from ps_worker.buffers import BufferTable
from ps_worker.catalogue import Catalogue
from ps_worker.trained_table import TrainedTable

_MAX_SKEW = 8
"""Clocks that the joins of one model's tables may be apart; tables further apart are so for a
reason, such as parameters that were unfrozen later."""


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
    """Put all tables of a model at one clock, and read them.

    Blocking: until this worker has joined every table.
    """
    joins = client.engine.joins
    client.join_tables([t.handle for t in tables if joins(t.handle.table.table_id)])
    newest = max((table.handle.clock for table in tables), default=0)
    behind = [t for t in tables if 0 < newest - t.handle.clock <= _MAX_SKEW]
    for table in behind:
        while table.handle.clock < newest:
            client.begin_step(table.handle).seal(skip=True)
    for table in tables:
        table.begin_pull()
    for table in tables:
        table.finish()
