"""What a worker writes down of its steps for `pushpull compare`.

A record is a file `worker-RANK.jsonl` in the directory of the setting `record`; each line is an
object whose `kind` says what it is:

    start     rank, worker_count, began_s (of the host's monotonic clock; t_s count from it)
    table     name, optimizer, consistency: what a table of the script turned out to be
    step      clock, t_s (its end), and what `StepLine` has
    report    t_s, clock, loss: a loss that belongs to no step of a DistributedOptimizer
    quality   t_s, measures: how good the model is at the end, by name
    end       t_s: the worker has closed its client

Rules:
    - A loss is reported after its step, so the line of a step is written when the next begins.
    - Lines are written whole and at once: what a worker that is killed has recorded can be read.
    - A number that is not finite is null.
    - Workers that record begin their first step together.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from ps_core.errors import InvalidConfig
from ps_core.tables import TableSpec
from ps_runtime.system.clock import now_s


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step of a DistributedOptimizer.

    Attributes:
        clock: the highest clock of its tables.
        compute_s: from the end of the step before to the call of `step`; where computation is
            emulated with the time that was added.
        send_s: in `step`, until all was handed over.
        commit_s: then until the servers had committed it. BSP: until all workers' steps were there.
        read_s: then until the parameters were here. SSP: until no worker was too far behind.
        staleness: the most of any block.
        rejected: blocks that were too stale.
        discarded: some part of a table formed its update without the step.
        applied: False if the step was skipped (a gradient that is not finite).
    """

    clock: int
    compute_s: float
    send_s: float
    commit_s: float
    read_s: float
    staleness: int
    rejected: int
    discarded: bool
    applied: bool


class StepRecord:
    """A worker's record; does nothing where no directory is given. Thread-safe.

    Args:
        directory: where the file is written; made if it is not there. Empty records nothing.
        rank: the worker's.
        worker_count: of the cluster.

    Raises:
        InvalidConfig: the file cannot be written.
    """

    def __init__(self, directory: str, rank: int, worker_count: int) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._step: dict[str, object] | None = None
        self._began_s = now_s()
        if not directory:
            return
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            path = Path(directory) / f"worker-{rank}.jsonl"
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InvalidConfig(
                f"record is '{directory}', where nothing can be written: {error.strerror}"
            ) from error
        self._write(
            {"kind": "start", "rank": rank, "worker_count": worker_count, "began_s": self._began_s}
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._file is not None

    def table(self, spec: TableSpec) -> None:
        """The script has made a table, or opened one that it would have made."""
        with self._lock:
            self._write(
                {
                    "kind": "table",
                    "name": spec.name,
                    "optimizer": spec.optimizer.label,
                    "consistency": str(spec.consistency),
                }
            )

    def step(self, line: StepLine) -> None:
        """A step has ended now."""
        with self._lock:
            self._flush()
            self._step = {"kind": "step", "t_s": self._now_s(), **asdict(line)}

    def loss(self, loss: float, clock: int) -> None:
        """The loss of the last step; of no step of ours, if that one has its loss."""
        with self._lock:
            if self._step is not None and "loss" not in self._step:
                self._step["loss"] = _finite(loss)
                return
            self._write(
                {"kind": "report", "t_s": self._now_s(), "clock": clock, "loss": _finite(loss)}
            )

    def quality(self, measures: Mapping[str, float]) -> None:
        """How good the model is."""
        with self._lock:
            self._flush()
            finite = {name: _finite(value) for name, value in measures.items()}
            self._write({"kind": "quality", "t_s": self._now_s(), "measures": finite})

    def close(self) -> None:
        """Write what is left. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._flush()
                self._write({"kind": "end", "t_s": self._now_s()})
                self._file.close()
                self._file = None

    def _now_s(self) -> float:
        return now_s() - self._began_s

    def _flush(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._write(step)

    def _write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
