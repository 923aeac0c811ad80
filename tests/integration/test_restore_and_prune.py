"""A restore while the scheduler removes old checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import MANIFEST_FILE
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.cluster.registration import operator_session
from ps_runtime.grpc import channels
from pushpull.v1 import scheduler_pb2
from scheduler.edge.restoring import AUTO, restored_at_start
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.checkpoint_state import CheckpointWritten
from scheduler.machine.cluster import Decision
from tests.integration.scheduler_calls import DEADLINE_S, cluster_of, refused, serving
from tests.unit.checkpoint_files import CLUSTER_ID, attempt_at, write_checkpoint
from tests.unit.reluctant_store import Gate, reluctant_store


@pytest.fixture
def reluctant() -> Iterator[CheckpointStore]:
    with reluctant_store() as store:
        yield store


def test_one_that_is_being_removed_is_not_restored(reluctant: CheckpointStore) -> None:
    """The removal has begun, and takes 4 after 5: the restore of 4 waits, and is told."""
    fourth, fifth = (
        write_checkpoint(reluctant.directory(number, CLUSTER_ID), number).directory
        for number in (4, 5)
    )
    sixth = attempt_at(reluctant.directory(6, CLUSTER_ID), 6)
    removal = Gate("rm_file", f"{fifth}/{MANIFEST_FILE}")
    cluster = cluster_of(checkpoint_url=reluctant.url, cluster_id=CLUSTER_ID)

    async def live() -> None:
        policy = CheckpointPolicy(keep=1)
        async with serving(Decision(cluster), policy=policy) as scheduler:
            scheduler.servicer.checkpointing.published(CheckpointWritten(sixth), 0.0)
            await asyncio.to_thread(removal.wait)
            session = await operator_session(scheduler.stub, DEADLINE_S)
            request = scheduler_pb2.RestoreCheckpointRequest(
                session=session, url=f"{reluctant.url}/{fourth}"
            )
            restoring = asyncio.create_task(
                refused(
                    scheduler.stub.RestoreCheckpoint(request, timeout=DEADLINE_S),
                    InvalidCheckpoint,
                    grpc.StatusCode.FAILED_PRECONDITION,
                    ("has no manifest.json",),
                )
            )
            await asyncio.wait({restoring}, timeout=0.5)
            removal.let_go()
            await restoring

    channels.run(live())


def test_a_cluster_that_ends_after_a_restore_goes_on_from_what_it_was_restored_to(
    tmp_path: Path,
) -> None:
    """Before its next checkpoint, and by --resume auto."""
    store, timeline = CheckpointStore(str(tmp_path)), b"t" * 16
    names = []
    for number in (1, 2, 3):
        directory = store.directory(number, CLUSTER_ID)
        told = replace(write_checkpoint(directory, number), timeline=timeline)
        directory.write_manifest(told)
        names.append(told.directory)
    cluster = cluster_of(
        checkpoint_url=store.url, cluster_id=CLUSTER_ID, timeline=timeline, checkpoint_count=3
    )

    async def live() -> None:
        async with serving(Decision(cluster)) as scheduler:
            session = await operator_session(scheduler.stub, DEADLINE_S)
            url = f"{store.url}/{names[0]}"
            request = scheduler_pb2.RestoreCheckpointRequest(session=session, url=url)
            await scheduler.stub.RestoreCheckpoint(request, timeout=DEADLINE_S)

    channels.run(live())
    found = restored_at_start(AUTO, store.url)
    assert found is not None
    assert found.url == f"{store.url}/{names[0]}"
