"""The small parts of the edge: addresses, log lines, waits, metrics, ready file, clock."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ps_core import errors as tree
from ps_runtime.grpc.addresses import (
    advertised,
    join_address,
    reachable,
    split_address,
    warn_of_loopback,
)
from ps_runtime.grpc.retry import Backoff, is_retryable
from ps_runtime.launch.launcher import Launcher, reason_of
from ps_runtime.launch.ready_file import write_ready_file
from ps_runtime.observe import logs, metrics
from ps_runtime.system import clock
from tests.file_limits import no_file_above


@pytest.fixture
def pushpull_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(logs.LOGGER_NAME)
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("server-0.servers:7000", ("server-0.servers", 7000)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses_split_and_join(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address, "listen") == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "host", ":7", "host:", "host:x", "h:65536", "::1:7", "h:²"]
)
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(tree.InvalidConfig, match=f"listen is '{address}'; expected host:port"):
        split_address(address, "listen")


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        (None, "127.0.0.1:7000"),
        ("", "127.0.0.1:7000"),
        ("server-0", "server-0:7000"),
        ("server-0:0", "server-0:7000"),
        ("server-0:9", "server-0:9"),
        ("[::1]", "[::1]:7000"),
    ],
)
def test_what_is_advertised(advertise: str | None, expected: str) -> None:
    assert advertised(advertise, "127.0.0.1", 7000) == expected


def test_a_wildcard_is_bound_but_never_advertised() -> None:
    host, port = split_address(advertised(None, "0.0.0.0", 7000), "advertised")  # noqa: S104
    assert host != "0.0.0.0"  # noqa: S104
    assert port == 7000
    with pytest.raises(tree.InvalidConfig, match="expected a host that others can reach"):
        advertised("[::]:1", "127.0.0.1", 7000)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        (["2001:db8::7", "10.0.0.7"], "10.0.0.7"),
        (["fe80::1%eth0", "::1", "2001:db8::7"], "2001:db8::7"),
        (["127.0.1.1", "2001:db8::7"], "2001:db8::7"),
        (["fe80::1%eth0", "::1"], "::1"),
        ([], "127.0.0.1"),
    ],
)
def test_the_address_of_this_machine_is_one_that_others_reach(
    found: list[str], expected: str
) -> None:
    assert reachable(found) == expected


@pytest.mark.parametrize(
    ("own", "listen", "scheduler", "warns"),
    [
        ("127.0.0.1:9", "127.0.0.1:0", "10.0.0.1:9", True),
        ("[::1]:9", "[::1]:0", "sched:9", True),
        ("localhost:9", "[fd00::1]:0", "[fd00::1]:9", True),
        ("127.0.0.1:9", "127.0.0.1:0", "localhost:9", False),
        ("127.0.0.1:9", "127.0.0.1:0", "[::1]:9", False),
        ("127.0.1.1:9", "0.0.0.0:0", "10.0.0.1:9", False),  # said when it was derived
        ("10.0.0.2:9", "127.0.0.1:0", "10.0.0.1:9", False),
    ],
)
def test_a_role_that_only_its_machine_reaches_says_so(
    pushpull_logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    own: str,
    listen: str,
    scheduler: str,
    warns: bool,
) -> None:
    logs.configure("server", "info")
    warn_of_loopback(own, listen, [scheduler])
    assert pushpull_logger.name == "pushpull"
    said = "event=advertised_address_is_loopback" in capsys.readouterr().err
    assert said is warns


def test_a_log_line_has_time_level_role_and_quoted_values(
    pushpull_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("server", "info")
    logs.configure("server", "info")  # a second time adds no second line
    logs.debug("unseen")
    logs.info("registered", node_id=3, why='a "b"\nc', empty="", took_s=1.23456)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    stamp, rest = lines[0].split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == (
        'info server event=registered node_id=3 why="a \\"b\\"\\nc" empty="" took_s=1.235'
    )
    assert pushpull_logger.name == "pushpull"


def test_a_failure_is_logged_with_its_traceback(
    pushpull_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("server", "error")
    try:
        raise ZeroDivisionError("of ours")
    except ZeroDivisionError as failure:
        logs.exception("call_failed", failure, method="Push")
    text = capsys.readouterr().err
    assert "event=call_failed method=Push\nTraceback" in text
    assert text.endswith("ZeroDivisionError: of ours\n")
    assert pushpull_logger.level == logging.ERROR


@given(
    event=st.text(min_size=1, max_size=20),
    fields=st.dictionaries(
        st.sampled_from(("message", "error", "reason", "url")),
        st.text(max_size=40),
    ),
)
def test_what_a_line_has_can_be_read_from_it(event: str, fields: dict[str, str]) -> None:
    assert logs.fields_of(f"time error server {logs.line(event, dict(fields))}") == {
        "event": event,
        **fields,
    }


def test_a_line_in_json_is_one_object_with_numbers_as_numbers_and_a_traceback_as_a_field(
    pushpull_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("server", "info", "json")
    logs.info("registered", node_id=3, why='a "b"\nc', took_s=1.23456, left_s=math.inf)
    try:
        raise ZeroDivisionError("of ours")
    except ZeroDivisionError as failure:
        logs.exception("call_failed", failure, reason="it is 0")
    pushpull_logger.warning("somebody else's line")
    lines = capsys.readouterr().err.splitlines()
    said = [json.loads(line) for line in lines]
    assert all(each.pop("time").endswith("Z") for each in said)
    assert said[0] == {
        "level": "info", "process": "server", "event": "registered",
        "node_id": 3, "why": 'a "b"\nc', "took_s": 1.235, "left_s": "inf",
    }  # fmt: skip
    assert said[1].pop("traceback").endswith("ZeroDivisionError: of ours")
    assert said[1] == {
        "level": "error",
        "process": "server",
        "event": "call_failed",
        "reason": "it is 0",
    }
    assert said[2]["message"] == "somebody else's line"
    assert [logs.is_error(line) for line in lines] == [False, True, False]
    assert logs.fields_of(lines[1])["reason"] == "it is 0"
    assert reason_of(lines) == "it is 0"


def test_what_is_no_log_line_has_no_fields() -> None:
    assert logs.fields_of("Traceback (most recent call last):") == {}
    assert logs.fields_of("a script's own line, with key=value") == {}
    assert logs.fields_of('{"a script\'s": "own line"}') == logs.fields_of("{}}") == {}


def test_a_long_value_is_cut_and_a_wrong_level_named() -> None:
    assert len(logs.line("x", {"value": "y" * 10_000})) < logs.MAX_VALUE_CHARACTERS + 100
    with pytest.raises(tree.InvalidConfig, match="log level is 'loud'; expected one of debug"):
        logs.configure("server", "loud")
    with pytest.raises(tree.InvalidConfig, match="log format is 'xml'; expected one of text, json"):
        logs.configure("server", "info", "xml")


@given(st.integers(1, 40))
def test_waits_stay_under_a_bound_that_doubles(attempts: int) -> None:
    backoff = Backoff(last_bound_s=3.0)
    for attempt in range(attempts):
        assert 0.0 <= backoff.next_s() <= min(0.05 * 2**attempt, 3.0)
    backoff.reset()
    assert backoff.next_s() <= 0.05


def test_a_wait_is_at_least_what_the_error_asks_for() -> None:
    asked = tree.Draining("goes", retry_after_ms=5_000)
    assert 5.0 <= Backoff().next_s(asked) <= 5.05


def test_which_errors_a_retry_may_cure() -> None:
    curable = {kind for kind in tree.CATALOGUE.values() if is_retryable(kind("x"))}
    assert curable == {tree.Recovering, tree.Draining, tree.Overloaded}


def test_all_metrics_live_in_one_registry_and_have_pushpull_names_and_help() -> None:
    registry = metrics.new_registry()
    node = metrics.NodeMetrics(registry)
    node.watch(lambda: 12, lambda: 0.5)
    metrics.SchedulerMetrics(registry)
    metrics.ServerMetrics(registry).push_duration_seconds.observe(0.003)
    metrics.WorkerMetrics(registry)
    text = generate_latest(registry).decode()
    assert "pushpull_node_view_number 12.0" in text
    assert 'pushpull_server_push_duration_seconds_bucket{le="0.005"} 1.0' in text
    ours = [m for m in registry.collect() if not m.name.startswith(("python_", "process_"))]
    assert len(ours) > 20
    assert all(m.name.startswith("pushpull_") and m.documentation.endswith(".") for m in ours)


def test_a_loop_counter_shows_what_a_counter_shows() -> None:
    texts = []
    for kind in (metrics.LoopCounter, Counter):
        registry = CollectorRegistry()
        counter = kind("waits_total", "Waits.", registry=registry)
        counter.inc()
        counter.inc(41)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line])
    assert texts[0] == texts[1]
    assert "waits_total 42.0" in texts[0]


def test_a_loop_counter_can_show_what_another_counts() -> None:
    registry = CollectorRegistry()
    counter = metrics.LoopCounter("waits_total", "Waits.", registry=registry)
    counter.set_function(lambda: 7)
    assert counter.count == 7
    assert "waits_total 7.0" in generate_latest(registry).decode()


def test_a_loop_histogram_shows_what_a_histogram_shows() -> None:
    texts = []
    for kind in (metrics.LoopHistogram, Histogram):
        registry = CollectorRegistry()
        histogram = kind("waits_seconds", "Waits.", buckets=(0, 0.5, 2), registry=registry)
        for value in (0, 0.25, 0.5, 0.75, 7):
            histogram.observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line])
    assert texts[0] == texts[1]


def test_the_ready_file_appears_whole_and_alone(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text("of a former run")
    write_ready_file(file, "127.0.0.1:1", "127.0.0.1:2")
    content = json.loads(file.read_text())
    assert content == {"address": "127.0.0.1:1", "http_address": "127.0.0.1:2"}
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(tree.InvalidConfig, match="cannot be written: No such file"):
        write_ready_file(tmp_path / "absent" / "ready.json", "a:1", "a:2")
    with pytest.raises(tree.InvalidConfig, match="cannot be written: Not a directory"):
        write_ready_file(file / "ready.json", "a:1", "a:2")
    # A full disk is no wrong setting: whoever is started again may find space.
    with (
        no_file_above(8),
        pytest.raises(tree.Recovering, match="cannot be written: File too large"),
    ):
        write_ready_file(file, "a:1", "a:2")
    assert json.loads(file.read_text()) == content


def test_a_launchers_directory_is_locked_until_it_stops() -> None:
    """systemd-tmpfiles removes what is old in /tmp, and asks for this lock first."""
    with Launcher() as launcher:
        directory = launcher.journal_directory.parent
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            launcher.stop()
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    assert not directory.exists()


def test_the_clock_never_goes_back() -> None:
    readings = [clock.now_s() for _ in range(1_000)]
    assert readings == sorted(readings)
