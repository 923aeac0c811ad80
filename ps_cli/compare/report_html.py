"""The report as one HTML page, without scripts and without anything to fetch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

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

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
  max-width: 66rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p, li { max-width: 52rem; } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; white-space: pre-wrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th { vertical-align: bottom; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.quiet { color: #595959; } .failed { color: #a40000; font-weight: 600; }
.legend { list-style: none; padding: 0; margin: .3rem 0; display: flex; flex-wrap: wrap;
  gap: .2rem 1.2rem; } .legend svg { width: 30px; height: 10px; margin-right: .4rem; }
figure { margin: .5rem 0; } figure > svg { width: 100%; max-width: 60rem; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: #333; } .end { text-anchor: end; }
.middle { text-anchor: middle; } svg .panel-name { font-weight: 600; }
.grid { stroke: #e4e4e4; } .axis { stroke: #777; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.point { fill: transparent; } .point:hover { fill: #333; } .bar:hover { opacity: .75; }
"""

_NOTES = """
Time: from the start of the first step of any worker to the end of the last step of any worker,
without starting processes and evaluating at the end. All workers start together.

Quality: as reported by the worker whose last step ended last, because its model has every update.

Staleness of a step: the most of any of its blocks, in updates by others between this worker's pull
and the application of its gradient. Under BSP it is 0.

Waiting: the share of the workers' time spent in step(), waiting for the commit of their own step
(under BSP until every worker's step has arrived) or for the pull (under SSP until no worker is too
far behind).

Medians over the runs that finished; with several seeds, each run's quality is in brackets.
"""
"""Paragraphs on the meaning of the columns."""


def page_of(comparison: Comparison, runs: Sequence[Run], rows: Sequence[ModeRow]) -> str:
    title = escape(f"pushpull compare: {comparison.script}")
    body = "\n".join(
        [
            f"<h1>{title}</h1>",
            *_setup(comparison),
            *_table(comparison, rows),
            *_failures(runs),
            *_missing(runs),
            *_qualities(comparison, runs),
            *_losses(comparison, runs),
            *_staleness(comparison, runs),
            *_waits(comparison, runs),
            *_environment(comparison),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def _setup(comparison: Comparison) -> Iterator[str]:
    command = shlex.join((comparison.script, *comparison.arguments))
    compute = f"emulated, {comparison.compute}" if comparison.compute else "as it comes"
    yield f'<p class="quiet">{escape(comparison.began)}</p>'
    yield (
        f"<p><code>{escape(command)}</code>: {comparison.worker_count} workers, "
        f"{comparison.server_count} servers; computation {escape(compute)}.</p>"
    )


def _table(comparison: Comparison, rows: Sequence[ModeRow]) -> Iterator[str]:
    head, cells = head_and_cells(comparison, rows)
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    yield "</tr></thead><tbody>"
    for row in cells:
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
    yield "</tbody></table></div>"
    notes = "".join(f"<li>{escape(note)}</li>" for note in _NOTES.strip().split("\n\n"))
    yield '<details class="quiet"><summary>What the columns mean</summary>'
    yield f"<ul>{notes}</ul></details>"


def _failures(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.state != FINISHED or run.message:
            kind = "quiet" if run.state == FINISHED else "failed"
            yield f'<p class="{kind}">{escape(run.mode)}, seed {run.seed}: {escape(run.state)}</p>'
            yield f"<pre>{escape(run.message)}</pre>"


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    for remark in missing_reports(runs):
        yield f'<p class="failed">{escape(remark)}</p>'


def _qualities(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
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
        yield f"<h2>{escape(title)}</h2>"
        yield from _legend(comparison.modes, [colour(n) for n in range(len(comparison.modes))])
        plot = dot_chart(title, Axis("seconds, each run's time"), Axis(measure), dots)
        yield f"<figure>{plot}</figure>"


def _losses(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
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
        yield f"<h2>{title}</h2>"
        yield from _legend(comparison.modes)
        plot = line_chart(title, axis, Axis("training loss, mean of the workers"), lines)
        yield f"<figure>{plot}</figure>"


def _staleness(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    title = "Staleness"
    histograms = []
    for style, mode in enumerate(comparison.modes):
        name, judged = _judged_runs(mode, runs)
        counts: Counter[int] = Counter()
        for run in judged:
            counts.update(run.figures.staleness)
        histograms.append(Histogram(name, style, dict(counts)))
    yield f"<h2>{title}</h2>"
    yield f"<figure>{histogram_panels(title, Axis('staleness, updates'), histograms)}</figure>"


def _waits(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    title = "Where the workers' time went"
    bars = [bar for mode in comparison.modes for bar in _bars(mode, runs)]
    yield f"<h2>{title}</h2>"
    yield from _legend(PHASES, PHASE_COLOURS)
    segments = [BarSegment(name, fill) for name, fill in zip(PHASES, PHASE_COLOURS, strict=True)]
    plot = stacked_bars(title, Axis("seconds a run, mean of the runs"), segments, bars)
    yield f"<figure>{plot}</figure>"


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


def _legend(names: Sequence[str], fills: Sequence[str] = ()) -> Iterator[str]:
    """Names with a sample of their line, or of their fill."""
    yield '<ul class="legend">'
    for style, name in enumerate(names):
        shape = (
            f'<line x1="0" y1="5" x2="30" y2="5" stroke="{colour(style)}" stroke-width="3" '
            f'stroke-dasharray="{dashes(style)}"/>'
            if not fills
            else f'<rect width="30" height="10" fill="{fills[style]}"/>'
        )
        yield (f'<li><svg viewBox="0 0 30 10" aria-hidden="true">{shape}</svg>{escape(name)}</li>')
    yield "</ul>"


def _environment(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Environment</h2><table><tbody>"
    for name, value in comparison.environment.items():
        if name.endswith("_bytes") and value.isdigit():
            name, value = name.removesuffix("_bytes"), size(int(value))
        yield f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(value)}</td></tr>"
    yield "</tbody></table>"
