"""Updates in a server, without the network, in GB/s of float32 gradient on one core."""

from __future__ import annotations

import itertools
from typing import Any

from rich.table import Table as TextTable

from ps_cli.bench.contenders.ceilings import memcpy
from ps_cli.bench.contenders.child import started
from ps_cli.bench.instruments.sampling import Operation, figures_table, measured_in_turns, rounded
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 64
QUICK_SIZE_MB = 2
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
KERNELS = ("fast", "exact")
_ACTORS = ("store", "torch")


def optimizers(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes about half a minute."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    with started(("kernels:kernels", str(byte_count))) as (child,):
        names = map(" ".join, itertools.product(OPTIMIZERS, KERNELS, _ACTORS))
        operations = [
            Operation("memcpy", memcpy(byte_count), byte_count),
            *(Operation(name, child.timed(name), byte_count) for name in names),
        ]
        measured = measured_in_turns(operations, settings.round_count, settings.on_progress)
    rates = {name: rounded(result.gb_s) for name, result in measured.items()}
    return {
        "environment": {"table_bytes": byte_count, "round_count": settings.round_count},
        "ceilings": {"memcpy_gb_s": rates["memcpy"]},
        "rows": [
            {
                "optimizer": optimizer,
                "kernels": kernels,
                "apply_gb_s": rates[f"{optimizer} {kernels} store"],
                "torch_optim_gb_s": rates[f"{optimizer} {kernels} torch"],
            }
            for optimizer, kernels in itertools.product(OPTIMIZERS, KERNELS)
        ],
    }


def optimizers_view(document: dict[str, Any]) -> TextTable:
    table = figures_table(
        "optimizers: GB/s of gradient on one core (in brackets: of torch.optim's step)",
        *("kernels", "server", "torch.optim"),
        caption=f"memcpy: {document['ceilings']['memcpy_gb_s']:.2f} GB/s",
    )
    for row in document["rows"]:
        rate, peer = row["apply_gb_s"], row["torch_optim_gb_s"]
        server = f"{rate:.2f} ({rate / peer:.2f})"
        table.add_row(row["optimizer"], row["kernels"], server, f"{peer:.2f}")
    return table
