"""The settings of one table by clock; a view has only the newest, which may take effect after the
worker's next step (SEMANTICS S6).
"""

from __future__ import annotations

from collections.abc import Callable

from ps_core.cluster_view import ClusterView
from ps_core.consistency import Consistency, Mode
from ps_core.tables.table import Table

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


def bsp_clocks(table: Table, view: Callable[[], ClusterView]) -> Callable[[int], bool]:
    """A function that is True for clocks of the table that are under BSP, by the newest view."""
    settings = SettingByClock()

    def is_bsp(clock: int) -> bool:
        newest = view().tables_by_id.get(table.table_id, table)  # without it, it was removed
        return settings.at(newest, clock).mode is Mode.BSP

    return is_bsp
