"""A step of a model that was sealed and has not ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_core.errors import EditRefused
from ps_worker.steps.steps import Pulled, PushTicket
from ps_worker.training.clipping import UpdateScaling
from ps_worker.training.planned_edits import Edited
from ps_worker.training.tables.gradient_marks import GradientMarks
from ps_worker.training.tables.trained_table import TrainedTable


@dataclass(slots=True, eq=False)
class SealedStep:
    """A step that was sealed on all tables and has not ended; an edit is one."""

    tickets: Mapping[TrainedTable, PushTicket]  # of the tables that are awake
    scaling: UpdateScaling | None
    is_skipped: bool  # it takes no part in the update
    problem: str  # the name of a gradient that was not finite, in words; else empty
    pulled: dict[TrainedTable, Pulled] = field(default_factory=dict)
    edited: Edited = field(default_factory=dict)
    is_edit: bool = False
    is_staged: bool = False  # it is an edit that a later one puts in place
    refused: EditRefused | None = None  # the error, if the edit was refused
    is_taken_over: bool = False  # its result was written into the parameters
    marks: GradientMarks | None = None  # of its gradients, if hooks do not tell of all
    has_gradients: bool = False  # gradients of the next step have come since

    def finish(self) -> None:
        """Wait for the end of the step, and of the pull, on every table; notes a refused edit,
        whose clock ends all the same. Blocks and raises as `TrainedTable.finish`.
        """
        for table in self.tickets:
            if (pulled := self._finished(table)) is not None:
                self.pulled[table] = pulled

    def _finished(self, table: TrainedTable) -> Pulled | None:
        while True:
            try:
                return table.finish()
            except EditRefused as error:  # each ticket raises once; the pull is still to come
                self.refused = self.refused or error
