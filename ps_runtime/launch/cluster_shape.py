"""The shape of a local cluster, as its scheduler and servers get it on their command lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ps_core import limits
from ps_core.errors import InvalidConfig

_EVERY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?")
_MOST = 1e15
"""Steps, or units of time, between two checkpoints at most."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The place of a cluster's checkpoints, and the checkpoint that it starts from.

    Attributes:
        url: a path, or a URL that fsspec knows; empty: none.
        every: "100" for each hundredth step, "60s", "5m" or "1h" for a time; empty: only on demand.
        keep: checkpoints to keep; 0: all; None: the scheduler's own setting.
        resume: a checkpoint's directory, or one above; "auto": the newest under `url`, or anew if
            none was ever complete there; empty: the cluster starts anew.
        full_every: one of so many in a row is full, the others have only changes; 1: all are full;
            None: the scheduler's own setting.
    """

    url: str = ""
    every: str = ""
    keep: int | None = None
    resume: str = ""
    full_every: int | None = None

    def __post_init__(self) -> None:
        if self.every and not self.url:
            raise InvalidConfig(
                f"a checkpoint every {self.every} has no place to go; give --checkpoint-url"
            )
        if self.resume == "auto" and not self.url:
            raise InvalidConfig("resume is 'auto' without a place to look; give --checkpoint-url")
        if self.every:
            self._every()
        if self.keep is not None and self.keep < 0:
            raise InvalidConfig(f"keep is {self.keep} checkpoints; expected 0 (all) or more")
        if self.full_every is not None and self.full_every < 1:
            raise InvalidConfig(
                f"a full checkpoint every {self.full_every}; expected 1 (each is) or more"
            )

    def _every(self) -> tuple[float, str]:
        found = _EVERY.fullmatch(self.every.replace(" ", ""))
        is_step_count = found is not None and not found[2]
        if found is None or not 0 < float(found[1]) <= _MOST or (is_step_count and "." in found[1]):
            raise InvalidConfig(
                f"a checkpoint every '{self.every}'; expected a number of steps such as 100, or a "
                "time such as 60s, 5m, 1h"
            )
        return float(found[1]), found[2] or ""

    @property
    def scheduler_arguments(self) -> tuple[str, ...]:
        given = []
        if self.url:
            # The starter of a local cluster makes the last one, before it stops the roles.
            given += [f"--checkpoint-url={self.url}", "--checkpoint-last-s=0"]
        else:  # intervals in the environment are those of a cluster with a place
            given += ["--checkpoint-every-s=0", "--checkpoint-every-clocks=0"]
        if self.every:
            number, unit = self._every()
            if unit:
                given.append(f"--checkpoint-every-s={number * _SECONDS[unit]:.15g}")
            else:
                given.append(f"--checkpoint-every-clocks={int(number)}")
        if self.url and self.keep is not None:
            given.append(f"--checkpoint-keep={self.keep}")
        if self.url and self.full_every is not None:
            given.append(f"--checkpoint-full-every={self.full_every}")
        if self.resume:
            given.append(f"--resume={self.resume}")
        return tuple(given)


NO_CHECKPOINTS = CheckpointPlan()


def checkpoints_of(url: str, resume: str, env: Mapping[str, str]) -> CheckpointPlan:
    """The plan of a cluster that a program starts; an empty argument comes from its variable."""
    return CheckpointPlan(
        url or env.get("PUSHPULL_CHECKPOINT_URL", ""),
        resume=resume or env.get("PUSHPULL_RESUME", ""),
    )


@dataclass(frozen=True, slots=True)
class UpdateLogPlan:
    """The update logs of a local cluster's servers.

    Attributes:
        path: a directory, with one directory a server; empty: no logs.
        bound_mb: MB of each log above which the oldest updates go; 0: the server's own setting.
        is_synced: an update counts only when the disk has it.
    """

    path: str = ""
    bound_mb: int = 0
    is_synced: bool = False

    def __post_init__(self) -> None:
        if self.bound_mb < 0:
            raise InvalidConfig(f"an update log of {self.bound_mb} MB; expected 0 or more")
        if not self.path and (self.bound_mb or self.is_synced):
            raise InvalidConfig("settings of an update log without one; give --update-log")

    def server_arguments(self, index: int) -> tuple[str, ...]:
        if not self.path:
            return ()
        given = [f"--update-log={Path(self.path).absolute() / f'server-{index}'}"]
        if self.bound_mb:
            given.append(f"--update-log-mb={self.bound_mb}")
        if self.is_synced:
            given.append("--update-log-sync")
        return tuple(given)


NO_UPDATE_LOG = UpdateLogPlan()


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A local cluster. 0 leaves a number to the scheduler's own setting.

    Attributes:
        worker_count: the workers that clock 1 of a BSP table waits for.
        listen: the scheduler's address.
        max_workers: the number of workers at most, those that join later included.
        replica_count: servers that hold each range.
        min_in_sync: replicas that must hold a push before it counts.
        lease_s: seconds without a heartbeat after which a node counts as silent.
        server_listen: each server's address.
        has_journal: its scheduler keeps a journal while its launcher lives, and goes on from it.
    """

    server_count: int
    worker_count: int
    listen: str = "127.0.0.1:0"
    environment: Mapping[str, str] = field(default_factory=dict)
    max_workers: int = 0
    replica_count: int = 0
    min_in_sync: int = 0
    lease_s: float = 0.0
    checkpoints: CheckpointPlan = NO_CHECKPOINTS
    update_log: UpdateLogPlan = NO_UPDATE_LOG
    server_listen: str = "127.0.0.1:0"
    has_journal: bool = False

    def __post_init__(self) -> None:
        for what, count in (("servers", self.server_count), ("workers", self.worker_count)):
            if count < 1:
                raise InvalidConfig(f"a cluster of {count} {what}; expected at least 1")
        for name, count, of, most in (
            ("replicas", self.replica_count, "servers", self.server_count),
            ("min_in_sync", self.min_in_sync, "replicas", max(self.replica_count, 1)),
        ):
            if count > most:
                raise InvalidConfig(f"{name} is {count}; expected 1 to the number of {of}, {most}")

    @property
    def scheduler_arguments(self) -> tuple[str, ...]:
        given: dict[str, float] = {
            "max-workers": self.max_workers,
            "replicas": self.replica_count,
            "min-in-sync": self.min_in_sync,
            "lease-s": self.lease_s,
        }
        if self.lease_s:
            # As many heartbeats to a lease as by default: one may be lost, and one late.
            shortened_s = self.lease_s * limits.HEARTBEAT_INTERVAL_S / limits.LEASE_S
            given["heartbeat-interval-s"] = min(limits.HEARTBEAT_INTERVAL_S, shortened_s)
        return (
            f"--workers={self.worker_count}",
            f"--servers={self.server_count}",
            *(f"--{name}={value:g}" for name, value in given.items() if value),
            *self.checkpoints.scheduler_arguments,
        )
