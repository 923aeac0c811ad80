"""The servers' own values of one table, of which a worker has rounded ones where the parameters or
its pulls have fewer bits.

    script:   p.data.mul_(mask)
    servers:  what the mask has changed <-- the worker's;  the rest <-- their own, unrounded

Rules:
    - An edit sends whole tensors. An element that still has the bits that were pulled is sent as
      the servers have it. Otherwise an edit in each step would round a whole tensor each time, and
      updates smaller than that would be lost.
    - Custom updates are an exception: servers give no values in the dtype of their arithmetic then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ps_core.tables.elements import Codec
from ps_core.tables.optimizers import VALUES_ARRAY
from ps_worker.client.pending import PendingTickets
from ps_worker.spec.flat_layout import TORCH_DTYPE, FlatLayout
from ps_worker.training.tables.inspection import differing_elements

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import TableHandle


def arithmetic_dtype(handle: TableHandle) -> torch.dtype:
    """The dtype in which servers keep a table."""
    is_double = handle.spec.arithmetic_codec is Codec.FP64
    return torch.float64 if is_double else torch.float32


class UnroundedValues:
    """Those of one table, for its next edit.

    Attributes:
        are_here: they were pulled, and no edit has used them.
    """

    def __init__(self, client: Client, handle: TableHandle, layout: FlatLayout) -> None:
        self._client = client
        self._handle = handle
        self._layout = layout
        self._values: torch.Tensor | None = None
        self._pending = PendingTickets(client)

    @property
    def are_here(self) -> bool:
        return self._values is not None

    def begin_pull(self) -> None:
        """Begin to pull them, where the worker has rounded ones; `wait` waits."""
        self._values, self._pending = None, PendingTickets(self._client)
        dtype, spec = arithmetic_dtype(self._handle), self._handle.spec
        is_rounded = dtype is not TORCH_DTYPE[spec.dtype] or self._handle.codecs.pull is not None
        if is_rounded and spec.optimizer.has_array(VALUES_ARRAY):
            self._values = torch.empty(self._handle.element_count, dtype=dtype)
            raw = self._values.view(torch.uint8).numpy()
            self._pending.add(self._client.pulls.start_state(self._handle, raw, VALUES_ARRAY))

    def wait(self) -> None:
        """Wait for them; blocks and raises as `Client.wait`."""
        self._pending.wait()

    def put_into(
        self, sent: torch.Tensor, now: torch.Tensor, pulled: torch.Tensor, indexes: Collection[int]
    ) -> None:
        """Put them in the place of elements of these parameters that are as they were pulled.

        Shapes:
            all: the elements of the table, 1-D; `sent` in the dtype of the table's arithmetic,
            `now` and `pulled` in that of its parameters.
        """
        values, self._values = self._values, None
        if values is None:
            return
        for index in indexes:
            entry = self._layout.placed[index]
            part = slice(entry.offset, entry.end)
            is_changed = differing_elements(now[part], pulled[part])
            sent[part] = torch.where(is_changed, sent[part], values[part])


def pull_unrounded(each: Iterable[UnroundedValues]) -> None:
    """Pull the values of several tables. Blocks and raises as `Client.wait`."""
    begun = list(each)
    for values in begun:
        values.begin_pull()
    for values in begun:
        values.wait()
