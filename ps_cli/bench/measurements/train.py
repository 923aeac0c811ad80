"""A training step with and without a cluster: the same script with torch's optimizer and ours."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

import ps_worker as ps
from ps_cli.bench.contenders.child import Child, started
from ps_cli.bench.contenders.contenders import enter_all
from ps_cli.bench.devices import CPU, name_of
from ps_cli.bench.instruments.sampling import MB, figures_table, rounded, take_turns
from ps_cli.bench.lanes import AUTO, GRPC, LANES
from ps_cli.bench.measurements.train_together import together_view, train_together
from ps_cli.bench.settings import BenchSettings

WIDTH, BATCH, LENGTH, STEP_COUNT = 1280, 16, 128, 3
"""About 10 million parameters; three steps in a run."""

QUICK_WIDTH, QUICK_BATCH, QUICK_LENGTH = 128, 4, 16
ELEMENT_BYTES = 4
ALONE = ("plain", "tuned")
"""Ways of `ps_cli.bench.contenders.training`, which is another process because it imports torch."""

_ACTIONS = ("steps", "transfer", "detection")
"""The actions that are timed on a cluster."""

_CEILINGS = {
    "local_step_s": ("plain", "steps"),
    "local_fused_step_s": ("plain", "fused steps"),
    "local_tuned_step_s": ("tuned", "fused steps"),
    "local_all_cores_step_s": ("tuned", "all cores steps"),
    "bare_step_s": ("tuned", "bare steps"),
}
"""The way and the action of each key of the document."""

_CEILING_NAMES = {
    "local_step_s": "alone, default Adam",
    "local_fused_step_s": "alone, fused Adam",
    "local_tuned_step_s": "alone, fused, tuned malloc",
    "local_all_cores_step_s": "alone, the same, all cores",
    "bare_step_s": "alone, no update, tuned",
}

_RATIOS = ("of_local", "of_local_fused", "of_local_tuned", "of_local_all_cores")


def train(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes a few minutes."""
    device = name_of(settings.device)
    sizes = (QUICK_WIDTH, QUICK_BATCH, QUICK_LENGTH) if settings.quick else (WIDTH, BATCH, LENGTH)
    shape = (settings.device, *map(str, (*sizes, STEP_COUNT)))
    # A worker on "auto" takes the best lane; the other one is asked for by name.
    asked = (AUTO, GRPC) if settings.lanes == LANES else settings.lanes
    ways = (*ALONE, *asked)
    with contextlib.ExitStack() as stack:
        trainers = dict(
            zip(ways, enter_all(stack, [_trainer(way, shape) for way in ways]), strict=True)
        )
        runs = {
            **{key: trainers[way].timed(action) for key, (way, action) in _CEILINGS.items()},
            **{f"{way} {each}": trainers[way].timed(each) for way in asked for each in _ACTIONS},
        }
        parameter_count = int(trainers["plain"].do("parameters").result)
        samples = take_turns(runs, settings.round_count, settings.on_progress)
        found_lanes = {way: trainers[way].do("lane").result for way in asked}
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    ceilings = {key: medians[key] for key in _CEILINGS}
    beside: dict[str, Any] = {"ceilings": {}, "together": []}
    if settings.device == CPU:
        beside = train_together(settings.within("two workers"))
    return {
        "environment": {
            "device": device,
            "batch": sizes[1],
            "length": sizes[2],
            "torch_threads": 1,
            "steps_per_run": STEP_COUNT,
            "round_count": settings.round_count,
        },
        "ceilings": {key: rounded(seconds) for key, seconds in ceilings.items()}
        | beside["ceilings"],
        "together": beside["together"],
        "rows": [
            {
                "lane": found_lanes[way],
                "asked_lane": way,
                "optimizer": "adam",
                "workers": 1,
                "servers": 1,
                "parameter_count": parameter_count,
                "bytes_per_step": 2 * ELEMENT_BYTES * parameter_count,
                **_figures([medians[f"{way} {each}"] for each in _ACTIONS], ceilings),
            }
            for way in asked
        ],
    }


@contextlib.contextmanager
def _trainer(way: str, shape: tuple[str, ...]) -> Iterator[Child]:
    """A process that trains alone, or on a cluster over a lane."""
    with contextlib.ExitStack() as stack:
        scheduler = ""
        if way not in ALONE:
            scheduler = stack.enter_context(ps.local_cluster(servers=1, workers=1)).address
        yield stack.enter_context(started(("training:training", way, scheduler, *shape)))[0]


def _figures(taken_s: Sequence[float], ceilings: dict[str, float]) -> dict[str, float]:
    """A step on the cluster compared with one alone, and the hidden share of the transfer."""
    step_s, transfer_s, detection_s = taken_s
    exposed_s = step_s - ceilings["bare_step_s"]
    return {
        "step_s": rounded(step_s),
        "of_local": rounded(ceilings["local_step_s"] / step_s),
        "of_local_fused": rounded(ceilings["local_fused_step_s"] / step_s),
        "of_local_tuned": rounded(ceilings["local_tuned_step_s"] / step_s),
        "of_local_all_cores": rounded(ceilings["local_all_cores_step_s"] / step_s),
        "transfer_s": rounded(transfer_s),
        "exposed_s": rounded(exposed_s),
        "detection_s": rounded(detection_s),
        "detection_share": rounded(detection_s / step_s),
        "hidden": rounded(min(1.0, max(0.0, 1.0 - exposed_s / transfer_s))),
    }


def train_view(document: dict[str, Any]) -> RenderableType:
    device = document["environment"]["device"]
    steps = figures_table(
        f"train on {device}: s of a step of a byte LSTM with Adam, 1 torch thread a process",
        *("step", "of default", "of fused", "of tuned", "of all cores"),
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
            *(f"{row[key]:.2f}" for key in _RATIOS),
        )
        transfer.add_row(name, *transfer_cells(row), f"{row['detection_share']:.2%}")
    tables = [steps, transfer]
    if document["together"]:
        tables.append(together_view(document))
    return Group(*tables)


def transfer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """MB, seconds of the transfer, those exposed, and the hidden share, of a row of a document."""
    return (
        f"{row['bytes_per_step'] / MB:.0f}",
        f"{row['transfer_s']:.4f}",
        f"{row['exposed_s']:.4f}",
        f"{row['hidden']:.0%}",
    )
