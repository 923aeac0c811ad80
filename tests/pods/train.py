"""Trains until it is told to stop, and counts in the values whose steps are in them.

A step of rank r adds UNIT ** r times a block's weight to each element of it, which float64 counts
exactly: a step that is lost, applied twice, torn, or in another place is seen at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pushpull as ps

BLOCK, BLOCK_COUNT = 256, 256
WORLD = 2
UNIT = 2.0**24
WEIGHTS = np.repeat(np.arange(BLOCK_COUNT) % 7 + 1.0, BLOCK)
STOP = Path("/tmp/stop")  # noqa: S108 - the pod's own volume

Counts = npt.NDArray[np.int64]


def counted(values: Any) -> Counts:
    """How many steps of each rank every element has: (WORLD, elements)."""
    sums = -np.asarray(values) / WEIGHTS
    if not np.all(sums == np.rint(sums)):
        raise SystemExit(f"no whole steps: {np.unique(sums)}")
    rests, last = np.modf(sums / UNIT)
    return np.stack([rests * UNIT, last]).astype(np.int64)


def say(word: str, client: ps.Client, clock: int, found: Counts, **more: int) -> None:
    """A line for the test, with the least and the most steps of each rank in any element."""
    counts = {"least": found.min(1).tolist(), "most": found.max(1).tolist()}
    print(json.dumps({"word": word, "rank": client.rank, "clock": clock, **counts, **more}))


with ps.connect() as client:
    table = client.create_table(
        "counted",
        BLOCK * BLOCK_COUNT,
        dtype="float64",
        optimizer=ps.SGD(lr=1.0),
        consistency="bsp",
        reduction="sum",
        block_elements=BLOCK,
    )
    found = at_start = counted(client.pull(table))  # one that takes a place begins where others are
    begun, alone = table.clock, 0
    say("begins", client, begun, found)
    step = WEIGHTS * UNIT**client.rank
    while not STOP.exists():
        before, found = found, counted(client.push_pull(table, step))
        grown = found - before
        if np.any((grown < 0) | (grown > 1)):
            raise SystemExit(f"a step of clock {table.clock} is there {np.unique(grown)} times")
        if np.any(found[client.rank] - at_start[client.rank] != table.clock - begun):
            raise SystemExit(f"at clock {table.clock} own steps are missing: {found}")
        alone += int(grown.min() == 0)
    say("ends", client, table.clock, found, alone=alone)
