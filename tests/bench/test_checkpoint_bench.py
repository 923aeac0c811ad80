"""`pushpull bench checkpoint` runs and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_cli.bench.lanes import LANES
from tests.bench.cli import run_cli
from tests.bench.test_bench import all_positive, bench

MIB = 1024 * 1024

pytestmark = pytest.mark.timeout(180)


def test_checkpoints_stand_beside_plain_writes_and_quiet_training(tmp_path: Path) -> None:
    document = bench("checkpoint", "--size-mb", "4", cwd=tmp_path)
    assert document["environment"]["table_bytes"] == 4 * MIB
    ceilings = document["ceilings"]
    assert set(ceilings) == {"write_one_thread_gb_s", "write_two_threads_gb_s"}
    assert all_positive(ceilings)
    assert {len(rates) for rates in document["samples_gb_s"].values()} == {3, 6}
    rows = document["rows"]

    writes = [row for row in rows if row["part"] == "write"]
    assert [row["lane"] for row in writes] == list(LANES)
    for row in writes:
        assert 12 * MIB < row["checkpoint_bytes"] < 14 * MIB
        assert row["of_one_thread"] == pytest.approx(
            row["write_gb_s"] / ceilings["write_one_thread_gb_s"], rel=0.01
        )

    pushes = [row for row in rows if row["part"] == "push"]
    assert [(row["lane"], row["table"]) for row in pushes] == [
        (lane, table) for lane in LANES for table in ("small", "whole")
    ]
    for row in pushes:
        assert row["sample_count"] >= 5
        for prefix in ("", "quiet_"):
            p50, p99, most = (row[f"{prefix}{name}_ms"] for name in ("p50", "p99", "max"))
            assert 0 < p50 <= p99 <= most
        assert row["p99_over_quiet"] == pytest.approx(row["p99_ms"] / row["quiet_p99_ms"], rel=0.01)

    # What is restored is the same whatever lane wrote it.
    restores = [row for row in rows if row["part"] == "restore"]
    assert [(row["lane"], row["servers"], row["cache"]) for row in restores] == [
        (LANES[0], count, cache) for count in (1, 2) for cache in ("warm", "cold")
    ]
    for row in restores:
        difference_s = row["with_s"] - row["without_s"]
        assert row["restore_s"] == pytest.approx(difference_s, abs=0.01)
        assert (row["restore_gb_s"] is None) == (row["restore_s"] <= 0)

    memory = [row for row in rows if row["part"] == "memory"]
    assert {(row["lane"], row["servers"], row["during"]) for row in memory} == {
        *((lane, 1, "write") for lane in LANES),
        *((LANES[0], count, "restore") for count in (1, 2)),
    }
    for row in memory:
        assert row["growth_bytes"] == row["peak_bytes"] - row["before_bytes"]
        assert row["bound_bytes"] == 288 * MIB * row["servers"]


def test_without_room_for_the_files_nothing_begins(tmp_path: Path) -> None:
    run = run_cli("checkpoint", "--size-mb", "1000000000", cwd=tmp_path)
    assert run.returncode == 2
    assert "choose a smaller --size-mb" in run.stderr
