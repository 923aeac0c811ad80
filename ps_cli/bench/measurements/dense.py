"""Push, pull and round of one dense float32 table, in GB/s of parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.ceilings import memcpy, tcp_loopback
from ps_cli.bench.contenders.child import together
from ps_cli.bench.contenders.contenders import MeasuredCluster, Pair
from ps_cli.bench.contenders.worker import PRIVATE
from ps_cli.bench.instruments.sampling import (
    Measured,
    Operation,
    figures_table,
    joined,
    measured_in_turns,
    rounded,
    samples_gb_s,
)
from ps_cli.bench.lanes import GRPC, SHARED_MEMORY
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 256
QUICK_SIZE_MB = 8
MOVES = ("push", "pull", "round")

Figures = dict[str, float]

_THREADS = ("one thread", "all cores")
"""Names of the numbers of threads of `ps_cli.bench.contenders.torch_rpc`, another process because
it imports torch.
"""

_CEILINGS = {
    "memcpy_gb_s": ["memcpy"],
    "tcp_gb_s": ["tcp"],
    "raw_grpc_push_gb_s": ["raw push"],
    "raw_grpc_pull_gb_s": ["raw pull"],
    "raw_grpc_round_gb_s": ["raw round apart", "raw round at once"],
    "torch_rpc_tutorial_round_gb_s": [f"torch tutorial {each}" for each in _THREADS],
    "torch_rpc_best_round_gb_s": [f"torch best {each}" for each in _THREADS],
    "torch_rpc_tcp_tutorial_round_gb_s": [f"torch TCP tutorial {each}" for each in _THREADS],
    "torch_rpc_tcp_best_round_gb_s": [f"torch TCP best {each}" for each in _THREADS],
}
"""The operations of each key of the document, of which the best counts."""

_PEERS = {
    "torch_rpc_tutorial": "torch RPC tutorial",
    "torch_rpc_best": "torch RPC best",
    "torch_rpc_tcp_tutorial": "torch RPC/TCP tutorial",
    "torch_rpc_tcp_best": "torch RPC/TCP best",
}


class _DenseRow(NamedTuple):
    """A row of the result: a table of a cluster, and the operations on it by move."""

    name: str
    cluster: MeasuredCluster
    operations: dict[str, Operation]


def operations_by_move(
    cluster: MeasuredCluster, name: str, title: str, byte_count: int
) -> dict[str, Operation]:
    """The moves of all workers on the table `name`; `title` has a place for the move."""
    moved_bytes = byte_count * len(cluster.workers)
    return {
        move: Operation(
            title.format(move),
            partial(together, cluster.workers, f"{name} {move}"),
            moved_bytes,
            cluster.pids,
        )
        for move in MOVES
    }


def dense(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes half a minute to a few minutes at 256 MB."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    rows: list[_DenseRow] = []
    legs = []
    with contextlib.ExitStack() as stack:
        peers = _peer_operations(stack, byte_count)
        # One lane's clusters at a time: both lanes' would need 16 GB. The peers take their turns
        # beside each.
        for lane in settings.lanes:
            with contextlib.ExitStack() as lane_stack:
                lane_rows = _rows(lane_stack, lane, byte_count)
                own = [row.operations.values() for row in lane_rows]
                operations = itertools.chain(peers, *own)
                listener = settings.within(lane).on_progress
                legs.append(measured_in_turns(operations, settings.round_count, listener))
            rows += lane_rows
    measured = joined(legs)
    ceilings = {
        key: rounded(max(measured[name].gb_s for name in names)) for key, names in _CEILINGS.items()
    }
    figures = [_figures(row, measured, ceilings) for row in rows]
    return {
        "environment": {"table_bytes": byte_count, "round_count": settings.round_count},
        "ceilings": ceilings,
        "rows": figures,
        "compared": [
            {"lane": lane, **_compared([row for row in figures if row["lane"] == lane], ceilings)}
            for lane in settings.lanes
        ],
        "samples_gb_s": samples_gb_s(measured),
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
    send = stack.enter_context(tcp_loopback(byte_count))
    calls = [f"{way} {each}" for way in ("tutorial", "best") for each in _THREADS]
    return [
        Operation("memcpy", memcpy(byte_count), byte_count),
        Operation("tcp", send, byte_count),
        *_pair_operations("raw", raw, ("push", "pull", "round apart", "round at once"), byte_count),
        *_pair_operations("torch", torch_own, calls, byte_count),
        *_pair_operations("torch TCP", torch_tcp, calls, byte_count),
    ]


def _pair_operations(
    name: str, pair: Pair, actions: Sequence[str], byte_count: int
) -> list[Operation]:
    def run(action: str) -> float:
        return pair.do(action).wall_s

    pids = (pair.client.pid, pair.server.pid)
    return [Operation(f"{name} {each}", partial(run, each), byte_count, pids) for each in actions]


def _rows(stack: contextlib.ExitStack, lane: str, byte_count: int) -> list[_DenseRow]:
    """The rows of one lane; their clusters end with `stack`."""
    also = (f"sgd{PRIVATE}",) if lane == SHARED_MEMORY else ()
    loads = {1: ("sgd", "adam", *also), 2: ("sgd",)}
    clusters = contenders.enter_all(
        stack,
        [
            contenders.cluster(lane, contenders.members(count, byte_count, names))
            for count, names in loads.items()
        ],
    )
    return [
        _DenseRow(
            name,
            cluster,
            operations_by_move(cluster, name, f"{lane} {name}, {count} x {{}}", byte_count),
        )
        for cluster, (count, names) in zip(clusters, loads.items(), strict=True)
        for name in names
    ]


def _figures(row: _DenseRow, measured: Mapping[str, Measured], ceilings: Figures) -> dict[str, Any]:
    cluster = row.cluster
    moves = {move: measured[operation.name] for move, operation in row.operations.items()}
    is_shared = cluster.lane == SHARED_MEMORY and not row.name.endswith(PRIVATE)
    of = lane_ceilings(cluster.lane, ceilings)
    return {
        "lane": cluster.lane,
        "optimizer": row.name.removesuffix(PRIVATE),
        "gradient": "shared" if is_shared else "private",
        "workers": len(cluster.workers),
        "servers": 1,
        **{f"{move}_gb_s": rounded(result.gb_s) for move, result in moves.items()},
        **{f"{move}_of_ceiling": rounded(moves[move].gb_s / of[move]) for move in MOVES},
        "cpu_s_per_gb": cpu_s_per_gb(moves, cluster.pids),
        "server_cpu_s_per_gb": cpu_s_per_gb(moves, cluster.server_pids),
        "worker_cpu_s_per_gb": cpu_s_per_gb(moves, cluster.worker_pids),
    }


def cpu_s_per_gb(moves: Mapping[str, Measured], pids: tuple[int, ...]) -> float:
    # A round pushes a GB and pulls a GB for each GB of parameters.
    moved_gb = moves["push"].gb + moves["pull"].gb + 2 * moves["round"].gb
    return rounded(sum(move.cpu_s(pid) for move in moves.values() for pid in pids) / moved_gb)


def lane_ceilings(lane: str, ceilings: Figures) -> Figures:
    """The rates that a lane is compared with: of a copy in memory, or of raw gRPC."""
    if lane == SHARED_MEMORY:
        return dict.fromkeys(MOVES, ceilings["memcpy_gb_s"])
    return {move: ceilings[f"raw_grpc_{move}_gb_s"] for move in MOVES}


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
            for peer in _PEERS
        },
        "adam_push_over_sgd": rounded(adam["push_gb_s"] / sgd["push_gb_s"]),
        **{
            f"two_workers_{move}_over_one": rounded(double[f"{move}_gb_s"] / sgd[f"{move}_gb_s"])
            for move in MOVES
        },
    }


def dense_view(document: dict[str, Any]) -> RenderableType:
    return Group(_rates(document), _comparison(document["compared"]))


def _rates(document: dict[str, Any]) -> TextTable:
    ceilings = document["ceilings"]
    table = figures_table(
        "dense: GB/s of parameters",
        *(*MOVES, "CPU s/GB"),
        caption="in brackets: shm of memcpy, grpc of raw gRPC; CPU: server + worker",
    )
    for name, key in {"memcpy": "memcpy_gb_s", "TCP loopback": "tcp_gb_s"}.items():
        table.add_row(name, *(2 * [f"{ceilings[key]:.2f}"]))
    table.add_row("raw gRPC", *(f"{rate:.2f}" for rate in lane_ceilings(GRPC, ceilings).values()))
    for peer, name in _PEERS.items():
        table.add_row(name, "", "", f"{ceilings[f'{peer}_round_gb_s']:.2f}")
    table.add_section()
    for row in document["rows"]:
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
    lines = {f"round / {name}": f"round_over_{peer}" for peer, name in _PEERS.items()}
    lines["Adam's push / SGD's"] = "adam_push_over_sgd"
    for move in MOVES:
        lines[f"2 workers' {move} / 1 worker's"] = f"two_workers_{move}_over_one"
    for name, key in lines.items():
        table.add_row(name, *(f"{lane[key]:.2f}" for lane in lanes))
    return table
