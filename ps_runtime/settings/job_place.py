"""The place of a process in its job: a rank, and the number of processes.

torchrun, Slurm, MPI and the Kubernetes operators each set variables of their own. A rank that is
given to pushpull itself, as an argument, a flag or PUSHPULL_RANK, takes precedence.

Rules:
    - Variables that name another rank or another number of processes are an error.
    - Under torchrun only its own variables count; Slurm's or Kubernetes' then number machines.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ps_core.errors import InvalidConfig

HOSTNAME = "hostname"
"""The value of the setting `identity` for this host's name."""

REMEDY = "give rank=, --rank or PUSHPULL_RANK"

_TORCHRUN = ("LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables that torchrun sets, and no operator does."""

_PAIRS = (
    # launcher, variable of the rank, of the number of processes, other variables that must be set
    ("torchrun or an operator", "RANK", "WORLD_SIZE", ("WORLD_SIZE",)),
    # A batch script has SLURM_PROCID, too; only a task of srun has a step.
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_STEP_ID",)),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ()),
    ("MPICH", "PMI_RANK", "PMI_SIZE", ()),
    ("an indexed Kubernetes Job", "JOB_COMPLETION_INDEX", "", ()),
)

_NODE_RANK, _NODES, _PER_NODE = "PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE"
"""An operator's variables for torchrun; without torchrun, a node is a worker."""


@dataclass(frozen=True, slots=True)
class JobPlace:
    """A rank, the number of processes (0: not known), and the variables that say so."""

    rank: int
    world_size: int
    source: str

    def __str__(self) -> str:
        of = f" of {self.world_size}" if self.world_size else ""
        return f"rank {self.rank}{of} ({self.source})"


def identity_of(setting: str) -> str:
    """The worker's identity for a value of the setting `identity`."""
    return socket.gethostname() if setting == HOSTNAME else setting


def place_in_job(env: Mapping[str, str]) -> JobPlace | None:
    """The place that the environment says, if any; InvalidConfig if variables disagree."""
    found = list(_places(env))
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        sizes = {place.world_size for place in (first, other)} - {0}
        if other.rank != first.rank or len(sizes) > 1:
            raise InvalidConfig(
                f"this process is {first}, and {other}: they disagree; {REMEDY}, or unset those "
                "that do not count workers"
            )
    return first


def _places(env: Mapping[str, str]) -> Iterator[JobPlace]:
    is_torchrun = all(name in env for name in _TORCHRUN)
    for launcher, rank, world_size, needed in _PAIRS:
        if rank in env and all(name in env for name in needed):
            yield _place(env, launcher, rank, world_size)
            if is_torchrun:
                return
    if _NODE_RANK in env:
        yield _place_of_node(env)


def _place(env: Mapping[str, str], launcher: str, rank: str, world_size: str) -> JobPlace:
    known = world_size in env
    source = f"{rank} and {world_size} of {launcher}" if known else f"{rank} of {launcher}"
    place = JobPlace(_number(env, rank), _number(env, world_size) if known else 0, source)
    if known and place.rank >= place.world_size:
        raise InvalidConfig(f"{rank} is {place.rank} of {place.world_size} processes; {REMEDY}")
    return place


def _place_of_node(env: Mapping[str, str]) -> JobPlace:
    per_node = env.get(_PER_NODE, "1")
    if per_node.isdigit() and int(per_node) > 1:
        raise InvalidConfig(
            f"{_PER_NODE} is {per_node}, and this is no process of torchrun: start it with "
            f"`torchrun --no-python pushpull worker SCRIPT`, or {REMEDY}"
        )
    nodes = env.get(_NODES, "")  # "2:4" is a range, and no number
    count = int(nodes) if nodes.isdigit() else 0
    return JobPlace(_number(env, _NODE_RANK), count, f"{_NODE_RANK} of an operator")


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    if not text.isdigit():
        raise InvalidConfig(f"{name} is {env[name]!r}; expected a number of 0 or more; {REMEDY}")
    return int(text)
