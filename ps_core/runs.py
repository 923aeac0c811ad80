"""Runs: groups of workers that train together, by name.

Rules:
    - A run has ranks, tables, clocks, barriers and a worker count of its own. The cluster has the
      servers and the ranges.
    - The run without a name is the one that the cluster was started for.
    - A worker may have an identity that outlives its process, such as the name of a pod. At most
      one process has it at a time, so a new process with it shows that the earlier one has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ps_core.errors import InvalidConfig

MAX_NAME_BYTES = 63
"""Length of a Kubernetes label, because a Job's name is its run's."""

MAX_IDENTITY_BYTES = 253
"""Length of a pod's or host's name."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and the workers that open clock 1 of its BSP tables. An operator ended a run that
    `has_ended`: no worker joins it. A run that `is_removed` has no tables.
    """

    name: str
    worker_count: int
    has_ended: bool = False
    is_removed: bool = False


def check_name(name: str) -> None:
    """Raise InvalidConfig for a malformed name; the empty one is valid."""
    if name and not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"run is {name[:100]!r}; expected a name of at most {MAX_NAME_BYTES} letters, digits, "
            "'.', '_' and '-', with a letter or digit at both ends"
        )


def check_identity(identity: str) -> None:
    """Raise InvalidConfig for a malformed identity; the empty one is valid."""
    if identity and not _IDENTITY.fullmatch(identity):
        raise InvalidConfig(
            f"identity is {identity[:100]!r}; expected at most {MAX_IDENTITY_BYTES} letters, "
            "digits, '.', '_' and '-', such as the name of a pod or a container"
        )


def words(name: str) -> str:
    """The run, for messages."""
    return f"run '{name}'" if name else "the run without a name"
