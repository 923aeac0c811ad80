"""A data pass of three workers, of which one is slow: fixed shares of the data, shards, and batches
whose sizes follow their workers' speed.
"""

from __future__ import annotations

import contextlib
import statistics
from functools import partial
from typing import Any

from rich.console import RenderableType

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import Child
from ps_cli.bench.instruments.sampling import figures_table, rounded, take_turns
from ps_cli.bench.settings import BenchSettings

STEP_MS = (10, 10, 30)
"""The emulated computation of a step, by rank; a timer takes it, so any machine will do."""

BATCH = 8
SHARD_BATCH_COUNT = 5
BATCH_COUNT, QUICK_BATCH_COUNT = 360, 180  # of a pass
FIXED, SHARDS, ADAPTIVE = "fixed", "shards", "adaptive"
WAYS = {FIXED: "asp", SHARDS: "asp", ADAPTIVE: "bsp"}
"""The consistency of the tables, whose workers wait for nobody, or for all in each step."""


def shards(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes half a minute."""
    batch_count = QUICK_BATCH_COUNT if settings.quick else BATCH_COUNT
    sizes = tuple(map(str, (batch_count * BATCH, BATCH, SHARD_BATCH_COUNT * BATCH)))
    with contextlib.ExitStack() as stack:
        workers: dict[str, list[Child]] = {}
        for consistency in ("asp", "bsp"):
            commands = [
                ("shard_worker:shard_worker", str(rank), consistency, str(step_ms), *sizes)
                for rank, step_ms in enumerate(STEP_MS)
            ]
            cluster = stack.enter_context(contenders.cluster(settings.lanes[0], commands))
            workers[consistency] = cluster.workers
        samples = take_turns(
            {way: partial(_pass, workers[consistency], way) for way, consistency in WAYS.items()},
            settings.round_count,
            settings.on_progress,
        )
    pass_s = {way: statistics.median(s for s, _ in found) for way, found in samples.items()}
    of_slow = {way: statistics.median(n for _, n in found) for way, found in samples.items()}
    return {
        "environment": {
            "step_ms": list(STEP_MS),
            "batch_count": batch_count,
            "shard_batch_count": SHARD_BATCH_COUNT,
            "round_count": settings.round_count,
        },
        "ceilings": {"even_pass_s": rounded(batch_count / sum(1e3 / each for each in STEP_MS))},
        "rows": [
            {
                "data": way,
                "pass_s": rounded(pass_s[way]),
                "slow_worker_samples": of_slow[way],
                "over_fixed": rounded(pass_s[way] / pass_s[FIXED]),
            }
            for way in WAYS
        ],
        "samples_s": {way: [s for s, _ in found] for way, found in samples.items()},
    }


def _pass(workers: list[Child], way: str) -> tuple[float, int]:
    """The seconds of a pass, and the samples of the slow worker."""
    for worker in workers:
        worker.tell(way)
    done = [worker.answer() for worker in workers]
    taken_s = max(one.ended_s for one in done) - min(one.began_s for one in done)
    return taken_s, int(done[-1].result)


def shards_view(document: dict[str, Any]) -> RenderableType:
    environment = document["environment"]
    table = figures_table(
        f"shards: a pass of {environment['batch_count']} batches, steps of "
        f"{', '.join(map(str, environment['step_ms']))} ms",
        *("seconds", "over fixed", "slow worker's samples"),
        caption="if all workers computed until the end: "
        f"{document['ceilings']['even_pass_s']:.2f} s",
    )
    for row in document["rows"]:
        table.add_row(
            row["data"],
            f"{row['pass_s']:.2f}",
            f"{row['over_fixed']:.2f}",
            f"{row['slow_worker_samples']:.0f}",
        )
    return table
