"""`python -m ps_worker SCRIPT`: a script as one worker, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import ps_worker as ps

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0

TRAINS = """
    import sys
    import numpy as np
    import ps_worker as ps
    import beside

    client = ps.connect()
    table = client.create_table("w", 10, optimizer=ps.SGD(lr=1.0))
    for _ in range(int(sys.argv[1])):
        client.push_pull(table, np.ones(10, np.float32))
    print("trained", client.rank, sys.argv[1:], beside.__name__, __name__, flush=True)
"""


@pytest.fixture
def cluster() -> Iterator[ps.LocalCluster]:
    with ps.local_cluster(servers=1, workers=2) as cluster:
        yield cluster


class Scripts:
    """Scripts in a folder of their own, run as workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        (folder / "beside.py").write_text("")

    def start(
        self,
        text: str,
        *arguments: str,
        cluster: ps.LocalCluster | None = None,
        by: Sequence[str] = ("-m", "ps_worker"),
        **env: str,
    ) -> subprocess.Popen[str]:
        script = self._folder / f"script{len(list(self._folder.iterdir()))}.py"
        script.write_text(textwrap.dedent(text))
        paths = [str(ROOT), str(ROOT / "protos")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env}
        if cluster is not None:
            environment["PUSHPULL_SCHEDULER"] = cluster.address
        process = subprocess.Popen(
            [sys.executable, *by, str(script), *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def stop(self) -> None:
        """End what a test left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def run(self, text: str, **env: str) -> tuple[int, str, str]:
        process = self.start(text, cluster=None, **env)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    scripts = Scripts(tmp_path)
    yield scripts
    scripts.stop()


def test_a_script_that_ends_normally_leaves(cluster: ps.LocalCluster, scripts: Scripts) -> None:
    short = scripts.start(
        TRAINS, "2", "--lr=1", cluster=cluster, PUSHPULL_RANK="1", PUSHPULL_LOG_LEVEL="info"
    )
    with ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as client:
        table = client.create_table("w", 10, optimizer=ps.SGD(lr=1.0))
        for clock in range(1, 6):  # uneven data: the script's end does not end this one
            found = client.push_pull(table, np.ones(10, np.float32))
            assert np.all(np.asarray(found) == -clock)
    out, err = short.communicate(timeout=DEADLINE_S)
    assert short.returncode == 0, err
    events = re.findall(r"event=((?:script|worker)_\S+(?: rank.*)?)", err)
    assert events == ["script_begins", "worker_joined rank=1 workers=2", "script_ended"]
    assert re.search(r"event=script_ended .*status=0$", err, re.MULTILINE)
    assert out == "trained 1 ['2', '--lr=1'] beside __main__\n"


def test_a_script_that_fails_is_gone_at_once(cluster: ps.LocalCluster, scripts: Scripts) -> None:
    failing = scripts.start(
        TRAINS + "    raise ValueError('on purpose')\n", "1", cluster=cluster, PUSHPULL_RANK="1"
    )
    client = ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S)
    table = client.create_table("w", 10, optimizer=ps.SGD(lr=1.0))
    client.push_pull(table, np.ones(10, np.float32))
    _, err = failing.communicate(timeout=DEADLINE_S)
    assert failing.returncode == 1
    assert err.startswith('Traceback (most recent call last):\n  File "')
    assert err.endswith("ValueError: on purpose\n")
    assert "runpy" not in err
    client.push_pull(table, np.ones(10, np.float32))  # waits for nobody's silence
    client.close()


def test_a_worker_that_is_told_to_stop_stops(cluster: ps.LocalCluster, scripts: Scripts) -> None:
    ready = """
        import ps_worker as ps
        client = ps.connect()
        table = client.create_table("w", 10, optimizer=ps.SGD(lr=1.0))
        print("waiting", flush=True)
        client.push_pull(table, [1.0] * 10)
    """
    process = scripts.start(ready, cluster=cluster)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    successor = ps.connect(cluster.address, rank=0, connect_deadline_s=5.0)  # it is gone at once
    successor.close(leave=False)


def test_a_worker_process_shows_metrics_and_health(scripts: Scripts, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    process = scripts.start(
        "print('running', flush=True)\ninput()\n", PUSHPULL_READY_FILE=str(ready_file)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    address = json.loads(ready_file.read_text())["http_address"]
    for path, expected in (("metrics", "pushpull_worker_pushed_bytes_total 0.0"), ("healthz", "")):
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=5.0) as answer:
            assert answer.status == 200
            assert expected in answer.read().decode()
    process.terminate()
    process.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('no luck')", 1, "no luck\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_an_exit_status_is_the_scripts(scripts: Scripts, text: str, status: int, says: str) -> None:
    assert scripts.run(text) == (status, "", says)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_script_cuts_nothing_off(scripts: Scripts, number: int) -> None:
    """The process ends anyway: what runs at its exit said that SystemExit was ignored."""
    text = f"""
        import atexit, os

        def end():
            os.kill(os.getpid(), {int(number)})
            print("at the exit", flush=True)

        atexit.register(end)
    """
    assert scripts.run(text) == (0, "at the exit\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_after_the_script_ends_it(scripts: Scripts, number: int) -> None:
    """What a script has for its exit, such as an upload of its logs, may hang."""
    text = f"""
        import atexit, os, threading

        def end():
            os.kill(os.getpid(), {int(number)})
            print("hangs", flush=True)
            threading.Event().wait()

        atexit.register(end)
    """
    process = scripts.start(text)
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(number)
    try:
        assert process.communicate(timeout=DEADLINE_S) == ("", "")
    finally:
        process.kill()
    assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_script_s_threads_that_go_on(scripts: Scripts, number: int) -> None:
    text = """
        import threading

        def go_on():
            threading.main_thread().join()  # until the interpreter waits for this thread
            print("alone", flush=True)
            threading.Event().wait()

        threading.Thread(target=go_on).start()
    """
    process = scripts.start(text)
    assert process.stdout is not None
    assert process.stdout.readline() == "alone\n"
    while process.poll() is None:  # in the moment before the interpreter waits one is not seen
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
    assert process.communicate(timeout=DEADLINE_S) == ("", "")
    assert process.returncode == 128 + number


def test_wrong_usage_is_explained(scripts: Scripts) -> None:
    status, _, err = scripts.run("", PUSHPULL_WINDOW_BYTE="1")
    assert status == 2
    assert "PUSHPULL_WINDOW_BYTE is unknown; did you mean PUSHPULL_WINDOW_BYTES?" in err


def test_a_script_that_cannot_be_compiled_is_shown_without_frames_of_ours(scripts: Scripts) -> None:
    status, _, err = scripts.run("x = (1\n")
    assert status == 1
    first, *_, last = err.splitlines()
    assert re.fullmatch(r'  File ".*/script\d\.py", line 1', first)
    assert last == "SyntaxError: '(' was never closed"


def test_the_collector_passes_by_what_the_import_of_torch_made(scripts: Scripts) -> None:
    text = """
        import gc
        before = gc.get_freeze_count()
        import torch
        print(gc.isenabled(), gc.get_freeze_count() - before > 100_000, gc.collect() < 100_000)
    """
    assert scripts.run(text) == (0, "True True True\n", "")


def test_a_cluster_that_cannot_be_joined_is_told_in_a_line(scripts: Scripts) -> None:
    with ps.local_cluster(servers=1, workers=2) as cluster:
        here = {"PUSHPULL_SCHEDULER": cluster.address}
        for env, expected in (
            ({**here, "PUSHPULL_RANK": "9"}, "requested_rank is 9; the cluster was started for 2"),
            ({**here, "PUSHPULL_CLUSTER_ID": "other"}, "the request names cluster 'other'"),
            (
                {**here, "PUSHPULL_JOIN_SECRET": "not the cluster's"},
                "the join secret of this worke",
            ),
            ({"PUSHPULL_SCHEDULER": "localhost"}, "expected host:port, such as localhost:"),
        ):
            status, out, err = scripts.run(TRAINS, **env)
            assert (status, out) == (2, "")
            (line,) = err.splitlines()
            assert "script" in line
            assert "line 7: this worker cannot join: " in line
            assert expected in line


SERVES = """
    import ps_worker as ps

    with ps.connect() as client:
        print(client.http_address, flush=True)
        input()
"""


@pytest.mark.parametrize("by", [(), ("-m", "ps_worker")], ids=["plain", "as a module"])
def test_a_script_serves_metrics_where_it_is_told(
    cluster: ps.LocalCluster, scripts: Scripts, by: tuple[str, ...]
) -> None:
    """Also one that was started as any other, without `python -m ps_worker`."""
    script = scripts.start(SERVES, cluster=cluster, by=by, PUSHPULL_HTTP_LISTEN="127.0.0.1:0")
    assert script.stdout is not None
    address = script.stdout.readline().strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S) as answer:
        assert "pushpull_worker_pushed_bytes_total" in answer.read().decode()
    with urllib.request.urlopen(f"http://{address}/healthz", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    _, err = script.communicate("\n", timeout=DEADLINE_S)
    assert script.returncode == 0
    assert "Traceback" not in err


def test_the_clients_of_a_process_share_a_port_and_the_last_closes_it(
    cluster: ps.LocalCluster,
) -> None:
    first, second = (ps.connect(cluster.address, http_listen="127.0.0.1:0") for _ in range(2))
    address = first.http_address
    assert address
    assert second.http_address == address
    with ps.connect(cluster.address, role="reader") as silent:
        assert silent.http_address == ""
    first.close()
    urllib.request.urlopen(f"http://{address}/healthz", timeout=DEADLINE_S).close()
    second.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/healthz", timeout=DEADLINE_S)


def test_a_port_that_cannot_be_bound_is_logged_and_training_goes_on(
    cluster: ps.LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with ps.connect(cluster.address, http_listen="127.0.0.1:0") as client:
        assert client.http_address != cluster.address
    with ps.connect(cluster.address, http_listen=cluster.address) as client:
        assert client.http_address == ""
        assert "metrics_are_not_served" in caplog.text
