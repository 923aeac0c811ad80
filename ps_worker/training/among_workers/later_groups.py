"""Parameter groups that come later: their tables count from the clock of their birth.

The clock is in the tables' names ("model/1@120/float32"), so it is the same for all. Where workers'
clocks may differ (ASP, backup workers), it is that of rank 0, which gives the values as well. A
worker that is at another clock then passes clocks, so that any two tables of the model are equally
far apart at all workers (SEMANTICS S7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ps_core.cluster_view import NodeState, Role

if TYPE_CHECKING:
    from ps_core.cluster_view import ClusterView
    from ps_worker.client.client import Client
    from ps_worker.spec.training_options import TrainingOptions
    from ps_worker.steps.steps import TableHandle
    from ps_worker.training.tables.trained_table import TrainedTable


def table_prefix(name: str, group: int, clock: int) -> str:
    """The beginning of the names of a group's tables; `clock` is that of the group's birth."""
    return f"{name}/{group}" + (f"@{clock}" if clock else "")


def birth_clock(table_name: str) -> int:
    """The clock in a name with a `table_prefix`."""
    _, _, clock = table_name.split("/")[1].partition("@")
    return int(clock or 0)


def known_birth(name: str, group: int, table_names: Iterable[str]) -> int | None:
    """The clock of a group's birth; None if none of these tables is of that group."""
    begins = (f"{name}/{group}/", f"{name}/{group}@")
    return next((birth_clock(each) for each in table_names if each.startswith(begins)), None)


@dataclass(frozen=True)
class ModelClocks:
    """The clocks of one worker's tables of a model when a group comes.

    Attributes:
        may_differ: workers may be at other clocks when they have taken as many steps.
        round_count: the clocks of rounds, which are no steps of the script.
        passing: the tables that may pass clocks, so none where the workers' copies need each update
            (`Aggregate`), or inner steps are counted by clocks (`Outer`).
    """

    name: str
    tables: Sequence[TableHandle]
    may_differ: bool
    round_count: int
    passing: Sequence[TableHandle]

    @property
    def step_count(self) -> int:
        """The clocks that were steps of the script: other workers that have come as far may have
        passed more clocks, or fewer.
        """
        passed = max((table.steps.skipped_count for table in self.tables), default=0)
        return max(_reached(self.tables) - self.round_count - passed, 0)


def begun(
    client: Client, options: TrainingOptions, group: int, clocks: ModelClocks | None
) -> tuple[str, TrainingOptions]:
    """The beginning of the names of a group's tables, and the options for them. Blocks until rank 0
    has made one of them, where workers' clocks may differ.

    Args:
        clocks: None: the group comes with the model.
    """
    birth = known_birth(options.name, group, client.checkpoints.tables_before)
    if birth is None:
        birth = 0 if clocks is None else _birth(client, clocks, group)
    prefix = table_prefix(options.name, group, birth)
    if clocks is None:
        return prefix, options
    return prefix, _options_as_made(client.engine.view, prefix, options)


def _birth(client: Client, clocks: ModelClocks, group: int) -> int:
    """The clock of a group that comes now."""

    def known(view: ClusterView) -> int | None:
        return known_birth(clocks.name, group, (table.spec.name for table in view.tables))

    if not clocks.may_differ:
        return _reached(clocks.tables)
    if client.rank == 0:  # an earlier call that was interrupted may have made a table
        found = known(client.engine.view)
        return clocks.step_count if found is None else found
    view = client.tables.await_view(
        lambda view: known(view) is not None or _has_rank_0_left(view),
        f"worker 0 to add parameter group {group} of '{clocks.name}'",
        client.connection.deadline_s(None),
    )
    found = known(view)
    return clocks.step_count if found is None else found  # worker 0 has left: nobody gives values


def _has_rank_0_left(view: ClusterView) -> bool:
    """True if nobody adds a group any more; the place of one that is gone may be taken again."""
    held = (node for node in view.nodes if node.role is Role.WORKER and node.rank == 0)
    newest = max(held, key=lambda node: node.incarnation, default=None)
    return newest is not None and newest.state is NodeState.LEFT


def _options_as_made(view: ClusterView, prefix: str, options: TrainingOptions) -> TrainingOptions:
    """The options for the tables with this prefix, of a group that comes later: with the setting
    that they have where another worker has made them, which may know of changes that this one has
    not heard of.
    """
    made = (each.spec for each in view.tables if each.spec.name.startswith(f"{prefix}/"))
    found = next((spec.consistency for spec in made), options.consistency)
    return options if found == options.consistency else replace(options, consistency=found)


def keep_apart(clocks: ModelClocks, tables: Sequence[TrainedTable]) -> None:
    """Have this worker pass the clocks by which a group's tables are behind the earlier ones, or
    these behind them, before its next step on them.
    """
    new = [table.handle for table in tables if not table.is_asleep]
    ahead = _reached(clocks.tables) - _reached(new)
    for table in new:
        table.steps.owed_count = max(ahead, 0)
    if ahead < 0 and not any(table.steps.has_open_step for table in clocks.passing):
        for table in clocks.passing:
            table.steps.owed_count -= ahead


def _reached(tables: Iterable[TableHandle]) -> int:
    """The clock of a model by those of its tables."""
    return max((birth_clock(each.spec.name) + each.clock for each in tables), default=0)
