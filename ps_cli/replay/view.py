"""The versions of a replay as a table, and as a document for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from ps_server.replay.replayer import Replay, Version

FORMAT = "pushpull-replay"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version that is shown; `loss` is that of --evaluate, and `row_count` that of all tables of
    rows, if there is one.
    """

    version: Version
    gradient_norm: float | None
    parameter_norm: float
    row_count: int | None
    loss: float | None


def view_of(rows: Sequence[VersionRow], *, is_by_clock: bool) -> Table:
    view = Table(box=None, pad_edge=False, header_style="dim")
    is_stale = any(row.version.staleness for row in rows)
    is_evaluated = any(row.loss is not None for row in rows)
    has_rows = any(row.row_count is not None for row in rows)
    heads = ["version", *["clock"] * (not is_by_clock), "time (UTC)", "from workers"]
    heads += [*["missed"] * is_stale, "gradient", "parameters"]
    heads += [*["rows"] * has_rows, *["loss"] * is_evaluated]
    for head in heads:
        is_left = head in ("time (UTC)", "from workers")
        view.add_column(head, justify="left" if is_left else "right", no_wrap=not is_left)
    for row in rows:
        version = row.version
        cells = [str(version.number), *[str(version.clock)] * (not is_by_clock)]
        time = datetime.fromtimestamp(version.time_s, UTC).strftime("%H:%M:%S.%f")[:-3]
        cells += [time, contributors(version)]
        cells += [str(version.staleness)] * is_stale
        cells += [_number(row.gradient_norm), _number(row.parameter_norm)]
        cells += [f"{row.row_count or 0:,}"] * has_rows
        cells += [_number(row.loss)] * is_evaluated
        view.add_row(*cells)
    return view


def contributors(version: Version) -> str:
    if version.step is None:
        return "the log's beginning"
    return ", ".join(_contributors(version)) or "nobody"


def _contributors(version: Version) -> Iterator[str]:
    yield from map(str, version.ranks)
    yield from (f"{rank} in part" for rank in version.partial_ranks)
    yield from (f"({rank} skipped)" for rank in version.skipped_ranks)
    if version.step is not None and not version.step[0]:
        yield "initial values"
    if version.gone_count:
        yield f"({version.gone_count} gone)"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def document_of(
    rows: Sequence[VersionRow], replayer: Replay, notes: Sequence[str]
) -> dict[str, Any]:
    history = replayer.history
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tables": [table.spec.name for table in replayer.tables],
        "versions_are_clocks": history.is_by_clock,
        "first_version": history.versions[0].number,
        "last_version": history.versions[-1].number,
        "unfinished_count": len(history.unfinished),
        "lost_count": history.lost_count,
        "earlier_count": history.earlier_count,
        "checked_snapshot_count": replayer.checked_count,
        "notes": list(notes),
        "versions": [_entry(row) for row in rows],
    }


def _entry(row: VersionRow) -> dict[str, Any]:
    """A version in JSON, which has no number that is not finite: null stands for it."""
    version = row.version
    same = ("clock", "time_s", "ranks", "partial_ranks", "skipped_ranks", "gone_count", "staleness")
    measured = "gradient_norm", "parameter_norm", "row_count", "loss"
    found = {name: getattr(row, name) for name in measured}
    return {
        "version": version.number,
        **{name: getattr(version, name) for name in same},
        **{n: None if v is None or not math.isfinite(v) else v for n, v in found.items()},
    }
