"""Runs in groups (`aggregate_within`) that a worker leaves, is late in, or is interrupted in."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_core.errors import JoinRefused
from tests.integration.group_jobs import Attempts, Trainer
from tests.integration.lane_cluster import LaneCluster, lane_cluster
from tests.integration.ordered_workers import (
    PATIENCE,
    REMEDY,
    Worker,
    begun,
    ordered_workers,
    stepped,
)
from tests.integration.training_models import differing

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]

GROUPS = "a", "b", "b", "a"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=1, workers=len(GROUPS), environment=PATIENCE) as cluster:
        yield cluster


def workers(
    cluster: LaneCluster, run: str, deadline_s: float = 60.0, groups: tuple[str, ...] = GROUPS
) -> AbstractContextManager[list[Worker]]:
    """All workers of a run."""
    make = partial(Trainer, name="model", groups=groups)
    return ordered_workers(cluster, run, make, len(groups), deadline_s)


def join(cluster: LaneCluster) -> None:
    with ps.connect(cluster.address, run="failed", rank=1) as client:
        model, sgd = nn.Linear(2, 2), ps.SGD(lr=0.1)
        ps.DistributedOptimizer(client, model, sgd, name="model", aggregate_within="b")


def check_next_steps(member: Worker, *others: Worker) -> None:
    """The member leaves; the others, in other groups, end their step, and not the next one."""
    member.pipe.send("leave")
    assert member.hear() == "left"
    assert [worker.hear() for worker in others] == [2] * len(others)
    for worker in others:
        begun(worker)
        kind, said = worker.hear()
        assert kind == "WorkerLost"
        assert "worker 1 was declared gone: its process has ended" in said


def test_a_member_whose_script_fails_is_named_at_all_others(cluster: LaneCluster) -> None:
    """Those of its group hear of it in the step that they have begun, others in the next."""
    with workers(cluster, "failed") as (first, victim, member, second):
        for worker in (first, member, second):
            begun(worker)
        victim.pipe.send("fail")
        kind, said = member.hear()
        assert kind == "WorkerLost"
        assert said.startswith("worker 1 was declared gone: its process has ended")
        assert REMEDY in said
        check_next_steps(member, first, second)
        with pytest.raises(JoinRefused, match="worker 1 joins others that train"):
            join(cluster)


def test_a_worker_that_is_alone_in_its_group_hears_of_it_too(cluster: LaneCluster) -> None:
    with workers(cluster, "alone", groups=("a", "b", "b", "c")) as (first, victim, member, second):
        for worker in (first, member, second):
            begun(worker)
        victim.pipe.send("fail")
        assert member.hear()[0] == "WorkerLost"
        check_next_steps(member, first, second)


def test_settings_that_change_while_members_reduce_are_of_the_next_step(
    cluster: LaneCluster,
) -> None:
    """The schedules of all but one go on, which has not come to the step yet."""
    with workers(cluster, "meanwhile", deadline_s=5.0) as (*waiting, late):
        for worker in waiting:
            begun(worker)
        for worker in waiting:
            assert worker.hear()[0] == "WaitExpired"
            worker.pipe.send("change")
            assert worker.hear() == "changed"
        late.pipe.send("step")
        assert late.hear() == "begins"
        for worker in waiting:
            worker.pipe.send("wait on")
            assert worker.hear() == "begins"
        assert [worker.hear() for worker in (*waiting, late)] == [2] * len(GROUPS)
        late.pipe.send("change")
        assert late.hear() == "changed"
        assert stepped([*waiting, late]) == [3] * len(GROUPS)
        for worker in (*waiting, late):
            worker.pipe.send("values")
        values, *others = [worker.hear() for worker in (*waiting, late)]
        assert [differing(values, each) for each in others] == [[]] * len(others)


def test_a_leader_that_is_killed_ends_the_step_of_its_group(cluster: LaneCluster) -> None:
    with workers(cluster, "killed") as (first, victim, member, second):
        for worker in (first, member, second):
            begun(worker)
        victim.signal(signal.SIGKILL)
        kind, said = member.hear()
        assert kind == "WorkerLost"
        assert REMEDY in said
        member.pipe.send("fail")
        assert [first.hear(), second.hear()] == [2, 2]
        for worker in (first, second):
            begun(worker)
            kind, said = worker.hear()
            assert kind == "WorkerLost"
            assert "worker 1 was declared gone after" in said


def test_a_step_that_is_waited_for_in_vain_or_interrupted_is_taken_by_the_next_call(
    cluster: LaneCluster,
) -> None:
    with workers(cluster, "late", deadline_s=5.0) as found:
        first, *others, late = found
        for worker in (first, *others):
            begun(worker)
        for worker in (first, *others):
            kind, said = worker.hear()
            assert kind == "WaitExpired", said
        first.pipe.send("wait on")
        assert first.hear() == "begins"
        first.signal(signal.SIGINT)
        kind, _ = first.hear()
        assert kind == "KeyboardInterrupt"
        begun(late)
        for worker in (first, *others):
            worker.pipe.send("wait on")
            assert worker.hear() == "begins"
        assert [worker.hear() for worker in found] == [2] * len(found)
        begun(first)
        kind, said = first.hear()
        assert kind == "WaitExpired"
        assert "worker 3 of this group has not come to this step within 5 s" in said
        for worker in (*others, late):
            begun(worker)
        begun(first)  # whose zero_grad ends the step that it has begun
        assert [worker.hear() for worker in (*others, late)] == [3] * (len(found) - 1)
        for worker in (*others, late):
            begun(worker)
        assert [worker.hear() for worker in found] == [3, 4, 4, 4]
        for worker in found:
            worker.pipe.send("values")
        values = [worker.hear() for worker in found]
        assert [differing(each, values[0]) for each in values] == [[]] * len(found)
        assert stepped(found) == [4, 5, 5, 5]


def test_a_step_that_the_members_have_agreed_on_keeps_its_gradients(cluster: LaneCluster) -> None:
    """Those of group "a" wait for the late worker's edit when they have reduced; their scripts then
    compute other gradients, without the optimizer.
    """
    make = partial(Attempts, name="model", groups=GROUPS, is_hooked=True, edited=8.0)
    with ordered_workers(cluster, "agreed", make, len(GROUPS), 5.0) as found:
        first, _late, *others = found
        words = [
            "worker 1",
            "worker 1 of this group has not come to this step within 5 s",
            "worker 0, which pulls for this group, has not given the values within 5 s",
        ]
        for worker in (first, *others):
            begun(worker)
        for worker, missing in zip((first, *others), words, strict=True):
            kind, said = worker.hear()
            assert kind == "WaitExpired", said
            assert missing in said
        for worker in found:
            begun(worker)
        assert [worker.hear() for worker in found] == [2] * len(found)
        for worker in found:
            worker.pipe.send("values")
            assert torch.equal(worker.hear()["values"], torch.full((64,), 8.0 - 250.0))


def test_gradients_that_are_written_before_the_members_have_reduced_are_refused(
    cluster: LaneCluster,
) -> None:
    """Those of the step that has begun count, though no hook tells of the others."""
    make = partial(Attempts, name="model", groups=GROUPS, is_hooked=False)
    with ordered_workers(cluster, "written", make, len(GROUPS), 5.0) as found:
        first, late, member, last = found
        for worker in (first, member, last):
            begun(worker)
        for worker in (first, member, last):
            assert worker.hear()[0] == "WaitExpired"
        begun(member)
        kind, said = member.hear()
        assert kind == "InvalidConfig"
        assert "before the last step has ended" in said
        begun(late)
        for worker in (first, member, last):
            worker.pipe.send("wait on")
            assert worker.hear() == "begins"
        assert [worker.hear() for worker in found] == [2] * len(found)
        for worker in found:
            worker.pipe.send("values")
            assert torch.equal(worker.hear()["values"], torch.full((64,), -25.0 - 250.0))
