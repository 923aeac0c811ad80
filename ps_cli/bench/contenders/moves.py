"""What a worker does with a table: what a user's script would do, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ps_worker as ps

ELEMENT_BYTES = 4
PRIVATE = "/private"
"""Behind the name of an optimizer: its gradient lies in an array of numpy's own."""

OPTIMIZERS: dict[str, ps.SGD | ps.Adam] = {"sgd": ps.SGD(lr=0.1), "adam": ps.Adam(lr=1e-3)}


class Buffers:
    """A gradient, and room for the values that come back; every page of both is there.

    Args:
        byte_count: of each.
        is_shared: the gradient lies where servers on this host read it, as `DistributedOptimizer`
            keeps it; otherwise in an array of numpy's own.
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
    """Push, pull and both, on one table.

    Args:
        client: the worker's session.
        table: a table as large as the buffers.
        buffers: several `Moves` may share them, one at a time.
    """

    def __init__(self, client: ps.Client, table: ps.TableHandle, buffers: Buffers) -> None:
        self._client = client
        self._table = table
        self._buffers = buffers

    def push(self) -> None:
        """A step, until it is committed."""
        self._client.wait(self._client.push(self._table, self._buffers.gradient, copy=False))

    def pull(self) -> None:
        """The parameters, until they are in the caller's buffer."""
        self._client.pull(self._table, out=self._buffers.values)

    def round(self) -> None:
        """A push, then a pull that has it in it."""
        ticket = self._client.push(self._table, self._buffers.gradient, copy=False)
        self._client.pull(self._table, out=self._buffers.values)
        self._client.wait(ticket)

    def push_pull(self) -> None:
        """Both with one verb."""
        self._client.push_pull(self._table, self._buffers.gradient, out=self._buffers.values)

    def by_name(self) -> dict[str, Callable[[], None]]:
        """Those that are measured in bytes a second."""
        return {"push": self.push, "pull": self.pull, "round": self.round}
