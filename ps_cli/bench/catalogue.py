"""The benchmarks by name, and how one is run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from ps_cli.bench.devices import CPU, DEVICES
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.lanes import LANES
from ps_cli.bench.measurements.checkpoint import checkpoint, checkpoint_view
from ps_cli.bench.measurements.codecs import codecs, codecs_view
from ps_cli.bench.measurements.dense import dense, dense_view
from ps_cli.bench.measurements.failover import failover, failover_fault, failover_view
from ps_cli.bench.measurements.latency import latency, latency_view
from ps_cli.bench.measurements.link import link, link_fault, link_view
from ps_cli.bench.measurements.memory import memory, memory_view
from ps_cli.bench.measurements.optimizers import optimizers, optimizers_view
from ps_cli.bench.measurements.replicated import replicated, replicated_view
from ps_cli.bench.measurements.sessions import sessions, sessions_view
from ps_cli.bench.measurements.shards import shards, shards_view
from ps_cli.bench.measurements.sparse import sparse, sparse_view
from ps_cli.bench.measurements.train import train, train_view
from ps_cli.bench.measurements.train_sized import train_sized, train_sized_view
from ps_cli.bench.settings import RATE_MBIT, BenchSettings
from ps_core.errors import Internal, InvalidConfig
from ps_runtime.system.process_end import unwound_by_sigterm

Document = dict[str, Any]

STANDARD_OUTPUT = "-"


def _no_fault(_: Document) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: `measure` makes its document, whose environment has the settings alone; `view`
    shows it to a person; `devices` may run its workers; `fault` finds the reason why it failed. It
    measures lanes one by one if it `has_lanes`, and at any size if it `has_size`.
    """

    summary: str
    measure: Callable[[BenchSettings], Document]
    view: Callable[[Document], RenderableType]
    devices: tuple[str, ...] = (CPU,)
    fault: Callable[[Document], str] = _no_fault
    has_lanes: bool = True
    has_size: bool = True


BENCHMARKS = {
    "dense": Benchmark("push, pull and round of one dense table, GB/s", dense, dense_view),
    "latency": Benchmark("push_pull of a 4 KB table, milliseconds", latency, latency_view),
    "sparse": Benchmark("rows of an embedding table, millions a second", sparse, sparse_view),
    "train": Benchmark(
        "a training step with and without a cluster, seconds", train, train_view, DEVICES
    ),
    "optimizers": Benchmark(
        "updates in a server, without the network, GB/s of gradient",
        optimizers,
        optimizers_view,
        has_lanes=False,
    ),
    "codecs": Benchmark("codecs on one core, and rounds in them, GB/s", codecs, codecs_view),
    "link": Benchmark(
        "rounds over a link of a given rate, as root, seconds",
        link,
        link_view,
        fault=link_fault,
        has_lanes=False,
    ),
    "memory": Benchmark("peak memory of a server and a worker, MB", memory, memory_view),
    "sessions": Benchmark("many sessions on one server, GB/s", sessions, sessions_view),
    "shards": Benchmark(
        "a data pass with a slow worker, fixed and by shards, seconds",
        shards,
        shards_view,
        has_size=False,
    ),
    "checkpoint": Benchmark(
        "checkpoints: writing, training meanwhile, restoring", checkpoint, checkpoint_view
    ),
}


REPLICATED = {
    "dense": Benchmark(
        "dense with replicas or an update log and without, GB/s", replicated, replicated_view
    ),
    "sparse": Benchmark(
        "rows with replicas, through the death of a server, seconds",
        failover,
        failover_view,
        fault=failover_fault,
    ),
}
"""Replace those of the name if replicas are asked for; an update log replaces `dense`, too."""


SIZED_TRAIN = Benchmark(
    "a training step of a transformer, beside DDP, seconds", train_sized, train_sized_view, DEVICES
)
"""Replaces `train` if a size is asked for."""


def find(name: str) -> Benchmark:
    found = BENCHMARKS.get(name)
    if found is None:
        known = "; ".join(f"{known} ({one.summary})" for known, one in BENCHMARKS.items())
        raise InvalidConfig(f"benchmark is '{name}'; there are: {known}")
    return found


def _chosen(name: str, settings: BenchSettings) -> Benchmark:
    """The benchmark of that name with these settings.

    Raises:
        InvalidConfig: there is none.
    """
    chosen = find(name)
    has_replicas = settings.replica_count > 1
    is_large = name == "train" and settings.size_mb > 0
    if settings.server_count and not (is_large or (name == "sparse" and has_replicas)):
        raise InvalidConfig(
            f"servers is {settings.server_count}; {name} chooses its own, and only sparse with "
            "--replicas 2 or more and train with --size-mb leave that to you"
        )
    if settings.lanes != LANES and not chosen.has_lanes:
        raise InvalidConfig(f"lane is '{settings.lanes[0]}'; {name} has none to choose")
    if settings.rate_mbit != RATE_MBIT and name != "link":
        raise InvalidConfig(f"rate-mbit is {settings.rate_mbit}; only link has a link of a rate")
    if settings.size_mb and not chosen.has_size:
        raise InvalidConfig(f"size-mb is {settings.size_mb}; {name} has a size of its own")
    if settings.has_update_log and name != "dense":
        raise InvalidConfig(f"{name} runs without an update log; leave --update-log to dense")
    if has_replicas and name not in REPLICATED:
        raise InvalidConfig(
            f"replicas is {settings.replica_count}; {name} runs with 1, and only "
            f"{' and '.join(REPLICATED)} otherwise"
        )
    if has_replicas or settings.has_update_log:
        chosen = REPLICATED[name]
    if is_large:
        chosen = SIZED_TRAIN
    if settings.device not in chosen.devices:
        raise InvalidConfig(
            f"device is '{settings.device}'; {name} runs on {' or '.join(chosen.devices)}"
        )
    return chosen


def run(name: str, settings: BenchSettings, console: Console) -> Document:
    """Run one benchmark and print its table."""
    benchmark = _chosen(name, settings)
    found = environment()  # the load is that before the measurement
    with unwound_by_sigterm(), console.status(f"{name}: starting") as status:
        document = benchmark.measure(
            replace(settings, on_progress=lambda phase: status.update(f"{name}: {phase}"))
        )
    document["environment"] = {**found, **document["environment"]}
    console.print(benchmark.view(document))
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return document


def bench(name: str, settings: BenchSettings, json_path: str) -> None:
    """Run one benchmark, and write its table, and its document to `json_path`: empty: nowhere; "-":
    standard output, and the table goes to standard error.

    Raises:
        InvalidConfig: there is no such benchmark, or the file cannot be written; if that is seen
            only at the end, the document is on standard output.
        Internal: the benchmark has found a fault; its table and its document are written.
    """
    find(name)
    path = Path(json_path)
    if json_path not in ("", STANDARD_OUTPUT):
        with _writing(path):
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()
    console = Console(stderr=json_path == STANDARD_OUTPUT, highlight=False)
    document = run(name, settings, console)
    text = json.dumps(document, indent=2)
    if json_path == STANDARD_OUTPUT:
        print(text)
    elif json_path:
        try:
            with _writing(path):
                path.write_text(text + "\n", encoding="utf-8")
        except InvalidConfig:
            print(text)
            raise
    fault = _chosen(name, settings).fault(document)
    if fault:
        raise Internal(fault)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"--json: {path} cannot be written: {error.strerror}") from error
