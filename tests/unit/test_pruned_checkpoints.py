"""The checkpoints that a cluster removes when another is complete, and those that it must leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_core.manifest import MANIFEST_FILE, SavedWorker
from ps_runtime.checkpoint.pruning import RunTimelines, prune
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.observe.metrics import SchedulerMetrics
from scheduler.edge.checkpointing import Checkpointing
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.checkpoint_state import CheckpointWritten
from tests.unit.checkpoint_files import CLUSTER_ID, attempt_at, write_checkpoint, write_worker
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


@pytest.mark.parametrize("run", [None, RunTimelines({FIRST, SECOND})])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_the_one_that_a_cluster_reads_stays_whatever_a_read_of_it_says(
    reluctant: CheckpointStore, run: RunTimelines | None, fails: int
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
    assert prune(reluctant, 1, RunTimelines({SECOND})) == [gone]
    assert reluctant.names() == [foreign, newest]


# --- what the kept ones lack of workers


def of_workers(
    store: CheckpointStore, number: int, states: str, timeline: bytes = FIRST, base: str = ""
) -> str:
    """The name of a good checkpoint; `states` has a sign for each worker: its state is there ("x"),
    lost ("-"), or there was none (".").
    """
    directory = store.directory(number, CLUSTER_ID)
    manifest = write_checkpoint(directory, number, base=base)
    workers = tuple(
        write_worker(directory, number, rank=rank)
        if sign == "x"
        else SavedWorker(rank, 41, problem="it died" if sign == "-" else "")
        for rank, sign in enumerate(states)
    )
    directory.write_manifest(replace(manifest, timeline=timeline, workers=workers))
    return directory.name


@pytest.mark.parametrize(
    ("states", "stay"),
    [
        (["xx", "xx", "xx"], [2]),
        (["xx", "xx", "x-"], [1, 2]),
        (["xx", "x-", "x-"], [0, 2]),
        (["x.", "x.", "-."], [1, 2]),
        (["xx", "x-", "-x"], [0, 1, 2]),  # no two of them have what the oldest has at one step
        (["xx", "xx", "x-", "-x"], [1, 2, 3]),
        (["x-", "x-", "--"], [1, 2]),
        (["x-", "x-", "x-"], [2]),  # nobody has it
        (["--", "--"], [1]),
    ],
)
@pytest.mark.parametrize("run", [None, RunTimelines({FIRST})])
def test_what_the_newest_lacks_of_a_worker_stays(
    reluctant: CheckpointStore, states: list[str], stay: list[int], run: RunTimelines | None
) -> None:
    """In the newest that has it."""
    names = [of_workers(reluctant, number, each) for number, each in enumerate(states, 1)]
    prune(reluctant, 1, run)
    assert reluctant.names() == [names[each] for each in stay]
    assert prune(reluctant, 1, run) == []


def test_one_that_stays_for_a_state_keeps_what_it_refers_to(reluctant: CheckpointStore) -> None:
    base = of_workers(reluctant, 1, "--")
    whole = of_workers(reluctant, 2, "xx", base=base)
    newest = of_workers(reluctant, 3, "x-")
    assert prune(reluctant, 1) == []
    assert reluctant.names() == [base, whole, newest]


def test_another_run_has_no_worker_s_state(reluctant: CheckpointStore) -> None:
    foreign = of_workers(reluctant, 1, "xx", SECOND)
    own, newest = of_workers(reluctant, 2, "xx"), of_workers(reluctant, 3, "--")
    assert prune(reluctant, 1) == [foreign]
    assert reluctant.names() == [own, newest]


def test_one_that_cannot_be_read_may_have_what_the_newest_lacks(reluctant: CheckpointStore) -> None:
    """And may refer to others."""
    base, whole = of_workers(reluctant, 1, "--"), of_workers(reluctant, 2, "xx")
    older, newest = of_workers(reluctant, 3, "x-"), of_workers(reluctant, 4, "x-")
    Failures("cat_file", f"{whole}/{MANIFEST_FILE}", 2)
    assert prune(reluctant, 1) == [older]
    assert prune(reluctant, 1) == [base]
    assert reluctant.names() == [whole, newest]
