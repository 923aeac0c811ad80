"""Samples: contenders take turns; the first turn is a warm-up, and the others' median counts."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

GB = 1e9
MIB = 1024 * 1024

_CLOCK_TICK_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Operation:
    """Something to measure: `run` does it once and returns its seconds.

    One run moves `byte_count`; `pids` are the processes whose CPU time it costs.
    """

    name: str
    run: Callable[[], float]
    byte_count: int
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of an operation: its wall time, and the CPU time of each of its processes."""

    wall_s: float
    cpu_s: tuple[float, ...]


class Measured:
    """The samples of one operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.samples: list[Sample] = []

    @property
    def gb_s(self) -> float:
        """The median rate; 1 GB is 10^9 bytes."""
        return statistics.median(self.rates_gb_s)

    @property
    def rates_gb_s(self) -> list[float]:
        return [self.operation.byte_count / GB / sample.wall_s for sample in self.samples]

    @property
    def gb(self) -> float:
        """GB that all samples moved together."""
        return self.operation.byte_count / GB * len(self.samples)

    def cpu_s(self, pid: int) -> float:
        """CPU seconds of the process in all samples together."""
        at = self.operation.pids.index(pid)
        return sum(sample.cpu_s[at] for sample in self.samples)


def take_turns(
    operations: Sequence[Operation], round_count: int, on_round: Callable[[int], None]
) -> dict[str, Measured]:
    """Run all operations once as a warm-up, then in turns `round_count` times.

    So contenders are measured within seconds of each other, and a disturbance of the machine
    disturbs all of them.

    Blocking: until all is measured; `on_round` is called with the number of each round, 0 for the
    warm-up.
    """
    measured = {operation.name: Measured(operation) for operation in operations}
    for number in range(round_count + 1):
        on_round(number)
        for operation in operations:
            before = [process_cpu_s(pid) for pid in operation.pids]
            wall_s = operation.run()
            after = [process_cpu_s(pid) for pid in operation.pids]
            spent = tuple(late - early for early, late in zip(before, after, strict=True))
            if number:
                measured[operation.name].samples.append(Sample(wall_s, spent))
    return measured


def joined(legs: Sequence[dict[str, Measured]]) -> dict[str, Measured]:
    """All samples of each operation, from all legs of a benchmark."""
    found: dict[str, Measured] = {}
    for leg in legs:
        for name, measured in leg.items():
            found.setdefault(name, Measured(measured.operation)).samples.extend(measured.samples)
    return found


def process_cpu_s(pid: int) -> float:
    """User and system time of a process, with all its threads, dead ones included.

    The kernel counts in ticks of 10 ms: sum over samples before you divide by it.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()  # the name before it may have spaces
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICK_HZ


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def call_latencies(call: Callable[[], object], call_count: int) -> dict[str, float]:
    """Percentiles of the seconds of calls, one after the other."""
    waits_s = []
    for _ in range(call_count):
        began_s = time.perf_counter()
        call()
        waits_s.append(time.perf_counter() - began_s)
    return latency_percentiles(waits_s)


def latency_percentiles(waits_s: Sequence[float]) -> dict[str, float]:
    return {"p50_s": percentile(waits_s, 50), "p99_s": percentile(waits_s, 99)}


def rounded(figure: float) -> float:
    """Four significant digits, as exact as a measurement is."""
    return float(f"{figure:.4g}")


def figures_table(title: str, *headings: str, caption: str | None = None, names: str = "") -> Table:
    """A table of figures; its first column, with the heading `names`, has the rows' names."""
    table = Table(title=title, caption=caption)
    table.add_column(names, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
