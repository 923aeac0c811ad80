"""Pulled values that are written into a table's parameters one after the other, when the script
reads them.

    step() --sealed, committed--> returns; a parameter is read --> waits for its piece

Rules:
    - A table is pulled in pieces, in the order of its parameters, which is mostly that of their
      use. A parameter waits for the pieces up to its last element, and for no more.
    - A parameter is written once. What the script has written into it since the step is not
      overwritten: it is an edit of the next step (SEMANTICS S16). To see that, the values come into
      memory of their own, beside those of the step before, which every parameter had when the step
      was sealed; once all are written the two change places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ps_core.tables.table import Table
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.spec.flat_layout import FlatLayout
from ps_worker.spec.values import Region
from ps_worker.steps.held_values import HeldValues
from ps_worker.training.tables.device_copies import Arrival, from_host
from ps_worker.training.tables.edits import WrittenValues
from ps_worker.training.tables.staging import FlatBuffer

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import Pulled, PullTicket, TableHandle

_MOST_PIECES = 8
"""A piece more lets forward begin earlier, and is a round trip more."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of the table. `is_whole`: what did not come, as unchanged, is there."""

    region: Region
    ticket: PullTicket[Pulled]
    is_whole: bool = False


class AwaitedValues:
    """The values of one table that are on their way, or have not been written."""

    def __init__(
        self,
        client: Client,
        handle: TableHandle,
        layout: FlatLayout,
        received: FlatBuffer,
        held: HeldValues,
        written: WrittenValues,
    ) -> None:
        self._client = client
        self._handle = handle
        self._layout = layout
        self._received = received
        self._held = held
        self._written = written
        self._incoming: FlatBuffer | None = None
        self._held_there, self._asked = HeldValues(), HeldValues()
        self._pieces: list[_Piece] = []
        self._unwritten: list[int] = []

    def __bool__(self) -> bool:
        """True if a parameter has not been written."""
        return bool(self._unwritten)

    def begin(self) -> PullTicket[Pulled]:
        """Begin to pull the table at this worker's clock. Returns the first piece, whose refusal
        explains a step that would wait for ever.
        """
        if self._unwritten:
            self._held_there.forget()
        self._asked = self._held.copy()
        regions = pieces_of(self._handle.table)
        tickets = self._start(regions)
        self._pieces = [_Piece(*each) for each in zip(regions, tickets, strict=True)]
        self._unwritten = list(range(len(self._layout.placed)))
        return tickets[0]

    def write(self, index: int) -> list[Arrival]:
        """Write a parameter, and those before it. Waits for their values, as `Client.wait`; after
        an error the next call pulls again what has not come.

        Returns:
            The arrivals after which the values are no longer read.
        """
        placed = self._layout.placed
        if not self._unwritten or index < self._unwritten[0]:
            return []
        end = placed[index].end
        pieces = [piece for piece in self._pieces if piece.region.begin < end]
        self._pull_again(pieces)
        self._client.wait_all([piece.ticket for piece in pieces])
        for piece in pieces:
            self._bring_unchanged(piece)
        come = pieces[-1].region.end if pieces else 0  # none, if it is without elements
        with uninterrupted(), torch.no_grad():
            ready = [each for each in self._unwritten if placed[each].end <= come]
            changed = self._written.changed_since_sealed(ready)
            moved = [each for each in ready if each not in changed]
            views = self._there.views
            arrivals = from_host([(placed[each].tensor, views[each]) for each in moved])
            self._written.wrote(moved)
            self._written.passed_over(changed)
            self._unwritten = self._unwritten[len(ready) :]
            if not self._unwritten:
                self._received.swap(self._there)
                self._held.swap(self._asked)
                self._held_there = self._asked
                self._written.end()
        return arrivals

    @property
    def _there(self) -> FlatBuffer:
        """The memory that the values come into."""
        if self._incoming is None:
            self._incoming = FlatBuffer(self._layout)
        return self._incoming

    def _bring_unchanged(self, piece: _Piece) -> None:
        """Copy the blocks that did not come, because `received` has them, unless they are there."""
        if piece.is_whole:
            return
        size, here, there = self._handle.table.spec.block_elements, self._received, self._there
        for begin in range(piece.region.begin, piece.region.end, size):
            block, end = begin // size, min(begin + size, piece.region.end)
            is_new = not self._held_there.is_same(self._asked, block)
            if is_new and self._asked.is_same(self._held, block):
                there.values[begin:end] = here.values[begin:end]
        piece.is_whole = True  # not before: Ctrl-C may come between two blocks

    def _pull_again(self, pieces: list[_Piece]) -> None:
        for piece in pieces:
            if piece.ticket.done() and piece.ticket.future.exception() is not None:
                (piece.ticket,) = self._start([piece.region])

    def _start(self, regions: list[Region]) -> list[PullTicket[Pulled]]:
        pulls, raw = self._client.pulls, self._there.raw
        return pulls.start_pieces(self._handle, raw, regions, self._asked)


def pieces_of(table: Table) -> list[Region]:
    """A table in up to `_MOST_PIECES` pieces of whole blocks, of one size but for the last."""
    count, size = table.spec.element_count, table.spec.block_elements
    step = size * -(-table.block_count // _MOST_PIECES)
    spans = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
    return [Region(begin, end, (end - begin,)) for begin, end in spans]
