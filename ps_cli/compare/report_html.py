"""The report as one HTML page, without scripts and without anything to fetch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from ps_cli.compare.figures import PHASE_TIMES, ModeRow, WorkerTime
from ps_cli.compare.report_document import FINISHED, ComparedRun, Comparison, missing_reports
from ps_cli.compare.report_table import head_and_cells
from ps_cli.console.page import Plot, page
from ps_cli.console.svg import (
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
)
from ps_cli.console.words import size

PHASES = (
    LegendEntry("computing", "#BDBDBD"),
    LegendEntry("sending", "#56B4E9"),
    LegendEntry("waiting for the commit", "#D55E00"),
    LegendEntry("waiting for the pull", "#0072B2"),
)
"""Computing is grey, so that waiting is seen, by colour-blind people as well."""


def page_of(comparison: Comparison, runs: Sequence[ComparedRun], rows: Sequence[ModeRow]) -> str:
    head, cells = head_and_cells(comparison, rows)
    return page(
        "ps_cli.compare",
        "report.html.j2",
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


def _qualities(comparison: Comparison, runs: Sequence[ComparedRun]) -> Iterator[Plot]:
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
        svg = dot_chart(title, "seconds, each run's time", measure, dots)
        legend = (LegendEntry(mode, colour(n)) for n, mode in enumerate(comparison.modes))
        yield Plot(title, svg, tuple(legend))


def _losses(comparison: Comparison, runs: Sequence[ComparedRun]) -> Iterator[Plot]:
    kinds = (
        ("Loss against steps", "steps of a worker", "loss_by_step"),
        ("Loss against time", "seconds since the first step began", "loss_by_time"),
    )
    modes = enumerate(comparison.modes)
    legend = tuple(LegendEntry(mode, colour(n), dashes(n)) for n, mode in modes)
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
        svg = line_chart(title, axis, "training loss, mean of the workers", lines)
        yield Plot(title, svg, legend)


def _staleness(comparison: Comparison, runs: Sequence[ComparedRun]) -> Plot:
    title = "Staleness"
    histograms = []
    for style, mode in enumerate(comparison.modes):
        name, judged = _judged_runs(mode, runs)
        counts: Counter[int] = Counter()
        for run in judged:
            counts.update(run.figures.staleness)
        histograms.append(Histogram(name, style, dict(counts)))
    return Plot(title, histogram_panels(title, "staleness, updates", histograms))


def _waits(comparison: Comparison, runs: Sequence[ComparedRun]) -> Plot:
    title = "Where the workers' time went"
    bars = [bar for mode in comparison.modes for bar in _bars(mode, runs)]
    svg = stacked_bars(title, "seconds a run, mean of the runs", PHASES, bars)
    return Plot(title, svg, PHASES)


def _bars(mode: str, runs: Sequence[ComparedRun]) -> Iterator[Bar]:
    name, judged = _judged_runs(mode, runs)
    by_rank: dict[int, list[WorkerTime]] = {}
    for worker in (worker for run in judged for worker in run.figures.workers):
        by_rank.setdefault(worker.rank, []).append(worker)
    for rank, workers in sorted(by_rank.items()):
        means_s = (
            sum(getattr(worker, phase) for worker in workers) / len(workers)
            for phase in PHASE_TIMES
        )
        yield Bar(name, f"worker {rank}", tuple(means_s))


def _judged_runs(mode: str, runs: Sequence[ComparedRun]) -> tuple[str, list[ComparedRun]]:
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
