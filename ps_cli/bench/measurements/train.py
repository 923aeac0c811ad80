"""A training step with and without a cluster: the same script with torch's optimizer and ours."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

import ps_worker as ps
from ps_cli.bench.contenders.child import Child
from ps_cli.bench.contenders.contenders import enter_all
from ps_cli.bench.devices import name_of
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.sampling import figures_table, rounded
from ps_cli.bench.lanes import AUTO, GRPC, LANES
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import InvalidConfig

WIDTH, BATCH, LENGTH, STEP_COUNT = 1280, 16, 128, 3
"""About 10 million parameters; three steps in a run."""

QUICK_WIDTH, QUICK_BATCH, QUICK_LENGTH = 128, 4, 16
ELEMENT_BYTES = 4
MB = 1e6
ALONE = ("plain", "tuned")
"""Ways of `ps_cli.bench.contenders.training`, which is another process because it imports torch."""

_ACTIONS = ("steps", "transfer", "detection")
"""The actions that are timed on a cluster."""

_CEILING_NAMES = {
    "local_step_s": "alone, default Adam",
    "local_fused_step_s": "alone, fused Adam",
    "local_tuned_step_s": "alone, fused, tuned malloc",
    "bare_step_s": "alone, no update, tuned",
}


@dataclass(frozen=True, slots=True)
class _Runs:
    """The functions that time actions, by name, and the processes that train, by way."""

    timed: dict[str, Callable[[], float]]
    trainers: dict[str, Child]
    parameter_count: int


def train(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document of `--json`.

    Blocking: a few minutes.

    Raises:
        InvalidConfig: the settings have a size, or there is no such device.
    """
    if settings.size_mb:
        raise InvalidConfig(
            f"train has a model of its own; leave the size of {settings.size_mb} MB out"
        )
    found = {**environment(), "device": name_of(settings.device)}
    sizes = (QUICK_WIDTH, QUICK_BATCH, QUICK_LENGTH) if settings.quick else (WIDTH, BATCH, LENGTH)
    shape = (settings.device, *(str(size) for size in (*sizes, STEP_COUNT)))
    # A worker on "auto" takes the best lane; the other one is asked for by name.
    asked = (AUTO, GRPC) if settings.lanes == LANES else settings.lanes
    with contextlib.ExitStack() as stack:
        runs = _start(stack, asked, shape)
        samples: dict[str, list[float]] = {name: [] for name in runs.timed}
        for number in range(settings.round_count + 1):
            settings.on_round(number)
            for name, run in runs.timed.items():
                seconds = run()
                if number:
                    samples[name].append(seconds)
        found_lanes = {way: runs.trainers[way].do("lane").result for way in asked}
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    ceilings = {key: medians[key] for key in _CEILING_NAMES}
    return {
        "environment": {
            **found,
            "batch": sizes[1],
            "length": sizes[2],
            "steps_per_run": STEP_COUNT,
            "round_count": settings.round_count,
        },
        "ceilings": {key: rounded(seconds) for key, seconds in ceilings.items()},
        "rows": [
            {
                "lane": found_lanes[way],
                "asked_lane": way,
                "optimizer": "adam",
                "workers": 1,
                "servers": 1,
                "parameter_count": runs.parameter_count,
                "bytes_per_step": 2 * ELEMENT_BYTES * runs.parameter_count,
                **_figures({each: medians[f"{way} {each}"] for each in _ACTIONS}, ceilings),
            }
            for way in asked
        ],
    }


def _start(stack: contextlib.ExitStack, asked: tuple[str, ...], shape: tuple[str, ...]) -> _Runs:
    """Start the processes, which end with `stack`."""
    ways = (*ALONE, *asked)
    trainers = enter_all(stack, [_trainer(way, shape) for way in ways])
    by_way = dict(zip(ways, trainers, strict=True))
    timed = {
        "local_step_s": by_way["plain"].timed("steps"),
        "local_fused_step_s": by_way["plain"].timed("fused steps"),
        "local_tuned_step_s": by_way["tuned"].timed("fused steps"),
        "bare_step_s": by_way["tuned"].timed("bare steps"),
        **{f"{way} {action}": by_way[way].timed(action) for way in asked for action in _ACTIONS},
    }
    return _Runs(timed, by_way, int(by_way["plain"].do("parameters").result))


@contextlib.contextmanager
def _trainer(way: str, shape: tuple[str, ...]) -> Iterator[Child]:
    """A process that trains alone, or on a cluster over a lane."""
    with contextlib.ExitStack() as stack:
        scheduler = ""
        if way not in ALONE:
            scheduler = stack.enter_context(ps.local_cluster(servers=1, workers=1)).address
        yield stack.enter_context(Child("ps_cli.bench.contenders.training", way, scheduler, *shape))


def _figures(taken_s: dict[str, float], ceilings: dict[str, float]) -> dict[str, float]:
    """A step on the cluster compared with one alone, and the hidden share of the transfer."""
    step_s, transfer_s, detection_s = (taken_s[action] for action in _ACTIONS)
    exposed_s = step_s - ceilings["bare_step_s"]
    return {
        "step_s": rounded(step_s),
        "of_local": rounded(ceilings["local_step_s"] / step_s),
        "of_local_fused": rounded(ceilings["local_fused_step_s"] / step_s),
        "of_local_tuned": rounded(ceilings["local_tuned_step_s"] / step_s),
        "transfer_s": rounded(transfer_s),
        "exposed_s": rounded(exposed_s),
        "detection_s": rounded(detection_s),
        "detection_share": rounded(detection_s / step_s),
        "hidden": rounded(min(1.0, max(0.0, 1.0 - exposed_s / transfer_s))),
    }


def train_view(document: dict[str, Any]) -> RenderableType:
    """Two tables: the steps, and the transfer."""
    device = document["environment"]["device"]
    steps = figures_table(
        f"train on {device}: s of a step of a byte LSTM with Adam, 1 torch thread a process",
        *("step", "of default", "of fused", "of tuned"),
    )
    for key, name in _CEILING_NAMES.items():
        steps.add_row(name, f"{document['ceilings'][key]:.4f}")
    transfer = figures_table(
        "train: the hidden share of the transfer, and the cost of looking for edits",
        *("MB", "transfer s", "exposed s", "hidden", "edits"),
        caption="exposed: s beyond forward and backward; hidden: the rest of the transfer; edits: "
        "the share of a step that looks for parameters which the script has changed",
    )
    for row in document["rows"]:
        name = f"{row['lane']} ({row['asked_lane']}), 1 worker, 1 server"
        steps.add_row(
            name,
            f"{row['step_s']:.4f}",
            *(f"{row[key]:.2f}" for key in ("of_local", "of_local_fused", "of_local_tuned")),
        )
        transfer.add_row(
            name,
            f"{row['bytes_per_step'] / MB:.0f}",
            f"{row['transfer_s']:.4f}",
            f"{row['exposed_s']:.4f}",
            f"{row['hidden']:.0%}",
            f"{row['detection_share']:.2%}",
        )
    return Group(steps, transfer)
