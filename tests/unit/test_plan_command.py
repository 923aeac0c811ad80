"""`pushpull plan`: its options, its costs, its table and its page."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from ps_cli.__main__ import app
from ps_cli.plan.costs import REFERENCE, costs_of
from ps_cli.plan.plan import bytes_per_s_of, count_of, seconds_of
from ps_core.errors import InvalidConfig

ASKED = ("--model", "1e8", "--compute", "300ms")
FEW_MODES = ("--modes", "bsp,asp+int8", "--workers", "8", "--servers", "4")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("25Gbit", 25e9 / 8), ("100mbit", 1e8 / 8), (" 0.5 Gbit", 5e8 / 8), ("64kbit", 8000.0)],
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    assert bytes_per_s_of(text) == bytes_per_s


def test_durations_and_counts() -> None:
    assert seconds_of("latency", "100us") == pytest.approx(1e-4)
    assert seconds_of("latency", "2ms") == pytest.approx(2e-3)
    assert seconds_of("latency", "0s") == 0.0
    assert count_of("model", "7e9") == 7_000_000_000


@pytest.mark.parametrize("text", ["", "25", "25GB", "fastGbit", "0Gbit", "-1Gbit", "infGbit"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(InvalidConfig, match="expected a number above 0 with Gbit, Mbit or kbit"):
        bytes_per_s_of(text)


@pytest.mark.parametrize("text", ["1", "x ms", "-1ms", "nans"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"latency is .* expected a number of 0 or more"):
        seconds_of("latency", text)


@pytest.mark.parametrize("text", ["0", "1.5", "many", "-3", "inf"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"model is .* expected a whole number above 0"):
        count_of("model", text)


def test_costs_are_read_as_they_are_written() -> None:
    assert costs_of(json.dumps(REFERENCE.document()), "costs.json") == REFERENCE


@pytest.mark.parametrize(
    "change",
    [
        {"call_s": None},
        {"call_s": -1.0},
        {"call_s": float("nan")},
        {"push": {"none": {"worker_s": 1.0}}},
        {"push": []},
        {"unknown": 1.0},
    ],
)
def test_other_files_are_no_costs(change: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match=r"costs.json has no costs .* `pushpull plan --measure"):
        costs_of(json.dumps(REFERENCE.document() | change), "costs.json")
    with pytest.raises(InvalidConfig, match=r"costs.json has no costs"):
        costs_of("no JSON", "costs.json")


def test_a_file_of_costs_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(b"\xff" + json.dumps(REFERENCE.document()).encode())
    found = plan(*ASKED, "--costs", str(file))
    assert (found.exit_code, f"the costs {file} cannot be read" in found.stderr) == (2, True)


def test_a_plan_has_a_row_for_each_mode_and_its_price() -> None:
    found = plan(*ASKED, *FEW_MODES, "--worker-price", "3.6", "--server-price", "1.8")
    assert found.exit_code == 0, found.output
    head, bsp, asp, costs = found.stdout.splitlines()
    assert head.split()[:5] == ["mode", "step,", "s", "steps/s", "MB"]
    assert head.endswith("1000 steps cost")
    assert bsp.split()[0] == "bsp"
    assert asp.split()[0] == "asp+int8/bf16"
    assert bsp.split()[3:7] == ["400.0", "400.0", "800.0", "800.0"]
    assert asp.split()[3:5] == ["101.6", "200.0"]
    hourly = 8 * 3.6 + 4 * 1.8
    step_s, cost = float(bsp.split()[1]), float(bsp.split()[-1].replace(",", ""))
    assert cost == pytest.approx(hourly / 3600 * 1000 * step_s, rel=0.01)
    assert costs == f"costs of the processor: {REFERENCE.machine}"


def test_a_mode_that_discards_steps_costs_until_as_many_are_applied() -> None:
    """One worker of four is always late: three of four steps count, and the clock is theirs."""
    found = plan(
        "--model", "1e8", "--compute", "permanent:1s,10s,rank=0", "--modes", "asp,bsp:backup=1",
        "--workers", "4", "--worker-price", "0.9", "--steps", "300",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    head, asp, backup, _ = found.stdout.splitlines()
    assert head.split()[-4:] == ["discarded", "300", "steps", "cost"]
    assert asp.split()[-2] == "0%"
    assert 0 < float(backup.split()[-2].removesuffix("%")) < 10
    for line in (asp, backup):
        steps_per_s, cost = float(line.split()[2]), float(line.split()[-1].replace(",", ""))
        assert cost == pytest.approx(4 * 0.9 / 3600 * 4 * 300 / steps_per_s, rel=0.01)


def test_a_plan_without_prices_has_no_cost() -> None:
    assert "cost" not in plan(*ASKED, *FEW_MODES).stdout.splitlines()[0]


@pytest.mark.thorough
def test_the_page_has_curves_over_workers_servers_and_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    found = plan(*ASKED, *FEW_MODES, "--bandwidth", "25Gbit", "--report", str(path))
    assert found.exit_code == 0, found.output
    root = ElementTree.parse(path).getroot()  # noqa: S314 - our own page
    assert [heading.text for heading in root.iter("h2")] == [
        "The time that each resource is busy",
        "Step time over workers",
        "Step time over servers",
        "Step time over bandwidth",
    ]
    rows = [[cell.text for cell in row.iter("td")] for row in root.iter("tr")]
    assert [row[0] for row in rows if row] == ["bsp", "asp+int8/bf16"]
    (command,) = root.iter("code")
    assert command.text == (
        "pushpull plan --workers 8 --servers 4 --model 1e8 --compute 300ms --bandwidth 25Gbit "
        f"--modes bsp,asp+int8 --report {path}"
    )
    curves = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    point_counts = [len(str(curve.get("points")).split()) for curve in curves]
    assert point_counts == [7, 7, 6, 6, 7, 7], "a count of servers that came twice is there once"


@pytest.mark.thorough
def test_curves_leave_out_clusters_that_cannot_be(tmp_path: Path) -> None:
    """Fewer workers than the slow one's rank, or than an update waits for; fewer servers than
    replicas; a link where there is no network.
    """
    path = tmp_path / "plan.html"
    found = plan(
        "--model", "1e8", "--compute", "permanent:30ms,90ms,rank=3", "--workers", "5",
        "--servers", "2", "--replicas", "2", "--modes", "bsp:backup=1", "--one-host", "4",
        "--report", str(path),
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    root = ElementTree.parse(path).getroot()  # noqa: S314 - our own page
    workers, servers = root.iter("{http://www.w3.org/2000/svg}polyline")
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(str(workers.get("points")).split()) == 4, titles  # 4, 5, 8, 10
    assert len(str(servers.get("points")).split()) == 3, titles  # 2, 3, 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compute", "1s"), "model is not given; expected --model, such as 7e9"),
        (("--model", "7e9"), "compute is not given; expected --compute, such as 300ms"),
        ((*ASKED, "--dtype", "int8"), "expected one of float32, bfloat16, float16"),
        ((*ASKED, "--optimizer", "lamb"), "the optimizer lamb has no measured cost"),
        ((*ASKED, "--bandwidth", "fast"), "bandwidth is 'fast'"),
        ((*ASKED, "--replicas", "2"), "replicas is 2; expected at most 1, the number of servers"),
        ((*ASKED, "--modes", "bsp:backup=1"), "'bsp:backup=1' has 1 backup workers of 1 workers"),
        ((*ASKED, "--modes", "asp:compensate=2+outer:4"), "expected no compensation with them"),
        ((*ASKED, "--modes", "later"), "consistency is 'later'"),
        (("--model", "1", "--compute", "permanent:1s,2s,rank=4"), "expected a rank below 1"),
        ((*ASKED, "--costs", "missing.json"), "the costs missing.json cannot be read"),
        ((*ASKED, "--workers", "20000"), "workers is 20000; expected 1 to 5000"),
        ((*ASKED, "--servers", "5001"), "servers is 5001; expected 1 to 5000"),
        (("--model", "200e9", "--compute", "1s"), "expected at most 137438953472, the elements"),
        ((*ASKED, "--gpu"), "gpu is given without --one-host"),
        ((*ASKED, "--report", "missing/plan.html"), "missing/plan.html cannot be written"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected(
    arguments: tuple[str, ...], message: str
) -> None:
    found = plan(*arguments)
    assert found.exit_code == 2
    assert message in found.output


@pytest.mark.parametrize(
    ("arguments", "remark"),
    [
        (("--model", "100e9", "--servers", "256"), "planned with block_elements=381504:"),
        (("--model", "1e9", "--servers", "300"), "44 of 300 servers have nothing to do: the model"),
        (("--model", "1e6", "--servers", "5"), "1 of 5 servers have nothing to do: the model"),
        (("--model", "1e6", "--servers", "4"), ""),
    ],
)
def test_a_cluster_that_wastes_or_needs_something_is_remarked_on(
    arguments: tuple[str, ...], remark: str
) -> None:
    found = plan(*arguments, "--compute", "1s", "--modes", "bsp")
    assert found.exit_code == 0, found.output
    *_, said, costs = found.stdout.splitlines()
    assert costs.startswith("costs of the processor")
    assert said.startswith(remark or "bsp ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--check", "--report", "a.html"), "report is given with --check"),
        (("--check", "--workers", "4", "--costs", "costs.json"), "workers is given with --check"),
        (("--measure", "a.json", "--report", "a.html"), "report is given with --measure"),
        (("--measure", "a.json", "--one-host", "2"), "one-host is given with --measure"),
        (("--measure", "a.json", "--check"), "check is given with --measure"),
    ],
)
def test_what_a_measurement_would_not_read_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan(*arguments)
    assert found.exit_code == 2
    assert f"{message}, which plans nothing of yours; expected --" in found.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--measure", "--report"])
def test_a_file_that_cannot_be_written_is_refused_first(option: str, tmp_path: Path) -> None:
    """Before minutes are spent on what is to be in it; an earlier file stays."""
    for path, reason in (
        (tmp_path / "absent" / "file", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        asked = ASKED if option == "--report" else ()
        found = plan(*asked, option, str(path))
        assert found.exit_code == 2
        assert found.output == f"pushpull: {path} cannot be written: {reason}\n"
