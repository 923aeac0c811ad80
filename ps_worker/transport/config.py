"""The settings of a worker or reader: argument over PUSHPULL_* over default."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ps_core import limits, runs
from ps_core.codecs.choices import check_codec
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig
from ps_runtime.settings.config import add_flags, check_choice, resolve, setting
from ps_runtime.settings.job_place import JobPlace, place_in_job
from ps_worker.spec.straggler import ComputeTime

_LAUNCH_ID = re.compile("[0-9a-f]{32}")

ROLES = ("worker", "reader", "operator")
"""The roles of clients."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one client; durations in seconds, sizes in bytes."""

    scheduler: tuple[str, ...] = field(
        metadata={"help": "where the scheduler is: host:port, or several of them with commas"}
    )
    role: str = setting(
        "worker",
        "worker (trains, has a rank), reader (only pulls) or operator (pulls nothing; changes "
        "consistency, makes and restores checkpoints)",
    )
    rank: int | None = setting(
        None,
        "the rank to ask for; unset takes that of torchrun, Slurm, MPI or Kubernetes, and where "
        "there is none lets the scheduler choose the lowest free one",
    )
    world_size: int = setting(
        0,
        "the number of workers of the job; a cluster for another number refuses this worker at "
        "once; 0: unknown",
    )
    run: str = setting(
        "",
        "the name of this worker's run, with ranks and tables of its own; empty: the run without a"
        " name",
    )
    identity: str = setting(
        "",
        "a name that this worker keeps when its process is started again: with the same identity "
        "it gets its rank back at once, and its earlier process is ended; hostname takes the name "
        "of this host, pod or container; empty: none, so a restarted worker waits until its "
        "earlier process is declared gone",
    )
    cluster_id: str = setting("", "the cluster to join; empty accepts whichever answers")
    connect_deadline_s: float = setting(
        60.0, "seconds to go on trying to reach the cluster at start"
    )
    request_deadline_s: float = setting(
        300.0,
        "seconds that a push, a pull or a wait may take before WaitExpired says who is missing; "
        "longer than a worker's longest pause (an evaluation between two steps)",
    )
    lane: str = setting(
        "auto",
        "how payloads travel: auto shares memory with the servers on this host and sends the "
        "others bytes; shm fails where memory cannot be shared; grpc sends bytes",
    )
    window_bytes: int = setting(
        limits.DEFAULT_WINDOW_BYTES,
        "payload bytes in flight to one server: sent, and not yet received there",
    )
    consistency: str = setting(
        "",
        "the consistency of tables whose script names none: bsp, ssp:4, asp, ...; empty means bsp",
    )
    push_codec: str = setting(
        "none",
        "how gradients travel where the script names no codec: none (as the table's dtype), bf16, "
        "fp16, int8, sign, topk:0.01 or randomk:0.01 (a hundredth of each block), or lowrank:4 "
        "(two factors of each block); what the last five leave out goes with the next gradients",
    )
    pull_codec: str = setting(
        "none",
        "how parameters travel to this process where the script names no codec: none, bf16, fp16 "
        "or int8",
    )
    outer_steps: int = setting(
        0,
        "the steps that a worker takes by itself in each outer step: DistributedOptimizer runs the "
        "torch.optim namesake of its SGD, Adam, AdamW, Adagrad or RMSprop in ps.Outer, and refuses "
        "other optimizers; 0: each step is one of the servers, as the script says",
    )
    compute: str = setting(
        "",
        "emulated computation: DistributedOptimizer.step waits until so long after the step "
        "before: 30ms; rotating:30ms,90ms,burst=2,seed=1; permanent:30ms,90ms,rank=0; empty "
        "emulates none",
    )
    record: str = setting(
        "",
        "a directory where the worker records its steps as JSON lines, in worker-RANK.jsonl; the "
        "first step then begins when all workers are there; empty records nothing",
    )
    http_listen: str = setting(
        "",
        "host:port where this process serves /metrics and /healthz; port 0 takes a free one; "
        "empty: only `pushpull worker` serves them",
        is_internal=True,  # the flag is that of `ProcessConfig`
    )
    launch_id: str = setting(
        "",
        "32 random hexadecimal digits from the parent of this process, with which it tells the "
        "scheduler that the process has ended (`pushpull train` does); empty: it cannot",
        is_internal=True,
    )

    def __post_init__(self) -> None:
        if self.launch_id and not _LAUNCH_ID.fullmatch(self.launch_id):
            raise InvalidConfig("launch_id is malformed; expected 32 hexadecimal digits")
        check_choice("role", self.role, ROLES)
        runs.check_name(self.run)
        runs.check_identity(self.identity)
        for name in ("rank", "world_size"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**31:
                raise InvalidConfig(f"{name} is {value}; expected 0 or more")
        if self.rank is not None and self.role != "worker":
            raise InvalidConfig(f"rank is {self.rank} for role {self.role}; only workers have one")
        for name in ("connect_deadline_s", "request_deadline_s"):
            value = getattr(self, name)
            if not 0 < value <= limits.MAX_DEADLINE_S:
                raise InvalidConfig(
                    f"{name} is {value}; expected more than 0, at most {limits.MAX_DEADLINE_S}"
                )
        check_choice("lane", self.lane, limits.LANES)
        if self.window_bytes <= 0:
            raise InvalidConfig(f"window_bytes is {self.window_bytes}; expected more than 0")
        if self.consistency:
            parsed(self.consistency)
        check_codec("push_codec", self.push_codec)
        check_codec("pull_codec", self.pull_codec)
        if not 0 <= self.outer_steps <= limits.MAX_INNER_STEP_COUNT:
            raise InvalidConfig(
                f"outer_steps is {self.outer_steps}; expected 0 to {limits.MAX_INNER_STEP_COUNT:,}"
            )
        if self.compute:
            ComputeTime.parsed(self.compute)


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Settings of `pushpull worker`, beside those of `connect`."""

    listen: str = setting("127.0.0.1:0", "host:port of gRPC health and reflection; port 0: free")
    advertise: str | None = setting(None, "host:port or host under which others reach them")
    http_listen: str = setting("127.0.0.1:0", "host:port of /metrics and /healthz; port 0 is free")
    log_level: str = setting("warning", "debug, info, warning or error: pushpull's own lines")
    log_format: str = setting("text", "text, or json: an object a line; pushpull's own lines")
    ready_file: Path | None = setting(None, "file to write when serving: the addresses as JSON")


def worker_config(
    arguments: Mapping[str, object], env: Mapping[str, str] | None = None
) -> WorkerConfig:
    """The settings in force: an argument that is not None, else the environment, else the default.
    Readers ignore a rank in the environment; a worker without one takes that of `job_place`.
    """
    env = os.environ if env is None else env
    role = arguments.get("role") or env.get("PUSHPULL_ROLE")
    if role in ROLES[1:] and arguments.get("rank") is None:
        env = {name: value for name, value in env.items() if name != "PUSHPULL_RANK"}
    place = job_place(arguments, env)
    if place is not None:
        size = arguments.get("world_size") or env.get("PUSHPULL_WORLD_SIZE") or place.world_size
        arguments = {**arguments, "rank": place.rank, "world_size": size}
    return resolve(WorkerConfig, arguments, env)


def job_place(arguments: Mapping[str, object], env: Mapping[str, str]) -> JobPlace | None:
    """The place of a worker without a rank in its job, if it has one."""
    role = arguments.get("role") or env.get("PUSHPULL_ROLE") or ROLES[0]
    if role != ROLES[0] or arguments.get("rank") is not None or env.get("PUSHPULL_RANK"):
        return None
    return place_in_job(env)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pushpull worker",
        usage="%(prog)s [OPTIONS] SCRIPT [ARGS...]",
        description="Runs a training script as one worker of a cluster.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A setting is what the script gives `connect`, else its flag, else its variable.",
        allow_abbrev=False,  # argparse would look for abbreviations in the script's arguments, too
    )
    for settings in (WorkerConfig, ProcessConfig):
        add_flags(made, settings)
    made.add_argument("script", metavar="SCRIPT", type=Path, help="the script")
    made.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    return made
