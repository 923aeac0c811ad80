"""The report: plots that say what they show, on a page that needs nothing but itself."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_cli.compare.figures import RunFigures, WorkerTime, mode_row
from ps_cli.compare.report_document import (
    FAILED,
    FINISHED,
    STOPPED,
    ComparedRun,
    Comparison,
    document_of,
    missing_reports,
)
from ps_cli.compare.report_html import page_of
from ps_cli.console.svg import (
    PALETTE,
    Bar,
    Histogram,
    LegendEntry,
    Line,
    colour,
    dashes,
    dot_chart,
    histogram_panels,
    line_chart,
    stacked_bars,
    ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own text


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def titles(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}title")]


def test_a_line_chart_has_a_curve_and_its_points_for_each_line() -> None:
    lines = [
        Line("bsp", 0, ((0.0, 2.0), (5.0, 1.0), (10.0, 0.5))),
        Line("a <b> & c", 1, ((2.0, 3.0), (4.0, 0.25))),
        Line("nothing", 2, ()),
    ]
    root = parsed(line_chart("Loss", "steps", "loss, nats", lines))
    assert root.get("aria-label") == "Loss"
    curves = list(root.iter(f"{SVG}polyline"))
    assert [len(str(curve.get("points")).split()) for curve in curves] == [3, 2]
    assert [curve.get("stroke") for curve in curves] == [colour(0), colour(1)]
    assert len(list(root.iter(f"{SVG}circle"))) == 5
    assert {"steps", "loss, nats", "10", "3"} <= set(texts(root))
    assert "a <b> & c: 0.25 at 4 steps" in titles(root)


def test_higher_values_lie_higher_and_later_ones_further_right() -> None:
    lines = [Line("one", 0, ((1.0, 1.0), (2.0, 3.0)))]
    (curve,) = parsed(line_chart("x", "x", "y", lines)).iter(f"{SVG}polyline")
    (x1, y1), (x2, y2) = (point.split(",") for point in str(curve.get("points")).split())
    assert float(x2) > float(x1)
    assert float(y2) < float(y1)


@pytest.mark.parametrize(
    "points", [((0.0, 1.0),), ((3.0, 0.0), (4.0, 0.0)), ((1e-9, 1e9), (1e9, 1e-9))]
)
def test_flat_and_extreme_curves_stay_within_the_plot(
    points: tuple[tuple[float, float], ...],
) -> None:
    root = parsed(line_chart("x", "x", "y", [Line("one", 0, points)]))
    _, _, width, height = (float(number) for number in str(root.get("viewBox")).split())
    for circle in root.iter(f"{SVG}circle"):
        assert 0 <= float(str(circle.get("cx"))) <= width
        assert 0 <= float(str(circle.get("cy"))) <= height


def test_a_plot_of_nothing_says_so() -> None:
    empty = [
        line_chart("a", "x", "y", [Line("one", 0, ())]),
        histogram_panels("b", "x", [Histogram("one", 0, {})]),
        stacked_bars("c", "s", [LegendEntry("p", "#000")], [Bar("g", "n", (0.0,))]),
    ]
    assert [texts(parsed(svg)) for svg in empty] == [["nothing was recorded"]] * 3


def test_histograms_have_a_bar_for_each_value_over_one_axis() -> None:
    root = parsed(
        histogram_panels(
            "Staleness",
            "staleness, updates",
            [Histogram("bsp", 0, {0: 10}), Histogram("asp", 2, {0: 1, 3: 2, 5: 1})],
        )
    )
    bars = list(root.iter(f"{SVG}rect"))
    assert [bar.get("fill") for bar in bars] == [colour(0)] + [colour(2)] * 3
    assert titles(root)[0] == "bsp: staleness, updates 0 in 100.0% of the steps"
    assert titles(root)[2] == "asp: staleness, updates 3 in 50.0% of the steps"
    assert float(str(bars[2].get("height"))) == pytest.approx(
        float(str(bars[0].get("height"))) / 2, abs=0.1
    )
    assert {"bsp", "asp", "100%"} <= set(texts(root))


def test_many_values_share_bars() -> None:
    counts = dict.fromkeys(range(1000), 1)
    root = parsed(histogram_panels("x", "tau", [Histogram("asp", 0, counts)]))
    assert 10 <= len(list(root.iter(f"{SVG}rect"))) <= 24
    assert titles(root)[0].startswith("asp: tau 0 to 41 in 4.2%")


def test_bars_are_stacked_and_named() -> None:
    segments = [LegendEntry("computing", "#111"), LegendEntry("waiting", "#222")]
    bars = [Bar("bsp", "worker 0", (1.0, 3.0)), Bar("asp", "worker 0", (1.0, 0.0))]
    root = parsed(stacked_bars("Time", "seconds", segments, bars))
    drawn = list(root.iter(f"{SVG}rect"))
    assert [bar.get("fill") for bar in drawn] == ["#111", "#222", "#111", "#222"]
    first, second = drawn[:2]
    end = float(str(first.get("x"))) + float(str(first.get("width")))
    assert float(str(second.get("x"))) == pytest.approx(end, abs=0.2)
    assert titles(root)[1] == "bsp, worker 0: waiting 3 seconds"
    assert {"bsp", "asp", "worker 0", "seconds"} <= set(texts(root))


def test_styles_differ_from_each_other() -> None:
    styles = [(colour(number), dashes(number)) for number in range(4 * len(PALETTE))]
    assert len(set(styles)) == len(styles)


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_ticks_are_few_within_and_evenly_apart(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 8
    slack = span * 1e-6 + 1e-9
    assert low - slack <= found[0]
    assert found[-1] <= low + span + slack
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


COMPARISON = Comparison(
    script="train.py",
    arguments=("--name", "<b>"),
    worker_count=2,
    server_count=1,
    compute="rotating:30ms,90ms,burst=2,seed=1",
    modes=("bsp", "asp", "ssp:4"),
    began="2026-01-02T03:04:05+00:00",
    environment={"cpu": "<fast> & cheap", "memory_bytes": str(3 * 2**30)},
)

FIGURES = RunFigures(
    time_s=2.0,
    step_count=10,
    applied_count=10,
    quality={"test accuracy": 0.97},
    staleness={0: 5, 2: 5},
    workers=(WorkerTime(0, 5, 1.0, 0.1, 0.5, 0.2), WorkerTime(1, 5, 1.2, 0.1, 0.3, 0.2)),
    loss_by_step=((1.0, 2.0), (5.0, 1.0)),
    loss_by_time=((0.1, 2.0), (2.0, 1.0)),
)


def runs() -> list[ComparedRun]:
    return [
        ComparedRun("bsp", 0, FINISHED, "", FIGURES),
        ComparedRun(
            "asp", 0, FINISHED, "a remark", replace(FIGURES, quality={"test accuracy": None})
        ),
        ComparedRun("ssp:4", 0, FAILED, "worker 1 ended\n  with <html>", RunFigures()),
        ComparedRun("bsp", 1, STOPPED, "stopped by SIGINT", replace(FIGURES, time_s=99.0)),
    ]


def page() -> str:
    finished = {"bsp": [FIGURES], "asp": [runs()[1].figures], "ssp:4": []}
    rows = [mode_row(mode, 1, finished[mode], 2.0) for mode in COMPARISON.modes]
    return page_of(COMPARISON, runs(), rows)


def test_the_page_is_well_formed_and_has_table_and_plots() -> None:
    root = ElementTree.fromstring(page())  # noqa: S314 - our own text
    assert root.tag == "html"
    assert len(list(root.iter("figure"))) == 5
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert rows[0][:5] == ["mode", "runs", "time, s", "of bsp", "steps/s"]
    assert rows[0][5:7] == ["MB pushed", "MB pulled"]
    assert rows[1][:8] == ["bsp", "1", "2.0", "1.00", "5.0", "0.0", "0.0", "0.97"]
    assert rows[2][7] == "not finite"
    assert rows[3][:3] == ["ssp:4", "0 of 1", "-"]
    assert ["cpu", "<fast> & cheap"] in rows
    assert ["memory", "3.0 GiB"] in rows
    headings = [heading.text for heading in root.iter("h2")]
    assert headings == [
        "Test accuracy against time",
        "Loss against steps",
        "Loss against time",
        "Staleness",
        "Where the workers' time went",
        "Environment",
    ]
    said = "".join(root.itertext())
    assert "worker 1 ended\n  with <html>" in said
    assert "bsp, seed 1, stopped" in said
    assert "a remark" in said
    assert "client.report" not in said
    assert "bsp, seed 0: 0.97 at 2 seconds, each run's time" in titles(root)


def test_the_page_says_what_to_report_where_nobody_did() -> None:
    silent = ComparedRun("bsp", 0, FINISHED, "", RunFigures(time_s=2.0, step_count=10))
    first, second = missing_reports([silent, runs()[2]])
    assert 'client.report(quality={"accuracy": ...})' in first
    assert "client.report(loss=...)" in second
    rows = [mode_row("bsp", 1, [silent.figures], 2.0)]
    root = ElementTree.fromstring(page_of(COMPARISON, [silent], rows))  # noqa: S314 - our own text
    said = "".join(root.itertext())
    assert first in said
    assert second in said
    assert missing_reports(runs()) == []
    assert missing_reports([runs()[2]]) == [], "nothing has finished: that is told already"


def test_dots_stand_where_their_values_are() -> None:
    lines = [Line("bsp", 0, ((2.0, 0.5),)), Line("asp", 1, ((1.0, 0.25),))]
    root = parsed(dot_chart("Quality", "s", "accuracy", lines))
    bsp, asp = root.iter(f"{SVG}circle")
    assert (bsp.get("fill"), asp.get("fill")) == (colour(0), colour(1))
    assert float(str(bsp.get("cx"))) > float(str(asp.get("cx")))
    assert float(str(bsp.get("cy"))) < float(str(asp.get("cy")))
    assert texts(parsed(dot_chart("Quality", "s", "a", []))) == ["nothing was recorded"]


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    text = re.sub(r'xmlns="[^"]*"', "", page())
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|@import|url\(| src=| on[a-z]+=", text)


def test_unfinished_runs_are_not_in_the_means_of_finished_ones() -> None:
    root = ElementTree.fromstring(page())  # noqa: S314 - our own text
    bars = [title for title in titles(root) if title.startswith("bsp, worker 0: computing")]
    assert bars == ["bsp, worker 0: computing 1 seconds a run, mean of the runs"]


def test_the_document_is_json_for_others_too() -> None:
    odd = ComparedRun("bsp", 0, FINISHED, "", replace(FIGURES, time_s=float("inf")))
    rows = [mode_row("bsp", 1, [FIGURES], 2.0)]
    text = json.dumps(document_of(COMPARISON, [*runs(), odd], rows), allow_nan=False)
    document = json.loads(text)
    assert document["format"] == 2
    assert document["modes"][0]["quality"] == {"test accuracy": [0.97, [0.97]]}
    assert document["runs"][0]["figures"]["staleness"] == {"0": 5, "2": 5}
    assert document["runs"][0]["figures"]["wait_share"] == pytest.approx(1.2 / 3.6)
    assert document["runs"][4]["figures"]["time_s"] is None
