"""Samples: contenders take turns, the first turn is a warm-up, the median of the rest counts."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

GB = 1e9
MIB = 1024 * 1024

_CLOCK_TICK_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Operation:
    """Something to measure: `run` does it once and says how many seconds it took.

    `byte_count` is what one run moves; `pids` are the processes whose CPU time it costs.
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
        """The rate of each sample, in the order that they were taken."""
        return [self.operation.byte_count / GB / sample.wall_s for sample in self.samples]

    @property
    def gb(self) -> float:
        """What all samples together moved."""
        return self.operation.byte_count / GB * len(self.samples)

    def cpu_s(self, pid: int) -> float:
        """CPU seconds that the process spent during all samples together."""
        at = self.operation.pids.index(pid)
        return sum(sample.cpu_s[at] for sample in self.samples)


def take_turns(
    operations: Sequence[Operation], round_count: int, on_round: Callable[[int], None]
) -> dict[str, Measured]:
    """Run all operations once as a warm-up, then in turns `round_count` times.

    Contenders that are compared are so measured within seconds of each other: what disturbs one
    round of a shared machine disturbs all of them.

    Blocking: until all is measured; `on_round` hears the number of each round, 0 for the warm-up.
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
    """All samples of each operation: some take turns in several legs of a benchmark."""
    found: dict[str, Measured] = {}
    for leg in legs:
        for name, measured in leg.items():
            found.setdefault(name, Measured(measured.operation)).samples.extend(measured.samples)
    return found


def process_cpu_s(pid: int) -> float:
    """User and system time of a process, all its threads, dead ones included.

    The kernel tells it in ticks of 10 ms: sum it over samples before dividing by it.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICK_HZ


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def rounded(figure: float) -> float:
    """Four significant digits: what a measurement is good for."""
    return float(f"{figure:.4g}")
