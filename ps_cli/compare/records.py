"""Reads the records of a run's workers, which `ps_worker.client.step_record` writes.

The record of a worker that was killed may end within a line: that line is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ps_cli.compare.modes import ComparedMode
from ps_core.consistency import parsed


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table that a script made, with the settings that it had."""

    name: str
    optimizer: str
    mode: ComparedMode


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One step; `ended_s` is on the host's monotonic clock, and `staleness` is None if the step
    pushed nothing (an inner step). `is_early`: an outer step beside the script's own, whose moves
    the inner steps were.
    """

    ended_s: float
    compute_s: float
    send_s: float
    commit_s: float
    read_s: float
    staleness: int | None
    rejected: int
    discarded: bool
    applied: bool
    is_early: bool = False

    @property
    def duration_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.compute_s + self.send_s + self.commit_s + self.read_s


_STEP_FIELDS = [field.name for field in fields(StepEntry)][1:]


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A loss of a worker's step; `at_s` is on the host's monotonic clock."""

    step: int
    at_s: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker of one run. `is_whole` if it ends as the worker's client did."""

    rank: int
    tables: tuple[TableEntry, ...]
    steps: tuple[StepEntry, ...]
    losses: tuple[LossEntry, ...]
    quality: dict[str, float | None]
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    is_whole: bool = True


def read_records(directory: Path) -> tuple[WorkerRecord, ...]:
    """The records in a directory, by rank."""
    found = map(_read, directory.glob("worker-*.jsonl"))
    return tuple(sorted(filter(None, found), key=lambda record: record.rank))


def _read(path: Path) -> WorkerRecord | None:
    lines = list(_lines(path))
    if not lines:
        return None
    began_s = float(lines[0]["began_s"])
    steps: list[StepEntry] = []
    losses: list[LossEntry] = []
    tables: list[TableEntry] = []
    quality: dict[str, float | None] = {}
    byte_counts, is_whole = (0, 0), lines[-1]["kind"] == "end"
    for line in lines[1:]:
        began_s = line.get("began_s", began_s)
        at_s = began_s + line.get("t_s", 0.0)
        if line["kind"] == "step":
            steps.append(StepEntry(at_s, *(line[name] for name in _STEP_FIELDS)))
            if "loss" in line:
                count = sum(not step.is_early for step in steps)
                losses.append(LossEntry(count, at_s, line["loss"]))
        elif line["kind"] == "report":
            losses.append(LossEntry(line["clock"], at_s, line["loss"]))
        elif line["kind"] == "table":
            mode = ComparedMode(
                parsed(line["consistency"]),
                line["push_codec"],
                line["pull_codec"],
                line["inner_steps"],
            )
            entry = TableEntry(line["name"], line["optimizer"], mode)
            if entry not in tables:  # made again after a restore
                tables.append(entry)
        elif line["kind"] == "quality":
            quality |= line["measures"]
        elif line["kind"] == "end":
            pushed_bytes, pulled_bytes = byte_counts
            byte_counts = pushed_bytes + line["pushed_bytes"], pulled_bytes + line["pulled_bytes"]
    return WorkerRecord(
        lines[0]["rank"],
        tuple(tables),
        tuple(steps),
        tuple(losses),
        quality,
        *byte_counts,
        is_whole=is_whole,
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as stream:
        for text in stream:
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return
