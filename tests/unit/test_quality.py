"""`ps_cli/bench/quality.py`: which rate is chosen, by what, and what counts then."""

from __future__ import annotations

import argparse

import pytest

from ps_cli.bench.quality import (
    SCRIPT,
    SINGLE,
    Reached,
    accuracies,
    judged,
    line,
    options,
    with_points,
)

RATES = (0.1, 0.2, 0.4)
VALIDATION = {0.1: 0.5, 0.2: 0.8, 0.4: 0.7}
TEST = {(0.1, 0): 0.99, (0.2, 0): 0.6, (0.2, 1): 0.9, (0.2, 2): 0.7, (0.4, 0): 0.98}


class Runs:
    """Runs with known ends, and which of them were made."""

    def __init__(self) -> None:
        self.made: list[tuple[str, float, int]] = []

    def __call__(self, mode: str, rate: float, seed: int) -> Reached:
        self.made.append((mode, rate, seed))
        validation = VALIDATION[rate] if seed == 0 else 1.0
        return {"validation accuracy": validation, "test accuracy": TEST[rate, seed]}


def test_the_rate_is_chosen_by_held_out_pictures_of_the_first_seed() -> None:
    runs = Runs()
    row = judged("asp", RATES, (0, 1, 2), runs)
    assert row["rate"] == 0.2, "not the rate that is best on the test pictures"
    assert not row["rate_is_at_end"]
    assert row["validation"] == {"0.1": 0.5, "0.2": 0.8, "0.4": 0.7}
    assert row["tests"] == [0.6, 0.9, 0.7]
    assert row["median"] == 0.7
    grid = [("asp", rate, 0) for rate in RATES]
    assert runs.made == [*grid, ("asp", 0.2, 1), ("asp", 0.2, 2)], "no run is made twice"


def test_of_equal_rates_the_first_is_taken() -> None:
    row = judged("bsp", (0.3, 0.1), (5,), lambda *_: dict.fromkeys(
        ("validation accuracy", "test accuracy"), 0.5
    ))  # fmt: skip
    assert row["rate"] == 0.3
    assert row["rate_is_at_end"]


def test_a_grid_of_one_rate_has_no_end() -> None:
    row = judged("bsp", (0.1,), (0,), Runs())
    assert not row["rate_is_at_end"]


def test_points_are_hundredths_above_the_median_of_the_first_row() -> None:
    rows = with_points(
        [
            {"mode": SINGLE, "median": 0.91, "points": 7.0, "tests": [0.91], "rate": 0.01},
            {"mode": "bsp", "median": 0.93, "tests": [0.93, 0.94, 0.9], "rate": 0.006},
            {"mode": "asp", "median": 0.9, "tests": [0.9], "rate": 0.003},
        ]
    )
    rows = [{"rate_is_at_end": row["mode"] == "asp", **row} for row in rows]
    assert [row["points"] for row in rows] == pytest.approx([0.0, 2.0, -1.0])
    assert line(rows[0]) == "one process: 91.00% (+0.00 points; 91.00%), lr 0.01"
    assert line(rows[1]) == "bsp: 93.00% (+2.00 points; 93.00%, 94.00%, 90.00%), lr 0.006"
    assert line(rows[2]) == (
        "asp: 90.00% (-1.00 points; 90.00%), lr 0.003, an end of the grid: a rate beyond may be "
        "better"
    )


@pytest.mark.parametrize(("mode", "batch_size"), [(SINGLE, 64), ("bsp", 16), ("asp:divide", 16)])
def test_every_setting_sees_as_many_pictures_at_a_clock(mode: str, batch_size: int) -> None:
    arguments = argparse.Namespace(workers=4, batch_size=64, epochs=5, hold_out=5000)
    told = options(arguments, mode, 0.006, 2)
    assert dict(zip(told[::2], told[1::2], strict=True)) == {
        "--batch-size": str(batch_size), "--epochs": "5", "--lr": "0.006", "--seed": "2",
        "--hold-out": "5000", "--log-every": "1000000",
    }  # fmt: skip


def test_the_script_is_there() -> None:
    assert SCRIPT.is_file()


def test_the_script_says_what_it_reached() -> None:
    printed = "step 1 of 2: loss 2.3\ntest accuracy 91.25%, validation accuracy 90.50%\n"
    assert accuracies(printed) == pytest.approx(
        {"test accuracy": 0.9125, "validation accuracy": 0.905}
    )
