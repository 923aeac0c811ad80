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
from ps_runtime.checkpoint.restores import restores_in_force
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.cluster.registration import operator_session
from ps_runtime.grpc import channels
from pushpull.v1 import scheduler_pb2
from scheduler.edge.publication import JournalWriter
from scheduler.edge.restoring import AUTO, restored_at_start
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.checkpoint_state import CheckpointWritten
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import Restored
from tests.integration.held_store import HeldStore
from tests.integration.scheduler_calls import DEADLINE_S, Running, cluster_of, refused, serving
from tests.unit.checkpoint_files import CLUSTER_ID, attempt_at, write_checkpoint
from tests.unit.cluster_harness import Harness
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


def made_by(store: CheckpointStore, timeline: bytes) -> tuple[list[str], Cluster]:
    """The URLs of three checkpoints, and the cluster that has written them."""
    urls = []
    for number in (1, 2, 3):
        directory = store.directory(number, CLUSTER_ID)
        told = replace(write_checkpoint(directory, number), timeline=timeline)
        directory.write_manifest(told)
        urls.append(directory.url)
    own = {"checkpoint_url": store.url, "cluster_id": CLUSTER_ID, "timeline": timeline}
    return urls, cluster_of(checkpoint_count=3, **own)


def auto(store: CheckpointStore) -> str:
    found = restored_at_start(AUTO, store.url)
    assert found is not None
    return found.url


async def restore(scheduler: Running, url: str) -> None:
    session = await operator_session(scheduler.stub, DEADLINE_S)
    request = scheduler_pb2.RestoreCheckpointRequest(session=session, url=url)
    await scheduler.stub.RestoreCheckpoint(request, timeout=DEADLINE_S)


def test_a_cluster_that_ends_after_a_restore_goes_on_from_what_it_was_restored_to(
    tmp_path: Path,
) -> None:
    """Before its next checkpoint, and by --resume auto."""
    store = CheckpointStore(str(tmp_path))
    urls, cluster = made_by(store, b"t" * 16)

    async def live() -> None:
        async with serving(Decision(cluster)) as scheduler:
            await restore(scheduler, urls[0])
            assert auto(store) == urls[0]

    channels.run(live())


def test_a_restore_that_the_journal_lacks_leaves_nothing_behind(tmp_path: Path) -> None:
    """The scheduler goes on from its journal in the timeline before it."""
    store = CheckpointStore(str(tmp_path / "runs"))
    urls, cluster = made_by(store, b"t" * 16)

    async def live() -> None:
        journal = HeldStore(tmp_path / "journal")
        journal.claim()
        async with serving(Decision(cluster), JournalWriter(journal)) as scheduler:
            journal.may_write.clear()
            restoring = asyncio.create_task(restore(scheduler, urls[0]))
            await asyncio.to_thread(journal.waits.wait, DEADLINE_S)
            assert auto(store) == urls[2]
            journal.may_write.set()
            await restoring
            assert auto(store) == urls[0]

    channels.run(live())


def test_a_restore_that_is_in_the_journal_alone_is_recorded_at_the_next_start(
    tmp_path: Path,
) -> None:
    """Of checkpoints that others had made, too, whose runs the cluster went on from."""
    store = CheckpointStore(str(tmp_path))
    urls, before = made_by(store, b"t" * 16)
    third = Restored(urls[2], {}, lineage=(b"t" * 16, b"s" * 16))
    own = {"checkpoint_url": store.url, "cluster_id": CLUSTER_ID, "restored": third}
    before = cluster_of(checkpoint_count=3, **own)
    first = Restored(urls[0], {}, lineage=(b"s" * 16,))
    settings = before.in_new_timeline(first, b"n" * 16, b"k" * 32)
    harness = Harness()
    harness.cluster = Cluster(settings, 100.0)
    harness.start_again()
    assert auto(store) == urls[2]

    async def live() -> None:
        for _ in range(2):
            async with serving(Decision(harness.cluster)) as scheduler:
                await scheduler.servicer.checkpointing.until_recorded()
                assert auto(store) == urls[0]
        (restore,) = restores_in_force(store.location)
        assert restore.order == 1

    channels.run(live())
