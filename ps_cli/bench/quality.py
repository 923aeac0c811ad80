"""Quality under several consistency settings: Fashion-MNIST, compared with one process.

    python -m ps_cli.bench.quality --report quality.json

Every setting trains on the same number of pictures, and as many at a clock: a worker's batch is its
share of the one process's batch. The learning rate of a setting is the best of one grid, by the
accuracy on pictures held out of training. The result is the accuracy on the test pictures, the
median of several seeds at that rate.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ps_core.errors import Internal

SCRIPT = Path(__file__).parents[2] / "examples" / "fashion_mnist.py"
SINGLE = "one process"
MODES = ("bsp", "ssp:4", "asp", "asp:divide", "asp:compensate=2,adaptive")
_REACHED = re.compile(r"(test|validation) accuracy ([\d.]+)%")

Reached = dict[str, float]
"""Accuracy by name: "test accuracy" and "validation accuracy", from 0 to 1."""


def accuracies(printed: str) -> Reached:
    """The accuracies in the script's output."""
    return {f"{name} accuracy": float(value) / 100 for name, value in _REACHED.findall(printed)}


def _output_of(name: str, command: Sequence[str]) -> str:
    done = subprocess.run([sys.executable, *command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise Internal(f"{name} failed: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def compared(mode: str, worker_count: int, told: Sequence[str]) -> Reached:
    """The script on a cluster under `mode`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        command = [
            "-m", "ps_cli", "compare", str(SCRIPT), "--modes", mode, "--workers",
            str(worker_count), "--report", str(report), "--", *told,
        ]  # fmt: skip
        _output_of(f"compare {mode}", command)
        figures = report.with_suffix(".json").read_text(encoding="utf-8")
        (run,) = json.loads(figures)["runs"]
    found: Reached = run["figures"]["quality"]
    return found


def options(arguments: Namespace, mode: str, rate: float, seed: int) -> list[str]:
    """The script's arguments: a worker's batch is its share of `--batch-size`."""
    worker_count = 1 if mode == SINGLE else arguments.workers
    return [
        "--batch-size", str(arguments.batch_size // worker_count),
        "--epochs", str(arguments.epochs), "--lr", str(rate), "--seed", str(seed),
        "--hold-out", str(arguments.hold_out), "--log-every", "1000000",
    ]  # fmt: skip


def judged(
    mode: str, rates: Sequence[float], seeds: Sequence[int], reached: Callable[..., Reached]
) -> dict[str, Any]:
    """The best rate of the grid for `mode`, and the test accuracy of each seed with it.

    The best rate is that of the first seed's best accuracy on the pictures that were held out;
    `reached(mode, rate, seed)` is a run.
    """
    first = {rate: reached(mode, rate, seeds[0]) for rate in rates}
    best = max(first, key=lambda rate: first[rate]["validation accuracy"])
    ends = [first[best], *(reached(mode, best, seed) for seed in seeds[1:])]
    tests = [end["test accuracy"] for end in ends]
    return {
        "mode": mode,
        "rate": best,
        "rate_is_at_end": len(rates) > 1 and best in (min(rates), max(rates)),
        "validation": {str(rate): found["validation accuracy"] for rate, found in first.items()},
        "tests": tests,
        "median": statistics.median(tests),
    }


def with_points(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its percentage points above the first one's median."""
    return [{**row, "points": 100 * (row["median"] - rows[0]["median"])} for row in rows]


def line(row: dict[str, Any]) -> str:
    tests = ", ".join(f"{test:.2%}" for test in row["tests"])
    at_end = ", an end of the grid: a rate beyond may be better" if row["rate_is_at_end"] else ""
    return (
        f"{row['mode']}: {row['median']:.2%} ({row['points']:+.2f} points; {tests}), "
        f"lr {row['rate']:g}{at_end}"
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="the settings")
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3, 6e-3, 1.2e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=5, help="passes over the pictures")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="pictures of all workers at a clock"
    )
    parser.add_argument("--hold-out", type=int, default=5000, help="pictures to choose a rate by")
    parser.add_argument("--report", type=Path, help="a JSON file")
    arguments = parser.parse_args()

    def reached(mode: str, rate: float, seed: int) -> Reached:
        told = options(arguments, mode, rate, seed)
        if mode == SINGLE:  # without a cluster
            found = accuracies(_output_of(SINGLE, [str(SCRIPT), "--single", *told]))
        else:
            found = compared(mode, arguments.workers, told)
        print(f"{mode}, lr {rate:g}, seed {seed}: {found}", file=sys.stderr, flush=True)
        return found

    rows: list[dict[str, Any]] = []
    for mode in [SINGLE, *arguments.modes]:
        rows = with_points([*rows, judged(mode, arguments.rates, arguments.seeds, reached)])
        if arguments.report is not None:
            arguments.report.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for row in rows:
        print(line(row))


if __name__ == "__main__":
    main()
