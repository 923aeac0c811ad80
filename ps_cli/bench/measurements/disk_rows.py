"""Rows of which a server has a tenth in memory and the others on disk, beside all in memory."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import Child
from ps_cli.bench.contenders.contenders import MeasuredCluster, Servers
from ps_cli.bench.contenders.rows import BATCH_COUNT, CALL_COUNT, IN_FLIGHT_COUNT, LENGTH
from ps_cli.bench.instruments.process_memory import resident
from ps_cli.bench.instruments.sampling import MB, MIB, figures_table, rounded
from ps_core import limits
from ps_core.errors import Internal, InvalidConfig

SHARE = 10
"""One row of so many is in memory."""

WARM_DRAWS = 2
"""Ids that are looked up for each row before it is measured."""

ACTIONS = ("zipf 1", f"zipf {IN_FLIGHT_COUNT}", "zipf_push 1")
_CALLS = {"zipf": "pull", "zipf_push": "push"}
ENDS = ("disk_row_count", "private_bytes")
"""Figures of a cluster, taken when its rates were."""

_RECORD_BYTES = 4 * LENGTH + 4
"""The values and the state of a row."""

_FRAME_BYTES = _RECORD_BYTES + 10
_KEPT_BYTES, _SLOT_BYTES = 8 + 4, 4
"""In memory for each row: its id and its place; and for each slot of an index."""

_DISK_ROWS = re.compile(r"^pushpull_server_disk_rows(?:\{.*\})? (\S+)$", re.MULTILINE)
_METRICS_DEADLINE_S = 10.0


def is_measured(row_count: int, partition_count: int) -> bool:
    """True if a partition may have as few rows in memory as a tenth of its own."""
    return row_count >= SHARE * limits.LEAST_FRAME_COUNT * partition_count


def memory_mb(row_count: int, partition_count: int) -> int:
    """The MiB that a server needs to have a tenth of the rows in memory, and all in its index."""
    slot_count = 64
    while 3 * slot_count * partition_count < 5 * row_count:
        slot_count *= 2
    index_bytes = partition_count * slot_count * _SLOT_BYTES + row_count * _KEPT_BYTES
    return math.ceil((index_bytes + row_count // SHARE * _FRAME_BYTES) / MIB)


def warm_run_count(row_count: int) -> int:
    return math.ceil(WARM_DRAWS * row_count / (BATCH_COUNT * CALL_COUNT))


def check_space(row_count: int, lane_count: int) -> None:
    """Raise InvalidConfig if the disk has no space for the rows of so many clusters."""
    folder = tempfile.gettempdir()
    needed_bytes = 2 * lane_count * row_count * _RECORD_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise InvalidConfig(
            f"{folder} has {free_bytes / 1e9:.1f} GB free; expected {needed_bytes / 1e9:.1f} for "
            "rows: choose another folder with TMPDIR"
        )


def disk_environment(row_count: int) -> dict[str, Any]:
    folder = tempfile.gettempdir()
    return {
        "disk_memory_rows": row_count // SHARE,
        "disk_warm_batches": warm_run_count(row_count) * CALL_COUNT,
        "disk_folder": folder,
        "disk_file_system": file_system(Path(folder)),
    }


def file_system(path: Path) -> str:
    """The type of the file system of a path, such as ext4 or tmpfs."""
    found = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, *_ = line.split(" ")
        if path.resolve().is_relative_to(place) and len(place) >= len(found[0]):
            found = place, kind  # a later one lies over an earlier one
    return found[1]


@contextlib.contextmanager
def disk_cluster(
    lane: str, command: tuple[str, ...], row_count: int, partition_count: int
) -> Iterator[MeasuredCluster]:
    """A cluster that has all rows, a tenth of them in memory: those that are looked up often."""
    with tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder:
        environment = {
            "PUSHPULL_MEMORY_MB": str(memory_mb(row_count, partition_count)),
            "PUSHPULL_ROWS_DIR": folder,
        }
        servers = Servers(environment=environment)
        with contenders.cluster(lane, [command], servers) as cluster:
            for _ in range(warm_run_count(row_count)):
                cluster.workers[0].do(ACTIONS[0])
            yield cluster


def disk_runs(
    lane: str, disk: MeasuredCluster, memory: MeasuredCluster
) -> dict[str, Callable[[], float]]:
    """The runs of a cluster with rows on disk and of one without, and their `ENDS`."""
    worker: Child = disk.workers[0]
    return {
        **{f"{lane} disk {action}": worker.timed(action) for action in ACTIONS},
        f"{lane} {ACTIONS[-1]}": memory.workers[0].timed(ACTIONS[-1]),
        f"{lane} disk disk_row_count": partial(_disk_row_count, disk),
        f"{lane} disk private_bytes": partial(_private_bytes, disk),
        f"{lane} private_bytes": partial(_private_bytes, memory),
    }


def _private_bytes(cluster: MeasuredCluster) -> float:
    return resident(cluster.server_pid).private_bytes


def _disk_row_count(cluster: MeasuredCluster) -> float:
    (address,) = cluster.server_http_addresses
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_METRICS_DEADLINE_S) as answer:
        found = _DISK_ROWS.search(answer.read().decode())
    if found is None:
        raise Internal(f"the server at {address} has no metric of the rows on its disk")
    return float(found[1])


def disk_row(
    rates: Mapping[str, float], row_count: int, partition_count: int, lane: str, action: str
) -> dict[str, Any]:
    """One call on rows that are on disk for the most part, beside the same in memory."""
    rate, memory_rate = rates[f"{lane} disk {action}"], rates[f"{lane} {action}"]
    name, count = action.split()
    return {
        "lane": lane,
        "partitions": partition_count,
        "call": _CALLS[name],
        "in_flight": int(count),
        "m_rows_s": rate,
        "memory_m_rows_s": memory_rate,
        "over_memory": rounded(rate / memory_rate),
        "memory_mb": memory_mb(row_count, partition_count),
        "disk_row_count": int(rates[f"{lane} disk disk_row_count"]),
        "private_bytes": int(rates[f"{lane} disk private_bytes"]),
        "memory_private_bytes": int(rates[f"{lane} private_bytes"]),
    }


def disk_view(document: dict[str, Any]) -> TextTable:
    environment = document["environment"]
    table = figures_table(
        "rows on disk: millions of rows a second, ids by Zipf's law",
        *("memory", "disk", "/ memory", "on disk", "MB", "MB, disk"),
        names="lane, partitions, at once",
        caption=f"memory: all rows are there. disk: about {environment['disk_memory_rows']:,} are "
        f"in memory, the others in a file in {environment['disk_folder']} "
        f"({environment['disk_file_system']}), of which the system may cache what it has memory "
        f"for; measured after {environment['disk_warm_batches']} batches. MB: the server's private "
        "memory",
    )
    for row in document["disk"]:
        table.add_row(
            f"{row['lane']} {row['call']}, {row['partitions']}, {row['in_flight']}",
            *(f"{row[key]:.2f}" for key in ("memory_m_rows_s", "m_rows_s", "over_memory")),
            f"{row['disk_row_count']:,}",
            *(f"{row[key] / MB:.0f}" for key in ("memory_private_bytes", "private_bytes")),
        )
    return table
