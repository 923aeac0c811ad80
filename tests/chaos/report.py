"""What a chaos run found, as JSON and as a table for people."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.cluster import Footprint
from tests.chaos.faults import Recovery

P50_OVER_LEASE_S = 0.8
MAX_OVER_LEASE_S = 2.0

GROWTH_MIB = 96.0
GROWTH_THREADS = 4
GROWTH_DESCRIPTORS = 12
"""What a process may have gained over the kills; a leak by the kill would be several times it."""


@dataclass
class Report:
    """One run."""

    lease_s: float
    worker_count: int
    server_count: int
    seed: int
    impossible: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    found: list[list[list[int]]] = field(default_factory=list)
    kills_last_s: float = 0.0
    steps_per_s: float = 0.0
    calm_last_s: float = 0.0
    calm_steps_per_s: float = 0.0
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether every worker found exactly the steps that all took, in every block."""
        return bool(self.found) and all(found == [self.taken] for found in self.found)

    @property
    def kills(self) -> list[Recovery]:
        """The recoveries from SIGKILL."""
        return [r for r in self.recoveries if r.kind == "SIGKILL"]

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
            "goodput_ratio": self.steps_per_s / self.calm_steps_per_s
            if self.calm_steps_per_s
            else None,
        }

    def lines(self) -> Iterable[str]:
        """The table."""
        yield f"{'fault':<26}{'count':>6}{'p50 s':>8}{'max s':>8}{'healed p50 s':>14}"
        for kind in dict.fromkeys(r.kind for r in self.recoveries):
            those = [r for r in self.recoveries if r.kind == kind]
            times = [r.first_s for r in those]
            healed_s = statistics.median(r.healed_s for r in those)
            yield (
                f"{kind:<26}{len(those):>6}{statistics.median(times):>8.2f}{max(times):>8.2f}"
                f"{healed_s:>14.1f}"
            )
        if self.kills:
            times = [r.first_s for r in self.kills]
            yield _against("p50", statistics.median(times), self.lease_s + P50_OVER_LEASE_S)
            yield _against("max", max(times), self.lease_s + MAX_OVER_LEASE_S)
        if self.calm_steps_per_s:
            yield (
                f"goodput: {self.steps_per_s:.1f} steps/s over {self.kills_last_s:.0f} s of kills, "
                f"{self.calm_steps_per_s:.1f} without over {self.calm_last_s:.0f} s: "
                f"{self.steps_per_s / self.calm_steps_per_s:.0%}"
            )
        verdict = "exact" if self.is_exact else f"WRONG: {self.found}"
        yield f"parameters: {verdict}; steps {self.taken}"
        for name, after in self.after.items():
            before = self.before.get(name)
            yield f"{name}: {_uses(before) if before else '(started since)'} -> {_uses(after)}"
        yield f"growth beyond bounds: {'; '.join(self.growth) or 'none'}"
        yield from (f"NOT DONE HERE: {what}" for what in self.impossible)


def _uses(found: Footprint) -> str:
    return (
        f"{found.resident_mib:.0f} MiB, {found.thread_count} threads, {found.descriptor_count} fds"
    )


def _against(what: str, found_s: float, target_s: float) -> str:
    word = "met" if found_s <= target_s else "MISSED"
    return f"recovery from SIGKILL, {what}: {found_s:.2f} s; target {target_s:.2f} s: {word}"
