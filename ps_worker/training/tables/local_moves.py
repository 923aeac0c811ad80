"""The distance that a worker's own optimizer moved one table's parameters: what `Add` and `Outer`
push. Then, for `Outer`, how the worker merges the values that the servers made of it.

    measured --pushed--> sealed --pulled--> arrived --> merged

Rules:
    - The pseudo-gradient of a block is its values as they were pulled last, minus the worker's own.
      The update of `Add` is the opposite; it begins at the values that were shown last.
    - A step exchanges the blocks of one fragment. All others keep their values, pulled and own.
    - Merging moves the parameters by `elastic` times the pulled values minus those that were
      measured. Steps in between stay, as moves of the next exchange; parameters that have not moved
      since become the pulled values, if `elastic` is 1.
    - A block that the servers did not take stays moved at the worker (`elastic` of 1), or keeps its
      values (below 1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from ps_core.tables.table import Table
from ps_worker.spec.flat_layout import FlatLayout, PlacedTensor
from ps_worker.spec.optimizers import Outer, ServerOptimizer
from ps_worker.spec.values import BlockValues
from ps_worker.training.tables.inspection import is_finite
from ps_worker.training.tables.staging import FlatBuffer, blocks_in


class _Piece(NamedTuple):
    """The elements of one parameter in one block."""

    entry: PlacedTensor
    elements: slice  # of the table

    @property
    def _inside(self) -> slice:
        offset = self.entry.offset
        return slice(self.elements.start - offset, self.elements.stop - offset)

    def own(self) -> torch.Tensor:
        """The parameter's values, 1-D."""
        return self.entry.tensor.detach().reshape(-1)[self._inside]

    def set_own(self, values: torch.Tensor) -> None:
        """Write values into the parameter."""
        flat = self.entry.tensor.detach().reshape(-1)  # a view, if it is contiguous
        flat[self._inside] = values
        if not self.entry.tensor.is_contiguous():
            self.entry.tensor.detach().copy_(flat.view(self.entry.tensor.shape))


class LocalMoves:
    """The moves of one table's parameters.

    Attributes:
        fragment: the blocks that the present step exchanges; None: all, whose values the worker
            takes over as they are.
        has_arrived: the values of a fragment are here, and wait for `merge`.
    """

    def __init__(
        self, table: Table, layout: FlatLayout, received: FlatBuffer, optimizer: ServerOptimizer
    ) -> None:
        self.fragment: range | None = None
        self.has_arrived = False
        self._table = table
        self._layout = layout
        self._received = received
        self._outer = optimizer if isinstance(optimizer, Outer) else None
        self._moved: FlatBuffer | None = None
        self._measured: torch.Tensor | None = None  # the parameters, if the step will be merged

    def choose(self, number: int, first_block: int) -> None:
        """Choose fragment `number` for the next step: each `fragments`-th block of the model, in
        which this table's begin with `first_block`.
        """
        assert self._outer is not None  # noqa: S101 - others have none
        count, step = self._table.block_count, self._outer.fragments
        self.fragment = range((number - first_block) % step, count, step)

    def measure(self, *, is_shared: bool, may_be_infinite: bool) -> PlacedTensor | None:
        """Measure how far the parameters have moved: `Add` from the shown values on, `Outer` back
        to the pulled ones. Returns one whose distance is not finite, if it must be.
        """
        if self._moved is None:
            self._moved = FlatBuffer(self._layout, is_shared=is_shared)
        if self.fragment is not None and self._measured is None:
            self._measured = torch.empty_like(self._received.values)
        for piece in self._pieces(self.exchanged):
            entry, elements = piece
            out, pulled = self._moved.values[elements], self._received.values[elements]
            out.copy_(piece.own())
            if self._measured is not None:
                self._measured[elements] = out
            if self._outer is not None:
                torch.sub(pulled, out, out=out)
            else:
                out.sub_(pulled)
            if not may_be_infinite and not is_finite(out):
                return entry
        return None

    def blocks(self) -> Iterator[BlockValues]:
        """The blocks that were measured."""
        assert self._moved is not None  # noqa: S101 - as it says
        blocks = blocks_in(self._table, self._moved.values)
        return (each for each in blocks if each.block in self.exchanged)

    def move_again(self, blocks: Collection[int], but: Collection[int] = ()) -> None:
        """Move the parameters, except `but` (places in the layout), once more, in blocks that the
        servers did not take.
        """
        assert self._moved is not None  # noqa: S101 - they were pushed
        kept = [self._layout.placed[index] for index in but]
        for piece in self._pieces(blocks):
            if piece.entry not in kept:
                own = piece.own()
                piece.set_own(own - self._moved.values[piece.elements].to(own.device))

    # --- a fragment

    def arrived(self, not_taken: Collection[int]) -> None:
        """The values of the fragment were pulled; the servers did not take some of its blocks."""
        assert self._moved is not None and self._measured is not None  # noqa: S101, PT018
        for block in not_taken:
            elements = self._elements(block)
            if self._elastic < 1.0:
                self._measured[elements] = self._received.values[elements]
            else:
                self._measured[elements] += self._moved.values[elements]
        self.has_arrived = True

    def merge(self) -> None:
        """Merge the values of the fragment into the parameters, if they have arrived."""
        if not self.has_arrived:
            return
        assert self._measured is not None  # noqa: S101 - it is the fragment's
        for piece in self._pieces(self.exchanged):
            own = piece.own()
            pulled = self._received.values[piece.elements].to(own.device)
            measured = self._measured[piece.elements].to(own.device)
            moved = own + self._elastic * (pulled - measured)
            if self._elastic == 1.0:
                moved = torch.where(own == measured, pulled, moved)
            piece.set_own(moved)
        self.has_arrived = False

    # --- in checkpoints

    @property
    def unmerged(self) -> torch.Tensor | None:
        """The values that were measured of the fragment that has arrived and is not merged."""
        return self._measured if self.has_arrived else None

    def load_unmerged(self, measured: torch.Tensor | None) -> None:
        """Go on from `unmerged`, with its fragment chosen again."""
        self.has_arrived = measured is not None
        self._measured = measured

    # --- elements

    @property
    def _elastic(self) -> float:
        return 1.0 if self._outer is None else self._outer.elastic

    @property
    def exchanged(self) -> range:
        """The blocks that the present step exchanges."""
        return range(self._table.block_count) if self.fragment is None else self.fragment

    def _elements(self, block: int) -> slice:
        begin = block * self._table.spec.block_elements
        return slice(begin, begin + self._table.block_length(block))

    def _pieces(self, blocks: Collection[int]) -> Iterator[_Piece]:
        for block in blocks:
            start = self._elements(block).start
            for segment in self._table.segments(block):
                elements = slice(start + segment.begin, start + segment.end)
                yield _Piece(self._layout.placed[segment.tensor], elements)
