"""The settings of a server: flag over PUSHPULL_* over file over default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_runtime.settings.config import argument_parser, check_choice, setting


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server."""

    scheduler: tuple[str, ...] = field(
        metadata={"help": "scheduler addresses, host:port, comma-separated"}
    )
    listen: str = setting("127.0.0.1:0", "host:port to serve gRPC on; port 0 takes a free one")
    advertise: str | None = setting(None, "host:port or host under which others reach this server")
    http_listen: str = setting("127.0.0.1:0", "host:port of /metrics, /healthz and /readyz")
    stream_listen: str = setting(
        "auto",
        "host:port of the stream port, where pushpull's own faster HTTP/2 serves gRPC; "
        "auto takes a free one at listen's host, off has none",
    )
    cluster_id: str = setting("", "the cluster meant; empty: any")
    log_level: str = setting("info", "debug, info, warning or error")
    log_format: str = setting("text", "text, or json: an object a line")
    ready_file: Path | None = setting(None, "file to write when serving: the addresses as JSON")
    connect_deadline_s: float = setting(
        60.0, "seconds to go on trying to reach the scheduler at start"
    )
    drain_grace_s: float = setting(
        25.0,
        "seconds that a server told to stop by SIGTERM stays while it has the only copy of "
        "anything, until another server or a checkpoint has it; calls may finish in them too. "
        "Where nothing could have it, it leaves when no scheduler has answered for a lease",
    )
    lane: str = setting(
        "auto",
        "auto shares memory with clients on this host, where it can; shm must; grpc does not",
    )
    threads: int = setting(1, "torch threads for updates; 0 leaves torch's own choice")
    checkpoint_rate_mb_s: float = setting(
        limits.CHECKPOINT_RATE_BYTES_S / 1e6,
        "MB a second read for a checkpoint while training goes on, not counting blocks that are "
        "about to change; 0: no bound",
    )
    memory_mb: int = setting(
        0,
        "MiB that tables may take here; 0: nine tenths of what the machine has, or the container, "
        "beyond 256 MiB for the process, shared with the other servers there",
    )
    rows_dir: Path | None = setting(
        None,
        "directory on a fast disk for rows of embedding tables that memory_mb has no space for; "
        "what lies there is of use to this process alone; unset: such rows are refused",
    )
    checkpoint_buffer_mb: int = setting(
        limits.CHECKPOINT_BUFFER_BYTES // 2**20,
        "MiB of copies that may wait to be written to a checkpoint; where a step would need more "
        "it waits for the checkpoint's store",
    )
    update_log: Path | None = setting(
        None,
        "directory of this server alone where every update is kept, so that a server started again "
        "there goes on from it; unset: none",
    )
    update_log_mb: int = setting(
        limits.UPDATE_LOG_BYTES // 1_000_000,
        "MB of the update log above which the oldest updates go",
    )
    update_log_sync: bool = setting(
        False,
        "an update counts when the disk has it, so that the log survives a power cut, and not the "
        "server's death alone",
    )

    def __post_init__(self) -> None:
        check_choice("lane", self.lane, limits.LANES)
        for name, least in (("memory_mb", 0), ("checkpoint_buffer_mb", 0), ("update_log_mb", 1)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; expected at least {least}")


def parser() -> argparse.ArgumentParser:
    return argument_parser(ServerConfig, "Runs a parameter server of a cluster.", "pushpull server")
