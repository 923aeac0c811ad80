"""The runs of a cluster: who trains together, under which name.

Rules:
    - A run has ranks, tables, clocks, barriers and a number of workers of its own. The cluster has
      the servers, the ranges and who holds them.
    - The run without a name is the one that the cluster was started for.
    - A worker may have an identity, which outlives its process: a pod's name, a container's. At
      most one process has it at a time, so who comes with it says that the one before has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ps_core.errors import InvalidConfig

MAX_NAME_BYTES = 63
"""As much as a label in Kubernetes may have: the name of a Job is a run's name."""

MAX_IDENTITY_BYTES = 253
"""As much as the name of a pod or a host may have."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True, slots=True)
class Run:
    """A run and the number of workers that opens clock 1 of its BSP tables. One that `has_ended`
    was ended by an operator: nobody joins it any more. Of one that `is_removed` no table is left.
    """

    name: str
    worker_count: int
    has_ended: bool = False
    is_removed: bool = False


def check_name(name: str) -> None:
    """Refuse what is no name of a run; the empty one is of the run that has none.

    Raises:
        InvalidConfig: it has other characters, or is too long.
    """
    if name and not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"run is {name[:100]!r}; expected a name of at most {MAX_NAME_BYTES} letters, digits, "
            "'.', '_' and '-', with a letter or digit at both ends"
        )


def check_identity(identity: str) -> None:
    """Refuse what is no worker's identity; the empty one is of a worker that has none.

    Raises:
        InvalidConfig: it has other characters, or is too long.
    """
    if identity and not _IDENTITY.fullmatch(identity):
        raise InvalidConfig(
            f"identity is {identity[:100]!r}; expected at most {MAX_IDENTITY_BYTES} letters, "
            "digits, '.', '_' and '-', such as the name of a pod or a container"
        )


def words(name: str) -> str:
    """The run, for a person."""
    return f"run '{name}'" if name else "the run without a name"
