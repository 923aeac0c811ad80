"""The moves of a worker on a table, as a user's script makes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ps_worker as ps

ELEMENT_BYTES = 4
PRIVATE = "/private"
"""After the name of an optimizer: its gradient is an array in numpy's own memory."""

OPTIMIZERS: dict[str, ps.SGD | ps.Adam] = {"sgd": ps.SGD(lr=0.1), "adam": ps.Adam(lr=1e-3)}


class Buffers:
    """A gradient and an array for pulled values; every page of both is resident.

    Args:
        byte_count: the size of each.
        is_shared: the gradient is in memory that servers on this host read, as that of
            `DistributedOptimizer`; otherwise in numpy's own.
    """

    def __init__(self, byte_count: int, *, is_shared: bool = False) -> None:
        self.element_count = byte_count // ELEMENT_BYTES
        if is_shared:
            self.gradient = ps.empty_shared(self.element_count, np.float32)
        else:
            self.gradient = np.empty(self.element_count, dtype=np.float32)
        self.gradient[:] = 1e-3
        self.values = np.full(self.element_count, 0, dtype=np.float32)


class Moves:
    """Push, pull and both, on a table as large as the buffers; several `Moves` may share buffers,
    one at a time.
    """

    def __init__(self, client: ps.Client, table: ps.TableHandle, buffers: Buffers) -> None:
        self._client = client
        self._table = table
        self._buffers = buffers

    def push(self) -> None:
        """Push, and wait for the commit."""
        self._client.wait(self._client.push(self._table, self._buffers.gradient, copy=False))

    def pull(self) -> None:
        self._client.pull(self._table, out=self._buffers.values)

    def round(self) -> None:
        """Push, and pull values that include it."""
        ticket = self._client.push(self._table, self._buffers.gradient, copy=False)
        self._client.pull(self._table, out=self._buffers.values)
        self._client.wait(ticket)

    def push_pull(self) -> None:
        self._client.push_pull(self._table, self._buffers.gradient, out=self._buffers.values)

    def by_name(self) -> dict[str, Callable[[], None]]:
        """The moves that are measured in bytes per second."""
        return {"push": self.push, "pull": self.pull, "round": self.round}
