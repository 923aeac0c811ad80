"""`pushpull tables top`: the rows of embedding tables, and those that come most often.

Shares of rows are estimates from the samples of each server, since it serves a range; counts, and
all other shares, are exact. A server that does not answer is named, and what it has is in no count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypedDict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ps_cli.console.scheduler_query import ServerAnswer
from ps_cli.console.words import size
from ps_core.errors import PushpullError
from ps_runtime.cluster.wire import table_from_proto
from pushpull.v1 import parameters_pb2, scheduler_pb2


class HotRowEntry(TypedDict):
    """One row, and its share of all ids of its table that came."""

    id: int
    share: float


class RowRangeEntry(TypedDict):
    """One range of a table of rows, and its shares of the ids that came."""

    range_id: int
    server: int
    row_count: int
    disk_row_count: int
    state_bytes: int
    pulled_share: float
    pushed_share: float


class RowTableEntry(TypedDict):
    """One table of rows. `found_share` is of the pulled ids those that had a row."""

    name: str
    row_count: int
    disk_row_count: int
    candidate_count: int
    state_bytes: int
    pulled_count: int
    pushed_count: int
    found_share: float | None
    pulled: list[HotRowEntry]
    pushed: list[HotRowEntry]
    ranges: list[RowRangeEntry]


class HotRowsDocument(TypedDict):
    """The document of `pushpull tables top --json`. `silent` names servers without an answer."""

    tables: list[RowTableEntry]
    silent: list[str]


class _Part(NamedTuple):
    """A range of a table, as its server sees it."""

    server: int
    stats: parameters_pb2.RangeStats


def hot_rows_document(
    response: scheduler_pb2.GetClusterStatusResponse,
    answers: Mapping[int, ServerAnswer],
    names: Iterable[str],
    count: int,
    run: str = "",
) -> HotRowsDocument:
    """The tables of rows among `names` of a run, with `count` rows and ranges of each."""
    parts: dict[int, list[_Part]] = {}
    for server, answer in answers.items():
        if not isinstance(answer, PushpullError):
            for stats in answer.ranges:
                if stats.HasField("rows"):
                    parts.setdefault(stats.table_id, []).append(_Part(server, stats))
    tables = [table_from_proto(message) for message in response.view.tables]
    wanted = set(names)
    return HotRowsDocument(
        tables=[
            _entry(table.title, parts.get(table.table_id, []), count)
            for table in tables
            if table.spec.rows is not None and table.run == run and table.spec.name in wanted
        ],
        silent=[
            f"server {server} does not answer: {answer.message}"
            for server, answer in answers.items()
            if isinstance(answer, PushpullError)
        ],
    )


def _entry(name: str, parts: list[_Part], count: int) -> RowTableEntry:
    rows = [part.stats.rows for part in parts]
    pulled = sum(each.pulled_count for each in rows)
    pushed = sum(each.pushed_count for each in rows)
    found = sum(each.found_count for each in rows)
    ranges = [
        RowRangeEntry(
            range_id=stats.range_id,
            server=server,
            row_count=stats.rows.row_count,
            disk_row_count=stats.rows.disk_row_count,
            state_bytes=stats.state_bytes,
            pulled_share=stats.rows.pulled_count / max(1, pulled),
            pushed_share=stats.rows.pushed_count / max(1, pushed),
        )
        for server, stats in parts
    ]
    ranges.sort(key=lambda each: (-each["pulled_share"] - each["pushed_share"], each["range_id"]))
    return RowTableEntry(
        name=name,
        row_count=sum(each.row_count for each in rows),
        disk_row_count=sum(each.disk_row_count for each in rows),
        candidate_count=sum(each.candidate_count for each in rows),
        state_bytes=sum(part.stats.state_bytes for part in parts),
        pulled_count=pulled,
        pushed_count=pushed,
        found_share=found / pulled if pulled else None,
        pulled=_hottest(rows, lambda each: each.pulled, lambda each: each.pulled_count, count),
        pushed=_hottest(rows, lambda each: each.pushed, lambda each: each.pushed_count, count),
        ranges=ranges[:count],
    )


def _hottest(
    rows: Iterable[parameters_pb2.RowStats],
    hot: Callable[[parameters_pb2.RowStats], Iterable[parameters_pb2.HotRow]],
    came: Callable[[parameters_pb2.RowStats], int],
    count: int,
) -> list[HotRowEntry]:
    """The hottest rows of all ranges: a row is in one of them."""
    ranges = list(rows)
    total = max(1, sum(map(came, ranges)))
    found = [
        HotRowEntry(id=each.id, share=each.share * came(own) / total)
        for own in ranges
        for each in hot(own)
    ]
    return sorted(found, key=lambda each: (-each["share"], each["id"]))[:count]


def hot_rows_view(document: HotRowsDocument) -> RenderableType:
    """The same for people."""
    shown: list[RenderableType] = [Text(f"warning: {each}") for each in document["silent"]]
    for table in document["tables"]:
        if shown:
            shown.append(Text())
        shown += [_head(table), *_body(table)]
    if not document["tables"]:
        shown.append(Text("no table of rows"))
    return Group(*shown)


def _head(table: RowTableEntry) -> Text:
    candidates = table["candidate_count"]
    on_disk = table["disk_row_count"] / max(1, table["row_count"])
    words = [
        f"{table['row_count']:,} rows"
        + (f", {on_disk:.1%} of them on disk," if on_disk else "")
        + (f" and {candidates:,} candidates" if candidates else ""),
        size(table["state_bytes"]),
        f"{table['pulled_count']:,} ids pulled",
    ]
    if table["found_share"] is not None:
        words[-1] += f", {table['found_share']:.1%} of them rows"
    words.append(f"{table['pushed_count']:,} pushed")
    return Text(f"{table['name']}: {'; '.join(words)}")


def _body(table: RowTableEntry) -> Iterable[RenderableType]:
    for verb, rows in (("pulled", table["pulled"]), ("pushed", table["pushed"])):
        if rows:
            listed = ", ".join(f"{each['id']} ({each['share']:.2%})" for each in rows)
            yield Text(f"  {verb} most: {listed}")
    if not table["ranges"]:
        return
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 2))
    for column in ("range", "server", "rows", "on disk", "bytes", "of pulls", "of pushes"):
        grid.add_column(column)
    for each in table["ranges"]:
        grid.add_row(
            str(each["range_id"]),
            str(each["server"]),
            f"{each['row_count']:,}",
            f"{each['disk_row_count']:,}",
            size(each["state_bytes"]),
            f"{each['pulled_share']:.1%}",
            f"{each['pushed_share']:.1%}",
        )
    yield grid
