"""The report as one HTML page, without scripts and without anything to fetch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from ps_cli.compare.figures import ModeRow, WorkerTime
from ps_cli.compare.report_document import FINISHED, Comparison, Run, missing_reports
from ps_cli.compare.report_table import head_and_cells
from ps_cli.console.svg import (
    Axis,
    Bar,
    BarSegment,
    Histogram,
    Line,
    colour,
    dashes,
    dot_chart,
    histogram_panels,
    line_chart,
    stacked_bars,
)
from ps_cli.status.view import size

PHASES = ("computing", "sending", "waiting for the commit", "waiting for the pull")
"""The phases of a step, as `WorkerTime` has them."""

PHASE_COLOURS = ("#BDBDBD", "#56B4E9", "#D55E00", "#0072B2")
"""Computing is grey, so that waiting is seen, by colour-blind people as well."""

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A name with a sample of its line, or of its fill where `dashes` is None."""

    name: str
    fill: str
    dashes: str | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """A section of the page: an SVG image below its title and its legend."""

    title: str
    svg: str
    legend: tuple[LegendEntry, ...] = ()


def page_of(comparison: Comparison, runs: Sequence[Run], rows: Sequence[ModeRow]) -> str:
    head, cells = head_and_cells(comparison, rows)
    templates = Environment(
        loader=PackageLoader("ps_cli.compare", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    return templates.get_template(_TEMPLATE).render(
        title=f"pushpull compare: {comparison.script}",
        command=shlex.join((comparison.script, *comparison.arguments)),
        comparison=comparison,
        head=head,
        cells=cells,
        runs=runs,
        finished=FINISHED,
        missing=missing_reports(runs),
        plots=[
            *_qualities(comparison, runs),
            *_losses(comparison, runs),
            _staleness(comparison, runs),
            _waits(comparison, runs),
        ],
        environment=list(_environment(comparison)),
    )


def _lines_of(modes: Sequence[str]) -> tuple[LegendEntry, ...]:
    return tuple(LegendEntry(mode, colour(n), dashes(n)) for n, mode in enumerate(modes))


def _fills_of(names: Sequence[str], fills: Sequence[str]) -> tuple[LegendEntry, ...]:
    return tuple(LegendEntry(name, fill) for name, fill in zip(names, fills, strict=True))


def _qualities(comparison: Comparison, runs: Sequence[Run]) -> Iterator[Plot]:
    """A plot of each measure over time."""
    finished = [run for run in runs if run.state == FINISHED]
    for measure in dict.fromkeys(name for run in finished for name in run.figures.quality):
        title = f"{measure[:1].upper()}{measure[1:]} against time"
        dots = [
            Line(
                f"{run.mode}, seed {run.seed}",
                comparison.modes.index(run.mode),
                ((run.figures.time_s, value),),
            )
            for run in finished
            if (value := run.figures.quality.get(measure)) is not None
        ]
        svg = dot_chart(title, Axis("seconds, each run's time"), Axis(measure), dots)
        fills = [colour(n) for n in range(len(comparison.modes))]
        yield Plot(title, svg, _fills_of(comparison.modes, fills))


def _losses(comparison: Comparison, runs: Sequence[Run]) -> Iterator[Plot]:
    kinds = (
        ("Loss against steps", Axis("steps of a worker"), "loss_by_step"),
        ("Loss against time", Axis("seconds since the first step began"), "loss_by_time"),
    )
    for title, axis, curve in kinds:
        lines = [
            Line(
                f"{run.mode}, seed {run.seed}"
                + ("" if run.state == FINISHED else f", {run.state}"),
                comparison.modes.index(run.mode),
                getattr(run.figures, curve),
            )
            for run in runs
        ]
        svg = line_chart(title, axis, Axis("training loss, mean of the workers"), lines)
        yield Plot(title, svg, _lines_of(comparison.modes))


def _staleness(comparison: Comparison, runs: Sequence[Run]) -> Plot:
    title = "Staleness"
    histograms = []
    for style, mode in enumerate(comparison.modes):
        name, judged = _judged_runs(mode, runs)
        counts: Counter[int] = Counter()
        for run in judged:
            counts.update(run.figures.staleness)
        histograms.append(Histogram(name, style, dict(counts)))
    return Plot(title, histogram_panels(title, Axis("staleness, updates"), histograms))


def _waits(comparison: Comparison, runs: Sequence[Run]) -> Plot:
    title = "Where the workers' time went"
    bars = [bar for mode in comparison.modes for bar in _bars(mode, runs)]
    segments = [BarSegment(name, fill) for name, fill in zip(PHASES, PHASE_COLOURS, strict=True)]
    svg = stacked_bars(title, Axis("seconds a run, mean of the runs"), segments, bars)
    return Plot(title, svg, _fills_of(PHASES, PHASE_COLOURS))


def _bars(mode: str, runs: Sequence[Run]) -> Iterator[Bar]:
    name, judged = _judged_runs(mode, runs)
    by_rank: dict[int, list[WorkerTime]] = {}
    for worker in (worker for run in judged for worker in run.figures.workers):
        by_rank.setdefault(worker.rank, []).append(worker)
    for rank, workers in sorted(by_rank.items()):
        count = len(workers)
        lengths = (
            sum(worker.compute_s for worker in workers) / count,
            sum(worker.send_s for worker in workers) / count,
            sum(worker.commit_s for worker in workers) / count,
            sum(worker.read_s for worker in workers) / count,
        )
        yield Bar(name, f"worker {rank}", lengths)


def _judged_runs(mode: str, runs: Sequence[Run]) -> tuple[str, list[Run]]:
    """The finished runs of a mode; if none has finished, all of them, with a name that says so."""
    of_mode = [run for run in runs if run.mode == mode]
    finished = [run for run in of_mode if run.state == FINISHED]
    if finished or not of_mode:
        return mode, finished
    return f"{mode}, unfinished", of_mode


def _environment(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for name, value in comparison.environment.items():
        if name.endswith("_bytes") and value.isdigit():
            name, value = name.removesuffix("_bytes"), size(int(value))
        yield name.replace("_", " "), value
