"""The settings of one table by clock, and what they make of a worker's steps. A view has only the
newest setting, which may take effect after the worker's next step (SEMANTICS S6).
"""

from __future__ import annotations

from collections.abc import Callable

from ps_core.cluster_view import ClusterView
from ps_core.consistency import Consistency, Mode
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction

_KEPT_CLOCKS = 10
"""A step that has not ended is at most so many clocks behind the next but one."""


class SettingByClock:
    """The settings that the views of each call have told of. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[int, Consistency] = {}  # by the last clock of the one before

    def at(self, table: Table, clock: int) -> Consistency:
        """The setting of a step.

        Args:
            table: as the newest view has it.
            clock: of the next steps, or of one that has not ended.
        """
        seen = self._seen
        if not seen:
            seen[-1] = table.spec.consistency
        if table.change is not None:
            seen[table.change.after_clock] = table.change.consistency
        for after in sorted(each for each in seen if each < clock - _KEPT_CLOCKS)[:-1]:
            del seen[after]
        return seen[max((after for after in seen if after < clock), default=min(seen))]


def reduction_of(
    table: Table, view: Callable[[], ClusterView]
) -> tuple[Callable[[int], bool], Callable[[], int]]:
    """Two functions, by the newest view: one is True for clocks of the table under BSP, the other
    counts the workers whose steps an update is the mean of; 0 if it is of no mean.
    """
    settings = SettingByClock()

    def newest() -> Table:
        return view().tables_by_id.get(table.table_id, table)  # without it, it was removed

    def is_bsp(clock: int) -> bool:
        return settings.at(newest(), clock).mode is Mode.BSP

    def mean_of() -> int:
        setting = newest().consistency
        if setting.mode is not Mode.BSP or table.spec.reduction is not Reduction.MEAN:
            return 0
        return max(len(view().awaited_ranks) - setting.backup_workers, 1)

    return is_bsp, mean_of
