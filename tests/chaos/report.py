"""What a chaos run found, as JSON and as a table for people."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.cluster import Footprint
from tests.chaos.faults import KILLED, Recovery

P50_OVER_LEASE_S = 0.8
MAX_OVER_LEASE_S = 2.0
KILLS_GOODPUT = 0.80
AWAY_GOODPUT = 0.95

GROWTH_MIB = 96.0
GROWTH_THREADS = 4
GROWTH_DESCRIPTORS = 12
"""What a process may have gained over the kills; a leak by the kill would be several times it."""


@dataclass(frozen=True)
class Rate:
    """Steps a second over a time."""

    lasted_s: float
    steps_per_s: float


@dataclass(frozen=True)
class Loop:
    """A fault, some quiet, another one: all of it, and the quiet alone."""

    whole: Rate
    quiet: Rate

    @property
    def share(self) -> float:
        """All of it over the quiet alone, which had the same of a machine's other work. The target
        is of the run without faults.
        """
        return self.whole.steps_per_s / self.quiet.steps_per_s if self.quiet.steps_per_s else 0.0


@dataclass(frozen=True)
class Away:
    """Before, while and after there was no scheduler; `worst_step_s` is of these while."""

    before: Rate
    while_away: Rate
    after: Rate
    worst_step_s: float
    calm_worst_step_s: float

    @property
    def ratio(self) -> float:
        """Throughput without a scheduler, as a share of that with one."""
        with_one = (self.before.steps_per_s + self.after.steps_per_s) / 2
        return self.while_away.steps_per_s / with_one


@dataclass
class Report:
    """One run. `loops` are the kinds of fault that came one after the other with quiet between, and
    what was done meanwhile; `calm` is as long a run without faults as the longest of them.
    """

    lease_s: float
    worker_count: int
    server_count: int
    seed: int
    impossible: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    found: list[list[list[int]]] = field(default_factory=list)
    loops: dict[str, Loop] = field(default_factory=dict)
    calm: Rate | None = None
    away: Away | None = None
    failed_calls: dict[str, list[str]] = field(default_factory=dict)  # by the fault under way
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether every worker found exactly the steps that all took, in every block."""
        return bool(self.found) and all(found == [self.taken] for found in self.found)

    @property
    def kills(self) -> list[Recovery]:
        """The recoveries from SIGKILL."""
        return [r for r in self.recoveries if r.kind == KILLED]

    @property
    def goodput(self) -> dict[str, float]:
        """Of each loop the steps a second, as a share of those of the calm run."""
        if self.calm is None:
            return {}
        return {k: r.whole.steps_per_s / self.calm.steps_per_s for k, r in self.loops.items()}

    @property
    def growth(self) -> list[str]:
        """Who uses more than it may, in words."""
        servers = [f for name, f in self.before.items() if name.startswith("server")]
        rows = []
        for name, after in self.after.items():
            # A server that was started since is compared with those that there were.
            before = [self.before[name]] if name in self.before else servers
            gained = (
                after.resident_mib - max(f.resident_mib for f in before),
                after.thread_count - max(f.thread_count for f in before),
                after.descriptor_count - max(f.descriptor_count for f in before),
            )
            limits = (GROWTH_MIB, GROWTH_THREADS, GROWTH_DESCRIPTORS)
            if any(more > limit for more, limit in zip(gained, limits, strict=True)):
                rows.append(
                    f"{name}: {gained[0]:+.0f} MiB, {gained[1]:+d} threads, {gained[2]:+d} fds"
                )
        return rows

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        times = [r.first_s for r in self.kills]
        return {
            "environment": {
                "cores": len(os.sched_getaffinity(0)),
                "load_average": os.getloadavg()[0],
                "machine": platform.machine(),
                "python": platform.python_version(),
            },
            **{k: v for k, v in asdict(self).items() if k != "found"},
            "is_exact": self.is_exact,
            "growth": self.growth,
            "kill_p50_s": statistics.median(times) if times else None,
            "kill_max_s": max(times, default=None),
            "goodput": self.goodput,
            "away_ratio": self.away.ratio if self.away is not None else None,
        }

    def lines(self) -> Iterable[str]:
        """The table."""
        yield (
            f"{'fault':<26}{'count':>6}{'p50 s':>8}{'max s':>8}{'healed p50 s':>14}"
            f"{'worst step s':>14}{'failed calls':>14}"
        )
        for kind in dict.fromkeys([*(r.kind for r in self.recoveries), *self.failed_calls]):
            those = [r for r in self.recoveries if r.kind == kind]
            failed = len(self.failed_calls.get(kind, ()))
            if not those:
                yield f"{kind:<26}{0:>6}{failed:>50}"
                continue
            times = [r.first_s for r in those]
            healed_s = statistics.median(r.healed_s for r in those)
            worst_s = max(r.worst_step_s for r in those)
            yield (
                f"{kind:<26}{len(those):>6}{statistics.median(times):>8.2f}{max(times):>8.2f}"
                f"{healed_s:>14.1f}{worst_s:>14.2f}{failed:>14}"
            )
        if self.kills:
            times = [r.first_s for r in self.kills]
            yield _against("p50", statistics.median(times), self.lease_s + P50_OVER_LEASE_S)
            yield _against("max", max(times), self.lease_s + MAX_OVER_LEASE_S)
        yield from self._goodput_lines()
        if self.away is not None:
            yield from _away_lines(self.away)
        verdict = "exact" if self.is_exact else f"WRONG: {self.found}"
        yield f"parameters: {verdict}; steps {self.taken}"
        for name, after in self.after.items():
            before = self.before.get(name)
            yield f"{name}: {_uses(before) if before else '(started since)'} -> {_uses(after)}"
        yield f"growth beyond bounds: {'; '.join(self.growth) or 'none'}"
        yield from (f"NOT DONE HERE: {what}" for what in self.impossible)

    def _goodput_lines(self) -> Iterable[str]:
        for kind, loop in self.loops.items():
            whole, quiet = loop.whole, loop.quiet
            of_calm = ""
            if kind in self.goodput:
                share = self.goodput[kind]
                of_calm = f", {share:.0%} of the run without faults"
                if kind == KILLED:
                    word = "met" if share >= KILLS_GOODPUT else "MISSED"
                    of_calm += f" (target {KILLS_GOODPUT:.0%}: {word})"
            yield (
                f"goodput, {kind}: {whole.steps_per_s:.1f} steps/s over {whole.lasted_s:.0f} s"
                f"{of_calm}, {loop.share:.0%} of the {quiet.steps_per_s:.1f} in the "
                f"{quiet.lasted_s:.0f} s between the faults"
            )
        if self.calm is not None:
            calm = self.calm
            yield f"without faults: {calm.steps_per_s:.1f} steps/s over {calm.lasted_s:.0f} s"


def _away_lines(away: Away) -> Iterable[str]:
    for when, rate in (
        ("before", away.before),
        ("no scheduler", away.while_away),
        ("after", away.after),
    ):
        yield f"{when:<26}{rate.steps_per_s:>8.1f} steps/s over {rate.lasted_s:.0f} s"
    word = "met" if away.ratio >= AWAY_GOODPUT else "MISSED"
    yield f"without a scheduler: {away.ratio:.1%}; target {AWAY_GOODPUT:.0%}: {word}"
    yield (
        f"worst step: {away.worst_step_s:.2f} s without a scheduler, "
        f"{away.calm_worst_step_s:.2f} s with one"
    )


def _uses(found: Footprint) -> str:
    return (
        f"{found.resident_mib:.0f} MiB, {found.thread_count} threads, {found.descriptor_count} fds"
    )


def _against(what: str, found_s: float, target_s: float) -> str:
    word = "met" if found_s <= target_s else "MISSED"
    return f"recovery from SIGKILL, {what}: {found_s:.2f} s; target {target_s:.2f} s: {word}"
