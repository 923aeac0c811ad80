"""`pushpull bench` runs and says what it promises; how fast is for people to judge.

A few minutes on two cores, so these have a target of their own: `make bench-check`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from ps_cli.bench.lanes import LANES
from tests.bench.cli import ROOT, run_cli

MIB = 1024 * 1024

pytestmark = pytest.mark.timeout(180)

ENVIRONMENT = {"cpu", "core_count", "python", "torch", "grpcio", "load_average", "warnings"}
MOVES = ("push", "pull", "round")

VARIANT = re.compile(r"^(?:`pushpull bench \w+ |\*\*`)(--[a-z-]+)")
"""The option of a variant of a benchmark, where its part of the page begins."""

NOT_QUICK = "_64"
"""The end of keys of so many micro-batches, which a quick run has not."""


def bench(name: str, *arguments: str, cwd: Path) -> dict[str, Any]:
    """A quick run's document, which was on standard output; its keys are those of the page."""
    run = run_cli(name, "--quick", "--json", "-", *arguments, cwd=cwd)
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    assert set(document["environment"]) >= ENVIRONMENT
    assert name in run.stderr
    assert not undocumented_keys(name, document)
    assert not missing_keys(name, arguments, document)
    return document


def undocumented_keys(name: str, document: dict[str, Any]) -> set[str]:
    """Keys that the benchmark's section of the page does not name."""
    return keys_of(document) - words("".join(section_of(name)))


def missing_keys(name: str, arguments: tuple[str, ...], document: dict[str, Any]) -> set[str]:
    """Keys that the page lists for these arguments, and the document has not. A list names them
    before its colon; behind the name of a table, all words that no value has.
    """
    base, *variants = section_of(name)
    options = {argument.partition("=")[0] for argument in arguments}
    part = next((each for each in variants if options & set(VARIANT.findall(each))), base)
    listed: set[str] = set()
    for bullet in re.findall(r"^- (.*?)(?=^- |\n\n|\Z)", part, re.MULTILINE | re.DOTALL):
        head, _, text = bullet.partition(":")
        tables = words(head) & {"ceilings", "rows", "compared"}
        listed |= {word for word in words(text) if "_" in word} if tables else words(head)
    return {key for key in listed - keys_of(document) if not key.endswith(NOT_QUICK)}


def section_of(name: str) -> list[str]:
    """The benchmark's section of the page: its base, and a part for each variant by an option."""
    page = (ROOT / "docs/reference/BENCHMARKS.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    return re.split(r"(?=^(?:`pushpull bench|\*\*`--))", section, flags=re.MULTILINE)


def keys_of(document: dict[str, Any]) -> set[str]:
    """Keys of the ceilings and of all rows."""
    tables = ("rows", "compared", "zipf", "disk")
    return set(document["ceilings"]).union(*(row for t in tables for row in document.get(t, ())))


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def all_positive(figures: dict[str, Any]) -> bool:
    numbers = [value for value in figures.values() if isinstance(value, int | float)]
    return bool(numbers) and all(value > 0 for value in numbers)


def rates(row: dict[str, Any]) -> dict[str, float]:
    return {move: row[f"{move}_gb_s"] for move in MOVES}


def test_dense_writes_rates_and_their_ceilings(tmp_path: Path) -> None:
    document = bench("dense", "--size-mb", "1", cwd=tmp_path)
    assert document["environment"]["table_bytes"] == MIB
    ceilings = document["ceilings"]
    assert set(ceilings) == {
        "memcpy_gb_s",
        "tcp_gb_s",
        "raw_grpc_push_gb_s",
        "raw_grpc_pull_gb_s",
        "raw_grpc_round_gb_s",
        "torch_rpc_tutorial_round_gb_s",
        "torch_rpc_best_round_gb_s",
        "torch_rpc_tcp_tutorial_round_gb_s",
        "torch_rpc_tcp_best_round_gb_s",
    }
    assert all_positive(ceilings)
    rows = {(row["lane"], row["optimizer"], row["workers"]): row for row in document["rows"][::-1]}
    kinds = [
        (row["lane"], row["gradient"], row["optimizer"], row["workers"]) for row in document["rows"]
    ]
    assert kinds == [
        ("shm", "shared", "sgd", 1),
        ("shm", "shared", "adam", 1),
        ("shm", "private", "sgd", 1),
        ("shm", "shared", "sgd", 2),
        ("grpc", "private", "sgd", 1),
        ("grpc", "private", "adam", 1),
        ("grpc", "private", "sgd", 2),
    ]
    for (lane, _, _), row in rows.items():
        assert row["servers"] == 1
        assert all_positive(rates(row))
        # 1 MiB may cost less than the kernel's tick of CPU time.
        assert row["cpu_s_per_gb"] == pytest.approx(
            row["server_cpu_s_per_gb"] + row["worker_cpu_s_per_gb"], rel=0.01
        )
        for move in MOVES:
            ceiling = ceilings["memcpy_gb_s" if lane == "shm" else f"raw_grpc_{move}_gb_s"]
            ratio = row[f"{move}_gb_s"] / ceiling
            assert row[f"{move}_of_ceiling"] == pytest.approx(ratio, rel=0.01)
    assert [compared["lane"] for compared in document["compared"]] == list(LANES)
    for compared in document["compared"]:
        one, two = (rows[compared["lane"], "sgd", count] for count in (1, 2))
        assert compared["round_over_torch_rpc_best"] == pytest.approx(
            one["round_gb_s"] / ceilings["torch_rpc_best_round_gb_s"], rel=0.01
        )
        assert compared["two_workers_push_over_one"] == pytest.approx(
            two["push_gb_s"] / one["push_gb_s"], rel=0.01
        )
    samples = document["samples_gb_s"]
    # Two rounds for each lane; what both are held against takes part in those of both.
    assert {len(samples[name]) for name in samples if name.startswith(LANES)} == {2}
    assert len(samples["memcpy"]) == len(samples["raw push"]) == 2 * len(LANES)


def test_dense_with_replicas_is_held_against_one_replica(tmp_path: Path) -> None:
    document = bench("dense", "--replicas", "2", "--size-mb", "1", cwd=tmp_path)
    assert document["ceilings"] == {}
    rows = document["rows"]
    assert {(r["lane"], r["optimizer"], r["replicas"]) for r in rows} == {
        (lane, optimizer, count)
        for lane in LANES
        for optimizer in ("sgd", "adam")
        for count in (1, 2)
    }
    assert all(all_positive(rates(row)) and row["servers"] == 2 for row in rows)
    by_key = {(r["lane"], r["optimizer"], r["replicas"]): rates(r) for r in rows}
    found = [(each["lane"], each["optimizer"]) for each in document["compared"]]
    assert found == list(itertools.product(LANES, ("sgd", "adam")))
    for ratio in document["compared"]:
        one, two = (by_key[ratio["lane"], ratio["optimizer"], count] for count in (1, 2))
        for move in MOVES:
            expected = two[move] / one[move]
            assert ratio[f"{move}_over_one_replica"] == pytest.approx(expected, rel=0.02)


def test_dense_with_an_update_log_is_held_against_none(tmp_path: Path) -> None:
    document = bench("dense", "--update-log", "--lane", "shm", "--size-mb", "1", cwd=tmp_path)
    rows = {(r["optimizer"], r["update_log"]): rates(r) for r in document["rows"]}
    environment = document["environment"]
    assert Path(environment["log_folder"]).is_dir()
    assert environment["log_file_system"] not in ("", "unknown")
    assert environment["log_is_synced"] is False
    assert rows.keys() == {(o, kept) for o in ("sgd", "adam") for kept in (False, True)}
    assert all(map(all_positive, rows.values()))
    for ratio in document["compared"]:
        for move in MOVES:
            expected = rows[ratio["optimizer"], True][move] / rows[ratio["optimizer"], False][move]
            assert ratio[f"{move}_over_one_replica"] == pytest.approx(expected, rel=0.02)


def test_only_dense_has_replicas(tmp_path: Path) -> None:
    run = run_cli("latency", "--quick", "--replicas", "2", cwd=tmp_path)
    assert run.returncode == 2
    assert "latency runs with 1" in run.stderr


def test_latency_stands_beside_raw_grpc_and_torch_rpc(tmp_path: Path) -> None:
    document = bench("latency", cwd=tmp_path)
    peers = ("raw_unary", "torch_rpc")
    assert set(document["ceilings"]) == {
        f"{peer}_{figure}" for peer in peers for figure in ("p50_ms", "p99_ms")
    }
    assert all_positive(document["ceilings"])
    calls = ("push_pull", "push", "pull")
    found = [(row["lane"], row["call"]) for row in document["rows"]]
    assert found == [(lane, call) for lane in LANES for call in calls]
    for row in document["rows"]:
        assert 0 < row["p50_ms"] <= row["p99_ms"]


def test_sparse_stands_beside_one_core_and_torch_rpc(tmp_path: Path) -> None:
    document = bench("sparse", cwd=tmp_path)
    assert document["environment"]["row_count"] == 100_000
    assert all_positive(document["ceilings"])
    keys = ("partitions", "lane", "call", "in_flight")
    found = [tuple(row[key] for key in keys) for row in document["rows"]]
    assert found == list(itertools.product((1, 8), LANES, ("pull", "push"), (1, 4)))
    core = {"pull": "gather_m_rows_s", "push": "add_m_rows_s"}
    for lane, call, count in itertools.product(LANES, core, (1, 4)):
        # A ratio is to what was measured beside as many partitions; a ceiling is the middle of it.
        rows = [
            row
            for row in document["rows"]
            if (row["lane"], row["call"], row["in_flight"]) == (lane, call, count)
        ]
        for ratio, key in (
            ("of_core", core[call]),
            ("over_torch_rpc", f"torch_rpc_{call}_{count}_m_rows_s"),
            ("over_torch_rpc_tcp", f"torch_rpc_tcp_{call}_{count}_m_rows_s"),
        ):
            beside = statistics.mean(row["m_rows_s"] / row[ratio] for row in rows)
            assert beside == pytest.approx(document["ceilings"][key], rel=0.01)
    pulled = [(row["partitions"], row["lane"], row["in_flight"]) for row in document["zipf"]]
    assert pulled == list(itertools.product((1, 8), LANES, (1, 4)))
    for row in document["zipf"]:
        assert all_positive(row)
        assert 0.3 < row["hit_rate"] < 0.6
        ratio = row["cached_m_rows_s"] / row["uniform_m_rows_s"]
        assert ratio == pytest.approx(row["cached_over_uniform"], rel=0.01)
    # A partition keeps more of its rows in memory than a tenth, if there are 8 of so few rows.
    found = [(row["partitions"], row["lane"], row["call"]) for row in document["disk"]]
    assert found == list(itertools.product((1,), LANES, ("pull", "pull", "push")))
    assert document["environment"]["disk_memory_rows"] == 10_000
    for row in document["disk"]:
        assert all_positive(row)
        assert 85_000 < row["disk_row_count"] < 92_000
        ratio = row["m_rows_s"] / row["memory_m_rows_s"]
        assert ratio == pytest.approx(row["over_memory"], rel=0.01)


def test_rows_are_exact_after_the_death_of_a_server(tmp_path: Path) -> None:
    document = bench("sparse", "--replicas", "2", "--lane", "grpc", cwd=tmp_path)
    assert document["environment"]["row_count"] == 20_000
    assert document["environment"]["lease_s"] == 1.0
    (row,) = document["rows"]
    place = ("lane", "workers", "servers", "replicas", "kill_count")
    assert tuple(row[key] for key in place) == ("grpc", 2, 3, 2, 2)
    assert (row["wrong_row_count"], row["wrong_ids"]) == (0, [])
    assert row["range_count"] > 0, "the killed server was primary of something"
    assert row["step_count"] > 0
    assert 0 < row["before_steps_s"] < math.inf
    assert 0 < row["after_steps_s"] < math.inf
    # A dead server's ranges go on after its lease; each kill has a sample.
    samples_s = document["samples_s"]["grpc"]
    assert len(samples_s) == row["kill_count"]
    assert 0 < min(samples_s) <= row["recovery_s"] <= row["recovery_max_s"] == max(samples_s)
    assert row["recovery_max_s"] < math.inf
    assert 0 < row["healed_s"] < math.inf


def test_train_compares_a_step_with_plain_torch(tmp_path: Path) -> None:
    document = bench("train", cwd=tmp_path)
    assert document["environment"]["device"] == "cpu"
    ceilings = document["ceilings"]
    local = ("local_step_s", "local_fused_step_s", "local_tuned_step_s", "local_all_cores_step_s")
    assert set(ceilings) == {*local, "bare_step_s", "ddp_together_step_s"}
    assert all_positive(ceilings)
    together = document["together"]
    assert [(row["lane"], row["overlaps_pulls"]) for row in together] == [
        (lane, overlaps) for lane in LANES for overlaps in (False, True)
    ]
    for row in together:
        ratio = ceilings["ddp_together_step_s"] / row["step_s"]
        assert row["of_ddp"] == pytest.approx(ratio, rel=0.01)
    assert [row["asked_lane"] for row in document["rows"]] == ["auto", "grpc"]
    assert [row["lane"] for row in document["rows"]] == [LANES[0], "grpc"]
    for row in document["rows"]:
        assert (row["optimizer"], row["workers"], row["servers"]) == ("adam", 1, 1)
        assert row["bytes_per_step"] == 8 * row["parameter_count"] > 0
        assert row["of_local"] == pytest.approx(ceilings["local_step_s"] / row["step_s"], rel=0.01)
        assert row["transfer_s"] > 0
        assert 0 <= row["hidden"] <= 1
        assert row["detection_s"] > 0
        share = row["detection_s"] / row["step_s"]
        assert row["detection_share"] == pytest.approx(share, rel=0.05)


def test_train_of_a_given_size_stands_beside_ddp(tmp_path: Path) -> None:
    document = bench("train", "--size-mb", "4", "--servers", "2", cwd=tmp_path)
    assert document["environment"]["layers"] >= 1
    ceilings = document["ceilings"]
    assert all(figure > 0 for key, figure in ceilings.items() if "_step_s_" in key)
    assert [row["micro_batches"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        assert (row["lane"], row["servers"]) == (LANES[0], 2)
        assert 2**19 < row["parameter_count"] < 2**21
        for key, ceiling in (
            ("of_local", "local"),
            ("of_ddp", "ddp"),
            ("of_local_all_cores", "local_all_cores"),
        ):
            alone_s = ceilings[f"{ceiling}_step_s_{row['micro_batches']}"]
            assert row[key] == pytest.approx(alone_s / row["step_s"], rel=0.01)
        assert row["transfer_s"] > 0
        assert 0 <= row["hidden"] <= 1


def test_optimizers_stand_beside_torch_in_a_file(tmp_path: Path) -> None:
    run = run_cli("optimizers", "--quick", "--json=optimizers.json", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "torch.optim" in run.stdout
    document = json.loads((tmp_path / "optimizers.json").read_text())
    assert not undocumented_keys("optimizers", document)
    assert all_positive(document["ceilings"])
    found = {(row["optimizer"], row["kernels"]) for row in document["rows"]}
    optimizers = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
    assert found == {(name, kernels) for name in optimizers for kernels in ("fast", "exact")}
    assert all(all_positive(row) for row in document["rows"])


def test_codecs_stand_beside_float32(tmp_path: Path) -> None:
    document = bench("codecs", "--size-mb", "1", "--lane", LANES[1], cwd=tmp_path)
    assert all_positive(document["ceilings"])
    rows = {row["codec"]: row for row in document["rows"]}
    assert list(rows) == ["fp32", "bf16", "fp16", "int8", "sign", "topk", "lowrank"]
    assert [row["bytes_over_fp32"] for row in rows.values()] == [
        1.0,
        0.5,
        0.5,
        0.2539,
        0.03516,
        0.02,
        0.01564,
    ]
    for row in rows.values():
        for move in MOVES:
            over = row[f"{move}_gb_s"] / rows["fp32"][f"{move}_gb_s"]
            assert row[f"{move}_over_fp32"] == pytest.approx(over, rel=0.01)


@pytest.mark.parametrize("lane", LANES)
def test_memory_stands_beside_its_bounds(lane: str, tmp_path: Path) -> None:
    document = bench("memory", "--lane", lane, cwd=tmp_path)
    table_bytes = document["environment"]["table_bytes"]
    assert document["ceilings"] == {}
    rows = {(row["lane"], row["workers"], row["role"]): row for row in document["rows"]}
    assert list(rows) == [(lane, count, role) for count in (1, 2) for role in ("server", "worker")]
    for (_, _, role), row in rows.items():
        assert row["of_bound"] == pytest.approx(row["peak_bytes"] / row["bound_bytes"], rel=0.01)
        if role == "server":  # which holds the table and Adam's two moments
            assert row["bound_bytes"] == 6.25 * table_bytes + 300_000_000
            assert row["private_bytes"] + row["shared_bytes"] > 3 * table_bytes
        else:
            assert row["bound_bytes"] == 256_000_000
            assert row["peak_bytes"] > 0


def test_sessions_stand_beside_two_workers(tmp_path: Path) -> None:
    document = bench("sessions", cwd=tmp_path)
    assert document["ceilings"] == {}
    rows = {(row["lane"], row["workers"]): row for row in document["rows"]}
    assert list(rows) == [(lane, count) for lane in LANES for count in (2, 8)]
    for row in rows.values():
        assert row["active"] == row["processes"] == 2
        assert all_positive(rates(row))
        assert row["server_peak_bytes"] > document["environment"]["table_bytes"]
    for compared in document["compared"]:
        pair, crowd = (rows[compared["lane"], count] for count in (2, 8))
        assert compared["push_over_two_workers"] == pytest.approx(
            crowd["push_gb_s"] / pair["push_gb_s"], rel=0.01
        )
        assert (
            crowd["server_thread_count"] - pair["server_thread_count"] == compared["threads_more"]
        )
        assert compared["threads_more"] < 6, "a thread for each session"


def test_a_pass_by_shards_is_shorter_than_on_fixed_shares(tmp_path: Path) -> None:
    document = bench("shards", cwd=tmp_path)
    fixed, shards, adaptive = document["rows"]
    assert [row["data"] for row in document["rows"]] == ["fixed", "shards", "adaptive"]
    assert adaptive["over_fixed"] < 0.85, "and so it is in batches that follow the speed"
    assert adaptive["slow_worker_samples"] < fixed["slow_worker_samples"]
    assert shards["over_fixed"] == pytest.approx(shards["pass_s"] / fixed["pass_s"], rel=0.01)
    assert shards["over_fixed"] <= 0.65
    assert shards["slow_worker_samples"] < fixed["slow_worker_samples"]
    assert shards["pass_s"] > document["ceilings"]["even_pass_s"]
