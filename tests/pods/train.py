"""Trains until it is told to stop, and looks at every value that it reads: each is whole, and minus
the clock, or an update was lost, or applied twice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import pushpull as ps

ELEMENTS = 64 * 1000
STOP = Path("/tmp/stop")  # noqa: S108 - the pod's own volume

with ps.connect() as client:
    table = client.create_table(
        "counted", ELEMENTS, optimizer=ps.SGD(lr=1.0), consistency="bsp", block_elements=64
    )
    client.pull(table)  # one that takes the place of another begins at the clock of the others
    ones = np.ones(ELEMENTS, np.float32)
    while not STOP.exists():
        values = np.asarray(client.push_pull(table, ones))
        found = {float(value) for value in np.unique(values)}
        if found != {-float(table.clock)}:
            raise SystemExit(f"after clock {table.clock} the values are {found}")
    print(f"worker {client.rank} ends at clock {table.clock}, exact", flush=True)
