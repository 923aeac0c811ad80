"""A store that does not answer says nothing of a checkpoint: neither that it is there nor not."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_cli.checkpoint.commands import verify_checkpoints
from ps_cli.console.output import Output
from ps_core.cluster_view import Role
from ps_core.errors import InvalidCheckpoint, WaitExpired
from ps_core.keys import TableId
from ps_core.manifest import MANIFEST_FILE, PartReport, ReportedTable
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.observe.metrics import SchedulerMetrics
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2
from scheduler.edge.checkpointing import Checkpointing
from scheduler.machine.checkpoint_schedule import RETRY_S, CheckpointPolicy
from scheduler.machine.checkpoint_state import CheckpointFailed, CheckpointMade
from scheduler.machine.cluster import Decision
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint
from tests.unit.cluster_harness import Harness
from tests.unit.reluctant_store import WAIT_S, Failures, ReluctantStore, reluctant_store


@pytest.fixture
def reluctant() -> Iterator[CheckpointStore]:
    with reluctant_store() as store:
        yield store


def test_a_manifest_is_missing_only_where_the_store_says_so(reluctant: CheckpointStore) -> None:
    directory = reluctant.directory(1, CLUSTER_ID)
    assert not directory.has_manifest()
    write_checkpoint(directory, 1)
    Failures("info", MANIFEST_FILE)
    with pytest.raises(InvalidCheckpoint, match=r"cannot be read: .*the store is away"):
        directory.has_manifest()
    assert directory.has_manifest()


def test_what_cannot_be_read_is_verified_as_bad(
    reluctant: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be a good one; the others are verified all the same."""
    first, second = (
        write_checkpoint(reluctant.directory(number, CLUSTER_ID), number).directory
        for number in (1, 2)
    )
    Failures("info", f"{first}/{MANIFEST_FILE}")
    printed = io.StringIO()
    assert verify_checkpoints(reluctant.url, Output(printed)) == 1
    assert f"{first} cannot be read" in " ".join(capsys.readouterr().err.split())
    assert f"{second}: good" in printed.getvalue()


class Resumed:
    """The edge of a cluster that goes on from its journal with checkpoint 1, which is written and
    has its manifest; nothing says so but the store.
    """

    def __init__(self, store: CheckpointStore) -> None:
        harness = Harness(
            checkpoint_url=store.url, cluster_id=CLUSTER_ID, server_count=1, worker_count=1
        )
        server = harness.join(Role.SERVER)
        harness.create(harness.join(Role.WORKER))
        cluster = harness.cluster
        cluster.begin_checkpoint("asked for", harness.now_s)
        (table,) = cluster.view.tables
        assert table.proposed is not None
        cluster.prepare_change(server, TableId(1), table.proposed.number, 3)
        counts = {TableId(1): ReportedTable(table.block_count, 3)}
        cluster.report_part(server, 1, PartReport("server", 100, "ab" * 32, counts))
        write_checkpoint(store.directory(1, CLUSTER_ID), 1)
        harness.start_again()
        self.transitions: list[Any] = []
        self.has_ended = asyncio.Event()
        self.registry = CollectorRegistry()
        self.edge = Checkpointing(
            harness.cluster,
            CheckpointPolicy(),
            self.carry_out,
            SchedulerMetrics(self.registry),
        )

    def carry_out(self, decision: Decision[Any]) -> Any:
        for transition in decision.transitions:
            self.transitions.append(transition)
            self.edge.published(transition, 0.0)
            if isinstance(transition, CheckpointMade | CheckpointFailed):
                self.has_ended.set()
        return decision.reply


def test_one_that_is_complete_stays_though_the_store_was_away_at_the_start(
    reluctant: CheckpointStore,
) -> None:
    """The scheduler died between the manifest and its journal's word of it."""

    async def live() -> None:
        resumed = Resumed(reluctant)
        Failures("info", MANIFEST_FILE)
        resumed.edge.resume()
        async with asyncio.timeout(WAIT_S):
            await resumed.has_ended.wait()
        await resumed.edge.close(goes_on=True)
        assert [type(each) for each in resumed.transitions] == [CheckpointMade]
        said = resumed.edge.history(clock.now_s())
        assert said.complete_count == 1
        assert said.complete_url == reluctant.directory(1, CLUSTER_ID).url
        assert not said.unknown_before
        assert reluctant.newest_good() is not None

    asyncio.run(live())


def test_while_its_store_is_away_the_reason_is_in_the_history_and_told_to_whoever_asks(
    reluctant: CheckpointStore,
) -> None:
    async def live() -> None:
        resumed, asked = Resumed(reluctant), threading.Semaphore(0)
        ReluctantStore.hooks.append(lambda *_: asked.release())
        failures = Failures("info", MANIFEST_FILE, 10**9)
        resumed.edge.resume()
        for _ in range(2):  # the second question comes after the first answer
            assert await asyncio.to_thread(asked.acquire, timeout=WAIT_S)
        assert resumed.edge.history(clock.now_s()).failed_count == 0, "it has only begun"
        said = resumed.edge.history(clock.now_s() + RETRY_S)
        assert (said.failed_count, said.failed_number) == (1, 1)
        assert "the store is away" in said.failed_reason
        with pytest.raises(WaitExpired, match=r"waits for its manifest.*the store is away"):
            await resumed.edge.create(scheduler_pb2.CreateCheckpointRequest(), clock.now_s())
        with pytest.raises(WaitExpired, match="the store is away"):
            await resumed.edge.until_none_is_under_way(clock.now_s())
        failures.count = 0
        async with asyncio.timeout(WAIT_S):
            await resumed.has_ended.wait()
        assert resumed.edge.history(clock.now_s() + RETRY_S).failed_count == 0
        await resumed.edge.close(goes_on=True)

    asyncio.run(live())


def test_a_scheduler_ends_while_its_store_is_away(reluctant: CheckpointStore) -> None:
    """The next one asks again."""

    async def live() -> None:
        resumed, failures = Resumed(reluctant), Failures("info", MANIFEST_FILE, 10**9)
        resumed.edge.resume()
        async with asyncio.timeout(WAIT_S):
            await resumed.edge.close(goes_on=True)
        assert failures.count < 10**9
        assert resumed.transitions == []

    asyncio.run(live())
    assert len(reluctant.names()) == 1


@pytest.mark.parametrize("is_complete", [False, True])
def test_one_whose_manifest_is_asked_for_when_a_restore_comes_counts_for_nothing(
    reluctant: CheckpointStore, *, is_complete: bool
) -> None:
    """Without a manifest its files go."""

    async def live() -> None:
        resumed = Resumed(reluctant)
        if not is_complete:
            [manifest] = (each for each in ReluctantStore.store if each.endswith(MANIFEST_FILE))
            del ReluctantStore.store[manifest]
        resumed.edge.resume()
        resumed.edge.end()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        labels = {"result": "complete"}
        name = "pushpull_scheduler_checkpoints_total"
        assert resumed.registry.get_sample_value(name, labels) == 0
        assert len(reluctant.names()) == is_complete
        await resumed.edge.close(goes_on=True)

    asyncio.run(live())
