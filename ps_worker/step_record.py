"""What a worker writes down of its steps for `pushpull compare`, and the pace of emulated ones.

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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from ps_core.errors import InvalidConfig
from ps_core.tables import TableSpec
from ps_runtime.clock import now_s
from ps_worker.optimizers import Assign
from ps_worker.settings import BSP
from ps_worker.straggler import ComputeTime
from ps_worker.tickets import PushTicket, StepResult

if TYPE_CHECKING:
    from ps_worker.client import Client


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


START_TABLE = "pushpull-start"
"""A table whose one step is a barrier."""


def _begin_together(client: Client) -> None:
    """Waits for all workers, so that no run has the seconds in it that some start later.

    Without it those of a BSP run would wait in their first step, and those of an ASP run would have
    trained alone; what is compared is how they wait once all are there.
    """
    table = client.create_table(START_TABLE, 1, optimizer=Assign(), consistency=BSP())
    if table.clock == 0:  # one barrier a client, whatever number of optimizers it has
        client.push_pull(table, np.zeros(1, dtype=np.float32))


class StepTimes:
    """Where the time of one optimizer's steps goes; waits where computation is emulated.

    Args:
        client: the optimizer's.

    Blocking: where steps are recorded, until all workers of the cluster are here.

    Raises:
        InvalidConfig: the emulated straggler is a rank that the cluster does not have.
        WaitExpired: workers are missing.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._compute: ComputeTime | None = client.compute_time
        if self._compute is not None:
            self._compute.check_fits(client.world_size)
        if client.record.is_on:
            _begin_together(client)
        self._tickets: Sequence[PushTicket] = ()
        self._committed_s: list[float] = []
        self._ended_s = self._computed_s = self._sealed_s = now_s()

    def computed(self, clock: int) -> None:
        """The gradients of step `clock` are there.

        Blocking: until the emulated computation would be done, which began when the step before
        ended; the computation that was real counts in it.
        """
        if self._compute is not None:
            client = self._client
            needed_s = self._compute.seconds(client.rank, client.world_size, clock)
            left_s = self._ended_s + needed_s - now_s()
            if left_s > 0:
                time.sleep(left_s)
        self._computed_s = now_s()

    def sealed(self, tickets: Sequence[PushTicket]) -> None:
        """All of the step has been handed over; `tickets` tell when it is committed."""
        self._sealed_s = now_s()
        if not self._client.record.is_on:
            return
        self._tickets = tickets
        times: list[float] = []
        self._committed_s = times

        def committed(_: Future[StepResult]) -> None:
            times.append(now_s())

        for ticket in tickets:
            ticket.future.add_done_callback(committed)

    def ended(self) -> None:
        """The parameters are here."""
        computed_from_s, self._ended_s = self._ended_s, now_s()
        # A skipped step's blocks may have been refused; that is the optimizer's to say.
        futures = [ticket.future for ticket in self._tickets if ticket.done()]
        results = [future.result() for future in futures if future.exception() is None]
        if not results:
            return
        # A commit that came together with the values may not have been noted yet.
        has_all = len(self._committed_s) == len(self._tickets)
        committed_s = max(self._committed_s) if has_all else self._ended_s
        self._client.record.step(
            StepLine(
                clock=max(result.clock for result in results),
                compute_s=self._computed_s - computed_from_s,
                send_s=self._sealed_s - self._computed_s,
                commit_s=committed_s - self._sealed_s,
                read_s=max(0.0, self._ended_s - committed_s),
                staleness=max(result.staleness for result in results),
                rejected=sum(len(result.rejected) for result in results),
                discarded=any(result.discarded for result in results),
                applied=all(result.applied for result in results),
            )
        )
        self._tickets = ()
