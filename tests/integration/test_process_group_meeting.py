"""Workers that cannot make torch.distributed's process group, and one that ends meanwhile."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ps_worker as ps
from ps_worker.training.among_workers import meeting
from tests.integration.lane_cluster import lane_cluster
from tests.integration.ordered_workers import PATIENCE, Worker, begun_workers


def without_a_device(client: ps.Client) -> Any:
    """As on a machine where somebody has named another's device."""
    if client.rank == 1:
        os.environ[meeting.DEVICE] = "no-such"
    ps.HybridOptimizer.init_process_group(client)


@contextmanager
def two_workers(deadline_s: float) -> Iterator[list[Worker]]:
    with (
        lane_cluster(servers=1, workers=2, environment=PATIENCE) as cluster,
        begun_workers(cluster, "", without_a_device, 2, deadline_s) as found,
    ):
        for worker in found:
            worker.pipe.send("make")
        yield found


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it stays"])
def test_a_worker_that_does_not_meet_the_others_is_not_waited_for_by_gloo(ends: bool) -> None:
    """gloo would wait for half an hour, and keep the process from its end as well."""
    with two_workers(deadline_s=60.0 if ends else 4.0) as (first, other):
        kind, said = other.hear()
        assert kind == "InvalidConfig"
        assert "torch.distributed's workers do not reach each other" in said
        assert meeting.DEVICE in said
        if ends:
            other.pipe.send("leave")
        kind, said = first.hear()
        if ends:
            assert kind == "WorkerLost"
            assert said.startswith("worker 1 ")
        else:
            assert kind == "WaitExpired"
            assert "have not met within 4 s" in said
        first.pipe.send("leave")
        assert first.hear() == "left"
        first.process.join(20.0)
        assert first.process.exitcode == 0


def test_a_device_is_found_by_its_address() -> None:
    found = meeting.device_of("127.0.0.1")
    assert found in {name for _, name in socket.if_nameindex()}
    assert meeting.device_of("192.0.2.1") == ""
    assert meeting.device_of("2001:db8::1") == ""


def test_the_own_address_is_that_on_the_way_to_a_scheduler_that_has_one() -> None:
    assert meeting.own_host(("no-such-host.invalid:1", "127.0.0.1:0")) == "127.0.0.1"
    with pytest.raises(ps.InvalidConfig, match="the way to the scheduler at unix:/tmp/it"):
        meeting.own_host(("unix:/tmp/it",))
