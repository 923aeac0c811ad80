"""A worker's record of its steps, for `pushpull compare`.

A record is `worker-RANK.jsonl` in the directory of the setting `record`; each line has a `kind`:

    start     rank, worker_count, began_s (of the host's monotonic clock; t_s count from it)
    table     name, optimizer, consistency, push_codec, pull_codec, inner_steps: of a table of the
              script
    step      clock, t_s (its end), and the fields of `StepLine`
    report    t_s, clock, loss: a loss that belongs to no step of a DistributedOptimizer
    quality   t_s, measures: of the model at the end, by name
    end       t_s, pushed_bytes, pulled_bytes: the worker has closed its client; of all payloads

Rules:
    - The line of a step is written when the next step begins, because its loss comes after it.
    - Lines are written whole and at once, so the record of a killed worker can be read.
    - A record that takes no more (a full disk) ends there, which is logged; training goes on.
    - A number that is not finite is null.
    - Workers that record begin their first step together.
    - A process that records there again, as after a restore in place, goes on in its file with
      another line `start`, from which the t_s after it count.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from ps_core.codecs.choices import name_of
from ps_core.errors import InvalidConfig
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.compression.table_codecs import TableCodecs


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step of a DistributedOptimizer.

    Attributes:
        clock: the highest clock of its tables.
        compute_s: from the last step's end to the call of `step`, emulated computation included.
        send_s: in `step`, until all gradients were handed over.
        commit_s: then until the servers had committed it. BSP: until all workers' steps were there.
        read_s: then until the parameters were here. SSP: until no worker was too far behind.
        staleness: the highest of any block; None for an inner step (`Outer`), which pushes none.
        rejected: the number of blocks that were too stale.
        discarded: some range of a table was updated without the step.
        applied: False if the step was skipped (a gradient that is not finite).
        is_early: it is an outer step that `synchronize` took, and no step of the script.
    """

    clock: int
    compute_s: float
    send_s: float
    commit_s: float
    read_s: float
    staleness: int | None
    rejected: int
    discarded: bool
    applied: bool
    is_early: bool = False


_begun: set[Path] = set()
"""The files of this process."""


class StepRecord:
    """A worker's record, in `directory`; empty records nothing. Thread-safe.

    Attributes:
        is_on: it was begun, though its disk may have taken no more since: workers that record begin
            their first step together.
    """

    def __init__(self, directory: str, rank: int, worker_count: int) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._step: dict[str, object] | None = None
        self._began_s = now_s()
        self.is_on = False
        if not directory:
            return
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            path = Path(directory).resolve() / f"worker-{rank}.jsonl"
            goes_on = path in _begun
            self._file = path.open("a" if goes_on else "w", encoding="utf-8", buffering=1)
            _begun.add(path)
            start = {"rank": rank, "worker_count": worker_count, "began_s": self._began_s}
            self._file.write(_line("start", start))
            self.is_on = True
        except OSError as error:
            raise InvalidConfig(
                f"record is '{directory}', where nothing can be written: {error.strerror}"
            ) from error

    def table(self, spec: TableSpec, codecs: TableCodecs) -> None:
        """Record a table that the script has created, or found created."""
        with self._lock:
            self._write(
                "table",
                name=spec.name,
                optimizer=spec.optimizer.label,
                consistency=str(spec.consistency),
                push_codec=name_of(codecs.push),
                pull_codec=name_of(codecs.pull),
                inner_steps=spec.optimizer.inner_steps,
            )

    def step(self, line: StepLine) -> None:
        with self._lock:
            self._flush()
            self._step = {"t_s": self._now_s(), **asdict(line)}

    def loss(self, loss: float, clock: int) -> None:
        """Record the loss of the last step, or, if that has one, of no step."""
        with self._lock:
            if self._step is not None and "loss" not in self._step:
                self._step["loss"] = _finite(loss)
                return
            self._write("report", t_s=self._now_s(), clock=clock, loss=_finite(loss))

    def quality(self, measures: Mapping[str, float]) -> None:
        with self._lock:
            self._flush()
            finite = {name: _finite(value) for name, value in measures.items()}
            self._write("quality", t_s=self._now_s(), measures=finite)

    def close(self, pushed_bytes: int, pulled_bytes: int) -> None:
        with self._lock:
            self._flush()
            byte_counts = {"pushed_bytes": pushed_bytes, "pulled_bytes": pulled_bytes}
            self._write("end", t_s=self._now_s(), **byte_counts)
            self._close()

    def _now_s(self) -> float:
        return now_s() - self._began_s

    def _flush(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._write("step", **step)

    def _write(self, kind: str, **fields: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(_line(kind, fields))
        except OSError as error:
            logs.warning(
                "steps_not_recorded",
                path=self._file.name,
                error=error.strerror,
                remedy="training goes on; the record has the steps before this line",
            )
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it tries to write what it could not
                file.close()


def _line(kind: str, fields: Mapping[str, object]) -> str:
    return json.dumps({"kind": kind, **fields}) + "\n"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
