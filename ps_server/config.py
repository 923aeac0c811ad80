"""The settings of a server: flag over PUSHPULL_* over file over default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_runtime.settings.config import argument_parser, check_choice


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server."""

    scheduler: tuple[str, ...] = field(
        metadata={"help": "scheduler addresses, host:port, comma-separated"}
    )
    listen: str = field(
        default="127.0.0.1:0",
        metadata={"help": "host:port to serve gRPC on; port 0 takes a free one"},
    )
    advertise: str | None = field(
        default=None, metadata={"help": "host:port or host under which others reach this server"}
    )
    http_listen: str = field(
        default="127.0.0.1:0", metadata={"help": "host:port of /metrics, /healthz and /readyz"}
    )
    stream_listen: str = field(
        default="auto",
        metadata={
            "help": "host:port of the stream port, where pushpull's own faster HTTP/2 serves gRPC; "
            "auto takes a free one at listen's host, off has none"
        },
    )
    cluster_id: str = field(default="", metadata={"help": "the cluster meant; empty: any"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})
    log_format: str = field(default="text", metadata={"help": "text, or json: an object a line"})
    ready_file: Path | None = field(
        default=None, metadata={"help": "file to write when serving: the addresses as JSON"}
    )
    connect_deadline_s: float = field(
        default=60.0, metadata={"help": "seconds to go on trying to reach the scheduler at start"}
    )
    drain_grace_s: float = field(
        default=25.0,
        metadata={
            "help": "seconds that a server told to stop by SIGTERM stays while it has the only "
            "copy of anything, until another server or a checkpoint has it; calls may finish in "
            "them too"
        },
    )
    lane: str = field(
        default="auto",
        metadata={
            "help": "auto shares memory with clients on this host, where it can; shm must; grpc "
            "does not"
        },
    )
    threads: int = field(
        default=1, metadata={"help": "torch threads for updates; 0 leaves torch's own choice"}
    )

    checkpoint_rate_mb_s: float = field(
        default=limits.CHECKPOINT_RATE_BYTES_S / 1e6,
        metadata={
            "help": "MB a second read for a checkpoint while training goes on, not counting blocks "
            "that are about to change; 0: no bound"
        },
    )

    memory_mb: int = field(
        default=0,
        metadata={
            "help": "MiB that tables may take here; 0: nine tenths of what the machine has, or the "
            "container, shared with the other servers there"
        },
    )

    checkpoint_buffer_mb: int = field(
        default=limits.CHECKPOINT_BUFFER_BYTES // 2**20,
        metadata={
            "help": "MiB of copies that may wait to be written to a checkpoint; where a step would "
            "need more it waits for the checkpoint's store"
        },
    )

    update_log: Path | None = field(
        default=None,
        metadata={
            "help": "directory of this server alone where every update is kept, so that a server "
            "started again there goes on from it; unset: none"
        },
    )
    update_log_mb: int = field(
        default=limits.UPDATE_LOG_BYTES // 1_000_000,
        metadata={"help": "MB of the update log above which the oldest updates go"},
    )
    update_log_sync: bool = field(
        default=False,
        metadata={
            "help": "an update counts when the disk has it, so that the log survives a power cut, "
            "and not the server's death alone"
        },
    )

    def __post_init__(self) -> None:
        check_choice("lane", self.lane, limits.LANES)
        if self.memory_mb < 0:
            raise InvalidConfig(f"memory_mb is {self.memory_mb}; expected at least 0")
        if self.checkpoint_buffer_mb < 0:
            raise InvalidConfig(
                f"checkpoint_buffer_mb is {self.checkpoint_buffer_mb}; expected at least 0"
            )
        if self.update_log_mb < 1:
            raise InvalidConfig(f"update_log_mb is {self.update_log_mb}; expected at least 1")


def parser() -> argparse.ArgumentParser:
    description = "Runs a parameter server of a cluster."
    return argument_parser(ServerConfig, description, "pushpull server")
