"""Updates in a server, without the network, in GB/s of float32 gradient on one core."""

from __future__ import annotations

from rich.table import Table as TextTable

from ps_cli.bench.contenders.ceilings import memcpy
from ps_cli.bench.contenders.child import Child
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.sampling import Operation, figures_table, rounded, take_turns
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 64
QUICK_SIZE_MB = 2
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
KERNELS = ("fast", "exact")
_ACTORS = ("store", "torch")


def optimizers(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document of `--json`.

    Blocking: about half a minute.
    """
    found = environment()
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    with Child("ps_cli.bench.contenders.kernels", str(byte_count)) as child:
        names = [
            f"{optimizer} {kernels} {actor}"
            for optimizer in OPTIMIZERS
            for kernels in KERNELS
            for actor in _ACTORS
        ]
        operations = [
            Operation("memcpy", memcpy(byte_count), byte_count),
            *(Operation(name, child.timed(name), byte_count) for name in names),
        ]
        measured = take_turns(operations, settings.round_count, settings.on_round)
    rates = {name: rounded(result.gb_s) for name, result in measured.items()}
    return {
        "environment": {**found, "table_bytes": byte_count, "round_count": settings.round_count},
        "ceilings": {"memcpy_gb_s": rates["memcpy"]},
        "rows": [
            {
                "optimizer": optimizer,
                "kernels": kernels,
                "apply_gb_s": rates[f"{optimizer} {kernels} store"],
                "torch_optim_gb_s": rates[f"{optimizer} {kernels} torch"],
            }
            for optimizer in OPTIMIZERS
            for kernels in KERNELS
        ],
    }


def optimizers_view(document: dict[str, object]) -> TextTable:
    ceilings, rows = document["ceilings"], document["rows"]
    assert isinstance(ceilings, dict)
    assert isinstance(rows, list)
    table = figures_table(
        "optimizers: GB/s of gradient on one core (in brackets: of torch.optim's step)",
        *("kernels", "server", "torch.optim"),
        caption=f"memcpy: {ceilings['memcpy_gb_s']:.2f} GB/s",
    )
    for row in rows:
        rate, peer = row["apply_gb_s"], row["torch_optim_gb_s"]
        server = f"{rate:.2f} ({rate / peer:.2f})"
        table.add_row(row["optimizer"], row["kernels"], server, f"{peer:.2f}")
    return table
