"""The whole table, and how one of it is run: at a worker, and in plain torch."""

from __future__ import annotations

import re
from typing import Any

import torch

import ps_worker as ps
from tests.idioms import (  # noqa: F401 - each enters its idioms into the table
    accelerate_runs,
    gradients,
    lightning_runs,
    modules,
    optimizers,
    parameters,
    schedules,
    trainer_runs,
)
from tests.idioms.kit import IDIOMS, Idiom, Kit, kept


def run_on_cluster(client: ps.Client, name: str, number: int) -> Any:
    """A worker's run of the idiom of that name: its result, or what refused it."""
    found = next(known for known in IDIOMS if known.name == name)
    torch.manual_seed(number)
    try:
        return kept(found.run(Kit(client, f"idiom{number}")))
    except ps.PushpullError as error:
        if found.refused is None or not re.search(found.refused, str(error)):
            raise
        return ("refused", str(error))


def run_plain(found: Idiom, number: int) -> Any:
    """The same in one process with torch.optim."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have it: sums of several threads round otherwise
    torch.manual_seed(number)
    try:
        return kept(found.run(Kit(None, "plain")))
    finally:
        torch.set_num_threads(threads)
