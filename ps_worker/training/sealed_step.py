"""A step of all tables of a model, between its seals and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ps_core.errors import EditRefused, InvalidConfig, PushpullError
from ps_worker.steps.steps import Pulled, PushTicket
from ps_worker.training.among_workers.workers_model import explained
from ps_worker.training.clipping import UpdateScaling
from ps_worker.training.tables.gradient_marks import GradientMarks

if TYPE_CHECKING:
    from ps_worker.training.planned_edits import Edited
    from ps_worker.training.tables.trained_table import TrainedTable


@dataclass(slots=True, eq=False)
class SealedStep:
    """A step that was sealed on all tables and has not ended."""

    tickets: Mapping[TrainedTable, PushTicket]  # of the tables that are awake
    scaling: UpdateScaling | None
    is_skipped: bool  # it takes no part in the update
    problem: str  # the name of a gradient that was not finite, in words; else empty
    pulled: dict[TrainedTable, Pulled] = field(default_factory=dict)
    edited: Edited = field(default_factory=dict)
    is_edit: bool = False
    is_staged: bool = False  # it is an edit that a later one puts in place
    is_early: bool = False  # an outer step that `synchronize` takes
    refused: EditRefused | None = None  # the error, if the edit was refused
    is_taken_over: bool = False  # its result was written into the parameters
    marks: GradientMarks | None = None  # of its gradients, if hooks do not tell of all
    has_gradients: bool = False  # gradients of the next step have come since
    failure: PushpullError | None = None  # of rows: the first, while others are waited for

    def finish(self, table: TrainedTable) -> Pulled | None:
        """As `TrainedTable.finish`; notes a refused edit, whose clock ends all the same, and goes
        on to wait for the pull.
        """
        while True:
            try:
                return table.finish()
            except EditRefused as error:  # each ticket raises once
                self.refused = self.refused or error
            except InvalidConfig as error:
                raise explained(error) from None
