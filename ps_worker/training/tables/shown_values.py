"""The values that a worker writes into one table's parameters: those that it has pulled; with `Add`
and a codec that sends a part of each update, plus what this worker has still to send.

    servers:  value                 + what is sent of each worker's updates
    worker:   value + what is left  -> its optimizer goes on from here

Rules:
    - Without what is left, a gradient would not know of it, and the optimizer would ask for it once
      more in each step until it is sent.
    - An update begins at the shown values. So whatever they were, it is only what the optimizer
      moved, and nothing counts twice.

Reference: Xie et al., "CSER: Communication-efficient SGD with Error Reset" (2020): what is left
    moves the worker's own model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ps_core.tables.table import Table
from ps_worker.spec.flat_layout import FlatLayout
from ps_worker.training.tables.staging import FlatBuffer

if TYPE_CHECKING:
    from ps_worker.steps.steps import PushResiduals


class ShownValues:
    """The shown values of one table.

    Args:
        left: what the pushes have left, if it is shown.

    Attributes:
        buffer: of the values; it is `received` if nothing is added.
    """

    def __init__(
        self,
        table: Table,
        layout: FlatLayout,
        received: FlatBuffer,
        left: PushResiduals | None = None,
    ) -> None:
        self._table = table
        self._received = received
        self._left = left
        is_own = left is not None
        self.buffer = FlatBuffer(layout, is_pinned=not layout.is_frozen) if is_own else received

    def take(self) -> None:
        """Take the pulled values, and what is left unless it is hidden."""
        if self._left is None:
            return
        if not self._left.are_shown:
            self.buffer.values.copy_(self._received.values)
            return
        self._left.learn_ends()
        size = self._table.spec.block_elements
        for block in range(self._table.block_count):
            part = slice(block * size, block * size + self._table.block_length(block))
            left = torch.from_numpy(self._left.of_block(block))
            torch.add(self._received.values[part], left, out=self.buffer.values[part])

    def hide_left(self, *, is_hidden: bool) -> None:
        """Take the values of all workers, until the next step."""
        if self._left is not None:
            self._left.are_shown = not is_hidden
