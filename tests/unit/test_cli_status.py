"""`pushpull status` as a function of the scheduler's and the servers' answers."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from ps_cli.console.json_text import json_text
from ps_cli.console.scheduler_query import ServerAnswer
from ps_cli.console.words import size, spans
from ps_cli.status.document import StatusDocument, status_document
from ps_cli.status.view import status_view
from ps_core.errors import Recovering
from ps_core.keys import TableId
from ps_core.tables.elements import DType as TableDType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster.wire import table_to_proto
from pushpull.v1 import parameters_pb2, scheduler_pb2, types_pb2


def node(node_id: int, role: types_pb2.NodeRole, rank: int = 0) -> types_pb2.Node:
    return types_pb2.Node(
        node_id=node_id,
        incarnation=100 + node_id,
        role=role,
        rank=rank,
        address=f"127.0.0.1:{5000 + node_id}" if role == types_pb2.NODE_ROLE_SERVER else "",
        state=types_pb2.NODE_STATE_ALIVE,
    )


def cluster() -> scheduler_pb2.GetClusterStatusResponse:
    """Two servers, one worker at clock 7 that waits, one table, six of eight ranges served."""
    nodes = [
        node(1, types_pb2.NODE_ROLE_SERVER),
        node(2, types_pb2.NODE_ROLE_SERVER),
        node(3, types_pb2.NODE_ROLE_WORKER, rank=0),
    ]
    spec = TableSpec(
        name="model",
        dtype=TableDType.FLOAT32,
        element_count=1000,
        optimizer=OptimizerSpec(OptimizerKind.ADAM),
        block_elements=64,
    ).validated()
    owners = [1, 1, 1, 2, 2, 1, 0, 0]
    view = types_pb2.ClusterView(
        view_number=9,
        cluster_id="c1",
        worker_count=2,
        server_count=2,
        nodes=nodes,
        ranges=[
            types_pb2.RangeAssignment(
                range_id=i,
                begin_slot=i * 8192,
                end_slot=(i + 1) * 8192,
                assignment_epoch=1,
                primary_node_id=owner,
            )
            for i, owner in enumerate(owners)
        ],
        tables=[table_to_proto(Table(TableId(1), 0, spec))],
    )
    said = scheduler_pb2.NodeProgress(
        tables=[scheduler_pb2.TableProgress(table_id=1, clock=7)],
        step_count=7,
        loss=0.5,
        lane="mixed",
        waiting_for="worker 1 (clock 6)",
    )
    statuses = [
        scheduler_pb2.NodeStatus(node=nodes[0], last_heard_ms=100),
        scheduler_pb2.NodeStatus(node=nodes[1], last_heard_ms=100),
        scheduler_pb2.NodeStatus(node=nodes[2], progress=said, last_heard_ms=250, view_number=9),
    ]
    return scheduler_pb2.GetClusterStatusResponse(view=view, nodes=statuses)


def stats(clock: int, **more: object) -> parameters_pb2.GetRangeStatsResponse:
    entry = parameters_pb2.RangeStats(
        range_id=3,
        table_id=1,
        assignment_epoch=1,
        clock=clock,
        block_count=8,
        state_bytes=6000,
        update_count=clock,
        initialized=True,
        **more,  # type: ignore[arg-type]
    )
    return parameters_pb2.GetRangeStatsResponse(ranges=[entry], gate_bytes=512)


def document(answers: dict[int, ServerAnswer]) -> StatusDocument:
    return status_document(cluster(), answers)


def test_spans_are_the_shortest_way_to_name_numbers() -> None:
    assert spans([7, 1, 2, 3, 9, 10]) == ["1-3", "7", "9-10"]
    assert spans([]) == []


def test_the_document_is_json_and_says_who_serves_what() -> None:
    made = document({1: stats(6), 2: stats(5)})
    assert json.loads(json.dumps(made)) == made
    assert made["unserved_ranges"] == ["6-7"]
    assert [(s["node_id"], s["ranges"], s["range_count"]) for s in made["servers"]] == [
        (1, ["0-2", "5"], 4),
        (2, ["3-4"], 2),
    ]
    assert made["servers"][0]["gate_bytes"] == 512


def test_a_node_that_has_ended_was_not_heard_just_now() -> None:
    answer = cluster()
    for state in (types_pb2.NODE_STATE_LEFT, types_pb2.NODE_STATE_GONE):
        answer.nodes[2].node.state = state
        answer.nodes[2].last_heard_ms = 0
        assert status_document(answer, {})["nodes"][2]["last_heard_s"] is None
        assert "s ago" not in shown(answer)


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    """A diverged run is what a program watches for, and NaN is no JSON."""
    answer = cluster()
    answer.nodes[2].progress.loss = math.nan
    made = status_document(answer, {})
    assert json.loads(json_text(made), parse_constant=pytest.fail)["nodes"][2]["loss"] is None
    assert "nan" in shown(answer)


def test_lost_ranges_are_the_first_thing_that_it_says() -> None:
    response = cluster()
    assert "lost:" not in shown(response)
    for number in (0, 1, 2):
        response.view.ranges[number].lost = True
    made = status_document(response, {})
    assert made["lost_ranges"] == ["0-2"]
    assert "lost: 3 of 8 key ranges are lost, with values of 'model'" in shown(response)
    assert "Restore a checkpoint" in shown(response)


def test_ranges_without_blocks_need_no_server() -> None:
    """A range without blocks has no primary: it reads as an outage, and is none."""
    response = cluster()
    del response.view.tables[:]
    assert status_document(response, {})["unserved_ranges"] == []


def test_a_tables_clock_is_that_of_its_last_range() -> None:
    (table,) = document({1: stats(6), 2: stats(5)})["tables"]
    assert (table["name"], table["clock"], table["update_count"]) == ("model", 5, 11)
    assert table["optimizer"] == "adam"
    assert table["hyperparameters"]["beta1"] == 0.9


def test_a_workers_clock_is_named_by_its_table() -> None:
    worker = document({})["nodes"][2]
    assert worker["rank"] == 0
    assert worker["clocks"] == {"model": 7}
    assert worker["last_heard_s"] == 0.25


def test_a_lane_is_said_by_those_who_use_one() -> None:
    made = document({})
    assert [entry["lane"] for entry in made["nodes"]] == [None, None, "mixed"]
    answer = cluster()
    answer.nodes[2].progress.lane = "[bold]made up"
    assert status_document(answer, {})["nodes"][2]["lane"] is None


def test_what_a_silent_server_would_have_said_is_unknown_not_zero() -> None:
    made = document({1: stats(6), 2: Recovering("connection refused")})
    assert made["servers"][1]["block_count"] is None
    assert made["servers"][1]["error"] == "connection refused"
    assert made["tables"][0]["clock"] is None


def test_waits_come_from_workers_and_ranges() -> None:
    made = document({1: stats(6, waits=["reader 9 waits for update 7 of worker 1"])})
    assert [(w["where"], w["table"]) for w in made["waits"]] == [
        ("worker 0", None),
        ("server 1, range 3", "model"),
    ]


def test_the_view_shows_roles_tables_and_waits() -> None:
    answers: dict[int, ServerAnswer] = {1: stats(6), 2: Recovering("connection refused")}
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(status_view(document(answers)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in (
        "servers 2 of 2",
        "workers 1 of 2",
        "4 (0-2, 5)",
        "connection refused",
        "model 7",
        "lane=mixed",
        "adam lr 0.001",
        "worker 0: worker 1 (clock 6)",
    ):
        assert expected in text


def test_a_silent_servers_reason_leaves_the_columns_their_width() -> None:
    reason = "UNAVAILABLE: failed to connect to all addresses; last error: " + "x" * 80
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(status_view(document({1: stats(6), 2: Recovering(reason)})))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "127.0.0.1:5002" in text
    assert f"server 2 does not answer: {reason}" in text.replace("\n", " ").replace("  ", " ")


def test_workers_beyond_the_first_are_counted_while_they_are_here() -> None:
    answer = cluster()
    for node_id, rank, state in (
        (11, 2, types_pb2.NODE_STATE_ALIVE),
        (12, 3, types_pb2.NODE_STATE_LEFT),
        (13, 4, types_pb2.NODE_STATE_SILENT),
    ):
        node = types_pb2.Node(
            node_id=node_id,
            incarnation=node_id,
            role=types_pb2.NODE_ROLE_WORKER,
            rank=rank,
            state=state,
        )
        answer.view.nodes.append(node)
        answer.nodes.append(scheduler_pb2.NodeStatus(node=node))
    made = status_document(answer, {})
    assert (made["worker_count"], made["world_size"]) == (2, 4)
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(status_view(made))
    assert "workers 2 of 4" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_that_has_failed_is_shown_with_the_reason() -> None:
    made = document({1: stats(6, failure="its update broke"), 2: stats(5)})
    assert made["tables"][0]["failure"] == "its update broke"
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(status_view(made))
    assert "5 (failed)" in console.file.getvalue()  # type: ignore[attr-defined]
    assert document({1: stats(6)})["tables"][0]["failure"] is None


def test_an_empty_cluster_has_a_view_too() -> None:
    view = types_pb2.ClusterView(view_number=1, cluster_id="c", worker_count=1, server_count=1)
    response = scheduler_pb2.GetClusterStatusResponse(view=view)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(status_view(status_document(response, {})))
    assert "nobody waits" in console.file.getvalue()  # type: ignore[attr-defined]


def test_sizes() -> None:
    assert [size(None), size(12), size(1536), size(3 << 30)] == ["?", "12 B", "1.5 KiB", "3.0 GiB"]


def replicated() -> scheduler_pb2.GetClusterStatusResponse:
    """The cluster with two replicas wanted: server 1 backs ranges 3 and 4 up, server 2 joins 0."""
    answer = cluster()
    answer.replica_count, answer.min_in_sync = 2, 2
    for range_id in (3, 4):
        answer.view.ranges[range_id].backup_node_ids.append(1)
    answer.view.ranges[0].catching_up_node_ids.append(2)
    return answer


def test_ranges_are_counted_by_their_living_replicas() -> None:
    made = status_document(replicated(), {1: stats(6), 2: stats(5)})
    assert (made["replica_count"], made["min_in_sync"]) == (2, 2)
    assert made["ranges_by_in_sync"] == {"1": 4, "2": 2}
    assert made["degraded_range_count"] == 4
    assert [
        (s["range_count"], s["backup_count"], s["catching_up_count"]) for s in made["servers"]
    ] == [
        (4, 2, 0),
        (2, 0, 1),
    ]
    dead = replicated()
    dead.view.nodes[0].state = types_pb2.NODE_STATE_SILENT
    made = status_document(dead, {})
    assert made["ranges_by_in_sync"] == {"0": 4, "1": 2}
    assert made["degraded_range_count"] == 6


def shown(answer: scheduler_pb2.GetClusterStatusResponse) -> str:
    made = status_document(answer, {1: stats(6), 2: stats(5)})
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(status_view(made))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_degraded_cluster_says_so_in_a_line() -> None:
    text = shown(replicated())
    assert "replicas 2 (at least 2 in sync)" in text
    assert "degraded: 4 ranges have fewer than 2 replicas; 4 take no pushes until 2 are in" in text
    assert "backs up" in text
    assert "0 +1 catching up" in text
    dead = replicated()
    dead.view.nodes[0].state = types_pb2.NODE_STATE_SILENT
    dead.min_in_sync = 1
    text = shown(dead)
    assert "degraded: 6 ranges have fewer than 2 replicas; 4 have no living replica" in text
    assert "waiting: 4 of 8 key ranges wait for server 1 at " in text
    assert "not heard for a lease, which alone has their values. Where it cannot come" in text
    for number in range(len(dead.view.ranges)):
        dead.view.ranges[number].lost = True
    assert "waiting:" not in shown(dead), "what is lost is told as that"


def test_a_whole_cluster_says_nothing_of_replicas() -> None:
    text = shown(cluster())
    assert "degraded" not in text
    assert "replicas" not in text
    assert "backs up" not in text


def test_a_dead_server_that_serves_nothing_makes_nothing_unknown() -> None:
    """Its ranges are others' now."""
    answer = cluster()
    answer.view.nodes[1].state = types_pb2.NODE_STATE_SILENT
    for assignment in answer.view.ranges:
        if assignment.primary_node_id == 2:
            assignment.primary_node_id = 1
    made = status_document(answer, {1: stats(6), 2: Recovering("connection refused")})
    assert made["tables"][0]["clock"] == 6


def test_checkpoints_that_are_complete_and_that_failed_have_a_row_each() -> None:
    response = cluster()
    assert status_document(response, {})["checkpoints"] is None
    response.checkpoints.url = "/runs/7"
    assert "checkpoints go to /runs/7; none is complete yet" in shown(response)
    response.checkpoints.unknown_before = True
    assert "none is complete since the scheduler was started again" in shown(response)
    response.checkpoints.unknown_before = False
    response.checkpoints.complete_count = 3
    response.checkpoints.complete_url = "/runs/7/00000003-c1"
    response.checkpoints.complete_ms = 65_000
    response.checkpoints.failed_count = 2
    response.checkpoints.failed_number = 5
    response.checkpoints.failed_reason = "server 1: no space left"
    response.checkpoints.failed_ms = 4_000
    document = status_document(response, {})
    assert document["checkpoints"] == {
        "url": "/runs/7",
        "complete_count": 3,
        "unknown_before": False,
        "failed_count": 2,
        "newest": "/runs/7/00000003-c1",
        "newest_age_s": 65.0,
        "failed_number": 5,
        "failure": "server 1: no space left",
        "failure_age_s": 4.0,
    }
    text = shown(response)
    assert "checkpoints 3 complete, the newest 1m05s ago: /runs/7/00000003-c1" in text
    assert "checkpoints 2 failed; checkpoint 5, 4s ago: server 1: no space left" in text


def test_values_that_another_clusters_server_keeps_have_a_row_with_the_remedy() -> None:
    response = cluster()
    assert status_document(response, {})["kept_values"] == []
    kept = response.kept_values.add(address="h:7", cluster_id="c0", last_heard_ms=1_500)
    text = " ".join(shown(response).split())
    assert "server at h:7 is none of this cluster's: it keeps the values of cluster c0" in text
    assert "stop it if they are not needed" in text
    kept.file = "/tmp/pushpull-server-1-x.json"  # noqa: S108 - shown, and not opened
    text = " ".join(shown(response).split())
    assert f"pushpull checkpoint rescue {kept.file} OUT.safetensors there, then stop it" in text
    assert status_document(response, {})["kept_values"] == [
        {"address": "h:7", "cluster_id": "c0", "file": kept.file, "last_heard_s": 1.5}
    ]


def test_each_data_set_has_a_line_about_its_present_pass() -> None:
    response = cluster()
    assert status_document(response, {})["data_sets"] == []
    data_set = scheduler_pb2.DataSet(name="train", sample_count=100, shard_size=20, seed=7)
    told = response.data_sets.add(
        data_set=data_set, pass_number=3, shard_count=5, done_count=2, leased_count=1
    )
    assert "data 'train': pass 3, 2 of 5 shards done, 1 leased\n" in shown(response)
    told.run, told.reissued_count = "nightly", 4
    line = "data 'train' of run 'nightly': pass 3, 2 of 5 shards done, 1 leased, 4 issued again\n"
    assert line in shown(response)
    assert status_document(response, {})["data_sets"] == [
        {
            "name": "train",
            "run": "nightly",
            "sample_count": 100,
            "shard_size": 20,
            "pass_number": 3,
            "shard_count": 5,
            "done_count": 2,
            "leased_count": 1,
            "reissued_count": 4,
        }
    ]
