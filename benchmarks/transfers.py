"""Push, pull and whole steps of one worker on a local cluster."""

from __future__ import annotations

import numpy as np

import ps_worker as ps
from benchmarks.measure import rate_samples, summary

ELEMENT_BYTES = 4


def transfers(server_count: int, byte_count: int, round_count: int) -> dict[str, object]:
    """GB/s of parameters through one float32 table with SGD, BSP, as a user's script gets them.

    A push is timed until it is committed, a pull until the values are in the caller's buffer; a
    step is both, and counts its bytes once.
    """
    element_count = byte_count // ELEMENT_BYTES
    gradient = np.full(element_count, 1e-3, dtype=np.float32)
    values = np.zeros(element_count, dtype=np.float32)
    with (
        ps.local_cluster(servers=server_count, workers=1) as cluster,
        ps.connect(cluster.address) as client,
    ):
        table = client.create_table("bench", element_count, optimizer=ps.SGD(lr=0.1))
        actions = {
            "push": lambda: client.wait(client.push(table, gradient, copy=False)),
            "pull": lambda: client.pull(table, out=values),
            "step": lambda: client.push_pull(table, gradient, out=values),
        }
        rates = {
            name: summary(rate_samples(action, byte_count, round_count))
            for name, action in actions.items()
        }
    return {"servers": server_count, "table_bytes": byte_count, "gb_per_s": rates}
