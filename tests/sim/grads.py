"""What is pushed in a simulation."""

from __future__ import annotations

from typing import NamedTuple

from ps_server.values.contributions import Contribution
from ps_server.values.row_gradients import RowGradients

EDIT = 100
"""The revision of what an edit changes a block's values to; one more, where one worker means
another; two more for each array of optimizer state, and ten for each name."""

VALUES, STEP, FIRST, SECOND, LAID_VALUES = range(5)
"""What an edit is of: values, at once; or the steps of each tensor, which put in place what was
laid beside before: its moments, and values."""

NAMES = (b"edit", b"other", b"late")
"""What seals say; a worker that means another edit than all others says `other`."""


class Grad(NamedTuple):
    """One worker's gradient of one block."""

    clock: int
    rank: int
    block: int
    revision: int
    pulled: int | None = None
    """Others' updates of the block that its worker had seen."""
    incarnation: int = 0
    """Its worker's."""

    @property
    def is_edit(self) -> bool:
        """Whether it is what an edit changes the block to; `pulled` is its table then."""
        return self.revision >= EDIT

    @property
    def array(self) -> int:
        """Of an edit: what it is of."""
        return (self.revision - EDIT) // 2 % 5

    @property
    def name(self) -> int:
        """Of an edit: under which name it is laid beside, as a place in `NAMES`."""
        return (self.revision - EDIT) // 10


class Arrived(Grad):
    """A gradient at a server: the same identity, and what the server has of its numbers."""

    part: Contribution | RowGradients
    delay: tuple[int, int] | None = None
    """Where it is corrected for its delay: how many gradients were in the block when its worker was
    given it, and when it was summed.
    """
