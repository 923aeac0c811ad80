"""What a comparison says of its runs, from records written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_cli.compare.compare import _judged, comparison_of, seeds_of
from ps_cli.compare.figures import (
    MAX_CURVE_POINTS,
    RunFigures,
    figures_of,
    mode_row,
    other_tables,
)
from ps_cli.compare.modes import ComparedMode, modes_of
from ps_cli.compare.options import CompareOptions
from ps_cli.compare.records import LossEntry, StepEntry, TableEntry, WorkerRecord
from ps_cli.compare.report_document import FINISHED
from ps_cli.train.exit_rules import RunEnd
from ps_core.errors import InvalidConfig


def step(ended_s: float, staleness: int | None = 0, **changed: float) -> StepEntry:
    given: dict[str, Any] = {
        "compute_s": 0.5,
        "send_s": 0.1,
        "commit_s": 0.3,
        "read_s": 0.1,
        **changed,
    }
    return StepEntry(
        ended_s=ended_s, staleness=staleness, rejected=2, discarded=True, applied=False, **given
    )


def worker(rank: int, steps: tuple[StepEntry, ...], **quality: float) -> WorkerRecord:
    losses = tuple(
        LossEntry(number, one.ended_s, 2.0 / number + rank) for number, one in enumerate(steps, 1)
    )
    return WorkerRecord(rank, (), steps, losses, dict(quality))


def test_time_is_from_the_first_computation_to_the_last_step() -> None:
    figures = figures_of([worker(0, (step(11.0), step(12.0))), worker(1, (step(11.5), step(14.0)))])
    assert figures.time_s == pytest.approx(4.0)
    assert figures.step_count == 4
    assert (figures.rejected_count, figures.discarded_count, figures.skipped_count) == (8, 4, 4)


def test_only_steps_that_were_applied_count_in_the_rate() -> None:
    """Of eight steps in four seconds two were too late, one was not finite, and one was both."""
    steps = [
        replace(step(ended_s), discarded=discarded, applied=applied)
        for ended_s, discarded, applied in (
            *((n / 2 + 1.0, False, True) for n in range(4)),
            *((n / 2 + 3.0, True, True) for n in range(2)),
            (4.0, False, False),
            (4.0, True, False),
        )
    ]
    figures = figures_of([worker(0, tuple(steps))])
    assert figures.time_s == pytest.approx(4.0)
    assert (figures.step_count, figures.applied_count) == (8, 4)
    assert figures.steps_per_s == pytest.approx(1.0)


def test_an_early_outer_step_takes_time_and_is_no_step_of_the_script() -> None:
    """The inner steps whose moves it pushes have been counted."""
    inner = replace(step(1.0, None), applied=True, discarded=False)
    early = replace(step(3.0, 4), is_early=True)
    figures = figures_of([worker(0, (inner, early))])
    counts = figures.step_count, figures.applied_count, figures.workers[0].step_count
    assert counts == (1, 1, 1)
    assert figures.skipped_count == 0
    assert figures.time_s == pytest.approx(3.0)
    assert figures.staleness == {4: 1}
    assert figures.workers[0].commit_s == pytest.approx(0.6)


def test_waiting_is_the_share_of_commit_and_read() -> None:
    figures = figures_of([worker(0, (step(1.0), step(2.0, read_s=1.1)))])
    assert figures.workers[0].total_s == pytest.approx(3.0)
    assert figures.wait_share == pytest.approx((0.6 + 1.2) / 3.0)


def test_staleness_is_counted_by_step() -> None:
    figures = figures_of([worker(0, (step(1.0, 0), step(2.0, 3), step(3.0, 3), step(4.0, 10)))])
    assert figures.staleness == {0: 1, 3: 2, 10: 1}
    with_inner = figures_of([worker(0, (step(1.0, None), step(2.0, None), step(3.0, 4)))])
    assert (with_inner.staleness, with_inner.mean_staleness) == ({4: 1}, 4.0)
    assert figures.mean_staleness == pytest.approx(4.0)
    assert figures.max_staleness == 10


def test_quality_is_that_of_the_worker_whose_last_step_ended_last() -> None:
    early = worker(0, (step(1.0), step(2.0)), accuracy=0.9)
    late = worker(1, (step(1.0), step(3.0)), accuracy=0.8)
    silent = worker(2, (step(9.0),))
    assert figures_of([early, late, silent]).quality == {"accuracy": 0.8}
    assert figures_of([silent]).quality == {}


def test_loss_is_the_mean_of_the_workers() -> None:
    figures = figures_of([worker(0, (step(1.0), step(2.0))), worker(1, (step(1.0), step(4.0)))])
    assert figures.loss_by_step == ((1.0, 2.5), (2.0, 1.5))
    assert [x for x, _ in figures.loss_by_time] == pytest.approx([1.0, 2.0, 4.0])
    assert [y for _, y in figures.loss_by_time] == pytest.approx([2.5, 1.0, 2.0])


def test_a_long_curve_is_thinned_and_keeps_its_mean_and_its_ends() -> None:
    losses = tuple(LossEntry(n, float(n), float(n % 2)) for n in range(1, 10_001))
    figures = figures_of([WorkerRecord(0, (), (), losses, {})])
    assert len(figures.loss_by_step) == MAX_CURVE_POINTS
    assert all(y == pytest.approx(0.5, abs=0.01) for _, y in figures.loss_by_step)
    assert figures.loss_by_step[0][0] < 100
    assert figures.loss_by_step[-1][0] > 9_900


def test_a_loss_that_is_not_finite_is_in_no_curve() -> None:
    losses = (LossEntry(1, 1.0, None), LossEntry(2, 2.0, 0.25))
    assert figures_of([WorkerRecord(0, (), (), losses, {})]).loss_by_step == ((2.0, 0.25),)


def test_nothing_recorded_is_a_run_without_figures() -> None:
    assert figures_of([]) == RunFigures()
    assert RunFigures().steps_per_s == 0.0


def test_tables_of_other_settings_are_found_and_buffers_are_not_judged() -> None:
    tables = tuple(
        TableEntry(f"model/{number}", optimizer, ComparedMode.parsed(mode))
        for number, (optimizer, mode) in enumerate(
            [("adam", "asp:divide"), ("adam", "bsp"), ("adam", "bsp+int8"), ("assign", "asp")]
        )
    )
    records = [WorkerRecord(rank, tables, (), (), {}) for rank in range(2)]
    for mode, others in (("asp:divide", [1, 2]), ("bsp", [0, 2]), ("bsp+int8/bf16", [0, 1])):
        found = other_tables(records, ComparedMode.parsed(mode))
        assert [table.name for table in found] == [f"model/{number}" for number in others]


def test_outer_steps_of_a_script_are_its_own_unless_the_mode_has_some() -> None:
    modes = [ComparedMode.parsed(mode) for mode in ("bsp", "bsp+outer:2", "asp+outer:2")]
    tables = tuple(TableEntry(str(mode), "sgd", mode) for mode in modes)
    records = [WorkerRecord(0, tables, (), (), {})]
    for mode, others in (
        ("bsp", ["asp+outer:2"]),
        ("bsp+outer:2", ["bsp", "asp+outer:2"]),
        ("bsp+outer:3", ["bsp", "bsp+outer:2", "asp+outer:2"]),
    ):
        found = other_tables(records, ComparedMode.parsed(mode))
        assert [table.name for table in found] == others


def test_a_record_that_breaks_off_is_told_beside_the_figures() -> None:
    whole, cut = (worker(rank, (step(1.0),)) for rank in range(2))
    records = [whole, replace(cut, is_whole=False)]
    said = "the figures lack what worker 1 did at the end: its record breaks off"
    assert _judged(RunEnd(0), records, "bsp") == (FINISHED, said)
    assert _judged(RunEnd(0), [whole], "bsp") == (FINISHED, "")


def test_a_row_has_the_medians_of_the_finished_runs() -> None:
    runs = [
        RunFigures(
            time_s=time_s, applied_count=100, quality={"accuracy": value}, staleness={tau: 4}
        )
        for time_s, value, tau in ((10.0, 0.9, 1), (20.0, 0.7, 2), (12.0, 0.8, 9))
    ]
    row = mode_row("asp", 4, runs, first_time_s=24.0)
    assert (row.finished_count, row.run_count) == (3, 4)
    assert (row.time_s, row.relative_time) == (12.0, 0.5)
    assert row.quality == {"accuracy": (0.8, (0.9, 0.7, 0.8))}
    assert (row.mean_staleness, row.max_staleness) == (2.0, 9)
    assert row.steps_per_s == pytest.approx(100 / 12)


def test_a_row_without_a_finished_run_has_no_figures() -> None:
    row = mode_row("asp", 2, [], first_time_s=1.0)
    assert (row.finished_count, row.time_s, row.wait_share, row.quality) == (0, None, None, {})


def test_a_quality_that_is_not_finite_is_shown_and_not_in_the_median() -> None:
    runs = [RunFigures(quality={"accuracy": None}), RunFigures(quality={"accuracy": 0.5})]
    assert mode_row("asp", 2, runs, None).quality == {"accuracy": (0.5, (None, 0.5))}


def test_modes_are_separated_by_commas_though_a_mode_may_have_some() -> None:
    for text, expected in (
        ("asp:compensate=2,adaptive,bsp", ["asp:compensate=2,adaptive", "bsp"]),
        ("bsp+lowrank:2, bsp+lowrank/none", ["bsp+lowrank:2/bf16", "bsp+lowrank:4/none"]),
        (
            "bsp, ssp:4,bsp:backup=1,grace=5ms,ASP:divide",
            ["bsp", "ssp:4", "bsp:backup=1,grace=5ms", "asp:divide"],
        ),
        (
            "asp:compensate=2,adaptive+int8,bsp+sign/none, bsp+topk,bsp+none/bf16,bsp+none",
            [
                "asp:compensate=2,adaptive+int8/bf16",
                *("bsp+sign/none", "bsp+topk:0.01/bf16", "bsp+none/bf16", "bsp"),
            ],
        ),
        (
            "bsp+outer:50,asp:compensate=2,adaptive+int8 + outer:1,bsp+sign/none+outer:1000000",
            [
                "bsp+outer:50",
                "asp:compensate=2,adaptive+int8/bf16+outer:1",
                "bsp+sign/none+outer:1000000",
            ],
        ),
    ):
        assert [str(mode) for mode in modes_of(text)] == expected


def test_workers_have_the_settings_of_their_mode() -> None:
    assert ComparedMode.parsed("ssp:2+topk:0.1:50").environment == {
        "PUSHPULL_CONSISTENCY": "ssp:2",
        "PUSHPULL_PUSH_CODEC": "topk:0.1:50",
        "PUSHPULL_PULL_CODEC": "bf16",
        "PUSHPULL_OUTER_STEPS": "0",
    }
    assert ComparedMode.parsed("bsp+int8/bf16+outer:50").environment == {
        "PUSHPULL_CONSISTENCY": "bsp",
        "PUSHPULL_PUSH_CODEC": "int8",
        "PUSHPULL_PULL_CODEC": "bf16",
        "PUSHPULL_OUTER_STEPS": "50",
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("bsp,ssp:-1", "staleness is -1"),
        ("bsp,,asp", "consistency is ''"),
        ("grace=5ms", "consistency is 'grace=5ms'"),
        ("bsp,asp,asp", "'asp' twice"),
        ("lax", "expected one of bsp"),
        ("bsp+zip", "push_codec is 'zip'; expected one of none, fp32"),
        ("bsp+", "push_codec is ''; expected one of"),
        ("bsp+int8/sign", "pull_codec is 'sign'; expected one of"),
        ("bsp+int8,bsp+int8/bf16", "'bsp\\+int8/bf16' twice"),
        ("bsp+outer:0", "'outer:0'; expected outer:1 to outer:1000000"),
        ("bsp+int8+outer:1000001", "'outer:1000001'; expected"),
        ("bsp+outer:x", "'outer:x'; expected"),
        ("bsp+outer", "'outer:'; expected"),
        ("bsp+outer:5+int8", "push_codec is 'outer:5\\+int8'; expected one of"),
        ("bsp+outer:5,bsp+outer:05", "'bsp\\+outer:5' twice"),
    ],
)
def test_wrong_modes_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        modes_of(text)


def options(**changed: Any) -> CompareOptions:
    return replace(CompareOptions(Path("train.py"), modes="bsp,asp"), **changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"modes": "bsp:backup=2"}, "2 backup workers of 2 workers"),
        ({"modes": "asp:compensate=2,adaptive+outer:4"}, "expected no compensation with them"),
        ({"seeds": "1,1"}, "name one twice"),
        ({"straggler": "permanent:1ms,2ms,rank=2"}, "a rank below 2"),
        ({"straggler": "later"}, "compute is 'later'"),
        ({"report": Path("compare.json")}, "another ending than .json"),
    ],
)
def test_contradictions_are_refused_before_anything_runs(
    changed: dict[str, object], named: str
) -> None:
    assert options().json_path == Path("compare.json")
    assert comparison_of(options()).modes == ("bsp", "asp")
    with pytest.raises(InvalidConfig, match=named):
        comparison_of(options(**changed))


def test_seeds_are_whole_numbers() -> None:
    assert seeds_of("0, 3,17") == (0, 3, 17)
    with pytest.raises(InvalidConfig, match="seeds is '1,x'"):
        seeds_of("1,x")
