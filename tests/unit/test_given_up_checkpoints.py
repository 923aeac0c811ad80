"""What the scheduler leaves of a checkpoint that came to nothing: no file."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import Role
from ps_core.errors import Fenced
from ps_core.keys import NodeId
from ps_runtime.observe.metrics import SchedulerMetrics
from pushpull.v1 import scheduler_pb2
from scheduler.edge.checkpointing import Checkpointing
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.checkpoint_state import (
    Attempt,
    CheckpointBegunAgain,
    CheckpointFailed,
    CheckpointMade,
    CheckpointWritten,
)
from scheduler.machine.cluster import Cluster, Decision
from tests.unit.cluster_harness import Harness

LATE = "server-1-1.safetensors"


def edge(cluster: Cluster, given_up: Sequence[str] = ()) -> Checkpointing:
    metrics = SchedulerMetrics(CollectorRegistry())
    return Checkpointing(cluster, CheckpointPolicy(), lambda it: it.reply, metrics, given_up)


async def removals() -> None:
    """All that was begun has ended."""
    own = asyncio.current_task()
    await asyncio.wait([task for task in asyncio.all_tasks() if task is not own])


@pytest.mark.parametrize("is_begun_again", [False, True])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_is_written_late_into_its_directory_goes_too(
    tmp_path: Path, is_begun_again: bool, is_stopped: bool
) -> None:
    """A server that has not heard that it was given up makes its file after it was removed."""
    given_up = tmp_path / "00000001-c"
    came_to: Any = (
        CheckpointBegunAgain(1, str(given_up), 2)
        if is_begun_again
        else CheckpointFailed(1, str(given_up), "a server was lost while it was made")
    )

    async def live() -> None:
        checkpointing = edge(Harness(checkpoint_url=str(tmp_path)).cluster)
        given_up.mkdir()
        checkpointing.published(came_to, 0.0)
        await removals()
        given_up.mkdir()
        (given_up / LATE).write_bytes(b"late")
        if is_stopped:
            await checkpointing.close(goes_on=False)
        else:
            checkpointing.published(CheckpointMade(2, f"{tmp_path}/00000002-c"), 1.0)
            await removals()
        assert not given_up.exists()

    asyncio.run(live())


def test_whatever_keeps_its_manifest_from_being_made_is_the_failure_of_this_one_alone(
    tmp_path: Path,
) -> None:
    harness = Harness(checkpoint_url=str(tmp_path), server_count=1, worker_count=1)
    harness.join(Role.SERVER)
    worker = harness.join(Role.WORKER)
    harness.create(worker)

    async def live() -> None:
        def carry_out(decision: Decision[Any]) -> Any:
            for transition in decision.transitions:
                checkpointing.published(transition, harness.now_s)
            return decision.reply

        checkpointing = Checkpointing(
            harness.cluster,
            CheckpointPolicy(),
            carry_out,
            SchedulerMetrics(CollectorRegistry()),
        )
        number = carry_out(harness.cluster.begin_checkpoint("asked for", harness.now_s)).number
        lacks_a_part = Attempt(
            number,
            f"{tmp_path}/{number:08}-c-1",
            "asked for",
            0,
            0.0,
            0.0,
            servers=frozenset({NodeId(99)}),
        )
        checkpointing.published(CheckpointWritten(lacks_a_part), harness.now_s)
        await removals()
        history = checkpointing.history(harness.now_s)
        assert (history.complete_count, history.failed_count) == (0, 1)
        assert history.failed_number == number
        assert history.failed_reason == "KeyError: 99"
        assert checkpointing.history(harness.now_s + 1.5).failed_ms == 1500
        assert harness.cluster.begin_checkpoint("again", harness.now_s).reply.number > number

    asyncio.run(live())


def test_who_waits_for_one_that_a_restore_ended_registers_again(tmp_path: Path) -> None:
    async def live() -> None:
        checkpointing = edge(Harness(checkpoint_url=str(tmp_path)).cluster)
        checkpointing.end()
        with pytest.raises(Fenced, match="a restore has replaced the cluster") as refusal:
            await checkpointing.create(scheduler_pb2.CreateCheckpointRequest(), math.inf)
        assert refusal.value.retry_after_ms

    asyncio.run(live())


def test_a_restore_leaves_no_file_of_one_that_was_under_way(tmp_path: Path) -> None:
    """Its parts are given up by the servers' next membership, which may be slow to hear of it."""
    harness = Harness(checkpoint_url=str(tmp_path), server_count=1, worker_count=1)
    harness.join(Role.SERVER)
    harness.create(harness.join(Role.WORKER))
    harness.cluster.begin_checkpoint("asked for", harness.now_s)
    under_way = harness.cluster.view.checkpoint
    assert under_way is not None
    unfinished = tmp_path / under_way.url.rpartition("/")[2]

    async def live() -> None:
        before = edge(harness.cluster)
        unfinished.mkdir()
        settings = harness.cluster.in_new_timeline(None, b"n" * 16, b"k" * 32)
        after = edge(Cluster(settings, 100.0), before.end())
        after.resume()
        await removals()
        assert not unfinished.exists()
        unfinished.mkdir()
        (unfinished / LATE).write_bytes(b"late")
        after.published(CheckpointMade(2, f"{tmp_path}/00000002-c"), 1.0)
        await removals()
        assert not unfinished.exists()

    asyncio.run(live())


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_restored_cluster_ends_with_the_states_of_those_who_had_left_before(
    tmp_path: Path, *, goes_on: bool
) -> None:
    """None of its own workers has left in order."""
    harness = Harness(checkpoint_url=str(tmp_path), server_count=1, worker_count=1)

    async def live() -> None:
        before = edge(harness.cluster)
        settings = harness.cluster.in_new_timeline(None, b"n" * 16, b"k" * 32)
        left = tmp_path / before.left_url.rpartition("/")[2]
        left.mkdir()
        (left / "worker-0-1.safetensors").write_bytes(b"state")
        after = edge(Cluster(settings, 100.0), before.end())
        assert after.left_url == before.left_url
        await after.close(goes_on=goes_on)
        assert left.exists() == goes_on

    asyncio.run(live())


def test_a_manifest_that_a_restore_overtakes_and_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async def live() -> None:
        checkpointing = edge(Harness(checkpoint_url=str(tmp_path)).cluster)
        directory = tmp_path / "00000001-c"
        directory.mkdir()
        lacks_a_part = Attempt(
            1, str(directory), "asked for", 0, 0.0, 0.0, servers=frozenset({NodeId(99)})
        )
        checkpointing.published(CheckpointWritten(lacks_a_part), 0.0)
        checkpointing.end()
        await removals()
        assert not directory.exists()

    asyncio.run(live())
