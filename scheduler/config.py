"""The settings of a scheduler: flag over PUSHPULL_* over file over default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_runtime.settings.config import argument_parser, flag_name, setting, variable_name


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler."""

    workers: int = field(
        metadata={"help": "Workers; clock 1 of a BSP table opens when all are there. At least 1."}
    )
    servers: int = field(
        metadata={"help": "Servers; a table waits until all are there. At least 1."}
    )
    replicas: int = setting(
        1,
        "Servers that hold each range, 1 to `servers`. 1: a server that dies takes its ranges "
        "with it; 2: training survives the death of one server.",
    )
    min_in_sync: int = setting(
        1,
        "In-sync replicas of a range that must hold a push before it counts, 1 to `replicas`; a "
        "range with fewer takes no pushes. 1: the last replica goes on alone.",
    )
    max_workers: int = setting(
        0,
        "Most workers at a time; those beyond `workers` join while the others train. 0: none "
        "beyond `workers`.",
    )
    ranges: int = setting(
        0,
        "Key ranges, the unit of ownership; fixed for the life of the cluster. More ranges share "
        "more evenly, fewer make pushes cheaper. 0: 64; 128 from 5 servers on, 256 from 9 on.",
    )
    listen: str = setting("127.0.0.1:0", "host:port to bind; port 0 takes a free one.")
    advertise: str | None = setting(
        None, "host:port, or host, at which others reach it; unset derives it."
    )
    http_listen: str = setting(
        "127.0.0.1:0", "host:port of /metrics and /healthz; port 0 takes a free one."
    )
    cluster_id: str | None = setting(
        None, "The cluster's identity; unset draws a random one at each start."
    )
    journal: Path | None = setting(
        None,
        "A directory on a local disk for the scheduler's state: a scheduler that is restarted "
        "with it resumes the cluster. Unset: a restarted scheduler has a new cluster, and its "
        "nodes must be restarted, too.",
    )
    stop_when_done: bool = setting(False, "End when all workers have left, and end the servers.")
    heartbeat_interval_s: float = setting(
        limits.HEARTBEAT_INTERVAL_S,
        "Seconds between heartbeats of a node; at most half of lease_s.",
    )
    lease_s: float = setting(
        limits.LEASE_S, "Seconds without a heartbeat after which a node counts as silent."
    )
    worker_timeout_s: float = setting(
        limits.WORKER_TIMEOUT_S,
        "Seconds of silence after which a worker is declared gone, and the others go on without "
        "it; above lease_s. 0: never.",
    )
    adaptation_interval_s: float = setting(
        limits.ADAPTATION_INTERVAL_S,
        "Shortest time between two moves of the bound of an ssp:LEAST..MOST table, in seconds.",
    )
    checkpoint_url: str = setting(
        "",
        "The directory of checkpoints: a path, or any URL that fsspec knows. Unset: no "
        "checkpoints.",
    )
    checkpoint_every_s: float = setting(0.0, "Seconds between checkpoints; 0: not by time.")
    checkpoint_every_clocks: int = setting(
        0, "Clocks of a table between checkpoints; 0: not by clocks."
    )
    checkpoint_keep: int = setting(0, "Complete checkpoints to keep; 0: all.")
    checkpoint_full_every: int = setting(
        1,
        "One of so many checkpoints in a row is full; the others have only what changed, and "
        "refer to earlier ones. 1: all are full.",
    )
    checkpoint_last_s: float = setting(
        30.0,
        "Seconds for a last checkpoint: when the scheduler is stopped while servers are there, "
        "and with stop_when_done when all workers have left. 0: no last checkpoint; one that is "
        "running has 30 s.",
    )
    resume: str = setting(
        "",
        "The checkpoint that the cluster starts from: its directory, or a URL with several, of "
        "which the newest valid one is taken. auto: the newest under checkpoint_url; empty if "
        "none was ever complete there. Unset: the cluster starts empty.",
    )
    checkpoint_roots: tuple[str, ...] = setting(
        (),
        "Further places that a restore may read, separated by commas, beside checkpoint_url and "
        "resume. No other place is opened.",
    )
    drain_grace_s: float = setting(
        1.0, "Seconds for running calls to end when the scheduler stops."
    )
    ready_file: Path | None = setting(
        None, "A file for the addresses as JSON, written when the scheduler serves."
    )
    log_level: str = setting("info", "One of debug, info, warning, error.")
    log_format: str = setting("text", "text, or json: an object per line.")

    def __post_init__(self) -> None:
        for name in ("checkpoint_every_s", "checkpoint_every_clocks"):
            every = getattr(self, name)
            if every and not self.checkpoint_url:
                raise InvalidConfig(
                    f"{name} is {every:g}, and checkpoints have no place to go; give "
                    f"{flag_name('checkpoint_url')} or {variable_name('checkpoint_url')}, or 0"
                )


def parser() -> argparse.ArgumentParser:
    description = "Runs a cluster's scheduler: membership, tables and placement."
    return argument_parser(SchedulerConfig, description, "pushpull scheduler")
