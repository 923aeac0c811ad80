"""Push, pull and round of one dense float32 table, in GB/s of parameters."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.ceilings import memcpy
from ps_cli.bench.contenders.child import together
from ps_cli.bench.contenders.contenders import Cluster, Load, Pair
from ps_cli.bench.contenders.moves import PRIVATE
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.sampling import (
    Measured,
    Operation,
    figures_table,
    joined,
    rounded,
    take_turns,
)
from ps_cli.bench.lanes import GRPC, SHARED_MEMORY
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 256
QUICK_SIZE_MB = 8
MOVES = ("push", "pull", "round")

Figures = dict[str, float]

_CEILINGS = {
    "memcpy_gb_s": "memcpy",
    "tcp_gb_s": "tcp",
    "raw_grpc_push_gb_s": "raw push",
    "raw_grpc_pull_gb_s": "raw pull",
    "torch_rpc_tutorial_round_gb_s": "torch tutorial",
    "torch_rpc_best_round_gb_s": "torch best",
    "torch_rpc_tcp_tutorial_round_gb_s": "torch TCP tutorial",
    "torch_rpc_tcp_best_round_gb_s": "torch TCP best",
}
"""The operation of each key of the document."""

PEERS = ("torch_rpc_tutorial", "torch_rpc_best", "torch_rpc_tcp_tutorial", "torch_rpc_tcp_best")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the result, and the cluster of its operations."""

    name: str
    cluster: Cluster

    @property
    def optimizer(self) -> str:
        return self.name.removesuffix(PRIVATE)

    @property
    def gradient(self) -> str:
        is_shared = self.cluster.lane == SHARED_MEMORY and not self.name.endswith(PRIVATE)
        return "shared" if is_shared else "private"

    @property
    def worker_count(self) -> int:
        return len(self.cluster.workers)

    def name_of(self, move: str) -> str:
        return f"{self.cluster.lane} {self.name}, {self.worker_count} x {move}"


def dense(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document of `--json`.

    Blocking: half a minute to a few minutes at 256 MB.
    """
    found = environment()
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    rows: list[_Row] = []
    legs = []
    with contextlib.ExitStack() as stack:
        peers = _peer_operations(stack, byte_count)
        # One lane's clusters at a time: both lanes' would need 16 GB. The peers take their turns
        # beside each.
        for lane in settings.lanes:
            with contextlib.ExitStack() as lane_stack:
                lane_rows = _rows(lane_stack, lane, byte_count)
                own = [_row_operations(row, byte_count) for row in lane_rows]
                operations = list(itertools.chain(peers, *own))
                listener = settings.within(lane).on_round
                legs.append(take_turns(operations, settings.round_count, listener))
            rows += lane_rows
    measured = joined(legs)
    ceilings = {key: rounded(measured[name].gb_s) for key, name in _CEILINGS.items()}
    figures = [_figures(row, measured, ceilings) for row in rows]
    return {
        "environment": {**found, "table_bytes": byte_count, "round_count": settings.round_count},
        "ceilings": ceilings,
        "rows": figures,
        "compared": [
            {"lane": lane, **_compared([row for row in figures if row["lane"] == lane], ceilings)}
            for lane in settings.lanes
        ],
        "samples_gb_s": {
            name: [rounded(rate) for rate in result.rates_gb_s] for name, result in measured.items()
        },
    }


def _peer_operations(stack: contextlib.ExitStack, byte_count: int) -> list[Operation]:
    """The operations that lanes are compared with; their processes end with `stack`."""
    raw, torch_own, torch_tcp = contenders.enter_all(
        stack,
        [
            contenders.raw_grpc(byte_count, 0),
            contenders.torch_rpc("own", byte_count, 0),
            contenders.torch_rpc("tcp", byte_count, 0),
        ],
    )
    tcp = stack.enter_context(contenders.tcp_loopback(byte_count))
    return [
        Operation("memcpy", memcpy(byte_count), byte_count),
        Operation("tcp", tcp.send, byte_count),
        *_pair_operations("raw", raw, ("push", "pull"), byte_count),
        *_pair_operations("torch", torch_own, ("tutorial", "best"), byte_count),
        *_pair_operations("torch TCP", torch_tcp, ("tutorial", "best"), byte_count),
    ]


def _rows(stack: contextlib.ExitStack, lane: str, byte_count: int) -> list[_Row]:
    """The rows of one lane; their clusters end with `stack`."""
    also = (f"sgd{PRIVATE}",) if lane == SHARED_MEMORY else ()
    loads = (Load(byte_count, ("sgd", "adam", *also)), Load(byte_count, ("sgd",)))
    clusters = contenders.enter_all(
        stack,
        [contenders.cluster(lane, count, load) for count, load in enumerate(loads, start=1)],
    )
    return [
        _Row(name, cluster)
        for cluster, load in zip(clusters, loads, strict=True)
        for name in load.names
    ]


def _pair_operations(
    name: str, pair: Pair, actions: tuple[str, ...], byte_count: int
) -> list[Operation]:
    def run(action: str) -> float:
        return pair.do(action).wall_s

    return [
        Operation(f"{name} {action}", partial(run, action), byte_count, pair.pids)
        for action in actions
    ]


def _row_operations(row: _Row, byte_count: int) -> list[Operation]:
    cluster, moved_bytes = row.cluster, byte_count * row.worker_count
    runs = {move: partial(together, cluster.workers, f"{row.name} {move}") for move in MOVES}
    return [
        Operation(row.name_of(move), run, moved_bytes, cluster.pids) for move, run in runs.items()
    ]


def _figures(row: _Row, measured: dict[str, Measured], ceilings: Figures) -> dict[str, Any]:
    moves = {move: measured[row.name_of(move)] for move in MOVES}
    # A round pushes a GB and pulls a GB for each GB of parameters.
    moved_gb = moves["push"].gb + moves["pull"].gb + 2 * moves["round"].gb

    def cpu_s_per_gb(*pids: int) -> float:
        return sum(move.cpu_s(pid) for move in moves.values() for pid in pids) / moved_gb

    of = lane_ceilings(row.cluster.lane, ceilings)
    return {
        "lane": row.cluster.lane,
        "optimizer": row.optimizer,
        "gradient": row.gradient,
        "workers": row.worker_count,
        "servers": 1,
        **{f"{move}_gb_s": rounded(result.gb_s) for move, result in moves.items()},
        **{f"{move}_of_ceiling": rounded(moves[move].gb_s / of[move]) for move in MOVES},
        "cpu_s_per_gb": rounded(cpu_s_per_gb(*row.cluster.pids)),
        "server_cpu_s_per_gb": rounded(cpu_s_per_gb(row.cluster.server_pid)),
        "worker_cpu_s_per_gb": rounded(cpu_s_per_gb(*row.cluster.worker_pids)),
    }


def lane_ceilings(lane: str, ceilings: Figures) -> Figures:
    """The rates that a lane is compared with: of a copy in memory, or of raw gRPC."""
    if lane == SHARED_MEMORY:
        return dict.fromkeys(MOVES, ceilings["memcpy_gb_s"])
    push, pull = ceilings["raw_grpc_push_gb_s"], ceilings["raw_grpc_pull_gb_s"]
    return {"push": push, "pull": pull, "round": 1 / (1 / push + 1 / pull)}


def _compared(rows: list[dict[str, Any]], ceilings: Figures) -> Figures:
    """The rows of one lane compared with each other and with torch RPC."""
    by_kind: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        # The first of a kind: with shared memory, the row whose gradient is shared.
        by_kind.setdefault((row["optimizer"], row["workers"]), row)
    sgd, adam, double = by_kind["sgd", 1], by_kind["adam", 1], by_kind["sgd", 2]
    return {
        **{
            f"round_over_{peer}": rounded(sgd["round_gb_s"] / ceilings[f"{peer}_round_gb_s"])
            for peer in PEERS
        },
        "adam_push_over_sgd": rounded(adam["push_gb_s"] / sgd["push_gb_s"]),
        **{
            f"two_workers_{move}_over_one": rounded(double[f"{move}_gb_s"] / sgd[f"{move}_gb_s"])
            for move in MOVES
        },
    }


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
    table = figures_table(
        "dense: GB/s of parameters",
        *(*MOVES, "CPU s/GB"),
        caption="in brackets: shm of memcpy, grpc of raw gRPC; CPU: server + worker",
    )
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
    names = [lane["lane"] for lane in lanes]
    table = figures_table("dense: rates of a lane over others in this run", *names)
    lines = {f"round / {_PEER_NAMES[peer]}": f"round_over_{peer}" for peer in PEERS}
    lines["Adam's push / SGD's"] = "adam_push_over_sgd"
    for move in MOVES:
        lines[f"2 workers' {move} / 1 worker's"] = f"two_workers_{move}_over_one"
    for name, key in lines.items():
        table.add_row(name, *(f"{lane[key]:.2f}" for lane in lanes))
    return table
