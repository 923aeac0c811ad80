"""A late joiner begins at the clock of the other workers.

The view has the clock after which it has joined each table (SEMANTICS S6). It may join the tables
of one model a step apart; then it ends empty steps on those that are behind, so that all its tables
are equally many steps from their beginning, like the other workers'. Where these step several
models in turn, it follows them to a place of their loop (`ps_worker.client.joined_place`). It pulls
only after that, because a pull of one table may wait for workers that wait for this one on another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ps_core.cluster_view import ClusterView
from ps_core.consistency import Mode
from ps_core.errors import EditRefused, WaitExpired
from ps_core.keys import TableId
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.client.client import Client
from ps_worker.client.joined_place import warn_between_steps
from ps_worker.spec.late_joiners import (
    ALL_HERE_WITHIN_S,
    LateJoiner,
    all_have_joined,
    clocks_behind,
    joined_tables,
    may_load,
)
from ps_worker.steps.steps import TableHandle, passed
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.planned_edits import Edited, names_of
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.training.trained_rows import TrainedRows


def begin_where_the_others_are(
    client: Client,
    tables: Sequence[TrainedTable | BufferTable],
    rows: Sequence[TrainedRows] = (),
) -> None:
    """Join every table of a model, bring them to one step, and pull all but `rows`."""
    joins, place = client.engine.joins, client.tables.place
    handles = [part.handle for part in (*tables, *rows)]
    joined = [handle for handle in handles if joins(handle.table.table_id)]
    client.tables.join(joined, at_place=True)
    _bring_to_one_step(client, tables, handles)
    for table in tables:
        # Others go on to step parameters that they have frozen again, and wait for this worker.
        if isinstance(table, TrainedTable) and table.handle.table.table_id in place.stepped:
            table.wake()
        table.begin_pull()
    for table in tables:
        table.finish()


def _bring_to_one_step(
    client: Client,
    tables: Sequence[TrainedTable | BufferTable],
    handles: Sequence[TableHandle],
) -> None:
    """End empty steps on the tables that are behind others, and at no place of a loop."""
    # A table of frozen parameters sleeps, or has slept: it is not as many steps from its beginning.
    frozen = {p.handle for p in tables if isinstance(p, TrainedTable) and p.layout.is_frozen}
    stepped = [handle for handle in handles if handle not in frozen]
    firsts = [handle.table.restored_clock or 0 for handle in stepped]
    counts = passed([handle.clock for handle in stepped], firsts)
    for handle, count in zip(stepped, counts, strict=True):
        is_placed = handle.table.table_id in client.tables.place.tables
        for _ in range(0 if is_placed else count):
            client.tables.begin_step(handle).seal(skip=True)


class ModelJoin:
    """A worker joins others that train a model: they would refuse changes that it makes before its
    first backward pass (SEMANTICS S16).
    """

    def __init__(self, client: Client, name: str, tables: Sequence[TrainedTable]) -> None:
        self._client = client
        self._name = name
        self._tables = tables
        self._clock = -1  # its clock when it joined
        self._joined_s = 0.0
        self._is_at_start = True  # no worker had taken a step by then
        self._brought: Edited | None = None  # its changes before its first backward pass

    def begin(self, clock: int, handles: Sequence[tuple[TableHandle, bool]]) -> None:
        """This worker has joined all tables of a model, and is at this clock of it.

        Args:
            clock: the model's.
            handles: of its tables, and whether each takes steps.
        """
        clocks = [(t.handle.clock, t.handle.table.restored_clock or 0) for t in self._tables]
        self._is_at_start = all(clock <= first for clock, first in clocks)
        self._clock, self._joined_s = clock, now_s()
        if not self._client.tables.place.is_told:
            _warn_between_steps(self._client, handles)

    def is_new(self, clock: int) -> bool:
        """True if it has taken no step with the others until this clock."""
        return self._clock >= clock

    def gradient_came(self, edited: Callable[[], Edited]) -> None:
        """A backward pass runs: note the changes of before."""
        if self._clock >= 0 and self._brought is None:
            self._brought = edited()

    def check(self, edited: Edited) -> None:
        """Refuse changes before its loop, which no other worker makes, if they are in `edited`."""
        brought = edited if self._brought is None else self._brought
        left = {
            table: indexes
            for table, found in brought.items()
            if (indexes := sorted({*found} & {*edited.get(table, ())}))
        }
        if left and not self.joins_nobody():
            raise EditRefused(
                f"parameter {names_of(left)} was changed in {self.words}. The change stays until "
                "it is undone"
            )

    def joins_nobody(self) -> bool:
        """As `joins_nobody`, since it joined."""
        at_start = self._is_at_start
        return joins_nobody(self._client, self._tables, self._joined_s, is_at_start=at_start)

    @property
    def words(self) -> str:
        """Words for a model that a late joiner may not change."""
        return (
            f"'{self._name}' before this worker's first step, and it joins others that train: the "
            f"model is theirs, as of step {self._clock}. Nothing was sent. Load only where "
            "optimizer.clock is 0, or start all workers anew, together"
        )


def _warn_between_steps(client: Client, own: Sequence[tuple[TableHandle, bool]]) -> None:
    """Warn if models, of which one is the `own`, are not equally many steps from their beginnings
    under BSP: the others may have been between two steps of a loop when this worker joined. One
    that has not begun is no sign of that.
    """
    reached = {}
    for handles in [*client.checkpoints.save_points.models(), own]:
        clocks = {
            handle.name: handle.clock - (handle.table.restored_clock or 0)
            for handle, is_awake in handles
            if is_awake and client.tables.newest(handle).consistency.mode is Mode.BSP
        }
        if name := max(clocks, key=clocks.__getitem__, default=""):
            reached[name] = clocks[name]
    counts = set(reached.values())
    if max(counts, default=0) > 1:
        counts.discard(0)
    if len(counts) > 1:
        warn_between_steps(", ".join(f"'{name}' {count}" for name, count in reached.items()))


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
