"""Restoring: the time and the memory of a cluster that starts from a checkpoint."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ps_worker as ps
from ps_cli.bench.contenders.checkpoint_worker import OPTIMIZER
from ps_cli.bench.contenders.worker import ELEMENT_BYTES, OPTIMIZERS
from ps_cli.bench.instruments.process_memory import PeakWatch, resident
from ps_cli.bench.instruments.sampling import GB, MIB, rounded
from ps_cli.bench.settings import BenchSettings
from ps_core import limits

SERVER_COUNTS = (1, 2)
WARM, COLD = "warm", "cold"
"""The files are in the page cache when the cluster starts, or not."""

_NOTHING = "without"
_STARTS = (_NOTHING, WARM, COLD)

GROWTH_BYTES = limits.CHECKPOINT_BUFFER_BYTES + 32 * MIB
"""Memory that a server may take for a checkpoint: copies that wait to be written, and the rest."""


class Saved(NamedTuple):
    """A checkpoint, and its table that is pulled."""

    url: str
    byte_count: int
    table: str
    table_bytes: int


class _Start(NamedTuple):
    """Seconds until the whole table was pulled; all servers' memory when serving, and its peak."""

    wall_s: float
    before_bytes: int
    peak_bytes: int


def restores(saved: Saved, lane: str, settings: BenchSettings) -> list[dict[str, Any]]:
    """The document's rows of restoring, and of its memory."""
    out = np.full(saved.table_bytes // ELEMENT_BYTES, 0, dtype=np.float32)
    round_count = 1 if settings.quick else settings.round_count
    rows = []
    for server_count in SERVER_COUNTS:
        listener = settings.within(f"restore, servers: {server_count}").on_progress
        taken: dict[str, list[_Start]] = {how: [] for how in _STARTS}
        # No warm-up, because every process is new, and the benchmark has started some before.
        for number in range(1, round_count + 1):
            for how in _STARTS:
                listener(f"round {number} of {round_count}, {how}")
                taken[how].append(_start(saved, lane, server_count, how, out))
        place = {"lane": lane, "servers": server_count}
        rows += [_restored(place, saved, cache, taken) for cache in (WARM, COLD)]
        rows.append(_memory(place, saved, taken))
    return rows


def _start(
    saved: Saved, lane: str, server_count: int, how: str, out: np.ndarray[Any, Any]
) -> _Start:
    if how == COLD:
        _forget_pages(Path(saved.url))
    resume = "" if how == _NOTHING else saved.url
    with ExitStack() as stack:
        began_s = time.perf_counter()
        cluster = stack.enter_context(ps.local_cluster(server_count, 1, resume=resume))
        pids = [pid for name, pid in cluster.process_ids.items() if name.startswith("server")]
        # The memory of a server that starts without a checkpoint: its own alone.
        before_bytes = sum(resident(pid).total_bytes for pid in pids)
        client = stack.enter_context(ps.connect(cluster.address, rank=0, lane=lane))
        table = client.create_table(saved.table, len(out), optimizer=OPTIMIZERS[OPTIMIZER])
        client.pull(table, out=out)
        wall_s = time.perf_counter() - began_s
        peak_bytes = 0
        for pid in pids:
            with PeakWatch(pid, since_its_start=True) as watch:
                pass
            peak_bytes += watch.peak_bytes
    return _Start(wall_s, before_bytes, peak_bytes)


def _forget_pages(directory: Path) -> None:
    """Drop the files from the page cache; they are durable."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _restored(
    place: dict[str, Any], saved: Saved, cache: str, taken: dict[str, list[_Start]]
) -> dict[str, Any]:
    with_s, without_s = (
        statistics.median(start.wall_s for start in taken[how]) for how in (cache, _NOTHING)
    )
    restore_s = with_s - without_s
    # A small table may take no measurable time.
    rate = rounded(saved.byte_count / GB / restore_s) if restore_s > 0 else None
    return {
        "part": "restore",
        **place,
        "cache": cache,
        "checkpoint_bytes": saved.byte_count,
        "with_s": rounded(with_s),
        "without_s": rounded(without_s),
        "restore_s": rounded(restore_s),
        "restore_gb_s": rate,
    }


def _memory(place: dict[str, Any], saved: Saved, taken: dict[str, list[_Start]]) -> dict[str, Any]:
    """The servers' peak beyond their own memory and their tables."""
    bare_bytes = statistics.median(start.before_bytes for start in taken[_NOTHING])
    peak_bytes = max(start.peak_bytes for start in (*taken[WARM], *taken[COLD]))
    before_bytes = int(bare_bytes) + saved.byte_count
    return memory_row(place, "restore", before_bytes, peak_bytes)


def memory_row(
    place: dict[str, Any], during: str, before_bytes: int, peak_bytes: int
) -> dict[str, Any]:
    """A row of the document: the growth of the servers' memory, and its bound."""
    bound_bytes = GROWTH_BYTES * place["servers"]
    growth_bytes = peak_bytes - before_bytes
    return {
        "part": "memory",
        **place,
        "during": during,
        "before_bytes": before_bytes,
        "peak_bytes": peak_bytes,
        "growth_bytes": growth_bytes,
        "bound_bytes": bound_bytes,
        "of_bound": rounded(growth_bytes / bound_bytes),
    }
