"""`pushpull bench` runs and says what it promises; how fast is for people to judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 170

pytestmark = pytest.mark.timeout(180)

ENVIRONMENT = {"cpu", "core_count", "python", "torch", "grpcio", "load_average", "warnings"}


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PUSHPULL_")}
    kept["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    return subprocess.run(
        [sys.executable, "-m", "ps_cli", "bench", *arguments],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def all_positive(figures: dict[str, Any]) -> bool:
    numbers = [value for value in figures.values() if isinstance(value, int | float)]
    return bool(numbers) and all(value > 0 for value in numbers)


def test_dense_writes_rates_and_their_ceilings(tmp_path: Path) -> None:
    run = bench("dense", "--quick", "--size-mb", "1", "--json", "dense.json", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads((tmp_path / "dense.json").read_text())
    assert set(document["environment"]) >= ENVIRONMENT
    assert document["environment"]["table_bytes"] == 1024 * 1024
    assert set(document["ceilings"]) == {
        "memcpy_gb_s",
        "tcp_gb_s",
        "raw_grpc_push_gb_s",
        "raw_grpc_pull_gb_s",
        "torch_rpc_tutorial_round_gb_s",
        "torch_rpc_best_round_gb_s",
        "torch_rpc_tcp_tutorial_round_gb_s",
        "torch_rpc_tcp_best_round_gb_s",
    }
    assert all_positive(document["ceilings"])
    rows = document["rows"]
    assert [(row["lane"], row["optimizer"], row["workers"], row["servers"]) for row in rows] == [
        ("grpc", "sgd", 1, 1),
        ("grpc", "adam", 1, 1),
        ("grpc", "sgd", 2, 1),
    ]
    for row in rows:
        rates = {name: value for name, value in row.items() if name.endswith("_gb_s")}
        assert set(rates) == {"push_gb_s", "pull_gb_s", "round_gb_s"}
        assert all_positive(rates)
        # 1 MiB may cost less than the kernel's tick of CPU time.
        assert row["cpu_s_per_gb"] >= 0
    assert {len(rates) for rates in document["samples_gb_s"].values()} == {2}
    assert "raw gRPC" in run.stdout


def test_latency_answers_on_standard_output(tmp_path: Path) -> None:
    run = bench("latency", "--quick", "--json", "-", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert set(document["environment"]) >= ENVIRONMENT
    peers = ("raw_unary", "torch_rpc")
    assert set(document["ceilings"]) == {
        f"{peer}_{figure}" for peer in peers for figure in ("p50_ms", "p99_ms")
    }
    assert all_positive(document["ceilings"])
    assert [row["call"] for row in document["rows"]] == ["push_pull", "push", "pull"]
    for row in document["rows"]:
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert "torch RPC" in run.stderr


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    run = bench("speed", cwd=tmp_path)
    assert run.returncode == 2
    assert "'speed'" in run.stderr
    assert "dense" in run.stderr
    assert "latency" in run.stderr


def test_a_figure_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    run = bench("dense", "--json", "missing/dense.json", cwd=tmp_path)
    assert run.returncode == 2
    assert "missing/dense.json" in run.stderr


def test_train_compares_a_step_with_plain_torch(tmp_path: Path) -> None:
    run = bench("train", "--quick", "--json", "-", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert set(document["environment"]) >= ENVIRONMENT
    assert set(document["ceilings"]) == {"local_step_s"}
    assert all_positive(document["ceilings"])
    (row,) = document["rows"]
    assert (row["lane"], row["optimizer"], row["workers"], row["servers"]) == ("grpc", "adam", 1, 1)
    assert row["bytes_per_step"] == 8 * row["parameter_count"] > 0
    assert row["of_local"] == pytest.approx(
        document["ceilings"]["local_step_s"] / row["step_s"], rel=0.01
    )
    assert row["transfer_s"] > 0
    assert 0 <= row["hidden"] <= 1


def test_optimizers_stand_beside_torch(tmp_path: Path) -> None:
    run = bench("optimizers", "--quick", "--json", "-", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert all_positive(document["ceilings"])
    found = {(row["optimizer"], row["kernels"]) for row in document["rows"]}
    optimizers = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
    assert found == {(name, kernels) for name in optimizers for kernels in ("fast", "exact")}
    assert all(all_positive(row) for row in document["rows"])
