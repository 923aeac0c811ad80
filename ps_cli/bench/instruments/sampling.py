"""Samples: contenders take turns; the first turn is a warm-up, and the others' median counts."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.table import Table

SampleT = TypeVar("SampleT")

MB = 1e6
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


class Sample(NamedTuple):
    """One run of an operation: its wall time, and the CPU time of each of its processes."""

    wall_s: float
    cpu_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of one operation."""

    operation: Operation
    samples: list[Sample]

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
    runs: Mapping[str, Callable[[], SampleT]], round_count: int, on_progress: Callable[[str], None]
) -> dict[str, list[SampleT]]:
    """Do all runs once as a warm-up, then in turns `round_count` times; the results by name.

    So contenders are measured within seconds of each other, and a disturbance disturbs all of them.

    Blocking: until all is measured; `on_progress` is called with a phrase about each round.
    """
    samples: dict[str, list[SampleT]] = {name: [] for name in runs}
    for number in range(round_count + 1):
        on_progress(f"round {number} of {round_count}" if number else "warm-up")
        for name, run in runs.items():
            sample = run()
            if number:
                samples[name].append(sample)
    return samples


def measured_in_turns(
    operations: Iterable[Operation], round_count: int, on_progress: Callable[[str], None]
) -> dict[str, Measured]:
    """As `take_turns`."""
    by_name = {operation.name: operation for operation in operations}
    runs = {name: partial(_sample, operation) for name, operation in by_name.items()}
    samples = take_turns(runs, round_count, on_progress)
    return {name: Measured(operation, samples[name]) for name, operation in by_name.items()}


def _sample(operation: Operation) -> Sample:
    before = [process_cpu_s(pid) for pid in operation.pids]
    wall_s = operation.run()
    after = [process_cpu_s(pid) for pid in operation.pids]
    return Sample(wall_s, tuple(late - early for early, late in zip(before, after, strict=True)))


def joined(legs: Sequence[dict[str, Measured]]) -> dict[str, Measured]:
    """All samples of each operation, from all legs of a benchmark."""
    found: dict[str, Measured] = {}
    for leg in legs:
        for name, one in leg.items():
            found.setdefault(name, Measured(one.operation, [])).samples.extend(one.samples)
    return found


def samples_gb_s(measured: Mapping[str, Measured]) -> dict[str, list[float]]:
    """The document's rates of all samples."""
    return {name: [rounded(rate) for rate in each.rates_gb_s] for name, each in measured.items()}


def process_cpu_s(pid: int) -> float:
    """User and system time of a process, with all its threads, dead ones included.

    The kernel counts in ticks of 10 ms: sum over samples before you divide by it.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()  # the name before it may have spaces
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICK_HZ


def processor_s() -> float:
    """CPU seconds that all processes of the machine have used, on all of its cores."""
    line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
    user, nice, system, _idle, _waiting, *others = map(int, line.split()[1:9])
    return (user + nice + system + sum(others)) / _CLOCK_TICK_HZ


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
