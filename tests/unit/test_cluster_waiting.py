"""A place that another node has: who asks for it at once is refused, who waits is told what for."""

from __future__ import annotations

from typing import Any

import pytest

from ps_core import errors
from ps_core.cluster_view import Role, Session
from tests.unit.cluster_harness import Harness, refused

TIMEOUT_S = 10.0


class Waiting(Harness):
    """One that asks again and again, for a place that `holder` has."""

    def ask(self, waited_s: float, role: Role = Role.WORKER, **fields: Any) -> Session:
        return self.join(role, waited_s=waited_s, **fields)

    def is_told_to_wait(self, waited_s: float, **fields: Any) -> str:
        before = self.cluster.view
        with pytest.raises(errors.Recovering) as told:
            self.ask(waited_s, **fields)
        assert self.cluster.view == before
        assert told.value.retry_after_ms == 1000
        return told.value.message


@pytest.fixture
def cluster() -> Waiting:
    return Waiting(worker_timeout_s=TIMEOUT_S, worker_count=1)


def test_the_rank_of_a_dead_worker_is_waited_for_until_it_is_gone(cluster: Waiting) -> None:
    dead = cluster.join(Role.WORKER)
    for waited_s in (0.0, 0.5, 2.0, 5.0, 10.0):
        cluster.pass_time(waited_s - (cluster.now_s - 100.0))
        for fields in ({}, {"requested_rank": 0}):
            message = cluster.is_told_to_wait(waited_s, **fields)
            assert "by worker node 1" in message
            assert "is given again after 10 s of silence (worker_timeout_s)" in message
    cluster.pass_time(0.5)
    successor = cluster.ask(10.5, requested_rank=0)
    assert (successor.rank, dead.rank) == (0, 0)


def test_a_living_holder_is_told_from_a_dead_one_by_its_next_heartbeats(cluster: Waiting) -> None:
    living = cluster.join(Role.WORKER)
    cluster.is_told_to_wait(0.0, requested_rank=0)
    cluster.pass_time(2, living)
    for fields in ({}, {"requested_rank": 0}):
        refused(
            errors.InvalidConfig,
            "worker node 1 (alive, rank 0, last heard 0.0 s ago)",
            by=lambda fields=fields: cluster.ask(2.0, **fields),  # type: ignore[misc]
            of=cluster,
        )


def test_a_last_heartbeat_that_was_on_its_way_proves_nothing(cluster: Waiting) -> None:
    dead = cluster.join(Role.WORKER)
    cluster.pass_time(0.5, dead)
    cluster.pass_time(3)
    cluster.is_told_to_wait(3.5, requested_rank=0)


@pytest.mark.parametrize("fields", [{}, {"requested_rank": 0}])
def test_nobody_waits_for_a_rank_that_is_never_free(fields: dict[str, Any]) -> None:
    patient = Waiting(worker_timeout_s=0.0, worker_count=1)
    patient.join(Role.WORKER)
    patient.pass_time(20)
    refused(errors.InvalidConfig, "(silent", by=lambda: patient.ask(0.0, **fields), of=patient)
    other = Waiting(worker_timeout_s=TIMEOUT_S, worker_count=1)
    other.leave(other.join(Role.WORKER))
    refused(errors.InvalidConfig, "(left", by=lambda: other.ask(0.0, **fields), of=other)


def test_a_server_waits_for_the_address_of_one_that_died(cluster: Waiting) -> None:
    cluster.join(Role.SERVER, address="h:70")
    message = cluster.is_told_to_wait(0.0, role=Role.SERVER, address="h:70")
    assert "which server node 1 at h:70 (alive, last heard 0.0 s ago) has already" in message
    assert "it is free when that one is silent" in message
    cluster.pass_time(3.5)
    assert cluster.ask(3.5, Role.SERVER, address="h:70").node_id == 2


def test_a_server_at_the_address_of_a_living_one_is_refused(cluster: Waiting) -> None:
    living = cluster.join(Role.SERVER, address="h:70")
    cluster.pass_time(2, living)
    refused(
        errors.InvalidConfig,
        "has already: stop that one, or give the address that others reach this one at "
        "(--advertise)",
        by=lambda: cluster.ask(2.0, Role.SERVER, address="h:70"),
        of=cluster,
    )
