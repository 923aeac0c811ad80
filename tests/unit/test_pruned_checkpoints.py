"""The checkpoints that a cluster removes when another is complete, and those that it must leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_core.manifest import MANIFEST_FILE
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.observe.metrics import SchedulerMetrics
from scheduler.edge.checkpointing import Checkpointing
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.checkpoint_state import CheckpointWritten
from tests.unit.checkpoint_files import CLUSTER_ID, attempt_at, write_checkpoint
from tests.unit.cluster_harness import Harness
from tests.unit.reluctant_store import Failures, Gate, reluctant_store


@pytest.fixture
def reluctant() -> Iterator[CheckpointStore]:
    with reluctant_store() as store:
        yield store


def keeping_one(store: CheckpointStore) -> Checkpointing:
    """The edge of a cluster that keeps the newest checkpoint."""
    settings: dict[str, Any] = {"cluster_id": CLUSTER_ID, "timeline": bytes(16)}
    return Checkpointing(
        Harness(checkpoint_url=store.url, **settings).cluster,
        CheckpointPolicy(keep=1),
        lambda decision: decision.reply,
        SchedulerMetrics(CollectorRegistry()),
    )


async def all_ended() -> None:
    """All that was begun has ended."""
    own = {asyncio.current_task()}
    while others := asyncio.all_tasks() - own:
        await asyncio.wait(others)


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_cluster_that_a_restore_has_replaced_prunes_no_more(
    reluctant: CheckpointStore, is_restored: bool
) -> None:
    """The restore has taken 5 while 6 waited for its manifest: tables are still read from 5."""
    fifth = write_checkpoint(reluctant.directory(5, CLUSTER_ID), 5).directory

    async def live() -> None:
        edge, manifest = keeping_one(reluctant), Gate("pipe_file", MANIFEST_FILE)
        sixth = attempt_at(reluctant.directory(6, CLUSTER_ID), 6)
        edge.published(CheckpointWritten(sixth), 0.0)
        await asyncio.to_thread(manifest.wait)
        if is_restored:
            edge.end()
        manifest.let_go()
        await all_ended()
        kept = [fifth] if is_restored else []
        assert reluctant.names() == [*kept, sixth.url.rpartition("/")[2]]

    asyncio.run(live())


FIRST, SECOND = bytes(16), b"2" * 16
"""Timelines of two clusters."""


def written(store: CheckpointStore, number: int, timeline: bytes, base: str = "") -> str:
    """The name of a good checkpoint of a timeline."""
    directory = store.directory(number, CLUSTER_ID)
    told = replace(write_checkpoint(directory, number, base=base), timeline=timeline)
    directory.write_manifest(told)
    return directory.name


@pytest.mark.parametrize("run", [None, {FIRST, SECOND}])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_the_one_that_a_cluster_reads_stays_whatever_a_read_of_it_says(
    reluctant: CheckpointStore, run: set[bytes] | None, fails: int
) -> None:
    """As do those that it refers to; nothing else does."""
    base = written(reluctant, 1, FIRST)
    source = written(reluctant, 2, FIRST, base)
    between, newest = (written(reluctant, number, SECOND) for number in (3, 4))
    Failures("cat_file", f"{source}/{MANIFEST_FILE}", fails)
    assert prune(reluctant, 1, run, source) == [between]
    assert reluctant.names() == [base, source, newest]


def test_a_read_that_fails_makes_no_checkpoint_of_another_run_ones_own(
    reluctant: CheckpointStore,
) -> None:
    """A cluster that was begun anew has its old id. What has no manifest is its own; this has."""
    foreign = written(reluctant, 1, FIRST)
    gone, newest = (written(reluctant, number, SECOND) for number in (2, 3))
    Failures("cat_file", f"{foreign}/{MANIFEST_FILE}")
    assert prune(reluctant, 1, {SECOND}) == [gone]
    assert reluctant.names() == [foreign, newest]
