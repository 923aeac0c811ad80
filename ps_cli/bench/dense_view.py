"""The document of `dense` for a person: figures, and how they compare within the run."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as TextTable

from ps_cli.bench.dense import MOVES, PEERS, lane_ceilings
from ps_cli.bench.lanes import GRPC

_PEER_NAMES = {
    "torch_rpc_tutorial": "torch RPC tutorial",
    "torch_rpc_best": "torch RPC best",
    "torch_rpc_tcp_tutorial": "torch RPC/TCP tutorial",
    "torch_rpc_tcp_best": "torch RPC/TCP best",
}


def dense_view(document: dict[str, Any]) -> RenderableType:
    """Two tables: the rates, and the rates over each other."""
    return Group(_rates(document), _comparison(document["compared"]))


def _rates(document: dict[str, Any]) -> TextTable:
    ceilings, rows = document["ceilings"], document["rows"]
    table = TextTable(
        title="dense: GB/s of parameters",
        caption="in brackets: shm of memcpy, grpc of raw gRPC; CPU: server + worker",
    )
    table.add_column("", no_wrap=True)
    for heading in ("push", "pull", "round", "CPU s/GB"):
        table.add_column(heading, justify="right")
    for name in ("memcpy", "tcp"):
        rate = f"{ceilings[f'{name}_gb_s']:.2f}"
        table.add_row({"tcp": "TCP loopback"}.get(name, name), rate, rate)
    table.add_row("raw gRPC", *(f"{rate:.2f}" for rate in lane_ceilings(GRPC, ceilings).values()))
    for peer in PEERS:
        table.add_row(_PEER_NAMES[peer], "", "", f"{ceilings[f'{peer}_round_gb_s']:.2f}")
    table.add_section()
    for row in rows:
        plural = "" if row["workers"] == 1 else "s"
        table.add_row(
            f"{row['lane']} {row['optimizer']}, {row['workers']} worker{plural}"
            + (", numpy's memory" if row["lane"] != GRPC and row["gradient"] == "private" else ""),
            *(f"{row[f'{move}_gb_s']:.2f} ({row[f'{move}_of_ceiling']:.2f})" for move in MOVES),
            f"{row['server_cpu_s_per_gb']:.2f}+{row['worker_cpu_s_per_gb']:.2f}",
        )
    return table


def _comparison(lanes: list[dict[str, Any]]) -> TextTable:
    table = TextTable(title="dense: rates of a lane over others in this run")
    table.add_column("")
    for lane in lanes:
        table.add_column(lane["lane"], justify="right")
    lines = {f"round / {_PEER_NAMES[peer]}": f"round_over_{peer}" for peer in PEERS}
    lines["Adam's push / SGD's"] = "adam_push_over_sgd"
    for move in MOVES:
        lines[f"2 workers' {move} / 1 worker's"] = f"two_workers_{move}_over_one"
    for name, key in lines.items():
        table.add_row(name, *(f"{lane[key]:.2f}" for lane in lanes))
    return table
