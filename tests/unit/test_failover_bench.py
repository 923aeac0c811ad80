"""`pushpull bench sparse --replicas`: a wrong sum is found and ends the command with an error."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ps_cli.bench import catalogue
from ps_cli.bench.contenders.counted_rows import expected_rows, steps, wrong_ids
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import Internal, InvalidConfig

ROW_COUNT = 5_000
STEP_COUNTS = {0: 3, 1: 5}
Rows = npt.NDArray[np.float32]


def added(values: Rows, rank: int, numbers: slice) -> None:
    """Add some of a worker's steps, as a server does."""
    for step in itertools.islice(steps(rank, ROW_COUNT), numbers.start, numbers.stop):
        np.add.at(values, step.ids, step.gradients)


@pytest.fixture
def served() -> Rows:
    """The values of all rows after all steps of both workers."""
    values = np.zeros((ROW_COUNT, 64), np.float32)
    for rank, step_count in STEP_COUNTS.items():
        added(values, rank, slice(0, step_count))
    return values


def last_step_ids(rank: int) -> set[int]:
    *_, last = itertools.islice(steps(rank, ROW_COUNT), STEP_COUNTS[rank])
    return set(last.ids.tolist())


def test_each_step_counted_once_gives_the_expected_rows(served: Rows) -> None:
    expected = expected_rows(STEP_COUNTS, ROW_COUNT)
    assert np.abs(expected).max() < 2**24, "float32 would round"
    assert wrong_ids(served, expected).tolist() == []
    assert 0 < np.count_nonzero(expected[:, 0]) < ROW_COUNT, "rows without a step are compared, too"


def test_a_step_that_is_doubled_is_found(served: Rows) -> None:
    added(served, 1, slice(4, 5))
    assert set(wrong_ids(served, expected_rows(STEP_COUNTS, ROW_COUNT))) == last_step_ids(1)


def test_a_step_that_is_lost_is_found(served: Rows) -> None:
    expected = expected_rows({0: 4, 1: 5}, ROW_COUNT)
    assert len(wrong_ids(served, expected)) > 0


def test_a_lost_step_beside_a_doubled_one_is_found(served: Rows) -> None:
    added(served, 0, slice(1, 2))
    (lost,) = itertools.islice(steps(0, ROW_COUNT), 2, 3)
    np.subtract.at(served, lost.ids, lost.gradients)
    assert len(wrong_ids(served, expected_rows(STEP_COUNTS, ROW_COUNT))) > 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows.__setitem__((7, 3), rows[7, 3] + 1),
        lambda rows: rows.__setitem__((7, 3), np.nan),
        lambda rows: rows.__setitem__(7, rows[7, ::-1].copy()),
    ],
    ids=["one more", "no number", "another order"],
)
def test_one_wrong_row_is_found(served: Rows, spoil: Callable[[Rows], None]) -> None:
    added(served, 1, slice(5, 30))  # so that row 7 has a value
    assert served[7].any()
    spoil(served)
    assert wrong_ids(served, expected_rows({0: 3, 1: 30}, ROW_COUNT)).tolist() == [7]


# --- the command


def document(**row: Any) -> dict[str, Any]:
    figures = dict.fromkeys(
        ("recovery_s", "recovery_max_s", "healed_s", "worst_step_s"), 1.0
    ) | dict.fromkeys(("before_steps_s", "after_steps_s"), 10.0)
    place = {"lane": "shm", "servers": 3, "replicas": 2, "kill_count": 2}
    return {
        "environment": {"row_count": ROW_COUNT, "lease_s": 1.0},
        "rows": [{**place, **figures, **row}],
    }


def run_with(found: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with a measurement that is over already."""
    benchmark = replace(catalogue.REPLICATED["sparse"], measure=lambda _: found)
    monkeypatch.setitem(catalogue.REPLICATED, "sparse", benchmark)
    catalogue.bench("sparse", BenchSettings(replica_count=2), str(path))


def test_wrong_rows_end_the_command_with_an_error_after_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    with pytest.raises(Internal, match=r"shm: 3 of 10000 rows .*, such as 7, 9, 11"):
        run_with(document(wrong_row_count=3, wrong_ids=[7, 9, 11]), path, monkeypatch)
    assert "WRONG" in capsys.readouterr().out
    assert json.loads(path.read_text())["rows"][0]["wrong_ids"] == [7, 9, 11]


def test_exact_rows_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(document(wrong_row_count=0, wrong_ids=[]), tmp_path / "figures.json", monkeypatch)
    said = capsys.readouterr().out
    assert "exact" in said
    assert "WRONG" not in said


@pytest.mark.parametrize(
    ("name", "settings", "remedy"),
    [
        ("sparse", BenchSettings(replica_count=2, server_count=1), "give --servers 3"),
        ("sparse", BenchSettings(replica_count=2, size_mb=4), "leave the size"),
        ("sparse", BenchSettings(server_count=3), "--replicas 2 or more"),
        ("dense", BenchSettings(replica_count=2, server_count=3), "dense chooses its own"),
        ("sparse", BenchSettings(has_update_log=True), "leave --update-log to dense"),
        ("latency", BenchSettings(replica_count=2), "only dense and sparse otherwise"),
    ],
)
def test_nonsense_is_refused_with_the_remedy(
    name: str, settings: BenchSettings, remedy: str
) -> None:
    with pytest.raises(InvalidConfig, match=remedy):
        catalogue.bench(name, settings, "")
