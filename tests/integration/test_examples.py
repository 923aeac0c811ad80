"""The examples beyond digits: the data readers, and a reader process beside a training run."""

from __future__ import annotations

import gzip
import math
import re
import runpy
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pushpull as ps
from tests.integration.command_line import ROOT, environment, run_warm

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]


@pytest.fixture(scope="module")
def fashion() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "fashion_mnist.py"))


@pytest.fixture
def idx(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "some-idx2-ubyte.gz"
        path.write_bytes(gzip.compress(content))
        return path

    return write


def test_an_idx_file_is_read_as_its_header_says(
    fashion: dict[str, Any], idx: Callable[[bytes], Path]
) -> None:
    path = idx(b"\0\0\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6)))
    assert fashion["read_idx"](path, 2).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\0\0\x08\x03" + struct.pack(">2I", 2, 3) + bytes(6), "expected 00000802"),
        (b"\0\0\x08\x02" + struct.pack(">2I", 2, 3) + bytes(5), "5 bytes of values"),
    ],
)
def test_a_wrong_idx_file_is_refused(
    content: bytes, expected: str, fashion: dict[str, Any], idx: Callable[[bytes], Path]
) -> None:
    with pytest.raises(SystemExit, match=expected):
        fashion["read_idx"](idx(content), 2)


def test_a_folder_without_the_pictures_is_refused_by_name(
    fashion: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"lacks train-images-idx3-ubyte\.gz"):
        fashion["find_data"](tmp_path)


def test_pictures_are_learnt_for_longer_than_the_resumed_run_was_to_be(
    fashion: dict[str, Any], tmp_path: Path
) -> None:
    """At the rates of that many steps. A replaced worker, too, takes its rate from the step."""
    data, saved = tmp_path / "data", str(tmp_path / "saved")
    data.mkdir()
    for part in ("train", "t10k"):
        for name, shape in (("images-idx3", (20, 28, 28)), ("labels-idx1", (20,))):
            header = bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
            content = gzip.compress(header + bytes(math.prod(shape)))
            (data / f"{part}-{name}-ubyte.gz").write_bytes(content)
    given = {
        "data": data, "hold_out": 0, "batch_size": 4, "seed": 0, "lr": 2e-3, "log_every": 100
    }  # fmt: skip
    for steps, resume in ((4, ""), (8, saved)):
        with (
            ps.local_cluster(checkpoint_url=saved, resume=resume) as cluster,
            ps.connect(cluster.address) as client,
        ):
            fashion["train"](Namespace(**given, steps=steps), client)
            assert client.progress().step_count == steps
            client.checkpoint().wait()
    model = nn.Linear(1, 1)
    rates = []
    for done in (0, 5):
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = fashion["schedule_at"](done, optimizer, 2e-3, 8)
        for _ in range(5 - done):
            optimizer.step()
            schedule.step()
        rates.append({name: optimizer.param_groups[0][name] for name in ("lr", "betas")})
    assert rates[0] == rates[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("movielens", ("--batch-size", "1000000"), "--batch-size 1000000: expected at most all "),
        ("flights_ctr", ("--batch-size", "1000000"), "--batch-size 1000000: expected at most all "),
        ("digits_cnn", ("--single", "--batch-size", "1438"), "1438: expected at most the 1437 of"),
        ("movielens", ("--batch-size", "0"), "argument --batch-size: invalid positive value: '0'"),
        ("digits_cnn", ("--batch-size", "0"), "argument --batch-size: invalid positive value: '0'"),
        ("fashion_mnist", ("--batch-size", "-1"), "argument --batch-size: invalid positive value"),
        ("stdlib_lm", ("--batch-size", "0"), "argument --batch-size: invalid positive value: '0'"),
        ("stdlib_lm", ("--length", "2000000", "--megabytes", "1"), "--length is a window of"),
        ("stdlib_lm", ("--steps", "-1"), "argument --steps: invalid not_negative value: '-1'"),
        ("movielens", ("--steps", "-1"), "argument --steps: invalid not_negative value: '-1'"),
        ("flights_ctr", ("--steps", "-1"), "argument --steps: invalid not_negative value: '-1'"),
        ("fashion_mnist", ("--steps", "-1"), "argument --steps: invalid not_negative value: '-1'"),
    ],
)
def test_an_option_that_nothing_can_be_done_with_is_refused(
    example: str, arguments: tuple[str, ...], expected: str
) -> None:
    """Before the worker joins, where the number of workers does not matter."""
    found = subprocess.run(
        [sys.executable, f"examples/{example}.py", *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode in (1, 2)
    assert expected in found.stderr


@pytest.mark.thorough
def test_a_batch_beyond_a_worker_s_share_ends_all_workers() -> None:
    found = run_warm(
        "train", "examples/digits_cnn.py", "-w", "2", "--", "--batch-size", "719",
        cwd=ROOT, has_warm_roles=True,
    )  # fmt: skip
    assert found.returncode != 0
    assert "--batch-size 719: expected at most the 718 of a worker" in found.stdout + found.stderr


@pytest.mark.thorough
def test_an_evaluator_reads_consistent_parameters_beside_the_training() -> None:
    found = run_warm(
        "train", "examples/stdlib_lm.py", "-w", "2", "-s", "2",
        "--", "--steps", "5", "--width", "32", "--length", "32", "--megabytes", "1",
        "--log-every", "5", "--evaluate",
        cwd=ROOT, has_warm_roles=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "[worker 0] step 5: training perplexity" in found.stdout
    reached = re.search(
        r"\[worker 0\] evaluator: held-out perplexity (\S+) at step \d+ after", found.stdout
    )
    assert reached is not None, found.stdout
    assert 1 < float(reached.group(1)) < 256


@pytest.mark.parametrize(("consistency", "inner_steps"), [("bsp", 0), ("ssp:2", 0), ("bsp", 7)])
def test_workers_whose_minutes_end_apart_end_training_together(
    consistency: str, inner_steps: int
) -> None:
    """One that ended first waited in `synchronize`, and the other for its next step."""
    example = runpy.run_path(str(ROOT / "examples" / "stdlib_lm.py"))
    given = {
        "width": 8, "length": 8, "batch_size": 2, "megabytes": 1, "lr": 3e-3, "seed": 0,
        "push_updates": False, "inner_steps": inner_steps, "outer_lr": 0.7, "outer_momentum": 0.5,
        "clip": 1.0, "log_every": 1000, "steps": 0,
    }  # fmt: skip

    def train(seconds: float) -> int:
        with ps.connect(cluster.address, consistency=consistency, request_deadline_s=10) as client:
            example["train"](Namespace(**{**given, "minutes": seconds / 60}), client)
            return client.progress().step_count

    with ps.local_cluster(workers=2) as cluster, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, (0.3, 1.3))
    assert first == second > 0


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["hybrid", "served", "rows under ASP"])
def test_a_model_of_flights_learns_as_it_does_in_one_process(form: str) -> None:
    options = {"hybrid": (), "served": ("--served",), "rows under ASP": ("--rows", "asp")}[form]
    found = run_warm(
        "train", "examples/flights_ctr.py", "-w", "2", "-s", "2",
        "--", "--steps", "40", "--log-every", "20", *options,
        cwd=ROOT, has_warm_roles=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "[worker 0] step 40 of 40: loss" in found.stdout
    reached = re.search(r"\[worker 0\] held-out AUC (\S+), ", found.stdout)
    assert reached is not None, found.stdout
    assert 0.6 < float(reached.group(1)) < 0.65  # as in one process


@pytest.mark.thorough
def test_a_model_of_ratings_learns_more_than_means_say() -> None:
    found = run_warm(
        "train", "examples/movielens.py", "-w", "2", "-s", "2",
        "--", "--steps", "160", "--log-every", "40",
        cwd=ROOT, has_warm_roles=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "[worker 0] step 160 of 160: loss" in found.stdout
    assert "RMSE of means: 1.0689 of all, 0.9029 of movies and users" in found.stdout
    reached = re.search(r"\[worker 0\] held-out RMSE (\d\.\d+), ", found.stdout)
    assert reached is not None, found.stdout
    assert 0.86 < float(reached.group(1)) < 0.9  # as in one process
