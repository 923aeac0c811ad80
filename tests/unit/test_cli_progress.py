"""The progress of `pushpull train` as a function of status messages."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from ps_cli.console.progress import (
    RateWindow,
    duration,
    early_ends,
    live_view,
    outsiders,
    plain_lines,
    still_awaited,
    worker_samples,
)
from pushpull.v1 import scheduler_pb2, types_pb2

MEGABYTE = 1_000_000


def worker(
    rank: int, steps: int, moved_bytes: int = 0, last_heard_ms: int = 0, **said: object
) -> scheduler_pb2.NodeStatus:
    """What the scheduler says of one worker."""
    progress = scheduler_pb2.NodeProgress(
        tables=[
            scheduler_pb2.TableProgress(table_id=1, clock=steps),
            scheduler_pb2.TableProgress(table_id=2, clock=max(0, steps - 1)),
        ],
        step_count=steps,
        pushed_bytes=moved_bytes // 2,
        pulled_bytes=moved_bytes - moved_bytes // 2,
        **said,  # type: ignore[arg-type]
    )
    node = types_pb2.Node(
        node_id=10 + rank,
        role=types_pb2.NODE_ROLE_WORKER,
        rank=rank,
        state=types_pb2.NODE_STATE_ALIVE,
    )
    return scheduler_pb2.NodeStatus(node=node, progress=progress, last_heard_ms=last_heard_ms)


def message(*nodes: scheduler_pb2.NodeStatus) -> scheduler_pb2.GetClusterStatusResponse:
    server = scheduler_pb2.NodeStatus(
        node=types_pb2.Node(
            node_id=1, role=types_pb2.NODE_ROLE_SERVER, state=types_pb2.NODE_STATE_ALIVE
        )
    )
    return scheduler_pb2.GetClusterStatusResponse(nodes=[server, *nodes])


def rendered(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(view)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_workers_come_by_rank_and_other_roles_are_left_out() -> None:
    samples = worker_samples(message(worker(1, 5), worker(0, 7)), now_s=100.0)
    assert [(s.rank, s.step_count, s.clock) for s in samples] == [(0, 7, 7), (1, 5, 5)]


def test_of_those_that_had_one_rank_the_newest_is_shown_with_its_own_rates() -> None:
    window = RateWindow()
    for second in (0, 1, 2):
        dead, living = worker(1, 90, last_heard_ms=1000 * second), worker(1, 10 * second)
        dead.node.incarnation, living.node.incarnation = 3, 4
        window.observe(worker_samples(message(worker(0, 5), living, dead), now_s=100.0 + second))
    (_, row) = window.rows()
    assert (row.sample.step_count, row.steps_per_s) == (20, 10.0)


def test_a_report_is_dated_when_it_was_made_not_when_it_was_read() -> None:
    (sample,) = worker_samples(message(worker(0, 1, last_heard_ms=750)), now_s=100.0)
    assert sample.reported_at_s == pytest.approx(99.25)


def test_rates_are_differences_over_the_time_between_reports() -> None:
    window = RateWindow()
    window.observe(worker_samples(message(worker(0, 10, 4 * MEGABYTE, last_heard_ms=900)), 10.0))
    assert window.rows()[0].steps_per_s is None
    # Read 0.1 s later than the first message, but made two seconds after it.
    window.observe(worker_samples(message(worker(0, 30, 12 * MEGABYTE)), 11.1))
    (row,) = window.rows()
    assert row.steps_per_s == pytest.approx(10.0)
    assert row.bytes_per_s == pytest.approx(4 * MEGABYTE)


def test_a_resumed_run_has_no_rate_of_the_steps_before_it() -> None:
    window = RateWindow()
    joined = worker(0, 0)
    del joined.progress.tables[:]
    window.observe(worker_samples(message(joined), 10.0))
    window.observe(worker_samples(message(worker(0, 60_010, planned_step_count=90_000)), 11.0))
    assert (window.rows()[0].steps_per_s, window.rows()[0].left_s) == (None, None)
    window.observe(worker_samples(message(worker(0, 60_030, planned_step_count=90_000)), 13.0))
    assert window.rows()[0].steps_per_s == pytest.approx(10.0)


def test_reading_one_report_twice_does_not_lower_the_rate() -> None:
    window = RateWindow()
    window.observe(worker_samples(message(worker(0, 0)), 10.0))
    window.observe(worker_samples(message(worker(0, 20)), 11.0))
    window.observe(worker_samples(message(worker(0, 20, last_heard_ms=800)), 11.8))
    assert window.rows()[0].steps_per_s == pytest.approx(20.0)


def test_rates_forget_what_is_older_than_the_window() -> None:
    window = RateWindow()
    for second in range(30):
        steps = second * 100 if second < 15 else 1500
        window.observe(worker_samples(message(worker(0, steps)), float(second)))
    assert window.rows()[0].steps_per_s == 0


def test_a_worker_that_left_keeps_its_row() -> None:
    window = RateWindow()
    window.observe(worker_samples(message(worker(0, 4), worker(1, 5)), 1.0))
    window.observe(worker_samples(message(worker(0, 9)), 2.0))
    assert [row.sample.rank for row in window.rows()] == [0, 1]


def test_plain_lines_say_everything_without_escape_sequences() -> None:
    window = RateWindow()
    window.observe(worker_samples(message(worker(0, 0)), 0.0))
    window.observe(
        worker_samples(
            message(worker(0, 50, 500 * MEGABYTE, loss=0.25, planned_step_count=90, staleness=3)),
            1.0,
        )
    )
    (line,) = plain_lines(window.rows(), 65.0)
    assert line == (
        "[train 1m05s] worker 0: step 50 of 90, clock 50, 50.0 steps/s, 0s left, loss 0.2500, "
        "staleness 3, 500 MB/s"
    )


def test_plain_lines_name_whom_a_worker_waits_for() -> None:
    window = RateWindow()
    window.observe(worker_samples(message(worker(0, 3, waiting_for="worker 1 (clock 2)")), 0.0))
    assert plain_lines(window.rows(), 1.0)[0].endswith("waits for worker 1 (clock 2)")


def test_plain_lines_before_anybody_joined() -> None:
    assert plain_lines((), 3.2) == ["[train 3s] no worker has joined yet"]
    assert plain_lines((), 3.2, "waits for 1 server to join") == [
        "[train 3s] waits for 1 server to join"
    ]


def test_it_is_said_who_has_not_come_while_roles_start() -> None:
    nobody = scheduler_pb2.GetClusterStatusResponse()
    assert still_awaited(nobody, 2, 1) == "waits for 2 servers and 1 worker to join"
    some = message(worker(1, 0))  # and a server
    assert still_awaited(some, 1, 3) == "waits for 2 workers to join"
    assert still_awaited(some, 2, 1) == "waits for 1 server to join"
    assert still_awaited(some, 1, 1) == ""
    assert plain_lines(RateWindow().rows(), 1.0, "waits") == ["[train 1s] waits"]
    window = RateWindow()
    window.observe(worker_samples(some, 0.0))
    assert len(plain_lines(window.rows(), 1.0, "waits for 2 workers to join")) == 2


def test_how_long_the_rest_takes_is_said_where_the_steps_are_planned() -> None:
    window = RateWindow()
    for second, steps in enumerate((0, 50)):
        planned = worker(0, steps, planned_step_count=10_050)
        window.observe(worker_samples(message(planned, worker(1, steps)), float(second)))
    (first, second_line) = plain_lines(window.rows(), 1.0)
    assert "50.0 steps/s, 3m20s left, loss" in first
    assert "50.0 steps/s, loss" in second_line
    assert "3m20s" in rendered(live_view(window.rows(), 1.0, ""))
    left = worker(0, 60, planned_step_count=10_050)
    left.node.state = types_pb2.NODE_STATE_LEFT
    window.observe(worker_samples(message(left), 2.0))
    assert "left," not in plain_lines(window.rows(), 2.0)[0].split("loss")[0]


@pytest.mark.parametrize(
    ("bytes_per_s", "shown"),
    [(0, "0 B/s"), (999, "999 B/s"), (32_800, "32.8 KB/s"), (1.2e9, "1.20 GB/s"), (3e15, "3000 T")],
)
def test_rates_have_the_unit_that_suits_them(bytes_per_s: float, shown: str) -> None:
    window = RateWindow()
    for second in (0, 1):
        window.observe(worker_samples(message(worker(0, 1, int(second * bytes_per_s))), second))
    assert f", {shown}" in plain_lines(window.rows(), 1.0)[0]


def test_many_workers_share_one_line() -> None:
    window = RateWindow()
    window.observe(worker_samples(message(*(worker(r, 20 - r, loss=1.0) for r in range(9))), 0.0))
    (line,) = plain_lines(window.rows(), 10.0)
    assert "9 workers, clocks 12 to 20" in line
    assert line.endswith("slowest is worker 8")


def test_the_live_view_has_a_row_a_worker() -> None:
    window = RateWindow()
    window.observe(
        worker_samples(message(worker(0, 5, planned_step_count=10, loss=0.5), worker(1, 4)), 0.0)
    )
    text = rendered(live_view(window.rows(), 12.0, "(a note)"))
    assert "train 12s  (a note)" in text
    assert "0.5000" in text
    assert "4 steps" in text
    assert "━" in text


@pytest.mark.parametrize(
    ("elapsed_s", "shown"), [(0.4, "0s"), (59.9, "59s"), (125.0, "2m05s"), (3725.0, "1h02m")]
)
def test_durations(elapsed_s: float, shown: str) -> None:
    assert duration(elapsed_s) == shown


def test_a_worker_that_ended_before_its_steps_were_done_is_named() -> None:
    window = RateWindow()
    statuses = [worker(rank, 12 + rank, planned_step_count=12) for rank in range(4)]
    statuses[1].progress.step_count = 5
    statuses[2].progress.planned_step_count = 0
    for status, state in zip(statuses, ("LEFT", "LEFT", "GONE", "GONE"), strict=True):
        status.node.state = getattr(types_pb2, f"NODE_STATE_{state}")
    window.observe(worker_samples(message(*statuses), now_s=100.0))
    first, second = early_ends(window.rows(), cut_off={2})
    assert first == "worker 1 ended before its steps were done: it left after step 5 of 12"
    assert second == (
        "worker 2 ended before its steps were done: its process ended without leaving the cluster, "
        "last heard at step 14"
    )


def test_workers_whose_scripts_never_joined_are_named() -> None:
    assert outsiders({0, 1}, 2) == ""
    assert outsiders({1}, 3).startswith("worker 0, worker 2 never joined the cluster as a worker: ")
