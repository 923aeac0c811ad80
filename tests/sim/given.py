"""What the scheduler has told under a number, for good.

Oracles:
    EPOCH  Under one epoch a range has one primary, and one set of backups, whoever is told of it
           and whenever (S8). A range that is handed over keeps its members and its term,
           and moves by two epochs (S9).
    GIVEN  The number of a view, of a table's change and of a checkpoint is given once, whichever
           scheduler gives it (S18): what was told of one is not another's.
"""

from __future__ import annotations

from typing import NamedTuple

from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.keys import RangeId, TableId

_HAND_OVER_EPOCHS = 2


class _Configuration(NamedTuple):
    primary: int | None
    backups: tuple[int, ...]
    term: int
    placed_epoch: int

    @classmethod
    def of(cls, assignment: RangeAssignment) -> _Configuration:
        found = assignment
        return cls(found.primary, found.backups, found.term, found.placed_epoch)

    @property
    def members(self) -> set[int | None]:
        return {self.primary, *self.backups}


class GivenNumbers:
    """What was told in one timeline."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._configurations: dict[tuple[RangeId, int], _Configuration] = {}
        self._changes: dict[tuple[TableId, int], object] = {}
        self._cuts: dict[int, bool] = {}

    def told(self, view: ClusterView) -> None:
        """A view is told."""
        before, self._view = self._view, view
        if before is not None and before.view_number == view.view_number:
            assert before == view, f"GIVEN: view {view.view_number} is {view}; it was {before}"
        for assignment in view.ranges:
            self._check(assignment, before)
        for table in view.tables:
            if table.proposed is not None:
                self._check_change(table.table_id, table.proposed)
        if view.checkpoint is not None:
            number, is_cut = view.checkpoint.number, view.checkpoint.is_cut
            is_older = number < max(self._cuts, default=0)
            assert not is_older and is_cut >= self._cuts.get(number, False), (  # noqa: PT018
                f"GIVEN: checkpoint {number} is proposed; told before: {self._cuts}"
            )
            self._cuts[number] = is_cut

    def _check(self, assignment: RangeAssignment, view: ClusterView | None) -> None:
        range_id, epoch = assignment.range_id, int(assignment.assignment_epoch)
        found = _Configuration.of(assignment)
        known = self._configurations.setdefault((range_id, epoch), found)
        assert known == found, f"EPOCH: range {range_id} is {found} at {epoch}; it was {known}"
        before = None if view is None else view.ranges[range_id]
        if before is None or None in (before.primary, found.primary) or before.term != found.term:
            return
        passed, was = epoch - before.assignment_epoch, _Configuration.of(before)
        if was.primary != found.primary:
            is_whole = passed > _HAND_OVER_EPOCHS or was.members == found.members
            assert passed >= _HAND_OVER_EPOCHS and is_whole, (  # noqa: PT018
                f"EPOCH: range {range_id} is handed over, from {before} to {assignment}"
            )

    def _check_change(self, table_id: TableId, change: TableChange) -> None:
        wanted = change.consistency, change.join, change.checkpoint
        known = self._changes.setdefault((table_id, change.number), wanted)
        assert known == wanted, (
            f"GIVEN: change {change.number} of table {table_id} is {wanted}; it was {known}"
        )
