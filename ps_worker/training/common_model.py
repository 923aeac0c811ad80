"""Gives all workers the same parameters: two barriers with a pull between them (SEMANTICS S17).

Rules:
    - The next call resumes one that was interrupted. So does the next step, which otherwise only
      some workers would pull.
    - Changes that the script makes after an interruption stay: they are an edit of the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ps_core.errors import EditRefused, InvalidConfig
from ps_worker.client.client import Client
from ps_worker.training.interrupts import uninterrupted
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.planned_edits import names_of
from ps_worker.training.tables.trained_table import TrainedTable

_PULL = ""
"""The pull, among the names of barriers."""


class CommonModel:
    """The meetings of one model's workers; `tables` and `buffers` are the owner's lists."""

    def __init__(
        self,
        client: Client,
        name: str,
        tables: Sequence[TrainedTable],
        buffers: Sequence[BufferTable],
    ) -> None:
        self._client = client
        self._name = name
        self._tables = tables
        self._buffers = buffers
        self._left: deque[str] = deque()  # the barriers, and the pull, that have not ended

    @property
    def is_interrupted(self) -> bool:
        """True if a meeting was begun and has not ended."""
        return bool(self._left)

    def meet(self, timeout_s: float | None, *, is_pulled: bool) -> None:
        """Wait until all workers have called this, and have the model; raises as
        `DistributedOptimizer.synchronize`. `is_pulled` is False if they have the same anyway.
        """
        went_on = self.is_interrupted
        if not went_on:
            if is_pulled:
                self._check_unchanged()
            # After the first barrier no worker takes a step, until all have passed the second.
            self._left.append(f"synchronize {self._name}")
            self._left.extend([_PULL, f"synchronized {self._name}"] if is_pulled else [])
        self.go_on(timeout_s)
        if went_on and is_pulled:
            self._check_unchanged()

    def go_on(self, timeout_s: float | None = None) -> None:
        """End a meeting that was interrupted, if one was. Changed parameters keep their values."""
        try:
            while self._left:
                if self._left[0] == _PULL:
                    self._pull_all()
                else:
                    self._client.barrier(self._left[0], timeout_s=timeout_s)
                self._left.popleft()
        except BaseException as error:
            if isinstance(error, InvalidConfig):  # it has ended for all
                self._left.clear()
            if _PULL in self._left:
                parts: list[TrainedTable | BufferTable] = [*self._tables, *self._buffers]
                with uninterrupted():
                    for part in parts:
                        part.left()
            raise

    def _check_unchanged(self) -> None:
        edited = {table: indexes for table in self._tables if (indexes := table.edited())}
        if edited:
            raise EditRefused(
                f"parameter {names_of(edited)} of '{self._name}' was changed since the last "
                "step, and synchronize would give it the servers' value. Undo the change, or take "
                "a step() first"
            )

    def _pull_all(self) -> None:
        """Pull all parameters and buffers, while no worker takes a step."""
        pulled = [buffers for buffers in self._buffers if buffers.is_pulled]
        for table in self._tables:
            table.begin_refresh()
        for buffers in pulled:
            buffers.begin_pull()
        for table in self._tables:
            table.finish_refresh()
        with uninterrupted():
            for table in self._tables:
                table.write_parameters()
        for buffers in pulled:
            buffers.finish()
