"""The document and the view of `pushpull tables top`."""

from __future__ import annotations

import io

from rich.console import Console

from ps_cli.console.scheduler_query import ServerAnswer
from ps_cli.tables.hot_rows import HotRowsDocument, hot_rows_document, hot_rows_view
from ps_core.errors import Recovering
from ps_core.keys import TableId
from ps_core.tables.elements import DType, Initializer
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_runtime.cluster.wire import table_to_proto
from pushpull.v1 import parameters_pb2, scheduler_pb2


def table(number: int, name: str, rows: RowsSpec | None, run: str = "") -> Table:
    sgd = OptimizerSpec(OptimizerKind.SGD)
    spec = TableSpec(name, DType.FLOAT32, 4, sgd, initializer=Initializer(), rows=rows)
    return Table(TableId(number), 0, spec.validated(), run=run)


def stats(range_id: int, **rows: object) -> parameters_pb2.RangeStats:
    made = parameters_pb2.RowStats(**rows)  # type: ignore[arg-type]
    return parameters_pb2.RangeStats(range_id=range_id, table_id=1, state_bytes=1000, rows=made)


def hot(*pairs: tuple[int, float]) -> list[parameters_pb2.HotRow]:
    return [parameters_pb2.HotRow(id=row_id, share=share) for row_id, share in pairs]


def document() -> HotRowsDocument:
    tables = [
        table(1, "users", RowsSpec(16)),
        table(2, "dense", None),
        table(3, "items", RowsSpec(16)),
    ]
    response = scheduler_pb2.GetClusterStatusResponse()
    response.view.tables.extend(map(table_to_proto, tables))
    small = stats(3, row_count=5, pulled_count=100, found_count=10, pulled=hot((2**64 - 1, 0.9)))
    large = stats(
        7, row_count=50, disk_row_count=22, candidate_count=2,
        pulled_count=300, found_count=290, pushed_count=80,
        pulled=hot((4, 0.5), (6, 0.1)), pushed=hot((4, 0.25)),
    )  # fmt: skip
    answers: dict[int, ServerAnswer] = {
        8: parameters_pb2.GetRangeStatsResponse(ranges=[small]),
        9: parameters_pb2.GetRangeStatsResponse(ranges=[large]),
        10: Recovering("no answer"),
    }
    return hot_rows_document(response, answers, ["users", "dense"], 2)


def test_a_table_of_another_run_with_the_same_name_is_not_shown() -> None:
    response = scheduler_pb2.GetClusterStatusResponse()
    response.view.tables.extend(
        table_to_proto(table(number, "users", RowsSpec(16), run))
        for number, run in ((1, ""), (2, "nightly"))
    )
    for run, title in (("", "users"), ("nightly", "nightly:users")):
        found = hot_rows_document(response, {}, ["users"], 2, run)
        assert [each["name"] for each in found["tables"]] == [title]


def test_ranges_are_added_up_and_shares_are_of_the_whole_table() -> None:
    found = document()
    assert found["silent"] == ["server 10 does not answer: no answer"]
    (users,) = found["tables"]
    assert (users["row_count"], users["candidate_count"], users["state_bytes"]) == (55, 2, 2000)
    assert users["disk_row_count"] == 22
    assert [each["disk_row_count"] for each in users["ranges"]] == [22, 0]
    assert (users["pulled_count"], users["pushed_count"]) == (400, 80)
    assert users["found_share"] == 0.75
    assert users["pulled"] == [{"id": 4, "share": 0.375}, {"id": 2**64 - 1, "share": 0.225}]
    assert users["pushed"] == [{"id": 4, "share": 0.25}]
    assert [(each["range_id"], each["server"]) for each in users["ranges"]] == [(7, 9), (3, 8)]
    assert users["ranges"][1]["pulled_share"] == 0.25
    assert users["ranges"][1]["pushed_share"] == 0.0


def test_people_read_the_same() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(hot_rows_view(document()))
    shown = out.getvalue()
    assert "warning: server 10 does not answer: no answer" in shown
    assert (
        "users: 55 rows, 40.0% of them on disk, and 2 candidates; 2.0 KiB; 400 ids pulled" in shown
    )
    assert "400 ids pulled, 75.0% of them rows" in shown
    assert "pulled most: 4 (37.50%), 18446744073709551615 (22.50%)" in shown
    assert "of pushes" in shown
    nothing = HotRowsDocument(tables=[], silent=[])
    out = io.StringIO()
    Console(file=out).print(hot_rows_view(nothing))
    assert out.getvalue() == "no table of rows\n"
