"""The table of a comparison: its cells as text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ps_cli.compare.figures import ModeRow
from ps_cli.compare.report_document import Comparison
from ps_cli.console.progress import number

Cells = list[str]


def head_and_cells(comparison: Comparison, rows: Sequence[ModeRow]) -> tuple[Cells, list[Cells]]:
    measures = list(dict.fromkeys(name for row in rows for name in row.quality))
    head = ["mode", "runs", "time, s", f"of {comparison.modes[0]}", "steps/s"]
    head += ["MB pushed", "MB pulled", *measures]
    head += ["staleness mean", "max", "waiting", "rejected blocks", "discarded steps"]
    return head, [_cells(row, measures) for row in rows]


def _cells(row: ModeRow, measures: Sequence[str]) -> Cells:
    unfinished = f"{row.finished_count} of " if row.finished_count != row.run_count else ""
    return [
        row.mode,
        f"{unfinished}{row.run_count}",
        number(row.time_s, 1),
        number(row.relative_time, 2),
        number(row.steps_per_s, 1),
        *(number(count and count / 1e6, 1) for count in (row.pushed_bytes, row.pulled_bytes)),
        *(_quality(row, name) for name in measures),
        number(row.mean_staleness, 2),
        number(row.max_staleness, 0),
        "-" if row.wait_share is None else f"{row.wait_share:.0%}",
        number(row.rejected_count, 0),
        number(row.discarded_count, 0),
    ]


def _quality(row: ModeRow, name: str) -> str:
    """The median, and in brackets each run's if there are several."""
    if name not in row.quality:
        return "-"
    median, values = row.quality[name]
    each = f" ({', '.join(measure_text(one) for one in values)})" if len(values) > 1 else ""
    return measure_text(median) + each


def measure_text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def table_of(comparison: Comparison, rows: Sequence[ModeRow]) -> Table:
    return cells_table(*head_and_cells(comparison, rows))


def cells_table(head: Cells, cells: Sequence[Cells]) -> Table:
    """The terminal's table; numbers are at the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(head):
        table.add_column(name, justify="right" if at else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table
