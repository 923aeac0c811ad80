"""Plots of a replay's versions: loss, norms, staleness and the workers' clocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ps_cli.console.svg import PALETTE, WIDTH, Line, Point, line_chart
from ps_cli.replay.view import VersionRow

_HEIGHT = 340
_TITLE_HEIGHT = 26

_STYLE = """
svg { background: #fff; } text { font: 12px system-ui, sans-serif; fill: #333; }
.title { font-weight: 600; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: #e4e4e4; } .axis { stroke: #777; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.point { fill: transparent; } .point:hover { fill: #333; }
"""


def plot_of(rows: Sequence[VersionRow], tables: str) -> str:
    """One SVG image, with the charts below each other."""
    inside, end = [], 0
    for title, chart in _charts(rows):
        place = f'x="0" y="{end + _TITLE_HEIGHT}" width="{WIDTH}" height="{_HEIGHT}"'
        inside.append(f'<text class="title" x="16" y="{end + 18}">{escape(title)}</text>')
        inside.append(chart.replace("<svg ", f"<svg {place} ", 1))
        end += _TITLE_HEIGHT + _HEIGHT
    body = "\n".join(inside)
    said = escape(f"replay of {tables}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end}" '
        f'role="img" aria-label="{said}">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


def _charts(rows: Sequence[VersionRow]) -> Iterator[tuple[str, str]]:
    first = rows[0].version.number
    stale = rows if any(row.version.staleness for row in rows) else ()
    curves = (
        ("loss", 1, [(r.version.number, r.loss) for r in rows]),
        ("norm of the parameters", 0, [(r.version.number, r.parameter_norm) for r in rows]),
        ("norm of the gradient", 2, [(r.version.number, r.gradient_norm) for r in rows]),
        ("rows", 5, [(r.version.number, r.row_count) for r in rows]),
        ("updates of others missed", 4, [(r.version.number, r.version.staleness) for r in stale]),
    )
    for name, style, values in curves:
        there: list[Point] = [(float(x), float(y)) for x, y in values if y is not None]
        points = [(x, y) for x, y in there if math.isfinite(y)]
        left_out = len(there) - len(points)
        title = f"{name}; not finite, and left out: {left_out}" if left_out else name
        if there:
            line = Line(name, style, tuple(points))
            yield title, line_chart(name, "version", name, [line], first)
    lines = list(_workers(rows))
    if lines:
        shown = ", ".join(f"{one.name} {_COLOUR_NAMES[one.style % len(PALETTE)]}" for one in lines)
        title = f"clock of each worker: {shown}"
        yield title, line_chart(title, "version", "clock", lines, first)


_COLOUR_NAMES = ("blue", "red", "green", "pink", "orange", "light blue", "black", "grey")


def _workers(rows: Sequence[VersionRow]) -> Iterator[Line]:
    points: dict[int, list[Point]] = {}
    for row in rows:
        version = row.version
        place = (float(version.number), float(version.clock))
        for rank in (*version.ranks, *version.partial_ranks) if version.clock else ():
            points.setdefault(rank, []).append(place)
    for style, (rank, found) in enumerate(sorted(points.items())):
        yield Line(f"worker {rank}", style, tuple(found))
