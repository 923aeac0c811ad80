"""Push, pull and round of one dense float32 table, in GB/s of parameters."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from rich.table import Table as TextTable

from benchmarks import contenders
from benchmarks.ceilings import memcpy
from benchmarks.child import together
from benchmarks.contenders import Cluster, Pair
from benchmarks.environment import environment
from benchmarks.sampling import MIB, Measured, Operation, rounded, take_turns
from benchmarks.settings import BenchSettings

DEFAULT_SIZE_MB = 256
QUICK_SIZE_MB = 8
LANE = "grpc"
_MOVES = ("push", "pull", "round")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the result, and where its operations run."""

    optimizer: str
    cluster: Cluster

    @property
    def worker_count(self) -> int:
        return len(self.cluster.workers)

    def name_of(self, move: str) -> str:
        return f"{self.optimizer}, {self.worker_count} x {move}"


def dense(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document that `--json` writes.

    Blocking: half a minute to a few minutes at 256 MB.
    """
    found = environment()
    size_mb = settings.size_mb or (QUICK_SIZE_MB if settings.quick else DEFAULT_SIZE_MB)
    byte_count = size_mb * MIB
    with contextlib.ExitStack() as stack:
        single = stack.enter_context(contenders.cluster(1, byte_count, 0, ("sgd", "adam")))
        double = stack.enter_context(contenders.cluster(2, byte_count, 0, ("sgd",)))
        raw = stack.enter_context(contenders.raw_grpc(byte_count, 0))
        torch_own = stack.enter_context(contenders.torch_rpc("own", byte_count, 0))
        torch_tcp = stack.enter_context(contenders.torch_rpc("tcp", byte_count, 0))
        tcp = stack.enter_context(contenders.tcp_loopback(byte_count))
        rows = [_Row("sgd", single), _Row("adam", single), _Row("sgd", double)]
        operations = [
            Operation("memcpy", memcpy(byte_count), byte_count),
            Operation("tcp", tcp.send, byte_count),
            *_pair_operations("raw", raw, ("push", "pull"), byte_count),
            *(operation for row in rows for operation in _row_operations(row, byte_count)),
            *_pair_operations("torch", torch_own, ("tutorial", "best"), byte_count),
            *_pair_operations("torch TCP", torch_tcp, ("tutorial", "best"), byte_count),
        ]
        measured = take_turns(operations, settings.round_count, settings.on_round)
    return {
        "environment": {**found, "table_bytes": byte_count, "round_count": settings.round_count},
        "ceilings": _ceilings(measured),
        "rows": [_row(row, measured) for row in rows],
        "samples_gb_s": {
            name: [rounded(rate) for rate in result.rates_gb_s] for name, result in measured.items()
        },
    }


def _pair_operations(
    name: str, pair: Pair, actions: tuple[str, ...], byte_count: int
) -> list[Operation]:
    def run(action: str) -> float:
        return pair.client.do(action).wall_s

    return [
        Operation(f"{name} {action}", lambda action=action: run(action), byte_count, pair.pids)  # type: ignore[misc]
        for action in actions
    ]


def _row_operations(row: _Row, byte_count: int) -> list[Operation]:
    def run(move: str) -> float:
        return together(row.cluster.workers, f"{row.optimizer} {move}")

    moved_bytes = byte_count * row.worker_count
    return [
        Operation(row.name_of(move), lambda move=move: run(move), moved_bytes, row.cluster.pids)  # type: ignore[misc]
        for move in _MOVES
    ]


def _ceilings(measured: dict[str, Measured]) -> dict[str, float]:
    names = {
        "memcpy_gb_s": "memcpy",
        "tcp_gb_s": "tcp",
        "raw_grpc_push_gb_s": "raw push",
        "raw_grpc_pull_gb_s": "raw pull",
        "torch_rpc_tutorial_round_gb_s": "torch tutorial",
        "torch_rpc_best_round_gb_s": "torch best",
        "torch_rpc_tcp_tutorial_round_gb_s": "torch TCP tutorial",
        "torch_rpc_tcp_best_round_gb_s": "torch TCP best",
    }
    return {key: rounded(measured[name].gb_s) for key, name in names.items()}


def _row(row: _Row, measured: dict[str, Measured]) -> dict[str, object]:
    moves = {move: measured[row.name_of(move)] for move in _MOVES}
    # A round pushes a GB and pulls a GB for each GB of parameters.
    moved_gb = moves["push"].gb + moves["pull"].gb + 2 * moves["round"].gb
    cpu_s = sum(move.cpu_s(pid) for move in moves.values() for pid in row.cluster.pids)
    return {
        "lane": LANE,
        "optimizer": row.optimizer,
        "workers": row.worker_count,
        "servers": 1,
        **{f"{move}_gb_s": rounded(result.gb_s) for move, result in moves.items()},
        "cpu_s_per_gb": rounded(cpu_s / moved_gb),
    }


def dense_table(document: dict[str, object]) -> TextTable:
    """The document for a person: figures, and how they compare with the ceilings of the run."""
    ceilings, rows = document["ceilings"], document["rows"]
    assert isinstance(ceilings, dict)
    assert isinstance(rows, list)
    raw_push, raw_pull = ceilings["raw_grpc_push_gb_s"], ceilings["raw_grpc_pull_gb_s"]
    raw_round = 1 / (1 / raw_push + 1 / raw_pull)
    peers = {
        "torch RPC, tutorial": ceilings["torch_rpc_tutorial_round_gb_s"],
        "torch RPC, best": ceilings["torch_rpc_best_round_gb_s"],
        "torch RPC on TCP, tutorial": ceilings["torch_rpc_tcp_tutorial_round_gb_s"],
        "torch RPC on TCP, best": ceilings["torch_rpc_tcp_best_round_gb_s"],
    }
    table = TextTable(title="dense: GB/s of parameters (in brackets: of raw gRPC in this run)")
    table.add_column("")
    for heading in ("push", "pull", "round", "CPU s/GB"):
        table.add_column(heading, justify="right")
    for name in ("memcpy", "tcp"):
        rate = f"{ceilings[f'{name}_gb_s']:.2f}"
        table.add_row({"tcp": "TCP loopback"}.get(name, name), rate, rate, "", "")
    table.add_row("raw gRPC", f"{raw_push:.2f}", f"{raw_pull:.2f}", f"{raw_round:.2f}", "")
    for name, rate in peers.items():
        table.add_row(name, "", "", f"{rate:.2f}", "")
    table.add_section()
    for row in rows:
        table.add_row(
            _row_name(row),
            _with_ratio(row["push_gb_s"], raw_push),
            _with_ratio(row["pull_gb_s"], raw_pull),
            _with_ratio(row["round_gb_s"], raw_round),
            f"{row['cpu_s_per_gb']:.2f}",
        )
    table.caption = f"a round of {_row_name(rows[0])}: " + "; ".join(
        f"{rows[0]['round_gb_s'] / rate:.2f} x {name}" for name, rate in peers.items()
    )
    return table


def _row_name(row: dict[str, object]) -> str:
    plural = "" if row["workers"] == 1 else "s"
    return f"{row['lane']} {row['optimizer']}, {row['workers']} worker{plural}"


def _with_ratio(rate: float, ceiling: float) -> str:
    return f"{rate:.2f} ({rate / ceiling:.2f})"
