"""A step of two workers that train together, beside DDP of two processes."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

import ps_worker as ps
from ps_cli.bench.contenders.child import Child, started, together
from ps_cli.bench.contenders.contenders import enter_all
from ps_cli.bench.instruments.sampling import figures_table, rounded, take_turns
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import Internal

WORKER_COUNT = 2
WIDTH, BATCH, STEP_COUNT = 2216, 64, 5
"""6.7 million parameters, images of a worker's batch, and steps of a run."""

QUICK_WIDTH, QUICK_BATCH = 64, 8

_DDP, _WAITS, _OVERLAPS = "ddp", "waits", "overlap"
_TOLERANCE = 1e-6
"""Between the sums of all parameters, relative: DDP's sums may come in another order."""

_Group = list[Child]


def train_together(settings: BenchSettings) -> dict[str, Any]:
    """The ceilings and the rows of the document of `train`, by these names."""
    width, batch = (QUICK_WIDTH, QUICK_BATCH) if settings.quick else (WIDTH, BATCH)
    sizes = tuple(map(str, (width, batch, STEP_COUNT)))
    ways = [(lane, pulls) for lane in settings.lanes for pulls in (_WAITS, _OVERLAPS)]
    with contextlib.ExitStack() as stack:
        contenders = [_ddp(sizes), *(_members(*way, sizes) for way in ways)]
        ddp, *members = enter_all(stack, contenders)
        runs: dict[str, Callable[[], float]] = {_DDP: _timed(ddp)}
        runs |= {" ".join(way): _timed(group) for way, group in zip(ways, members, strict=True)}
        samples = take_turns(runs, settings.round_count, settings.on_progress)
        _check_equal([ddp, *members])
        parameter_count = int(ddp[0].do("parameters").result)
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return {
        "ceilings": {"ddp_together_step_s": rounded(medians[_DDP])},
        "together": [
            {
                "lane": lane,
                "optimizer": "adam",
                "workers": WORKER_COUNT,
                "servers": 1,
                "overlaps_pulls": pulls == _OVERLAPS,
                "batch": batch,
                "parameter_count": parameter_count,
                "step_s": rounded(medians[f"{lane} {pulls}"]),
                "of_ddp": rounded(medians[_DDP] / medians[f"{lane} {pulls}"]),
            }
            for lane, pulls in ways
        ],
    }


def _timed(group: _Group) -> Callable[[], float]:
    """A function that has all workers take their steps; the seconds of one, of the slowest."""
    return lambda: together(group, "steps") / STEP_COUNT


def _check_equal(groups: list[_Group]) -> None:
    """Raise Internal unless all have trained the same model."""
    sums = [float(child.do("sum").result) for group in groups for child in group]
    if not all(math.isclose(each, sums[0], rel_tol=_TOLERANCE) for each in sums):
        raise Internal(f"the sums of the parameters are {sums}; expected those of DDP, the first")


@contextlib.contextmanager
def _ddp(sizes: tuple[str, ...]) -> Iterator[_Group]:
    with tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder:
        store, count = str(Path(folder) / "store"), str(WORKER_COUNT)
        commands = [
            ("perceptron:ddp", store, str(rank), count, *sizes) for rank in range(WORKER_COUNT)
        ]
        with started(*commands) as group:
            yield group


@contextlib.contextmanager
def _members(lane: str, pulls: str, sizes: tuple[str, ...]) -> Iterator[_Group]:
    with ps.local_cluster(servers=1, workers=WORKER_COUNT) as cluster:
        commands = [
            ("perceptron:member", cluster.address, lane, str(rank), pulls, *sizes)
            for rank in range(WORKER_COUNT)
        ]
        with started(*commands) as group:
            yield group


def together_view(document: dict[str, Any]) -> Table:
    rows = document["together"]
    table = figures_table(
        f"train: ms of a step of {WORKER_COUNT} workers under BSP, an MLP of "
        f"{rows[0]['parameter_count'] / 1e6:.1f} M parameters with Adam",
        *("ms", "of DDP"),
        caption="of DDP: its step over this one; more is faster. 1 torch thread a process, one "
        "server beside the workers",
    )
    ddp_s = document["ceilings"]["ddp_together_step_s"]
    table.add_row("DDP, gloo, fused Adam", f"{1e3 * ddp_s:.1f}", "1.00")
    for row in rows:
        pulls = ", pulls overlap forward" if row["overlaps_pulls"] else ""
        table.add_row(f"{row['lane']}{pulls}", f"{1e3 * row['step_s']:.1f}", f"{row['of_ddp']:.2f}")
    return table
