"""Plots as SVG, made by pure functions from values to text, without a library or a script.

Rules:
    - Every axis has a name with its unit, every plot a title. Each mark has its value in a
      `<title>`, which browsers show beside the pointer and screen readers read out.
    - Colours are those of Okabe and Ito, which colour-blind people can tell apart; from the ninth
      style on, lines are dashed as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C",
)  # fmt: skip
_DASHES = ("", "7 4", "2 3", "9 3 2 3")

WIDTH = 760
_HEIGHT = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 16, 52
_TICK_COUNT = 6
_BAR_HEIGHT = 15
_GROUP_GAP = 10
_DOT_MARGIN = 1.05
"""Length of a dot chart's axis, in multiples of the last dot's place."""
_MAX_BIN_COUNT = 24
_LABEL_WIDTH = 190
_PANEL_WIDTH, _PANEL_HEIGHT, _PANEL_COLUMNS = 250, 190, 3


@dataclass(frozen=True, slots=True)
class Line:
    """A curve; `style` chooses its colour and dashes, and lines of one style share a legend."""

    name: str
    style: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """The counts of each value, for one panel."""

    name: str
    style: int
    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A name with a sample of its line, or of its fill where `dashes` is None."""

    name: str
    fill: str
    dashes: str | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, made of segments of these lengths."""

    group: str
    name: str
    lengths: tuple[float, ...]


def colour(style: int) -> str:
    return PALETTE[style % len(PALETTE)]


def dashes(style: int) -> str:
    """SVG's stroke-dasharray of a style; empty for a solid line."""
    return _DASHES[style // len(PALETTE) % len(_DASHES)]


def ticks(low: float, high: float, count: int = _TICK_COUNT) -> list[float]:
    """Round numbers from `low` or above to `high` or below, about `count` of them."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def line_chart(
    title: str, x_axis: str, y_axis: str, lines: Sequence[Line], from_x: float = 0.0
) -> str:
    """Curves over one pair of axes.

    Args:
        title: describes the plot for people who cannot see it.
        x_axis: the name of the horizontal axis.
        y_axis: the name of the vertical axis, from the lowest to the highest value.
        lines: the curves; those without points are left out.
        from_x: the start of the horizontal axis; no point is before it.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return _empty(title)
    frame = _framed(points, from_x, max(max(x for x, _ in points), from_x + 1.0))
    inside = [*frame.grid(x_axis, y_axis)]
    inside += [mark for line in lines if line.points for mark in _curve(frame, line, x_axis)]
    return _svg(title, WIDTH, _HEIGHT, inside)


def dot_chart(title: str, x_axis: str, y_axis: str, lines: Sequence[Line]) -> str:
    """As `line_chart`, with a dot for each point and no curve."""
    points = [point for line in lines for point in line.points]
    if not points:
        return _empty(title)
    frame = _framed(points, 0.0, max(1.0, *(x for x, _ in points)) * _DOT_MARGIN)
    inside = [*frame.grid(x_axis, y_axis)]
    for line in lines:
        kind = f'r="5" fill="{colour(line.style)}"'
        inside += [frame.dot(line, point, x_axis, "", kind) for point in line.points]
    return _svg(title, WIDTH, _HEIGHT, inside)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps values to places within a line chart."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = self.high_y - self.low_y or 1.0
        return _HEIGHT - _BOTTOM - (value - self.low_y) / span * (_HEIGHT - _TOP - _BOTTOM)

    def dot(self, line: Line, point: Point, x_axis: str, before: str, after: str) -> str:
        x, y = point
        said = f"{escape(line.name)}: {y:.4g} at {x:.4g} {escape(x_axis)}"
        place = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"'
        return f"<circle {before}{place} {after}><title>{said}</title></circle>"

    def grid(self, x_axis: str, y_axis: str) -> Iterator[str]:
        bottom, right = _HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for value in ticks(self.low_y, self.high_y):
            yield _rule(_LEFT, self.y(value), right, self.y(value), "grid")
            yield _text(_LEFT - 8, self.y(value) + 4, f"{value:g}", "number end")
        for value in ticks(self.low_x, self.high_x):
            yield _rule(self.x(value), bottom, self.x(value), bottom + 5, "axis")
            yield _text(self.x(value), bottom + 19, f"{value:g}", "number middle")
        yield _rule(_LEFT, bottom, right, bottom, "axis")
        yield _text((_LEFT + right) / 2, _HEIGHT - 10, x_axis, "axis-name middle")
        turned = f"translate(18.0 {(_TOP + bottom) / 2:.1f}) rotate(-90)"
        yield f'<text class="axis-name middle" transform="{turned}">{escape(y_axis)}</text>'


def _framed(points: Sequence[Point], low_x: float, high_x: float) -> _Frame:
    heights = [y for _, y in points]
    return _Frame(low_x, high_x, min(heights), max(heights))


def _curve(frame: _Frame, line: Line, x_axis: str) -> Iterator[str]:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
    dash = f' stroke-dasharray="{dashes(line.style)}"' if dashes(line.style) else ""
    yield (
        f'<polyline class="curve" points="{path}" stroke="{colour(line.style)}"{dash}>'
        f"<title>{escape(line.name)}</title></polyline>"
    )
    for point in line.points:
        yield frame.dot(line, point, x_axis, 'class="point" ', 'r="4"')


def histogram_panels(title: str, axis: str, histograms: Sequence[Histogram]) -> str:
    """A panel for each histogram, with the share of each value in percent; all share axes."""
    counted = [one for one in histograms if one.counts]
    if not counted:
        return _empty(title)
    highest = max(value for one in counted for value in one.counts)
    width = max(1, math.ceil((highest + 1) / _MAX_BIN_COUNT))
    shares = [_shares(one, width) for one in counted]
    bin_count = highest // width + 1
    top = max(max(share.values()) for share in shares)
    rows = math.ceil(len(counted) / _PANEL_COLUMNS)
    inside: list[str] = []
    for number, (one, share) in enumerate(zip(counted, shares, strict=True)):
        row, column = divmod(number, _PANEL_COLUMNS)
        panel = _Panel(column * _PANEL_WIDTH, row * _PANEL_HEIGHT, bin_count, width, top)
        inside += panel.marks(one, share, axis)
    return _svg(title, _PANEL_COLUMNS * _PANEL_WIDTH + 10, rows * _PANEL_HEIGHT + 6, inside)


def _shares(histogram: Histogram, width: int) -> dict[int, float]:
    """Percentages of the values in each bin of `width` values."""
    total = sum(histogram.counts.values())
    shares: dict[int, float] = {}
    for value, count in histogram.counts.items():
        shares[value // width] = shares.get(value // width, 0.0) + 100.0 * count / total
    return shares


@dataclass(frozen=True, slots=True)
class _Panel:
    """The place of one histogram among several, and the axes that all share."""

    left: float
    above: float
    bin_count: int
    bin_width: int
    top: float

    def marks(self, one: Histogram, shares: dict[int, float], axis: str) -> Iterator[str]:
        left, right = self.left + 46, self.left + _PANEL_WIDTH - 12
        top, bottom = self.above + 26, self.above + _PANEL_HEIGHT - 44
        step = (right - left) / self.bin_count
        yield _text(left, self.above + 16, one.name, "panel-name")
        for value in ticks(0.0, self.top, 4):
            y = bottom - value / self.top * (bottom - top)
            yield _rule(left, y, right, y, "grid")
            yield _text(left - 6, y + 4, f"{value:g}%", "number end")
        for index, share in sorted(shares.items()):
            first, last = index * self.bin_width, (index + 1) * self.bin_width - 1
            values = f"{first}" if first == last else f"{first} to {last}"
            height = share / self.top * (bottom - top)
            yield _rectangle(
                (left + index * step + 0.5, bottom - height, max(step - 1, 1), height),
                colour(one.style),
                f"{one.name}: {axis} {values} in {share:.1f}% of the steps",
            )
        for tick in ticks(0.0, self.bin_count - 1.0, 5):
            if tick == int(tick):
                x = left + (tick + 0.5) * step
                yield _text(x, bottom + 15, f"{int(tick) * self.bin_width}", "number middle")
        yield _rule(left, bottom, right, bottom, "axis")
        yield _text((left + right) / 2, bottom + 32, axis, "axis-name middle")


def stacked_bars(
    title: str, axis: str, segments: Sequence[LegendEntry], bars: Sequence[Bar]
) -> str:
    """Horizontal bars of `segments`, whose lengths the axis measures; each group of bars, which
    follow each other, has its name at the left.
    """
    longest = max((sum(bar.lengths) for bar in bars), default=0.0)
    if not longest > 0:
        return _empty(title)
    scale = (WIDTH - _LABEL_WIDTH - _RIGHT) / longest
    inside: list[str] = []
    y, group = float(_TOP), ""
    for bar in bars:
        if bar.group != group:
            y += _GROUP_GAP if group else 0
            group = bar.group
            inside.append(_text(4, y + _BAR_HEIGHT - 4, group, "panel-name"))
        inside.append(_text(_LABEL_WIDTH - 8, y + _BAR_HEIGHT - 4, bar.name, "number end"))
        x = float(_LABEL_WIDTH)
        for segment, length in zip(segments, bar.lengths, strict=True):
            said = f"{bar.group}, {bar.name}: {segment.name} {length:.3g} {axis}"
            inside.append(_rectangle((x, y, length * scale, _BAR_HEIGHT - 2), segment.fill, said))
            x += length * scale
        y += _BAR_HEIGHT
    bottom = y + 6
    for value in ticks(0.0, longest):
        x = _LABEL_WIDTH + value * scale
        inside.insert(0, _rule(x, _TOP, x, bottom, "grid"))
        inside.append(_text(x, bottom + 15, f"{value:g}", "number middle"))
    inside.append(_text((_LABEL_WIDTH + WIDTH) / 2, bottom + 34, axis, "axis-name middle"))
    return _svg(title, WIDTH, bottom + 44, inside)


def _svg(title: str, width: float, height: float, inside: Sequence[str]) -> str:
    said = escape(title, quote=True)
    body = "\n".join(inside)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{said}">\n{body}\n</svg>'
    )


def _empty(title: str) -> str:
    return _svg(title, WIDTH, 40, [_text(8, 24, "nothing was recorded", "axis-name")])


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _rectangle(place: tuple[float, float, float, float], fill: str, said: str) -> str:
    x, y, width, height = place
    return (
        f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}"><title>{escape(said)}</title></rect>'
    )
