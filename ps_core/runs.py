"""The runs of a cluster: who trains together, under which name.

Rules:
    - A run has ranks, tables, clocks, barriers and a number of workers of its own. The cluster has
      the servers, the ranges and who holds them.
    - The run without a name is the one that the cluster was started for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ps_core.errors import InvalidConfig

MAX_NAME_BYTES = 63
"""As much as a label in Kubernetes may have: the name of a Job is a run's name."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Run:
    """A run and the number of workers that opens clock 1 of its BSP tables. One that `has_ended`
    was ended by an operator: nobody joins it any more.
    """

    name: str
    worker_count: int
    has_ended: bool = False


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


def words(name: str) -> str:
    """The run, for a person."""
    return f"run '{name}'" if name else "the run without a name"
