"""A training step of a transformer of a given size: on a cluster, under DDP, and alone."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType

import ps_worker as ps
from ps_cli.bench.contenders.child import Child, started
from ps_cli.bench.contenders.contenders import ALONE, HEAD_WIDTH, enter_all
from ps_cli.bench.devices import CPU, name_of, transformer_thread_count
from ps_cli.bench.instruments.sampling import MIB, figures_table, rounded, take_turns
from ps_cli.bench.lanes import AUTO, LANES
from ps_cli.bench.measurements.train import transfer_cells
from ps_cli.bench.settings import BenchSettings

ELEMENT_BYTES = 4
BATCH, LENGTH = 4, 1024
LARGE_MB, LARGE_BATCH = 4000, 2
"""Parameters from so many on leave less memory to batches."""

SMALL_BATCH, SMALL_LENGTH = 2, 32
"""On a CPU, and with `--quick`."""

MICRO_BATCHES, QUICK_MICRO_BATCHES = (1, 64), (1, 2)
"""Backward passes of a step: the least, and as many as large models take (a quarter of a million
tokens).
"""

ROUND_COUNT = 3
MAX_SERVER_COUNT = 8

_CEILINGS = {"local": "steps", "ddp": "ddp steps", "bare": "bare steps"}
_CPU_CEILINGS = {"local_all_cores": "all cores steps"}
"""On a CPU, whose cores the servers of a cluster have as well."""

_NAMES = {
    "local": "fused Adam",
    "local_all_cores": "the same on all cores",
    "ddp": "under DDP",
    "bare": "no update",
}


def train_sized(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes minutes, with gigabytes of parameters some more."""
    device = name_of(settings.device)
    is_small = settings.quick or settings.device == CPU
    batch = LARGE_BATCH if settings.size_mb >= LARGE_MB else BATCH
    batch, length = (SMALL_BATCH, SMALL_LENGTH) if is_small else (batch, LENGTH)
    micro_batches = QUICK_MICRO_BATCHES if is_small else MICRO_BATCHES
    layer_count, width = _shape_of(settings.size_mb * MIB // ELEMENT_BYTES)
    sizes = tuple(map(str, (layer_count, width, batch, length)))
    cores = len(os.sched_getaffinity(0))
    server_count = settings.server_count or max(1, min(MAX_SERVER_COUNT, cores // 2))
    asked = (AUTO,) if settings.lanes == LANES else settings.lanes
    ceilings: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for count in micro_batches:
        shape = (settings.device, str(count), *sizes)
        part = settings.within(f"{count} micro-batches")
        found, measured = _measure(part, asked, shape, server_count)
        ceilings |= {f"{key}_{count}": seconds for key, seconds in found.items()}
        rows += [{"micro_batches": count, "servers": server_count, **row} for row in measured]
    return {
        "environment": {
            "device": device,
            "layers": layer_count,
            "width": width,
            "batch": batch,
            "length": length,
            **({"torch_threads": transformer_thread_count()} if settings.device == CPU else {}),
            "round_count": min(ROUND_COUNT, settings.round_count),
        },
        "ceilings": ceilings,
        "rows": rows,
    }


def _shape_of(parameter_count: int) -> tuple[int, int]:
    """The layers and the width of a transformer of about so many parameters (12 layers x width²),
    in the proportions of models of a billion: a layer for every 36 of the width.
    """
    width = (parameter_count * 36 / 12) ** (1 / 3)
    width = max(HEAD_WIDTH, round(width / HEAD_WIDTH) * HEAD_WIDTH)
    return max(1, round(parameter_count / (12 * width * width))), width


def _measure(
    settings: BenchSettings, asked: tuple[str, ...], shape: tuple[str, ...], server_count: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The ceilings and the rows of one number of micro-batches."""
    with contextlib.ExitStack() as stack:
        ways = (ALONE, *asked)
        settings.on_progress("starting")
        found = enter_all(stack, [_trainer(way, shape, server_count) for way in ways])
        trainers = dict(zip(ways, found, strict=True))
        alone = trainers[ALONE]
        actions = _CEILINGS | (_CPU_CEILINGS if shape[0] == CPU else {})
        runs = {key: alone.timed(action) for key, action in actions.items()}
        for way in asked:
            runs |= {f"{way} {each}": trainers[way].timed(each) for each in ("steps", "transfer")}
        round_count = min(ROUND_COUNT, settings.round_count)
        samples = take_turns(runs, round_count, settings.on_progress)
        medians = {name: statistics.median(taken) for name, taken in samples.items()}
        parameter_count = int(alone.do("parameters").result)
        ceilings = {f"{key}_step_s": rounded(medians[key]) for key in actions}
        ceilings["local_peak_device_mb"] = rounded(float(alone.do("peak").result))
        rows = []
        for way in asked:
            trainer = trainers[way]
            step_s, transfer_s = medians[f"{way} steps"], medians[f"{way} transfer"]
            exposed_s = step_s - medians["bare"]
            rows.append({
                "lane": trainer.do("lane").result,
                "asked_lane": way,
                "optimizer": "adam",
                "workers": 1,
                "parameter_count": parameter_count,
                "bytes_per_step": 2 * ELEMENT_BYTES * parameter_count,
                "step_s": rounded(step_s),
                "of_local": rounded(medians["local"] / step_s),
                "of_ddp": rounded(medians["ddp"] / step_s),
                **{
                    f"of_{key}": rounded(medians[key] / step_s)
                    for key in _CPU_CEILINGS
                    if key in medians
                },
                "transfer_s": rounded(transfer_s),
                "exposed_s": rounded(exposed_s),
                "hidden": rounded(min(1.0, max(0.0, 1.0 - exposed_s / transfer_s))),
                "peak_device_mb": rounded(float(trainer.do("peak").result)),
                "pinned_mb": rounded(float(trainer.do("pinned").result)),
            })  # fmt: skip
        return ceilings, rows


@contextlib.contextmanager
def _trainer(way: str, shape: tuple[str, ...], server_count: int) -> Iterator[Child]:
    """A process that trains alone, or on a cluster over a lane."""
    with contextlib.ExitStack() as stack:
        scheduler = ""
        if way != ALONE:
            cluster = ps.local_cluster(servers=server_count, workers=1)
            scheduler = stack.enter_context(cluster).address
        command = ("transformer:training", way, scheduler, *shape)
        yield stack.enter_context(started(command))[0]


def train_sized_view(document: dict[str, Any]) -> RenderableType:
    environment, ceilings = document["environment"], document["ceilings"]
    millions = document["rows"][0]["parameter_count"] / 1e6
    steps = figures_table(
        f"train on {environment['device']}: s of a step of a byte transformer of {millions:.0f} M "
        "parameters with Adam",
        *("step", "of fused", "of DDP", "device MB"),
        caption="x2: two micro-batches a step",
    )
    transfer = figures_table(
        "train: the hidden share of the transfer",
        *("MB", "transfer s", "exposed s", "hidden", "pinned MB"),
        caption="exposed: s beyond forward and backward; hidden: the rest of the transfer",
    )
    for count in dict.fromkeys(row["micro_batches"] for row in document["rows"]):
        peak = f"{ceilings[f'local_peak_device_mb_{count}']:.0f}"
        for name, key in _NAMES.items():
            found = ceilings.get(f"{key}_step_s_{count}")
            if found is not None:
                steps.add_row(f"alone, {name}, x{count}", f"{found:.4f}", "", "", peak)
    for row in document["rows"]:
        name = f"{row['lane']} ({row['asked_lane']}), {row['servers']} servers"
        name += f", x{row['micro_batches']}"
        ratios = (f"{row[key]:.2f}" for key in ("of_local", "of_ddp"))
        steps.add_row(name, f"{row['step_s']:.4f}", *ratios, f"{row['peak_device_mb']:.0f}")
        transfer.add_row(name, *transfer_cells(row), f"{row['pinned_mb']:.0f}")
    return Group(steps, transfer)
