"""A server that is told to stop does so at once, whoever waits on it."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import ps_worker as ps
from ps_runtime.clock import now_s
from ps_runtime.launcher import (
    READY_DEADLINE_S,
    ClusterShape,
    Launcher,
    start_scheduler,
    start_servers,
)

GRACE_S = 5.0  # drain_grace_s: a server that waited for its streams would take all of it


@pytest.mark.timeout(90)
def test_sigterm_ends_a_server_with_an_open_stream_and_a_parked_read() -> None:
    """A worker of two waits for the other; the server waits for neither."""
    shape = ClusterShape(server_count=1, worker_count=2)
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, shape, READY_DEADLINE_S)
        (server,) = start_servers(launcher, shape, scheduler.address)
        launcher.wait_ready(server)
        client = ps.connect(scheduler.address, rank=0)
        table = client.create_table("waits", 100, optimizer=ps.SGD(lr=0.1))
        step = client.push(table, np.ones(100, np.float32))
        read = client.pull(table, callback=lambda _: None)
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            client.wait(step, 0.5)
        told_s = now_s()
        server.send(signal.SIGTERM)
        ended = server.wait(20.0)
        took_s = now_s() - told_s
        with pytest.raises(ps.WaitExpired, match="server 1"):
            client.wait(read, 2.0)
        client.close(leave=False)
    assert ended is not None
    assert ended.how == "exit code 0"
    assert took_s < GRACE_S, took_s
