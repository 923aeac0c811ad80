"""The settings of a scheduler: flag over PUSHPULL_* over file over default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from ps_core import limits
from ps_runtime.settings.config import argument_parser


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler."""

    workers: int = field(
        metadata={"help": "The number of workers that opens clock 1 of a BSP table; at least 1."}
    )
    servers: int = field(
        metadata={"help": "The number of servers that a table waits for; at least 1."}
    )
    replicas: int = field(
        default=1,
        metadata={
            "help": "Servers that hold each range, 1 to `servers`. 1: a server that dies takes its "
            "ranges with it; 2: one server may die, and training goes on."
        },
    )
    min_in_sync: int = field(
        default=1,
        metadata={
            "help": "Of the replicas of a range, how many must hold a push before it counts, 1 to "
            "`replicas`; a range with fewer takes none. 1: it goes on with the last one."
        },
    )
    max_workers: int = field(
        default=0,
        metadata={
            "help": "How many workers there may be at a time: those beyond `workers` join while "
            "the others train. 0: none beyond these."
        },
    )
    ranges: int = field(
        default=0,
        metadata={
            "help": "Key ranges, the unit of ownership; fixed for the life of the cluster. More "
            "share more evenly over servers that join, fewer make pushes cheaper. 0: 64, 128 from "
            "5 servers on, 256 from 9 on."
        },
    )
    listen: str = field(
        default="127.0.0.1:0",
        metadata={"help": "host:port to bind; port 0 takes a free one."},
    )
    advertise: str | None = field(
        default=None,
        metadata={"help": "host:port, or host, where others reach it; unset derives it."},
    )
    http_listen: str = field(
        default="127.0.0.1:0",
        metadata={"help": "host:port of /metrics and /healthz; port 0 takes a free one."},
    )
    cluster_id: str | None = field(
        default=None,
        metadata={"help": "The cluster's identity; unset draws a random one at each start."},
    )
    journal: Path | None = field(
        default=None,
        metadata={
            "help": "A directory on a local disk where the scheduler keeps what it knows: started "
            "again with it, it goes on with the same cluster. Unset: a scheduler that is started "
            "again has another cluster, and its nodes have to be started again, too."
        },
    )
    stop_when_done: bool = field(
        default=False,
        metadata={"help": "End, and tell the servers to, when all workers have left."},
    )
    heartbeat_interval_s: float = field(
        default=limits.HEARTBEAT_INTERVAL_S,
        metadata={"help": "How often nodes call, in seconds; at most half of lease_s."},
    )
    lease_s: float = field(
        default=limits.LEASE_S,
        metadata={"help": "A node counts as silent after so many seconds without a heartbeat."},
    )
    worker_timeout_s: float = field(
        default=limits.WORKER_TIMEOUT_S,
        metadata={
            "help": "A worker silent for so many seconds is declared gone, and the others go on "
            "without it; above lease_s. 0: never."
        },
    )
    adaptation_interval_s: float = field(
        default=limits.ADAPTATION_INTERVAL_S,
        metadata={
            "help": "The bound of a table with ssp:LEAST..MOST moves at most once in so many "
            "seconds."
        },
    )
    checkpoint_url: str = field(
        default="",
        metadata={
            "help": "Where checkpoints go: a path, or any URL that fsspec knows. Unset: "
            "none are made."
        },
    )
    checkpoint_every_s: float = field(
        default=0.0, metadata={"help": "A checkpoint in so many seconds; 0: not by time."}
    )
    checkpoint_every_clocks: int = field(
        default=0,
        metadata={"help": "A checkpoint whenever a table is so many clocks further; 0: none so."},
    )
    checkpoint_keep: int = field(
        default=0, metadata={"help": "How many good checkpoints are kept; 0: all."}
    )
    checkpoint_full_every: int = field(
        default=1,
        metadata={
            "help": "Of so many checkpoints in a row one is full; the others have what changed, "
            "and refer to earlier ones for the rest. 1: all are full."
        },
    )
    checkpoint_last_s: float = field(
        default=30.0,
        metadata={
            "help": "Seconds that a last checkpoint may take: when the scheduler is told to stop "
            "while servers are there, and with stop_when_done when all workers have left. 0: none "
            "is made; one that is under way has 30 s."
        },
    )
    resume: str = field(
        default="",
        metadata={
            "help": "The checkpoint that the cluster starts from: its directory, or a URL, under "
            "which the newest good one is taken. auto: the newest under checkpoint_url, or anew if "
            "none was ever complete there. Unset: it starts anew."
        },
    )
    checkpoint_roots: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Further places, with commas, from which a restore may be asked for, beside "
            "those of checkpoint_url and resume. Nothing else is opened."
        },
    )
    drain_grace_s: float = field(
        default=1.0,
        metadata={"help": "Seconds that calls in progress may take when the scheduler stops."},
    )
    ready_file: Path | None = field(
        default=None,
        metadata={"help": "Written when it serves: its addresses as JSON. Unset writes none."},
    )
    log_level: str = field(default="info", metadata={"help": "One of debug, info, warning, error."})
    log_format: str = field(default="text", metadata={"help": "text, or json: an object a line."})


def parser() -> argparse.ArgumentParser:
    """What reads the command line of `pushpull scheduler`."""
    description = "Runs a cluster's scheduler: membership, tables and placement."
    return argument_parser(SchedulerConfig, description, "pushpull scheduler")
