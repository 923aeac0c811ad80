"""Gives all workers the same parameters: two barriers with a pull between them (SEMANTICS S17).

    begun      this worker waits until each worker has taken its last step
    met        all have; no worker takes a step
    pulled     this worker has the model, and waits until all have it

Rules:
    - The next call resumes one that was interrupted. So does the next step, which otherwise only
      some workers would pull.
    - Changes that the script makes after an interruption stay: they are an edit of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from ps_core.errors import EditRefused, InvalidConfig
from ps_worker.client.client import Client
from ps_worker.training.interrupts import uninterrupted
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.planned_edits import names_of
from ps_worker.training.tables.trained_table import TrainedTable


class _Stage(IntEnum):
    NONE = 0
    BEGUN = 1
    MET = 2
    PULLED = 3


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
        self._stage = _Stage.NONE
        self._is_pulled = True

    @property
    def is_interrupted(self) -> bool:
        """True if a meeting was begun and has not ended."""
        return self._stage is not _Stage.NONE

    def meet(self, timeout_s: float | None, *, is_pulled: bool) -> None:
        """Wait until all workers have called this, and have the model; raises as
        `DistributedOptimizer.synchronize`. `is_pulled` is False if they have the same anyway.
        """
        went_on = self.is_interrupted
        if not went_on:
            if is_pulled:
                self._check_unchanged()
            self._is_pulled, self._stage = is_pulled, _Stage.BEGUN
        self.go_on(timeout_s)
        if went_on and is_pulled:
            self._check_unchanged()

    def go_on(self, timeout_s: float | None = None) -> None:
        """End a meeting that was interrupted, if one was. Changed parameters keep their values."""
        try:
            if self._stage is _Stage.BEGUN:
                self._client.barrier(f"synchronize {self._name}", timeout_s=timeout_s)
                self._stage = _Stage.MET if self._is_pulled else _Stage.NONE
            if self._stage is _Stage.MET:
                self._pull_all()
                self._stage = _Stage.PULLED
            if self._stage is _Stage.PULLED:
                self._client.barrier(f"synchronized {self._name}", timeout_s=timeout_s)
                self._stage = _Stage.NONE
        except BaseException as error:
            if isinstance(error, InvalidConfig):  # it has ended for all
                self._stage = _Stage.NONE
            if self._is_pulled and self._stage in (_Stage.BEGUN, _Stage.MET):
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
