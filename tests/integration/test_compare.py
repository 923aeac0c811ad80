"""`pushpull compare` with real clusters: what it measures, what it refuses, how it is stopped."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ps_worker import ComputeTime
from tests.integration.command_line import START_DEADLINE_S, Tool, run, run_here, run_warm

END_DEADLINE_S = 20.0

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]

TRAINING = """
import sys
import torch
import ps_worker as ps

step_count, seed = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
with ps.connect() as client:
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.05))
    for step in range(step_count):
        inputs = torch.randn(8, 4)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        client.report(loss=loss.item(), planned_steps=step_count)
    assert "torch._dynamo" not in sys.modules, "a second of CPU for nothing"
    client.report(quality={"rank and seed": client.rank + 10 * seed})
"""

WIDE = """
import torch
import ps_worker as ps

torch.manual_seed(0)
with ps.connect() as client:
    model = torch.nn.Linear(64, 512)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=20.0))
    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        client.report(loss=loss.item())
"""

STUBBORN = """
import torch
import ps_worker as ps

with ps.connect() as client:
    if client.consistency == ps.ASP():
        raise RuntimeError("this script refuses to be asynchronous")
    model = torch.nn.Linear(4, 1)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.05), consistency="bsp")
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        client.report(loss=loss.item())
"""

ENDLESS_UNDER_ASP = """
import itertools
import numpy as np
import ps_worker as ps

with ps.connect() as client:
    is_endless = client.consistency == ps.ASP()
    table = client.create_table("weights", 64, optimizer=ps.SGD(lr=0.1))
    gradient = np.ones(64, dtype=np.float32)
    for step in itertools.count(1) if is_endless else range(1, 6):
        client.push_pull(table, gradient)
        client.report(loss=1.0 / step)
        if step == 40:
            print("is well on its way", flush=True)
"""


def figures(folder: Path, name: str = "compare") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return document


def page(folder: Path, name: str = "compare") -> ElementTree.Element:
    return ElementTree.parse(folder / f"{name}.html").getroot()  # noqa: S314 - our own page


@pytest.mark.thorough
def test_a_script_is_compared_under_its_modes_with_a_straggler(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    found = run_warm(
        "compare", str(script), "--modes", "bsp,asp:divide", "--straggler",
        "permanent:1ms,25ms,rank=1", "--seeds", "3", "-o", "made/here.html", "--", "20", "{seed}",
        cwd=tmp_path, has_warm_roles=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "rank and seed" in found.stdout
    assert "run 2 of 2: asp:divide, seed 3: 40 steps in" in found.stderr
    assert found.stderr.count("starting the scheduler") == 1, "both runs have one cluster"
    document = figures(tmp_path, "made/here")
    assert [(run["mode"], run["state"]) for run in document["runs"]] == [
        ("bsp", "finished"),
        ("asp:divide", "finished"),
    ]
    for each in document["runs"]:
        measured = each["figures"]
        assert measured["step_count"] == 40
        assert len(measured["loss_by_step"]) == 20
        assert measured["quality"] in ({"rank and seed": 30.0}, {"rank and seed": 31.0})
        fast, slow = measured["workers"]
        assert slow["compute_s"] >= 20 * 0.025
        assert measured["time_s"] >= 20 * 0.025
        if each["mode"] == "bsp":
            assert measured["staleness"] == {"0": 40}
            parts = (fast[f"{part}_s"] for part in ("compute", "send", "commit", "read"))
            assert sum(parts) >= 18 * 0.025, "BSP: no worker is faster than the straggler"
        else:
            assert measured["max_staleness"] > 0
    assert document["compute"] == "permanent:1ms,25ms,rank=1"
    rows = [[cell.text for cell in row] for row in page(tmp_path, "made/here").iter("tr")]
    assert [row[0] for row in rows[:3]] == ["mode", "bsp", "asp:divide"]


@pytest.mark.thorough
def test_codecs_and_outer_steps_are_compared_with_the_bytes_that_they_take(tmp_path: Path) -> None:
    script = tmp_path / "wide.py"
    script.write_text(WIDE)
    modes = ("bsp", "bsp+int8/bf16", "bsp+topk:0.02/none", "bsp+outer:5")
    straggler = "rotating:1ms,40ms,burst=2"
    found = run_warm(
        "compare", str(script), "--modes", ",".join(modes), "--straggler", straggler,
        cwd=tmp_path, has_warm_roles=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    rows = figures(tmp_path)["modes"]
    assert [row["mode"] for row in rows] == [*modes]
    whole, eight_bits, few, fifth = (row["pushed_bytes"] for row in rows)
    trained_bytes = 2 * 10 * 4 * 33_280  # two workers take ten steps
    assert whole - eight_bits == pytest.approx(0.746 * trained_bytes, rel=0.01)
    assert whole - few == pytest.approx(0.96 * trained_bytes, rel=0.01)
    assert whole - fifth == pytest.approx(0.8 * trained_bytes, rel=0.01)
    assert trained_bytes <= whole <= 1.1 * trained_bytes
    whole, halves, same, fifth = (row["pulled_bytes"] for row in rows)
    assert whole == same
    assert halves / whole == pytest.approx(0.5, abs=0.1)
    assert whole - fifth == pytest.approx(0.8 * trained_bytes, rel=0.01)
    each_step, *_, outer_steps = (one["figures"] for one in figures(tmp_path)["runs"])
    for trained in (each_step, outer_steps):
        assert trained["step_count"] == 20
        assert [step for step, _ in trained["loss_by_step"]] == [*range(1, 11)]
        (_, first), *_, (_, last) = trained["loss_by_step"]
        assert last < 0.5 * first
        for worker in trained["workers"]:
            slow = ComputeTime.parsed(straggler)
            expected = (slow.seconds(worker["rank"], 2, step) for step in range(1, 11))
            assert worker["compute_s"] >= sum(expected), "each takes its turns"
    assert outer_steps["staleness"] == {"0": 4}, "of the steps that pushed"


@pytest.mark.thorough
def test_what_cannot_be_compared_is_in_the_report_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    arguments = ("compare", str(script), "--modes", "ssp:1,asp,bsp", "--workers", "1")
    found = run_warm(*arguments, cwd=tmp_path, has_warm_roles=True)
    assert found.returncode == 1, found.stdout + found.stderr
    ssp, asp, bsp = figures(tmp_path)["runs"]
    assert ssp["state"] == "failed"
    assert "'model/0/float32' is bsp, not ssp:1; expected a script without" in ssp["message"]
    assert asp["state"] == "failed"
    assert "this script refuses to be asynchronous" in asp["message"]
    assert bsp["state"] == "finished"
    assert found.stderr.count("starting the scheduler") == 2, "the second run's has failed"
    said = "".join(page(tmp_path).itertext())
    assert "is bsp, not ssp:1" in said
    assert "this script refuses to be asynchronous" in said


@pytest.mark.thorough
def test_ctrl_c_leaves_no_process_and_a_report_of_what_there_is(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS_UNDER_ASP)
    tool = Tool(
        "compare", str(script), "-v", "--modes", "bsp,asp", "-w", "1", cwd=tmp_path, is_warm=True
    )
    tool.wait_for(r"\[worker 0\] is well on its way")
    roles = [pid for pids in tool.role_pids().values() for pid in pids]
    assert len(roles) == 3
    tool.process.send_signal(signal.SIGINT)
    assert tool.end(END_DEADLINE_S) == 130, tool.text
    assert not [pid for pid in roles if Path(f"/proc/{pid}").exists()]
    first, second = figures(tmp_path)["runs"]
    assert (first["state"], len(first["figures"]["loss_by_step"])) == ("finished", 5)
    assert (second["state"], second["message"]) == ("stopped", "stopped by SIGINT")
    assert second["figures"]["loss_by_step"][-1][0] >= 39
    assert "stopped by SIGINT" in "".join(page(tmp_path).itertext())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--modes", "bsp,lax"), "consistency is 'lax'; expected one of bsp"),
        (("--straggler", "permanent:1ms,2ms,rank=7"), "a rank below 2"),
        (("-o", "/proc/nowhere/report.html"), "cannot be written"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    arguments: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    found = run_here("compare", "training.py", *arguments, cwd=tmp_path)
    assert found.returncode == 2
    assert named in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "compare.html").exists()


@pytest.mark.thorough
def test_a_new_interpreter_has_all_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    found = run("compare", "training.py", "--modes", "lax", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert "consistency is 'lax'; expected one of bsp" in line


FILLS_THE_DISK = """
import os
import resource
import sys
import ps_worker as ps

with ps.connect() as client:
    table = client.create_table("t", 64, optimizer=ps.SGD(lr=1.0))
    for step in range(2):
        client.push_pull(table, [1.0] * 64)
        client.report(loss=1.0 / (step + 1))
    if sys.argv[1] == "1":  # the tool's writes fail from here on
        resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
"""


@pytest.mark.thorough
def test_a_report_that_cannot_be_written_any_more_leaves_the_last_and_the_table(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FILLS_THE_DISK)
    arguments = ("--modes", "bsp", "--seeds", "0,1", "-w", "1", "--", "{seed}")
    with Tool("compare", str(script), *arguments, cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 1, tool.text
    assert [run["seed"] for run in figures(tmp_path)["runs"]] == [0], "the first run's"
    page(tmp_path)
    assert re.search(r"^bsp +2 ", tool.text, re.MULTILINE), "the table has both"
    assert tool.text.endswith(
        "pushpull: compare.json cannot be written: File too large; compare.html and compare.json "
        "lack 1 of 2 runs\n"
    )


def test_runs_that_no_report_has_are_a_failure_though_they_finished(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FILLS_THE_DISK)
    arguments = ("--modes", "bsp", "--seeds", "1", "-w", "1", "--", "{seed}")
    with Tool("compare", str(script), *arguments, cwd=tmp_path, is_warm=True) as tool:
        assert tool.end(START_DEADLINE_S) == 1, tool.text
    assert tool.text.endswith("compare.html and compare.json lack 1 of 1 runs\n")


def test_an_earlier_report_stays_until_a_run_has_ended(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import signal\nprint('begins', flush=True)\nsignal.pause()"
    )
    for name in ("compare.json", "compare.html"):
        (tmp_path / name).write_text("earlier")
    with Tool("compare", "endless.py", "-v", "-w", "1", cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("begins")
        assert {path.name for path in tmp_path.iterdir()} == {
            "compare.html", "compare.json", "endless.py",
        }  # fmt: skip
        assert (tmp_path / "compare.json").read_text() == "earlier"
        assert (tmp_path / "compare.html").read_text() == "earlier"
